package leased

import (
	"testing"
	"time"
)

// Ends that come with time: maximum and idle holds, collected leases.

func TestAMaximumHoldEndsTheLeaseAndRenewalOnceNoOtherLeaseIsWithinItsOwn(t *testing.T) {
	bound := func(d time.Duration) func(*lockOptions) { return func(o *lockOptions) { o.maxHold = d } }
	short, long, free := reader(bound(time.Minute)), reader(bound(2*time.Minute)), reader()
	h := drive(t).keep()
	h.enter(short, long)
	h.answer(h.grant())
	h.enter(free)
	h.in(short, long, free)

	h.pass(time.Minute - 1)
	h.lost()
	h.pass(1)
	h.lost(short)
	h.pass(time.Minute - 1)
	h.lost(short)
	h.pass(1)
	h.lost(short, long)
	h.pass(time.Hour)
	h.lost(short, long) // the third has no maximum
	n := len(h.renewals)
	h.leave(free)
	h.settled(free, nil)
	h.pass(handTTL)
	if len(h.renewals) != n {
		t.Error("renewed for leases that are over")
	}
	h.leave(short)
	h.leave(long)
	h.settled(long, ErrLeaseLost)
	h.lost(short, long)
}

func TestTheNextLeaseIsRenewedAfterAMaximumHold(t *testing.T) {
	a, b := writer(func(o *lockOptions) { o.maxHold = time.Minute }), writer()
	h := holding(t, a).keep()
	h.enter(b)
	h.pass(time.Minute + time.Second)
	h.lost(a)
	h.leave(a)
	h.sends(yield) // the tenure was long
	h.answer(h.grant())
	h.in(b)
	n := len(h.renewals)
	h.pass(time.Hour)
	h.lost(a)
	if len(h.renewals) == n {
		t.Error("the next lease is not renewed")
	}
}

func TestACollectedLeaseIsNotRenewedAndEndsWithItsWindow(t *testing.T) {
	c := writer()
	h := holding(t, c).keep()
	h.pass(time.Hour)
	h.lost()
	if !h.l.abandoned(c) {
		t.Error("the lease was not taken for abandoned")
	}
	if h.l.abandoned(c) {
		t.Error("abandoned twice")
	}
	n := len(h.renewals)
	h.pass(handTTL)
	if len(h.renewals) != n {
		t.Error("an abandoned lease is renewed")
	}
	h.lost(c)
}

func TestAnIdleGrantIsKeptForItsTimeAndGivenUpAtTheFirstWish(t *testing.T) {
	idle := func(o *lockOptions) { o.idleHold = time.Minute }
	t.Run("its time", func(t *testing.T) {
		a, b := writer(idle), writer(idle)
		h := holding(t, a).keep()
		h.leave(a)
		h.settled(a, nil)
		h.pass(time.Minute - 1)
		h.sendsNothing()
		h.enter(b)
		h.in(b)
		if b.via != viaIdle {
			t.Errorf("came %v", b.via)
		}
		h.leave(b)
		h.pass(time.Minute - 1)
		h.sendsNothing()
		h.pass(1)
		h.sends(release)
	})
	t.Run("a wish", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.leave(a)
		h.hears("wanted", h.l.grant.req.id, 0)
		h.sends(release)
	})
	t.Run("a wish before", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.hears("wanted", h.l.grant.req.id, 0)
		h.leave(a)
		h.sends(release)
	})
	t.Run("no renewal confirmed", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.leave(a)
		h.pass(handWindow - 1)
		h.sendsNothing()
		h.pass(1)
		h.sends(release)
		h.lost()
	})
	t.Run("another mode", func(t *testing.T) {
		a, b := writer(idle), reader()
		h := holding(t, a)
		h.leave(a)
		h.enter(b)
		h.out(b)
		h.sends(yield)
		h.answer(h.grant())
		h.in(b)
	})
}

// Whoever came last, and whichever ends first.
func TestEachMaximumHoldEndsItsOwnLease(t *testing.T) {
	bound := func(d time.Duration) func(*lockOptions) { return func(o *lockOptions) { o.maxHold = d } }
	for _, order := range [][]time.Duration{{1, 2, 3}, {3, 2, 1}, {2, 3, 1}, {3, 1, 2}, {1, 3, 2}} {
		h := drive(t).keep()
		byEnd := make([]*caller, 4)
		for i, m := range order {
			c := reader(bound(m * time.Minute))
			h.enter(c)
			if i == 0 {
				h.answer(h.grant())
			}
			h.in(c)
			byEnd[m] = c
		}
		for m := 1; m <= 3; m++ {
			h.pass(time.Minute - 1)
			h.lost(byEnd[1:m]...)
			h.pass(1)
			h.lost(byEnd[1 : m+1]...)
		}
	}
}

// A tenure begins when an idle grant is used again, whatever was given out before.
func TestAnIdleGrantThatIsUsedAgainGivesOutAllLeasesOfATenure(t *testing.T) {
	own := func(o *lockOptions) { o.idleHold, o.handoffs, o.tenure = time.Minute, 3, time.Hour }
	h := holding(t, writer(own)).keep()
	c := h.l.inside.first
	for range 5 { // nobody wants it so far
		next := writer(own)
		h.enter(next)
		h.leave(c)
		h.in(next)
		c = next
	}
	h.leave(c)
	h.pass(time.Second)
	cs := []*caller{writer(own), writer(own), writer(own), writer(own)}
	h.enter(cs...)
	h.in(cs[0])
	h.hears("wanted", h.l.grant.req.id, 0)
	for i := range 2 {
		h.leave(cs[i])
		h.in(cs[i+1])
	}
	h.leave(cs[2])
	h.out(cs[3])
	h.sends(yield)
}
