package lockstate

import (
	"testing"
	"time"

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

// On a quorum, an answer that the request waits can overtake the message of its grant, although the message
// is about answers of servers that were sent before.
func TestAMessageIsTrustedFromWhatItIsAbout(t *testing.T) {
	for name, proved := range map[string]bool{"a quorum's": true, "one server's": false} {
		c := writer()
		h := drive(t)
		h.enter(c)
		id := h.sends(protocol.Acquire).ID
		asked := h.now
		h.answer(h.queue())
		h.pass(time.Second)
		h.step(h.l.Subscribed)
		again := h.now
		h.sends(protocol.Acquire)
		h.answer(h.queue())
		m := protocol.Message{Kind: protocol.MessageGranted, ID: id, Token: h.token(), Clock: h.clock()}
		want := again
		if proved {
			m.Proved, want = asked, asked
		}
		h.step(func(now time.Time, fx *Effects) { h.l.Receive(&m, now, fx) })
		h.in(c)
		if got := h.l.TrustedUntil(c, h.now); !got.Equal(want.Add(handWindow)) {
			t.Errorf("%s message: trusted until %v after the first acquire, want %v", name, got.Sub(asked), want.Add(handWindow).Sub(asked))
		}
	}
}

func TestAMessageAboutAYieldIsTrustedFromWhatItIsAbout(t *testing.T) {
	h, _, b, cmd := yielding(t)
	m := protocol.Message{Kind: protocol.MessageGranted, ID: cmd.Next, Token: h.token(), Clock: h.clock(), Proved: h.now.Add(-time.Second)}
	h.step(func(now time.Time, fx *Effects) { h.l.Receive(&m, now, fx) })
	h.in(b)
	if got, want := h.l.TrustedUntil(b, h.now), m.Proved.Add(handWindow); !got.Equal(want) {
		t.Errorf("trusted until %v, want %v", got, want)
	}
}
