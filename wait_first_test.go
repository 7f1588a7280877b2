package leased_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// What the first lock of a client costs, and which messages it misses: the client asks
// for it before its inbox is confirmed.

func TestAWaiterThatDiesWaitingForItsFirstLockCostsItsSuccessorNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const ttl = time.Hour // patience is far less
		var g gate
		// Not in a Cluster, where no count proves that the dead is gone: it is made owner.
		way := s.connect(t, g.change)
		owner := newClient(t, s)
		l := lock(t, owner.Mutex("x"))
		dies, err := s.open(t, way, leased.WithKeyPrefix(s.Prefix), leased.WithTTL(ttl))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var entered atomic.Bool
		over := make(chan struct{})
		go func() { // ended by cancel, waited for through over
			defer close(over)
			if l, err := dies.Mutex("x").LockContext(ctx); err == nil {
				entered.Store(true)
				_ = l.Unlock()
			}
		}()
		s.queued(t, "x", 1)
		next := locking(t, newClient(t, s).Mutex("x"))
		s.queued(t, "x", 2)
		g.shut.Store(true) // as good as dead: it can no longer subscribe
		g.cutInbox()
		eventually(t, "its inbox is gone", func() bool {
			return len(s.inboxes(t)) == 2 && (s.members == nil || s.members.listen() == 2)
		})
		unlock(t, l)
		l = closesSoon(t, "the successor enters", next)
		if entered.Load() {
			t.Error("the dead was made owner: a process that had died would be so for a TTL")
		}
		cancel()
		<-over
		unlock(t, l)
		close(g.open)
		if err := dies.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestVirtualTheFirstLockOfAClientCostsOneMoreCommandIfItIsTakenAndNoneThereafter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner, waits := newClient(t, s), newClient(t, s)
		for i, want := range []int64{2, 1, 1} {
			l := lock(t, owner.Mutex("x"))
			before := s.commands(waits)
			next := locking(t, waits.Mutex("x"))
			synctest.Wait()
			if n := s.commands(waits) - before; n > want+scripts(i) {
				t.Errorf("wait %d took %d commands", i, n)
			}
			unlock(t, l)
			unlock(t, <-next)
		}
	})
}

// scripts is how many commands a client sends in vain at first, for the server does not
// know its scripts.
func scripts(i int) int64 {
	if i == 0 {
		return 1
	}
	return 0
}

func TestVirtualAnOwnerThatHasJustStartedHearsThatItIsWanted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		starts := clientOn(t, s, s.connect(t, lateInbox), leased.WithLocalHandoffs(1, 0))
		l := lock(t, starts.Mutex("x"))
		next := locking(t, newClient(t, s).Mutex("x")) // which notifies subscribed owners
		mine := locking(t, starts.Mutex("x"))
		time.Sleep(500 * time.Millisecond)
		unlock(t, l) // before a tenure of 1 s, that ends in any case
		select {
		case l := <-next:
			unlock(t, l)
			unlock(t, <-mine)
		case l := <-mine:
			t.Error("it kept the lock for its own caller")
			unlock(t, l)
			unlock(t, <-next)
		}
	})
}

// late is a connection on which SUBSCRIBE takes its time.
type late struct{ net.Conn }

func lateInbox(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn { return late{conn} })
}

func (c late) Write(p []byte) (int, error) {
	if subscribes(p) {
		time.Sleep(100 * time.Millisecond) // of virtual time: what makes it late
	}
	return c.Conn.Write(p)
}

func TestVirtualWithASubscriptionThatIsRefusedTheFirstLockIsWaitedForAtOnce(t *testing.T) {
	firstSubscription(t, func(p *mini.Peer) {
		p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	})
}

func TestVirtualWithASubscriptionThatIsRefusedByCuttingItOffTheFirstLockIsWaitedForAtOnce(t *testing.T) {
	firstSubscription(t, func(p *mini.Peer) { p.Close() })
}

// firstSubscription has each SUBSCRIBE answered so, and the first lock of a client be
// waited for.
func firstSubscription(t *testing.T, answer func(p *mini.Peer)) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			if cmd != "SUBSCRIBE" {
				return false
			}
			time.Sleep(time.Millisecond) // after the first answer
			answer(p)
			return true
		})
		next := locking(t, newClient(t, s).Mutex("x"))
		time.Sleep(10 * time.Millisecond)
		queue, _, _, _ := s.helperKeys("x")
		if n := s.rdb.ZCard(context.Background(), queue).Val(); n != 1 {
			t.Errorf("%d wait", n)
		}
		unlock(t, l)
		unlock(t, <-next)
	})
}
