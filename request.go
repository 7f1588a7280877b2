package leased

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// mode says how a lock is owned. The letters are part of every request's id.
type mode byte

const (
	exclusive mode = 'w'
	shared    mode = 'r'
)

func (m mode) String() string {
	if m == shared {
		return "shared"
	}
	return "exclusive"
}

// formatTag begins everything this version writes into Redis. What begins with
// a higher number comes from a later version and is left alone; what has no
// such tag is foreign.
const formatTag = "leased1:"

// markerValue stands in the lock's key while readers own it.
const markerValue = formatTag + "readers"

// request is one process asking for a grant. Its id is never reused and says
// all that any script or process has to know of it:
//
//	leased1:<mode>:<ttl ms>:<c|u>[i]:<96 random bits>:<client>
//
// c: the asker's inbox was confirmed on a server whose PUBLISH counts every
// subscriber, so a count of 0 proves the asker gone. u: it proves nothing. i: its
// owner may keep it with nobody inside, until it hears that it is wanted.
type request struct {
	id   string
	mode mode
	ttl  time.Duration
}

// newClientID returns what tells clients apart: 96 random bits and a label for
// people to read.
func newClientID(label string) string { return randomBits() + ":" + label }

func newRequest(client string, m mode, ttl time.Duration, idles, counted bool) request {
	flag := "u"
	if counted {
		flag = "c"
	}
	if idles {
		flag += "i"
	}
	return request{
		id:   formatTag + string(rune(m)) + ":" + strconv.FormatInt(ttl.Milliseconds(), 10) + ":" + flag + ":" + randomBits() + ":" + client,
		mode: m,
		ttl:  ttl,
	}
}

func randomBits() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// identity is what an id found in Redis says. Nothing in Redis is trusted to be
// well-formed.
type identity struct {
	mode   mode
	ttl    time.Duration
	idles  bool
	client string // random part and label
	label  string
}

func parseID(id string) (identity, error) {
	malformed := func() (identity, error) { return identity{}, fmt.Errorf("leased: %.80q is not a request id", id) }
	rest, ok := strings.CutPrefix(id, formatTag)
	if !ok || len(rest) < 2 || (rest[0] != byte(exclusive) && rest[0] != byte(shared)) || rest[1] != ':' {
		return malformed()
	}
	who := identity{mode: mode(rest[0])}
	ttl, rest, _ := strings.Cut(rest[2:], ":")
	ms, err := strconv.ParseUint(ttl, 10, 40)
	if err != nil || ms == 0 || ttl[0] == '+' {
		return malformed()
	}
	who.ttl = time.Duration(ms) * time.Millisecond
	flags, rest, _ := strings.Cut(rest, ":")
	flags, who.idles = strings.CutSuffix(flags, "i")
	// bits of the request and of the client: of fixed length
	const bits = 17
	if flags != "c" && flags != "u" || len(rest) < 2*bits || !randomPart(rest[:bits]) || !randomPart(rest[bits:2*bits]) {
		return malformed()
	}
	who.client = rest[bits:]
	who.label = rest[2*bits:]
	if strings.ContainsFunc(who.label, unicode.IsSpace) {
		return malformed()
	}
	return who, nil
}

// randomPart reports whether s is what randomBits makes, and a colon.
func randomPart(s string) bool {
	for i := range len(s) - 1 {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return s[len(s)-1] == ':'
}

// requestOf returns the request whose id is known.
func requestOf(id string) (request, error) {
	who, err := parseID(id)
	return request{id: id, mode: who.mode, ttl: who.ttl}, err
}

// newerFormat reports whether v was written by a later version of leased.
func newerFormat(v string) bool {
	rest, ok := strings.CutPrefix(v, "leased")
	if !ok {
		return false
	}
	number, _, ok := strings.Cut(rest, ":")
	if !ok {
		return false
	}
	n, err := strconv.ParseUint(number, 10, 32)
	return err == nil && n > 1
}
