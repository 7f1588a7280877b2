//go:build unix

package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A flash sale: three processes sell a stock of 100, which one Redis keeps, under a lock on
// another Redis. That other Redis breaks, and so do the processes. examples/flashsale is the
// same with HTTP servers and PostgreSQL.

var saleRuns = flag.Int("sale.runs", 4, "how many sales with faults")

const (
	storeVariable  = "LEASED_FAULTS_STORE"  // address of the Redis that keeps the stock
	recipeVariable = "LEASED_FAULTS_RECIPE" // how the token is used
	tokenFirst     = "first-access"
	tokenAtWrite   = "write-only"
)

func init() {
	roles["clerk"] = clerk
	roles["stepper"] = stepper
}

// shelf is the stock and the number of sales, on the server that does not break.
type shelf struct {
	rdb    *redis.Client
	prefix string
	recipe string
}

var (
	// seeAndPresent is the first access under a lease: it records the token and reads. An equal
	// token belongs to another lease: two owners at once can draw the same one.
	seeAndPresent = redis.NewScript(`
		if tonumber(redis.call('HGET', KEYS[1], 'token') or '0') >= tonumber(ARGV[1]) then return -1 end
		redis.call('HSET', KEYS[1], 'token', ARGV[1])
		return tonumber(redis.call('HGET', KEYS[1], 'left'))`)
	// sellUnder writes if no other lease has accessed the item since.
	sellUnder = redis.NewScript(`
		if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
		redis.call('HSET', KEYS[1], 'left', ARGV[2])
		redis.call('INCR', KEYS[2])
		return 1`)
	// sellAbove is the wrong recipe: it compares the token only here.
	sellAbove = redis.NewScript(`
		if tonumber(redis.call('HGET', KEYS[1], 'token') or '0') > tonumber(ARGV[1]) then return 0 end
		redis.call('HSET', KEYS[1], 'token', ARGV[1], 'left', ARGV[2])
		redis.call('INCR', KEYS[2])
		return 1`)
)

var errOtherLease = errors.New("another lease was here")

func (s *shelf) item() string { return s.prefix + "{item}" }
func (s *shelf) sold() string { return s.prefix + "{item}:sold" }

// see returns how many are left.
func (s *shelf) see(ctx context.Context, token uint64) (int, error) {
	if s.recipe == tokenAtWrite {
		return s.rdb.HGet(ctx, s.item(), "left").Int()
	}
	left, err := seeAndPresent.Run(ctx, s.rdb, []string{s.item()}, token).Int()
	if err == nil && left < 0 {
		err = errOtherLease
	}
	return left, err
}

func (s *shelf) sell(ctx context.Context, token uint64, left int) error {
	script := sellUnder
	if s.recipe == tokenAtWrite {
		script = sellAbove
	}
	n, err := script.Run(ctx, s.rdb, []string{s.item(), s.sold()}, token, left-1).Int()
	if err == nil && n == 0 {
		err = errOtherLease
	}
	return err
}

// count returns how many are left and how many were sold.
func (s *shelf) count(ctx context.Context) (left, sold int, err error) {
	left, err = s.rdb.HGet(ctx, s.item(), "left").Int()
	if err != nil {
		return 0, 0, err
	}
	sold, err = s.rdb.Get(ctx, s.sold()).Int()
	return left, sold, err
}

func (a *actor) shelf() *shelf {
	return &shelf{redis.NewClient(redistest.Options(os.Getenv(storeVariable))), a.prefix, os.Getenv(recipeVariable)}
}

// clerk sells, with four callers at once, until nothing is left.
func clerk(a *actor) error {
	s := a.shelf()
	defer s.rdb.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	mu := a.client.Mutex("sale")
	var sold atomic.Int64
	var last atomic.Value
	var all sync.WaitGroup
	say("ready")
	for range 4 {
		all.Go(func() {
			for ctx.Err() == nil {
				lease, err := mu.LockContext(ctx)
				if err != nil {
					last.Store(err.Error())
					continue
				}
				work := lease.Context()
				left, err := s.see(work, lease.Token())
				if err == nil && left > 0 {
					time.Sleep(2 * time.Millisecond) // the caller thinks
					if err = s.sell(work, lease.Token(), left); err == nil {
						sold.Add(1)
					}
				}
				done := err == nil && left == 0
				if err := lease.Unlock(); err != nil {
					last.Store(err.Error())
				}
				if done {
					return
				}
			}
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return fmt.Errorf("not sold out in time; the last error: %v", last.Load())
	}
	say("sold %d", sold.Load())
	return nil
}

// stepper sells one piece, taking each step when it is told to.
func stepper(a *actor) error {
	s := a.shelf()
	defer s.rdb.Close()
	ctx := context.Background()
	lease, err := a.client.Mutex("sale").LockContext(ctx)
	if err != nil {
		return err
	}
	left, err := s.see(ctx, lease.Token())
	say("read %d %v", left, err)
	a.told()
	err = s.sell(ctx, lease.Token(), left)
	say("wrote %t %v", err == nil, err)
	a.told()
	say("unlocked %v", lease.Unlock())
	return nil
}

// stand is the two servers of a sale.
type stand struct {
	locks, store *redistest.Instance
	shelf        *shelf
}

func newStand(t *testing.T, recipe, prefix string, stock int) *stand {
	t.Helper()
	st := &stand{locks: redistest.Server(t), store: redistest.Server(t)}
	st.shelf = &shelf{st.store.Client(), prefix, recipe}
	t.Setenv(storeVariable, st.store.Addr)
	t.Setenv(recipeVariable, recipe)
	st.fill(t, stock)
	return st
}

func (st *stand) fill(t *testing.T, stock int) {
	t.Helper()
	err := errors.Join(st.shelf.rdb.Del(t.Context(), st.shelf.item()).Err(),
		st.shelf.rdb.HSet(t.Context(), st.shelf.item(), "left", stock).Err(),
		st.shelf.rdb.Set(t.Context(), st.shelf.sold(), 0, 0).Err())
	if err != nil {
		t.Fatal(err)
	}
}

func TestASaleThatPresentsTokensAtTheFirstAccessSells100Of100WhateverBreaks(t *testing.T) {
	const ttl = 400 * time.Millisecond
	runs := *saleRuns
	if testing.Short() {
		runs = 1
	}
	st := newStand(t, tokenFirst, "s:", 100)
	look := newClient(t, st.locks.Client(), "s:")
	for run := range runs {
		began, stopped := time.Now(), time.Time{}
		st.fill(t, 100)
		var clerks []*child
		for range 3 {
			clerks = append(clerks, spawn(t, "clerk", st.locks.Addr, "s:", ttl))
		}
		for _, c := range clerks {
			c.hear("ready")
		}
		rdb := st.locks.Client()
		flush := func() { rdb.FlushAll(t.Context()) } // if the server is down, nothing is left either
		evict := func() { _, _ = look.ForceUnlock(t.Context(), "sale") }
		for _, fault := range []struct {
			at int // it happens once this many are sold
			do func()
		}{
			{10, flush},
			{20, evict},
			{30, func() { stopInside(t, clerks[0], look); stopped = time.Now() }},
			{40, func() { stopInside(t, clerks[1], look); clerks[1].signal(syscall.SIGKILL) }},
			{50, evict},
			{60, st.locks.Kill},
			{60, st.locks.Restart},
			{70, func() {
				time.Sleep(time.Until(stopped.Add(2 * ttl))) // the fault is a stop for longer than its TTL
				clerks[0].signal(syscall.SIGCONT)            // it continues where it was, still believing that it has the lock
			}},
			{80, flush},
			{90, flush},
		} {
			eventually(t, fmt.Sprintf("%d sold", fault.at), func() bool {
				_, sold, err := st.shelf.count(t.Context())
				return err == nil && sold >= fault.at
			})
			fault.do()
		}
		told := 0
		for _, c := range []*child{clerks[0], clerks[2]} {
			n, err := strconv.Atoi(c.hear("sold")[0])
			if err != nil {
				t.Fatal(err)
			}
			told += n
		}
		left, sold, err := st.shelf.count(t.Context())
		if left != 0 || sold != 100 || err != nil {
			t.Errorf("run %d: %d sold of 100, %d left, %v", run+1, sold, left, err)
		}
		t.Logf("run %d: %d sold of 100 (%d of them by processes that lived), %d left, in %v", run+1, sold, told, left,
			time.Since(began).Round(time.Millisecond))
	}
}

// stopInside stops the process while it owns the lock.
func stopInside(t *testing.T, c *child, look *leased.Client) {
	t.Helper()
	label := fmt.Sprintf(":%d", c.cmd.Process.Pid)
	eventually(t, "a process is stopped while it owns the lock", func() bool {
		c.signal(syscall.SIGSTOP)
		info, err := look.Inspect(t.Context(), "sale")
		if err == nil && len(info.Owners) == 1 && strings.HasSuffix(info.Owners[0].Client, label) {
			return true
		}
		c.signal(syscall.SIGCONT)
		return false
	})
}

// Nothing is left to chance: one process has read the stock when its lock is lost, then another reads it.
func TestASaleThatComparesTokensAtTheWriteOnlySellsOnePieceTwice(t *testing.T) {
	for recipe, want := range map[string]struct {
		first string // whether the first owner's write was taken
		sold  int
	}{
		tokenAtWrite: {"true", 2},
		tokenFirst:   {"false", 1},
	} {
		for what, lose := range map[string]func(*stand) error{
			"FLUSHALL": func(st *stand) error { return st.locks.Client().FlushAll(t.Context()).Err() },
			"ForceUnlock": func(st *stand) error {
				_, err := newClient(t, st.locks.Client(), "s:").ForceUnlock(t.Context(), "sale")
				return err
			},
			"restart": func(st *stand) error { st.locks.Restart(); return nil },
		} {
			t.Run(recipe+", "+what, func(t *testing.T) {
				st := newStand(t, recipe, "s:", 50)
				first := spawn(t, "stepper", st.locks.Addr, "s:", time.Minute)
				first.hear("read")
				if err := lose(st); err != nil {
					t.Fatal(err)
				}
				second := spawn(t, "stepper", st.locks.Addr, "s:", time.Minute)
				if read := second.hear("read"); read[0] != "50" {
					t.Fatalf("the second owner read %v", read)
				}
				first.tell("write")
				if wrote := first.hear("wrote"); wrote[0] != want.first {
					t.Errorf("the first owner's write: %v, want %s", wrote, want.first)
				}
				second.tell("write")
				if wrote := second.hear("wrote"); wrote[0] != "true" {
					t.Errorf("the second owner's write: %v", wrote)
				}
				left, sold, err := st.shelf.count(t.Context())
				if left != 49 || sold != want.sold || err != nil {
					t.Errorf("%d sold, want %d; %d left; %v", sold, want.sold, left, err)
				}
				// Unlock's error is the only sign that somebody else was inside.
				first.tell("unlock")
				if said := strings.Join(first.hear("unlocked"), " "); !strings.Contains(said, "lost") {
					t.Errorf("the first owner's Unlock: %s", said)
				}
				second.tell("unlock")
				if said := strings.Join(second.hear("unlocked"), " "); said != "<nil>" {
					t.Errorf("the second owner's Unlock: %s", said)
				}
			})
		}
	}
}

// Two that own the lock at once, as after a FLUSHALL, draw their tokens from the same clock,
// and can draw the same one.
func TestTheFirstAccessOfASaleRefusesTheTokenOfAnotherLeaseAlsoIfItIsEqual(t *testing.T) {
	st := newStand(t, tokenFirst, "s:", 50)
	if left, err := st.shelf.see(t.Context(), 7); left != 50 || err != nil {
		t.Fatalf("the first reads %d, %v", left, err)
	}
	if _, err := st.shelf.see(t.Context(), 7); !errors.Is(err, errOtherLease) {
		t.Errorf("the first access of a second lease with an equal token returned %v", err)
	}
	if err := st.shelf.sell(t.Context(), 7, 50); err != nil {
		t.Errorf("the first does not sell: %v", err)
	}
}
