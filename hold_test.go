package leased_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAMaximumHoldEndsTheLeaseAndThenItsRenewal(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold, ttl = time.Minute, 12 * time.Second
		var losses []leased.LossEvent
		c := newClient(t, s, leased.WithMaxHold(hold), leased.WithTTL(ttl),
			leased.WithLossHandler(func(ev leased.LossEvent) { losses = append(losses, ev) }))
		began := time.Now()
		stuck := lock(t, c.Mutex("x"))
		local := locking(t, c.Mutex("x"))
		elsewhere := locking(t, newClient(t, s).Mutex("x"))
		work := stuck.Context()
		<-work.Done()
		if held := time.Since(began); held != hold {
			t.Errorf("ended after %v", held)
		}
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		unlock(t, <-elsewhere)
		if outlived := time.Since(began) - hold; outlived < ttl/2 || outlived > ttl+2*time.Millisecond {
			t.Errorf("another client got in %v after the end of the lease", outlived)
		}
		synctest.Wait()
		if !open(local) {
			t.Error("a local caller entered beside the holder")
		}
		isAll(t, stuck.Unlock(), leased.ErrLeaseLost)
		unlock(t, <-local)
		if len(losses) != 1 {
			t.Errorf("told of %v", losses)
		}
	})
}

func TestAnIdleGrantIsReusedWithoutACommand(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var sent stamps
		rdb := s.connect(t, func(o *redis.Options) { o.Limiter = &sent })
		c := clientOn(t, s, rdb, leased.WithIdleHold(time.Hour), leased.WithTTL(time.Hour))
		warm(t, s, c) // connecting costs commands, and so does having just begun
		unlock(t, lock(t, c.Mutex("x")))
		before, was := len(sent.all()), c.Stats()
		for range 100 {
			c.Mutex("x").Lock()
			c.Mutex("x").Unlock() //nolint:staticcheck // that it costs nothing is the point
		}
		if n := len(sent.all()) - before; n != 0 {
			t.Errorf("100 uses cost %d commands", n)
		}
		if st := c.Stats(); st.Idle-was.Idle != 100 || st.Leases-was.Leases != 100 {
			t.Errorf("%+v", st)
		}
	})
}

func TestAnIdleGrantGoesAtOnceToTheFirstWhoWantsIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		idle := newClient(t, s, leased.WithIdleHold(time.Hour))
		unlock(t, lock(t, idle.Mutex("x")))
		time.Sleep(time.Minute)
		if s.value(t, "x") == "" {
			t.Fatal("it was not kept")
		}
		began := time.Now()
		l := lock(t, newClient(t, s).Mutex("x"))
		if waited := time.Since(began); waited > time.Millisecond {
			t.Errorf("waited %v for an idle grant", waited)
		}
		unlock(t, l)
	})
}

func TestAnIdleGrantIsReleasedWhenItsTimeIsOver(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithIdleHold(time.Minute), leased.WithTTL(10*time.Second))
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Minute - time.Millisecond)
		if s.value(t, "x") == "" {
			t.Error("released before its time")
		}
		time.Sleep(2 * time.Millisecond)
		if s.value(t, "x") != "" {
			t.Error("kept after its time")
		}
	})
}

// busy has n callers of c work one after the other, for so long each, and writes
// into order who did.
func busy(c *leased.Client, who string, n int, work time.Duration, order *[]string, all *sync.WaitGroup) {
	for range n {
		all.Go(func() {
			mu := c.Mutex("x")
			mu.Lock()
			*order = append(*order, who)
			time.Sleep(work)
			mu.Unlock()
		})
		synctest.Wait() // it waits, or works
	}
}

func TestLocalHandoffsAreBoundedWhileAnotherWaits(t *testing.T) {
	for what, c := range map[string]struct {
		option leased.LockOption
		want   string
	}{
		"by number": {leased.WithLocalHandoffs(3, time.Hour), "AAABAAAA"},
		"by tenure": {leased.WithLocalHandoffs(1000, 50*time.Millisecond), "AAABAAAA"},
		"to one":    {leased.WithLocalHandoffs(1, 0), "ABAAAAAA"},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				a, b := newClient(t, s, c.option), newClient(t, s)
				var order []string
				var all sync.WaitGroup
				busy(a, "A", 7, 20*time.Millisecond, &order, &all)
				busy(b, "B", 1, 20*time.Millisecond, &order, &all)
				all.Wait()
				if got := strings.Join(order, ""); got != c.want {
					t.Errorf("order %s, want %s", got, c.want)
				}
			})
		})
	}
}

func TestLocalHandoffsAreNotBoundedWhenNobodyElseWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLocalHandoffs(2, time.Millisecond))
		var order []string
		var all sync.WaitGroup
		busy(c, "A", 10, 20*time.Millisecond, &order, &all)
		all.Wait()
		// One acquire, and one release, each sent by hash and then by text; and one more
		// acquire when messages are heard for the first time.
		if st := c.Stats(); st.Local != 9 || st.Commands != 5 {
			t.Errorf("%+v", st)
		}
	})
}

// Without ContextTimeoutEnabled the commands of locks go through a clone of the
// Redis client, which go-redis makes without its hooks.
func TestHooksOfARedisClientThatHeedsDeadlinesSeeTheCommandsOfLocks(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		var seen redistest.Counter
		rdb.AddHook(&seen)
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		if n := seen.Commands(); n["evalsha"] < 2 {
			t.Errorf("an acquire and a release were seen as %v", n)
		}
	})
}

func TestUnlockInAnOutageSaysNotReleasedAndTheClientReleasesLater(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		strain := redistest.NewStrain(t)
		wire := redistest.NewProxy(t, s.Addr)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr })
		c := clientOn(t, s, rdb, leased.WithTTL(time.Hour), leased.WithReleaseTimeout(150*time.Millisecond))
		for what, unlock := range map[string]func(l *leased.Lease) error{
			"Lease.Unlock": (*leased.Lease).Unlock,
			"Mutex.Unlock": func(l *leased.Lease) error { c.Mutex("x").Unlock(); return l.Unlock() },
		} {
			l := lock(t, c.Mutex("x"))
			wire.BlackHole()
			began := time.Now()
			err := unlock(l)
			if what == "Lease.Unlock" && !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("%s: %v", what, err)
			}
			if took := time.Since(began); took < 150*time.Millisecond || took > time.Second+strain.Since(began) {
				t.Errorf("%s took %v", what, took)
			}
			if s.value(t, "x") == "" {
				t.Fatal("the lock was released all the same: the test proves nothing")
			}
			if l.Context().Err() == nil {
				t.Errorf("%s: the lease's context goes on", what)
			}
			wire.Heal()
			wire.Cut()
			eventually(t, "the lock is released", func() bool { return s.value(t, "x") == "" })
		}
	})
}

func TestAnUnconfirmedReleaseThatRedisCarriedOutHarmsNobody(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		wire := redistest.NewProxy(t, s.Addr)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr })
		c := clientOn(t, s, rdb, leased.WithReleaseTimeout(150*time.Millisecond))
		// The server knows the scripts then, however long it takes to learn them.
		unlock(t, lock(t, c.Mutex("x", leased.WithReleaseTimeout(patience))))
		l := lock(t, c.Mutex("x"))
		wire.DropReplies()
		isAll(t, l.Unlock(), leased.ErrNotReleased)
		next := lock(t, newClient(t, s).Mutex("x"))
		before := s.value(t, "x")
		wire.Heal()
		wire.Cut()
		if err := c.Close(); err != nil { // whatever it repeats, it has repeated
			t.Error(err)
		}
		if after := s.value(t, "x"); after != before {
			t.Errorf("the next owner's key changed from %q to %q", before, after)
		}
		unlock(t, next)
	})
}

func TestHandlesOfOneLockMayDifferInOptions(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(10*time.Second))
		var lasting []time.Duration
		for _, mu := range []*leased.Mutex{c.Mutex("x"), c.Mutex("x", leased.WithTTL(time.Minute))} {
			l := lock(t, mu)
			lasting = append(lasting, s.rdb.PTTL(context.Background(), "x").Val())
			unlock(t, l)
		}
		if lasting[0] > 10*time.Second || lasting[1] <= 10*time.Second {
			t.Errorf("the keys were set to last %v", lasting)
		}
	})
}
