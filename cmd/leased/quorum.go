package main

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
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
	servers := a.Redis
	if len(a.said) > 1 {
		servers = strings.Join(a.said, ",")
	}
	for server := range strings.SplitSeq(servers, ",") {
		one := *a
		one.Redis = strings.TrimSpace(server)
		o, err := one.options()
		if err != nil {
			closeAll()
			return nil, err
		}
		rdbs, options = append(rdbs, redis.NewUniversalClient(o)), append(options, o)
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
	return &connection{client, rdbs, a.prefix}, nil
}

// majorityAnswers returns nil if a majority of the servers answers, and otherwise an error that
// says why not.
func majorityAnswers(ctx context.Context, rdbs []redis.UniversalClient, options []*redis.UniversalOptions) error {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	errs := make([]error, len(rdbs))
	var all sync.WaitGroup
	for i, rdb := range rdbs {
		all.Go(func() { errs[i] = rdb.Ping(ctx).Err() })
	}
	all.Wait()
	answered := 0
	var last error
	for i, err := range errs {
		if err == nil {
			answered++
		} else {
			last = unconnected(options[i], err)
		}
	}
	if answered <= len(rdbs)/2 {
		return fmt.Errorf("%d of the %d servers answered, which is no majority: %w", answered, len(rdbs), last)
	}
	return nil
}
