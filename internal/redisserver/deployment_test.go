package redisserver

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// known is what the rest of the library asks about a client.
type known struct {
	kind                                                Kind
	masters, slots, own, bounded, sentinel, canBeCloned bool
	proof                                               protocol.Proof
	addr                                                string
	reads                                               time.Duration
}

// The timeout of a user who has set a shorter one than a command takes is kept.
func TestACloneWaitsNoLongerThanTheClientAndThanACommandTakes(t *testing.T) {
	for set, want := range map[time.Duration]time.Duration{
		300 * time.Millisecond: 300 * time.Millisecond,
		time.Hour:              protocol.CommandTimeout,
		-1:                     protocol.CommandTimeout, // for no limit
	} {
		rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ReadTimeout: set})
		defer rdb.Close()
		if clone, _ := DeploymentOf(rdb).withContexts(); clone.ReadTimeout != want {
			t.Errorf("with %v, the clone waits %v, want %v", set, clone.ReadTimeout, want)
		}
	}
}

func TestWhatIsKnownAboutEachKindOfRedisClient(t *testing.T) {
	const at = "127.0.0.1:1"
	node := redis.NewClient(&redis.Options{Addr: at, ReadTimeout: time.Second})
	bounded := redis.NewClient(&redis.Options{Addr: at, ReadTimeout: time.Second, ContextTimeoutEnabled: true})
	noDeadlines := redis.NewClient(&redis.Options{Addr: at, ReadTimeout: -2, ContextTimeoutEnabled: true}) // go-redis keeps -2 as -1
	sentinel := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{at}, ReadTimeout: time.Second})
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{at}, ReadTimeout: time.Second, ContextTimeoutEnabled: true})
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": at}})
	for what, c := range map[string]struct {
		rdb  redis.UniversalClient
		want known
	}{
		"one node":                   {node, known{kind: OneNode, own: true, canBeCloned: true, proof: protocol.Counted, addr: at, reads: time.Second}},
		"one node, bounded":          {bounded, known{kind: OneNode, own: true, canBeCloned: true, bounded: true, proof: protocol.Counted, addr: at, reads: time.Second}},
		"one node without deadlines": {noDeadlines, known{kind: OneNode, own: true, canBeCloned: true, proof: protocol.Counted, addr: at, reads: -1}},
		"one node, inside":           {around.Node{Client: bounded}, known{kind: OneNode, canBeCloned: true, bounded: true, proof: protocol.Counted, addr: at, reads: time.Second}},
		"Sentinel":                   {sentinel, known{kind: OneNode, own: true, canBeCloned: true, sentinel: true, proof: protocol.Counted, addr: failoverAddr, reads: time.Second}},
		"a Cluster":                  {cluster, known{kind: Cluster, masters: true, slots: true, bounded: true, proof: protocol.Provisionally, reads: time.Second}},
		"a Cluster, inside":          {around.Cluster{ClusterClient: cluster}, known{kind: Cluster, masters: true, slots: true, bounded: true, proof: protocol.Provisionally, reads: time.Second}},
		"like a Cluster":             {around.LikeCluster{Client: node}, known{kind: Cluster, proof: protocol.Provisionally}},
		"a Ring":                     {ring, known{kind: Ring, proof: protocol.Unproved}},
		"a Ring, inside":             {around.Ring{Ring: ring}, known{kind: Ring, proof: protocol.Unproved}},
		"any":                        {around.Any{UniversalClient: node}, known{proof: protocol.Unproved}},
	} {
		defer c.rdb.Close()
		d := DeploymentOf(c.rdb)
		got := known{d.Kind, d.Masters != nil, d.Slots != nil, d.Own != nil, d.Bounded, d.FollowsSentinel(), d.cloner != nil, d.Proof(), d.Addr(), d.ReadTimeout}
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", what, got, c.want)
		}
		bound, cloned := d.withContexts()
		if want := got.own && got.reads >= 0; cloned != want || bound.Bounded != (want || got.bounded) {
			t.Errorf("%s: cloned %v, bounded %v", what, cloned, bound.Bounded)
		}
	}
}
