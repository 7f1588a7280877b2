package leased_test

import (
	"context"
	"errors"
	"testing"
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
		for range 20 {
			if err := l.Check(l.Context()); errors.Is(err, leased.ErrLeaseLost) {
				isAll(t, l.Unlock(), leased.ErrLeaseLost)
				return
			} else if l.Context().Err() != nil {
				t.Fatalf("the lease is lost, and Check returned %v", err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Error("not lost")
	})
}
