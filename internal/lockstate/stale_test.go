package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What went wrong in a model of the protocol when a rule was left out: the
// traces that docs/design.md lists under traps, as far as the state machine is
// concerned. The simulation finds them by luck, these by name.

func TestTrapB1AGrantedMessageThatIsNotAboveTheFloorIsOld(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.l.grant.req.ID
	h.answer(h.queue())
	old := h.token() // the grant of id that it never heard of, and that expired
	h.pass(2 * time.Second)
	h.step(h.l.Subscribed)
	a := h.queue()
	a.Token = old
	h.answer(a)
	for _, token := range []uint64{1, old - 1, old} {
		h.hears(protocol.MessageGranted, id, token)
		h.out(c)
	}
	h.cancels()
	h.hears(protocol.MessageGranted, id, old+1)
	h.in(c)
	if c.Token != old+1 {
		t.Errorf("token %d, want %d", c.Token, old+1)
	}
}

// Where Redis has forgotten the last token, a token is above the floor if it was given later.
func TestAMessageIsOldThoughTheLastTokenIsForgotten(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.l.grant.req.ID
	h.answer(h.queue())
	old := h.token()
	h.pass(2 * time.Second)
	h.step(h.l.Subscribed)
	a := h.queue()
	a.Token, a.Clock = 0, h.clock()
	h.answer(a)
	h.hears(protocol.MessageGranted, id, old)
	h.out(c)
	h.cancels()
	h.hears(protocol.MessageGranted, id, a.Clock)
	h.in(c)
}

// The floor is a time then. If the server's clock was set back since, a later token may be below it.
func TestAnOldMessageIsFollowedByAReCheck(t *testing.T) {
	h, c := waitsThird(t)
	h.sendsNothing()
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.l.grant.token)
	h.out(c)
	if cmd := h.sends(protocol.Acquire); cmd.Until != 0 {
		t.Error("it is brief")
	}
	h.answer(h.kept(h.token()))
	h.in(c)
}

func TestTrapB3AGrantedMessageForAHeldIDIsIgnored(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.Subscribed)
	token := h.token()
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: h.clock()}) // the re-check was faster
	h.in(c)
	before := h.l.grant
	h.hears(protocol.MessageGranted, req.ID, token)
	if h.l.grant != before {
		t.Errorf("it changed %+v to %+v", before, h.l.grant)
	}
	h.cancels()
	h.sendsNothing()
}

func TestTrapB3ALateQueuedAnswerDoesNotUnmakeAHeldGrant(t *testing.T) {
	c := writer()
	h, _ := overtaken(t, c)
	h.answer(h.olderQueue())
	h.in(c)
	h.state(Held)
	h.cancels()
	h.pass(handTTL)
	if len(h.renewals) == 0 {
		t.Error("it is not renewed")
	}
}

func TestTrapB4AGrantConfirmedByAReplyIsBelievedFromThatCommandsSending(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	h.pass(time.Second)
	h.reply(protocol.Answer{}, errSilence, 0)
	h.pass(time.Second)
	h.answer(h.grant()) // which extends the key
	h.in(c)
	h.trust(time.Second + handWindow)
}

func TestTrapB5AMessageIsTrustedFromTheSendingOfTheLastAcquireAnsweredQueued(t *testing.T) {
	t.Run("of the first", func(t *testing.T) {
		h := drive(t)
		c := h.enter(writer())
		h.pass(time.Second)
		h.answer(h.queue())
		h.pass(time.Second)
		h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		h.in(c)
		h.trust(handWindow)
	})
	t.Run("of a later one", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.Subscribed)
		h.pass(time.Second)
		h.answer(h.queue())
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.in(c)
		h.trust(2*time.Second + handWindow)
	})
	t.Run("not of one under way", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.Subscribed)
		h.pass(time.Second)
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.in(c)
		h.trust(handWindow)
	})
	t.Run("not of one without answer", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.Subscribed)
		h.reply(protocol.Answer{}, errSilence, time.Minute)
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.in(c)
		h.trust(handWindow)
	})
}

func TestTrapB10ARequestQueuedAfterItsCallerGaveUpIsCanceled(t *testing.T) {
	for name, a := range map[string]func(h *hand) protocol.Answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			c := h.enter(writer())
			id := h.sends(protocol.Acquire).ID
			h.abandon(c)
			h.answer(a(h))
			if name == "granted" {
				if cmd := h.sends(protocol.Release); cmd.ID != id {
					t.Errorf("releases %s", cmd.ID)
				}
				return
			}
			h.cancels(id)
			h.state(none)
		})
	}
}

func TestTrapB11WantedForARequestThatIsOverIsAnsweredWithCancel(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.leave(c)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.state(none)
	h.hears(protocol.MessageWanted, id, 0) // a late copy of its acquire made it owner again
	h.cancels(id)
}

func TestTrapB13TokensNeverGoBackWhateverAReplySays(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Hour }
	a, b, c := writer(idle), writer(idle), writer(idle)
	h, req := queueing(t, a)
	h.enter(b)
	h.step(h.l.Subscribed)
	first := h.token()
	h.hears(protocol.MessageGranted, req.ID, first)
	h.leave(a) // the re-check is still under way: b gets the next token
	h.in(b)
	h.answer(h.kept(first))
	h.leave(b)
	h.enter(c)
	h.in(c) // the hand checks that tokens grow

	t.Run("nor with the server's clock", func(t *testing.T) {
		d := writer()
		h.leave(c)
		h.hears(protocol.MessageWanted, req.ID, 0)
		if cmd := h.sends(protocol.Release); cmd.Last != h.top {
			t.Errorf("tells the server of token %d, the last was %d", cmd.Last, h.top)
		}
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.enter(d)
		h.answer(protocol.Answer{Outcome: protocol.Granted, Token: 17, Clock: 17})
		h.in(d)
		if d.ClockLead() != 0 {
			t.Errorf("waits %v for a clock that went back", d.ClockLead())
		}
	})
}

func TestTrapB13TokensOfReadersDoNotGoBackEither(t *testing.T) {
	w, r, again := writer(), reader(), writer()
	h := holding(t, w)
	first := w.Token
	h.leave(w)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.enter(r)
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: 17, Clock: 17}) // flushed, and its clock set back
	if r.Token <= first {
		t.Errorf("a reader's token %d after a writer's %d", r.Token, first)
	}
	h.leave(r)
	if cmd := h.sends(protocol.Release); cmd.Last < first {
		t.Errorf("tells the server of token %d, the last was %d", cmd.Last, first)
	}
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.enter(again)
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: 18, Clock: 18})
	if again.Token <= first || again.Token <= r.Token {
		t.Errorf("tokens %d, %d, then %d", first, r.Token, again.Token)
	}
}

func TestTrapP8AGrantHeardOfTooLateIsAskedForAndNotBelieved(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.now = h.now.Add(handWindow) // the process slept
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.out(c)
	if cmd := h.sends(protocol.Acquire); cmd.ID != req.ID {
		t.Errorf("asks as %s, not as %s", cmd.ID, req.ID)
	}
	h.answer(h.queue())
	h.out(c)
	h.cancels()
}

func TestTrapP9AnOldRevokedDoesNotEndANewerGrant(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id, token := h.l.grant.req.ID, h.l.grant.token
	h.hears(protocol.MessageRevoked, id, token-1)
	h.hears(protocol.MessageRevoked, "leased1:w:1000:c:0000000000000000:AAAAAAAAAAAAAAAA:hand", token+1)
	h.lost()
	h.in(c)
	h.hears(protocol.MessageRevoked, id, token)
	h.lost(c)
	h.leave(c)
	h.settled(c, ErrLeaseLost)
	h.sendsNothing()
	h.cancels()
}

// An operator also deleted what the lock's last token stood in.
func TestARevokedWithoutATokenIsBelieved(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.hears(protocol.MessageRevoked, "leased1:w:1000:c:0000000000000000:AAAAAAAAAAAAAAAA:hand", 0)
	h.lost()
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, 0)
	h.lost(c)
}

func TestTrapP10ARenewalsOutcomeIsAboutItsRequestOnly(t *testing.T) {
	t.Run("after the release", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a)
		h.pass(handTTL / 3)
		h.leave(a)
		h.enter(b)
		h.renewed(h.renewals[0], protocol.NotOurs)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.answer(h.grant())
		h.in(b)
		for _, o := range []protocol.Outcome{protocol.NotOurs, protocol.Unanswered, protocol.Granted} {
			before := h.l.grant
			h.renewed(h.renewals[0], o)
			if h.l.grant != before {
				t.Errorf("outcome %d of an old renewal changed %+v to %+v", o, before, h.l.grant)
			}
		}
		h.lost()
		h.settled(a, nil)
	})
	t.Run("during a yield", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a)
		h.pass(handTTL / 3)
		h.enter(b)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.leave(a) // its tenure is over
		h.sends(protocol.Yield)
		h.renewed(h.renewals[0], protocol.NotOurs)
		h.lost()
		h.answer(h.grant())
		h.in(b)
	})
}

// rechecked returns a lock that was granted by a message while the answer to its
// re-check is still under way.
func rechecked(t *testing.T, c *Caller) (*hand, protocol.Request) {
	t.Helper()
	h, req := queueing(t, c)
	h.pass(MaxPoll)
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.in(c)
	return h, req
}

// again is the answer that the grant is ours already.
func (h *hand) again() protocol.Answer {
	a := h.grant()
	a.Token = h.l.grant.token
	return a
}

func TestAReCheckAnsweredLateDoesNotShortenTheTrustThatARenewalGave(t *testing.T) {
	h, _ := rechecked(t, writer())
	h.pass(3 * time.Second)
	if len(h.renewals) == 0 {
		t.Fatal("it was not renewed")
	}
	h.renewed(h.renewals[0], protocol.Granted)
	want := h.l.grant.trust()
	h.answer(h.again())
	if got := h.l.grant.trust(); !got.Equal(want) {
		t.Errorf("believed until %v, want %v", got.Sub(noon), want.Sub(noon))
	}
}

func TestAReCheckAnsweredLateDoesNotTakeBackThatOthersWantTheLock(t *testing.T) {
	a := writer(func(o *Terms) { o.IdleHold = time.Hour })
	h, req := rechecked(t, a)
	h.hears(protocol.MessageWanted, req.ID, 0)
	h.answer(h.again())
	h.leave(a)
	h.sends(protocol.Release)
}
