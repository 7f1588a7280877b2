//go:build unix

package faults

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// When sentinels replace a primary, the holder keeps its lease, and the waiter's inbox leaves
// the old server within the time of a re-check and of the echo that it asks for. A frozen
// primary keeps its connections open, and go-redis stays on them.
func TestBehindSentinelTheInboxLeavesAPrimaryThatWasReplaced(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a failover by sentinels; run it without -short")
	}
	t.Parallel()
	for what, strike := range map[string]func(in *redistest.Instance){
		"dead":   (*redistest.Instance).Kill,
		"frozen": (*redistest.Instance).Stop,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.NewSentinels(t)
			strain := redistest.NewStrain(t)
			client := func() *leased.Client {
				o := s.FailoverOptions()
				o.ContextTimeoutEnabled = true
				rdb := redis.NewFailoverClient(o)
				t.Cleanup(func() { _ = rdb.Close() })
				return newClient(t, rdb, "", leased.WithTTL(15*time.Second))
			}
			holder, waiter := client(), client()
			l := mustLock(t, holder.Mutex("x"))
			got := wait(within(t, time.Minute), waiter.Mutex("x"))
			queued(t, holder, "x", 1)
			old := s.Primary()
			inboxesAt(t, old, 2)
			if n := old.Client().Wait(t.Context(), 2, patience).Val(); n != 2 {
				t.Fatalf("%d replicas have the lock", n)
			}

			strike(old)
			next := s.AwaitPrimary(old)
			promoted := time.Now()
			eventually(t, "the waiter's inbox is at the new primary", func() bool { return next.Subscribers() > 0 })
			left := time.Since(promoted)
			if left > 5*time.Second+strain.Since(promoted) {
				t.Errorf("an inbox arrived %v after the promotion", left)
			}
			t.Logf("an inbox arrived %v after the promotion", left)
			unlocked := time.Now()
			mustUnlock(t, l)
			o := entered(t, got)
			if took := o.at.Sub(unlocked); took > 4*time.Second+strain.Since(unlocked) {
				t.Errorf("the waiter entered %v after the release", took)
			}
			mustUnlock(t, o.lease)
		})
	}
}

// go-redis keeps asking the Sentinel that answered first. If that one hangs, a command that needs a new
// connection ends before go-redis asks the others, unless it reads from Sentinels for much less than the
// DialTimeout, as docs/deployments.md advises. Here, that Sentinel is on the primary's machine, which hangs.
func TestBehindSentinelAHungSentinelIsLeftForTheOthers(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a failover by sentinels; run it without -short")
	}
	t.Parallel()
	s := redistest.NewSentinels(t)
	strain := redistest.NewStrain(t)
	o := s.FailoverOptions()
	o.ContextTimeoutEnabled, o.ReadTimeout, o.MaxRetries = true, 2*time.Second, -1
	rdb := redis.NewFailoverClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	client := newClient(t, rdb, "", leased.WithLossHandler(func(leased.LossEvent) {}))
	l := mustLock(t, client.Mutex("x"))
	old := s.Primary()
	if n := old.Client().Wait(t.Context(), 2, patience).Val(); n != 2 {
		t.Fatalf("%d replicas have the lock", n)
	}
	var asked *redistest.Instance
	eventually(t, "the client has subscribed at a Sentinel", func() bool {
		for _, in := range s.Watchers {
			if strings.Contains(in.Client().ClientList(t.Context()).Val(), " cmd=subscribe ") {
				asked = in
			}
		}
		return asked != nil
	})

	asked.Stop()
	old.Stop()
	s.AwaitPrimary(old)
	promoted := time.Now()
	mustUnlock(t, mustLock(t, client.Mutex("y")))
	took := time.Since(promoted)
	if took > 15*time.Second+strain.Since(promoted) {
		t.Errorf("another lock was acquired %v after the promotion", took)
	}
	t.Logf("another lock was acquired %v after the promotion", took)
	renewed := client.Stats().Renewals
	eventually(t, "the lease is renewed, or lost", func() bool { return client.Stats().Renewals > renewed || l.Context().Err() != nil })
	mustUnlock(t, l)
}

// In a planned failover, the Sentinels demote the old primary some ten seconds after they have promoted the new one. A
// client that has not heard of that is granted locks there until then, and the others are granted the same ones. Here
// it only knows the old primary's address.
func TestBehindSentinelTheOldPrimaryOfAPlannedFailoverGrantsUntilItIsDemoted(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a failover by sentinels; run it without -short")
	}
	t.Parallel()
	for what, c := range map[string]struct {
		server  []string
		options []leased.Option
		refused string
	}{
		"as it is by default":   {},
		"WithReplicas":          {options: []leased.Option{leased.WithReplicas(1, 200*time.Millisecond)}, refused: "0 of 1 replicas had the grant"},
		"min-replicas-to-write": {server: []string{"--min-replicas-to-write", "1"}, refused: "NOREPLICAS"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.NewSentinels(t, c.server...)
			old := s.Primary()
			deaf := newClient(t, old.Client(), "", c.options...)
			mustUnlock(t, mustLock(t, deaf.Mutex("x")))
			s.PlannedFailover()
			s.AwaitPrimary(old)
			eventually(t, "the other replica follows the new primary", func() bool {
				return strings.Contains(old.Client().Info(t.Context(), "replication").Val(), "connected_slaves:0")
			})

			rdb := redis.NewFailoverClient(s.FailoverOptions())
			t.Cleanup(func() { _ = rdb.Close() })
			l := mustLock(t, newClient(t, rdb, "").Mutex("x"))
			second, err := deaf.Mutex("x").TryLockContext(within(t, time.Second))
			switch {
			case c.refused == "" && err != nil:
				t.Errorf("the old primary, which is not demoted yet, refused the lock: %v", err)
			case c.refused == "":
				mustUnlock(t, second)
			case err == nil:
				t.Error("the lock has two owners")
			case !strings.Contains(err.Error(), c.refused):
				t.Errorf("the old primary refused with %v", err)
			}
			mustUnlock(t, l)
			eventually(t, "the old primary is demoted", func() bool { return len(s.Replicas()) == 2 })
		})
	}
}
