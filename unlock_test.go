package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// What Unlock returns where Redis answers with errors, or too late.

const outOfOrder = "ERR out of order"

// The end of the maximum is a loss, whatever becomes of the release.
func TestAnUnlockAfterTheMaximumHoldTellsOfTheLossThoughTheReleaseFails(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := newClient(t, s, out.option(), leased.WithMaxHold(2*time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))
		err := c.Mutex("x").Do(context.Background(), func(ctx context.Context) error {
			<-ctx.Done()
			s.Mini.SetError(outOfOrder)
			return nil
		})
		isAll(t, err, leased.ErrLeaseLost, leased.ErrNotReleased)
		s.Mini.SetError("")
		c.Mutex("y").Lock()
		time.Sleep(2 * time.Second)
		s.Mini.SetError(outOfOrder)
		c.Mutex("y").Unlock() // has no error to return
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "not confirmed"); n != 1 {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
		z := newClient(t, s, leased.WithMaxHold(2*time.Second), leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		s.Mini.SetError("")
		l := lock(t, z.Mutex("z"))
		<-l.Context().Done()
		s.Mini.SetError(outOfOrder)
		unlocked := make(chan error, 1)
		go func() { unlocked <- l.Unlock() }() // ended by Close, waited for through unlocked
		synctest.Wait()
		if err := z.Close(); !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "releases were not confirmed") {
			t.Errorf("Close: %v", err)
		}
		isAll(t, <-unlocked, leased.ErrLeaseLost, leased.ErrNotReleased, leased.ErrClosed)
		s.Mini.SetError("")
		time.Sleep(time.Minute)
	})
}

// Only the reaper knows of the lock by then.
func TestShutdownWaitsForAnUnlockThatWaitsForItsCancel(t *testing.T) {
	const away, limit = time.Second, 3 * time.Second
	for _, back := range []bool{true, false} {
		t.Run(fmt.Sprintf("Redis comes back=%v", back), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s, leased.WithReleaseTimeout(time.Minute))
				warm(t, s, c)
				l := take(t, c.Mutex("x").LockContext)
				s.Mini.SetError(outOfOrder)
				unlocked := make(chan error, 1)
				go func() { unlocked <- l.Unlock() }() // ended by Shutdown at the latest, waited for through unlocked
				synctest.Wait()
				if back {
					time.AfterFunc(away, func() { s.Mini.SetError("") })
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				began := time.Now()
				if err := c.Shutdown(ctx); (err == nil) != back {
					t.Errorf("Shutdown: %v", err)
				}
				err, took := <-unlocked, time.Since(began)
				if back && (err != nil || took < away || took >= limit || !s.clean(t, "x")) {
					t.Errorf("Unlock returned %v, Shutdown took %v", err, took)
				}
				if !back {
					isAll(t, err, leased.ErrNotReleased, leased.ErrClosed)
					if took != limit {
						t.Errorf("Shutdown took %v", took)
					}
				}
				s.Mini.SetError("")
				time.Sleep(time.Minute)
			})
		})
	}
}

// The second one asks when the first has put it into the reaper's hands.
func TestASecondUnlockOfWhatWasNotReleasedNamesNoTimeItDoesNotKnow(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		warm(t, s, c)
		mu := c.Mutex("x")
		l := take(t, mu.LockContext)
		s.Mini.SetError(outOfOrder)
		mu.Unlock()
		err := l.Unlock()
		isAll(t, err, leased.ErrNotReleased)
		if strings.Contains(err.Error(), "0001-") || errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("Unlock: %v", err)
		}
		s.Mini.SetError("")
		time.Sleep(time.Minute)
	})
}
