package leased_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

func TestVirtualAReleaseWakesTheNextProcessAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		waits := newClient(t, s)
		l := lock(t, newClient(t, s).Mutex("x"))
		for range 20 {
			waiter := locking(t, waits.Mutex("x"))
			time.Sleep(time.Minute)
			began := time.Now()
			unlock(t, l)
			l = <-waiter
			if d := time.Since(began); d != 0 {
				t.Errorf("entered after %v", d)
			}
			waits = newClient(t, s)
		}
		unlock(t, l)
	})
}

func TestVirtualAWaiterEntersWhenAVanishedOwnersTTLEnds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 47 * time.Second
		s.rdb.Set(context.Background(), "x", "leased1:w:47000:c:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:gone", ttl)
		began := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if d := time.Since(began) - ttl; d <= 0 || d > time.Millisecond {
			t.Errorf("entered %v after the end of the TTL", d)
		}
	})
}

// Most of the second waiter's re-checks ask only whether it still waits. So when the lock comes to the
// first, and that one dies, the second does not know that it is the head.
func TestVirtualAWaiterThatCameToTheFrontUnnoticedIsServedInTime(t *testing.T) {
	const longest = 15 * time.Second // between two re-checks that are not brief
	for what, c := range map[string]struct {
		ttl     time.Duration // of the one that dies
		deleted bool          // the key
		most    time.Duration
	}{
		"all have one TTL":     {ttl: time.Minute, most: time.Minute + 10*time.Millisecond},
		"its TTL is short":     {ttl: 4 * time.Second, most: longest},
		"its TTL is not short": {ttl: longest, most: longest + 10*time.Millisecond},
		"the key is deleted":   {ttl: time.Minute, deleted: true, most: longest},
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			if c.deleted && s.members != nil {
				return // on a quorum's servers, no re-check is brief
			}
			first, third := newClient(t, s, leased.WithTTL(time.Minute)), newClient(t, s, leased.WithTTL(time.Minute))
			second, wire := onLine(t, s, leased.WithTTL(c.ttl))
			warm(t, s, first, second, third)
			l := take(t, first.Mutex("x").LockContext)
			next := taking(t, second.Mutex("x").LockContext)
			synctest.Wait()
			last := taking(t, third.Mutex("x").LockContext)
			for range 5 {
				time.Sleep(3 * time.Second)
				synctest.Wait()
			}
			unlock(t, l)
			lost := <-next
			wire.cut()
			died := time.Now()
			if c.deleted {
				must(t, s.rdb.Del(context.Background(), "x").Err())
			}
			l = <-last
			if waited := time.Since(died); waited > c.most {
				t.Errorf("%s: the one behind waited for %v, at most %v are right", what, waited, c.most)
			}
			unlock(t, l)
			wire.mend()
			isAll(t, lost.Unlock(), leased.ErrLeaseLost)
		})
	}
}

// The first ten were told when the minimum hold ends. Who dies before that cannot act on it, so if all
// ten do, only a full re-check finds the lock free.
func TestVirtualAWaiterBehindThoseThatDieInAMinimumHoldIsServedAtItsEnd(t *testing.T) {
	const hold = 6 * time.Second
	for dying, most := range map[int]time.Duration{1: 50 * time.Millisecond, 9: 100 * time.Millisecond, 10: 15 * time.Second} {
		inVirtualTime(t, func(t *testing.T, s place) {
			if s.members != nil && dying > 1 {
				return // no re-check is brief there
			}
			ttl := leased.WithTTL(time.Minute)
			first, last := newClient(t, s, ttl), newClient(t, s, ttl)
			warm(t, s, first, last)
			began := time.Now()
			l := take(t, first.Mutex("x", leased.WithMinHold(hold)).LockContext)
			var deaths, ends []func()
			for range dying {
				c, wire := onLine(t, s, ttl)
				warm(t, s, c)
				giveUp := mayGiveUp(t, c.Mutex("x").LockContext)
				synctest.Wait()
				deaths = append(deaths, wire.cut)
				ends = append(ends, giveUp, wire.mend)
			}
			next := taking(t, last.Mutex("x").LockContext)
			synctest.Wait()
			time.Sleep(time.Second)
			unlock(t, l)
			time.Sleep(2 * time.Second)
			for _, die := range deaths {
				die()
			}
			l = <-next
			if late := time.Since(began) - hold; late < 0 || late > most {
				t.Errorf("behind %d, it enters %v after the end of the minimum hold", dying, late)
			}
			unlock(t, l)
			for _, end := range ends {
				end()
			}
		})
	}
}

func TestVirtualAHundredWaitingClientsLookAtTheirPace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const span = time.Minute
		clients := 100
		if race.Enabled {
			clients = 25
		}
		if s.members != nil {
			clients = 20 // each has five servers
		}
		longest := 3*time.Second + time.Duration(clients)*lockstate.PausePerPlace // it grows with the place
		l := lock(t, newClient(t, s).Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		looks := make([]stamps, clients)
		for i := range looks {
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &looks[i] }))
			all.Go(func() {
				_, err := c.Mutex("x").LockContext(ctx)
				isAll(t, err, context.Canceled)
			})
		}
		began := time.Now()
		time.Sleep(span)
		synctest.Wait()
		for i := range looks {
			times := looks[i].all()
			last := began // all that is asked in the beginning is asked then
			n := 0
			for _, at := range times {
				if at.Equal(began) {
					continue
				}
				if pause := at.Sub(last); pause < 2*time.Second || pause > longest {
					t.Errorf("client %d looked after %v", i, pause)
				}
				last = at
				n++
			}
			if most := int(span/time.Second) / 2; n > most || n < int(span/longest) {
				t.Errorf("client %d sent %d commands in %v", i, n, span)
			}
		}
		cancel()
		all.Wait()
		unlock(t, l)
	})
}

// Ten thousand of them are to take the server less than a twentieth of a core.
func TestVirtualAWaiterFarBehindSendsThreeCommandsAMinute(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ctx, stop := context.WithCancel(context.Background())
		s.rdb.Set(ctx, "x", "leased1:w:3600000:c:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:owner", time.Hour)
		s.rdb.Set(ctx, "x:{x}:meta", "leased1:1:1", time.Hour) // the last token, which an owner leaves
		var ids, leases []redis.Z
		for i := range 1000 { // who never ask again, nor are asked about while the lock is held
			id := fmt.Sprintf("leased1:w:3600000:c:AAAAAAAAAAAAAAAA:%016d:ahead", i)
			ids = append(ids, redis.Z{Score: float64(i), Member: id})
			leases = append(leases, redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: id})
		}
		for name, all := range map[string][]redis.Z{"queue": ids, "waiters": leases} {
			if err := s.rdb.ZAdd(ctx, "x:{x}:"+name, all...).Err(); err != nil {
				t.Fatal(err)
			}
		}
		var sent stamps
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }))
		echoes := s.rdb.PSubscribe(ctx, "*")
		defer echoes.Close()
		refused := make(chan error, 1)
		go func() {
			_, err := c.Mutex("x").LockContext(ctx)
			refused <- err
		}()
		var heard atomic.Int64
		counted := make(chan struct{})
		go func() { // ends with the subscription
			defer close(counted)
			for {
				m, err := echoes.Receive(ctx)
				if err != nil {
					return
				}
				if m, ok := m.(*redis.Message); ok && strings.HasPrefix(m.Payload, "leased1:echo ") {
					heard.Add(1)
				}
			}
		}()
		time.Sleep(time.Minute)
		synctest.Wait()
		looks := len(sent.all())
		for end := time.Now().Add(21 * time.Second); len(sent.all()) == looks && time.Now().Before(end); synctest.Wait() {
			time.Sleep(time.Second / 10) // to begin after a look
		}
		looks, before := len(sent.all()), heard.Load()
		time.Sleep(4*time.Minute + time.Second) // twelve pauses of at most 20 s, and less than thirteen of at least 19
		synctest.Wait()
		if err := echoes.Close(); err != nil {
			t.Error(err)
		}
		<-counted
		if n := len(sent.all()) - looks; n != 12 || heard.Load()-before != 4 {
			t.Errorf("it looked %d times in four minutes, with %d echoes; want 12 and 4", n, heard.Load()-before)
		}
		stop()
		isAll(t, <-refused, context.Canceled)
	})
}

func TestVirtualLockBacksOffUpTo30sAndSaysSoOnceAMinute(t *testing.T) {
	for text, want := range map[string]struct {
		level       slog.Level
		long, after time.Duration // how long pauses become, and the last
	}{
		"NOAUTH Authentication required.":                {slog.LevelError, 10 * time.Second, 30 * time.Second},
		"LOADING Redis is loading the dataset in memory": {slog.LevelWarn, 2 * time.Second, 2 * time.Second},
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			var sent stamps
			var out logs
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }), out.option())
			unlock(t, lock(t, c.Mutex("other"))) // it was well once
			time.Sleep(time.Second)              // and the inbox is subscribed, whose attempts count too
			before := len(sent.all())
			s.Mini.SetError(text)
			in := make(chan struct{})
			go func() {
				c.Mutex("x").Lock()
				close(in)
			}()
			time.Sleep(time.Hour)
			synctest.Wait()
			times := sent.all()[before:]
			for i := 1; i < len(times); i++ {
				pause := times[i].Sub(times[i-1])
				if pause > want.after {
					t.Errorf("%.7s: pause %d is %v", text, i, pause)
					break
				}
				if i > 30 && pause < want.long {
					t.Errorf("%.7s: pause %d is still %v", text, i, pause)
					break
				}
			}
			if len(times) < 120 {
				t.Errorf("%.7s: tried %d times in an hour", text, len(times))
			}
			if n := out.count(want.level, "lock commands"); n < 30 || n > 61 { // at both ends of the hour
				t.Errorf("%.7s: said so %d times in an hour", text, n)
			}
			s.Mini.SetError("")
			mended := time.Now()
			<-in
			if d := time.Since(mended); d > want.after {
				t.Errorf("%.7s: entered %v after it was mended", text, d)
			}
			c.Mutex("x").Unlock()
		})
	}
}

// stops is a policy that gives up at once.
type stops struct{}

func (stops) NextBackOff() time.Duration { return -1 } // backoff.Stop

func TestVirtualAPolicyThatStopsIsAskedAgainEach30Seconds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var sent stamps
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }),
			leased.WithBackOff(func() leased.BackOff { return stops{} }))
		unlock(t, lock(t, c.Mutex("another")))
		time.Sleep(time.Second)
		// An error that an operator has to fix: in an outage one lock asks each 2 s.
		s.Mini.SetError("NOPERM this user has no permissions to run the 'evalsha' command")
		before := len(sent.all())
		mu, in := c.Mutex("x"), make(chan struct{})
		go func() { // Lock waits for an operator, LockContext does not; ended below
			mu.Lock()
			close(in)
		}()
		time.Sleep(5*time.Minute + time.Second)
		times := sent.all()[before:]
		if len(times) != 11 {
			t.Errorf("asked %d times in five minutes", len(times))
		}
		for i := 1; i < len(times); i++ {
			if pause := times[i].Sub(times[i-1]); pause != 30*time.Second {
				t.Errorf("asked again after %v", pause)
			}
		}
		s.Mini.SetError("")
		<-in
		mu.Unlock()
	})
}

// hurries is a policy without pauses, such as backoff.ZeroBackOff.
type hurries struct{}

func (hurries) NextBackOff() time.Duration { return 0 }

func TestVirtualAPolicyWithoutPausesIsAskedAgainEach5Milliseconds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var sent stamps
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }),
			leased.WithBackOff(func() leased.BackOff { return hurries{} }))
		unlock(t, lock(t, c.Mutex("another")))
		time.Sleep(time.Second)
		s.Mini.SetError("LOADING for a moment")
		before := len(sent.all())
		next := locking(t, c.Mutex("x"))
		time.Sleep(time.Second - time.Millisecond)
		if n := len(sent.all()) - before; n < 150 || n > 250 {
			t.Errorf("asked %d times in a second", n)
		}
		s.Mini.SetError("")
		unlock(t, closesSoon(t, "who waits gets in", next))
	})
}

// unanswered makes a client whose commands get no answer anymore, on connections that it has used,
// before answer is called.
func unanswered(t *testing.T, s place) (c *leased.Client, answer func(*testing.T)) {
	var way hang
	c = clientOn(t, s, s.connect(t, way.change))
	unlock(t, lock(t, c.Mutex("another")))
	way.start()
	return c, way.end
}

func TestVirtualTryLockContextReturnsAfterTwoSecondsWithoutAnAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, answer := unanswered(t, s)
		began := time.Now()
		_, err := c.Mutex("x").TryLockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		if errors.Is(err, leased.ErrLocked) {
			t.Errorf("without an answer it says that another caller has the lock: %v", err)
		}
		if d := time.Since(began); d > 2*time.Second+50*time.Millisecond || s.members == nil && d < 1900*time.Millisecond {
			t.Errorf("it took %v: %v", d, err)
		}
		answer(t)
	})
}

// The lock is being given back, and that command has no answer either.
func TestVirtualTryLockContextDoesNotWaitForTwoCommandsWithoutAnAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hung
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
		l := lock(t, c.Mutex("x"))
		synctest.Wait()
		way.shut.Store(true)
		ctx, cancel := context.WithCancel(context.Background())
		unlocked := make(chan error, 1)
		go func() { unlocked <- l.UnlockContext(ctx) }()
		synctest.Wait()
		began := time.Now()
		_, err := c.Mutex("x").TryLockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		if d := time.Since(began); d > 2*time.Second+50*time.Millisecond || errors.Is(err, leased.ErrLocked) {
			t.Errorf("it took %v: %v", d, err)
		}
		cancel()
		<-unlocked
		way.shut.Store(false)
		s.becomesClean(t, "x")
	})
}

func TestVirtualTryLockReturnsAfterASecondWhateverRedisIsDoing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, answer := unanswered(t, s)
		began := time.Now()
		if c.Mutex("x").TryLock() {
			t.Error("it got a lock without an answer")
		}
		if d := time.Since(began); d > time.Second || s.members == nil && d < time.Second {
			t.Errorf("it took %v", d)
		}
		answer(t)
	})
}

// What the first lock of a client costs, and which messages it misses: the client asks
// for it before its inbox is confirmed.

func TestAWaiterThatDiesWaitingForItsFirstLockCostsItsSuccessorNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const ttl = time.Hour // patience is far less
		var g gate
		// Not in a Cluster, where no count proves that the dead is gone: it is made owner.
		way := s.connect(t, g.change)
		owner := newClient(t, s)
		l := lock(t, owner.Mutex("x"))
		dies, err := s.open(t, way, leased.WithKeyPrefix(s.Prefix), leased.WithTTL(ttl))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var entered atomic.Bool
		over := make(chan struct{})
		go func() { // ended by cancel, waited for through over
			defer close(over)
			if l, err := dies.Mutex("x").LockContext(ctx); err == nil {
				entered.Store(true)
				_ = l.Unlock()
			}
		}()
		s.queued(t, "x", 1)
		next := locking(t, newClient(t, s).Mutex("x"))
		s.queued(t, "x", 2)
		g.shut.Store(true) // as good as dead: it can no longer subscribe
		g.cutInbox()
		eventually(t, "its inbox is gone", func() bool {
			return len(s.inboxes(t)) == 2 && (s.members == nil || s.members.listen() == 2)
		})
		unlock(t, l)
		l = closesSoon(t, "the successor enters", next)
		if entered.Load() {
			t.Error("the dead was made owner: a process that had died would be so for a TTL")
		}
		cancel()
		<-over
		unlock(t, l)
		close(g.open)
		if err := dies.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestVirtualTheFirstLockOfAClientCostsOneMoreCommandIfItIsTakenAndNoneThereafter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner, waits := newClient(t, s), newClient(t, s)
		for i, want := range []int64{2, 1, 1} {
			l := lock(t, owner.Mutex("x"))
			before := s.commands(waits)
			next := locking(t, waits.Mutex("x"))
			synctest.Wait()
			if n := s.commands(waits) - before; n > want+scripts(i) {
				t.Errorf("wait %d took %d commands", i, n)
			}
			unlock(t, l)
			unlock(t, <-next)
		}
	})
}

// scripts is how many commands a client sends in vain at first, for the server does not
// know its scripts.
func scripts(i int) int64 {
	if i == 0 {
		return 1
	}
	return 0
}

func TestVirtualAnOwnerThatHasJustStartedHearsThatItIsWanted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		starts := clientOn(t, s, s.connect(t, lateInbox), leased.WithLocalHandoffs(1, 0))
		l := lock(t, starts.Mutex("x"))
		next := locking(t, newClient(t, s).Mutex("x")) // which notifies subscribed owners
		mine := locking(t, starts.Mutex("x"))
		time.Sleep(500 * time.Millisecond)
		unlock(t, l) // before a tenure of 1 s, that ends in any case
		select {
		case l := <-next:
			unlock(t, l)
			unlock(t, <-mine)
		case l := <-mine:
			t.Error("it kept the lock for its own caller")
			unlock(t, l)
			unlock(t, <-next)
		}
	})
}

// late is a connection on which SUBSCRIBE takes its time.
type late struct{ net.Conn }

func lateInbox(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn { return late{conn} })
}

func (c late) Write(p []byte) (int, error) {
	if subscribes(p) {
		time.Sleep(100 * time.Millisecond) // of virtual time: what makes it late
	}
	return c.Conn.Write(p)
}

func TestVirtualWithASubscriptionThatIsRefusedTheFirstLockIsWaitedForAtOnce(t *testing.T) {
	firstSubscription(t, func(p *mini.Peer) {
		p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	})
}

func TestVirtualWithASubscriptionThatIsRefusedByCuttingItOffTheFirstLockIsWaitedForAtOnce(t *testing.T) {
	firstSubscription(t, func(p *mini.Peer) { p.Close() })
}

// firstSubscription has each SUBSCRIBE answered so, and the first lock of a client be
// waited for.
func firstSubscription(t *testing.T, answer func(p *mini.Peer)) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			if cmd != "SUBSCRIBE" {
				return false
			}
			time.Sleep(time.Millisecond) // after the first answer
			answer(p)
			return true
		})
		next := locking(t, newClient(t, s).Mutex("x"))
		time.Sleep(10 * time.Millisecond)
		queue, _, _, _ := s.helperKeys("x")
		if n := s.rdb.ZCard(context.Background(), queue).Val(); n != 1 {
			t.Errorf("%d wait", n)
		}
		unlock(t, l)
		unlock(t, <-next)
	})
}

// inCluster makes a client whose waiters no count proves gone.
func inCluster(t *testing.T, s place) *leased.Client {
	c := clientOn(t, s, around.LikeCluster{Client: s.connect(t)})
	unlock(t, lock(t, c.Mutex("warm"))) // from here on its inbox is confirmed
	synctest.Wait()
	return c
}

func TestVirtualAHandOffWhereNoCountIsProofCostsOneCommandMore(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, proof := range []bool{true, false} {
			connect, want := newClient, int64(0)
			if !proof {
				connect, want = func(t *testing.T, s place, _ ...leased.Option) *leased.Client { return inCluster(t, s) }, 1
			}
			owner, waits := connect(t, s), connect(t, s)
			known := lock(t, waits.Mutex("x"))
			time.Sleep(15 * time.Second) // the server knows all scripts then
			unlock(t, known)
			synctest.Wait()
			l := lock(t, owner.Mutex("x"))
			next := locking(t, waits.Mutex("x"))
			synctest.Wait()
			before := s.commands(waits)
			unlock(t, l)
			got := <-next
			synctest.Wait()
			time.Sleep(5 * time.Second) // no more until the regular renewal
			if n := s.commands(waits) - before; n != want {
				t.Errorf("with proof %v: %d commands", proof, n)
			}
			if left := time.Until(got.TrustedUntil()); left < 20*time.Second {
				t.Errorf("with proof %v: believed for %v", proof, left)
			}
			unlock(t, got)
			synctest.Wait() // a majority of a quorum is enough for Unlock
			before = s.commands(waits)
			again := lock(t, waits.Mutex("x"))
			synctest.Wait() // else the last of a quorum's servers is asked once more, to cancel
			unlock(t, again)
			synctest.Wait()
			if n := s.commands(waits) - before; n != 2 {
				t.Errorf("with proof %v: an uncontended use took %d commands", proof, n)
			}
		}
	})
}

// The price: its TTL is 30 s.
func TestVirtualALeaseThatIsHandedOnWhereNoCountIsProofEndsSoonIfRedisDoesNotConfirmIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner, waits := inCluster(t, s), inCluster(t, s)
		l := lock(t, owner.Mutex("x"))
		next := locking(t, waits.Mutex("x"))
		synctest.Wait()
		var away atomic.Bool
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, _ ...string) bool {
			if cmd == "PUBLISH" { // of the release
				away.Store(true)
			}
			if away.Load() && cmd == "EVALSHA" {
				p.WriteError("LOADING Redis is loading the dataset in memory")
				return true
			}
			return false
		})
		unlock(t, l)
		got := <-next
		began := time.Now()
		<-got.Context().Done()
		if took := time.Since(began); took < time.Second || took > 2*time.Second {
			t.Errorf("it ended after %v", took)
		}
		if cause := context.Cause(got.Context()); !errors.Is(cause, leased.ErrLeaseLost) {
			t.Errorf("it ended with %v", cause)
		}
		away.Store(false)
		s.Mini.SetPreHook(nil)
		isAll(t, got.Unlock(), leased.ErrLeaseLost)
	})
}

// A lock may be free behind hundreds of requests whose processes are gone. One call of a
// script drops a bounded number of them; the client then asks again at once, so that the
// lock takes a few commands and no sleep. Virtual time would show any sleep, except those
// until the server's clock has reached a token, which take microseconds.

// deadWaiters queues n requests whose waiting leases have expired.
func (s place) deadWaiters(t *testing.T, name string, n int) {
	t.Helper()
	queue, _, waiters, _ := s.helperKeys(name)
	ctx := context.Background()
	var entries, leases []redis.Z
	for i := range n {
		id := fmt.Sprintf("leased1:w:30000:c:%016d:AAAAAAAAAAAAAAAA:gone", i)
		entries = append(entries, redis.Z{Score: float64(i), Member: id})
		leases = append(leases, redis.Z{Score: float64(time.Now().Add(-time.Minute).UnixMilli()), Member: id})
	}
	must(t, s.rdb.ZAdd(ctx, queue, entries...).Err())
	must(t, s.rdb.ZAdd(ctx, waiters, leases...).Err())
	must(t, s.rdb.PExpire(ctx, queue, time.Hour).Err())
	must(t, s.rdb.PExpire(ctx, waiters, time.Hour).Err())
}

func TestAFreeLockBehindDeadWaitersIsGotAtOnce(t *testing.T) {
	for _, dead := range []int{100, 500, 1_500} {
		for what, take := range map[string]func(c *leased.Client) (*leased.Lease, error){
			"try": func(c *leased.Client) (*leased.Lease, error) {
				return c.Mutex("x").TryLockContext(context.Background())
			},
			"lock": func(c *leased.Client) (*leased.Lease, error) { return c.Mutex("x").LockContext(context.Background()) },
			"read": func(c *leased.Client) (*leased.Lease, error) {
				return c.RWMutex("x").TryRLockContext(context.Background())
			},
		} {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s)
				warm(t, s, c) // a client that has just begun asks once more
				s.deadWaiters(t, "x", dead)
				began, before := time.Now(), s.commands(c)
				l, err := take(c)
				took, sent := time.Since(began), s.commands(c)-before
				if err != nil {
					t.Fatalf("%s behind %d dead: %v", what, dead, err)
				}
				if took > time.Millisecond || sent > int64(2+dead/400) {
					t.Errorf("%s behind %d dead: %v and %d commands", what, dead, took, sent)
				}
				unlock(t, l)
				synctest.Wait()
				if !s.clean(t, "x") {
					t.Errorf("%s behind %d dead: left %v", what, dead, s.rdb.Keys(context.Background(), "*").Val())
				}
			})
		}
	}
}

// Neither the waiter behind the dead requests nor the owner that releases sleeps.
func TestAReleasedLockPassesDeadWaitersAtOnce(t *testing.T) {
	for _, shared := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			owner, next := newClient(t, s), newClient(t, s)
			l := lock(t, owner.Mutex("x"))
			s.deadWaiters(t, "x", 1_500)
			var waiter <-chan *leased.Lease
			if shared {
				waiter = reading(t, next.RWMutex("x"))
			} else {
				waiter = locking(t, next.Mutex("x"))
			}
			synctest.Wait()
			s.deadWaiters(t, "x", 1_200) // they are before it, for their scores are lower
			began := time.Now()
			unlock(t, l)
			got := <-waiter
			if took := time.Since(began); took > time.Millisecond {
				t.Errorf("shared %v: it took %v", shared, took)
			}
			unlock(t, got)
		})
	}
}

// manyReaders is more than the 100 that one call of a script tells or lets in.
func manyReaders() int {
	if race.Enabled || wantsQuorum() {
		return 110
	}
	return 250
}

func TestManyReadersBehindAWriterEnterAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		readers := manyReaders()
		l := lock(t, newClient(t, s).Mutex("x"))
		var waiting []<-chan *leased.Lease
		for range readers {
			waiting = append(waiting, reading(t, newClient(t, s).RWMutex("x")))
			synctest.Wait()
		}
		s.queued(t, "x", int64(readers))
		began := time.Now()
		unlock(t, l)
		var in []*leased.Lease
		for _, w := range waiting {
			in = append(in, <-w)
		}
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the last of %d readers entered after %v", readers, took)
		}
		// All of them are notified at once that a writer waits.
		writer := locking(t, newClient(t, s).Mutex("x"))
		for _, r := range in {
			unlock(t, r)
		}
		unlock(t, <-writer)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the writer entered after %v", took)
		}
	})
}

// Readers of many processes keep the lock idle until a notification says that it is wanted.
func TestAWriterGetsTheLockThatManyReadersKeepIdleAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for range manyReaders() {
			unlock(t, <-reading(t, newClient(t, s).RWMutex("x", leased.WithIdleHold(time.Hour))))
		}
		synctest.Wait()
		began := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// In real time, because a pipe of the virtual network cannot take a pipeline of so many
// messages. A reader without a message would notice at its renewal, after ten seconds.
func TestForceUnlockTellsManyReadersAtOnce(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		var in []*leased.Lease
		defer func() { // if it fails, or each Close would wait for its client's lease
			var all sync.WaitGroup
			for _, l := range in {
				all.Go(func() { _ = l.Unlock() })
			}
			all.Wait()
		}()
		for range manyReaders() {
			l := <-reading(t, newClient(t, s).RWMutex("x"))
			if l == nil {
				t.Fatal("a reader does not enter")
			}
			in = append(in, l)
		}
		strain, began := redistest.NewStrain(t), time.Now()
		must(t, forceUnlock(context.Background(), newClient(t, s), "x"))
		for _, l := range in {
			closesSoon(t, "a reader hears of it", l.Context().Done())
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		if took := time.Since(began); took > 5*time.Second+strain.Since(began) {
			t.Errorf("the last of them heard after %v", took)
		}
	})
}

// reading is a caller that waits to read.
func reading(t *testing.T, rw *leased.RWMutex) <-chan *leased.Lease {
	t.Helper()
	got := make(chan *leased.Lease, 1)
	go func() {
		l, err := rw.RLockContext(context.Background())
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	return got
}
