package leased

import (
	"hash/fnv"
	"log/slog"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

func TestEachSubscriptionIsMadeAtAnotherMasterThanTheOneBefore(t *testing.T) {
	var masters [3]*redis.Client // none of which runs: which key is whose is made up
	for i, addr := range []string{"127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4"} {
		masters[i] = redis.NewClient(&redis.Options{Addr: addr})
		defer masters[i].Close()
	}
	rdb := around.Cluster{
		ClusterClient: redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}),
		Master: func(key string) (*redis.Client, error) {
			h := fnv.New32()
			_, _ = h.Write([]byte(key))
			return masters[h.Sum32()%3], nil
		},
	}
	defer rdb.Close()
	c, err := New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	same, seen := 0, map[string]bool{}
	for range 100 {
		before := c.inbox[0].node
		_ = c.inbox[0].newSubscription(t.Context()).Close()
		seen[c.inbox[0].node] = true
		if c.inbox[0].node == before {
			same++
		}
	}
	if same > 0 || len(seen) < 3 {
		t.Errorf("%d of 100 subscriptions at the same master again; at %v", same, seen)
	}
}

// Whoever knows that a replica has taken the place of its node does not wait for an echo.
func TestTheInboxLeavesANodeThatIsNoMasterAnyMore(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	c, err := New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for what, test := range map[string]struct {
		node    string
		masters []string
		want    bool
	}{
		"still a master":  {"a:1", []string{"b:1", "a:1"}, false},
		"replaced":        {"a:1", []string{"b:1", "c:1"}, true},
		"not a Cluster's": {"", []string{"b:1"}, false},
		"nobody knows":    {"a:1", nil, false},
	} {
		c.inbox[0].sub, c.inbox[0].broken, c.inbox[0].node = rdb.Subscribe(t.Context()), false, test.node
		c.inbox[0].cut = func() {}
		c.inbox[0].mastersAre(test.masters)
		if c.inbox[0].broken != test.want {
			t.Errorf("%s: left %v", what, c.inbox[0].broken)
		}
	}
}

func TestTheInboxSurvivesAPanicWhileItLooksForAMaster(t *testing.T) {
	rdb := around.Cluster{
		ClusterClient: redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}),
		Master:        func(string) (*redis.Client, error) { panic("a hook") }, // or a dialer, or ClusterSlots
	}
	defer rdb.Close()
	c, err := New(rdb, WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if sub := c.inbox[0].newSubscription(t.Context()); sub == nil {
		t.Error("no subscription")
	} else {
		_ = sub.Close()
	}
}

// What tells other processes that a client is gone depends on what its server is.
func TestTheProofInAnIDIsThatOfTheDeployment(t *testing.T) {
	node, cluster := redis.NewClient(&redis.Options{}), redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer node.Close()
	defer cluster.Close()
	for what, c := range map[string]struct {
		rdb  redis.UniversalClient
		want protocol.Proof
	}{
		"a node":                {node, protocol.Counted},
		"a node, inside":        {around.Node{Client: node}, protocol.Counted},
		"a Cluster":             {cluster, protocol.Provisionally},
		"a Cluster, inside":     {around.Cluster{ClusterClient: cluster}, protocol.Provisionally},
		"nothing that is known": {around.Any{UniversalClient: cluster}, protocol.Unproved},
	} {
		client, err := New(c.rdb)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		env := (*environment)(client)
		made := func() protocol.Proof {
			who, err := protocol.ParseID(env.NewRequest(protocol.Exclusive, 1e9, false, protocol.Origin{}).ID)
			if err != nil {
				t.Fatal(err)
			}
			return who.Proof
		}
		if p := made(); p != protocol.Unproved {
			t.Errorf("%s: %c before the inbox is confirmed", what, p)
		}
		if pending := env.InboxPending(); pending != (c.want != protocol.Unproved) {
			t.Errorf("%s: waits for its inbox: %v", what, pending)
		}
		client.inbox[0].hearing.State = lockstate.Joined
		if p := made(); p != c.want {
			t.Errorf("%s: %c, want %c", what, p, c.want)
		}
	}
}
