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
// connection, and on those in the pool nothing arrives anymore. Each command that takes one of them
// waits for its whole time, and only then is the connection discarded: with dozens in the pool, leases
// end before the last one has gone.
//
// So after a command that had no answer in time, a PING is sent on a new connection. If it has an answer, two are
// sent on the connections that the next commands would take. If both have none, more are sent, on more and more
// connections at once, for as long as most have no answer: a server that is uneven answers most, and those that it
// answers late are lost. go-redis discards what is silent, so a server that is slow, or far away, has twice the time
// that it took on the new connection. That is asked before each batch, because the server may hang by then.

const (
	minSilence = 250 * time.Millisecond // the least time for an answer
	// The first batch is two PINGs. Each further one is larger by this factor, up to a bound, so that a few suffice
	// for hundreds of connections: a lease of some seconds waits meanwhile.
	firstPings  = 2
	batchGrowth = 32
	maxPings    = 256
	maxBatches  = 12
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
// It also returns whether such a server has answered on the new connection to the end, so that commands which wait
// on an old one are worth sending again.
//
// It looks at each node once, at all at the same time, for some seconds at most. It does not call the
// process hooks and the Limiter of the Redis client, which would see many failures at once, but may dial,
// and so call its Dialer and OnConnect. The new connection that decides is made without dial hooks, which
// go-redis lets nobody call.
func (s *Server) DropSilent(ctx context.Context, keys ...string) (silent int, again bool) {
	nodes := []Deployment{s.Deployment}
	if s.Masters != nil {
		nodes = nil
		for _, key := range keys {
			node, err := s.nodeOf(ctx, key)
			if err == nil && !slices.ContainsFunc(nodes, func(other Deployment) bool { return other.Own == node.Own }) {
				nodes = append(nodes, node)
			}
		}
	}
	var n atomic.Int64
	var one atomic.Bool
	inParallel(2*len(nodes), func(i int) {
		silent, again := s.dropSilentOf(ctx, nodes[i/2], i%2 == 1)
		n.Add(int64(silent))
		if again {
			one.Store(true)
		}
	})
	return int(n.Load()), one.Load()
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

// dropSilentOf looks at the connections to a node that pipelines use, or at the others.
func (s *Server) dropSilentOf(ctx context.Context, on Deployment, pipelines bool) (silent int, again bool) {
	if on.cloner == nil {
		return 0, false
	}
	clone := func(limit time.Duration) *redis.Client {
		c := on.cloner.WithTimeout(limit)
		c.Options().ContextTimeoutEnabled, c.Options().Limiter = true, nil // it has its own copy
		return c
	}
	idle := func() int { return unused(on.Rdb, pipelines) }
	if idle() == 0 {
		return 0, false // the next command has a new connection
	}
	fresh := dialFresh(on.options)
	defer fresh.close()
	return s.pingIdle(ctx, fresh, clone, idle, pipelines)
}

// ping sends a PING on one of the connections that pipelines use, or of the others.
func (s *Server) ping(ctx context.Context, rdb *redis.Client, pipelines bool, limit time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	return s.sendOn(ctx, rdb, pipelines, "ping")
}

// freshConn is a new connection to a server, which is dialed for the first question.
type freshConn struct {
	rdb  *redis.Client
	made closer
	took time.Duration // how long the slowest answer took, without dialing and a greeting
}

func dialFresh(o *redis.Options) *freshConn {
	f := &freshConn{}
	f.rdb = redis.NewClient(&redis.Options{
		// go-redis asks DNS which kind of address a host name is, for 2 s, and that of a client of Sentinel is none.
		Addr:        "127.0.0.1:0",
		Dialer:      f.made.dialer(func(ctx context.Context) (net.Conn, error) { return o.Dialer(ctx, o.Network, o.Addr) }),
		DialTimeout: o.DialTimeout, DialerRetries: 1, MaxRetries: -1,
		Protocol: 2, DisableIdentity: true, ContextTimeoutEnabled: true,
		PoolSize: 2, // a pool that failed to dial as often as that goes on dialing
	})
	return f
}

// answers reports whether the server answers a PING. That it asks for a password, or refuses the PING, is an
// answer. That it is at its maxclients is none, because then the connections in the pool may be all there are.
// Once it has not answered, f is of no more use.
func (f *freshConn) answers(ctx context.Context) bool {
	ctx, stop := bounded(ctx)
	defer stop()
	defer context.AfterFunc(ctx, f.made.close)() // go-redis would wait for the answer until the deadline
	err := f.rdb.Process(ctx, onceCmd{redis.NewCmd(ctx, "ping")})
	if written := f.made.written(); !written.IsZero() {
		f.took = max(f.took, time.Since(written))
	}
	return err == nil || redis.HasErrorPrefix(err, "NOAUTH") || redis.HasErrorPrefix(err, "NOPERM")
}

func (f *freshConn) close() {
	f.made.close()
	_ = f.rdb.Close()
}

// asks sends a PING on a new connection, and reports whether it has an answer.
func (s *Server) asks(ctx context.Context, fresh *freshConn) bool {
	s.sent.Add(1)
	return fresh.answers(ctx)
}

// closer closes connections, also those that are made later. go-redis leaves one open whose greeting it does not
// understand, and goes on dialing when nobody waits for the connection anymore.
type closer struct {
	mu     sync.Mutex // guards what follows
	closed bool
	conns  []net.Conn
	wrote  time.Time // when something was last written to one of them
}

// closable is a connection that notes when it is written to.
type closable struct {
	net.Conn
	by *closer
}

func (c closable) Write(p []byte) (int, error) {
	c.by.mu.Lock()
	c.by.wrote = time.Now()
	c.by.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *closer) written() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wrote
}

func (c *closer) dialer(dial func(context.Context) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := dial(ctx)
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
		return closable{conn, c}, nil
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

// pingIdle sends PINGs on idle connections, in batches, until most of a batch are not silent, or the server does not
// answer on the new connection either. clone returns a client of them with a ReadTimeout. It returns how many were
// silent, without the first batch, and whether most of a batch were although the server has answered each time.
func (s *Server) pingIdle(ctx context.Context, fresh *freshConn, clone func(time.Duration) *redis.Client, idle func() int, pipelines bool) (total int, again bool) {
	var silent atomic.Int64
	for i, size := 0, firstPings; i < maxBatches && idle() > 0; i, size = i+1, min(batchGrowth*size, maxPings) {
		if !s.asks(ctx, fresh) {
			return total, false
		}
		limit := max(2*fresh.took, minSilence)
		rdb := clone(limit)
		silent.Store(0)
		n := min(idle(), size)
		inParallel(n, func(int) {
			if readTooLong(s.ping(ctx, rdb, pipelines, limit)) {
				silent.Add(1)
			}
		})
		none := int(silent.Load())
		if i > 0 {
			total += none
		}
		if 2*none <= n || ctx.Err() != nil {
			break
		}
		again = true
	}
	return total, again
}
