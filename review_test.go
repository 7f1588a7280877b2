package leased_test

import (
	"bytes"
	"context"
	"errors"
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
	"github.com/leasedmutex/leased/internal/redistest"
)

// What a review found in the shell around the state machine.

func TestRUnlockSparesALeaseThatIsJustBeingHandedOver(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		for range 300 {
			w := take(t, rw.LockContext)
			r := taking(t, rw.RLockContext)
			synctest.Wait()
			var plain sync.WaitGroup
			plain.Go(func() {
				rw.RLock()
				rw.RUnlock() //nolint:staticcheck // that it comes in or does not is the point
			})
			synctest.Wait()
			unlock(t, w)
			l := <-r
			plain.Wait()
			if err := l.Context().Err(); err != nil {
				t.Fatalf("RUnlock ended the lease of RLockContext: %v", err)
			}
			unlock(t, l)
		}
	})
}

// gate is a way to the server through which, once shut, no new connection comes.
type gate struct {
	wards
	mu    sync.Mutex
	conns []net.Conn
	shut  atomic.Bool
	open  chan struct{}
}

func (g *gate) change(o *redis.Options) {
	g.open = make(chan struct{})
	if o.Dialer == nil {
		o.Dialer = redis.NewDialer(o)
	}
	g.wards.change(o)
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if g.shut.Load() {
			select {
			case <-g.open:
			case <-ctx.Done():
			}
			return nil, errors.New("nobody there")
		}
		conn, err := direct(ctx, network, addr)
		if err == nil {
			g.mu.Lock()
			g.conns = append(g.conns, conn)
			g.mu.Unlock()
		}
		return conn, err
	}
}

// cutInbox closes the connections that listen.
func (g *gate) cutInbox() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, conn := range g.conns {
		if conn.(*ward).listens.Load() {
			_ = conn.Close()
		}
	}
}

func TestAnInboxThatCannotReconnectHoldsUpNoDeadline(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := place{target, target.NewClient(t)}
		const ttl = 6 * time.Second
		strain := redistest.NewStrain(t)
		another := newClient(t, s)
		theirs := lock(t, another.Mutex("x"))
		var g gate
		rdb := s.connect(t, g.change)
		c, err := leased.New(rdb, leased.WithKeyPrefix(s.Prefix), leased.WithTTL(ttl), leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		mine := lock(t, c.Mutex("mine"))
		work := mine.Context()
		waiter := locking(t, c.Mutex("x"))
		s.queued(t, "x", 1)
		eventually(t, "subscribed", func() bool {
			return len(s.rdb.PubSubChannels(context.Background(), s.Prefix+"leased:inbox:*").Val()) >= 2
		})
		// From go-redis 9.23 on, pipelines have connections of their own. The first
		// renewal dials one.
		eventually(t, "renewed", func() bool { return c.Stats().Renewals > 0 })
		g.shut.Store(true)
		g.cutInbox()
		// Commands go on over the connections that are there, for a TTL.
		renewed := c.Stats().Renewals
		held := func() bool {
			until := mine.TrustedUntil()
			late := time.Since(until)
			if late <= 200*time.Millisecond+strain.Since(until) || work.Err() != nil {
				return true
			}
			t.Errorf("the lease's context is alive %v after its trust has ended", late)
			if another.Mutex("mine").TryLock() {
				t.Error("and another is inside")
				another.Mutex("mine").Unlock()
			}
			return false
		}
		eventually(t, "renewals go on", func() bool {
			return !held() || work.Err() != nil || c.Stats().Renewals >= renewed+3
		})
		if work.Err() != nil {
			t.Errorf("lost although Redis answers: %v", context.Cause(work))
		}
		close(g.open)
		_ = theirs.Unlock()
		_ = (<-waiter).Unlock()
		_ = mine.Unlock()
		_ = c.Close()
	})
}

// stuck is a logger whose output is not read any more.
type stuck struct {
	slog.Handler
	on   string
	free chan struct{}
}

func (h stuck) Enabled(context.Context, slog.Level) bool { return true }
func (h stuck) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.on) {
		<-h.free
	}
	return nil
}

func TestALoggerThatBlocksHoldsUpNoDeadline(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		theirs := lock(t, newClient(t, s).Mutex("x"))
		var lines wards
		logger := stuck{slog.DiscardHandler, "does not hear", make(chan struct{})}
		c := clientOn(t, s, s.connect(t, lines.change), leased.WithTTL(3*time.Second), leased.WithLogger(slog.New(logger)))
		mine := lock(t, c.Mutex("mine"))
		work := mine.Context()
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		lines.frozen.Add(1)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if late := time.Since(mine.TrustedUntil()); late > 0 && work.Err() == nil {
			t.Errorf("the lease's context is alive %v after its trust has ended", late)
		}
		close(logger.free)
		unlock(t, theirs)
		unlock(t, <-waiter)
		_ = mine.Unlock()
	})
}

func TestALossHandlerMayCloseTheClient(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := place{target, target.NewClient(t)}
		strain := redistest.NewStrain(t)
		var c *leased.Client
		closed := make(chan error, 1)
		c, err := leased.New(s.connect(t), leased.WithKeyPrefix(s.Prefix), leased.WithLossHandler(func(leased.LossEvent) {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			closed <- c.Shutdown(ctx)
		}))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		work := l.Context()
		hearing(t, s)
		if err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		go func() { // ended by the loss; nobody waits, for it may be what hangs
			<-work.Done()
			_ = l.Unlock()
		}()
		began := time.Now()
		closesSoon(t, "Shutdown returns", closed)
		if took := time.Since(began); took > 4*time.Second+strain.Since(began) {
			t.Errorf("Shutdown, bounded by 100 ms, took %v", took)
		}
	})
}

func TestCloseIsBoundedWhenTheSubscriptionGetsNoAnswer(t *testing.T) {
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

func TestOnlyTheCallersContextMakesItsErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		o := redistest.Options("127.0.0.1:1")
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		rdb := redis.NewClient(o)
		defer rdb.Close()
		c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, err = c.Mutex("x").TryLockContext(context.Background())
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody's context ended: %v", err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(3*time.Second, cancel)
		_, err = c.Mutex("x").LockContext(ctx)
		isAll(t, err, context.Canceled)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cancelled, and it had no deadline: %v", err)
		}
	})
}

// deaf is a connection on which nothing comes back after SUBSCRIBE.
type deaf struct {
	net.Conn
	on atomic.Bool
}

func (c *deaf) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) {
		c.on.Store(true)
	}
	return c.Conn.Write(p)
}

func (c *deaf) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.on.Load() {
			return n, err
		}
	}
}

func TestVirtualASubscriptionThatIsNeverConfirmedIsMadeAnew(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		var healed atomic.Bool
		waiter := locking(t, newClientDeaf(t, s, &healed).Mutex("x"))
		time.Sleep(time.Second)
		healed.Store(true) // for connections made from now on
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		began := time.Now()
		unlock(t, l)
		unlock(t, <-waiter)
		if d := time.Since(began); d != 0 {
			t.Errorf("entered %v after the release", d)
		}
	})
}

func newClientDeaf(t *testing.T, s place, healed *atomic.Bool) *leased.Client {
	return clientOn(t, s, s.connect(t, func(o *redis.Options) {
		direct := o.Dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := direct(ctx, network, addr)
			if err != nil || healed.Load() {
				return conn, err
			}
			return &deaf{Conn: conn}, nil
		}
	}))
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

// An owner does not look again, so nothing has it notice that it has gone deaf.
func TestVirtualAnIdleOwnerWhoseInboxIsHalfOpenLetsGo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var lines wards
		c := clientOn(t, s, s.connect(t, lines.change), leased.WithIdleHold(time.Hour))
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Minute)
		lines.frozen.Add(1)
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Hour)
		defer cancel()
		l, err := newClient(t, s).Mutex("x").LockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
		if d := time.Since(began); d > time.Minute {
			t.Errorf("entered after %v", d)
		}
	})
}

func TestVirtualAWriterIsNotStarvedByReadersWhoseInboxIsHalfOpen(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var lines wards
		rw := clientOn(t, s, s.connect(t, lines.change)).RWMutex("x")
		l := take(t, rw.RLockContext)
		time.Sleep(time.Minute)
		lines.frozen.Add(1)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		defer cancel()
		done := make(chan struct{})
		go func() { // ended by ctx, waited for through done
			defer close(done)
			w, err := newClient(t, s).RWMutex("x").LockContext(ctx)
			if err != nil {
				t.Errorf("readers of one process, each inside for 2 s, kept a writer out: %v", err)
				return
			}
			unlock(t, w)
		}()
		for i := 0; i < 600 && open(done); i++ { // there is always one inside
			time.Sleep(time.Second)
			next := taking(t, rw.RLockContext)
			synctest.Wait()
			unlock(t, l)
			l = <-next
		}
		unlock(t, l)
		<-done
	})
}

func TestLocksWhoseNamesLookLikeAnothersHelpersAreRefusedOrApart(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		tried := 0
		for _, end := range []string{"queue", "readers", "waiters", "meta"} {
			for _, names := range [][2]string{
				{"job:{42}", "job:{42}:" + end}, {"job", "job:{job}:" + end}, {"job", "job:{job}"}, {"job:", "job:{job}"},
				{"job:{42}", "job:{42}:" + end + "s"}, {"job", "job:" + end}, {"job", "job:{job}:"},
			} {
				for _, shared := range []bool{false, true} {
					c, second := newClient(t, s), newClient(t, s).RWMutex(names[1])
					take := second.LockContext
					if shared {
						take = second.RLockContext
					}
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					l, err := take(ctx)
					if errors.Is(err, leased.ErrInvalidName) {
						cancel()
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					tried++
					other, err := c.Mutex(names[0]).LockContext(ctx)
					if err != nil {
						t.Errorf("with %q locked, %q cannot be: %v", names[1], names[0], err)
					} else {
						unlock(t, other)
					}
					if err := l.Unlock(); err != nil {
						t.Errorf("locking %q took %q away: %v", names[0], names[1], err)
					}
					cancel()
					s.Mini.FlushAll()
				}
			}
		}
		if tried < 40 {
			t.Errorf("only %d pairs of names were tried", tried)
		}
	})
}

// The pool has a connection that looks free, and finds it closed when it takes it.
func TestUnlockIsBoundedWhenItsConnectionIsDeadAndDiallingHangs(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := place{target, target.NewClient(t)}
		wire := redistest.NewProxy(t, s.Addr)
		var shut atomic.Bool
		var once sync.Once
		noticed, open := make(chan struct{}), make(chan struct{})
		c, err := leased.New(s.connect(t, func(o *redis.Options) {
			o.Addr = wire.Addr
			direct := redis.NewDialer(o)
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if shut.Load() {
					once.Do(func() { close(noticed) })
					select {
					case <-open:
					case <-ctx.Done():
					}
					return nil, errors.New("nobody there")
				}
				return direct(ctx, network, addr)
			}
		}), leased.WithKeyPrefix(s.Prefix), leased.WithReleaseTimeout(200*time.Millisecond), leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		shut.Store(true)
		wire.Cut()
		// The inbox' connection ends with the pool's, and it tells: it dials anew. Were the
		// other's end later, Unlock would find it one step later, with the same bound.
		closesSoon(t, "the inbox finds its connection closed", noticed)
		strain, began := redistest.NewStrain(t), time.Now()
		done := make(chan error, 1)
		go func() { done <- l.Unlock() }()
		isAll(t, closesSoon(t, "Unlock returns", done), leased.ErrNotReleased)
		if took := time.Since(began); took > 3*time.Second+strain.Since(began) { // dialling may take 5 s
			t.Errorf("Unlock, bounded by 200 ms, took %v", took)
		}
		close(open)
		_ = c.Close()
	})
}
