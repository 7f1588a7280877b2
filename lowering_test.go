package leased

import (
	"testing"
	"time"
)

func (h *hand) downgrade(c *caller) chan struct{} {
	h.t.Helper()
	done := make(chan struct{})
	h.step(func(now time.Time, fx *effects) { h.l.downgrade(c, done, now, fx) })
	return done
}

func closed(ch chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// The message was faster than the answer to the acquire, so the downgrade cannot
// be sent yet; and its caller leaves before it can.
func TestADowngradeThatWasNeverSentDiesWithItsLease(t *testing.T) {
	a, b := writer(), writer()
	h, req := queueing(t, a)
	h.enter(b)
	h.step(h.l.subscribed)
	h.hears("granted", req.id, h.token())
	h.in(a)
	done := h.downgrade(a)
	h.leave(a)
	if !closed(done) {
		t.Error("Downgrade waits on for a lease that is over")
	}
	h.in(b)
	h.answer(h.queue())
	h.sendsNothing() // b did not ask for it
	if b.mode != exclusive {
		t.Error("another's lease became a reader's")
	}
}

func TestADowngradeUnderWayIsNotTheNextLeases(t *testing.T) {
	for name, a := range map[string]answer{
		"granted":  {outcome: granted, token: uint64(noon.UnixMicro()) + 9, clock: uint64(noon.UnixMicro())},
		"not ours": {outcome: notOurs},
	} {
		t.Run(name, func(t *testing.T) {
			first, next := writer(), writer()
			h := holding(t, first)
			h.enter(next)
			done := h.downgrade(first)
			h.sends(downgrade)
			h.leave(first)
			h.out(next) // which of the two ids owns is not known
			h.answer(a)
			if !closed(done) {
				t.Error("Downgrade waits on")
			}
			if next.mode != exclusive || next.ended != notYet {
				t.Errorf("the next caller is %v, ended %v", next.mode, next.ended)
			}
		})
	}
}

func TestADowngradeKeepsTheGrantUnderAnotherIDAndLetsLocalReadersIn(t *testing.T) {
	a, r, w := writer(), reader(), writer()
	h := holding(t, a)
	old := h.l.grant.req.id
	h.enter(r, w)
	done := h.downgrade(a)
	cmd := h.sends(downgrade)
	if cmd.id != old || cmd.next == old {
		t.Errorf("downgrades %s to %s", cmd.id, cmd.next)
	}
	h.out(r)
	token := h.token() + 5
	h.answer(answer{outcome: granted, token: token, clock: h.clock()})
	h.in(a, r)
	h.out(w)
	if !closed(done) || a.mode != shared || a.token != token || r.token != token {
		t.Errorf("mode %v, tokens %d and %d, want %d", a.mode, a.token, r.token, token)
	}
	place := h.sends(acquire).id // for w, behind them
	h.answer(h.queue())
	h.leave(a)
	h.leave(r)
	if cmd := h.sends(yield); cmd.id == old || cmd.next != place {
		t.Error("lets go under the old id")
	}
	h.cancels()
}

func TestADowngradeWithoutAnswerIsRepeatedUnderTheSameIDsWhileTheLeaseLasts(t *testing.T) {
	c := writer()
	h := holding(t, c).keep()
	done := h.downgrade(c)
	cmd := h.sends(downgrade)
	for range 20 {
		h.reply(answer{}, errSilence, time.Second)
		h.sendsNothing()
		h.pass(time.Second)
		if again := h.sends(downgrade); again.id != cmd.id || again.next != cmd.next {
			t.Errorf("first %s to %s, then %s to %s", cmd.id, cmd.next, again.id, again.next)
		}
	}
	h.reply(answer{}, errSilence, time.Second)
	if closed(done) {
		t.Error("taken for done")
	}
	h.leave(c)
	if !closed(done) {
		t.Error("Downgrade waits on for a lease that is over")
	}
	// A copy that is still under way must not find the old id after the new one was
	// cancelled. Either may own; Unlock waits for both.
	h.cancels(cmd.id)
	old := h.ghosts[0]
	h.cancelled(old)
	if c.settled || old.then == nil || old.then.id != cmd.next {
		t.Fatalf("its Unlock does not wait for the cancel of the other id: %+v", old.then)
	}
	h.cancelled(*old.then)
	h.settled(c, nil)
}

func TestADowngradeOfALostLeaseSaysSo(t *testing.T) {
	c := writer()
	h := holding(t, c)
	done := h.downgrade(c)
	h.answer(answer{outcome: notOurs})
	h.lost(c)
	if !closed(done) || c.mode != exclusive {
		t.Errorf("done %v, mode %v", closed(done), c.mode)
	}
}
