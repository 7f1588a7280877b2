package lockstate

import (
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// chance drives a lock with random events, and answers that need not make sense
// together: Redis and the network may say anything at any time. What hand checks
// after every step holds nevertheless: one command under way, nobody admitted on
// a grant that is not trusted, tokens that grow, an alarm that comes to rest.
type chance struct {
	*hand
	rng    *rand.Rand
	calls  []*Caller
	order  map[*Caller]int
	last   int // order of the caller admitted last
	ids    []string
	log    []string
	done   []chan struct{}
	checks []*Check
	short  bool // callers take the short cuts where they lead somewhere
}

// TestRandomEventsNeverBreakTheRulesOfTheLock is replayed by its seed.
func TestRandomEventsNeverBreakTheRulesOfTheLock(t *testing.T) {
	n := 3000
	if testing.Short() {
		n = 300
	}
	if race.Enabled {
		n = 60
	}
	for seed := range int64(n) {
		c := &chance{hand: drive(t), rng: rand.New(rand.NewSource(seed)), order: map[*Caller]int{}}
		c.polling, c.short = c.rng.Intn(4) == 0, c.rng.Intn(2) == 0
		if seed%2 == 1 {
			c.proof = protocol.Provisionally
		}
		for range 20 + c.rng.Intn(150) {
			c.act()
			c.follow()
			if t.Failed() {
				break
			}
		}
		if !t.Failed() {
			c.end()
		}
		if t.Failed() {
			t.Fatalf("seed %d:\n%s", seed, strings.Join(c.log, "\n"))
		}
	}
}

func (c *chance) note(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf("%9v  ", c.now.Sub(noon))+fmt.Sprintf(format, args...))
}

// follow checks the order of admissions and forgets those who are through.
func (c *chance) follow() {
	for _, w := range c.woken {
		if !w.Entered {
			continue
		}
		if n := c.order[w]; n < c.last {
			c.t.Errorf("caller %d was admitted after %d", n, c.last)
		} else {
			c.last = n
		}
	}
	c.woken = nil
	if id := c.l.grant.req.ID; id != "" && !slices.Contains(c.ids, id) {
		c.ids = append(c.ids, id)
	}
}

// some returns one of the callers in that phase, nil if there is none.
func (c *chance) some(ph Phase) *Caller {
	var all []*Caller
	for _, w := range c.calls {
		if w.Phase == ph {
			all = append(all, w)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[c.rng.Intn(len(all))]
}

func (c *chance) act() {
	switch n := c.rng.Intn(108); {
	case n < 20:
		c.come()
	case n < 26:
		if w := c.some(Waiting); w != nil {
			c.note("%d gives up", c.order[w])
			c.abandon(w)
		}
	case n < 40:
		if w := c.some(Inside); w != nil {
			c.goes(w)
		}
	case n < 60:
		if c.flight != nil {
			a, err := c.any(c.flight)
			c.note("answer to %d: %+v, %v", c.flight.Verb, a, err)
			c.reply(a, err, time.Duration(c.rng.Intn(1000))*time.Millisecond)
		}
	case n < 72:
		c.gossip()
	case n < 80:
		c.outcome()
	case n < 82:
		c.note("subscribed")
		c.step(c.l.Subscribed)
	case n < 84:
		if w := c.some(Inside); w != nil {
			done := make(chan struct{})
			c.done = append(c.done, done)
			c.note("%d wants to read on", c.order[w])
			c.step(func(now time.Time, fx *Effects) { c.l.Downgrade(w, done, now, fx) })
		}
	case n < 88:
		if w := c.some(Phase(1 + c.rng.Intn(2))); w != nil { // inside or left
			c.note("%d checks", c.order[w])
			c.checks = append(c.checks, c.check(w))
		}
	case n < 89:
		if w := c.some(Inside); w != nil {
			c.note("%d is collected", c.order[w])
			c.l.Collected(w)
		}
	case n < 90 && c.rng.Intn(20) == 0:
		c.note("close")
		c.close()
	case n < 93:
		c.canceled()
	case n < 95:
		if w := c.some(Inside); w != nil && !w.Orphaned {
			c.note("%d gives back", c.order[w])
			c.step(func(now time.Time, fx *Effects) { c.l.GiveBack(w, now, fx) })
		}
	case n < 96:
		c.note("the subscription fails")
		c.step(c.l.SubscribeFailed)
	case n < 97:
		c.note("silent connections were found")
		c.step(c.l.Reconnected)
	default:
		d := time.Duration(c.rng.Int63n(1 << (10 + c.rng.Intn(24))))
		c.note("%v pass", d)
		c.pass(d)
	}
}

func (c *chance) goes(w *Caller) {
	c.note("%d leaves", c.order[w])
	if !c.short || !c.leaveKept(w) {
		c.leave(w)
	}
}

func (c *chance) come() {
	w := writer(func(o *Terms) {
		o.TTL = []time.Duration{100 * time.Millisecond, time.Second, handTTL}[c.rng.Intn(3)]
		o.Handoffs = 1 + c.rng.Intn(3)
		if c.rng.Intn(4) == 0 {
			o.IdleHold = 500 * time.Millisecond
		}
		if c.rng.Intn(6) == 0 {
			o.MaxHold = 700 * time.Millisecond
		}
		if c.rng.Intn(6) == 0 {
			o.MinHold = 600 * time.Millisecond
		}
	})
	if c.rng.Intn(2) == 0 {
		w.Mode = protocol.Shared
	}
	w.Try, w.RetryFatal = c.rng.Intn(6) == 0, c.rng.Intn(2) == 0
	c.calls = append(c.calls, w)
	c.order[w] = len(c.calls)
	c.note("%d comes: %v, TTL %v, try %v", len(c.calls), w.Mode, w.Opts.TTL, w.Try)
	if !c.short || w.Try || !c.reenter(w) {
		c.enter(w)
	}
}

// any returns what the command could be answered.
func (c *chance) any(cmd *protocol.Command) (protocol.Answer, error) {
	if n := c.rng.Intn(10); n == 0 {
		return protocol.Answer{}, errSilence
	} else if n == 1 {
		return protocol.Answer{}, refusal("NOPERM no")
	}
	one := func(in int) bool { return c.rng.Intn(in) == 0 }
	g := c.grant()
	g.More, g.Unfinished, g.Gone = one(3), one(8), cmd.Verb == protocol.Yield && one(8)
	if one(4) {
		g.Kept, g.Token = true, max(1, c.top)
		g.Forgot = one(4)
	}
	q := c.queue()
	q.Unfinished, q.Split, q.Brief = one(8), one(8), cmd.Until != 0 && one(2)
	if one(4) {
		q.Told = c.clock()
	}
	q.Left = []time.Duration{protocol.Endless, protocol.Ownerless, 0, time.Second}[c.rng.Intn(4)]
	q.Place, q.NoNotify = c.rng.Intn(3), c.rng.Intn(3) == 0
	lost := protocol.Answer{Outcome: protocol.NotOurs}
	switch cmd.Verb {
	case protocol.Acquire:
		if cmd.Question && one(2) {
			return lost, nil
		}
		if !cmd.Wait && c.rng.Intn(2) == 0 {
			q.Outcome = protocol.Refused
			return q, nil
		}
		return []protocol.Answer{g, q}[c.rng.Intn(2)], nil
	case protocol.Yield:
		return []protocol.Answer{g, q, lost}[c.rng.Intn(3)], nil
	case protocol.Release:
		return []protocol.Answer{{Outcome: protocol.Done}, {Outcome: protocol.Done, Proved: true}, lost}[c.rng.Intn(3)], nil
	}
	return []protocol.Answer{g, lost}[c.rng.Intn(2)], nil
}

// gossip is a message about any request, known or not.
func (c *chance) gossip() {
	id := c.NewRequest(protocol.Exclusive, handTTL, false, protocol.Origin{}).ID
	if next := c.l.grant.next; next != nil && c.rng.Intn(2) == 0 {
		id = next.req.ID
	} else if len(c.ids) > 0 {
		id = c.ids[max(0, len(c.ids)-1-c.rng.Intn(3))]
	}
	kind := []protocol.MessageKind{protocol.MessageGranted, protocol.MessageWanted, protocol.MessageRevoked, protocol.MessageUnwanted, protocol.MessageEnds}[c.rng.Intn(5)]
	if kind == protocol.MessageRevoked && c.rng.Intn(4) != 0 {
		kind = protocol.MessageGranted
	}
	token := c.token() + uint64(c.rng.Intn(3)) - 1
	c.note("%s %s %d", kind, id[9:], token)
	c.hears(kind, id, token)
}

// canceled ends some cancel for which callers wait, or all there are.
func (c *chance) canceled() {
	for i := range c.unwanted {
		for g := &c.unwanted[i]; g != nil; g = g.Then {
			if len(g.Callers) == 0 || c.rng.Intn(2) == 0 {
				continue
			}
			s := Settlement{Callers: g.Callers, proved: c.rng.Intn(2) == 0}
			if !s.proved && c.rng.Intn(3) == 0 {
				s.Fail = failureOf(errSilence)
			}
			c.note("canceled %s: %v", g.ID[9:], s.proved)
			c.settle(g, &s)
		}
	}
}

func (c *chance) settle(g *Cancellation, s *Settlement) {
	g.Callers = nil
	c.step(func(now time.Time, fx *Effects) { c.l.Canceled(s, now, fx) })
	for _, w := range s.Callers {
		if !w.Settled {
			c.t.Errorf("caller %d is not settled by its cancel", c.order[w])
		}
	}
}

// outcome is that of any renewal that was sent, once or again.
func (c *chance) outcome() {
	if len(c.renewals) == 0 {
		return
	}
	r := c.renewals[max(0, len(c.renewals)-1-c.rng.Intn(2))]
	o := []protocol.Outcome{protocol.Granted, protocol.Granted, protocol.Granted, protocol.Unanswered, protocol.NotOurs}[c.rng.Intn(5)]
	c.note("renewal of %s: %d", r.Req.ID[9:], o)
	c.renewed(r, o)
}

// end lets everybody go, and Redis answer: then nothing may be left.
func (c *chance) end() {
	c.note("the end")
	for _, w := range c.calls {
		switch w.Phase {
		case Waiting:
			c.abandon(w)
		case Inside:
			c.leave(w)
		}
	}
	for range 10 {
		for c.flight != nil {
			switch c.flight.Verb {
			case protocol.Acquire:
				c.answer(c.queue())
			case protocol.Release:
				c.answer(protocol.Answer{Outcome: protocol.Done})
			default:
				c.answer(protocol.Answer{Outcome: protocol.NotOurs})
			}
		}
		c.pass(time.Minute)
	}
	if !c.l.Idle() {
		c.t.Errorf("something is left: %+v", c.l)
	}
	for i := range c.unwanted {
		for g := &c.unwanted[i]; g != nil; g = g.Then {
			c.settle(g, &Settlement{Callers: g.Callers, proved: true})
		}
	}
	for i, w := range c.calls {
		if w.Phase == Left && !w.Settled || w.Phase != Left && w.Phase != Rejected {
			c.t.Errorf("caller %d is not through: phase %d", i+1, w.Phase)
		}
	}
	for i, k := range c.checks {
		if !closed(k.done) {
			c.t.Errorf("check %d was never answered", i)
		}
	}
	for i, done := range c.done {
		select {
		case <-done:
		default:
			c.t.Errorf("downgrade %d is not through", i+1)
		}
	}
}
