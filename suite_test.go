package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestMain(m *testing.M) {
	redis.SetLogger(silence{}) // of dialling what a test has broken
	os.Exit(redistest.Main(m))
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// patience bounds what must happen but has no time of its own.
const patience = 30 * time.Second

// place is where a test's locks live: a server, a prefix of its own, and a
// connection to look and meddle through.
type place struct {
	redistest.Target // in virtual time only Prefix and Mini are set
	rdb              redis.UniversalClient
}

// onBoth runs f on the embedded and on a real server, in real time, and where else
// LEASED_SERVERS says, and fails it for what it leaves behind.
func onBoth(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := place{target, target.NewClient(t)}
		redistest.CheckLeaks(t, s.rdb, s.Prefix)
		f(t, s)
	})
	onDeployments(t, f)
}

// inVirtualTime runs f on the embedded server where time passes only while
// everybody waits, and to the nanosecond.
func inVirtualTime(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		m := redistest.Mini(t)
		s := place{redistest.Target{Name: "virtual", Mini: m}, redistest.MiniClient(t, m)}
		redistest.CheckLeaks(t, s.rdb, "")
		f(t, s)
	})
}

// connect returns connections that end with the test. Where there is more than one
// server to connect to, the test is skipped: see universal.
func (s place) connect(t *testing.T, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	if s.Addr == "" {
		return redistest.MiniClient(t, s.Mini, change...)
	}
	if s.Deployment != nil {
		rdb, one := s.Deployment.Connect(t, change...).(*redis.Client)
		if !one {
			t.Skip("about a client of one server")
		}
		return rdb
	}
	return s.NewClient(t, change...)
}

// newClient returns a client with connections of its own, as another process
// would have.
func newClient(t *testing.T, s place, opts ...leased.Option) *leased.Client {
	t.Helper()
	return clientOn(t, s, s.universal(t), opts...)
}

// clientOn returns a client on rdb that is closed at the end of the test, when
// all its leases must have been unlocked, and logs nowhere unless told. In real time
// a release has as long as it takes, for a second may pass on a machine under load.
func clientOn(t *testing.T, s place, rdb redis.UniversalClient, opts ...leased.Option) *leased.Client {
	t.Helper()
	opts = append([]leased.Option{
		leased.WithKeyPrefix(s.Prefix),
		leased.WithLogger(slog.New(slog.DiscardHandler)),
	}, opts...)
	if s.Addr != "" {
		opts = append([]leased.Option{leased.WithReleaseTimeout(patience)}, opts...)
	}
	c, err := leased.New(rdb, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := leased.Closed(c) // by the test, which knows what it returned
		if err := c.Close(); err != nil && !closed {
			t.Errorf("Close at the end of the test: %v", err)
		}
	})
	return c
}

// helperKeys are the keys beside the lock's own, as docs/design.md names them.
func (s place) helperKeys(name string) (queue, readers, waiters, meta string) {
	key := s.Prefix + name
	stem := key + ":{" + key + "}:"
	return stem + "queue", stem + "readers", stem + "waiters", stem + "meta"
}

// value returns what stands in the lock's key, "" if nothing does.
func (s place) value(t *testing.T, name string) string {
	t.Helper()
	v, err := s.rdb.Get(context.Background(), s.Prefix+name).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	return v
}

// clean reports whether nobody owns the lock or waits for it.
func (s place) clean(t *testing.T, name string) bool {
	t.Helper()
	queue, readers, waiters, _ := s.helperKeys(name)
	n, err := s.rdb.Exists(context.Background(), s.Prefix+name, queue, readers, waiters).Result()
	if err != nil {
		t.Fatal(err)
	}
	return n == 0
}

// queued returns when n processes wait for the lock.
func (s place) queued(t *testing.T, name string, n int64) {
	t.Helper()
	queue, _, _, _ := s.helperKeys(name)
	eventually(t, "the queue has its length", func() bool {
		return s.rdb.ZCard(context.Background(), queue).Val() == n
	})
}

// eventually is for what no event tells of.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// closesSoon waits for an event.
func closesSoon[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case v := <-ch:
		return v
	case <-timer.C:
		t.Fatalf("not within %v: %s", patience, what)
		panic("unreachable")
	}
}

// open reports whether nothing has come through ch and it is not closed.
func open[T any](ch <-chan T) bool {
	select {
	case <-ch:
		return false
	default:
		return true
	}
}

func lock(t *testing.T, mu *leased.Mutex) *leased.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	l, err := mu.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func unlock(t *testing.T, l *leased.Lease) {
	t.Helper()
	if err := l.Unlock(); err != nil {
		t.Fatalf("Unlock: %v", err)
	}
}

// locking locks in a goroutine, which sends the lease.
func locking(t *testing.T, mu *leased.Mutex) <-chan *leased.Lease {
	ch := make(chan *leased.Lease, 1)
	go func() {
		l, err := mu.LockContext(context.Background())
		if err != nil {
			t.Error(err)
		}
		ch <- l
	}()
	return ch
}

// isAll fails t unless err matches every one of wants.
func isAll(t *testing.T, err error, wants ...error) {
	t.Helper()
	for _, want := range wants {
		if !errors.Is(err, want) {
			t.Errorf("%v does not match %v", err, want)
		}
	}
}

// panics returns what f panics with, nil if it does not.
func panics(f func()) (with any) {
	defer func() { with = recover() }()
	f()
	return nil
}

// room notices when two are inside. The plain counter is there for the race
// detector and for lost updates.
type room struct {
	inside  atomic.Int32
	crowded atomic.Bool
	visits  int
}

func (r *room) visit(f func()) {
	if r.inside.Add(1) != 1 {
		r.crowded.Store(true)
	}
	r.visits++
	f()
	r.inside.Add(-1)
}
