package leased_test

import (
	"context"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
)

func TestVirtualWithASubscriptionThatIsRefusedTheFirstLockIsWaitedForAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		s.Mini.Server().SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			if cmd != "SUBSCRIBE" {
				return false
			}
			time.Sleep(time.Millisecond) // after the first answer
			p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
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
