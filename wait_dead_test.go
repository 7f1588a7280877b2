package leased_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A lock may be free behind hundreds of requests whose processes are gone. One call of a
// script drops a bounded number of them; the client then asks again at once, so that the
// lock takes a few commands and no sleep. Virtual time would show any sleep, except those
// until the server's clock has reached a token, which take microseconds.

// deadWaiters queues n requests whose waiting leases have expired.
func (s place) deadWaiters(t *testing.T, name string, n int) {
	t.Helper()
	queue, _, waiters, _ := s.helperKeys(name)
	ctx := context.Background()
	var entries, leases []redis.Z
	for i := range n {
		id := fmt.Sprintf("leased1:w:30000:c:%016d:AAAAAAAAAAAAAAAA:gone", i)
		entries = append(entries, redis.Z{Score: float64(i), Member: id})
		leases = append(leases, redis.Z{Score: float64(time.Now().Add(-time.Minute).UnixMilli()), Member: id})
	}
	must(t, s.rdb.ZAdd(ctx, queue, entries...).Err())
	must(t, s.rdb.ZAdd(ctx, waiters, leases...).Err())
	must(t, s.rdb.PExpire(ctx, queue, time.Hour).Err())
	must(t, s.rdb.PExpire(ctx, waiters, time.Hour).Err())
}

func TestAFreeLockBehindDeadWaitersIsGotAtOnce(t *testing.T) {
	for _, dead := range []int{100, 500, 1_500} {
		for what, take := range map[string]func(c *leased.Client) (*leased.Lease, error){
			"try": func(c *leased.Client) (*leased.Lease, error) {
				return c.Mutex("x").TryLockContext(context.Background())
			},
			"lock": func(c *leased.Client) (*leased.Lease, error) { return c.Mutex("x").LockContext(context.Background()) },
			"read": func(c *leased.Client) (*leased.Lease, error) {
				return c.RWMutex("x").TryRLockContext(context.Background())
			},
		} {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				warm(t, s, c) // a client that has just begun asks once more
				s.deadWaiters(t, "x", dead)
				began, before := time.Now(), s.commands(c)
				l, err := take(c)
				took, sent := time.Since(began), s.commands(c)-before
				if err != nil {
					t.Fatalf("%s behind %d dead: %v", what, dead, err)
				}
				if took > time.Millisecond || sent > int64(2+dead/400) {
					t.Errorf("%s behind %d dead: %v and %d commands", what, dead, took, sent)
				}
				unlock(t, l)
				synctest.Wait()
				if !s.clean(t, "x") {
					t.Errorf("%s behind %d dead: left %v", what, dead, s.rdb.Keys(context.Background(), "*").Val())
				}
			})
		}
	}
}

// Neither the waiter behind the dead requests nor the owner that releases sleeps.
func TestAReleasedLockPassesDeadWaitersAtOnce(t *testing.T) {
	for _, shared := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			owner, next := newClient(t, s), newClient(t, s)
			l := lock(t, owner.Mutex("x"))
			s.deadWaiters(t, "x", 1_500)
			var waiter <-chan *leased.Lease
			if shared {
				waiter = reading(t, next.RWMutex("x"))
			} else {
				waiter = locking(t, next.Mutex("x"))
			}
			synctest.Wait()
			s.deadWaiters(t, "x", 1_200) // they are before it, for their scores are lower
			began := time.Now()
			unlock(t, l)
			got := <-waiter
			if took := time.Since(began); took > time.Millisecond {
				t.Errorf("shared %v: it took %v", shared, took)
			}
			unlock(t, got)
		})
	}
}

// manyReaders is more than the 100 that one call of a script tells or lets in.
func manyReaders() int {
	if race.Enabled || wantsQuorum() {
		return 110
	}
	return 250
}

func TestManyReadersBehindAWriterEnterAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		readers := manyReaders()
		l := lock(t, newClient(t, s).Mutex("x"))
		var waiting []<-chan *leased.Lease
		for range readers {
			waiting = append(waiting, reading(t, newClient(t, s).RWMutex("x")))
			synctest.Wait()
		}
		s.queued(t, "x", int64(readers))
		began := time.Now()
		unlock(t, l)
		var in []*leased.Lease
		for _, w := range waiting {
			in = append(in, <-w)
		}
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the last of %d readers entered after %v", readers, took)
		}
		// All of them are notified at once that a writer waits.
		writer := locking(t, newClient(t, s).Mutex("x"))
		for _, r := range in {
			unlock(t, r)
		}
		unlock(t, <-writer)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the writer entered after %v", took)
		}
	})
}

// Readers of many processes keep the lock idle until a notification says that it is wanted.
func TestAWriterGetsTheLockThatManyReadersKeepIdleAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for range manyReaders() {
			unlock(t, <-reading(t, newClient(t, s).RWMutex("x", leased.WithIdleHold(time.Hour))))
		}
		synctest.Wait()
		began := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// In real time, because a pipe of the virtual network cannot take a pipeline of so many
// messages. A reader without a message would notice at its renewal, after ten seconds.
func TestForceUnlockTellsManyReadersAtOnce(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		var in []*leased.Lease
		defer func() { // if it fails, or each Close would wait for its client's lease
			var all sync.WaitGroup
			for _, l := range in {
				all.Go(func() { _ = l.Unlock() })
			}
			all.Wait()
		}()
		for range manyReaders() {
			l := <-reading(t, newClient(t, s).RWMutex("x"))
			if l == nil {
				t.Fatal("a reader does not enter")
			}
			in = append(in, l)
		}
		strain, began := redistest.NewStrain(t), time.Now()
		must(t, newClient(t, s).ForceUnlock(context.Background(), "x"))
		for _, l := range in {
			closesSoon(t, "a reader hears of it", l.Context().Done())
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		if took := time.Since(began); took > 5*time.Second+strain.Since(began) {
			t.Errorf("the last of them heard after %v", took)
		}
	})
}

// reading is a caller that waits to read.
func reading(t *testing.T, rw *leased.RWMutex) <-chan *leased.Lease {
	t.Helper()
	got := make(chan *leased.Lease, 1)
	go func() {
		l, err := rw.RLockContext(context.Background())
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	return got
}
