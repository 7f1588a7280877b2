package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/lockstate"
)

// deleteOwn ends what SET NX PX began, in the lock of the textbooks.
var deleteOwn = redis.NewScript(`
	if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
	return 0`)

func compareAndDelete(t *testing.T, s place, name, value string) int {
	t.Helper()
	// Run sends the text only to servers that do not know it: of a quorum's, some may.
	n, err := deleteOwn.Eval(context.Background(), s.rdb, []string{s.Prefix + name}, value).Int()
	if err != nil {
		t.Error(err)
	}
	return n
}

func setIfFree(t *testing.T, s place, name, value string, ttl time.Duration) bool {
	t.Helper()
	ok, err := s.rdb.SetNX(context.Background(), s.Prefix+name, value, ttl).Result()
	if err != nil {
		t.Error(err)
	}
	return ok
}

func TestAForeignOwnerExcludesUs(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		if !setIfFree(t, s, "x", "foreign", time.Minute) {
			t.Fatal("the lock was not free")
		}
		c := newClient(t, s)
		_, err := c.Mutex("x").TryLockContext(context.Background())
		isAll(t, err, leased.ErrLocked)
		waiter := locking(t, c.Mutex("x"))
		s.queued(t, "x", 1)
		if !open(waiter) || s.value(t, "x") != "foreign" {
			t.Fatal("the foreign owner was disregarded")
		}
		if compareAndDelete(t, s, "x", "foreign") != 1 {
			t.Error("the foreign owner lost its key")
		}
		unlock(t, closesSoon(t, "we get in after the foreign owner", waiter))
	})
}

func TestWeExcludeAForeignClient(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		if setIfFree(t, s, "x", "foreign", time.Minute) {
			t.Fatal("a foreign client took what we own")
		}
		unlock(t, l)
		if !setIfFree(t, s, "x", "foreign", time.Minute) {
			t.Fatal("a foreign client could not take what we released")
		}
		compareAndDelete(t, s, "x", "foreign")
	})
}

func TestForeignAndOwnClientsExcludeEachOther(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const turns = 20
		var r room
		var all sync.WaitGroup
		for i := range 3 {
			mine := fmt.Sprintf("foreign %d", i)
			all.Go(func() {
				for range turns {
					for !setIfFree(t, s, "x", mine, time.Minute) {
						time.Sleep(100 * time.Microsecond) // as such clients do
					}
					r.visit(func() {})
					if compareAndDelete(t, s, "x", mine) != 1 {
						t.Error("a foreign owner's key was taken away")
					}
				}
			})
		}
		for range 2 {
			mu := newClient(t, s).Mutex("x")
			all.Go(func() {
				for range turns {
					mu.Lock()
					r.visit(func() {})
					mu.Unlock()
				}
			})
		}
		all.Wait()
		if r.visits != 5*turns || r.crowded.Load() {
			t.Errorf("%d visits, two inside: %v", r.visits, r.crowded.Load())
		}
	})
}

func TestAnExpiringForeignOwnerIsFollowedAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 7*time.Second + 77*time.Millisecond
		setIfFree(t, s, "x", "foreign", ttl)
		began := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if waited := time.Since(began); waited < ttl || waited > ttl+2*time.Millisecond {
			t.Errorf("got in after %v, the foreign owner's TTL is %v", waited, ttl)
		}
	})
}

func TestAForeignOwnerIsPolledFrom50msToAThirdOfTheTTLOr3s(t *testing.T) {
	for ttl, longest := range map[time.Duration]time.Duration{
		3 * time.Second:  time.Second,
		30 * time.Second: 3 * time.Second,
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			setIfFree(t, s, "x", "foreign", 0)
			var sent stamps
			rdb := s.connect(t, func(o *redis.Options) { o.Limiter = &sent })
			waiter := locking(t, clientOn(t, s, rdb, leased.WithTTL(ttl)).Mutex("x"))
			time.Sleep(time.Minute)
			synctest.Wait()
			looks := sent.all()
			compareAndDelete(t, s, "x", "foreign")
			began := time.Now()
			unlock(t, <-waiter)
			if late := time.Since(began); late > longest {
				t.Errorf("TTL %v: got in %v after the release", ttl, late)
			}

			// The subscription's confirmation has us look again at the beginning:
			// at one instant, which no pause separates.
			var pauses []time.Duration
			for i := 1; i < len(looks); i++ {
				if pause := looks[i].Sub(looks[i-1]); pause > 0 {
					pauses = append(pauses, pause)
				}
			}
			if len(pauses) < 20 {
				t.Fatalf("TTL %v: looked after %v only", ttl, pauses)
			}
			most := 100 * time.Millisecond
			if s.members != nil {
				most *= 2 // subscriptions of several servers are confirmed, and each look doubles the pause
			}
			if first := pauses[0]; first > most {
				t.Errorf("TTL %v: looked first after %v", ttl, first)
			}
			nominal := pauses[0]
			for i, pause := range pauses {
				if pause > longest || pause < 50*time.Millisecond*2/3 {
					t.Errorf("TTL %v: pause %d is %v", ttl, i, pause)
				}
				if i >= 8 && pause < longest*2/3 {
					t.Errorf("TTL %v: pause %d is still %v", ttl, i, pause)
				}
				if pause > 3*nominal { // doubled, and the jitter may have cut a third before
					t.Errorf("TTL %v: pause %d is %v after %v", ttl, i, pause, nominal)
				}
				nominal = pause
			}
		})
	}
}

func TestAForeignOwnerWithoutExpiryIsWaitedForAndWarnedOfOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		setIfFree(t, s, "x", "foreign", 0)
		var out logs
		waiter := locking(t, newClient(t, s, out.option()).Mutex("x"))
		time.Sleep(time.Hour)
		synctest.Wait()
		if !open(waiter) || s.value(t, "x") != "foreign" {
			t.Error("the foreign owner was disregarded")
		}
		if left := s.rdb.PTTL(context.Background(), "x").Val(); left != -1 {
			t.Errorf("the foreign key was given the expiry %v", left)
		}
		if n := out.count(slog.LevelWarn, "without an expiry"); n != 1 {
			t.Errorf("warned %d times in an hour", n)
		}
		s.rdb.Del(context.Background(), "x")
		unlock(t, <-waiter)
	})
}

// Foreign clients free the lock for an instant only, and send no message.
func TestVirtualTheHeadOfTheQueuePollsAnewForEachForeignOwnerAndThoseBehindAtTheirPace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const turn, span = 100 * time.Millisecond, 30 * time.Second
		owner := func(n int) {
			s.rdb.Set(context.Background(), "x", "foreign-"+strconv.Itoa(n), 10*time.Second)
		}
		owner(0)
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		looks := make([]stamps, 4)
		for i := range looks {
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &looks[i] }))
			all.Go(func() {
				if l, err := c.Mutex("x").LockContext(ctx); err == nil {
					t.Error("it entered beside a foreign owner")
					unlock(t, l)
				}
			})
			synctest.Wait()
		}
		time.Sleep(5 * time.Second) // one owner for long: all look seldom
		began := time.Now()
		for n := range int(span / turn) {
			owner(n + 1)
			time.Sleep(turn)
		}
		synctest.Wait()
		for i := range looks {
			// The head sees the first change at the pace it has then.
			first, last := began.Add(3*time.Second), time.Time{}
			var worst, best time.Duration = 0, span
			for _, at := range looks[i].all() {
				if at.Before(first) {
					continue
				}
				if !last.IsZero() {
					worst, best = max(worst, at.Sub(last)), min(best, at.Sub(last))
				}
				last = at
			}
			switch {
			case i == 0 && (worst > turn || last.IsZero()):
				t.Errorf("the head did not look for %v", worst)
			// Those behind look each 3 s, less up to a third of it by chance, and later for each ahead.
			case i > 0 && (best < 2*time.Second || worst > 3*time.Second+time.Duration(i)*lockstate.PausePerPlace):
				t.Errorf("number %d looked after %v to %v", i, best, worst)
			}
		}
		cancel()
		all.Wait()
	})
}

// What docs/migration.md says of a busy lock that old and new clients share: while new clients queue,
// it is never free, so old clients that poll starve; if the new ones poll, too, all get turns.
func TestOldClientsStarveBesideAQueueAndNotBesideNewClientsThatPoll(t *testing.T) {
	const span, turn, pause, round = 2 * time.Second, 2 * time.Millisecond, 50 * time.Millisecond, time.Millisecond
	for _, what := range []string{"queue", "poll"} {
		inVirtualTime(t, func(t *testing.T, s place) {
			enter := func(mu *leased.Mutex) *leased.Lease {
				if what == "queue" {
					return lock(t, mu)
				}
				l, err := mu.TryLockContext(context.Background())
				for errors.Is(err, leased.ErrLocked) {
					time.Sleep(pause)
					l, err = mu.TryLockContext(context.Background())
				}
				if err != nil {
					t.Error(err)
				}
				return l
			}
			var all sync.WaitGroup
			end := time.Now().Add(span)
			var old, young atomic.Int32
			for i := range 4 {
				mu, mine := newClient(t, s).Mutex("x"), "foreign "+strconv.Itoa(i)
				all.Go(func() {
					for time.Now().Before(end) {
						l := enter(mu)
						young.Add(1)
						time.Sleep(turn)
						unlock(t, l)
						time.Sleep(round) // as long as a command takes that nobody waits for
					}
				})
				all.Go(func() {
					time.Sleep(5*turn + time.Duration(i)*turn) // until the new ones queue
					for time.Now().Before(end) {
						if !setIfFree(t, s, "x", mine, time.Minute) {
							time.Sleep(pause)
							continue
						}
						old.Add(1)
						time.Sleep(turn)
						compareAndDelete(t, s, "x", mine)
						time.Sleep(round)
					}
				})
			}
			all.Wait()
			if starved := old.Load() == 0; starved != (what == "queue") || young.Load() < 100 || !starved && old.Load() < 100 {
				t.Errorf("while new clients %s, old ones had %d turns, new ones %d", what, old.Load(), young.Load())
			}
		})
	}
}
