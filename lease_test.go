package leased_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
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
		err := c.Mutex("x").Do(t.Context(), func(ctx context.Context) error {
			must(t, newClient(t, s).ForceUnlock(t.Context(), "x"))
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if isAll(t, err, leased.ErrLeaseLost); strings.Count(err.Error(), "lost (token") != 1 {
			t.Errorf("it says %q", err)
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
