package lockstate

import (
	"fmt"
	"math/rand"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// Reenter and LeaveKept are short cuts. The same events, at random, with the short cuts and
// without, must leave two locks in the same state after each step, and everybody where they
// were; only tokens may differ, for who enters by a short cut draws none.
func TestTheShortCutsDoWhatTheLongWayDoes(t *testing.T) {
	n := 500
	if testing.Short() {
		n = 100
	}
	if race.Enabled {
		n = 20
	}
	entered, left := 0, 0
	for seed := range int64(n) {
		var both [2]*chance
		for i := range both {
			both[i] = &chance{hand: drive(t), rng: rand.New(rand.NewSource(seed)), order: map[*Caller]int{}}
		}
		long, short := both[0], both[1]
		short.short = true
		for range 100 {
			for _, c := range both {
				c.pass(time.Millisecond) // so that tokens are the server's clock in both
				if c.rng.Intn(4) == 0 {
					c.act()
				} else {
					c.routine()
				}
				c.follow()
			}
			if what := differ(long, short); what != "" {
				t.Fatalf("seed %d: %s", seed, what)
			}
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		entered, left = entered+short.cutIn, left+short.cutOut
	}
	if entered < n || left < n {
		t.Errorf("in %d runs only %d entered and %d left by a short cut", n, entered, left)
	}
}

// routine is an event of a lock that the process keeps, most of the time.
func (c *chance) routine() {
	switch w := c.some(Inside); {
	case c.flight != nil && c.flight.Verb == protocol.Release:
		c.answer(protocol.Answer{Outcome: protocol.Done})
	case c.flight != nil:
		c.answer(c.grant())
	case w != nil && c.rng.Intn(5) < 3:
		c.goes(w)
	default:
		w := reader(func(o *Terms) { o.IdleHold = 500 * time.Millisecond })
		if c.rng.Intn(4) == 0 {
			w.Mode = protocol.Exclusive
		}
		c.calls = append(c.calls, w)
		c.order[w] = len(c.calls)
		if !c.short || !c.reenter(w) {
			c.enter(w)
		}
	}
}

// outline is all of a lock but its tokens, as far as it can be compared.
func outline(c *chance) [32]any {
	g := &c.l.grant
	return [...]any{g.state, g.req, g.via, g.wanted, g.askDue, g.fresh, g.idle, g.served, g.since, g.renewAt, g.touchAt, g.idleTill,
		g.minHoldUntil, g.gained, g.notified, g.proved, g.sent, g.mayNotQueue, g.lateUntil, g.doubtUntil, g.recheckAt, g.role(),
		c.l.waiting.n, c.l.inside.n, c.l.leaving.n, c.l.anyOrphans(), c.l.pending, c.l.closed, c.l.maxHoldAt, c.l.checking != nil, c.l.Due(),
		[...]any{len(c.calls), len(c.losses), len(c.unwanted), len(c.told), len(c.renewals), c.flight != nil}}
}

func outlineOf(w *Caller) [11]any {
	return [...]any{w.Phase, w.Via, w.Entered, w.Settled, w.Ended, w.Why, fmt.Sprint(w.Outcome()), w.Since, w.until, w.Orphaned, w.Mode}
}

// differ returns what differs between two locks, "" for nothing.
func differ(a, b *chance) string {
	if x, y := outline(a), outline(b); x != y {
		return fmt.Sprint("the long way\n", x, "\nthe short cuts\n", y)
	}
	for i := range a.calls {
		if x, y := outlineOf(a.calls[i]), outlineOf(b.calls[i]); x != y {
			return fmt.Sprint("caller ", i+1, ", the long way\n", x, "\nthe short cuts\n", y)
		}
	}
	return ""
}

// Who enters by a short cut has a token as soon as it is of use: when its lease is lost, and
// when the lock is given back, so that it is the next one's bound.
func TestWhoReentersDrawsItsTokenWhenItIsOfUse(t *testing.T) {
	idles := func(o *Terms) { o.IdleHold = time.Minute }
	kept := func(t *testing.T) (*hand, *Caller) {
		first := writer(idles)
		h := holding(t, first)
		h.pass(time.Millisecond)
		h.leave(first)
		again := writer(idles)
		if !h.reenter(again) || again.Phase != Inside || again.Via != ViaIdle || again.Token != 0 {
			t.Fatalf("it is not inside, or has a token: %+v", again)
		}
		if other := writer(idles); h.reenter(other) {
			t.Fatal("another is inside too")
		}
		return h, again
	}
	t.Run("lost", func(t *testing.T) {
		h, c := kept(t)
		before := h.top
		h.hears(protocol.MessageRevoked, h.l.grant.req.ID, 0)
		if len(h.losses) != 1 || c.Token <= before {
			t.Errorf("%d losses, of token %d after %d", len(h.losses), c.Token, before)
		}
		h.leave(c)
	})
	t.Run("given back", func(t *testing.T) {
		h, c := kept(t)
		before := h.top
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		if h.leaveKept(c) {
			t.Fatal("the lock was kept although it is wanted")
		}
		h.leave(c)
		if c.Token <= before || h.flight.Verb != protocol.Release || h.flight.Last != c.Token {
			t.Errorf("token %d after %d, and it sends %+v", c.Token, before, h.flight)
		}
	})
	t.Run("kept", func(t *testing.T) {
		h, c := kept(t)
		if !h.leaveKept(c) || !c.Settled || !h.l.grant.idle || c.Token != 0 {
			t.Errorf("it was not kept: %+v", c)
		}
		h.pass(time.Millisecond)
		next := writer(idles)
		h.enter(next)
		if next.Via != ViaIdle || next.Token == 0 {
			t.Errorf("the next entered by %v with token %d", next.Via, next.Token)
		}
	})
}

// Whatever a rule could have to say, the short cuts leave to the long way.
func TestTheShortCutsLeaveTheRestToTheRules(t *testing.T) {
	idles := func(o *Terms) { o.IdleHold = time.Minute }
	for name, disturb := range map[string]func(h *hand, c *Caller){
		"a maximum hold":   func(_ *hand, c *Caller) { c.Opts.MaxHold = time.Second },
		"a minimum hold":   func(_ *hand, c *Caller) { c.Opts.MinHold = time.Second },
		"the other mode":   func(_ *hand, c *Caller) { c.Mode = protocol.Shared },
		"a writer inside":  func(h *hand, _ *Caller) { h.enter(writer(idles)) },
		"drifted clocks":   func(h *hand, _ *Caller) { h.now = clocktest.Asleep(h.t, h.now, handMargin+time.Millisecond) },
		"the window's end": func(h *hand, _ *Caller) { h.now = h.l.grant.proved.Add(handWindow) },
		"a command":        func(h *hand, _ *Caller) { h.l.grant.askDue = true },
		"a closed client":  func(h *hand, _ *Caller) { h.l.closed = true },
		"nothing":          func(*hand, *Caller) {},
	} {
		t.Run(name, func(t *testing.T) {
			first, c := writer(idles), writer(idles)
			h := driveFrom(t, time.Now())
			h.enter(first)
			h.answer(h.grant())
			h.pass(time.Millisecond)
			h.leave(first)
			disturb(h, c)
			if h.reenter(c) != (name == "nothing") {
				t.Errorf("in by the short cut: %v", c.Phase == Inside)
			}
		})
	}
	for name, disturb := range map[string]func(h *hand, c *Caller){
		"no idle hold":     func(_ *hand, c *Caller) { c.Opts.IdleHold = 0 },
		"a minimum hold":   func(h *hand, _ *Caller) { h.l.grant.minHoldUntil = h.l.instant(h.now) + 1 },
		"a maximum hold":   func(h *hand, _ *Caller) { h.l.maxHoldAt = h.l.instant(h.now) + 1 },
		"wanted":           func(h *hand, _ *Caller) { h.l.grant.wanted = true },
		"one who waits":    func(h *hand, _ *Caller) { h.enter(writer(idles)) },
		"a lost lease":     func(h *hand, _ *Caller) { h.hears(protocol.MessageRevoked, h.l.grant.req.ID, 0) },
		"drifted clocks":   func(h *hand, _ *Caller) { h.now = clocktest.Asleep(h.t, h.now, handMargin+time.Millisecond) },
		"the window's end": func(h *hand, _ *Caller) { h.now = h.l.grant.proved.Add(handWindow) },
		"a command":        func(h *hand, _ *Caller) { h.l.grant.askDue = true },
		"a closed client":  func(h *hand, _ *Caller) { h.l.closed = true },
		"a downgrade":      func(h *hand, _ *Caller) { h.l.grant.next = &successor{role: byDowngrade} },
		"nothing":          func(*hand, *Caller) {},
	} {
		t.Run("leaving, "+name, func(t *testing.T) {
			c := writer(idles)
			h := driveFrom(t, time.Now())
			h.enter(c)
			h.answer(h.grant())
			disturb(h, c)
			if h.l.LeaveKept(c, h.now) != (name == "nothing") {
				t.Errorf("out by the short cut: %v", c.Phase == Left)
			}
		})
	}
}

func TestAMaximumHoldThatIsOverWithItsLeaseHoldsUpNobody(t *testing.T) {
	idles := func(o *Terms) { o.IdleHold = time.Minute }
	first := writer(idles, func(o *Terms) { o.MaxHold = time.Hour })
	h := holding(t, first).keep()
	h.leave(first)
	if !h.reenter(writer(idles)) {
		t.Errorf("the next caller does not enter by the short cut; a maximum hold ends in %v", h.l.time(h.l.maxHoldAt).Sub(h.now))
	}
}
