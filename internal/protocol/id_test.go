package protocol

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestAnIDSaysWhatItWasMadeOf(t *testing.T) {
	client := NewClientID("host:1")
	for _, m := range []Mode{Exclusive, Shared} {
		for _, ttl := range []time.Duration{100 * time.Millisecond, ProvisionalTTL, 30 * time.Second, MaxTTL} {
			for _, idles := range []bool{false, true} {
				for i, p := range []Proof{Unproved, Counted, Provisionally, Counted} {
					from := []Origin{{}, {Token: 1<<53 - 1}, {Span: aSpan}, {Token: 1_800_000_000_000_000, Span: aSpan}}[i]
					made := NewRequest(client, m, ttl, idles, p, from)
					who, err := ParseID(made.ID)
					if want := (Identity{Mode: m, TTL: ttl, Proof: p, Idles: idles, Origin: from, Client: client, Label: "host:1"}); err != nil || who != want {
						t.Errorf("%q: %+v, %v", made.ID, who, err)
					}
					if parsed, err := RequestOf(made.ID); err != nil || parsed != made {
						t.Errorf("%+v, %v, want %+v", parsed, err, made)
					}
					if want := p == Provisionally && ttl > ProvisionalTTL; made.Provisional != want {
						t.Errorf("%q: provisional %v", made.ID, made.Provisional)
					}
				}
			}
		}
	}
}

var aSpan = Span{TraceID: [16]byte{0: 0xff, 15: 1}, SpanID: [8]byte{7: 2}, Flags: 1, Remote: true}

func TestAnIDWithAnotherOriginIsMalformed(t *testing.T) {
	const good = "leased1:w:30000:p:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:o"
	span := "B" + strings.Repeat("A", 30) + "Q"
	for origin, ok := range map[string]bool{
		"": true, "t0000000000z": true, "s" + span: true, "t0000000000zs" + span: true,
		"t": false, "s": false, "x": false, "t000000000z": false, "t00000000000": false, "t0000000000Z": false, "tzzzzzzzzzzz": false,
		"s" + strings.Repeat("A", 32): false, "s" + span + "A": false, "s" + span[1:]: false, "s" + span + "t0000000000z": false, "t0000000000zt0000000000z": false,
	} {
		if who, err := ParseID(strings.Replace(good, "A:B", "A"+origin+":B", 1)); (err == nil) != ok {
			t.Errorf("origin %q: %+v, %v", origin, who, err)
		}
	}
}

// Anybody who may publish can have a client parse an id, keep it for its TTL, and print its label.
func TestAnIDThatNoClientMakesIsMalformed(t *testing.T) {
	const good = "leased1:w:30000:p:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:o"
	for ttl, ok := range map[string]bool{
		"1": true, "30000": true, "2592000000": true, "2592000001": false, "1099511627775": false, "0": false,
		"030000": false, strings.Repeat("0", 1000) + "1": false, "": false, "+1": false, "-1": false, "1_000": false,
	} {
		if who, err := ParseID(strings.Replace(good, "30000", ttl, 1)); (err == nil) != ok {
			t.Errorf("TTL %.20q: %+v, %v", ttl, who, err)
		}
	}
	for label, ok := range map[string]bool{
		"o": true, "": true, "müller:7": true, strings.Repeat("x", MaxLabelBytes): true, strings.Repeat("x", MaxLabelBytes+1): false,
		"a b": false, "a\nb": false, "a\x1b[2J": false, "a\x00": false, "a\xff": false, "a\u009b2J": false, "a\u202e": false, "a\u0378": true, // which Unicode may assign one day
	} {
		if who, err := ParseID(strings.TrimSuffix(good, "o") + label); (err == nil) != ok {
			t.Errorf("label %.20q: %+v, %v", label, who, err)
		}
	}
	for c, ok := range map[string]bool{
		"a": true, "z": true, "A": true, "Z": true, "0": true, "9": true, "-": true, "_": true,
		"`": false, "{": false, "@": false, "[": false, "/": false, ":": false, ".": false, "": false, "AA": false,
	} {
		for _, random := range []string{"AAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBB"} { // of the request, and of the client
			if who, err := ParseID(strings.Replace(good, random, random[1:]+c, 1)); (err == nil) != ok {
				t.Errorf("a random part that ends with %q: %+v, %v", c, who, err)
			}
		}
	}
	for _, id := range []string{
		"", "leased1:", "leased1:w", "leased1:w:", "leased1:w30000", good[len("leased1:"):], "leased2" + good[len("leased1"):],
		strings.Replace(good, ":w:", ":x:", 1), strings.Replace(good, ":w:", ":w;", 1), strings.TrimSuffix(good, ":o"), strings.TrimSuffix(good, "B:o"),
	} {
		if r, err := RequestOf(id); err == nil {
			t.Errorf("%q: %+v", id, r)
		}
	}
}

func TestAnIDWithOtherFlagsIsMalformed(t *testing.T) {
	const good = "leased1:w:30000:p:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:o"
	if _, err := ParseID(good); err != nil {
		t.Fatal(err)
	}
	for _, flags := range []string{"", "i", "x", "P", "pp", "cp", "pc", "up", "ip", "pii", "p ", "pi "} {
		if who, err := ParseID(strings.Replace(good, ":p:", ":"+flags+":", 1)); err == nil {
			t.Errorf("flags %q: %+v", flags, who)
		}
	}
}

// What is accepted is what NewRequest could have made: the fields give the same text again.
func FuzzParseID(f *testing.F) {
	for _, flags := range []string{"c", "u", "p", "ci", "ui", "pi", "x", ""} {
		f.Add("leased1:w:30000:" + flags + ":AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:o")
		f.Add("leased1:r:1:" + flags + ":AAAAAAAAAAAAAAA_:BBBBBBBBBBBBBBB-:")
	}
	for _, id := range []string{"", "leased1:w:0:u:a:b", "leased1:w:99999999999999:u:a:b", "leased1:x:1:u:a:b", "leased1:w:-1:u:a:b", "leased2:w:1:u:a:b", "leased1:w:1:u:"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		who, err := ParseID(id)
		if err != nil {
			return
		}
		flags := string(rune(who.Proof))
		if who.Idles {
			flags += "i"
		}
		parts := strings.SplitN(id, ":", 6)
		if parts[1] != string(rune(who.Mode)) || parts[3] != flags || parts[5] != who.Client || parts[2] != strconv.FormatInt(who.TTL.Milliseconds(), 10) {
			t.Errorf("%q was read as %+v", id, who)
		}
		if who.TTL <= 0 || who.TTL > MaxTTL || strings.ContainsFunc(who.Label, endangers) || len(id) > 256 {
			t.Errorf("%q was accepted: %+v", id, who)
		}
		if r, err := RequestOf(id); err != nil || r.Provisional && (who.Proof != Provisionally || r.TTL <= ProvisionalTTL) {
			t.Errorf("%q: %+v, %v", id, r, err)
		}
	})
}
