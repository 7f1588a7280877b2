//go:build unix

package faults

import (
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Replication is asynchronous: what a primary has answered can be lost with it. This test shows
// the limit that docs/deployments.md names, and what is promised all the same: the old holder
// learns of the loss within a renewal period, and the next owner's token is greater, so a
// resource can tell the two apart.
func TestALockThatNoReplicaHadIsLostWithItsPrimaryAndTheNextTokenIsGreater(t *testing.T) {
	t.Parallel()
	n := newFixedName(t)
	strain := redistest.NewStrain(t)
	primary, replica := n.servers.Nodes[0], n.servers.Nodes[1]
	const ttl = 9 * time.Second // so that a third of it, a renewal period, is well before its end
	holder := n.client(leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
	next := n.client()
	mustUnlock(t, mustLock(t, holder.Mutex("x")))
	mustUnlock(t, mustLock(t, next.Mutex("x")))

	replica.Isolate()
	l := mustLock(t, holder.Mutex("x"))
	ended := watch(l)
	primary.Kill()
	replica.Promote()
	n.proxy.Lead(replica.Addr, redistest.KeepNone)
	began := time.Now()
	theirs := mustLock(t, next.Mutex("x"))
	if theirs.Token() <= l.Token() {
		t.Errorf("the next owner's token is %d, after %d", theirs.Token(), l.Token())
	}
	if took := lostAt(t, l, ended).Sub(began); took > ttl/3+slack+strain.Since(began) {
		t.Errorf("the holder learned of its loss after %v", took)
	}
	mustUnlock(t, theirs)
}

// A primary is cut off from its replica together with a holder, and the replica is promoted. By
// itself the old primary goes on renewing the lease, for as long as the holder reaches nothing else.
// There are two ways to have that end, and docs/deployments.md names both.
func TestAnOldPrimaryThatIsCutOffWithAHolderRenewsUntilItIsToldNotTo(t *testing.T) {
	const ttl = 2 * time.Second
	for _, c := range []struct {
		name    string
		primary []string        // arguments
		holder  []leased.Option // in addition
		ends    func(t *testing.T, cut time.Time, l *leased.Lease, ended <-chan time.Time, next outcome, late time.Duration)
	}{
		{"by itself", nil, nil,
			func(t *testing.T, _ time.Time, l *leased.Lease, _ <-chan time.Time, next outcome, _ time.Duration) {
				eventually(t, "two TTLs later, both hold leases", func() bool { return l.TrustedUntil().After(next.at.Add(3 * ttl)) })
			}},
		{"with min-replicas-to-write", []string{"--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"}, nil,
			func(t *testing.T, cut time.Time, l *leased.Lease, ended <-chan time.Time, _ outcome, late time.Duration) {
				// A replica acknowledges once a second, and the server counts whole seconds.
				if took := lostAt(t, l, ended).Sub(cut); took > 3*time.Second+ttl+late {
					t.Errorf("the lease ended %v after the cut", took)
				}
			}},
		{"with WithReplicas", nil, []leased.Option{leased.WithReplicas(1, 500*time.Millisecond)},
			func(t *testing.T, _ time.Time, l *leased.Lease, ended <-chan time.Time, next outcome, late time.Duration) {
				if at := lostAt(t, l, ended); at.Sub(next.at) > late {
					t.Errorf("the lease ended %v after the next owner had entered", at.Sub(next.at))
				}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			primary := redistest.Server(t, c.primary...)
			replica := redistest.Server(t)
			redistest.CheckLeaks(t, nil, "")
			between, name := redistest.NewProxy(t, primary.Addr), redistest.NewProxy(t, primary.Addr)
			host, port, _ := net.SplitHostPort(between.Addr)
			if err := replica.Client().Do(t.Context(), "REPLICAOF", host, port).Err(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the replica is in step", func() bool {
				n, err := primary.Client().Wait(t.Context(), 1, 100*time.Millisecond).Result()
				return n == 1 && err == nil
			})
			strain := redistest.NewStrain(t)
			rdb := redis.NewClient(redistest.Options(name.Addr))
			t.Cleanup(func() { _ = rdb.Close() })
			holder := newClient(t, rdb, "", append(c.holder, leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))...)
			others := newClient(t, replica.Client(), "")
			l := mustLock(t, holder.Mutex("x"))
			ended := watch(l)
			eventually(t, "the replica has the lock", func() bool { return replica.Client().Exists(t.Context(), "x").Val() == 1 })

			cut := time.Now()
			between.BlackHole()
			replica.Promote()
			next := entered(t, wait(within(t, patience), others.Mutex("x")))
			if next.lease.Token() <= l.Token() {
				t.Errorf("the next owner's token is %d, after %d", next.lease.Token(), l.Token())
			}
			c.ends(t, cut, l, ended, next, slack+strain.Since(cut))

			// Once the holder reaches the new primary, it learns of its loss in any case.
			name.Lead(replica.Addr, redistest.KeepNone)
			reached := time.Now()
			if at := lostAt(t, l, watch(l)); at.Sub(reached) > ttl/3+slack+strain.Since(reached) {
				t.Errorf("the holder learned of its loss %v after it reached the new primary", at.Sub(reached))
			}
			mustUnlock(t, next.lease)
		})
	}
}
