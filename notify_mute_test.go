package leased_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased"
)

// mute has the servers refuse to publish, as for a user of Redis without any channel.
func (s place) mute(t *testing.T) {
	t.Helper()
	s.Mini.SetPreHook(refuseToPublish)
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

// The clients of a quorum poll where a majority of its servers publishes nothing, and only there.
func TestAQuorumsClientPollsIfAMajorityPublishesNothing(t *testing.T) {
	for n, want := range map[int]string{2: "subscribed", 3: "polling"} {
		t.Run(want, func(t *testing.T) {
			onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
				m, out := newMeter(t), &logs{}
				owner, c := open(), open(leased.WithMeterProvider(m), out.option())
				confirmInboxes(t, owner, c)
				muteServers(servers[:n])
				theirs := lock(t, owner.Mutex("x"))
				mine := locking(t, c.Mutex("x"))
				time.Sleep(10 * time.Second)
				if got := sum(t, m.collect(t)["leased.clients"], "leased.inbox", want); got != 1 {
					t.Errorf("%d clients are %s", got, want)
				}
				if lines := out.count(slog.LevelWarn, "a server of the quorum does not let lock scripts publish"); lines != n {
					t.Errorf("%d servers: logged %q", n, out.messages())
				}
				unlock(t, theirs)
				unlock(t, <-mine)
			})
		})
	}
}

func TestAQuorumsIdleLockGoesToAnotherProcessThoughItPublishesNothing(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		const ttl = 6 * time.Second
		a, b := open(leased.WithTTL(ttl)), open(leased.WithTTL(ttl))
		confirmInboxes(t, a, b)
		muteServers(servers)
		unlock(t, lock(t, a.Mutex("x", leased.WithIdleHold(time.Hour))))
		began := time.Now()
		unlock(t, lock(t, b.Mutex("x")))
		if waited := time.Since(began); waited > 20*time.Second+ttl {
			t.Errorf("the waiter got the idle lock after %v", waited)
		}
	})
}

// muteServers has some servers of a quorum refuse to publish.
func muteServers(servers []*mortal) {
	for _, m := range servers {
		m.Server().SetPreHook(refuseToPublish)
	}
}

func refuseToPublish(p *mini.Peer, cmd string, _ ...string) bool {
	if !strings.EqualFold(cmd, "PUBLISH") {
		return false
	}
	p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	return true
}
