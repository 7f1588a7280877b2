package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
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
	"github.com/leasedmutex/leased/internal/redistest"
)

// A loss says what was lost and why, wherever the user learns of it.
func TestALossExplainsItself(t *testing.T) {
	for what, c := range map[string]struct {
		opts []leased.LockOption
		lose func(s place, c *leased.Client)
		why  string
		is   error // nil: only a loss
	}{
		"evicted": {nil, func(_ place, c *leased.Client) { _, _ = c.ForceUnlock(context.Background(), "flash") },
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
		if err := waits(); !strings.HasSuffix(err.Error(), `(held by "elsewhere")`) {
			t.Errorf("beside another process: %v", err)
		}
		waiter := locking(t, mu)
		synctest.Wait()
		says(tries(), `leased: lock "x" not acquired: another caller of this process waits for the lock (held by "elsewhere")`)
		unlock(t, l)
		l = closesSoon(t, "it gets in", waiter)
		says(waits(), `leased: lock "x" not acquired after 1s: context deadline exceeded (held by another caller of this process)`)
		unlock(t, l)
	})
}

// Readers keep no readers out, but a writer that waits does.
func TestAReaderThatWaitsForAWriterIsNotToldThatAReaderKeepsItOut(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		shop, c := newClient(t, s, leased.WithOwner("shop-b")), newClient(t, s)
		reads := take(t, shop.RWMutex("x").RLockContext)
		writer := taking(t, newClient(t, s).RWMutex("x").LockContext)
		synctest.Wait()
		gives := func(lock func(context.Context) (*leased.Lease, error), want string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if _, err := lock(ctx); err == nil || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		}
		gives(c.RWMutex("x").RLockContext, `(held by readers such as "shop-b", and a writer waits)`)
		gives(c.RWMutex("x").LockContext, `(held by "shop-b")`)
		unlock(t, reads)
		unlock(t, closesSoon(t, "the writer enters", writer))
	})
}

// Nobody holds a lock whose lease has ended, and others of the process are refused all the same, until
// whoever has not unlocked does, or another one for it, by name.
func TestWhoIsKeptOutByALeaseThatHasEndedIsToldSo(t *testing.T) {
	for what, c := range map[string]struct {
		opts []leased.LockOption
		lose func(s place, c *leased.Client)
	}{
		"a writer, evicted":         {nil, func(_ place, c *leased.Client) { _, _ = c.ForceUnlock(context.Background(), "x") }},
		"a writer, deleted":         {nil, func(s place, _ *leased.Client) { s.rdb.Del(context.Background(), "x") }},
		"a writer past its maximum": {[]leased.LockOption{leased.WithMaxHold(time.Second)}, func(place, *leased.Client) {}},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				client, elsewhere := newClient(t, s), newClient(t, s)
				mu := client.Mutex("x", c.opts...)
				l := lock(t, mu)
				time.Sleep(100 * time.Millisecond) // until the client hears messages
				c.lose(s, client)
				<-l.Context().Done()
				unlock(t, lock(t, elsewhere.Mutex("x"))) // Redis has it free

				const why = "a caller of this process whose lease has ended has not unlocked"
				_, err := mu.TryLockContext(context.Background())
				if want := `leased: lock "x" not acquired: ` + why; err == nil || err.Error() != want {
					t.Errorf("%v, want %s", err, want)
				}
				isAll(t, err, leased.ErrLocked, leased.ErrNotAcquired)
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				_, err = mu.LockContext(ctx)
				if want := `leased: lock "x" not acquired after 1s: context deadline exceeded (` + why + `)`; err == nil || err.Error() != want {
					t.Errorf("%v, want %s", err, want)
				}
				isAll(t, err, leased.ErrLocked, leased.ErrNotAcquired, context.DeadlineExceeded)

				isAll(t, mu.UnlockContext(context.Background()), leased.ErrLeaseLost)
				unlock(t, lock(t, mu))
				isAll(t, l.Unlock(), leased.ErrLeaseLost) // it ends no other hold
			})
		})
	}
}

// A reader whose lease goes on holds the lock, whatever became of another reader's.
func TestAReaderPastItsMaximumHoldBesideAnotherIsNotWhyAWriterIsKeptOut(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rlock := func(opts ...leased.LockOption) *leased.Lease {
			l, err := c.RWMutex("x", opts...).RLockContext(context.Background())
			must(t, err)
			return l
		}
		brief, long := rlock(leased.WithMaxHold(time.Second)), rlock()
		<-brief.Context().Done()
		_, err := c.RWMutex("x").TryLockContext(context.Background())
		if err == nil || !strings.HasSuffix(err.Error(), ": another caller of this process holds the lock") {
			t.Errorf("beside a reader: %v", err)
		}
		unlock(t, long)
		_, err = c.RWMutex("x").TryLockContext(context.Background())
		if err == nil || !strings.HasSuffix(err.Error(), ": a caller of this process whose lease has ended has not unlocked") {
			t.Errorf("beside none: %v", err)
		}
		isAll(t, brief.Unlock(), leased.ErrMaxHold)
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
			want := `leased: lock "x" not acquired after 50ms: context deadline exceeded (held by "elsewhere")`
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

// Nothing tries to release such a lock anymore, so the error does not say that it does.
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
						!strings.Contains(text, "expires by ") || !strings.Contains(text, "client is closed") {
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

// A text of an error may name hosts, tables or other customers.
func TestTheHandlerOfTheRecipesTellsClientsNothingOfTheWorksError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		handler := handle(newClient(t, s), func(context.Context) error { return errors.New("secret") })
		var logged bytes.Buffer
		defer log.SetOutput(log.Writer())
		log.SetOutput(&logged)
		w := httptest.NewRecorder()
		handler(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders/7", nil))
		if w.Code != http.StatusInternalServerError || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
		if !strings.Contains(logged.String(), "secret") {
			t.Errorf("logged %q", logged.String())
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

// Who works under two locks gives the calls about the inner one the context of the outer one, and repeats
// the work if the inner lease was lost.
func TestTheLossOfALeaseIsNoLossOfAnother(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		background, ours := context.Background(), errors.New("ours")
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		outer := lock(t, c.Mutex("outer"))
		ctx, cancel := outer.With(background)
		defer cancel()
		must(t, forceUnlock(background, newClient(t, s), "outer"))
		<-ctx.Done()
		isAll(t, context.Cause(ctx), leased.ErrLeaseLost)
		other, end := context.WithCancelCause(background)
		end(ours)
		inner := lock(t, c.Mutex("inner"))
		calls := []struct {
			what string
			call func(context.Context) error
			is   []error
		}{
			{"Check", inner.Check, nil},
			{"Downgrade", inner.Downgrade, nil},
			{"Inspect", func(ctx context.Context) error { _, err := c.Inspect(ctx, "inner"); return err }, nil},
			{"ForceUnlock", func(ctx context.Context) error { return forceUnlock(ctx, c, "inner") }, nil},
			{"LockContext", func(ctx context.Context) error { _, err := c.Mutex("x").LockContext(ctx); return err }, []error{leased.ErrNotAcquired}},
			{"Do", func(ctx context.Context) error {
				return c.Mutex("x").Do(ctx, func(context.Context) error { t.Error("done"); return nil })
			}, []error{leased.ErrNotAcquired}},
		}
		for _, call := range calls {
			err := call.call(ctx)
			isAll(t, err, append(call.is, context.Canceled)...)
			if errors.Is(err, leased.ErrLeaseLost) {
				t.Errorf("%s: %v", call.what, err)
			}
			isAll(t, call.call(other), append(call.is, context.Canceled, ours)...)
		}
		must(t, inner.Check(background))
		unlock(t, inner)
		isAll(t, outer.Unlock(), leased.ErrLeaseLost)
	})
}

// A lease's own context has ended with it, and says why.
func TestALossIsFoundUnderTheContextThatItHasEnded(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		background := context.Background()
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		for what, call := range map[string]func(*leased.Lease, context.Context) error{
			"Check": (*leased.Lease).Check, "Downgrade": (*leased.Lease).Downgrade, "UnlockContext": (*leased.Lease).UnlockContext,
		} {
			l, err := c.RWMutex("x").LockContext(background)
			must(t, err)
			must(t, forceUnlock(background, newClient(t, s), "x"))
			ctx := l.Context()
			<-ctx.Done()
			if err := call(l, ctx); !errors.Is(err, leased.ErrLeaseLost) {
				t.Errorf("%s: %v", what, err)
			}
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
	})
}

// A Check that waits for Redis when the lease is lost, and its context with it, returns the loss.
func TestACheckThatWaitsReturnsALossUnderTheLeasesOwnContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		way.start()
		for l.Context().Err() == nil {
			if err := l.Check(l.Context()); errors.Is(err, leased.ErrLeaseLost) != (l.Context().Err() != nil) {
				t.Errorf("the context ended with %v, and Check returned %v", context.Cause(l.Context()), err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		way.end(t) // a client that closes while a subscription hangs would stop virtual time
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		time.Sleep(time.Minute) // of virtual time: what was held back is delivered
	})
}

// The call ends its own context, so it does not wait, and the client goes on releasing.
func TestUnlockContextDoesNotWaitUnderAContextOfItsLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change))
		warm(t, s, c)
		l := lock(t, c.Mutex("x"))
		work, cancel := l.With(context.Background())
		defer cancel()
		way.start()
		began := time.Now()
		isAll(t, l.UnlockContext(work), leased.ErrNotReleased, context.Canceled)
		if took := time.Since(began); took > 0 {
			t.Errorf("it waited for %v", took)
		}
		way.end(t)
		s.becomesClean(t, "x")
		time.Sleep(time.Minute) // of virtual time: what was held back is delivered
	})
}

// Close ends the contexts of leases, and a call under one says that it was Close.
func TestTheEndByCloseOfALeasesContextIsErrClosed(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		background := context.Background()
		c, other := newClient(t, s), newClient(t, s)
		rw := c.RWMutex("x")
		l := take(t, rw.LockContext)
		elsewhere := take(t, other.RWMutex("y").LockContext)
		work, cancel := l.With(background)
		defer cancel()
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }()
		<-work.Done()
		for call, check := range map[string]func(context.Context) error{"Check": l.Check, "Downgrade": l.Downgrade} {
			mine, end := context.WithCancel(background)
			end()
			if err := check(mine); !errors.Is(err, context.Canceled) || errors.Is(err, leased.ErrClosed) {
				t.Errorf("%s under a context that the user has ended: %v", call, err)
			}
		}
		for what, ctx := range map[string]context.Context{"Context": l.Context(), "With": work} {
			for call, err := range map[string]error{
				"Check": l.Check(ctx), "Downgrade": l.Downgrade(ctx), "LockContext": lockError(c, ctx), "ForceUnlock": forceUnlock(ctx, c, "z"),
			} {
				if !errors.Is(err, leased.ErrClosed) {
					t.Errorf("%s under %s: %v", call, what, err)
				}
			}
			for call, err := range map[string]error{"Check": elsewhere.Check(ctx), "LockContext": lockError(other, ctx)} {
				if isAll(t, err, context.Canceled); errors.Is(err, leased.ErrClosed) {
					t.Errorf("%s of another client under %s: %v", call, what, err)
				}
			}
		}
		unlock(t, l)
		unlock(t, elsewhere)
		must(t, <-closed)
	})
}

func lockError(c *leased.Client, ctx context.Context) error { // the client comes first, as in the calls
	_, err := c.Mutex("z").LockContext(ctx)
	return err
}

// A call that waits for Redis when Close ends its context says so as well.
func TestAnInspectThatCloseEndsIsErrClosed(t *testing.T) {
	f := func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		warm(t, s, c)
		way.start()
		inspected := make(chan error, 1)
		go func() {
			_, err := c.Inspect(l.Context(), "x")
			inspected <- err
		}()
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }()
		isAll(t, <-inspected, leased.ErrClosed, context.Canceled)
		way.end(t)
		_ = l.Unlock() // its release may have been among what hung
		<-closed
		time.Sleep(time.Minute) // of virtual time: what was held back is delivered
	}
	t.Run("one server", func(t *testing.T) { inVirtualTime(t, f) })
	t.Run("quorum", func(t *testing.T) { onQuorum(t, f) })
}

// What is called under the context of Do ends with the lease, and its error does not say that the lease was lost.
func TestDoTellsOfItsLossBesideTheErrorOfACallUnderItsContext(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		other := newClient(t, s)
		inner := lock(t, c.Mutex("inner"))
		for what, call := range map[string]func(context.Context) error{
			"LockContext": func(ctx context.Context) error { return lockError(c, ctx) },
			"Do": func(ctx context.Context) error {
				return c.Mutex("z").Do(ctx, func(context.Context) error { return nil })
			},
			"Check":   inner.Check,
			"Inspect": func(ctx context.Context) error { _, err := c.Inspect(ctx, "z"); return err },
		} {
			err := c.Mutex("x").Do(context.Background(), func(ctx context.Context) error {
				must(t, forceUnlock(context.Background(), other, "x"))
				<-ctx.Done()
				return call(ctx)
			})
			if isAll(t, err, context.Canceled); !errors.Is(err, leased.ErrLeaseLost) {
				t.Errorf("Do of a %s: %v", what, err)
			}
		}
		unlock(t, inner)
	})
}

// stageError is an error of the user's that wraps one of this package.
type stageError struct{ of error }

func (e *stageError) Error() string { return "a stage failed: " + e.of.Error() }
func (e *stageError) Unwrap() error { return e.of }

// Who gives up wants to know whether to tell its user that somebody else is at work, or that Redis is away.
func TestVirtualAWaitThatEndsSaysWhetherAnotherCallerHadTheLock(t *testing.T) {
	soon := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(context.Background(), time.Second)
	}
	late := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(context.Background(), time.Minute)
	}
	canceled := func() (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Second, func() { cancel(leased.ErrLeaseLost) }) // as with the context of another lease
		return ctx, func() {}
	}
	ended := func() (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return ctx, cancel
	}
	type taker = func(context.Context) (*leased.Lease, error)
	writer := func(c *leased.Client) taker { return c.RWMutex("x").LockContext }
	reader := func(c *leased.Client) taker { return c.RWMutex("x").RLockContext }
	briefly := func(c *leased.Client) taker {
		return func(ctx context.Context) (*leased.Lease, error) {
			l, err := c.Mutex("x", leased.WithMinHold(time.Hour)).LockContext(ctx)
			if err == nil {
				must(t, l.Unlock())
			}
			return l, err
		}
	}
	for what, x := range map[string]struct {
		owner, caller func(*leased.Client) taker
		until         func() (context.Context, context.CancelFunc)
		here          bool // whether the owner is of the same process
		cut           int  // Redis is away before the call, or afterwards; 0: neither
		taken         bool
	}{
		"a writer":                          {owner: writer, caller: writer, until: soon, taken: true},
		"readers":                           {owner: reader, caller: writer, until: soon, taken: true},
		"a writer, for readers":             {owner: writer, caller: reader, until: soon, taken: true},
		"a minimum hold":                    {owner: briefly, caller: writer, until: soon, taken: true},
		"a caller of this process":          {owner: writer, caller: writer, until: soon, here: true, taken: true},
		"a writer, until it is canceled":    {owner: writer, caller: writer, until: canceled, taken: true},
		"a writer, and its context is over": {owner: writer, caller: writer, until: ended},
		"Redis away":                        {owner: writer, caller: writer, until: soon, cut: 1},
		"Redis away after a while":          {owner: writer, caller: writer, until: late, cut: 2},
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			c, wire := onLine(t, s)
			other := c
			if !x.here {
				other = newClient(t, s)
			}
			warm(t, s, c, other)
			first := take(t, x.owner(other))
			if x.cut == 1 {
				wire.cut()
			}
			ctx, cancel := x.until()
			defer cancel()
			if x.cut == 2 {
				time.AfterFunc(time.Second, wire.cut)
			}
			_, err := x.caller(c)(ctx)
			isAll(t, err, leased.ErrNotAcquired, ctx.Err())
			if got := errors.Is(err, leased.ErrLocked); got != x.taken {
				t.Errorf("%s: taken: %v, %v", what, got, err)
			}
			if errors.Is(err, leased.ErrLeaseLost) {
				t.Errorf("%s: it matches another call's error: %v", what, err)
			}
			if x.cut > 0 {
				wire.mend()
			}
			_ = first.Unlock()
			time.Sleep(2 * time.Minute)
		})
	}
}

func TestVirtualAWaitThatCloseEndsDoesNotSayThatTheLockWasTaken(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, here := range []bool{false, true} {
			c := newClient(t, s)
			other := c
			if !here {
				other = newClient(t, s)
			}
			l := lock(t, other.Mutex("x"))
			time.AfterFunc(time.Second, func() { _ = c.Close() })
			_, err := c.Mutex("x").LockContext(context.Background())
			isAll(t, err, leased.ErrNotAcquired, leased.ErrClosed)
			if errors.Is(err, leased.ErrLocked) {
				t.Errorf("held here %v: %v", here, err)
			}
			unlock(t, l)
		}
	})
}

// A cause that wraps an error of this package still is the user's. Contexts that end with each other's errors
// make a chain, which costs a step for each.
func TestACauseOfTheUsersIsFoundBehindErrorsOfContexts(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		mine := errors.New("mine")
		first := &stageError{errors.Join(leased.ErrLocked, mine)}
		var err error = first
		for range 40 {
			ctx, cancel := context.WithCancelCause(context.Background())
			cancel(err)
			err = l.Check(ctx)
			if _, inspected := c.Inspect(ctx, "x"); !errors.Is(inspected, mine) || errors.Is(inspected, leased.ErrLocked) {
				t.Fatalf("Inspect: %v", inspected)
			}
		}
		isAll(t, err, context.Canceled, mine, first)
		if of := new(stageError); !errors.As(err, &of) || of != first {
			t.Errorf("not found: %v", err)
		}
		if of := new(net.OpError); errors.As(err, &of) {
			t.Errorf("it has an error in it that the cause has not: %v", of)
		}
		if errors.Is(err, leased.ErrLocked) {
			t.Errorf("it matches another call's error: %v", err)
		}
		unlock(t, l)
	})
}

// refusals are servers that only an operator can make take our commands.
var refusals = map[string]struct {
	args   []string
	user   []any // of ACL SETUSER
	change func(o *redis.Options)
	want   string
	mend   func(t *testing.T, admin *redis.Client)
}{
	"no password": {
		args: []string{"--requirepass", "secret"},
		want: "auth", // NOAUTH, or that an unauthenticated client may not send so long a command
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.ConfigSet(context.Background(), "requirepass", "").Err())
		},
	},
	"wrong password": {
		args:   []string{"--requirepass", "secret"},
		change: func(o *redis.Options) { o.Password = "wrong" },
		want:   "WRONGPASS",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.ConfigSet(context.Background(), "requirepass", "wrong").Err())
		},
	},
	"no scripts": {
		user:   []any{"on", ">pw", "~*", "&*", "+@all", "-@scripting"},
		change: func(o *redis.Options) { o.Username, o.Password = "app", "pw" },
		want:   "NOPERM",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "+@scripting").Err())
		},
	},
	"no keys": {
		user:   []any{"on", ">pw", "~other:*", "&*", "+@all"},
		change: func(o *redis.Options) { o.Username, o.Password = "app", "pw" },
		want:   "NOPERM",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "~*").Err())
		},
	},
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatOnlyAnOperatorCanMendIsReturnedAtOnceAndWaitedForByLock(t *testing.T) {
	t.Parallel()
	for what, c := range refusals {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			server := redistest.Server(t, c.args...)
			admin := server.Client(func(o *redis.Options) {
				if c.args != nil {
					o.Password = "secret"
				}
			})
			if c.user != nil {
				must(t, admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, c.user...)...).Err())
			}
			s := place{Target: redistest.Target{Name: what, Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
			redistest.CheckLeaks(t, nil, s.Prefix)
			var out logs
			var change []func(*redis.Options)
			if c.change != nil {
				change = append(change, c.change)
			}
			client := clientOn(t, s, s.connect(t, change...), out.option(),
				leased.WithBackOff(func() leased.BackOff { return every(10 * time.Millisecond) }))

			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_, err := client.Mutex("x").LockContext(ctx)
			if !errors.Is(err, leased.ErrNotAcquired) || errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.want)) {
				t.Errorf("LockContext did not return at once with %s: %v", c.want, err)
			}
			if client.Mutex("x").TryLock() {
				t.Fatal("TryLock succeeded")
			}

			locked := make(chan any, 1)
			go func() { locked <- panics(client.Mutex("x").Lock) }() // ended by Close at the latest
			sent := client.Stats().Commands
			eventually(t, "Lock tries again and again", func() bool { return client.Stats().Commands > sent+5 })
			if !open(locked) {
				t.Fatal("Lock returned")
			}
			// A connection that is refused may break instead, which is another trouble, and then it is
			// refused again.
			broke := out.count(slog.LevelWarn, "does not answer")
			if n := out.count(slog.LevelError, "operator"); n < 1 || n > 1+broke {
				t.Errorf("logged %d times at Error: %q", n, out.messages())
			}
			c.mend(t, admin)
			if p := closesSoon(t, "Lock gets in when it is mended", locked); p != nil {
				t.Fatalf("Lock panicked with %v", p)
			}
			client.Mutex("x").Unlock()
			if n := admin.Exists(context.Background(), "p:x").Val(); n != 0 {
				t.Error("not released")
			}
		})
	}
}

// A script that lacks the right to one of its commands has carried out those before it.
func TestWhatAScriptLeavesThatMayNotCallACommandIsCanceled(t *testing.T) {
	t.Parallel()
	for command, take := range map[string]func(*leased.Client) error{
		"set": func(c *leased.Client) error {
			_, err := c.RWMutex("x").TryRLockContext(context.Background())
			return err
		},
		"zremrangebyscore": func(c *leased.Client) error {
			_, err := c.RWMutex("x").RLockContext(context.Background())
			return err
		},
		"pexpire": func(c *leased.Client) error { // it waits
			_, err := c.Mutex("y").LockContext(context.Background())
			return err
		},
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			other := lock(t, newClient(t, s).Mutex("y"))
			c := clientOn(t, s, s.connect(t, app))
			unlock(t, lock(t, c.Mutex("first"))) // it has subscribed
			acl("-" + command)
			err := take(c)
			isAll(t, err, leased.ErrNotAcquired)
			if !strings.Contains(err.Error(), "can't run this command") && !strings.Contains(err.Error(), "ACL failure in script") {
				t.Fatal(err)
			}
			acl("+" + command)
			eventually(t, "nothing of the request is left", func() bool {
				return s.rdb.Exists(context.Background(), "p:x:{p:x}:readers", "p:y:{p:y}:queue").Val() == 0
			})
			if l, err := newClient(t, s).Mutex("x").TryLockContext(context.Background()); err != nil {
				t.Error(err)
			} else {
				unlock(t, l)
			}
			unlock(t, other)
		})
	}
}

// every is a policy without growth.
type every time.Duration

func (e every) NextBackOff() time.Duration { return time.Duration(e) }

func TestWithoutChannelPermissionWaitingMeansPolling(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	admin := server.Client()
	must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all").Err())
	s := place{Target: redistest.Target{Name: "acl", Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
	redistest.CheckLeaks(t, admin, s.Prefix)
	var out logs
	deaf := func() *leased.Client {
		rdb := s.connect(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
		return clientOn(t, s, rdb, out.option(), leased.WithTTL(time.Hour))
	}
	a := deaf()
	l := lock(t, a.Mutex("x"))
	eventually(t, "the refused subscription is warned of", func() bool { return len(out.messages()) > 0 })

	b := deaf()
	waiter := locking(t, b.Mutex("x"))
	s.queued(t, "x", 1)
	sent := b.Stats().Commands
	eventually(t, "the waiter polls", func() bool { return b.Stats().Commands >= sent+2 })
	unlock(t, l)
	unlock(t, closesSoon(t, "the waiter finds out, not by the end of a TTL", waiter))
	eventually(t, "both have warned of their subscription", func() bool { return out.count(slog.LevelWarn, "subscribe") >= 2 })
	if n := out.count(slog.LevelWarn, "subscribe"); n != 2 {
		t.Errorf("two clients warned %d times of the subscription: %q", n, out.messages())
	}
	if n := len(out.messages()); n > 4 { // and at most once of publishing
		t.Errorf("warned too often: %q", out.messages())
	}

	// One that may subscribe is not held up by one that may not publish.
	hearing := newClient(t, s)
	l = lock(t, a.Mutex("x"))
	waiter = locking(t, hearing.Mutex("x"))
	s.queued(t, "x", 1)
	unlock(t, l)
	unlock(t, closesSoon(t, "a hearing waiter gets in after a mute owner", waiter))

	// A place behind readers of one's own needs no messages.
	reader := take(t, a.RWMutex("x").RLockContext)
	writer := taking(t, a.RWMutex("x").LockContext)
	s.queued(t, "x", 1)
	later := taking(t, b.RWMutex("x").RLockContext)
	s.queued(t, "x", 2)
	unlock(t, reader)
	unlock(t, closesSoon(t, "the writer gets in after its own readers", writer))
	unlock(t, closesSoon(t, "the later reader finds out", later))
}

// onAppServer starts a server with a user "app" who may do everything, and returns acl,
// which changes that.
func onAppServer(t *testing.T) (s place, acl func(rules ...any), app func(*redis.Options)) {
	t.Helper()
	server := redistest.Server(t)
	admin := server.Client()
	acl = func(rules ...any) {
		t.Helper()
		must(t, admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, rules...)...).Err())
	}
	acl("on", ">pw", "~*", "&*", "+@all")
	s = place{Target: redistest.Target{Name: "acl", Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
	redistest.CheckLeaks(t, admin, s.Prefix)
	return s, acl, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }
}

func TestADowngradeThatOnlyAnOperatorCanMendIsWaitedForAsLongAsItsContextAndItsLeaseLast(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		forbid, allow []any
		renewed       bool // renewals are not forbidden
	}{
		"no scripts":     {forbid: []any{"-@scripting"}, allow: []any{"+@scripting"}},
		"no helper keys": {forbid: []any{"resetkeys", "~p:x"}, allow: []any{"~*"}, renewed: true},
		"no sorted sets": {forbid: []any{"-@sortedset"}, allow: []any{"+@sortedset"}, renewed: true},
		"no ZADD":        {forbid: []any{"-zadd"}, allow: []any{"+zadd"}, renewed: true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			ttl := 20 * time.Second
			if c.renewed {
				ttl = 6 * time.Second
			}
			var out logs
			client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(ttl),
				leased.WithBackOff(func() leased.BackOff { return every(20 * time.Millisecond) }))
			l := take(t, client.RWMutex("x").LockContext)
			token := l.Token()
			acl(c.forbid...)
			const wait = 200 * time.Millisecond
			strain := redistest.NewStrain(t)
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			defer cancel()
			began := time.Now()
			isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
			if took := time.Since(began); took > wait+time.Second+strain.Since(began) {
				t.Errorf("returned after %v", took)
			}
			if c.renewed {
				renewals := client.Stats().Renewals
				eventually(t, "it is renewed", func() bool { return client.Stats().Renewals > renewals+1 })
			}
			if newClient(t, s).RWMutex("x").TryLock() {
				t.Fatal("a writer got in")
			}
			if l.Context().Err() != nil || l.Token() != token {
				t.Errorf("%v, token %d became %d", context.Cause(l.Context()), token, l.Token())
			}
			// A connection that is refused may break instead, which is another trouble, and then it is
			// refused again.
			broke := out.count(slog.LevelWarn, "does not answer")
			if n := out.count(slog.LevelError, "operator"); n < 1 || n > 1+broke {
				t.Errorf("logged %d times at Error: %q", n, out.messages())
			}

			acl(c.allow...)
			downgrade(t, l)
			if o := inspect(t, newClient(t, s), "x").Owners; len(o) != 1 || !o[0].Shared || l.Token() <= token {
				t.Errorf("owners %+v, token %d after %d", o, l.Token(), token)
			}
			unlock(t, l)
			if !s.clean(t, "x") {
				t.Error("something is left")
			}
		})
	}
}

// Here the permission stays away for as long as the lease lasts.
func TestALeaseWhoseDowngradeIsForbiddenIsUnlockedAllTheSame(t *testing.T) {
	t.Parallel()
	for what, forbid := range map[string]string{"half-way": "-zadd", "from the start": "-zcard"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			client := clientOn(t, s, s.connect(t, app), leased.WithReleaseTimeout(time.Second))
			l := take(t, client.RWMutex("x").LockContext)
			acl(forbid)
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
			err := l.Unlock()
			if err != nil && !errors.Is(err, leased.ErrNotReleased) {
				t.Error(err)
			}
			acl("+@all")
			s.becomesClean(t, "x")
			unlock(t, take(t, newClient(t, s).RWMutex("x").LockContext))
		})
	}
}

// The readers behind it become owners and get no message.
func TestWithoutChannelPermissionReadersFindOutThatAWriterBecameAReader(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	acl("resetchannels")
	mute, hearing := clientOn(t, s, s.connect(t, app), leased.WithTTL(time.Hour)), newClient(t, s, leased.WithTTL(time.Hour))
	l := take(t, mute.RWMutex("x").LockContext)
	reader := taking(t, hearing.RWMutex("x").RLockContext)
	s.queued(t, "x", 1)
	downgrade(t, l)
	r := closesSoon(t, "the reader finds out, not by the end of a TTL", reader)
	if o := inspect(t, hearing, "x").Owners; len(o) != 2 {
		t.Errorf("owners: %+v", o)
	}
	unlock(t, l)
	unlock(t, r)
}

// With the options that docs/deployments.md names, the error says what is wrong with the Sentinels.
func TestThatNoSentinelCanBeReachedIsSaid(t *testing.T) {
	t.Parallel()
	for want, sentinels := range map[string][]string{
		"all sentinels specified in configuration are unreachable": {"127.0.0.1:1", "127.0.0.1:1"},
		"it is not a Sentinel": {redistest.Server(t).Addr, "127.0.0.1:1"},
	} {
		rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main", SentinelAddrs: sentinels,
			ReadTimeout: 2 * time.Second, MaxRetries: -1, DialerRetries: 1})
		t.Cleanup(func() { _ = rdb.Close() })
		c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = c.Mutex("x").LockContext(ctx)
		cancel()
		if isAll(t, err, leased.ErrNotAcquired); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("LockContext: %v", err)
		}
	}
}
