package leased_test

import (
	"context"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func TestAMaximumHoldEndsTheLeaseAndThenItsRenewal(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold, ttl = time.Minute, 12 * time.Second
		var losses []leased.LossEvent
		c := newClient(t, s, leased.WithMaxHold(hold), leased.WithTTL(ttl),
			leased.WithLossHandler(func(ev leased.LossEvent) { losses = append(losses, ev) }))
		began := time.Now()
		stuck := lock(t, c.Mutex("x"))
		local := locking(t, c.Mutex("x"))
		elsewhere := locking(t, newClient(t, s).Mutex("x"))
		work := stuck.Context()
		<-work.Done()
		if held := time.Since(began); held != hold {
			t.Errorf("ended after %v", held)
		}
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		unlock(t, <-elsewhere)
		if outlived := time.Since(began) - hold; outlived < ttl/2 || outlived > ttl+2*time.Millisecond {
			t.Errorf("another client got in %v after the end of the lease", outlived)
		}
		synctest.Wait()
		if !open(local) {
			t.Error("a local caller entered beside the holder")
		}
		isAll(t, stuck.Unlock(), leased.ErrLeaseLost)
		unlock(t, <-local)
		if len(losses) != 1 {
			t.Errorf("told of %v", losses)
		}
	})
}

func TestAnIdleGrantIsReusedWithoutACommand(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var sent stamps
		rdb := s.connect(t, func(o *redis.Options) { o.Limiter = &sent })
		c := clientOn(t, s, rdb, leased.WithIdleHold(time.Hour), leased.WithTTL(time.Hour))
		warm(t, s, c) // connecting costs commands, and so does having just begun
		unlock(t, lock(t, c.Mutex("x")))
		before, was := len(sent.all()), c.Stats()
		for range 100 {
			c.Mutex("x").Lock()
			c.Mutex("x").Unlock() //nolint:staticcheck // that it costs nothing is the point
		}
		if n := len(sent.all()) - before; n != 0 {
			t.Errorf("100 uses cost %d commands", n)
		}
		if st := c.Stats(); st.Idle-was.Idle != 100 || st.Leases-was.Leases != 100 {
			t.Errorf("%+v", st)
		}
	})
}

func TestAnIdleGrantGoesAtOnceToTheFirstWhoWantsIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		idle := newClient(t, s, leased.WithIdleHold(time.Hour))
		unlock(t, lock(t, idle.Mutex("x")))
		time.Sleep(time.Minute)
		if s.value(t, "x") == "" {
			t.Fatal("it was not kept")
		}
		began := time.Now()
		l := lock(t, newClient(t, s).Mutex("x"))
		if waited := time.Since(began); waited > time.Millisecond {
			t.Errorf("waited %v for an idle grant", waited)
		}
		unlock(t, l)
	})
}

func TestAnIdleGrantIsReleasedWhenItsTimeIsOver(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithIdleHold(time.Minute), leased.WithTTL(10*time.Second))
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Minute - time.Millisecond)
		if s.value(t, "x") == "" {
			t.Error("released before its time")
		}
		time.Sleep(2 * time.Millisecond)
		if s.value(t, "x") != "" {
			t.Error("kept after its time")
		}
	})
}

// busy has n callers of c take the lock one after the other, each for the duration
// work, and appends who to order for each of them.
func busy(c *leased.Client, who string, n int, work time.Duration, order *[]string, all *sync.WaitGroup) {
	for range n {
		all.Go(func() {
			mu := c.Mutex("x")
			mu.Lock()
			*order = append(*order, who)
			time.Sleep(work) // of virtual time
			mu.Unlock()
		})
		synctest.Wait() // it waits, or works
	}
}

func TestLocalHandoffsAreBoundedWhileAnotherWaits(t *testing.T) {
	for what, c := range map[string]struct {
		option leased.LockOption
		want   string
	}{
		"by number": {leased.WithLocalHandoffs(3, time.Hour), "AAABAAAA"},
		"by tenure": {leased.WithLocalHandoffs(1000, 50*time.Millisecond), "AAABAAAA"},
		"to one":    {leased.WithLocalHandoffs(1, 0), "ABAAAAAA"},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				a, b := newClient(t, s, c.option), newClient(t, s)
				var order []string
				var all sync.WaitGroup
				busy(a, "A", 7, 20*time.Millisecond, &order, &all)
				busy(b, "B", 1, 20*time.Millisecond, &order, &all)
				all.Wait()
				if got := strings.Join(order, ""); got != c.want {
					t.Errorf("order %s, want %s", got, c.want)
				}
			})
		})
	}
}

func TestLocalHandoffsAreNotBoundedWhenNobodyElseWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLocalHandoffs(2, time.Millisecond))
		warm(t, s, c)
		before, sent := c.Stats(), s.commands(c)
		var order []string
		var all sync.WaitGroup
		busy(c, "A", 10, 20*time.Millisecond, &order, &all)
		all.Wait()
		// One acquire and one release.
		if st := c.Stats(); st.Local-before.Local != 9 || s.commands(c)-sent != 2 {
			t.Errorf("%+v after %+v", st, before)
		}
	})
}

func TestAMaximumHoldBesideAnotherReaderKeepsOthersOutForATTLAfterThatReader(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold, ttl = time.Minute, 12 * time.Second
		c := newClient(t, s, leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
		stuck := take(t, c.RWMutex("x", leased.WithMaxHold(hold)).RLockContext)
		other := take(t, c.RWMutex("x").RLockContext)
		elsewhere := locking(t, newClient(t, s).Mutex("x"))
		time.Sleep(2 * hold)
		if !open(elsewhere) {
			t.Error("a writer got in beside a reader")
		}
		unlock(t, other)
		left := time.Now()
		unlock(t, <-elsewhere)
		if took := time.Since(left); took > ttl+2*time.Millisecond {
			t.Errorf("a writer got in %v after the last reader at work", took)
		}
		isAll(t, stuck.Unlock(), leased.ErrLeaseLost)
	})
}

func TestReadersOfOneProcessShareTheTTLOfTheFirst(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		first := take(t, c.RWMutex("x", leased.WithTTL(10*time.Second)).RLockContext)
		second := take(t, c.RWMutex("x", leased.WithTTL(time.Minute)).RLockContext)
		if lasts := time.Until(second.TrustedUntil()); lasts > 10*time.Second {
			t.Errorf("the second is trusted for %v", lasts)
		}
		unlock(t, first)
		unlock(t, second)
	})
}

func TestHandlesOfOneLockMayDifferInOptions(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(10*time.Second))
		var lasting []time.Duration
		for _, mu := range []*leased.Mutex{c.Mutex("x"), c.Mutex("x", leased.WithTTL(time.Minute))} {
			l := lock(t, mu)
			lasting = append(lasting, s.rdb.PTTL(context.Background(), "x").Val())
			unlock(t, l)
		}
		if lasting[0] > 10*time.Second || lasting[1] <= 10*time.Second {
			t.Errorf("the keys were set to last %v", lasting)
		}
	})
}

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
			synctest.Wait() // the inboxes are confirmed
			before, began := s.commands(tries), time.Now()
			got, err := tries.Mutex("x").TryLockContext(context.Background())
			if d := time.Since(began); d < c.waits || d > c.waits+10*time.Microsecond {
				t.Errorf("%+v: it took %v", c, d)
			}
			if c.enters != (err == nil) {
				t.Errorf("%+v: %v", c, err)
			}
			most := int64(1)
			if s.members != nil {
				most = 2 // what two servers may grant after three have refused is given back
			}
			if n := s.commands(tries) - before; !c.idle && (n == 0 || n > most) {
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

// turns has many callers of one process take turns, each holding the lock for hold, and
// returns how many leases and how much time they had until another process got in,
// which came when the first of them was inside.
func turns(t *testing.T, s place, hold time.Duration) (n int, took time.Duration) {
	t.Helper()
	here, there := newClient(t, s), newClient(t, s)
	for _, c := range []*leased.Client{here, there} {
		unlock(t, lock(t, c.Mutex("another"))) // their inboxes are confirmed
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

func TestTheLongestMaximumHoldEndsNoLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		mu := newClient(t, s, leased.WithMaxHold(math.MaxInt64)).Mutex("x")
		must(t, mu.Do(context.Background(), func(ctx context.Context) error {
			time.Sleep(time.Hour)
			return context.Cause(ctx)
		}))
	})
}

// It costs no command, so it says nothing of what Redis has; nor does anything else, for the lease is over.
func TestAnUnlockAfterWhichTheProcessKeepsTheLockTellsOfNoLoss(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		told := make(chan leased.LossEvent, 9)
		c := newClient(t, s, leased.WithIdleHold(time.Hour), leased.WithLossHandler(func(ev leased.LossEvent) { told <- ev }))
		warm(t, s, c)
		for _, checked := range []bool{false, true} {
			l := lock(t, c.Mutex("x"))
			s.forget(t)
			other := lock(t, newClient(t, s).Mutex("x"))
			if checked {
				isAll(t, l.Check(context.Background()), leased.ErrLeaseLost)
				isAll(t, l.Unlock(), leased.ErrLeaseLost)
			} else {
				unlock(t, l)
			}
			time.Sleep(time.Minute)
			if n := len(told); n > 0 != checked {
				t.Errorf("checked %v: told of %d losses", checked, n)
			}
			unlock(t, other)
		}
	})
}

// The calls of a kept lock take a short cut, which has to see to it that the lock is given back.
func TestAKeptLockIsGivenBackInTimeAfterACallThatTookLong(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		mu := newClient(t, s, leased.WithIdleHold(time.Second), leased.WithTTL(time.Hour)).Mutex("x")
		for range 3 { // the third takes the short cut; no renewal comes in between
			mu.Lock()
			time.Sleep(3 * time.Second)
			mu.Unlock()
			time.Sleep(500 * time.Millisecond)
			if s.value(t, "x") == "" {
				t.Fatal("the lock is not kept")
			}
		}
		time.Sleep(600 * time.Millisecond)
		synctest.Wait()
		if v := s.value(t, "x"); v != "" {
			t.Errorf("kept for longer than a second: %q", v)
		}
	})
}

// Two processes keep the lock idle for readers. Nobody is inside. One of them tries to write.
func TestATryGetsTheLockThatItsProcessAndAnotherKeepIdleForReaders(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b := newClient(t, s, leased.WithIdleHold(time.Hour)), newClient(t, s, leased.WithIdleHold(time.Hour))
		for _, c := range []*leased.Client{a, b} {
			unlock(t, lock(t, c.Mutex("another")))
			synctest.Wait() // the inbox is confirmed
			c.RWMutex("x").RLock()
			c.RWMutex("x").RUnlock()
		}
		if !b.RWMutex("x").TryLock() {
			t.Fatal("a try is refused, though nobody is inside")
		}
		b.RWMutex("x").Unlock()
	})
}
