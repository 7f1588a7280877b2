package main

import (
	"context"
	"fmt"
	"strconv"
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
	young := time.Minute   // the library's default
	if a.quarantine != 0 { // which no TTL may exceed, that of a command that takes no locks included
		ttl := min(30*time.Second, a.quarantine).Truncate(time.Millisecond)
		young = a.quarantine
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
	return &connection{client: client, servers: rdbs, prefix: a.prefix, young: young}, nil
}

// voters returns how many of a quorum's servers have kept their data for longer than the quarantine, so that their
// votes count, and how many others answer. It stops asking when the former are a majority.
func (c *connection) voters(ctx context.Context) (old, young int) {
	type vote struct {
		counts bool
		err    error
	}
	votes := make(chan vote, len(c.servers))
	ctx, cancel := context.WithCancel(ctx) // ends those that are not waited for
	defer cancel()
	for _, rdb := range c.servers {
		go func() {
			counts, err := c.mayVote(ctx, rdb)
			votes <- vote{counts, err}
		}()
	}
	for n := 0; n < len(c.servers) && old <= len(c.servers)/2; n++ {
		select {
		case v := <-votes:
			switch {
			case v.err != nil:
			case v.counts:
				old++
			default:
				young++
			}
		case <-ctx.Done():
			return old, young
		}
	}
	return old, young
}

// mayVote reports whether a server has kept its data for longer than the quarantine, by the mark that it keeps.
func (c *connection) mayVote(ctx context.Context, rdb redis.UniversalClient) (bool, error) {
	ask := rdb.Pipeline()
	mark, now := ask.MGet(ctx, protocol.MarkKey(c.prefix)), ask.Time(ctx) // which the scripts of a lock use, too
	if _, err := ask.Exec(ctx); err != nil {
		return false, err
	}
	text, _ := mark.Val()[0].(string)
	since, err := strconv.ParseInt(text, 10, 64)
	return err == nil && now.Val().Sub(time.UnixMicro(since)) > c.young, nil
}

// majorityAnswers returns nil if a majority of the servers answers, and otherwise an error that
// says of each of the others why not.
func majorityAnswers(ctx context.Context, rdbs []redis.UniversalClient, options []*redis.UniversalOptions) error {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	type answer struct {
		server int
		err    error
	}
	answers := make(chan answer, len(rdbs))
	for i, rdb := range rdbs {
		// A server that hangs is not waited for. Its PING ends with the client's read timeout.
		go func() { answers <- answer{i, rdb.Ping(ctx).Err()} }()
	}
	answered := 0
	failures := make([]error, len(rdbs))
	var over <-chan time.Time
	for waiting := len(rdbs); waiting > 0; waiting-- {
		select {
		case a := <-answers:
			if a.err != nil {
				failures[a.server] = a.err
			} else if answered++; answered > len(rdbs)/2 && over == nil {
				over = time.After(othersTime)
			}
			continue
		case <-over:
		}
		break
	}
	if answered > len(rdbs)/2 {
		return nil
	}
	var text strings.Builder
	for i, err := range failures { // of which a line each is easier to read, as some say what to do
		if err != nil {
			fmt.Fprintf(&text, "\n  %s: %v", where(options[i]), unconnected(options[i], err))
		}
	}
	return fmt.Errorf("%d of the %d servers answered, which is no majority:%s", answered, len(rdbs), &text)
}
