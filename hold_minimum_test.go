package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/lockstate"
)

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
		if isAll(t, err, leased.ErrLocked); !strings.Contains(err.Error(), "(kept until the end of the minimum hold of job:1)") {
			t.Error(err)
		}
		if _, err := job.Mutex("x").TryLockContext(ctx); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("the process itself got in again: %v", err)
		}
		waiter := locking(t, other.Mutex("x"))
		s.queued(t, "x", 1)
		if err := job.ForceUnlock(ctx, "x"); err != nil {
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
			must(t, c.ForceUnlock(context.Background(), "x"))
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
