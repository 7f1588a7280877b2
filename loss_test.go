package leased_test

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// taken are the ways in which a lock's key stops being ours without a message.
var taken = map[string]struct {
	take func(s place)
	left string // what must still stand in the key after loss and Unlock
}{
	"deleted": {func(s place) { s.rdb.Del(context.Background(), "x") }, ""},
	"flushed": {func(s place) { s.rdb.FlushAll(context.Background()) }, ""},
	"set by another": {func(s place) {
		s.rdb.Set(context.Background(), "x", "another", time.Hour)
	}, "another"},
	"made a list": {func(s place) {
		s.rdb.Del(context.Background(), "x")
		s.rdb.RPush(context.Background(), "x", "item")
		s.rdb.PExpire(context.Background(), "x", time.Hour)
	}, "list"},
}

func TestALeaseIsLostWithinARenewalPeriodOfItsKey(t *testing.T) {
	for how, c := range taken {
		t.Run(how, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				const ttl = 30 * time.Second
				l := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
				work := l.Context()
				time.Sleep(25 * time.Second)
				if work.Err() != nil {
					t.Fatal(context.Cause(work))
				}
				c.take(s)
				began := time.Now()
				closesSoon(t, "the loss is noticed", work.Done())
				if took := time.Since(began); took > ttl/3 {
					t.Errorf("noticed after %v", took)
				}
				isAll(t, context.Cause(work), leased.ErrLeaseLost)
				isAll(t, l.Unlock(), leased.ErrLeaseLost)
				isAll(t, l.Unlock(), leased.ErrLeaseLost)
				time.Sleep(time.Minute)
				switch got := s.rdb.Type(context.Background(), "x").Val(); {
				case c.left == "list" && got != "list", c.left == "" && got != "none":
					t.Errorf("the key is a %s", got)
				case c.left == "another" && s.value(t, "x") != c.left:
					t.Errorf("the key holds %q", s.value(t, "x"))
				}
			})
		})
	}
}

// awaitInbox waits until the inbox of the only client is subscribed.
func awaitInbox(t *testing.T, s place) {
	t.Helper()
	eventually(t, "its inbox hears", func() bool {
		return len(s.inboxes(t)) == 1
	})
}

// A failover can lose the release that handed the lock over. Then Redis records the old owner again, and
// the next one is back at the head of the queue, and does not know that. When its renewal has told it that
// the lock is not its own, the old owner gives the lock back to whoever waits behind.
func TestAfterAFailoverThatLostAHandoffTheNextWaiterGetsTheLock(t *testing.T) {
	for _, released := range []bool{false, true} { // whether the owner unlocks before a renewal tells it
		inVirtualTime(t, func(t *testing.T, s place) {
			if s.members != nil {
				t.Skip("a quorum's servers do not fail over")
			}
			const ttl = 30 * time.Second
			first, second, third := newClient(t, s), newClient(t, s), newClient(t, s)
			owner := lock(t, first.Mutex("x"))
			next := locking(t, second.Mutex("x"))
			s.queued(t, "x", 1)
			last := locking(t, third.Mutex("x"))
			s.queued(t, "x", 2)

			failsOver := s.remembers(t, "x", ttl)
			unlock(t, owner)
			lost := <-next
			failsOver()

			began := time.Now()
			if released {
				isAll(t, lost.Unlock(), leased.ErrLeaseLost)
			}
			got := <-last
			if took := time.Since(began); took > ttl/3+time.Second || released && took > time.Second {
				t.Errorf("released %v: the next one waits for %v", released, took)
			}
			if got.Token() <= lost.Token() {
				t.Errorf("token %d after %d", got.Token(), lost.Token())
			}
			if !released {
				closesSoon(t, "the lease is lost", lost.Context().Done())
				isAll(t, lost.Unlock(), leased.ErrLeaseLost)
			}
			unlock(t, got)
		})
	}
}

// remembers returns a function that has the server know of the owner and the queue what it knows now, as one
// that is promoted and has nothing newer.
func (s place) remembers(t *testing.T, name string, ttl time.Duration) func() {
	t.Helper()
	ctx := context.Background()
	queue, _, waiters, _ := s.helperKeys(name)
	owner := s.value(t, name)
	places, lives := s.rdb.ZRangeWithScores(ctx, queue, 0, -1).Val(), s.rdb.ZRangeWithScores(ctx, waiters, 0, -1).Val()
	return func() {
		t.Helper()
		must(t, s.rdb.Set(ctx, s.Prefix+name, owner, ttl).Err())
		must(t, s.rdb.Del(ctx, queue, waiters).Err())
		must(t, s.rdb.ZAdd(ctx, queue, places...).Err())
		must(t, s.rdb.ZAdd(ctx, waiters, lives...).Err())
		for _, key := range []string{queue, waiters} {
			must(t, s.rdb.PExpire(ctx, key, 3*ttl).Err())
		}
	}
}

// A failover can undo whole turns. Then Redis records an owner that has released the lock, and at the head of
// the queue a request that has had its turn: its process lives, and asks about it no more. Whoever wants the
// lock next is not to wait until their leases are over.
func TestAfterAFailoverThatUndidTurnsTheLockMovesOn(t *testing.T) {
	const ttl = 5 * time.Minute
	for what, c := range map[string]struct {
		wants int  // the process that wants the lock next: that of the owner, of the first in the queue, or another one
		early bool // it has waited since before the failover
		takes time.Duration
	}{
		"the owner's process":            {0, false, time.Millisecond},
		"that of the first in the queue": {1, false, 20 * time.Second},
		"another one":                    {2, false, 20 * time.Second},
		"one that has waited":            {2, true, 4 * time.Second},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					t.Skip("a quorum's servers do not fail over")
				}
				clients := []*leased.Client{newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl))}
				warm(t, s, clients...)
				owner := lock(t, clients[0].Mutex("x"))
				next := locking(t, clients[1].Mutex("x"))
				s.queued(t, "x", 1)
				failsOver := s.remembers(t, "x", ttl)
				unlock(t, owner)
				unlock(t, <-next)

				var got <-chan *leased.Lease
				if c.early {
					present := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
					defer func() { isAll(t, present.Unlock(), leased.ErrLeaseLost) }()
					got = locking(t, clients[c.wants].Mutex("x"))
					s.queued(t, "x", 1)
				}
				failsOver()
				began := time.Now()
				if !c.early {
					got = locking(t, clients[c.wants].Mutex("x"))
				}
				l := <-got
				if took := time.Since(began); took > c.takes {
					t.Errorf("it waited %v", took)
				}
				unlock(t, l)
			})
		})
	}
}

func TestALeaseEndsAtOnceOnForceUnlock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s, leased.WithTTL(time.Hour)).Mutex("x"))
		awaitInbox(t, s)
		if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		work := l.Context()
		closesSoon(t, "the lease's context ends", work.Done())
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

// Only a command of this process can find that the key is gone. Where Unlock sends none,
// because another caller of the process goes on with the lock or the process keeps it, nil
// does not say that nobody else was inside.
func TestALossThatNobodyHasNoticedIsNotToldByAnUnlockThatAsksNobody(t *testing.T) {
	// enter has another process enter x, whose key is gone, while l is held, and leave again.
	enter := func(t *testing.T, s place) {
		s.forget(t)
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
	}
	// lostBeforeAnother has a process lose x while another of its callers waits.
	lostBeforeAnother := func(t *testing.T, s place) (first *leased.Lease, second <-chan *leased.Lease) {
		mu := newClient(t, s).Mutex("x")
		first, second = lock(t, mu), locking(t, mu)
		synctest.Wait()
		enter(t, s)
		return first, second
	}
	t.Run("another caller goes on", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			first, second := lostBeforeAnother(t, s)
			if err := first.Unlock(); err != nil {
				t.Errorf("a hand-off within the process says %v", err)
			}
			isAll(t, (<-second).Unlock(), leased.ErrLeaseLost) // which asks Redis
		})
	})
	t.Run("Do, and another caller goes on", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			mu := newClient(t, s).Mutex("x")
			var second <-chan *leased.Lease
			if err := mu.Do(t.Context(), func(context.Context) error {
				second = locking(t, mu)
				synctest.Wait()
				enter(t, s)
				return nil
			}); err != nil {
				t.Errorf("a hand-off within the process says %v", err)
			}
			isAll(t, (<-second).Unlock(), leased.ErrLeaseLost)
		})
	})
	t.Run("the process keeps it", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			c := newClient(t, s, leased.WithIdleHold(time.Second))
			l := lock(t, c.Mutex("x"))
			time.Sleep(time.Second) // its inbox hears, without which it keeps nothing
			enter(t, s)
			if err := l.Unlock(); err != nil {
				t.Errorf("a process that keeps the lock says %v", err)
			}
			time.Sleep(time.Minute)
			if lost := c.Stats().Lost; lost != 0 {
				t.Errorf("%d losses were counted later", lost)
			}
		})
	})
	t.Run("another reader is still inside", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			mu := newClient(t, s).RWMutex("x")
			first, err := mu.RLockContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			second, err := mu.RLockContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second) // its inbox hears, and what it asked then is answered
			enter(t, s)
			if err := first.Unlock(); err != nil {
				t.Errorf("beside another reader of the process it says %v", err)
			}
			isAll(t, second.Unlock(), leased.ErrLeaseLost)
		})
	})
	t.Run("Check asks first", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			first, second := lostBeforeAnother(t, s)
			isAll(t, first.Check(t.Context()), leased.ErrLeaseLost)
			isAll(t, first.Unlock(), leased.ErrLeaseLost)
			unlock(t, <-second) // by a grant of its own
		})
	})
}

func TestALeaseEndsBeforeTheServersTTLWhenRedisIsUnreachable(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		c, wire := onLine(t, s, leased.WithTTL(ttl))
		began := time.Now()
		l := lock(t, c.Mutex("x"))
		if until := l.TrustedUntil(); !until.Equal(began.Add(ttl - ttl/100 - 2*time.Millisecond)) {
			t.Errorf("trusted for %v", until.Sub(began))
		}
		time.Sleep(15 * time.Second) // a renewal
		until := l.TrustedUntil()
		if d := until.Sub(began); d <= ttl || d > ttl+15*time.Second {
			t.Errorf("after a renewal trusted for %v", d)
		}
		wire.cut()
		work := l.Context()
		closesSoon(t, "the lease ends", work.Done())
		if !time.Now().Equal(until) {
			t.Errorf("ended %v off the end of its trust", time.Since(until))
		}
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		if left := s.rdb.PTTL(context.Background(), "x").Val(); left <= 0 {
			t.Errorf("the server's TTL had ended: %v", left)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		wire.mend()
	})
}

func TestACollectedLeaseEndsWithItsTTLAndKeepsLocalCallersOut(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		var out logs
		const ttl = 6 * time.Second // a renewal may be late
		c := newClient(t, s, leased.WithTTL(ttl), out.option())
		work := lock(t, c.Mutex("kept")).Context() // a context keeps its lease
		func() { lock(t, c.Mutex("x")) }()
		c.Mutex("sync").Lock() // never collected
		eventually(t, "the lease is collected", func() bool {
			runtime.GC()
			return out.count(slog.LevelError, "garbage-collected") > 0
		})
		// Another client gets in when the TTL ends.
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if c.Mutex("x").TryLock() {
			t.Error("a local caller was let in beside the one who never unlocked")
		}
		const why = "a caller of this process whose lease has ended has not unlocked"
		if _, err := c.Mutex("x").TryLockContext(context.Background()); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("a local caller is told %v, want %s", err, why)
		}
		if s.value(t, "sync") == "" || s.value(t, "kept") == "" {
			t.Error("a lock that is in use was not renewed")
		}
		isAll(t, c.Mutex("x").UnlockContext(context.Background()), leased.ErrLeaseLost)
		for _, name := range []string{"sync", "kept"} {
			c.Mutex(name).Unlock()
		}
		if work.Err() == nil {
			t.Error("the context that kept the lease has not ended")
		}
		unlock(t, lock(t, c.Mutex("x")))
	})
}

func TestEachCollectedLeaseIsNamedInTheLogAndInItsLoss(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		var out logs
		lost := make(chan leased.LossEvent, 2)
		c := newClient(t, s, leased.WithTTL(2*time.Second), leased.WithSlowThreshold(time.Hour), out.option(),
			leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
		for range 8 {
			unlock(t, lock(t, c.Mutex("z"))) // a later lease gets its guard
		}
		names := []string{"x", "y"}
		for _, name := range names {
			func() { lock(t, c.Mutex(name)) }()
		}
		eventually(t, "both leases are collected", func() bool {
			runtime.GC()
			return out.count(slog.LevelError, "garbage-collected") == 2
		})
		var named []string
		out.mu.Lock()
		for _, line := range out.lines {
			line.Attrs(func(a slog.Attr) bool {
				switch {
				case a.Key == "lock":
					named = append(named, a.Value.String())
				case a.Key != "locked_at" || !strings.Contains(a.Value.String(), "_test.go:"):
					t.Errorf("%q has %v", line.Message, a)
				}
				return true
			})
		}
		out.mu.Unlock()
		slices.Sort(named)
		if !slices.Equal(named, names) {
			t.Errorf("the log names %q", named)
		}
		for range names {
			if ev := closesSoon(t, "the lease is lost", lost); !strings.Contains(ev.Reason, "garbage-collected") {
				t.Errorf("told of %+v", ev)
			}
		}
		for _, name := range names {
			c.Mutex(name).Unlock()
		}
	})
}

func TestALossIsToldOnceAndOutsideAllLocks(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var events []leased.LossEvent
		var c *leased.Client
		c = newClient(t, s, leased.WithLossHandler(func(ev leased.LossEvent) {
			events = append(events, ev)
			if _, err := c.Inspect(context.Background(), ev.Name); err != nil {
				t.Error(err)
			}
			unlock(t, lock(t, c.Mutex("another")))
			c.Mutex(ev.Name).Unlock() // and no later goroutine has to
		}))
		l := lock(t, c.Mutex("x"))
		s.rdb.Del(context.Background(), "x")
		closesSoon(t, "the loss is noticed", l.Context().Done())
		time.Sleep(time.Minute)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		if len(events) != 1 || events[0].Name != "x" || events[0].Token != l.Token() || events[0].Reason == "" {
			t.Errorf("told of %+v", events)
		}
		if n := c.Stats().Lost; n != 1 {
			t.Errorf("counted %d losses", n)
		}
	})
}

func TestAfterALossLocalCallersWaitForTheHoldersUnlock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		holder := lock(t, c.Mutex("x"))
		next := locking(t, c.Mutex("x"))
		synctest.Wait()
		s.rdb.Del(context.Background(), "x")
		closesSoon(t, "the loss is noticed", holder.Context().Done())
		elsewhere := lock(t, newClient(t, s).Mutex("x")) // Redis is free, so others may
		time.Sleep(time.Hour)
		if !open(next) {
			t.Error("a local caller entered beside the holder")
		}
		unlock(t, elsewhere)
		isAll(t, holder.Unlock(), leased.ErrLeaseLost)
		unlock(t, <-next)
	})
}

// A handler that waits for what its own call holds up would wait forever. The
// clock is the machine's, for virtual time stands still while a mutex is waited
// for; and nothing here waits for the client without a bound.
func TestALossHandlerMayUseTheLockThatWasLost(t *testing.T) {
	const bound = patience
	onBoth(t, func(t *testing.T, s place) {
		var c *leased.Client
		handled := make(chan struct{})
		c, err := s.open(t, s.universal(t), leased.WithKeyPrefix(s.Prefix), leased.WithLossHandler(func(ev leased.LossEvent) {
			defer close(handled)
			mu := c.Mutex(ev.Name)
			if _, err := c.Inspect(context.Background(), ev.Name); err != nil {
				t.Error(err)
			}
			if mu.TryLock() {
				t.Error("let in beside the holder, who has not unlocked")
			}
			mu.Unlock() // for the holder
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // that it comes through is what is tested
		}))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		awaitInbox(t, s)
		if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		select {
		case <-handled:
		case <-time.After(bound):
			t.Fatalf("the handler has not returned within %v", bound)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// The limits that the package comment opens with, where no other test has them.

func TestALeaseEndsWithinARenewalPeriodOfAForceUnlockWhoseMessageIsLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		var lines wards
		c := clientOn(t, s, s.connect(t, lines.change), leased.WithTTL(ttl))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second) // the inbox is there
		lines.frozen.Add(1)
		work, began := l.Context(), time.Now()
		if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if work.Err() != nil {
			t.Fatal("the message was heard: nothing is shown")
		}
		<-work.Done()
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		if d := time.Since(began); d > ttl/3 {
			t.Errorf("it ended after %v", d)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestALeaseEndsWithinARenewalPeriodOfAServersClockThatIsSetAhead(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		l := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
		work, began := l.Context(), time.Now()
		s.Mini.SetTime(began.Add(time.Minute))
		// Two owners: this is the time that the limits speak of.
		next := lock(t, newClient(t, s).Mutex("x"))
		if next.Token() <= l.Token() {
			t.Errorf("token %d after %d", next.Token(), l.Token())
		}
		<-work.Done()
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		if d := time.Since(began); d > ttl/3 {
			t.Errorf("it ended after %v", d)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		unlock(t, next)
	})
}

func TestALossHandlerMayCloseTheClient(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := placeAt(target, target.NewClient(t))
		strain := redistest.NewStrain(t)
		var c *leased.Client
		closed := make(chan error, 1)
		c, err := s.open(t, s.connect(t), leased.WithKeyPrefix(s.Prefix), leased.WithLossHandler(func(leased.LossEvent) {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			closed <- c.Shutdown(ctx)
		}))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		work := l.Context()
		awaitInbox(t, s)
		if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		go func() { // ended by the loss; not waited for, because it may be what hangs
			<-work.Done()
			_ = l.Unlock()
		}()
		began := time.Now()
		closesSoon(t, "Shutdown returns", closed)
		if took := time.Since(began); took > 4*time.Second+strain.Since(began) {
			t.Errorf("Shutdown, bounded by 100 ms, took %v", took)
		}
	})
}

func TestVirtualALeaseEndsWithItsTrustWhileRedisLoads(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		l := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
		began := time.Now()
		work := l.Context()
		time.Sleep(25 * time.Second)
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		<-work.Done()
		// Confirmed last by the renewal sent after 20 s.
		if took := time.Since(began); took != 20*time.Second+ttl-ttl/100-2*time.Millisecond {
			t.Errorf("ended after %v", took)
		}
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		s.Mini.SetError("")
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}
