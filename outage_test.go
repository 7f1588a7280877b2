package leased_test

import (
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

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// After a long outage of the server, back-off alone would have each lock wait for up to
// 30 s more.

// hung is a connection to the server on which, while it is shut, nothing arrives but the
// messages of a subscription.
type hung struct{ shut atomic.Bool }

type hungConn struct {
	net.Conn
	all     *hung
	listens atomic.Bool
}

func (h *hung) change(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if h.shut.Load() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		conn, err := direct(ctx, network, addr)
		return &hungConn{Conn: conn, all: h}, err
	}
}

func (c *hungConn) Write(p []byte) (int, error) {
	if subscribes(p) {
		c.listens.Store(true)
	}
	if c.all.shut.Load() && !c.listens.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// docs/operating.md has these figures.
func TestVirtualALeaseSurvivesTheOutageThatTheTableNames(t *testing.T) {
	for ttl, outage := range map[time.Duration]time.Duration{
		6 * time.Second: 2300 * time.Millisecond, 30 * time.Second: 17600 * time.Millisecond, 2 * time.Minute: 76700 * time.Millisecond,
	} {
		for _, refused := range []bool{true, false} {
			if !refused {
				outage -= time.Second
				if ttl > time.Minute {
					outage -= 5 * time.Second // a dial
				}
			}
			t.Run(fmt.Sprintf("%v/refused=%v", ttl, refused), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					outage := outage
					if s.members != nil {
						outage -= time.Second // up to which the servers' PINGs are apart
					}
					var way hung
					rdb, wire := s.lineOf(t)
					if !refused {
						rdb = s.connect(t, way.change)
					}
					l := lock(t, clientOn(t, s, rdb, leased.WithTTL(ttl)).Mutex("x"))
					time.Sleep(ttl/3 - time.Millisecond) // the worst moment: the first renewal is due
					began := time.Now()
					way.shut.Store(true)
					wire.cut()
					time.Sleep(outage)
					way.shut.Store(false)
					wire.mend()
					time.Sleep(ttl)
					if l.Context().Err() != nil || l.TrustedUntil().Before(began.Add(outage+ttl)) {
						t.Errorf("it is trusted until %v after the outage began: %v", l.TrustedUntil().Sub(began), context.Cause(l.Context()))
					}
					unlock(t, l)
				})
			})
		}
	}
}

const outage = 75 * time.Second

func TestVirtualAFreeLockIsEnteredWithin2sOfTheEndOfAnOutage(t *testing.T) {
	for _, trouble := range []string{"OOM command not allowed", "READONLY You can't write against a read only replica.", "NOREPLICAS Not enough good replicas to write.",
		"MASTERDOWN Link with MASTER is down", "CLUSTERDOWN The cluster is down", "LOADING Redis is loading", "BUSY Redis is busy running a script.", "TRYAGAIN Multiple keys request", ""} {
		many := 100
		if testing.Short() {
			many = 20
		}
		for _, locks := range []int{1, many} {
			name := trouble
			if name == "" {
				name = "no answer"
			}
			t.Run(fmt.Sprintf("%.11s/locks=%d", name, locks), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					var way hung
					c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
						way.change(o)
						// After as many failed dials go-redis fails at once, until a dial of its
						// own, one a second and perhaps still hanging, succeeds.
						o.PoolSize, o.PipelinePoolSize = 1500, 1500 // pipelines have a pool of their own from go-redis 9.23 on
					}))
					unlock(t, lock(t, c.Mutex("warm")))
					synctest.Wait()
					if trouble == "" {
						way.shut.Store(true)
					} else {
						s.Mini.SetError(trouble)
					}
					var entered sync.WaitGroup
					for i := range locks {
						entered.Go(func() { unlock(t, lock(t, c.Mutex(fmt.Sprint("x", i)))) })
					}
					time.Sleep(outage)
					sent := s.commands(c)
					s.Mini.SetError("")
					way.shut.Store(false)
					began := time.Now()
					entered.Wait()
					most := 2 * time.Second
					if trouble == "" {
						most += 2 * time.Second // a command may be waiting for its answer
						// From go-redis 9.23 on pipelines have a pool of their own, of 10 connections,
						// which fails at once as said above.
						if locks > 1 {
							most += 2 * time.Second
						}
					}
					if strings.HasPrefix(trouble, "READONLY") {
						// The pool is being searched, and a new connection, whose handshake the embedded
						// server refuses as well, is tried again every 100 ms, up to five times.
						most += 500 * time.Millisecond
					}
					if took := time.Since(began); took > most+10*time.Millisecond {
						t.Errorf("entered %v after the end", took)
					}
					limit := int64(60)
					if strings.HasPrefix(trouble, "READONLY") {
						limit *= 2 // the pool is searched for a connection to a primary
					}
					if locks == 1 && sent > limit {
						t.Errorf("%d commands in the outage", sent)
					}
				})
			})
		}
	}
}

// Others wait for an operator: their keys are of another type. What they are answered says nothing of the
// server, so none of them is asked whether it is well again.
func TestVirtualLocksThatWaitForAnOperatorHoldUpNoOtherAfterAnOutage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		ctx, giveUp := context.WithCancel(context.Background())
		var waiting sync.WaitGroup
		for i := range 20 {
			name := fmt.Sprint("hash", i)
			s.rdb.HSet(ctx, s.Prefix+name, "field", "value")
			waiting.Go(func() { c.Mutex(name).Lock() }) // returns once the key is gone
		}
		time.Sleep(time.Minute)
		s.Mini.SetError("LOADING Redis is loading")
		entered := make(chan time.Time, 1)
		go func() {
			l := lock(t, c.Mutex("good"))
			entered <- time.Now()
			unlock(t, l)
		}()
		time.Sleep(outage)
		s.Mini.SetError("")
		began := time.Now()
		if took := (<-entered).Sub(began); took > 2*time.Second+10*time.Millisecond {
			t.Errorf("entered %v after the end", took)
		}
		giveUp()
		for i := range 20 {
			s.rdb.Del(context.Background(), s.Prefix+fmt.Sprint("hash", i))
		}
		waiting.Wait()
		for i := range 20 {
			c.Mutex(fmt.Sprint("hash", i)).Unlock()
		}
	})
}

// losesRenewals is a hook that loses the answers to as many pipelines with renewals.
type losesRenewals struct{ n atomic.Int32 }

func (*losesRenewals) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *losesRenewals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return l.lose(next(ctx, cmd), cmd)
	}
}

func (l *losesRenewals) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return l.lose(next(ctx, cmds), cmds...) }
}

func (l *losesRenewals) lose(err error, cmds ...redis.Cmder) error {
	for _, cmd := range cmds {
		if args := cmd.Args(); len(args) > 1 && args[1] == redisserver.RenewScript.Sha && l.n.Load() > 0 {
			l.n.Add(-1)
			for _, cmd := range cmds {
				cmd.SetErr(context.DeadlineExceeded)
			}
			return context.DeadlineExceeded
		}
	}
	return err
}

// An outage that a renewal began ends, though nothing but a lock that waits for an operator could be asked.
func TestVirtualALockThatWaitsForAnOperatorIsNotAskedAllTheTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var fails losesRenewals
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, &fails)
		c := clientOn(t, s, rdb)
		l := lock(t, c.Mutex("x"))
		s.rdb.HSet(context.Background(), s.Prefix+"hash", "field", "value")
		waits := make(chan struct{})
		go func() {
			c.Mutex("hash").Lock() // returns once the key is gone
			close(waits)
		}()
		time.Sleep(2 * time.Minute)
		fails.n.Store(1)
		time.Sleep(30 * time.Second)
		if fails.n.Load() != 0 {
			t.Fatal("no renewal has failed")
		}
		before := s.commands(c)
		time.Sleep(5 * time.Minute)
		// A renewal each 10 s, an echo each 20 or 30 s, and the lock's own tries.
		if n := s.commands(c) - before; n > 80 {
			t.Errorf("%d commands in five minutes", n)
		}
		s.rdb.Del(context.Background(), s.Prefix+"hash")
		<-waits
		c.Mutex("hash").Unlock()
		unlock(t, l)
	})
}

// Every 30 s, as its own policy wants it: the rest are the client's.
type leisurely struct{}

func (leisurely) NextBackOff() time.Duration { return 30 * time.Second }

// A probe that hangs is not waited for: another lock asks 2 s after it.
func TestVirtualOneLockOfAClientAsksEvery2sWhetherRedisIsWellAgain(t *testing.T) {
	for _, refusal := range []string{"LOADING Redis is loading", "no answer"} {
		t.Run(refusal, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var way hung
				c := clientOn(t, s, s.connect(t, way.change), leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
				unlock(t, lock(t, c.Mutex("warm")))
				synctest.Wait()
				if refusal == "no answer" {
					way.shut.Store(true)
				} else {
					s.Mini.SetError(refusal)
				}
				ctx, cancel := context.WithCancel(context.Background())
				var all sync.WaitGroup
				const locks = 20
				for i := range locks {
					all.Go(func() { _, _ = c.Mutex(fmt.Sprint("x", i)).LockContext(ctx) })
				}
				time.Sleep(2*time.Second + time.Millisecond) // until every lock has failed
				before := s.commands(c)
				time.Sleep(27 * time.Second) // no lock asks at its own pace in this time
				n := s.commands(c) - before
				if pings := s.members != nil && refusal == "no answer"; !pings && n != 13 || pings && n > 27 { // PINGs of servers that are away
					t.Errorf("%d probes in 27 s", n)
				}
				cancel()
				all.Wait()
				s.Mini.SetError("")
				way.shut.Store(false)
				time.Sleep(time.Minute)
			})
		})
	}
}

// Whoever probed gives up; the next has to.
func TestVirtualALockProbesInTheStepsOfOneThatGaveUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait()
		s.Mini.SetError("LOADING Redis is loading")
		for i := range 5 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i+1)*3*time.Second)
			defer cancel()
			go func() { _, _ = c.Mutex(fmt.Sprint("x", i)).LockContext(ctx) }()
		}
		last := locking(t, c.Mutex("last"))
		time.Sleep(20 * time.Second)
		s.Mini.SetError("")
		began := time.Now()
		unlock(t, <-last)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("entered %v after the end", took)
		}
	})
}

// half is a deployment half of whose locks cannot be reached, as of a Cluster that
// lost a master.
type half struct{ broken func(args []any) bool }

func (h half) DialHook(next redis.DialHook) redis.DialHook                               { return next }
func (h half) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook { return n }

func (h half) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.broken(cmd.Args()) {
			err := redis.ErrPoolTimeout
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func TestVirtualAClusterThatIsHalfBrokenIsNotAskedByAllAllTheTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var refused atomic.Int64
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, half{func(args []any) bool {
			if len(args) < 4 || len(fmt.Sprint(args[3])) < 4 || fmt.Sprint(args[3])[:4] != "lost" {
				return false
			}
			refused.Add(1)
			return true
		}})
		var out logs
		c := clientOn(t, s, rdb, out.option())
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		locks := 100
		if race.Enabled {
			locks = 30
		}
		for i := range locks {
			all.Go(func() { _, _ = c.Mutex(fmt.Sprint("lost", i)).LockContext(ctx) })
		}
		time.Sleep(time.Minute) // until their pauses are long
		before := s.share(refused.Load())
		all.Go(func() { // the other half is well
			for ctx.Err() == nil {
				unlock(t, lock(t, c.Mutex("well")))
				time.Sleep(50 * time.Millisecond)
			}
		})
		const watched = time.Minute
		time.Sleep(watched)
		// Each by its own policy, which pauses for 10 s at least, and one probe a second.
		if n := s.share(refused.Load()) - before; n > int64(locks)*int64(watched/(10*time.Second))+int64(watched/time.Second) {
			t.Errorf("%d commands in %v", n, watched)
		}
		if n := out.count(slog.LevelInfo, "Redis answers again"); n != 0 {
			t.Errorf("the end is logged %d times, and half of the locks cannot be had", n)
		}
		cancel()
		all.Wait()
		time.Sleep(time.Minute)
	})
}

// hang makes connections to an embedded server that can hold back what is sent, also on
// connections closed meanwhile, and deliver all of it later.
type hang struct {
	mu    sync.Mutex // guards what follows
	hangs bool
	conns []*hangingConn
}

type hangingConn struct {
	net.Conn
	way    *hang
	held   []byte
	closed bool
}

func (w *hang) change(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn {
		c := &hangingConn{Conn: conn, way: w}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.conns = append(w.conns, c)
		return c
	})
}

func (c *hangingConn) Write(p []byte) (int, error) {
	c.way.mu.Lock()
	if c.way.hangs {
		c.held = append(c.held, p...)
		c.way.mu.Unlock()
		return len(p), nil
	}
	c.way.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *hangingConn) Close() error {
	c.way.mu.Lock()
	defer c.way.mu.Unlock()
	if c.closed = true; len(c.held) > 0 {
		return nil
	}
	return c.Conn.Close()
}

func (w *hang) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangs = true
}

// end delivers what was held back.
func (w *hang) end(t *testing.T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangs = false
	for _, c := range w.conns {
		if len(c.held) == 0 {
			continue
		}
		_ = c.SetDeadline(time.Time{}) // it may have passed
		if c.closed {                  // its replies are no longer read
			t.Cleanup(func() { _ = c.Conn.Close() })
			go func() { _, _ = io.Copy(io.Discard, c.Conn) }() // ends with the connection
		}
		if _, err := c.Conn.Write(c.held); err != nil {
			t.Errorf("what was held up does not arrive: %v", err)
		}
		c.held = nil
	}
}

func TestVirtualAnOwnerThatAHangingServerMadeHearsThatOthersWait(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		a := clientOn(t, s, s.connect(t, way.change))
		unlock(t, lock(t, a.Mutex("another"))) // its inbox is confirmed
		time.Sleep(time.Second)
		way.start()
		owner := locking(t, a.Mutex("x"))
		later := 11 * time.Second
		if s.members != nil {
			later = 12750 * time.Millisecond // a pause between two PINGs
		}
		time.Sleep(3*time.Minute + later) // its pauses have grown by then
		way.end(t)
		time.Sleep(time.Millisecond) // an acquire that was given up is carried out
		if s.value(t, "x") == "" {
			t.Fatal("nobody was made owner")
		}
		began := time.Now()
		first, second := locking(t, newClient(t, s).Mutex("x")), locking(t, newClient(t, s).Mutex("x"))
		for first != nil || second != nil { // a quorum's client has given back what it hears of late, and is not the first
			select {
			case l := <-owner:
				unlock(t, l)
				owner = nil
			case l := <-first:
				unlock(t, l)
				first = nil
			case l := <-second:
				unlock(t, l)
				second = nil
			}
		}
		if d := time.Since(began); d > 10*time.Millisecond {
			t.Errorf("two others waited %v for an owner that did not know of it", d)
		}
		if owner != nil {
			if s.members == nil {
				t.Error("others entered before it")
			}
			unlock(t, <-owner)
		}
	})
}

// switchings are ways in which an operator has Redis refuse a client's connections.
var switchings = map[string]struct {
	off, on []any
	text    string
}{
	"the user is switched off":    {[]any{"off"}, []any{"on"}, "WRONGPASS"},
	"the password is another one": {[]any{"resetpass", ">new"}, []any{">pw"}, "WRONGPASS"},
}

// Where the connection itself is refused, no command of a pipeline has an error.

func TestUnlockIsNotNilWhileRedisKeepsTheOwnerOfARefusedConnection(t *testing.T) {
	t.Parallel()
	for what, c := range switchings {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			client := clientOn(t, s, s.connect(t, app), leased.WithTTL(20*time.Second), leased.WithReleaseTimeout(500*time.Millisecond))
			l := lock(t, client.Mutex("x"))
			acl(c.off...)
			must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
			err := l.Unlock()
			isAll(t, err, leased.ErrNotReleased)
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("Unlock: %v", err)
			}
			if s.value(t, "x") == "" {
				t.Fatal("it was released: the test has proved nothing")
			}
			acl(c.on...)
			s.becomesClean(t, "x")
		})
	}
}

func TestAWaiterThatGaveUpIsCanceledWhenItsConnectionIsNotRefusedAnyMore(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	l := lock(t, newClient(t, s).Mutex("x"))
	var out logs
	client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(time.Hour))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	refused := make(chan error, 1)
	go func() { // ended by cancel, waited for through refused
		_, err := client.Mutex("x").LockContext(ctx)
		refused <- err
	}()
	s.queued(t, "x", 1)
	acl("off")
	must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
	cancel()
	isAll(t, closesSoon(t, "LockContext returns", refused), leased.ErrNotAcquired)
	eventually(t, "a cancel is refused", func() bool { return out.count(slog.LevelError, "operator") > 0 })
	s.queued(t, "x", 1)
	acl("on")
	s.queued(t, "x", 0)
	unlock(t, l)
}

func TestARenewalOverARefusedConnectionSaysWhy(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	var out logs
	client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(900*time.Millisecond))
	l := lock(t, client.Mutex("x"))
	acl("off")
	must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
	<-l.Context().Done()
	isAll(t, l.Unlock(), leased.ErrLeaseLost)
	if n := out.count(slog.LevelError, "operator"); n != 1 {
		t.Errorf("logged %q", out.messages())
	}
	acl("on")
	s.becomesClean(t, "x")
}

// bare is a hook after which nothing of a pipeline has a value or an error.
type bare struct{ err error }

func (b bare) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (b bare) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (b bare) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return b.err }
}

func TestACommandWithoutReplyAndWithoutErrorHadNoAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithTTL(30*time.Second))
		l := lock(t, c.Mutex("x"))
		s.hook(rdb, bare{})
		began := time.Now()
		<-l.Context().Done()
		if took := time.Since(began); took != 30*time.Second-302*time.Millisecond {
			t.Errorf("ended after %v", took)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestVirtualTheRecipeThatTriesFirstWaitsForATakenLockAndNotForRedis(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, hangs := range []bool{false, true} {
			var way hung
			rdb, wire := s.lineOf(t)
			if hangs {
				rdb = s.connect(t, way.change)
			}
			c, other := clientOn(t, s, rdb, leased.WithTTL(time.Minute)), newClient(t, s) // no renewal fails during a wait
			warm(t, s, c, other)
			mu, taken := c.Mutex("x"), other.Mutex("x")
			taken.Lock()
			time.AfterFunc(3*time.Second, taken.Unlock)
			l, err := lockUnlessDown(context.Background(), mu)
			must(t, err)
			time.Sleep(time.Minute)
			must(t, l.Context().Err()) // the end of the wait's context is not that of the lease
			unlock(t, l)

			away := func() {
				way.shut.Store(hangs)
				if !hangs {
					wire.cut()
				}
			}
			fails := func(within time.Duration, taken bool) {
				t.Helper()
				began := time.Now()
				_, err := lockUnlessDown(context.Background(), mu)
				if took := time.Since(began); took > within || !errors.Is(err, leased.ErrNotAcquired) || errors.Is(err, leased.ErrLocked) != taken {
					t.Errorf("hangs: %v: %v after %v, want an error within %v; taken: %v", hangs, err, took, within, taken)
				}
				way.shut.Store(false)
				wire.mend()
				time.Sleep(time.Minute)
			}
			away()
			fails(2*time.Second+10*time.Millisecond, false)
			taken.Lock()
			time.AfterFunc(time.Second, away)
			fails(10*time.Second, false) // it went away during the wait
			taken.Unlock()
			l = lock(t, mu)
			away()
			fails(10*time.Second, true) // a caller of this process is asked first, and not Redis
			unlock(t, l)
		}
	})
}

func TestVirtualTheHeartbeatOfTheRecipeGivesALockAwayWhenAStepHangs(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		const limit = 30 * time.Second
		began, n := time.Now(), 0
		hangs := make(chan struct{})
		done := make(chan error)
		go func() { // ends with the last step; this test waits for it
			done <- inSteps(context.Background(), c.Mutex("x"), limit, func(context.Context) error {
				n++
				if n == 10 {
					<-hangs
					return nil
				}
				time.Sleep(limit - time.Second) // stands for the work
				return nil
			})
		}()
		synctest.Wait()
		unlock(t, lock(t, other.Mutex("x")))
		if want := 9*(limit-time.Second) + limit; time.Since(began).Round(time.Second) != want {
			t.Errorf("the lock was given away after %v, want %v", time.Since(began), want)
		}
		close(hangs)
		if err := <-done; !errors.Is(err, errHangs) || n != 10 {
			t.Errorf("%d steps, %v", n, err)
		}
	})
}
