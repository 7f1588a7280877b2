package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
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

// fillPipelinePool leaves n idle connections in the pool that the pipelines of rdb have.
func fillPipelinePool(t *testing.T, rdb *redis.Client, n int, prefix string) {
	t.Helper()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			_, _ = rdb.Pipelined(context.Background(), func(p redis.Pipeliner) error {
				p.BLPop(context.Background(), time.Second, prefix+"none")
				return nil
			})
		})
	}
	all.Wait()
	if own := rdb.PoolStats().PipelineStats; own == nil || int(own.IdleConns) < n {
		t.Fatalf("the test proves nothing: %+v", own)
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
		if _, err := c.ForceUnlock(context.Background(), "nobody's"); err != nil {
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
		fillPipelinePool(t, rdb, idle, s.Prefix)
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

// forgetful makes the connections of a network that can forget those it has: then nothing gets through them any
// more, in either direction, and nobody is told. New ones work.
type forgetful struct {
	times atomic.Int64 // how often it has forgotten all
	hangs atomic.Bool  // nothing gets through, on new ones neither
}

type forgotten struct {
	net.Conn
	all  *forgetful
	born int64
}

func (f *forgetful) change(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn { return &forgotten{conn, f, f.times.Load()} })
}

func (c *forgotten) silent() bool { return c.all.hangs.Load() || c.all.times.Load() != c.born }

func (c *forgotten) Write(p []byte) (int, error) {
	if c.silent() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *forgotten) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.silent() {
			return n, err
		}
	}
}

// The first command that meets such a connection waits for its whole time. Then all of them are found.
func TestVirtualSilentIdleConnectionsThatACommandMeetsCostNoLease(t *testing.T) {
	for _, own := range []bool{false, true} { // whether pipelines have connections of their own
		inVirtualTime(t, func(t *testing.T, s place) { silentConnections(t, s, own, true) })
	}
}

func TestVirtualSilentIdleConnectionsThatARenewalMeetsCostNoLease(t *testing.T) {
	for _, own := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) { silentConnections(t, s, own, false) })
	}
}

func TestSilentConnectionsToServersOfAQuorumCostNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		silentConnections(t, quorumPlace(t, true), false, true)
	})
}

func silentConnections(t *testing.T, s place, own, byCommand bool) {
	const idle = 60
	var out logs
	var net forgetful
	rdb := s.connect(t, net.change, func(o *redis.Options) {
		o.PoolSize = idle + 10
		if own {
			o.PipelinePoolSize, o.PipelineReadBufferSize = idle+10, 64<<10
		}
	})
	c := clientOn(t, s, rdb, out.option())
	held := lock(t, c.Mutex("held"))
	mu := c.Mutex("x")
	unlock(t, lock(t, mu))
	for _, one := range s.alike(rdb) {
		fillPool(t, one, idle)
		if own {
			fillPipelinePool(t, one, idle, s.Prefix)
		}
	}
	synctest.Wait()
	net.times.Add(1)
	if byCommand {
		began := time.Now()
		l := lock(t, mu)
		most := 4500 * time.Millisecond // two commands
		if s.members != nil {
			most = 7 * time.Second // and a PING, and what follows it
		}
		if took := time.Since(began); took > most {
			t.Errorf("a free lock took %v", took)
		}
		unlock(t, l)
	}
	time.Sleep(time.Minute)
	if err := held.Context().Err(); err != nil {
		t.Errorf("the lease ended: %v", context.Cause(held.Context()))
	}
	if err := held.Unlock(); err != nil && !errors.Is(err, leased.ErrNotReleased) { // the first command that needs one of them
		t.Error(err)
	}
	time.Sleep(time.Minute)
	if s.members == nil && out.count(slog.LevelWarn, "closed connections to Redis that had stopped answering") == 0 {
		t.Errorf("the log does not say what happened: %q", out.messages())
	}
}

// The code that the Redis client calls for a connection is the user's.
func TestVirtualAPanicWhileConnectionsAreLookedAtEndsNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum looks at the connections to its servers itself")
		}
		const idle = 60
		var out logs
		var net forgetful
		panics := true
		rdb := s.connect(t, net.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
		c := clientOn(t, s, around.Node{Client: rdb, BeforeWithTimeout: func() {
			if panics {
				panic("in WithTimeout")
			}
		}}, out.option())
		mu := c.Mutex("x")
		unlock(t, lock(t, mu))
		for _, panics = range []bool{true, false} {
			fillPool(t, rdb, idle)
			synctest.Wait()
			net.times.Add(1)
			unlock(t, lock(t, mu))
			time.Sleep(time.Minute)
			if out.count(slog.LevelError, "whose connections were looked at, panicked") == 0 {
				t.Errorf("no line tells of the panic: %q", out.messages())
			}
			if found := out.count(slog.LevelWarn, "closed connections to Redis that had stopped answering") > 0; found == panics {
				t.Errorf("while it panics, %v, connections that were silent are found: %v", panics, found)
			}
		}
	})
}

// A TTL of a few seconds ends before a second command can wait for its whole time.
func TestVirtualSilentIdleConnectionsCostNoShortLease(t *testing.T) {
	inVirtualTime(t, shortLeases)
}

func TestSilentConnectionsToServersOfAQuorumCostNoShortLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		shortLeases(t, quorumPlace(t, true))
	})
}

func shortLeases(t *testing.T, s place) {
	const idle, ttl, phases = 60, 4 * time.Second, 10
	var net forgetful
	rdb := s.connect(t, net.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
	c := clientOn(t, s, rdb, leased.WithTTL(ttl))
	for phase := range phases { // of the renewals, when the network forgets its connections
		held := lock(t, c.Mutex(fmt.Sprint("held", phase)))
		for _, one := range s.alike(rdb) {
			fillPool(t, one, idle)
		}
		synctest.Wait()
		time.Sleep(time.Duration(phase) * ttl / 3 / phases)
		net.times.Add(1)
		time.Sleep(5 * ttl)
		if err := held.Context().Err(); err != nil {
			t.Errorf("phase %d: the lease ended: %v", phase, context.Cause(held.Context()))
		}
		_ = held.Unlock()
	}
}

// What it takes to find all that are silent must not grow with their number as long as a lease lasts.
func TestVirtualSilentConnectionsOfALargePoolCostNoLease(t *testing.T) {
	const idle, phases = 350, 10
	for _, ttl := range []time.Duration{4 * time.Second, 6500 * time.Millisecond, 7 * time.Second} {
		inVirtualTime(t, func(t *testing.T, s place) {
			if s.members != nil {
				t.Skip("it takes as long there as for one server")
			}
			var net forgetful
			rdb := s.connect(t, net.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
			c := clientOn(t, s, rdb, leased.WithTTL(ttl))
			for phase := range phases {
				held := lock(t, c.Mutex(fmt.Sprint("held", phase)))
				fillPool(t, rdb, idle)
				synctest.Wait()
				time.Sleep(time.Duration(phase) * ttl / 3 / phases)
				net.times.Add(1)
				time.Sleep(5 * ttl)
				if err := held.Context().Err(); err != nil {
					t.Errorf("%v, phase %d: the lease ended: %v", ttl, phase, context.Cause(held.Context()))
				}
				_ = held.Unlock()
			}
		})
	}
}

// A renewal that was slow once must not let the next one wait for much longer. If all have been slow, the next one
// may wait for longer than a command has time. Then the pool is looked at after that.
func TestVirtualSilentIdleConnectionsCostNoLeaseAfterASlowRenewal(t *testing.T) {
	for ttl, slow := range map[time.Duration]time.Duration{
		4 * time.Second: 900 * time.Millisecond, 6 * time.Second: 1500 * time.Millisecond, 8 * time.Second: 1900 * time.Millisecond,
	} {
		t.Run(ttl.String(), func(t *testing.T) { silentAfter(t, ttl, ttl/2, slow) })
	}
	t.Run("always slow", func(t *testing.T) { silentAfter(t, 30*time.Second, 0, 1500*time.Millisecond) })
}

// silentAfter has a renewal take that long, after a time in which renewals were quick, and then the network forget
// its connections.
func silentAfter(t *testing.T, ttl, quick, slow time.Duration) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum decides without a server that is slow")
		}
		const idle = 60
		var delay atomic.Int64
		var way forgetful
		rdb := s.connect(t, way.change, func(o *redis.Options) {
			o.PoolSize = idle + 10
			wrapConns(o, func(conn net.Conn) net.Conn { return &sluggish{faraway: faraway{Conn: conn}, wait: &delay} })
		})
		c := clientOn(t, s, rdb, leased.WithTTL(ttl))
		held := lock(t, c.Mutex("held"))
		fillPool(t, rdb, idle)
		time.Sleep(quick)
		delay.Store(int64(slow))
		for before := held.TrustedUntil(); !held.TrustedUntil().After(before); time.Sleep(10 * time.Millisecond) {
			if held.Context().Err() != nil {
				delay.Store(0)
				_ = held.Unlock()
				t.Skip("from go-redis 9.23 on, the first renewal dials, and cannot be so slow")
			}
		}
		delay.Store(0)
		way.times.Add(1)
		time.Sleep(2 * ttl)
		if err := held.Context().Err(); err != nil {
			t.Errorf("the lease ended: %v", context.Cause(held.Context()))
		}
		if err := held.Unlock(); err != nil && !errors.Is(err, leased.ErrNotReleased) { // from go-redis 9.23 on, the first command of its pool
			t.Error(err)
		}
	})
}

// A server that is far away has longer to answer, and what finds the silent connections takes a few round trips.
func TestVirtualSilentIdleConnectionsToAFarServerCostNoLease(t *testing.T) {
	for far, ttl := range map[time.Duration]struct{ one, quorum time.Duration }{
		100 * time.Millisecond: {4 * time.Second, 5 * time.Second},
		300 * time.Millisecond: {7 * time.Second, 10 * time.Second},
		450 * time.Millisecond: {10 * time.Second, 15 * time.Second},
	} {
		t.Run(far.String(), func(t *testing.T) {
			if wantsQuorum() {
				silentWhileSlow(t, far, ttl.quorum, false)
				return
			}
			silentWhileSlow(t, far, ttl.one, false)
		})
	}
}

// Here only scripts take long, and so renewals.
func TestVirtualSilentIdleConnectionsToASlowServerCostNoLease(t *testing.T) {
	for slow, ttl := range map[time.Duration]time.Duration{
		600 * time.Millisecond: 10 * time.Second, time.Second: 10 * time.Second, 1900 * time.Millisecond: 10 * time.Second,
	} {
		t.Run(slow.String(), func(t *testing.T) { silentWhileSlow(t, slow, ttl, true) })
	}
}

// silentWhileSlow has the network forget its connections while the server always answers after a delay, to scripts
// only or to everything.
func silentWhileSlow(t *testing.T, slow, ttl time.Duration, onlyScripts bool) {
	const idle, phases = 60, 10
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil && onlyScripts {
			t.Skip("a quorum decides without a server that is slow")
		}
		var delay atomic.Int64
		var way forgetful
		rdb := s.connect(t, way.change, func(o *redis.Options) {
			o.PoolSize = idle + 10
			wrapConns(o, func(conn net.Conn) net.Conn {
				return &sluggish{faraway: faraway{Conn: conn}, wait: &delay, onlyScripts: onlyScripts}
			})
		})
		c := clientOn(t, s, rdb, leased.WithTTL(ttl))
		for phase := range phases { // of the renewals, when the network forgets its connections
			held := lock(t, c.Mutex(fmt.Sprint("held", phase)))
			for _, one := range s.alike(rdb) {
				fillPool(t, one, idle)
			}
			delay.Store(int64(slow))
			time.Sleep(2*ttl + time.Duration(phase)*ttl/3/phases)
			if err := held.Context().Err(); err != nil {
				t.Fatal("the lease ended before the connections were forgotten: ", context.Cause(held.Context()))
			}
			way.times.Add(1)
			time.Sleep(2 * ttl)
			if err := held.Context().Err(); err != nil {
				t.Errorf("phase %d: the lease ended: %v", phase, context.Cause(held.Context()))
			}
			delay.Store(0)
			time.Sleep(ttl)
			_ = held.Unlock()
		}
	})
}

// Behind Sentinel, the connection to it is forgotten, too. go-redis asks on that first where the primary is, and waits
// twice ReadTimeout for the answer.
func TestVirtualSilentIdleConnectionsBehindSentinelCostNoLease(t *testing.T) {
	const idle, phases = 60, 10
	for read, ttl := range map[time.Duration]time.Duration{2 * time.Second: 10 * time.Second, 500 * time.Millisecond: 5 * time.Second} {
		t.Run(read.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					t.Skip("a quorum is not behind Sentinel")
				}
				var way forgetful
				rdb := s.connect(t, way.change, func(o *redis.Options) {
					o.PoolSize, o.ReadTimeout = idle+10, read
					direct, asks, knows := o.Dialer, make(chan struct{}, 1), int64(0)
					o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						asks <- struct{}{} // one after the other, as go-redis does
						if now := way.times.Load(); now != knows {
							time.Sleep(2 * read)
							knows = now
						}
						<-asks
						return direct(ctx, network, addr)
					}
				})
				c := clientOn(t, s, rdb, leased.WithTTL(ttl))
				for phase := range phases { // of the renewals, when the network forgets its connections
					held := lock(t, c.Mutex(fmt.Sprint("held", phase)))
					fillPool(t, rdb, idle)
					time.Sleep(2*ttl + time.Duration(phase)*ttl/3/phases)
					way.times.Add(1)
					time.Sleep(2 * ttl)
					if err := held.Context().Err(); err != nil {
						t.Errorf("phase %d: the lease ended: %v", phase, context.Cause(held.Context()))
					}
					time.Sleep(ttl)
					_ = held.Unlock()
				}
			})
		})
	}
}

// sluggish is a connection to a server that answers with a delay, which a test can change.
type sluggish struct {
	faraway
	wait        *atomic.Int64
	onlyScripts bool
	script      bool // the last command was one
}

func (c *sluggish) Write(p []byte) (int, error) {
	c.script = bytes.Contains(bytes.ToLower(p), []byte("\r\nevalsha\r\n"))
	return c.faraway.Write(p)
}

func (c *sluggish) Read(p []byte) (int, error) {
	c.delay = 0
	if c.script || !c.onlyScripts {
		c.delay = time.Duration(c.wait.Load())
	}
	return c.faraway.Read(p)
}

// A slow server answers late on each connection, on a new one too. If its connections were closed, the next
// command would need several round trips for another one, and have no time left: it has none anyway with more
// than half a second for each.
func TestVirtualASlowServerKeepsItsConnections(t *testing.T) {
	for _, wait := range []time.Duration{450 * time.Millisecond, 550 * time.Millisecond, 900 * time.Millisecond} {
		for _, idle := range []int{1, 12} {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					t.Skip("a quorum decides without a server that is slow")
				}
				const ttl = 4 * time.Second
				var delay atomic.Int64
				rdb := s.connect(t, func(o *redis.Options) {
					wrapConns(o, func(conn net.Conn) net.Conn { return &sluggish{faraway: faraway{Conn: conn}, wait: &delay} })
				})
				c := clientOn(t, s, rdb, leased.WithTTL(ttl))
				held := lock(t, c.Mutex("held"))
				fillPool(t, rdb, idle)
				time.Sleep(ttl / 2) // from go-redis 9.23 on, the first renewal dials
				before := rdb.PoolStats().IdleConns
				delay.Store(int64(wait))
				time.Sleep(10 * ttl)
				delay.Store(0)
				time.Sleep(time.Second) // until nothing is under way
				if left := rdb.PoolStats().IdleConns; left < before {
					t.Errorf("%v: %d of %d idle connections are left", wait, left, before)
				}
				if err := held.Unlock(); err != nil && wait < 500*time.Millisecond {
					t.Errorf("%v: %v", wait, err)
				}
			})
		}
	}
}

// Where the server answers on new connections neither, those in the pool are kept: they work again when it does.
func TestVirtualIdleConnectionsToAServerThatHangsAreKept(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const idle = 60
		var net forgetful
		rdb := s.connect(t, net.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
		c := clientOn(t, s, rdb)
		mu := c.Mutex("x")
		unlock(t, lock(t, mu))
		for _, one := range s.alike(rdb) {
			fillPool(t, one, idle)
		}
		synctest.Wait()
		net.hangs.Store(true)
		next := locking(t, mu)
		time.Sleep(10 * time.Second)
		net.hangs.Store(false)
		unlock(t, <-next)
		for _, one := range s.alike(rdb) {
			if left := one.PoolStats().IdleConns; left < idle-20 {
				t.Errorf("%d of %d idle connections are left", left, idle)
			}
		}
	})
}

// countPings returns how many PINGs reach the server from now on.
func countPings(s place) *atomic.Int64 {
	var pings atomic.Int64
	s.Mini.SetPreHook(func(_ *mini.Peer, cmd string, _ ...string) bool {
		if cmd == "PING" {
			pings.Add(1)
		}
		return false
	})
	return &pings
}

// However many commands had no answer, a server that was frozen is asked once, and not on every connection.
func TestVirtualAServerThatWasFrozenIsNotFloodedWithPings(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum's servers are sent PINGs for other reasons")
		}
		const idle = 60
		var net forgetful
		rdb := s.connect(t, net.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		fillPool(t, rdb, idle)
		synctest.Wait()
		pings := countPings(s)
		net.hangs.Store(true)
		var all []<-chan *leased.Lease
		for i := range 30 { // which have no answer one after the other, after the server was frozen
			all = append(all, locking(t, c.Mutex(fmt.Sprint("x", i))))
			time.Sleep(60 * time.Millisecond)
		}
		net.hangs.Store(false)
		for _, l := range all {
			unlock(t, <-l)
		}
		time.Sleep(time.Second)
		if n := pings.Load(); n == 0 || n > 10 { // two looks at two pools, each with one on the new connection before, and two new connections
			t.Errorf("%d PINGs", n)
		}
		if left := rdb.PoolStats().IdleConns; left < idle-30 {
			t.Errorf("%d of %d idle connections are left", left, idle)
		}
	})
}

// A server that was frozen for longer answers the PING on a new connection when it goes on. So do the others then.
func TestVirtualAServerThatThawsKeepsItsConnections(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum's servers are sent PINGs for other reasons")
		}
		const idle = 30
		var out logs
		var b backlog
		rdb := s.connect(t, b.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
		c := clientOn(t, s, rdb, out.option())
		mu := c.Mutex("x")
		unlock(t, lock(t, mu))
		fillPool(t, rdb, idle)
		synctest.Wait()
		pings := countPings(s)
		b.hang()
		time.AfterFunc(3*time.Second, b.goOn) // the PING on the next connection is over, and that on a new one is not
		unlock(t, lock(t, mu))
		time.Sleep(time.Second)
		if n := pings.Load(); n == 0 || n > 4 { // two of them on the new connection
			t.Errorf("%d PINGs", n)
		}
		if out.count(slog.LevelWarn, "closed connections to Redis that had stopped answering") != 0 {
			t.Errorf("the log says that connections were silent: %q", out.messages())
		}
	})
}

// Each master of a Cluster has a pool of its own. One whose command has no answer while another one's pool is looked
// at is looked at next.
func TestVirtualSilentConnectionsToAllMastersAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		dial := map[string]func(context.Context, string, string) (net.Conn, error){ // by the port: go-redis leaves out the host
			"1": redistest.MiniOptions(redistest.Mini(t)).Dialer,
			"2": redistest.MiniOptions(redistest.Mini(t)).Dialer,
		}
		port := func(addr string) string { return addr[strings.LastIndex(addr, ":")+1:] }
		through := redistest.Options("")
		through.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dial[port(addr)](ctx, network, addr)
		}
		var all forgetful
		all.change(through)
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Dialer: through.Dialer, MaintNotificationsConfig: through.MaintNotificationsConfig, PoolSize: 40, ContextTimeoutEnabled: true,
			ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
				return []redis.ClusterSlot{
					{Start: 0, End: 8191, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:1"}}},
					{Start: 8192, End: 16383, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:2"}}},
				}, nil
			},
		})
		t.Cleanup(func() { _ = rdb.Close() })
		c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		names := map[string]string{} // of a lock at each
		for i := 0; len(names) < len(dial); i++ {
			name := fmt.Sprint("x", i)
			unlock(t, lock(t, c.Mutex(name)))
			node, err := rdb.MasterForKey(context.Background(), name)
			must(t, err)
			names[port(node.Options().Addr)] = name
		}
		must(t, rdb.ForEachMaster(context.Background(), func(_ context.Context, node *redis.Client) error {
			fillPool(t, node, 20)
			return nil
		}))
		synctest.Wait()
		all.times.Add(1)
		var locked sync.WaitGroup
		for _, name := range names {
			locked.Go(func() {
				began := time.Now()
				unlock(t, lock(t, c.Mutex(name)))
				if took := time.Since(began); took > 5*time.Second { // two commands
					t.Errorf("a free lock took %v", took)
				}
			})
			time.Sleep(400 * time.Millisecond) // the other one is being looked at when this one has no answer
		}
		locked.Wait()
	})
}
