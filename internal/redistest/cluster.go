package redistest

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	slots   = 16384
	masters = 3
)

// Cluster is three masters with one replica each, on real servers. A master that has not
// been heard of for 1.5 s is replaced by its replica.
type Cluster struct {
	// Nodes lists the original masters first, then their replicas in the same order.
	Nodes []*Instance

	tb testing.TB
}

// NewCluster starts a cluster and returns once every slot is served and every replica is
// in sync with its master; before that, no replica could be promoted. The arguments are
// appended to the command line of each node.
func NewCluster(tb testing.TB, args ...string) *Cluster {
	tb.Helper()
	program := need(tb)
	c := &Cluster{tb: tb}
	for range 2 * masters {
		c.Nodes = append(c.Nodes, startFor(tb, plan{program: program, dir: tb.TempDir(), port: clusterPort, args: func(port int) ([]string, error) {
			own := append(usualArgs(port), "--cluster-enabled", "yes", "--cluster-node-timeout", "1500",
				"--repl-diskless-sync-delay", "0", "--cluster-allow-replica-migration", "no")
			return append(own, args...), nil
		}}))
	}
	first := c.Nodes[0]
	for i, in := range c.Nodes {
		if i < masters {
			share := []any{"CLUSTER", "ADDSLOTS"}
			for slot := i * slots / masters; slot < (i+1)*slots/masters; slot++ {
				share = append(share, slot)
			}
			in.mustAsk(share...)
			in.mustAsk("CLUSTER", "SET-CONFIG-EPOCH", i+1)
		}
		if in != first {
			host, port, _ := net.SplitHostPort(in.Addr)
			first.mustAsk("CLUSTER", "MEET", host, port)
		}
	}
	for i, in := range c.Nodes[masters:] {
		master := fmt.Sprint(c.Nodes[i].mustAsk("CLUSTER", "MYID"))
		await(tb, in.Addr+" knows its master", func() error {
			_, err := in.ask("CLUSTER", "REPLICATE", master)
			return err
		})
	}
	for _, in := range c.Nodes[masters:] {
		in.awaitSync()
	}
	c.settled(c.Nodes)
	return c
}

// Settled waits until all nodes that answer agree that every slot is served.
func (c *Cluster) Settled() {
	c.tb.Helper()
	var live []*Instance
	for _, in := range c.Nodes {
		if in.role() != "" {
			live = append(live, in)
		}
	}
	c.settled(live)
}

func (c *Cluster) settled(nodes []*Instance) {
	c.tb.Helper()
	for _, in := range nodes {
		await(c.tb, "the cluster is whole for "+in.Addr, func() error {
			reply, err := in.ask("CLUSTER", "INFO")
			if err != nil {
				return err
			}
			info := fmt.Sprint(reply)
			if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_slots_ok:"+strconv.Itoa(slots)) {
				return errors.New("state not ok")
			}
			all, err := in.clusterNodes()
			if err != nil {
				return err
			}
			replicas := 0
			for _, n := range all {
				if slices.Contains(n.flags, "handshake") {
					return errors.New("nodes are being met")
				}
				if slices.Contains(n.flags, "slave") {
					replicas++
				}
			}
			if len(all) != len(c.Nodes) || len(nodes) == len(c.Nodes) && replicas != masters {
				return fmt.Errorf("%d nodes, %d replicas", len(all), replicas)
			}
			return nil
		})
	}
}

// ClusterOptions returns fresh options for redis.NewClusterClient.
func (c *Cluster) ClusterOptions() *redis.ClusterOptions {
	o := &redis.ClusterOptions{
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	for _, in := range c.Nodes {
		o.Addrs = append(o.Addrs, in.Addr)
	}
	return o
}

// NewClient returns a new client whose options the given functions may change. It is closed
// in tb's cleanup.
func (c *Cluster) NewClient(tb testing.TB, change ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	o := c.ClusterOptions()
	for _, f := range change {
		f(o)
	}
	rdb := redis.NewClusterClient(o)
	tb.Cleanup(func() { _ = rdb.Close() }) // a test may have closed it already
	return rdb
}

// Slot returns the hash slot of a key.
func (c *Cluster) Slot(key string) int {
	c.tb.Helper()
	return c.slot(key, nil)
}

// slot returns the hash slot of a key without asking old, which may be frozen and slow to fail.
func (c *Cluster) slot(key string, old *Instance) int {
	c.tb.Helper()
	for _, in := range c.Nodes {
		if in == old {
			continue
		}
		if reply, err := in.ask("CLUSTER", "KEYSLOT", key); err == nil {
			return number(fmt.Sprint(reply))
		}
	}
	c.tb.Fatal("redistest: no node of the cluster answers")
	return -1
}

// Owner returns the master that, by its own account, serves the key. If that master is frozen,
// Owner waits until another one has taken its place.
func (c *Cluster) Owner(key string) *Instance {
	c.tb.Helper()
	return c.AwaitOwner(key, nil)
}

// AwaitOwner waits until a master other than old serves the key.
func (c *Cluster) AwaitOwner(key string, old *Instance) *Instance {
	c.tb.Helper()
	slot := c.slot(key, old)
	var found *Instance
	await(c.tb, fmt.Sprintf("a master for slot %d", slot), func() error {
		if found = c.master(slot, old); found == nil {
			return errors.New("nobody serves it")
		}
		return nil
	})
	return found
}

// master returns a master other than old that, by its own account, serves the slot, or nil.
func (c *Cluster) master(slot int, old *Instance) *Instance {
	for _, in := range c.Nodes {
		if in == old {
			continue
		}
		if me := in.self(); me != nil && slices.Contains(me.flags, "master") && me.serves(slot) {
			return in
		}
	}
	return nil
}

// Replica returns the replica of a master.
func (c *Cluster) Replica(master *Instance) *Instance {
	c.tb.Helper()
	id := fmt.Sprint(master.mustAsk("CLUSTER", "MYID"))
	for _, in := range c.Nodes {
		if me := in.self(); me != nil && me.master == id {
			return in
		}
	}
	c.tb.Fatalf("redistest: %s has no replica", master.Addr)
	return nil
}

// Failover performs a planned failover of the master that serves the key, which loses no
// write. It returns the new master once all nodes know of it. A replica that does not get the
// votes, because the masters have just voted for another one or are short of time, gives up
// after five seconds, so it is asked again.
func (c *Cluster) Failover(key string) *Instance {
	c.tb.Helper()
	const givesUp = 6 * time.Second
	old := c.Owner(key)
	next := c.Replica(old)
	slot := c.slot(key, nil)
	var asked time.Time
	await(c.tb, "CLUSTER FAILOVER", func() error {
		if c.master(slot, old) != nil {
			return nil
		}
		if time.Since(asked) < givesUp {
			return errors.New("nobody serves it")
		}
		_, err := next.ask("CLUSTER", "FAILOVER")
		if err == nil {
			asked = time.Now()
			err = errors.New("it has just been asked")
		}
		return err
	})
	old.awaitSync()
	c.Settled()
	return next
}

// AwaitReplica waits until a node that was replaced and is running again has caught up with
// its new master, and all nodes agree.
func (c *Cluster) AwaitReplica(in *Instance) {
	c.tb.Helper()
	in.awaitSync()
	c.Settled()
}

// Expel removes a node that serves no slots from the cluster. The node keeps running on its
// own, and the others forget it.
func (c *Cluster) Expel(in *Instance) {
	c.tb.Helper()
	id := in.mustAsk("CLUSTER", "MYID")
	in.mustAsk("CLUSTER", "RESET", "SOFT")
	for _, other := range c.Nodes {
		if other != in {
			other.mustAsk("CLUSTER", "FORGET", id)
		}
	}
}
