package leased_test

import (
	"context"
	"strings"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased"
)

// mute has the servers refuse to publish, as for a user of Redis without any channel.
func (s place) mute(t *testing.T) {
	t.Helper()
	if s.members != nil {
		t.Skip("the client of a quorum does not learn that nothing may be published")
	}
	s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
		if strings.EqualFold(cmd, "PUBLISH") {
			p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
			return true
		}
		return false
	})
}

// Nobody tells the owner that others wait. Once its own probe, after 20 s, has shown that nothing is
// published, it asks with each renewal.
func TestVirtualAnIdleLockGoesToAnotherProcessThoughNothingIsPublished(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 6 * time.Second
		a, b := newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl))
		warm(t, s, a, b)
		s.mute(t)
		unlock(t, lock(t, a.Mutex("x", leased.WithIdleHold(time.Hour))))
		began := time.Now()
		unlock(t, lock(t, b.Mutex("x")))
		if waited := time.Since(began); waited > 20*time.Second+ttl {
			t.Errorf("the waiter got the idle lock after %v", waited)
		}
	})
}

// Readers that overlap, in a process that has nothing to publish itself.
func TestVirtualAWriterEntersBetweenReadersThoughNothingIsPublished(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		warm(t, s, a, b)
		s.mute(t)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		for i := range 2 {
			go func() {
				defer func() { ended <- struct{}{} }()
				time.Sleep(time.Duration(i) * 50 * time.Millisecond)
				for ctx.Err() == nil {
					l := take(t, a.RWMutex("x").RLockContext)
					time.Sleep(100 * time.Millisecond)
					unlock(t, l)
				}
			}()
		}
		time.Sleep(time.Second)
		began := time.Now()
		unlock(t, take(t, b.RWMutex("x").LockContext))
		if waited := time.Since(began); waited > 40*time.Second {
			t.Errorf("the writer waited for %v", waited)
		}
		stop()
		<-ended
		<-ended
	})
}
