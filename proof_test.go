package leased

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

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
		"a node, inside":        {struct{ *redis.Client }{node}, protocol.Counted},
		"a Cluster":             {cluster, protocol.Provisionally},
		"a Cluster, inside":     {struct{ *redis.ClusterClient }{cluster}, protocol.Provisionally},
		"nothing that is known": {struct{ redis.UniversalClient }{cluster}, protocol.Unproved},
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
