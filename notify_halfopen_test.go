package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redistest"
)

// deaf is a connection on which nothing arrives after SUBSCRIBE.
type deaf struct {
	net.Conn
	on atomic.Bool
}

func (c *deaf) Write(p []byte) (int, error) {
	if subscribes(p) {
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

func newClientDeaf(t *testing.T, s place, healed *atomic.Bool, opts ...leased.Option) *leased.Client {
	return clientOn(t, s, s.connect(t, func(o *redis.Options) { deafUntil(healed, o) }), opts...)
}

// deafUntil has o make deaf connections until they are healed.
func deafUntil(healed *atomic.Bool, o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn {
		if healed.Load() {
			return conn
		}
		return &deaf{Conn: conn}
	})
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

const cannotSubscribe = "no subscription can be made"

func TestVirtualThatNoSubscriptionCanBeMadeIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var healed atomic.Bool
		var out logs
		c := newClientDeaf(t, s, &healed, out.option())
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(9 * time.Second)
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 0 {
			t.Errorf("%d lines, though it may be a restart", n)
		}
		time.Sleep(16 * time.Second)
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 1 {
			t.Errorf("%d lines: %q", n, out.messages())
		}
		healed.Store(true)
		time.Sleep(10 * time.Minute)
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 1 {
			t.Errorf("%d lines after subscriptions can be made: %q", n, out.messages())
		}
	})
}

// A server at its connection limit, or a firewall, may keep subscriptions out and let commands through.
// Whoever the lock is handed to would not hear of it, and each of its turns would cost everybody seconds.
// brief is a connection that is closed a moment after SUBSCRIBE.
type brief struct{ net.Conn }

func (c *brief) Write(p []byte) (int, error) {
	if subscribes(p) {
		time.AfterFunc(10*time.Millisecond, func() { _ = c.Close() })
	}
	return c.Conn.Write(p)
}

// Something ends each subscription soon after it was confirmed: a proxy, the server's bound for what it buffers
// for a subscriber, or a script that kills idle clients.
func TestVirtualWaitersPollWhereNoSubscriptionLasts(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &brief{conn} })
		}), out.option())
		other := newClient(t, s)
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(10 * time.Second)
		most := time.Second
		if s.members != nil {
			most = 3 * time.Second // each of a majority has to be asked at the right moment
		}
		entersWithin(t, most, c, other)
		if n := out.count(slog.LevelWarn, "no subscription can be made"); n != 1 {
			t.Errorf("%d lines: %q", n, out.messages())
		}
	})
}

func TestVirtualWaitersPollOnceNoSubscriptionCouldBeMadeForLong(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var healed atomic.Bool
		var sent stamps
		m := newMeter(t)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			deafUntil(&healed, o)
			o.Limiter = &sent
		}), leased.WithMeterProvider(m))
		other := newClient(t, s)
		var theirs []*leased.Lease
		var mine []<-chan *leased.Lease
		for i := range 5 {
			name := strconv.Itoa(i)
			theirs = append(theirs, lock(t, other.Mutex(name)))
			mine = append(mine, locking(t, c.Mutex(name)))
		}
		// Attempts take 2 s. The first failed after 2 s, and 4 s later they have failed for long.
		time.Sleep(6 * time.Second)
		before := len(sent.all())
		time.Sleep(time.Second)
		if n := len(sent.all()) - before; n < 5*3 { // after 50, 100, 200 ms, …
			t.Errorf("5 waiters looked %d times in the next second", n)
		}
		for i := range theirs {
			unlock(t, theirs[i])
			unlock(t, <-mine[i])
		}
		entersByPolling(t, c, other)
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "polling"); n != 1 {
			t.Errorf("%d clients poll", n)
		}
		healed.Store(true)
		time.Sleep(time.Minute)
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "subscribed"); n != 1 {
			t.Errorf("%d clients are subscribed once subscriptions can be made", n)
		}
		held := lock(t, other.Mutex("x"))
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(2 * time.Second)
		before = len(sent.all())
		time.Sleep(500 * time.Millisecond)
		if n := len(sent.all()) - before; n > 1 && s.members == nil {
			t.Errorf("it polls, though messages come: %d commands in half a second", n)
		}
		unlock(t, held)
		unlock(t, <-waiter)
	})
}

// During an outage no subscription can be made either. Once it is over, one is made at once.
func TestAnOutageIsNotFollowedByPolls(t *testing.T) {
	for _, lasts := range []time.Duration{10600 * time.Millisecond, 30600 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			redistest.LastInBubble(t)
			m := &mortal{Miniredis: redistest.Mini(t)}
			open := func(change ...func(*redis.Options)) *leased.Client {
				c, err := leased.New(redistest.MiniClient(t, m.Miniredis, change...), leased.WithLogger(slog.New(slog.DiscardHandler)))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				return c
			}
			c, other := open(func(o *redis.Options) { o.Dialer = m.dial }), open()
			const locks = 50
			ctx, cancel := context.WithCancel(context.Background())
			var all sync.WaitGroup
			for i := range locks {
				name := strconv.Itoa(i)
				l := lock(t, other.Mutex(name))
				defer unlock(t, l)
				all.Go(func() { _, _ = c.Mutex(name).LockContext(ctx) })
			}
			time.Sleep(10 * time.Second)
			m.die()
			time.Sleep(lasts)
			m.comeBack()
			before := c.Stats().Commands
			time.Sleep(2 * time.Second)
			// Each asks when Redis answers again, and when the subscription is made, and once in 3 s. One
			// that polls asks five times more.
			if n := c.Stats().Commands - before; n < locks || n > 5*locks {
				t.Errorf("after %v of outage %d waiters sent %d commands in 2 s", lasts, locks, n)
			}
			cancel()
			all.Wait()
		})
	}
}

// A request made while the client was subscribed says so, and each release passes over it once the client
// is not.
func TestVirtualAWaiterWhoseSubscriptionIsGoneForGoodIsServed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way listeners
		var refuse atomic.Bool
		c := clientOn(t, s, s.connect(t, way.change, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &mute{conn, &refuse} })
		}))
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait() // its inbox is confirmed, and its next request says so
		held := lock(t, newClient(t, s).Mutex("x"))
		served := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			l, err := c.Mutex("x").LockContext(ctx)
			if err == nil {
				unlock(t, l)
			}
			served <- err
		}()
		s.queued(t, "x", 1)
		refuse.Store(true)
		way.cut()
		ctx, stop := context.WithCancel(context.Background())
		var others sync.WaitGroup
		for range 4 { // so that the queue is never empty
			mu := newClient(t, s).Mutex("x")
			others.Go(func() {
				for {
					l, err := mu.LockContext(ctx)
					if err != nil {
						return
					}
					time.Sleep(20 * time.Millisecond)
					unlock(t, l)
				}
			})
		}
		unlock(t, held)
		if err := <-served; err != nil {
			t.Error(err)
		}
		stop()
		others.Wait()
	})
}

// mute is a connection that ends instead of subscribing.
type mute struct {
	net.Conn
	refuse *atomic.Bool
}

func (c *mute) Write(p []byte) (int, error) {
	if subscribes(p) && c.refuse.Load() {
		_ = c.Close()
		return 0, errors.New("max number of clients reached")
	}
	return c.Conn.Write(p)
}

func TestVirtualARefusedSubscriptionIsNotLoggedAsOneThatFails(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		unlock(t, lock(t, newClient(t, s).Mutex("x"))) // the server runs from now on
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			refuses := strings.EqualFold(cmd, "SUBSCRIBE")
			if refuses {
				p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
			}
			return refuses
		})
		c := clientOn(t, s, s.connect(t), out.option())
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Minute)
		refused := out.count(slog.LevelWarn, "does not let this client subscribe")
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 0 || refused != s.servers() {
			t.Errorf("logged %q", out.messages())
		}
	})
}

// Of a quorum, the servers to which subscriptions can be made send the messages, if they are a majority.
func TestSubscriptionsOfAQuorumAreLoggedAsMissingWhenThoseOfAMajorityAre(t *testing.T) {
	for deafServers, lines := range map[int]int{2: 0, 3: 1} {
		t.Run(strconv.Itoa(deafServers), func(t *testing.T) {
			onQuorum(t, func(t *testing.T, s place) {
				var never atomic.Bool
				var out logs
				made := 0
				c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
					if made++; made <= deafServers {
						deafUntil(&never, o)
					}
				}), out.option())
				unlock(t, lock(t, c.Mutex("x")))
				time.Sleep(25 * time.Second)
				if n := out.count(slog.LevelWarn, cannotSubscribe); n != lines {
					t.Errorf("%d lines, want %d: %q", n, lines, out.messages())
				}
			})
		})
	}
}

// What counts is for how long those of a majority have been missing. A server that is down has lines of
// its own.
func TestAServerOfAQuorumThatIsDownDoesNotHaveSubscriptionsLoggedAsMissingTooSoon(t *testing.T) {
	for pause := range 4 { // a server that is down is tried every 2 s
		onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
			var text bytes.Buffer
			var refuse atomic.Bool
			var rdbs []redis.UniversalClient
			for i, m := range servers {
				rdbs = append(rdbs, redistest.MiniClient(t, m.Miniredis, func(o *redis.Options) {
					o.Dialer, o.ContextTimeoutEnabled = m.dial, true
					if i == 1 {
						wrapConns(o, func(conn net.Conn) net.Conn { return &mute{conn, &refuse} })
					}
				}))
			}
			c, err := leased.NewQuorum(rdbs, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			logged := func(when string, want int) {
				t.Helper()
				synctest.Wait()
				if n := strings.Count(text.String(), cannotSubscribe); n != want {
					t.Errorf("%s: %d lines, want %d:\n%s", when, n, want, &text)
				}
			}
			unlock(t, lock(t, c.Mutex("x")))
			servers[2].die()
			time.Sleep(20 * time.Second)
			servers[1].die()
			time.Sleep(3 * time.Second)
			servers[1].comeBack()
			time.Sleep(10 * time.Second) // so that its next subscription is tried at once
			logged("one server was down, and another one for 3 s", 0)

			time.Sleep(time.Duration(pause) * time.Second / 2)
			refuse.Store(true)
			servers[1].die() // which ends its subscription
			servers[1].comeBack()
			works := func(d time.Duration) {
				t.Helper()
				for began := time.Now(); time.Since(began) < d; time.Sleep(time.Second) {
					unlock(t, lock(t, c.Mutex("x")))
				}
			}
			works(8 * time.Second)
			logged("one server is down, and another one has had no subscription for 8 s", 0)
			works(10 * time.Second)
			logged("and for 18 s", 1)
			for line := range strings.Lines(text.String()) {
				if strings.Contains(line, cannotSubscribe) && !strings.Contains(line, "max number of clients") {
					t.Errorf("the line names another server's error: %s", line)
				}
			}
		})
	}
}

func TestAnOutageOfAQuorumIsNotLoggedAsMissingSubscriptions(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var out logs
		c := open(out.option())
		unlock(t, lock(t, c.Mutex("x")))
		servers[1].die()
		servers[2].die()
		got := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 0 || out.count(slog.LevelWarn, "Redis does not answer") == 0 {
			t.Errorf("%d lines: %q", n, out.messages())
		}
		servers[1].comeBack()
		unlock(t, <-got)
	})
}

func TestVirtualAnOutageIsNotLoggedAsMissingSubscriptions(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		var out logs
		way.shut.Store(true)
		c := clientOn(t, s, s.connect(t, way.change), out.option())
		got := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		if n := out.count(slog.LevelWarn, cannotSubscribe); n != 0 || out.count(slog.LevelWarn, "Redis does not answer") == 0 {
			t.Errorf("%d lines: %q", n, out.messages())
		}
		way.shut.Store(false)
		unlock(t, <-got)
	})
}

// An owner does not poll, so no command makes it notice that its inbox is half-open.
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

func TestVirtualAHalfOpenInboxIsNoticedASecondAfterARecheckAndRebuilt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var lines wards
		var out logs
		l := lock(t, newClient(t, s).Mutex("x"))
		waiter := locking(t, clientOn(t, s, s.connect(t, lines.change), out.option()).Mutex("x"))
		long := time.Hour
		if race.Enabled {
			long = 10 * time.Minute
		}
		time.Sleep(long)
		if n := len(out.messages()); n != 0 {
			t.Errorf("%v of echoes made it say %q", long, out.messages())
		}
		lines.frozen.Add(1)
		// A re-check within 3 s, its echo within 1 s, another subscription 20 ms later.
		time.Sleep(4*time.Second + 20*time.Millisecond)
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "no messages arrive"); n != s.servers() {
			t.Errorf("it says %q", out.messages())
		}
		began := time.Now()
		unlock(t, l)
		unlock(t, <-waiter)
		if d := time.Since(began); d != 0 {
			t.Errorf("the new inbox heard of the release after %v", d)
		}
	})
}

// The same if no re-check is answered that it waits: each finds that the lock was handed over to it, of
// which no message came.
func TestVirtualAHalfOpenInboxIsNoticedByARecheckThatFindsTheGrant(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var lines wards
		var out logs
		theirs := newClient(t, s).Mutex("x")
		mine := clientOn(t, s, s.connect(t, lines.change), out.option()).Mutex("x")
		l := lock(t, theirs)
		waiter := locking(t, mine)
		time.Sleep(10 * time.Second)
		lines.frozen.Add(1)
		unlock(t, l)
		unlock(t, <-waiter)
		time.Sleep(time.Second + 20*time.Millisecond) // for the echo, and then until it has another subscription
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "no messages arrive"); n != s.servers() {
			t.Errorf("it says %q", out.messages())
		}
		l = lock(t, theirs)
		waiter = locking(t, mine)
		synctest.Wait()
		began := time.Now()
		unlock(t, l)
		unlock(t, <-waiter)
		if d := time.Since(began); d > time.Millisecond { // a token may have to wait for the clock
			t.Errorf("the new inbox heard of the release after %v", d)
		}
	})
}

// A half-open inbox is found out although commands of another lock go on failing.
func TestVirtualErrorsOfAnotherLockDoNotHideAHalfOpenInbox(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way wards
		rdb := s.connect(t, func(o *redis.Options) {
			way.change(o)
			o.ContextTimeoutEnabled = true
		})
		s.hook(rdb, half{func(args []any) bool { return len(args) > 3 && fmt.Sprint(args[3]) == "lost" }})
		c := clientOn(t, s, rdb, leased.WithBackOff(func() leased.BackOff { return hasty{} }))
		theirs := lock(t, newClient(t, s).Mutex("x"))
		mine := locking(t, c.Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		var failing sync.WaitGroup
		failing.Go(func() { _, _ = c.Mutex("lost").LockContext(ctx) })
		time.Sleep(10 * time.Second)
		way.frozen.Add(1)
		time.Sleep(20 * time.Second)
		began := time.Now()
		unlock(t, theirs)
		unlock(t, <-mine)
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release: the inbox hears nothing", took)
		}
		cancel()
		failing.Wait()
		time.Sleep(time.Minute)
	})
}

type hasty struct{}

func (hasty) NextBackOff() time.Duration { return 300 * time.Millisecond }

// undated is a connection that accepts no deadlines, like one through an SSH tunnel.
type undated struct{ net.Conn }

var errUndated = errors.New("deadlines are not supported")

func (undated) SetDeadline(time.Time) error      { return errUndated }
func (undated) SetReadDeadline(time.Time) error  { return errUndated }
func (undated) SetWriteDeadline(time.Time) error { return errUndated }

func TestVirtualAWaiterWhoseConnectionsAcceptNoDeadlinesIsWokenByAMessage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var healed atomic.Bool
		rdb := s.connect(t, func(o *redis.Options) {
			o.ReadTimeout, o.WriteTimeout = -2, -2
			wrapConns(o, func(conn net.Conn) net.Conn {
				if !healed.Load() {
					conn = &deaf{Conn: conn}
				}
				return undated{conn}
			})
		})
		waits := clientOn(t, s, rdb)
		l := lock(t, newClient(t, s).Mutex("x"))
		waiter := locking(t, waits.Mutex("x"))
		time.Sleep(time.Second)
		healed.Store(true) // until now, its subscription was not confirmed
		time.Sleep(time.Minute)
		for range 3 {
			time.Sleep(time.Second + 7*time.Millisecond) // no look is due at that moment
			began := time.Now()
			unlock(t, l)
			l = <-waiter
			if d := time.Since(began); d != 0 {
				t.Errorf("entered %v after the release", d)
			}
			unlock(t, l)
			l = lock(t, newClient(t, s).Mutex("x"))
			waiter = locking(t, waits.Mutex("x"))
		}
		unlock(t, l)
		unlock(t, <-waiter)
	})
}

// A request that is made while the subscription is made anew says, for as long as it waits, that nothing shows
// whether its process is alive. If that is killed then, the next one waits for a TTL.
func TestARequestMadeWithoutASubscriptionCostsATTLIfItsProcessDies(t *testing.T) {
	for _, subscribed := range []bool{true, false} {
		t.Run(fmt.Sprint("subscribed=", subscribed), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				if s.members != nil {
					t.Skip("a quorum has tests of its own")
				}
				owner := lock(t, newClient(t, s).Mutex("x"))
				var refuse atomic.Bool
				rdb, wire := s.lineOf(t, func(o *redis.Options) {
					wrapConns(o, func(conn net.Conn) net.Conn { return &mute{conn, &refuse} })
				})
				dies := clientOn(t, s, rdb)
				confirmInboxes(t, dies)
				if !subscribed {
					refuse.Store(true)
					wire.cut()
					wire.mend()
					synctest.Wait()
				}
				ctx, cancel := context.WithCancel(context.Background())
				waited := make(chan struct{})
				go func() {
					defer close(waited)
					_, _ = dies.Mutex("x").LockContext(ctx)
				}()
				s.queued(t, "x", 1)
				refuse.Store(false)
				time.Sleep(10 * time.Second) // so that it is subscribed, in any case
				next := locking(t, newClient(t, s).Mutex("x"))
				s.queued(t, "x", 2)
				wire.cut() // as if it were killed
				synctest.Wait()
				began := time.Now()
				unlock(t, owner)
				unlock(t, <-next)
				if took := time.Since(began); (took < time.Second) != subscribed || took > 31*time.Second {
					t.Errorf("the next one entered %v after the release", took)
				}
				wire.mend()
				cancel()
				<-waited
			})
		})
	}
}
