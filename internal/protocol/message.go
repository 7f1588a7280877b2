package protocol

import (
	"strconv"
	"strings"
	"time"
)

// MessageKind says what a message is about. It is the first word of the message's text.
type MessageKind string

// The kinds of messages. Each comment says which client causes it, who receives it, and what it says. A
// quorum makes its own messages of those that its servers publish. From a quorum, MessageWanted also goes
// to a request that waits and may own a majority: it is to ask.
const (
	MessageGranted  MessageKind = "granted"  // one that frees the lock or finds it free, to the next request: it owns the lock
	MessageWanted   MessageKind = "wanted"   // a waiter, or one that gives up while others wait, to an owner: others wait
	MessageUnwanted MessageKind = "unwanted" // the last waiter, as it gives up, to readers that own: nobody waits anymore
	MessageEnds     MessageKind = "ends"     // one that gives back or gives up, to the head of the queue: when the lease or cool-down ahead of it ends
	MessageRevoked  MessageKind = "revoked"  // one that forces an unlock, to an owner: it does not own the lock anymore
	MessageEcho     MessageKind = "echo"     // a client, to itself: its inbox works
)

// Message is a message that arrived in an inbox. Any client with permission to publish there
// can send one, so every field is validated.
type Message struct {
	Kind  MessageKind
	ID    string
	Key   string        // the lock's key in Redis
	Token uint64        // granted, revoked
	Clock uint64        // granted: the server's time, µs
	More  bool          // granted: others wait
	Link  *Span         // granted: hold span of the lease that was given back, nil if unknown
	Nonce string        // echo
	Left  time.Duration // ends

	// Proved is set by a quorum only: since when a majority of servers is known to have granted, or to have
	// had the request in their queues.
	Proved time.Time
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
	kind, text, _ := strings.Cut(text, " ")
	m.Kind = MessageKind(kind)
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
	case MessageGranted:
		m.Token, m.Clock = number(), number()
		m.More = number() > 0
		var link string
		link, text, _ = strings.Cut(text, " ")
		m.Link = parseSpan(link)
		ok = ok && m.Token > 0 && m.Clock > 0
	case MessageRevoked:
		m.Token = number()
	case MessageEnds:
		ms := number()
		m.Left = time.Duration(min(ms, uint64(MaxTTL.Milliseconds()))) * time.Millisecond
	case MessageWanted, MessageUnwanted:
	case MessageEcho:
		m.Nonce = text
		return m, m.Nonce != ""
	default:
		return m, false
	}
	m.ID, m.Key, _ = strings.Cut(text, " ")
	return m, ok && m.ID != "" && m.Key != ""
}
