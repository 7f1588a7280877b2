package redisserver

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Deployment is a Redis client, and what is known about where it leads. All that depends on the kind of a
// client is decided here, once, by DeploymentOf: the rest of the library looks at the fields. A client of a
// user's own type is known by its methods, which it has if it embeds one of go-redis's.
type Deployment struct {
	Rdb  redis.UniversalClient
	Kind Kind

	Masters Masters       // finds the node that has a key; nil where one node has all, or that is not known
	Slots   Slots         // the client's map of slots; nil where there are none
	Visitor Visitor       // visits all masters; nil where one node has all, or that is not known
	Own     *redis.Client // Rdb, if it is a client of one node and has go-redis's own type; else nil

	// ReadTimeout is that of the client. It is less than 0 if -2 was set, because connections know no
	// deadlines, and 0 if -1 was set, for no limit, or if it is not known.
	ReadTimeout time.Duration
	// DialTimeout is that of the client, 0 if it is not known.
	DialTimeout time.Duration
	// Bounded is whether a command is known to end when its context does.
	Bounded bool

	options *redis.Options // of a client of one node; else nil
	cloner  cloner         // nil if there is no way to clone the client of one node
}

// Kind is a kind of Redis client.
type Kind uint8

const (
	UnknownKind Kind = iota // nothing is known about a type of the user's
	OneNode                 // of one node, also of one behind Sentinel
	Cluster
	Ring
)

// Masters is a *redis.ClusterClient, or a type that embeds one.
type Masters interface {
	MasterForKey(ctx context.Context, key string) (*redis.Client, error)
}

// Slots is a *redis.ClusterClient, or a type that embeds one. It does one reload after another.
type Slots interface{ ReloadState(context.Context) }

// Visitor is a *redis.ClusterClient, or a type that embeds one. Each visit begins with a reload of the slots
// of its own.
type Visitor interface {
	ForEachMaster(context.Context, func(context.Context, *redis.Client) error) error
}

// cloner is a *redis.Client, or a type that embeds one. The clones that it makes have neither its hooks
// nor its Limiter, which would see many failures at once.
type cloner interface {
	WithTimeout(time.Duration) *redis.Client
}

// DeploymentOf returns what is known about rdb, which must not be nil. The kind of a client is that of its
// method Options.
func DeploymentOf(rdb redis.UniversalClient) Deployment {
	d := Deployment{Rdb: rdb}
	d.Masters, _ = rdb.(Masters)
	d.Slots, _ = rdb.(Slots)
	d.Visitor, _ = rdb.(Visitor)
	d.Own, _ = rdb.(*redis.Client)
	switch c := rdb.(type) {
	case interface{ Options() *redis.Options }:
		o := c.Options()
		d.Kind, d.options, d.ReadTimeout, d.DialTimeout = OneNode, o, o.ReadTimeout, o.DialTimeout
		d.Bounded = o.ContextTimeoutEnabled && takesDeadlines(o.ReadTimeout, o.WriteTimeout)
		d.cloner, _ = rdb.(cloner)
	case interface{ Options() *redis.ClusterOptions }:
		o := c.Options()
		d.Kind, d.ReadTimeout, d.DialTimeout = Cluster, o.ReadTimeout, o.DialTimeout
		d.Bounded = o.ContextTimeoutEnabled && takesDeadlines(o.ReadTimeout, o.WriteTimeout)
	case interface{ Options() *redis.RingOptions }:
		d.Kind = Ring
	}
	return d
}

// takesDeadlines reports whether a client's connections do: -2 is set for those that know no deadlines, and
// then a context bounds nothing either.
func takesDeadlines(read, write time.Duration) bool { return read >= 0 && write >= 0 }

// withContexts returns a client of the same type, on the same pool of connections, whose commands end when
// their contexts do. It returns false if there is none.
func (d Deployment) withContexts() (Deployment, bool) {
	if d.Own == nil || !takesDeadlines(d.options.ReadTimeout, d.options.WriteTimeout) {
		return d, false
	}
	// The timeout is short, because a command without an answer is repeated under the same id on another
	// connection.
	limit := protocol.CommandTimeout
	if d.ReadTimeout > 0 { // 0: -1 was set
		limit = min(limit, d.ReadTimeout)
	}
	clone := d.Own.WithTimeout(limit)
	clone.Options().ContextTimeoutEnabled = true // the clone has its own copy
	return DeploymentOf(clone), true
}

// Proof returns what can prove to others that a client whose inbox was confirmed is gone: the answer to
// PUBSUB NUMSUB. In a Cluster nothing can: no node counts the subscribers of all nodes.
func (d Deployment) Proof() protocol.Proof {
	switch d.Kind {
	case OneNode:
		return protocol.Counted
	case Cluster:
		return protocol.Provisionally
	}
	return protocol.Unproved
}

// Addr returns the address of one node, and "" for any other client.
func (d Deployment) Addr() string {
	if d.options == nil {
		return ""
	}
	return d.options.Addr
}

// FollowsSentinel reports whether the client asks Sentinels for the address of its node.
func (d Deployment) FollowsSentinel() bool { return d.Addr() == failoverAddr }

// failoverAddr is what redis.NewFailoverClient gives as its client's address, which has no port.
const failoverAddr = "FailoverClient"

// KeepsSentinel reports whether the client follows Sentinels and waits for one that hangs for as long as it
// may dial, so that it has no time left to ask another one.
func (d Deployment) KeepsSentinel() bool {
	if !d.FollowsSentinel() {
		return false
	}
	reads := 2 * time.Duration(max(d.options.MaxRetries, 0)+1) // it asks twice
	return d.ReadTimeout <= 0 || reads*d.ReadTimeout >= d.options.DialTimeout
}

// nodeOf returns the node that has the key, for what is done at one node, and for a command that names no
// key and that the client of a Cluster would therefore send to any node.
func (d Deployment) nodeOf(ctx context.Context, key string) (Deployment, error) {
	if d.Masters == nil {
		return d, nil
	}
	ctx, stop := bounded(ctx)
	defer stop()
	master, err := d.Masters.MasterForKey(ctx, key)
	if err != nil {
		return d, err
	}
	return DeploymentOf(master), nil
}
