package leased

import (
	"testing"
	"time"
)

// What went wrong in a model of the protocol when a rule was left out: the
// traces that docs/design.md lists under traps, as far as the state machine is
// concerned. The simulation finds them by luck, these by name.

func TestTrapB1AGrantedMessageThatIsNotAboveTheFloorIsOld(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.l.grant.req.id
	h.answer(h.queue())
	old := h.token() // the grant of id that it never heard of, and that expired
	h.pass(2 * time.Second)
	h.step(h.l.subscribed)
	a := h.queue()
	a.token = old
	h.answer(a)
	for _, token := range []uint64{1, old - 1, old} {
		h.hears("granted", id, token)
		h.out(c)
	}
	h.cancels()
	h.hears("granted", id, old+1)
	h.in(c)
	if c.token != old+1 {
		t.Errorf("token %d, want %d", c.token, old+1)
	}
}

func TestTrapB3AGrantedMessageForAHeldIDIsIgnored(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	token := h.token()
	h.answer(answer{outcome: granted, token: token, clock: h.clock()}) // the re-check was faster
	h.in(c)
	before := h.l.grant
	h.hears("granted", req.id, token)
	if h.l.grant != before {
		t.Errorf("it changed %+v to %+v", before, h.l.grant)
	}
	h.cancels()
	h.sendsNothing()
}

func TestTrapB3ALateQueuedAnswerDoesNotUnmakeAHeldGrant(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.subscribed)
	earlier := h.queue()
	h.hears("granted", req.id, h.token())
	h.in(c)
	h.answer(earlier)
	h.in(c)
	h.state(held)
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
	h.reply(answer{}, errSilence, 0)
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
		h.hears("granted", h.l.grant.req.id, h.token())
		h.in(c)
		h.trust(handWindow)
	})
	t.Run("of a later one", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.subscribed)
		h.pass(time.Second)
		h.answer(h.queue())
		h.hears("granted", req.id, h.token())
		h.in(c)
		h.trust(2*time.Second + handWindow)
	})
	t.Run("not of one under way", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.subscribed)
		h.pass(time.Second)
		h.hears("granted", req.id, h.token())
		h.in(c)
		h.trust(handWindow)
	})
	t.Run("not of one without answer", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.pass(2 * time.Second)
		h.step(h.l.subscribed)
		h.reply(answer{}, errSilence, time.Minute)
		h.hears("granted", req.id, h.token())
		h.in(c)
		h.trust(handWindow)
	})
}

func TestTrapB10ARequestQueuedAfterItsCallerGaveUpIsCancelled(t *testing.T) {
	for name, a := range map[string]func(h *hand) answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			c := h.enter(writer())
			id := h.sends(acquire).id
			h.abandon(c)
			h.answer(a(h))
			if name == "granted" {
				if cmd := h.sends(release); cmd.id != id {
					t.Errorf("releases %s", cmd.id)
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
	id := h.l.grant.req.id
	h.leave(c)
	h.answer(answer{outcome: done})
	h.state(none)
	h.hears("wanted", id, 0) // a late copy of its acquire made it owner again
	h.cancels(id)
}

func TestTrapB13TokensNeverGoBackWhateverAReplySays(t *testing.T) {
	idle := func(o *lockOptions) { o.idleHold = time.Hour }
	a, b, c := writer(idle), writer(idle), writer(idle)
	h, req := queueing(t, a)
	h.enter(b)
	h.step(h.l.subscribed)
	first := h.token()
	h.hears("granted", req.id, first)
	h.leave(a) // the re-check is still under way: b gets the next token
	h.in(b)
	h.answer(answer{outcome: granted, token: first, clock: h.clock()})
	h.leave(b)
	h.enter(c)
	h.in(c) // the hand checks that tokens grow

	t.Run("nor with the server's clock", func(t *testing.T) {
		d := writer()
		h.leave(c)
		h.hears("wanted", req.id, 0)
		if cmd := h.sends(release); cmd.last != h.top {
			t.Errorf("tells the server of token %d, the last was %d", cmd.last, h.top)
		}
		h.answer(answer{outcome: done})
		h.enter(d)
		h.answer(answer{outcome: granted, token: 17, clock: 17})
		h.in(d)
		if d.ahead != 0 {
			t.Errorf("waits %v for a clock that went back", d.ahead)
		}
	})
}

func TestTrapB13TokensOfReadersDoNotGoBackEither(t *testing.T) {
	w, r, again := writer(), reader(), writer()
	h := holding(t, w)
	first := w.token
	h.leave(w)
	h.answer(answer{outcome: done})
	h.enter(r)
	h.answer(answer{outcome: granted, token: 17, clock: 17}) // flushed, and its clock set back
	if r.token <= first {
		t.Errorf("a reader's token %d after a writer's %d", r.token, first)
	}
	h.leave(r)
	if cmd := h.sends(release); cmd.last < first {
		t.Errorf("tells the server of token %d, the last was %d", cmd.last, first)
	}
	h.answer(answer{outcome: done})
	h.enter(again)
	h.answer(answer{outcome: granted, token: 18, clock: 18})
	if again.token <= first || again.token <= r.token {
		t.Errorf("tokens %d, %d, then %d", first, r.token, again.token)
	}
}

func TestTrapP8AGrantHeardOfTooLateIsAskedForAndNotBelieved(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.now = h.now.Add(handWindow) // the process slept
	h.hears("granted", req.id, h.token())
	h.out(c)
	if cmd := h.sends(acquire); cmd.id != req.id {
		t.Errorf("asks as %s, not as %s", cmd.id, req.id)
	}
	h.answer(h.queue())
	h.out(c)
	h.cancels()
}

func TestTrapP9AnOldRevokedDoesNotEndANewerGrant(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id, token := h.l.grant.req.id, h.l.grant.token
	h.hears("revoked", id, token-1)
	h.hears("revoked", "leased1:w:1000:c:0000000000000000:AAAAAAAAAAAAAAAA:hand", token+1)
	h.lost()
	h.in(c)
	h.hears("revoked", id, token)
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
	h.hears("revoked", "leased1:w:1000:c:0000000000000000:AAAAAAAAAAAAAAAA:hand", 0)
	h.lost()
	h.hears("revoked", h.l.grant.req.id, 0)
	h.lost(c)
}

func TestTrapP10ARenewalsOutcomeIsAboutItsRequestOnly(t *testing.T) {
	t.Run("after the release", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a)
		h.pass(handTTL / 3)
		h.leave(a)
		h.enter(b)
		h.renewed(h.renewals[0], notOurs)
		h.sends(release)
		h.answer(answer{outcome: done})
		h.answer(h.grant())
		h.in(b)
		for _, o := range []outcome{notOurs, unanswered, granted} {
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
		h.hears("wanted", h.l.grant.req.id, 0)
		h.leave(a) // its tenure is over
		h.sends(yield)
		h.renewed(h.renewals[0], notOurs)
		h.lost()
		h.answer(h.grant())
		h.in(b)
	})
}
