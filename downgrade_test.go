package leased_test

import (
	"context"
	"errors"
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
		if strings.Count(err.Error(), "leased: ") != 1 {
			t.Errorf("it says %q", err)
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
		isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("returned after %v", took)
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
		if panics(rw.RUnlock) == nil {
			t.Error("unlocked twice")
		}
	})
}
