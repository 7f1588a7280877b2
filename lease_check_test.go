package leased_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestCheckFindsOutAtOnceThatALeaseIsLost(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		background := context.Background()
		rw := c.RWMutex("x")
		a, err := rw.RLockContext(background)
		must(t, err)
		b, err := rw.RLockContext(background)
		must(t, err)
		must(t, a.Check(background))
		must(t, s.rdb.Del(background, s.Prefix+"x").Err())
		err = a.Check(background)
		isAll(t, err, leased.ErrLeaseLost)
		if !strings.HasPrefix(err.Error(), `leased: lock "x" lost (token `) {
			t.Errorf("Check: %v", err)
		}
		for _, l := range []*leased.Lease{a, b} { // both were on that grant
			if l.Context().Err() == nil {
				t.Error("a lease goes on")
			}
			isAll(t, l.Check(background), leased.ErrLeaseLost)
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
			isAll(t, l.Check(background), leased.ErrLeaseLost)
		}
	})
}

// A process that hands a lock on among its callers does not ask Redis each time; the first
// caller that does saves the others from a grant that is gone.
func TestAfterACheckNobodyIsHandedADeadGrant(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLocalHandoffs(1000, time.Hour), leased.WithLossHandler(func(leased.LossEvent) {}))
		mu := c.Mutex("x")
		l := lock(t, mu)
		var all sync.WaitGroup
		dead := 0
		for range 57 {
			all.Go(func() {
				next, err := mu.LockContext(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				if s.value(t, "x") == "" {
					dead++
				}
				_ = next.Unlock()
			})
		}
		synctest.Wait()
		s.Mini.FlushAll()
		isAll(t, l.Check(context.Background()), leased.ErrLeaseLost)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		all.Wait()
		if dead > 0 {
			t.Errorf("%d callers were handed a lock that Redis knew nothing of", dead)
		}
	})
}

func TestCheckTrustsTheLeaseFromItsSending(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		until := l.TrustedUntil()
		time.Sleep(7 * time.Second)
		must(t, l.Check(context.Background()))
		if moved := l.TrustedUntil().Sub(until); moved != 7*time.Second {
			t.Errorf("the end of the trust window moved by %v", moved)
		}
		unlock(t, l)
		err := l.Check(context.Background())
		isAll(t, err, leased.ErrLeaseLost)
		if want := `leased: lock "x" not checked: the lease has ended`; err.Error() != want {
			t.Errorf("after Unlock: %v, want %s", err, want)
		}
	})
}

func TestACheckThatRedisDoesNotAnswerLeavesTheLeaseAlone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Millisecond) // what a quorum's servers prove at one instant is one proof
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		err := l.Check(context.Background())
		if want := `leased: lock "x" not checked: ` + s.saying("LOADING Redis is loading the dataset in memory"); err == nil || err.Error() != want {
			t.Errorf("Check: %v, want %s", err, want)
		}
		over, cancel := context.WithCancel(context.Background())
		cancel()
		isAll(t, l.Check(over), context.Canceled)
		if err := l.Context().Err(); err != nil || errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("the lease has ended: %v", err)
		}
		s.Mini.SetError("")
		must(t, l.Check(context.Background()))
		unlock(t, l)
	})
}

func TestCheckReturnsWhenItsContextEnds(t *testing.T) {
	inTurn(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr }))
		l := lock(t, c.Mutex("x"))
		wire.BlackHole()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		strain, began := redistest.NewStrain(t), time.Now()
		isAll(t, l.Check(ctx), context.DeadlineExceeded)
		if took := time.Since(began); took > time.Second+strain.Since(began) { // a command without answer takes 2 s
			t.Errorf("it took %v", took)
		}
		if err := l.Context().Err(); err != nil {
			t.Errorf("the lease has ended: %v", err)
		}
		wire.Heal()
		wire.Cut()
		unlock(t, l)
	})
}

// A check that comes while the renewal of another one is under way has one sent after that.
func TestACheckWaitsNoLongerThanACommandAlthoughItComesDuringAnother(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum does not wait for servers that it knows to be away")
		}
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Hour))
		l := lock(t, c.Mutex("x"))
		warm(t, s, c)
		way.shut.Store(true)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				began := time.Now()
				err := l.Check(context.Background())
				if took := time.Since(began); err == nil || took < 2*time.Second || took > 2*time.Second+10*time.Millisecond {
					t.Errorf("Check returned %v after %v", err, took)
				}
				if errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v matches the error of a context, and there was none", err)
				}
			})
			time.Sleep(500 * time.Millisecond) // the time between checks
		}
		all.Wait()
		way.shut.Store(false)
		must(t, l.Check(context.Background()))
		unlock(t, l)
	})
}

func TestChecksMadeTogetherShareCommands(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		var leases []*leased.Lease
		for range 100 {
			l, err := rw.RLockContext(context.Background())
			must(t, err)
			leases = append(leases, l)
		}
		before := s.commands(c)
		var all sync.WaitGroup
		for _, l := range leases {
			all.Go(func() { must(t, l.Check(context.Background())) })
		}
		all.Wait()
		if n := s.commands(c) - before; n < 1 || n > 50 {
			t.Errorf("100 checks took %d commands", n)
		}
		for _, l := range leases {
			unlock(t, l)
		}
	})
}

func TestCheckOfAClosedClientReturns(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = c.Shutdown(ctx)
		isAll(t, l.Check(context.Background()), leased.ErrClosed)
		_ = l.Unlock()
		s.Mini.FlushAll()
	})
}

// A downgrade that failed answers checks when it is tried again, which a client that is closed does not do.
func TestACheckDuringADowngradeEndsWithItsClient(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s, leased.WithLossHandler(func(leased.LossEvent) {}), leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
		l := take(t, c.RWMutex("x").LockContext)
		wire.cut()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
		checked := make(chan error, 1)
		go func() { checked <- l.Check(context.Background()) }() // ended by Shutdown, waited for through checked
		synctest.Wait()
		if err := c.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Shutdown: %v", err)
		}
		select {
		case err := <-checked:
			isAll(t, err, leased.ErrClosed)
		case <-time.After(time.Hour):
			t.Error("an hour after the client was closed, Check waits still")
		}
		_ = l.Unlock() // what becomes of it is Shutdown's story
		wire.mend()
	})
}
