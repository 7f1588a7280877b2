package redisserver

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A NAT, a firewall or a load balancer that restarts forgets its connections without closing them, and
// a machine that loses its power closes none. The server, or the one in its place, answers on every
// new connection, and on those in the pool nothing arrives any more. Each command that takes one of
// them waits for its whole time, and only then is the connection discarded: with dozens in the pool,
// leases end before the last one has gone.
//
// So after a command that had no answer in time, a PING is sent on a connection that is dialed for it.
// If that is answered, all idle connections are sent a PING at once, and go-redis discards those that
// do not answer.

const (
	// leastSilence and mostSilence bound how long a connection may take to answer the PING. In between it is
	// silenceFactor times what a new connection took to be set up and to answer.
	leastSilence  = 250 * time.Millisecond
	mostSilence   = time.Second
	silenceFactor = 4
	// mostPings is how many idle connections are sent a PING at once, and mostRounds how often so many.
	mostPings  = 200
	mostRounds = 10
)

// TimedOut reports whether err says that a command was sent, or may have been, and had no answer in time.
func TimedOut(err error) bool {
	if err == nil || notSent(err) {
		return false
	}
	var network net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrLateAnswer) || errors.As(err, &network) && network.Timeout()
}

// hadNoAnswer tells OnSilence of a command that had no answer in time. Its line is that of a script.
func (s *Server) hadNoAnswer(line []any, err error) {
	if s.OnSilence != nil && TimedOut(err) {
		key, _ := line[firstKey].(string)
		s.OnSilence(key)
	}
}

// DropSilent discards the idle connections, to the node that has the key, on which no answer comes, if
// the node answers on a new connection. It returns how many connections it has found silent. It takes
// a few seconds at most, unless a Dialer of the user's does not keep to its context.
func (s *Server) DropSilent(ctx context.Context, key string) (silent int) {
	rdb, err := s.nodeOf(ctx, key)
	node, ok := rdb.(oneNode)
	if err != nil || !ok || idleIn(rdb, false)+idleIn(rdb, true) == 0 { // the next command has a new connection
		return 0
	}
	s.sent.Add(1)
	took, ok := answersAnew(ctx, node.Options())
	if !ok {
		return 0
	}
	limit := min(max(silenceFactor*took, leastSilence), mostSilence)
	silent = s.pingIdle(ctx, rdb, false, limit)
	if rdb.PoolStats().PipelineStats != nil {
		silent += s.pingIdle(ctx, rdb, true, limit)
	}
	return silent
}

// answersAnew reports whether a server answers on a new connection, and how long that took. It does not
// authenticate: that the server asks for a password is an answer. Others are not, such as that it is at its
// maxclients, because then the connections in the pool may be all there are.
func answersAnew(ctx context.Context, o *redis.Options) (took time.Duration, answers bool) {
	ctx, stop := bounded(ctx)
	defer stop()
	began := time.Now()
	conn, err := o.Dialer(ctx, o.Network, o.Addr)
	if err != nil {
		return 0, false
	}
	defer func() { _ = conn.Close() }()
	if until, ok := ctx.Deadline(); !ok || conn.SetDeadline(until) != nil {
		return 0, false // nothing would bound it
	}
	if _, err := conn.Write([]byte("*1\r\n$4\r\nPING\r\n")); err != nil {
		return 0, false
	}
	line, err := bufio.NewReaderSize(conn, 128).ReadSlice('\n')
	if err != nil {
		return 0, false
	}
	reply := string(line)
	return time.Since(began), strings.HasPrefix(reply, "+") || strings.HasPrefix(reply, "-NOAUTH") || strings.HasPrefix(reply, "-NOPERM")
}

// pingIdle sends PINGs on all idle connections at once, those that pipelines use or the others, and
// returns how many had no answer within the limit. go-redis discards those.
func (s *Server) pingIdle(ctx context.Context, rdb redis.UniversalClient, pipelines bool, limit time.Duration) int {
	var silent atomic.Int64
	for range mostRounds {
		idle := min(idleIn(rdb, pipelines), mostPings)
		before := silent.Load()
		var all sync.WaitGroup
		for range idle {
			all.Go(func() {
				ctx, stop := context.WithTimeout(ctx, limit)
				defer stop()
				s.sent.Add(1)
				cmd := onceCmd{redis.NewCmd(ctx, "ping")}
				var err error
				if pipelines {
					err = pipelined(ctx, rdb, []redis.Cmder{cmd})
				} else {
					err = rdb.Process(ctx, cmd)
				}
				if TimedOut(err) {
					silent.Add(1)
				}
			})
		}
		all.Wait()
		if idle < mostPings || silent.Load() == before {
			break
		}
	}
	return int(silent.Load())
}
