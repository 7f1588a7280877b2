package leasedtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/leasedtest"
)

func TestMain(m *testing.M) {
	logging.Disable()          // it logs what a test has broken
	os.Exit(redistest.Main(m)) // skips the examples on 32 bits
}

const ttl = 30 * time.Second

// holding runs f in virtual time while a client holds the lock.
func holding(t *testing.T, f func(t *testing.T, server *leasedtest.Server, owner *leased.Client, lease *leased.Lease)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		owner := server.Client(leased.WithTTL(ttl))
		lease := lock(t, owner)
		synctest.Wait() // a client that has just subscribed looks after what it holds
		f(t, server, owner, lease)
	})
}

func lock(t *testing.T, c *leased.Client) *leased.Lease {
	t.Helper()
	lease, err := c.Mutex("lock").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// waiting locks in a goroutine, and returns what tells when it got the lock.
func waiting(t *testing.T, c *leased.Client) <-chan *leased.Lease {
	got := make(chan *leased.Lease, 1)
	go func() {
		lease, err := c.Mutex("lock").LockContext(context.Background())
		if err != nil {
			t.Error(err)
		}
		got <- lease
	}()
	synctest.Wait()
	return got
}

// after waits for ch and returns how long that took.
func after[T any](t *testing.T, ch <-chan T) (T, time.Duration) {
	t.Helper()
	began := time.Now()
	select {
	case v := <-ch:
		return v, time.Since(began)
	case <-time.After(time.Hour):
		t.Fatal("not within an hour")
		panic("unreachable")
	}
}

func unlock(t *testing.T, l *leased.Lease) {
	t.Helper()
	if err := l.Unlock(); err != nil {
		t.Error(err)
	}
}

// lost fails t unless the lease ended by loss.
func lost(t *testing.T, l *leased.Lease) {
	t.Helper()
	if cause := context.Cause(l.Context()); !errors.Is(cause, leased.ErrLeaseLost) {
		t.Errorf("the lease's context ended with %v, want ErrLeaseLost", cause)
	}
	if err := l.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Unlock returned %v, want ErrLeaseLost", err)
	}
}

func TestNewWorksInRealTime(t *testing.T) {
	t.Parallel()
	client := leasedtest.New(t)
	n := 0
	if err := client.Mutex("lock").Do(t.Context(), func(context.Context) error { n++; return nil }); err != nil || n != 1 {
		t.Errorf("n is %d and Do returned %v", n, err)
	}
}

func TestALeaseLastsAsLongAsItIsHeld(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, _ *leased.Client, lease *leased.Lease) {
		time.Sleep(time.Hour)
		if _, err := server.Client().Mutex("lock").TryLockContext(t.Context()); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("another client got %v, want ErrLocked", err)
		}
		unlock(t, lease)
	})
}

func TestClientsHandTheLockOnAsProcessesDo(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, _ *leased.Client, lease *leased.Lease) {
		next := waiting(t, server.Client())
		unlock(t, lease)
		second, took := after(t, next)
		if took > time.Millisecond { // tokens may have to wait for the clock
			t.Errorf("the hand-off took %v", took)
		}
		unlock(t, second)
	})
}

func TestLoseEndsTheLeaseNow(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, owner *leased.Client, lease *leased.Lease) {
		next := waiting(t, server.Client())
		leasedtest.Lose(t, owner, "lock")
		if _, took := after(t, lease.Context().Done()); took != 0 {
			t.Errorf("the owner learned of it after %v", took)
		}
		lost(t, lease)
		second, _ := after(t, next)
		unlock(t, second)
	})
}

func TestWithRenewalsFrozenALeaseEndsByItself(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, owner *leased.Client, lease *leased.Lease) {
		resume := server.FreezeRenewals()
		if _, took := after(t, lease.Context().Done()); took > ttl || took < ttl/2 {
			t.Errorf("the lease lasted %v", took)
		}
		lost(t, lease)
		resume()
		again := lock(t, owner)
		time.Sleep(time.Hour)
		unlock(t, again)
	})
}

// Readers renew by another script.
func TestWithRenewalsFrozenAReadersLeaseEndsToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		lease, err := server.Client(leased.WithTTL(ttl)).RWMutex("lock").RLockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		server.FreezeRenewals()
		if _, took := after(t, lease.Context().Done()); took > ttl {
			t.Errorf("the lease lasted %v", took)
		}
		lost(t, lease)
	})
}

func TestWithoutAServerALeaseEndsByTheLocalClock(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, owner *leased.Client, lease *leased.Lease) {
		start := server.Stop()
		if _, took := after(t, lease.Context().Done()); took >= ttl || took < ttl/2 {
			t.Errorf("the lease lasted %v, with a TTL of %v", took, ttl)
		}
		lost(t, lease)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		if _, err := owner.Mutex("lock").LockContext(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a lock without a server returned %v", err)
		}
		next := waiting(t, owner)
		start()
		again, took := after(t, next)
		if took > 5*time.Second {
			t.Errorf("after the outage it took %v", took)
		}
		unlock(t, again)
	})
}

func TestAShortOutageCostsNoLease(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, _ *leased.Client, lease *leased.Lease) {
		start := server.Stop()
		time.Sleep(ttl / 2)
		start()
		time.Sleep(time.Hour)
		unlock(t, lease)
	})
}

func TestWithMessagesDroppedAWaiterReChecks(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, _ *leased.Client, lease *leased.Lease) {
		next := waiting(t, server.Client())
		deliver := server.DropMessages()
		unlock(t, lease)
		second, took := after(t, next)
		if took == 0 || took > 3*time.Second {
			t.Errorf("the waiter learned of it after %v", took)
		}
		deliver()
		time.Sleep(time.Minute) // in which a subscription that heard nothing is built anew
		third := waiting(t, server.Client())
		unlock(t, second)
		if lease, took := after(t, third); took > time.Millisecond {
			t.Errorf("with messages again, it took %v", took)
		} else {
			unlock(t, lease)
		}
	})
}

func TestWithMessagesDroppedALossIsNoticedByTheRenewal(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, owner *leased.Client, lease *leased.Lease) {
		server.DropMessages()
		leasedtest.Lose(t, owner, "lock")
		if _, took := after(t, lease.Context().Done()); took == 0 || took > ttl/3+time.Second {
			t.Errorf("the owner learned of it after %v", took)
		}
		lost(t, lease)
	})
}

// The server's clock runs on from where it was set to.
func TestAdvanceMakesTwoOwners(t *testing.T) {
	holding(t, func(t *testing.T, server *leasedtest.Server, _ *leased.Client, lease *leased.Lease) {
		server.Advance(ttl)
		second := lock(t, server.Client(leased.WithTTL(ttl)))
		if lease.Context().Err() != nil || second.Token() <= lease.Token() {
			t.Errorf("the first owner's context has %v, tokens are %d and %d", lease.Context().Err(), lease.Token(), second.Token())
		}
		if _, took := after(t, lease.Context().Done()); took > ttl/3 {
			t.Errorf("the first owner learned of it after %v", took)
		}
		lost(t, lease)
		time.Sleep(time.Hour)
		unlock(t, second)

		abandoned := server.Client(leased.WithTTL(ttl))
		left := lock(t, abandoned)
		next := waiting(t, server.Client())
		resume := server.FreezeRenewals()
		third, took := after(t, next)
		if took < ttl-4*time.Second || took > ttl+4*time.Second {
			t.Errorf("an abandoned lock was free after %v", took)
		}
		lost(t, left)
		resume()
		unlock(t, third)
	})
}

func TestAdvanceRefusesToSetTheClockBack(t *testing.T) {
	server := leasedtest.NewServer(t)
	defer func() {
		if recover() == nil {
			t.Error("it did not panic")
		}
	}()
	server.Advance(-1)
}

// A long pipeline and its replies pass each other, and so do replies of all kinds.
func TestRedisIsOneForOtherCodeToo(t *testing.T) {
	t.Parallel()
	rdb := leasedtest.NewServer(t).Redis()
	long := strings.Repeat("text\r\n>3\r\n$7\r\nmessage\r\n", 1000)
	cmds, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for i := range 200 { // 5 MB: on a machine under load, more can take longer than go-redis waits
			p.HSet(t.Context(), "hash", fmt.Sprint(i), long)
		}
		p.HGetAll(t.Context(), "hash")
		p.Get(t.Context(), "none")
		p.LRange(t.Context(), "none", 0, -1)
		p.Set(t.Context(), "empty", "", 0)
		p.Get(t.Context(), "empty")
		return nil
	})
	if !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	all := cmds[200].(*redis.MapStringStringCmd).Val()
	if len(all) != 200 || all["7"] != long {
		t.Errorf("a hash of %d fields came back", len(all))
	}
	if v, err := cmds[len(cmds)-1].(*redis.StringCmd).Result(); v != "" || err != nil {
		t.Errorf("an empty value came back as %q, %v", v, err)
	}
}

// fake notes what a test is failed for, and runs its cleanups when told.
type fake struct {
	testing.TB
	failed   []string
	cleanups []func()
}

func (f *fake) Helper()                      {}
func (f *fake) Cleanup(c func())             { f.cleanups = append(f.cleanups, c) }
func (f *fake) Errorf(text string, v ...any) { f.failed = append(f.failed, fmt.Sprintf(text, v...)) }

func (f *fake) end() {
	for len(f.cleanups) > 0 {
		last := f.cleanups[len(f.cleanups)-1]
		f.cleanups = f.cleanups[:len(f.cleanups)-1]
		last()
	}
}

func TestALeaseThatIsNotUnlockedFailsTheTest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{TB: t}
		left := leasedtest.New(f)
		lock(t, left)
		f.end()
		if len(f.failed) != 1 || !strings.Contains(f.failed[0], "lock") {
			t.Errorf("it failed with %q", f.failed)
		}

		f = &fake{TB: t}
		closed := leasedtest.New(f)
		lock(t, closed)
		_ = closed.Close()
		f.end()
		if f.failed != nil {
			t.Errorf("a test that closed the client failed with %q", f.failed)
		}
	})
}

func TestLoseFailsTheTestIfNobodyOwns(t *testing.T) {
	for what, before := range map[string]func(*leased.Client){
		"free": func(*leased.Client) {},
		"unlocked before the end of its minimum hold": func(c *leased.Client) {
			mu := c.Mutex("lock", leased.WithMinHold(time.Minute))
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // its minimum hold is what is tested
		},
	} {
		f, client := &fake{TB: t}, leasedtest.New(t)
		before(client)
		leasedtest.Lose(f, client, "lock")
		if len(f.failed) != 1 || !strings.Contains(f.failed[0], "nobody owns") {
			t.Errorf("%s: it failed with %q", what, f.failed)
		}
	}
}

// go-redis keeps the timer of who waits for a connection, and a bubble does not survive a timer of another
// one.
func TestBubblesOneAfterTheOtherMayHaveManyCommandsUnderWay(t *testing.T) {
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			rdb := leasedtest.NewServer(t).Redis()
			var all sync.WaitGroup
			for range 500 {
				all.Go(func() {
					if err := rdb.Incr(t.Context(), "n").Err(); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
		})
	}
}

func TestServersMakeAQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var rdbs []redis.UniversalClient
		var servers []*leasedtest.Server
		for range 3 {
			server := leasedtest.NewServer(t)
			servers, rdbs = append(servers, server), append(rdbs, server.Redis())
		}
		client, err := leased.NewQuorum(rdbs, leased.WithLogger(slog.New(slog.DiscardHandler)))
		must(t, err)
		mu := client.Mutex("x")
		lock := func() {
			t.Helper()
			lease, err := mu.LockContext(t.Context())
			must(t, err)
			must(t, lease.Unlock())
		}
		lock()
		time.Sleep(time.Hour) // they are no new set anymore
		start := servers[0].Stop()
		lock()
		servers[1].Stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := mu.LockContext(ctx); !errors.Is(err, leased.ErrNoQuorum) {
			t.Errorf("one server of three: %v", err)
		}
		start()
		lock()
		must(t, client.Close())
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
