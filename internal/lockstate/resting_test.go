package lockstate

import (
	"errors"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// hand lets a lock rest after each event after which it can, and wakes it for the next. Random
// events show that the rules of the lock hold all the same.

func TestALockRestsThatOneCallerHoldsAndNobodyWaitsFor(t *testing.T) {
	limits := func(o *Terms) { o.MaxHold, o.MinHold = time.Hour, time.Second }
	for what, c := range map[string]*Caller{
		"a writer": writer(), "a reader": reader(),
		"a writer with limits": writer(limits), "a reader with limits": reader(limits),
	} {
		h := drive(t)
		h.enter(c)
		if h.rested != 0 {
			t.Errorf("%s: it rests before it is held", what)
		}
		h.answer(h.grant())
		if h.rested != 1 {
			t.Errorf("%s: it does not rest when it is held", what)
		}
		h.pass(handTTL / 2)
		if len(h.renewals) == 0 || h.rested != 1+len(h.renewals) {
			t.Errorf("%s: %d renewals, came to rest %d times", what, len(h.renewals), h.rested)
		}
	}
}

func TestALockRestsAfterItsFirstRenewalIfItWasWaitedFor(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	h.answer(h.queue())
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
	h.in(c)
	if h.rested != 0 {
		t.Error("it rests, and knows who had blocked it")
	}
	h.pass(handTTL / 2)
	if len(h.renewals) == 0 || h.rested == 0 {
		t.Errorf("%d renewals, came to rest %d times", len(h.renewals), h.rested)
	}
}

// What mattered only until the caller had entered is not remembered.
func TestALockRestsHoweverItsOnlyCallerGotIt(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Hour }
	another := func(first *Caller) *Caller {
		c := writer()
		c.Opts = first.Opts // as of callers with the same options
		return c
	}
	for what, enter := range map[string]func(h *hand){
		"before the inbox was confirmed": func(h *hand) {
			h.connects = true
			h.enter(writer())
			h.answer(h.grant())
			h.connects = false
			h.step(h.l.Subscribed)
			h.answer(h.kept(h.l.grant.token)) // the question
		},
		"by the second request, because the first was sent before the inbox was confirmed": func(h *hand) {
			h.connects = true
			h.enter(writer())
			h.answer(h.refused(busysID, 3))
			h.connects = false
			h.step(h.l.Subscribed)
			h.answer(h.queue())
			h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		},
		"from a lease with a span": func(h *hand) {
			h.enter(writer())
			h.answer(h.queue())
			granted := &protocol.Message{Kind: protocol.MessageGranted, ID: h.l.grant.req.ID, Token: h.token(), Clock: h.clock(),
				Link: &protocol.Span{TraceID: [16]byte{1}, SpanID: [8]byte{1}, Flags: 1}}
			h.step(func(now time.Time, fx *Effects) { h.l.Receive(granted, now, fx) })
		},
		"by an acquire whose first copy had no answer": func(h *hand) {
			h.enter(writer())
			h.reply(protocol.Answer{}, errors.New("no answer"), 0)
			h.answer(h.grant())
		},
		"kept idle": func(h *hand) {
			first := h.enter(writer(idle))
			h.answer(h.grant())
			h.leave(first)
			h.enter(another(first))
		},
		"kept idle, without an event log": func(h *hand) {
			first := h.enter(writer(idle))
			h.answer(h.grant())
			h.l.LeaveKept(first, h.now)
			if !h.l.Reenter(another(first), h.now) {
				t.Error("a caller cannot enter at once")
			}
		},
	} {
		h := drive(t)
		enter(h)
		before, answered := h.rested, 0
		for range 12 {
			h.pass(handTTL / 3)
			for ; answered < len(h.renewals); answered++ {
				h.renewed(h.renewals[answered], protocol.Granted)
			}
		}
		if answered == 0 || h.rested == before {
			t.Errorf("%s: %d renewals, and it never comes to rest", what, answered)
		}
	}
}

func TestALockDoesNotRestWhileAnotherCallerWaits(t *testing.T) {
	h := drive(t)
	first := h.enter(writer())
	h.answer(h.grant())
	before := h.rested
	other := writer()
	other.Opts = first.Opts // as of callers with the same options
	second := h.enter(other)
	if h.rested != before {
		t.Error("it rests although another waits")
	}
	h.leave(first)
	h.in(second)
	if h.rested != before+1 {
		t.Error("it does not rest when the last one has it")
	}
}
