package leased

import (
	"testing"
	"time"
)

// A writer behind readers of its own process.

// reserving returns a lock with r inside, and w waiting with a place in the queue.
func reserving(t *testing.T, r, w *caller) (h *hand, place string) {
	t.Helper()
	h = holding(t, r)
	h.enter(w)
	place = h.sends(acquire).id
	h.answer(h.queue())
	h.out(w)
	h.sendsNothing()
	return h, place
}

func TestAWriterBehindReadersOfItsProcessHasItsPlaceAtOnceAndTheYieldKeepsIt(t *testing.T) {
	r, w := reader(), writer()
	h := holding(t, r)
	h.enter(w)
	cmd := h.sends(acquire)
	if !cmd.wait || cmd.check || cmd.id == h.l.grant.req.id || cmd.own != h.l.grant.req.id || cmd.ttl != handTTL {
		t.Errorf("asks for its place with %+v", cmd)
	}
	h.answer(h.queue())
	h.leave(r)
	if y := h.sends(yield); y.next != cmd.id || y.id != h.l.grant.req.id {
		t.Errorf("yields %s to %s, the place is %s", y.id, y.next, cmd.id)
	}
	h.answer(h.queue())
	h.settled(r, nil)
	h.out(w)
	h.hears("granted", cmd.id, h.token())
	h.in(w)
	h.cancels()
}

func TestOnlyAWriterAtTheHeadWhoWaitsAsksForAPlace(t *testing.T) {
	h := holding(t, reader())
	h.turned(h.enter(trying(writer())), ErrLocked)
	h.sendsNothing()
	h.hears("wanted", h.l.grant.req.id, 0)
	first := h.enter(reader())
	h.enter(writer())
	h.out(first)
	h.sendsNothing()
	h.abandon(first)
	h.sends(acquire)
	h.enter(writer())
	h.answer(h.queue())
	h.sendsNothing()
}

func TestAWriterBehindReadersThatEnterNowAsksForItsPlaceAtOnce(t *testing.T) {
	for name, a := range map[string]*caller{"by grant": reader(), "by downgrade": writer()} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h := drive(t)
			h.enter(a, r, w)
			h.answer(h.grant())
			if a.mode == exclusive {
				h.downgrade(a)
				h.answer(h.grant())
			}
			h.in(a, r)
			h.sends(acquire)
			h.answer(h.queue())
			h.leave(a)
			h.sendsNothing()
			h.leave(r)
			h.sends(yield)
		})
	}
}

func TestAReservedPlaceIsAskedForAgainBeforeItsWaitingLeaseEnds(t *testing.T) {
	for ttl, pace := range map[time.Duration]time.Duration{
		900 * time.Millisecond: 300 * time.Millisecond,
		time.Hour:              longestPoll,
	} {
		for _, polling := range []bool{false, true} {
			h := holding(t, reader()).keep()
			h.polling = polling
			h.enter(writer(func(o *lockOptions) { o.ttl = ttl }))
			id := h.sends(acquire).id
			for _, luck := range []float64{0, 0.5, 0.999} {
				h.luck = luck
				a := h.queue()
				a.left = 0 // that of our own readers, who are renewed
				h.answer(a)
				h.pass(pace - time.Duration(float64(pace)/3*luck) - 1)
				h.sendsNothing()
				h.pass(1)
				if cmd := h.sends(acquire); cmd.id != id || !cmd.check || !cmd.wait || cmd.own != h.l.grant.req.id || cmd.ttl != ttl {
					t.Errorf("asks again with %+v", cmd)
				}
			}
		}
	}
}

// Whoever wants the readers' grant then may have given up with it.
func TestAPlaceOfAWriterWhoGivesUpIsCancelledAndReadersBehindEnterAtOnce(t *testing.T) {
	t.Run("queued", func(t *testing.T) {
		r, w, next := reader(), writer(), reader()
		h, place := reserving(t, r, w)
		h.hears("wanted", h.l.grant.req.id, 0)
		h.enter(next)
		h.abandon(w)
		h.in(r, next)
		h.cancels(place)
		h.leave(r)
		h.leave(next)
		h.sends(release)
		h.cancels(place)
	})
	for name, c := range map[string]struct {
		a    answer
		err  error
		want int
		till time.Duration
	}{
		"queued later": {a: answer{outcome: enqueued}, want: 1},
		"no reply":     {err: errSilence, want: 1, till: handTTL},
		"refusal":      {err: refusal("NOPERM no")},
	} {
		t.Run(name, func(t *testing.T) {
			r, w, next := reader(), writer(), reader()
			h := holding(t, r)
			h.enter(w, next)
			place := h.sends(acquire).id
			h.abandon(w)
			h.hears("wanted", h.l.grant.req.id, 0)
			h.in(r, next)
			h.cancels() // rule 14
			h.reply(c.a, c.err, time.Second)
			h.sendsNothing()
			h.in(h.enter(reader()))
			if c.want == 0 {
				h.cancels()
				return
			}
			h.cancels(place)
			if until := h.ghosts[0].until; c.till == 0 != until.IsZero() || c.till > 0 && until.Sub(h.now) != c.till {
				t.Errorf("cancelled until %v", until)
			}
		})
	}
}

func TestAWriterWhoGivesUpLeavesItsPlaceToTheNextWriterOfItsProcess(t *testing.T) {
	r, first, second := reader(), writer(), writer()
	h, place := reserving(t, r, first)
	h.enter(second)
	h.abandon(first)
	h.sendsNothing()
	h.cancels()
	h.leave(r)
	if cmd := h.sends(yield); cmd.next != place {
		t.Errorf("yields to %s, not to %s", cmd.next, place)
	}
	h.answer(h.grant())
	h.in(second)
}

func TestAGrantWantedByAnotherBeforeThePlaceWasTakenStaysSo(t *testing.T) {
	h := holding(t, reader())
	h.hears("wanted", h.l.grant.req.id, 0)
	w, next := writer(), reader()
	h.enter(w, next)
	h.answer(h.queue())
	h.abandon(w)
	h.out(next)
}

func TestTheYieldWaitsForTheAnswerAboutThePlace(t *testing.T) {
	for name, err := range map[string]error{"queued": nil, "no reply": errSilence} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer(func(o *lockOptions) { o.ttl = handTTL / 2 })
			w.patient = true
			h := holding(t, r)
			h.enter(w)
			place := h.sends(acquire).id
			h.leave(r)
			h.sends(acquire)
			h.reply(h.queue(), err, time.Second)
			if cmd := h.sends(yield); cmd.next != place {
				t.Errorf("yields to %s, not to %s", cmd.next, place)
			}
			h.answer(answer{outcome: notOurs})
			h.lost(r)
			if cmd := h.sends(acquire); cmd.id == place {
				t.Error("asks under the id of an acquire that may still arrive")
			}
			if err == nil {
				h.cancels()
				return
			}
			h.cancels(place)
			if until := h.ghosts[0].until; until.Sub(h.now) != handTTL/2 {
				t.Errorf("cancelled until %v, late copies may arrive for %v", until.Sub(h.now), handTTL/2)
			}
		})
	}
}

func TestAPlaceThatIsServedEndsTheReadersLeasesAndTheWriterStaysBehindThem(t *testing.T) {
	for name, serve := range map[string]func(h *hand, place string){
		"by answer":  func(h *hand, _ string) { h.pass(longestPoll); h.sends(acquire); h.answer(h.grant()) },
		"by message": func(h *hand, place string) { h.hears("granted", place, h.token()) },
		"by message and answer": func(h *hand, place string) {
			h.pass(longestPoll)
			h.sends(acquire)
			h.hears("granted", place, h.token())
			h.answer(h.grant())
		},
		"by an old message": func(h *hand, place string) { h.hears("granted", place, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.keep()
			serve(h, place)
			h.lost(r)
			h.out(w)
			h.state(none)
			h.sendsNothing()
			h.hears("granted", place, h.token()) // another copy
			h.out(w)
			for _, g := range h.ghosts { // again for each that could still bring it
				if g.id != place {
					t.Errorf("cancels %s, not the place", g.id)
				}
			}
			h.leave(r)
			if cmd := h.sends(acquire); cmd.id == place {
				t.Error("asks under the id that is being cancelled")
			}
			h.answer(h.grant())
			h.in(w)
		})
	}
}

// The server takes us for the owner, so the message was lost.
func TestWantedForAReservedPlaceHasItLookAgain(t *testing.T) {
	r := reader()
	h, place := reserving(t, r, writer())
	h.hears("wanted", place, 0)
	if cmd := h.sends(acquire); cmd.id != place {
		t.Errorf("looks for %s", cmd.id)
	}
	h.answer(h.grant())
	h.lost(r)
	h.cancels(place)
}

// The place may have been served before the yield came, if the readers' lease had
// ended in Redis: they are not told that they kept it until the end.
func TestAMessageAboutAReservedPlaceWaitsForTheAnswerToTheYield(t *testing.T) {
	for what, c := range map[string]struct {
		answer func(h *hand) answer
		want   error
	}{
		"served by the yield, or after it": {(*hand).grant, nil},
		"served before it": {func(h *hand) answer {
			a := h.grant()
			a.gone = true
			return a
		}, ErrLeaseLost},
		"queued by it, and the message was faster": {(*hand).queue, nil},
	} {
		t.Run(what, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.leave(r)
			h.sends(yield)
			h.hears("granted", place, h.token())
			h.out(w)
			if r.settled {
				t.Fatalf("told %v before the answer", r.err)
			}
			a := c.answer(h)
			h.answer(a)
			h.settled(r, c.want)
			if a.outcome == enqueued {
				h.out(w)
				h.sends(acquire) // at once
				h.answer(h.grant())
			}
			h.in(w)
			h.cancels()
		})
	}
}

// Rule 4 for the message that comes instead of the yield's answer: the place may have
// been served before the yield was sent.
func TestAMessageAboutAReservedPlaceIsTrustedFromTheLastSendingThatWasAnsweredQueued(t *testing.T) {
	r, w := reader(), writer()
	h, place := reserving(t, r, w)
	h.keep()
	h.pass(longestPoll)
	h.sends(acquire)
	floor := h.token() - 1
	h.answer(h.queue())
	h.pass(2 * time.Second)
	h.leave(r)
	h.sends(yield)
	h.reply(answer{}, errSilence, time.Second)
	h.hears("granted", place, floor)
	h.out(w)
	h.hears("granted", place, h.token())
	h.in(w)
	h.trust(longestPoll + handWindow)
}
