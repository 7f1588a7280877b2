package leased_test

import (
	"bytes"
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

func TestABadNameIsRefusedWithoutACommand(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for _, name := range []string{
			"", strings.Repeat("n", 513), "a}b", "}", "{}", "a{}b", "{a", "a{", "}a{b}", "\xff", "a\xc3", "{}{a}",
		} {
			refusesAll(t, c.Mutex(name), leased.ErrInvalidName)
		}
		if n := c.Stats().Commands; n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

// refusesAll checks that every way to lock fails with want, as an error where
// there is one to return and as a panic where not.
func refusesAll(t *testing.T, mu *leased.Mutex, want error) {
	t.Helper()
	_, err := mu.LockContext(context.Background())
	isAll(t, err, leased.ErrNotAcquired, want)
	_, err = mu.TryLockContext(context.Background())
	isAll(t, err, leased.ErrNotAcquired, want)
	err = mu.Do(context.Background(), func(context.Context) error { t.Error("it ran"); return nil })
	isAll(t, err, leased.ErrNotAcquired, want)
	for what, f := range map[string]func(){"Lock": mu.Lock, "TryLock": func() { mu.TryLock() }, "Unlock": mu.Unlock} {
		if got, ok := panics(f).(error); !ok || !errors.Is(got, want) {
			t.Errorf("%s panicked with %v, not with %v", what, got, want)
		}
	}
}

func TestAnyOtherNameIsALock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		for _, name := range []string{
			"n", strings.Repeat("n", 512), "with space", "new\nline", "{tag}", "a{tag}b", "{a}}", "{a}{b}", "{a}{}", "{{a}",
			"ключ", "🔒", "\x00", "*?[a]", `"`, "%s%n",
		} {
			l := lock(t, c.Mutex(name))
			if _, err := other.Mutex(name).TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
				t.Errorf("%q: %v", name, err)
			}
			waiter := locking(t, other.Mutex(name))
			eventually(t, "it waits", func() bool { return inspect(t, c, name).Queue == 1 })
			unlock(t, l)
			unlock(t, closesSoon(t, "it gets in", waiter))
		}
	})
}

func TestABadOptionIsRefused(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for what, o := range map[string]leased.LockOption{
			"nil option":           nil,
			"TTL zero":             leased.WithTTL(0),
			"TTL negative":         leased.WithTTL(-time.Second),
			"TTL below 100 ms":     leased.WithTTL(99 * time.Millisecond),
			"TTL in microseconds":  leased.WithTTL(time.Second + time.Microsecond),
			"TTL huge":             leased.WithTTL(1<<63 - 1),
			"maximum hold":         leased.WithMaxHold(-1),
			"idle hold":            leased.WithIdleHold(-1),
			"idle hold huge":       leased.WithIdleHold(1<<63 - 1),
			"no hand-off":          leased.WithLocalHandoffs(0, time.Second),
			"negative tenure":      leased.WithLocalHandoffs(1, -1),
			"release time-out":     leased.WithReleaseTimeout(0),
			"release time-out < 0": leased.WithReleaseTimeout(-1),
		} {
			refusesAll(t, c.Mutex("x", o), leased.ErrInvalidOption)
			if _, err := leased.New(s.rdb, o); !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("New with %s: %v", what, err)
			}
		}
		for what, o := range map[string]leased.Option{
			"long prefix":      leased.WithKeyPrefix(strings.Repeat("p", 257)),
			"prefix not UTF-8": leased.WithKeyPrefix("\xff"),
			"empty owner":      leased.WithOwner(""),
			"owner with space": leased.WithOwner("a b"),
			"owner with line":  leased.WithOwner("a\nb"),
			"long owner":       leased.WithOwner(strings.Repeat("o", 129)),
			"logger":           leased.WithLogger(nil),
			"loss handler":     leased.WithLossHandler(nil),
			"back-off":         leased.WithBackOff(nil),
			"no policy":        leased.WithBackOff(func() leased.BackOff { return nil }),
			"nil policy":       leased.WithBackOff(func() leased.BackOff { return (*once)(nil) }),
			"empty hash tag":   leased.WithKeyPrefix("app{}:"),
			"brace shut first": leased.WithKeyPrefix("app}:"),
		} {
			if got, err := leased.New(s.rdb, o); got != nil || !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("New with %s: %v", what, err)
			}
		}
		if n := c.Stats().Commands; n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

func TestARedisClientThatCannotKeepLocksIsRefused(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	for what, rdb := range map[string]redis.UniversalClient{
		"nil":         nil,
		"nil Client":  (*redis.Client)(nil),
		"nil Cluster": (*redis.ClusterClient)(nil),
		"nil Ring":    (*redis.Ring)(nil),
		"Ring":        ring,
	} {
		if c, err := leased.New(rdb); c != nil || !errors.Is(err, leased.ErrInvalidOption) {
			t.Errorf("%s: %v, %v", what, c, err)
		}
	}
	var none *leased.Client
	refusesAll(t, none.Mutex("x"), leased.ErrInvalidOption)
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
				eventually(t, "nobody owns or waits", func() bool { return s.clean(t, "x") })
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

func TestLogsDoNotNameLocks(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		s.rdb.HSet(context.Background(), "secret-name", "field", "value")
		_, err := c.Mutex("secret-name").LockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		l := lock(t, c.Mutex("secret-lock"))
		s.rdb.Del(context.Background(), "secret-lock")
		<-l.Context().Done()
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		synctest.Wait()
		if text.Len() == 0 || strings.Contains(text.String(), "secret") {
			t.Errorf("logged %q", text.String())
		}
		s.rdb.Del(context.Background(), "secret-name")
	})
}
