package leased

import (
	"testing"
	"time"
)

// What Redis gives an id a second time, it has taken from it in between.

func TestAGrantThatIsAnsweredAnewWasLost(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed) // a re-check is under way
	first := h.token()
	h.hears("granted", req.id, first)
	h.in(c)
	h.answer(answer{outcome: granted, token: h.top + 1, clock: h.clock()})
	h.lost(c)
	h.leave(c)
	h.cancels(req.id)
}

func TestAGrantThatIsToldAnewWasLost(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(acquire).id
	h.answer(h.grant())
	h.in(c)
	h.hears("granted", id, h.top+1)
	h.in(c)
	if cmd := h.sends(acquire); cmd.id != id {
		t.Fatalf("asks about %s", cmd.id)
	}
	h.answer(answer{outcome: granted, token: h.top + 1, clock: h.clock(), kept: true})
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

func TestAGrantThatIsFalselyToldAnewGoesOn(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(acquire).id
	h.answer(h.grant())
	h.hears("granted", id, h.top+1)
	h.sends(acquire)
	h.answer(answer{outcome: granted, token: h.top, clock: h.clock(), kept: true})
	h.in(c)
	h.state(held)
	h.cancels()
}

func TestAReadersGrantThatIsToldAnewWasLost(t *testing.T) {
	c := reader()
	h := drive(t)
	h.enter(c)
	id := h.sends(acquire).id
	h.answer(h.grant())
	h.hears("granted", id, h.top+1)
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

func TestAnOwnerThatIsAnsweredThatItWaitsLostItsGrant(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	h.hears("granted", req.id, h.token())
	h.in(c)
	a := h.queue()
	a.token = h.top + 1 // another's, since
	h.answer(a)
	h.lost(c)
	h.leave(c)
	h.cancels(req.id)
}

func TestAGrantThatIsExtendedGoesOn(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	h.hears("granted", req.id, h.token())
	h.pass(time.Millisecond)
	h.answer(answer{outcome: granted, token: h.top, clock: h.clock(), kept: true})
	h.in(c)
	h.state(held)
	h.cancels()
}

// A key that was evicted, or deleted by hand, says nothing of the lock.
func TestAGrantWhoseTokenWasForgottenGoesOn(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	h.hears("granted", req.id, h.token())
	h.answer(answer{outcome: granted, token: h.top + 1, clock: h.clock(), kept: true, forgot: true})
	h.in(c)
	h.state(held)
	h.cancels()
}

func TestAReadersGrantThatIsExtendedGoesOn(t *testing.T) {
	c := reader()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	h.hears("granted", req.id, h.token())
	h.answer(answer{outcome: granted, token: h.top + 1, clock: h.clock(), kept: true}) // another reader's
	h.in(c)
	h.state(held)
	h.cancels()
}

func TestAGrantThatIsToldAnewWhileItIsLetGoWasLost(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(acquire).id
	h.answer(h.grant())
	h.leave(c)
	h.sends(release)
	h.hears("granted", id, h.top+1) // by a late acquire: another was inside before
	h.answer(answer{outcome: done})
	h.lost(c)
	h.settled(c, ErrLeaseLost)
}

// One command at a time, also where a lowering grant is asked about when its lease ends.
func TestAGrantThatIsAskedAboutWhileItIsLoweredSendsNothingBesides(t *testing.T) {
	c := writer()
	h := drive(t)
	h.connects = true // so it asks once whether it is wanted
	h.enter(c)
	id := h.sends(acquire).id
	h.answer(h.grant())
	h.step(func(now time.Time, fx *effects) { h.l.downgrade(c, make(chan struct{}), now, fx) })
	next := h.sends(downgrade).next
	h.reply(answer{}, errSilence, time.Second)
	h.connects = false
	h.step(h.l.subscribed)
	h.sends(acquire)
	h.leave(c)
	h.enter(writer())
	if cmd := h.sends(acquire); cmd.id != id {
		t.Errorf("asks about %s", cmd.id)
	}
	h.answer(answer{outcome: granted, token: h.top, clock: h.clock(), kept: true})
	if cmd := h.sends(acquire); cmd.id == id || cmd.id == next {
		t.Errorf("asks about %s", cmd.id)
	}
}
