package simulation

import (
	"math/rand/v2"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// closesPercent is in how many of a hundred worlds clients are closed, givesBackPercent in how many callers
// give up when they have just been admitted.
const (
	closesPercent    = 20
	givesBackPercent = 20
)

// chooseEnds decides whether clients of this world are closed and whether its callers give back. Like
// chooseChecks, it draws from a source of its own.
func (w *world) chooseEnds() {
	w.ends = rand.New(rand.NewPCG(uint64(w.seed), 6))
	w.has[closes] = w.ends.IntN(100) < closesPercent
	w.has[givesBack] = w.ends.IntN(100) < givesBackPercent
}

// close closes the client. Its callers inside keep their leases until they unlock, and nobody enters
// anymore.
func (c *simClient) close() {
	if c.closed {
		return
	}
	c.w.count("a client is closed")
	c.w.logf("%s is closed", c.name)
	c.closed = true
	c.step("close", c.lock.Close)
}

// halt stops the clients that are closed and have nothing left to do: from then on they hear nothing.
func (w *world) halt() {
	for _, c := range w.clients {
		if !c.closed || c.dead || c.paused || !c.lock.Idle() || len(c.cancel.Pending) > 0 || len(c.left) > 0 {
			continue
		}
		w.count("a closed client has stopped")
		w.logf("%s has stopped", c.name)
		c.dead = true
	}
}

// mayGiveBack appends x to those who give the lock back, if x does. The context of its caller ended at
// the moment in which it was admitted. Some readers do so only later: see giveBackLate.
func (c *simClient) mayGiveBack(x *lockstate.Caller, some []*lockstate.Caller) []*lockstate.Caller {
	w := c.w
	switch {
	case w.calm || !w.has[givesBack] || w.ends.IntN(4) > 0:
		return some
	case x.Mode == protocol.Shared && w.ends.IntN(2) == 0:
		c.returning = append(c.returning, x)
		return some
	}
	return append(some, x)
}

// unlocks returns whose hold the Unlock of a reader ends that does not say which: that of the caller that
// entered first, also if its call has not returned. It returns nil if no reader is left that can unlock.
func (c *simClient) unlocks() *lockstate.Caller {
	if _, inside := c.lock.Counts(); inside <= len(c.returning) {
		return nil
	}
	return c.lock.PickHolder(protocol.Shared)
}

// giveBackLate has a reader give the lock back whose goroutine did not run since it was admitted. Others may
// have unlocked meanwhile.
func (c *simClient) giveBackLate() {
	x := c.returning[0]
	c.returning = c.returning[1:]
	if x.Phase == lockstate.Inside {
		c.giveBack([]*lockstate.Caller{x})
		return
	}
	c.w.count("a caller gives back whose hold has ended")
	c.w.logf("%s gives back token %d, which has left", c.name, x.Token)
	other := c.lock.PickHolder(protocol.Shared)
	if other == nil {
		c.w.fail("%s: nobody is inside in place of a reader whose call has not returned", c.name)
		return
	}
	d := departure{caller: other, ids: c.owned(other)}
	c.step("give back", func(now time.Time, fx *lockstate.Effects) {
		c.lock.GiveBack(x, now, fx)
		if other.Phase != lockstate.Left {
			c.w.fail("%s: a reader is inside, and nobody is left that will unlock for it", c.name)
		}
		d.asked = !other.Settled
		c.left = append(c.left, d)
	})
}

// giveBack has callers give the lock back, as the client does for a caller that it did not reach in time.
func (c *simClient) giveBack(some []*lockstate.Caller) {
	for _, x := range some {
		c.w.count("a caller gives back")
		c.w.logf("%s gives back token %d", c.name, x.Token)
		delete(c.w.promises, x) // it has done nothing
		d := departure{caller: x, ids: c.owned(x), unused: true}
		c.step("give back", func(now time.Time, fx *lockstate.Effects) {
			c.lock.GiveBack(x, now, fx)
			d.asked = !x.Settled
			c.left = append(c.left, d)
		})
	}
}
