package leased_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func downgrade(t *testing.T, l *leased.Lease) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := l.Downgrade(ctx); err != nil {
		t.Fatalf("Downgrade: %v", err)
	}
}

// Two other clients try to write in between, one by spinning and one from the
// queue; both write in the breaks, which shows that they would have.
func TestADowngradeLeavesNoGapForAWriter(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		const turns = 60
		const free, writing, reading = 0, 1, 2
		var state atomic.Int32
		var done atomic.Bool
		var spun, waited atomic.Int64
		a := newClient(t, s).RWMutex("x")
		spins, waits := newClient(t, s).RWMutex("x"), newClient(t, s).RWMutex("x")
		var others sync.WaitGroup
		alone := func(who string, n *atomic.Int64) {
			n.Add(1)
			if is := state.Load(); is != free {
				t.Errorf("%s writes in state %d of the lease", who, is)
			}
		}
		others.Go(func() {
			for !done.Load() {
				if spins.TryLock() {
					alone("the spinning one", &spun)
					spins.Unlock()
				}
				runtime.Gosched()
			}
		})
		others.Go(func() {
			for !done.Load() {
				waits.Lock()
				alone("the waiting one", &waited)
				waits.Unlock()
			}
		})
		for range turns {
			l := take(t, a.LockContext)
			state.Store(writing)
			s.queued(t, "x", 1)
			downgrade(t, l)
			state.Store(reading)
			runtime.Gosched()
			state.Store(free) // so that no release is later than this
			unlock(t, l)
		}
		eventually(t, "the spinning one gets its turn", func() bool { return spun.Load() > 0 || waited.Load() > 10*turns })
		done.Store(true)
		others.Wait()
		if waited.Load() < turns-1 {
			t.Errorf("the waiting one wrote %d times in %d turns", waited.Load(), turns)
		}
		s.becomesClean(t, "x")
	})
}

func TestADowngradeLetsReadersInWhoWaitRightBehindAndNobodyElse(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b, c, d, e := newClient(t, s), newClient(t, s), newClient(t, s), newClient(t, s), newClient(t, s)
		warm(t, s, a, b, c, d, e)
		owner := take(t, a.RWMutex("x").LockContext)
		in := []<-chan *leased.Lease{taking(t, a.RWMutex("x").RLockContext)}
		for _, client := range []*leased.Client{b, c} {
			synctest.Wait()
			in = append(in, taking(t, client.RWMutex("x").RLockContext))
		}
		synctest.Wait()
		writer := taking(t, d.RWMutex("x").LockContext)
		synctest.Wait()
		behind := taking(t, e.RWMutex("x").RLockContext)
		synctest.Wait()
		before := s.commands(a)
		began := time.Now()
		downgrade(t, owner)
		var leases []*leased.Lease
		for _, ch := range in {
			leases = append(leases, <-ch)
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the readers behind it entered after %v", waited)
		}
		if n := s.commands(a) - before; n > 2 { // by hash, then by text
			t.Errorf("it took %d commands", n)
		}
		late := taking(t, a.RWMutex("x").RLockContext)
		time.Sleep(time.Minute)
		if !open(writer) || !open(behind) || !open(late) {
			t.Error("a writer entered beside readers, or a reader before the writer")
		}
		for _, l := range append(leases, owner) {
			unlock(t, l)
		}
		w := <-writer
		synctest.Wait()
		if !open(behind) || !open(late) {
			t.Error("a reader entered beside the writer")
		}
		unlock(t, w)
		unlock(t, <-behind)
		unlock(t, <-late)
	})
}

func TestTheTokenOfADowngradedLeaseGrows(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		writers := l.Token()
		downgrade(t, l)
		beside, elsewhere := take(t, c.RWMutex("x").RLockContext), take(t, newClient(t, s).RWMutex("x").RLockContext)
		if l.Token() <= writers || beside.Token() != l.Token() || elsewhere.Token() <= writers {
			t.Errorf("writer %d, then %d, beside it %d, elsewhere %d", writers, l.Token(), beside.Token(), elsewhere.Token())
		}
		for _, r := range []*leased.Lease{l, beside, elsewhere} {
			unlock(t, r)
		}
		next := take(t, c.RWMutex("x").LockContext)
		if next.Token() <= l.Token() || next.Token() <= elsewhere.Token() {
			t.Errorf("readers %d and %d, then a writer %d", l.Token(), elsewhere.Token(), next.Token())
		}
		unlock(t, next)
	})
}

func TestADowngradedLeaseGoesOnBeingRenewed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 6 * time.Second
		c, other := newClient(t, s, leased.WithOwner("reads"), leased.WithTTL(ttl)), newClient(t, s)
		// At every phase of the renewals: one may be under way for the old id.
		for wait := time.Duration(0); wait <= ttl/3; wait += ttl / 60 {
			l := take(t, c.RWMutex("x").LockContext)
			work := l.Context()
			time.Sleep(wait)
			downgrade(t, l)
			time.Sleep(10 * ttl)
			if work.Err() != nil {
				t.Fatalf("downgraded after %v: %v", wait, context.Cause(work))
			}
			if o := inspect(t, other, "x").Owners; len(o) != 1 || !o[0].Shared || o[0].Client != "reads" || o[0].TTL < ttl/2 {
				t.Errorf("owners: %+v", o)
			}
			if other.RWMutex("x").TryLock() {
				t.Error("a writer got in")
			}
			if left := time.Until(l.TrustedUntil()); left < ttl/2 || left > ttl {
				t.Errorf("trusted for %v", left)
			}
			unlock(t, l)
			if !s.clean(t, "x") {
				t.Error("not given back")
			}
		}
	})
}

func TestADowngradeOfAReadersLeaseCostsNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Hour))
		warm(t, s, c) // a client that has just begun asks once more
		for _, call := range []func(context.Context) (*leased.Lease, error){c.RWMutex("x").LockContext, c.RWMutex("x").RLockContext} {
			l := take(t, call)
			downgrade(t, l)
			token, before := l.Token(), s.commands(c)
			downgrade(t, l)
			downgrade(t, l)
			if n := s.commands(c) - before; n != 0 || l.Token() != token {
				t.Errorf("took %d commands, token %d became %d", n, token, l.Token())
			}
			unlock(t, l)
		}
	})
}

func TestTwoWhoDowngradeOneLeaseAtOnceAreBothServed(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if err := l.Downgrade(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if o := inspect(t, c, "x").Owners; len(o) != 1 || !o[0].Shared {
			t.Errorf("owners: %+v", o)
		}
		unlock(t, l)
		if !s.clean(t, "x") {
			t.Error("something is left")
		}
	})
}

func TestAnOverLeaseIsNotDowngraded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		unlock(t, l)
		before := s.commands(c)
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
		if n := s.commands(c) - before; n != 0 {
			t.Errorf("took %d commands", n)
		}
		l = take(t, c.RWMutex("x").LockContext)
		s.rdb.Del(context.Background(), "x")
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost) // it is the first to see
		closesSoon(t, "the lease ends", l.Context().Done())
		isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost) // it is known
		if v := s.value(t, "x"); v != "" {
			t.Errorf("took %q", v)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestTheErrorOfADowngradeThatCloseEndsNamesThePackageOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		s.Mini.SetError("LOADING Redis is loading")
		defer s.Mini.SetError("")
		downgraded := make(chan error, 1)
		go func() { downgraded <- l.Downgrade(context.Background()) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Shutdown(ctx)
		err := <-downgraded
		isAll(t, err, leased.ErrClosed)
		if want := `leased: downgrade of lock "x" not confirmed; no longer tried: `; strings.Count(err.Error(), "leased: ") != 1 || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("it says %q, want %q first", err, want)
		}
		_ = l.Unlock()
	})
}

func TestADowngradeWhoseReplyIsLostIsRepeated(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr }))
		warm(t, s, c) // otherwise the reply NOSCRIPT would be lost, or that to the greeting of another connection
		l := take(t, c.RWMutex("x").LockContext)
		was, look := l.Token(), newClient(t, s)
		wire.DropReplies()
		done := make(chan error, 1)
		go func() { done <- l.Downgrade(context.Background()) }() // ended by its answer, waited for through done
		eventually(t, "the server has carried it out", func() bool {
			o := inspect(t, look, "x").Owners
			return len(o) == 1 && o[0].Shared
		})
		if !open(done) {
			t.Fatal("it was answered: the test proves nothing")
		}
		wire.Heal()
		wire.Cut()
		if err := closesSoon(t, "Downgrade returns", done); err != nil {
			t.Fatal(err)
		}
		if l.Token() <= was || l.Context().Err() != nil {
			t.Errorf("token %d after %d, %v", l.Token(), was, context.Cause(l.Context()))
		}
		if n := len(inspect(t, look, "x").Owners); n != 1 {
			t.Errorf("%d owners", n)
		}
		unlock(t, l)
		s.becomesClean(t, "x")
	})
}

func TestADowngradeGoesOnWhenItsContextHasEnded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s)
		look := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		wire.cut()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		began := time.Now()
		err := l.Downgrade(ctx)
		isAll(t, err, context.DeadlineExceeded)
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("returned after %v", took)
		}
		if want := `leased: downgrade of lock "x" not confirmed; still trying, and the lease goes on: `; !strings.HasPrefix(err.Error(), want) {
			t.Errorf("it says %q, want %q first", err, want)
		}
		if want := "(last Redis error: " + s.saying(errCut.Error()) + ")"; !strings.HasSuffix(err.Error(), want) || !errors.Is(err, errCut) {
			t.Errorf("it says %q, want %q last", err, want)
		}
		if o := inspect(t, look, "x").Owners; len(o) != 1 || o[0].Shared || l.Context().Err() != nil {
			t.Errorf("owners: %+v, %v", o, context.Cause(l.Context()))
		}
		wire.mend()
		time.Sleep(8 * time.Second)
		if o := inspect(t, look, "x").Owners; len(o) != 1 || !o[0].Shared || l.Context().Err() != nil {
			t.Errorf("owners: %+v, %v", o, context.Cause(l.Context()))
		}
		downgrade(t, l)
		unlock(t, l)
	})
}

func TestRUnlockEndsADowngradedLeaseAndUnlockPanics(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		l := take(t, rw.LockContext)
		downgrade(t, l)
		for _, call := range []func(){rw.Unlock, c.Mutex("x").Unlock} {
			if err, ok := panics(call).(error); !ok || err.Error() != `leased: unlock of unlocked mutex "x"` || !errors.Is(err, leased.ErrNotLocked) {
				t.Errorf("panics with %v", err)
			}
		}
		rw.RUnlock()
		if l.Context().Err() == nil || !s.clean(t, "x") {
			t.Error("RUnlock did not end it")
		}
		if err := l.Unlock(); err != nil {
			t.Errorf("Unlock after RUnlock: %v", err)
		}
		if err, ok := panics(rw.RUnlock).(error); !ok || err.Error() != `leased: RUnlock of unlocked mutex "x"` {
			t.Errorf("unlocked twice, it panics with %v", err)
		}
	})
}

// A downgrade and what may end the lease, or the client, meanwhile.

func TestALeaseCanBeDowngradedWhileItsClientCloses(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		reader := taking(t, newClient(t, s).RWMutex("x").RLockContext)
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }() // ended by the Unlock, waited for through closed
		synctest.Wait()
		downgrade(t, l)
		unlock(t, <-reader)
		if !open(closed) {
			t.Error("Close did not wait for the Unlock")
		}
		unlock(t, l)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if !s.clean(t, "x") {
			t.Error("something is left")
		}
	})
}

func TestADowngradeUnderWayEndsWithItsClient(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		wire.cut()
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- l.Downgrade(ctx) }() // ended by ctx at the latest, waited for through done
		time.Sleep(time.Second)
		if err := c.Close(); !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Close with a lease inside: %v", err)
		}
		closing := time.Now()
		if err := <-done; err == nil || errors.Is(err, context.DeadlineExceeded) || time.Since(closing) > time.Second {
			t.Errorf("%v after the client had closed, Downgrade returned %v", time.Since(closing), err)
		}
		_ = l.Unlock() // what becomes of it is Close's story
		wire.mend()
	})
}

func TestADowngradedLeaseCanBeForcedAndLost(t *testing.T) {
	for how, end := range map[string]func(t *testing.T, s place){
		"forced": func(t *testing.T, s place) {
			if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
				t.Error(err)
			}
		},
		"marker deleted": func(t *testing.T, s place) { s.rdb.Del(context.Background(), "x") },
		"entry deleted": func(t *testing.T, s place) {
			_, readers, _, _ := s.helperKeys("x")
			s.rdb.Del(context.Background(), readers)
		},
	} {
		t.Run(how, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				const ttl = 9 * time.Second
				c := newClient(t, s, leased.WithTTL(ttl))
				l := take(t, c.RWMutex("x").LockContext)
				downgrade(t, l)
				synctest.Wait()
				end(t, s)
				began := time.Now()
				<-l.Context().Done()
				isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
				if took := time.Since(began); took > ttl/3 || how == "forced" && took != 0 {
					t.Errorf("told after %v", took)
				}
				isAll(t, l.Unlock(), leased.ErrLeaseLost)
			})
		})
	}
}

func TestADowngradeThatCannotBeProvedEndsWithTheTrustInTheLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s, leased.WithTTL(10*time.Second))
		l := take(t, c.RWMutex("x").LockContext)
		wire.cut()
		until := l.TrustedUntil()
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
		if !time.Now().Equal(until) {
			t.Errorf("returned %v off the end of the trust", time.Since(until))
		}
		isAll(t, context.Cause(l.Context()), leased.ErrLeaseLost)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		wire.mend()
		time.Sleep(20 * time.Second)
		if !s.clean(t, "x") {
			t.Errorf("%q is left", s.value(t, "x"))
		}
	})
}

func TestAnUnlockDuringAnUnansweredDowngradeLeavesNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		warm(t, s, newClient(t, s))
		for what, carriedOut := range map[string]bool{"replies lost": true, "black hole": false} {
			wire := s.proxy(t)
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr, o.ReadTimeout = wire.Addr, 100*time.Millisecond }),
				leased.WithReleaseTimeout(200*time.Millisecond), leased.WithTTL(time.Hour))
			l := take(t, c.RWMutex("x").LockContext)
			if carriedOut {
				wire.DropReplies()
			} else {
				wire.BlackHole()
			}
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
			cancel()
			if err := l.Unlock(); !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("%s: Unlock: %v", what, err)
			}
			if panics(c.RWMutex("x").Unlock) == nil || panics(c.RWMutex("x").RUnlock) == nil {
				t.Errorf("%s: it is still locked in this client", what)
			}
			wire.Heal()
			wire.Cut()
			s.becomesClean(t, "x")
			unlock(t, take(t, c.RWMutex("x", leased.WithReleaseTimeout(patience)).LockContext))
		}
	})
}

// No command is under way then: it is Unlock itself that gives both ids up.
func TestAnUnlockBetweenTheTriesOfADowngradeSaysWhetherRedisConfirmed(t *testing.T) {
	for _, back := range []bool{true, false} {
		t.Run(fmt.Sprintf("Redis comes back=%v", back), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				const limit = 5 * time.Second
				c := newClient(t, s, leased.WithTTL(time.Hour), leased.WithReleaseTimeout(limit))
				warm(t, s, c)
				l := take(t, c.RWMutex("x").LockContext)
				s.Mini.SetError(outOfOrder)
				mend := func() { s.Mini.SetError("") }
				ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond) // it is tried again later
				isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
				cancel()
				if back {
					time.AfterFunc(limit/2, mend)
				}
				began := time.Now()
				err := l.Unlock()
				took := time.Since(began)
				if back {
					if err != nil || took < limit/2 || took >= limit || !s.clean(t, "x") {
						t.Errorf("Unlock after %v: %v; %q is left", took, err, s.value(t, "x"))
					}
					return
				}
				isAll(t, err, leased.ErrNotReleased)
				if took != limit {
					t.Errorf("Unlock waited for %v", took)
				}
				mend()
				time.Sleep(time.Minute)
				if !s.clean(t, "x") {
					t.Errorf("%q is left", s.value(t, "x"))
				}
			})
		})
	}
}

// A lease is safe for concurrent use: the race detector judges.
func TestATokenCanBeReadWhileADowngradeChangesIt(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := take(t, c.RWMutex("x").LockContext)
		was := l.Token()
		done := make(chan error, 1)
		go func() { done <- l.Downgrade(context.Background()) }() // ended by Redis's answer, waited for below
		eventually(t, "the token grows", func() bool { return l.Token() > was })
		must(t, <-done)
		unlock(t, l)
	})
}

func TestADowngradeWhoseContextHasEndedDoesNotBegin(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		c := newClient(t, s)
		warm(t, s, c)
		l := take(t, c.RWMutex("x").LockContext)
		before := s.commands(c)
		isAll(t, l.Downgrade(ended), context.Canceled)
		time.Sleep(time.Second)
		if o := inspect(t, newClient(t, s), "x").Owners; len(o) != 1 || o[0].Shared {
			t.Errorf("owners: %+v", o)
		}
		if n := s.commands(c) - before; n != 0 {
			t.Errorf("took %d commands", n)
		}
		unlock(t, l)
	})
}

func TestAnOverReadersLeaseIsNotDowngradedEither(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		l := take(t, c.RWMutex("x").RLockContext)
		unlock(t, l)
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
		l = take(t, c.RWMutex("x").LockContext)
		downgrade(t, l)
		must(t, forceUnlock(context.Background(), c, "x"))
		closesSoon(t, "the lease is lost", l.Context().Done())
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
	})
}

// What is known needs no answer of Redis, so it does not matter that the context has ended.
func TestADowngradeThatIsDecidedSaysSoWhateverItsContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		reader := take(t, c.RWMutex("x").RLockContext)
		for range 100 {
			downgradeIn(t, ended, reader)
		}
		unlock(t, reader)
		lost := take(t, c.RWMutex("y").LockContext)
		must(t, forceUnlock(context.Background(), c, "y"))
		closesSoon(t, "the lease is lost", lost.Context().Done())
		for range 100 {
			isAll(t, lost.Downgrade(ended), leased.ErrLeaseLost)
		}
		isAll(t, lost.Unlock(), leased.ErrLeaseLost)
	})
}

// Which of two reasons is found first is left to chance, but not which is told.
func TestADowngradeOfALeaseThatIsOverSaysTheSameEachTimeAfterClose(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		l := take(t, c.RWMutex("x").LockContext)
		unlock(t, l)
		must(t, c.Close())
		for range 100 {
			isAll(t, l.Downgrade(context.Background()), leased.ErrLeaseLost)
		}
	})
}

func downgradeIn(t *testing.T, ctx context.Context, l *leased.Lease) {
	t.Helper()
	if err := l.Downgrade(ctx); err != nil {
		t.Fatalf("Downgrade: %v", err)
	}
}
