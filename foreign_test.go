package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/redistest"
)

// junk is values that no client of this version writes.
var junk = []string{
	"garbage", "leased", "leased1:", "leased1", "leased:", "leased0:w", "leasedx:", "\xff\x00\n",
	"leased1:w:30000:c:", "leased1:w:0:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:o",
	"leased1:w:99999999999999:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:o",
	"leased1:x:30000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:o", strings.Repeat("long", 10_000),
}

func TestAGarbageValueIsAForeignOwner(t *testing.T) {
	for _, value := range junk {
		inVirtualTime(t, func(t *testing.T, s place) {
			setIfFree(t, s, "x", value, time.Minute)
			began := time.Now()
			waiter := locking(t, newClient(t, s).Mutex("x"))
			time.Sleep(30 * time.Second)
			synctest.Wait()
			if s.value(t, "x") != value {
				t.Errorf("%.40q was overwritten", value)
			}
			unlock(t, <-waiter)
			if waited := time.Since(began); waited < time.Minute || waited > time.Minute+2*time.Millisecond {
				t.Errorf("%.40q: got in after %v", value, waited)
			}
		})
	}
}

func TestALaterVersionsOwnerIsWaitedForAndNeverOverwritten(t *testing.T) {
	for _, value := range []string{"leased2:w:owner", "leased10:", "leased99999:readers"} {
		inVirtualTime(t, func(t *testing.T, s place) {
			setIfFree(t, s, "x", value, 0)
			var out logs
			waiter := locking(t, newClient(t, s, out.option()).Mutex("x"))
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if s.value(t, "x") != value || s.rdb.PTTL(context.Background(), "x").Val() != -1 {
				t.Errorf("%q was touched", value)
			}
			if n := out.count(slog.LevelWarn, "later version"); n != 1 {
				t.Errorf("%q: warned %d times in ten minutes", value, n)
			}
			s.rdb.Del(context.Background(), "x")
			began := time.Now()
			unlock(t, <-waiter)
			if late := time.Since(began); late > 3*time.Second {
				t.Errorf("%q: got in %v after it was gone", value, late)
			}
		})
	}
}

func TestGarbageInTheQueueIsDropped(t *testing.T) {
	for _, live := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			ctx := context.Background()
			queue, _, waiters, _ := s.helperKeys("x")
			for i, entry := range append(junk, "leased2:not live") {
				s.rdb.ZAdd(ctx, queue, redis.Z{Score: float64(i), Member: entry})
				if live && !strings.HasPrefix(entry, "leased2:") {
					s.rdb.ZAdd(ctx, waiters, redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: entry})
				}
			}
			began := time.Now()
			c, other := newClient(t, s), newClient(t, s)
			l := lock(t, c.Mutex("x"))
			next := locking(t, other.Mutex("x"))
			synctest.Wait()
			unlock(t, l)
			unlock(t, <-next)
			if took := time.Since(began); took > time.Millisecond {
				t.Errorf("scores live %v: it took %v to get past the garbage", live, took)
			}
			if !s.clean(t, "x") {
				t.Errorf("scores live %v: left %v", live, s.rdb.Keys(ctx, "*").Val())
			}
		})
	}
}

func TestALaterVersionsPlaceInTheQueueIsKeptWhileItWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ctx := context.Background()
		queue, _, waiters, _ := s.helperKeys("x")
		const entry = "leased2:w:somebody"
		s.rdb.ZAdd(ctx, queue, redis.Z{Score: 1, Member: entry})
		s.rdb.ZAdd(ctx, waiters, redis.Z{Score: float64(time.Now().Add(time.Minute).UnixMilli()), Member: entry})
		began := time.Now()
		_, err := newClient(t, s).Mutex("x").TryLockContext(ctx)
		isAll(t, err, leased.ErrLocked)
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if waited := time.Since(began); waited < time.Minute || waited > time.Minute+3*time.Second {
			t.Errorf("got in after %v, the other waits for a minute", waited)
		}
	})
}

func TestGarbageInMetaDoesNotSpoilTokens(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx := context.Background()
		_, _, _, meta := s.helperKeys("x")
		c := newClient(t, s)
		var k tokens
		for _, text := range append(junk, "leased1:-5:1", "leased1:nan:", "leased1:99999999999999999999:1",
			"leased1:9007199254740991:1", "leased1:1e300:", fmt.Sprint(uint64(math.MaxUint64))) {
			s.rdb.Set(ctx, meta, text, time.Hour)
			l := lock(t, c.Mutex("x"))
			k.next(t, text, l.Token())
			inspect(t, c, "x")
			unlock(t, l)
		}
	})
}

func TestALaterVersionsMetaIsNotOverwritten(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ctx := context.Background()
		_, _, _, meta := s.helperKeys("x")
		s.rdb.Set(ctx, meta, "leased2:anything", time.Minute)
		var out logs
		c := newClient(t, s, out.option())
		short, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(short)
		isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
		if by := "a later version of leased"; !strings.Contains(err.Error(), by) {
			t.Errorf("%v does not say that %s is in the way", err, by)
		}
		if n := out.count(slog.LevelWarn, "in use by a later version"); n != 1 {
			t.Errorf("logged %d times", n)
		}
		if got := s.rdb.Get(ctx, meta).Val(); got != "leased2:anything" {
			t.Errorf("it became %q", got)
		}
		unlock(t, lock(t, c.Mutex("x"))) // when it has expired
	})
}

func TestGarbageAmongTheReadersBlocksNobodyForEver(t *testing.T) {
	for name, marker := range map[string]bool{"under the marker": true, "without the marker": false} {
		for what, score := range map[string]float64{
			"dead":    1,
			"live":    float64(time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC).UnixMilli()), // a minute after the bubble's beginning
			"endless": math.Inf(1),
		} {
			t.Run(what+" "+name, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					ctx := context.Background()
					_, readers, _, _ := s.helperKeys("x")
					for _, member := range junk {
						s.rdb.ZAdd(ctx, readers, redis.Z{Score: score, Member: member})
					}
					if marker {
						s.rdb.Set(ctx, "x", "leased1:readers", time.Minute)
					}
					c := newClient(t, s)
					inspect(t, c, "x")
					short, cancel := context.WithTimeout(ctx, 5*time.Minute)
					defer cancel()
					l, err := c.Mutex("x").LockContext(short)
					if err != nil {
						s.rdb.Del(ctx, readers)
						t.Fatal(err)
					}
					unlock(t, l)
				})
			})
		}
	}
}

func TestGarbageInTheInboxHarmsNobody(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx := context.Background()
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		waiting := newClient(t, s)
		waiter := locking(t, waiting.Mutex("x"))
		s.queued(t, "x", 1)
		// Until its request is answered a waiter has to believe any token.
		eventually(t, "the waiter knows who is before it", func() bool {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			_, err := waiting.Mutex("x").LockContext(short)
			return err != nil && strings.Contains(err.Error(), "held by")
		})
		var inboxes []string
		eventually(t, "both inboxes are open", func() bool {
			inboxes = s.inboxes(t)
			return len(inboxes) == 2
		})
		queueKey, _, _, _ := s.helperKeys("x")
		key, held, queued := s.Prefix+"x", s.value(t, "x"), s.rdb.ZRange(ctx, queueKey, 0, 0).Val()[0]
		texts := append([]string{
			"", " ", "leased1:granted", "leased1:granted 1 2 3", "leased1:granted a b c d e f",
			"leased1:granted 99999999999999999999 1 0 - id key", "leased1:wanted", "leased1:wanted  ",
			"leased1:revoked -1 " + held + " " + key, "leased1:revoked 1 " + held + " " + key, // an old one
			"leased1:granted 9007199254740000 1 0 - " + held + " " + key, // for what holds already
			"leased1:granted 1 1 0 - " + queued + " " + key,              // not above the floor
			"leased1:wanted " + queued + " " + s.Prefix + "a}b",
			"leased1:revoked 9007199254740000 " + queued + " " + key, // it only waits
			"leased1:wanted leased1:w:30000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:o " + key,
			"leased1:echo", "leased1:echo nonsense", "leased2:granted 1", "leased1:unheard of",
		}, junk...)
		for _, inbox := range inboxes {
			for _, text := range texts {
				if err := s.rdb.Publish(ctx, inbox, text).Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
		hears(t, s, c)
		hears(t, s, waiting)
		if out := !open(waiter); out || s.value(t, "x") != held || l.Context().Err() != nil {
			t.Fatalf("the garbage was believed: waiter out: %v, key %q, lease %v", out, s.value(t, "x"), l.Context().Err())
		}
		unlock(t, l)
		unlock(t, closesSoon(t, "the waiter gets in", waiter))
	})
}

// photo is what stands under a prefix: types and contents, and no TTLs.
func (s place) photo(t *testing.T) map[string]string {
	t.Helper()
	ctx := context.Background()
	keys, err := redistest.Keys(ctx, s.rdb, s.Prefix)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, k := range keys {
		kind := s.rdb.Type(ctx, k).Val()
		switch kind {
		case "string":
			kind += " " + s.rdb.Get(ctx, k).Val()
		case "list":
			kind += fmt.Sprint(s.rdb.LRange(ctx, k, 0, -1).Val())
		case "hash":
			kind += fmt.Sprint(s.rdb.HGetAll(ctx, k).Val())
		case "zset":
			kind += fmt.Sprint(s.rdb.ZRangeWithScores(ctx, k, 0, -1).Val())
		}
		all[k] = kind
	}
	return all
}

// aliens are keys of a type that the protocol does not expect there.
func aliens(s place) map[string]string {
	queue, readers, waiters, meta := s.helperKeys("x")
	return map[string]string{"lock": s.Prefix + "x", "queue": queue, "readers": readers, "waiters": waiters, "meta": meta}
}

func TestAKeyOfAnotherTypeIsToldAtOnceAndLeftAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx := context.Background()
		for which, key := range aliens(s) {
			for _, held := range []bool{false, true} {
				if held && which == "lock" || !held && which == "waiters" {
					continue // cannot be; is not looked at
				}
				owner := newClient(t, s)
				var l *leased.Lease
				if held {
					warm(t, s, owner) // else it asks once more, which may write the key anew
					l = lock(t, owner.Mutex("x"))
				}
				_, err := s.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error { // the owner may write in between
					p.Del(ctx, key)
					p.HSet(ctx, key, "field", "value")
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				before := s.photo(t)
				c := newClient(t, s)
				began := time.Now()
				for _, f := range []func(context.Context) (*leased.Lease, error){c.Mutex("x").LockContext, c.Mutex("x").TryLockContext} {
					got, err := f(ctx)
					if got != nil || !errors.Is(err, leased.ErrNotAcquired) || !strings.Contains(err.Error(), "wrong kind of value") {
						t.Errorf("%s, held %v: %v, %v", which, held, got, err)
					}
				}
				if took := time.Since(began); took > patience/3 { // else it would wait for the type to change
					t.Errorf("%s, held %v: told after %v", which, held, took)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if after := s.photo(t); !maps.Equal(before, after) {
					t.Errorf("%s, held %v: %q became %q", which, held, before, after)
				}
				s.rdb.Del(ctx, key)
				if held {
					unlock(t, l)
					s.rdb.Del(ctx, key)
				}
				s.becomesClean(t, "x")
			}
		}
	})
}

func TestLockWaitsUntilAKeyOfAnotherTypeIsGone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		ctx := context.Background()
		var out logs
		c := newClient(t, s, out.option())
		s.rdb.HSet(ctx, "x", "field", "value")
		done := make(chan struct{})
		go func() { c.Mutex("x").Lock(); close(done) }()
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		if !open(done) {
			t.Fatal("locked over an alien key")
		}
		if n := out.count(slog.LevelError, "another type of value"); n < 1 || n > 11 {
			t.Errorf("logged %d times in ten minutes: %q", n, out.messages())
		}
		s.rdb.Del(ctx, "x")
		began := time.Now()
		<-done
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("noticed after %v", took)
		}
		c.Mutex("x").Unlock()
	})
}

// hash has another program keep a hash under a lock's name, as Redisson's locks do.
func (s place) hash(t *testing.T, name string) {
	t.Helper()
	ctx := context.Background()
	// In one transaction, because an owner may ask in between whether it is wanted, which
	// would take the free lock.
	_, err := s.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		tx.Del(ctx, s.Prefix+name)
		tx.HSet(ctx, s.Prefix+name, "owner", 1)
		tx.PExpire(ctx, s.Prefix+name, time.Minute)
		return nil
	})
	must(t, err)
}

// saysSo fails unless err says in words what is the matter, and still matches Redis's.
func saysSo(t *testing.T, err error) {
	t.Helper()
	var answer redis.Error
	if err == nil || !strings.Contains(err.Error(), "another program, such as Redisson, uses this name") || !errors.As(err, &answer) {
		t.Errorf("%v", err)
	}
}

func TestUnlockAfterAKeyOfAnotherTypeTookTheLocksIsALossAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		// Two locks, because a lost reader keeps later writers waiting until its lease ends.
		for name, acquire := range map[string]func(context.Context) (*leased.Lease, error){
			"written": c.RWMutex("written").LockContext, "read": c.RWMutex("read").RLockContext,
		} {
			l := take(t, acquire)
			s.hash(t, name)
			err := l.Unlock()
			isAll(t, err, leased.ErrLeaseLost)
			if errors.Is(err, leased.ErrNotReleased) || strings.Contains(err.Error(), "no reply") {
				t.Errorf("%s: %v", name, err)
			}
			if s.rdb.HGet(context.Background(), s.Prefix+name, "owner").Val() != "1" {
				t.Errorf("%s: the other program's key is gone", name)
			}
			must(t, s.rdb.Del(context.Background(), s.Prefix+name).Err())
		}
	})
}

// The release had no answer.
func TestAnUnlockWithoutAnswerBesideAKeyOfAnotherTypeIsALoss(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, h := onLosing(t, s, leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		s.hash(t, "x")
		h.commands.Store(1)
		err := l.Unlock()
		isAll(t, err, leased.ErrLeaseLost)
		var answer redis.Error
		if errors.As(err, &answer) { // after a TTL, in which the cancel was repeated
			t.Errorf("%v", err)
		}
		must(t, s.rdb.Del(context.Background(), s.Prefix+"x").Err())
	})
}

func TestAKeyOfAnotherTypeIsSpokenOfInWordsAndLeftAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t), out.option())
		s.hash(t, "x")
		ctx := context.Background()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		saysSo(t, err)
		_, err = c.Mutex("x").TryLockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		saysSo(t, err)
		_, err = c.Inspect(ctx, "x")
		saysSo(t, err)
		saysSo(t, forceUnlock(ctx, c, "x"))
		if s.rdb.HGet(ctx, s.Prefix+"x", "owner").Val() != "1" {
			t.Error("the other program's key is gone")
		}
		logged := func() int { return out.count(slog.LevelError, "another type of value") }
		eventually(t, "it is logged", func() bool { return logged() > 0 })
		if logged() != 1 {
			t.Errorf("logged %q", out.messages())
		}
		must(t, s.rdb.Del(ctx, s.Prefix+"x").Err())
	})
}

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
