//go:build unix

package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// slack is what servers and other processes on a loaded machine may take for what the
// contract requires within milliseconds. The time for which this process itself was kept
// from running is measured by redistest.Strain and comes on top. A bug costs a re-check, a
// renewal period or a TTL, all of which are longer than slack. The exact durations are
// measured in internal/measure.
const slack = 400 * time.Millisecond

// patience bounds what must happen although the contract sets no bound for it.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	logging.Disable() // go-redis logs every fault, and these are ours
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	os.Exit(redistest.Main(m))
}

// newClient makes a client that is closed at the end of the test. If the test failed, its
// log is then written to the test's.
func newClient(t *testing.T, rdb redis.UniversalClient, prefix string, opts ...leased.Option) *leased.Client {
	t.Helper()
	log := &notes{}
	opts = append([]leased.Option{
		leased.WithKeyPrefix(prefix),
		leased.WithReleaseTimeout(patience), // under load, more than a second may pass
		leased.WithLogger(slog.New(slog.NewTextHandler(log, nil))),
	}, opts...)
	c, err := leased.New(rdb, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// This is shorter than Close, whose duration TestUnlockAndCloseAreBounded tests.
		// The error is ignored because a test may have let leases die.
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		_ = c.Shutdown(ctx)
		if t.Failed() {
			t.Log(log)
		}
	})
	return c
}

// notes is a log that is kept in memory.
type notes struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (n *notes) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.Write(p)
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return strings.TrimSpace(n.text.String())
}

// within returns a context that ends after d.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

var eventually = redistest.Eventually

func mustLock(t *testing.T, m *leased.Mutex) *leased.Lease {
	t.Helper()
	l, err := m.LockContext(within(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustUnlock(t *testing.T, l *leased.Lease) {
	t.Helper()
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
}

// queued waits until n processes wait for the lock.
func queued(t *testing.T, c *leased.Client, name string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d waiting for %s", n, name), func() bool {
		info, err := c.Inspect(t.Context(), name)
		return err == nil && info.Queue == n
	})
}

// nothingLeft waits until the lock has neither owner nor queue.
func nothingLeft(t *testing.T, c *leased.Client, name string) {
	t.Helper()
	var info leased.Info
	for until := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) { // the pause between two attempts
		var err error
		if info, err = c.Inspect(t.Context(), name); err == nil && len(info.Owners) == 0 && info.Queue == 0 {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("left in Redis: %+v, %v", info, err)
		}
	}
}

// wait starts LockContext and returns a channel with its outcome.
func wait(ctx context.Context, m *leased.Mutex) <-chan outcome { return calling(ctx, m.LockContext) }

// calling does what wait does, with any call.
func calling(ctx context.Context, call func(context.Context) (*leased.Lease, error)) <-chan outcome {
	got := make(chan outcome, 1)
	// Owned by the test, ended by ctx at the latest; its result is waited for.
	go func() {
		l, err := call(ctx)
		got <- outcome{l, err, time.Now()}
	}()
	return got
}

type outcome struct {
	lease *leased.Lease
	err   error
	at    time.Time
}

// entered waits for the lease and fails the test if the call returned an error.
func entered(t *testing.T, got <-chan outcome) outcome {
	t.Helper()
	select {
	case o := <-got:
		if o.err != nil {
			t.Fatal(o.err)
		}
		return o
	case <-time.After(patience):
		t.Fatal("nobody entered")
		return outcome{}
	}
}

// watch returns a channel that receives the time at which the lease's context ends.
func watch(l *leased.Lease) <-chan time.Time {
	ended := make(chan time.Time, 1)
	context.AfterFunc(l.Context(), func() { ended <- time.Now() })
	return ended
}

// lostAt waits for the end of a watched lease, which must be a loss.
func lostAt(t *testing.T, l *leased.Lease, ended <-chan time.Time) time.Time {
	t.Helper()
	select {
	case at := <-ended:
		if cause := context.Cause(l.Context()); !errors.Is(cause, leased.ErrLeaseLost) {
			t.Fatalf("the lease ended with %v", cause)
		}
		return at
	case <-time.After(patience):
		t.Fatal("the lease did not end")
		return time.Time{}
	}
}
