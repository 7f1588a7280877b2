package leased_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A server, or a load balancer, closes all connections at once: when it restarts, fails over, or finds them
// idle. go-redis cannot see that of a connection that is encrypted, so each command meets another dead one.

// fillPool leaves n idle connections in the pool of rdb, that work.
func fillPool(t *testing.T, rdb *redis.Client, n int) {
	t.Helper()
	var all []*redis.Conn
	for broken := 0; len(all) < n; {
		conn := rdb.Conn()
		if err := conn.Ping(context.Background()).Err(); err == nil {
			all = append(all, conn)
			continue
		} else if broken++; broken > 2*n {
			t.Fatal(err)
		}
		_ = conn.Close() // it had been in the pool, and go-redis discards it
	}
	for _, conn := range all {
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if idle := rdb.PoolStats().IdleConns; int(idle) < n {
		t.Fatalf("%d idle connections: the test proves nothing", idle)
	}
}

func TestVirtualBrokenIdleConnectionsCostNoTimeAndNoLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum has tests of its own")
		}
		var out logs
		const idle = 30
		var never atomic.Bool // an inbox would be asked for an echo, which rids the pool of broken connections as well
		rdb, l := s.lineOf(t, func(o *redis.Options) {
			o.PoolSize = idle + 10 // some are left for what is sent meanwhile
			deafUntil(&never, o)
		})
		c := clientOn(t, s, rdb, leased.WithTTL(6*time.Second), out.option())
		breakAll := func() {
			fillPool(t, rdb, idle)
			synctest.Wait() // or a command under way would be cut as well
			l.cut()
			l.mend()
		}
		held := lock(t, c.Mutex("held"))
		mu := c.Mutex("x")
		unlock(t, lock(t, mu))

		breakAll()
		began := time.Now()
		if !mu.TryLock() {
			t.Fatal("a try of a free lock failed")
		}
		breakAll()
		if err := mu.UnlockContext(context.Background()); err != nil {
			t.Error(err)
		}
		breakAll()
		unlock(t, lock(t, mu))
		breakAll()
		if _, err := c.Inspect(context.Background(), "held"); err != nil {
			t.Error(err)
		}
		breakAll()
		if err := c.ForceUnlock(context.Background(), "nobody's"); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 200*time.Millisecond {
			t.Errorf("it all took %v", took)
		}

		for range 5 { // renewals
			breakAll()
			time.Sleep(3 * time.Second)
		}
		unlock(t, held)
		if n := out.count(slog.LevelWarn, "Redis does not answer"); n != 0 {
			t.Errorf("Redis answers on every new connection, and the log says: %q", out.messages())
		}
	})
}

// Pipelines, which renewals are, can have a pool of their own, of any size.
func TestVirtualBrokenIdleConnectionsOfPipelinesCostNoLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum has tests of its own")
		}
		const idle = 40
		var never atomic.Bool // as above
		rdb, l := s.lineOf(t, func(o *redis.Options) {
			o.PoolSize, o.PipelinePoolSize, o.PipelineReadBufferSize = idle+10, idle+10, 64<<10
			deafUntil(&never, o)
		})
		c := clientOn(t, s, rdb, leased.WithTTL(6*time.Second))
		held := lock(t, c.Mutex("held"))
		var all sync.WaitGroup
		for range idle {
			all.Go(func() {
				_, _ = rdb.Pipelined(context.Background(), func(p redis.Pipeliner) error {
					p.BLPop(context.Background(), time.Second, s.Prefix+"none")
					return nil
				})
			})
		}
		all.Wait()
		if own := rdb.PoolStats().PipelineStats; own == nil || own.IdleConns < idle {
			t.Fatalf("the test proves nothing: %+v", own)
		}
		synctest.Wait()
		l.cut()
		l.mend()
		time.Sleep(20 * time.Second)
		unlock(t, held)
	})
}

// fussy is a connection through a proxy that answers a PING and hangs up on scripts.
type fussy struct {
	net.Conn
	scripts *atomic.Int64
	over    atomic.Bool
}

func (c *fussy) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("evalsha")) {
		c.scripts.Add(1)
		c.over.Store(true)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *fussy) Read(p []byte) (int, error) {
	if c.over.Load() {
		return 0, io.EOF
	}
	return c.Conn.Read(p)
}

func TestVirtualAServerThatHangsUpOnScriptsIsNotAskedAllTheTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum has tests of its own")
		}
		var scripts atomic.Int64
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &fussy{Conn: conn, scripts: &scripts} })
		}))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
		if n := scripts.Load(); n < 2 || n > 150 { // cancels are repeated at once, too
			t.Errorf("%d commands in a minute", n)
		}
		isAll(t, c.Close(), leased.ErrClosed) // for the cancel has no answer either
	})
}

func TestConnectionsOfTLSThatTheServerClosedCostNoTime(t *testing.T) {
	t.Parallel()
	in := redistest.TLSServer(t)
	const idle = 30
	rdb := in.Client(func(o *redis.Options) { o.PoolSize = idle + 10 })
	c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	admin := in.Client()
	mu := c.Mutex("x")
	unlock(t, lock(t, mu))
	for range 3 {
		fillPool(t, rdb, idle)
		if err := admin.Do(context.Background(), "client", "kill", "type", "normal", "skipme", "yes").Err(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		l, err := mu.TryLockContext(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
	}
}
