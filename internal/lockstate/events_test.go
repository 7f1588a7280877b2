package lockstate

import (
	"errors"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Which hold a wait is linked to: the one whose end let it in, or none.

// traced gives c a trail with a hold span of its own.
func traced(c *Caller, id byte) *Caller {
	c.Events = &EventLog{Hold: span(1, id)}
	return c
}

func (h *hand) linked(c *Caller, to *protocol.Span) {
	h.t.Helper()
	h.in(c)
	if c.Events.From != to {
		h.t.Errorf("a link to %v, want %v", c.Events.From, to)
	}
}

// The reader waited for the writer before it, who gave up: no lease let it in, and
// least of all the one that let in the reader who was there all the time.
func TestAReaderLetInByAWriterThatGaveUpIsLinkedToNoLease(t *testing.T) {
	far, first := traced(writer(), 1), traced(reader(), 2)
	h, req := queueing(t, first)
	m := protocol.Message{Kind: protocol.MessageGranted, ID: req.ID, Token: h.token(), Clock: h.clock(), Link: far.Events.Hold}
	h.step(func(now time.Time, fx *Effects) { h.l.Receive(&m, now, fx) })
	h.linked(first, far.Events.Hold)
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
	h.sends(protocol.Downgrade)
	h.answer(h.grant())
	h.linked(next, w.Events.Hold)
}

// One whose lease was lost lets nobody in: the release that has no answer is
// repeated with the link that it had.
func TestALostLeaseIsNotLinkedByTheReleaseOfTheNextGrant(t *testing.T) {
	lost, next := traced(reader(), 1), traced(reader(), 2)
	h := holding(t, lost)
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top)
	h.lost(lost)
	h.enter(next)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(lost, next)
	h.leave(next)
	if cmd := h.sends(protocol.Release); cmd.Link != next.Events.Hold {
		t.Errorf("released with %v", cmd.Link)
	}
	h.leave(lost)
	h.reply(protocol.Answer{}, errSilence, 0)
	if g := h.unwanted[len(h.unwanted)-1]; g.Link != next.Events.Hold {
		t.Errorf("canceled with %v", g.Link)
	}
}

// Trouble that lasts does not keep the end from being told.
func TestTroubleLeavesRoomForTheEnd(t *testing.T) {
	c := traced(writer(), 1)
	h := holding(t, c)
	for range 10 * maxEvents {
		h.step(func(now time.Time, fx *Effects) {
			h.l.Renewed(&protocol.Renewal{Req: h.l.grant.req, At: now, Err: errors.New("no")}, now, fx)
		})
	}
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top)
	notes := c.Events.List
	if last := notes[len(notes)-1]; last.What != eventLost || len(notes) > maxEvents+1 {
		t.Errorf("%d notes, the last is %v", len(notes), last.What)
	}
}

// A leader's lease may last for weeks, in which others come and give up.
func TestCallersThatComeAndGiveUpLeaveRoomForTheEnd(t *testing.T) {
	c := traced(writer(), 1)
	h := holding(t, c)
	for range 10 * maxEvents {
		w := writer()
		h.enter(w)
		h.abandon(w)
	}
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top)
	notes := c.Events.List
	if last := notes[len(notes)-1]; last.What != eventLost || len(notes) > maxEvents+1 {
		t.Errorf("%d notes, the last is %v", len(notes), last.What)
	}
}

// The readers of a process whose visits always overlap share one grant for as long as that goes on.
func TestTheLeasesOfAGrantAreNotCountedBeyondTheirLimit(t *testing.T) {
	h := holding(t, reader())
	h.l.grant.served = math.MaxInt32
	for range 2 {
		if c := h.enter(reader()); c.Via != ViaLocal {
			t.Errorf("entered %v", c.Via)
		}
	}
}

// Whoever may publish can send nonsense for a span. The lock it is about comes all
// the same.
func TestGarbageInPlaceOfASpanGrantsAllTheSame(t *testing.T) {
	for _, text := range []string{"-", "x", "00-zz-zz-01", strings.Repeat("f", 400), protocol.FormatSpan(span(0, 0))} {
		c := writer()
		c.Events = &EventLog{}
		h, req := queueing(t, c)
		token := h.token()
		m, ok := protocol.ParseMessage("leased1:granted " + strconv.FormatUint(token, 10) + " " + strconv.FormatUint(h.clock(), 10) + " 0 " + text + " " + req.ID + " x")
		if !ok {
			t.Fatalf("%q: not read", text)
		}
		h.step(func(now time.Time, fx *Effects) { h.l.Receive(&m, now, fx) })
		h.in(c)
		if c.Events.From != nil {
			t.Errorf("%q: a link to %v", text, c.Events.From)
		}
	}
}

func span(id, span byte) *protocol.Span {
	return &protocol.Span{TraceID: [16]byte{15: id}, SpanID: [8]byte{7: span}, Flags: 1}
}

// A try does not wait for the next attempt of a reader that waits through an outage.
func TestATryToReadIsRefusedBesideAReaderWhoseRequestFailed(t *testing.T) {
	h := drive(t)
	h.enter(reader())
	h.sends(protocol.Acquire)
	h.reply(protocol.Answer{}, errSilence, 30*time.Second)
	if try := h.enter(trying(reader())); try.Phase != Rejected || !errors.Is(try.Outcome(), ErrLocked) {
		t.Errorf("%v, %v", try.Phase, try.Outcome())
	}
}

// The request that is under way is a writer's then, and a reader has come after it.
func TestATryToReadIsRefusedBehindAWriterThatAsks(t *testing.T) {
	h := drive(t)
	h.enter(writer(), reader())
	if try := h.enter(trying(reader())); try.Phase != Rejected || !errors.Is(try.Outcome(), ErrLocked) {
		t.Errorf("%v, %v", try.Phase, try.Outcome())
	}
}
