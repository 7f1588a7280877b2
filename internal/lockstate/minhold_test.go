package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A minimum hold: what is sent when a caller leaves before it is over.

const handMinHold = time.Minute

func minHold(o *Terms) { o.MinHold = handMinHold }

// leavesEarly returns a lock whose only caller has left 20 s after it came.
func leavesEarly(t testing.TB, c *Caller) *hand {
	t.Helper()
	h := holding(t, c)
	h.keep()
	h.pass(20 * time.Second)
	h.leave(c)
	return h
}

func (h *hand) coolsDown(v protocol.Verb, want time.Duration) protocol.Command {
	h.t.Helper()
	cmd := h.sends(v)
	if cmd.Cooldown != want {
		h.t.Errorf("kept for %v, want %v", cmd.Cooldown, want)
	}
	return cmd
}

func TestWhoLeavesBeforeTheEndOfItsMinimumHoldHasTheRestKeptByRedis(t *testing.T) {
	for _, idle := range []time.Duration{0, time.Hour} {
		a := writer(minHold, func(o *Terms) { o.IdleHold = idle })
		h := leavesEarly(t, a)
		h.coolsDown(protocol.Release, handMinHold-20*time.Second)
		b := writer()
		h.enter(b)
		h.out(b)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.settled(a, nil)
		h.out(b)
		h.sends(protocol.Acquire)
	}
}

func TestWhoWaitsInTheProcessIsQueuedForTheEndOfAMinimumHold(t *testing.T) {
	a, b := writer(minHold, func(o *Terms) { o.Handoffs, o.Tenure = 1000, time.Hour }), writer()
	h := holding(t, a)
	h.enter(b)
	h.leave(a)
	h.coolsDown(protocol.Yield, handMinHold)
	h.out(b)
	left := h.queue()
	left.Left = 30 * time.Millisecond
	h.answer(left)
	h.settled(a, nil)
	h.out(b)
	h.pass(30 * time.Millisecond)
	h.sendsNothing()
	h.pass(AfterExpiry)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(b)
	h.leave(b)
	h.coolsDown(protocol.Release, 0)
}

func TestAMinimumHoldThatIsOverKeepsNobodyOut(t *testing.T) {
	a, b := writer(minHold, func(o *Terms) { o.Tenure = time.Hour }), writer()
	h := holding(t, a)
	h.keep()
	h.pass(handMinHold)
	h.enter(b)
	h.leave(a)
	h.in(b)
	h.leave(b)
	h.coolsDown(protocol.Release, 0)
}

func TestTheNextCallerHasItsOwnMinimumHold(t *testing.T) {
	a, b := writer(func(o *Terms) { o.Tenure = time.Hour }), writer(minHold)
	h := holding(t, a)
	h.enter(b)
	h.pass(5 * time.Second)
	h.leave(a)
	h.in(b)
	h.pass(time.Second)
	h.leave(b)
	h.coolsDown(protocol.Release, handMinHold-time.Second)
}

func TestAReleaseWithoutAnswerIsCanceledWithTheRestOfTheMinimumHold(t *testing.T) {
	for _, waits := range []bool{false, true} {
		a := writer(minHold)
		h := holding(t, a)
		if waits {
			h.enter(writer())
		}
		h.leave(a)
		h.reply(protocol.Answer{}, errSilence, time.Second)
		for _, d := range []time.Duration{0, 10 * time.Second, handMinHold, 2 * handMinHold} {
			if got := h.unwanted[0].Cooldown(h.now.Add(d)); got != max(0, handMinHold-d) {
				t.Errorf("after %v kept for %v", d, got)
			}
		}
	}
}

func TestWhoDoesNotTakeTheLockHasNoMinimumHold(t *testing.T) {
	a := writer(minHold)
	h := holding(t, a)
	h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(a, now, fx) })
	h.coolsDown(protocol.Release, 0)
}

func TestWhoDoesNotTakeTheLockHasNoMinimumHoldThoughItsLeaseWasLostMeanwhile(t *testing.T) {
	a := writer(minHold)
	h := holding(t, a)
	h.pass(handTTL)
	h.lost(a)
	h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(a, now, fx) })
	if len(h.unwanted) != 1 || h.unwanted[0].Cooldown(h.now) != 0 {
		t.Errorf("canceled: %+v", h.unwanted)
	}
}

func TestALeaseThatWasNotProvedInTimeIsCanceledWithTheRestOfItsMinimumHold(t *testing.T) {
	a := writer(minHold)
	h := holding(t, a)
	h.pass(handTTL)
	h.lost(a)
	h.leave(a)
	if got := h.unwanted[0].Cooldown(h.now); got != handMinHold-handTTL {
		t.Errorf("kept for %v", got)
	}
}

func TestNobodyEntersAfterAMinimumHoldWhileACommandIsInFlight(t *testing.T) {
	a, b := writer(minHold), writer()
	h := drive(t)
	h.connects = true
	h.enter(a)
	h.answer(h.grant())
	h.in(a)
	h.connects = false
	h.step(h.l.Subscribed) // whether it is wanted is asked for
	h.sends(protocol.Acquire)
	h.leave(a)
	h.enter(b)
	h.out(b)
	h.answer(h.kept(h.top))
	h.out(b)
	h.coolsDown(protocol.Yield, handMinHold)
	h.answer(h.queue())
	h.settled(a, nil)
}

func TestADowngradeEndsTheMinimumHoldOnceItIsDone(t *testing.T) {
	a := writer(minHold)
	h := holding(t, a)
	h.step(func(now time.Time, fx *Effects) { h.l.Downgrade(a, make(chan struct{}), now, fx) })
	cmd := h.sends(protocol.Downgrade)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.leave(a) // it is not known which id owns
	h.cancels(cmd.ID)
	if first := h.unwanted[0]; first.Cooldown(h.now) != handMinHold || first.Then.ID != cmd.Next || first.Then.Cooldown(h.now) != 0 {
		t.Errorf("kept for %v, and %v", first.Cooldown(h.now), first.Then.Cooldown(h.now))
	}

	b := writer(minHold)
	h = holding(t, b)
	h.step(func(now time.Time, fx *Effects) { h.l.Downgrade(b, make(chan struct{}), now, fx) })
	h.sends(protocol.Downgrade)
	h.answer(h.grant())
	h.leave(b)
	h.coolsDown(protocol.Release, 0)
}

func TestAReaderHasNoMinimumHold(t *testing.T) {
	h := leavesEarly(t, reader(minHold))
	h.coolsDown(protocol.Release, 0)
}
