package leased

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

// The last error of Redis is left out only where the reason is that error. The texts of a broken connection are short,
// and a user's cause can contain them.
func TestAnErrorLeavesOutTheLastErrorOfRedisOnlyIfItSaysThat(t *testing.T) {
	canceled, cancel := context.WithCancelCause(t.Context())
	cancel(fmt.Errorf("reading the request: %w", io.EOF))
	loading := errors.New("LOADING Redis is loading the dataset in memory")
	for _, c := range []struct {
		reason, last error
		leftOut      bool
	}{
		{nil, io.EOF, false},
		{loading, loading, true},
		{fmt.Errorf("no server can be asked: %w", loading), loading, true},
		{errors.New("reading: unexpected EOF"), io.EOF, false},
		{errors.New("LOADING"), loading, false},
		{context.DeadlineExceeded, io.EOF, false},
		{ended(canceled), io.EOF, false},
	} {
		text := (&notAcquired{name: "x", reason: c.reason, lastErr: c.last}).Error()
		if strings.HasSuffix(text, "(last Redis error: "+c.last.Error()+")") == c.leftOut {
			t.Errorf("%v, after %v: %s", c.reason, c.last, text)
		}
	}
}

// What a handler panics with may name a lock, as a hook's panic may.
func TestWithoutLockNamesThePanicOfAHandlerIsLoggedWithoutItsValue(t *testing.T) {
	before, writer, flags := slog.Default(), log.Writer(), log.Flags() // SetDefault changes all three
	defer func() {
		slog.SetDefault(before)
		log.SetOutput(writer)
		log.SetFlags(flags)
	}()
	for hide, logged := range map[bool]string{false: "lost the lock topsecret", true: "a value of type string"} {
		var out bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, nil)))
		q := asyncQueue[string]{what: "the loss handler", hideNames: hide, deliver: func(name string) { panic("lost the lock " + name) }}
		q.add("topsecret")
		done := q.wait(t.Context())
		if text := out.String(); !done || !strings.Contains(text, logged) || hide && strings.Contains(text, "topsecret") {
			t.Errorf("hide is %v: %s", hide, text)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		if c := onStub(t, 0, 0, WithoutLockNamesInLogs()); !c.losses.hideNames || !c.tracing.queue.hideNames || !c.log.lines.hideNames {
			t.Error("a queue reports what names locks")
		}
	})
}
