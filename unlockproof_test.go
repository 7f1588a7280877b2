package leased_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// answerLosing is a hook that loses the next commands, or the answers to them.
type answerLosing struct {
	mu       sync.Mutex
	commands int // are not sent
	answers  int // single commands whose answers are lost
	batches  int // pipelines whose answers are lost
}

func (h *answerLosing) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *answerLosing) counts(n *int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if *n == 0 {
		return false
	}
	*n--
	return true
}

func (h *answerLosing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "evalsha" && cmd.Name() != "eval" {
			return next(ctx, cmd)
		}
		if h.counts(&h.commands) {
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		err := next(ctx, cmd)
		if (err == nil || !redis.HasErrorPrefix(err, "NOSCRIPT")) && h.counts(&h.answers) {
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

func (h *answerLosing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if (err == nil || !redis.HasErrorPrefix(err, "NOSCRIPT")) && h.counts(&h.batches) {
			for _, cmd := range cmds {
				cmd.SetErr(io.ErrUnexpectedEOF)
			}
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

// onLosing returns a client whose commands can be lost.
func onLosing(t *testing.T, s place, opts ...leased.Option) (*leased.Client, *answerLosing) {
	rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	var h answerLosing
	rdb.AddHook(&h)
	c := clientOn(t, s, rdb, opts...)
	warm(t, s, c) // a client that has just begun asks once more than the tests count
	return c, &h
}

func TestAnUnlockWithoutAnswerIsNilWhereItIsProvedThatTheLockWasOurs(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		for what, lose := range map[string]func(*answerLosing){
			"the release ran":                  func(h *answerLosing) { h.answers = 1 },
			"the release was lost":             func(h *answerLosing) { h.commands = 1 },
			"an answer to the cancel was lost": func(h *answerLosing) { h.commands, h.batches = 1, 1 },
		} {
			for how, acquire := range map[string]func(c *leased.Client) *leased.Lease{
				"a writer": func(c *leased.Client) *leased.Lease { return take(t, c.RWMutex("x").LockContext) },
				"a reader": func(c *leased.Client) *leased.Lease { return take(t, c.RWMutex("x").RLockContext) },
				"a writer of the process after another": func(c *leased.Client) *leased.Lease {
					first := take(t, c.RWMutex("x").LockContext)
					next := taking(t, c.RWMutex("x").LockContext)
					unlock(t, first)
					return <-next
				},
			} {
				c, h := onLosing(t, s)
				l := acquire(c)
				lose(h)
				if err := l.Unlock(); err != nil {
					t.Errorf("%s, %s: %v", how, what, err)
				}
				if h.commands+h.answers+h.batches != 0 {
					t.Errorf("%s, %s: nothing was lost", how, what)
				}
				eventually(t, "nobody owns or waits", func() bool { return s.clean(t, "x") })
			}
		}
	})
}

func TestAnUnlockWithoutAnswerIsALossWhereTheLockMayHaveBeenAnothers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var another *leased.Lease
		for what, meanwhile := range map[string]func(){
			"nobody remembers": func() {},
			"another owns it":  func() { another = lock(t, newClient(t, s).Mutex("x")) },
			"another had it":   func() { unlock(t, lock(t, newClient(t, s).Mutex("x"))) },
			"a foreign owner has it": func() {
				unlock(t, lock(t, newClient(t, s).Mutex("x")))
				s.rdb.Set(context.Background(), "x", "somebody", 0)
			},
		} {
			for _, lose := range []func(*answerLosing){
				func(h *answerLosing) { h.answers = 1 }, func(h *answerLosing) { h.commands = 1 }, func(h *answerLosing) { h.answers, h.batches = 1, 2 },
			} {
				lost := make(chan leased.LossEvent, 10)
				c, h := onLosing(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
				l := lock(t, c.Mutex("x"))
				time.Sleep(time.Millisecond) // no two grants are of one microsecond
				s.rdb.FlushAll(context.Background())
				meanwhile()
				value := s.value(t, "x")
				lose(h)
				err := l.Unlock()
				isAll(t, err, leased.ErrLeaseLost)
				if err != nil && (errors.Is(err, leased.ErrNotReleased) || !strings.Contains(err.Error(), "had no answer")) {
					t.Errorf("%s: %v", what, err)
				}
				if now := s.value(t, "x"); now != value {
					t.Errorf("%s: %q owns after %q", what, now, value)
				}
				time.Sleep(time.Millisecond)
				if len(lost) != 1 {
					t.Fatalf("%s: told of %d losses", what, len(lost))
				}
				if ev := <-lost; ev.Token != l.Token() || !strings.Contains(ev.Reason, "had no answer") {
					t.Errorf("%s: told of %+v", what, ev)
				}
				if another != nil {
					unlock(t, another)
					another = nil
				}
				s.rdb.FlushAll(context.Background())
			}
		}
	})
}

// Unlock of the sync face returns no error, so its user hears of it as of any loss.
func TestAMutexWhoseUnlockProvedNothingTellsTheLossHandler(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		lost := make(chan leased.LossEvent, 10)
		c, h := onLosing(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
		mu := c.Mutex("x")
		mu.Lock()
		time.Sleep(time.Millisecond)
		s.rdb.FlushAll(context.Background())
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		h.answers = 1
		mu.Unlock()
		time.Sleep(time.Millisecond)
		if len(lost) != 1 {
			t.Fatalf("told of %d losses", len(lost))
		}
		if n := c.Stats().Lost; n != 1 {
			t.Errorf("%d lost", n)
		}
	})
}
