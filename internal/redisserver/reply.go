package redisserver

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/leasedmutex/leased/internal/protocol"
)

// malformed returns an error that quotes a reply that none of the scripts returns.
func malformed(reply any) error {
	if reply == nil { // no script returns it, and the server did not refuse
		return errors.New("leased: no answer and no error: a hook or a mock of the Redis client may have swallowed the command")
	}
	return fmt.Errorf("leased: malformed answer %.200q", fmt.Sprint(reply))
}

// What the first number of a long reply says: the codes that common.lua defines by the same names.
const (
	codeGranted = 1 + iota
	codeQueued
	codeRefused
	codeNotOurs
	codeDone
)

// The lengths of granted_reply and waiting_reply, see common.lua.
const (
	grantedLength = 9
	waitingLength = 12
)

// The values of kept in granted_reply, see extend in common.lua.
const (
	keptToken = 1 // the id owned the lock already
	keptAnew  = 2 // it did, but its token was not remembered, and it has a new one
)

// parseAnswer parses granted_reply, waiting_reply, {NOT_OURS, 0, …} and release's {DONE, …};
// see common.lua, release.lua and yield.lua.
func parseAnswer(reply longReply) (protocol.Answer, error) {
	if len(reply) < 2 {
		return protocol.Answer{}, malformed(reply)
	}
	if _, short := reply[0].(string); short {
		return parseShort(reply)
	}
	switch code := reply.number(0); {
	case code <= codeRefused && !validToken(reply.number(1)):
		return protocol.Answer{}, malformed(reply)
	case code == codeGranted && len(reply) == grantedLength:
		return parseGranted(reply), nil
	case code == codeQueued && len(reply) == waitingLength:
		return parseWaiting(reply, protocol.Enqueued), nil
	case code == codeRefused && len(reply) == waitingLength:
		return parseWaiting(reply, protocol.Refused), nil
	case code == codeNotOurs:
		a := protocol.Answer{Outcome: protocol.NotOurs}
		if len(reply) > 3 {
			a.Clock, a.Mark = clockAndMark(reply[2], reply[3])
		}
		return a, nil
	case code == codeDone:
		return protocol.Answer{Outcome: protocol.Done, Handed: int(reply.number(1)), Unfinished: len(reply) > 2 && reply.number(2) == 1}, nil
	}
	return protocol.Answer{}, malformed(reply)
}

// longReply is a reply that begins with a code.
type longReply []any

// number returns the number at a place, or -1 if there is none.
func (r longReply) number(i int) int64 {
	n, ok := r[i].(int64)
	if !ok {
		return -1
	}
	return n
}

func parseGranted(r longReply) protocol.Answer {
	kept := r.number(6)
	return protocol.Answer{
		Outcome:    protocol.Granted,
		Token:      uint64(r.number(1)),
		Clock:      uint64(r.number(2)),
		More:       r.number(3) == 1,
		Handed:     int(r.number(4)),
		Unfinished: r.number(5) == 1,
		Kept:       kept >= keptToken,
		Forgot:     kept == keptAnew,
		Gone:       r.number(7) == 1,
		Echo:       int(r.number(8)),
	}
}

func parseWaiting(r longReply, outcome protocol.Outcome) protocol.Answer {
	blocker, _ := r[5].(string)
	return protocol.Answer{
		Outcome:    outcome,
		Token:      uint64(r.number(1)),
		Clock:      uint64(r.number(2)),
		Place:      int(r.number(3)),
		Left:       protocol.Remaining(r.number(4)),
		Blocker:    blocker,
		NoNotify:   r.number(6) == 1,
		Echo:       int(r.number(7)),
		Handed:     int(r.number(8)),
		Unfinished: r.number(9) == 1,
		Told:       uint64(max(0, r.number(10))),
		Gone:       r.number(11) == 1,
	}
}

// parseShort parses a shortcut's reply to a waiting request; see acquire_fast.lua.
func parseShort(reply []any) (protocol.Answer, error) {
	if len(reply) != 5 && len(reply) != 6 {
		return protocol.Answer{}, malformed(reply)
	}
	a := protocol.Answer{Outcome: protocol.Enqueued, Echo: protocol.NoEcho}
	last, _ := reply[0].(string)
	clock, _ := reply[1].(string)
	place, ok1 := reply[2].(int64)
	left, ok2 := reply[3].(int64)
	blocker, ok3 := reply[4].(string)
	var err1, err2 error
	a.Token, err1 = parseToken(last)
	a.Clock, err2 = parseToken(clock)
	if err1 != nil || err2 != nil || !ok1 || !ok2 || !ok3 {
		return protocol.Answer{}, malformed(reply)
	}
	a.Place, a.Left, a.Blocker = int(place), protocol.Remaining(left), blocker
	if len(reply) == 6 {
		echoed, ok := reply[5].(int64)
		if !ok {
			return protocol.Answer{}, malformed(reply)
		}
		a.Echo = int(echoed)
	}
	return a, nil
}

// parseToken parses a token or a time that a shortcut returns as a string.
func parseToken(text string) (uint64, error) {
	n, err := strconv.ParseUint(text, 10, 53)
	if err != nil {
		return 0, malformed(text)
	}
	return n, nil
}

// clockAndMark parses the time and the mark of a quorum's server, and returns 0 for both if that fails.
func clockAndMark(time, mark any) (uint64, uint64) {
	t, _ := time.(int64)
	m, _ := mark.(int64)
	if !validToken(t) || !validToken(m) {
		return 0, 0
	}
	return uint64(t), uint64(m)
}

// noKey is what PTTL returns of a key that does not exist.
const noKey = -2

// eviction is the reply of evict.lua.
type eviction struct {
	token      int64    // the lock's last token
	owners     []string // the ids or values of the evicted
	notified   int      // how many of them, from the first on, the script has notified
	unfinished bool     // more waiters may enter: see common.lua
}

// parseEviction parses the reply of evict.lua.
func parseEviction(reply any) (eviction, error) {
	all, _ := reply.([]any)
	if len(all) != 4 {
		return eviction{}, malformed(reply)
	}
	var e eviction
	e.token, _ = all[0].(int64)
	notified, _ := all[1].(int64)
	unfinished, _ := all[2].(int64)
	owners, _ := all[3].([]any)
	for _, owner := range owners {
		id, _ := owner.(string)
		e.owners = append(e.owners, id)
	}
	if notified < 0 || notified > int64(len(e.owners)) {
		return eviction{}, malformed(reply)
	}
	e.notified, e.unfinished = int(notified), unfinished == 1
	return e, nil
}

// validToken reports whether n can be a token, which is below 2^53, or 0: the floor of a
// lock that has never assigned one.
func validToken(n int64) bool { return n >= 0 && n < 1<<53 }

// parseSnapshot parses the reply of inspect.lua.
func parseSnapshot(reply []any) (protocol.Snapshot, error) {
	if len(reply) != 7 {
		return protocol.Snapshot{}, malformed(reply)
	}
	text := func(v any) string { s, _ := v.(string); return s }
	number := func(v any) int64 { n, _ := v.(int64); return n }
	list := func(v any) []string {
		all, _ := v.([]any)
		out := make([]string, 0, len(all))
		for _, x := range all {
			switch x := x.(type) {
			case string:
				out = append(out, x)
			case int64:
				out = append(out, strconv.FormatInt(x, 10))
			case float64:
				out = append(out, strconv.FormatFloat(x, 'f', 0, 64))
			case []any: // RESP3: a pair
				for _, y := range x {
					out = append(out, fmt.Sprintf("%v", y))
				}
			}
		}
		return out
	}
	value, left := text(reply[0]), number(reply[1])
	if value == "" && left != noKey {
		value = protocol.EmptyValue
	}
	return protocol.Snapshot{
		Value:   value,
		Left:    protocol.Remaining(left),
		Clock:   uint64(number(reply[2])),
		Meta:    text(reply[3]),
		Readers: list(reply[4]),
		Queue:   list(reply[5]),
		Length:  int(number(reply[6])),
	}, nil
}
