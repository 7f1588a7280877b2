package leased_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
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
