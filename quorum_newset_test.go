package leased_test

import (
	"context"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
)

// How long the set has run is counted from when it was first asked for a lock.
func TestANewSetOfServersOfAQuorumNeedsAllOfThemUntilTheQuarantineIsOver(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.FlushAll() // which leaves no mark
		}
		time.Sleep(time.Hour)
		c := open()
		held, released := lock(t, c.Mutex("held")), lock(t, c.Mutex("released"))
		unlock(t, released)
		servers[0].die()
		for range 2 { // the second of them after the quarantine has passed
			time.Sleep(29 * time.Second)
			if err := held.Context().Err(); err != nil {
				t.Fatalf("lost without a minority: %v", context.Cause(held.Context()))
			}
			for _, name := range []string{"new", "released"} {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				_, err := c.Mutex(name).LockContext(ctx)
				cancel()
				isAll(t, err, leased.ErrNoQuorum, leased.ErrNotAcquired)
			}
		}
		unlock(t, held)
		time.Sleep(2 * time.Second)
		for _, name := range []string{"new", "released", "held"} {
			unlock(t, lock(t, c.Mutex(name)))
		}
	})
}
