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
	return &connection{client: client, servers: rdbs, prefix: a.prefix, quorum: true, young: young}, nil
}

// vote is what a server of a quorum says of a lock.
type vote struct {
	info   leased.Info
	counts bool // it has kept its data for longer than the quarantine
}

// ask returns the answers of a quorum's servers, without those that fail. Once they are enough, it does not wait
// long for others.
func (c *connection) ask(ctx context.Context, name string, enough func([]vote) bool) []vote {
	ctx, cancel := context.WithCancel(ctx) // ends those that are not waited for
	defer cancel()
	answers := make(chan *vote, len(c.servers)) // nil for one that failed
	for _, rdb := range c.servers {
		go func() {
			v, err := c.askOne(ctx, rdb, name)
			if err != nil {
				v = nil
			}
			answers <- v
		}()
	}
	var votes []vote
	var over <-chan time.Time
	for range c.servers {
		select {
		case v := <-answers:
			if v == nil {
				continue
			}
			if votes = append(votes, *v); over == nil && enough(votes) {
				over = time.After(othersTime)
			}
			continue
		case <-over:
		case <-ctx.Done():
		}
		break
	}
	return votes
}

func (c *connection) askOne(ctx context.Context, rdb redis.UniversalClient, name string) (*vote, error) {
	client, err := newClient(rdb, c.prefix)
	if err != nil {
		return nil, err
	}
	defer client.Close() // it holds nothing
	v := &vote{}
	if v.info, err = client.Inspect(ctx, name); err != nil {
		return nil, err
	}
	ask := rdb.Pipeline()
	mark, now := ask.MGet(ctx, protocol.MarkKey(c.prefix)), ask.Time(ctx) // which the scripts of a lock use, too
	if _, err := ask.Exec(ctx); err != nil {
		return nil, err
	}
	text, _ := mark.Val()[0].(string)
	since, err := strconv.ParseInt(text, 10, 64)
	v.counts = err == nil && now.Val().Sub(time.UnixMicro(since)) > c.young
	return v, nil
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
