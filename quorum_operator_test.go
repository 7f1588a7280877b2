package leased_test

// Inspect and ForceUnlock on a quorum, while its servers and the owners go on.

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// An operator who forces a lock must not take "2 of 5" for done.
func TestForceUnlockOnAQuorumTellsOnHowManyServersItEvicted(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c, operator := open(), open()
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second)
		for _, m := range servers[:3] {
			m.mu.Lock()
			m.dying = true
			m.mu.Unlock()
		}
		evicted, err := operator.ForceUnlock(context.Background(), "x")
		isAll(t, err, leased.ErrNoQuorum)
		if oneLine(t, err); !strings.Contains(err.Error(), "evicted on 2 of 5 servers: 2 of 5 servers answered, but 3 are needed") {
			t.Errorf("the error reads %q", err)
		}
		t.Log(err)
		if evicted != 0 {
			t.Errorf("with an error, ForceUnlock returned %d", evicted)
		}
		_, err = operator.Inspect(context.Background(), "x")
		isAll(t, err, leased.ErrNoQuorum)
		if oneLine(t, err); !strings.Contains(err.Error(), "2 of 5 servers answered, but 3 are needed") {
			t.Errorf("the error reads %q", err)
		}
		for _, m := range servers[:3] {
			m.mu.Lock()
			m.dying, m.dead = false, false
			m.mu.Unlock()
		}
		time.Sleep(5 * time.Second)
		if evicted, err := operator.ForceUnlock(context.Background(), "x"); evicted != 3 || err != nil {
			t.Errorf("ForceUnlock found an owner on %d servers: %v", evicted, err)
		}
		closesSoon(t, "the owner is told", l.Context().Done())
		_ = l.Unlock()
	})
}

// Servers that are slow for all are waited for: an operator forces a lock when something is wrong.
func TestAnOperatorWaitsForAMajorityOfSlowServers(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c, operator := open(), open()
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second)
		inspect := func(slow []*mortal, want time.Duration) {
			t.Helper()
			for _, m := range slow {
				m.slowBy(700 * time.Millisecond)
			}
			began := time.Now()
			info, err := operator.Inspect(context.Background(), "x")
			if err != nil || len(info.Owners) != 1 {
				t.Errorf("%+v, %v", info, err)
			}
			if took := time.Since(began); took != want {
				t.Errorf("it waited %v for %d slow servers, not %v", took, len(slow), want)
			}
			time.Sleep(3 * time.Second)
		}
		inspect(nil, 0)
		inspect(servers[:2], 500*time.Millisecond)
		inspect(servers, 700*time.Millisecond)
		must(t, forceUnlock(context.Background(), operator, "x"))
		for _, m := range servers {
			m.slowBy(0)
		}
		closesSoon(t, "the owner is told", l.Context().Done())
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

// A client that is closed ends what an operator has asked. The operator's context has not ended.
func TestAnOperatorIsToldThatTheClientWasClosedMeanwhile(t *testing.T) {
	for what, call := range map[string]func(*leased.Client) error{
		"Inspect":     func(c *leased.Client) error { _, err := c.Inspect(context.Background(), "x"); return err },
		"ForceUnlock": func(c *leased.Client) error { return forceUnlock(context.Background(), c, "x") },
	} {
		t.Run(what, func(t *testing.T) {
			onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
				c := open()
				must(t, call(c))
				for _, m := range servers {
					m.slowBy(time.Second)
				}
				failed := make(chan error, 1)
				go func() { failed <- call(c) }()
				synctest.Wait()
				must(t, c.Close())
				err := <-failed
				isAll(t, err, leased.ErrClosed, leased.ErrNoQuorum)
				if errors.Is(err, context.Canceled) {
					t.Errorf("as if its context had ended: %v", err)
				}
			})
		})
	}
}

func TestForceUnlockOnAQuorumThatSucceedsTellsHowManyServersHadAnOwner(t *testing.T) {
	onMortals(t, func(t *testing.T, _ []*mortal, open func(...leased.Option) *leased.Client) {
		c, operator := open(), open()
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second)
		for _, want := range []int{5, 0} { // the second time nobody owns it
			if evicted, err := operator.ForceUnlock(context.Background(), "x"); evicted != want || err != nil {
				t.Errorf("an owner on %d servers, want %d: %v", evicted, want, err)
			}
			time.Sleep(time.Second)
		}
		_ = l.Unlock()
	})
}

// The evicted owner, which hears of it, gives back what it has left. That lets the next one in,
// which the operator does not mean.
func TestForceUnlockOnAQuorumLeavesTheNextOwnerAlone(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		l := lock(t, open().Mutex("x"))
		waiter := locking(t, open().Mutex("x"))
		time.Sleep(time.Second)
		own := viewed(servers)
		operator := openMortals(t, own)
		for _, m := range own[3:] {
			m.slowBy(200 * time.Millisecond)
		}
		if _, err := operator.ForceUnlock(context.Background(), "x"); err != nil {
			t.Error(err)
		}
		next := <-waiter
		closesSoon(t, "the owner is told", l.Context().Done())
		time.Sleep(time.Second)
		stands(t, operator, 5, 5)
		if err := next.Context().Err(); err != nil {
			t.Errorf("the next lease is lost: %v", context.Cause(next.Context()))
		}
		unlock(t, next)
		_ = l.Unlock()
	})
}

// What was unlocked after the operator had looked was not taken from anybody.
func TestForceUnlockOnAQuorumDoesNotCountOwnersThatUnlockMeanwhile(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		inspect(t, c, "x") // the servers run from now on
		for _, m := range s.members.minis {
			must(t, m.Set("x", "foreign"))
			m.Server().SetPreHook(func(_ *mini.Peer, cmd string, args ...string) bool {
				if strings.HasPrefix(cmd, "EVAL") && (args[0] == redisserver.EvictScript.Sha || args[0] == redisserver.EvictScript.Text) {
					m.Del("x")
				}
				return false
			})
		}
		if evicted, err := c.ForceUnlock(context.Background(), "x"); evicted != 0 || err != nil {
			t.Errorf("evicted on %d servers: %v", evicted, err)
		}
	})
}

// A server that is slower than a majority may have another owner, which the operator does not mean.
func TestForceUnlockOnAQuorumLeavesAnotherOwnerOfASlowServerAlone(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		must(t, servers[4].Set("x", "another"))
		l := lock(t, open().Mutex("x"))
		own := viewed(servers)
		operator := openMortals(t, own)
		own[4].slowBy(700 * time.Millisecond)
		must(t, forceUnlock(context.Background(), operator, "x"))
		closesSoon(t, "the owner is told", l.Context().Done())
		time.Sleep(5 * time.Second)
		if got, _ := servers[4].Get("x"); got != "another" {
			t.Errorf("its owner is %q now", got)
		}
		_ = l.Unlock()
	})
}

// forcing has an operator force the lock x, and returns when the operator has looked at it. The operator
// continues once the gate is opened.
func forcing(t *testing.T, servers []*mortal) (gate *scriptGate, operator *leased.Client, forced chan error) {
	t.Helper()
	gate = &scriptGate{opened: make(chan struct{})}
	gate.through.Store(1000)
	operator = openHooked(t, servers, gate)
	_, err := operator.Inspect(context.Background(), "x") // loads the script
	must(t, err)
	gate.through.Store(int32(len(servers)))
	forced = make(chan error, 1)
	go func() { forced <- forceUnlock(context.Background(), operator, "x") }()
	synctest.Wait()
	return gate, operator, forced
}

func TestForceUnlockOnAQuorumEvictsAnOwnerThatBecomesAReaderMeanwhile(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		l, err := open().RWMutex("x").LockContext(context.Background())
		must(t, err)
		time.Sleep(time.Second)
		gate, operator, forced := forcing(t, servers)
		must(t, l.Downgrade(context.Background()))
		synctest.Wait()
		close(gate.opened)
		must(t, <-forced)
		time.Sleep(time.Second)
		if l.Context().Err() == nil {
			info, err := operator.Inspect(context.Background(), "x")
			t.Errorf("the lease goes on: %+v, %v", info.Owners, err)
		}
		_ = l.Unlock()
	})
}

func TestForceUnlockOnAQuorumEndsAMinimumHoldWhoseOwnerUnlocksMeanwhile(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		l, err := open().Mutex("x", leased.WithMinHold(time.Hour)).LockContext(context.Background())
		must(t, err)
		time.Sleep(time.Second)
		gate, operator, forced := forcing(t, servers)
		must(t, l.Unlock())
		synctest.Wait()
		close(gate.opened)
		must(t, <-forced)
		next, err := operator.Mutex("x").TryLockContext(context.Background())
		if err != nil {
			t.Fatalf("it is not free: %v", err)
		}
		must(t, next.Unlock())
	})
}

// Servers that had no owner when the operator looked may grant the lease right after the eviction. If the
// operator counted them, the owner could go on with them, and hear nothing.
func TestForceUnlockOnAQuorumDoesNotCountServersThatHadNoOwner(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		its, own := viewed(servers), viewed(servers)
		for _, m := range its[3:] {
			m.slowBy(300 * time.Millisecond)
		}
		l := lock(t, openMortals(t, its).Mutex("x"))
		gate, _, forced := forcing(t, own)
		time.Sleep(time.Second) // the slow servers grant it
		for _, m := range servers {
			m.Server().SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
				if cmd == "PUBLISH" {
					p.WriteInt(0)
				}
				return cmd == "PUBLISH"
			})
		}
		own[0].die()
		close(gate.opened)
		err := <-forced
		time.Sleep(20 * time.Second) // two renewals
		if goesOn := l.Context().Err() == nil; goesOn == (err == nil) {
			t.Errorf("the lease goes on: %v, and ForceUnlock returned %v", goesOn, err)
		}
		_ = l.Unlock()
	})
}

// blockedScripts is a hook whose scripts block until the channel is closed.
type blockedScripts chan struct{}

func (blockedScripts) DialHook(next redis.DialHook) redis.DialHook { return next }

func (blockedScripts) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (b blockedScripts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			<-b
		}
		return next(ctx, cmd)
	}
}

func TestAnOperatorOfAQuorumDoesNotWaitForHooksThatBlock(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		blocked := make(blockedScripts)
		operator := openHooked(t, servers, blocked)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		began := time.Now()
		_, err := operator.Inspect(ctx, "x")
		isAll(t, err, leased.ErrNoQuorum)
		if took := time.Since(began); took != 2500*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		close(blocked)
		synctest.Wait()
	})
}

// An empty value is a foreign owner's like any other, and no script can be asked for it.
func TestForceUnlockOnAQuorumDeletesAKeyWithAnEmptyValue(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		for _, m := range servers {
			must(t, m.Set("x", ""))
		}
		if info, err := c.Inspect(context.Background(), "x"); err != nil || len(info.Owners) != 1 || info.Owners[0].Value != `""` {
			t.Errorf("Inspect: %+v, %v", info, err)
		}
		if evicted, err := c.ForceUnlock(context.Background(), "x"); evicted < 3 || err != nil {
			t.Errorf("ForceUnlock found an owner on %d servers: %v", evicted, err)
		}
		left := 0
		for _, m := range servers {
			if m.Exists("x") {
				left++
			}
		}
		if left > 2 {
			t.Errorf("%d servers still have the key", left)
		}
	})
}
