package leased_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// Numbers that the documentation names.

// turns has many callers of one process take turns, each holding the lock for hold, and
// returns how many leases and how much time they had until another process got in,
// which came when the first of them was inside.
func turns(t *testing.T, s place, hold time.Duration) (n int, took time.Duration) {
	t.Helper()
	here, there := newClient(t, s), newClient(t, s)
	for _, c := range []*leased.Client{here, there} {
		unlock(t, lock(t, c.Mutex("another"))) // their inboxes hear
	}
	synctest.Wait()
	first := lock(t, here.Mutex("x"))
	began := time.Now()
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			l := lock(t, here.Mutex("x"))
			n++
			time.Sleep(hold)
			unlock(t, l)
		})
	}
	other := locking(t, there.Mutex("x"))
	synctest.Wait()
	n = 1
	unlock(t, first)
	l := <-other
	got, d := n, time.Since(began)
	unlock(t, l)
	all.Wait()
	return got, d
}

func TestVirtualAProcessGivesOut64LeasesOrForTenMillisecondsWhileAnotherWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if n, took := turns(t, s, 0); n != 64 || took > time.Millisecond {
			t.Errorf("%d leases in %v", n, took)
		}
		if n, took := turns(t, s, 999*time.Microsecond); n != 12 || took < 10*time.Millisecond || took > 11*time.Millisecond {
			t.Errorf("%d leases in %v", n, took)
		}
	})
}

// stops is a policy that gives up at once.
type stops struct{}

func (stops) NextBackOff() time.Duration { return -1 } // backoff.Stop

func TestVirtualAPolicyThatStopsIsAskedAgainEach30Seconds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var sent stamps
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }),
			leased.WithBackOff(func() leased.BackOff { return stops{} }))
		unlock(t, lock(t, c.Mutex("another")))
		time.Sleep(time.Second)
		// An error that an operator has to fix: in an outage one lock asks each 2 s.
		s.Mini.SetError("NOPERM this user has no permissions to run the 'evalsha' command")
		before := len(sent.all())
		mu, in := c.Mutex("x"), make(chan struct{})
		go func() { // Lock waits for an operator, LockContext does not; ended below
			mu.Lock()
			close(in)
		}()
		time.Sleep(5*time.Minute + time.Second)
		times := sent.all()[before:]
		if len(times) != 11 {
			t.Errorf("asked %d times in five minutes", len(times))
		}
		for i := 1; i < len(times); i++ {
			if pause := times[i].Sub(times[i-1]); pause != 30*time.Second {
				t.Errorf("asked again after %v", pause)
			}
		}
		s.Mini.SetError("")
		<-in
		mu.Unlock()
	})
}

func TestVirtualTryLockReturnsAfterASecondWhateverRedisIsDoing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change))
		unlock(t, lock(t, c.Mutex("another")))
		way.start()
		began := time.Now()
		if c.Mutex("x").TryLock() {
			t.Error("it got a lock without an answer")
		}
		if d := time.Since(began); d != time.Second {
			t.Errorf("it took %v", d)
		}
		way.end(t)
	})
}
