package leased_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// onQuorum runs f on five embedded servers in virtual time.
func onQuorum(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		f(t, quorumPlace(t, true))
	})
}

func TestAQuorumLocksAndHandsOver(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		first := lock(t, a.Mutex("x"))
		if err := first.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
			t.Fatal("two owners")
		}
		waiter := locking(t, b.Mutex("x"))
		time.Sleep(10 * time.Second)
		if !open(waiter) {
			t.Fatal("two owners")
		}
		before := b.Stats().Commands
		unlock(t, first)
		second := <-waiter
		if second.Token() <= first.Token() {
			t.Errorf("tokens %d, %d", first.Token(), second.Token())
		}
		if n := b.Stats().Commands - before; n != 0 || b.Stats().Direct != 1 {
			t.Errorf("a hand-off cost its receiver %d commands: %+v", n, b.Stats())
		}
		unlock(t, second)
		synctest.Wait()
		if !s.clean(t, "x") {
			t.Error("keys are left")
		}
	})
}
