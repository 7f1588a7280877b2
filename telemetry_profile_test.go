package leased_test

import (
	"context"
	"runtime/pprof"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// What a goroutine profile says of a client's goroutines and of those that wait for locks.

// goroutines returns the groups of a goroutine profile in whose stack the function is.
func goroutines(t *testing.T, function string) (groups []string) {
	t.Helper()
	var text strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
		t.Fatal(err)
	}
	for group := range strings.SplitSeq(text.String(), "\n\n") {
		if strings.Contains(group, function) {
			groups = append(groups, group)
		}
	}
	return groups
}

// labeled runs f with a profiler label that no other test uses.
func labeled(value string, f func(ctx context.Context)) {
	pprof.Do(context.Background(), pprof.Labels("request", value), f)
}

// A profile by labels is for finding out which request costs what. The first one to lock would
// be charged with the client's goroutines for as long as the client lives.
func TestGoroutinesOfTheClientHaveNoLabelsOfTheFirstCaller(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		blocked := make(chan struct{})
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) { <-blocked }))
		labeled("first", func(context.Context) {
			l := lock(t, c.Mutex("x"))
			time.Sleep(time.Second)
			s.rdb.Del(context.Background(), "x")
			if err := l.Check(context.Background()); err == nil {
				t.Error("the lease is not lost")
			}
			_ = l.Unlock()
		})
		synctest.Wait()
		for _, function := range []string{"(*watchdog).run", "(*inbox).run", "(*asyncQueue"} {
			groups := goroutines(t, function)
			if len(groups) == 0 {
				t.Errorf("no goroutine in %s", function)
			}
			for _, group := range groups {
				if strings.Contains(group, "first") {
					t.Errorf("%s has the labels of the first caller:\n%s", function, group)
				}
			}
		}
		close(blocked)
	})
}

func TestGoroutinesThatWaitAreLabeledWithTheLocksNameIfAskedFor(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, on := range []bool{false, true} {
			var opts []leased.Option
			if on {
				opts = append(opts, leased.WithProfileLabels())
			}
			c := newClient(t, s, opts...)
			mu, rw := c.Mutex("stock"), c.RWMutex("ledger")
			held, written := lock(t, mu), take(t, rw.LockContext)
			var after []string
			done := make(chan struct{})
			go func() {
				defer close(done)
				labeled("order", func(ctx context.Context) {
					l, err := rw.RLockContext(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					after = goroutines(t, "TestGoroutinesThatWait")
					unlock(t, l)
				})
			}()
			entered := locking(t, mu)
			synctest.Wait()
			var waiting string
			for _, group := range goroutines(t, "(*handle).wait") {
				waiting += group
			}
			for _, label := range []string{`"leased.lock":"stock"`, `"leased.lock":"ledger"`, `"leased.mode":"shared"`} {
				if got := strings.Contains(waiting, label); got != on {
					t.Errorf("with labels: %v; %s is there: %v:\n%s", on, label, got, waiting)
				}
			}
			unlock(t, held)
			unlock(t, <-entered)
			unlock(t, written)
			<-done
			if all := strings.Join(after, "\n"); strings.Contains(all, "leased.lock") || !strings.Contains(all, `"request":"order"`) {
				t.Errorf("after the wait the goroutine's labels are not those of its context:\n%s", all)
			}
		}
	})
}
