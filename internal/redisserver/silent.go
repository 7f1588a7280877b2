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
// So after a command that had no answer in time, PINGs are sent on a new connection. If they have answers, one
// is sent on the connection that the next command would take. If that has none, more are sent, on more and
// more connections at once, for as long as some have no answer. go-redis discards those, so a server that is
// slow, or far away, has twice the time that it took on the new connection.

const (
	// The least times for the answer on the connection that the next command would take, and on the others.
	sampleSilence = 500 * time.Millisecond
	leastSilence  = 250 * time.Millisecond
	// The first batch is one PING, because a server that was frozen answers by then. Each further one is
	// larger by this factor, up to a bound.
	batchGrowth = 4
	mostPings   = 256
	mostBatches = 12
)

// timedOut reports whether err says that a command was sent, or may have been, and had no answer in time.
func timedOut(err error) bool {
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
	if s.OnSilence != nil && timedOut(err) {
		key, _ := line[firstKey].(string)
		s.OnSilence(key)
	}
}

// DropSilent looks at the pools for the nodes that have the keys. Where the server answers on a new
// connection, and not on those that the next commands would take, it discards these. It returns how many it
// has found besides the first, whose silence may have been a server's that hung.
//
// It looks at each node once, at all at the same time, for some seconds at most. It does not call the
// process hooks and the Limiter of the Redis client, which would see many failures at once, but may dial,
// and so call its Dialer and OnConnect. The new connection that decides is made without dial hooks, which
// go-redis lets nobody call.
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
	if unused(rdb, false)+unused(rdb, true) == 0 {
		return 0 // the next command has a new connection
	}
	s.sent.Add(2)
	took, answers := answersAnew(ctx, node.Options())
	if !answers {
		return 0
	}
	for _, pipelines := range []bool{false, true} {
		if unused(rdb, pipelines) == 0 {
			continue
		}
		limit := max(2*took, sampleSilence)
		if !readTooLong(s.ping(ctx, clone(limit), pipelines, limit)) {
			continue
		}
		limit = max(2*took, leastSilence)
		silent += s.pingIdle(ctx, clone(limit), pipelines, limit)
	}
	return silent
}

// ping sends a PING on one of the connections that pipelines use, or of the others.
func (s *Server) ping(ctx context.Context, rdb *redis.Client, pipelines bool, limit time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	return s.sendOn(ctx, rdb, pipelines, "ping")
}

// answersAnew reports whether a server answers on a new connection, and how long it took to answer once the
// connection was set up. That it asks for a password, or refuses the PING, is an answer. That it is at its
// maxclients is none, because then the connections in the pool may be all there are.
func answersAnew(ctx context.Context, o *redis.Options) (took time.Duration, answers bool) {
	ctx, stop := bounded(ctx)
	defer stop()
	var made closer
	defer made.close()
	defer context.AfterFunc(ctx, made.close)() // go-redis would wait for the answer until the deadline
	one := redis.NewClient(&redis.Options{
		Network: o.Network, Addr: o.Addr, Dialer: made.dialer(o.Dialer), DialTimeout: o.DialTimeout, DialerRetries: 1, MaxRetries: -1,
		Protocol: 2, DisableIdentity: true, ContextTimeoutEnabled: true,
		PoolSize: 2, // a pool that failed to dial as often as that goes on dialing
	})
	defer func() { _ = one.Close() }()
	for range 2 { // the first one waits for the connection
		began := time.Now()
		err := one.Process(ctx, onceCmd{redis.NewCmd(ctx, "ping")})
		if err != nil && !redis.HasErrorPrefix(err, "NOAUTH") && !redis.HasErrorPrefix(err, "NOPERM") {
			return 0, false
		}
		took = time.Since(began)
	}
	return took, true
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

// pingIdle sends PINGs on idle connections, in batches, until all of a batch are answered within the limit. It
// returns how many were not.
func (s *Server) pingIdle(ctx context.Context, rdb *redis.Client, pipelines bool, limit time.Duration) int {
	var silent atomic.Int64
	for i, size := 0, 1; i < mostBatches; i, size = i+1, min(batchGrowth*size, mostPings) {
		before := silent.Load()
		inParallel(min(unused(rdb, pipelines), size), func(int) {
			if readTooLong(s.ping(ctx, rdb, pipelines, limit)) {
				silent.Add(1)
			}
		})
		if silent.Load() == before || ctx.Err() != nil {
			break
		}
	}
	return int(silent.Load())
}
