package redisserver

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// speaker runs the scripts of one version, and parses the replies that both versions have in
// common. On a server of a quorum it runs those that vote.
type speaker struct {
	s       *scene
	scripts map[string]Script // nil: today's, through Server
	known   string            // a mark that version 1 knows to be older than the quarantine; "" for none
}

// member returns a server that uses the scene's as one of a quorum's.
func (s *scene) member() *Server { return NewMember(s.srv.Rdb, s.prefix(), quarantine) }

// prefix returns the prefix of the scene's keys.
func (s *scene) prefix() string {
	return strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", ""))
}

const quarantine = time.Minute

// take runs a step and returns the answer. Of version 1's it has what that client acts on.
func (c *speaker) take(st step, last uint64) protocol.Answer {
	c.s.t.Helper()
	if c.scripts == nil {
		return c.today(st, last)
	}
	member := c.s.srv.mark != ""
	names := c.s.keys.All()
	five := names[:]
	all, voting := five, ""
	if member {
		all, voting = append(names[:], c.s.srv.mark), "vote_"
	}
	id, ttl, inboxes := st.id, Milliseconds(ttlOf(c.s.t, st.id)), c.s.srv.Inboxes
	token := strconv.FormatUint(last, 10)
	ticketed := func(args ...any) []any {
		if member {
			args = append(args, strconv.FormatUint(st.ticket, 10))
		}
		return args
	}
	var reply any
	switch st.what {
	case "acquire", "try", "newcomer", "question", "briefly":
		how := map[string]string{"acquire": "1", "try": "0", "newcomer": "2", "question": "4"}[st.what]
		if st.what == "briefly" {
			how = fmt.Sprintf("3%d+%d", uint64(c.s.look().waiters[id])+later, later)
		}
		args := []any{id, ttl, fmt.Sprint(append(ticketed(how), " "+inboxes)...)}
		if st.what == "question" {
			args = append(args, "")
		}
		if member {
			known := c.known
			if known == "" {
				known = "-"
			}
			args = append(args, known)
		}
		reply = c.run(st, voting+"acquire", all, args...)
	case "release":
		reply = c.run(st, "release", all, withCooldown(st.cool, id, "- "+inboxes, token)...)
	case "yield":
		reply = c.run(st, voting+"yield", all, ticketed(withCooldown(st.cool, inboxes, id, st.next, token, "-")...)...)
	case "downgrade":
		reply = c.run(st, voting+"downgrade", all, ticketed(inboxes, id, st.next, token, "-")...)
	case "cancel":
		reply = c.run(st, voting+"cancel", all, withCooldown(st.cool, id, "- "+inboxes, token)...)
	case "adopt":
		reply = c.run(st, "adopt", five, inboxes, id, token)
	case "renew":
		name, keys := "renew", names[:1]
		if strings.HasPrefix(id, "leased1:r") {
			name, keys = "renew_shared", []any{names[0], names[2]}
		}
		if c.run(st, name, keys, id, ttl) == int64(0) {
			return protocol.Answer{Outcome: protocol.NotOurs}
		}
		return protocol.Answer{Outcome: protocol.Granted}
	}
	return c.answer(st, reply)
}

// later is by how many ms a brief re-check extends a waiting lease. It is sent at once after the
// acquire, so hardly anything is missing.
const later = uint64(1)

func (c *speaker) run(st step, name string, keys []any, args ...any) any {
	c.s.t.Helper()
	sc := c.scripts[name]
	val, err := c.s.srv.run(context.Background(), &sc, keys, args...)
	if err != nil {
		c.s.t.Fatalf("version 1: %+v: %v", st, err)
	}
	return val
}

// answer parses a reply of version 1.
func (c *speaker) answer(st step, reply any) (a protocol.Answer) {
	c.s.t.Helper()
	malformed := func() { c.s.t.Fatalf("version 1: %+v: malformed %v", st, reply) }
	number := func(text any) uint64 {
		digits, _ := text.(string)
		n, err := strconv.ParseUint(digits, 10, 53)
		if err != nil {
			malformed()
		}
		return n
	}
	if voted, ok := reply.([]any); ok && len(voted) > 1 && c.s.srv.mark != "" && asks(st.what) {
		a.Mark = number(voted[0])
		if c.s.now()*1000-int64(a.Mark) > quarantine.Microseconds() {
			c.known, _ = voted[0].(string)
		}
		if reply = voted[1]; len(voted) > 2 { // the shortcut's answer to a request that waits
			reply = voted[1:]
		}
	}
	switch reply := reply.(type) {
	case string: // a shortcut's: the token of a lock that was free
		a.Outcome, a.Token = protocol.Granted, number(reply)
		return a
	case int64: // a shortcut's, to a release or to a brief re-check
		a.Outcome = protocol.Done
		if a.Brief = asks(st.what); a.Brief {
			a.Outcome = protocol.Enqueued
		}
		return a
	case []any:
		if len(reply) > 4 {
			if _, short := reply[0].(string); short { // a shortcut's, to a request that waits
				place, _ := reply[2].(int64)
				left, _ := reply[3].(int64)
				a.Outcome, a.Place, a.Left = protocol.Enqueued, int(place), protocol.Remaining(left)
				return a
			}
		}
		at := func(i int) int64 {
			if i >= len(reply) {
				malformed()
			}
			n, ok := reply[i].(int64)
			if !ok {
				malformed()
			}
			return n
		}
		switch at(0) {
		case 1:
			a.Outcome, a.Token, a.More = protocol.Granted, uint64(at(1)), at(3) == 1
		case 2:
			a.Outcome, a.Place, a.Left, a.NoNotify = protocol.Enqueued, int(at(3)), protocol.Remaining(at(4)), at(6) == 1
		case 3:
			a.Outcome = protocol.Refused
		case 4:
			a.Outcome = protocol.NotOurs
		case 5:
			a.Outcome = protocol.Done
		default:
			malformed()
		}
		return a
	}
	malformed()
	return a
}

// asks reports whether a step runs a script that votes on a server of a quorum.
func asks(what string) bool {
	switch what {
	case "acquire", "try", "newcomer", "question", "briefly", "yield", "downgrade":
		return true
	}
	return false
}

func (c *speaker) today(st step, last uint64) protocol.Answer {
	var a protocol.Answer
	var err error
	ask := func(cmd protocol.Command) {
		cmd.Ticket = st.ticket
		a, err = c.s.do(cmd)
	}
	switch st.what {
	case "acquire":
		ask(c.s.acquireOf(st.id))
	case "try":
		cmd := c.s.acquireOf(st.id)
		cmd.Wait = false
		ask(cmd)
	case "newcomer":
		ask(c.s.newcomer(st.id))
	case "question":
		ask(c.s.questionOf(st.id))
	case "briefly":
		ask(c.s.briefly(st.id, later))
	case "release":
		ask(protocol.Command{Verb: protocol.Release, ID: st.id, Last: last, Cooldown: st.cool})
	case "yield":
		ask(protocol.Command{Verb: protocol.Yield, ID: st.id, Next: st.next, Last: last, Cooldown: st.cool})
	case "downgrade":
		ask(protocol.Command{Verb: protocol.Downgrade, ID: st.id, Next: st.next, Last: last})
	case "cancel":
		err = c.s.tryCancel(st.id, last, st.cool)
		a.Outcome = protocol.Done
	case "adopt":
		a, err = c.s.srv.Adopt(context.Background(), &c.s.keys, st.id, last)
	case "renew":
		r := c.s.renewal(st.id)
		a.Outcome, err = r.Outcome, r.Err
	}
	if err != nil {
		c.s.t.Fatalf("today's: %+v: %v", st, err)
	}
	return a
}

// evict evicts the owners and returns them.
func (c *speaker) evict() []string {
	c.s.t.Helper()
	member := c.s.srv.mark != ""
	var owners []string
	var err error
	switch {
	case c.scripts == nil && member:
		owners, err = c.s.srv.EvictOwner(context.Background(), &c.s.keys, 0, "")
	case c.scripts == nil:
		owners = c.s.evict()
	default:
		names, args := c.s.keys.All(), []any{c.s.srv.Inboxes}
		if member {
			args = append(args, "0", "")
		}
		val := c.run(step{what: "evict"}, "evict", names[:], args...)
		var e eviction
		e, err = parseEviction(val)
		if owners = e.owners; err == nil && e.notified != len(owners) {
			c.s.t.Fatalf("version 1: evict: malformed %v", val)
		}
	}
	if err != nil {
		c.s.t.Fatal(err)
	}
	return owners
}
