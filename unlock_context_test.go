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

func TestUnlockContextSaysWhatUnlockPanicsWith(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		background := context.Background()
		rw := c.RWMutex("x")
		notLocked := func(err error) {
			t.Helper()
			isAll(t, err, leased.ErrNotLocked)
			if want := `leased: lock "x" not unlocked: not locked by this client`; err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
		notLocked(rw.UnlockContext(background))
		notLocked(rw.RUnlockContext(background))
		notLocked(c.Mutex("x").UnlockContext(background))

		rw.Lock()
		notLocked(rw.RUnlockContext(background))
		notLocked(other.Mutex("x").UnlockContext(background))
		must(t, rw.UnlockContext(background))
		rw.RLock()
		notLocked(rw.UnlockContext(background))
		must(t, rw.RUnlockContext(background))
		notLocked(rw.RUnlockContext(background))
		unlock(t, lock(t, other.Mutex("x"))) // it is free

		l := lock(t, c.Mutex("x"))
		must(t, c.Mutex("x").UnlockContext(background))
		if l.Context().Err() == nil {
			t.Error("the lease goes on")
		}
		must(t, l.Unlock())
		var none context.Context
		rw.Lock()
		if err := rw.UnlockContext(none); err == nil || errors.Is(err, leased.ErrNotLocked) {
			t.Errorf("without a context: %v", err)
		}
		rw.Unlock()
	})
}

func TestUnlockContextSaysThatTheLeaseWasLost(t *testing.T) {
	for _, read := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
			take, leave := waysIn(c.RWMutex("x"), read)
			take()
			s.Mini.FlushAll()
			err := leave(context.Background())
			isAll(t, err, leased.ErrLeaseLost)
			if !strings.HasPrefix(err.Error(), `leased: lock "x" lost (token `) {
				t.Errorf("read %v: %v", read, err)
			}
		})
	}
}

// waysIn returns how a writer, or a reader, locks and unlocks by name.
func waysIn(rw *leased.RWMutex, read bool) (take func(), leave func(context.Context) error) {
	if read {
		return rw.RLock, rw.RUnlockContext
	}
	return rw.Lock, rw.UnlockContext
}

func TestUnlockContextWaitsUntilItsContextEnds(t *testing.T) {
	for _, option := range []time.Duration{time.Millisecond, time.Minute} { // which does not matter
		for _, read := range []bool{false, true} {
			inTurn(t, func(t *testing.T, s place) { unlockContextWaits(t, s, option, read) })
		}
	}
}

func unlockContextWaits(t *testing.T, s place, option time.Duration, read bool) {
	wire := s.proxy(t)
	rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr; o.ContextTimeoutEnabled = true })
	c := clientOn(t, s, rdb, leased.WithReleaseTimeout(option))
	take, leave := waysIn(c.RWMutex("x"), read)
	take()
	wire.BlackHole()
	strain, began := redistest.NewStrain(t), time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	err := leave(ctx)
	isAll(t, err, leased.ErrNotReleased, context.DeadlineExceeded)
	// A command without answer takes 2 s.
	if took := time.Since(began); took < 100*time.Millisecond || took > time.Second+strain.Since(began) {
		t.Errorf("it took %v", took)
	}
	isAll(t, leave(ctx), leased.ErrNotLocked) // it was unlocked all the same
	wire.Heal()
	wire.Cut()
	unlock(t, lock(t, newClient(t, s).Mutex("x")))
}

func TestALeaseIsUnlockedWithAContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		var none context.Context
		if err := l.UnlockContext(none); err == nil {
			t.Error("without a context it returns nil")
		}
		must(t, l.UnlockContext(context.Background()))
		must(t, l.Unlock()) // a later call does nothing
		l = lock(t, c.Mutex("x"))
		s.Mini.FlushAll()
		for range 2 {
			isAll(t, l.UnlockContext(context.Background()), leased.ErrLeaseLost)
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		if l = new(leased.Lease); l.UnlockContext(context.Background()) == nil {
			t.Error("a lease that was not made is unlocked")
		}
	})
}

// What another call of the same lease waits for is not this one's affair.
func TestASecondUnlockWaitsNoLongerThanItMay(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute), leased.WithReleaseTimeout(4*time.Second))
		l := lock(t, c.Mutex("x"))
		warm(t, s, c)
		way.shut.Store(true)
		var all sync.WaitGroup
		check := func(call func() error, want time.Duration, is ...error) {
			all.Go(func() {
				began := time.Now()
				err := call()
				if took := time.Since(began); took != want {
					t.Errorf("it returned %v after %v, want %v", err, took, want)
				}
				isAll(t, err, append(is, leased.ErrNotReleased)...)
			})
			synctest.Wait()
		}
		within := func(limit time.Duration) func() error {
			return func() error {
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				return l.UnlockContext(ctx)
			}
		}
		check(within(6*time.Second), 6*time.Second, context.DeadlineExceeded)
		check(l.Unlock, 4*time.Second)
		check(within(50*time.Millisecond), 50*time.Millisecond, context.DeadlineExceeded)
		check(within(0), 0, context.DeadlineExceeded)
		check(within(time.Hour), 6*time.Second, context.DeadlineExceeded) // that of the first
		all.Wait()
		before := l.Unlock()
		isAll(t, before, leased.ErrNotReleased)
		way.shut.Store(false)
		if after := l.Unlock(); after != before { //nolint:errorlint // the same error
			t.Errorf("a later call returned %v", after)
		}
		time.Sleep(5 * time.Second) // until it is released
	})
}

func TestALeaseIsUnlockedThoughItsContextHasEnded(t *testing.T) {
	inTurn(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr; o.ContextTimeoutEnabled = true })
		l := lock(t, clientOn(t, s, rdb, leased.WithReleaseTimeout(time.Hour)).Mutex("x"))
		wire.BlackHole()
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		err := l.UnlockContext(ended)
		isAll(t, err, leased.ErrNotReleased, context.Canceled)
		if again := l.Unlock(); again != err { //nolint:errorlint // the same error
			t.Errorf("a later Unlock returned %v", again)
		}
		wire.Heal()
		wire.Cut()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
	})
}
