package leased

import (
	"testing"
	"time"
)

// rechecked returns a lock that was granted by a message while the answer to its
// re-check is still under way.
func rechecked(t *testing.T, c *caller) (*hand, request) {
	t.Helper()
	h, req := queueing(t, c)
	h.pass(longestPoll)
	h.sends(acquire)
	h.hears("granted", req.id, h.token())
	h.in(c)
	return h, req
}

// again is the answer that the grant is ours already.
func (h *hand) again() answer {
	a := h.grant()
	a.token = h.l.grant.token
	return a
}

func TestAReCheckAnsweredLateDoesNotShortenTheTrustThatARenewalGave(t *testing.T) {
	h, _ := rechecked(t, writer())
	h.pass(3 * time.Second)
	if len(h.renewals) == 0 {
		t.Fatal("it was not renewed")
	}
	h.renewed(h.renewals[0], granted)
	want := h.l.grant.trust()
	h.answer(h.again())
	if got := h.l.grant.trust(); !got.Equal(want) {
		t.Errorf("believed until %v, want %v", got.Sub(noon), want.Sub(noon))
	}
}

func TestAReCheckAnsweredLateDoesNotTakeBackThatOthersWantTheLock(t *testing.T) {
	a := writer(func(o *lockOptions) { o.idleHold = time.Hour })
	h, req := rechecked(t, a)
	h.hears("wanted", req.id, 0)
	h.answer(h.again())
	h.leave(a)
	h.sends(release)
}

func TestATryThatInheritsAQueuedRequestIsTurnedAway(t *testing.T) {
	h := drive(t)
	a, b := writer(), trying(writer())
	h.enter(a)
	h.sends(acquire)
	h.abandon(a)
	h.enter(b)
	h.answer(h.queue())
	h.turned(b, ErrLocked)
}

func TestAReCheckWhereNobodyWillTellComesLaterEachTime(t *testing.T) {
	h := drive(t)
	h.polling = true
	h.enter(writer())
	for _, want := range []time.Duration{firstPoll, 2 * firstPoll, 4 * firstPoll, 8 * firstPoll} {
		h.sends(acquire)
		h.answer(h.queue())
		if got := h.l.due().Sub(h.now); got != want {
			t.Fatalf("looks again after %v, want %v", got, want)
		}
		h.pass(want)
	}
}

func TestAPlaceIsCancelledWithTheReadersGrantThatIsLost(t *testing.T) {
	h := holding(t, reader())
	h.enter(writer())
	place := h.sends(acquire)
	h.answer(h.queue())
	h.renewed(renewal{req: h.l.grant.req, at: h.now}, notOurs)
	h.cancels(place.id)
}
