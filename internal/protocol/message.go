package protocol

import (
	"strconv"
	"strings"
	"time"
)

// Message is a message that arrived in an inbox. Any client with permission to publish there
// can send one, so every field is validated.
type Message struct {
	Kind  string // granted, wanted, unwanted, ends, revoked, echo
	ID    string
	Key   string        // the lock's key in Redis
	Token uint64        // granted, revoked
	Clock uint64        // granted: the server's time, µs
	More  bool          // granted: others wait
	Link  *Span         // granted: hold span of the lease that was given back, nil if unknown
	Nonce string        // echo
	Left  time.Duration // ends
}

// ParseMessage parses
//
//	leased1:granted <token> <clock> <others wait> <span> <id> <key>
//	leased1:wanted <id> <key>
//	leased1:unwanted <id> <key>
//	leased1:ends <ms> <id> <key>
//	leased1:revoked <token> <id> <key>
//	leased1:echo <nonce>
//
// and reports whether text has one of these forms. A key may contain spaces.
func ParseMessage(text string) (m Message, ok bool) {
	text, ok = strings.CutPrefix(text, FormatTag)
	if !ok {
		return m, false
	}
	m.Kind, text, _ = strings.Cut(text, " ")
	number := func() uint64 {
		var field string
		field, text, _ = strings.Cut(text, " ")
		n, err := strconv.ParseUint(field, 10, 53)
		if err != nil {
			ok = false
		}
		return n
	}
	switch m.Kind {
	case "granted":
		m.Token, m.Clock = number(), number()
		m.More = number() > 0
		var link string
		link, text, _ = strings.Cut(text, " ")
		m.Link = parseSpan(link)
		ok = ok && m.Token > 0 && m.Clock > 0
	case "revoked":
		m.Token = number()
	case "ends":
		ms := number()
		m.Left = time.Duration(min(ms, uint64(MaxTTL.Milliseconds()))) * time.Millisecond
	case "wanted", "unwanted":
	case "echo":
		m.Nonce = text
		return m, m.Nonce != ""
	default:
		return m, false
	}
	m.ID, m.Key, _ = strings.Cut(text, " ")
	return m, ok && m.ID != "" && m.Key != ""
}
