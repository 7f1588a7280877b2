//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func init() {
	roles["seller"] = sell
	roles["worker"] = work
}

// sell sells until nothing is left. The stock is a plain counter that is read, then
// written back. The number of processes inside is counted atomically and is never above one.
func sell(a *actor) error {
	ctx := context.Background()
	mu := a.client.Mutex("stock")
	for sold := 0; ; sold++ {
		l, err := mu.LockContext(ctx)
		if err != nil {
			return err
		}
		inside, err := a.rdb.Incr(ctx, a.prefix+"inside").Result()
		if err != nil {
			return err
		}
		if inside != 1 {
			return fmt.Errorf("%d inside at once", inside)
		}
		left, err := a.rdb.Get(ctx, a.prefix+"left").Int()
		if err == nil && left > 0 {
			err = a.rdb.Set(ctx, a.prefix+"left", left-1, redis.KeepTTL).Err()
		}
		if err == nil {
			err = a.rdb.Decr(ctx, a.prefix+"inside").Err()
		}
		if err := errors.Join(err, l.Unlock()); err != nil {
			return err
		}
		if left == 0 {
			say("sold %d", sold)
			return nil
		}
	}
}

// work locks once, and obeys the parent's commands until it is told nothing more.
func work(a *actor) error {
	ctx := context.Background()
	l, err := a.client.Mutex("x").LockContext(ctx)
	if err != nil {
		return err
	}
	say("locked %d %d", l.Token(), time.Now().UnixNano())
	stop := context.AfterFunc(l.Context(), func() { say("ended %q", context.Cause(l.Context())) })
	defer stop()
	for {
		switch a.told() {
		case "write":
			done, err := write(ctx, a.rdb, a.prefix, l.Token(), "child")
			if err != nil {
				return err
			}
			say("wrote %t", done)
		case "unlock":
			err := l.Unlock()
			say("unlocked %t %v", errors.Is(err, leased.ErrLeaseLost), err)
		case "":
			return nil
		}
	}
}

// write is a resource that compares tokens: it refuses a write with a smaller token than it
// has already seen.
func write(ctx context.Context, rdb *redis.Client, prefix string, token uint64, text string) (bool, error) {
	const compare = `
		local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
		if tonumber(ARGV[1]) < seen then return 0 end
		redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
		redis.call('PEXPIRE', KEYS[1], 60000)
		return 1`
	n, err := rdb.Eval(ctx, compare, []string{prefix + "resource"}, strconv.FormatUint(token, 10), text).Int()
	return n == 1, err
}

func TestProcessesThatSellTogetherNeverSellOneTooMany(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	processes, stock := 12, 1200
	if testing.Short() {
		processes, stock = 6, 150
	}
	ctx := t.Context()
	rdb.Set(ctx, prefix+"left", stock, 10*time.Minute)
	rdb.Set(ctx, prefix+"inside", 0, 10*time.Minute)
	var sellers []*child
	for range processes {
		sellers = append(sellers, spawn(t, "seller", s.Addr, prefix, time.Minute))
	}
	total, idle := 0, 0
	for _, c := range sellers {
		n, err := strconv.Atoi(c.hear("sold")[0])
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			idle++
		}
		total += n
		c.end()
	}
	if total != stock {
		t.Errorf("%d sold of a stock of %d", total, stock)
	}
	if left := rdb.Get(ctx, prefix+"left").Val(); left != "0" {
		t.Errorf("%s left", left)
	}
	if inside := rdb.Get(ctx, prefix+"inside").Val(); inside != "0" {
		t.Errorf("%s still inside", inside)
	}
	t.Logf("%d processes, %d sold, %d sold nothing", processes, total, idle)
}

func TestTheNextProcessRunsWhenAKilledOwnersTTLEnds(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	strain := redistest.NewStrain(t)
	look := newClient(t, rdb, prefix)
	// A re-check comes after a third of this; being late by that, or by a whole TTL, would exceed the
	// bound.
	const ttl = 2 * time.Second

	for range 5 {
		owner := spawn(t, "worker", s.Addr, prefix, ttl)
		owner.hear("locked")
		next := spawn(t, "worker", s.Addr, prefix, ttl)
		queued(t, look, "x", 1)
		owner.kill(rdb)
		earliest, latest, owned := owner.owns(look)
		ns, err := strconv.ParseInt(next.hear("locked")[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		next.tell("unlock")
		next.hear("unlocked")
		next.end()
		if !owned {
			t.Log("the machine took longer than a TTL to see the owner dead: once more")
			continue
		}
		at := time.Unix(0, ns)
		if at.Before(earliest) {
			t.Errorf("the next owner ran %v before the TTL's end", earliest.Sub(at))
		}
		late := at.Sub(latest)
		if late > slack+strain.Since(latest) {
			t.Errorf("the next owner ran %v after the TTL's end", late)
		}
		t.Logf("the next owner ran %v after the TTL's end", late)
		return
	}
	t.Error("five times the TTL ended before the owner's death could be observed")
}

func TestAStoppedOwnerLearnsItsLossAndHarmsNobody(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	c := newClient(t, rdb, prefix)
	ctx := t.Context()

	owner := spawn(t, "worker", s.Addr, prefix, time.Second)
	old, err := strconv.ParseUint(owner.hear("locked")[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	next := wait(within(t, patience), c.Mutex("x"))
	queued(t, c, "x", 1)
	owner.signal(syscall.SIGSTOP)
	l := entered(t, next).lease
	if l.Token() <= old {
		t.Errorf("token %d after %d", l.Token(), old)
	}
	if done, err := write(ctx, rdb, prefix, l.Token(), "parent"); !done || err != nil {
		t.Fatalf("the owner's write: %t, %v", done, err)
	}

	owner.tell("write") // the child continues where it was, still believing that it has the lock
	owner.signal(syscall.SIGCONT)
	heard := map[string]string{}
	for len(heard) < 2 { // in either order
		select {
		case line, ok := <-owner.lines:
			var word, rest string
			if _, err := fmt.Sscanf(line, "%s %q", &word, &rest); err != nil {
				_, _ = fmt.Sscanf(line, "%s %s", &word, &rest)
			}
			if !ok || word == "failed" {
				t.Fatalf("child: %q", line)
			}
			heard[word] = rest
		case <-time.After(patience):
			t.Fatalf("heard only %v", heard)
		}
	}
	if heard["wrote"] != "false" {
		t.Error("the resource took the write of an owner that had lost its lock")
	}
	if !strings.HasPrefix(heard["ended"], fmt.Sprintf(`leased: lock "x" lost (token %d): `, old)) {
		t.Errorf("its context ended with %q", heard["ended"])
	}
	owner.tell("unlock")
	if said := owner.hear("unlocked"); said[0] != "true" {
		t.Errorf("its Unlock returned %v", said[1:])
	}
	owner.end()

	if text := rdb.HGet(ctx, prefix+"resource", "text").Val(); text != "parent" {
		t.Errorf("the resource holds %q", text)
	}
	info, err := c.Inspect(ctx, "x")
	if err != nil || len(info.Owners) != 1 || info.Owners[0].Token != l.Token() {
		t.Errorf("the next owner's lock: %+v, %v", info, err)
	}
	if l.Context().Err() != nil {
		t.Errorf("the next owner's lease ended: %v", context.Cause(l.Context()))
	}
	mustUnlock(t, l)
}
