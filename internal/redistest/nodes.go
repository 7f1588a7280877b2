package redistest

import (
	"context"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// eachMaster calls f for every master behind rdb, one at a time.
func eachMaster(ctx context.Context, rdb redis.UniversalClient, f func(context.Context, redis.Cmdable) error) error {
	// go-redis asks all nodes at once; mu lets f do without a lock of its own.
	var mu sync.Mutex
	one := func(ctx context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		return f(ctx, node)
	}
	switch c := rdb.(type) {
	case *redis.ClusterClient:
		return c.ForEachMaster(ctx, one)
	case *redis.Ring:
		return c.ForEachShard(ctx, one)
	default:
		return f(ctx, rdb)
	}
}

// literal escapes s so that it matches only itself in a pattern of SCAN or PUBSUB CHANNELS.
func literal(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(s)
}
