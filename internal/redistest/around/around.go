// Package around has types such as users write around a client of go-redis. The tests share them,
// because a type that embeds a client gets some hundreds of methods, which cost the compiler more
// than a second for each such type. For the same reason they have a package to themselves: one
// with tests is compiled twice.
package around

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

// Node is a type around a client of one server. It has a function, so its values cannot
// be compared.
type Node struct {
	*redis.Client
	BeforeSubscribe   func() // if not nil
	BeforeWithTimeout func() // if not nil
}

// Subscribe is the client's, after BeforeSubscribe.
func (n Node) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	if n.BeforeSubscribe != nil {
		n.BeforeSubscribe()
	}
	return n.Client.Subscribe(ctx, channels...)
}

// WithTimeout is the client's, after BeforeWithTimeout.
func (n Node) WithTimeout(d time.Duration) *redis.Client {
	if n.BeforeWithTimeout != nil {
		n.BeforeWithTimeout()
	}
	return n.Client.WithTimeout(d)
}

// Cluster is a type around a client of a Cluster.
type Cluster struct {
	*redis.ClusterClient
	Master func(key string) (*redis.Client, error) // says whose a key is; nil leaves it to the client
}

// MasterForKey is Master or, if that is nil, the client's.
func (c Cluster) MasterForKey(ctx context.Context, key string) (*redis.Client, error) {
	if c.Master != nil {
		return c.Master(key)
	}
	return c.ClusterClient.MasterForKey(ctx, key)
}

// Ring is a type around a client of a Ring.
type Ring struct{ *redis.Ring }

// Any is a type that does not show what its client is.
type Any struct{ redis.UniversalClient }

// LikeCluster is a client of one server that is taken for a Cluster's.
type LikeCluster struct{ *redis.Client }

// Options returns what only a client of a Cluster returns.
func (LikeCluster) Options() *redis.ClusterOptions { return &redis.ClusterOptions{} }
