package leased_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/leasedmutex/leased"
)

// A loss says what was lost and why, wherever the user learns of it.
func TestALossExplainsItself(t *testing.T) {
	for what, c := range map[string]struct {
		opts []leased.LockOption
		lose func(s place, c *leased.Client)
		why  string
		is   error // nil: only a loss
	}{
		"evicted": {nil, func(_ place, c *leased.Client) { _ = c.ForceUnlock(context.Background(), "flash") },
			"an operator evicted its owner", nil},
		"deleted": {nil, func(s place, _ *leased.Client) { s.rdb.Del(context.Background(), "flash") },
			"Redis reports that this process no longer owns it", nil},
		"maximum hold": {[]leased.LockOption{leased.WithMaxHold(time.Second)}, func(place, *leased.Client) {},
			"its maximum hold ended", leased.ErrMaxHold},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				events := make(chan leased.LossEvent, 10)
				client := newClient(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { events <- ev }))
				check := func(where string, err error, token uint64) {
					t.Helper()
					want := fmt.Sprintf(`leased: lock "flash" lost (token %d): %s`, token, c.why)
					if err == nil || err.Error() != want {
						t.Errorf("%s: %v, want %s", where, err, want)
					}
					if !errors.Is(err, leased.ErrLeaseLost) || errors.Is(err, leased.ErrMaxHold) != (c.is != nil) {
						t.Errorf("%s: %v matches the wrong sentinels", where, err)
					}
				}
				l := lock(t, client.Mutex("flash", c.opts...))
				work, stop := l.With(context.Background())
				defer stop()
				time.Sleep(100 * time.Millisecond) // until the client hears messages
				c.lose(s, client)
				<-l.Context().Done()
				<-work.Done()
				check("cause", context.Cause(l.Context()), l.Token())
				check("cause of With", context.Cause(work), l.Token())
				check("Downgrade", l.Downgrade(context.Background()), l.Token())
				check("Unlock", l.Unlock(), l.Token())
				told := <-events
				check("the loss handler", told.Err, told.Token)
				late := lock(t, client.Mutex("flash", c.opts...))
				c.lose(s, client)
				time.Sleep(time.Minute)
				check("cause of a context that is asked for later", context.Cause(late.Context()), late.Token())
				check("Unlock", late.Unlock(), late.Token())

				var token uint64
				err := client.Mutex("flash", c.opts...).Do(context.Background(), func(ctx context.Context) error {
					token = inspect(t, client, "flash").Token
					c.lose(s, client)
					<-ctx.Done()
					check("cause in Do", context.Cause(ctx), token)
					return nil
				})
				check("Do", err, token)
			})
		})
	}
}

func TestWhoIsKeptOutByItsOwnProcessIsToldSo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, elsewhere := newClient(t, s), newClient(t, s, leased.WithOwner("elsewhere"))
		mu := c.Mutex("x")
		says := func(err error, want string) {
			t.Helper()
			if err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
		tries := func() error { _, err := mu.TryLockContext(context.Background()); return err }
		waits := func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, err := mu.LockContext(ctx)
			return err
		}
		l := lock(t, mu)
		says(tries(), `leased: lock "x" not acquired: another caller of this process holds the lock`)
		isAll(t, tries(), leased.ErrLocked, leased.ErrNotAcquired)
		says(waits(), `leased: lock "x" not acquired after 1s: context deadline exceeded (held by another caller of this process)`)
		unlock(t, l)

		l = lock(t, elsewhere.Mutex("x"))
		if err := waits(); !strings.HasSuffix(err.Error(), "(held by elsewhere)") {
			t.Errorf("beside another process: %v", err)
		}
		waiter := locking(t, mu)
		synctest.Wait()
		says(tries(), `leased: lock "x" not acquired: another caller of this process waits for the lock (held by elsewhere)`)
		unlock(t, l)
		l = closesSoon(t, "it gets in", waiter)
		says(waits(), `leased: lock "x" not acquired after 1s: context deadline exceeded (held by another caller of this process)`)
		unlock(t, l)
	})
}

// A wait that is shorter than a command's time limit has no error of Redis yet. Its error says that Redis
// had not answered, so that nobody looks for an owner.
func TestAWaitThatEndsBeforeRedisHasAnsweredSaysSo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		c := clientOn(t, s, s.connect(t, way.change))
		mu := c.Mutex("x")
		unlock(t, lock(t, mu)) // the connections stand
		for _, silent := range []bool{true, false} {
			way.shut.Store(silent)
			var holder *leased.Lease
			if !silent {
				holder = lock(t, newClient(t, s, leased.WithOwner("elsewhere")).Mutex("x"))
			}
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			_, err := mu.LockContext(ctx)
			want := `leased: lock "x" not acquired after 50ms: context deadline exceeded (held by elsewhere)`
			if silent {
				want = `leased: lock "x" not acquired after 50ms: context deadline exceeded (Redis had not answered)`
			}
			if err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
			way.shut.Store(false)
			if holder != nil {
				unlock(t, holder)
			}
			time.Sleep(10 * time.Second) // what was sent is given up
		}
	})
}

func TestShutdownNamesSomeOfTheLocksThatWereNotUnlocked(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		var leases []*leased.Lease
		for _, name := range []string{"e", "b", "d", "a", "c"} {
			leases = append(leases, lock(t, c.Mutex(name)))
		}
		leases = append(leases, lock(t, c.Mutex("r")))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := c.Shutdown(ctx)
		isAll(t, err, leased.ErrClosed)
		if want := `6 leases were not unlocked ("a", "b", "c" and 3 more): they`; !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		for _, l := range leases {
			_ = l.Unlock()
		}
		s.Mini.FlushAll()
	})
}

// Nothing tries to release such a lock any more, so the error does not say that it does.
func TestAnUnlockAfterAClientWasClosedNamesTheLock(t *testing.T) {
	for what, closes := range map[string]func(t *testing.T, c *leased.Client, rdbs []*redis.Client){
		"the Redis client": func(t *testing.T, _ *leased.Client, rdbs []*redis.Client) {
			for _, rdb := range rdbs {
				must(t, rdb.Close())
			}
		},
		"the leased.Client": func(_ *testing.T, c *leased.Client, _ []*redis.Client) { _ = c.Close() },
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				rdb := s.connect(t)
				c := clientOn(t, s, rdb, out.option())
				warm(t, s, c)
				l := lock(t, c.Mutex("x"))
				other := c.Mutex("y")
				other.Lock()
				closes(t, c, s.alike(rdb))
				for range 2 {
					err := l.Unlock()
					isAll(t, err, leased.ErrNotReleased, leased.ErrClosed)
					if text := err.Error(); !strings.Contains(text, `release of lock "x" not confirmed`) || strings.Contains(text, "trying") ||
						!strings.Contains(text, "client is closed") {
						t.Error(text)
					}
				}
				other.Unlock()
				synctest.Wait()
				if !slices.Contains(out.messages(), "WARN leased: a release was not confirmed, because a client was closed") {
					t.Errorf("logged %q", out.messages())
				}
			})
		})
	}
}

// recipes.md shows the handler.
func TestTheHandlerOfTheRecipesTellsATakenLockFromAnOutage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		locks, other := newClient(t, s), newClient(t, s)
		mux := http.NewServeMux()
		mux.Handle("POST /orders/{id}", handle(locks, pay))
		answers := func(want int) {
			t.Helper()
			w, began := httptest.NewRecorder(), time.Now()
			mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders/7", nil))
			if took := time.Since(began); w.Code != want || took > 6*time.Second {
				t.Errorf("status %d after %v, want %d: %s", w.Code, took, want, w.Body)
			}
		}
		answers(http.StatusOK)
		l := lock(t, other.Mutex("order:7"))
		answers(http.StatusConflict)
		s.Mini.SetError(outOfOrder)
		answers(http.StatusServiceUnavailable)
		s.Mini.SetError("")
		unlock(t, l)
		time.Sleep(time.Minute)
		answers(http.StatusOK)
	})
}

func TestTheHandlerOfTheRecipesUnlocksAlsoIfTheWorkPanics(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		fails := true
		handler := handle(newClient(t, s), func(context.Context) error {
			if fails {
				panic("a bug")
			}
			return nil
		})
		answer := func() (status int) {
			defer func() {
				if recover() != nil { // as net/http does
					status = 0
				}
			}()
			w := httptest.NewRecorder()
			handler(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders/7", nil))
			return w.Code
		}
		first := answer()
		fails = false
		if second := answer(); first != 0 || second != http.StatusOK {
			t.Errorf("status %d, then %d", first, second)
		}
	})
}

// detailed is an error that cannot be compared, although its type can.
type detailed struct{ details any }

func (e detailed) Error() string { return fmt.Sprint("refused: ", e.details) }

func TestAnErrorThatCannotBeComparedIsToldOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		hook := &carelessHook{do: func(redis.Cmder) error { return detailed{[]string{"by the limiter"}} }}
		s.hook(rdb, hook)
		c := clientOn(t, s, rdb, leased.WithTracerProvider(sdk.NewTracerProvider()))
		hook.on.Store(true)
		_, err := c.Mutex("x").TryLockContext(context.Background())
		if err == nil || strings.Count(err.Error(), "by the limiter") != 1 && s.members == nil {
			t.Errorf("TryLockContext: %v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, err = c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
		if s.members == nil && strings.Count(err.Error(), "by the limiter") != 1 {
			t.Errorf("LockContext: %v", err)
		}
		hook.on.Store(false)
	})
}
