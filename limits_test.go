package leased_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

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
		if err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
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

func TestNewAndHandlesDoNoIO(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var dials atomic.Int32
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			direct := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				return direct(ctx, network, addr)
			}
		}))
		mu := c.Mutex("x")
		c.RWMutex("y").RLocker()
		time.Sleep(time.Hour)
		if n := dials.Load(); n != 0 {
			t.Errorf("%d connections before the first lock", n)
		}
		unlock(t, lock(t, mu))
		if dials.Load() == 0 {
			t.Error("no connection after it: nothing is shown")
		}
	})
}
