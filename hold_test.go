package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/lockstate"
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

// An owner that is asked for a lock that it keeps idle may be far away.
func TestATryOfAnIdleLockReachesItsFarOwner(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		far := func() *leased.Client {
			return clientOn(t, s, s.connect(t, func(o *redis.Options) {
				wrapConns(o, func(conn net.Conn) net.Conn { return &faraway{Conn: conn, delay: 150 * time.Millisecond} })
			}), leased.WithIdleHold(time.Hour))
		}
		owner, tries := far(), far()
		for range 3 { // the first time, the scripts are loaded as well
			unlock(t, lock(t, owner.Mutex("x")))
			unlock(t, lock(t, tries.Mutex("another")))
			time.Sleep(time.Second)
			l, err := tries.Mutex("x").TryLockContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			unlock(t, l)
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
			c.RWMutex("x").RUnlock() //nolint:staticcheck // an empty section leaves the lock kept
		}
		if !b.RWMutex("x").TryLock() {
			t.Fatal("a try is refused, though nobody is inside")
		}
		b.RWMutex("x").Unlock()
	})
}

// soonAfter is how late a waiter may notice that a minimum hold is over in virtual time: it
// looks AfterExpiry later, and Redis counts in whole milliseconds.
const soonAfter = lockstate.AfterExpiry + time.Millisecond

func TestAMinimumHoldKeepsEverybodyOutUntilItIsOver(t *testing.T) {
	const hold = 47 * time.Second // no multiple of any pause between re-checks
	for what, c := range map[string]struct {
		worked  time.Duration // from the acquisition to the unlock
		comes   time.Duration // when the other one comes
		here    bool          // to the same process
		reads   bool
		options []leased.Option
	}{
		"one who waits in another process":    {worked: time.Second},
		"a reader of another process":         {worked: time.Second, reads: true},
		"one who waits in the same process":   {worked: time.Second, here: true},
		"a reader of the same process":        {worked: time.Second, here: true, reads: true},
		"one who comes later":                 {worked: time.Second, comes: 30 * time.Second},
		"one of this process who comes later": {worked: time.Second, comes: 30 * time.Second, here: true},
		"one who comes at the end":            {worked: time.Second, comes: hold - 3*time.Millisecond},
		"one behind an owner who works long":  {worked: hold - time.Millisecond},
		"one behind a short TTL":              {worked: time.Second, options: []leased.Option{leased.WithTTL(100 * time.Millisecond)}},
		"one behind a long TTL":               {worked: time.Second, options: []leased.Option{leased.WithTTL(time.Hour)}},
		"an idle hold does not begin":         {worked: time.Second, here: true, options: []leased.Option{leased.WithIdleHold(time.Hour)}},
		"nor for others":                      {worked: time.Second, options: []leased.Option{leased.WithIdleHold(time.Hour)}},
		"local hand-offs are none":            {worked: time.Second, here: true, options: []leased.Option{leased.WithLocalHandoffs(1000, time.Hour)}},
		"with a maximum":                      {worked: time.Second, options: []leased.Option{leased.WithMaxHold(hold)}},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				opts := append([]leased.Option{out.option()}, c.options...)
				job := newClient(t, s, opts...)
				other := job
				if !c.here {
					other = newClient(t, s, out.option())
				}
				warm(t, s, job, other)
				began := time.Now()
				l := lock(t, job.Mutex("x", leased.WithMinHold(hold)))
				entered := make(chan time.Duration, 1)
				go func() {
					time.Sleep(c.comes)
					rw := other.RWMutex("x")
					take := rw.LockContext
					if c.reads {
						take = rw.RLockContext
					}
					l, err := take(context.Background())
					entered <- time.Since(began)
					if err == nil {
						err = l.Unlock()
					}
					if err != nil {
						t.Error(err)
					}
				}()
				time.Sleep(c.worked)
				unlocking := time.Now()
				unlock(t, l)
				if d := time.Since(unlocking); d > time.Millisecond {
					t.Errorf("Unlock took %v", d)
				}
				if at := <-entered; at < hold || at > hold+soonAfter {
					t.Errorf("the other one was in after %v, want %v", at, hold)
				}
				synctest.Wait()
				if st := job.Stats(); st.Lost != 0 || len(out.messages()) > 0 {
					t.Errorf("%d losses, log %q", st.Lost, out.messages())
				}
			})
		})
	}
}

func TestAMinimumHoldThatIsOverCostsNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		job, other := newClient(t, s), newClient(t, s)
		warm(t, s, job, other)
		l := lock(t, job.Mutex("x", leased.WithMinHold(time.Second)))
		waiter := locking(t, other.Mutex("x"))
		time.Sleep(time.Second)
		unlocked := time.Now()
		unlock(t, l)
		unlock(t, <-waiter)
		if d := time.Since(unlocked); d > time.Millisecond || other.Stats().Direct == 0 {
			t.Errorf("the waiter was in %v after the unlock, %+v", d, other.Stats())
		}
	})
}

func TestWhoWaitsForTheEndOfAMinimumHoldIsServedInOrderAndDoesNotPoll(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold, n = 10 * time.Second, 5
		job := newClient(t, s, leased.WithMinHold(hold))
		l := lock(t, job.Mutex("x"))
		var order []int
		var all [n]*leased.Client
		done := make(chan int, n)
		for i := range n {
			all[i] = newClient(t, s)
			go func() {
				mu := all[i].Mutex("x")
				mu.Lock()
				done <- i
				mu.Unlock()
			}()
			s.queued(t, "x", int64(i)+1)
		}
		unlock(t, l)
		began := time.Now()
		for range n {
			order = append(order, <-done)
		}
		if d := time.Since(began); d > hold+soonAfter {
			t.Errorf("all were served after %v", d)
		}
		for i, who := range order {
			if who != i {
				t.Fatalf("served in the order %v", order)
			}
		}
		for i, c := range all {
			// A re-check each 2 to 3 s and, for each, an echo that is no command of ours; at the end a
			// release, with a PING if others wait.
			if sent := s.commands(c); sent > 15 {
				t.Errorf("waiter %d sent %d commands", i, sent)
			}
		}
	})
}

func TestTheNextMinimumHoldBeginsWithItsOwnLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold = time.Minute
		began := time.Now()
		done := make(chan time.Duration, 4)
		for _, c := range []*leased.Client{newClient(t, s, leased.WithMinHold(hold)), newClient(t, s, leased.WithMinHold(hold))} {
			for range 2 {
				go func() {
					l := lock(t, c.Mutex("x"))
					done <- time.Since(began)
					unlock(t, l)
				}()
			}
		}
		for i := range 4 {
			if at, want := <-done, time.Duration(i)*hold; at < want || at > want+4*soonAfter+30*time.Millisecond {
				t.Errorf("job %d began after %v, want %v", i, at, want)
			}
		}
		time.Sleep(hold) // of the last one
	})
}

func TestAMinimumHoldOutlivesItsProcess(t *testing.T) {
	for what, idle := range map[string]time.Duration{"which has closed its client": 0, "which would idle": time.Hour} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				const hold = time.Minute
				job := newClient(t, s, leased.WithMinHold(hold), leased.WithIdleHold(idle))
				began := time.Now()
				unlock(t, lock(t, job.Mutex("x")))
				if err := job.Close(); err != nil {
					t.Fatal(err)
				}
				other := newClient(t, s)
				if l, err := other.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
					t.Fatalf("%v, %v", l, err)
				}
				unlock(t, lock(t, other.Mutex("x")))
				if at := time.Since(began); at < hold || at > hold+soonAfter {
					t.Errorf("free after %v", at)
				}
			})
		})
	}
}

func TestAReleaseWithoutAnswerKeepsTheMinimumHold(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const hold = time.Minute
		job, other := newClient(t, s), newClient(t, s)
		warm(t, s, job, other)
		began := time.Now()
		l := lock(t, job.Mutex("x", leased.WithMinHold(hold)))
		s.Mini.SetError(outOfOrder)
		isAll(t, l.Unlock(), leased.ErrNotReleased)
		time.Sleep(5 * time.Second)
		s.Mini.SetError("")
		unlock(t, lock(t, other.Mutex("x")))
		if at := time.Since(began); at < hold || at > hold+soonAfter {
			t.Errorf("free after %v", at)
		}
	})
}

// The replica that a failover promotes need not have the release. Then Redis names the owner again, and asks its
// process for the lock.
func TestAFailoverThatUndoesAnUnlockDoesNotEndTheMinimumHold(t *testing.T) {
	const hold, ttl = 50 * time.Second, time.Minute
	for what, forget := range map[string]bool{"its lock is in use": false, "its lock is forgotten": true} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					return // its servers have no replicas
				}
				a, b := newClient(t, s), newClient(t, s)
				warm(t, s, a, b)
				began := time.Now()
				l := lock(t, a.Mutex("x", leased.WithMinHold(hold), leased.WithTTL(ttl)))
				if !forget {
					ctx, cancel := context.WithTimeout(context.Background(), hold/2)
					defer cancel()
					go func() { _, _ = a.Mutex("x").LockContext(ctx) }()
				}
				entered := make(chan time.Duration, 1)
				go func() {
					next := lock(t, b.Mutex("x"))
					entered <- time.Since(began)
					unlock(t, next)
				}()
				time.Sleep(time.Second)
				owner := s.value(t, "x")
				unlock(t, l)
				must(t, s.rdb.Set(context.Background(), s.Prefix+"x", owner, ttl-time.Since(began)).Err())
				if at := <-entered; at < hold || at > hold+soonAfter {
					t.Errorf("another process got the lock after %v of %v", at, hold)
				}
			})
		})
	}
}

// The TTL alone covers a process that does not unlock.
func TestAMinimumHoldIsForLeasesThatAreUnlocked(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 10 * time.Second
		job, err := s.open(t, s.connect(t), leased.WithTTL(ttl), leased.WithMinHold(time.Hour), leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, job.Mutex("x"))
		if err := job.Close(); !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Close with a lease inside: %v", err)
		}
		stopped := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if d := time.Since(stopped); d > ttl+soonAfter {
			t.Errorf("free %v after the process had stopped", d)
		}
		_ = l
	})
}

func TestAMinimumHoldEndsWithADowngrade(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		job, other := newClient(t, s, leased.WithMinHold(time.Hour)), newClient(t, s)
		l, err := job.RWMutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Downgrade(context.Background()); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		unlock(t, l)
		unlock(t, lock(t, other.Mutex("x")))
		reader := take(t, job.RWMutex("x").RLockContext)
		unlock(t, reader)
		unlock(t, lock(t, other.Mutex("x")))
		if d := time.Since(began); d > time.Second {
			t.Errorf("a writer waited %v for readers without a minimum hold", d)
		}
	})
}

func TestAMinimumHoldIsSeenByOperatorsAndForeignersAndEndedByForceUnlock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx := context.Background()
		const hold = time.Hour
		job, other := newClient(t, s, leased.WithMinHold(hold), leased.WithOwner("job:1")), newClient(t, s)
		l := lock(t, job.Mutex("x"))
		token := l.Token()
		unlock(t, l)
		info, err := other.Inspect(ctx, "x")
		if err != nil || len(info.Owners) != 1 {
			t.Fatalf("%+v, %v", info, err)
		}
		o := info.Owners[0]
		if !o.Unlocked || o.Client != "job:1" || o.Token != token || o.Value != "" || o.TTL > hold || o.TTL < hold-patience || time.Since(o.Since).Abs() > time.Minute {
			t.Errorf("%+v, token %d", o, token)
		}
		if taken, err := s.rdb.SetNX(ctx, s.Prefix+"x", "foreign", time.Minute).Result(); taken || err != nil {
			t.Errorf("a foreign client took it: %v", err)
		}
		_, err = other.Mutex("x").TryLockContext(ctx)
		if isAll(t, err, leased.ErrLocked); !strings.Contains(err.Error(), `(kept until the end of the minimum hold of "job:1")`) {
			t.Error(err)
		}
		if _, err := job.Mutex("x").TryLockContext(ctx); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("the process itself got in again: %v", err)
		}
		waiter := locking(t, other.Mutex("x"))
		s.queued(t, "x", 1)
		if _, err := job.ForceUnlock(ctx, "x"); err != nil {
			t.Fatal(err)
		}
		unlock(t, closesSoon(t, "ForceUnlock lets the waiter in", waiter))
		if !s.clean(t, "x") {
			t.Errorf("left in Redis: %q", s.value(t, "x"))
		}
	})
}

// In real time, on every kind of server: never too early, and woken by the end itself.
func TestTheEndOfAMinimumHoldWakesTheWaiters(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const hold = 300 * time.Millisecond
		job, other := newClient(t, s), newClient(t, s)
		warm(t, s, job, other)
		for range 2 {
			mu := job.Mutex("x", leased.WithMinHold(hold))
			began := time.Now() // before the caller is admitted, from when on the hold counts
			mu.Lock()
			here, there := locking(t, job.Mutex("x")), locking(t, other.Mutex("x"))
			s.queued(t, "x", 1)
			mu.Unlock()
			if s.members != nil { // one that a majority does not answer in time queues again, behind the other
				both := make(chan *leased.Lease)
				for _, one := range []<-chan *leased.Lease{here, there} {
					go func() { both <- <-one }()
				}
				here, there = both, both
			}
			first := closesSoon(t, "the first is in", there)
			if d := time.Since(began); d < hold-hold/100 {
				t.Errorf("in after %v of %v", d, hold)
			}
			unlock(t, first)
			unlock(t, closesSoon(t, "the second is in", here))
		}
	})
}

func TestAMinimumHoldOutOfRangeIsAnError(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{})
	defer rdb.Close()
	for _, opts := range [][]leased.Option{
		{leased.WithMinHold(-time.Millisecond)},
		{leased.WithMinHold(time.Microsecond)},
		{leased.WithMinHold(31 * 24 * time.Hour)},
		{leased.WithMaxHold(time.Second), leased.WithMinHold(2 * time.Second)},
		{leased.WithMinHold(2 * time.Second), leased.WithMaxHold(time.Second)},
	} {
		if _, err := leased.New(rdb, opts...); !errors.Is(err, leased.ErrInvalidOption) {
			t.Error(err)
		}
	}
	c, err := leased.New(rdb, leased.WithMinHold(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err = c.Mutex("x", leased.WithMaxHold(time.Second)).LockContext(ctx)
	isAll(t, err, leased.ErrInvalidOption, leased.ErrNotAcquired)
}

// Nobody owns the lock after the Unlock, so nobody tells a server that restarts without its data of it.
func TestAMinimumHoldOfAQuorumIsForgottenByServersThatRestart(t *testing.T) {
	const quarantine = time.Minute
	for hold, kept := range map[time.Duration]bool{quarantine: true, time.Hour: false} {
		onQuorum(t, func(t *testing.T, s place) {
			c, other := newClient(t, s, leased.WithQuarantine(quarantine)), newClient(t, s, leased.WithQuarantine(quarantine))
			confirmInboxes(t, c, other)
			began := time.Now()
			unlock(t, lock(t, c.Mutex("x", leased.WithMinHold(hold))))
			synctest.Wait()
			try := func() bool {
				l, err := other.Mutex("x").TryLockContext(t.Context())
				if err == nil {
					unlock(t, l)
				}
				synctest.Wait()
				return err == nil
			}
			for _, mini := range s.members.minis[:3] {
				mini.FlushAll()
				if try() {
					break
				}
				if !kept { // else all restart within the minimum hold, and none may vote before its end
					time.Sleep(quarantine + time.Second)
				}
			}
			if kept {
				time.Sleep(hold - time.Since(began) - time.Second)
			}
			if try() == kept {
				t.Errorf("%v after it was acquired, for %v at least, it was kept: %v", time.Since(began), hold, !kept)
			}
		})
	}
}

// An Unlock at once finds servers that have not answered the acquire yet. What is canceled there keeps the
// lock as well, or the restart of one of the others is enough to have it free.
func TestEachServerOfAQuorumKeepsAMinimumHold(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		confirmInboxes(t, c)
		for range 10 {
			unlock(t, lock(t, c.Mutex("x", leased.WithMinHold(time.Hour))))
			synctest.Wait()
			kept := 0
			for _, mini := range s.members.minis {
				if v, _ := mini.Get("x"); strings.HasPrefix(v, "leased1:cooldown:") {
					kept++
				}
			}
			if kept != suiteMembers {
				t.Errorf("%d of %d servers keep the lock", kept, suiteMembers)
			}
			must(t, forceUnlock(context.Background(), c, "x"))
		}
	})
}

func TestVirtualAMinimumHoldIsOverWhenRedisForgetsTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		mu := newClient(t, s).Mutex("x", leased.WithMinHold(time.Minute))
		unlock(t, lock(t, mu))
		if mu.TryLock() {
			t.Fatal("the lock is free although the minimum hold goes on")
		}
		s.Mini.FlushAll()
		l, err := mu.TryLockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
	})
}
