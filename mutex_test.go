package leased_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func TestFiftyBuyersOfTenTicketsGetTen(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var r room
		var buyers sync.WaitGroup
		tickets, sold := 10, 0
		for range 5 {
			c := newClient(t, s)
			for range 10 {
				buyers.Go(func() {
					mu := c.Mutex("tickets")
					mu.Lock()
					defer mu.Unlock()
					r.visit(func() {
						left := tickets
						time.Sleep(10 * time.Microsecond) // an invitation to others
						if left > 0 {
							tickets = left - 1
							sold++
						}
					})
				})
			}
		}
		buyers.Wait()
		if sold != 10 || tickets != 0 || r.visits != 50 || r.crowded.Load() {
			t.Errorf("sold %d, left %d, visits %d, two inside: %v", sold, tickets, r.visits, r.crowded.Load())
		}
	})
}

func TestOneHolderAtATimeUnderContention(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const clients, callers, turns = 4, 6, 20
		var r room
		var all sync.WaitGroup
		for range clients {
			c := newClient(t, s, leased.WithLocalHandoffs(3, time.Millisecond))
			for range callers {
				all.Go(func() {
					mu := c.Mutex("x")
					for range turns {
						mu.Lock()
						r.visit(func() {})
						mu.Unlock()
					}
				})
			}
		}
		all.Wait()
		if r.visits != clients*callers*turns || r.crowded.Load() {
			t.Errorf("%d visits, two inside: %v", r.visits, r.crowded.Load())
		}
	})
}

func TestLocalCallersEnterInTheOrderTheyCame(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		first := lock(t, c.Mutex("x"))
		var order []int
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				mu := c.Mutex("x") // handles do not matter
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			synctest.Wait() // it waits now
		}
		unlock(t, first)
		all.Wait()
		if len(order) != 20 || !slices.IsSorted(order) {
			t.Errorf("entered in the order %v", order)
		}
	})
}

func TestClientsEnterInTheOrderTheyCame(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		first := lock(t, newClient(t, s).Mutex("x"))
		var order []int
		var all sync.WaitGroup
		for i := range 6 {
			mu := newClient(t, s).Mutex("x")
			all.Go(func() {
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			s.queued(t, "x", int64(i+1))
		}
		unlock(t, first)
		all.Wait()
		if !slices.Equal(order, []int{0, 1, 2, 3, 4, 5}) {
			t.Errorf("entered in the order %v", order)
		}
	})
}

func TestTryLockOnAHeldLockSaysErrLocked(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		here, elsewhere := newClient(t, s), newClient(t, s)
		l := lock(t, here.Mutex("x"))
		for who, c := range map[string]*leased.Client{"the same client": here, "another client": elsewhere} {
			got, err := c.Mutex("x").TryLockContext(context.Background())
			if got != nil || !errors.Is(err, leased.ErrLocked) || !errors.Is(err, leased.ErrNotAcquired) {
				t.Errorf("%s got %v, %v", who, got, err)
			}
			if c.Mutex("x").TryLock() {
				t.Errorf("TryLock of %s succeeded", who)
			}
		}
		unlock(t, l)
		if !elsewhere.Mutex("x").TryLock() {
			t.Fatal("TryLock of a free lock failed")
		}
		elsewhere.Mutex("x").Unlock()
	})
}

func TestTryLockDoesNotOvertakeOneWhoWaits(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		waiter := locking(t, newClient(t, s).Mutex("x"))
		s.queued(t, "x", 1)
		// The lock becomes free without a message to the waiter.
		s.rdb.Del(context.Background(), s.Prefix+"x")
		_, err := newClient(t, s).Mutex("x").TryLockContext(context.Background())
		isAll(t, err, leased.ErrLocked)
		unlock(t, closesSoon(t, "the waiter has the lock", waiter))
		isAll(t, owner.Unlock(), leased.ErrLeaseLost)
	})
}

func TestTryLockDoesNotOvertakeALocalWaiter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		foreign := "somebody"
		s.rdb.Set(context.Background(), "x", foreign, time.Minute)
		c := newClient(t, s)
		waiter := locking(t, c.Mutex("x"))
		synctest.Wait()
		s.rdb.Del(context.Background(), "x") // free, and the waiter's next look is some ms away
		if c.Mutex("x").TryLock() {
			t.Error("TryLock overtook a waiter")
		}
		unlock(t, <-waiter)
	})
}

func TestAnotherGoroutineAndAnotherHandleMayUnlock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		c.Mutex("x").Lock()
		done := make(chan any)
		go func() { done <- panics(c.Mutex("x", leased.WithTTL(time.Minute)).Unlock) }()
		if p := <-done; p != nil {
			t.Fatal(p)
		}
		if v := s.value(t, "x"); v != "" {
			t.Errorf("the key still holds %q", v)
		}
	})
}

func TestMutexUnlockEndsALeaseOfLockContext(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		l := lock(t, c.Mutex("x"))
		work := l.Context()
		c.Mutex("x").Unlock()
		if context.Cause(work) != context.Canceled {
			t.Errorf("the lease's context has cause %v", context.Cause(work))
		}
		next := lock(t, other.Mutex("x"))
		untouched := s.unchanged(t, "x")
		if err := l.Unlock(); err != nil {
			t.Errorf("Unlock after Mutex.Unlock: %v", err)
		}
		untouched()
		unlock(t, next)
	})
}

func TestASecondUnlockOfALeaseDoesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		first := lock(t, c.Mutex("x"))
		unlock(t, first)
		second := lock(t, c.Mutex("x"))
		before := s.value(t, "x")
		for range 3 {
			unlock(t, first)
		}
		if after := s.value(t, "x"); after != before || second.Context().Err() != nil {
			t.Errorf("the second lease suffered: %q became %q, %v", before, after, second.Context().Err())
		}
		unlock(t, second)
	})
}

func TestUnlockOfAnUnlockedMutexPanics(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		check := func(when string) {
			t.Helper()
			if p := panics(c.Mutex("x").Unlock); !strings.Contains(fmt.Sprint(p), "unlocked") {
				t.Errorf("%s: panicked with %v", when, p)
			}
		}
		check("never locked")
		l := lock(t, other.Mutex("x"))
		check("locked by another client")
		if other.Mutex("x").TryLock() {
			t.Error("another client's Unlock released the lock")
		}
		unlock(t, l)
		lock(t, c.Mutex("x"))
		c.Mutex("x").Unlock()
		check("unlocked twice")
	})
}

func TestAStrangersReleaseDoesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		l := lock(t, c.Mutex("x"))
		before := s.value(t, "x")
		if n := compareAndDelete(t, s, "x", "not the owner's value"); n != 0 {
			t.Errorf("a stranger deleted %d keys", n)
		}
		unlock(t, lock(t, other.Mutex("y"))) // a lease of another lock is nothing to this one
		if p := panics(other.Mutex("x").Unlock); p == nil {
			t.Error("another client's Unlock did not panic")
		}
		if after := s.value(t, "x"); after != before || l.Context().Err() != nil {
			t.Errorf("key %q became %q, lease %v", before, after, l.Context().Err())
		}
		unlock(t, l)
	})
}

func TestTheWaitIsBoundedApartFromTheTTL(t *testing.T) {
	for _, ttl := range []time.Duration{100 * time.Millisecond, time.Hour} {
		inVirtualTime(t, func(t *testing.T, s place) {
			owner := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
			waiter := newClient(t, s, leased.WithTTL(ttl))
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			began := time.Now()
			_, err := waiter.Mutex("x").LockContext(ctx)
			isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
			if waited := time.Since(began); waited != 20*time.Second {
				t.Errorf("TTL %v: waited %v", ttl, waited)
			}
			unlock(t, owner)
		})
	}
}

func TestACrashedOwnersLockPassesOnWhenItsTTLEnds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 20 * time.Second
		owner, wire := onLine(t, s, leased.WithTTL(ttl))
		l := lock(t, owner.Mutex("x"))
		began := time.Now()
		wire.cut()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if waited := time.Since(began); waited < ttl || waited > ttl+2*time.Millisecond {
			t.Errorf("got in after %v, the TTL is %v", waited, ttl)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestAStalledOwnerDoesNotDeleteTheNextOwnersLock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		stalled := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr }), leased.WithTTL(400*time.Millisecond))
		l := lock(t, stalled.Mutex("x"))
		wire.BlackHole()
		next := lock(t, newClient(t, s).Mutex("x"))
		if until := time.Until(l.TrustedUntil()); until > 0 {
			t.Errorf("two owners: the first would be for another %v", until)
		}
		closesSoon(t, "the first owner's context ends", l.Context().Done())
		isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
		wire.Heal()
		wire.Cut()
		untouched := s.unchanged(t, "x")
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		eventually(t, "the first owner reaches Redis again", func() bool {
			_, err := stalled.Inspect(context.Background(), "x")
			return err == nil
		})
		if err := stalled.Close(); err != nil { // all it still had to say is said
			t.Error(err)
		}
		untouched()
		unlock(t, next)
	})
}
