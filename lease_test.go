package leased_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

type valueKey struct{}

func TestALeasesContextHasItsParentsValuesAndNotItsEnd(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), valueKey{}, "v"), time.Minute)
		l, err := newClient(t, s).Mutex("x").LockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		work := l.Context()
		if work.Value(valueKey{}) != "v" {
			t.Error("the value is lost")
		}
		if _, has := work.Deadline(); has || work.Err() != nil {
			t.Errorf("it ends with its parent: deadline %v, error %v", has, work.Err())
		}
		unlock(t, l)
		if work.Err() != context.Canceled || context.Cause(work) != context.Canceled {
			t.Errorf("after Unlock: error %v, cause %v", work.Err(), context.Cause(work))
		}
		if l.Context().Err() == nil {
			t.Error("the context asked for after Unlock has not ended")
		}
	})
}

func TestTrustedUntilStaysAfterTheEnd(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		unlock(t, l)
		until := l.TrustedUntil()
		time.Sleep(time.Hour)
		if !l.TrustedUntil().Equal(until) {
			t.Error("it moved")
		}
	})
}

func TestWithEndsWithItsContextWithUnlockAndWithLoss(t *testing.T) {
	why := errors.New("the request is over")
	for what, end := range map[string]struct {
		by    func(s place, c *leased.Client, l *leased.Lease, cancel context.CancelCauseFunc)
		cause error
		lost  bool
	}{
		"its context": {func(_ place, _ *leased.Client, _ *leased.Lease, cancel context.CancelCauseFunc) { cancel(why) }, why, false},
		"Unlock":      {func(_ place, _ *leased.Client, l *leased.Lease, _ context.CancelCauseFunc) { l.Unlock() }, context.Canceled, false},
		"Mutex.Unlock": {func(_ place, c *leased.Client, _ *leased.Lease, _ context.CancelCauseFunc) {
			c.Mutex("x").Unlock()
		}, context.Canceled, false},
		"loss": {func(s place, _ *leased.Client, _ *leased.Lease, _ context.CancelCauseFunc) {
			s.rdb.Del(context.Background(), "x")
		}, leased.ErrLeaseLost, true},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				l := lock(t, c.Mutex("x"))
				ctx, cancel := context.WithCancelCause(context.WithValue(context.Background(), valueKey{}, "v"))
				defer cancel(nil)
				work, stop := l.With(ctx)
				defer stop()
				time.Sleep(time.Minute)
				if work.Err() != nil || work.Value(valueKey{}) != "v" {
					t.Fatalf("error %v, value %v", work.Err(), work.Value(valueKey{}))
				}
				end.by(s, c, l, cancel)
				closesSoon(t, "the context ends", work.Done())
				if !errors.Is(context.Cause(work), end.cause) {
					t.Errorf("cause %v", context.Cause(work))
				}
				if what != "its context" && ctx.Err() != nil {
					t.Error("the context it was made of has ended too")
				}
				late, stopLate := l.With(context.Background())
				defer stopLate()
				if over := what != "its context"; over != (late.Err() != nil) || over && !errors.Is(context.Cause(late), end.cause) {
					t.Errorf("a context that is made then: %v, %v", late.Err(), context.Cause(late))
				}
				if err := l.Unlock(); errors.Is(err, leased.ErrLeaseLost) != end.lost {
					t.Errorf("Unlock: %v", err)
				}
				<-late.Done()
			})
		})
	}
}

// No goroutine has to run in between: on a busy processor, the work would go on beside the next owner's.
func TestWithHasEndedWhenUnlockReturnsAndWhenTheLossIsToldOf(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var work, other context.Context
		told := make(chan bool, 1)
		c := newClient(t, s, leased.WithTTL(time.Second), leased.WithLossHandler(func(leased.LossEvent) {
			told <- work.Err() != nil && other.Err() != nil
		}))
		for range 100 {
			for what, end := range map[string]func(l *leased.Lease) error{
				"Unlock": func(l *leased.Lease) error { return l.Unlock() },
				"Mutex.Unlock": func(*leased.Lease) error {
					c.Mutex("x").Unlock()
					return nil
				},
				"Check": func(l *leased.Lease) error {
					s.rdb.Del(context.Background(), "x")
					return l.Check(context.Background())
				},
			} {
				l := lock(t, c.Mutex("x"))
				var stop, stopOther context.CancelFunc
				work, stop = l.With(context.Background())
				other, stopOther = l.With(context.Background())
				unused, drop := l.With(context.Background())
				drop()
				if err := errors.Join(work.Err(), other.Err()); err != nil || unused.Err() == nil {
					t.Fatalf("before %s: %v, %v", what, err, unused.Err())
				}
				err, cause := end(l), context.Canceled
				if err != nil {
					cause = leased.ErrLeaseLost
				}
				if work.Err() == nil || other.Err() == nil || !errors.Is(context.Cause(work), cause) {
					t.Fatalf("after %s: %v, %v, cause %v", what, work.Err(), other.Err(), context.Cause(work))
				}
				if err != nil && !<-told {
					t.Fatal("the loss was told of before the contexts ended")
				}
				_ = l.Unlock()
				stop()
				stopOther()
			}
		}
	})
}

func TestWithNeedsNoGoroutine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		synctest.Wait()
		before := runtime.NumGoroutine()
		for range 1000 {
			work, stop := l.With(context.Background())
			inner, stopInner := context.WithCancel(work)
			defer func() { stop(); stopInner(); <-inner.Done() }()
		}
		if grew := runtime.NumGoroutine() - before; grew > 10 {
			t.Errorf("1000 contexts took %d goroutines", grew)
		}
		unlock(t, l)
	})
}

func TestDoRunsUnderTheLockAndReturnsTheFunctionsError(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		failed := errors.New("failed")
		var work context.Context
		err := c.Mutex("x").Do(context.WithValue(context.Background(), valueKey{}, "v"), func(ctx context.Context) error {
			work = ctx
			if s.value(t, "x") == "" || ctx.Value(valueKey{}) != "v" || ctx.Err() != nil {
				t.Error("not under the lock, or without ctx")
			}
			return failed
		})
		if err != failed {
			t.Errorf("returned %v", err)
		}
		if work.Err() == nil || s.value(t, "x") != "" {
			t.Error("the lease outlives Do")
		}
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		err = c.Mutex("x").Do(ended, func(context.Context) error { t.Error("it ran"); return nil })
		isAll(t, err, leased.ErrNotAcquired, context.Canceled)
	})
}

func TestDoJoinsALossToTheFunctionsError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		failed := errors.New("failed")
		for _, own := range []error{failed, nil} {
			err := newClient(t, s).Mutex("x").Do(context.Background(), func(ctx context.Context) error {
				s.rdb.Del(context.Background(), "x")
				closesSoon(t, "the context ends", ctx.Done())
				isAll(t, context.Cause(ctx), leased.ErrLeaseLost)
				return own
			})
			isAll(t, err, leased.ErrLeaseLost)
			if errors.Is(err, failed) != (own != nil) {
				t.Errorf("returned %v for %v", err, own)
			}
		}
	})
}

func TestDoReportsALossOnceThoughTheFunctionReturnsIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		for _, returns := range []func(error) error{
			func(cause error) error { return cause },
			func(cause error) error { return fmt.Errorf("the work: %w", cause) },
			func(cause error) error { return errors.Join(errors.New("the work"), cause) },
		} {
			err := c.Mutex("x").Do(t.Context(), func(ctx context.Context) error {
				must(t, forceUnlock(t.Context(), newClient(t, s), "x"))
				<-ctx.Done()
				return returns(context.Cause(ctx))
			})
			if isAll(t, err, leased.ErrLeaseLost); strings.Count(err.Error(), "lost (token") != 1 {
				t.Errorf("it says %q", err)
			}
		}
	})
}

func TestDoUnlocksOnPanic(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		if p := panics(func() {
			_ = c.Mutex("x").Do(context.Background(), func(context.Context) error { panic("boom") })
		}); p != "boom" {
			t.Errorf("panicked with %v", p)
		}
		if s.value(t, "x") != "" || !c.Mutex("x").TryLock() {
			t.Fatal("the lock is still held")
		}
		c.Mutex("x").Unlock()
	})
}

func TestCheckFindsOutAtOnceThatALeaseIsLost(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		background := context.Background()
		rw := c.RWMutex("x")
		a, err := rw.RLockContext(background)
		must(t, err)
		b, err := rw.RLockContext(background)
		must(t, err)
		must(t, a.Check(background))
		must(t, s.rdb.Del(background, s.Prefix+"x").Err())
		err = a.Check(background)
		isAll(t, err, leased.ErrLeaseLost)
		if !strings.HasPrefix(err.Error(), `leased: lock "x" lost (token `) {
			t.Errorf("Check: %v", err)
		}
		for _, l := range []*leased.Lease{a, b} { // both were on that grant
			if l.Context().Err() == nil {
				t.Error("a lease goes on")
			}
			isAll(t, l.Check(background), leased.ErrLeaseLost)
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
			isAll(t, l.Check(background), leased.ErrLeaseLost)
		}
	})
}

// A process that hands a lock on among its callers does not ask Redis each time; the first
// caller that does saves the others from a grant that is gone.
func TestAfterACheckNobodyIsHandedADeadGrant(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLocalHandoffs(1000, time.Hour), leased.WithLossHandler(func(leased.LossEvent) {}))
		mu := c.Mutex("x")
		l := lock(t, mu)
		var all sync.WaitGroup
		dead := 0
		for range 57 {
			all.Go(func() {
				next, err := mu.LockContext(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				if s.value(t, "x") == "" {
					dead++
				}
				_ = next.Unlock()
			})
		}
		synctest.Wait()
		s.Mini.FlushAll()
		isAll(t, l.Check(context.Background()), leased.ErrLeaseLost)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		all.Wait()
		if dead > 0 {
			t.Errorf("%d callers were handed a lock that Redis knew nothing of", dead)
		}
	})
}

func TestCheckTrustsTheLeaseFromItsSending(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		until := l.TrustedUntil()
		time.Sleep(7 * time.Second)
		must(t, l.Check(context.Background()))
		if moved := l.TrustedUntil().Sub(until); moved != 7*time.Second {
			t.Errorf("the end of the trust window moved by %v", moved)
		}
		unlock(t, l)
		err := l.Check(context.Background())
		isAll(t, err, leased.ErrLeaseLost)
		if want := `leased: lock "x" not checked: the lease has ended`; err.Error() != want {
			t.Errorf("after Unlock: %v, want %s", err, want)
		}
	})
}

func TestACheckThatRedisDoesNotAnswerLeavesTheLeaseAlone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Millisecond) // what a quorum's servers prove at one instant is one proof
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		err := l.Check(context.Background())
		if want := `leased: lock "x" not checked: ` + s.saying("LOADING Redis is loading the dataset in memory"); err == nil || err.Error() != want {
			t.Errorf("Check: %v, want %s", err, want)
		}
		over, cancel := context.WithCancel(context.Background())
		cancel()
		isAll(t, l.Check(over), context.Canceled)
		if err := l.Context().Err(); err != nil || errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("the lease has ended: %v", err)
		}
		s.Mini.SetError("")
		must(t, l.Check(context.Background()))
		unlock(t, l)
	})
}

func TestCheckReturnsWhenItsContextEnds(t *testing.T) {
	inTurn(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr }))
		l := lock(t, c.Mutex("x"))
		wire.BlackHole()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		strain, began := redistest.NewStrain(t), time.Now()
		isAll(t, l.Check(ctx), context.DeadlineExceeded)
		if took := time.Since(began); took > time.Second+strain.Since(began) { // a command without answer takes 2 s
			t.Errorf("it took %v", took)
		}
		if err := l.Context().Err(); err != nil {
			t.Errorf("the lease has ended: %v", err)
		}
		wire.Heal()
		wire.Cut()
		unlock(t, l)
	})
}

// A check that comes while the renewal of another one is under way has one sent after that.
func TestACheckWaitsNoLongerThanACommandAlthoughItComesDuringAnother(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum does not wait for servers that it knows to be away")
		}
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Hour))
		l := lock(t, c.Mutex("x"))
		warm(t, s, c)
		way.shut.Store(true)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				began := time.Now()
				err := l.Check(context.Background())
				if took := time.Since(began); err == nil || took < 2*time.Second || took > 2*time.Second+10*time.Millisecond {
					t.Errorf("Check returned %v after %v", err, took)
				}
				if errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v matches the error of a context, and there was none", err)
				}
			})
			time.Sleep(500 * time.Millisecond) // the time between checks
		}
		all.Wait()
		way.shut.Store(false)
		must(t, l.Check(context.Background()))
		unlock(t, l)
	})
}

func TestChecksMadeTogetherShareCommands(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		var leases []*leased.Lease
		for range 100 {
			l, err := rw.RLockContext(context.Background())
			must(t, err)
			leases = append(leases, l)
		}
		before := s.commands(c)
		var all sync.WaitGroup
		for _, l := range leases {
			all.Go(func() { must(t, l.Check(context.Background())) })
		}
		all.Wait()
		if n := s.commands(c) - before; n < 1 || n > 50 {
			t.Errorf("100 checks took %d commands", n)
		}
		for _, l := range leases {
			unlock(t, l)
		}
	})
}

func TestCheckOfAClosedClientReturns(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = c.Shutdown(ctx)
		isAll(t, l.Check(context.Background()), leased.ErrClosed)
		_ = l.Unlock()
		s.Mini.FlushAll()
	})
}

// A downgrade that failed answers checks when it is tried again, which a client that is closed does not do.
func TestACheckDuringADowngradeEndsWithItsClient(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s, leased.WithLossHandler(func(leased.LossEvent) {}), leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
		l := take(t, c.RWMutex("x").LockContext)
		wire.cut()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
		checked := make(chan error, 1)
		go func() { checked <- l.Check(context.Background()) }() // ended by Shutdown, waited for through checked
		synctest.Wait()
		if err := c.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Shutdown: %v", err)
		}
		select {
		case err := <-checked:
			isAll(t, err, leased.ErrClosed)
		case <-time.After(time.Hour):
			t.Error("an hour after the client was closed, Check waits still")
		}
		_ = l.Unlock() // what becomes of it is Shutdown's story
		wire.mend()
	})
}
