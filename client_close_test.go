package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestCloseEndsLeasesAndWaitsForTheirUnlock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Second))
		l := lock(t, c.Mutex("x"))
		c.Mutex("y").Lock()
		closed := make(chan error, 1)
		began := time.Now()
		go func() { closed <- c.Close() }()
		work := l.Context()
		<-work.Done()
		isAll(t, context.Cause(work), leased.ErrClosed)
		if errors.Is(context.Cause(work), leased.ErrLeaseLost) {
			t.Error("a closed client's lease is not a lost one")
		}
		time.Sleep(4 * time.Second)
		if s.value(t, "x") == "" {
			t.Error("it was not renewed while its holder cleans up")
		}
		if !open(closed) {
			t.Fatal("Close did not wait")
		}
		unlock(t, l)
		c.Mutex("y").Unlock()
		if err := <-closed; err != nil || time.Since(began) != 4*time.Second {
			t.Errorf("Close returned %v after %v", err, time.Since(began))
		}
		if !s.clean(t, "x") || !s.clean(t, "y") {
			t.Error("not released")
		}
		if err := c.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// Code that unlocks for a while, as sync.Cond does, has deferred an Unlock before the Lock that panics.
func TestALockThatPanicsInAShutdownLeavesTheHoldOfAnotherGoroutineAlone(t *testing.T) {
	again := func(l sync.Locker) <-chan any {
		panicked := make(chan any, 1)
		go func() {
			panicked <- panics(func() {
				defer l.Unlock()
				l.Lock()
			})
		}()
		return panicked
	}
	for what, of := range map[string]func(c *leased.Client) sync.Locker{
		"Mutex":   func(c *leased.Client) sync.Locker { return c.Mutex("x") },
		"RWMutex": func(c *leased.Client) sync.Locker { return c.RWMutex("x") },
		"RLocker": func(c *leased.Client) sync.Locker { return c.RWMutex("x").RLocker() },
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				mu := of(c)
				mu.Lock()
				var waited <-chan any
				if what != "RLocker" { // where it would enter
					waited = again(mu) // waits already
					synctest.Wait()
				}
				closed := make(chan error, 1)
				go func() { closed <- c.Close() }()
				synctest.Wait()
				came := again(mu) // comes later
				time.Sleep(3 * time.Second)
				if s.clean(t, "x") || !open(came) {
					t.Error("the hold has ended, or the other goroutine's Lock has returned")
				}
				mu.Unlock()
				if err := <-closed; err != nil {
					t.Errorf("Close: %v", err)
				}
				if text := fmt.Sprint(<-came); !strings.Contains(text, "of unlocked mutex") {
					t.Errorf("the deferred Unlock panicked with %q", text)
				}
				if waited != nil {
					<-waited
				}
			})
		})
	}
	t.Run("beside another lock", func(t *testing.T) { // which only the goroutine that waits can unlock
		inVirtualTime(t, func(t *testing.T, s place) {
			c := newClient(t, s)
			a, b := c.Mutex("a"), c.Mutex("b")
			a.Lock()
			b.Lock()
			closed, panicked := make(chan error, 1), make(chan any, 1)
			go func() {
				panicked <- panics(func() {
					defer b.Unlock()
					a.Lock()
				})
			}()
			go func() { closed <- c.Shutdown(context.Background()) }()
			time.Sleep(time.Second)
			if !open(panicked) || a.TryLock() {
				t.Error("the other goroutine does not wait for the holder to leave, or TryLock is let in")
			}
			a.Unlock()
			<-panicked
			if err := <-closed; err != nil || !s.clean(t, "b") {
				t.Errorf("Shutdown: %v", err)
			}
		})
	})
	// Code that gives a read lock up for a write lock, or the other way round, has an Unlock deferred that
	// would end the hold of somebody who is inside in the other mode.
	for _, reads := range []bool{true, false} {
		t.Run(fmt.Sprint("beside the other mode, reads=", reads), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				rw := c.RWMutex("x")
				inside, wants := sync.Locker(rw), rw.RLocker()
				if reads {
					inside, wants = wants, inside
				}
				inside.Lock()
				closed, panicked := make(chan error, 1), make(chan any, 1)
				go func() {
					panicked <- panics(func() {
						defer inside.Unlock()
						wants.Lock()
					})
				}()
				synctest.Wait()
				go func() { closed <- c.Close() }()
				time.Sleep(3 * time.Second)
				if s.clean(t, "x") || !open(panicked) || rw.TryLock() || rw.TryRLock() {
					t.Error("the hold has ended, or Lock has returned, or a try does not return false")
				}
				inside.Unlock()
				if err := <-closed; err != nil {
					t.Errorf("Close: %v", err)
				}
				if text := fmt.Sprint(<-panicked); !strings.Contains(text, "of unlocked mutex") {
					t.Errorf("the deferred Unlock panicked with %q", text)
				}
			})
		})
	}
	t.Run("not unlocked in time", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T, s place) {
			c := newClient(t, s)
			mu := c.Mutex("x")
			mu.Lock()
			closed := make(chan error, 1)
			go func() { closed <- c.Close() }()
			synctest.Wait()
			came := again(mu)
			isAll(t, <-closed, leased.ErrClosed)
			<-came
			if err, ok := panics(func() { mu.TryLock() }).(error); !ok || !errors.Is(err, leased.ErrClosed) {
				t.Errorf("after Close, TryLock panicked with %v", err)
			}
			if s.value(t, "x") == "" {
				t.Error("it was released while its holder may be at work")
			}
		})
	})
}

func TestCloseTurnsAwayThoseWhoWaitAndThoseWhoCome(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		c := newClient(t, s)
		refused := make(chan error, 1)
		panicked := make(chan any, 1)
		go func() {
			_, err := c.Mutex("x").LockContext(context.Background())
			refused <- err
		}()
		go func() { panicked <- panics(c.Mutex("x").Lock) }()
		synctest.Wait()
		began := time.Now()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		isAll(t, <-refused, leased.ErrNotAcquired, leased.ErrClosed)
		if err, ok := (<-panicked).(error); !ok || !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Lock panicked with %v", err)
		}
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("took %v", took)
		}

		_, err := c.Mutex("x").LockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired, leased.ErrClosed)
		_, err = c.Mutex("free").TryLockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired, leased.ErrClosed)
		for what, f := range map[string]func(){
			"Lock": c.Mutex("x").Lock, "TryLock": func() { c.Mutex("x").TryLock() }, "Unlock": c.Mutex("x").Unlock,
		} {
			if panics(f) == nil {
				t.Errorf("%s of a closed client did not panic", what)
			}
		}
		unlock(t, owner)
		if !s.clean(t, "x") {
			t.Error("a waiter of the closed client is still queued")
		}
	})
}

func TestCloseReleasesIdleGrants(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithIdleHold(time.Hour))
		for _, name := range []string{"x", "y", "z"} {
			unlock(t, lock(t, c.Mutex(name)))
			if s.value(t, name) == "" {
				t.Fatal("it was not kept")
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"x", "y", "z"} {
			if s.value(t, name) != "" {
				t.Errorf("%s was not released", name)
			}
		}
	})
}

func TestALeaseThatNobodyUnlocksIsLeftToItsTTLByClose(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		c := newClient(t, s, leased.WithTTL(ttl))
		l := lock(t, c.Mutex("x"))
		began := time.Now()
		err := c.Close()
		if err == nil || time.Since(began) != 5*time.Second {
			t.Errorf("Close returned %v after %v", err, time.Since(began))
		}
		if s.value(t, "x") == "" {
			t.Fatal("it was released under its holder's feet")
		}
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if waited := time.Since(began); waited < ttl || waited > ttl+2*time.Millisecond {
			t.Errorf("another client got in after %v", waited)
		}
		done := make(chan error, 1)
		go func() { done <- l.Unlock() }()
		select {
		case <-done: // whatever it says
		case <-time.After(time.Minute):
			t.Error("Unlock after Close hangs")
		}
		if again := c.Close(); again != err { // the very same
			t.Errorf("second Close: %v", again)
		}
	})
}

func TestUnlockAfterCloseSaysWhatBecameOfTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		began := time.Now()
		if err := c.Shutdown(ctx); err == nil || time.Since(began) != time.Second {
			t.Errorf("Shutdown returned %v after %v", err, time.Since(began))
		}
		if err := l.Unlock(); err == nil {
			t.Error("Unlock claims a release although the client does not talk to Redis anymore")
		}
		if took := time.Since(began); took > 2*time.Second+time.Millisecond { // of it, a release timeout
			t.Errorf("Unlock took until %v", took)
		}
		if s.value(t, "x") == "" {
			t.Error("the key is gone")
		}
	})
}

// A client that is closed renews nothing and asks nothing, so nothing but the time says that a lease has
// ended.
func TestALeaseWhoseTimeEndsAfterCloseIsLost(t *testing.T) {
	shut := func(t *testing.T, c *leased.Client) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if err := c.Shutdown(ctx); err == nil {
			t.Error("Shutdown with a lease inside returned nil")
		}
	}
	for what, run := range map[string]func(t *testing.T, c *leased.Client, work func()) error{
		"Do": func(t *testing.T, c *leased.Client, work func()) error {
			return c.Mutex("x").Do(context.Background(), func(context.Context) error { work(); return nil })
		},
		"RDo": func(t *testing.T, c *leased.Client, work func()) error {
			return c.RWMutex("x").RDo(context.Background(), func(context.Context) error { work(); return nil })
		},
		"a lease": func(t *testing.T, c *leased.Client, work func()) error {
			l := lock(t, c.Mutex("x"))
			work()
			return l.Unlock()
		},
		"a name": func(t *testing.T, c *leased.Client, work func()) error {
			mu := c.Mutex("x")
			mu.Lock()
			work()
			return mu.UnlockContext(context.Background())
		},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				losses := make(chan leased.LossEvent, 2)
				c := newClient(t, s, leased.WithTTL(time.Second), leased.WithLossHandler(func(l leased.LossEvent) { losses <- l }))
				other := newClient(t, s)
				isAll(t, run(t, c, func() {
					shut(t, c)
					unlock(t, lock(t, other.Mutex("x"))) // once the TTL is over
				}), leased.ErrLeaseLost)
				synctest.Wait()
				if len(losses) != 1 {
					t.Errorf("%d losses reported", len(losses))
				}

				c = newClient(t, s, leased.WithTTL(time.Second))
				err := run(t, c, func() { shut(t, c) })
				if errors.Is(err, leased.ErrLeaseLost) {
					t.Errorf("unlocked in time: %v", err)
				}
			})
		})
	}
}

func TestConcurrentClosesAllWaitForTheEnd(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		closed := make(chan error, 3)
		for range 3 {
			go func() { closed <- c.Close() }()
		}
		time.Sleep(time.Second)
		if !open(closed) {
			t.Error("one of them did not wait")
		}
		unlock(t, l)
		for range 3 {
			if err := <-closed; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestCloseStopsEveryGoroutine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t)
		rdb.Ping(context.Background())
		synctest.Wait()
		before := runtime.NumGoroutine()
		for range 20 {
			c := clientOn(t, s, rdb)
			unlock(t, lock(t, c.Mutex("x")))
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait()
		// A pool of connections may have grown by a few, with a goroutine each in
		// the embedded server.
		if grew := runtime.NumGoroutine() - before; grew > 10 {
			t.Errorf("20 clients left %d goroutines", grew)
		}
		if err := rdb.Ping(context.Background()).Err(); err != nil {
			t.Errorf("the Redis client was closed: %v", err)
		}
	})
}

func TestAClientThatWasNeverUsedCloses(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s)
		wire.cut()
		began := time.Now()
		if err := c.Close(); err != nil || time.Since(began) != 0 {
			t.Errorf("Close returned %v after %v", err, time.Since(began))
		}
	})
}

func TestCloseWhileRedisIsUnreachableIsBounded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s)
		unlock(t, lock(t, c.Mutex("x", leased.WithIdleHold(time.Hour))))
		wire.cut()
		began := time.Now()
		_ = c.Close()
		if took := time.Since(began); took > 8*time.Second { // 5 s, and a command under way
			t.Errorf("took %v", took)
		}
	})
}

func TestCloseIsBoundedWhenTheSubscriptionGetsNoAnswer(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	o := redistest.Options(silent.Addr().String())
	o.ReadTimeout = time.Hour
	rdb := redis.NewClient(o)
	defer rdb.Close()
	c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	c.Mutex("x").TryLock()
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	closesSoon(t, "Close returns, without an answer that would take an hour", closed)
}

// A load balancer can send the next connection to a server that accepts it and never answers. go-redis
// waits for its greeting for ReadTimeout, which is a user's choice for slow commands of other kinds, and cannot
// close the subscription meanwhile.
func TestCloseDoesNotWaitForAServerThatDoesNotGreetASubscription(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		hangs := make(chan struct{})
		var mu sync.Mutex
		var subscription net.Conn // until it was cut
		var cut atomic.Bool
		rdb := s.connect(t, func(o *redis.Options) {
			o.ReadTimeout, o.ContextTimeoutEnabled = time.Hour, true
			direct := o.Dialer
			if direct == nil {
				direct = redis.NewDialer(o)
			}
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if cut.Load() {
					here, _ := net.Pipe()
					close(hangs)
					return written{here}, nil
				}
				conn, err := direct(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				return noted{conn, func() { mu.Lock(); subscription = conn; mu.Unlock() }}, nil
			}
		})
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		eventually(t, "its inbox listens", func() bool { return len(s.inboxes(t)) == 1 })
		cut.Store(true)
		mu.Lock()
		subscription.Close()
		mu.Unlock()
		<-hangs
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// written is a connection to which all can be written.
type written struct{ net.Conn }

func (written) Write(p []byte) (int, error) { return len(p), nil }

// noted is a connection that says when a subscription is made on it.
type noted struct {
	net.Conn
	subscribing func()
}

func (c noted) Write(p []byte) (int, error) {
	if subscribes(p) {
		c.subscribing()
	}
	return c.Conn.Write(p)
}

func TestAnUnlockAfterCloseSaysThatTheLockIsNotReleased(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		if err := c.Close(); err == nil {
			t.Error("Close with a lease inside returned nil")
		}
		isAll(t, l.Unlock(), leased.ErrNotReleased, leased.ErrClosed)
	})
}

func TestVirtualCloseWaitsFiveSecondsForHoldersAndNotLonger(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, err := s.open(t, s.connect(t), leased.WithLogger(slog.New(slog.DiscardHandler)), leased.WithTTL(6*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		began := time.Now()
		isAll(t, c.Close(), leased.ErrClosed)
		if d := time.Since(began); d != 5*time.Second {
			t.Errorf("waited %v", d)
		}
		// Renewed until then, and not released: another may not enter before the
		// last renewal's TTL ends.
		if left := s.rdb.PTTL(context.Background(), "x").Val(); left < 4*time.Second || left > 6*time.Second {
			t.Errorf("its TTL goes on for %v", left)
		}
		if n := c.Stats().Renewals; n != 2 {
			t.Errorf("renewed %d times while Close waited", n)
		}
		if c.Stats().Lost != 0 {
			t.Error("the lease was taken for lost")
		}
		_ = l.Unlock()
	})
}

// A service that is closed while Redis is away for a moment leaves no lock behind. An idle lock is not unlocked
// by anybody: the client itself gives it back when it is closed.
func TestCloseWaitsForReleasesThatHadNoAnswer(t *testing.T) {
	unlocks := func(t *testing.T, s place, c *leased.Client, wire *line) {
		for _, name := range []string{"y", "x"} {
			l := lock(t, c.Mutex(name))
			wire.cut()
			isAll(t, l.Unlock(), leased.ErrNotReleased)
			if name == "y" { // which is no longer waited for then
				wire.mend()
				s.becomesClean(t, "y")
			}
		}
	}
	idles := func(t *testing.T, _ place, c *leased.Client, wire *line) {
		unlock(t, lock(t, c.Mutex("x", leased.WithIdleHold(time.Hour))))
		wire.cut()
	}
	for what, gives := range map[string]func(*testing.T, place, *leased.Client, *line){"unlocked": unlocks, "idle": idles} {
		for _, mended := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/mended=%v", what, mended), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					c, wire := onLine(t, s, leased.WithTTL(time.Minute))
					gives(t, s, c, wire)
					if mended {
						time.AfterFunc(2*time.Second, wire.mend)
					}
					began := time.Now()
					err := c.Close()
					took := time.Since(began)
					switch {
					case !mended:
						isAll(t, err, leased.ErrClosed)
						if took != 5*time.Second || err == nil || !strings.Contains(err.Error(), "1 release was not confirmed") {
							t.Errorf("Close returned %v after %v", err, took)
						}
						wire.mend()
						s.Mini.FlushAll()
					case err != nil || took < 2*time.Second || took > 4*time.Second || !s.clean(t, "x"):
						t.Errorf("Close returned %v after %v, released %v", err, took, s.clean(t, "x"))
					}
				})
			})
		}
	}
}

// backlog holds up what is sent to a server that hangs. When it goes on, it carries out first what came last.
type backlog struct {
	mu    sync.Mutex // guards what follows
	hangs bool
	held  []*backlogConn
}

type backlogConn struct {
	net.Conn
	all     *backlog
	listens bool     // guarded by backlog.mu: to messages, and then nothing is held up
	sent    [][]byte // likewise
}

func (b *backlog) change(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn { return &backlogConn{Conn: conn, all: b} })
}

func (b *backlog) hang() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hangs = true
}

func (b *backlog) goOn() {
	b.mu.Lock()
	b.hangs = false
	held := b.held
	b.mu.Unlock()
	for _, c := range slices.Backward(held) {
		_ = c.SetDeadline(time.Time{}) // the client's own is over
		for _, p := range c.sent {
			_, _ = c.Conn.Write(p)
		}
		time.Sleep(time.Millisecond) // of virtual time, in which the server carries it out
	}
}

func (c *backlogConn) Write(p []byte) (int, error) {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.listens = c.listens || subscribes(p)
	if !c.all.hangs || c.listens { // what is held up is no longer waited for, so this is another connection
		return c.Conn.Write(p)
	}
	if c.sent == nil {
		c.all.held = append(c.all.held, c)
	}
	c.sent = append(c.sent, bytes.Clone(p))
	return len(p), nil
}

// Close leaves the connection to the server open while that has yet to read from it.
func (c *backlogConn) Close() error {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.sent != nil {
		return nil
	}
	return c.Conn.Close()
}

// A server that hung can carry out a request after the cancel, and the lock would be taken for the TTL by a
// client that is gone.
func TestCloseWaitsForTheCancelOfARequestThatMayStillArrive(t *testing.T) {
	for _, hangs := range []time.Duration{550 * time.Millisecond, 1700 * time.Millisecond, 3 * time.Second, 0} {
		t.Run(hangs.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					t.Skip("a quorum's client does not wait for servers that hang, as Shutdown says")
				}
				var b backlog
				rdb := s.connect(t, b.change)
				c := clientOn(t, s, rdb, leased.WithTTL(time.Minute))
				unlock(t, lock(t, c.Mutex("x")))
				fillPool(t, rdb, 8)
				synctest.Wait() // until it subscribes: the backlog cannot end a subscription whose greeting it holds up
				b.hang()
				ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond)
				defer cancel()
				_, err := c.Mutex("x").LockContext(ctx)
				isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
				began := time.Now()
				if hangs > 0 {
					time.AfterFunc(hangs, b.goOn)
				}
				err = c.Close()
				took := time.Since(began)
				time.Sleep(time.Second) // of virtual time: by then the server has carried out all
				switch {
				case hangs == 0:
					if err == nil || !strings.Contains(err.Error(), "1 request that was given up was not canceled") || took > 5*time.Second+100*time.Millisecond {
						t.Errorf("Close returned %v after %v", err, took)
					}
				case err != nil || took > 5*time.Second || !s.clean(t, "x"):
					t.Errorf("Close returned %v after %v; the lock is free: %v", err, took, s.clean(t, "x"))
				}
			})
		})
	}
}

// A request that was given up is canceled before the client ends, though its first cancel had no answer: its lock
// would be handed to a client that is gone, or it would keep others out.
func TestCloseRepeatsTheCancelOfARequestThatWaited(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum's client does not wait for servers that hang, as Shutdown says")
		}
		for _, hangs := range []time.Duration{time.Second, 2500 * time.Millisecond, time.Minute} {
			var way hung
			c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
			owner := lock(t, newClient(t, s).Mutex("x"))
			ctx, cancel := context.WithCancel(context.Background())
			waited := make(chan error)
			go func() {
				_, err := c.Mutex("x").LockContext(ctx)
				waited <- err
			}()
			s.queued(t, "x", 1)
			synctest.Wait()
			way.shut.Store(true)
			cancel()
			isAll(t, <-waited, leased.ErrNotAcquired, context.Canceled)
			began := time.Now()
			time.AfterFunc(hangs, func() { way.shut.Store(false) })
			err := c.Close()
			took := time.Since(began)
			if hangs > 5*time.Second {
				if err == nil || !strings.Contains(err.Error(), "1 request that was given up was not canceled") || took > 6*time.Second {
					t.Errorf("hung for %v: Close returned %v after %v", hangs, err, took)
				}
			} else if err != nil || took > 5*time.Second {
				t.Errorf("hung for %v: Close returned %v after %v", hangs, err, took)
			} else {
				s.queued(t, "x", 0)
			}
			unlock(t, owner)
			time.Sleep(2 * time.Minute)
		}
	})
}

// A context that has ended leaves time for what is under way.
func TestAShutdownWithoutTimeCancelsWhatWaits(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		for _, held := range []bool{false, true} { // whether it also holds a lock
			c := clientOn(t, s, s.connect(t)) // first, because it skips where there are several servers
			reader := take(t, newClient(t, s).RWMutex("x").RLockContext)
			if held {
				lock(t, c.Mutex("y"))
			}
			waited := make(chan error)
			go func() {
				_, err := c.RWMutex("x").LockContext(context.Background())
				waited <- err
			}()
			s.queued(t, "x", 1)
			over, cancel := context.WithCancel(context.Background())
			cancel()
			err := c.Shutdown(over)
			if (err != nil) != held || held && strings.Contains(err.Error(), "request") {
				t.Errorf("holds a lock %v: %v", held, err)
			}
			isAll(t, <-waited, leased.ErrClosed)
			s.queued(t, "x", 0)
			unlock(t, reader)
			if _, err := newClient(t, s).ForceUnlock(context.Background(), "y"); err != nil {
				t.Error(err)
			}
			s.becomesClean(t, "x")
		}
	})
}

// So it does for a command whose answer is on its way.
func TestAShutdownWithoutTimeWaitsForAnAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &faraway{Conn: conn, delay: 4 * time.Millisecond} })
		}))
		warm(t, s, c)
		waited := make(chan error)
		go func() {
			_, err := c.Mutex("x").LockContext(context.Background())
			waited <- err
		}()
		time.Sleep(2 * time.Millisecond) // the server has the request, and its answer is on its way
		over, cancel := context.WithCancel(context.Background())
		cancel()
		if err := c.Shutdown(over); err != nil {
			t.Error(err)
		}
		isAll(t, <-waited, leased.ErrClosed)
		s.queued(t, "x", 0)
		unlock(t, owner)
	})
}

// What a request obtains whose answer comes after that is canceled by nobody.
func TestAShutdownTellsOfARequestThatIsUnderWay(t *testing.T) {
	for _, taken := range []bool{false, true} {
		for _, c := range []struct{ trip, time time.Duration }{
			{130 * time.Millisecond, 0}, {130 * time.Millisecond, 20 * time.Millisecond}, {200 * time.Millisecond, 90 * time.Millisecond},
		} {
			inVirtualTime(t, func(t *testing.T, s place) {
				other := newClient(t, s, leased.WithTTL(time.Minute))
				var owner *leased.Lease
				if taken {
					owner = lock(t, other.Mutex("x"))
				}
				closing := clientOn(t, s, s.connect(t, func(o *redis.Options) {
					wrapConns(o, func(conn net.Conn) net.Conn { return &faraway{Conn: conn, delay: c.trip} })
				}))
				warm(t, s, closing)
				waited := make(chan error)
				go func() {
					_, err := closing.Mutex("x").LockContext(context.Background())
					waited <- err
				}()
				time.Sleep(10 * time.Millisecond)
				ctx, cancel := context.WithTimeout(context.Background(), c.time)
				defer cancel()
				err := closing.Shutdown(ctx)
				if err == nil || !strings.Contains(err.Error(), "1 request that was given up was not canceled") {
					t.Errorf("taken %v, %v away, in %v: %v", taken, c.trip, c.time, err)
				}
				isAll(t, <-waited, leased.ErrClosed)
				if taken {
					unlock(t, owner)
				}
				if _, err := other.ForceUnlock(context.Background(), "x"); err != nil { // takes it from the closed client
					t.Error(err)
				}
			})
		}
	}
}

// The error counts what is left, and nothing else: a lease that is held, and a release that has had no answer
// since before the lock was forgotten.
func TestTheErrorOfAShutdownCountsReleases(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
		var others []*leased.Lease
		them := newClient(t, s)
		for i := range 5 { // of which one will be asking at any time
			name := fmt.Sprint("theirs", i)
			others = append(others, lock(t, them.Mutex(name)))
			go func() { _, _ = c.Mutex(name).LockContext(context.Background()) }()
		}
		released, held := lock(t, c.Mutex("released")), lock(t, c.Mutex("held"))
		synctest.Wait()
		way.shut.Store(true)
		isAll(t, released.Unlock(), leased.ErrNotReleased)
		time.Sleep(4 * time.Second) // a re-check of the one that waits is under way
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := c.Shutdown(ctx)
		isAll(t, err, leased.ErrClosed)
		if err == nil || !strings.Contains(err.Error(), "1 lease was not unlocked (\"held\")") || !strings.Contains(err.Error(), "1 release was not confirmed") {
			t.Errorf("Shutdown: %v", err)
		}
		way.shut.Store(false)
		_ = held.Unlock()
		for _, l := range others {
			unlock(t, l)
		}
		s.Mini.FlushAll()
	})
}

// Several of each are told in other words than one.
func TestTheErrorOfAShutdownCountsWhatIsMoreThanOne(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
		them := newClient(t, s)
		first, second := lock(t, c.Mutex("a")), lock(t, c.Mutex("b"))
		others := []*leased.Lease{lock(t, them.Mutex("c")), lock(t, them.Mutex("d"))}
		ctx, cancel := context.WithCancel(context.Background())
		for _, name := range []string{"c", "d"} {
			go func() { _, _ = c.Mutex(name).LockContext(ctx) }() // ended by cancel
		}
		synctest.Wait()
		way.shut.Store(true)
		isAll(t, first.Unlock(), leased.ErrNotReleased)
		isAll(t, second.Unlock(), leased.ErrNotReleased)
		cancel()
		synctest.Wait()
		soon, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		err := c.Shutdown(soon)
		isAll(t, err, leased.ErrClosed)
		wants := []string{"2 releases were not confirmed"}
		if s.members == nil { // a quorum knows by then that it cannot ask
			wants = append(wants, "2 requests that were given up were not canceled")
		}
		for _, want := range wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("Shutdown: %v, want %s", err, want)
			}
		}
		way.shut.Store(false)
		for _, l := range others {
			unlock(t, l)
		}
		s.Mini.FlushAll()
	})
}

// A method of the context panics: the client stops all the same.
func TestAShutdownWhoseContextPanicsStopsTheClient(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		if panics(func() { _ = c.Shutdown(struct{ context.Context }{}) }) == nil {
			t.Fatal("it has not panicked")
		}
		err := c.Close()
		isAll(t, err, leased.ErrClosed)
		if err == nil || !strings.Contains(err.Error(), "1 lease was not unlocked (\"x\")") {
			t.Errorf("Close: %v", err)
		}
		isAll(t, context.Cause(l.Context()), leased.ErrClosed)
		time.Sleep(time.Minute)
		if !s.clean(t, "x") {
			t.Error("it is still renewed")
		}
	})
}

// loud is a context whose Value panics.
type loud struct{ context.Context }

func (loud) Value(any) any { panic("a context's bug") }

// And so it does if that is only found when the client's goroutines are waited for: nobody waits for what
// nobody does anymore.
func TestAShutdownWhoseContextPanicsLateLeavesNobodyWaiting(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s, leased.WithTTL(time.Hour))
		l := lock(t, c.Mutex("x"))
		wire.cut()
		unlocked := make(chan error, 1)
		go func() { unlocked <- l.UnlockContext(context.Background()) }()
		time.Sleep(time.Minute)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if panics(func() { _ = c.Shutdown(loud{ctx}) }) == nil {
			t.Fatal("it has not panicked")
		}
		isAll(t, closesSoon(t, "UnlockContext returns", unlocked), leased.ErrNotReleased, leased.ErrClosed)
		isAll(t, c.Close(), leased.ErrClosed)
		wire.mend()
		s.Mini.FlushAll()
	})
}

// What keeps the last token of a lock that is held is such a command too.
func TestTheTouchThatACloseCancelsIsNotLoggedAsAnOutage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		held := make(chan struct{})
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true }) // hooks see the commands
		touch := &hanging{name: "pexpire", since: held}
		s.hook(rdb, touch)
		c := clientOn(t, s, rdb, out.option())
		l := lock(t, c.Mutex("x"))
		close(held)
		for touch.hung.Load() == 0 {
			time.Sleep(time.Second)
		}
		unlock(t, l)
		must(t, c.Close())
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "does not answer"); n != 0 {
			t.Errorf("logged %q", out.messages())
		}
	})
}

// A client that is shut down by a context that has ended cancels its own command, which says nothing
// about Redis.
func TestTheCommandThatAShutdownCancelsIsNotLoggedAsAnOutage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		held := make(chan struct{})
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true }) // hooks see the commands
		s.hook(rdb, &hanging{name: "evalsha", since: held})
		c := clientOn(t, s, rdb, out.option())
		l := lock(t, c.Mutex("x"))
		close(held)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		isAll(t, c.Mutex("x").UnlockContext(ended), leased.ErrNotReleased)
		synctest.Wait() // its command is under way
		isAll(t, c.Shutdown(ended), leased.ErrClosed)
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "does not answer"); n != 0 {
			t.Errorf("logged %q", out.messages())
		}
		_ = l.Unlock() // the outcome is Shutdown's
	})
}

func TestASecondShutdownEndsWithItsOwnContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		first := make(chan error, 1)
		go func() { first <- c.Close() }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		began := time.Now()
		isAll(t, c.Shutdown(ctx), context.DeadlineExceeded)
		if took := time.Since(began); took != time.Second {
			t.Errorf("it took %v", took)
		}
		if !open(first) {
			t.Error("the first call has ended with the second")
		}
		unlock(t, l)
		if err := <-first; err != nil {
			t.Error(err)
		}
	})
}
