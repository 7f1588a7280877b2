package redisserver

import (
	"context"
	"errors"
	"fmt"
	"strings"
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
// WAIT does not make Redis strongly consistent: the replica that is promoted can be one that
// WAIT did not count. To make the loss of a grant unlikely, n must be at least half of all
// replicas, and a Sentinel or Cluster must promote the most advanced one.
type ReplicatedServer struct {
	*Server
	n       int
	timeout time.Duration
}

// Replicated returns s with confirmation by n replicas, waiting for them for at most timeout.
func Replicated(s *Server, n int, timeout time.Duration) *ReplicatedServer {
	return &ReplicatedServer{Server: s, n: n, timeout: timeout}
}

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
	confirmed, wait := s.confirming(ctx, node)
	a, err := confirmed.Do(ctx, k, c)
	if err != nil || a.Outcome != protocol.Granted {
		return a, err
	}
	err = s.counted(wait)
	switch {
	case err == nil:
		return a, nil
	case c.Held || c.Verb == protocol.Downgrade: // a grant that may be in use is not taken away
	case errors.As(err, new(*tooFewReplicas)) || IsServerReply(err):
		err = &unconfirmedGrant{err}
	}
	return protocol.Answer{}, err
}

// confirming returns a copy of the server that sends WAIT after each command, and that WAIT. The
// commands go to one node, but their errors are still explained for the whole client, because the
// client of a Cluster reports a node that has left as closed.
func (s *ReplicatedServer) confirming(ctx context.Context, node redis.UniversalClient) (*Server, *redis.IntCmd) {
	wait := redis.NewIntCmd(ctx, "wait", s.n, s.timeout.Milliseconds())
	one := *s.Server
	one.trailer, one.node = wait, node
	return &one, wait
}

// counted returns nil if WAIT counted enough replicas, and otherwise the error of the grant.
func (s *ReplicatedServer) counted(wait *redis.IntCmd) error {
	got, err := wait.Result()
	switch {
	case err == nil && got >= int64(s.n):
		return nil
	case err == nil:
		return &tooFewReplicas{int(got), s.n, s.timeout}
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
	confirmed, wait := s.confirming(ctx, node)
	confirmed.Renew(ctx, batch)
	if err = s.counted(wait); err == nil {
		return
	}
	for i := range batch {
		if batch[i].Outcome == protocol.Granted {
			batch[i].Outcome, batch[i].Err = protocol.Unanswered, err
		}
	}
}
