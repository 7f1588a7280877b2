package leased_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// As with a sync.RWMutex: readers do not keep each other out, and their tries come to the same request.
func TestReadersOfAProcessThatTryAtOnceAllEnter(t *testing.T) {
	for _, first := range []string{"a try", "a call that waits"} {
		t.Run(first, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
				s.hook(rdb, &far{}) // so that all have come before there is an answer
				c := clientOn(t, s, rdb)
				warm(t, s, c)
				rw := c.RWMutex("x")
				leases := make(chan *leased.Lease, 5)
				read := func(f func(context.Context) (*leased.Lease, error)) {
					l, err := f(context.Background())
					if err != nil {
						t.Error(err)
					}
					leases <- l
				}
				calls := cap(leases)
				if first != "a try" {
					go read(rw.RLockContext)
					calls--
				}
				for range calls {
					go read(rw.TryRLockContext)
				}
				for range cap(leases) {
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
