package leased

import (
	"testing"
	"time"
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
		if cmd := h.sends(acquire); cmd.wait {
			t.Error("one who only tries is to be queued")
		}
		h.answer(answer{outcome: refused, token: 1, clock: h.clock()})
		h.turned(c, ErrLocked)
		h.state(none)
		h.cancels()
	})
	t.Run("an idle grant lets it in", func(t *testing.T) {
		a := writer(func(o *lockOptions) { o.idleHold = time.Minute })
		h := holding(t, a)
		h.leave(a)
		h.in(h.enter(trying(writer())))
	})
}

func TestOneWhoOnlyTriesDoesNotOutlastTheFirstTrouble(t *testing.T) {
	h := drive(t)
	tries, waits := trying(writer()), writer()
	h.enter(tries, waits)
	h.reply(answer{}, errSilence, time.Second)
	h.turned(tries, errSilence)
	h.out(waits)
	h.pass(time.Second)
	if cmd := h.sends(acquire); !cmd.wait {
		t.Error("the other is not to be queued")
	}
}

func TestOneWhoOnlyTriesIsTurnedAwayWhenTheRequestOfAllIsQueued(t *testing.T) {
	h := drive(t)
	tries, waits := trying(writer()), writer()
	h.enter(tries, waits)
	h.reply(answer{}, refusal("LOADING Redis is loading"), 0) // ends the first attempt of both
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
	h.answer(answer{outcome: refused, token: 1, clock: h.clock()})
	h.turned(tries, ErrLocked)
	if cmd := h.sends(acquire); !cmd.wait {
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
		h.hears("granted", req.id, h.token())
		h.in(b)
		h.cancels()
	})
}

func TestARequestThatTheLastCallerAbandonsIsGivenBack(t *testing.T) {
	t.Run("queued", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.abandon(c)
		h.cancels(req.id)
		h.sendsNothing()
		if !h.l.idle() {
			t.Error("something is left")
		}
	})
	t.Run("queued, looking again", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.step(h.l.subscribed)
		h.abandon(c)
		h.cancels()
		h.answer(h.queue())
		h.cancels(req.id)
	})
	t.Run("yielding", func(t *testing.T) {
		h, _, b, _ := yielding(t)
		h.abandon(b)
		h.answer(h.grant())
		h.sends(release)
		h.answer(answer{outcome: done})
		h.cancels()
	})
	t.Run("yielding in vain", func(t *testing.T) {
		h, _, b, cmd := yielding(t)
		h.abandon(b)
		h.answer(h.queue())
		h.cancels(cmd.next)
		h.sendsNothing()
	})
	t.Run("admitted", func(t *testing.T) { // too late to abandon
		c := writer()
		h := holding(t, c)
		h.step(func(now time.Time, fx *effects) {
			if h.l.abandon(c, now, fx) {
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
	h.cancels(req.id)
	if cmd := h.sends(acquire); cmd.id == req.id || h.l.grant.req.mode != shared {
		t.Errorf("asks for %v as %s", h.l.grant.req.mode, cmd.id)
	}
	h.hears("granted", req.id, h.token()) // it crossed with the cancel
	h.out(r)
	h.cancels(req.id, req.id)
	h.answer(h.grant())
	h.in(r)
}
