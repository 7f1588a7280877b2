package protocol

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Mode says how a lock is owned. Its letter is part of every request id.
type Mode byte

const (
	Exclusive Mode = 'w'
	Shared    Mode = 'r'
)

func (m Mode) String() string {
	if m == Shared {
		return "shared"
	}
	return "exclusive"
}

// FormatTag is the prefix of everything this version writes into Redis. A higher number
// marks a value of a later version, which is left alone; a value without such a tag is
// foreign.
const FormatTag = "leased1:"

// MarkerValue is the value of the lock's key while readers own the lock.
const MarkerValue = FormatTag + "readers"

// Request is one process's request for a grant. Its id is never reused and contains
// everything that scripts and other processes need to know about it:
//
//	leased1:<mode>:<ttl ms>:<c|p|u>[i]:<96 random bits>[t<token>][s<span>]:<client>
//
// The letter is a Proof. i: the owner may keep the grant without a holder until it is
// notified that others want the lock. t and s are its Origin.
type Request struct {
	ID  string
	TTL time.Duration

	Mode Mode

	// Provisional says that a grant by message is for ProvisionalTTL only, until the owner
	// has renewed it or asked for it again.
	Provisional bool
}

// Origin is what a request was made for, in its id for others to read. Both fields may be
// zero.
type Origin struct {
	// Span is the wait of the caller that it was made for, or the hold that a downgrade
	// continues. It leads to the trace that has the lock, for those who wait behind it.
	Span Span
	// Token is the writer's, if the request is that of its downgrade: its lease is still the
	// same. A token is the server's time in µs when it was given, or little more.
	Token uint64
}

// append formats o with a length and characters that no random part has: a letter, then 11
// digits of base 36; another one, then 24 bytes in base64url.
func (o *Origin) append(b []byte) []byte {
	if o.Token > 0 {
		digits := strconv.FormatUint(o.Token, 36)
		b = append(append(b, 't'), "00000000000"[:tokenDigits-len(digits)]...)
		b = append(b, digits...)
	}
	if o.Span.Valid() {
		both := append(o.Span.TraceID[:], o.Span.SpanID[:]...)
		b = base64.RawURLEncoding.AppendEncode(append(b, 's'), both)
	}
	return b
}

const (
	tokenDigits = 11 // of 2^53 in base 36
	spanChars   = 32
)

// parseOrigin is the inverse of Origin.append. It reports whether text is one of its outputs.
func parseOrigin(text string) (o Origin, ok bool) {
	whole := text
	if len(text) > tokenDigits && text[0] == 't' {
		o.Token, _ = strconv.ParseUint(text[1:1+tokenDigits], 36, 53)
		text = text[1+tokenDigits:]
	}
	if len(text) == 1+spanChars && text[0] == 's' {
		if b, err := base64.RawURLEncoding.DecodeString(text[1:]); err == nil {
			// Only spans that are sampled are referred to.
			o.Span = Span{TraceID: [16]byte(b[:16]), SpanID: [8]byte(b[16:]), Flags: 1, Remote: true}
		}
	}
	return o, string(o.append(nil)) == whole
}

// Proof says in an id what tells others that the client is gone.
type Proof byte

const (
	// Unproved: nothing does. The client's inbox was not confirmed when the id was made.
	Unproved Proof = 'u'
	// Counted: its inbox was confirmed on a server that counts every subscriber, so a count
	// of 0 does.
	Counted Proof = 'c'
	// Provisionally: its inbox was confirmed where such a count proves nothing. A client
	// that is granted such a request by message and is alive says so within ProvisionalTTL.
	Provisionally Proof = 'p'
)

// ProvisionalTTL is for how long scripts record an owner that is notified of its grant and
// whose id says Provisionally, at most: common.lua and release_fast.lua say the same. In a
// queue whose dead nothing else tells apart, one of them costs so much instead of its TTL.
const ProvisionalTTL = 2 * time.Second

// provisional reports whether ProvisionalTTL is less than the request's own TTL.
func provisional(p Proof, ttl time.Duration) bool {
	return p == Provisionally && ttl > ProvisionalTTL
}

// NewClientID returns a unique name for a client: 96 random bits, and a label for people to
// read.
func NewClientID(label string) string { return randomBits() + ":" + label }

// NewRequest returns a request with a fresh id. idles sets the flag i that is described at
// Request.
func NewRequest(client string, m Mode, ttl time.Duration, idles bool, p Proof, from Origin) Request {
	s := ShortID{proof: p, idles: idles}
	_, _ = rand.Read(s.random[:]) // never fails: crypto/rand
	return s.request(client, m, ttl, from)
}

// ShortID is what a request's id says that its client, mode and TTL do not.
type ShortID struct {
	random [randomBytes]byte
	proof  Proof
	idles  bool
}

// Short returns the short id of r, a request of client. ok is false if it has none, as if it has
// an Origin.
func (r *Request) Short(client string) (s ShortID, ok bool) {
	who, err := ParseID(r.ID)
	if err != nil || who.Origin != (Origin{}) || who.Client != client || who.Mode != r.Mode || who.TTL != r.TTL ||
		provisional(who.Proof, who.TTL) != r.Provisional {
		return ShortID{}, false
	}
	random := r.ID[len(r.ID)-len(client)-randomChars-1:][:randomChars]
	_, err = base64.RawURLEncoding.Decode(s.random[:], []byte(random))
	s.proof, s.idles = who.Proof, who.Idles
	return s, err == nil
}

// Request is the inverse of Request.Short.
func (s *ShortID) Request(client string, m Mode, ttl time.Duration) Request {
	return s.request(client, m, ttl, Origin{})
}

func (s *ShortID) request(client string, m Mode, ttl time.Duration, from Origin) Request {
	b := append(make([]byte, 0, 160), FormatTag...)
	b = strconv.AppendInt(append(b, byte(m), ':'), ttl.Milliseconds(), 10)
	b = append(b, ':', byte(s.proof))
	if s.idles {
		b = append(b, 'i')
	}
	b = base64.RawURLEncoding.AppendEncode(append(b, ':'), s.random[:])
	b = append(append(from.append(b), ':'), client...)
	return Request{ID: string(b), Mode: m, TTL: ttl, Provisional: provisional(s.proof, ttl)}
}

const (
	randomBytes = 12
	randomChars = 16 // of that in base64
)

func randomBits() string {
	var b [randomBytes]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// Identity holds the fields of a request id.
type Identity struct {
	Mode   Mode
	TTL    time.Duration
	Proof  Proof
	Idles  bool
	Origin Origin
	Client string // random part and label
	Label  string
}

// ParseID parses an id found in Redis. Nothing in Redis is trusted to be well-formed.
func ParseID(id string) (Identity, error) {
	malformed := func() (Identity, error) { return Identity{}, fmt.Errorf("leased: %.80q is not a request id", id) }
	rest, ok := strings.CutPrefix(id, FormatTag)
	if !ok || len(rest) < 2 || (rest[0] != byte(Exclusive) && rest[0] != byte(Shared)) || rest[1] != ':' {
		return malformed()
	}
	who := Identity{Mode: Mode(rest[0])}
	ttl, rest, _ := strings.Cut(rest[2:], ":")
	ms, err := strconv.ParseUint(ttl, 10, 40)
	if err != nil || ms == 0 || ttl[0] == '+' {
		return malformed()
	}
	who.TTL = time.Duration(ms) * time.Millisecond
	flags, rest, _ := strings.Cut(rest, ":")
	flags, who.Idles = strings.CutSuffix(flags, "i")
	const bits = randomChars + 1 // and a colon, for the request and again for the client
	if end := strings.IndexByte(rest, ':'); end >= bits {
		if who.Origin, ok = parseOrigin(rest[bits-1 : end]); !ok {
			return malformed()
		}
		rest = rest[:bits-1] + rest[end:]
	}
	switch flags {
	case "c", "p", "u":
		who.Proof = Proof(flags[0])
	default:
		return malformed()
	}
	if len(rest) < 2*bits || !randomPart(rest[:bits]) || !randomPart(rest[bits:2*bits]) {
		return malformed()
	}
	who.Client = rest[bits:]
	who.Label = rest[2*bits:]
	if strings.ContainsFunc(who.Label, unicode.IsSpace) {
		return malformed()
	}
	return who, nil
}

// randomPart reports whether s is an output of randomBits followed by a colon.
func randomPart(s string) bool {
	for i := range len(s) - 1 {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return s[len(s)-1] == ':'
}

// ParseCooldown parses the value that a lock's key has from the release of a writer with a
// minimum hold until the end of that. It returns who released it.
func ParseCooldown(value string) (Identity, bool) {
	rest, ok := strings.CutPrefix(value, FormatTag+"cooldown:")
	if !ok {
		return Identity{}, false
	}
	_, id, _ := strings.Cut(rest, ":") // the milliseconds are for scripts
	who, err := ParseID(id)
	return who, err == nil
}

// OwnerOf parses the value of a lock's key: of its owner, or of the last one in a cool-down.
func OwnerOf(value string) (Identity, bool) {
	if who, err := ParseID(value); err == nil {
		return who, true
	}
	return ParseCooldown(value)
}

// RequestOf returns the request with this id.
func RequestOf(id string) (Request, error) {
	who, err := ParseID(id)
	return Request{ID: id, Mode: who.Mode, TTL: who.TTL, Provisional: provisional(who.Proof, who.TTL)}, err
}

// NewerFormat reports whether a later version of leased wrote v.
func NewerFormat(v string) bool {
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
