package redisserver

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A NAT, a firewall or a load balancer that restarts forgets its connections without closing them, and
// a machine that loses its power closes none. The server, or the one in its place, answers on every new
// connection, and on those in the pool nothing arrives any more. Each command that takes one of them
// waits for its whole time, and only then is the connection discarded: with dozens in the pool, leases
// end before the last one has gone.
//
// So after a command that had no answer in time, a PING is sent on the connection that the next command
// would take. If that has no answer either, but one on a connection made for it has, all idle
// connections are sent a PING at once, and go-redis discards those that do not answer.

const (
	// sampleSilence is how long the connection that the next command would take may take to answer.
	sampleSilence = 500 * time.Millisecond
	// leastSilence and mostSilence bound how long the others may take: twice what a new connection took
	// to be set up and to answer.
	leastSilence = 250 * time.Millisecond
	mostSilence  = time.Second
	// mostPings bounds the connections that are sent a PING at once.
	mostPings = 1000
	// allTaken is how long a connection that has answered is kept, so that none is taken twice.
	allTaken = 50 * time.Millisecond
)

// TimedOut reports whether err says that a command was sent, or may have been, and had no answer in time.
func TimedOut(err error) bool {
	if err == nil || notSent(err) {
		return false
	}
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrLateAnswer) || readTooLong(err)
}

// readTooLong reports whether err says that nothing arrived on a connection in time.
func readTooLong(err error) bool {
	var network net.Error
	return errors.As(err, &network) && network.Timeout() && !errors.Is(err, context.DeadlineExceeded)
}

// hadNoAnswer tells OnSilence of a command that had no answer in time. Its line is that of a script.
func (s *Server) hadNoAnswer(line []any, err error) {
	if s.OnSilence != nil && TimedOut(err) {
		key, _ := line[firstKey].(string)
		s.OnSilence(key)
	}
}

// DropSilent looks at the pools for the nodes that have the keys. Where the server answers on a new
// connection, and not on the one that the next command would take, it discards all idle connections that
// do not answer. It returns how many it has found.
//
// It looks at each node once, at all at the same time, for about 4 s at most, and for not much longer once
// ctx has ended. It does not call hooks or the Limiter of the Redis client, but may call its Dialer and
// OnConnect.
func (s *Server) DropSilent(ctx context.Context, keys ...string) (silent int) {
	nodes := []redis.UniversalClient{s.Rdb}
	if _, ok := s.Rdb.(clusterNodes); ok {
		nodes = nil
		for _, key := range keys {
			if node, err := s.nodeOf(ctx, key); err == nil && !slices.Contains(nodes, node) {
				nodes = append(nodes, node)
			}
		}
	}
	var n atomic.Int64
	inParallel(len(nodes), func(i int) { n.Add(int64(s.dropSilentOf(ctx, nodes[i]))) })
	return int(n.Load())
}

// inParallel calls f for each i below n, each in a goroutine, and waits for them. It panics if one of them does.
func inParallel(n int, f func(i int)) {
	var panicked atomic.Pointer[any]
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					panicked.Store(&p)
				}
			}()
			f(i)
		})
	}
	all.Wait()
	if p := panicked.Load(); p != nil {
		panic(*p)
	}
}

// plainNode is a *redis.Client, or a type that embeds one. The clones that it makes have neither its hooks
// nor its Limiter, which would see many failures at once.
type plainNode interface {
	oneNode
	WithTimeout(time.Duration) *redis.Client
}

func (s *Server) dropSilentOf(ctx context.Context, rdb redis.UniversalClient) (silent int) {
	node, ok := rdb.(plainNode)
	if !ok {
		return 0
	}
	clone := func(limit time.Duration) *redis.Client {
		c := node.WithTimeout(limit)
		c.Options().ContextTimeoutEnabled, c.Options().Limiter = true, nil // it has its own copy
		return c
	}
	for _, pipelines := range []bool{false, true} {
		if pipelines && rdb.PoolStats().PipelineStats == nil || idleIn(rdb, pipelines) == 0 {
			continue // the next command has a new connection
		}
		s.sent.Add(1)
		if !readTooLong(pingOn(ctx, clone(sampleSilence), pipelines, sampleSilence)) {
			continue
		}
		silent++
		s.sent.Add(1)
		took, ok := answersAnew(ctx, node.Options())
		if !ok {
			return silent - 1
		}
		limit := min(max(2*took, leastSilence), mostSilence)
		silent += s.pingIdle(ctx, clone(limit), pipelines, limit)
	}
	return silent
}

// pingOn sends a PING on a connection of the pool that pipelines use, or of the other.
func pingOn(ctx context.Context, rdb *redis.Client, pipelines bool, limit time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	cmd := onceCmd{redis.NewCmd(ctx, "ping")}
	if pipelines {
		return pipelined(ctx, rdb, []redis.Cmder{cmd})
	}
	return rdb.Process(ctx, cmd)
}

// answersAnew reports whether a server answers on a new connection, and how long that took. That it asks for
// a password, or refuses the PING, is an answer. That it is at its maxclients is none, because then the
// connections in the pool may be all there are.
func answersAnew(ctx context.Context, o *redis.Options) (took time.Duration, answers bool) {
	ctx, stop := bounded(ctx)
	defer stop()
	began := time.Now()
	var made closer
	defer made.close()
	one := redis.NewClient(&redis.Options{
		Network: o.Network, Addr: o.Addr, Dialer: made.dialer(o.Dialer), DialTimeout: o.DialTimeout, DialerRetries: 1, MaxRetries: -1,
		Protocol: 2, DisableIdentity: true, ContextTimeoutEnabled: true,
		PoolSize: 2, // a pool that failed to dial as often as that goes on dialing
	})
	defer func() { _ = one.Close() }()
	err := one.Process(ctx, onceCmd{redis.NewCmd(ctx, "ping")})
	answers = err == nil || redis.HasErrorPrefix(err, "NOAUTH") || redis.HasErrorPrefix(err, "NOPERM")
	return time.Since(began), answers
}

// closer closes connections, also those that are made later. go-redis leaves one open whose greeting it does not
// understand, and goes on dialing when nobody waits for the connection any more.
type closer struct {
	mu     sync.Mutex // guards what follows
	closed bool
	conns  []net.Conn
}

func (c *closer) dialer(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		c.conns = append(c.conns, conn)
		closed := c.closed
		c.mu.Unlock()
		if closed {
			_ = conn.Close()
		}
		return conn, nil
	}
}

func (c *closer) close() {
	c.mu.Lock()
	c.closed = true
	conns := c.conns
	c.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// pingIdle sends a PING on each idle connection, on all at once, and returns how many had no answer within the
// limit. go-redis discards those.
func (s *Server) pingIdle(ctx context.Context, rdb *redis.Client, pipelines bool, limit time.Duration) int {
	began := time.Now()
	var silent atomic.Int64
	inParallel(min(idleIn(rdb, pipelines), mostPings), func(int) {
		s.sent.Add(1)
		var err error
		if pipelines {
			err = pingOn(ctx, rdb, true, limit)
		} else {
			ctx, stop := context.WithTimeout(ctx, limit)
			defer stop()
			conn := rdb.Conn() // which keeps its connection until it is closed
			defer func() { _ = conn.Close() }()
			if err = conn.Process(ctx, onceCmd{redis.NewCmd(ctx, "ping")}); err == nil {
				time.Sleep(allTaken - time.Since(began))
			}
		}
		if readTooLong(err) {
			silent.Add(1)
		}
	})
	return int(silent.Load())
}
