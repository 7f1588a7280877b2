package leased

import (
	"testing"
	"time"
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
	if h.sends(acquire).wait {
		t.Error("it would queue")
	}
	h.answer(h.grant())
	h.in(c)
}

func TestNobodyQueuesBeforeMessagesAreHeard(t *testing.T) {
	for name, heard := range map[string]func(h *hand){
		"confirmed":   func(h *hand) { h.step(h.l.subscribed) },
		"refused":     func(h *hand) { h.polling = true; h.step(h.l.messageless) },
		"no response": nil,
	} {
		t.Run(name, func(t *testing.T) {
			h := connecting(t)
			a := h.enter(writer())
			first := h.sends(acquire)
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
			if second := h.sends(acquire); second.id == first.id || !second.wait {
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
	first := h.sends(acquire)
	h.connects = false
	h.step(h.l.subscribed)
	h.answer(h.refused(busysID, 0))
	if second := h.sends(acquire); second.id == first.id || !second.wait {
		t.Errorf("asks with %+v", second)
	}
	h.cancels()
}

// The first may have been granted, or be so later.
func TestAFirstRequestWithoutAnswerIsCancelledWhenMessagesAreHeard(t *testing.T) {
	h := connecting(t)
	h.enter(writer())
	first := h.sends(acquire)
	h.reply(answer{}, errSilence, time.Second)
	h.pass(time.Second)
	if again := h.sends(acquire); again.id != first.id || again.wait {
		t.Errorf("asks with %+v", again)
	}
	h.connects = false
	h.step(h.l.subscribed)
	h.reply(answer{}, errSilence, time.Second)
	if second := h.sends(acquire); second.id == first.id || !second.wait {
		t.Errorf("asks with %+v", second)
	}
	h.cancels(first.id)
}

func TestAnOwnerFromBeforeMessagesWereHeardAsksOnceWhetherItIsWanted(t *testing.T) {
	early := func(t *testing.T, c *caller) *hand {
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
		id := h.l.grant.req.id
		h.step(h.l.subscribed)
		if cmd := h.sends(acquire); cmd.id != id || cmd.wait {
			t.Errorf("asks with %+v", cmd)
		}
		a := h.grant()
		a.token, a.more = c.token, true
		h.answer(a)
		if h.in(c); !h.l.grant.wanted {
			t.Error("it does not know that it is wanted")
		}
		h.step(h.l.subscribed)
		h.sendsNothing()
	})
	t.Run("it is not the owner any more", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		h.step(h.l.subscribed)
		h.answer(h.refused(busysID, 0))
		h.lost()
		h.ring()
		if len(h.renewals) != 1 {
			t.Fatalf("%d renewals", len(h.renewals))
		}
		h.renewed(h.renewals[0], notOurs)
		h.lost(c)
	})
	t.Run("it is not the owner any more and has left", func(t *testing.T) {
		c := writer(func(o *lockOptions) { o.idleHold = time.Hour })
		h := early(t, c)
		h.step(h.l.subscribed)
		h.leave(c) // while it is asked about
		h.answer(h.refused(busysID, 0))
		if c.settled {
			t.Fatalf("Unlock returned %v although it may have been lost", c.err)
		}
		h.sends(release)
		h.answer(answer{outcome: notOurs})
		h.lost(c)
	})
	t.Run("there was no answer", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		waits := h.enter(writer())
		h.step(h.l.subscribed)
		h.reply(answer{}, refusal("NOPERM no"), time.Second)
		h.out(waits)
		h.sendsNothing()
	})
	t.Run("it has gone", func(t *testing.T) {
		c := writer()
		h := early(t, c)
		h.leave(c)
		h.sends(release)
		h.answer(answer{outcome: done})
		h.step(h.l.subscribed)
		h.sendsNothing()
	})
	t.Run("the answer came after the confirmation", func(t *testing.T) {
		h := connecting(t)
		h.enter(writer())
		h.connects = false
		h.step(h.l.subscribed)
		h.answer(h.grant())
		h.sends(acquire) // what was published in between went to nobody
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
	h.step(h.l.subscribed)
	h.sends(acquire)
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
	h.step(h.l.subscribed)
	if place := h.sends(acquire); place.own != h.l.grant.req.id || !place.wait {
		t.Errorf("asks with %+v", place)
	}
	h.answer(h.queue())
	if cmd := h.sends(acquire); cmd.id != h.l.grant.req.id {
		t.Errorf("asks with %+v whether its readers are wanted", cmd)
	}
}

func TestAnEarlyOwnersOwnWriterIsNotSomebodyWhoWantsIt(t *testing.T) {
	h := connecting(t)
	c := h.enter(reader())
	h.sends(acquire)
	h.answer(h.grant())
	h.in(c)
	w := h.enter(writer())
	h.connects = false
	h.step(h.l.subscribed)
	h.sends(acquire) // a place for the writer
	h.answer(h.queue())
	own := h.sends(acquire) // whether the lock is wanted
	h.answer(answer{outcome: granted, token: h.top, clock: h.clock(), kept: true, more: true})
	if own.id != h.l.grant.req.id {
		t.Fatalf("asks about %s", own.id)
	}
	h.abandon(w)
	h.in(h.enter(reader()))
}
