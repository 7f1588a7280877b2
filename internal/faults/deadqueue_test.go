//go:build unix

package faults

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func init() { roles["waiter of a Cluster"] = waitInCluster }

// waitInCluster waits for x, until it is killed, in the Cluster whose nodes it was given.
func waitInCluster(a *actor) error {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: strings.Split(os.Getenv(addrVariable), ","), ClientName: connectionName(os.Getpid()),
		ContextTimeoutEnabled: true,
	})
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithTTL(deadTTL), leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	defer client.Close()
	l, err := client.Mutex("x").LockContext(context.Background())
	if err != nil {
		return err
	}
	say("locked")
	a.told()
	return l.Unlock()
}

const deadTTL = 30 * time.Second

// In a Cluster no subscriber count proves that a waiter is gone, so each dead waiter in turn is
// made owner, but for 2 s instead of for its TTL. x was the first lock they ever waited for.
func TestThreeWaitersKilledInAClustersQueueCostTheFourthSomeSeconds(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes a Cluster, and seconds; run it without -short")
	}
	c := redistest.NewCluster(t)
	var addrs []string
	for _, in := range c.Nodes {
		addrs = append(addrs, in.Addr)
	}
	client := func() *leased.Client {
		made := newClient(t, c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true }), "", leased.WithTTL(deadTTL))
		mustUnlock(t, mustLock(t, made.Mutex("warm")))
		return made
	}
	holder, fourth := client(), client()
	look := c.NewClient(t)
	l := mustLock(t, holder.Mutex("x"))
	var dead []*child
	for i := range 3 {
		dead = append(dead, spawn(t, "waiter of a Cluster", strings.Join(addrs, ","), "", deadTTL))
		eventually(t, fmt.Sprint(i+1, " wait"), func() bool {
			ids := look.ZRange(t.Context(), "x:{x}:queue", 0, -1).Val()
			return len(ids) == i+1 && strings.Contains(ids[i], ":p:")
		})
	}
	got := wait(within(t, time.Minute), fourth.Mutex("x"))
	queued(t, holder, "x", 4)
	var nodes []*redis.Client
	for _, in := range c.Nodes {
		nodes = append(nodes, in.Client())
	}
	for _, one := range dead {
		one.kill(nodes...)
	}

	strain, began := redistest.NewStrain(t), time.Now()
	mustUnlock(t, l)
	info, err := holder.Inspect(t.Context(), "x")
	if err != nil || len(info.Owners) != 1 || !strings.HasSuffix(info.Owners[0].Client, fmt.Sprintf(":%d", dead[0].cmd.Process.Pid)) {
		t.Errorf("the first dead waiter should have been made owner: %+v, %v", info, err)
	}
	o := entered(t, got)
	took := o.at.Sub(began)
	t.Logf("the fourth entered after %v", took)
	if took > 10*time.Second+strain.Since(began) {
		t.Errorf("the fourth entered after %v", took)
	}
	mustUnlock(t, o.lease)
	nothingLeft(t, holder, "x")
}

// A waiter that is alive confirms its grant, and then owns the lock for its full TTL.
func TestAHandOffInAClusterIsConfirmedAtOnce(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes a Cluster, and seconds; run it without -short")
	}
	c := redistest.NewCluster(t)
	var clients []*leased.Client
	for range 2 {
		made := newClient(t, c.NewClient(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true }), "", leased.WithTTL(deadTTL))
		mustUnlock(t, mustLock(t, made.Mutex("warm")))
		clients = append(clients, made)
	}
	look := c.NewClient(t)
	for what, call := range map[string]func(i int) func(context.Context) (*leased.Lease, error){
		"writer": func(i int) func(context.Context) (*leased.Lease, error) { return clients[i].Mutex("x").LockContext },
		"reader": func(i int) func(context.Context) (*leased.Lease, error) { return clients[i].RWMutex("x").RLockContext },
	} {
		l := mustLock(t, clients[0].Mutex("x"))
		got := calling(within(t, time.Minute), call(1))
		queued(t, clients[0], "x", 1)
		if ids := look.ZRange(t.Context(), "x:{x}:queue", 0, -1).Val(); len(ids) != 1 || !strings.Contains(ids[0], ":p:") {
			t.Fatalf("the queue is %q, want one id with a provisional proof", ids)
		}
		mustUnlock(t, l)
		o := entered(t, got)
		confirmed := func() bool {
			info, err := clients[0].Inspect(t.Context(), "x")
			return err == nil && len(info.Owners) == 1 && info.Owners[0].TTL > deadTTL/2
		}
		eventually(t, "its full TTL", confirmed)
		select {
		case <-o.lease.Context().Done():
			t.Fatalf("the lease of the %s ended: %v", what, context.Cause(o.lease.Context()))
		case <-time.After(3 * time.Second): // longer than a provisional grant lasts
		}
		if !confirmed() {
			t.Errorf("the %s does not own for its TTL", what)
		}
		mustUnlock(t, o.lease)
	}
	nothingLeft(t, clients[0], "x")
}
