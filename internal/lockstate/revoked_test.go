package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A message comes by another connection than answers do, so one that says that an operator has
// evicted a grant can come before the answer that gives the grant.

func TestAnEvictionThatOvertakesTheGrantIsHeeded(t *testing.T) {
	for name, token := range map[string]func(g protocol.Answer) uint64{
		"token known":     func(g protocol.Answer) uint64 { return g.Token },
		"token forgotten": func(protocol.Answer) uint64 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			c := h.enter(writer())
			h.sends(protocol.Acquire)
			g := h.grant()
			h.hears(protocol.MessageRevoked, h.l.grant.req.ID, token(g))
			h.answer(g)
			h.out(c)
			h.sends(protocol.Acquire) // it is asked again at once, and what it answers counts
			h.answer(h.grant())
			h.in(c)
		})
	}
}

func TestAnEvictionThatOvertakesTheAnswerToAYieldIsHeeded(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(2 * time.Second) // so that the grant is not kept for others here
	d := h.enter(writer())
	h.leave(c)
	y := h.sends(protocol.Yield)
	g := h.grant()
	h.hears(protocol.MessageRevoked, y.Next, g.Token)
	h.answer(g)
	h.settled(c, nil)
	h.out(d)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(d)
}

func TestAnEvictionOfAnEarlierGrantDoesNotConcernALaterOne(t *testing.T) {
	for name, revoked := range map[string]func(h *hand, id string){
		"by its token": func(h *hand, id string) {
			h.sends(protocol.Acquire)
			h.hears(protocol.MessageRevoked, id, h.token()-1)
		},
		"before it was asked for": func(h *hand, id string) {
			h.answer(h.queue())
			h.sendsNothing()
			h.hears(protocol.MessageRevoked, id, 0)
			h.step(h.l.Subscribed)
			h.sends(protocol.Acquire)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			c := h.enter(writer())
			revoked(h, h.l.grant.req.ID)
			h.answer(h.grant())
			h.in(c)
		})
	}
}

// Messages of a quorum come from several servers, each on a goroutine of its own. So one that says that an
// operator has evicted a grant can come before the one that says that it was granted.
func TestAnEvictionThatOvertakesTheMessageOfTheGrantIsHeeded(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	h.answer(h.queue())
	h.sendsNothing()
	token := h.token()
	h.hears(protocol.MessageRevoked, id, 0)
	h.hears(protocol.MessageGranted, id, token)
	h.out(c)
	h.sends(protocol.Acquire) // it is asked at once, and what it answers counts
	h.answer(h.grant())
	h.in(c)
}

func TestAnEvictionThatOvertakesTheMessageAboutAYieldIsHeeded(t *testing.T) {
	h, _, b, cmd := yielding(t)
	token := h.token()
	h.hears(protocol.MessageRevoked, cmd.Next, token)
	h.hears(protocol.MessageGranted, cmd.Next, token)
	h.out(b)
	h.answer(h.queue())
	h.out(b)
	if again := h.sends(protocol.Acquire); again.ID != cmd.Next {
		t.Errorf("asks as %s, not as %s", again.ID, cmd.Next)
	}
	h.answer(h.grant())
	h.in(b)
}

// On a quorum, the downgrade may have been carried out where nobody evicts.
func TestAnEvictionDuringADowngradeCancelsTheReaderThatItMayHaveMade(t *testing.T) {
	for _, answered := range []bool{false, true} {
		c := writer()
		h := holding(t, c)
		done := h.downgrade(c)
		cmd := h.sends(protocol.Downgrade)
		if answered {
			h.reply(protocol.Answer{}, errSilence, time.Second)
		}
		h.hears(protocol.MessageRevoked, cmd.ID, h.token())
		h.lost(c)
		h.cancels(cmd.Next)
		if until := h.unwanted[0].until; !until.After(h.now) {
			t.Errorf("canceled until %v, a late copy may arrive", until)
		}
		if !answered {
			h.answer(h.grant())
		}
		if !closed(done) {
			t.Error("the downgrade is not through")
		}
		h.leave(c)
		h.sendsNothing()
	}
}

// The message of the grant comes only after the request has been asked about again.
func TestAMessageOfAGrantThatWasEvictedIsNotBelievedLaterEither(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	h.answer(h.queue())
	token := h.token()
	h.hears(protocol.MessageRevoked, id, token)
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageGranted, id, token)
	h.out(c)
	h.answer(h.grant())
	h.in(c)
}
