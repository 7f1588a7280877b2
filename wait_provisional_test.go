package leased_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// inCluster makes a client whose waiters no count proves gone.
func inCluster(t *testing.T, s place) *leased.Client {
	c := clientOn(t, s, around.LikeCluster{Client: s.connect(t)})
	unlock(t, lock(t, c.Mutex("warm"))) // from here on its inbox is confirmed
	synctest.Wait()
	return c
}

func TestVirtualAHandOffWhereNoCountIsProofCostsOneCommandMore(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, proof := range []bool{true, false} {
			connect, want := newClient, int64(0)
			if !proof {
				connect, want = func(t *testing.T, s place, _ ...leased.Option) *leased.Client { return inCluster(t, s) }, 1
			}
			owner, waits := connect(t, s), connect(t, s)
			known := lock(t, waits.Mutex("x"))
			time.Sleep(15 * time.Second) // the server knows all scripts then
			unlock(t, known)
			synctest.Wait()
			l := lock(t, owner.Mutex("x"))
			next := locking(t, waits.Mutex("x"))
			synctest.Wait()
			before := s.commands(waits)
			unlock(t, l)
			got := <-next
			synctest.Wait()
			time.Sleep(5 * time.Second) // no more until the regular renewal
			if n := s.commands(waits) - before; n != want {
				t.Errorf("with proof %v: %d commands", proof, n)
			}
			if left := time.Until(got.TrustedUntil()); left < 20*time.Second {
				t.Errorf("with proof %v: believed for %v", proof, left)
			}
			unlock(t, got)
			synctest.Wait() // a majority of a quorum is enough for Unlock
			before = s.commands(waits)
			again := lock(t, waits.Mutex("x"))
			synctest.Wait() // else the last of a quorum's servers is asked once more, to cancel
			unlock(t, again)
			synctest.Wait()
			if n := s.commands(waits) - before; n != 2 {
				t.Errorf("with proof %v: an uncontended use took %d commands", proof, n)
			}
		}
	})
}

// The price: its TTL is 30 s.
func TestVirtualALeaseThatIsHandedOnWhereNoCountIsProofEndsSoonIfRedisDoesNotConfirmIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner, waits := inCluster(t, s), inCluster(t, s)
		l := lock(t, owner.Mutex("x"))
		next := locking(t, waits.Mutex("x"))
		synctest.Wait()
		var away atomic.Bool
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			if cmd == "PUBLISH" { // of the release
				away.Store(true)
			}
			if away.Load() && cmd == "EVALSHA" {
				p.WriteError("LOADING Redis is loading the dataset in memory")
				return true
			}
			return false
		})
		unlock(t, l)
		got := <-next
		began := time.Now()
		<-got.Context().Done()
		if took := time.Since(began); took < time.Second || took > 2*time.Second {
			t.Errorf("it ended after %v", took)
		}
		if cause := context.Cause(got.Context()); !errors.Is(cause, leased.ErrLeaseLost) {
			t.Errorf("it ended with %v", cause)
		}
		away.Store(false)
		s.Mini.SetPreHook(nil)
		isAll(t, got.Unlock(), leased.ErrLeaseLost)
	})
}
