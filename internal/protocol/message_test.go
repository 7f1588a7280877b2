package protocol

import (
	"strings"
	"testing"
	"time"
)

const about = "leased1:w:1000:c:HbZEXU7hLZS2nN2A:_ndYsGKQ3wY2CW2s:vm:1"

func TestAMessageSaysWhatItWasMadeOf(t *testing.T) {
	span := spanOf(1, 2)
	for text, want := range map[string]Message{
		"granted 7 9 0 - " + about + " x":                        {Kind: MessageGranted, ID: about, Key: "x", Token: 7, Clock: 9},
		"granted 7 9 1 " + FormatSpan(span) + " " + about + " x": {Kind: MessageGranted, ID: about, Key: "x", Token: 7, Clock: 9, More: true, Link: span},
		"wanted " + about + " a key with spaces":                 {Kind: MessageWanted, ID: about, Key: "a key with spaces"},
		"unwanted " + about + " x":                               {Kind: MessageUnwanted, ID: about, Key: "x"},
		"ends 0 " + about + " x":                                 {Kind: MessageEnds, ID: about, Key: "x"},
		"ends 500 " + about + " x":                               {Kind: MessageEnds, ID: about, Key: "x", Left: 500 * time.Millisecond},
		"ends 9007199254740991 " + about + " x":                  {Kind: MessageEnds, ID: about, Key: "x", Left: MaxTTL},
		"revoked 0 " + about + " x":                              {Kind: MessageRevoked, ID: about, Key: "x"},
		"revoked 7 " + about + " x":                              {Kind: MessageRevoked, ID: about, Key: "x", Token: 7},
		"echo 12":                                                {Kind: MessageEcho, Nonce: "12"},
	} {
		got, ok := ParseMessage("leased1:" + text)
		if got.Link != nil && want.Link != nil {
			if link := *want.Link; *got.Link != (Span{TraceID: link.TraceID, SpanID: link.SpanID, Flags: link.Flags, Remote: true}) {
				t.Errorf("%q: link %+v", text, *got.Link)
			}
			got.Link = want.Link
		}
		if !ok || got != want {
			t.Errorf("%q: %+v, %v, want %+v", text, got, ok, want)
		}
	}
}

// Anybody who may publish can send them.
func TestAMessageThatNoServerSendsIsMalformed(t *testing.T) {
	for _, text := range []string{
		"", "leased1:", "leased1:granted", "leased1:other " + about + " x", "leased2:wanted " + about + " x", "wanted " + about + " x",
		"leased1:wanted", "leased1:wanted " + about, "leased1:wanted " + about + " ", "leased1:wanted  x", "leased1:echo", "leased1:echo ",
		"leased1:granted 0 9 0 - " + about + " x", "leased1:granted 7 0 0 - " + about + " x", // no server gives such a token, or has such a clock
		"leased1:granted a 9 0 - " + about + " x", "leased1:granted 7 a 0 - " + about + " x", "leased1:granted 7 9 a - " + about + " x",
		"leased1:granted 7 9 0 - " + about, "leased1:granted 9007199254740992 9 0 - " + about + " x",
		"leased1:ends a " + about + " x", "leased1:ends -1 " + about + " x", "leased1:ends 9007199254740992 " + about + " x",
		"leased1:revoked a " + about + " x", "leased1:revoked -1 " + about + " x",
	} {
		if m, ok := ParseMessage(text); ok {
			t.Errorf("%q is read as %+v", text, m)
		}
	}
	good := FormatSpan(spanOf(1, 2))
	for at := range good { // a link that is not understood does not keep a grant from its owner
		link := good[:at] + "x" + good[at+1:]
		if m, ok := ParseMessage("leased1:granted 7 9 0 " + link + " " + about + " x"); !ok || m.Link != nil || m.Token != 7 {
			t.Errorf("link %q: %+v, %v", link, m, ok)
		}
	}
}

func TestALinkThatIdentifiesNoSpanIsNone(t *testing.T) {
	for _, s := range []*Span{spanOf(0, 2), spanOf(1, 0)} {
		if text := FormatSpan(s); text != NoSpan {
			t.Errorf("%+v is written as %q", *s, text)
		}
	}
	const trace, span = "00000000000000000000000000000001", "0000000000000002"
	for _, link := range []string{"00-" + strings.Repeat("0", 32) + "-" + span + "-01", "00-" + trace + "-" + strings.Repeat("0", 16) + "-01"} {
		if s := parseSpan(link); s != nil {
			t.Errorf("%q is read as %+v", link, *s)
		}
	}
}
