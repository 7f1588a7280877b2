package simulation

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// A message can overtake the answer that says that the client's request is queued. What that
// answer says was true before the message.

// overtaken returns a client with a queued request, about which the answer arrived only after
// early was called.
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

// The head of the queue is told when the last reader's lease will expire.
func TestAMessageAboutTheEndOfTheOwnerMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, id string) {
		c.step("test", func(now time.Time, fx *lockstate.Effects) { c.lock.Ends(id, 500*time.Millisecond, now, fx) })
	})
	if due := c.lock.Due().Time(c.Start()).Sub(c.now()); due > 500*time.Millisecond+lockstate.AfterExpiry {
		t.Errorf("the client re-checks only after %v", due)
	}
}

// Rule 3. The message that grants the request may have been published before the
// subscription was established.
func TestRule3ASubscriptionMayOvertakeTheAnswer(t *testing.T) {
	c := overtaken(t, func(c *simClient, _ string) { c.step("subscribed", c.lock.Subscribed) })
	if c.status().InFlight != protocol.Acquire {
		t.Errorf("the client re-checks only after %v", c.lock.Due().Time(c.Start()).Sub(c.now()))
	}
}
