package leased

import (
	"errors"
	"testing"
	"time"
)

// Which hold a wait is linked to: the one whose end let it in, or none.

// traced gives c a trail with a hold span of its own.
func traced(c *caller, id byte) *caller {
	c.trail = &trail{hold: span(1, id)}
	return c
}

func (h *hand) linked(c *caller, to *spanRef) {
	h.t.Helper()
	h.in(c)
	if c.trail.from != to {
		h.t.Errorf("a link to %v, want %v", c.trail.from, to)
	}
}

// The reader waited for the writer before it, who gave up: no lease let it in, and
// least of all the one that let in the reader who was there all the time.
func TestAReaderLetInByAWriterThatGaveUpIsLinkedToNoLease(t *testing.T) {
	far, first := traced(writer(), 1), traced(reader(), 2)
	h, req := queueing(t, first)
	m := message{kind: "granted", id: req.id, token: h.token(), clock: h.clock(), link: far.trail.hold}
	h.step(func(now time.Time, fx *effects) { h.l.receive(&m, now, fx) })
	h.linked(first, far.trail.hold)
	w, next := traced(writer(), 3), traced(reader(), 4)
	h.enter(w)
	h.enter(next)
	h.out(w, next)
	h.abandon(w)
	h.linked(next, nil)
}

func TestAReaderLetInByADowngradeOfItsProcessIsLinkedToIt(t *testing.T) {
	w, next := traced(writer(), 1), traced(reader(), 2)
	h := holding(t, w)
	h.enter(next)
	h.downgrade(w)
	h.sends(downgrade)
	h.answer(h.grant())
	h.linked(next, w.trail.hold)
}

// One whose lease was lost lets nobody in: the release that has no answer is
// repeated with the link that it had.
func TestALostLeaseIsNotLinkedByTheReleaseOfTheNextGrant(t *testing.T) {
	lost, next := traced(reader(), 1), traced(reader(), 2)
	h := holding(t, lost)
	h.hears("revoked", h.l.grant.req.id, h.top)
	h.lost(lost)
	h.enter(next)
	h.sends(acquire)
	h.answer(h.grant())
	h.in(lost, next)
	h.leave(next)
	if cmd := h.sends(release); cmd.link != next.trail.hold {
		t.Errorf("released with %v", cmd.link)
	}
	h.leave(lost)
	h.reply(answer{}, errSilence, 0)
	if g := h.ghosts[len(h.ghosts)-1]; g.link != next.trail.hold {
		t.Errorf("cancelled with %v", g.link)
	}
}

// Trouble that lasts does not keep the end from being told.
func TestTroubleLeavesRoomForTheEnd(t *testing.T) {
	c := traced(writer(), 1)
	h := holding(t, c)
	for range 10 * mostNotes {
		h.step(func(now time.Time, fx *effects) {
			h.l.renewed(&renewal{req: h.l.grant.req, at: now, err: errors.New("no")}, now, fx)
		})
	}
	h.hears("revoked", h.l.grant.req.id, h.top)
	notes := c.trail.notes
	if last := notes[len(notes)-1]; last.what != noteLost || len(notes) > mostNotes+1 {
		t.Errorf("%d notes, the last is %v", len(notes), last.what)
	}
}
