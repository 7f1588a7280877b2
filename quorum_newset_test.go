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

// One server is asked for a lock before the others are there. They all grant locks together, until the quarantine
// of the first one is over: then two that are new are no majority, and the first one is none by itself.
func TestANewSetThatIsMetInPartsGrantsNothingUntilAMajorityIsOldEnough(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.FlushAll() // which leaves no mark
		}
		servers[1].die()
		servers[2].die()
		c := open()
		grants := func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			l, err := c.Mutex("x").LockContext(ctx)
			if err != nil {
				isAll(t, err, leased.ErrNoQuorum)
				return false
			}
			unlock(t, l)
			return true
		}
		began := time.Now()
		at := func(d time.Duration, want bool) {
			t.Helper()
			time.Sleep(time.Until(began.Add(d)))
			if got := grants(); got != want {
				t.Errorf("after %v: granted %v", d, got)
			}
		}
		at(0, false)
		servers[1].comeBack()
		servers[2].comeBack()
		at(40*time.Second, true)
		at(70*time.Second, false)
		at(110*time.Second, true)
	})
}
