package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// replicated returns a client whose leases need a replica, and its deployment.
func replicated(t *testing.T, opts ...leased.Option) (*leased.Client, *redistest.Replication) {
	t.Helper()
	r := redistest.NewReplication(t, 1)
	return confirmed(t, r.Primary().Client(), opts...), r
}

func confirmed(t *testing.T, rdb redis.UniversalClient, opts ...leased.Option) *leased.Client {
	t.Helper()
	c, err := leased.New(rdb, append([]leased.Option{leased.WithReplicas(1, 100*time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestALeaseThatItsReplicasHaveIsGranted(t *testing.T) {
	c, r := replicated(t, leased.WithReplicas(1, time.Second)) // a replica may be slow for a moment
	ctx := t.Context()
	m := c.Mutex("x")
	m.Lock()   // the first of a client asks more, and is asked again when the client is subscribed
	m.Unlock() //nolint:staticcheck // that it comes in is the point
	eventually(t, "the client is subscribed", func() bool { return leased.Subscribed(c) })
	m.Lock()
	m.Unlock() //nolint:staticcheck // likewise
	before := c.Stats().Commands
	l, err := m.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if n := c.Stats().Commands - before; n > 3 { // with a cancel of before
		t.Errorf("%d commands, want the script, WAIT and not much more", n)
	}
	on := r.Replicas()[0].Client()
	if n, err := on.Exists(ctx, "x").Result(); n != 1 || err != nil {
		t.Fatalf("the replica has %d keys, %v", n, err)
	}
	// By another process's release: the message is not enough.
	other := confirmed(t, r.Primary().Client())
	waiter := make(chan *leased.Lease)
	go func() {
		next, err := other.Mutex("x").LockContext(ctx)
		if err != nil {
			t.Error(err)
		}
		waiter <- next
	}()
	eventually(t, "it waits", func() bool { return inspect(t, c, "x").Queue == 1 })
	unlock(t, l)
	next := <-waiter
	if next.Token() <= l.Token() {
		t.Errorf("token %d after %d", next.Token(), l.Token())
	}
	unlock(t, next)
}

func TestALeaseThatNoReplicaHasIsNotGranted(t *testing.T) {
	t.Parallel()
	c, r := replicated(t)
	m := c.Mutex("x")
	m.Lock()
	m.Unlock() //nolint:staticcheck // that it comes in is the point
	replica := r.Replicas()[0]
	replica.Stop()
	defer replica.Cont()
	_, err := m.TryLockContext(t.Context())
	if !errors.Is(err, leased.ErrNoReplicas) || !errors.Is(err, leased.ErrNotAcquired) || errors.Is(err, leased.ErrLocked) {
		t.Fatalf("TryLockContext: %v", err)
	}
	if !strings.Contains(err.Error(), "0 of 1 replicas") {
		t.Errorf("the error does not say how many: %v", err)
	}
	eventually(t, "it is let go", func() bool { return len(inspect(t, c, "x").Owners) == 0 })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	before, refused := c.Stats().Commands, make(chan error, 1)
	go func() {
		_, err := m.LockContext(ctx)
		refused <- err
	}()
	// The script and WAIT, and when that was answered a cancel, before they are sent once more.
	eventually(t, "it tries again", func() bool { return c.Stats().Commands >= before+5 })
	cancel()
	if err := closesSoon(t, "LockContext returns", refused); !errors.Is(err, leased.ErrNoReplicas) || !errors.Is(err, context.Canceled) {
		t.Errorf("LockContext: %v", err)
	}
	// It does not keep others out while it tries again.
	waiting, done := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = m.LockContext(waiting)
	}()
	plain, err := leased.New(r.Primary().Client())
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	for range 3 {
		soon, cancel := context.WithTimeout(t.Context(), patience)
		l, err := plain.Mutex("x").LockContext(soon)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
	}
	done()
	<-gone
	replica.Cont()
	l, err := m.LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock(t, l)
}

// Each of those that wait for the replica has a connection. A release needs no replica.
func TestReleasesHaveConnectionsWhileGrantsWaitForReplicas(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 1)
	const size, workers = 10, 60
	rdb := r.Primary().Client(func(o *redis.Options) { o.PoolSize = size })
	c := confirmed(t, rdb, leased.WithReplicas(1, time.Second))
	unlock(t, lock(t, c.Mutex("first")))
	eventually(t, "the client is subscribed", func() bool { return leased.Subscribed(c) }) // else a lock asks whether it is wanted
	var held []*leased.Lease
	for i := range 3 {
		held = append(held, lock(t, c.Mutex(fmt.Sprint("held", i))))
	}
	replica := r.Replicas()[0]
	replica.Stop()
	defer replica.Cont()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			if _, err := c.Mutex(fmt.Sprint("wanted", i)).LockContext(ctx); err == nil {
				t.Error("granted without a replica")
			}
		})
	}
	inUse := func() int {
		pool := rdb.PoolStats()
		if own := pool.PipelineStats; own != nil {
			return int(own.TotalConns - own.IdleConns)
		}
		return int(pool.TotalConns - pool.IdleConns)
	}
	eventually(t, "grants wait for the replica", func() bool { return inUse() >= size/2 })
	for _, l := range held {
		if err := l.Unlock(); err != nil {
			t.Errorf("Unlock: %v", err)
		}
		if err := rdb.Get(t.Context(), "something").Err(); !errors.Is(err, redis.Nil) {
			t.Errorf("GET: %v", err)
		}
	}
	if n := inUse(); n > size-2 {
		t.Errorf("%d of %d connections are in use", n, size)
	}
	cancel()
	all.Wait()
}

// A cancel without an answer can arrive at any time, also when its sender has the lock by then.
func TestTheLateCancelOfAGrantThatNoReplicaHadEndsNoLaterGrant(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 1)
	held := &heldCancel{came: make(chan struct{})}
	o := r.Primary().Options()
	o.ContextTimeoutEnabled = true // or the client sends through a clone, which has no hooks
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(held)
	c := confirmed(t, rdb)
	m := c.Mutex("x")
	m.Lock()
	m.Unlock() //nolint:staticcheck // the first of a client asks more
	replica := r.Replicas()[0]
	replica.Stop()
	held.next.Store(true)
	granted := locking(t, m)
	<-held.came
	replica.Cont()
	l := closesSoon(t, "it is granted", granted)
	if err := r.Primary().Client().Do(t.Context(), held.args...).Err(); err != nil {
		t.Fatal(err)
	}
	must(t, l.Check(t.Context()))
	unlock(t, l)
}

// heldCancel is a hook that keeps back the next cancel, as a network may.
type heldCancel struct {
	next atomic.Bool
	args []any // of the cancel
	came chan struct{}
}

func (h *heldCancel) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h *heldCancel) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h *heldCancel) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if args := cmds[0].Args(); args[1] == redisserver.CancelScript.Sha && h.next.CompareAndSwap(true, false) {
			h.args = append([]any{"eval", redisserver.CancelScript.Text}, args[2:]...)
			close(h.came)
			cmds[0].SetErr(os.ErrDeadlineExceeded)
			return os.ErrDeadlineExceeded
		}
		return next(ctx, cmds)
	}
}

// Too few replicas say nothing about the lease.
func TestACheckOrADowngradeThatNoReplicaConfirmsLeavesTheLeaseAlone(t *testing.T) {
	t.Parallel()
	c, r := replicated(t)
	l, err := c.RWMutex("x").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	replica := r.Replicas()[0]
	replica.Stop()
	stopped := true
	defer func() {
		if stopped {
			replica.Cont()
		}
	}()
	isAll(t, l.Check(t.Context()), leased.ErrNoReplicas)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	isAll(t, l.Downgrade(ctx), leased.ErrNoReplicas, context.DeadlineExceeded)
	if err := l.Context().Err(); err != nil {
		t.Errorf("the lease has ended: %v", context.Cause(l.Context()))
	}
	replica.Cont()
	stopped = false
	must(t, l.Downgrade(t.Context()))
	unlock(t, l)
}

func TestALeaseWhoseRenewalNoReplicaHasIsLost(t *testing.T) {
	t.Parallel()
	var told logs
	c, r := replicated(t, leased.WithTTL(time.Second), leased.WithLossHandler(func(leased.LossEvent) {}), told.option())
	l, err := c.Mutex("x").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	replica := r.Replicas()[0]
	replica.Stop()
	defer replica.Cont()
	select {
	case <-l.Context().Done():
	case <-time.After(patience):
		t.Fatal("it goes on")
	}
	if err := context.Cause(l.Context()); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("ended by %v", err)
	}
	if err := l.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Unlock: %v", err)
	}
	// Redis answers, and the operator must not look for it in the network.
	eventually(t, "the renewal is logged", func() bool { return told.count(slog.LevelWarn, "Redis cannot run lock commands now") > 0 })
	if n := told.count(slog.LevelWarn, "Redis does not answer"); n > 0 {
		t.Errorf("%q", told.messages())
	}
}

// A user's own Redis client may be a value that cannot be compared, and so cannot be the key of a map.
func TestALeaseOfAClientThatCannotBeComparedIsRenewed(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 1)
	c := confirmed(t, around.Node{Client: r.Primary().Client()}, leased.WithTTL(time.Second))
	l, err := c.Mutex("x").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock(t, l)
	eventually(t, "a renewal", func() bool { return c.Stats().Renewals > 0 || l.Context().Err() != nil })
	if err := context.Cause(l.Context()); err != nil {
		t.Errorf("ended by %v", err)
	}
}

// WAIT counts the replicas that have the connection's last write from the primary itself.
func TestReplicasOfAReplicaDoNotCount(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 2)
	replicas := r.Replicas()
	replicas[1].Follow(replicas[0])
	c := confirmed(t, r.Primary().Client(), leased.WithReplicas(2, 500*time.Millisecond))
	_, err := c.Mutex("x").TryLockContext(t.Context())
	if isAll(t, err, leased.ErrNoReplicas); err != nil && !strings.Contains(err.Error(), "1 of 2 replicas") {
		t.Error(err)
	}
	unlock(t, take(t, confirmed(t, r.Primary().Client(), leased.WithReplicas(1, time.Second)).Mutex("x").LockContext))
}

// It still takes writes, but no replica has them.
func TestAnOldPrimaryThatIsNotDemotedGrantsNothingThatNeedsAReplica(t *testing.T) {
	t.Parallel()
	c, r := replicated(t)
	r.Replicas()[0].Promote()
	_, err := c.Mutex("x").TryLockContext(t.Context())
	isAll(t, err, leased.ErrNoReplicas)
}

// The lease that a replica has survives the loss of the primary.
func TestALeaseSurvivesItsPrimary(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 1)
	primary, replica := r.Primary(), r.Replicas()[0]
	c := confirmed(t, primary.Client(), leased.WithLossHandler(func(leased.LossEvent) {}))
	l, err := c.Mutex("x").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	primary.Kill()
	replica.Promote()
	other, err := leased.New(replica.Client())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.Mutex("x").TryLockContext(t.Context()); !errors.Is(err, leased.ErrLocked) {
		t.Errorf("with token %d held: %v", l.Token(), err)
	}
}

// A server that does not know the script is sent it again. If each of the two waited for replicas as long as it may, the
// time of a command would be over.
func TestAServerWithoutReplicasSaysSoAlsoWhereItDoesNotKnowTheScript(t *testing.T) {
	t.Parallel()
	c := confirmed(t, redistest.Server(t).Client(), leased.WithReplicas(1, time.Second))
	_, err := c.Mutex("x").TryLockContext(t.Context())
	if !errors.Is(err, leased.ErrNoReplicas) || !strings.Contains(err.Error(), "0 of 1 replicas had the grant within 1s") {
		t.Errorf("TryLockContext: %v", err)
	}
}

func TestAServerWithoutWAITSaysSo(t *testing.T) {
	in := redistest.Server(t, "--rename-command", "WAIT", "")
	c := confirmed(t, in.Client(), leased.WithTTL(time.Hour)) // so that nothing ends by it
	_, err := c.Mutex("x").TryLockContext(t.Context())
	if !errors.Is(err, leased.ErrNoReplicas) || !strings.Contains(err.Error(), "WAIT, which WithReplicas needs") {
		t.Errorf("TryLockContext: %v", err)
	}
	isFree(t, in, "x")
}

// isFree waits until a lock is not left to a grant that nobody uses: the cancel follows the error.
func isFree(t *testing.T, in *redistest.Instance, key string) {
	t.Helper()
	rdb := in.Client()
	eventually(t, "the lock is free", func() bool {
		n, err := rdb.Exists(t.Context(), key).Result()
		return err == nil && n == 0
	})
}

func TestAUserWithoutTheRightToWAITLeavesTheLockFree(t *testing.T) {
	in := redistest.Server(t)
	if err := in.Client().Do(t.Context(), "acl", "setuser", "waitless", "on", "nopass", "~*", "&*", "+@all", "-wait").Err(); err != nil {
		t.Fatal(err)
	}
	c := confirmed(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "waitless", "any" }), leased.WithTTL(time.Hour))
	_, err := c.Mutex("x").LockContext(t.Context())
	if err == nil || !strings.Contains(err.Error(), "NOPERM") {
		t.Errorf("LockContext: %v", err)
	}
	isFree(t, in, "x")
}

func TestReplicasInACluster(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a Cluster; run it without -short")
	}
	cluster := redistest.NewCluster(t)
	const ttl = 3 * time.Second
	a, b := confirmed(t, cluster.NewClient(t), leased.WithTTL(ttl)), confirmed(t, cluster.NewClient(t))
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	held := map[string]*leased.Lease{}
	for _, name := range names {
		held[name] = lock(t, a.Mutex(name))
	}
	began := time.Now()
	for _, name := range names {
		l := held[name]
		eventually(t, "it is renewed", func() bool { return l.TrustedUntil().After(began.Add(ttl)) || l.Context().Err() != nil })
		if l.Context().Err() != nil {
			t.Fatalf("%s ended: %v", name, context.Cause(l.Context()))
		}
	}
	for _, name := range names {
		waiter := locking(t, b.Mutex(name))
		eventually(t, "it waits", func() bool { return inspect(t, a, name).Queue == 1 })
		unlock(t, held[name])
		unlock(t, closesSoon(t, "it gets in", waiter))
	}
}

// WAIT is sent to one node with its command, and go-redis does not send on what it sends to
// one node. By itself it reads the slots again after a minute.
func TestReplicasFollowASlotThatMoves(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a Cluster; run it without -short")
	}
	cluster := redistest.NewCluster(t)
	c := confirmed(t, cluster.NewClient(t))
	m := c.Mutex("x")
	unlock(t, lock(t, m))
	home := cluster.Owner("x")
	away := cluster.Nodes[slices.IndexFunc(cluster.Nodes, func(in *redistest.Instance) bool { return in != home })]
	for _, to := range []*redistest.Instance{away, home} {
		cluster.MoveSlot("x", to)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		take := m.LockContext
		if to == away { // soon after that, the slots are not read again at once
			take = m.TryLockContext
		}
		l, err := take(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
	}
}

func TestReplicasHaveBounds(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	for _, o := range []leased.Option{
		leased.WithReplicas(0, time.Second), leased.WithReplicas(1, 0), leased.WithReplicas(1, 2*time.Second),
		leased.WithReplicas(1, 1500*time.Microsecond), leased.WithReplicas(-1, time.Second),
		leased.WithReplicas(1, time.Second+time.Millisecond),
	} {
		if c, err := leased.New(rdb, o); c != nil || !errors.Is(err, leased.ErrInvalidOption) {
			t.Errorf("%v", err)
		}
	}
	for _, timeout := range []time.Duration{time.Millisecond, time.Second} {
		c, err := leased.New(rdb, leased.WithReplicas(1, timeout))
		if err != nil {
			t.Fatalf("a timeout of %v: %v", timeout, err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
