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
