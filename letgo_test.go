package leased

import (
	"testing"
	"time"
)

// Release and yield: what their answers, or none, lead to.

// yielding returns a lock that gave the lock away with a caller waiting.
func yielding(t testing.TB) (h *hand, a, b *caller, cmd command) {
	t.Helper()
	a, b = writer(), writer()
	h = holding(t, a)
	h.hears("wanted", h.l.grant.req.id, 0)
	h.enter(b)
	h.pass(20 * time.Millisecond) // over the tenure
	h.leave(a)
	cmd = h.sends(yield)
	if cmd.next == cmd.id || cmd.next == "" {
		t.Fatalf("waits under %q after %q", cmd.next, cmd.id)
	}
	if a.settled {
		t.Fatal("settled although the lock is not given back")
	}
	return h, a, b, cmd
}

func TestAMessageMayOvertakeTheAnswerToAYield(t *testing.T) {
	h, a, b, cmd := yielding(t)
	sent := h.now
	h.pass(time.Second)
	h.hears("granted", cmd.next, h.token())
	h.in(b)
	h.trust(sent.Sub(noon) + handWindow)
	h.answer(h.queue())
	h.in(b)
	h.settled(a, nil)
	h.cancels()
	h.leave(b)
	if again := h.sends(release); again.id != cmd.next {
		t.Errorf("releases %s, not %s", again.id, cmd.next)
	}
}

func TestAMessageThatOvertookTheAnswerToAYieldTooLateIsNotBelieved(t *testing.T) {
	h, _, b, cmd := yielding(t)
	h.pass(handWindow)
	h.hears("granted", cmd.next, h.token())
	h.out(b)
	h.answer(h.queue())
	h.out(b)
	h.cancels()
	if again := h.sends(acquire); again.id != cmd.next { // no other message will come
		t.Errorf("asks as %s, not as %s", again.id, cmd.next)
	}
}

func TestAYieldWithoutAnswerHasTheOldCancelledAndTheNewAskedFor(t *testing.T) {
	h, a, b, cmd := yielding(t)
	h.reply(answer{}, errSilence, time.Second)
	h.out(b)
	h.cancels(cmd.id)
	if until := h.ghosts[0].until; until.Sub(h.now) != handTTL {
		t.Errorf("cancelled for %v, late copies may arrive for %v", until.Sub(h.now), handTTL)
	}
	if len(h.ghosts[0].gone) != 1 || h.ghosts[0].gone[0] != a || a.settled {
		t.Error("the cancel will not tell who left")
	}
	h.sendsNothing()
	h.pass(time.Second)
	if again := h.sends(acquire); again.id != cmd.next {
		t.Errorf("asks as %s, not as %s", again.id, cmd.next)
	}
	h.answer(h.grant())
	h.in(b)
}

func TestAYieldOfALostGrantTellsTheLossAndAsksAnew(t *testing.T) {
	h, a, b, cmd := yielding(t)
	h.answer(answer{outcome: notOurs})
	h.settled(a, ErrLeaseLost)
	h.lost(a)
	h.cancels()
	if again := h.sends(acquire); again.id == cmd.id || again.id == cmd.next {
		t.Errorf("asks under a used id, %s", again.id)
	}
	h.answer(h.grant())
	h.in(b)
}

func TestAReleaseWithoutAnswerIsFollowedByCancelWithTheLastToken(t *testing.T) {
	a, b := writer(), writer()
	h := holding(t, a)
	id := h.l.grant.req.id
	h.enter(b)
	h.leave(a)
	h.in(b) // a token of its own
	h.leave(b)
	cmd := h.sends(release)
	h.reply(answer{}, errSilence, time.Second)
	h.cancels(id)
	if got := h.ghosts[0].last; got != b.token || cmd.last != b.token {
		t.Errorf("release tells of token %d, cancel of %d, the last was %d", cmd.last, got, b.token)
	}
	if until := h.ghosts[0].until; until.Sub(h.now) != handTTL {
		t.Errorf("cancelled for %v, late copies may arrive for %v", until.Sub(h.now), handTTL)
	}
	h.settled(a, nil)
	if b.settled {
		t.Error("settled before anybody knows")
	}
	h.state(none)
	if !h.l.idle() {
		t.Error("the lock is kept for what the reaper has")
	}
}

func TestAReleaseOfALostGrantTellsTheLoss(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.leave(c)
	h.answer(answer{outcome: notOurs})
	h.settled(c, ErrLeaseLost)
	h.lost(c)
	h.cancels()
}

// It left while another command was under way, so the release was still to come.
func TestALossBeforeTheReleaseWasSentIsToldToWhoLeft(t *testing.T) {
	t.Run("evicted", func(t *testing.T) {
		h := drive(t)
		c := h.enter(writer())
		id := h.sends(acquire).id
		h.hears("granted", id, h.token())
		h.leave(c)
		h.hears("revoked", id, h.top)
		h.settled(c, ErrLeaseLost)
		h.lost(c)
	})
	t.Run("not ours at the downgrade", func(t *testing.T) {
		c := writer()
		h := holding(t, c)
		h.downgrade(c)
		h.leave(c)
		h.answer(answer{outcome: notOurs})
		h.settled(c, ErrLeaseLost)
		h.lost(c)
	})
}

func TestALossWhileARecheckIsUnderWayCancelsWhatItBrings(t *testing.T) {
	for name, a := range map[string]func(h *hand) answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			x, y := writer(), writer()
			h, req := queueing(t, x)
			h.step(h.l.subscribed)
			h.hears("granted", req.id, h.token())
			h.enter(y)
			h.hears("revoked", req.id, h.top)
			h.lost(x)
			h.leave(x)
			h.out(y) // one command at a time
			h.answer(a(h))
			h.cancels(req.id)
			if again := h.sends(acquire); again.id == req.id {
				t.Error("asks under the id that was lost")
			}
			h.answer(h.grant())
			h.in(y)
		})
	}
}
