package redisserver

import (
	"context"
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
