package leased

import (
	"testing"
	"time"
)

// Section 5: suspended machines.
func TestAGrantIsConfirmedAfterASuspensionBeforeAnybodyIsAdmitted(t *testing.T) {
	for name, d := range map[string]time.Duration{"slept": time.Hour, "set back": -time.Hour, "barely": handMargin + 1} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			h.now = time.Now() // which has both clocks
			a, b, c := writer(), writer(func(o *lockOptions) { o.idleHold = time.Hour }), writer()
			h.enter(a, b)
			h.answer(h.grant())
			id := h.l.grant.req.id
			h.slept(d)
			h.leave(a)
			h.out(b)
			if cmd := h.sends(yield); cmd.id != id || a.settled {
				t.Errorf("yields %s, not %s, or Unlock does not wait to hear of it", cmd.id, id)
			}
			h.answer(h.grant())
			h.settled(a, nil)
			h.in(b)
			h.leave(b)
			h.slept(d)
			h.enter(c)
			h.out(c)
			h.sends(acquire)
			h.answer(h.queue()) // it was taken meanwhile
			h.out(c)
			h.cancels()
		})
	}
}

func TestADriftWithinTheMarginCostsNothing(t *testing.T) {
	h := drive(t)
	h.now = time.Now()
	a, b := writer(), writer()
	h.enter(a, b)
	h.answer(h.grant())
	h.slept(handMargin)
	h.leave(a)
	h.in(b)
	h.sendsNothing()
}

// Redis is away, so nobody but our clocks can tell.
func TestALeaseEndsWithItsWindowByWhicheverClockMovedFurther(t *testing.T) {
	const asleep = 4 * time.Second
	for name, c := range map[string]struct {
		slept time.Duration // a second after the grant
		after time.Duration // that it was awake, until the end
	}{
		"slept for an hour":            {time.Hour, 0},
		"slept for just its window":    {handWindow - time.Second, 0},
		"slept for a part of it":       {asleep, handWindow - time.Second - asleep},
		"the wall clock was set back":  {-time.Hour, handWindow - time.Second},
		"a drift of less than a blink": {1, handWindow - time.Second - 1},
	} {
		for event, look := range map[string]func(h *hand){
			"a tick":             func(h *hand) { h.step(h.l.tick) },
			"another who comes":  func(h *hand) { h.enter(writer()) },
			"a message":          func(h *hand) { h.hears("wanted", h.l.grant.req.id, 0) },
			"a renewal's answer": func(h *hand) { h.renewed(renewal{req: h.l.grant.req, at: h.now}, unanswered) },
		} {
			t.Run(name+"/"+event, func(t *testing.T) {
				h := drive(t)
				h.now = time.Now()
				w := writer()
				h.enter(w)
				h.answer(h.grant())
				h.pass(time.Second)
				h.slept(c.slept)
				if c.after > 0 {
					h.now = h.now.Add(c.after - 1)
					if until := h.l.trustedUntil(w, h.now); !until.After(h.now) {
						t.Errorf("trusted until %v ago", h.now.Sub(until))
					}
					look(h)
					h.lost()
					h.now = h.now.Add(1)
				}
				if until := h.l.trustedUntil(w, h.now); until.After(h.now) {
					t.Errorf("it is trusted for another %v", until.Sub(h.now))
				}
				look(h)
				h.lost(w)
			})
		}
	}
}

// What was drawn from the window is drawn from the alarm, too.
func TestALeaseIsLookedAtAgainWhenItsWindowEndsAfterASleep(t *testing.T) {
	h := drive(t)
	h.now = time.Now()
	w := writer()
	h.enter(w)
	h.answer(h.grant())
	h.pass(time.Second)
	h.slept(4 * time.Second)
	h.step(h.l.tick) // whenever that is
	if len(h.renewals) != 1 || !h.renewals[0].at.Equal(h.now) {
		t.Errorf("%d renewals were sent at once", len(h.renewals))
	}
	h.pass(handWindow - 5*time.Second - 1)
	h.lost()
	h.pass(1)
	h.lost(w)
}

func TestAMessageThatASleepMadeOldIsNotBelieved(t *testing.T) {
	t.Run("of a request", func(t *testing.T) {
		h := drive(t)
		h.now = time.Now()
		w := writer()
		h.enter(w)
		h.answer(h.queue())
		h.slept(handWindow)
		h.hears("granted", h.l.grant.req.id, h.token())
		h.out(w)
		h.sends(acquire)
	})
	t.Run("of a yield", func(t *testing.T) {
		h := drive(t)
		h.now = time.Now()
		a, b := writer(), writer()
		h.enter(a)
		h.answer(h.grant())
		h.hears("wanted", h.l.grant.req.id, 0)
		h.enter(b)
		h.pass(20 * time.Millisecond)
		h.leave(a)
		next := h.sends(yield).next
		h.slept(handWindow)
		h.hears("granted", next, h.token())
		h.out(b)
	})
	t.Run("of a renewal", func(t *testing.T) {
		h := drive(t)
		h.now = time.Now()
		w := writer()
		h.enter(w)
		h.answer(h.grant())
		h.pass(handTTL / 3)
		h.slept(handWindow)
		h.renewed(h.renewals[0], granted)
		h.lost(w)
	})
}

// An alarm is late by the sleep; what else the watchdog has to do has it look first.
func TestTheWatchdogLooksAtAllLocksWithinASecondOfWaking(t *testing.T) {
	w := newWatchdog(nil)
	var locks [3]entry
	now := time.Now()
	for i := range locks {
		locks[i].alarm.owner = &locks[i]
		w.set(&locks[i].alarm, now.Add(time.Duration(i+8)*time.Hour))
	}
	another := alarm{owner: &inbox{}}
	w.set(&another, now.Add(time.Hour)) // an echo is not late because the machine slept
	if due := w.take(now, nil); len(due) != 0 {
		t.Fatalf("%d alarms rang", len(due))
	}
	if next := w.plan(now); next.Sub(now) > time.Second {
		t.Errorf("the clocks are compared after %v", next.Sub(now))
	}
	now = asleep(t, now, -time.Hour)
	if due := w.take(now, nil); len(due) != 0 {
		t.Errorf("%d alarms rang because the clock was set back", len(due))
	}
	now = asleep(t, now, time.Minute)
	if due := w.take(now, nil); len(due) != len(locks) {
		t.Errorf("%d alarms rang after a sleep", len(due))
	}
	if another.index == 0 || len(w.alarms) != 1 {
		t.Errorf("%d alarms are left", len(w.alarms))
	}
	if w.remove(&another); !w.plan(now).IsZero() {
		t.Error("the clocks are compared for nothing")
	}
}
