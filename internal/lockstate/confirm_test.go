package lockstate

import (
	"testing"

	"github.com/leasedmutex/leased/internal/protocol"
)

func confirm(o *Terms) { o.Confirm = true }

// Replicas have what a server answers behind WAIT, and may not have what it tells.
func TestConfirmedGrantsAreAskedForAfterTheirMessage(t *testing.T) {
	c := writer(confirm)
	h, req := queueing(t, c)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.out(c)
	if cmd := h.sends(protocol.Acquire); cmd.ID != req.ID {
		t.Fatalf("asks for %s", cmd.ID)
	}
	a := h.grant()
	a.Kept = true
	h.answer(a)
	h.in(c)
}

func TestConfirmedGrantsAreAskedForWhereTheMessageOvertakesAYield(t *testing.T) {
	first, second := writer(confirm, func(o *Terms) { o.Handoffs = 1 }), writer(confirm)
	h := holding(t, first)
	h.enter(second)
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.leave(first)
	next := h.sends(protocol.Yield).Next
	h.hears(protocol.MessageGranted, next, h.token())
	h.out(second)
	h.answer(h.queue())
	if cmd := h.sends(protocol.Acquire); cmd.ID != next {
		t.Fatalf("asks for %s", cmd.ID)
	}
	h.answer(h.grant())
	h.in(second)
}
