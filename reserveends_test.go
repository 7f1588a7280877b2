package leased

import (
	"fmt"
	"testing"
	"time"
)

// How a reserved place ends, other than by being served.

func TestALossOfTheReadersGrantGivesUpTheReservedPlace(t *testing.T) {
	for name, lose := range map[string]func(h *hand){
		"evicted":  func(h *hand) { h.hears("revoked", h.l.grant.req.id, h.top) },
		"not ours": func(h *hand) { h.renewed(renewal{req: h.l.grant.req, at: h.now}, notOurs) },
		"unproved": func(h *hand) { h.now = h.now.Add(handWindow); h.ring() },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			old := h.l.grant.req.id
			lose(h)
			h.lost(r)
			h.cancels(place)
			h.sendsNothing()
			h.leave(r)
			if cmd := h.sends(acquire); cmd.id == place {
				t.Error("asks under the id that is being cancelled")
			}
			if name == "unproved" {
				h.cancels(place, old)
			}
			h.answer(h.grant())
			h.in(w)
		})
		t.Run(name+" while it is asked for", func(t *testing.T) {
			for _, a := range []answer{{outcome: enqueued}, {outcome: granted}} {
				r, w := reader(), writer()
				h := holding(t, r)
				h.enter(w)
				place := h.sends(acquire).id
				lose(h)
				h.lost(r)
				h.cancels()
				h.answer(a)
				h.cancels(place)
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
			if cmd := h.sends(yield); cmd.next != place || r.settled {
				t.Errorf("yields to %s, not to %s, or Unlock does not wait to hear of it", cmd.next, place)
			}
			a := h.grant()
			a.gone = lost
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
func besideAStray(t *testing.T) (h *hand, stray, r *caller) {
	stray, r = reader(), reader()
	h = holding(t, stray)
	h.hears("revoked", h.l.grant.req.id, h.top)
	h.enter(r)
	h.answer(h.grant())
	h.in(r)
	return h, stray, r
}

func TestAStrayDoesNotWaitForTheReleaseOfALaterGrant(t *testing.T) {
	h, stray, r := besideAStray(t)
	h.leave(r)
	h.sends(release)
	h.leave(stray)
	h.settled(stray, ErrLeaseLost)
	h.reply(answer{}, errSilence, time.Second)
	if n := len(h.ghosts[0].gone); n != 1 {
		t.Errorf("the cancel will tell %d callers", n)
	}
}

func TestCloseGivesUpAReservedPlaceAndReleasesWhenTheReadersHaveLeft(t *testing.T) {
	r, w := reader(), writer()
	h, place := reserving(t, r, w)
	h.close()
	h.turned(w, ErrClosed)
	h.cancels(place)
	h.sendsNothing()
	h.leave(r)
	h.sends(release)
}

func TestAFailureToReserveIsToldToWhoDoesNotWaitForAnOperatorAndRepeatedForOthers(t *testing.T) {
	r, w, patient := reader(), writer(), writer()
	patient.patient = true
	h := holding(t, r).keep()
	h.enter(w, patient)
	place := h.sends(acquire).id
	h.reply(answer{}, refusal("NOPERM no"), time.Second)
	h.turned(w, refusal("NOPERM no"))
	h.out(patient)
	h.pass(time.Second - 1)
	h.sendsNothing()
	h.pass(1)
	if cmd := h.sends(acquire); cmd.id != place {
		t.Errorf("asks again as %s, not as %s", cmd.id, place)
	}
	h.in(r)
}

// It could not enter before them: the yield would go round.
func TestNoPlaceIsTakenBehindAReaderWhoLostItsLease(t *testing.T) {
	h, stray, r := besideAStray(t)
	h.enter(writer())
	h.sendsNothing()
	h.leave(stray)
	place := h.sends(acquire).id
	h.answer(h.queue())
	h.leave(r)
	if cmd := h.sends(yield); cmd.next != place {
		t.Errorf("yields to %s, not to %s", cmd.next, place)
	}
}

// It could not be let go before the answer about the place, and was lost meanwhile.
func TestAReaderWhoLeavesWhileAPlaceIsAskedForHearsOfALossUntilTheAnswer(t *testing.T) {
	for name, lose := range map[string]func(h *hand, place string){
		"served, by answer":  func(h *hand, _ string) { h.answer(h.grant()) },
		"served, by message": func(h *hand, place string) { h.hears("granted", place, h.token()) },
		"evicted":            func(h *hand, _ string) { h.hears("revoked", h.l.grant.req.id, h.top) },
		"not ours":           func(h *hand, _ string) { h.renewed(renewal{req: h.l.grant.req, at: h.now}, notOurs) },
	} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h := holding(t, r)
			h.enter(w)
			place := h.sends(acquire).id
			h.pass(time.Second)
			till := h.now
			h.leave(r)
			h.pass(time.Second)
			lose(h, place)
			h.settled(r, ErrLeaseLost)
			h.lost(r)
			if !r.till.Equal(till) {
				t.Errorf("was trusted until %v, it left at %v", r.till, till)
			}
		})
	}
}

// The yield finds the place, but not the grant that it is to give back.
func TestAYieldOfALostReadersGrantToAReservedPlaceTellsTheLossAndKeepsThePlace(t *testing.T) {
	for name, a := range map[string]func(h *hand) answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			r, w := reader(), writer()
			h, place := reserving(t, r, w)
			h.leave(r)
			h.sends(yield)
			reply := a(h)
			reply.gone = true
			h.answer(reply)
			h.settled(r, ErrLeaseLost)
			h.lost(r)
			h.cancels()
			if name == "queued" {
				h.out(w)
				if cmd := h.sends(acquire); cmd.id != place { // the lock may be free
					t.Errorf("asks as %s, not as %s", cmd.id, place)
				}
				h.answer(h.grant())
			}
			h.in(w)
		})
	}
}
