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

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// slack is what servers and other processes on a loaded machine may take for what
// the contract wants done in milliseconds; what is kept from this process is told
// by redistest.Strain and comes on top. A mistake costs a re-check, a renewal period
// or a TTL, and each of these is longer. The exact figures are those of
// internal/measure.
const slack = 400 * time.Millisecond

// patience bounds what has no bound in the contract but must happen.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	redis.SetLogger(silence{}) // it tells of each fault, and they are ours
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	os.Exit(redistest.Main(m))
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// newClient makes a client that is closed with the test. Its log goes to the
// test's, at its end and only if it failed.
func newClient(t *testing.T, rdb redis.UniversalClient, prefix string, opts ...leased.Option) *leased.Client {
	t.Helper()
	log := &notes{}
	opts = append([]leased.Option{
		leased.WithKeyPrefix(prefix),
		leased.WithReleaseTimeout(patience), // a second may pass on a machine under load
		leased.WithLogger(slog.New(slog.NewTextHandler(log, nil))),
	}, opts...)
	c, err := leased.New(rdb, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Shorter than Close, whose own length is tested in TestUnlockAndCloseAreBounded.
		// Leases that a test let die are an error it does not care for.
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		_ = c.Shutdown(ctx)
		if t.Failed() {
			t.Log(log)
		}
	})
	return c
}

// notes is a log that is kept.
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

// within returns a context for what has to happen.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls, for there is no event: Redis tells nobody what happens in it.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) { // between two looks
		if time.Now().After(until) {
			t.Fatalf("after %v, still not: %s", patience, what)
		}
	}
}

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
	for until := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) { // between two looks
		var err error
		if info, err = c.Inspect(t.Context(), name); err == nil && len(info.Owners) == 0 && info.Queue == 0 {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("left in Redis: %+v, %v", info, err)
		}
	}
}

// wait starts LockContext and returns what becomes of it.
func wait(ctx context.Context, m *leased.Mutex) <-chan outcome { return calling(ctx, m.LockContext) }

// calling does the same with any call.
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

// entered waits for the lease.
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

// watch returns the time at which the lease's context ends.
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
