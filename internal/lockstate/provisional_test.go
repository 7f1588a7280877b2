package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Provisional grants (docs/design.md, section 4): the server keeps what it granted by message
// for a short time only, until the owner has said that it is there.

const provisionalWindow = protocol.ProvisionalTTL - protocol.ProvisionalTTL/100 - 2*time.Millisecond

// provisionally returns a lock whose caller waits in the queue, under an id that will be granted
// provisionally.
func provisionally(t testing.TB, c *Caller) (*hand, protocol.Request) {
	t.Helper()
	h := drive(t)
	h.proof = protocol.Provisionally
	h.enter(c)
	h.sends(protocol.Acquire)
	h.answer(h.queue())
	h.sendsNothing()
	return h, h.l.grant.req
}

// granted returns a lock whose caller is inside by a message that came at once.
func granted(t testing.TB, c *Caller) (*hand, protocol.Request) {
	t.Helper()
	h, req := provisionally(t, c)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.in(c)
	return h, req
}

func TestAProvisionalGrantIsRenewedAtOnceAndThenBelievedForItsTTL(t *testing.T) {
	for _, c := range []*Caller{writer(), reader()} {
		h, req := provisionally(t, c)
		h.pass(500 * time.Millisecond)
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.in(c)
		h.trust(provisionalWindow) // from the basis, as rule 4 says
		h.pass(0)
		if len(h.renewals) != 1 {
			t.Fatalf("%d renewals at once", len(h.renewals))
		}
		h.now = h.now.Add(100 * time.Millisecond)
		h.renewed(h.renewals[0], protocol.Granted)
		h.trust(500*time.Millisecond + handWindow)
		h.pass(handTTL / 4)
		if len(h.renewals) != 1 {
			t.Errorf("%d renewals in a quarter of its TTL", len(h.renewals))
		}
		h.pass(handTTL / 10)
		if len(h.renewals) != 2 {
			t.Errorf("%d renewals in more than a third of it", len(h.renewals))
		}
		h.lost()
	}
}

func TestAProvisionalGrantIsRenewedOftenUntilThatIsAnswered(t *testing.T) {
	for what, outcome := range map[string]func(h *hand, r protocol.Renewal){
		"no answer yet": nil,
		"it failed":     func(h *hand, r protocol.Renewal) { h.renewed(r, protocol.Unanswered) },
	} {
		c := writer()
		h, _ := granted(t, c)
		if outcome != nil {
			h.onRenew = func(r protocol.Renewal) { outcome(h, r) }
		}
		h.pass(provisionalWindow - 1)
		h.lost()
		h.in(c)
		if n := len(h.renewals); n < 4 || n > 20 {
			t.Errorf("%s: %d renewals", what, n)
		}
		h.pass(1)
		h.lost(c) // the renewal, or the server, was away for too long
		for _, r := range h.renewals {
			h.renewed(r, protocol.Granted) // revives nothing
		}
		h.lost(c)
		h.state(none)
	}
}

func TestAProvisionalGrantThatIsNotOursAnyMoreIsLost(t *testing.T) {
	c := writer()
	h, _ := granted(t, c)
	h.pass(0)
	h.renewed(h.renewals[0], protocol.NotOurs)
	h.lost(c)
}

// The message is late: nobody enters before Redis has said whether the id still owns.
func TestAProvisionalGrantOfWhichTooLittleIsLeftIsAskedForFirst(t *testing.T) {
	const last = provisionalWindow - confirmTime
	for age, enters := range map[time.Duration]bool{
		0: true, last - 1: true, last: false, provisionalWindow - 1: false,
		protocol.ProvisionalTTL: false, 2 * protocol.ProvisionalTTL: false,
	} {
		c := writer()
		h, req := provisionally(t, c)
		h.l.grant.recheckAt = h.l.instant(noon.Add(time.Hour)) // it was kept from asking again
		h.pass(age)
		token := h.token()
		h.hears(protocol.MessageGranted, req.ID, token)
		if enters {
			h.in(c)
			continue
		}
		h.out(c)
		if cmd := h.sends(protocol.Acquire); cmd.ID != req.ID {
			t.Fatalf("asks for %s", cmd.ID)
		}
		sent := h.now
		if age < protocol.ProvisionalTTL {
			h.answer(protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: h.clock(), Kept: true})
			h.in(c)
			h.trust(sent.Sub(noon) + handWindow)
			h.pass(0)
			if len(h.renewals) > 0 {
				t.Error("it is renewed, though the answer gave it its TTL")
			}
			continue
		}
		a := h.queue() // it had ended, and the request waits anew
		a.Token = token
		h.answer(a)
		h.out(c)
		h.hears(protocol.MessageGranted, req.ID, token) // doubled
		h.out(c)
		h.hears(protocol.MessageGranted, req.ID, token+1)
		h.in(c)
	}
}

// A message that is lost is made up for by a re-check, which comes in time for the head.
func TestTheHeadLooksEachSecondWhereItsGrantWillBeProvisional(t *testing.T) {
	for what, c := range map[string]struct {
		proof  protocol.Proof
		ttl    time.Duration
		place  int
		within time.Duration
	}{
		"the head":                     {protocol.Provisionally, handTTL, 0, time.Second},
		"the head, with a shorter TTL": {protocol.Provisionally, 2400 * time.Millisecond, 0, 800 * time.Millisecond},
		"behind the head":              {protocol.Provisionally, handTTL, 1, 3 * time.Second},
		"the head, where it is not":    {protocol.Counted, handTTL, 0, 3 * time.Second},
	} {
		h := drive(t)
		h.proof = c.proof
		h.enter(writer(func(o *Terms) { o.TTL = c.ttl }))
		a := h.queue()
		a.Place = c.place
		h.answer(a)
		for range 3 {
			h.pass(c.within - 1)
			h.sendsNothing()
			h.pass(1)
			if h.flight == nil {
				t.Fatalf("%s does not look within %v", what, c.within)
			}
			h.answer(a)
		}
	}
}

func TestAProvisionalGrantIsConfirmedByTheReCheckThatItsMessageOvertook(t *testing.T) {
	for _, late := range []bool{false, true} {
		c := writer()
		h, req := provisionally(t, c)
		h.pass(time.Second)
		h.sends(protocol.Acquire)
		asked := h.now
		h.pass(100 * time.Millisecond)
		token := h.token()
		h.hears(protocol.MessageGranted, req.ID, token)
		h.in(c)
		h.trust(provisionalWindow)
		a := protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: h.clock(), Kept: true}
		if late {
			a.Token-- // about a grant before this one
		}
		h.answer(a)
		if late {
			h.trust(provisionalWindow)
			h.pass(0)
			if len(h.renewals) != 1 {
				t.Errorf("%d renewals", len(h.renewals))
			}
			continue
		}
		h.trust(asked.Sub(noon) + handWindow)
		h.pass(0)
		if len(h.renewals) != 0 {
			t.Errorf("%d renewals", len(h.renewals))
		}
	}
}

// The answer does not say that the grant has not ended in between, and begun anew.
func TestAProvisionalGrantWhoseWindowHasEndedIsNotRevivedByAnAnswer(t *testing.T) {
	for _, c := range []*Caller{writer(), reader()} {
		h, req := provisionally(t, c)
		h.pass(time.Second)
		h.sends(protocol.Acquire)
		token := h.token()
		h.hears(protocol.MessageGranted, req.ID, token)
		h.in(c)
		h.now = noon.Add(provisionalWindow) // and no alarm has rung yet
		h.answer(protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: h.clock(), Kept: true})
		h.lost(c)
	}
}

// The id was owned before, and a renewal of that time comes only now.
func TestAProvisionalGrantIsNotConfirmedByARenewalFromBeforeItsMessage(t *testing.T) {
	for _, o := range []protocol.Outcome{protocol.Granted, protocol.NotOurs} {
		h, req := provisionally(t, writer())
		old := protocol.Renewal{Req: req, At: h.now.Add(time.Millisecond)}
		h.pass(10 * time.Millisecond)
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.pass(0)
		h.renewed(old, o)
		h.lost()
		h.trust(provisionalWindow)
		n := len(h.renewals)
		h.pass(confirmTime)
		if len(h.renewals) == n {
			t.Errorf("%d: it is not renewed again", o)
		}
	}
}

func TestAProvisionalGrantIsReleasedLikeAnyOther(t *testing.T) {
	c := writer()
	h, req := granted(t, c)
	h.leave(c) // before a renewal was sent
	if cmd := h.sends(protocol.Release); cmd.ID != req.ID {
		t.Fatalf("releases %s", cmd.ID)
	}
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.settled(c, nil)
	h.pass(time.Hour)
	if len(h.renewals) != 0 {
		t.Errorf("%d renewals", len(h.renewals))
	}

	c = writer()
	h, _ = granted(t, c)
	h.pass(0)
	h.leave(c)
	h.renewed(h.renewals[0], protocol.NotOurs) // it crossed with the release
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.NotOurs}) // its time was over
	h.settled(c, ErrLeaseLost)
}

func TestAProvisionalGrantThatHasEndedAdmitsNoLocalCaller(t *testing.T) {
	a, b := writer(func(o *Terms) { o.IdleHold = time.Hour }), writer()
	h, _ := granted(t, a)
	h.leave(a)
	h.sendsNothing() // it idles
	h.now = h.now.Add(provisionalWindow)
	h.enter(b)
	h.out(b)
	h.sends(protocol.Acquire)
}

func TestAProvisionalGrantByAMessageInsteadOfAYieldsAnswerIsProvisionalToo(t *testing.T) {
	first, second := writer(func(o *Terms) { o.Handoffs = 1 }), writer()
	h := drive(t)
	h.proof = protocol.Provisionally
	h.enter(first)
	h.answer(h.grant())
	h.trust(handWindow) // an answer is no message
	h.enter(second)
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.pass(time.Second)
	h.leave(first)
	next := h.sends(protocol.Yield).Next
	yielded := h.now
	h.pass(100 * time.Millisecond)
	h.hears(protocol.MessageGranted, next, h.token())
	h.in(second)
	h.trust(yielded.Sub(noon) + provisionalWindow)
	h.pass(0)
	if len(h.renewals) != 1 {
		t.Errorf("%d renewals", len(h.renewals))
	}

	h.leave(second) // and late
	h.reply(protocol.Answer{}, errSilence, 0)
}

func TestAProvisionalGrantThatIsDowngradedIsConfirmedByThat(t *testing.T) {
	c := writer()
	h, _ := granted(t, c)
	h.downgrade(c)
	h.sends(protocol.Downgrade)
	h.pass(time.Second)
	h.answer(h.grant())
	h.lost()
	h.trust(handWindow)
}

func TestAProvisionalGrantEndsWhileTheMachineSleeps(t *testing.T) {
	for name, d := range map[string]time.Duration{"slept": protocol.ProvisionalTTL, "set back": -time.Hour, "barely": 22*time.Millisecond + 1} {
		a, b := writer(), writer()
		h := driveFrom(t, time.Now()) // which has both clocks
		h.proof = protocol.Provisionally
		h.enter(a, b)
		h.answer(h.queue())
		h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		h.in(a)
		h.slept(d)
		h.step(h.l.Tick)
		if d == protocol.ProvisionalTTL {
			h.lost(a)
			continue
		}
		h.lost()
		h.leave(a)
		h.out(b) // until Redis has said what is so
		if name == "" {
			t.Error(name)
		}
	}
}

func TestAProvisionalGrantOfAShortTTLIsLikeAnyOther(t *testing.T) {
	c := writer(func(o *Terms) { o.TTL = protocol.ProvisionalTTL })
	h, _ := granted(t, c)
	h.trust(provisionalWindow)
	h.pass(protocol.ProvisionalTTL / 4)
	if len(h.renewals) != 0 {
		t.Errorf("%d renewals at once", len(h.renewals))
	}
}

func TestAProvisionalGrantThatReplicasMustHaveIsAskedFor(t *testing.T) {
	c := writer(confirm)
	h, req := provisionally(t, c)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.out(c)
	h.sends(protocol.Acquire)
}

// Nobody waits for it anymore.
func TestAProvisionalGrantWithoutACallerIsCanceled(t *testing.T) {
	c := writer()
	h, req := provisionally(t, c)
	h.abandon(c)
	h.cancels(req.ID)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.cancels(req.ID, req.ID)
	h.state(none)
	if len(h.renewals) != 0 {
		t.Errorf("%d renewals", len(h.renewals))
	}
}

func TestAGrantOfWhichACountIsProofIsNotProvisional(t *testing.T) {
	c := writer()
	h, req := queueing(t, c)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.in(c)
	h.trust(handWindow)
	h.pass(handTTL / 4)
	if len(h.renewals) != 0 {
		t.Errorf("%d renewals", len(h.renewals))
	}
}
