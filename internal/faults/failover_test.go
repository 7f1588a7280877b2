//go:build unix

package faults

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// fixedName is two servers, one a replica of the other, behind a single address that leads
// to the primary, like a virtual IP, a Kubernetes Service or a proxy.
type fixedName struct {
	t       *testing.T
	servers *redistest.Replication
	proxy   *redistest.Proxy
}

func newFixedName(t *testing.T) *fixedName {
	servers := redistest.NewReplication(t, 1)
	redistest.CheckLeaks(t, nil, "")
	return &fixedName{t, servers, redistest.NewProxy(t, servers.Nodes[0].Addr)}
}

func (n *fixedName) client(opts ...leased.Option) *leased.Client {
	n.t.Helper()
	rdb := redis.NewClient(redistest.Options(n.proxy.Addr))
	n.t.Cleanup(func() { _ = rdb.Close() })
	return newClient(n.t, rdb, "", opts...)
}

// hooked returns a Redis client like the one that client uses, with a hook added.
func (n *fixedName) hooked(h redis.Hook) *redis.Client {
	n.t.Helper()
	o := redistest.Options(n.proxy.Addr)
	o.ContextTimeoutEnabled = true // otherwise the library would use a clone, which has no hooks
	rdb := redis.NewClient(o)
	n.t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(h)
	return rdb
}

// failover makes the replica the primary, losing no write. The clients' subscriptions stay on
// the old server, which is now a replica and does not fail.
func (n *fixedName) failover() (before, now *redistest.Instance) {
	n.t.Helper()
	before, now = n.servers.Primary(), n.servers.Replicas()[0]
	n.servers.Failover(now)
	n.proxy.Lead(now.Addr, redistest.KeepSubscriptions)
	return before, now
}

// inboxesAt waits until the server has exactly n subscriptions.
func inboxesAt(t *testing.T, in *redistest.Instance, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d inboxes on a server", n), func() bool { return in.Subscribers() == n })
}

// room notices when two callers are inside at once. The plain counter is there to show lost
// updates, and for the race detector.
type room struct {
	inside  atomic.Int32
	crowded atomic.Int32 // how many entered while somebody was inside
	visits  int
}

// stay stays inside for d, long enough for another caller to come in by mistake.
func (r *room) stay(d time.Duration) {
	if r.inside.Add(1) != 1 {
		r.crowded.Add(1)
	}
	n := r.visits
	time.Sleep(d) // the stay
	r.visits = n + 1
	r.inside.Add(-1)
}

// The owner releases the lock on the new primary. The new primary replicates the scripts'
// messages to the replica, to which the waiters are subscribed, but itself counts no
// subscribers. If it took a grant back for that reason, the waiter would still hear of it.
func TestAPlannedFailoverBehindAFixedNameLeavesOneOwner(t *testing.T) {
	t.Parallel()
	n := newFixedName(t)
	strain := redistest.NewStrain(t)
	const waiters = 4
	owner := n.client()
	l := mustLock(t, owner.Mutex("x"))
	var r room
	var inside sync.WaitGroup
	for i := range waiters {
		c := n.client()
		mustUnlock(t, mustLock(t, c.Mutex("warm")))
		inboxesAt(t, n.servers.Nodes[0], i+2)
		got := wait(within(t, patience), c.Mutex("x"))
		queued(t, owner, "x", i+1)
		// Owned by the test, ended by the end of the wait, waited for below.
		inside.Go(func() {
			o := <-got
			if o.err != nil {
				t.Error(o.err)
				return
			}
			r.stay(300 * time.Millisecond)
			if err := o.lease.Unlock(); err != nil {
				t.Error(err)
			}
		})
	}
	n.failover()
	if err := l.Unlock(); err != nil {
		t.Errorf("the owner's Unlock returned %v", err)
	}
	began := time.Now()
	inside.Wait()
	if met := r.crowded.Load(); met > 0 || r.visits != waiters {
		t.Errorf("%d entered while somebody was inside; %d of %d visits counted", met, r.visits, waiters)
	}
	// The waiters find their grants by their own re-checks, which are 3 s apart at most.
	if took := time.Since(began); took > waiters*(3*time.Second+slack)+strain.Since(began) {
		t.Errorf("the last one left %v after the failover", took)
	}
	nothingLeft(t, owner, "x")
}

// Six processes take turns while the servers swap roles again and again.
func TestProcessesGoOnOneAtATimeWhileServersChangePlaces(t *testing.T) {
	t.Parallel()
	n := newFixedName(t)
	const clients = 6
	failovers := 3
	if testing.Short() {
		failovers = 1
	}
	var r room
	var turns, unhappy atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	var all []*leased.Client
	for range clients {
		all = append(all, n.client(leased.WithLossHandler(func(leased.LossEvent) {}))) // counted below
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	for _, c := range all {
		mu := c.Mutex("x")
		// Owned by the test, ended by stop, waited for below.
		running.Go(func() {
			for ctx.Err() == nil {
				l, err := mu.LockContext(ctx)
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				r.stay(2 * time.Millisecond)
				if err := l.Unlock(); err != nil {
					unhappy.Add(1)
				}
				turns.Add(1)
			}
		})
	}
	more := func() {
		t.Helper()
		was := turns.Load()
		eventually(t, "more turns", func() bool { return turns.Load() >= was+3*clients })
	}
	more()
	for range failovers {
		before, now := n.failover()
		more()
		// At a re-check, a waiter notices that its inbox is deaf, and the inbox moves.
		inboxesAt(t, now, clients)
		inboxesAt(t, before, 0)
	}
	more()
	stop()
	running.Wait()
	if met := r.crowded.Load(); met > 0 || int64(r.visits) != turns.Load() {
		t.Errorf("%d of %d turns met somebody inside; %d were counted", met, turns.Load(), r.visits)
	}
	var lost int64
	for _, c := range all {
		lost += c.Stats().Lost
	}
	if lost > 0 || unhappy.Load() > 0 {
		t.Errorf("%d leases were lost, and %d Unlocks returned an error", lost, unhappy.Load())
	}
	t.Logf("%d turns", turns.Load())
	nothingLeft(t, all[0], "x")
}

// readOnlyRefusals counts the scripts that a server refused because it is read-only. A script that
// grants or releases a lock names all five of its keys; a renewal names fewer.
type readOnlyRefusals struct {
	mu sync.Mutex // guards n
	n  map[string]int
}

func (r *readOnlyRefusals) count(cmd redis.Cmder, err error) {
	args := cmd.Args()
	if err == nil || !strings.Contains(err.Error(), "READONLY") || len(args) < 4 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n[fmt.Sprint(args[3], " and ", args[2], " keys")]++
}

// of returns how many refused scripts named the given number of keys, with lock as the first.
func (r *readOnlyRefusals) of(lock string, keys int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n[fmt.Sprint(lock, " and ", keys, " keys")]
}

func (r *readOnlyRefusals) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *readOnlyRefusals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		r.count(cmd, err)
		return err
	}
}

func (r *readOnlyRefusals) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			r.count(cmd, cmd.Err())
		}
		return err
	}
}

// A primary that was demoted lags behind and does not know the newest owner. It must not say
// that the lock belongs to somebody else, because it cannot know.
func TestAStaleReadOnlyServerEndsNoLease(t *testing.T) {
	t.Parallel()
	n := newFixedName(t)
	primary, stale := n.servers.Nodes[0], n.servers.Nodes[1]
	const ttl = 9 * time.Second
	refused := &readOnlyRefusals{n: map[string]int{}}
	c := newClient(t, n.hooked(refused), "", leased.WithTTL(ttl), leased.WithReleaseTimeout(patience), leased.WithLossHandler(func(leased.LossEvent) {}))
	look := newClient(t, primary.Client(), "")
	mustUnlock(t, mustLock(t, c.Mutex("warm")))
	stale.Isolate()
	l, rl := mustLock(t, c.Mutex("x")), mustRLock(t, c.RWMutex("r"))
	justRenewed(t, c, 1)

	n.proxy.Lead(stale.Addr, redistest.KeepNone)
	eventually(t, "renewals at the stale server", func() bool { return refused.of("x", 1) > 0 && refused.of("r", 2) > 0 })
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	waited := wait(ctx, c.Mutex("warm")) // the stale server knows the scripts, too
	eventually(t, "the stale server is asked for a lock", func() bool { return refused.of("warm", 5) > 0 || len(waited) > 0 })
	giveUp()
	if o := <-waited; o.err == nil {
		t.Error("a server that is read-only gave a lock")
	}
	n.proxy.Lead(primary.Addr, redistest.KeepNone)
	justRenewed(t, c, 2)
	for _, l := range []*leased.Lease{l, rl} {
		if l.Context().Err() != nil {
			t.Errorf("the lease ended: %v", context.Cause(l.Context()))
		}
	}

	// Unlock reaches the stale server, which knows of nothing to release.
	n.proxy.Lead(stale.Addr, redistest.KeepNone)
	left := calling(t.Context(), func(context.Context) (*leased.Lease, error) { return nil, l.Unlock() })
	eventually(t, "Unlock asks the stale server again", func() bool { return refused.of("x", 5) >= 3 || len(left) > 0 })
	if len(left) > 0 {
		t.Fatalf("Unlock returned %v, and nobody let go", (<-left).err)
	}
	if info, err := look.Inspect(t.Context(), "x"); err != nil || len(info.Owners) != 1 {
		t.Errorf("the primary's view: %+v, %v", info, err)
	}
	n.proxy.Lead(primary.Addr, redistest.KeepNone)
	select {
	case o := <-left:
		if o.err != nil {
			t.Errorf("Unlock returned %v", o.err)
		}
	case <-time.After(patience):
		t.Fatal("Unlock does not return")
	}
	nothingLeft(t, look, "x")
	if err := rl.Unlock(); err != nil {
		t.Errorf("the reader's Unlock returned %v", err)
	}
	if lost := c.Stats().Lost; lost != 0 {
		t.Errorf("%d leases were lost", lost)
	}
}

func mustRLock(t *testing.T, m *leased.RWMutex) *leased.Lease {
	t.Helper()
	l, err := m.RLockContext(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	return l
}
