package lockstate

import (
	"slices"
	"testing"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A script does only so much at once, and says in its answer that more is to be
// done: whoever reads that goes on at once.

func unfinishedAnswer(a protocol.Answer) protocol.Answer {
	a.Unfinished = true
	return a
}

func TestOneWhoWaitsBehindUnfinishedWorkAsksAgainAtOnce(t *testing.T) {
	h := drive(t)
	w := h.enter(writer())
	first := h.sends(protocol.Acquire)
	for range 3 {
		h.answer(unfinishedAnswer(h.queue()))
		if again := h.sends(protocol.Acquire); again.ID != first.ID || !again.Wait {
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
	first := h.sends(protocol.Acquire)
	for range 3 {
		h.answer(unfinishedAnswer(protocol.Answer{Outcome: protocol.Refused, Token: h.clock()}))
		if again := h.sends(protocol.Acquire); again.ID != first.ID || again.Wait {
			t.Errorf("%+v after %+v", again, first)
		}
		h.out(w)
	}
	h.answer(protocol.Answer{Outcome: protocol.Refused, Token: h.clock()})
	h.turned(w, ErrLocked)
	if len(h.unwanted) > 0 {
		t.Errorf("cancels %+v, which was never enqueued", h.unwanted)
	}
}

// A waiter stands behind the try, so the request is enqueued; and the lock may
// still be free.
func TestATryBeforeAWaiterIsNotRefusedByUnfinishedWork(t *testing.T) {
	h := drive(t)
	try := h.enter(trying(writer()))
	h.enter(writer())
	h.answer(unfinishedAnswer(protocol.Answer{Outcome: protocol.Refused, Token: h.clock()}))
	h.sends(protocol.Acquire)
	h.answer(unfinishedAnswer(h.queue()))
	h.out(try)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(try)
}

func TestWhoLetsGoHasACancelGoOnWithUnfinishedWork(t *testing.T) {
	gone := func(h *hand, want string) {
		t.Helper()
		if len(h.unwanted) != 1 || h.unwanted[0].ID != want && want != "" || h.unwanted[0].ID == h.l.grant.req.ID || !h.unwanted[0].until.IsZero() {
			t.Errorf("cancels %+v, want %q", h.unwanted, want)
		}
	}
	w := writer()
	h := holding(t, w)
	h.leave(w)
	old := h.sends(protocol.Release).ID
	h.answer(unfinishedAnswer(protocol.Answer{Outcome: protocol.Done}))
	gone(h, old)

	a := writer(func(o *Terms) { o.Handoffs = 1 })
	h = holding(t, a)
	h.enter(writer())
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.leave(a)
	old = h.sends(protocol.Yield).ID
	h.answer(unfinishedAnswer(h.grant()))
	gone(h, old)

	w = writer()
	h = holding(t, w)
	h.downgrade(w)
	old = h.sends(protocol.Downgrade).ID
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
		told = append(told, h.sends(protocol.Acquire).Told)
		a := h.queue()
		a.Told = upTo
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
		told = append(told, h.sends(protocol.Acquire).Told)
		a := h.queue()
		a.Told = upTo
		h.answer(a)
	}
	h.sendsNothing()
	if !slices.Equal(told, []uint64{0, 100, 200}) {
		t.Errorf("goes on after %d", told)
	}
}
