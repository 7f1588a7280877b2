package lockstate

import (
	"math/rand"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Section 5: suspended machines.
func TestAGrantIsConfirmedAfterASuspensionBeforeAnybodyIsAdmitted(t *testing.T) {
	for name, d := range map[string]time.Duration{"slept": time.Hour, "set back": -time.Hour, "barely": handMargin + 1} {
		t.Run(name, func(t *testing.T) {
			h := driveFrom(t, time.Now()) // which has both clocks
			a, b, c := writer(), writer(func(o *Terms) { o.IdleHold = time.Hour }), writer()
			h.enter(a, b)
			h.answer(h.grant())
			id := h.l.grant.req.ID
			h.slept(d)
			h.leave(a)
			h.out(b)
			if cmd := h.sends(protocol.Yield); cmd.ID != id || a.Settled {
				t.Errorf("yields %s, not %s, or Unlock does not wait to hear of it", cmd.ID, id)
			}
			h.answer(h.grant())
			h.settled(a, nil)
			h.in(b)
			h.leave(b)
			h.slept(d)
			h.enter(c)
			h.out(c)
			if cmd := h.sends(protocol.Acquire); cmd.Last != b.Token {
				t.Errorf("asks with the last token %d, not %d", cmd.Last, b.Token)
			}
			h.answer(h.queue()) // it was taken meanwhile
			h.out(c)
			h.cancels()
		})
	}
}

func TestADriftWithinTheMarginCostsNothing(t *testing.T) {
	h := driveFrom(t, time.Now())
	a, b := writer(), writer()
	h.enter(a, b)
	h.answer(h.grant())
	h.slept(handMargin)
	h.leave(a)
	h.in(b)
	h.sendsNothing()
}

// Redis is away, so nobody but our clocks can tell.
func TestALeaseEndsWithItsWindowByWhicheverClockMovedFurther(t *testing.T) {
	const asleep = 4 * time.Second
	for name, c := range map[string]struct {
		slept time.Duration // a second after the grant
		after time.Duration // that it was awake, until the end
	}{
		"slept for an hour":            {time.Hour, 0},
		"slept for just its window":    {handWindow - time.Second, 0},
		"slept for a part of it":       {asleep, handWindow - time.Second - asleep},
		"the wall clock was set back":  {-time.Hour, handWindow - time.Second},
		"a drift of less than a blink": {1, handWindow - time.Second - 1},
	} {
		for event, look := range map[string]func(h *hand){
			"a tick":             func(h *hand) { h.step(h.l.Tick) },
			"another who comes":  func(h *hand) { h.enter(writer()) },
			"a message":          func(h *hand) { h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0) },
			"a renewal's answer": func(h *hand) { h.renewed(protocol.Renewal{Req: h.l.grant.req, At: h.now}, protocol.Unanswered) },
		} {
			t.Run(name+"/"+event, func(t *testing.T) {
				h := driveFrom(t, time.Now())
				w := writer()
				h.enter(w)
				h.answer(h.grant())
				h.pass(time.Second)
				h.slept(c.slept)
				if c.after > 0 {
					h.now = h.now.Add(c.after - 1)
					if until := h.l.TrustedUntil(w, h.now); !until.After(h.now) {
						t.Errorf("trusted until %v ago", h.now.Sub(until))
					}
					look(h)
					h.lost()
					h.now = h.now.Add(1)
				}
				if until := h.l.TrustedUntil(w, h.now); until.After(h.now) {
					t.Errorf("it is trusted for another %v", until.Sub(h.now))
				}
				look(h)
				h.lost(w)
			})
		}
	}
}

// What was drawn from the window is drawn from the alarm, too.
func TestALeaseIsLookedAtAgainWhenItsWindowEndsAfterASleep(t *testing.T) {
	h := driveFrom(t, time.Now())
	w := writer()
	h.enter(w)
	h.answer(h.grant())
	h.pass(time.Second)
	h.slept(4 * time.Second)
	h.step(h.l.Tick) // whenever that is
	if len(h.renewals) != 1 || !h.renewals[0].At.Equal(h.now) {
		t.Errorf("%d renewals were sent at once", len(h.renewals))
	}
	h.pass(handWindow - 5*time.Second - 1)
	h.lost()
	h.pass(1)
	h.lost(w)
}

func TestAMessageThatASleepMadeOldIsNotBelieved(t *testing.T) {
	t.Run("of a request", func(t *testing.T) {
		h := driveFrom(t, time.Now())
		w := writer()
		h.enter(w)
		h.answer(h.queue())
		h.slept(handWindow)
		h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		h.out(w)
		h.sends(protocol.Acquire)
	})
	t.Run("of a yield", func(t *testing.T) {
		h := driveFrom(t, time.Now())
		a, b := writer(), writer()
		h.enter(a)
		h.answer(h.grant())
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.enter(b)
		h.pass(20 * time.Millisecond)
		h.leave(a)
		next := h.sends(protocol.Yield).Next
		h.slept(handWindow)
		h.hears(protocol.MessageGranted, next, h.token())
		h.out(b)
	})
	t.Run("of a renewal", func(t *testing.T) {
		h := driveFrom(t, time.Now())
		w := writer()
		h.enter(w)
		h.answer(h.grant())
		h.pass(handTTL / 3)
		h.slept(handWindow)
		h.renewed(h.renewals[0], protocol.Granted)
		h.lost(w)
	})
}

// trusts keeps what it found out about a proof. It must say the same as if it kept nothing.
func TestAGrantIsTrustedForThoseWhoAskOverAndOver(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	some := func(most time.Duration) time.Duration { return time.Duration(rng.Int63n(int64(most))) }
	both := map[bool]int{}
	for range 1000 {
		h := driveFrom(t, time.Now()) // which has both clocks
		g := &h.l.grant
		g.req.TTL, g.proved = time.Second, h.now
		for range 10 {
			switch rng.Intn(4) {
			case 0:
				g.prove(h.now)
			case 1:
				g.notified = Instant(rng.Intn(2))
			}
			h.now = clocktest.Asleep(t, h.now.Add(some(600*time.Millisecond)), some(15*time.Millisecond))
			if rng.Intn(4) == 0 { // it was set back
				h.now = clocktest.Asleep(t, h.now, -some(15*time.Millisecond))
			}
			want := g.trusted(h.now)
			if both[want]++; h.l.trusts(h.l.instant(h.now), h.now) != want {
				t.Fatalf("%+v: trusted at %v: %v", g, h.now, want)
			}
		}
	}
	if both[true] < 1000 || both[false] < 1000 {
		t.Errorf("trusted or not: %v", both)
	}
}
