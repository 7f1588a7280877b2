package leasedtest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// New returns a client of a new server. It is short for NewServer(t).Client(opts...).
func New(t testing.TB, opts ...leased.Option) *leased.Client {
	t.Helper()
	return NewServer(t).Client(opts...)
}

// Lose takes the named lock away from its owners, as an operator does with
// [leased.Client.ForceUnlock]. The contexts of their leases end with a cause that matches
// leased.ErrLeaseLost, and the next waiter gets the lock. client can be the owner's client
// or any other client of the same server with the same key prefix.
//
// Lose does not wait for the message to reach the owners, which takes microseconds: wait
// for what the code under test does then, or call synctest.Wait. If messages are dropped,
// the owners learn of the loss when they renew, after at most a third of their TTL.
//
// Lose fails t if nobody owns the lock, or if the lock was unlocked and is only kept by its
// minimum hold, because the test would then show nothing. A process that keeps the lock with
// leased.WithIdleHold does own it. Lose may be called from any goroutine.
func Lose(t testing.TB, client *leased.Client, name string) {
	t.Helper()
	info, err := client.Inspect(context.Background(), name)
	if err == nil && !slices.ContainsFunc(info.Owners, func(o leased.Owner) bool { return !o.Unlocked }) {
		t.Errorf("leasedtest: nobody owns the lock %q, so nobody can lose it", name)
		return
	}
	if err == nil {
		_, err = client.ForceUnlock(context.Background(), name)
	}
	if err != nil {
		t.Errorf("leasedtest: %v", err)
	}
}

// A Server is an in-memory Redis that can have the troubles of a real one. Its clients
// exclude each other like clients of different processes. Its methods may be called from
// any goroutine, except for Client, which must be called from the goroutine of the test.
type Server struct {
	t      testing.TB
	mini   *miniredis.Miniredis
	addr   string // its own, for leased.NewQuorum; never dialed, and a host name would be resolved
	output output

	dropping atomic.Int32 // calls of DropMessages that were not undone
	frozen   atomic.Int32 // calls of FreezeRenewals that were not undone

	mu      sync.Mutex // guards what follows
	stopped int        // calls of Stop that were not undone
	conns   map[*conn]struct{}
	ahead   time.Duration // how far the server's clock is ahead of the clients'
}

var servers atomic.Uint32 // made so far

// NewServer returns a new server, which ends with the test.
func NewServer(t testing.TB) *Server {
	t.Helper()
	if strconv.IntSize < 64 {
		t.Skip("leasedtest: miniredis reads the time of PEXPIREAT as an int, which has 32 bits here")
	}
	n := servers.Add(1)
	s := &Server{
		t: t, mini: miniredis.NewMiniRedis(), output: output{to: t.Output()}, conns: map[*conn]struct{}{},
		addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), 6379).String(),
	}
	s.mini.ClockTTL(true) // keys expire as time passes; inside a bubble, by its fake clock
	t.Cleanup(func() {
		s.mini.Close()
		s.output.end()
	})
	first, err := s.mini.Dial() // starts serving; before that there is nothing to hook into
	if err != nil {
		t.Fatalf("leasedtest: %v", err)
	}
	_ = first.Close()
	s.mini.Server().SetPreHook(s.refuseRenewals)
	return s
}

// Client returns a new client of the server, like the client of another process. It takes
// the options of [leased.New] and, unless they say otherwise, logs to the output of the
// test.
//
// The client is closed when the test ends, and the test fails if a lease was not unlocked by
// then. A test that leaves a lease behind on purpose, as a process that dies does, closes
// the client itself.
func (s *Server) Client(opts ...leased.Option) *leased.Client {
	s.t.Helper()
	logger := slog.New(slog.NewTextHandler(&s.output, nil))
	client, err := leased.New(s.Redis(), append([]leased.Option{leased.WithLogger(logger)}, opts...)...)
	if err != nil {
		s.t.Fatalf("leasedtest: %v", err)
	}
	s.t.Cleanup(func() {
		done, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := client.Inspect(done, "closed"); errors.Is(err, leased.ErrClosed) {
			return // the test has closed it, and knows what Close returned
		}
		if err := client.Close(); err != nil {
			s.t.Errorf("leasedtest: at the end of the test: %v", err)
		}
	})
	return client
}

// Redis returns a new client of the server, for code that uses Redis itself or that calls leased.New. It is
// closed when the test ends. At most 10,000 of its commands may be under way at once.
func (s *Server) Redis() *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr: s.addr,
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			return s.dial()
		},
		ContextTimeoutEnabled: true,
		// Who waits for a connection does so with a timer that go-redis keeps for the next one, and a
		// bubble does not survive a timer of another bubble. Connections are made as they are needed.
		PoolSize: 10_000,
		// These notifications look the address up, which a bubble does not survive.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	s.t.Cleanup(func() { _ = rdb.Close() }) // a test may have closed it already
	return rdb
}

// Stop takes the server away: connections break, and new ones are refused, until the
// returned function is called. The data stays, and expires as time passes. A lease ends on
// the local clock, before its TTL can have ended on the server.
func (s *Server) Stop() (start func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped++
	for c := range s.conns {
		_ = c.Conn.Close()
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stopped--
	})
}

// FreezeRenewals makes the server refuse to renew the leases of all clients until the
// returned function is called. New leases are granted as usual. A lease ends when its TTL,
// less a margin, has passed since its last renewal.
func (s *Server) FreezeRenewals() (resume func()) { return raise(&s.frozen) }

// DropMessages loses all messages that are published from now on, for all clients, until
// the returned function is called. The server counts the receivers of the messages as if
// they had arrived. A waiter then learns only from a re-check that it has the lock: after
// at most 3 s or a third of its TTL if it was first in the queue when it last asked, else after
// up to 20 s. An owner is not told that it lost the lock or that others wait.
func (s *Server) DropMessages() (deliver func()) { return raise(&s.dropping) }

func raise(n *atomic.Int32) (lower func()) {
	n.Add(1)
	return sync.OnceFunc(func() { n.Add(-1) })
}

// Advance sets the server's clock ahead by d and leaves the clients' clocks as they are:
// the server sees all clients stand still for that long. Locks whose TTL ends in that time
// become free, but their owners do not know it until they renew. So another client can get
// a lock that its owner still believes it holds, which is what fencing tokens are for. Shortly
// after its first lock, a client sends one more command about it, so in a bubble call
// synctest.Wait before Advance.
//
// To let time pass for everyone, sleep in a bubble of testing/synctest. Advance panics if d
// is negative.
func (s *Server) Advance(d time.Duration) {
	if d < 0 {
		panic("leasedtest: the clock cannot be set back")
	}
	s.mu.Lock()
	s.ahead += d
	s.mu.Unlock()
	s.tick()
}

// tick sets the server's clock if it differs from the clock of the process. Left alone, it
// would stand still, so tick is called before each command.
func (s *Server) tick() {
	s.mu.Lock()
	defer s.mu.Unlock() // so that concurrent calls set it in the order of their clocks
	if s.ahead > 0 {
		s.mini.SetTime(time.Now().UTC().Add(s.ahead))
	}
}

// refuseRenewals is called before each command of the server, including those of scripts.
func (s *Server) refuseRenewals(c *mini.Peer, cmd string, args ...string) bool {
	if s.frozen.Load() == 0 || cmd != "EVALSHA" && cmd != "EVAL" || len(args) == 0 {
		return false
	}
	for _, renewal := range []*redisserver.Script{&redisserver.RenewScript, &redisserver.RenewSharedScript} {
		if args[0] == renewal.Sha || args[0] == renewal.Text {
			c.WriteError("ERR leasedtest: renewals are frozen")
			return true
		}
	}
	return false
}

// output is the output of the test, until the test ends: a client that could not be closed
// in time may log later.
type output struct {
	mu sync.Mutex // guards to
	to io.Writer  // nil after the end
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.to == nil {
		return len(p), nil
	}
	return o.to.Write(p)
}

func (o *output) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.to = nil
}
