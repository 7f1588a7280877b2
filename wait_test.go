package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/race"
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

// unanswered makes a client whose commands get no answer any more, on connections that it has used,
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
