package leased

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// curious is an error of a user's hook. Each of its methods checks that its caller holds
// no mutex of the client.
type curious struct {
	w     *curiosity
	cause error
}

type curiosity struct {
	t      *testing.T
	client *Client
	down   atomic.Bool
	asked  atomic.Int64
	met    sync.Map // *entry
}

func (c *curious) Error() string   { c.w.look(); return "from a hook: " + c.cause.Error() }
func (c *curious) Unwrap() error   { c.w.look(); return c.cause }
func (c *curious) Is(error) bool   { c.w.look(); return false }
func (c *curious) As(any) bool     { c.w.look(); return false }
func (c *curious) Timeout() bool   { c.w.look(); return false }
func (c *curious) Temporary() bool { c.w.look(); return false }

// look fails if a mutex stays locked: another goroutine would unlock it, but the caller
// cannot before look returns.
func (w *curiosity) look() {
	w.asked.Add(1)
	w.meet()
	c := w.client
	for whose, mu := range map[string]*sync.Mutex{
		"the client's": &c.mu, "the inbox's": &c.inbox[0].mu, "the watchdog's": &c.watchdog.mu, "the canceler's": &c.canceler.mu,
		"the log's": &c.log.lines.mu,
	} {
		w.free(whose, mu)
	}
	w.met.Range(func(e, _ any) bool { return w.free("a lock's", &e.(*entry).mu) })
}

// meet notes the locks in use; errors are still asked after they are forgotten.
func (w *curiosity) meet() {
	if w.free("the client's", &w.client.mu) {
		for _, e := range w.client.entries() {
			w.met.Store(e, true)
		}
	}
}

func (w *curiosity) free(whose string, mu *sync.Mutex) bool {
	for end := time.Now().Add(2 * time.Second); !w.t.Failed() && time.Now().Before(end); runtime.Gosched() {
		if mu.TryLock() {
			mu.Unlock()
			return true
		}
	}
	if w.t.Failed() {
		return false
	}
	stack := make([]byte, 4096)
	w.t.Errorf("an error of the user's was asked while a mutex, %s, was held:\n%s", whose, stack[:runtime.Stack(stack, false)])
	return false
}

func (w *curiosity) fail() error {
	w.meet()
	return &curious{w, fmt.Errorf("reading: %w", io.ErrUnexpectedEOF)}
}

func (w *curiosity) DialHook(next redis.DialHook) redis.DialHook { return next }

func (w *curiosity) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if w.down.Load() {
			return w.fail()
		}
		return next(ctx, cmd)
	}
}

func (w *curiosity) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if !w.down.Load() {
			return next(ctx, cmds)
		}
		for _, cmd := range cmds {
			cmd.SetErr(w.fail())
		}
		return w.fail()
	}
}

func TestErrorsOfTheUsersHooksAreAskedWhileNothingIsLocked(t *testing.T) {
	t.Parallel()
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	w := &curiosity{t: t}
	c, err := New(rdb, WithLogger(slog.New(slog.DiscardHandler)), WithReleaseTimeout(500*time.Millisecond), WithLossHandler(func(LossEvent) {}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w.client = c
	rdb.AddHook(w)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	held, err := c.Mutex("held", WithTTL(300*time.Millisecond)).LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	downgraded, err := c.RWMutex("downgraded").LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	w.down.Store(true)
	brief := func() context.Context {
		brief, stop := context.WithTimeout(ctx, 500*time.Millisecond) // for what takes some microseconds
		t.Cleanup(stop)
		return brief
	}
	if _, err := c.Mutex("asked").LockContext(brief()); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("refused with %v", err)
	}
	if err := downgraded.Downgrade(brief()); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("not downgraded: %v", err)
	}
	if _, err := c.Mutex("tried").TryLockContext(ctx); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("refused with %v", err)
	}
	w.down.Store(false)
	l, err := c.Mutex("unlocked").LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	w.down.Store(true)
	if err := l.Unlock(); !errors.Is(err, ErrNotReleased) || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("unlocked: %v", err)
	}
	<-held.Context().Done() // its renewals fail, too
	_ = held.Unlock()
	_ = downgraded.Unlock()
	w.down.Store(false)
	if w.asked.Load() == 0 {
		t.Error("nobody asked: the test has proved nothing")
	}
}
