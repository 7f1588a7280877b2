package protocol

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Mode says whether a lock is owned exclusively or shared. Its letter is part of every
// request id.
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

// FormatTag prefixes every value that this version writes to Redis. A value tagged with a
// higher number was written by a later version, and is left alone. A value without such a
// tag is foreign.
const FormatTag = "leased1:"

// MarkerValue is the value of the lock's key while readers own the lock.
const MarkerValue = FormatTag + "readers"

// Request is one process's request for a grant. Its id is never reused and contains
// everything that scripts and other processes need to know about it:
//
//	leased1:<mode>:<ttl ms>:<c|p|u>[i]:<96 random bits>[t<token>][s<span>]:<client>
//
// The letter c, p or u is the request's Proof. The flag i says that the owner may keep the
// grant without a holder until it is notified that others want the lock. The parts t and s
// are the request's Origin.
type Request struct {
	ID  string
	TTL time.Duration

	Mode Mode

	// Provisional says that a grant announced by message lasts only ProvisionalTTL until the
	// owner renews it or acquires it again.
	Provisional bool
}

// Origin says what a request was made for. The request's id carries it so that other
// processes can read it. Either field may be zero, or both.
type Origin struct {
	// Span is the wait span of the caller that the request was made for, or the hold span
	// that a downgrade continues. It leads those who wait behind the request to the trace
	// that has the lock.
	Span Span
	// Token is set if the request is for the downgrade of a writer. It is the writer's token,
	// because the lease stays the same. A token is the server's time in µs when it was given,
	// or slightly more.
	Token uint64
}

// append appends o to b: the letter t and 11 base-36 digits for the token, then the letter s
// and 24 bytes in base64url for the span.
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
	tokenDigits = 11 // digits of 2^53 in base 36
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
			// An id refers to sampled spans only.
			o.Span = Span{TraceID: [16]byte(b[:16]), SpanID: [8]byte(b[16:]), Flags: 1, Remote: true}
		}
	}
	return o, string(o.append(nil)) == whole
}

// Proof is the part of an id that says how others can tell that the client is gone.
type Proof byte

const (
	// Unproved: they cannot, because the client's inbox was not confirmed when the id was made.
	Unproved Proof = 'u'
	// Counted: the inbox was confirmed on a server that counts every subscriber, so a count
	// of 0 proves that the client is gone.
	Counted Proof = 'c'
	// Provisionally: the inbox was confirmed, but on a server where a count of 0 proves
	// nothing. If such a request is granted by message, a live client confirms the grant
	// within ProvisionalTTL.
	Provisionally Proof = 'p'
)

// ProvisionalTTL is the longest TTL for which scripts record an owner that is notified of its
// grant by message and whose id says Provisionally. common.lua and release_fast.lua have the
// same value. Where nothing else shows that a waiter is dead, each dead waiter in the queue
// costs this time instead of its own TTL.
const ProvisionalTTL = 2 * time.Second

// provisional reports whether a request with this proof and TTL has Request.Provisional set:
// it is pointless if ProvisionalTTL is not shorter than the request's own TTL.
func provisional(p Proof, ttl time.Duration) bool {
	return p == Provisionally && ttl > ProvisionalTTL
}

// NewClientID returns a unique name for a client: 96 random bits and a human-readable label.
func NewClientID(label string) string { return randomBits() + ":" + label }

// NewRequest returns a request with a fresh id. idles sets the flag i; see Request.
func NewRequest(client string, m Mode, ttl time.Duration, idles bool, p Proof, from Origin) Request {
	s := ShortID{proof: p, idles: idles}
	_, _ = rand.Read(s.random[:]) // never fails: crypto/rand
	return s.request(client, m, ttl, from)
}

// ShortID holds the parts of a request's id that do not follow from its client, mode and TTL.
type ShortID struct {
	random [randomBytes]byte
	proof  Proof
	idles  bool
}

// Short returns the short id of r, a request of client. ok is false if r has none, for example
// because its id has an Origin.
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
	randomChars = 16 // length of randomBytes in base64
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
	Client string // the random part and the label
	Label  string
}

// ParseID parses an id found in Redis. Nothing in Redis is trusted to be well-formed: what is accepted is
// short, its TTL has a bound, and its label does no harm where it is printed.
func ParseID(id string) (Identity, error) {
	malformed := func() (Identity, error) { return Identity{}, fmt.Errorf("leased: %.80q is not a request id", id) }
	rest, ok := strings.CutPrefix(id, FormatTag)
	if !ok || len(rest) < 2 || (rest[0] != byte(Exclusive) && rest[0] != byte(Shared)) || rest[1] != ':' {
		return malformed()
	}
	who := Identity{Mode: Mode(rest[0])}
	ttl, rest, _ := strings.Cut(rest[2:], ":")
	ms, err := strconv.ParseUint(ttl, 10, 40)
	if err != nil || ttl[0] == '0' || ms > uint64(MaxTTL.Milliseconds()) {
		return malformed()
	}
	who.TTL = time.Duration(ms) * time.Millisecond
	flags, rest, _ := strings.Cut(rest, ":")
	flags, who.Idles = strings.CutSuffix(flags, "i")
	const bits = randomChars + 1 // a random part and its colon: the request's, or the client's
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
	if len(who.Label) > MaxLabelBytes || strings.ContainsFunc(who.Label, endangers) {
		return malformed()
	}
	return who, nil
}

// MaxLabelBytes is the greatest length of a client's label.
const MaxLabelBytes = 128

// ValidLabel reports whether a client may have this label.
func ValidLabel(label string) bool {
	return len(label) <= MaxLabelBytes && !strings.ContainsFunc(label, notInLabels)
}

// Label returns s without the characters that a label must not contain.
func Label(s string) string {
	return strings.Map(func(r rune) rune {
		if notInLabels(r) {
			return -1
		}
		return r
	}, s)
}

func notInLabels(r rune) bool { return endangers(r) || !unicode.IsPrint(r) }

// endangers reports whether a character must not be in an id: ids are fields of messages, which spaces separate,
// and their labels are printed. What else can be printed depends on the version of Go, so that would have one
// client take the ids of another one for foreign.
func endangers(r rune) bool {
	return r == utf8.RuneError || unicode.IsSpace(r) || unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
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

// ParseCooldown parses the value of a lock's key during a cool-down, which lasts from the
// release of a writer with a minimum hold until that minimum hold is over. It returns the
// identity of that writer.
func ParseCooldown(value string) (Identity, bool) {
	if !strings.HasPrefix(value, cooldownTag) {
		return Identity{}, false
	}
	who, err := ParseID(OwnerID(value))
	return who, err == nil
}

const cooldownTag = FormatTag + "cooldown:"

// OwnerID returns the id of the owner from the value of a lock's key, or that of the last owner in a
// cool-down. Any other value is returned as it is.
func OwnerID(value string) string {
	if rest, cools := strings.CutPrefix(value, cooldownTag); cools {
		_, value, _ = strings.Cut(rest, ":") // only scripts need the milliseconds
	}
	return value
}

// OwnerOf parses the value of a lock's key. It returns the owner, or the last owner in a
// cool-down.
func OwnerOf(value string) (Identity, bool) {
	if who, err := ParseID(value); err == nil {
		return who, true
	}
	return ParseCooldown(value)
}

// RequestOf returns the request with this id, for the tests of several packages, which choose their ids. It
// returns an error if ParseID does.
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
