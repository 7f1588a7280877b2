package leased

import (
	"slices"
	"testing"
)

// A script does only so much at once, and says in its answer that more is to be
// done: whoever reads that goes on at once.

func unfinishedAnswer(a answer) answer {
	a.unfinished = true
	return a
}

func TestOneWhoWaitsBehindUnfinishedWorkAsksAgainAtOnce(t *testing.T) {
	h := drive(t)
	w := h.enter(writer())
	first := h.sends(acquire)
	for range 3 {
		h.answer(unfinishedAnswer(h.queue()))
		if again := h.sends(acquire); again.id != first.id || !again.wait {
			t.Errorf("%+v after %+v", again, first)
		}
	}
	h.answer(h.queue())
	h.sendsNothing()
	h.out(w)
}

func TestATryIsRefusedOnlyWhenTheWorkIsFinished(t *testing.T) {
	h := drive(t)
	w := h.enter(trying(writer()))
	first := h.sends(acquire)
	for range 3 {
		h.answer(unfinishedAnswer(answer{outcome: refused, token: h.clock()}))
		if again := h.sends(acquire); again.id != first.id || again.wait {
			t.Errorf("%+v after %+v", again, first)
		}
		h.out(w)
	}
	h.answer(answer{outcome: refused, token: h.clock()})
	h.turned(w, ErrLocked)
	if len(h.ghosts) > 0 {
		t.Errorf("cancels %+v, which was never enqueued", h.ghosts)
	}
}

// A waiter stands behind the try, so the request is enqueued; and the lock may
// still be free.
func TestATryBeforeAWaiterIsNotRefusedByUnfinishedWork(t *testing.T) {
	h := drive(t)
	try := h.enter(trying(writer()))
	h.enter(writer())
	h.answer(unfinishedAnswer(answer{outcome: refused, token: h.clock()}))
	h.sends(acquire)
	h.answer(unfinishedAnswer(h.queue()))
	h.out(try)
	h.sends(acquire)
	h.answer(h.grant())
	h.in(try)
}

func TestWhoLetsGoHasACancelGoOnWithUnfinishedWork(t *testing.T) {
	gone := func(h *hand, want string) {
		t.Helper()
		if len(h.ghosts) != 1 || h.ghosts[0].id != want && want != "" || h.ghosts[0].id == h.l.grant.req.id || !h.ghosts[0].until.IsZero() {
			t.Errorf("cancels %+v, want %q", h.ghosts, want)
		}
	}
	w := writer()
	h := holding(t, w)
	h.leave(w)
	old := h.sends(release).id
	h.answer(unfinishedAnswer(answer{outcome: done}))
	gone(h, old)

	a := writer(func(o *lockOptions) { o.handoffs = 1 })
	h = holding(t, a)
	h.enter(writer())
	h.hears("wanted", h.l.grant.req.id, 0)
	h.leave(a)
	old = h.sends(yield).id
	h.answer(unfinishedAnswer(h.grant()))
	gone(h, old)

	w = writer()
	h = holding(t, w)
	h.downgrade(w)
	old = h.sends(downgrade).id
	h.answer(unfinishedAnswer(h.grant()))
	gone(h, old)

	h = drive(t)
	h.enter(reader())
	h.answer(unfinishedAnswer(h.grant()))
	gone(h, "") // any id but its own will do
}

func TestReadersAreToldOfAWaiterUntilAllAre(t *testing.T) {
	h := drive(t)
	h.enter(writer())
	var told []uint64
	for _, upTo := range []uint64{100, 200, 0} {
		told = append(told, h.sends(acquire).told)
		a := h.queue()
		a.told = upTo
		h.answer(a)
	}
	h.sendsNothing()
	if !slices.Equal(told, []uint64{0, 100, 200}) {
		t.Errorf("goes on after %d", told)
	}
}

func TestReadersAreToldOfAReservedPlaceUntilAllAre(t *testing.T) {
	r := reader()
	h := holding(t, r)
	h.enter(writer())
	var told []uint64
	for _, upTo := range []uint64{100, 200, 0} {
		told = append(told, h.sends(acquire).told)
		a := h.queue()
		a.told = upTo
		h.answer(a)
	}
	h.sendsNothing()
	if !slices.Equal(told, []uint64{0, 100, 200}) {
		t.Errorf("goes on after %d", told)
	}
}
