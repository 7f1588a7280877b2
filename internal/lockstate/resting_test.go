package lockstate

import (
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
