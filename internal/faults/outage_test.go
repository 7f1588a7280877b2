//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// justRenewed waits for a renewal, so that no other is sent for a third of the TTL.
func justRenewed(t *testing.T, c *leased.Client, leases int64) {
	t.Helper()
	before := c.Stats().Renewals
	eventually(t, "a renewal", func() bool { return c.Stats().Renewals >= before+leases })
}

// When the second renewal hangs, two of the pool's connections are in use, and with many
// leases there are several batches each time. None of this may delay the end of a lease.
func TestLeasesEndBeforeTheirTTLWhileRenewalsHang(t *testing.T) {
	for _, o := range outages {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel()
			s, p, rdb := behind(t)
			strain := redistest.NewStrain(t)
			look := s.Client()
			const ttl, leases = 1500 * time.Millisecond, 600
			c := newClient(t, rdb, "", leased.WithTTL(ttl), leased.WithReleaseTimeout(time.Millisecond),
				leased.WithLossHandler(func(leased.LossEvent) {}))
			var held []*leased.Lease
			var ended []<-chan time.Time
			for i := range leases {
				l := mustLock(t, c.Mutex(fmt.Sprintf("n%d", i)))
				held, ended = append(held, l), append(ended, watch(l))
			}
			justRenewed(t, c, 2*leases) // by now they are renewed together

			// Redis must not end a lease before the client believes that it ends. The client is asked
			// first, so that a renewal in between does no harm.
			believed := make([]time.Time, leases)
			for i, l := range held {
				believed[i] = l.TrustedUntil()
			}
			ttls := make([]*redis.DurationCmd, leases)
			if _, err := look.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
				for i := range held {
					ttls[i] = pipe.PTTL(t.Context(), fmt.Sprintf("n%d", i))
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			now := time.Now()
			for i := range held {
				if dies := now.Add(ttls[i].Val() + time.Millisecond); dies.Before(believed[i]) {
					t.Fatalf("Redis ends a lease %v before the client does", believed[i].Sub(dies))
				}
			}

			sent := c.Stats().Commands // commands sent from now on get no answer
			o.begin(s, p)
			begun := time.Now()

			// The TTL on the server ends a margin after the trust window, or later. A process that does
			// not run ends nothing in time, so the time for which this one was kept from running is added.
			margin := ttl/100 + 2*time.Millisecond
			worst := -time.Hour
			early, late := 0, 0
			var due int64 // renewals that were due at one third and at two thirds of the TTL
			for i, l := range held {
				at := lostAt(t, l, ended[i])
				trusted := l.TrustedUntil()
				worst = max(worst, at.Sub(trusted))
				if at.Before(believed[i]) {
					early++
				}
				if trusted.After(begun.Add(ttl)) {
					t.Fatalf("a lease was trusted until %v after the start of the outage, longer than its TTL", trusted.Sub(begun))
				}
				if at.Sub(trusted) > margin+slack+strain.Since(trusted) {
					late++
				}
				due++
				// The one at a third was sent before the outage began if the last answered renewal was sent
				// more than a third of the TTL, less one step of the timer grid, before it.
				if renewed := trusted.Add(margin - ttl); renewed.Add(ttl/3 - ttl/30).After(begun) {
					due++
				}
			}
			vain := c.Stats().Commands - sent
			t.Logf("%s: %d of %d renewals in vain, ended at most %v after the trust window", o.name, vain, due, worst)
			if early > 0 {
				t.Errorf("%d of %d ended before their trust window did", early, leases)
			}
			if late > 0 {
				t.Errorf("%d of %d ended after the TTL on the server, worst %v after the trust window", late, leases, worst)
			}
			// This is demanded only if the process got to run: once, when it was kept from running for less
			// than a tenth of the TTL, the number was halved.
			if kept := strain.Since(begun); vain < due && kept < ttl/50 {
				t.Errorf("only %d of the %d renewals due during the outage were sent; the process was kept from running for %v", vain, due, kept)
			}
		})
	}
}

func TestUnlockAndCloseAreBounded(t *testing.T) {
	t.Parallel()
	for i, o := range outages {
		t.Run(o.name, func(t *testing.T) {
			if testing.Short() && i%2 == 1 {
				t.Skip("two of four are enough for the short run")
			}
			t.Parallel()
			s, p, rdb := behind(t)
			strain := redistest.NewStrain(t)
			c := newClient(t, rdb, "", leased.WithReleaseTimeout(time.Second)) // the default
			l, other := mustLock(t, c.Mutex("x")), mustLock(t, c.Mutex("y"))
			mustLock(t, c.Mutex("never unlocked"))
			holder := newClient(t, s.Client(), "")
			mustLock(t, holder.Mutex("z"))
			waiting := wait(context.Background(), c.Mutex("z"))
			queued(t, holder, "z", 1)
			o.begin(s, p)

			began := time.Now()
			err := l.Unlock()
			took := time.Since(began)
			if !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("Unlock returned %v", err)
			}
			if took > time.Second+slack+strain.Since(began) {
				t.Errorf("Unlock took %v", took)
			}
			began = time.Now()
			c.Mutex("y").Unlock()
			if took := time.Since(began); took > time.Second+slack+strain.Since(began) {
				t.Errorf("Mutex.Unlock took %v", took)
			}
			if err := other.Unlock(); !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("the lease's Unlock returned %v after the mutex's", err)
			}

			began = time.Now()
			err = c.Close()
			closed := time.Since(began)
			// 5 s for the holders, 2 s for commands under way.
			if closed > 7*time.Second+slack+strain.Since(began) {
				t.Errorf("Close took %v", closed)
			}
			if !errors.Is(err, leased.ErrClosed) {
				t.Errorf("Close returned %v although one lease was never unlocked", err)
			}
			if r := <-waiting; !errors.Is(r.err, leased.ErrClosed) || r.at.Sub(began) > slack+strain.Since(began) {
				t.Errorf("the waiter got %v after %v", r.err, r.at.Sub(began))
			}
			t.Logf("%s: Unlock %v, Close %v", o.name, took, closed)
		})
	}
}

func TestARestartedEmptyServerIsNoticedWithinARenewalPeriod(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	const ttl = 3 * time.Second
	c := newClient(t, s.Client(), "", leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
	next := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	l := mustLock(t, c.Mutex("x"))
	ended := watch(l)
	waiting := wait(within(t, patience), next.Mutex("x"))
	queued(t, next, "x", 1)

	s.Kill()
	s.Restart()
	up := time.Now()
	lost := lostAt(t, l, ended).Sub(up)
	r := entered(t, waiting)
	t.Logf("the loss was learnt %v after the restart, the next owner ran after %v", lost, r.at.Sub(up))
	// A renewal that failed during the restart is repeated sooner than that.
	if lost > ttl/3+slack+strain.Since(up) {
		t.Errorf("the holder learned of its loss %v after the restart", lost)
	}
	// The waiter hears no message: it subscribes again, and re-checks.
	if got := r.at.Sub(up); got > ttl/3+slack+strain.Since(up) {
		t.Errorf("the next owner ran %v after the restart", got)
	}
	if r.lease.Token() <= l.Token() {
		t.Errorf("token %d after %d, which an empty server forgot", r.lease.Token(), l.Token())
	}
	if err := l.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Unlock returned %v", err)
	}
	mustUnlock(t, r.lease)
	nothingLeft(t, next, "x")
}

func TestAFrozenServerThatGoesOnInTimeLosesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	c := newClient(t, s.Client(), "", leased.WithTTL(9*time.Second))
	next := newClient(t, s.Client(), "")
	l := mustLock(t, c.Mutex("x"))
	waiting := wait(within(t, patience), next.Mutex("x"))
	queued(t, next, "x", 1)
	justRenewed(t, c, 1)
	sent := c.Stats().Commands
	s.Stop()
	eventually(t, "a renewal without answer", func() bool { return c.Stats().Commands > sent })
	s.Cont()
	justRenewed(t, c, 1)
	if l.Context().Err() != nil {
		t.Fatalf("the lease ended: %v", context.Cause(l.Context()))
	}
	mustUnlock(t, l)
	mustUnlock(t, entered(t, waiting).lease)
	if lost := c.Stats().Lost; lost != 0 {
		t.Errorf("%d leases lost", lost)
	}
	nothingLeft(t, next, "x")
}

func TestABlockedCommandInAPoolOfOneDelaysNoEnd(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	rdb := s.Client(func(o *redis.Options) {
		// Pipelines must use the same pool. From go-redis 9.23 on they have a pool of their own, on
		// which renewals would continue, and the lease with them.
		o.PoolSize, o.PipelinePoolSize = 1, -1
	})
	const ttl = time.Second
	c := newClient(t, rdb, "", leased.WithTTL(ttl), leased.WithReleaseTimeout(time.Second),
		leased.WithLossHandler(func(leased.LossEvent) {}))
	look := newClient(t, s.Client(), "")
	l := mustLock(t, c.Mutex("x"))
	released := mustLock(t, c.Mutex("y"))
	ended := watch(l)
	justRenewed(t, c, 2)

	var blocked sync.WaitGroup
	blocked.Go(func() { rdb.BLPop(t.Context(), 4*time.Second, "nobody pushes") })
	admin := s.Client()
	eventually(t, "the pool's connection blocked", func() bool {
		return strings.Contains(admin.ClientList(t.Context()).Val(), " cmd=blpop ")
	})

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	due, _ := ctx.Deadline()
	if _, err := c.Mutex("z").LockContext(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("LockContext returned %v", err)
	}
	if late := time.Since(due); late > slack+strain.Since(due) {
		t.Errorf("LockContext returned %v after the end of its context", late)
	}
	began := time.Now()
	err := released.Unlock()
	if took := time.Since(began); !errors.Is(err, leased.ErrNotReleased) && !errors.Is(err, leased.ErrLeaseLost) || took > time.Second+slack+strain.Since(began) {
		t.Errorf("Unlock returned %v after %v", err, took)
	}
	at, trusted := lostAt(t, l, ended), l.TrustedUntil()
	t.Logf("ended %v after the trust window", at.Sub(trusted))
	if at.Before(trusted) || at.Sub(trusted) > slack+strain.Since(trusted) {
		t.Errorf("the lease ended %v after its trust window", at.Sub(trusted))
	}
	_ = l.Unlock() // it returns a loss

	blocked.Wait()
	mustUnlock(t, mustLock(t, c.Mutex("z"))) // the pool is free again and everything works
	for _, name := range []string{"x", "y", "z"} {
		nothingLeft(t, look, name)
	}
}
