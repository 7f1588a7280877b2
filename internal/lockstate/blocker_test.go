package lockstate

import (
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What is known of who blocked a caller that waited behind another process.

var aSpan = protocol.Span{TraceID: [16]byte{1}, SpanID: [8]byte{2}, Flags: 1}

// blocked returns a lock whose caller waits behind the owner "other".
func blocked(t testing.TB) (h *hand, c *Caller, id string) {
	t.Helper()
	h, c = drive(t), writer()
	c.Events = &EventLog{}
	h.enter(c)
	id = h.sends(protocol.Acquire).ID
	a := h.queue()
	a.Blocker = "other"
	h.answer(a)
	return h, c, id
}

func TestASuccessorThatNoReleaseLetInKnowsItsBlocker(t *testing.T) {
	h, c, id := blocked(t)
	h.hears(protocol.MessageGranted, id, h.token()) // by an eviction
	h.in(c)
	if c.Events.Blocker != "other" || c.Events.From != nil {
		t.Errorf("blocked by %q, after %v", c.Events.Blocker, c.Events.From)
	}
}

// Whoever comes next followed the last one to leave, though that one has no span, and not the one before.
func TestTheLinkOfAReleaseIsThatOfTheLastToLeave(t *testing.T) {
	traced, last := reader(), reader()
	traced.Events = &EventLog{Hold: &aSpan}
	h := holding(t, traced)
	h.enter(last)
	h.in(last)
	h.leave(traced)
	h.leave(last)
	if c := h.sends(protocol.Release); c.Link != nil {
		t.Errorf("the release links to %v", c.Link)
	}
}

func TestTheBlockerOfAHandOffIsTheLeaseThatItFollows(t *testing.T) {
	h, c, id := blocked(t)
	h.step(func(now time.Time, fx *Effects) {
		h.l.Receive(&protocol.Message{Kind: protocol.MessageGranted, ID: id, Token: h.token(), Clock: h.clock(), Link: &aSpan}, now, fx)
	})
	h.in(c)
	if c.Events.Blocker != "" || c.Events.From != &aSpan {
		t.Errorf("blocked by %q, after %v", c.Events.Blocker, c.Events.From)
	}
}

func TestTheBlockerIsForgottenWhenTheLockIsGivenBack(t *testing.T) {
	h, c, id := blocked(t)
	h.hears(protocol.MessageGranted, id, h.token())
	h.in(c)
	h.leave(c)
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	if who := h.l.Blocker(); who != "" {
		t.Errorf("blocked by %q", who)
	}
}

// An owner's id of this client that nobody here has is from before a failover.
func TestAnOwnerOfOursThatWeDoNotKnowIsCanceledAtOnce(t *testing.T) {
	queuedBehind := func(h *hand, owner string) {
		a := h.queue()
		a.Blocker = owner
		h.answer(a)
	}
	h := drive(t)
	h.enter(writer())
	own := h.sends(protocol.Acquire).ID
	theirs := strings.Replace(own, h.Client(), "BBBBBBBBBBBBBBBB:hand", 1)
	queuedBehind(h, theirs)
	h.cancels()

	h = drive(t)
	forgotten := h.NewRequest(protocol.Exclusive, handTTL, false, protocol.Origin{}).ID
	h.enter(writer())
	h.sends(protocol.Acquire)
	queuedBehind(h, forgotten)
	h.cancels(forgotten)
}
