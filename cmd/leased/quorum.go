package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
)

// openQuorum is like open, but for several independent servers; a majority of them has answered.
func (a *address) openQuorum(ctx context.Context, opts ...leased.Option) (*connection, error) {
	a.fill()
	if a.Cluster || a.Sentinel != "" {
		return nil, usagef("--quorum excludes --cluster and --sentinel")
	}
	var rdbs []redis.UniversalClient
	var options []*redis.UniversalOptions
	closeAll := func() {
		for _, rdb := range rdbs {
			rdb.Close()
		}
	}
	for server := range strings.SplitSeq(a.Redis, ",") {
		one := *a
		one.Redis, one.said = strings.TrimSpace(server), nil
		o, err := one.options()
		if err != nil {
			closeAll()
			return nil, err
		}
		rdbs, options = append(rdbs, redis.NewUniversalClient(o)), append(options, o)
	}
	quarantine := protocol.DefaultQuarantine
	if a.quarantine != 0 { // which no TTL may exceed, that of a command that takes no locks included
		ttl := min(protocol.DefaultTTL, a.quarantine).Truncate(time.Millisecond)
		quarantine = a.quarantine
		opts = append([]leased.Option{leased.WithQuarantine(a.quarantine), leased.WithTTL(ttl)}, opts...)
	}
	client, err := leased.NewQuorum(rdbs, clientOptions(a.prefix, opts)...)
	if err != nil {
		closeAll()
		return nil, usagef("--quorum: %s", bare(err))
	}
	if err := majorityAnswers(ctx, rdbs, options); err != nil {
		client.Close() // it holds nothing
		closeAll()
		return nil, err
	}
	return &connection{client: client, servers: rdbs, prefix: a.prefix, quorum: true, quarantine: quarantine}, nil
}

// majorityAnswers returns nil if a majority of the servers answers, and otherwise an error that
// says of each of the others why not.
func majorityAnswers(ctx context.Context, rdbs []redis.UniversalClient, options []*redis.UniversalOptions) error {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	answered := 0
	failures := make([]error, len(rdbs))
	// A PING to a server that hangs ends with the client's read timeout.
	ping := func(ctx context.Context, rdb redis.UniversalClient) (string, error) { return rdb.Ping(ctx).Result() }
	askServers(ctx, rdbs, ping, func(a reply[string]) (enough bool) {
		if failures[a.server] = a.err; a.err == nil {
			answered++
		}
		return answered > len(rdbs)/2
	})
	if answered > len(rdbs)/2 {
		return nil
	}
	var text strings.Builder
	for i, err := range failures { // one per line, because some say what to do
		if err != nil {
			fmt.Fprintf(&text, "\n  %s: %v", where(options[i]), unconnected(options[i], err))
		}
	}
	return fmt.Errorf("%d of the %d servers answered, which is not a majority:%s", answered, len(rdbs), &text)
}

// reply is what a server answered, or why it did not.
type reply[T any] struct {
	server int
	val    T
	err    error
}

// askServers asks all servers at once, and passes each answer to heard, which returns whether those so far are enough.
// The others are not waited for long then.
func askServers[T any](ctx context.Context, rdbs []redis.UniversalClient, ask func(context.Context, redis.UniversalClient) (T, error), heard func(reply[T]) (enough bool)) {
	replies := make(chan reply[T], len(rdbs))
	for i, rdb := range rdbs {
		// One that is not waited for ends with ctx, or with the timeouts of rdb.
		go func() {
			val, err := ask(ctx, rdb)
			replies <- reply[T]{i, val, err}
		}()
	}
	var over <-chan time.Time
	for range rdbs {
		select {
		case r := <-replies:
			if heard(r) && over == nil {
				over = time.After(othersTime)
			}
		case <-over:
			return
		}
	}
}
