package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A client can own a lock and not know it: the server carried out a command that was
// given up. Who queues behind it tells.

func TestWantedForARequestThatIsBeingAskedForEndsThePauseAfterAFailure(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, errSilence, 30*time.Second)
	h.pass(time.Second)
	h.sendsNothing()
	h.hears(protocol.MessageWanted, id, 0)
	if again := h.sends(protocol.Acquire).ID; again != id {
		t.Errorf("asks as %s, not as %s", again, id)
	}
	h.cancels()
	h.answer(h.grant())
	h.in(c)
}

// Whatever the answer says, it may be older than the message.
func TestWantedForACommandUnderWayHasItAskedAgain(t *testing.T) {
	for name, reply := range map[string]func(h *hand){
		"no answer": func(h *hand) { h.reply(protocol.Answer{}, errSilence, 30*time.Second) },
		"queued":    func(h *hand) { h.answer(h.queue()) },
	} {
		t.Run("asking/"+name, func(t *testing.T) {
			h := drive(t)
			h.enter(writer())
			id := h.sends(protocol.Acquire).ID
			h.hears(protocol.MessageWanted, id, 0)
			reply(h)
			if again := h.sends(protocol.Acquire).ID; again != id {
				t.Errorf("asks as %s, not as %s", again, id)
			}
			h.reply(protocol.Answer{}, errSilence, 30*time.Second) // once is enough
			h.sendsNothing()
		})
		t.Run("queued/"+name, func(t *testing.T) {
			h, req := queueing(t, writer())
			h.step(h.l.Subscribed)
			h.sends(protocol.Acquire)
			h.hears(protocol.MessageWanted, req.ID, 0)
			reply(h)
			h.sends(protocol.Acquire)
		})
		t.Run("granted too late/"+name, func(t *testing.T) {
			h, req := queueing(t, writer())
			h.now = h.now.Add(handWindow)
			h.step(h.l.Subscribed)
			h.sends(protocol.Acquire)
			h.hears(protocol.MessageGranted, req.ID, h.token())
			reply(h)
			h.sends(protocol.Acquire)
		})
		t.Run("yielding/"+name, func(t *testing.T) {
			a, b := writer(), writer()
			h := holding(t, a)
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
			h.enter(b)
			h.pass(20 * time.Millisecond)
			h.leave(a)
			next := h.sends(protocol.Yield).Next
			h.hears(protocol.MessageWanted, next, 0)
			reply(h)
			if again := h.sends(protocol.Acquire).ID; again != next {
				t.Errorf("asks as %s, not as %s", again, next)
			}
		})
		t.Run("a place/"+name, func(t *testing.T) {
			h := holding(t, reader())
			h.enter(writer())
			id := h.sends(protocol.Acquire).ID
			h.hears(protocol.MessageWanted, id, 0)
			reply(h)
			if again := h.sends(protocol.Acquire).ID; again != id {
				t.Errorf("asks as %s, not as %s", again, id)
			}
		})
	}
}

// A refusal that is older than the message does not make the request unknown.
func TestARequestThatIsWantedIsCanceledWhenItWasRefusedBefore(t *testing.T) {
	h := drive(t)
	h.enter(trying(writer()))
	id := h.sends(protocol.Acquire).ID
	h.hears(protocol.MessageWanted, id, 0)
	h.answer(protocol.Answer{Outcome: protocol.Refused})
	h.cancels(id)
}

// An acquire is carried out, and somebody queues behind it, before its answer is here.
func TestAGrantThatIsWantedBeforeItsAnswerCameIsWanted(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	h.hears(protocol.MessageWanted, h.sends(protocol.Acquire).ID, 0)
	h.answer(h.grant())
	h.in(c)
	if !h.l.grant.wanted {
		t.Error("it is not taken for wanted")
	}
}

// So is a message about a request that is asked about because the message "granted" is not believed alone.
func TestAGrantThatIsWantedWhileItIsConfirmedIsWanted(t *testing.T) {
	h, req := queueing(t, writer(confirm))
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageWanted, req.ID, 0)
	h.answer(h.kept(h.token()))
	if h.l.grant.state != Held || !h.l.grant.wanted {
		t.Errorf("state %v, wanted %v", h.l.grant.state, h.l.grant.wanted)
	}
}

// A yield is granted at once, and somebody queues behind it, before its answer is here.
func TestAGrantByAYieldThatIsWantedBeforeItsAnswerCameIsWanted(t *testing.T) {
	for _, byMessage := range []bool{false, true} {
		a := reader(func(o *Terms) { o.IdleHold = time.Second })
		h := holding(t, a)
		h.leave(a)
		b := h.enter(writer())
		next := h.sends(protocol.Yield).Next
		h.hears(protocol.MessageWanted, next, 0)
		if byMessage {
			h.hears(protocol.MessageGranted, next, h.token())
		} else {
			h.answer(h.grant())
		}
		h.in(b)
		if !h.l.grant.wanted {
			t.Errorf("it is not taken for wanted (granted by a message: %v)", byMessage)
		}
	}
}

// The server joins an id to the queue in fewer calls if it was never sent before.
func TestOnlyTheFirstAcquireOfARequestIsCalledThat(t *testing.T) {
	h := drive(t)
	h.enter(writer())
	if !h.sends(protocol.Acquire).First {
		t.Error("the first one is not")
	}
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.pass(time.Second)
	if h.sends(protocol.Acquire).First {
		t.Error("one after a silence is")
	}
	h.answer(h.queue())
	h.pass(MaxPoll)
	if h.sends(protocol.Acquire).First {
		t.Error("a re-check is")
	}
}
