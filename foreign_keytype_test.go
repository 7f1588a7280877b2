package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

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

// saysSo fails unless err says in words what is the matter, and still matches Redis'.
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
		saysSo(t, c.ForceUnlock(ctx, "x"))
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
