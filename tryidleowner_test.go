package leased_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

func TestATryGetsAnIdleGrantOfAnotherProcess(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		keeps := newClient(t, s, leased.WithIdleHold(time.Hour))
		for range 3 {
			unlock(t, lock(t, keeps.Mutex("x")))
			if s.value(t, "x") == "" {
				t.Fatal("it was not kept")
			}
			tries := newClient(t, s) // its inbox is not confirmed yet
			for range 2 {
				// A machine under load may take longer than a try waits.
				eventually(t, "a try gets the idle grant", tries.Mutex("x").TryLock)
				tries.Mutex("x").Unlock()
				unlock(t, lock(t, keeps.Mutex("x")))
			}
			if err := tries.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestVirtualATryTakesNoTimeWhereNobodyIdlesAndLittleWhereTheOwnerIsBusy(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, c := range []struct {
			idle, busy bool
			waits      time.Duration
			enters     bool
		}{
			{idle: false, busy: true, waits: 0},
			{idle: true, busy: true, waits: 50 * time.Millisecond},
			{idle: true, busy: false, waits: 0, enters: true},
		} {
			var opts []leased.LockOption
			if c.idle {
				opts = append(opts, leased.WithIdleHold(time.Hour))
			}
			owner, tries := newClient(t, s).Mutex("x", opts...), newClient(t, s)
			l := lock(t, owner)
			if !c.busy {
				unlock(t, l)
			}
			unlock(t, lock(t, tries.Mutex("another")))
			synctest.Wait() // the inboxes hear
			before, began := tries.Stats().Commands, time.Now()
			got, err := tries.Mutex("x").TryLockContext(context.Background())
			if d := time.Since(began); d < c.waits || d > c.waits+10*time.Microsecond {
				t.Errorf("%+v: it took %v", c, d)
			}
			if c.enters != (err == nil) {
				t.Errorf("%+v: %v", c, err)
			}
			if n := tries.Stats().Commands - before; !c.idle && n != 1 {
				t.Errorf("%+v: %d commands", c, n)
			}
			if err == nil {
				unlock(t, got)
			} else {
				isAll(t, err, leased.ErrLocked)
			}
			if c.busy {
				unlock(t, l)
			}
			synctest.Wait()
			if !s.clean(t, "x") {
				t.Errorf("%+v: something is left", c)
			}
		}
	})
}
