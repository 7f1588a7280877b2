package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// The callers' half of the state machine: tenure, those who only try, those who
// give up, those of another mode, and Close.

func TestOneWhoOnlyTriesIsTurnedAwayByAnybodyInsideOrBefore(t *testing.T) {
	t.Run("inside", func(t *testing.T) {
		h := holding(t, writer())
		h.turned(h.enter(trying(writer())), ErrLocked)
		h.turned(h.enter(trying(reader())), ErrLocked)
	})
	t.Run("readers inside", func(t *testing.T) {
		h := holding(t, reader())
		h.turned(h.enter(trying(writer())), ErrLocked)
		h.in(h.enter(trying(reader())))
	})
	t.Run("before it", func(t *testing.T) {
		h, _ := queueing(t, writer())
		h.turned(h.enter(trying(writer())), ErrLocked)
		h.sendsNothing()
	})
	t.Run("in Redis", func(t *testing.T) {
		h := drive(t)
		c := h.enter(trying(writer()))
		if cmd := h.sends(protocol.Acquire); cmd.Wait {
			t.Error("one who only tries is to be queued")
		}
		h.answer(protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: h.clock()})
		h.turned(c, ErrLocked)
		h.state(none)
		h.cancels()
	})
	t.Run("an idle grant lets it in", func(t *testing.T) {
		a := writer(func(o *Terms) { o.IdleHold = time.Minute })
		h := holding(t, a)
		h.leave(a)
		h.in(h.enter(trying(writer())))
	})
}

func TestOneWhoOnlyTriesDoesNotOutlastTheFirstTrouble(t *testing.T) {
	h := drive(t)
	tries, waits := trying(writer()), writer()
	h.enter(tries, waits)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.turned(tries, errSilence)
	h.out(waits)
	h.pass(time.Second)
	if cmd := h.sends(protocol.Acquire); !cmd.Wait {
		t.Error("the other is not to be queued")
	}
}

func TestOneWhoOnlyTriesIsTurnedAwayWhenTheRequestOfAllIsQueued(t *testing.T) {
	h := drive(t)
	tries, waits := trying(writer()), writer()
	h.enter(tries, waits)
	h.reply(protocol.Answer{}, refusal("LOADING Redis is loading"), 0) // ends the first attempt of both
	late := trying(writer())
	h.turned(h.enter(late), ErrLocked) // one waits before it
	h.turned(tries, refusal("LOADING Redis is loading"))
	h.answer(h.queue())
	h.out(waits)

	h = drive(t)
	tries, waits = trying(writer()), writer()
	h.enter(tries)
	h.abandon(tries)
	tries = trying(writer())
	h.enter(tries, waits)
	h.answer(h.queue()) // the command of the first, which was enqueued all the same
	h.turned(tries, ErrLocked)
	h.out(waits)
}

// A request without waiting was refused: those who came meanwhile do wait.
func TestOneWhoWaitsBehindOneWhoTriesIsQueued(t *testing.T) {
	h := drive(t)
	tries, waits := trying(writer()), writer()
	h.enter(tries, waits)
	h.answer(protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: h.clock()})
	h.turned(tries, ErrLocked)
	if cmd := h.sends(protocol.Acquire); !cmd.Wait {
		t.Error("it is not to be queued")
	}
	h.out(waits)
}

func TestAnAbandonedRequestIsLeftToTheNextCaller(t *testing.T) {
	t.Run("asking", func(t *testing.T) {
		a, b := writer(), writer()
		h := drive(t)
		h.enter(a, b)
		h.abandon(a)
		h.answer(h.grant())
		h.in(b)
		h.cancels()
	})
	t.Run("queued", func(t *testing.T) {
		a, b := writer(), writer()
		h, req := queueing(t, a)
		h.enter(b)
		h.abandon(a)
		h.sendsNothing()
		h.hears(protocol.MessageGranted, req.ID, h.token())
		h.in(b)
		h.cancels()
	})
}

func TestARequestThatTheLastCallerAbandonsIsGivenBack(t *testing.T) {
	t.Run("queued", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.abandon(c)
		h.cancels(req.ID)
		h.sendsNothing()
		if !h.l.Idle() {
			t.Error("something is left")
		}
	})
	t.Run("queued, looking again", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.step(h.l.Subscribed)
		h.abandon(c)
		h.cancels()
		h.answer(h.queue())
		h.cancels(req.ID)
	})
	t.Run("yielding", func(t *testing.T) {
		h, _, b, _ := yielding(t)
		h.abandon(b)
		h.answer(h.grant())
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.cancels()
	})
	t.Run("yielding in vain", func(t *testing.T) {
		h, _, b, cmd := yielding(t)
		h.abandon(b)
		h.answer(h.queue())
		h.cancels(cmd.Next)
		h.sendsNothing()
	})
	t.Run("admitted", func(t *testing.T) { // too late to abandon
		c := writer()
		h := holding(t, c)
		h.step(func(now time.Time, fx *Effects) {
			if h.l.Abandon(c, now, fx) {
				t.Error("one inside gave up")
			}
		})
		h.in(c)
	})
	t.Run("between others", func(t *testing.T) {
		a, b, c := writer(), writer(), writer()
		h := holding(t, a)
		h.enter(b, c)
		h.abandon(b)
		h.leave(a)
		h.in(c)
	})
}

func TestARequestOfAnotherModeThanTheHeadsIsDropped(t *testing.T) {
	w, r := writer(), reader()
	h, req := queueing(t, w)
	h.enter(r)
	h.abandon(w)
	h.cancels(req.ID)
	if cmd := h.sends(protocol.Acquire); cmd.ID == req.ID || h.l.grant.req.Mode != protocol.Shared {
		t.Errorf("asks for %v as %s", h.l.grant.req.Mode, cmd.ID)
	}
	h.hears(protocol.MessageGranted, req.ID, h.token()) // it crossed with the cancel
	h.out(r)
	h.cancels(req.ID, req.ID)
	h.answer(h.grant())
	h.in(r)
}

// Thousands may give up together, and each holds the lock's mutex meanwhile.
func TestGivingUpCostsTheSameHoweverManyWait(t *testing.T) {
	if race.Enabled {
		t.Skip("it compares times, of one goroutine")
	}
	cost := func(crowd int) time.Duration {
		h := drive(t)
		opts := with()
		all := make([]Caller, crowd)
		for i := range all {
			all[i] = Caller{Mode: protocol.Exclusive, Opts: opts}
			var fx Effects
			h.l.Enter(&all[i], noon, &fx)
			if fx.Send.Verb == protocol.Acquire {
				h.l.Answered(&fx.Send, protocol.Answer{Outcome: protocol.Enqueued, Left: time.Hour}, nil, 0, noon, &Effects{})
			}
		}
		const some = 64
		began := time.Now()
		for i := crowd - some; i < crowd; i++ {
			var fx Effects
			if !h.l.Abandon(&all[i], noon, &fx) {
				t.Fatal("it does not wait")
			}
		}
		return time.Since(began)
	}
	few, many := time.Hour, time.Hour
	for range 20 { // the least of many runs is the machine's best
		few, many = min(few, cost(100)), min(many, cost(100_000))
	}
	if many > 20*few {
		t.Errorf("%v among 100, %v among 100,000", few, many)
	}
}

func TestATryThatInheritsAQueuedRequestIsTurnedAway(t *testing.T) {
	h := drive(t)
	a, b := writer(), trying(writer())
	h.enter(a)
	h.sends(protocol.Acquire)
	h.abandon(a)
	h.enter(b)
	h.answer(h.queue())
	h.turned(b, ErrLocked)
}
