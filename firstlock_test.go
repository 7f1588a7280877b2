package leased_test

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// What a client costs and misses with the first lock of its life, which it asks for
// before its inbox is confirmed.

func TestAWaiterThatDiesWaitingForItsFirstLockCostsItsSuccessorNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const ttl = time.Hour // patience is far less
		owner := newClient(t, s)
		l := lock(t, owner.Mutex("x"))
		var g gate
		dies, err := leased.New(s.connect(t, g.change), leased.WithKeyPrefix(s.Prefix), leased.WithTTL(ttl))
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
		g.shut.Store(true) // as good as dead: nobody subscribes for it any more
		g.cutInbox()
		eventually(t, "its inbox is gone", func() bool {
			return len(s.rdb.PubSubChannels(context.Background(), s.Prefix+"leased:inbox:*").Val()) == 2
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
			before := waits.Stats().Commands
			next := locking(t, waits.Mutex("x"))
			synctest.Wait()
			if n := waits.Stats().Commands - before; n > want+scripts(i) {
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
		next := locking(t, newClient(t, s).Mutex("x")) // which tells those who listen
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
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		return late{conn}, err
	}
}

func (c late) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) {
		time.Sleep(100 * time.Millisecond)
	}
	return c.Conn.Write(p)
}
