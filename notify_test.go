package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
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

// Subscriptions that are refused, break again and again, or cannot reconnect.

// unsubscribable is a connection through a proxy that does not know SUBSCRIBE.
type unsubscribable struct {
	net.Conn
	answer []byte // used by the goroutine that writes and then reads
}

func (c *unsubscribable) Write(p []byte) (int, error) {
	if subscribes(p) {
		c.answer = []byte("-ERR unknown command 'subscribe'\r\n")
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *unsubscribable) Read(p []byte) (int, error) {
	if len(c.answer) > 0 {
		n := copy(p, c.answer)
		c.answer = c.answer[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

func TestVirtualWhereSubscribingIsRefusedWaitersPollAndThatIsLoggedOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &unsubscribable{Conn: conn} })
		}), out.option())
		unlock(t, lock(t, c.Mutex("warm")))
		other := newClient(t, s)
		entersByPolling(t, c, other)
		time.Sleep(time.Hour)
		if n := out.count(slog.LevelWarn, "subscribe"); n != s.servers() {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
	})
}

// An operator who has allowed it must not take the next refusal for an old line, which is not repeated for a while.
func TestVirtualEachTimeThatSubscribingIsForbiddenIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c, wire := onLine(t, s, out.option())
		warm(t, s, c)
		const denied = "let this client subscribe"
		for n := range 3 {
			if got := out.count(slog.LevelWarn, denied); got != n*s.servers() {
				t.Errorf("forbidden %d times, logged %d times: %q", n, got, out.messages())
			}
			s.Mini.SetError("NOPERM this user has no permissions to access one of the channels used as arguments")
			wire.cut()
			wire.mend()
			time.Sleep(2 * time.Second)
			s.Mini.SetError("")
			time.Sleep(10 * time.Second)
		}
	})
}

// entersByPolling has c wait, again and again, for a lock that other releases after 300 ms.
func entersByPolling(t *testing.T, c, other *leased.Client) {
	t.Helper()
	entersWithin(t, 500*time.Millisecond, c, other)
}

// entersWithin has c wait for other's lock, and checks how soon after the release it has the lock.
func entersWithin(t *testing.T, most time.Duration, c, other *leased.Client) {
	t.Helper()
	for range 20 {
		theirs := lock(t, other.Mutex("x"))
		mine := locking(t, c.Mutex("x"))
		time.Sleep(300 * time.Millisecond) // of virtual time
		began := time.Now()
		unlock(t, theirs)
		unlock(t, <-mine)
		if took := time.Since(began); took > most {
			t.Errorf("entered %v after the release", took)
		}
	}
}

// listeners are connections of which those that listen can be cut.
type listeners struct {
	wards
	mu    sync.Mutex // guards conns
	conns []*ward
}

func (l *listeners) change(o *redis.Options) {
	l.wards.change(o)
	wrapConns(o, func(conn net.Conn) net.Conn {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.conns = append(l.conns, conn.(*ward))
		return conn
	})
}

func (l *listeners) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest := l.conns[:0]
	for _, conn := range l.conns {
		if conn.listens.Load() {
			_ = conn.Close()
		} else {
			rest = append(rest, conn)
		}
	}
	l.conns = rest
}

func TestVirtualASubscriptionThatBreaksAllTheTimeCostsFewCommandsAndIsQuickOnceSound(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way listeners
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
		other := clientOn(t, s, s.connect(t, onRoomyLines), leased.WithTTL(time.Minute))
		locks := 100
		if race.Enabled {
			locks = 30
		}
		if s.members != nil {
			locks = 20 // each is asked about on five servers
		}
		var theirs, mine []*leased.Lease
		var waiting []<-chan *leased.Lease
		for i := range locks {
			theirs = append(theirs, lock(t, other.Mutex(fmt.Sprint("x", i))))
			waiting = append(waiting, locking(t, c.Mutex(fmt.Sprint("x", i))))
		}
		synctest.Wait()
		before := s.commands(c)
		seconds := int64(12)
		if s.members != nil {
			seconds = 60 // the first requests are placed on five servers
		}
		for range 16 * seconds {
			time.Sleep(time.Second / 16)
			way.cut()
		}
		// They poll after a while, as where no subscription can be made.
		if n := (s.commands(c) - before) / seconds; n > 4*int64(locks) {
			t.Errorf("%d commands a second", n)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		way.cut()
		began := time.Now()
		unlock(t, theirs[0])
		mine = append(mine, <-waiting[0])
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release, across one break", took)
		}
		for i := 1; i < locks; i++ {
			unlock(t, theirs[i])
			mine = append(mine, <-waiting[i])
		}
		for _, l := range mine {
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
	t.Parallel()
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := placeAt(target, target.NewClient(t))
		const ttl = 6 * time.Second
		strain := redistest.NewStrain(t)
		another := newClient(t, s)
		theirs := lock(t, another.Mutex("x"))
		var g gate
		rdb := s.connect(t, g.change)
		c, err := s.open(t, rdb, leased.WithKeyPrefix(s.Prefix), leased.WithTTL(ttl), leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		mine := lock(t, c.Mutex("mine"))
		work := mine.Context()
		waiter := locking(t, c.Mutex("x"))
		s.queued(t, "x", 1)
		eventually(t, "subscribed", func() bool {
			return len(s.inboxes(t)) >= 2
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

// If a connection breaks, go-redis dials again before it reports that. Until then the subscription seems
// sound, and a dialer of the user's may wait for minutes for an address at which nobody answers.
func TestVirtualAnInboxWhoseRedialHangsIsMadeAnew(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		theirs := lock(t, newClient(t, s).Mutex("x"))
		var g gate
		c := clientOn(t, s, s.connect(t, g.change))
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		g.shut.Store(true)
		g.cutInbox()
		synctest.Wait()
		g.shut.Store(false)          // the dial that has begun gets no answer
		time.Sleep(10 * time.Second) // a re-check, which has the inbox prove itself
		began := time.Now()
		unlock(t, theirs)
		unlock(t, <-waiter)
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release", took)
		}
	})
}

func TestVirtualAnInboxThatRejoinsHasItsWaitersLookAgainAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		c, wire := onLine(t, s)
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		began := time.Now()
		wire.cut()
		synctest.Wait()
		unlock(t, l) // no subscriber is notified
		wire.mend()
		unlock(t, <-waiter)
		soon := 100 * time.Millisecond
		if s.members != nil {
			soon = 500 * time.Millisecond // a server that was cut off is first asked whether it answers
		}
		if d := time.Since(began); d > soon { // the pace alone has it look after 2 to 3 s
			t.Errorf("looked again after %v", d)
		}
	})
}

// asleep is a connection to a server that is frozen: it accepts connections, and answers nothing.
type asleep struct {
	net.Conn
	shut *atomic.Bool
}

func (c *asleep) Write(p []byte) (int, error) {
	if c.shut.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func TestVirtualASubscriptionThatIsNotMadeIsGivenUpAfter2s(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var shut atomic.Bool
		shut.Store(true)
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.ReadTimeout = true, time.Minute
			wrapConns(o, func(conn net.Conn) net.Conn { return &asleep{conn, &shut} })
		}))
		began := time.Now()
		got := locking(t, c.Mutex("x"))
		time.Sleep(time.Second)
		shut.Store(false)
		if took := subscribedAfter(t, s, began); took > 2100*time.Millisecond {
			t.Errorf("subscribed after %v", took)
		}
		unlock(t, <-got)
	})
}

// subscribedAfter waits until an inbox is subscribed, and returns how long that has taken.
func subscribedAfter(t *testing.T, s place, began time.Time) time.Duration {
	t.Helper()
	for len(s.rdb.PubSubChannels(context.Background(), "leased:inbox:*").Val()) == 0 {
		if time.Sleep(10 * time.Millisecond); time.Since(began) > time.Minute { // the pause of a poll
			t.Fatal("no inbox")
		}
	}
	return time.Since(began)
}

// The first address of a host name may be dead. Go gives it at least 2 s.
func TestVirtualASubscriptionWhoseDialingTakes3sIsMade(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var fast atomic.Bool
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			direct := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if fast.Load() {
					return direct(ctx, network, addr)
				}
				select {
				case <-time.After(3 * time.Second): // of virtual time
				case <-ctx.Done():
					return nil, ctx.Err()
				}
				return direct(ctx, network, addr)
			}
		}))
		began := time.Now()
		got := locking(t, c.Mutex("x"))
		if took := subscribedAfter(t, s, began); took > 3100*time.Millisecond {
			t.Errorf("subscribed after %v", took)
		}
		fast.Store(true) // a release on another connection would fail
		unlock(t, <-got)
	})
}

// Packets of an outage are lost, and dialing waits on.
func TestVirtualASubscriptionIsMadeSoonAfterAnOutageInWhichItsDialingBegan(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		way.shut.Store(true)
		c := clientOn(t, s, s.connect(t, way.change))
		got := locking(t, c.Mutex("x"))
		time.Sleep(time.Second)
		way.shut.Store(false)
		unlock(t, <-got) // its next attempt
		if took := subscribedAfter(t, s, time.Now()); took > time.Second {
			t.Errorf("subscribed %v after the first answer", took)
		}
	})
}

// mute has the servers refuse to publish, as for a user of Redis without any channel.
func (s place) mute(t *testing.T) {
	t.Helper()
	s.Mini.SetPreHook(refuseToPublish)
}

// Nobody tells the owner that others wait. Once its own probe, after 20 s, has shown that nothing is
// published, it asks with each renewal.
func TestVirtualAnIdleLockGoesToAnotherProcessThoughNothingIsPublished(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 6 * time.Second
		a, b := newClient(t, s, leased.WithTTL(ttl)), newClient(t, s, leased.WithTTL(ttl))
		warm(t, s, a, b)
		s.mute(t)
		unlock(t, lock(t, a.Mutex("x", leased.WithIdleHold(time.Hour))))
		began := time.Now()
		unlock(t, lock(t, b.Mutex("x")))
		if waited := time.Since(began); waited > 20*time.Second+ttl {
			t.Errorf("the waiter got the idle lock after %v", waited)
		}
	})
}

// Readers that overlap, in a process that has nothing to publish itself.
func TestVirtualAWriterEntersBetweenReadersThoughNothingIsPublished(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		warm(t, s, a, b)
		s.mute(t)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		for i := range 2 {
			go func() {
				defer func() { ended <- struct{}{} }()
				time.Sleep(time.Duration(i) * 50 * time.Millisecond)
				for ctx.Err() == nil {
					l := take(t, a.RWMutex("x").RLockContext)
					time.Sleep(100 * time.Millisecond)
					unlock(t, l)
				}
			}()
		}
		time.Sleep(time.Second)
		began := time.Now()
		unlock(t, take(t, b.RWMutex("x").LockContext))
		if waited := time.Since(began); waited > 40*time.Second {
			t.Errorf("the writer waited for %v", waited)
		}
		stop()
		<-ended
		<-ended
	})
}

// The clients of a quorum poll where a majority of its servers publishes nothing, and only there.
func TestAQuorumsClientPollsIfAMajorityPublishesNothing(t *testing.T) {
	for n, want := range map[int]string{2: "subscribed", 3: "polling"} {
		t.Run(want, func(t *testing.T) {
			onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
				m, out := newMeter(t), &logs{}
				owner, c := open(), open(leased.WithMeterProvider(m), out.option())
				confirmInboxes(t, owner, c)
				muteServers(servers[:n])
				theirs := lock(t, owner.Mutex("x"))
				mine := locking(t, c.Mutex("x"))
				time.Sleep(10 * time.Second)
				if got := sum(t, m.collect(t)["leased.clients"], "leased.inbox", want); got != 1 {
					t.Errorf("%d clients are %s", got, want)
				}
				if lines := out.count(slog.LevelWarn, "a server of the quorum does not let lock scripts publish"); lines != n {
					t.Errorf("%d servers: logged %q", n, out.messages())
				}
				unlock(t, theirs)
				unlock(t, <-mine)
			})
		})
	}
}

func TestAQuorumsIdleLockGoesToAnotherProcessThoughItPublishesNothing(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		const ttl = 6 * time.Second
		a, b := open(leased.WithTTL(ttl)), open(leased.WithTTL(ttl))
		confirmInboxes(t, a, b)
		muteServers(servers)
		unlock(t, lock(t, a.Mutex("x", leased.WithIdleHold(time.Hour))))
		began := time.Now()
		unlock(t, lock(t, b.Mutex("x")))
		if waited := time.Since(began); waited > 20*time.Second+ttl {
			t.Errorf("the waiter got the idle lock after %v", waited)
		}
	})
}

// muteServers has some servers of a quorum refuse to publish.
func muteServers(servers []*mortal) {
	for _, m := range servers {
		m.Server().SetPreHook(refuseToPublish)
	}
}

func refuseToPublish(p *mini.Peer, cmd string, _ ...string) bool {
	if !strings.EqualFold(cmd, "PUBLISH") {
		return false
	}
	p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	return true
}

// fixedName is a name that leads to one server, and then to another: connections
// that are there stay where they are.
type fixedName struct{ leadsTo atomic.Pointer[string] }

func (n *fixedName) change(o *redis.Options) {
	direct := redis.NewDialer(o)
	o.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return direct(ctx, network, *n.leadsTo.Load())
	}
}

// plannedFailover is a primary and its replica, with a name that leads to the primary.
type plannedFailover struct {
	fixedName
	place
	first, second *redistest.Instance
	old, next     *redis.Client
}

func newPlannedFailover(t *testing.T) *plannedFailover {
	t.Helper()
	p := &plannedFailover{first: redistest.Server(t), second: redistest.Server(t)}
	p.old, p.next = p.first.Client(), p.second.Client()
	t.Cleanup(func() {
		_ = p.old.Close()
		_ = p.next.Close()
	})
	ctx := context.Background()
	host, port, err := net.SplitHostPort(p.first.Addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.next.ReplicaOf(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	p.inSync(t, p.next)
	eventually(t, "its primary knows", func() bool {
		return strings.Contains(p.old.Info(ctx, "replication").Val(), "state=online")
	})
	p.leadsTo.Store(&p.first.Addr)
	p.place = place{Target: redistest.Target{Addr: p.first.Addr, Prefix: "failover:"}, rdb: p.old}
	return p
}

func (p *plannedFailover) inSync(t *testing.T, replica *redis.Client) {
	t.Helper()
	eventually(t, "the replica is in sync", func() bool {
		return strings.Contains(replica.Info(context.Background(), "replication").Val(), "master_link_status:up")
	})
}

// failOver has the two servers exchange their roles, and the name lead to the new primary.
func (p *plannedFailover) failOver(t *testing.T) {
	t.Helper()
	host, port, err := net.SplitHostPort(p.second.Addr)
	if err != nil {
		t.Fatal(err)
	}
	p.leadsTo.Store(&p.second.Addr)
	if err := p.old.Do(context.Background(), "FAILOVER", "TO", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	p.inSync(t, p.old)
}

// lateAnswers is a hook.
type lateAnswers struct{}

func (lateAnswers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (lateAnswers) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return n
}

func (lateAnswers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		defer time.Sleep(50 * time.Millisecond) // what makes them late
		return next(ctx, cmd)
	}
}

// The old primary is a replica then, and passes on to its subscribers what the new one
// publishes, echoes included.
func TestAfterAPlannedFailoverBehindAFixedNameTheInboxMovesToTheNewPrimary(t *testing.T) {
	t.Parallel()
	p := newPlannedFailover(t)
	name, s, first, old, next := &p.fixedName, p.place, p.first, p.old, p.next
	ctx := context.Background()
	owner := clientOn(t, s, first.Client(name.change))
	// The echo arrives over another connection, before the count of its receivers.
	slow := first.Client(name.change, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	slow.AddHook(lateAnswers{})
	waiter := clientOn(t, s, slow)
	theirs := lock(t, owner.Mutex("x"))
	mine := locking(t, waiter.Mutex("x"))
	s.queued(t, "x", 1)
	inboxes := func(rdb *redis.Client) []string {
		all := rdb.PubSubChannels(ctx, s.Prefix+"leased:inbox:*").Val()
		slices.Sort(all)
		return all
	}
	eventually(t, "both listen", func() bool { return len(inboxes(old)) == 2 })

	p.failOver(t)
	eventually(t, "the waiter listens to the new primary", func() bool { return len(inboxes(next)) > 0 })
	unlock(t, theirs)
	unlock(t, closesSoon(t, "it is handed over", mine))
}

// Behind a name that leaves connections alone, all that were in the pool lead to the old primary, which
// answers, as a replica.
func TestAfterAPlannedFailoverBehindAFixedNameTheConnectionsInThePoolCostNothing(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]func(c *leased.Client) error{
		"a try": func(c *leased.Client) error {
			l, err := c.Mutex("x").TryLockContext(context.Background())
			if err == nil {
				err = l.Unlock()
			}
			return err
		},
		"an eviction":  func(c *leased.Client) error { return forceUnlock(context.Background(), c, "nobody's") },
		"a renewal":    nil,
		"an unlocking": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlannedFailover(t)
			const idle = 30
			rdb := p.first.Client(p.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
			c := clientOn(t, p.place, rdb)
			held := lock(t, c.Mutex("held"))
			fillPool(t, rdb, idle)
			p.failOver(t)
			switch {
			case try != nil:
				if err := try(c); err != nil {
					t.Error(err)
				}
			case name == "a renewal":
				if err := held.Check(context.Background()); err != nil {
					t.Error(err)
				}
			}
			unlock(t, held)
		})
	}
}
