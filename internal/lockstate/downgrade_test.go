package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

func (h *hand) downgrade(c *Caller) chan struct{} {
	h.t.Helper()
	done := make(chan struct{})
	h.step(func(now time.Time, fx *Effects) { h.l.Downgrade(c, done, now, fx) })
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
	h, _ := overtaken(t, a)
	h.enter(b)
	done := h.downgrade(a)
	h.leave(a)
	if !closed(done) {
		t.Error("Downgrade waits on for a lease that is over")
	}
	h.in(b)
	h.answer(h.queue())
	h.sendsNothing() // b did not ask for it
	if b.Mode != protocol.Exclusive {
		t.Error("another's lease became a reader's")
	}
}

func TestADowngradeUnderWayIsNotTheNextLeases(t *testing.T) {
	for name, a := range map[string]protocol.Answer{
		"granted":  {Outcome: protocol.Granted, Token: uint64(noon.UnixMicro()) + 9, Clock: uint64(noon.UnixMicro())},
		"not ours": {Outcome: protocol.NotOurs},
	} {
		t.Run(name, func(t *testing.T) {
			first, next := writer(), writer()
			h := holding(t, first)
			h.enter(next)
			done := h.downgrade(first)
			h.sends(protocol.Downgrade)
			h.leave(first)
			h.out(next) // which of the two ids owns is not known
			h.answer(a)
			if !closed(done) {
				t.Error("Downgrade waits on")
			}
			if next.Mode != protocol.Exclusive || next.Ended != NotYet {
				t.Errorf("the next caller is %v, ended %v", next.Mode, next.Ended)
			}
		})
	}
}

func TestADowngradeKeepsTheGrantUnderAnotherIDAndLetsLocalReadersIn(t *testing.T) {
	a, r, w := writer(), reader(), writer()
	h := holding(t, a)
	old := h.l.grant.req.ID
	h.enter(r, w)
	done := h.downgrade(a)
	cmd := h.sends(protocol.Downgrade)
	if cmd.ID != old || cmd.Next == old {
		t.Errorf("downgrades %s to %s", cmd.ID, cmd.Next)
	}
	h.out(r)
	token := h.token() + 5
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: h.clock()})
	h.in(a, r)
	h.out(w)
	if !closed(done) || a.Mode != protocol.Shared || a.Token != token || r.Token != token {
		t.Errorf("mode %v, tokens %d and %d, want %d", a.Mode, a.Token, r.Token, token)
	}
	place := h.sends(protocol.Acquire).ID // for w, behind them
	h.answer(h.queue())
	h.leave(a)
	h.leave(r)
	if cmd := h.sends(protocol.Yield); cmd.ID == old || cmd.Next != place {
		t.Error("lets go under the old id")
	}
	h.cancels()
}

func TestADowngradeWithoutAnswerIsRepeatedUnderTheSameIDsWhileTheLeaseLasts(t *testing.T) {
	c := writer()
	h := holding(t, c).keep()
	done := h.downgrade(c)
	cmd := h.sends(protocol.Downgrade)
	for range 20 {
		h.reply(protocol.Answer{}, errSilence, time.Second)
		h.sendsNothing()
		h.pass(time.Second)
		if again := h.sends(protocol.Downgrade); again.ID != cmd.ID || again.Next != cmd.Next {
			t.Errorf("first %s to %s, then %s to %s", cmd.ID, cmd.Next, again.ID, again.Next)
		}
	}
	h.reply(protocol.Answer{}, errSilence, time.Second)
	if closed(done) {
		t.Error("taken for done")
	}
	h.leave(c)
	if !closed(done) {
		t.Error("Downgrade waits on for a lease that is over")
	}
	// A copy that is still under way must not find the old id after the new one was
	// canceled. Either may own; Unlock waits for both.
	h.cancels(cmd.ID)
	old := h.unwanted[0]
	h.canceled(old)
	if c.Settled || old.Then == nil || old.Then.ID != cmd.Next {
		t.Fatalf("its Unlock does not wait for the cancel of the other id: %+v", old.Then)
	}
	h.canceled(*old.Then)
	h.settled(c, nil)
}

// Either may own by the time that the lease is lost for want of a proof. Its caller may go on
// using what the lock protects until its Unlock, so neither is canceled before.
func TestBothIDsOfADowngradeWithoutAnswerAreCanceledWhenItsLostLeaseIsUnlocked(t *testing.T) {
	c := writer()
	h := holding(t, c)
	done := h.downgrade(c)
	cmd := h.sends(protocol.Downgrade)
	h.reply(protocol.Answer{}, errSilence, time.Minute)
	h.pass(handWindow)
	h.lost(c)
	if !closed(done) {
		t.Error("Downgrade waits on for a lease that is over")
	}
	h.cancels()
	h.leave(c)
	h.cancels(cmd.Next, cmd.ID)
	for _, g := range h.unwanted {
		if until := g.until.Sub(h.now); until != handTTL {
			t.Errorf("%s is canceled for %v, late copies may arrive for %v", g.ID, until, handTTL)
		}
	}
}

// It would extend the grant, which only its lease still needs.
func TestADowngradeIsNotRepeatedAfterTheMaximumHold(t *testing.T) {
	c := writer(func(o *Terms) { o.MaxHold = 5 * time.Second })
	h := holding(t, c)
	done := h.downgrade(c)
	h.sends(protocol.Downgrade)
	h.pass(4 * time.Second)
	h.reply(protocol.Answer{}, errSilence, 2*time.Second)
	h.pass(time.Second)
	h.lost(c)
	if !closed(done) {
		t.Error("Downgrade waits on")
	}
	h.pass(2 * time.Second)
	h.step(h.l.Subscribed)
	h.sendsNothing()
	if due := h.due(); !due.IsZero() && !due.After(h.now) {
		t.Errorf("the lock is due at once, again and again")
	}
}

// The answer comes after the maximum hold. The caller has been told that its lease has ended, and is still
// inside as the writer that it was.
func TestADowngradeThatIsAnsweredAfterTheMaximumHoldLetsNoReaderIn(t *testing.T) {
	c := writer(func(o *Terms) { o.MaxHold = 5 * time.Second })
	h := holding(t, c)
	h.pass(4 * time.Second)
	done := h.downgrade(c)
	next := h.sends(protocol.Downgrade).Next
	r := h.enter(reader())
	h.pass(time.Second)
	h.lost(c)
	if !closed(done) {
		t.Error("Downgrade waits on")
	}
	old, answer := h.l.grant.req.ID, h.grant()
	answer.Unfinished = true
	h.answer(answer)
	h.out(r)
	if c.Mode != protocol.Exclusive {
		t.Error("it has become a reader")
	}
	h.cancels(old) // which lets more of those in that wait
	h.leave(c)
	h.cancels(old, next)
}

func TestADowngradeOfALostLeaseSaysSo(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	done := h.downgrade(c)
	next := h.flight.Next
	h.answer(protocol.Answer{Outcome: protocol.NotOurs})
	h.lost(c)
	h.cancels(id, next) // the first may be back in the queue, and an earlier try may have made the other a reader
	if !closed(done) || c.Mode != protocol.Exclusive {
		t.Errorf("done %v, mode %v", closed(done), c.Mode)
	}
}

// It holds the grant until its Unlock, and nobody need wait for that.
func TestADowngradeAfterTheMaximumHoldSaysSo(t *testing.T) {
	c := writer(func(o *Terms) { o.MaxHold = time.Second })
	h := holding(t, c)
	h.pass(time.Second)
	h.lost(c)
	if !closed(h.downgrade(c)) {
		t.Error("it is waited for")
	}
	h.sendsNothing()
}

func TestADowngradeTellsTheLastToken(t *testing.T) {
	a, b := writer(), writer()
	h := holding(t, a)
	h.enter(b)
	h.leave(a)
	h.in(b)
	h.downgrade(b)
	if cmd := h.sends(protocol.Downgrade); cmd.Last != b.Token || b.Token == 0 {
		t.Errorf("tells of token %d, the last was %d", cmd.Last, b.Token)
	}
}

func TestAnUnlockDuringADowngradeWithoutAnswerIsNoLoss(t *testing.T) {
	c := writer()
	h := holding(t, c)
	done := h.downgrade(c)
	cmd := h.sends(protocol.Downgrade)
	h.leave(c)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.lost()
	h.cancels(cmd.ID)
	if then := h.unwanted[0].Then; then == nil || then.ID != cmd.Next || c.Settled || !closed(done) {
		t.Errorf("canceled with %+v, settled %v, done %v", then, c.Settled, closed(done))
	}
}

func TestAnEvictionOfAnotherIDEndsNoLeaseThatIsBeingDowngraded(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.downgrade(c)
	h.hears(protocol.MessageRevoked, h.NewRequest(protocol.Shared, handTTL, false, protocol.Origin{}).ID, h.top)
	h.in(c)
	h.lost()
}

// The answer may be older than the message, and does not say that others wait then.
func TestADowngradesNewIDIsWantedAfterItsAnswerToo(t *testing.T) {
	a := writer()
	h := holding(t, a)
	h.downgrade(a)
	id := h.sends(protocol.Downgrade).Next
	h.hears(protocol.MessageWanted, id, 0)
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: h.token() + 5, Clock: h.clock()})
	h.in(a)
	if !h.l.Contended() {
		t.Error("it is forgotten that the lock is wanted")
	}
}

// The new id may own already, so messages about it are about the grant.
func TestADowngradesNewIDIsHeededBeforeItsAnswer(t *testing.T) {
	a := writer()
	h := holding(t, a)
	h.downgrade(a)
	id := h.sends(protocol.Downgrade).Next
	h.hears(protocol.MessageWanted, id, 0)
	h.cancels()
	if !h.l.Contended() {
		t.Error("a message that the new id is wanted is ignored")
	}
	h.hears(protocol.MessageRevoked, id, h.token())
	h.lost(a)
}

// A downgrade without an answer may have been carried out by the time that the grant turns out to
// have been another's.
func TestADowngradeOfALeaseThatIsGrantedAnewLeavesNothing(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.downgrade(c)
	cmd := h.sends(protocol.Downgrade)
	h.reply(protocol.Answer{}, errSilence, time.Minute)
	h.hears(protocol.MessageGranted, id, h.top+1)
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top + 1))
	h.lost(c)
	h.leave(c)
	h.cancels(id, cmd.Next)
}
