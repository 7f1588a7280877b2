//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// afterPromotion bounds what follows the promotion of a replica. By itself, go-redis reloads
// the slots only a minute after it last did.
const afterPromotion = 5 * time.Second

// While the master of their lock is dead or frozen, and until the others have promoted its
// replica, a holder renews, a waiter waits, and a newcomer asks.
func TestLocksOfAClusterGoOnSoonAfterAReplicaIsPromoted(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a failover of a Cluster; run it without -short")
	}
	t.Parallel()
	for what, strike := range map[string]func(in *redistest.Instance){
		"dead":   (*redistest.Instance).Kill,
		"frozen": (*redistest.Instance).Stop,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := redistest.NewCluster(t)
			strain := redistest.NewStrain(t)
			// go-redis reads the slots from a randomly chosen node, with a timeout of its own, 5 s by
			// default, and may choose the frozen node.
			prompt := func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled, o.ReadTimeout = true, time.Second }
			client := func() *leased.Client {
				return newClient(t, around.Cluster{ClusterClient: c.NewClient(t, prompt)}, "", leased.WithTTL(15*time.Second))
			}
			holder, waiter, newcomer := client(), client(), client()
			for _, one := range []*leased.Client{holder, waiter, newcomer} {
				mustUnlock(t, mustLock(t, one.Mutex("x")))
			}
			l := mustLock(t, holder.Mutex("x"))
			got := wait(within(t, time.Minute), waiter.Mutex("x"))
			queued(t, newcomer, "x", 1)
			old := c.Owner("x")
			if n := old.Client().Wait(t.Context(), 1, patience).Val(); n != 1 {
				t.Fatalf("%d replicas have the lock", n)
			}

			strike(old)
			c.AwaitOwner("x", old)
			promoted := time.Now()
			mustUnlock(t, mustLock(t, newcomer.Mutex("new{x}"))) // the hash tag puts it into the same slot
			if took := time.Since(promoted); took > afterPromotion+strain.Since(promoted) {
				t.Errorf("a newcomer locked %v after the promotion", took)
			}
			renewed := holder.Stats().Renewals
			eventually(t, "the holder renews at the new master", func() bool { return holder.Stats().Renewals > renewed })
			if err := l.Context().Err(); err != nil {
				t.Fatalf("the holder's lease ended: %v", context.Cause(l.Context()))
			}
			began := time.Now()
			mustUnlock(t, l)
			o := entered(t, got)
			if took := o.at.Sub(began); took > afterPromotion+strain.Since(began) {
				t.Errorf("the waiter entered %v after the release", took)
			}
			mustUnlock(t, o.lease)
			t.Logf("renewed %v after the promotion", began.Sub(promoted))
		})
	}
}

// The renewals of all masters' locks are due together. A master that is frozen answers none, and by
// default the others wait for 15 s before they promote its replica. Scripts that a server does not
// know have to be sent to it again, for which there must still be time.
func TestAFrozenMasterOfAClusterCostsNoLeaseAtTheOthers(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a TTL, and a Cluster each; run it without -short")
	}
	t.Parallel()
	for what, opts := range map[string][]leased.Option{
		"plain":    nil,
		"replicas": {leased.WithReplicas(1, 200*time.Millisecond)},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := redistest.NewCluster(t, "--cluster-node-timeout", "15000")
			const ttl = 6 * time.Second
			rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
			client := newClient(t, rdb, "", append(opts, leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))...)
			victim := c.Owner("x")
			frozen := mustLock(t, client.Mutex("x"))
			live := map[string]*leased.Lease{}
			healthy := map[*redistest.Instance]bool{}
			for i := 0; len(healthy) < 2 || len(live) < 4; i++ {
				name := fmt.Sprint("x", i)
				if at := c.Owner(name); at != victim {
					live[name] = mustLock(t, client.Mutex(name))
					healthy[at] = true
				}
			}
			for at := range healthy {
				if err := at.Client().ScriptFlush(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
			}

			victim.Stop()
			began := time.Now()
			for name, l := range live {
				eventually(t, "it is renewed a TTL later", func() bool {
					return l.TrustedUntil().After(began.Add(2*ttl)) || l.Context().Err() != nil
				})
				if l.Context().Err() != nil {
					t.Errorf("after %v, %s ended: %v", time.Since(began), name, context.Cause(l.Context()))
				}
			}
			if frozen.Context().Err() == nil {
				t.Error("the master was not frozen")
			}
		})
	}
}

// A master dies and no replica takes over. By default the whole Cluster then refuses commands; without full
// coverage, only the slots of the dead master are missing.
func TestAClusterWithoutFullCoverageLosesOnlyTheDeadMastersLeases(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds, and a Cluster each; run it without -short")
	}
	t.Parallel()
	for _, covers := range []string{"yes", "no"} {
		t.Run("cluster-require-full-coverage "+covers, func(t *testing.T) {
			t.Parallel()
			c := redistest.NewCluster(t, "--cluster-replica-no-failover", "yes", "--cluster-require-full-coverage", covers)
			const ttl = 6 * time.Second
			rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
			client := newClient(t, rdb, "", leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
			victim := c.Owner("x")
			dead := mustLock(t, client.Mutex("x"))
			live := map[string]*leased.Lease{}
			for i := 0; len(live) < 4; i++ {
				if name := fmt.Sprint("x", i); c.Owner(name) != victim {
					live[name] = mustLock(t, client.Mutex(name))
				}
			}
			began := time.Now()
			victim.Kill()
			for name, l := range live {
				eventually(t, "it is renewed two TTLs later, or lost", func() bool {
					return l.TrustedUntil().After(began.Add(3*ttl)) || l.Context().Err() != nil
				})
				if lost := l.Context().Err() != nil; lost != (covers == "yes") {
					t.Errorf("after %v, %s has ended: %v", time.Since(began), name, lost)
				}
			}
			if dead.Context().Err() == nil {
				t.Error("the lease of the dead master has not ended")
			}
		})
	}
}

// A client that may read from replicas is not redirected by a master that has become one, until a script
// writes. Renewals go out in pipelines, after which go-redis does not look for the new master.
func TestAfterAPlannedFailoverAClientThatReadsFromReplicasRenewsAtTheNewMaster(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds, and a Cluster each; run it without -short")
	}
	t.Parallel()
	for what, opts := range map[string][]leased.Option{
		"plain":    nil,
		"replicas": {leased.WithReplicas(1, time.Second)},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := redistest.NewCluster(t)
			strain := redistest.NewStrain(t)
			rdb := c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled, o.ReadOnly = true, true })
			client := newClient(t, rdb, "", append(opts, leased.WithTTL(6*time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))...)
			l := mustLock(t, client.Mutex("x"))
			c.Failover("x")
			failedOver := time.Now()
			renewed := client.Stats().Renewals
			eventually(t, "it is renewed twice, or lost", func() bool {
				return client.Stats().Renewals > renewed+1 || l.Context().Err() != nil
			})
			if l.Context().Err() != nil {
				t.Fatalf("the lease ended %v after the failover: %v", time.Since(failedOver), context.Cause(l.Context()))
			}
			began := time.Now()
			mustUnlock(t, mustLock(t, client.Mutex("other{x}")))
			if took := time.Since(began); took > afterPromotion+strain.Since(began) {
				t.Errorf("another lock of that node took %v", took)
			}
			mustUnlock(t, l)
		})
	}
}

// Of two clients of a Cluster, one holds a lock and the other waits for it. The waiter's inbox
// is on a different node than the lock, and that node becomes unusable.
func TestTheInboxOfAClusterLeavesANodeThatIsNoGood(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds, and a Cluster each; run it without -short")
	}
	t.Parallel()
	for what, strike := range map[string]func(c *redistest.Cluster, in *redistest.Instance){
		"dead":     func(_ *redistest.Cluster, in *redistest.Instance) { in.Kill() },
		"frozen":   func(_ *redistest.Cluster, in *redistest.Instance) { in.Stop() },
		"expelled": func(c *redistest.Cluster, in *redistest.Instance) { c.Expel(in) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := redistest.NewCluster(t)
			strain := redistest.NewStrain(t)
			prompt := func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true }
			prefix := what + ":" // a client of another test may have found its way here
			waiter := newClient(t, c.NewClient(t, prompt), prefix)
			mustUnlock(t, mustLock(t, waiter.Mutex("warm")))
			look := map[*redistest.Instance]*redis.Client{}
			for _, in := range c.Nodes {
				look[in] = in.Client()
			}
			var at *redistest.Instance
			var inbox string
			eventually(t, "its inbox is somewhere", func() bool {
				for _, in := range c.Nodes {
					if all := look[in].PubSubChannels(t.Context(), prefix+"leased:inbox:*").Val(); len(all) == 1 {
						at, inbox = in, all[0]
					}
				}
				return at != nil
			})
			listens := func(in *redistest.Instance) bool {
				return len(look[in].PubSubChannels(t.Context(), inbox).Val()) == 1
			}
			name := "x"
			for i := 0; c.Owner(prefix+name) == at; i++ {
				name = fmt.Sprint("x", i)
			}
			its := "its"
			for i := 0; c.Owner(its) != at; i++ {
				its = fmt.Sprint("its", i)
			}
			if what == "expelled" { // a master that serves slots cannot be expelled
				c.Failover(its)
			}
			holder := newClient(t, c.NewClient(t, prompt), prefix)
			l := mustLock(t, holder.Mutex(name))
			got := wait(within(t, time.Minute), waiter.Mutex(name))
			queued(t, holder, name, 1)
			t.Cleanup(func() { // before the clients are closed
				if t.Failed() {
					reportInboxes(t, c, inbox, at)
					t.Logf("the waiter's %+v; entered: %v", waiter.Stats(), len(got) > 0)
				}
			})
			asked := waiter.Stats().Commands
			eventually(t, "it looks again", func() bool { return waiter.Stats().Commands > asked })

			if !listens(at) {
				t.Fatal("its inbox has left the node before the strike")
			}
			began := time.Now()
			strike(c, at)
			eventually(t, "its inbox is elsewhere", func() bool {
				return slices.ContainsFunc(c.Nodes, func(in *redistest.Instance) bool { return in != at && listens(in) })
			})
			left := time.Since(began)
			// The waiter re-checks after 3 s at most, and waits one more second for the echo.
			if left > 6*time.Second+strain.Since(began) {
				t.Errorf("it left the node after %v", left)
			}
			t.Logf("it left the node after %v", left)
			if what != "expelled" { // while slots have no master, no node runs any command
				c.AwaitOwner(its, at)
				c.Settled()
			}
			unlocked := time.Now()
			mustUnlock(t, l)
			o := entered(t, got)
			if took := o.at.Sub(unlocked); took > time.Second+strain.Since(unlocked) {
				t.Errorf("a waiter entered %v after the release", took)
			}
			mustUnlock(t, o.lease)
		})
	}
}

// reportInboxes logs which nodes of a Cluster have that inbox, how each of them sees the others, and
// what all goroutines do.
func reportInboxes(t *testing.T, c *redistest.Cluster, inbox string, struck *redistest.Instance) {
	for _, in := range c.Nodes {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		channels, err := in.Client().PubSubChannels(ctx, "*").Result()
		t.Logf("%s, struck: %v, has its inbox: %v (%v), and sees\n%s",
			in.Addr, in == struck, slices.Contains(channels, inbox), err, in.Client().ClusterNodes(ctx).Val())
	}
	var stacks strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
	t.Log(stacks.String())
}

// A client of one server would be told forever that the lock's slot is elsewhere.
func TestAClientOfOneServerOfAClusterIsToldAtOnceThatItIsTheWrongKind(t *testing.T) {
	t.Parallel()
	cluster := redistest.NewCluster(t)
	name := "x"
	for cluster.Owner(name) == cluster.Owner("other") {
		name += "x"
	}
	client, err := leased.New(cluster.Owner("other").Client())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = client.Mutex(name).LockContext(ctx)
	if !errors.Is(err, leased.ErrNotAcquired) || ctx.Err() != nil || !strings.Contains(err.Error(), "redis.NewClusterClient") {
		t.Errorf("LockContext: %v", err)
	}
}
