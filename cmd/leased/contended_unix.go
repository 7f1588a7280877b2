//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// contended reports whether a wait ended with err, or goes on after it, because the lock is taken, and not because
// of Redis. Redis is no obstacle if it answers and did not refuse the lock when it was last asked. Of a quorum,
// contended says how its servers vote.
func (o *runOptions) contended(ctx context.Context, conn *connection, err error) (is bool, why string) {
	ask, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var votes []vote
	unproved := errors.Is(err, leased.ErrNoQuorum) || errors.Is(err, redisserver.ErrLateAnswer) // nobody need have the lock
	if conn.quorum {
		askServers(ask, conn.servers, conn.voteOn(o.name), func(a reply[vote]) (enough bool) {
			if a.err == nil {
				votes = append(votes, a.val)
			}
			is, why = o.contendedOnQuorum(votes, len(conn.servers), unproved)
			return is
		})
		return is, why
	}
	info, failed := conn.client.Inspect(ask, o.name)
	if failed != nil {
		return false, ""
	}
	if unproved {
		return o.keptOut(&info), ""
	}
	// What passes would have been the answer to Inspect, too, so it has passed.
	return !errors.As(err, new(redis.Error)) || redisserver.Passes(err), ""
}

// contendedOnQuorum is contended for what those of n servers answered that did. While a server is in quarantine, an
// owner may be named by a majority of servers and yet not by one of those that vote, so only the latter count. A set
// of new servers votes as a whole.
func (o *runOptions) contendedOnQuorum(answers []vote, n int, unproved bool) (is bool, why string) {
	old, taken, takenOnOld := 0, 0, 0
	for i := range answers {
		a := &answers[i]
		if a.counts {
			old++
		}
		if o.keptOut(&a.info) {
			taken++
			if a.counts {
				takenOnOld++
			}
		}
	}
	switch young, failed := len(answers)-old, n-len(answers); {
	case failed > n/2: // which err, or the next error, says
		return false, ""
	case young == n:
		return taken == n, fmt.Sprintf("all %d servers are new, so each has to vote for an owner, and %d do", n, taken)
	case old <= n/2:
		why = fmt.Sprintf("%d of %d servers may vote: others are in quarantine, as after a restart without data", old, n)
		if failed > 0 {
			why += ", or failed"
		}
		return false, why
	case young == 0 && !unproved:
		return true, ""
	default:
		return takenOnOld > n/2, fmt.Sprintf("%d of %d servers may vote, and %d of these for an owner", old, n, takenOnOld)
	}
}

// keptOut reports whether others keep this run from the lock: a reader is not kept out by readers.
func (o *runOptions) keptOut(info *leased.Info) bool {
	if !o.shared {
		return len(info.Owners)+info.Queue > 0
	}
	return slices.ContainsFunc(info.Owners, func(other leased.Owner) bool { return !other.Shared }) ||
		slices.ContainsFunc(info.Waiting, func(other leased.Waiter) bool { return !other.Shared })
}

// vote is what a server of a quorum says of a lock.
type vote struct {
	info   leased.Info
	counts bool // it has kept its data for longer than the quarantine
}

// voteOn returns a function that asks a server of a quorum for its vote on a lock.
func (c *connection) voteOn(name string) func(context.Context, redis.UniversalClient) (vote, error) {
	return func(ctx context.Context, rdb redis.UniversalClient) (vote, error) {
		client, err := newClient(rdb, c.prefix)
		if err != nil {
			return vote{}, err
		}
		defer client.Close() // it holds nothing
		info, err := client.Inspect(ctx, name)
		if err != nil {
			return vote{}, err
		}
		old, err := c.isOld(ctx, rdb)
		return vote{info, old}, err
	}
}

// isOld reports whether a server of a quorum has kept its data for longer than the quarantine.
func (c *connection) isOld(ctx context.Context, rdb redis.UniversalClient) (bool, error) {
	ask := rdb.Pipeline()
	mark, now := ask.MGet(ctx, protocol.MarkKey(c.prefix)), ask.Time(ctx) // which the scripts of a lock use, too
	if _, err := ask.Exec(ctx); err != nil {
		return false, err
	}
	text, _ := mark.Val()[0].(string)
	since, err := strconv.ParseInt(text, 10, 64)
	return err == nil && now.Val().Sub(time.UnixMicro(since)) > c.quarantine, nil
}
