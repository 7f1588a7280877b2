package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
)

// onQuorum runs f on five embedded servers in virtual time.
func onQuorum(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		f(t, quorumPlace(t, true))
	})
}

// confirmInboxes has clients lock, and waits until messages reach them.
func confirmInboxes(t *testing.T, clients ...*leased.Client) {
	t.Helper()
	for _, c := range clients {
		unlock(t, lock(t, c.Mutex("another")))
	}
	synctest.Wait()
}

func TestAQuorumLocksAndHandsOver(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		first := lock(t, a.Mutex("x"))
		if err := first.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
			t.Fatal("two owners")
		}
		waiter := locking(t, b.Mutex("x"))
		time.Sleep(10 * time.Second)
		if !open(waiter) {
			t.Fatal("two owners")
		}
		synctest.Wait() // a re-check may be under way
		before := b.Stats().Commands
		unlock(t, first)
		second := <-waiter
		if second.Token() <= first.Token() {
			t.Errorf("tokens %d, %d", first.Token(), second.Token())
		}
		if n := b.Stats().Commands - before; n != 0 || b.Stats().Direct != 1 {
			t.Errorf("a hand-off cost its receiver %d commands: %+v", n, b.Stats())
		}
		unlock(t, second)
		synctest.Wait()
		if !s.clean(t, "x") {
			t.Error("keys are left")
		}
	})
}

func TestAQuorumsLeaseIsLostWithinARenewalPeriodOfItsKeys(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s, leased.WithTTL(30*time.Second)).Mutex("x"))
		time.Sleep(25 * time.Second)
		s.rdb.Del(context.Background(), "x")
		began := time.Now()
		closesSoon(t, "the loss is noticed", l.Context().Done())
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("noticed after %v", took)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestServersOfAQuorumThatLoseTheirDataWhileALeaseIsHeldGiveItToNobodyElse(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		l := lock(t, a.Mutex("x"))
		for range 3 { // each time a majority, and never all
			for _, mini := range s.members.minis[:3] {
				mini.FlushAll()
			}
			if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
				t.Fatal("two owners")
			}
			time.Sleep(time.Minute)
			if err := l.Context().Err(); err != nil {
				t.Fatalf("lost, though nobody else can have owned it: %v", context.Cause(l.Context()))
			}
			if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
				t.Fatal("two owners")
			}
		}
		unlock(t, l)
	})
}

// What a server that did not answer carries out late is given back when it sends a message
// about it, although it would be asked only later whether it answers.
func TestAServerOfAQuorumThatSendsAMessageIsAskedAtOnceWhetherItAnswers(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		var way hang
		a, b := clientOn(t, s, s.connect(t, way.change)), newClient(t, s)
		confirmInboxes(t, a, b)
		time.Sleep(time.Second)
		way.start()
		late := locking(t, a.Mutex("x"))
		time.Sleep(3*time.Minute + 12750*time.Millisecond) // a pause between two PINGs
		way.end(t)
		time.Sleep(time.Millisecond)
		if s.value(t, "x") == "" {
			t.Fatal("nothing was carried out late")
		}
		began := time.Now()
		l := lock(t, b.Mutex("x"))
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("it took %v to enter a lock that its owner does not know of", took)
		}
		unlock(t, l)
		unlock(t, <-late)
	})
}

// ofThree makes a lease that three of five servers grant, because the other two do not answer.
func ofThree(t *testing.T, servers []*mortal, c *leased.Client) *leased.Lease {
	t.Helper()
	for _, m := range servers[3:] {
		m.die()
	}
	l := lock(t, c.Mutex("x", leased.WithTTL(30*time.Second)))
	time.Sleep(time.Second) // what was on its way to them has failed
	for _, m := range servers[3:] {
		m.comeBack()
	}
	return l
}

// After the first renewal the servers that are back have granted it, too.
func TestALeaseOfABareMajorityIsNotProvenWhenServersOfItDie(t *testing.T) {
	for _, renewed := range []bool{false, true} {
		onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			l := ofThree(t, servers, open())
			time.Sleep(5 * time.Second)
			if renewed {
				time.Sleep(10 * time.Second)
			}
			stands := 3
			if renewed {
				stands = 5
			}
			if info, err := open().Inspect(context.Background(), "x"); err != nil || info.Behind != stands {
				t.Errorf("renewed %v: %d servers name the owner, want %d: %v", renewed, info.Behind, stands, err)
			}
			for _, m := range servers[:2] {
				m.die()
			}
			err := l.Unlock()
			if proven := err == nil; proven != renewed || !proven && !errors.Is(err, leased.ErrLeaseLost) && !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("renewed %v: Unlock returned %v", renewed, err)
			}
		})
	}
}

func TestServersOfAQuorumThatRefusedStandBehindALeaseBeforeItsFirstRenewal(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		ctx, k := context.Background(), &protocol.Keys{Lock: "x"}
		id := protocol.NewRequest(protocol.NewClientID("another"), protocol.Exclusive, time.Minute, false, protocol.Unproved, protocol.Origin{}).ID
		var others []*redisserver.Server // where another's release has not arrived yet
		for _, m := range servers[3:] {
			srv := redisserver.NewMember(redistest.MiniClient(t, m.Miniredis), "", time.Minute)
			if a, err := srv.Do(ctx, k, &protocol.Command{Verb: protocol.Acquire, ID: id, TTL: time.Minute}); err != nil || a.Outcome != protocol.Granted {
				t.Fatal(a, err)
			}
			others = append(others, srv)
		}
		c := open()
		l, err := c.Mutex("x", leased.WithTTL(30*time.Second)).TryLockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		for _, srv := range others {
			if a, err := srv.Do(ctx, k, &protocol.Command{Verb: protocol.Release, ID: id}); err != nil || a.Outcome != protocol.Done {
				t.Fatal(a, err)
			}
		}
		synctest.Wait()
		stands(t, open(), 5, 5)
		for _, m := range servers[:2] {
			m.die()
		}
		unlock(t, l)
	})
}

// Whatever has become of their data, nobody else can have had the lock.
func TestServersOfAQuorumThatLoseTheirDataProveAnUnlock(t *testing.T) {
	for _, all := range []bool{false, true} {
		onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			var l *leased.Lease
			lose := servers[:2]
			if all {
				l, lose = lock(t, open().Mutex("x")), servers
				synctest.Wait()
			} else {
				l = ofThree(t, servers, open())
			}
			for _, m := range lose {
				m.FlushAll()
			}
			if err := l.Unlock(); errors.Is(err, leased.ErrLeaseLost) != all || !all && err != nil {
				t.Errorf("all %v: %v", all, err)
			}
		})
	}
}

// quorumLocks are the locks that a quorum has: how a writer locks them, and readers, if there are.
var quorumLocks = map[string]func(c *leased.Client) (writer, reader func(context.Context) (*leased.Lease, error)){
	"Mutex": func(c *leased.Client) (writer, reader func(context.Context) (*leased.Lease, error)) {
		return c.Mutex("x").LockContext, nil
	},
	"RWMutex": func(c *leased.Client) (writer, reader func(context.Context) (*leased.Lease, error)) {
		rw := c.RWMutex("x")
		return rw.LockContext, rw.RLockContext
	},
}

func TestAQuorumOfThreeFiveOrSevenServersGoesOnWithoutAMinority(t *testing.T) {
	for _, n := range []int{3, 5, 7} {
		for what, of := range quorumLocks {
			t.Run(fmt.Sprintf("%s on %d", what, n), func(t *testing.T) {
				onSomeMortals(t, n, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
					last := uint64(0)
					grown := func(l *leased.Lease) *leased.Lease {
						t.Helper()
						if l.Token() <= last {
							t.Errorf("token %d after %d", l.Token(), last)
						}
						last = l.Token()
						return l
					}
					write, read := of(open())
					writeToo, readToo := of(open())
					inTurn := func() {
						t.Helper()
						for range 3 {
							first := grown(take(t, write))
							next := make(chan *leased.Lease, 1)
							go func() { next <- take(t, writeToo) }()
							time.Sleep(time.Second)
							if len(next) > 0 {
								t.Fatal("two owners")
							}
							unlock(t, first)
							second := grown(<-next)
							unlock(t, second)
						}
						if read == nil {
							return
						}
						one, two := take(t, read), take(t, readToo) // together
						if one.Token() <= last || two.Token() <= last {
							t.Errorf("readers' tokens %d and %d after a writer's %d", one.Token(), two.Token(), last)
						}
						writing := make(chan *leased.Lease, 1)
						go func() { writing <- take(t, writeToo) }()
						time.Sleep(time.Second)
						unlock(t, one)
						time.Sleep(time.Second)
						if len(writing) > 0 {
							t.Fatal("a writer beside a reader")
						}
						unlock(t, two)
						unlock(t, grown(<-writing))
					}
					inTurn()
					held := grown(take(t, write))
					synctest.Wait()
					for _, m := range servers[:n/2] {
						m.die()
					}
					time.Sleep(time.Minute) // two TTLs
					if err := held.Context().Err(); err != nil {
						t.Fatalf("lost without a minority: %v", context.Cause(held.Context()))
					}
					unlock(t, held)
					inTurn()
					servers[n-1].die()
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					defer cancel()
					_, err := writeToo(ctx)
					isAll(t, err, leased.ErrNoQuorum, leased.ErrNotAcquired)
					for _, m := range servers {
						m.comeBack()
					}
					time.Sleep(5 * time.Second)
					inTurn()
				})
			})
		}
	}
}

// Clients that reach different majorities have a server in common.
func TestClientsOfAQuorumThatReachDifferentServersExcludeEachOther(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		first, last := viewed(servers), viewed(servers)
		for _, m := range append(first[3:5:5], last[:2]...) {
			m.die()
		}
		a, b := openMortals(t, first), openMortals(t, last)
		token := uint64(0)
		for range 5 {
			l := lock(t, a.Mutex("x"))
			waiter := locking(t, b.Mutex("x"))
			time.Sleep(time.Minute)
			if !open(waiter) {
				t.Fatal("two owners")
			}
			began := time.Now()
			unlock(t, l)
			next := <-waiter
			if d := time.Since(began); d > time.Second {
				t.Errorf("handed over after %v", d)
			}
			if l.Token() <= token || next.Token() <= l.Token() {
				t.Errorf("tokens %d, %d, %d", token, l.Token(), next.Token())
			}
			token = next.Token()
			unlock(t, next)
		}
		first[2].die() // two of five are left to it
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := a.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNoQuorum)
		unlock(t, lock(t, b.Mutex("x")))
	})
}

// Each client's nearest server is another one, so each is granted the lock by that server and refused by
// all others.
func TestOneOfSeveralClientsThatTryAQuorumsLockAtOnceGetsIt(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		var clients []*leased.Client
		for i := range servers {
			seen := viewed(servers)
			c := openMortals(t, seen)
			unlock(t, lock(t, c.Mutex("another")))
			for j, m := range seen {
				m.slowBy(time.Duration(1+(j-i+len(seen))%len(seen)) * time.Millisecond)
			}
			clients = append(clients, c)
		}
		confirmInboxes(t, clients...)
		results := make(chan error, len(clients))
		for i, c := range clients {
			go func() { // ends with its try, and is waited for below
				time.Sleep(time.Duration(i) * 100 * time.Microsecond) // of virtual time: no two try in the same microsecond
				l, err := c.Mutex("x", leased.WithMinHold(time.Minute)).TryLockContext(t.Context())
				if err == nil {
					err = l.Unlock()
				}
				results <- err
			}()
		}
		got := 0
		for range clients {
			if err := <-results; err == nil {
				got++
			} else if !errors.Is(err, leased.ErrLocked) {
				t.Error(err)
			}
		}
		if got != 1 {
			t.Errorf("%d of %d clients got the lock, want one", got, len(clients))
		}
	})
}

func TestAQuorumIsAsFastAsItsFastestMajority(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		a, b := open(), open()
		for _, m := range servers[:2] {
			m.slowBy(300 * time.Millisecond)
		}
		for range 20 {
			began := time.Now()
			l := lock(t, a.Mutex("x"))
			waiter := locking(t, b.Mutex("x"))
			synctest.Wait()
			unlock(t, l)
			unlock(t, <-waiter)
			if d := time.Since(began); d > 100*time.Millisecond {
				t.Fatalf("two leases took %v, where two servers take 300ms each time", d)
			}
		}
	})
}

// A load balancer has closed the connections that were idle, which go-redis cannot see of encrypted ones.
func TestATryOfAQuorumsFreeLockSucceedsAfterItsConnectionsWereClosed(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var out logs
		c := open(out.option())
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait()
		breakConnections(servers)
		time.Sleep(10 * time.Second) // until the subscriptions are there again
		began := time.Now()
		if !c.Mutex("x").TryLock() {
			t.Error("a try of a free lock failed")
		}
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		if len(out.messages()) > 0 {
			t.Errorf("logged %q", out.messages())
		}
	})
}

// It takes several round trips to set up a connection, and what asks whether a server is back needs one.
func TestServersOfAQuorumThatAreFarAwayComeBack(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		for _, m := range servers[:3] {
			m.die()
		}
		if c.Mutex("x").TryLock() {
			t.Error("two of five servers are enough")
		}
		time.Sleep(time.Minute)
		for _, m := range servers[:3] {
			m.moveAway(300 * time.Millisecond)
			m.comeBack()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		unlock(t, take(t, func(context.Context) (*leased.Lease, error) { return c.Mutex("x").LockContext(ctx) }))
	})
}

// A lease ends a little before its TTL has passed since a majority last confirmed it, whatever the others
// still answer. Too few servers say nothing about it before.
func TestALeaseOfAQuorumEndsByItsLastMajority(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		const ttl = 3 * time.Second
		c := open(leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := take(t, c.RWMutex("x").LockContext)
		before := l.TrustedUntil()
		for l.TrustedUntil().Equal(before) { // until the first renewal
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		proved := time.Now()
		for _, m := range servers[:3] {
			m.die()
		}
		until := l.TrustedUntil()
		if until.After(proved.Add(ttl)) {
			t.Errorf("trusted for %v after a renewal", until.Sub(proved))
		}
		time.Sleep(100 * time.Millisecond)
		isAll(t, l.Check(context.Background()), leased.ErrNoQuorum)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		isAll(t, l.Downgrade(ctx), leased.ErrNoQuorum, context.DeadlineExceeded)
		if err := l.Context().Err(); err != nil {
			t.Errorf("the lease has ended early: %v", context.Cause(l.Context()))
		}
		<-l.Context().Done()
		if now := time.Now(); now.After(until) || until.Sub(now) > time.Millisecond {
			t.Errorf("it ended %v after it was trusted", now.Sub(until))
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

// A decision waits for a server that does not answer for a tenth of the TTL, within bounds, and once.
func TestASilentServerOfAQuorumIsWaitedForOnce(t *testing.T) {
	for ttl, want := range map[time.Duration]time.Duration{
		100 * time.Millisecond: 20 * time.Millisecond,
		2 * time.Second:        200 * time.Millisecond,
		time.Minute:            500 * time.Millisecond,
	} {
		onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			c := open()
			unlock(t, lock(t, c.Mutex("warm")))
			synctest.Wait()
			for _, m := range servers[:3] {
				m.fallSilent()
			}
			for i, want := range []time.Duration{want, 0} {
				began := time.Now()
				_, err := c.Mutex("x", leased.WithTTL(ttl)).TryLockContext(context.Background())
				isAll(t, err, leased.ErrNoQuorum)
				if took := time.Since(began); took != want {
					t.Errorf("TTL %v: try %d took %v, want %v", ttl, i+1, took, want)
				}
				time.Sleep(time.Second)
			}
		})
	}
}

// Servers in other regions are not silent while connections to them are made, which takes several round
// trips, nor are they if other servers are near.
func TestAFarQuorumAnswersWhileItsPoolsGrow(t *testing.T) {
	const ms = time.Millisecond
	for _, distances := range [][]time.Duration{
		{100 * ms, 100 * ms, 100 * ms}, {200 * ms, 200 * ms, 200 * ms}, {0, 200 * ms, 200 * ms}, {1 * ms, 200 * ms, 200 * ms, 200 * ms, 80 * ms},
	} {
		t.Run(fmt.Sprint(distances), func(t *testing.T) {
			onSomeMortals(t, len(distances), func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
				for i, m := range servers {
					m.moveAway(distances[i])
				}
				var lines logs
				c := open(lines.option())
				tries := func(n int) {
					t.Helper()
					var all sync.WaitGroup
					for i := range n {
						all.Go(func() {
							l, err := c.Mutex(fmt.Sprint("lock ", i)).TryLockContext(t.Context())
							if err != nil {
								t.Errorf("%d free locks: %v", n, err)
								return
							}
							unlock(t, l)
						})
					}
					all.Wait()
				}
				tries(1)
				time.Sleep(5 * time.Second)
				tries(60)
				if n := lines.count(slog.LevelWarn, ""); n != 0 {
					t.Errorf("%d warnings", n)
				}
			})
		})
	}
}

// A far server that falls silent is waited for once as well, for as long as making a connection to it may
// take.
func TestAFarServerOfAQuorumIsWaitedForOnce(t *testing.T) {
	for distance, want := range map[time.Duration]time.Duration{
		60 * time.Millisecond:  500 * time.Millisecond,
		100 * time.Millisecond: 800 * time.Millisecond,
		200 * time.Millisecond: 1600 * time.Millisecond,
		300 * time.Millisecond: 1800 * time.Millisecond,
	} {
		onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			for _, m := range servers {
				m.moveAway(distance)
			}
			c := open()
			for range 3 { // the last time on connections that there are, so that the distance is known
				unlock(t, lock(t, c.Mutex("x")))
				time.Sleep(3 * time.Second)
			}
			for _, m := range servers[:2] {
				m.fallSilent()
			}
			for i, want := range []time.Duration{want, distance} {
				began := time.Now()
				_, err := c.Mutex("x").TryLockContext(t.Context())
				isAll(t, err, leased.ErrNoQuorum)
				// It is seen within 100 ms that the server is away. An answer that needed two round trips,
				// because the server did not have the script, may be the last one.
				if took := time.Since(began); took < want || took > want+want/16+100*time.Millisecond {
					t.Errorf("%v away: try %d took %v, want %v", distance, i+1, took, want)
				}
				time.Sleep(3 * time.Second)
			}
		})
	}
}

// What a far server owes to other locks does not matter to a decision that it has taken part in.
func TestAFarServerThatIsBusyGivesNoMoreTimeToOthers(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		servers[2].moveAway(200 * time.Millisecond)
		c := open()
		for range 3 { // so that the distances are known
			unlock(t, lock(t, c.Mutex("x")))
			time.Sleep(3 * time.Second)
		}
		must(t, servers[2].Set("x", "somebody else"))
		ctx, cancel := context.WithCancel(t.Context())
		var others sync.WaitGroup
		for i := range 4 {
			others.Go(func() {
				time.Sleep(time.Duration(i) * 60 * time.Millisecond)
				for ctx.Err() == nil {
					if l, err := c.Mutex(fmt.Sprint("other ", i)).LockContext(ctx); err == nil {
						_ = l.Unlock()
					}
					time.Sleep(150 * time.Millisecond) // of virtual time: the pause between two leases
				}
			})
		}
		time.Sleep(3 * time.Second)
		servers[1].fallSilent()
		began := time.Now()
		_, err := c.Mutex("x").TryLockContext(t.Context())
		isAll(t, err, leased.ErrNotAcquired)
		if took := time.Since(began); took > 800*time.Millisecond {
			t.Errorf("the try took %v", took)
		}
		cancel()
		others.Wait()
	})
}

// A server may have been dead for days when a process starts.
func TestCloseWaitsBrieflyForAServerThatNeverAnswered(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		servers[2].fallSilent()
		c := open()
		unlock(t, lock(t, c.Mutex("x")))
		began := time.Now()
		must(t, c.Close())
		if took := time.Since(began); took > time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}

// How far away a server is does not matter once it is known not to answer.
func TestAnAwayServerGivesNoMoreTimeToOthers(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		servers[2].moveAway(300 * time.Millisecond)
		c := open()
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(3 * time.Second)
		servers[2].fallSilent()
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(3 * time.Second)
		servers[1].fallSilent()
		began := time.Now()
		_, err := c.Mutex("x").TryLockContext(t.Context())
		isAll(t, err, leased.ErrNoQuorum)
		if took := time.Since(began); took != 500*time.Millisecond {
			t.Errorf("the try took %v", took)
		}
	})
}

// For two minutes the clocks drift apart, by more than any clock does.
func TestClocksOfAQuorumThatDriftEndNoLease(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s, leased.WithTTL(10*time.Second)), newClient(t, s, leased.WithTTL(10*time.Second))
		show := make([]time.Time, suiteMembers)
		for i := range show {
			show[i] = time.Now()
		}
		last := uint64(0)
		for range 4 {
			l := lock(t, a.Mutex("x"))
			for range 30 {
				time.Sleep(time.Second)
				for i, one := range s.members.minis { // from 2 % slow to 2 % fast
					passed := time.Second + time.Duration(i-2)*10*time.Millisecond
					show[i] = show[i].Add(passed)
					one.SetTime(show[i])
					one.FastForward(passed)
				}
				if _, err := b.Mutex("x").TryLockContext(t.Context()); !errors.Is(err, leased.ErrLocked) {
					t.Fatalf("two owners: %v", err)
				}
			}
			if err := l.Context().Err(); err != nil {
				t.Fatalf("lost: %v", context.Cause(l.Context()))
			}
			unlock(t, l)
			next := lock(t, b.Mutex("x"))
			if l.Token() <= last || next.Token() <= l.Token() {
				t.Errorf("tokens %d, %d, %d", last, l.Token(), next.Token())
			}
			last = next.Token()
			unlock(t, next)
		}
	})
}

// A server whose subscription broke may have sent messages that were missed; the others have not.
func TestASubscriptionOfAQuorumThatBreaksHasItsServerAskedAlone(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		ways := make([]listeners, suiteMembers)
		next := 0
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) { ways[next].change(o); next++ }))
		other := newClient(t, s)
		confirmInboxes(t, c, other)
		time.Sleep(time.Second)
		l := lock(t, other.Mutex("x"))
		s.settle()
		mine := locking(t, c.Mutex("x"))
		synctest.Wait()
		before := c.Stats().Commands
		ways[2].cut()
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if n := c.Stats().Commands - before; n != 1 {
			t.Errorf("%d commands after a break at one server", n)
		}
		for i := range ways {
			ways[i].cut()
		}
		unlock(t, l)
		began := time.Now()
		l = <-mine
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release, across a break at all servers", took)
		}
		unlock(t, l)
	})
}

// A connection may have been broken for long when it is used, and all of a client at once: where they
// are encrypted, go-redis cannot see it before.
func TestALockOfAQuorumWhoseConnectionsAllBrokeIsUnlockedAtOnce(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var lines logs
		c := open(lines.option())
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second)
		breakConnections(servers)
		synctest.Wait()
		began := time.Now()
		unlock(t, l)
		if took := time.Since(began); took != 0 {
			t.Errorf("Unlock took %v", took)
		}
		synctest.Wait()
		if n := lines.count(slog.LevelWarn, "a server of the quorum"); n != 0 {
			t.Errorf("%d servers were said not to answer", n)
		}
	})
}

// The PING that asks a server whether it answers may meet connections that are broken, too.
func TestALockOfAQuorumManyOfWhoseConnectionsBrokeIsUnlockedSoon(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var lines logs
		c := open(lines.option())
		l := lock(t, c.Mutex("x"))
		var all sync.WaitGroup
		for i := range 30 {
			all.Go(func() { unlock(t, lock(t, c.Mutex(fmt.Sprint("other ", i)))) })
		}
		all.Wait()
		time.Sleep(time.Second)
		breakConnections(servers)
		synctest.Wait()
		unlock(t, l)
		synctest.Wait()
		if n := lines.count(slog.LevelWarn, "a server of the quorum"); n != 0 {
			t.Errorf("%d servers were said not to answer", n)
		}
	})
}

// What a PING meets says more than that there was no answer in time.
func TestAQuorumSaysWhyItsServersAreAwayByWhatIsKnownLast(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		says := func(text string) {
			t.Helper()
			_, err := c.Mutex("x").TryLockContext(t.Context())
			isAll(t, err, leased.ErrNoQuorum)
			if want := "1 of 3 servers answered, but 2 are needed; servers 1 and 2: " + text; !strings.HasSuffix(err.Error(), want) {
				t.Errorf("it says %q, want %q", err, want)
			}
		}
		for _, m := range servers[:2] {
			m.fallSilent()
		}
		says("no answer in time")
		time.Sleep(5 * time.Second)
		says("no answer from Redis in time")
		for _, m := range servers[:2] {
			m.die()
		}
		time.Sleep(10 * time.Second)
		says(errDead.Error())
	})
}

func TestAProxyWithoutAServerOfAQuorumIsLeftAlone(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var lines logs
		c := open(lines.option())
		lockAll := func() {
			var all sync.WaitGroup
			for i := range 20 {
				all.Go(func() { unlock(t, lock(t, c.Mutex(fmt.Sprint("lock ", i)))) })
			}
			all.Wait()
		}
		lockAll()
		servers[1].losesServer()
		lockAll()
		time.Sleep(5 * time.Second)
		if all := lines.messages(); len(all) != 1 || !strings.Contains(all[0], "a server of the quorum does not answer") {
			t.Fatalf("logged %q", all)
		}
		lines.lines[0].Attrs(func(a slog.Attr) bool {
			if a.Key == "error" && !errors.Is(a.Value.Any().(error), io.ErrClosedPipe) && !errors.Is(a.Value.Any().(error), io.EOF) {
				t.Errorf("it is said to be away because of %v", a.Value)
			}
			return true
		})
		before := servers[1].dialed()
		for range 20 {
			lockAll()
			time.Sleep(500 * time.Millisecond)
		}
		if n := servers[1].dialed() - before; n < 10 || n > 150 { // for PINGs, with those that go-redis repeats, and to subscribe
			t.Errorf("%d connections in 10 s", n)
		}
	})
}

func TestAServerOfAQuorumWhoseConnectionBrokeIsAskedForWhatWaitsThere(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		own := viewed(servers)
		c := openMortals(t, own)
		confirmInboxes(t, c, open())
		l := lock(t, open().Mutex("x"))
		breakConnections(own[:2])
		time.Sleep(time.Second)
		mine := locking(t, c.Mutex("x"))
		synctest.Wait()
		queue := "x:{x}:queue"
		for i, m := range servers {
			if all, _ := m.ZMembers(queue); len(all) != 1 {
				t.Errorf("%d wait at server %d", len(all), i+1)
			}
		}
		unlock(t, l)
		unlock(t, <-mine)
	})
}

// The acquire is repeated on another connection, which breaks as well.
func TestAServerOfAQuorumWhoseConnectionBrokeAgainIsAskedForWhatWaitsThere(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var rdbs []redis.UniversalClient
		hook := &breaking{}
		for i, m := range servers {
			rdb := m.client(t)
			if i == 0 {
				rdb.AddHook(hook)
			}
			rdbs = append(rdbs, rdb)
		}
		c, err := leased.NewQuorum(rdbs)
		must(t, err)
		defer c.Close()
		confirmInboxes(t, c, open())
		l := lock(t, open().Mutex("x"))
		time.Sleep(time.Second)
		hook.left.Store(2)
		mine := locking(t, c.Mutex("x"))
		synctest.Wait()
		for i, m := range servers {
			if all, _ := m.ZMembers("x:{x}:queue"); len(all) != 1 {
				t.Errorf("%d wait at server %d", len(all), i+1)
			}
		}
		unlock(t, l)
		unlock(t, <-mine)
	})
}

// breaking is a hook under which the connections of so many scripts break.
type breaking struct{ left atomic.Int32 }

func (b *breaking) DialHook(next redis.DialHook) redis.DialHook { return next }
func (b *breaking) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (b *breaking) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") && b.left.Add(-1) >= 0 {
			cmd.SetErr(io.EOF)
			return io.EOF
		}
		return next(ctx, cmd)
	}
}

// A client whose pools have no connection for a command of one lock does not ask for what waits for
// others, which would take more connections: nothing that was sent to a server has been lost.
func TestAQuorumWhosePoolsAreExhaustedIsNotAskedForWhatWaitsThere(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		var refused, others atomic.Int64
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, half{func(args []any) bool {
			switch {
			case len(args) < 4:
			case strings.HasPrefix(fmt.Sprint(args[3]), "lost"):
				refused.Add(1)
				return true
			case strings.HasPrefix(fmt.Sprint(args[3]), "x"):
				others.Add(1)
			}
			return false
		}})
		c := clientOn(t, s, rdb)
		confirmInboxes(t, c)
		l := lock(t, newClient(t, s).Mutex("x"))
		mine := locking(t, c.Mutex("x"))
		time.Sleep(time.Second) // it waits at all servers, also where the inbox was confirmed late
		before := others.Load()
		if before == 0 {
			t.Fatal("nothing was sent for the lock that is waited for")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := c.Mutex("lost").LockContext(ctx); err == nil {
			t.Fatal("locked without a connection")
		}
		if refused.Load() == 0 || others.Load() != before {
			t.Errorf("%d commands had no connection, and %d were sent for another lock", refused.Load(), others.Load()-before)
		}
		unlock(t, l)
		unlock(t, <-mine)
	})
}

// While a server does not answer, it is not asked for what waits there, nor are its messages heard.
// Its regular looks would have a waiter ask after 2 to 3 s, and one far behind after 20 s.
func TestAServerOfAQuorumThatComesBackIsAskedForWhatWaitsThere(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		c, way := onLine(t, s)
		other := newClient(t, s)
		confirmInboxes(t, c, other)
		l := lock(t, other.Mutex("x"))
		mine := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		way.cut()
		synctest.Wait()
		unlock(t, l) // which makes mine the owner, and nobody hears of that
		way.mend()
		began := time.Now()
		unlock(t, <-mine)
		if took := time.Since(began); took > 500*time.Millisecond {
			t.Errorf("entered %v after the servers were back", took)
		}
	})
}

// Its subscription need not break when a server stops to answer commands, so that nothing but the
// answer to a PING says that it can be asked again.
func TestAServerOfAQuorumThatAnswersAgainIsAskedForWhatWaitsThere(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		confirmInboxes(t, c, other)
		l := lock(t, other.Mutex("x"))
		synctest.Wait()
		var deaf, answered atomic.Bool
		deaf.Store(true)
		one := s.members.minis[0]
		one.Server().SetPreHook(func(_ *mini.Peer, cmd string, _ ...string) bool {
			if cmd == "PING" && !deaf.Load() {
				answered.Store(true)
			}
			return deaf.Load() && (cmd == "PING" || strings.HasPrefix(cmd, "EVAL")) // which then has no answer
		})
		mine := locking(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		deaf.Store(false)
		for range 3000 {
			if answered.Load() {
				break
			}
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if all, _ := one.ZMembers("x:{x}:queue"); !answered.Load() || len(all) != 1 {
			t.Errorf("a PING was answered: %v; %d wait", answered.Load(), len(all))
		}
		unlock(t, l)
		unlock(t, <-mine)
	})
}

// subscribingLate has a server answer SUBSCRIBE so much later.
func (s place) subscribingLate(server int, by time.Duration) {
	s.members.minis[server].Server().SetPreHook(func(_ *mini.Peer, cmd string, _ ...string) bool {
		if cmd == "SUBSCRIBE" {
			time.Sleep(by) // of virtual time: what makes it late
		}
		return false
	})
}

// proofs returns the letter that the id of the only one that waits has on each server, '-' where
// none does.
func (s place) proofs() string {
	queue, _, _, _ := s.helperKeys("x")
	all := ""
	for _, one := range s.members.minis {
		letter := "-"
		if ids, _ := one.ZMembers(queue); len(ids) == 1 {
			who, _ := protocol.ParseID(ids[0])
			letter = string(rune(who.Proof))
		}
		all += letter
	}
	return all
}

// firstRequest has a new client ask for a lock that is held, on servers of which some answer SUBSCRIBE
// late. Its request queues after that time, and not before, with these proofs.
func firstRequest(t *testing.T, late map[int]time.Duration, after time.Duration, proofs string) {
	t.Helper()
	onQuorum(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		synctest.Wait() // a server that has not been dialed yet has no hook to set
		for server, by := range late {
			s.subscribingLate(server, by)
		}
		next := locking(t, newClient(t, s).Mutex("x"))
		time.Sleep(after - time.Nanosecond)
		if all := s.proofs(); all != "-----" {
			t.Errorf("before %v: %s", after, all)
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if all := s.proofs(); all != proofs {
			t.Errorf("after %v: %s, want %s", after, all, proofs)
		}
		unlock(t, l)
		unlock(t, <-next)
	})
}

// Without that proof, a process that is killed while it waits for its first lock would be made
// owner by those servers.
func TestTheFirstRequestOfAQuorumsClientProvesOnEachServerThatItLives(t *testing.T) {
	firstRequest(t, map[int]time.Duration{3: 20 * time.Millisecond, 4: 30 * time.Millisecond}, 30*time.Millisecond, "ccccc")
}

// But a server that hangs keeps a new client only for a moment.
func TestANewClientOfAQuorumDoesNotWaitForTheInboxOfAServerThatHangs(t *testing.T) {
	firstRequest(t, map[int]time.Duration{1: time.Second}, 100*time.Millisecond, "cuccc")
}

// The clocks of its servers are an hour behind that of a client that has just begun: whoever comes
// after it is served after it.
func TestANewClientOfAQuorumIsServedInTurnWhateverItsClockShows(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		onQuorum(t, func(t *testing.T, s place) {
			s.Mini.SetTime(time.Now().Add(ahead))
			old, owner := newClient(t, s), newClient(t, s)
			for range 100 { // it knows what the servers' clocks show
				unlock(t, lock(t, old.Mutex("another")))
			}
			first := lock(t, owner.Mutex("x"))
			turn := make(chan string, 2)
			join := func(name string, c *leased.Client) {
				go func() { // ended by its turn, waited for through turn
					c.Mutex("x").Lock()
					turn <- name
					c.Mutex("x").Unlock()
				}()
				time.Sleep(5 * time.Millisecond)
				s.Mini.SetTime(time.Now().Add(ahead))
			}
			join("the new client", newClient(t, s))
			join("the old one", old)
			unlock(t, first)
			if name := <-turn; name != "the new client" {
				t.Errorf("%s, which came later, was served before the new client", name)
			}
			<-turn
			synctest.Wait()
		})
	}
}

// A majority may need a server that is much farther away than another one. Then what the near server grants
// at a hand-off waits for the grant of the far one, and is not given back meanwhile, as if the servers were
// split.
func TestTheHandOffsOfAQuorumWaitForItsFarServers(t *testing.T) {
	const ms, down = time.Millisecond, time.Duration(0)
	for what, of := range map[string]struct {
		distances []time.Duration
		majority  time.Duration // how far away the second nearest server is
	}{
		"equal distances, one server is down": {[]time.Duration{40 * ms, down, 40 * ms}, 40 * ms},
		"one server is near, one is down":     {[]time.Duration{ms, down, 40 * ms}, 40 * ms},
		"one server is near":                  {[]time.Duration{ms, 60 * ms, 40 * ms}, 40 * ms},
		"one server is much nearer":           {[]time.Duration{ms, 80 * ms, 80 * ms}, 80 * ms},
	} {
		t.Run(what, func(t *testing.T) {
			onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
				var all sync.WaitGroup
				var leases atomic.Int64
				const span = 10 * time.Second
				end := time.Now().Add(span)
				for range 4 {
					own := viewed(servers)
					for i, d := range of.distances {
						if own[i].slowBy(d); d == down {
							own[i].die()
						}
					}
					mu := openMortals(t, own, leased.WithTTL(3*time.Second)).Mutex("x")
					all.Go(func() {
						for time.Now().Before(end) {
							l := lock(t, mu)
							leases.Add(1)
							time.Sleep(time.Millisecond) // of virtual time: the work
							unlock(t, l)
						}
					})
				}
				all.Wait()
				if n, most := time.Duration(leases.Load()), span/of.majority; n < most/2 {
					t.Errorf("%d leases in %v, at most %d are possible", n, span, most)
				}
			})
		})
	}
}

// severed is a connection that is cut, but looks whole until it is used, as an encrypted one does to go-redis.
type severed struct {
	net.Conn
	cut *atomic.Bool
}

func (s severed) Write(b []byte) (int, error) {
	if s.cut.Load() {
		return len(b), nil
	}
	return s.Conn.Write(b)
}

func (s severed) Read(b []byte) (int, error) {
	if s.cut.Load() {
		return 0, io.EOF
	}
	return s.Conn.Read(b)
}

// A firewall has cut all connections. go-redis tries four of them for a command, with pauses, so it takes
// some seconds to get through them, and until then the servers are away.
func TestALockOfAQuorumManyOfWhoseEncryptedConnectionsBrokeIsTakenInTime(t *testing.T) {
	for idle, most := range map[int]time.Duration{100: 5 * time.Second, 600: 20 * time.Second} {
		t.Run(fmt.Sprint(idle), func(t *testing.T) { takesALockAfterACut(t, idle, most) })
	}
}

func takesALockAfterACut(t *testing.T, idle int, most time.Duration) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		var mu sync.Mutex
		var made []*atomic.Bool
		var rdbs []redis.UniversalClient
		for _, m := range servers {
			rdbs = append(rdbs, redistest.MiniClient(t, m.Miniredis, func(o *redis.Options) {
				o.ContextTimeoutEnabled = true
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := m.dial(ctx, network, addr)
					if err != nil {
						return nil, err
					}
					s := severed{conn, new(atomic.Bool)}
					mu.Lock()
					defer mu.Unlock()
					made = append(made, s.cut)
					return s, nil
				}
			}))
		}
		c, err := leased.NewQuorum(rdbs)
		must(t, err)
		defer c.Close()
		held := lock(t, c.Mutex("held", leased.WithTTL(2*most)))
		var all sync.WaitGroup
		for _, rdb := range rdbs {
			for range idle {
				all.Go(func() {
					conn := rdb.(*redis.Client).Conn()
					defer conn.Close()
					_ = conn.Ping(t.Context()).Err()
					time.Sleep(time.Second) // until all have one
				})
			}
		}
		all.Wait()
		mu.Lock()
		for _, cut := range made {
			cut.Store(true)
		}
		mu.Unlock()
		began := time.Now()
		l := lock(t, c.Mutex("x"))
		if took := time.Since(began); took > most {
			t.Errorf("with %d broken connections to each server, a lock took %v", idle, took)
		}
		unlock(t, l)
		time.Sleep(2 * most)
		unlock(t, held)
	})
}

// How long the set has run is counted from when it was first asked for a lock.
func TestANewSetOfServersOfAQuorumNeedsAllOfThemUntilTheQuarantineIsOver(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.FlushAll() // which leaves no mark
		}
		time.Sleep(time.Hour)
		c := open()
		held, released := lock(t, c.Mutex("held")), lock(t, c.Mutex("released"))
		unlock(t, released)
		servers[0].die()
		for range 2 { // the second of them after the quarantine has passed
			time.Sleep(29 * time.Second)
			if err := held.Context().Err(); err != nil {
				t.Fatalf("lost without a minority: %v", context.Cause(held.Context()))
			}
			for _, name := range []string{"new", "released"} {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				_, err := c.Mutex(name).LockContext(ctx)
				cancel()
				isAll(t, err, leased.ErrNoQuorum, leased.ErrNotAcquired)
			}
		}
		unlock(t, held)
		time.Sleep(2 * time.Second)
		for _, name := range []string{"new", "released", "held"} {
			unlock(t, lock(t, c.Mutex(name)))
		}
	})
}

// One server is asked for a lock before the others are there. They all grant locks together, until the quarantine
// of the first one is over: then two that are new are no majority, and the first one is none by itself.
func TestANewSetThatIsMetInPartsGrantsNothingUntilAMajorityIsOldEnough(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.FlushAll() // which leaves no mark
		}
		servers[1].die()
		servers[2].die()
		c := open()
		grants := func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			l, err := c.Mutex("x").LockContext(ctx)
			if err != nil {
				isAll(t, err, leased.ErrNoQuorum)
				return false
			}
			unlock(t, l)
			return true
		}
		began := time.Now()
		at := func(d time.Duration, want bool) {
			t.Helper()
			time.Sleep(time.Until(began.Add(d)))
			if got := grants(); got != want {
				t.Errorf("after %v: granted %v", d, got)
			}
		}
		at(0, false)
		servers[1].comeBack()
		servers[2].comeBack()
		at(40*time.Second, true)
		at(70*time.Second, false)
		at(110*time.Second, true)
	})
}

// senders counts the goroutines of this process that send commands to a quorum's servers, or
// wait for some to send.
func senders(t *testing.T) int {
	t.Helper()
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 2); err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b.Bytes(), []byte("internal/quorum.(*Server).sender("))
}

// The goroutines that send to a quorum's servers are used again, however many locks are taken,
// and end when there is nothing to send.
func TestVirtualSendersAreUsedAgainAndEnd(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		before := senders(t)
		c := newClient(t, s)
		mu := c.Mutex("x")
		for range 50 {
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // as often as a lock is used
		}
		// A release and an acquire may be under way to each server, and a sender be about to wait.
		if n := senders(t) - before; n < 1 || n > 4*suiteMembers {
			t.Errorf("%d goroutines send, want up to %d", n, 4*suiteMembers)
		}
		time.Sleep(time.Minute)
		if n := senders(t) - before; n > 0 {
			t.Errorf("%d goroutines are left", n)
		}
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // it goes on
	})
}
