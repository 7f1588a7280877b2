package leased_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// Whom a client made owner is counted by the client that did it.

func TestAReaderWhoYieldsBesideReadersOfOthersHandsNothingOn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		warm(t, s, a, b)
		ours, theirs := take(t, a.RWMutex("x").RLockContext), take(t, b.RWMutex("x").RLockContext)
		writer := taking(t, a.RWMutex("x").LockContext)
		synctest.Wait()
		unlock(t, ours)
		synctest.Wait()
		if n := a.Stats().Handed; n != 0 {
			t.Errorf("handed on %d times, while others read", n)
		}
		unlock(t, theirs)
		unlock(t, <-writer)
		if n := b.Stats().Handed; n != 1 {
			t.Errorf("the last reader handed on %d times", n)
		}
	})
}

func TestAWriterWhoYieldsOrDowngradesCountsWhomItLetIn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b, c := newClient(t, s), newClient(t, s), newClient(t, s)
		warm(t, s, a, b, c)
		first := take(t, a.RWMutex("x").LockContext)
		readers := []<-chan *leased.Lease{taking(t, b.RWMutex("x").RLockContext), taking(t, c.RWMutex("x").RLockContext)}
		synctest.Wait()
		downgrade(t, first)
		for _, r := range readers {
			defer unlock(t, <-r)
		}
		if n := a.Stats().Handed; n != 2 {
			t.Errorf("a downgrade let %d in", n)
		}
		unlock(t, first)

		last := take(t, a.RWMutex("y", leased.WithLocalHandoffs(1, 0)).LockContext)
		other := taking(t, b.RWMutex("y").LockContext)
		synctest.Wait()
		again := taking(t, a.RWMutex("y").LockContext)
		synctest.Wait()
		unlock(t, last)
		unlock(t, <-other)
		unlock(t, <-again)
		if n := a.Stats().Handed; n != 3 {
			t.Errorf("after a yield %d were let in", n)
		}
	})
}

func TestACallerThatIsNotAdmittedIsNotCounted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		warm(t, s, c, other)
		l := lock(t, other.Mutex("x"))
		before := c.Stats()
		if _, err := c.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("a try: %v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := c.Mutex("x").LockContext(ctx); err == nil {
			t.Error("two inside")
		}
		synctest.Wait()
		if after := c.Stats(); after.Leases != before.Leases {
			t.Errorf("%d leases were counted, and none was granted", after.Leases-before.Leases)
		}
		unlock(t, l)
	})
}
