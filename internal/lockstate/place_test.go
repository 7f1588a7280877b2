package lockstate

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A writer behind readers of its own process.

// reserving returns a lock with r inside, and w waiting with a place in the queue.
func reserving(t *testing.T, r, w *Caller) (h *hand, place string) {
	t.Helper()
	h = holding(t, r)
	h.enter(w)
	place = h.sends(protocol.Acquire).ID
	h.answer(h.queue())
	h.out(w)
	h.sendsNothing()
	return h, place
}

func TestAWriterBehindReadersOfItsProcessHasItsPlaceAtOnceAndTheYieldKeepsIt(t *testing.T) {
	r, w := reader(), writer()
	h := holding(t, r)
	h.enter(w)
	cmd := h.sends(protocol.Acquire)
	if !cmd.Wait || cmd.Recheck || cmd.ID == h.l.grant.req.ID || cmd.Own != h.l.grant.req.ID || cmd.TTL != handTTL {
		t.Errorf("asks for its place with %+v", cmd)
	}
	h.answer(h.queue())
	h.leave(r)
	if y := h.sends(protocol.Yield); y.Next != cmd.ID || y.ID != h.l.grant.req.ID {
		t.Errorf("yields %s to %s, the place is %s", y.ID, y.Next, cmd.ID)
	}
	h.answer(h.queue())
	h.settled(r, nil)
	h.out(w)
	h.hears(protocol.MessageGranted, cmd.ID, h.token())
	h.in(w)
	h.cancels()
}

func TestOnlyAWriterAtTheHeadWhoWaitsAsksForAPlace(t *testing.T) {
	h := holding(t, reader())
	h.turned(h.enter(trying(writer())), ErrLocked)
	h.sendsNothing()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	first := h.enter(reader())
	h.enter(writer())
	h.out(first)
	h.sendsNothing()
	h.abandon(first)
	h.sends(protocol.Acquire)
	h.enter(writer())
	h.answer(h.queue())
	h.sendsNothing()
}

// The request belongs to the lock: who comes when its writer has given up goes on with it.
func TestAPlaceIsTakenOverByTheNextWriter(t *testing.T) {
	for name, next := range map[string]*Caller{"that waits": writer(), "that only tries": trying(writer())} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h := holding(t, r)
			h.enter(w)
			place := h.sends(protocol.Acquire).ID
			h.leave(r)
			h.abandon(w)
			h.enter(next)
			h.answer(h.queue())
			if cmd := h.sends(protocol.Yield); cmd.Next != place {
				t.Errorf("yields to %s, not to %s", cmd.Next, place)
			}
			h.answer(h.grant())
			h.in(next)
			h.cancels()
		})
	}
}

func TestAWriterBehindReadersThatEnterNowAsksForItsPlaceAtOnce(t *testing.T) {
	for name, a := range map[string]*Caller{"by grant": reader(), "by downgrade": writer()} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h := drive(t)
			h.enter(a, r, w)
			h.answer(h.grant())
			if a.Mode == protocol.Exclusive {
				h.downgrade(a)
				h.answer(h.grant())
			}
			h.in(a, r)
			h.sends(protocol.Acquire)
			h.answer(h.queue())
			h.leave(a)
			h.sendsNothing()
			h.leave(r)
			h.sends(protocol.Yield)
		})
	}
}

func TestAReservedPlaceIsAskedForAgainBeforeItsWaitingLeaseEnds(t *testing.T) {
	for ttl, pace := range map[time.Duration]time.Duration{
		900 * time.Millisecond: 300 * time.Millisecond,
		time.Hour:              MaxPoll,
	} {
		for _, polling := range []bool{false, true} {
			h := holding(t, reader()).keep()
			h.polling = polling
			h.enter(writer(func(o *Terms) { o.TTL = ttl }))
			id := h.sends(protocol.Acquire).ID
			for _, luck := range []float64{0, 0.5, 0.999} {
				h.luck = luck
				a := h.queue()
				a.Left = 0 // that of our own readers, who are renewed
				h.answer(a)
				h.pass(pace - time.Duration(float64(pace)/3*luck) - 1)
				h.sendsNothing()
				h.pass(1)
				if cmd := h.sends(protocol.Acquire); cmd.ID != id || !cmd.Recheck || !cmd.Wait || cmd.Own != h.l.grant.req.ID || cmd.TTL != ttl {
					t.Errorf("asks again with %+v", cmd)
				}
			}
		}
	}
}

// Whoever wants the readers' grant then may have given up with it.
func TestAPlaceOfAWriterWhoGivesUpIsCanceledAndReadersBehindEnterAtOnce(t *testing.T) {
	t.Run("queued", func(t *testing.T) {
		r, w, next := reader(), writer(), reader()
		h, place := reserving(t, r, w)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.enter(next)
		h.abandon(w)
		h.in(r, next)
		h.cancels(place)
		h.leave(r)
		h.leave(next)
		h.sends(protocol.Release)
		h.cancels(place)
	})
	for name, c := range map[string]struct {
		a    protocol.Answer
		err  error
		want int
		till time.Duration
	}{
		"queued later": {a: protocol.Answer{Outcome: protocol.Enqueued}, want: 1},
		"no reply":     {err: errSilence, want: 1, till: handTTL},
		"refusal":      {err: refusal("NOPERM no")},
	} {
		t.Run(name, func(t *testing.T) {
			r, w, next := reader(), writer(), reader()
			h := holding(t, r)
			h.enter(w, next)
			place := h.sends(protocol.Acquire).ID
			h.abandon(w)
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
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
			if until := h.unwanted[0].until; c.till == 0 != until.IsZero() || c.till > 0 && until.Sub(h.now) != c.till {
				t.Errorf("canceled until %v", until)
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
	if cmd := h.sends(protocol.Yield); cmd.Next != place {
		t.Errorf("yields to %s, not to %s", cmd.Next, place)
	}
	h.answer(h.grant())
	h.in(second)
}

func TestAGrantWantedByAnotherBeforeThePlaceWasTakenStaysSo(t *testing.T) {
	h := holding(t, reader())
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	w, next := writer(), reader()
	h.enter(w, next)
	h.answer(h.queue())
	h.abandon(w)
	h.out(next)
}

func TestTheYieldWaitsForTheAnswerAboutThePlace(t *testing.T) {
	for name, err := range map[string]error{"queued": nil, "no reply": errSilence} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer(func(o *Terms) { o.TTL = handTTL / 2 })
			w.RetryFatal = true
			h := holding(t, r)
			old := h.l.grant.req.ID
			h.enter(w)
			place := h.sends(protocol.Acquire).ID
			h.leave(r)
			h.sends(protocol.Acquire)
			h.reply(h.queue(), err, time.Second)
			if cmd := h.sends(protocol.Yield); cmd.Next != place {
				t.Errorf("yields to %s, not to %s", cmd.Next, place)
			}
			h.answer(protocol.Answer{Outcome: protocol.NotOurs})
			h.lost(r)
			if cmd := h.sends(protocol.Acquire); cmd.ID == place {
				t.Error("asks under the id of an acquire that may still arrive")
			}
			h.cancels(old, place)
			if err == nil {
				return
			}
			if until := h.unwanted[1].until; until.Sub(h.now) != handTTL/2 {
				t.Errorf("canceled until %v, late copies may arrive for %v", until.Sub(h.now), handTTL/2)
			}
		})
	}
}

// The acquire is sent under the span of that writer.
func TestServedIsTheWriterForWhomAPlaceIsReserved(t *testing.T) {
	r, w := reader(), writer()
	h := holding(t, r)
	h.enter(w)
	if h.l.Served() != w {
		t.Error("the acquire of the place serves the reader")
	}
	h.sends(protocol.Acquire)
	h.answer(h.queue())
	h, in, _ := keepingOut(t)
	h.asksAsReaders()
	if h.l.Served() != in {
		t.Error("the readers' question serves the one that waits")
	}
}

func TestAPlaceThatIsServedEndsTheReadersLeasesAndTheWriterStaysBehindThem(t *testing.T) {
	for name, serve := range map[string]func(h *hand, place string){
		"by answer":  func(h *hand, _ string) { h.pass(MaxPoll); h.sends(protocol.Acquire); h.answer(h.grant()) },
		"by message": func(h *hand, place string) { h.hears(protocol.MessageGranted, place, h.token()) },
		"by message and answer": func(h *hand, place string) {
			h.pass(MaxPoll)
			h.sends(protocol.Acquire)
			h.hears(protocol.MessageGranted, place, h.token())
			h.answer(h.grant())
		},
		"by an old message": func(h *hand, place string) { h.hears(protocol.MessageGranted, place, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.keep()
			readers := h.l.Request().ID
			serve(h, place)
			h.lost(r)
			h.out(w)
			h.state(none)
			h.sendsNothing()
			h.hears(protocol.MessageGranted, place, h.token()) // another copy
			h.out(w)
			for _, g := range h.unwanted { // again for each that could still bring it
				if g.ID != place {
					t.Errorf("cancels %s, not the place", g.ID)
				}
			}
			h.leave(r)
			if !slices.ContainsFunc(h.unwanted, func(g Cancellation) bool { return g.ID == readers }) {
				t.Error("what is left of the readers' grant is not canceled when they have left")
			}
			if cmd := h.sends(protocol.Acquire); cmd.ID == place {
				t.Error("asks under the id that is being canceled")
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
	h.hears(protocol.MessageWanted, place, 0)
	if cmd := h.sends(protocol.Acquire); cmd.ID != place {
		t.Errorf("looks for %s", cmd.ID)
	}
	h.answer(h.grant())
	h.lost(r)
	h.cancels(place)
}

// The place may have been served before the yield came, if the readers' lease had
// ended in Redis: they are not told that they kept it until the end.
func TestAMessageAboutAReservedPlaceWaitsForTheAnswerToTheYield(t *testing.T) {
	for what, c := range map[string]struct {
		answer func(h *hand) protocol.Answer
		want   error
	}{
		"served by the yield, or after it": {(*hand).grant, nil},
		"served before it": {func(h *hand) protocol.Answer {
			a := h.grant()
			a.Gone = true
			return a
		}, ErrLeaseLost},
		"queued by it, and the message was faster": {(*hand).queue, nil},
	} {
		t.Run(what, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.leave(r)
			h.sends(protocol.Yield)
			h.hears(protocol.MessageGranted, place, h.token())
			h.out(w)
			if r.Settled {
				t.Fatalf("told %v before the answer", r.Outcome())
			}
			a := c.answer(h)
			h.answer(a)
			h.settled(r, c.want)
			if a.Outcome == protocol.Enqueued {
				h.out(w)
				h.sends(protocol.Acquire) // at once
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
	h.pass(MaxPoll)
	h.sends(protocol.Acquire)
	floor := h.token() - 1
	h.answer(h.queue())
	h.pass(2 * time.Second)
	h.leave(r)
	h.sends(protocol.Yield)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.hears(protocol.MessageGranted, place, floor)
	h.out(w)
	h.hears(protocol.MessageGranted, place, h.token())
	h.in(w)
	h.trust(MaxPoll + handWindow)
}

func TestAMessageOfAPlaceIsOldThoughTheLastTokenIsForgotten(t *testing.T) {
	r, w := reader(), writer()
	h := holding(t, r)
	h.enter(w)
	place, old := h.sends(protocol.Acquire).ID, h.token()
	h.pass(time.Second)
	a := h.queue()
	a.Token, a.Clock = 0, h.clock()
	h.answer(a)
	h.leave(r)
	h.sends(protocol.Yield)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.hears(protocol.MessageGranted, place, old)
	h.out(w)
}

// How a reserved place ends, other than by being served.

func TestALossOfTheReadersGrantGivesUpTheReservedPlace(t *testing.T) {
	for name, lose := range map[string]func(h *hand){
		"evicted":  func(h *hand) { h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top) },
		"not ours": func(h *hand) { h.renewed(protocol.Renewal{Req: h.l.grant.req, At: h.now}, protocol.NotOurs) },
		"unproved": func(h *hand) { h.now = h.now.Add(handWindow); h.ring() },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			old := h.l.grant.req.ID
			lose(h)
			h.lost(r)
			if name == "not ours" {
				h.cancels(place, old)
			} else {
				h.cancels(place)
			}
			h.sendsNothing()
			h.leave(r)
			if cmd := h.sends(protocol.Acquire); cmd.ID == place {
				t.Error("asks under the id that is being canceled")
			}
			if name == "unproved" {
				h.cancels(place, old)
			}
			h.answer(h.grant())
			h.in(w)
		})
		t.Run(name+" while it is asked for", func(t *testing.T) {
			for _, a := range []protocol.Answer{{Outcome: protocol.Enqueued}, {Outcome: protocol.Granted}} {
				r, w := reader(), writer()
				h := holding(t, r)
				h.enter(w)
				place := h.sends(protocol.Acquire).ID
				var canceled []string
				if name == "not ours" {
					canceled = append(canceled, h.l.grant.req.ID)
				}
				lose(h)
				h.lost(r)
				h.cancels(canceled...)
				h.answer(a)
				h.cancels(append(canceled, place)...)
				h.out(w)
			}
		})
	}
}

// The watchdog was late: nobody vouches for the readers' grant. The yield tells
// whether it was ours, and keeps the place either way.
func TestAGrantThatIsNotTrustedAnyMoreIsYieldedToThePlaceBehindIt(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.now = h.now.Add(handWindow)
			h.leave(r)
			if cmd := h.sends(protocol.Yield); cmd.Next != place || r.Settled {
				t.Errorf("yields to %s, not to %s, or Unlock does not wait to hear of it", cmd.Next, place)
			}
			a := h.grant()
			a.Gone = lost
			h.answer(a)
			if lost {
				h.settled(r, ErrLeaseLost)
			} else {
				h.settled(r, nil)
			}
			h.in(w)
			h.cancels()
		})
	}
}

// besideAStray has r inside on a grant that came after stray's was lost.
func besideAStray(t *testing.T) (h *hand, stray, r *Caller) {
	stray, r = reader(), reader()
	h = holding(t, stray)
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top)
	h.enter(r)
	h.answer(h.grant())
	h.in(r)
	return h, stray, r
}

func TestAStrayDoesNotWaitForTheReleaseOfALaterGrant(t *testing.T) {
	h, stray, r := besideAStray(t)
	h.leave(r)
	h.sends(protocol.Release)
	h.leave(stray)
	h.settled(stray, ErrLeaseLost)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	if n := len(h.unwanted[0].Callers); n != 1 {
		t.Errorf("the cancel will tell %d callers", n)
	}
}

func TestCloseGivesUpAReservedPlaceAndReleasesWhenTheReadersHaveLeft(t *testing.T) {
	r, w := reader(), writer()
	h, place := reserving(t, r, w)
	h.close()
	h.turned(w, protocol.ErrClosed)
	h.cancels(place)
	h.sendsNothing()
	h.leave(r)
	h.sends(protocol.Release)
}

func TestAFailureToReserveIsToldToWhoDoesNotWaitForAnOperatorAndRepeatedForOthers(t *testing.T) {
	r, w, patient := reader(), writer(), writer()
	patient.RetryFatal = true
	h := holding(t, r).keep()
	h.enter(w, patient)
	place := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, refusal("NOPERM no"), time.Second)
	h.turned(w, refusal("NOPERM no"))
	h.out(patient)
	h.pass(time.Second - 1)
	h.sendsNothing()
	h.pass(1)
	if cmd := h.sends(protocol.Acquire); cmd.ID != place {
		t.Errorf("asks again as %s, not as %s", cmd.ID, place)
	}
	h.in(r)
}

// It could not enter before them: the yield would go round.
func TestNoPlaceIsTakenBehindAReaderWhoLostItsLease(t *testing.T) {
	h, stray, r := besideAStray(t)
	h.enter(writer())
	h.sendsNothing()
	h.leave(stray)
	place := h.sends(protocol.Acquire).ID
	h.answer(h.queue())
	h.leave(r)
	if cmd := h.sends(protocol.Yield); cmd.Next != place {
		t.Errorf("yields to %s, not to %s", cmd.Next, place)
	}
}

// It could not be let go before the answer about the place, and was lost meanwhile.
func TestAReaderWhoLeavesWhileAPlaceIsAskedForHearsOfALossUntilTheAnswer(t *testing.T) {
	for name, lose := range map[string]func(h *hand, place string){
		"served, by answer":  func(h *hand, _ string) { h.answer(h.grant()) },
		"served, by message": func(h *hand, place string) { h.hears(protocol.MessageGranted, place, h.token()) },
		"evicted":            func(h *hand, _ string) { h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top) },
		"not ours":           func(h *hand, _ string) { h.renewed(protocol.Renewal{Req: h.l.grant.req, At: h.now}, protocol.NotOurs) },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h := holding(t, r)
			h.enter(w)
			place := h.sends(protocol.Acquire).ID
			h.pass(time.Second)
			till := h.now
			h.leave(r)
			h.pass(time.Second)
			lose(h, place)
			h.settled(r, ErrLeaseLost)
			h.lost(r)
			if !h.l.time(r.until).Equal(till) {
				t.Errorf("was trusted until %v, it left at %v", h.l.time(r.until), till)
			}
		})
	}
}

// The yield finds the place, but not the grant that it is to give back.
func TestAYieldOfALostReadersGrantToAReservedPlaceTellsTheLossAndKeepsThePlace(t *testing.T) {
	for name, a := range map[string]func(h *hand) protocol.Answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.leave(r)
			h.sends(protocol.Yield)
			reply := a(h)
			reply.Gone = true
			h.answer(reply)
			h.settled(r, ErrLeaseLost)
			h.lost(r)
			h.cancels()
			if name == "queued" {
				h.out(w)
				if cmd := h.sends(protocol.Acquire); cmd.ID != place { // the lock may be free
					t.Errorf("asks as %s, not as %s", cmd.ID, place)
				}
				h.answer(h.grant())
			}
			h.in(w)
		})
	}
}

func TestAPlaceIsCanceledWithTheReadersGrantThatIsLost(t *testing.T) {
	h := holding(t, reader())
	h.enter(writer())
	place := h.sends(protocol.Acquire)
	h.answer(h.queue())
	old := h.l.grant.req
	h.renewed(protocol.Renewal{Req: old, At: h.now}, protocol.NotOurs)
	h.cancels(place.ID, old.ID)
}

func TestAPlaceThatOneCallCouldNotFinishIsAskedAboutAtOnce(t *testing.T) {
	h := holding(t, reader())
	h.enter(writer())
	h.sends(protocol.Acquire)
	a := h.queue()
	a.Unfinished = true
	h.answer(a)
	h.sends(protocol.Acquire)
}
