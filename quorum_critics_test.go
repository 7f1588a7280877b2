package leased_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// The cases that critics of Redlock and its author argued about, and what comes of them here.
// docs/redlock.md tells the outcomes. The third case, a server that restarts without its
// data, is in quorum_test.go and quorum_real_test.go.

// resource is what a lock protects. It refuses tokens below the greatest it has seen.
type resource struct{ greatest uint64 }

func (r *resource) write(token uint64) bool {
	if token < r.greatest {
		return false
	}
	r.greatest = token
	return true
}

// jump sets the clock of one server ahead, where it stops. What expires in between is gone.
func (s place) jump(server int, ahead time.Duration) {
	one := s.members.minis[server]
	one.SetTime(time.Now().Add(ahead))
	one.FastForward(ahead)
}

// Servers need not store a token that another one gave, because it is behind their clocks when the lease
// ends by itself. An operator ends it earlier.
func TestTokensGrowWhenAnOwnerIsEvictedThatTheFastestClockGaveItsToken(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.SetTime(time.Now()) // where it stops
		}
		servers[0].SetTime(time.Now().Add(140 * time.Millisecond))
		first := ofThree(t, servers, open())
		servers[0].die()
		operator := open()
		must(t, forceUnlock(context.Background(), operator, "x"))
		next := lock(t, operator.Mutex("x"))
		if next.Token() <= first.Token() {
			t.Errorf("tokens %d, %d", first.Token(), next.Token())
		}
		unlock(t, next)
		isAll(t, first.Unlock(), leased.ErrLeaseLost)
	})
}

// scriptGate lets some scripts through, and holds up those that follow until it is opened.
type scriptGate struct {
	through atomic.Int32
	opened  chan struct{}
}

func (g *scriptGate) DialHook(next redis.DialHook) redis.DialHook { return next }

func (g *scriptGate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (g *scriptGate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") && g.through.Add(-1) < 0 {
			<-g.opened
		}
		return next(ctx, cmd)
	}
}

// The operator has looked at the lock, which was free, when somebody enters and is evicted.
func TestTokensGrowWhenAnOwnerIsEvictedThatEnteredMeanwhile(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.SetTime(time.Now()) // where it stops
		}
		servers[0].SetTime(time.Now().Add(140 * time.Millisecond))
		gate := &scriptGate{opened: make(chan struct{})}
		gate.through.Store(1000)
		operator := openHooked(t, servers, gate)
		if _, err := operator.Inspect(context.Background(), "x"); err != nil { // loads the script
			t.Fatal(err)
		}
		gate.through.Store(int32(len(servers)))
		evicted := make(chan error, 1)
		go func() { evicted <- forceUnlock(context.Background(), operator, "x") }()
		synctest.Wait()
		its := viewed(servers)
		for _, m := range its[3:] {
			m.slowBy(100 * time.Millisecond) // so the first three grant
		}
		first := lock(t, openMortals(t, its).Mutex("x"))
		for _, m := range its {
			m.die() // so the owner does not tell its token when it hears of the eviction
		}
		servers[0].die()
		close(gate.opened)
		must(t, <-evicted)
		next := lock(t, open().Mutex("x"))
		if next.Token() <= first.Token() {
			t.Errorf("token %d after %d", next.Token(), first.Token())
		}
		unlock(t, next)
	})
}

func TestAHolderThatPausesForLongerThanItsTTLIsRefusedByItsToken(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		const ttl = 10 * time.Second
		var r resource
		paused, wire := onLine(t, s, leased.WithTTL(ttl))
		late := lock(t, paused.Mutex("x"))
		if !r.write(late.Token()) {
			t.Fatal("the first write was refused")
		}
		waiter := locking(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
		wire.cut() // a process that stands still renews nothing
		began := time.Now()
		next := <-waiter
		if d := time.Since(began); d > ttl+time.Second {
			t.Errorf("the next owner came after %v", d)
		}
		if late.Context().Err() == nil {
			t.Error("the lease has not ended for the holder that paused")
		}
		if next.Token() <= late.Token() {
			t.Errorf("tokens %d, %d", late.Token(), next.Token())
		}
		if !r.write(next.Token()) {
			t.Error("the next owner's write was refused")
		}
		if r.write(late.Token()) { // it was on its way all the time
			t.Error("the late write was let in")
		}
		wire.mend()
		isAll(t, late.Unlock(), leased.ErrLeaseLost)
		unlock(t, next)
	})
}

func TestOneServersClockThatJumpsAheadEndsNoLease(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		const ttl = 10 * time.Second
		a, b := newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl))
		for _, server := range []int{0, 3} {
			l := lock(t, a.Mutex("x"))
			synctest.Wait()
			s.jump(server, time.Hour)
			for range 30 { // the lease ends at once there, and is renewed on the others
				if _, err := b.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
					t.Fatalf("two owners, when the clock of server %d has jumped: %v", server, err)
				}
				time.Sleep(time.Second)
			}
			if err := l.Context().Err(); err != nil {
				t.Fatalf("lost, though one clock alone has jumped: %v", context.Cause(l.Context()))
			}
			unlock(t, l)
			next := lock(t, b.Mutex("x"))
			if next.Token() <= l.Token() {
				t.Errorf("tokens %d, %d", l.Token(), next.Token())
			}
			unlock(t, next)
			s.members.minis[server].SetTime(time.Time{}) // set right, which is back
			after := lock(t, a.Mutex("x"))
			if after.Token() <= next.Token() {
				t.Errorf("when the clock is set right: tokens %d, %d", next.Token(), after.Token())
			}
			unlock(t, after)
		}
	})
}

func TestClocksOfAMajorityThatJumpLetTwoOwnUntilTheNextRenewal(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		var r resource
		a, b := newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl))
		first := lock(t, a.Mutex("x"))
		synctest.Wait()
		for server := range suiteMembers/2 + 1 {
			s.jump(server, time.Hour)
		}
		second, err := b.Mutex("x").TryLockContext(context.Background())
		if err != nil {
			t.Fatalf("a majority takes the lease for expired, and yet: %v", err)
		}
		if first.Context().Err() != nil {
			t.Error("the first lease has ended before anybody could know: say so in docs/redlock.md")
		}
		if second.Token() <= first.Token() || !r.write(second.Token()) || r.write(first.Token()) {
			t.Errorf("tokens %d, %d do not keep the first owner out", first.Token(), second.Token())
		}
		began := time.Now()
		<-first.Context().Done()
		if d := time.Since(began); d > ttl/3+time.Second {
			t.Errorf("two owned for %v", d)
		}
		isAll(t, context.Cause(first.Context()), leased.ErrLeaseLost)
		isAll(t, first.Unlock(), leased.ErrLeaseLost)
		if err := second.Context().Err(); err != nil {
			t.Errorf("the second lease was lost: %v", context.Cause(second.Context()))
		}
		unlock(t, second)
	})
}
