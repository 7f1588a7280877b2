package simulation

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
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
	c.step("test", func(now time.Time, fx *lockstate.Effects) {
		c.lock.Enter(&lockstate.Caller{Mode: protocol.Exclusive, Opts: &lockstate.Terms{TTL: 30 * time.Second}}, now, fx)
	})
	id := c.status().Req.ID
	early(c, id)
	answered := protocol.Answer{Outcome: protocol.Enqueued, Token: 7, Left: time.Minute, Echo: protocol.NoEcho}
	c.step("test", func(now time.Time, fx *lockstate.Effects) {
		c.lock.Answered(&protocol.Command{Verb: protocol.Acquire, ID: id, At: now}, answered, nil, 0, now, fx)
	})
	return c
}

// The head of the queue is told when the last reader's lease ends by itself.
func TestAMessageAboutTheEndOfTheOwnerMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, id string) {
		c.step("test", func(now time.Time, fx *lockstate.Effects) { c.lock.Ends(id, 500*time.Millisecond, now, fx) })
	})
	if due := c.lock.Due().Time(c.Start()).Sub(c.now()); due > 500*time.Millisecond+lockstate.AfterExpiry {
		t.Errorf("it looks again after %v", due)
	}
}

// Rule 3. What let the request in may have been published before the subscription
// stood.
func TestRule3ASubscriptionMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, _ string) { c.step("subscribed", c.lock.Subscribed) })
	if c.status().InFlight != protocol.Acquire {
		t.Errorf("it looks again after %v", c.lock.Due().Time(c.Start()).Sub(c.now()))
	}
}
