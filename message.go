package leased

import (
	"strconv"
	"strings"
	"time"
)

// message is what arrives in an inbox. All fields come from whoever may publish
// there, so all are checked.
type message struct {
	kind  string // granted, wanted, ends, revoked, echo
	id    string
	key   string        // the lock's key in Redis
	token uint64        // granted, revoked
	clock uint64        // granted: the server's, µs
	more  bool          // granted: others wait
	link  *spanRef      // granted: hold span of the lease that let go, nil if not told
	nonce string        // echo
	left  time.Duration // ends
}

// parseMessage reads
//
//	leased1:granted <token> <clock> <others wait> <span> <id> <key>
//	leased1:wanted <id> <key>
//	leased1:ends <ms> <id> <key>
//	leased1:revoked <token> <id> <key>
//	leased1:echo <nonce>
//
// and reports whether text was one of them. A key may contain spaces.
func parseMessage(text string) (m message, ok bool) {
	text, ok = strings.CutPrefix(text, formatTag)
	if !ok {
		return m, false
	}
	m.kind, text, _ = strings.Cut(text, " ")
	number := func() uint64 {
		var field string
		field, text, _ = strings.Cut(text, " ")
		n, err := strconv.ParseUint(field, 10, 53)
		if err != nil {
			ok = false
		}
		return n
	}
	switch m.kind {
	case "granted":
		m.token, m.clock = number(), number()
		m.more = number() > 0
		var link string
		link, text, _ = strings.Cut(text, " ")
		m.link = parseSpan(link)
		ok = ok && m.token > 0 && m.clock > 0
	case "revoked":
		m.token = number()
	case "ends":
		ms := number()
		m.left = time.Duration(min(ms, uint64(maxTTL.Milliseconds()))) * time.Millisecond
	case "wanted":
	case "echo":
		m.nonce = text
		return m, m.nonce != ""
	default:
		return m, false
	}
	m.id, m.key, _ = strings.Cut(text, " ")
	return m, ok && m.id != "" && m.key != ""
}
