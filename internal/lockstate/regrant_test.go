package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What Redis gives an id a second time, it has taken from it in between.

func TestAGrantThatIsAnsweredAnewWasLost(t *testing.T) {
	c := writer()
	h, id := overtaken(t, c)
	h.answer(h.grant())
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

func TestAGrantThatIsToldAnewWasLost(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.hears(protocol.MessageGranted, id, h.top+1)
	h.in(c)
	if cmd := h.sends(protocol.Acquire); cmd.ID != id {
		t.Fatalf("asks about %s", cmd.ID)
	}
	h.answer(h.kept(h.top + 1))
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

func TestAGrantThatIsFalselyToldAnewGoesOn(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.hears(protocol.MessageGranted, id, h.top+1)
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top))
	h.in(c)
	h.state(Held)
	h.cancels()
}

func TestAnOwnersQuestionThatOneCallCouldNotFinishHasTheGrantRenewedAtOnce(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.top+1) // falsely, so it asks
	h.sends(protocol.Acquire)
	h.answer(unfinishedAnswer(protocol.Answer{Outcome: protocol.Refused, Blocker: "another"}))
	if due := h.due(); due.After(h.now) {
		t.Errorf("renewed after %v, although it is said not to own the lock", due.Sub(h.now))
	}
}

func TestAReadersGrantThatIsToldAnewWasLost(t *testing.T) {
	c := reader()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.hears(protocol.MessageGranted, id, h.top+1)
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

func TestAnOwnerThatIsAnsweredThatItWaitsLostItsGrant(t *testing.T) {
	c := writer()
	h, id := overtaken(t, c)
	a := h.queue()
	a.Token = h.top + 1 // another's, since
	h.answer(a)
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

// If Redis has forgotten the token, the answer does not say whether the grant came before it.
func TestAnOwnerThatIsAnsweredThatItWaitsButNotSinceWhenAsks(t *testing.T) {
	c := writer()
	h, _ := overtaken(t, c)
	a := h.queue()
	a.Token = 0
	h.answer(a)
	h.in(c)
	if cmd := h.sends(protocol.Acquire); !cmd.Question {
		t.Errorf("it sends %+v", cmd)
	}
	h.answer(h.kept(h.top))
	h.in(c)
	h.state(Held)
}

// The question then makes no grant of what waits in the queue, and nobody waits for that.
func TestWhatAnOwnerLeftInTheQueueButNotSinceWhenIsCanceled(t *testing.T) {
	for what, loses := range map[string]func(h *hand, id string){
		"a renewal says so": func(h *hand, _ string) {
			h.ring()
			h.renewed(h.renewals[0], protocol.NotOurs)
		},
		"it is evicted": func(h *hand, id string) { h.hears(protocol.MessageRevoked, id, h.l.grant.token) },
	} {
		t.Run(what, func(t *testing.T) {
			c := writer()
			h, id := overtaken(t, c)
			a := h.queue()
			a.Token = 0
			h.answer(a)
			h.sends(protocol.Acquire)
			h.answer(protocol.Answer{Outcome: protocol.NotOurs})
			loses(h, id)
			h.lost(c)
			h.cancels(id)
		})
	}
}

func TestAGrantThatIsExtendedGoesOn(t *testing.T) {
	c := writer()
	h, _ := overtaken(t, c)
	h.pass(time.Millisecond)
	h.answer(h.kept(h.top))
	h.in(c)
	h.state(Held)
	h.cancels()
}

// A key that was evicted, or deleted by hand, says nothing of the lock. Redis keeps the token that it drew
// then, and answers with it from then on.
func TestAGrantWhoseTokenWasForgottenGoesOnWithTheNewOne(t *testing.T) {
	c := writer()
	h, id := overtaken(t, c)
	a := h.kept(h.top + 1)
	a.Forgot = true
	h.answer(a)
	h.in(c)
	h.state(Held)
	h.cancels()
	h.hears(protocol.MessageGranted, id, a.Token+1) // falsely, so it asks
	h.sends(protocol.Acquire)
	h.answer(h.kept(a.Token))
	h.in(c)
	h.state(Held)
	h.cancels()
}

// The server's clock went back, too.
func TestAGrantWhoseTokenWasForgottenGoesOnWithItsOwnIfThatIsGreater(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.pass(time.Second)
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.in(c)
	h.trust(handWindow)
	a := h.kept(h.top - 1)
	a.Forgot = true
	h.answer(a)
	h.trust(time.Second + handWindow)
	h.hears(protocol.MessageGranted, req.ID, h.top) // the one that it has
	h.sendsNothing()
	h.in(c)
}

// What is canceled must not be granted again, because a copy of the cancel can arrive at any time.
func TestARequestThatWasNotConfirmedGoesOnUnderAnotherID(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, errUnconfirmed, time.Second)
	h.cancels(id)
	h.out(c)
	h.pass(time.Second - time.Millisecond)
	h.sendsNothing()
	h.pass(time.Millisecond)
	cmd := h.sends(protocol.Acquire)
	if cmd.ID == id || !cmd.First {
		t.Errorf("it asks again with %+v", cmd)
	}
	h.answer(h.queue())
	if !h.l.LackedReplicas() { // so the owner that it waits for now says little
		t.Error("it forgets that a grant was not confirmed")
	}
	h.hears(protocol.MessageGranted, cmd.ID, h.token())
	h.in(c)
	if h.l.LackedReplicas() {
		t.Error("a grant that counts is taken for one that was not confirmed")
	}
	h.cancels(id)
}

func TestAQueuedRequestThatWasNotConfirmedGoesOnUnderAnotherID(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.reply(protocol.Answer{}, errUnconfirmed, time.Second)
	h.cancels(req.ID)
	h.hears(protocol.MessageGranted, req.ID, h.token()) // from before the cancel
	h.out(c)
	h.pass(time.Second)
	if cmd := h.sends(protocol.Acquire); cmd.ID == req.ID {
		t.Errorf("it asks again with %+v", cmd)
	}
}

// Replicas may be missing for days, and each time another process may take the lock meanwhile.
func TestARequestThatIsNotConfirmedAgainAndAgainHasFewEvents(t *testing.T) {
	c := traced(writer(), 1)
	h, _ := queueing(t, c)
	for range 2 * maxEvents {
		h.step(h.l.Subscribed)
		h.sends(protocol.Acquire)
		h.reply(protocol.Answer{}, errUnconfirmed, time.Second)
		h.pass(time.Second)
		h.sends(protocol.Acquire)
		h.answer(h.queue())
	}
	if n := len(c.Events.List); n < 3 || n > maxEvents {
		t.Errorf("%d events", n)
	}
}

func TestThatACallerWaitsBehindOthersIsToldAfterAnyNumberOfErrors(t *testing.T) {
	c := traced(writer(), 1)
	h := drive(t)
	h.enter(c)
	for range 2 * maxEvents {
		h.sends(protocol.Acquire)
		h.reply(protocol.Answer{}, errSilence, time.Second)
		h.pass(time.Second)
	}
	h.sends(protocol.Acquire)
	h.answer(h.queue())
	if n := len(c.Events.List); n != maxEvents+1 || c.Events.List[n-1].What != EventQueuedInRedis {
		t.Errorf("%d events, the last is %v", n, c.Events.List[n-1].What)
	}
}

// Redis made the writer the owner, so it has forgotten our readers, whoever confirms that.
func TestAPlaceThatWasNotConfirmedShowsThatTheReadersLostTheLock(t *testing.T) {
	r, w := reader(), writer()
	h := holding(t, r)
	h.enter(w)
	place := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, errUnconfirmed, time.Second)
	h.lost(r)
	h.cancels(place)
	h.sendsNothing() // the reader is still inside
	h.leave(r)
	if cmd := h.sends(protocol.Acquire); cmd.ID == place || cmd.Own != "" {
		t.Errorf("it asks with %+v", cmd)
	}
}

// The next process in the queue has asked its owner for the lock meanwhile, and that is given up.
func TestAnOwnerThatWasNotConfirmedPausesAlthoughItIsWanted(t *testing.T) {
	h := drive(t)
	h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.hears(protocol.MessageWanted, id, 0)
	h.reply(protocol.Answer{}, errUnconfirmed, time.Second)
	h.cancels(id)
	h.sendsNothing()
	h.pass(time.Second)
	h.sends(protocol.Acquire)
}

// Nobody waits anymore when it turns out that too few replicas have the grant.
func TestARequestThatWasGivenUpAndNotConfirmedIsCanceled(t *testing.T) {
	for _, why := range []error{errUnconfirmed, errHalfRun} {
		c := writer()
		h := drive(t)
		h.enter(c)
		id := h.sends(protocol.Acquire).ID
		h.abandon(c)
		h.reply(protocol.Answer{}, why, time.Second)
		h.sendsNothing()
		h.cancels(id)
	}
}

// The place ended with the readers' grant while it was asked for.
func TestAPlaceThatIsGoneAndWasNotConfirmedIsCanceled(t *testing.T) {
	for _, why := range []error{errWaitRefused, errHalfRun} {
		r, w := reader(), writer()
		h := holding(t, r)
		h.enter(w)
		place := h.sends(protocol.Acquire).ID
		h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.l.grant.token)
		h.lost(r)
		h.unwanted = nil
		h.reply(protocol.Answer{}, why, 0)
		h.cancels(place)
	}
}

func TestWhatAScriptHasDoneThatWasStoppedHalfWayIsCanceled(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	h.reply(protocol.Answer{}, errHalfRun, time.Second)
	h.turned(c, errHalfRun)
	h.sendsNothing()
	h.cancels(id)
}

func TestAReadersGrantThatIsExtendedGoesOn(t *testing.T) {
	c := reader()
	h, _ := overtaken(t, c)
	h.answer(h.kept(h.top + 1)) // another reader's
	h.in(c)
	h.state(Held)
	h.cancels()
}

func TestAGrantThatIsToldAnewWhileItIsLetGoWasLost(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.leave(c)
	h.sends(protocol.Release)
	h.hears(protocol.MessageGranted, id, h.top+1) // by a late acquire: another was inside before
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.lost(c)
	h.settled(c, ErrLeaseLost)
}

// One command at a time, also where a grant that is being downgraded is asked about when its lease ends.
func TestAGrantThatIsAskedAboutWhileItIsDowngradedSendsNothingBesides(t *testing.T) {
	c := writer()
	h := drive(t)
	h.connects = true // so it asks once whether it is wanted
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	h.answer(h.grant())
	h.downgrade(c)
	next := h.sends(protocol.Downgrade).Next
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.connects = false
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.leave(c)
	h.enter(writer())
	if cmd := h.sends(protocol.Acquire); cmd.ID != id {
		t.Errorf("asks about %s", cmd.ID)
	}
	h.answer(h.kept(h.top))
	if cmd := h.sends(protocol.Acquire); cmd.ID == id || cmd.ID == next {
		t.Errorf("asks about %s", cmd.ID)
	}
}

// Redis can have restarted from an older state, in which this owned; others had the lock
// since that token was given.
func TestAGrantOfAnOlderStateOfTheServerGivesTokensOfNow(t *testing.T) {
	for name, c := range map[string]*Caller{"writer": writer(), "reader": reader()} {
		t.Run(name, func(t *testing.T) {
			h, _ := queueing(t, c)
			before := h.grant()
			before.Kept = true
			h.now = h.now.Add(time.Second)
			h.top = h.clock() - 1 // another's, since
			before.Clock = h.clock()
			h.step(h.l.Subscribed)
			h.answer(before)
			h.in(c)
			h.leave(c)
			if cmd := h.sends(protocol.Release); cmd.Last != c.Token {
				t.Errorf("released with %d, its token was %d", cmd.Last, c.Token)
			}
		})
	}
}

// The server's clock went back to before the last reader's token, and so did its data.
func TestReadersOfAnOlderStateOfTheServerGetGreaterTokens(t *testing.T) {
	c := reader()
	h := holding(t, c).keep()
	h.leave(c)
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	again := reader()
	h.enter(again)
	h.sends(protocol.Acquire)
	older := h.kept(h.top - 2000)
	older.Clock = h.top - 1000
	h.answer(older)
	h.in(again)
	if again.Token <= c.Token {
		t.Errorf("token %d after %d", again.Token, c.Token)
	}
}

// Everything is forgotten, and the server's clock went back.
func TestAGrantThatIsAnsweredAnewWithASmallerTokenWasLost(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.hears(protocol.MessageGranted, id, h.top+1)
	h.sends(protocol.Acquire)
	h.answer(protocol.Answer{Outcome: protocol.Granted, Token: h.top - 3_600_000_000, Clock: h.clock() - 3_600_000_000})
	h.lost(c)
	h.leave(c)
	h.cancels(id)
}

// A late copy had the request queue, and granted, again. When that is heard the grant is
// over, and another process may have the lock, though the request was repeated since.
func TestAGrantFromBeforeARequestWasRepeatedIsNotBelievedForLonger(t *testing.T) {
	c := writer()
	h := drive(t)
	h.enter(c)
	id := h.sends(protocol.Acquire).ID
	first := h.grant()
	h.now = h.now.Add(handTTL)
	second := h.token()
	h.now = h.now.Add(handTTL)
	h.answer(first)
	h.out(c)
	if cmd := h.sends(protocol.Acquire); cmd.ID != id {
		t.Fatalf("asks for %s", cmd.ID)
	}
	h.hears(protocol.MessageGranted, id, second)
	h.out(c)
	h.answer(h.queue())
	h.out(c)
	h.hears(protocol.MessageGranted, id, h.token())
	h.in(c)
}
