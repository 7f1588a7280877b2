package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestACanceledWaitLeavesNothingInRedis(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		refused := make(chan error, 1)
		waiter := newClient(t, s)
		go func() {
			_, err := waiter.Mutex("x").LockContext(ctx)
			refused <- err
		}()
		s.queued(t, "x", 1)
		cancel()
		isAll(t, closesSoon(t, "LockContext returns", refused), leased.ErrNotAcquired, context.Canceled)
		queue, _, waiters, _ := s.helperKeys("x")
		eventually(t, "queue and waiters are gone", func() bool {
			return s.rdb.Exists(context.Background(), queue, waiters).Val() == 0
		})
		unlock(t, owner)
		if !s.clean(t, "x") {
			t.Error("somebody still owns the lock or waits for it")
		}
	})
}

func TestOneWhoGivesUpLeavesTheMiddleOfTheQueue(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		first := locking(t, newClient(t, s).Mutex("x"))
		s.queued(t, "x", 1)
		ctx, cancel := context.WithCancel(context.Background())
		second := newClient(t, s).Mutex("x")
		refused := make(chan error, 1)
		go func() {
			_, err := second.LockContext(ctx)
			refused <- err
		}()
		s.queued(t, "x", 2)
		cancel()
		isAll(t, closesSoon(t, "LockContext returns", refused), context.Canceled)
		s.queued(t, "x", 1)
		unlock(t, owner)
		unlock(t, closesSoon(t, "the first waiter gets in", first))
	})
}

func TestAnEndedContextTakesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		late, stop := context.WithDeadline(context.Background(), time.Unix(0, 0))
		defer stop()
		for want, ctx := range map[error]context.Context{context.Canceled: ctx, context.DeadlineExceeded: late} {
			l, err := c.Mutex("x").LockContext(ctx)
			if l != nil {
				t.Error("got a lease")
			}
			isAll(t, err, leased.ErrNotAcquired, want)
			_, err = c.Mutex("x").TryLockContext(ctx)
			isAll(t, err, leased.ErrNotAcquired, want)
		}
		if n := s.commands(c); n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

func TestTheErrorOfACanceledWaitMatchesItsContextsError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		owner := lock(t, newClient(t, s).Mutex("x"))
		why := errors.New("the user left")
		for _, before := range []bool{true, false} {
			ctx, cancel := context.WithCancelCause(context.Background())
			if before {
				cancel(why)
			} else {
				time.AfterFunc(time.Second, func() { cancel(why) })
			}
			_, err := c.Mutex("x").LockContext(ctx)
			if !errors.Is(err, leased.ErrNotAcquired) || !errors.Is(err, context.Canceled) {
				t.Errorf("ended before the call: %v: %v does not match the context's error", before, err)
			}
		}
		unlock(t, owner)
	})
}

func TestTheErrorOfACanceledWaitNamesTheLastTroubleOfRedis(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s)
		wire.cut()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded, errCut)
		wire.mend()
	})
}

func TestAWaitEndsWithItsContextWhateverRedisDoes(t *testing.T) {
	inTurn(t, func(t *testing.T, s place) {
		strain := redistest.NewStrain(t)
		wire := s.proxy(t)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr }))
		unlock(t, lock(t, c.Mutex("x")))
		wire.BlackHole()
		before := runtime.NumGoroutine()
		began := time.Now()
		for range 500 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			_, err := c.Mutex("x").LockContext(ctx)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, leased.ErrNotAcquired) {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took > 500*11*time.Millisecond+strain.Since(began) {
			t.Errorf("500 waits of 1 ms took %v", took)
		}
		if grew := runtime.NumGoroutine() - before; grew > 50 {
			t.Errorf("500 canceled calls left %d goroutines", grew)
		}
		wire.Heal()
		wire.Cut()
		unlock(t, lock(t, c.Mutex("x")))
	})
}

func TestALocalWaiterInheritsTheRequestOfACanceledOne(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		c := newClient(t, s)
		ctx, cancel := context.WithCancel(context.Background())
		refused := make(chan error, 1)
		go func() {
			_, err := c.Mutex("x").LockContext(ctx)
			refused <- err
		}()
		synctest.Wait()
		second := locking(t, c.Mutex("x"))
		third := locking(t, newClient(t, s).Mutex("x"))
		synctest.Wait()
		cancel()
		isAll(t, <-refused, context.Canceled)
		unlock(t, owner)
		time.Sleep(time.Millisecond)
		if open(second) == open(third) || !open(third) {
			t.Error("the first client lost its place in the queue")
		}
		c.Mutex("x").Unlock()
		unlock(t, <-third)
	})
}

func TestAGrantThatCrossesACancellationIsPassedOn(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		a, b, c := newClient(t, s), newClient(t, s), newClient(t, s)
		for range 60 {
			owner := lock(t, a.Mutex("x"))
			ctx, cancel := context.WithCancel(context.Background())
			var crossing sync.WaitGroup
			crossing.Go(func() {
				if l, err := b.Mutex("x").LockContext(ctx); err == nil {
					unlock(t, l)
				}
			})
			s.queued(t, "x", 1)
			next := locking(t, c.Mutex("x"))
			s.queued(t, "x", 2)
			crossing.Go(cancel)
			unlock(t, owner)
			unlock(t, closesSoon(t, "the next waiter gets in", next))
			crossing.Wait()
			cancel()
		}
		s.becomesClean(t, "x")
	})
}

func TestCancelingAtRandomUnderContentionLeavesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const clients, callers, turns = 4, 8, 50
		var r room
		var entered, refused atomic.Int64
		var all sync.WaitGroup
		for range clients {
			c := newClient(t, s, leased.WithLocalHandoffs(2, time.Millisecond))
			for range callers {
				all.Go(func() {
					for turn := range turns {
						// From too short for any caller to enter to enough on most machines; in
						// the end as long as it takes.
						ctx, cancel := context.WithTimeout(context.Background(), rand.N(time.Millisecond<<(turn/8)))
						if turn == turns-1 {
							ctx = context.Background()
						}
						l, err := c.Mutex("x").LockContext(ctx)
						switch {
						case err == nil:
							entered.Add(1)
							r.visit(func() {})
							if err := l.Unlock(); err != nil {
								t.Error(err)
							}
						case errors.Is(err, leased.ErrNotAcquired) && errors.Is(err, context.DeadlineExceeded):
							refused.Add(1)
						default:
							t.Error(err)
						}
						cancel()
					}
				})
			}
		}
		all.Wait()
		if r.crowded.Load() || int64(r.visits) != entered.Load() {
			t.Errorf("%d visits of %d leases, two inside: %v", r.visits, entered.Load(), r.crowded.Load())
		}
		if entered.Load() == 0 || refused.Load() == 0 {
			t.Errorf("%d entered, %d gave up: the test has proved nothing", entered.Load(), refused.Load())
		}
		s.becomesClean(t, "x")
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
	})
}

func TestOnlyTheCallersContextMakesItsErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		o := redistest.Options("127.0.0.1:1")
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		rdb := redis.NewClient(o)
		defer rdb.Close()
		c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, err = c.Mutex("x").TryLockContext(context.Background())
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody's context ended: %v", err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(3*time.Second, cancel)
		_, err = c.Mutex("x").LockContext(ctx)
		isAll(t, err, context.Canceled)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("canceled, and it had no deadline: %v", err)
		}
	})
}

// hole is the way to a server that stops to answer while its connections stay open.
type hole struct{ shut atomic.Bool }

type holed struct {
	net.Conn
	hole *hole
}

func (h *hole) change(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn { return &holed{conn, h} })
}

// Read drops what arrives while the hole is shut, so that the server is not held up.
func (c *holed) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.hole.shut.Load() {
			return n, err
		}
	}
}

// The contract's 10 ms are for the scheduler. In virtual time, where only timers and
// sleeps take time, a wait has to return at the very instant at which its context ends,
// in whatever stage it is. What it takes on a machine is printed by make measure.
func TestVirtualNoTimerLiesBetweenAContextsEndAndTheReturnOfItsWait(t *testing.T) {
	calls := map[string]func(*leased.Client, context.Context) (*leased.Lease, error){
		"LockContext": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.Mutex("x").LockContext(ctx)
		},
		"RLockContext": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.RWMutex("x").RLockContext(ctx)
		},
		"TryLockContext, free": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.Mutex("free").TryLockContext(ctx)
		},
	}
	for _, redis := range []string{"answers", "does not answer", "answers with errors"} {
		for name, call := range calls {
			t.Run(name+", Redis "+redis, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					var h hole
					held := lock(t, newClient(t, s, leased.WithTTL(time.Hour)).Mutex("x"))
					c := clientOn(t, s, s.connect(t, h.change), leased.WithTTL(time.Hour))
					unlock(t, lock(t, c.Mutex("warm")))
					switch redis {
					case "does not answer":
						h.shut.Store(true)
					case "answers with errors":
						s.Mini.SetError("LOADING Redis is loading the dataset in memory")
					}
					waits := 0
					// Odd times fall into pauses, re-checks and commands under way.
					for after := 100 * time.Microsecond; after < 20*time.Second; after = after*7/5 + 13*time.Microsecond {
						ctx, cancel := context.WithTimeout(context.Background(), after)
						ends, _ := ctx.Deadline()
						l, err := call(c, ctx)
						cancel()
						if l != nil { // a lock that was free, on a Redis that answers
							unlock(t, l)
							continue
						}
						if !errors.Is(err, context.DeadlineExceeded) {
							continue // a try is refused before that
						}
						waits++
						if late := time.Since(ends); late != 0 {
							t.Errorf("a wait of %v returned %v after its context's end", after, late)
						}
					}
					if waits == 0 && name == "LockContext" {
						t.Error("no wait ended with its context")
					}
					s.Mini.SetError("")
					h.shut.Store(false)
					unlock(t, held)
					time.Sleep(time.Minute) // what was under way comes to its end
					synctest.Wait()
				})
			})
		}
	}
}
