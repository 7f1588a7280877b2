package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/leasedmutex/leased/examples/internal/testclient"
)

func TestOldAndNewTakeTurnsOnOneKey(t *testing.T) {
	server, rdb := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Fatal(err)
	}
	if n, err := rdb.Get(t.Context(), "counter").Int(); n != 3*turns || err != nil {
		t.Errorf("counted to %d of %d, %v", n, 3*turns, err)
	}
}

// LEASED_PYTHON names a Python that has the package redis.
func TestRedisPyAndLeasedTakeTurnsOnOneKey(t *testing.T) {
	python := os.Getenv("LEASED_PYTHON")
	if python == "" {
		t.Skip("set LEASED_PYTHON to a Python that has the package redis, such as python3")
	}
	server, rdb := testclient.Redis(t)
	locks := testclient.Process(t, rdb)
	host, port, err := net.SplitHostPort(server.Addr)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			if out, err := exec.CommandContext(t.Context(), python, "old.py", host, port, fmt.Sprint(turns)).CombinedOutput(); err != nil {
				t.Errorf("old.py: %v\n%s", err, out)
			}
		})
	}
	all.Go(func() {
		err := takeTurns(t.Context(), rdb, func(ctx context.Context, work func(context.Context) error) error {
			return withLeased(ctx, locks, work)
		})
		if err != nil {
			t.Error(err)
		}
	})
	all.Wait()
	if n, err := rdb.Get(t.Context(), "counter").Int(); n != 3*turns || err != nil {
		t.Errorf("counted to %d of %d, %v", n, 3*turns, err)
	}
}

// Each of them keeps Leased out while it holds the lock, and is kept out by Leased.
func TestOldAndNewExcludeEachOther(t *testing.T) {
	_, rdb := testclient.Redis(t)
	locks := testclient.Process(t, rdb)
	for name, old := range map[string]func(context.Context, func(context.Context) error) error{
		"redsync": func(ctx context.Context, work func(context.Context) error) error { return withRedsync(ctx, rdb, work) },
		"redislock": func(ctx context.Context, work func(context.Context) error) error {
			return withRedislock(ctx, rdb, work)
		},
	} {
		err := old(t.Context(), func(context.Context) error {
			if locks.Mutex(lockName).TryLock() {
				t.Errorf("%s has the lock, and Leased gets it too", name)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		err = withLeased(t.Context(), locks, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			defer cancel()
			if err := old(ctx, func(context.Context) error { return nil }); err == nil {
				t.Errorf("Leased has the lock, and %s gets it too", name)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Three new processes use the lock without a pause, and the old one gets its turns among
// them. With withLeased in place of besideOld it gets none.
func TestAnOldProcessGetsItsTurnsBesideBusyNewOnes(t *testing.T) {
	_, rdb := testclient.Redis(t)
	ctx, stop := context.WithTimeout(t.Context(), testclient.Patience)
	defer stop()
	work := func(context.Context) error {
		time.Sleep(2 * time.Millisecond) // the work
		return nil
	}
	var all sync.WaitGroup
	for range 3 {
		locks := testclient.Process(t, rdb)
		all.Go(func() {
			for ctx.Err() == nil {
				if err := besideOld(ctx, locks, work); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	for n := range turns {
		if err := withRedislock(ctx, rdb, work); err != nil {
			t.Errorf("turn %d of the old one: %v", n, err)
			break
		}
	}
	stop()
	all.Wait()
}
