package leased_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// The readers of each process have a separate lease.

// renewedTill returns when the lease of the reader called label ends on the
// server's clock.
func renewedTill(t *testing.T, look *leased.Client, label string) time.Time {
	t.Helper()
	for _, o := range inspect(t, look, "x").Owners {
		if o.Client == label {
			return time.Now().Add(o.TTL)
		}
	}
	t.Fatalf("%s does not own the lock", label)
	return time.Time{}
}

func TestAReaderWithAShortTTLDoesNotShortenTheLeasesOfOthers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		look := newClient(t, s)
		long, longWire := onLine(t, s, leased.WithOwner("long"), leased.WithTTL(time.Minute))
		short, shortWire := onLine(t, s, leased.WithOwner("short"), leased.WithTTL(3*time.Second))
		warm(t, s, long, short)                                                                // clients that have just begun ask once more
		time.Sleep(time.Millisecond - time.Duration(time.Now().Nanosecond())%time.Millisecond) // a PTTL is in whole ms
		l := take(t, long.RWMutex("x").RLockContext)
		longWire.cut() // its lease lasts as long as it was given
		want := renewedTill(t, look, "long")
		brief := take(t, short.RWMutex("x").RLockContext)
		marker := func() time.Time {
			return time.Now().Add(s.rdb.PTTL(context.Background(), "x").Val())
		}
		still := func(when string) {
			t.Helper()
			if got := renewedTill(t, look, "long"); !got.Equal(want) || !marker().Equal(want) {
				t.Errorf("%s: its lease ends %v, and the marker %v, off what it was", when, got.Sub(want), marker().Sub(want))
			}
		}
		still("a reader with a shorter TTL entered")
		time.Sleep(5 * time.Second)
		still("it was renewed")
		unlock(t, brief)
		still("it left")
		brief = take(t, short.RWMutex("x").RLockContext)
		shortWire.cut()
		time.Sleep(10 * time.Second)
		still("its lease ended")
		if setIfFree(t, s, "x", "foreign", time.Second) {
			t.Error("a foreign client got in beside a reader")
		}
		isAll(t, brief.Unlock(), leased.ErrLeaseLost)
		longWire.mend()
		shortWire.mend()
		unlock(t, l)
	})
}

func TestTheWatchdogRenewsReaders(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl, held = 3 * time.Second, 5 * time.Minute
		c, other := newClient(t, s, leased.WithTTL(ttl)), newClient(t, s)
		rw := c.RWMutex("x")
		one, two := take(t, rw.RLockContext), take(t, rw.RLockContext)
		for until := time.Now().Add(held); time.Now().Before(until); time.Sleep(977 * time.Millisecond) {
			if other.RWMutex("x").TryLock() {
				t.Fatal("a writer got in beside readers")
			}
			if left := inspect(t, other, "x").Owners[0].TTL; left < ttl/2 {
				t.Fatalf("%v are left of the lease", left)
			}
		}
		// Two leases of one grant are renewed as one.
		if n := c.Stats().Renewals; n < int64(held/ttl*3) || n > int64(held/ttl*3)*11/10 {
			t.Errorf("renewed %d times in %v", n, held)
		}
		unlock(t, one)
		unlock(t, two)
	})
}

func TestALiveReaderDoesNotKeepADeadOnesLeaseAlive(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 9 * time.Second
		look := newClient(t, s)
		alive := newClient(t, s, leased.WithOwner("alive"), leased.WithTTL(ttl))
		dies, wire := onLine(t, s, leased.WithOwner("dead"), leased.WithTTL(ttl))
		dead := take(t, dies.RWMutex("x").RLockContext)
		live := take(t, alive.RWMutex("x").RLockContext)
		time.Sleep(time.Minute + ttl/6) // between two renewals
		ends := renewedTill(t, look, "dead")
		wire.cut()
		time.Sleep(time.Until(ends) - time.Millisecond)
		if n := len(inspect(t, look, "x").Owners); n != 2 {
			t.Errorf("%d owners before the dead reader's lease ended", n)
		}
		time.Sleep(time.Millisecond)
		if o := inspect(t, look, "x").Owners; len(o) != 1 || o[0].Client != "alive" {
			t.Errorf("after the end of the dead reader's lease: %+v", o)
		}
		time.Sleep(time.Minute)
		began := time.Now()
		writer := taking(t, look.RWMutex("x").LockContext)
		synctest.Wait()
		unlock(t, live)
		unlock(t, <-writer)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the writer waited %v more for a reader that is long dead", waited)
		}
		isAll(t, dead.Unlock(), leased.ErrLeaseLost)
		wire.mend()
	})
}

func TestACrashedReaderDelaysAWriterByItsOwnTTLAtMost(t *testing.T) {
	for name, before := range map[string]time.Duration{
		"the others leave long before its end": 4 * time.Second,
		"the others leave just before its end": time.Millisecond,
		"the others leave long after its end":  -time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				const ttl = 7 * time.Second
				look := newClient(t, s)
				alive := newClient(t, s, leased.WithTTL(10*time.Minute)) // no other reader has this TTL
				crashes, wire := onLine(t, s, leased.WithOwner("crashed"), leased.WithTTL(ttl))
				live := take(t, alive.RWMutex("x").RLockContext)
				dead := take(t, crashes.RWMutex("x").RLockContext)
				writer := taking(t, look.RWMutex("x").LockContext)
				time.Sleep(5 * time.Second)
				wire.cut()
				ends := renewedTill(t, look, "crashed")
				if rest := time.Until(ends); rest <= 0 || rest > ttl {
					t.Fatalf("its lease has %v left", rest)
				}
				time.Sleep(time.Until(ends) - before)
				left := time.Now()
				unlock(t, live)
				w := <-writer
				if left.After(ends) {
					if waited := time.Since(left); waited != 0 {
						t.Errorf("the writer entered %v after the last reader left", waited)
					}
				} else if late := time.Since(ends); late < 0 || late > 2*time.Millisecond {
					t.Errorf("the writer entered %v after the end of the crashed reader's lease", late)
				}
				unlock(t, w)
				isAll(t, dead.Unlock(), leased.ErrLeaseLost)
				wire.mend()
			})
		})
	}
}

func TestRenewalNeverOutlivesRUnlock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 3 * time.Second
		c := newClient(t, s, leased.WithTTL(ttl))
		rw := c.RWMutex("x")
		began := time.Now()
		for early := -time.Millisecond; early <= time.Millisecond; early += 50 * time.Microsecond {
			rw.RLock()
			rw.RLock()
			rw.RUnlock()                       //nolint:staticcheck // its renewal is what is tested
			renewal := time.Now().Add(ttl / 3) // and onto the grid of its TTL
			renewal = renewal.Add(-(renewal.Sub(began) % (ttl / 30)))
			time.Sleep(time.Until(renewal) + early)
			rw.RUnlock()
			synctest.Wait()
			if !s.clean(t, "x") {
				t.Fatalf("%q is left after RUnlock", s.value(t, "x"))
			}
		}
		before := c.Stats()
		if before.Renewals == 0 {
			t.Error("nothing was renewed: the test proves nothing")
		}
		time.Sleep(10 * ttl)
		if after := c.Stats(); after != before || !s.clean(t, "x") {
			t.Errorf("it goes on: %+v, then %+v", before, after)
		}
	})
}

func TestALostSharedGrantEndsTheLeasesOfAllItsReaders(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 9 * time.Second
		told := 0
		c := newClient(t, s, leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) { told++ }))
		rw := c.RWMutex("x")
		var old []*leased.Lease
		for range 5 {
			old = append(old, take(t, rw.RLockContext))
		}
		unlock(t, old[4])
		old = old[:4]
		s.rdb.Del(context.Background(), "x")
		began := time.Now()
		for _, l := range old {
			<-l.Context().Done()
			isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
		}
		if took := time.Since(began); took > ttl/3 {
			t.Errorf("they were told after %v", took)
		}

		// New readers enter beside the old ones, on a grant of their own; a
		// writer waits for both, and those behind it with it.
		fresh := take(t, rw.RLockContext)
		if fresh.Token() <= old[0].Token() || fresh.Context().Err() != nil {
			t.Errorf("token %d after %d, %v", fresh.Token(), old[0].Token(), context.Cause(fresh.Context()))
		}
		writer := taking(t, rw.LockContext)
		synctest.Wait()
		behind := taking(t, rw.RLockContext)
		unlock(t, fresh)
		for _, l := range old {
			time.Sleep(time.Minute)
			if !open(writer) || !open(behind) {
				t.Fatal("somebody entered beside a reader that has not left")
			}
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		unlock(t, <-writer)
		unlock(t, <-behind)
		synctest.Wait()
		if told != 4 {
			t.Errorf("told of %d losses", told)
		}
	})
}

// A holder that never unlocks after a loss blocks the writers of its own process, as in
// sync.RWMutex, but not those of others: it has no lease anymore.
func TestAReaderThatLostItsLeaseDoesNotKeepALaterGrantFromOthers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 9 * time.Second
		c := newClient(t, s, leased.WithTTL(ttl))
		rw := c.RWMutex("x")
		stuck := take(t, rw.RLockContext)
		s.rdb.Del(context.Background(), "x")
		<-stuck.Context().Done()
		unlock(t, take(t, rw.RLockContext)) // on a new grant, which it gave back
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 10*ttl)
		defer cancel()
		l, err := newClient(t, s).RWMutex("x").LockContext(ctx)
		if err == nil {
			unlock(t, l)
		} else if errors.Is(err, leased.ErrNotAcquired) {
			t.Errorf("no reader has a lease, and a writer of another process waits: %v", err)
		}
		isAll(t, stuck.Unlock(), leased.ErrLeaseLost)
	})
}

func TestForeignOwnersAndReadersExcludeEachOther(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		ra, rb := take(t, a.RWMutex("x").RLockContext), take(t, b.RWMutex("x").RLockContext)
		taken := func() bool { return setIfFree(t, s, "x", "foreign", time.Minute) }
		if taken() {
			t.Fatal("a foreign client got in beside two readers")
		}
		unlock(t, ra)
		if taken() {
			t.Fatal("a foreign client got in beside a reader")
		}
		if compareAndDelete(t, s, "x", "foreign") != 0 {
			t.Fatal("a foreign client could release what readers own")
		}
		unlock(t, rb)
		if !taken() {
			t.Fatal("the lock is not free after the last reader")
		}
		_, err := a.RWMutex("x").TryRLockContext(context.Background())
		isAll(t, err, leased.ErrLocked)
		readers := []<-chan *leased.Lease{taking(t, a.RWMutex("x").RLockContext), taking(t, b.RWMutex("x").RLockContext)}
		s.queued(t, "x", 2)
		if v := s.value(t, "x"); v != "foreign" || !open(readers[0]) || !open(readers[1]) {
			t.Errorf("the foreign owner was disregarded: %q", v)
		}
		if compareAndDelete(t, s, "x", "foreign") != 1 {
			t.Error("the foreign owner lost its key")
		}
		for _, ch := range readers {
			unlock(t, closesSoon(t, "a reader enters after the foreign owner", ch))
		}
	})
}

func TestInspectShowsAllReadersWithTheirOwnTTLsAndTheQueueWithModes(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ttls := map[string]time.Duration{"one": 30 * time.Second, "two": 45 * time.Second, "three": 8 * time.Second}
		var leases []*leased.Lease
		for label, ttl := range ttls {
			c := newClient(t, s, leased.WithOwner(label), leased.WithTTL(ttl))
			leases = append(leases, take(t, c.RWMutex("x").RLockContext))
			synctest.Wait() // on a quorum it would wait behind the writer, where it comes late
		}
		var waiters []<-chan *leased.Lease
		writes := newClient(t, s, leased.WithOwner("writes")).RWMutex("x")
		reads := newClient(t, s, leased.WithOwner("reads")).RWMutex("x")
		waiters = append(waiters, taking(t, writes.LockContext))
		synctest.Wait()
		waiters = append(waiters, taking(t, reads.RLockContext))
		synctest.Wait()
		time.Sleep(time.Second)
		info := inspect(t, newClient(t, s), "x")
		if len(info.Owners) != 3 || info.Queue != 2 || len(info.Waiting) != 2 {
			t.Fatalf("%+v", info)
		}
		for _, o := range info.Owners {
			if want := ttls[o.Client] - time.Second; !o.Shared || o.TTL != want || o.Value != "" {
				t.Errorf("%+v, want %v left", o, want)
			}
		}
		if info.Waiting[0] != (leased.Waiter{Client: "writes"}) || info.Waiting[1] != (leased.Waiter{Client: "reads", Shared: true}) {
			t.Errorf("waiting: %+v", info.Waiting)
		}
		for _, l := range leases {
			if l.Token() > info.Token {
				t.Errorf("token %d of a reader is above the lock's last, %d", l.Token(), info.Token)
			}
			unlock(t, l)
		}
		for _, ch := range waiters {
			unlock(t, <-ch)
		}
	})
}

func TestForceUnlockEvictsAllReadersAndTellsThemAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		long := leased.WithTTL(time.Hour) // no renewal can reveal the loss within the test's patience
		a, b, operator := newClient(t, s, long), newClient(t, s, long), newClient(t, s, long)
		warm(t, s, a, b, operator)
		leases := []*leased.Lease{
			take(t, a.RWMutex("x").RLockContext), take(t, a.RWMutex("x").RLockContext), take(t, b.RWMutex("x").RLockContext),
		}
		writer := taking(t, operator.RWMutex("x").LockContext)
		s.queued(t, "x", 1)
		if _, err := operator.ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		w := closesSoon(t, "the writer enters", writer)
		for _, l := range leases {
			closesSoon(t, "a reader is told", l.Context().Done())
			isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
			if l.Token() >= w.Token() {
				t.Errorf("token %d of an evicted reader, %d of the writer", l.Token(), w.Token())
			}
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		if o := inspect(t, operator, "x").Owners; len(o) != 1 || o[0].Shared {
			t.Errorf("owners: %+v", o)
		}
		unlock(t, w)
	})
}
