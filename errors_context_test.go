package leased_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// Who works under two locks gives the calls about the inner one the context of the outer one, and repeats
// the work if the inner lease was lost.
func TestTheLossOfALeaseIsNoLossOfAnother(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		background, ours := context.Background(), errors.New("ours")
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		outer := lock(t, c.Mutex("outer"))
		ctx, cancel := outer.With(background)
		defer cancel()
		must(t, newClient(t, s).ForceUnlock(background, "outer"))
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
			{"ForceUnlock", func(ctx context.Context) error { return c.ForceUnlock(ctx, "inner") }, nil},
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
			must(t, newClient(t, s).ForceUnlock(background, "x"))
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
		for what, ctx := range map[string]context.Context{"Context": l.Context(), "With": work} {
			for call, err := range map[string]error{
				"Check": l.Check(ctx), "Downgrade": l.Downgrade(ctx), "LockContext": lockError(c, ctx), "ForceUnlock": c.ForceUnlock(ctx, "z"),
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

func lockError(c *leased.Client, ctx context.Context) error { //nolint:revive // the client comes first, as in the calls
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
				must(t, other.ForceUnlock(context.Background(), "x"))
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
		if errors.Is(err, leased.ErrLocked) {
			t.Errorf("it matches another call's error: %v", err)
		}
		unlock(t, l)
	})
}
