package redisserver

import (
	"context"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// twoNodes is a Cluster whose second node, locks, serves all locks. A message that is published
// without choosing a node goes to the first one.
type twoNodes struct {
	*redis.Client
	locks *redis.Client
}

func (n twoNodes) MasterForKey(context.Context, string) (*redis.Client, error) { return n.locks, nil }

func TestAnEchoIsPublishedByTheNodeThatServesTheLock(t *testing.T) {
	channels, locks := redistest.Mini(t), redistest.Mini(t)
	rdb := twoNodes{redistest.MiniClient(t, channels), redistest.MiniClient(t, locks)}
	ctx := t.Context()
	inbox := protocol.InboxChannel("", "me")
	sub := rdb.locks.Subscribe(ctx, inbox)
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	n, err := New(rdb, "").Echo(ctx, &k, inbox, "1")
	if err != nil || n != 1 {
		t.Errorf("%d receivers, %v", n, err)
	}
}

// A demoted primary has the inbox, and old connections: what it counts proves nothing.
func TestAnEchoOfADemotedPrimaryIsNoProof(t *testing.T) {
	first, second := redistest.Server(t), redistest.Server(t)
	ctx := t.Context()
	rdb := first.Client()
	defer rdb.Close()
	host, port, err := net.SplitHostPort(second.Addr)
	if err != nil {
		t.Fatal(err)
	}
	inbox := protocol.InboxChannel("", "me")
	sub := rdb.Subscribe(ctx, inbox)
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := New(rdb, "").Echo(ctx, &k, inbox, "1"); n != 1 || err != nil {
		t.Fatalf("%d receivers, %v", n, err)
	}
	if err := rdb.ReplicaOf(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := New(rdb, "").Echo(ctx, &k, inbox, "2"); err == nil {
		t.Errorf("%d receivers, and no error", n)
	}
}
