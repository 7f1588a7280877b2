package simulation

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// In some worlds the lock has WithReplicas: the server has a replica, each command that makes an
// owner is followed by WAIT, and in a failover the replica takes the server's place with what it
// has received. No such failover is an accident: what it takes was never confirmed. So nobody is
// excused for two owners at once, or for a lease that is lost although it was confirmed.

// commander is what clients send their commands to.
type commander interface {
	Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error)
	Renew(ctx context.Context, batch []protocol.Renewal)
	Touch(ctx context.Context, batch []protocol.Renewal) error
	Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled
}

// replicasPercent is how many of a hundred worlds have a replica.
const replicasPercent = 20

// chooseReplicas decides whether the server of this world has a replica. Like chooseChecks, it draws from
// a source of its own.
func (w *world) chooseReplicas() {
	w.copying = rand.New(rand.NewPCG(uint64(w.seed), 5))
	w.has[replicas] = w.copying.IntN(100) < replicasPercent
}

// replicate makes the choice effective.
func (w *world) replicate() {
	w.commands, w.server.wait = w.srv, nil
	if w.has[replicas] {
		delete(w.has, olderState) // the state that was saved is the replica's
		w.commands = redisserver.Replicated(w.srv, 1, time.Second)
		w.server.wait = w.wait
	}
}

// wait is WAIT. It returns how many replicas have all that was written so far. A replica can have it
// although its word came too late to be counted.
func (w *world) wait() (int64, error) {
	luck := w.copying.IntN(100)
	switch {
	case w.calm || luck >= 25:
		w.save()
		return 1, nil
	case luck < 2:
		w.count("WAIT is refused")
		return 0, simAnswer("ERR WAIT cannot be used here")
	case luck < 10:
		w.count("WAIT counts a replica too late")
		w.save()
	default:
		w.count("WAIT counts no replica")
	}
	return 0, nil
}

// unconfirmed reports whether err says that too few replicas have a grant.
func unconfirmed(err error) bool { return errors.Is(err, protocol.ErrNoReplicas) }

// failOver has the replica take the server's place. Owners that have not been confirmed, places in
// the queue, releases, cool-downs and tokens can be lost.
func (w *world) failOver() {
	w.count("a failover")
	w.logf("FAILOVER")
	w.unclean = true
	w.load()
	v := w.lookAgain()
	for _, id := range append(sortedKeys(v.readers), append(v.queue, v.value)...) {
		w.copied[id] = w.copied[id] || w.given[id] // it can own again after its release
	}
	for x, p := range w.promises {
		switch {
		case p.left.IsZero():
		case p.outlasts(v, w.now):
			w.count("a minimum hold outlasts a failover")
		default: // the cool-down was not confirmed
			delete(w.promises, x)
		}
	}
	for _, c := range w.clients {
		g := c.status()
		trusted := g.Trust.Sub(c.now())
		if g.State != lockstate.Held || trusted <= 0 || c.dead || c.drowsy() || w.excuse(g.Req.ID) || w.struck[g.Req.ID] || w.given[g.Req.ID] {
			continue
		}
		if !v.owns(g.Req.ID) {
			w.fail("the grant %s of %s was confirmed, and is not what the replica has", short(g.Req.ID), c.name)
		} else if v.value == g.Req.ID && v.left+3*time.Millisecond+trusted/500 < trusted { // which was twice cut to whole ms
			w.fail("%s of %s is trusted for %v, and the replica has it for %v", short(g.Req.ID), c.name, trusted, v.left)
		}
	}
	if w.foreign != "" && w.look().value != w.foreign {
		w.foreign = "" // it did not wait for a replica
	}
}
