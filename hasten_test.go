package leased

import (
	"testing"
	"time"
)

// What a client hears can be faster than the answer that puts its request into the
// queue, which says what was true before.

// overtaken returns a client whose request was enqueued, as an answer said that came
// after early.
func overtaken(t *testing.T, early func(c *simClient, id string)) *simClient {
	t.Helper()
	w := newWorld(t, true)
	t.Cleanup(w.close)
	w.begin(1)
	w.deny = false
	c := w.clients[0]
	c.step("test", func(now time.Time, fx *effects) {
		c.lock.enter(&caller{mode: exclusive, opts: &lockOptions{ttl: 30 * time.Second}}, now, fx)
	})
	id := c.lock.grant.req.id
	early(c, id)
	answered := answer{outcome: enqueued, token: 7, left: time.Minute, echo: noEcho}
	c.step("test", func(now time.Time, fx *effects) {
		c.lock.answered(&command{verb: acquire, id: id, at: now}, answered, nil, 0, now, fx)
	})
	return c
}

// The head of the queue is told when the last reader's lease ends by itself.
func TestAMessageAboutTheEndOfTheOwnerMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, id string) {
		c.step("test", func(now time.Time, fx *effects) { c.lock.ends(id, 500*time.Millisecond, now, fx) })
	})
	if due := c.lock.due().Sub(c.now()); due > 500*time.Millisecond+afterExpiry {
		t.Errorf("it looks again after %v", due)
	}
}

// Rule 3. What let the request in may have been published before the subscription
// stood.
func TestRule3ASubscriptionMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, _ string) { c.step("subscribed", c.lock.subscribed) })
	if c.lock.grant.inFlight != acquire {
		t.Errorf("it looks again after %v", c.lock.due().Sub(c.now()))
	}
}
