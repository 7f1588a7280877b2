package leased

import (
	"testing"
	"time"
)

// While a held grant is asked about, as by a re-check that a message overtook, the
// server may have lost it and given the lock to another process in between. What it
// answers then is about a new grant, or a new place in the queue.

func TestAGrantThatWasGivenAnewIsLost(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed) // the re-check is under way
	h.hears("granted", req.id, h.token())
	h.in(c)
	h.answer(answer{outcome: granted, token: h.token() + 1, clock: h.clock()})
	lostGrantOf(t, c)
	h.cancels(req.id)
}

func TestAGrantThatIsAnsweredQueuedLaterIsLost(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	token := h.token()
	h.hears("granted", req.id, token)
	h.in(c)
	h.answer(answer{outcome: enqueued, token: token + 1, clock: h.clock(), left: handTTL, blocker: "another"})
	lostGrantOf(t, c)
	h.cancels(req.id)
}

func TestAMessageOfALaterGrantEndsTheOneBefore(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	token := h.token()
	h.answer(answer{outcome: granted, token: token, clock: h.clock()})
	h.in(c)
	h.hears("granted", req.id, token+1)
	lostGrantOf(t, c)
	h.cancels(req.id)
}

func TestAGrantThatWasExtendedOrTakenForWaitingBeforeIsKept(t *testing.T) {
	for name, a := range map[string]func(h *hand, token uint64) answer{
		"extended, the lock's last token being greater": func(h *hand, token uint64) answer {
			return answer{outcome: granted, token: token + 9, clock: h.clock(), extended: true}
		},
		"granted before, to be lost and granted again": func(h *hand, token uint64) answer {
			return answer{outcome: granted, token: token - 1, clock: h.clock()}
		},
		"queued before it was granted": func(h *hand, token uint64) answer {
			return answer{outcome: enqueued, token: token - 1, clock: h.clock(), left: handTTL, blocker: "another"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := writer()
			h, req := queueing(t, c)
			h.step(h.l.subscribed)
			token := h.token()
			h.hears("granted", req.id, token)
			h.in(c)
			h.answer(a(h, token))
			h.cancels()
			if !h.l.holds(req.id) || c.ended != notYet {
				t.Error("it was given up")
			}
		})
	}
}

func lostGrantOf(t *testing.T, c *caller) {
	t.Helper()
	if c.ended != byLoss {
		t.Error("who is inside was not told")
	}
}

func TestAcquireSaysWhetherItExtended(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, id := range []string{s.writer("A"), s.reader("A")} {
			if a := s.acquire(id); a.outcome != granted || a.extended {
				t.Errorf("at first: %+v", a)
			}
			if a := s.acquire(id); a.outcome != granted || !a.extended {
				t.Errorf("of the owner: %+v", a)
			}
			s.is(s.release(id, 0), done)
		}
	})
}

func TestAReleaseProvesNothingWhileAnAcquireOfItsGrantHadNoAnswer(t *testing.T) {
	for name, token := range map[string]uint64{"and another had the lock": 1, "and nobody had": 0} {
		t.Run(name, func(t *testing.T) {
			c := writer()
			h, req := queueing(t, c)
			h.step(h.l.subscribed)
			h.hears("granted", req.id, h.token())
			h.in(c)
			h.reply(answer{}, errSilence, 0) // it may have run, and may run yet
			h.leave(c)
			h.sends(release)
			h.answer(answer{outcome: done})
			if c.settled {
				t.Fatal("Unlock said how it went before that was known")
			}
			var s cancelSchedule
			for i := range h.ghosts {
				g := h.ghosts[i]
				s.add(&g, h.now)
				r := s.answered(s.take(h.now)[0], cancelled{token: c.token + token}, h.now)
				h.step(func(now time.Time, fx *effects) { h.l.cancelled(&r, now, fx) })
			}
			if lost := c.err != nil; !c.settled || lost != (token > 0) {
				t.Errorf("settled %v: %v", c.settled, c.err)
			}
		})
	}
}
