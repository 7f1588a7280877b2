package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A node of a Cluster that hangs must not hold up what needs only the others. So nothing here leaves
// it to go-redis which node to ask.

const (
	othersTime = 250 * time.Millisecond // for further servers to answer, once enough have
	slotsTime  = time.Second            // for reading the slots again
)

// connectCluster returns a client of a Cluster, with the nodes that answered, once one of them did.
func connectCluster(ctx context.Context, o *redis.UniversalOptions) (redis.UniversalClient, error) {
	addrs, err := awake(ctx, o)
	if err != nil {
		return nil, err
	}
	c := o.Cluster()
	// go-redis reads the slots from one of these that it chooses at random.
	c.Addrs = addrs
	// These policies have PING sent to all masters, and before the first command, go-redis reads them
	// from a node that it chooses at random.
	c.DisableRoutingPolicies = true
	return redis.NewClusterClient(c), nil
}

// awake asks all of the given nodes for the slots, and returns those that answer soon.
func awake(ctx context.Context, o *redis.UniversalOptions) ([]string, error) {
	var nodes []redis.UniversalClient
	for _, addr := range o.Addrs {
		one := *o
		one.Addrs, one.MaxRetries = []string{addr}, -1
		nodes = append(nodes, redis.NewClient(one.Simple()))
	}
	closeAll := sync.OnceFunc(func() {
		for _, node := range nodes {
			node.Close()
		}
	})
	defer closeAll()
	defer context.AfterFunc(ctx, closeAll)() // else a question to a node that hangs does not end before its deadline
	var found []string
	var failed error
	slots := func(ctx context.Context, rdb redis.UniversalClient) ([]redis.ClusterSlot, error) {
		return rdb.ClusterSlots(ctx).Result()
	}
	askServers(ctx, nodes, slots, func(a reply[[]redis.ClusterSlot]) (enough bool) {
		switch isReply := errors.As(a.err, new(redis.Error)); {
		case a.err == nil:
			found = append(found, o.Addrs[a.server])
		case isReply || failed == nil && ctx.Err() == nil: // an error of Redis says more than silence
			failed = a.err
		case failed == nil: // what a client says that was closed says nothing
			failed = ctx.Err()
		}
		return len(found) > 0
	})
	if len(found) > 0 {
		return found, nil
	}
	return nil, failed
}

// reach returns an error if the lock is on a node of a Cluster that does not answer.
func reach(ctx context.Context, rdb redis.UniversalClient, prefix, name string) error {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return nil // it has answered
	}
	keys, err := protocol.NewKeys(prefix, name)
	if err != nil {
		return nil //nolint:nilerr // whoever uses the name says what is wrong with it
	}
	node, err := cluster.MasterForKey(ctx, keys.Lock)
	if err != nil {
		return fmt.Errorf("no node of the Cluster has lock %q: %w", name, inPlainWords(err))
	}
	return answers(ctx, node, fmt.Sprintf("has lock %q", name))
}

// answers returns an error that says what a node of a Cluster does, if it is silent.
func answers(ctx context.Context, node *redis.Client, does string) error {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	if err := node.Ping(ctx).Err(); err != nil && !errors.As(err, new(redis.Error)) {
		return named{fmt.Errorf("no Redis at %s, which %s: %w", node.Options().Addr, does, inPlainWords(err))}
	}
	return nil
}

// masters returns the masters of a Cluster once all of them have answered, or the only server.
func masters(ctx context.Context, rdb redis.UniversalClient) ([]redis.Cmdable, error) {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return []redis.Cmdable{rdb}, nil
	}
	found, err := mastersOf(ctx, cluster)
	if err != nil {
		return nil, err
	}
	nodes, failures := make([]redis.Cmdable, len(found)), make([]error, len(found))
	var all sync.WaitGroup
	for i, node := range found {
		nodes[i] = node
		all.Go(func() { failures[i] = answers(ctx, node, "is a master of the Cluster") }) // waited for below
	}
	all.Wait()
	for _, err := range failures {
		if err != nil {
			return nil, err
		}
	}
	return nodes, nil
}

// mastersOf returns the masters of a Cluster, whether they answer or not.
func mastersOf(ctx context.Context, cluster *redis.ClusterClient) ([]*redis.Client, error) {
	// go-redis reads the slots again, from any node. If that one hangs, it takes the slots that it knows.
	ctx, cancel := context.WithTimeout(ctx, slotsTime)
	defer cancel()
	var mu sync.Mutex // guards nodes: ForEachMaster makes its calls concurrently
	var nodes []*redis.Client
	err := cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		nodes = append(nodes, node)
		return nil
	})
	if err == nil && len(nodes) == 0 {
		err = errors.New("the Cluster has no masters")
	}
	return nodes, err
}

// hello returns what a server says of itself: its mode and its role, among others. To ask with HELLO needs
// no right. Nothing is returned of a server that does not answer, or that wants an argument there, as those
// before Redis 6.2.
func hello(ctx context.Context, node *redis.Client) map[string]any {
	ask := redis.NewMapStringInterfaceCmd(ctx, "hello")
	_ = node.Process(ctx, ask) // which leaves nothing if it fails
	return ask.Val()
}

// isPart reports whether a server is one of several masters of a Cluster, or a replica of one. A server of
// which hello returns nothing counts as whole; so does a Cluster whose slots are all served by one master.
func isPart(ctx context.Context, node *redis.Client) bool {
	if hello(ctx, node)["mode"] != "cluster" {
		return false
	}
	slots, err := node.ClusterSlots(ctx).Result() //nolint:staticcheck // Redis before 7.0 has no CLUSTER SHARDS
	if err != nil {
		return true
	}
	masters := map[string]bool{}
	for _, s := range slots {
		if len(s.Nodes) > 0 {
			masters[s.Nodes[0].ID] = true
		}
	}
	return len(masters) != 1
}
