package simulation

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
)

// checkUp is a call of Lease.Check that has not returned yet.
type checkUp struct {
	c      *simClient
	caller *lockstate.Caller
	k      *lockstate.Check
	done   chan struct{}
	ids    []string  // of the grant at the time of the call
	gone   bool      // none of them owned at the time of the call, and none has since
	at     time.Time // of the call, in the world's time
}

// chooseChecks decides whether callers of this world check their leases. It draws from a source
// of its own, so that worlds without checks are what they were before checks existed.
func (w *world) chooseChecks() {
	w.checkUps = nil
	w.luck = rand.New(rand.NewPCG(uint64(w.seed), 2))
	w.has[checks] = w.luck.IntN(100) < 25
}

// checkUp makes a caller check its lease.
func (c *simClient) checkUp(x *lockstate.Caller) {
	w := c.w
	w.logf("%s checks", c.name)
	u := &checkUp{c: c, caller: x, k: &lockstate.Check{}, done: make(chan struct{}), at: w.now, gone: true}
	g := c.status()
	u.ids = []string{g.Req.ID, g.Next}
	w.checkUps = append(w.checkUps, u)
	w.watchChecks()
	c.step("check", func(now time.Time, fx *lockstate.Effects) { c.lock.Check(u.k, x, u.done, now, fx) })
	w.watchChecks()
}

// watchChecks fails if a check says that the lock is ours although it was not ours at any time
// since the call. A late copy of a command may make an id the owner again.
func (w *world) watchChecks() {
	if len(w.checkUps) == 0 {
		return
	}
	v := w.look()
	owners := append(sortedKeys(v.readers), v.value)
	left := w.checkUps[:0]
	for _, u := range w.checkUps {
		for _, id := range append(u.ids, u.c.status().Req.ID) {
			u.gone = u.gone && !(id != "" && slices.Contains(owners, id))
		}
		select {
		case <-u.done:
			switch {
			case u.k.Over:
				w.count("a check: over")
			case u.k.Err != nil:
				w.count("a check: no answer")
			default:
				w.count("a check: ours")
				if u.gone {
					w.fail("a check of %s says that the lock is its own, which it was not since %v", u.c.name, u.at.Sub(simEpoch))
				}
			}
		default:
			left = append(left, u)
		}
	}
	w.checkUps = left
}

// checksReturned fails if a check has never been answered.
func (w *world) checksReturned() {
	for _, u := range w.checkUps {
		if !u.c.dead {
			w.fail("a check of %s was never answered", u.c.name)
		}
	}
}
