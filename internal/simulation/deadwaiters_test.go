package simulation

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// Where no count proves that a waiter is gone, each dead waiter costs its successor the time of a
// provisional grant. The first can cost a whole pause between two re-checks, because the successor
// does not hear of the hand-off.
func TestTheSuccessorOfDeadWaitersWaitsForAShortTimeWhereNoCountIsProof(t *testing.T) {
	w := newWorld(t, true)
	defer w.close()
	seeds := int64(300)
	if testing.Short() {
		seeds = 40
	}
	if race.Enabled {
		seeds = 8
	}
	for seed := range seeds {
		w.begin(seed)
		w.mini.FlushAll() // removes what the world's troubles may have put there
		w.has, w.deny, w.denyAsk, w.calm, w.wire = map[trouble]bool{uncounting: true}, false, false, true, nil
		a, b := w.clients[0], w.clients[1]
		for _, c := range w.clients {
			c.join()
			c.ttls = []time.Duration{30 * time.Second}
		}
		enter := func(c *simClient) *lockstate.Caller {
			x := &lockstate.Caller{Mode: protocol.Exclusive, Opts: &lockstate.Terms{TTL: 30 * time.Second, Handoffs: 2, Tenure: 50 * time.Millisecond}}
			w.seq++
			c.order[x] = w.seq
			c.calls = append(c.calls, x)
			c.step("enter", func(now time.Time, fx *lockstate.Effects) { c.lock.Enter(x, now, fx) })
			w.pass(time.Millisecond)
			return x
		}
		owner := enter(a)
		dead := 1 + w.rng.IntN(4)
		w.killed(dead)
		next := enter(b)
		w.pass(time.Duration(w.rng.IntN(5000)) * time.Millisecond)
		began := w.now
		a.leave(owner)
		for next.Phase == lockstate.Waiting && w.failure == "" && w.now.Sub(began) < time.Minute {
			w.pass(10 * time.Millisecond)
		}
		took := w.now.Sub(began)
		if bound := lockstate.MaxPoll + time.Duration(dead-1)*protocol.ProvisionalTTL + 200*time.Millisecond; took > bound || w.failure != "" {
			t.Fatalf("seed %d:\n%s\nseed %d: %d dead waiters delayed their successor by %v, more than %v; %s", seed, w.story(), seed, dead, took, bound, w.failure)
		}
		b.leave(next)
	}
}
