package leased_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

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
			if err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
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
		go func() { done <- l.Downgrade(context.Background()) }() // ended by Redis' answer, waited for below
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
		must(t, c.ForceUnlock(context.Background(), "x"))
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
		must(t, c.ForceUnlock(context.Background(), "y"))
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
