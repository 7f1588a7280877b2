package leasedtest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
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

// New returns a client on a server of its own: it is short for NewServer(t).Client(opts...).
func New(t testing.TB, opts ...leased.Option) *leased.Client {
	t.Helper()
	return NewServer(t).Client(opts...)
}

// Lose takes the lock of that name away from its owners, as an operator does with
// [leased.Client.ForceUnlock]: the contexts of their leases end with a cause that matches
// leased.ErrLeaseLost, and the next waiter gets the lock. client can be the owner's or any
// other of its server with the same key prefix.
//
// Lose does not wait for the message to reach the owners, which takes it microseconds:
// wait for what the code under test does then, or call synctest.Wait. If messages are
// dropped, they learn of it when they renew, after a third of their TTL at most.
//
// It fails t if nobody owns the lock, since the test would then show nothing. It may be
// called from any goroutine.
func Lose(t testing.TB, client *leased.Client, name string) {
	t.Helper()
	info, err := client.Inspect(context.Background(), name)
	if err == nil && len(info.Owners) == 0 {
		t.Errorf("leasedtest: nobody owns the lock %q, so nobody can lose it", name)
		return
	}
	if err == nil {
		err = client.ForceUnlock(context.Background(), name)
	}
	if err != nil {
		t.Errorf("leasedtest: %v", err)
	}
}

// Server is a Redis in memory, with the troubles that a real one can have. Its clients
// exclude each other as those of different processes do. Its methods may be called from
// any goroutine, except Client, which is for the test's own.
type Server struct {
	t      testing.TB
	mini   *miniredis.Miniredis
	output output

	dropping atomic.Int32 // how often DropMessages was called and not undone
	frozen   atomic.Int32 // the same of FreezeRenewals

	mu      sync.Mutex // guards what follows
	stopped int        // the same of Stop
	conns   map[*conn]struct{}
	ahead   time.Duration // of the server's clock before the clients'
}

// NewServer returns a new server that ends with the test.
func NewServer(t testing.TB) *Server {
	t.Helper()
	if strconv.IntSize < 64 {
		t.Skip("leasedtest: miniredis reads the time of PEXPIREAT as an int, which has 32 bits here")
	}
	s := &Server{t: t, mini: miniredis.NewMiniRedis(), output: output{to: t.Output()}, conns: map[*conn]struct{}{}}
	s.mini.ClockTTL(true) // keys expire as time passes, by the fake clock inside a bubble
	t.Cleanup(func() {
		s.mini.Close()
		s.output.end()
	})
	first, err := s.mini.Dial() // begins to serve; before that there is nothing to hook into
	if err != nil {
		t.Fatalf("leasedtest: %v", err)
	}
	_ = first.Close()
	s.mini.Server().SetPreHook(s.refuseRenewals)
	return s
}

// Client returns a new client of the server, as another process would have. It takes the
// options of [leased.New] and logs to the output of the test unless they say otherwise.
//
// It is closed at the end of the test, which fails if a lease was not unlocked then. A test
// that leaves a lease behind on purpose, as a process that dies does, closes the client
// itself.
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
			return // by the test, which knows what it returned
		}
		if err := client.Close(); err != nil {
			s.t.Errorf("leasedtest: at the end of the test: %v", err)
		}
	})
	return client
}

// Redis returns a new connection to the server, for code that uses Redis itself, or calls
// leased.New. It is closed at the end of the test.
func (s *Server) Redis() *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:6379", // never dialled, but a host name in its place would be resolved
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			return s.dial()
		},
		ContextTimeoutEnabled: true,
		// They look the address up, which a bubble does not survive.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	s.t.Cleanup(func() { _ = rdb.Close() }) // a test may have closed it already
	return rdb
}

// Stop takes the server away: connections break, and new ones are refused, until the
// function that it returns is called. What is stored stays, and expires as time passes. A
// lease ends on the local clock, before its TTL can have ended on the server.
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

// FreezeRenewals has the server refuse to renew leases, of all clients, until the function
// that it returns is called. New leases are granted as ever. A lease ends when its TTL,
// less a margin, has passed since it was renewed last.
func (s *Server) FreezeRenewals() (resume func()) { return raise(&s.frozen) }

// DropMessages loses all messages that are published from now on, of all clients, until
// the function that it returns is called. The server counts their receivers as if they had
// arrived. A waiter then learns that the lock is its own by a re-check, after 3 s or a third
// of its TTL at most, and an owner is not told that it lost the lock or that others wait.
func (s *Server) DropMessages() (deliver func()) { return raise(&s.dropping) }

func raise(n *atomic.Int32) (lower func()) {
	n.Add(1)
	return sync.OnceFunc(func() { n.Add(-1) })
}

// Advance sets the server's clock ahead by d, and leaves that of the clients as it is: to
// the server, all of them stood still for so long. Locks whose TTL ends meanwhile are free,
// and their owners do not know it before they renew: another client can get a lock that is
// believed to be held still, which is what fencing tokens are for.
//
// To let time pass for all, sleep in a bubble of testing/synctest. d must not be negative:
// Advance panics then.
func (s *Server) Advance(d time.Duration) {
	if d < 0 {
		panic("leasedtest: the clock cannot be set back")
	}
	s.mu.Lock()
	s.ahead += d
	s.mu.Unlock()
	s.tick()
}

// tick sets the server's clock, if it is not that of the process. Its own would stand
// still, so this precedes each command.
func (s *Server) tick() {
	s.mu.Lock()
	defer s.mu.Unlock() // two that tick do so in the order of their clocks
	if s.ahead > 0 {
		s.mini.SetTime(time.Now().UTC().Add(s.ahead))
	}
}

// refuseRenewals is called before each command of the server, those of scripts included.
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

// output is that of the test, until the test ends: a client that could not be closed in
// time may log later.
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
