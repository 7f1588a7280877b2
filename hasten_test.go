package leased

import (
	"testing"
	"time"
)

// The head of the queue is told when the last reader's lease ends by itself. The
// message can be faster than the answer that puts it into the queue, which says
// what was true before.
func TestAMessageAboutTheEndOfTheOwnerMayOvertakeTheAnswer(t *testing.T) {
	w := newWorld(t, 1, true)
	defer w.close()
	w.begin(1)
	w.deny = false
	c := w.clients[0]
	c.step(func(now time.Time, fx *effects) {
		c.lock.enter(&caller{mode: exclusive, opts: &lockOptions{ttl: 30 * time.Second}}, now, fx)
	})
	id := c.lock.grant.req.id
	c.step(func(now time.Time, fx *effects) { c.lock.ends(id, 500*time.Millisecond, now, fx) })
	answered := answer{outcome: enqueued, token: 7, left: time.Minute, echo: noEcho}
	c.step(func(now time.Time, fx *effects) {
		c.lock.answered(&command{verb: acquire, id: id, at: now}, answered, nil, 0, now, fx)
	})
	if due := c.lock.due().Sub(w.now); due > 500*time.Millisecond+afterExpiry {
		t.Errorf("it looks again after %v", due)
	}
}

// Rule 3. The answer was on its way when the subscription came about: what let the
// request in may have been published between the two.
func TestRule3ASubscriptionMayOvertakeTheAnswer(t *testing.T) {
	w := newWorld(t, 1, true)
	defer w.close()
	w.begin(1)
	w.deny = false
	c := w.clients[0]
	c.step(func(now time.Time, fx *effects) {
		c.lock.enter(&caller{mode: exclusive, opts: &lockOptions{ttl: 30 * time.Second}}, now, fx)
	})
	id := c.lock.grant.req.id
	c.step(c.lock.subscribed)
	answered := answer{outcome: enqueued, token: 7, left: time.Minute, echo: noEcho}
	c.step(func(now time.Time, fx *effects) {
		c.lock.answered(&command{verb: acquire, id: id, at: now}, answered, nil, 0, now, fx)
	})
	if c.lock.grant.inFlight != acquire {
		t.Errorf("it looks again after %v", c.lock.due().Sub(w.now))
	}
}
