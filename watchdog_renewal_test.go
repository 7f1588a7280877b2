package leased_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/race"
)

// Hours of leases in milliseconds: the whole client on an embedded server, where
// time passes only while everybody waits, so that instants and counts are exact.

func TestVirtualALeaseOfThreeHoursIsRenewedEachThirdOfItsTTLAndNeverLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		began := time.Now()
		l := lock(t, c.Mutex("x"))
		work := l.Context()
		for range 1080 {
			time.Sleep(10*time.Second - time.Millisecond)
			before := c.Stats().Renewals
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if n := c.Stats().Renewals; n != before+1 || n != int64(time.Since(began)/(10*time.Second)) {
				t.Fatalf("%d renewals %v after the beginning, %d a moment before", n, time.Since(began), before)
			}
			if left := time.Until(l.TrustedUntil()); left != 30*time.Second-302*time.Millisecond {
				t.Fatalf("trusted for %v after a renewal", left)
			}
		}
		if work.Err() != nil || c.Stats().Lost != 0 {
			t.Errorf("lost: %v", context.Cause(work))
		}
		unlock(t, l)
	})
}

func TestVirtualAThousandLeasesOfMixedTTLsAreRenewedTogetherAndInTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var sent stamps
		c := clientOn(t, s, s.connect(t, onRoomyLines, func(o *redis.Options) { o.Limiter = &sent }))
		ttls := []time.Duration{3 * time.Second, 10 * time.Second, 30 * time.Second, time.Hour}
		var held []*leased.Lease
		n := 1000
		if testing.Short() {
			n = 200
		}
		if race.Enabled {
			n = 40
		}
		for i := range n {
			held = append(held, lock(t, c.Mutex("x"+strconv.Itoa(i), leased.WithTTL(ttls[i%4]))))
		}
		before, trips := c.Stats(), len(sent.all())
		time.Sleep(31*time.Second - 50*time.Millisecond) // many leave within a thirtieth of their TTL
		synctest.Wait()
		if renewals := c.Stats().Renewals - before.Renewals; renewals != int64(n)/4*(30+9+3) {
			t.Errorf("%d renewals", renewals)
		}
		// 30 + 9 instants, and three at which another quarter is due; a few more for
		// the script that the server did not know and for further connections. 50 leave together.
		each := (n/4 + 49) / 50
		if n := len(sent.all()) - trips; n < (30+9)*each || n > 50*each {
			t.Errorf("%d round trips", n)
		}
		for _, l := range held {
			if l.Context().Err() != nil {
				t.Fatal(context.Cause(l.Context()))
			}
			unlock(t, l)
		}
		if n := c.Stats().Lost; n != 0 {
			t.Errorf("%d lost", n)
		}
	})
}

// hanging is a hook that has commands of one name hang until their context ends, once since is closed
// if it is not nil.
type hanging struct {
	name  string
	since <-chan struct{}
	hung  atomic.Int32
}

func (h *hanging) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *hanging) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := h.wait(ctx, cmd); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

func (h *hanging) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := h.wait(ctx, cmds[len(cmds)-1]); err != nil {
			return err
		}
		return next(ctx, cmds)
	}
}

func (h *hanging) wait(ctx context.Context, cmd redis.Cmder) error {
	if cmd.Name() != h.name || h.since != nil && open(h.since) {
		return nil
	}
	h.hung.Add(1)
	<-ctx.Done()
	cmd.SetErr(ctx.Err())
	return ctx.Err()
}

// What follows a renewal may hang while it passes: the server froze in between, or
// its commands wait for a connection of another pool.
func TestVirtualWhatFollowsARenewalHoldsUpNoOutcome(t *testing.T) {
	for name, after := range map[string]time.Duration{
		"publish": 20 * time.Second,  // an echo is demanded
		"pexpire": 150 * time.Second, // the last token is kept alive
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true }) // hooks see all then
			hook := hanging{name: name}
			s.hook(rdb, &hook)
			c := clientOn(t, s, rdb, leased.WithTTL(30*time.Second))
			began := time.Now()
			kept, l := lock(t, c.Mutex("kept")), lock(t, c.Mutex("x"))
			work := l.Context()
			time.Sleep(after - time.Second)
			if n := hook.hung.Load(); n != 0 {
				t.Fatalf("%d times %s after %v", n, name, time.Since(began))
			}
			s.rdb.Del(context.Background(), "x")
			<-work.Done()
			if took := time.Since(began); took != after {
				t.Errorf("with a %s that hangs the loss was told after %v", name, took)
			}
			synctest.Wait()
			if n := s.share(int64(hook.hung.Load())); n != 1 {
				t.Errorf("%d times %s", n, name)
			}
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
			unlock(t, kept)
		})
	}
}
