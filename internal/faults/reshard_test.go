//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
		to := elsewhere(c, "{x}")
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

// Readers in four processes and a writer in a fifth share a lock whose slot moves to and fro. What a
// script for readers does can be stopped half-way by a move that begins meanwhile. Whatever comes of
// that, no writer may be inside together with a reader, and all of them go on.
func TestReadersWhoseSlotMovesToAndFroAreNeitherMixedWithAWriterNorStuck(t *testing.T) {
	t.Parallel()
	moving := 20 * time.Second
	if testing.Short() {
		moving = 3 * time.Second
	}
	c := redistest.NewCluster(t)
	refused := &slotErrors{}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	var readers, writers, mixed, unproved atomic.Int32
	var turns [5]atomic.Int32
	for i := range turns {
		rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
		rdb.OnNewNode(func(node *redis.Client) { node.AddHook(refused) })
		m := newClient(t, rdb, "", leased.WithTTL(15*time.Second)).RWMutex("shared{x}")
		lock, mine, theirs := m.RLockContext, &readers, &writers
		if i == 0 {
			lock, mine, theirs = m.LockContext, &writers, &readers
		}
		running.Go(func() {
			for ctx.Err() == nil {
				l, err := lock(ctx)
				if err != nil {
					if ctx.Err() == nil {
						t.Errorf("caller %d: %v", i, err)
					}
					return
				}
				mine.Add(1)
				if theirs.Load() > 0 {
					mixed.Add(1)
				}
				time.Sleep(2 * time.Millisecond) // the work
				mine.Add(-1)
				switch err := l.Unlock(); {
				case isUnproved(err):
					unproved.Add(1)
				case err != nil:
					t.Errorf("caller %d: %v", i, err)
				}
				turns[i].Add(1)
			}
		})
	}
	all := func() {
		t.Helper()
		for i := range turns {
			was := turns[i].Load()
			eventually(t, fmt.Sprintf("turns of caller %d", i), func() bool { return turns[i].Load() >= was+3 || t.Failed() })
		}
	}
	all()
	moves := 0
	for began := time.Now(); time.Since(began) < moving || refused.tryAgain.Load() == 0 && time.Since(began) < 10*moving; moves++ {
		to := elsewhere(c, "{x}")
		m := c.BeginMove("{x}", to)
		for range 6 { // some keys move, and commands meet the half-moved slot and create new keys
			m.Keys(1)
			time.Sleep(20 * time.Millisecond) // time for commands to meet the half-moved slot
		}
		m.End()
		all()
	}
	stop()
	running.Wait()
	if n := mixed.Load(); n > 0 {
		t.Errorf("a writer and a reader met %d times", n)
	}
	if n := unproved.Load(); n > int32(moves) {
		t.Errorf("%d releases had no answer, in %d moves", n, moves)
	}
	if refused.tryAgain.Load() == 0 {
		t.Error("no command met a slot of which only some keys had moved")
	}
	t.Logf("%d moves; %d TRYAGAIN, %d ASK, %d MOVED; %d unproved", moves, refused.tryAgain.Load(), refused.ask.Load(), refused.moved.Load(), unproved.Load())
	nothingLeft(t, newClient(t, c.NewClient(t), ""), "shared{x}")
}

// WAIT has to follow its command to the same node, and cannot be asked for where the keys of a slot are
// already and the slot is not. So a lease that needs a replica ends there, and one that needs none goes on.
func TestALeaseThatNeedsAReplicaEndsIfTheMoveOfItsSlotTakesLongerThanItsTTL(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	c := redistest.NewCluster(t)
	strain := redistest.NewStrain(t)
	quiet := leased.WithLossHandler(func(leased.LossEvent) {})
	client := func(opts ...leased.Option) *leased.Client {
		rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
		return newClient(t, rdb, "", append(opts, leased.WithTTL(ttl), quiet)...)
	}
	alone, replicated := client(), client(leased.WithReplicas(1, 500*time.Millisecond))
	kept, lost := mustLock(t, alone.Mutex("kept{x}")), mustLock(t, replicated.Mutex("lost{x}"))
	ended := watch(lost)
	renewed := func(l *leased.Lease) {
		t.Helper()
		from := time.Now()
		eventually(t, "it is renewed", func() bool { return l.TrustedUntil().After(from.Add(ttl)) || l.Context().Err() != nil })
	}
	renewed(lost) // so it is renewed where nothing moves

	to := elsewhere(c, "{x}")
	m := c.BeginMove("{x}", to)
	began := time.Now()
	m.Keys(100)
	if took := lostAt(t, lost, ended).Sub(began); took > ttl+slack+strain.Since(began) {
		t.Errorf("it ended %v after its keys had moved", took)
	}
	if err := lost.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Unlock after the loss returned %v", err)
	}
	renewed(kept)
	m.End()
	mustUnlock(t, kept)
	mustUnlock(t, entered(t, wait(within(t, patience), replicated.Mutex("lost{x}"))).lease)
}

// elsewhere returns a master that does not have the slot of a key.
func elsewhere(c *redistest.Cluster, key string) *redistest.Instance {
	if c.Owner(key) == c.Nodes[0] {
		return c.Nodes[1]
	}
	return c.Nodes[0]
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
