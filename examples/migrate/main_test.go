package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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

// trying ends a context when some commands that may lock have been answered.
type trying struct {
	answered atomic.Int32
	end      context.CancelFunc
}

const someTries = 4

func (h *trying) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *trying) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		switch cmd.Name() {
		case "set", "eval", "evalsha":
			if h.answered.Add(1) == someTries {
				h.end()
			}
		}
		return err
	}
}

func (h *trying) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Each of them keeps Leased out while it holds the lock, and is kept out by Leased.
func TestOldAndNewExcludeEachOther(t *testing.T) {
	server, rdb := testclient.Redis(t)
	locks := testclient.Process(t, rdb)
	for name, old := range map[string]func(context.Context, *redis.Client, func(context.Context) error) error{
		"redsync": withRedsync, "redislock": withRedislock,
	} {
		err := old(t.Context(), rdb, func(context.Context) error {
			if mu := locks.Mutex(lockName); mu.TryLock() {
				t.Errorf("%s has the lock, and Leased gets it too", name)
				mu.Unlock()
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		err = withLeased(t.Context(), locks, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, testclient.Patience)
			defer cancel()
			tries, keptOut := &trying{end: cancel}, testclient.Connect(t, server)
			keptOut.AddHook(tries)
			if err := old(ctx, keptOut, func(context.Context) error { return nil }); err == nil {
				t.Errorf("Leased has the lock, and %s gets it too", name)
			} else if tries.answered.Load() < someTries {
				t.Errorf("%s has not tried: %v", name, err)
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
