package leased_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// As with a sync.RWMutex: readers do not keep each other out, and their tries come to the same request.
func TestReadersOfAProcessThatTryAtOnceAllEnter(t *testing.T) {
	for _, first := range []string{"a try", "a call that waits"} {
		t.Run(first, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				warm(t, s, c)
				rw := c.RWMutex("x")
				leases := make(chan *leased.Lease, 9)
				read := func(f func(context.Context) (*leased.Lease, error)) {
					l, err := f(context.Background())
					if err != nil {
						t.Error(err)
					}
					leases <- l
				}
				if first != "a try" {
					go read(rw.RLockContext)
				}
				for range 4 {
					go read(rw.TryRLockContext)
				}
				synctest.Wait()
				for range len(leases) {
					unlock(t, <-leases)
				}
			})
		})
	}
}

func TestReadersOfAProcessThatTryAtOnceAreAllRefusedBesideAWriter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		c := newClient(t, s)
		warm(t, s, c)
		rw := c.RWMutex("x")
		ended := make(chan error, 9)
		reader := reading(t, rw)
		for range 4 {
			go func() {
				_, err := rw.TryRLockContext(context.Background())
				ended <- err
			}()
		}
		for range 4 {
			isAll(t, <-ended, leased.ErrLocked)
		}
		time.Sleep(time.Second)
		unlock(t, l)
		unlock(t, <-reader)
	})
}
