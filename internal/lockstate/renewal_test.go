package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Rule 7: renewals and what ends them.

func TestRule7AHeldGrantIsRenewedEachThirdOfItsTTLAndTrustedFromTheSending(t *testing.T) {
	c := writer()
	h := holding(t, c)
	for i := 1; i <= 100; i++ {
		h.pass(handTTL/3 - h.now.Sub(noon)%(handTTL/3))
		if len(h.renewals) != i {
			t.Fatalf("%d renewals after %v", len(h.renewals), h.now.Sub(noon))
		}
		sent := h.renewals[i-1].At
		h.now = h.now.Add(time.Second)
		h.renewed(h.renewals[i-1], protocol.Granted)
		h.trust(sent.Sub(noon) + handWindow)
	}
	h.lost()
}

func TestRule7AnUnknownRenewalIsRepeatedUntilTheWindowEnds(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.onRenew = func(r protocol.Renewal) { h.renewed(r, protocol.Unanswered) }
	h.pass(handWindow - 1)
	h.lost()
	h.in(c)
	if n := len(h.renewals); n < 6 || n > 20 {
		t.Errorf("%d renewals in a window", n)
	}
	for i := 1; i < len(h.renewals); i++ {
		if pause := h.renewals[i].At.Sub(h.renewals[i-1].At); pause > time.Second {
			t.Errorf("renewal %d is sent after %v", i, pause)
		}
	}
	h.pass(1)
	h.lost(c)
	n := len(h.renewals)
	h.pass(time.Hour)
	if len(h.renewals) != n {
		t.Error("a lost grant is renewed")
	}
	h.cancels() // somebody still works under it
	h.leave(c)
	h.settled(c, ErrLeaseLost)
	if len(h.unwanted) != 1 || h.unwanted[0].until.Sub(h.now) != handTTL {
		t.Errorf("cancels %+v", h.unwanted)
	}
}

// The renewal may have been sent on a connection that has fallen silent. One that is not due yet is not.
func TestRule7ARenewalWithoutAnswerIsSentAgainOnceSilentConnectionsWereFound(t *testing.T) {
	h := holding(t, writer())
	h.pass(handTTL/3 - time.Second)
	h.step(h.l.Reconnected)
	h.pass(0)
	if len(h.renewals) != 0 {
		t.Error("a renewal is sent before it is due")
	}
	h.pass(2 * time.Second)
	if len(h.renewals) != 1 {
		t.Fatal(len(h.renewals), "renewals are sent")
	}
	h.step(h.l.Reconnected)
	h.pass(0)
	if len(h.renewals) != 2 {
		t.Fatal(len(h.renewals), "renewals are sent after silent connections were found")
	}
	h.renewed(h.renewals[1], protocol.Granted)
	h.step(h.l.Reconnected)
	h.pass(0)
	if len(h.renewals) != 2 {
		t.Error("a grant that was renewed is renewed again at once")
	}
}

func TestRule7AnUnknownRenewalIsForgottenAfterASuccessfulOne(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(handTTL / 3)
	h.renewed(h.renewals[0], protocol.Unanswered)
	h.pass(time.Second)
	h.renewed(h.renewals[1], protocol.Granted)
	h.trust(h.renewals[1].At.Sub(noon) + handWindow)
	h.pass(handTTL/3 - handTTL/30 - time.Millisecond)
	if len(h.renewals) != 2 {
		t.Errorf("renewed %d times", len(h.renewals))
	}
}

func TestRule7ALateRenewalDoesNotShortenTheWindow(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(handTTL / 3)
	h.renewed(h.renewals[0], protocol.Unanswered)
	h.pass(time.Second)
	h.renewed(h.renewals[1], protocol.Granted)
	h.renewed(h.renewals[0], protocol.Granted)
	h.trust(h.renewals[1].At.Sub(noon) + handWindow)
}

func TestRule7NotOursIsALossAtOnce(t *testing.T) {
	a, b := writer(), writer()
	h := holding(t, a)
	h.pass(handTTL / 3)
	h.enter(b)
	h.renewed(h.renewals[0], protocol.NotOurs)
	h.lost(a)
	h.sendsNothing()
	h.out(b) // until a unlocks, as in sync.Mutex
	h.pass(time.Hour)
	h.out(b)
	h.leave(a)
	h.settled(a, ErrLeaseLost)
	h.cancels(h.renewals[0].Req.ID) // it may be back in the queue
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(b)
	h.lost(a)
}

func TestRule7RenewedAfterTheWindowsEndRevivesNothing(t *testing.T) {
	t.Run("before the watchdog saw it", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a)
		h.pass(handTTL / 3)
		h.enter(b)
		h.now = noon.Add(handWindow)
		h.renewed(h.renewals[0], protocol.Granted)
		h.lost(a)
		h.leave(a)
		h.out(b)
	})
	t.Run("after it", func(t *testing.T) {
		a := writer()
		h := holding(t, a)
		h.pass(handTTL / 3)
		h.pass(handWindow)
		h.lost(a)
		h.renewed(h.renewals[0], protocol.Granted)
		h.lost(a)
		h.state(none)
		if a.Ended != ByLoss {
			t.Error("revived")
		}
	})
}

func TestRule7NoRenewalIsSentAfterUnlock(t *testing.T) {
	for name, v := range map[string]protocol.Verb{"release": protocol.Release, "yield": protocol.Yield} {
		t.Run(name, func(t *testing.T) {
			a, b := writer(), writer()
			h := holding(t, a)
			if v == protocol.Yield {
				h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
				h.enter(b)
				h.pass(20 * time.Millisecond)
			}
			h.leave(a)
			h.sends(v)
			h.pass(time.Hour) // the answer takes its time
			h.step(h.l.Tick)
			if len(h.renewals) != 0 {
				t.Errorf("renewed %d times while it was released", len(h.renewals))
			}
		})
	}
}

// An idle hold that ends on a renewal's instant is the usual case: both are
// round numbers.
func TestRule7AGrantIsNotRenewedInTheStepThatLetsItGo(t *testing.T) {
	c := writer(func(o *Terms) { o.TTL, o.IdleHold = 9*time.Second, 3*time.Second })
	h := holding(t, c)
	h.leave(c)
	h.pass(3 * time.Second)
	h.sends(protocol.Release)
	if len(h.renewals) != 0 {
		t.Error("renewed and released at once")
	}
}

func TestALostGrantIsNotCanceledWhileSomebodyWorksUnderIt(t *testing.T) {
	for name, a := range map[string]func(h *hand) (protocol.Answer, error){
		"granted":  func(h *hand) (protocol.Answer, error) { return h.grant(), nil },
		"no reply": func(h *hand) (protocol.Answer, error) { return protocol.Answer{}, errSilence },
	} {
		t.Run(name, func(t *testing.T) {
			c := writer()
			h := drive(t)
			h.enter(c)
			id := h.sends(protocol.Acquire).ID
			h.hears(protocol.MessageGranted, id, h.token())
			h.in(c)
			h.pass(handTTL) // no answer, and no renewal is confirmed
			h.lost(c)
			h.hears(protocol.MessageWanted, id, 0)
			h.hears(protocol.MessageGranted, id, h.token())
			h.cancels()
			ans, err := a(h)
			h.reply(ans, err, time.Second)
			h.cancels()
			h.leave(c)
			if len(h.unwanted) == 0 || h.unwanted[0].ID != id {
				t.Errorf("after Unlock cancels %+v", h.unwanted)
			}
		})
	}
}

// The watchdog sends renewals for what a tick asks for, and for nothing else.
func TestOnlyATickAsksForARenewal(t *testing.T) {
	t.Run("the watchdog is late", func(t *testing.T) {
		c := writer()
		h := holding(t, c)
		h.pass(handTTL / 3)
		h.now = h.now.Add(handTTL / 3) // the next is due
		h.renewed(h.renewals[0], protocol.Granted)
		if len(h.renewals) != 1 {
			t.Error("an answer asked for a renewal, which nobody sends")
		}
		h.ring()
		if len(h.renewals) != 2 {
			t.Errorf("%d renewals after the tick", len(h.renewals))
		}
	})
	t.Run("the machine slept", func(t *testing.T) {
		h := driveFrom(t, time.Now())
		h.enter(writer())
		h.answer(h.grant())
		h.pass(handTTL / 2)
		h.slept(time.Hour)
		h.renewed(h.renewals[0], protocol.Granted)
		if len(h.renewals) != 1 {
			t.Error("an answer asked for a renewal, which nobody sends")
		}
	})
}

// The renewal was sent before the command that proved the grant since, and
// overtaken by it.
func TestAnOldRenewalsNotOursEndsNoLeaseThatWasProvedSince(t *testing.T) {
	first := writer(func(o *Terms) { o.IdleHold = time.Minute })
	h := holding(t, first)
	h.leave(first)
	h.pass(handTTL / 3)
	old := h.renewals[0]
	h.now = h.now.Add(handTTL) // nobody rang: the process was slow
	c := h.enter(writer())
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(c)
	h.renewed(old, protocol.NotOurs)
	h.lost()
}

func TestARenewalWithoutAnswerIsRepeatedSoon(t *testing.T) {
	for ttl, pause := range map[time.Duration]time.Duration{time.Second: 100 * time.Millisecond, 5 * time.Second: 500 * time.Millisecond, 30 * time.Second: time.Second} {
		h := holding(t, writer(func(o *Terms) { o.TTL = ttl }))
		h.pass(ttl / 3)
		h.renewed(h.renewals[0], protocol.Unanswered)
		if next := h.due().Sub(h.now); next != pause {
			t.Errorf("TTL %v: repeated after %v, not after %v", ttl, next, pause)
		}
	}
}
