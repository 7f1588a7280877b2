package redisserver

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A server that takes no new connection does not answer on one, and then those in the pool may be all there are.
func TestAServerAnswersAnewIfItTakesNewConnections(t *testing.T) {
	for reply, want := range map[string]bool{
		"+PONG\r\n":                            true,
		"-NOAUTH Authentication required.\r\n": true,
		"-NOPERM this user has no permissions to run the 'ping' command\r\n":   true,
		"-ERR max number of clients reached\r\n":                               false,
		"-LOADING Redis is loading the dataset in memory\r\n":                  false,
		"-MASTERDOWN Link with MASTER is down\r\n":                             false,
		"-DENIED Redis is running in protected mode because there is none\r\n": false,
		"HTTP/1.1 400 Bad Request\r\n":                                         false,
		"+PONG":                                                                false, // and no more
		"":                                                                     false,
	} {
		o, ended := answering(reply)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		fresh := dialFresh(o)
		answers := fresh.answers(ctx)
		if answers { // and again, on the same connection
			answers = fresh.answers(ctx)
		}
		if answers != want {
			t.Errorf("%q: %v", reply, answers)
		}
		cancel()
		fresh.close()
		closes(t, reply, ended)
	}
	refused := &redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }}
	fresh := dialFresh(refused)
	defer fresh.close()
	if fresh.answers(t.Context()) {
		t.Error("no connection is taken for an answer")
	}
}

// The Addr of a client of Sentinel is no address, and another one may say something to its Dialer alone.
func TestAskingAnewResolvesNoAddress(t *testing.T) {
	var asked atomic.Int64
	before := net.DefaultResolver
	defer func() { net.DefaultResolver = before }()
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		asked.Add(1)
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	for _, addr := range []string{"FailoverClient", "db.internal:6379"} {
		o, ended := answering("+PONG\r\n")
		o.Addr = addr
		fresh := dialFresh(o)
		if answers := fresh.answers(t.Context()); !answers || asked.Load() > 0 {
			t.Errorf("%s: it answers: %v; DNS was asked %d times", addr, answers, asked.Load())
		}
		fresh.close()
		closes(t, addr, ended)
	}
}

// closes waits until the connection has ended.
func closes(t *testing.T, what string, ended <-chan struct{}) {
	t.Helper()
	select {
	case <-ended:
	case <-time.After(3 * time.Second):
		t.Errorf("%q: the connection is not made, or stays open", what)
	}
}

// answering returns options whose Dialer connects to a server that gives this reply to nearly all commands, and a
// channel that is closed when a connection to it has ended.
func answering(reply string) (o *redis.Options, ended chan struct{}) {
	ended = make(chan struct{})
	return &redis.Options{DialTimeout: time.Second, Dialer: func(context.Context, string, string) (net.Conn, error) {
		ours, its := net.Pipe()
		go func() { // ends with its connection
			defer close(ended)
			defer its.Close()
			for p := make([]byte, 1000); ; {
				n, err := its.Read(p)
				if err != nil {
					return
				}
				for cmd := range bytes.SplitSeq(p[:n], []byte("*")) {
					switch {
					case bytes.Contains(bytes.ToLower(cmd), []byte("hello")) && !strings.HasPrefix(reply, "HTTP"):
						_, _ = its.Write([]byte("-ERR unknown command\r\n"))
					case len(cmd) > 0:
						_, _ = its.Write([]byte(reply))
					}
				}
				if strings.Contains(reply, "max number") {
					return
				}
			}
		}()
		return ours, nil
	}}, ended
}

func TestTimedOut(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{context.DeadlineExceeded, true},
		{&net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}, true},
		{errTooLate{}, true},
		{ErrLateAnswer, true},
		{&net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}, false},
		{redis.ErrPoolTimeout, false},
		{errPoolExhausted{1}, false},
		{context.Canceled, false},
		{errors.New("ERR something"), false},
	} {
		if got := timedOut(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

// muted is a connection on which nothing arrives once it is told so.
type muted struct {
	net.Conn
	deaf *atomic.Bool
}

func (c muted) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.deaf.Load() {
			return n, err
		}
	}
}

// wrapConns has o make the connections that wrap returns.
func wrapConns(o *redis.Options, wrap func(net.Conn) net.Conn) {
	direct := o.Dialer
	if direct == nil {
		direct = redis.NewDialer(o)
	}
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wrap(conn), nil
	}
}

// fillPool leaves n idle connections in the pool of rdb.
func fillPool(t *testing.T, rdb *redis.Client, n int) {
	t.Helper()
	all := make([]*redis.Conn, n)
	for i := range all {
		all[i] = rdb.Conn()
		if err := all[i].Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, conn := range all {
		_ = conn.Close()
	}
}

// Where nothing arrives on the connection that the next command would take, those on which nothing arrives are
// discarded, and no others.
func TestSilentConnectionsAreDropped(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		const idle = 40
		for name, dead := range map[string]func(made int) bool{ // by how many connections were made before
			"all":        func(int) bool { return true },
			"the newest": func(made int) bool { return made >= idle/2 },
			"none":       func(int) bool { return false },
			"the oldest": func(made int) bool { return made < idle/2 }, // the last one is used next
		} {
			var made atomic.Int64
			var deaf atomic.Bool
			rdb := target.NewClient(t, func(o *redis.Options) {
				o.PoolSize = idle + 10
				wrapConns(o, func(conn net.Conn) net.Conn {
					if n := int(made.Add(1)) - 1; n < idle && dead(n) {
						return muted{conn, &deaf}
					}
					return conn
				})
			})
			fillPool(t, rdb, idle)
			s := New(rdb, target.Prefix)
			if n, again := s.DropSilent(t.Context(), "x"); n != 0 || rdb.PoolStats().IdleConns != idle || again {
				t.Errorf("%s: %d connections that work are silent, and %d of %d are left", name, n, rdb.PoolStats().IdleConns, idle)
			}
			if n := made.Load(); n != idle+1 {
				t.Errorf("%s: %d connections were made, and not one", name, n-idle)
			}
			deaf.Store(true)
			n, _ := s.DropSilent(t.Context(), "x")
			left := int(rdb.PoolStats().IdleConns)
			switch name {
			case "all": // the first two were a sample
				if n != idle-2 || left != 0 {
					t.Errorf("%d of %d silent ones were found, and %d are left", n, idle, left)
				}
			case "the newest":
				if n != idle/2-2 || left != idle/2 {
					t.Errorf("%d of %d silent ones were found, and %d of %d are left", n, idle/2, left, idle)
				}
			default:
				if n != 0 || left != idle {
					t.Errorf("%s: %d were found, and %d of %d are left", name, n, left, idle)
				}
			}
			if err := rdb.Ping(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		}
	})
}

// A server that hangs after it has answered on the new connection must not lose its whole pool.
func TestConnectionsToAServerThatBeginsToHangAreKept(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		const idle = 40
		var armed, hangs atomic.Bool
		rdb := target.NewClient(t, func(o *redis.Options) {
			o.PoolSize = idle + 10
			made := 0
			var mu sync.Mutex
			wrapConns(o, func(conn net.Conn) net.Conn {
				mu.Lock()
				defer mu.Unlock()
				if made++; made > idle {
					return muted{conn, &hangs} // the new one
				}
				return hanging{muted{conn, &hangs}, &armed}
			})
		})
		fillPool(t, rdb, idle)
		s := New(rdb, target.Prefix)
		armed.Store(true)
		n, again := s.DropSilent(t.Context(), "x")
		if left := int(rdb.PoolStats().IdleConns); n != 0 || left != idle-2 || again {
			t.Errorf("%d were found silent, and %d of %d are left; commands are to be sent again: %v", n, left, idle, again)
		}
	})
}

// hanging is a connection of the pool: the server hangs from when it is used on.
type hanging struct {
	muted
	armed *atomic.Bool
}

func (c hanging) Write(p []byte) (int, error) {
	if c.armed.Load() {
		c.deaf.Store(true)
	}
	return c.muted.Write(p)
}

// A server that answers some of the PINGs late is not cut off from its pool.
func TestConnectionsToAServerWhoseAnswersAreUnevenAreKept(t *testing.T) {
	for _, share := range []float64{0.1, 0.3} {
		closed := 0
		const looks = 60
		for seed := range uint64(looks) {
			synctest.Test(t, func(t *testing.T) {
				redistest.LastInBubble(t)
				const idle = 100
				of := &uneven{share: share, chance: rand.New(rand.NewPCG(seed, 1))}
				rdb := redistest.MiniClient(t, redistest.Mini(t), func(o *redis.Options) {
					o.PoolSize = idle + 10
					wrapConns(o, func(conn net.Conn) net.Conn { return &unevenConn{Conn: conn, of: of} })
				})
				fillPool(t, rdb, idle)
				of.mu.Lock()
				of.on = true
				of.mu.Unlock()
				New(rdb, "").DropSilent(t.Context(), "x")
				n := idle - int(rdb.PoolStats().IdleConns)
				if n > idle/2 {
					t.Errorf("of %d connections %d were closed, with a share of %v", idle, n, share)
				}
				closed += n
			})
		}
		if mean := float64(closed) / looks; mean > 5 {
			t.Errorf("%v connections are closed in a look, on average, with a share of %v", mean, share)
		}
	}
}

// uneven says which answers are late.
type uneven struct {
	share  float64
	mu     sync.Mutex // guards what follows
	on     bool
	chance *rand.Rand
}

func (u *uneven) late() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.on && u.chance.Float64() < u.share
}

// unevenConn is a connection of whose answers to PINGs some are late.
type unevenConn struct {
	net.Conn
	of    *uneven
	late  bool
	until time.Time // the read deadline
}

func (c *unevenConn) SetReadDeadline(t time.Time) error {
	c.until = t
	return c.Conn.SetReadDeadline(t)
}

func (c *unevenConn) Write(p []byte) (int, error) {
	c.late = bytes.Contains(bytes.ToLower(p), []byte("ping")) && c.of.late()
	return c.Conn.Write(p)
}

func (c *unevenConn) Read(p []byte) (int, error) {
	if c.late {
		const late = 400 * time.Millisecond
		if left := time.Until(c.until); !c.until.IsZero() && left < late {
			time.Sleep(left) // in virtual time, like the next
			return 0, os.ErrDeadlineExceeded
		}
		time.Sleep(late) // in virtual time
	}
	return c.Conn.Read(p)
}

// Neither hooks nor the Limiter are called, which would see many failures at once, and could panic.
func TestDroppingSilentConnectionsCallsNoHookAndNoLimiter(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		var deaf atomic.Bool
		limits := &limiter{}
		rdb := target.NewClient(t, func(o *redis.Options) {
			o.Limiter, o.ContextTimeoutEnabled = limits, true // so it is not cloned
			wrapConns(o, func(conn net.Conn) net.Conn {
				if deaf.Load() {
					return conn
				}
				return muted{conn, &deaf}
			})
		})
		const idle = 3
		fillPool(t, rdb, idle)
		var hooked redistest.Counter
		rdb.AddHook(&hooked)
		before := limits.asked.Load()
		deaf.Store(true)
		if n, _ := New(rdb, target.Prefix).DropSilent(t.Context(), "x"); n != idle-2 {
			t.Errorf("%d silent connections", n)
		}
		if n, trips := limits.asked.Load()-before, hooked.Trips(); n != 0 || trips != 0 {
			t.Errorf("the limiter was asked %d times, and the hooks were called %d times", n, trips)
		}
	})
}

type limiter struct{ asked atomic.Int64 }

func (l *limiter) Allow() error {
	l.asked.Add(1)
	return nil
}

func (*limiter) ReportResult(error) {}

func TestEachCommandWithoutAnAnswerInTimeIsToldOfWithItsKey(t *testing.T) {
	r := &road{takes: slowly("", time.Hour)}
	onRoad(t, r, func(t *testing.T, s *Server) {
		var told []string
		s.OnSilence = func(key string) { told = append(told, key) }
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.run(ctx, &RenewScript, []any{"alone"}, "id"); err == nil {
			t.Error("a command that hangs has an answer")
		}
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		s.Renew(t.Context(), []protocol.Renewal{{Keys: &k, Req: protocol.Request{ID: "id"}}})
		if want := []string{"alone", k.Lock}; !slices.Equal(told, want) {
			t.Errorf("told of %q, want %q", told, want)
		}
	})
}
