//go:build unix

package faults

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// One lock is held and waited for, another is taken by five clients in turn. Their slot moves
// from one master to another and back all the time, key by key. A command with several keys is
// refused with TRYAGAIN while only some keys have moved, and redirected with ASK once all have.
func TestLocksWhoseSlotMovesToAndFroAreNeitherLostNorStuck(t *testing.T) {
	t.Parallel()
	move := func(c *redistest.Cluster, to *redistest.Instance, ask func()) {
		m := c.BeginMove("{x}", to)
		for range 6 { // some keys move, and commands meet the half-moved slot and create new keys
			m.Keys(1)
			time.Sleep(20 * time.Millisecond) // time for commands to meet the half-moved slot
		}
		m.Keys(100)
		ask() // it is redirected: the lock's key has moved, and the slot has not
		m.End()
	}
	moveLocks(t, move, func(r *slotErrors) bool { return r.tryAgain.Load() > 0 && r.ask.Load() > 0 })
}

// The same, but all keys of the slot change masters in one step. Writing commands are held back
// during that step, and those that reach the old master afterwards are redirected to the new one.
func TestLocksWhoseSlotMigratesInOneStepAreNeitherLostNorStuck(t *testing.T) {
	t.Parallel()
	move := func(c *redistest.Cluster, to *redistest.Instance, _ func()) { c.MigrateSlot("{x}", to) }
	r := moveLocks(t, move, func(r *slotErrors) bool { return r.moved.Load() > 0 })
	if r.tryAgain.Load() > 0 || r.ask.Load() > 0 {
		t.Error("a command met a slot of which only some keys had moved")
	}
}

// moveLocks keeps moving the slot of busy locks for some time, and then until the commands have
// met the errors that they are supposed to meet. move is given a function that asks for a lease
// that is held, by a command with one key.
func moveLocks(t *testing.T, move func(c *redistest.Cluster, to *redistest.Instance, ask func()), met func(*slotErrors) bool) *slotErrors {
	t.Helper()
	moving := 30 * time.Second
	if testing.Short() {
		moving = 3 * time.Second
	}
	c := redistest.NewCluster(t)
	refused := &slotErrors{}
	var workers []*worker
	for range 5 {
		rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
		rdb.OnNewNode(func(node *redis.Client) { node.AddHook(refused) })
		workers = append(workers, &worker{client: newClient(t, rdb, "", leased.WithTTL(15*time.Second))})
	}
	holder := workers[0].client
	l := mustLock(t, holder.Mutex("held{x}"))
	waiting := wait(within(t, 2*time.Minute), workers[1].client.Mutex("held{x}"))
	queued(t, holder, "held{x}", 1)
	busy := &till{}
	stop := start(t, workers, "busy{x}", busy)
	turns(t, workers)

	moves := 0
	for began := time.Now(); time.Since(began) < moving || !met(refused) && time.Since(began) < 10*moving; moves++ {
		from := c.Owner("{x}")
		to := c.Nodes[0]
		if from == to {
			to = c.Nodes[1]
		}
		move(c, to, func() {
			if err := l.Check(t.Context()); err != nil {
				t.Errorf("asked for the lease that is held: %v", err)
			}
		})
		turns(t, workers[:1])
	}
	turns(t, workers) // no worker is stuck

	stop()
	if err := l.Context().Err(); err != nil {
		t.Errorf("the lease ended: %v", context.Cause(l.Context()))
	}
	mustUnlock(t, l)
	mustUnlock(t, entered(t, waiting).lease)
	entries := int32(0)
	for _, w := range workers {
		entries += w.entries.Load()
	}
	lost, unproved := losses(workers)
	if lost > 0 || unproved > int64(moves) {
		t.Errorf("%d leases were lost, and %d releases had no answer", lost, unproved)
	}
	if busy.refused > 0 {
		t.Errorf("%d writes were refused: two callers were inside at once", busy.refused)
	}
	busy.check(t, "busy")
	if !met(refused) {
		t.Errorf("the commands did not meet the errors that the test is about: %d TRYAGAIN, %d ASK, %d MOVED", refused.tryAgain.Load(), refused.ask.Load(), refused.moved.Load())
	}
	t.Logf("%d moves, %d entries; %d TRYAGAIN, %d ASK, %d MOVED", moves, entries, refused.tryAgain.Load(), refused.ask.Load(), refused.moved.Load())
	nothingLeft(t, holder, "held{x}")
	nothingLeft(t, holder, "busy{x}")
	return refused
}

// slotErrors is a hook that counts the errors with which the nodes of a Cluster redirect commands.
type slotErrors struct{ tryAgain, ask, moved atomic.Int32 }

func (r *slotErrors) count(err error) {
	switch {
	case redis.HasErrorPrefix(err, "TRYAGAIN"):
		r.tryAgain.Add(1)
	case redis.HasErrorPrefix(err, "ASK "):
		r.ask.Add(1)
	case redis.HasErrorPrefix(err, "MOVED "):
		r.moved.Add(1)
	}
}

func (r *slotErrors) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *slotErrors) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		r.count(err)
		return err
	}
}

func (r *slotErrors) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			r.count(cmd.Err())
		}
		return err
	}
}

// One subscription per lock or per node would be too many.
func TestAThousandContendedLocksOfAClusterNeedOneSubscriptionAClient(t *testing.T) {
	t.Parallel()
	locks := 1000
	if testing.Short() {
		locks = 200
	}
	c := redistest.NewCluster(t)
	client := func() *leased.Client {
		return newClient(t, c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true }), "")
	}
	holder, waiter := client(), client()
	var held []*leased.Lease
	var waiting []<-chan outcome
	ctx := within(t, 2*time.Minute)
	for i := range locks {
		name := fmt.Sprint("lock", i)
		held = append(held, mustLock(t, holder.Mutex(name)))
		waiting = append(waiting, wait(ctx, waiter.Mutex(name)))
	}
	for i := range locks {
		queued(t, holder, fmt.Sprint("lock", i), 1)
	}
	subscriptions := func() (n int) {
		for _, in := range c.Nodes {
			n += in.Subscribers()
		}
		return n
	}
	if n := subscriptions(); n != 2 {
		t.Errorf("2 clients have %d subscription connections while %d locks are waited for", n, locks)
	}
	for i, l := range held {
		mustUnlock(t, l)
		mustUnlock(t, entered(t, waiting[i]).lease)
	}
	if n := subscriptions(); n != 2 {
		t.Errorf("2 clients have %d subscription connections afterwards", n)
	}
}
