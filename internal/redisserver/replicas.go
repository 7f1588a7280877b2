package redisserver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// ReplicatedServer is a Server whose grants count only when enough replicas have them.
// Replication is asynchronous. Without confirmation, a lease granted just before its primary
// failed may be unknown to the replica that is promoted, and granted again.
//
// A command that makes its sender an owner is sent with WAIT behind it, on one connection and in
// one round trip, because WAIT counts the replicas that have that connection's last write. If
// there are too few, the command fails, and the lock cancels the grant. A grant made by another
// process's release is confirmed in the same way, by the acquire that its owner sends when the
// message arrives. The renewals of each node are confirmed together, and a renewal that too few
// replicas have does not extend a lease.
//
// Each such command has a connection of its own for as long as the replicas take. So no more than half of a
// pool's connections are used for new grants at once: releases, renewals and the user's own commands need the
// others. An owner's question and its downgrade wait for no turn, because its release would wait for them.
//
// WAIT does not make Redis strongly consistent: the replica that is promoted can be one that
// WAIT did not count. To make the loss of a grant unlikely, n must be at least half of all
// replicas, and a Sentinel or Cluster must promote the most advanced one.
type ReplicatedServer struct {
	*Server
	n       int
	timeout time.Duration
	turns   turns
}

// Replicated returns s with confirmation by n replicas, waiting for them for at most timeout.
func Replicated(s *Server, n int, timeout time.Duration) *ReplicatedServer {
	return &ReplicatedServer{Server: s, n: n, timeout: timeout, turns: turns{of: map[*redis.Client]*turn{}}}
}

// turns bounds how many commands wait for replicas of a node at once.
type turns struct {
	mu sync.Mutex              // guards what follows
	of map[*redis.Client]*turn // those in use; nil stands for a client of the user's own type, which is one node
}

// turn is what the commands to one node share.
type turn struct {
	users int           // commands that have it or wait for it
	taken chan struct{} // holds a value for each command that has it
}

// take waits until a command to the node may be sent, and returns what to call once it was answered. It returns an
// error if that would leave less than least of the time that the command has. When its time is over, another command
// may be sent, even if a hook keeps this one.
func (t *turns) take(ctx context.Context, node Deployment, least time.Duration) (done func(), err error) {
	if node.Kind != OneNode {
		return func() {}, nil
	}
	key := node.Own
	t.mu.Lock()
	mine := t.of[key]
	if mine == nil {
		mine = &turn{taken: make(chan struct{}, max(1, pipelineConns(node.Rdb, node.options)/2))}
		t.of[key] = mine
	}
	mine.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if mine.users--; mine.users == 0 {
			delete(t.of, key)
		}
	}
	give := sync.OnceFunc(func() {
		<-mine.taken
		leave()
	})
	took := func() (func(), error) {
		stop := context.AfterFunc(ctx, give)
		return func() {
			stop()
			give()
		}, nil
	}
	select {
	case mine.taken <- struct{}{}:
		return took()
	default:
	}
	spare := time.Duration(math.MaxInt64)
	if end, bounded := ctx.Deadline(); bounded {
		spare = time.Until(end) - least
	}
	timer := time.NewTimer(spare)
	defer timer.Stop()
	select {
	case mine.taken <- struct{}{}:
		return took()
	case <-timer.C:
	case <-ctx.Done():
	}
	leave()
	return nil, &noTurn{cap(mine.taken)}
}

// pipelineConns returns how many connections the pipelines of a node can have.
func pipelineConns(node redis.UniversalClient, o *redis.Options) int {
	size := o.PoolSize
	if node.PoolStats().PipelineStats != nil {
		if size = o.PipelinePoolSize; size <= 0 {
			size = min(o.PoolSize, 10) // the default of go-redis 9.23
		}
	}
	if o.MaxActiveConns > 0 {
		size = min(size, o.MaxActiveConns)
	}
	return size
}

// noTurn is the error of a command that was not sent because too many others wait for replicas.
type noTurn struct{ most int }

func (e *noTurn) Error() string {
	return fmt.Sprintf("not sent, because %d commands wait for their replicas already, for which the Redis client's "+
		"pool has no more connections", e.most)
}

// minForGrant is how much time a grant has, at least, beside that in which it is confirmed.
const minForGrant = protocol.CommandTimeout / 8

// tooFewReplicas is the error of a grant that too few replicas have.
type tooFewReplicas struct {
	got, want int
	timeout   time.Duration
}

func (e *tooFewReplicas) Error() string {
	return fmt.Sprintf("%d of %d replicas had the grant within %v", e.got, e.want, e.timeout)
}

func (e *tooFewReplicas) Unwrap() error { return protocol.ErrNoReplicas }

// unconfirmedGrant is the error of a grant that does not count, because of what WAIT was answered. It is
// like a refusal by the server: the lock cancels the grant.
type unconfirmedGrant struct{ error }

func (e *unconfirmedGrant) Unwrap() error { return e.error }
func (*unconfirmedGrant) RedisError()     {}

// noWAIT is the error of a grant on a server that refuses WAIT.
type noWAIT struct{ answer error }

func (e *noWAIT) Error() string {
	return "this server, or its proxy, refuses WAIT, which WithReplicas needs: " + e.answer.Error()
}

func (e *noWAIT) Unwrap() []error { return []error{protocol.ErrNoReplicas, e.answer} }

// Do runs one command. A grant that too few replicas have is an error.
func (s *ReplicatedServer) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	if c.Verb != protocol.Acquire && c.Verb != protocol.Downgrade {
		a, err := s.Server.Do(ctx, k, c)
		if c.Verb == protocol.Yield && err == nil && a.Outcome == protocol.Granted {
			// The new request already owns the lock, but unconfirmed. This answer makes it send an
			// acquire, which confirms the grant.
			a = protocol.Answer{
				Outcome: protocol.Enqueued, Token: a.Token - 1, Clock: a.Clock, Left: protocol.Ownerless,
				Handed: a.Handed, Gone: a.Gone, Unfinished: true,
			}
		}
		return a, err
	}
	node, err := s.nodeOf(ctx, k.Lock)
	if err != nil {
		return protocol.Answer{}, s.explain(err)
	}
	if c.Verb == protocol.Acquire && !c.Question {
		done, err := s.turns.take(ctx, node, s.timeout+minForGrant)
		if err != nil {
			return protocol.Answer{}, err
		}
		defer done() // even if a hook panics
	}
	confirmed := s.confirming(node.Rdb)
	a, err := confirmed.Do(ctx, k, c)
	if err != nil || a.Outcome != protocol.Granted {
		return a, err
	}
	err = confirmed.counted()
	switch {
	case err == nil:
		return a, nil
	case c.Question || c.Verb == protocol.Downgrade: // a grant that may be in use is not taken away
	case errors.As(err, new(*tooFewReplicas)) || IsServerReply(err):
		err = &unconfirmedGrant{err}
	}
	return protocol.Answer{}, err
}

// confirming returns the server that sends WAIT after the commands of each round trip. They
// go to one node, but their errors are still explained for the whole client, because the client of a
// Cluster reports a node that has left as closed.
func (s *ReplicatedServer) confirming(node redis.UniversalClient) *Server {
	return s.by(route{confirm: &confirmation{node: node, want: s.n, timeout: s.timeout, fewest: math.MaxInt64}})
}

// confirmation has replicas confirm the commands that are sent to one node, in one round trip or, if the server
// did not know the script of some, in two or three. Each round trip needs the replicas: the next one can have
// another connection, and if its commands write nothing there, its WAIT says nothing of what came before.
type confirmation struct {
	node    redis.UniversalClient
	want    int
	timeout time.Duration
	wait    *redis.IntCmd // the last one sent; nil before that
	fewest  int64         // the fewest replicas that those before it counted
}

// next returns the WAIT for another round trip.
func (c *confirmation) next(ctx context.Context) redis.Cmder {
	timeout := c.timeout
	if c.wait != nil {
		if got, err := c.wait.Result(); err == nil {
			c.fewest = min(c.fewest, got)
		}
		if c.fewest < int64(c.want) {
			timeout = time.Millisecond // the grant does not count anyway, and has waited already
		}
	}
	c.wait = redis.NewIntCmd(ctx, "wait", c.want, timeout.Milliseconds())
	return c.wait
}

// counted returns nil if each WAIT counted enough replicas, and otherwise the error of the grant.
func (s *Server) counted() error {
	c := s.confirm
	got, err := c.wait.Result()
	if c.fewest < int64(c.want) {
		got = c.fewest // the last one had no time
	}
	switch {
	case err == nil && got >= int64(c.want):
		return nil
	case err == nil:
		return &tooFewReplicas{int(got), c.want, c.timeout}
	case strings.HasPrefix(err.Error(), "ERR"):
		return &noWAIT{err}
	}
	return s.explain(err)
}

// Renew renews grants that one node has, in one round trip. A renewal that too few replicas have
// counts as unanswered, and so does one that another node has: go-redis does not follow a redirection
// of what was sent to one node.
func (s *ReplicatedServer) Renew(ctx context.Context, batch []protocol.Renewal) {
	node, err := s.nodeOf(ctx, batch[0].Keys.Lock)
	if err != nil {
		err = s.explain(err)
		for i := range batch {
			batch[i].Outcome, batch[i].Err = protocol.Unanswered, err
		}
		return
	}
	confirmed := s.confirming(node.Rdb)
	confirmed.Renew(ctx, batch)
	if err = confirmed.counted(); err == nil {
		return
	}
	for i := range batch {
		if batch[i].Outcome == protocol.Granted {
			batch[i].Outcome, batch[i].Err = protocol.Unanswered, err
		}
	}
}
