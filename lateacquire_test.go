package leased

import (
	"errors"
	"testing"
	"time"
)

// An acquire without answer may arrive after its request was granted by the next one,
// and let go: it would own the lock, or wait, for nobody.

func TestALateAcquireOfAGrantThatWasLetGoIsCancelled(t *testing.T) {
	again := func(t *testing.T, c *caller) (*hand, string) {
		h := drive(t)
		h.now = time.Now() // which has both clocks
		h.enter(c)
		id := h.sends(acquire).id
		h.reply(answer{}, errors.New("no answer"), time.Millisecond)
		h.pass(time.Millisecond)
		h.sends(acquire)
		h.answer(h.grant())
		h.in(c)
		return h, id
	}
	late := func(t *testing.T, h *hand, id string) {
		t.Helper()
		for _, g := range h.ghosts {
			if g.id == id && g.until.After(h.now.Add(handTTL/2)) {
				return
			}
		}
		t.Errorf("it is not cancelled for as long as the acquire may arrive, but %+v", h.ghosts)
	}
	t.Run("by a release", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.leave(c)
		h.sends(release)
		h.answer(answer{outcome: done})
		h.settled(c, nil)
		late(t, h, id)
	})
	t.Run("by a yield", func(t *testing.T) {
		c, next := writer(), writer(func(o *lockOptions) { o.ttl = 2 * handTTL })
		h, id := again(t, c)
		h.enter(next)
		h.hears("wanted", id, 0)
		h.pass(time.Second)
		h.leave(c)
		h.sends(yield)
		h.answer(h.queue())
		late(t, h, id)
	})
	t.Run("by a downgrade", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.step(func(now time.Time, fx *effects) { h.l.downgrade(c, make(chan struct{}), now, fx) })
		h.sends(downgrade)
		h.answer(h.grant())
		late(t, h, id)
	})
	t.Run("as it was lost", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.hears("revoked", id, 0)
		late(t, h, id)
	})
	t.Run("as nobody waits any more for an idle one that was asked about", func(t *testing.T) {
		c := writer(func(o *lockOptions) { o.idleHold = time.Hour })
		h, id := again(t, c)
		h.leave(c)
		h.sendsNothing()
		h.slept(handMargin + 1) // so that it cannot be entered on without asking
		next := h.enter(writer())
		h.sends(acquire)
		h.abandon(next)
		h.answer(h.queue())
		h.state(none)
		late(t, h, id)
	})
	t.Run("but not where every acquire was answered", func(t *testing.T) {
		c := writer()
		h := holding(t, c)
		h.leave(c)
		h.sends(release)
		h.answer(answer{outcome: done})
		h.cancels()
	})
}
