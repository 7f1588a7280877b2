package leased_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
)

func inspect(t *testing.T, c *leased.Client, name string) leased.Info {
	t.Helper()
	info, err := c.Inspect(context.Background(), name)
	if err != nil {
		t.Fatal(err)
	}
	if info.Name != name {
		t.Errorf("Inspect of %q tells of %q", name, info.Name)
	}
	return info
}

func TestInspectOfAFreeLockShowsNobodyAndMakesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		info := inspect(t, newClient(t, s), "x")
		if len(info.Owners)+len(info.Waiting)+info.Queue != 0 || info.Token != 0 {
			t.Errorf("%+v", info)
		}
		if keys := s.lockKeys(t); len(keys) != 0 {
			t.Errorf("made %q", keys)
		}
	})
}

func TestInspectShowsTheOwner(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		began := time.Now()
		l := lock(t, newClient(t, s, leased.WithOwner("billing-7"), leased.WithTTL(30*time.Second)).Mutex("x"))
		time.Sleep(5 * time.Second)
		info := inspect(t, newClient(t, s), "x")
		want := leased.Owner{Client: "billing-7", TTL: 25 * time.Second, Since: began, Token: l.Token()}
		if len(info.Owners) != 1 || info.Token != l.Token() {
			t.Fatalf("%+v", info)
		}
		got := info.Owners[0]
		if !got.Since.Equal(want.Since) {
			t.Errorf("since %v, want %v", got.Since, want.Since)
		}
		if got.Since = want.Since; got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		unlock(t, l)
		if info := inspect(t, newClient(t, s), "x"); len(info.Owners) != 0 || info.Token != l.Token() {
			t.Errorf("after Unlock: %+v", info)
		}
	})
}

func TestInspectShowsThoseWhoWaitInTheirOrder(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := lock(t, newClient(t, s).Mutex("x"))
		var waiters []<-chan *leased.Lease
		for i, label := range []string{"first", "second", "third"} {
			waiters = append(waiters, locking(t, newClient(t, s, leased.WithOwner(label)).Mutex("x")))
			s.queued(t, "x", int64(i+1))
		}
		info := inspect(t, newClient(t, s), "x")
		if info.Queue != 3 || len(info.Waiting) != 3 {
			t.Fatalf("%+v", info)
		}
		for i, label := range []string{"first", "second", "third"} {
			if info.Waiting[i] != (leased.Waiter{Client: label}) {
				t.Errorf("place %d: %+v", i, info.Waiting[i])
			}
		}
		unlock(t, owner)
		for _, w := range waiters {
			unlock(t, closesSoon(t, "a waiter gets in", w))
		}
	})
}

// A client that gives up and asks again has two requests in the queue until the cancel of the first has arrived.
func TestInspectShowsOnlyTheLastRequestOfAWaitingClient(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		ctx := context.Background()
		owner := lock(t, newClient(t, s).Mutex("x"))
		first := locking(t, newClient(t, s, leased.WithOwner("first")).Mutex("x"))
		s.queued(t, "x", 1)
		second := taking(t, newClient(t, s, leased.WithOwner("second")).RWMutex("x").RLockContext)
		s.queued(t, "x", 2)
		queue, _, waiters, _ := s.helperKeys("x")
		who, err := protocol.ParseID(s.rdb.ZRange(ctx, queue, 1, 1).Val()[0])
		must(t, err)
		earlier := protocol.NewRequest(who.Client, protocol.Exclusive, time.Minute, false, protocol.Unproved, protocol.Origin{}).ID
		for key, score := range map[string]float64{queue: 0, waiters: float64(time.Now().Add(time.Hour).UnixMilli())} {
			must(t, s.rdb.ZAdd(ctx, key, redis.Z{Score: score, Member: earlier}).Err())
		}
		info := inspect(t, newClient(t, s), "x")
		if want := []leased.Waiter{{Client: "first"}, {Client: "second", Shared: true}}; info.Queue != 2 || !slices.Equal(info.Waiting, want) {
			t.Errorf("%d: %+v", info.Queue, info.Waiting)
		}
		must(t, s.rdb.ZRem(ctx, queue, earlier).Err())
		must(t, s.rdb.ZRem(ctx, waiters, earlier).Err())
		unlock(t, owner)
		unlock(t, closesSoon(t, "the first gets in", first))
		unlock(t, closesSoon(t, "the second gets in", second))
	})
}

func TestInspectShowsForeignAndLaterOwnersAsTheyAre(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for _, value := range []string{"8d1f", "leased2:w:owner", "leased1:garbage", ""} {
			s.rdb.Set(context.Background(), s.Prefix+"x", value, time.Minute)
			if value == "" {
				value = `""`
			}
			info := inspect(t, c, "x")
			if len(info.Owners) != 1 {
				t.Fatalf("%q: %+v", value, info)
			}
			o := info.Owners[0]
			if o.Value != value || o.Client != "" || o.Token != 0 || !o.Since.IsZero() || o.TTL <= 0 || o.TTL > time.Minute {
				t.Errorf("%q: %+v", value, o)
			}
		}
		s.rdb.Persist(context.Background(), s.Prefix+"x")
		if o := inspect(t, c, "x").Owners[0]; o.TTL >= 0 {
			t.Errorf("a key without expiry has the TTL %v", o.TTL)
		}
		s.rdb.Del(context.Background(), s.Prefix+"x")
	})
}

func TestAForeignOwnerIsNotNamedInErrors(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		setIfFree(t, s, "x", "secret-token", time.Minute)
		_, err := newClient(t, s).Mutex("x").TryLockContext(context.Background())
		if err == nil || strings.Contains(err.Error(), "secret-token") || !strings.Contains(err.Error(), "(held by a client of another library)") {
			t.Errorf("%v", err)
		}
	})
}

// forceUnlock returns only the error, for callers that do not count owners.
func forceUnlock(ctx context.Context, c *leased.Client, name string) error {
	_, err := c.ForceUnlock(ctx, name)
	return err
}

func TestForceUnlockLetsTheNextWaiterIn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		operator := newClient(t, s)
		force := func(owned bool) {
			t.Helper()
			evicted, err := operator.ForceUnlock(context.Background(), "x")
			if (evicted > 0) != owned || s.members == nil && evicted > 1 || err != nil {
				t.Fatalf("an owner on %d servers, and there was one: %v; %v", evicted, owned, err)
			}
		}
		force(false) // the lock is free, which is not an error
		if keys := s.lockKeys(t); len(keys) != 0 {
			t.Errorf("evicting nobody made %q", keys)
		}

		ours := lock(t, newClient(t, s, leased.WithTTL(time.Hour)).Mutex("x"))
		waiter := locking(t, newClient(t, s).Mutex("x"))
		synctest.Wait()
		began := time.Now()
		force(true)
		next := <-waiter
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the next waiter got in after %v", took)
		}
		isAll(t, context.Cause(ours.Context()), leased.ErrLeaseLost)
		isAll(t, ours.Unlock(), leased.ErrLeaseLost)
		if next.Context().Err() != nil {
			t.Error("the next owner was evicted too")
		}
		unlock(t, next)

		setIfFree(t, s, "x", "foreign", 0)
		waiter = locking(t, newClient(t, s).Mutex("x"))
		synctest.Wait()
		began = time.Now()
		force(true)
		unlock(t, <-waiter)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("the next waiter got in %v after a foreign owner was evicted", took)
		}
	})
}

func TestAnEvictedOwnersLateUnlockDoesNotTouchTheNextOwner(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		evicted := newClient(t, s)
		l := lock(t, evicted.Mutex("x"))
		c := newClient(t, s)
		if _, err := c.ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		next := lock(t, c.Mutex("x"))
		untouched := s.unchanged(t, "x")
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		if err := evicted.Close(); err != nil {
			t.Error(err)
		}
		untouched()
		unlock(t, next)
	})
}

func TestInspectAndForceUnlockRefuseBadNamesAndAClosedClient(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		check := func(name string, want error) {
			t.Helper()
			_, err := c.Inspect(context.Background(), name)
			isAll(t, err, want)
			isAll(t, forceUnlock(context.Background(), c, name), want)
		}
		check("", leased.ErrInvalidName)
		check("a}b", leased.ErrInvalidName)
		c.Close()
		check("x", leased.ErrClosed)
		_, err := c.Inspect(context.Background(), "x")
		if want := `leased: inspecting lock "x": client is closed`; err.Error() != want {
			t.Errorf("the error is %q, want %q", err, want)
		}
		err = forceUnlock(context.Background(), c, "x")
		if want := `leased: unlocking lock "x" by force: client is closed`; err.Error() != want {
			t.Errorf("the error is %q, want %q", err, want)
		}
	})
}

// How long Redis takes to answer does not matter to a context, which is the user's.
func TestInspectAndForceUnlockEndWithTheirContext(t *testing.T) {
	f := func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change))
		warm(t, s, c)
		calls := map[string]func(context.Context) error{
			"Inspect":     func(ctx context.Context) error { _, err := c.Inspect(ctx, "x"); return err },
			"ForceUnlock": func(ctx context.Context) error { return forceUnlock(ctx, c, "x") },
		}
		l := lock(t, newClient(t, s).Mutex("x"))
		cause := errors.New("the operator went home")
		ended, cancel := context.WithCancelCause(context.Background())
		cancel(cause)
		synctest.Wait()
		before := c.Stats().Commands
		for what, call := range calls {
			err, most := call(ended), 1
			if s.members == nil {
				most = 2 // go-redis says so, too, but its error may be of another context and does not match
			}
			if isAll(t, err, context.Canceled, cause); !strings.Contains(err.Error(), `lock "x"`) ||
				strings.Count(err.Error(), context.Canceled.Error()) > most || strings.Count(err.Error(), cause.Error()) > 1 {
				t.Errorf("%s under a context that has ended: %v", what, err)
			}
		}
		synctest.Wait()
		if n := c.Stats().Commands - before; n > 0 && s.members != nil { // of one server's go-redis finds out
			t.Errorf("%d commands were sent", n)
		}
		unlock(t, l) // and was not forced
		way.start()
		for what, call := range calls {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			began := time.Now()
			if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 10*time.Millisecond {
				t.Errorf("%s returned %v after %v", what, err, time.Since(began))
			}
			cancel()
			ctx, cancel = context.WithCancel(context.Background())
			began = time.Now()
			time.AfterFunc(10*time.Millisecond, cancel)
			if err := call(ctx); !errors.Is(err, context.Canceled) || time.Since(began) != 10*time.Millisecond {
				t.Errorf("%s that is canceled returned %v after %v", what, err, time.Since(began))
			}
		}
		way.end(t)
		time.Sleep(time.Minute) // of virtual time: what was held back is delivered
	}
	t.Run("one server", func(t *testing.T) { inVirtualTime(t, f) })
	t.Run("quorum", func(t *testing.T) { onQuorum(t, f) })
}

// With a context that can be canceled, they are sent in a goroutine of the client.
func TestWhatAHookDoesInInspectComesOutInItsCaller(t *testing.T) {
	inEachWayToBreak(t, func(t *testing.T, s place, how string, breaks func()) {
		if s.members != nil {
			t.Skip("a quorum has tests of its own")
		}
		var hook faulty
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, &hook)
		c := clientOn(t, s, rdb)
		warm(t, s, c)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		hook.breaks = breaks
		for what, call := range map[string]func() error{
			"Inspect":     func() error { _, err := c.Inspect(ctx, "x"); return err },
			"ForceUnlock": func() error { return forceUnlock(ctx, c, "x") },
		} {
			hook.faults.Store(1)
			var err error
			p := panics(func() { err = call() })
			if how == "panics" && p != "a hook's bug" || how != "panics" && (p != nil || err == nil) {
				t.Errorf("%s panicked with %v and returned %v", what, p, err)
			}
			must(t, call())
		}
	})
}

// Two applications whose prefixes and names make the same key exclude each other, but no message of one reaches
// the other: what one keeps idle, the other does not get.
func TestAnIdleLockIsNotGivenUpToAClientWithAnotherPrefix(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		owner := newClient(t, s, leased.WithKeyPrefix("app:"))
		other := newClient(t, s, leased.WithKeyPrefix("app:x:"))
		unlock(t, lock(t, owner.Mutex("x:y", leased.WithIdleHold(time.Hour))))
		synctest.Wait() // until its inbox is confirmed, and it has asked whether it missed a message
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		_, err := other.Mutex("y").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
	})
}

func TestAClientIsCalledByItsHostAndProcess(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		if who, want := inspect(t, c, "x").Owners[0].Client, fmt.Sprint(host, ":", os.Getpid()); who != want {
			t.Errorf("owned by %q, want %q", who, want)
		}
		unlock(t, l)
	})
}
