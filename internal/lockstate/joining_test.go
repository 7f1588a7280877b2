package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Until a client's inbox is confirmed for the first time, no message reaches it, and
// its requests cannot say that a count of 0 receivers proves it gone.

func connecting(t *testing.T) *hand {
	h := drive(t)
	h.connects = true
	return h
}

func TestAFreeLockIsTakenBeforeMessagesAreHeard(t *testing.T) {
	h := connecting(t)
	c := h.enter(writer())
	if h.sends(protocol.Acquire).Wait {
		t.Error("it would queue")
	}
	h.answer(h.grant())
	h.in(c)
}

// The question that follows the first subscription holds up the release. A caller that comes meanwhile is handed
// the lock, which nobody had kept idle: it counts among the hand-offs, and the tenure goes on.
func TestALockThatIsPassedOnDuringAQuestionWasNotIdle(t *testing.T) {
	h := connecting(t)
	a, b := writer(), writer()
	h.enter(a)
	h.answer(h.grant())
	h.in(a)
	h.connects = false
	h.step(h.l.Subscribed)
	if c := h.sends(protocol.Acquire); !c.Question {
		t.Fatalf("sends %+v", c)
	}
	h.leave(a)
	h.enter(b)
	h.in(b)
	if b.Via != ViaLocal || h.l.grant.served != 2 {
		t.Errorf("came %v, as number %d", b.Via, h.l.grant.served)
	}
}

// One that was kept idle was, even if its time has passed before the answer.
func TestALockThatWasKeptIdleUntilAQuestionWasIdle(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = 3 * time.Second }
	for _, tick := range []bool{false, true} {
		h := connecting(t)
		a, b := writer(idle), writer(idle)
		h.enter(a)
		h.answer(h.grant())
		h.in(a)
		h.leave(a)
		h.pass(3*time.Second - 1)
		h.connects = false
		h.step(h.l.Subscribed)
		if c := h.sends(protocol.Acquire); !c.Question {
			t.Fatalf("sends %+v", c)
		}
		h.pass(time.Second)
		if tick {
			h.step(h.l.Tick)
		}
		h.enter(b)
		h.in(b)
		if b.Via != ViaIdle || h.l.grant.served != 1 {
			t.Errorf("with a tick %v, came %v, as number %d", tick, b.Via, h.l.grant.served)
		}
	}
}

func TestNobodyQueuesBeforeMessagesAreHeard(t *testing.T) {
	for name, heard := range map[string]func(h *hand){
		"confirmed":   func(h *hand) { h.step(h.l.Subscribed) },
		"refused":     func(h *hand) { h.polling = true; h.step(h.l.SubscribeFailed) },
		"no response": nil,
	} {
		t.Run(name, func(t *testing.T) {
			h := connecting(t)
			a := h.enter(writer())
			first := h.sends(protocol.Acquire)
			h.answer(h.refused(busysID, 3))
			h.pass(time.Second)
			h.enter(writer())
			h.out(a)
			h.sendsNothing()
			if heard != nil {
				h.connects = false
				heard(h)
			} else {
				h.pass(time.Second - 1)
				h.sendsNothing()
				h.pass(1)
			}
			if second := h.sends(protocol.Acquire); second.ID == first.ID || !second.Wait {
				t.Errorf("asks with %+v after %+v", second, first)
			}
			h.answer(h.queue())
			h.state(queued)
			h.cancels() // the first never queued
		})
	}
}

func TestASubscriptionMayOvertakeTheFirstAnswer(t *testing.T) {
	h := connecting(t)
	h.enter(writer())
	first := h.sends(protocol.Acquire)
	h.connects = false
	h.step(h.l.Subscribed)
	h.answer(h.refused(busysID, 0))
	if second := h.sends(protocol.Acquire); second.ID == first.ID || !second.Wait {
		t.Errorf("asks with %+v", second)
	}
	h.cancels()
}

// Messages are heard from the moment on between the making of the first request, whose id does not
// say so, and its sending.
func TestARequestOfJustBeforeMessagesAreHeardDoesNotQueue(t *testing.T) {
	h := connecting(t)
	h.joins = true
	h.enter(writer())
	first := h.sends(protocol.Acquire)
	if h.connects || first.Wait {
		t.Errorf("asks with %+v", first)
	}
	h.answer(h.refused(busysID, 0))
	if second := h.sends(protocol.Acquire); second.ID == first.ID || !second.Wait {
		t.Errorf("asks with %+v after %+v", second, first)
	}
	h.cancels()
}

// The first may have been granted, or be so later.
func TestAFirstRequestWithoutAnswerIsCanceledWhenMessagesAreHeard(t *testing.T) {
	h := connecting(t)
	h.enter(writer())
	first := h.sends(protocol.Acquire)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.pass(time.Second)
	if again := h.sends(protocol.Acquire); again.ID != first.ID || again.Wait {
		t.Errorf("asks with %+v", again)
	}
	h.connects = false
	h.step(h.l.Subscribed)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	if second := h.sends(protocol.Acquire); second.ID == first.ID || !second.Wait {
		t.Errorf("asks with %+v", second)
	}
	h.cancels(first.ID)
}

func TestAnOwnerFromBeforeMessagesWereHeardAsksOnceWhetherItIsWanted(t *testing.T) {
	early := func(t *testing.T, c *Caller) *hand {
		h := connecting(t)
		h.enter(c)
		h.answer(h.grant())
		h.in(c)
		h.pass(10 * time.Millisecond)
		h.sendsNothing()
		h.connects = false
		return h
	}
	t.Run("it is", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		id := h.l.grant.req.ID
		h.step(h.l.Subscribed)
		if cmd := h.sends(protocol.Acquire); cmd.ID != id || cmd.Wait {
			t.Errorf("asks with %+v", cmd)
		}
		a := h.kept(c.Token)
		a.More = true
		h.answer(a)
		h.in(c)
		if !h.l.grant.wanted {
			t.Error("it does not know that it is wanted")
		}
		h.step(h.l.Subscribed)
		h.sendsNothing()
	})
	t.Run("it is not the owner anymore", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		h.step(h.l.Subscribed)
		h.answer(h.refused(busysID, 0))
		h.lost()
		h.ring()
		if len(h.renewals) != 1 {
			t.Fatalf("%d renewals", len(h.renewals))
		}
		h.renewed(h.renewals[0], protocol.NotOurs)
		h.lost(c)
	})
	t.Run("it is not the owner anymore and has left", func(t *testing.T) {
		c := writer(func(o *Terms) { o.IdleHold = time.Hour })
		h := early(t, c)
		h.step(h.l.Subscribed)
		h.leave(c) // while it is asked about
		if !c.Settled || c.Outcome() != nil {
			t.Fatalf("Unlock returned %v, %v although the lock is kept", c.Settled, c.Outcome())
		}
		h.answer(h.refused(busysID, 0))
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.NotOurs})
		h.lost()
	})
	t.Run("there was no answer", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		waits := h.enter(writer())
		h.step(h.l.Subscribed)
		h.reply(protocol.Answer{}, refusal("NOPERM no"), time.Second)
		h.out(waits)
		h.sendsNothing()
	})
	t.Run("it has gone", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		h.leave(c)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.step(h.l.Subscribed)
		h.sendsNothing()
	})
	t.Run("the answer came after the confirmation", func(t *testing.T) {
		h := connecting(t)
		h.enter(writer())
		h.connects = false
		h.step(h.l.Subscribed)
		h.answer(h.grant())
		h.sends(protocol.Acquire) // what was published in between went to nobody
	})
}

func TestATryWaitsForMessagesNoLongerThanForAnIdleOwner(t *testing.T) {
	h := connecting(t)
	c := h.enter(trying(writer()))
	h.answer(h.refused(idlersID, 0))
	h.sendsNothing()
	h.pass(idleOwnersTime - 1)
	h.out(c)
	h.connects = false
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.answer(h.queue())
	h.pass(idleOwnersTime - 1)
	h.out(c)
	h.pass(1)
	h.turned(c, ErrLocked)

	h = connecting(t)
	c = h.enter(trying(writer()))
	h.answer(h.refused(idlersID, 0))
	h.pass(idleOwnersTime)
	h.turned(c, ErrLocked)
	h.sendsNothing()
}

func TestAPlaceBehindReadersIsTakenWhenMessagesAreHeard(t *testing.T) {
	h := connecting(t)
	r := h.enter(reader())
	h.answer(h.grant())
	h.in(r)
	h.enter(writer())
	h.sendsNothing()
	h.connects = false
	h.step(h.l.Subscribed)
	if place := h.sends(protocol.Acquire); place.Own != h.l.grant.req.ID || !place.Wait {
		t.Errorf("asks with %+v", place)
	}
	h.answer(h.queue())
	if cmd := h.sends(protocol.Acquire); cmd.ID != h.l.grant.req.ID {
		t.Errorf("asks with %+v whether its readers are wanted", cmd)
	}
}

func TestAnEarlyOwnersOwnWriterIsNotSomebodyWhoWantsIt(t *testing.T) {
	h := connecting(t)
	c := h.enter(reader())
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(c)
	w := h.enter(writer())
	h.connects = false
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire) // a place for the writer
	h.answer(h.queue())
	own := h.sends(protocol.Acquire) // whether the lock is wanted
	a := h.kept(h.top)
	a.More = true
	h.answer(a)
	if own.ID != h.l.grant.req.ID {
		t.Fatalf("asks about %s", own.ID)
	}
	h.abandon(w)
	h.in(h.enter(reader()))
}

func TestAGrantIsNotAskedAboutAfterTheMaximumHold(t *testing.T) {
	h := connecting(t)
	c := h.enter(writer(func(o *Terms) { o.MaxHold = time.Second }))
	h.answer(h.grant())
	h.pass(time.Second)
	h.lost(c)
	h.connects = false
	h.step(h.l.Subscribed)
	h.sendsNothing() // the question would extend what is not renewed anymore
}

// It may have missed a message that it is wanted, and a renewal says nothing of that.
func TestAQuestionThatWaitsForTheInboxIsAskedAfterARenewalToo(t *testing.T) {
	h := drive(t)
	h.connects = true
	c := h.enter(writer())
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(c)
	h.pass(handTTL / 3)
	h.renewed(h.renewals[0], protocol.Granted)
	h.sendsNothing()
	h.connects = false
	h.step(h.l.Subscribed)
	if cmd := h.sends(protocol.Acquire); !cmd.Question {
		t.Errorf("sends %+v", cmd)
	}
}
