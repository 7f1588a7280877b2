package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// The rules of docs/design.md, section 4, as far as they live in the state
// machine, under their numbers there; rule 7 is in renewal_test.go.

func TestRule2AGrantedMessageMayOvertakeTheAnswer(t *testing.T) {
	for name, late := range map[string]func(h *hand) protocol.Answer{
		"queued":  func(h *hand) protocol.Answer { return h.olderQueue() },
		"granted": func(h *hand) protocol.Answer { a := h.grant(); a.Token = h.top; return a },
	} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			c := h.enter(writer())
			h.pass(time.Second)
			h.hears(protocol.MessageGranted, h.sends(protocol.Acquire).ID, h.token())
			h.in(c)
			h.trust(handWindow) // from the sending
			h.answer(late(h))
			h.in(c)
			h.trust(handWindow)
			h.cancels()
			h.leave(c)
			h.sends(protocol.Release)
		})
	}
}

// Until the answer is there, nothing else is sent.
func TestRule2AnUnlockBeforeTheAnswerWaitsForIt(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.hears(protocol.MessageGranted, id, h.token())
	h.leave(c)
	if c.Settled {
		t.Fatal("settled although the lock is not given back")
	}
	h.answer(h.olderQueue())
	if cmd := h.sends(protocol.Release); cmd.ID != id {
		t.Fatalf("releases %s, not %s", cmd.ID, id)
	}
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.settled(c, nil)
	h.cancels()
}

func TestRule3EveryConfirmationOfTheInboxHasAWaiterLookAgain(t *testing.T) {
	h, req := queueing(t, writer())
	h.step(h.l.Subscribed)
	if cmd := h.sends(protocol.Acquire); cmd.ID != req.ID || !cmd.Recheck || !cmd.Wait {
		t.Errorf("looks again with %+v", cmd)
	}
	h.answer(h.queue())
	h.sendsNothing()
}

func TestRule3AWaiterLooksAgainWhenTheOwnersTTLEndsTheLaterTheFurtherBehind(t *testing.T) {
	for place, want := range []time.Duration{1001, 1006, 1011, 1016} {
		h := drive(t)
		h.enter(writer())
		a := h.queue()
		a.Left, a.Place = time.Second, place
		h.answer(a)
		h.pass(want*time.Millisecond - 1)
		h.sendsNothing()
		h.pass(1)
		h.sends(protocol.Acquire)
	}
}

func TestRule3TheOwnersTTLRunsWhileTheAnswerIsOnItsWay(t *testing.T) {
	for _, late := range []time.Duration{400 * time.Millisecond, 2 * time.Second} { // before and after the owner's expiry
		h := drive(t)
		h.enter(writer())
		a := h.queue()
		a.Left = time.Second
		h.pass(late)
		h.answer(a)
		if early := a.Left + AfterExpiry - late; early > 0 {
			h.pass(early - 1)
			h.sendsNothing()
			h.pass(1)
		}
		h.sends(protocol.Acquire)
	}
}

func TestRule3AMessageThatTheOwnersLeaseEndsIsHeededByTheRequestItNamesOnly(t *testing.T) {
	h, req := queueing(t, writer())
	another := h.NewRequest(protocol.Exclusive, handTTL, false, protocol.Origin{}).ID
	ends := func(id string) {
		h.step(func(now time.Time, fx *Effects) { h.l.Ends(id, time.Second, now, fx) })
	}
	ends(another)
	h.pass(time.Second + AfterExpiry)
	h.sendsNothing()
	ends(req.ID)
	h.pass(time.Second + AfterExpiry - 1)
	h.sendsNothing()
	h.pass(1)
	h.sends(protocol.Acquire)
}

func TestRule3AMessageThatTheOwnersLeaseEndsMayOvertakeTheAnswerToAYield(t *testing.T) {
	for _, late := range []time.Duration{10 * time.Millisecond, 2 * time.Second} { // the answer, before and after the end
		h, _, _, cmd := yielding(t)
		h.step(func(now time.Time, fx *Effects) { h.l.Ends(cmd.Next, time.Second, now, fx) })
		h.pass(late)
		a := h.queue() // from before the owner gave the lock back
		a.Left = time.Hour
		h.answer(a)
		if early := time.Second + AfterExpiry - late; early > 0 {
			h.pass(early - 1)
			h.sendsNothing()
			h.pass(1)
		}
		if again := h.sends(protocol.Acquire); again.ID != cmd.Next {
			t.Errorf("asks as %s, not as %s", again.ID, cmd.Next)
		}
		h.answer(a)
		h.pass(time.Second) // that was the re-check, and there is not another one at once
		h.sendsNothing()
	}
}

func TestRule3AWaiterLooksAgainAtAPaceJitteredDownwards(t *testing.T) {
	for ttl, pace := range map[time.Duration]time.Duration{
		900 * time.Millisecond: 300 * time.Millisecond,
		9 * time.Second:        3 * time.Second,
		time.Hour:              3 * time.Second,
	} {
		for _, luck := range []float64{0, 0.5, 0.999} {
			h := drive(t)
			h.luck = luck
			h.enter(writer(func(o *Terms) { o.TTL = ttl }))
			for range 3 { // the pace does not change
				a := h.queue()
				a.Left = time.Hour
				h.answer(a)
				want := pace - time.Duration(float64(pace)/3*luck)
				if got := h.due().Sub(h.now); got != want {
					t.Errorf("TTL %v, luck %v: looks after %v, want %v", ttl, luck, got, want)
				}
				h.pass(want)
				h.sends(protocol.Acquire)
			}
		}
	}
}

// See also TestTrapB1 and TestTrapB5.
func TestRule4ADirectGrantIsConfirmedBeforeHalfOfItsTTLIsGone(t *testing.T) {
	for heard, want := range map[time.Duration]time.Duration{
		0:               10 * time.Second / 3, // the next regular renewal
		time.Second:     13 * time.Second / 3, // the same
		2 * time.Second: 5 * time.Second,      // half of the TTL since the sending
	} {
		h := drive(t)
		c := h.enter(writer())
		a := h.queue()
		a.Left = time.Hour
		h.answer(a)
		h.pass(heard)
		h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		h.in(c)
		h.pass(handTTL)
		if len(h.renewals) == 0 {
			t.Fatal("it is not renewed")
		}
		first := h.renewals[0].At.Sub(noon)
		if first > want || want-first >= handTTL/30 {
			t.Errorf("heard after %v, renewed at %v, want %v or a grid's step before", heard, first, want)
		}
	}
}

func TestRule5AMessageAboutARequestNobodyKnowsIsAnsweredWithCancel(t *testing.T) {
	const stranger = "leased1:w:1000:c:0000000000000000:AAAAAAAAAAAAAAAA:hand"
	for _, kind := range []protocol.MessageKind{protocol.MessageGranted, protocol.MessageWanted} {
		t.Run("none/"+string(kind), func(t *testing.T) {
			h := drive(t)
			h.hears(kind, stranger, 7)
			h.cancels(stranger)
		})
		t.Run("queued/"+string(kind), func(t *testing.T) {
			h, _ := queueing(t, writer())
			h.hears(kind, stranger, 7)
			h.cancels(stranger)
			h.state(queued)
		})
		t.Run("held/"+string(kind), func(t *testing.T) {
			c := writer()
			h := holding(t, c)
			h.hears(kind, stranger, 7)
			h.cancels(stranger)
			h.in(c)
			if h.l.grant.wanted {
				t.Error("another's wanted was taken for the grant's")
			}
		})
		t.Run("releasing/"+string(kind), func(t *testing.T) {
			c := writer()
			h := holding(t, c)
			h.leave(c)
			h.hears(kind, stranger, 7)
			h.cancels(stranger)
			h.sends(protocol.Release)
		})
	}
	t.Run("revoked", func(t *testing.T) { // it owns nothing anymore
		h := drive(t)
		h.hears(protocol.MessageRevoked, stranger, 7)
		h.cancels()
	})
}

// What is known is not canceled.
func TestRule5AMessageAboutTheGrantBeingLetGoIsNotAnswered(t *testing.T) {
	a, b := writer(), writer()
	h := holding(t, a)
	id, first := h.l.grant.req.ID, h.l.grant.token
	h.leave(a)
	h.hears(protocol.MessageWanted, id, 0)
	h.hears(protocol.MessageGranted, id, first)
	h.cancels()
	h.lost()
	h.enter(b)
	h.out(b)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.sends(protocol.Acquire)
	h.cancels()
}

// The server takes us for the owner, so the message was lost.
func TestRule5WantedForAWaitingRequestHasItLookAgain(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.hears(protocol.MessageWanted, req.ID, 0)
	h.sends(protocol.Acquire)
	h.cancels()
	h.answer(h.grant())
	h.in(c)
}

func TestRule14ARequestIsCanceledOnlyAfterItsCommandReturned(t *testing.T) {
	for name, c := range map[string]struct {
		a    protocol.Answer
		err  error
		want int
		till time.Duration // after the answer, how long late copies may arrive
	}{
		"queued":   {a: protocol.Answer{Outcome: protocol.Enqueued}, want: 1},
		"refused":  {a: protocol.Answer{Outcome: protocol.Refused}},
		"no reply": {err: errSilence, want: 1, till: handTTL},
		"refusal":  {err: refusal("NOPERM no")},
	} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			x := h.enter(writer())
			id := h.sends(protocol.Acquire).ID
			h.abandon(x)
			h.pass(time.Second)
			h.cancels()
			h.reply(c.a, c.err, time.Second)
			h.sendsNothing()
			if len(h.unwanted) != c.want {
				t.Fatalf("cancels %+v", h.unwanted)
			}
			if c.want == 0 {
				return
			}
			h.cancels(id)
			switch until := h.unwanted[0].until; {
			case c.till == 0 && !until.IsZero():
				t.Errorf("an answered request is canceled until %v", until)
			case c.till != 0 && until.Sub(h.now) != c.till:
				t.Errorf("canceled until %v from now, late copies may arrive for %v", until.Sub(h.now), c.till)
			}
		})
	}
}

// Also when a message took the request away from the lock meanwhile.
func TestRule14AnUnansweredCommandOfAnEvictedRequestIsCanceledForAsLongAsItMayArrive(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.hears(protocol.MessageGranted, id, h.token())
	h.in(c)
	h.hears(protocol.MessageRevoked, id, h.top)
	h.lost(c)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.cancels(id)
	if until := h.unwanted[0].until; until.Sub(h.now) < handTTL-time.Second {
		t.Errorf("canceled until %v only, although the acquire may still arrive", until)
	}
}

// A request that the server may have heard of is not forgotten when
// its last command was refused.
func TestRule14ACommandWithoutAnswerIsRememberedThroughALaterRefusal(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.pass(time.Second)
	if again := h.sends(protocol.Acquire).ID; again != id {
		t.Errorf("asks again as %s, not as %s", again, id)
	}
	h.reply(protocol.Answer{}, refusal("NOPERM no"), time.Second)
	h.turned(c, refusal("NOPERM no"))
	h.cancels(id)
	if until := h.unwanted[0].until; until.Sub(noon) != handTTL {
		t.Errorf("canceled until %v after the first command", until.Sub(noon))
	}
}

// refusal is an answer of Redis that only an operator can change.

// The ways to be admitted.
func TestRule15NobodyEntersWhenTheTrustWindowIsOver(t *testing.T) {
	t.Run("by an answer", func(t *testing.T) {
		h := drive(t)
		c := h.enter(writer())
		a := h.grant()
		h.pass(handWindow)
		h.answer(a)
		h.out(c)
		id := h.l.grant.req.ID
		if cmd := h.sends(protocol.Acquire); cmd.ID != id {
			t.Errorf("asks as %s, not as %s", cmd.ID, id)
		}
		h.answer(h.grant())
		h.in(c)
		h.trust(2 * handWindow)
	})
	t.Run("locally", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a)
		id := h.l.grant.req.ID
		h.enter(b)
		h.now = h.now.Add(handWindow) // and the watchdog is late
		h.leave(a)
		h.out(b)
		if cmd := h.sends(protocol.Yield); cmd.ID != id || a.Settled {
			t.Errorf("yields %s, not %s, or Unlock does not wait to hear of it", cmd.ID, id)
		}
		h.answer(protocol.Answer{Outcome: protocol.NotOurs}) // it was taken meanwhile
		h.settled(a, ErrLeaseLost)
		h.out(b)
		h.sends(protocol.Acquire)
	})
	t.Run("among readers", func(t *testing.T) {
		a, b := reader(), reader()
		h := holding(t, a)
		h.now = h.now.Add(handWindow)
		h.enter(b)
		h.out(b)
		h.ring()
		h.lost(a)
		h.sends(protocol.Acquire) // under another id: one of ours still works under the first
		h.answer(h.grant())
		h.in(b)
		h.lost(a)
	})
	t.Run("on an idle grant", func(t *testing.T) {
		a, b := writer(func(o *Terms) { o.IdleHold = time.Hour }), writer()
		h := holding(t, a)
		h.leave(a)
		h.settled(a, nil)
		h.sendsNothing()
		h.now = h.now.Add(handWindow)
		h.enter(b)
		h.out(b)
		h.sends(protocol.Acquire)
	})
	t.Run("an instant before, they do", func(t *testing.T) {
		a, b := writer(func(o *Terms) { o.IdleHold = time.Hour }), writer()
		h := holding(t, a)
		h.leave(a)
		h.now = h.now.Add(handWindow - 1)
		h.enter(b)
		h.in(b)
	})
}
