//go:build unix

package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/dbtest"
	"github.com/leasedmutex/leased/internal/redistest"
)

var runs = flag.Int("sale.runs", 5, "how many sales with faults by the recipe first-access")

// A server of the sale is this test program, started once more.
func TestMain(m *testing.M) {
	logging.Disable() // it tells of each fault, and they are ours
	if os.Getenv(serverVariable) != "" {
		os.Exit(run(os.Args[1:]))
	}
	os.Exit(m.Run())
}

const serverVariable = "FLASHSALE_SERVER"

// patience bounds what has no time of its own.
const patience = 60 * time.Second

// fixture is what all sales of a test use: a Redis for the lock, a PostgreSQL.
type fixture struct {
	redis    *redistest.Instance
	database string
	db       *sql.DB
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{database: dbtest.Postgres(t), redis: redistest.Server(t)}
	db, err := sql.Open("pgx", f.database)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	f.db = db
	return f
}

// open begins a sale with three servers.
func (f *fixture) open(t *testing.T, o options) *sale {
	t.Helper()
	o.redis, o.database = "redis://"+f.redis.Addr, f.database
	if err := (store{f.db}).recreate(t.Context(), item, o.stock); err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := &sale{program: program, options: o, before: func(cmd *exec.Cmd) {
		cmd.Env = append(os.Environ(), serverVariable+"=1")
	}}
	t.Cleanup(s.end)
	for range 3 {
		if err := s.add(); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (f *fixture) count(t *testing.T) (left, sold int) {
	t.Helper()
	left, sold, err := store{f.db}.count(t.Context(), item)
	if err != nil {
		t.Fatal(err)
	}
	return left, sold
}

func TestSaleWithTheRightRecipeSells100Of100WhateverBreaks(t *testing.T) {
	f := newFixture(t)
	n := *runs
	if testing.Short() {
		n = 1
	}
	for i := range n + 1 {
		how := "first-access"
		if i == n {
			how = "as-read"
		}
		began := time.Now()
		left, sold := f.saleWithFaults(t, how)
		if left != 0 || sold != 100 {
			t.Errorf("run %d, %s: %d sold of 100, %d left", i+1, how, sold, left)
		}
		t.Logf("run %d, %s: %d sold of 100, %d left, in %v", i+1, how, sold, left, time.Since(began).Round(time.Millisecond))
		if t.Failed() {
			return
		}
	}
}

// saleWithFaults sells 100 pieces while Redis and the servers break, each at its
// point of the sale, and returns what is left and how many were sold.
func (f *fixture) saleWithFaults(t *testing.T, how string) (left, sold int) {
	t.Helper()
	const ttl = 500 * time.Millisecond
	s := f.open(t, options{recipe: how, stock: 100, ttl: ttl, think: 4 * time.Millisecond})
	defer s.end()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	bought := make(chan error, 1)
	// Owned by this call, ended by ctx at the latest, waited for at its end.
	go func() { bought <- s.buyAll(ctx, 110) }()

	rdb := f.redis.Client()
	operator, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer operator.Close()
	var stopped time.Time
	flush := func() { rdb.FlushAll(ctx) } // it may be down: then its keys are gone as well
	for _, fault := range []struct {
		at int // pieces sold
		do func()
	}{
		{10, flush},
		{20, func() { _, _ = operator.ForceUnlock(ctx, "stock:"+item) }},
		{30, func() { s.signal(0, syscall.SIGSTOP); stopped = time.Now() }},
		{32, flush},
		{40, func() { s.kill(1) }},
		{42, func() {
			if err := s.add(); err != nil {
				t.Error(err)
			}
		}},
		{55, f.redis.Kill},
		{0, f.redis.Restart}, // at once
		{65, func() {
			time.Sleep(time.Until(stopped.Add(2 * ttl))) // the fault: stopped for longer than the TTL
			s.signal(0, syscall.SIGCONT)
		}},
		{75, func() { _, _ = operator.ForceUnlock(ctx, "stock:"+item) }},
		{85, func() {
			for range 5 {
				flush()
				time.Sleep(3 * time.Millisecond) // the fault: five times in a row
			}
		}},
	} {
		for began := time.Now(); ; time.Sleep(time.Millisecond) { // between two looks
			// A stopped server may hold the lock: then nothing is sold for a TTL.
			if _, sold = f.count(t); sold >= fault.at || time.Since(began) > patience || ctx.Err() != nil {
				break
			}
		}
		fault.do()
	}
	if err := <-bought; err != nil {
		t.Error(err)
	}
	return f.count(t)
}

// signal stops the n-th server or lets it go on.
func (s *sale) signal(n int, what syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.servers[n].cmd.Process.Signal(what)
}

// steps stops each server between its read and its write, until it is told to go on.
type steps struct {
	*httptest.Server
	read chan string              // buyers whose server has read
	goOn map[string]chan struct{} // closed when that server may write
}

func newSteps(t *testing.T, buyers ...string) *steps {
	t.Helper()
	s := &steps{read: make(chan string, len(buyers)), goOn: map[string]chan struct{}{}}
	for _, b := range buyers {
		s.goOn[b] = make(chan struct{})
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		buyer := r.FormValue("buyer")
		s.read <- buyer
		select {
		case <-s.goOn[buyer]:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *steps) hasRead(t *testing.T, buyer string) {
	t.Helper()
	select {
	case b := <-s.read:
		if b != buyer {
			t.Fatalf("%s has read, not %s", b, buyer)
		}
	case <-time.After(patience):
		t.Fatalf("%s has not read", buyer)
	}
}

// Two servers believe that they own the lock, one after the other has read: it is what
// the limits name, made to happen. What the recipes make of it is another matter.
func TestSaleSeesEachRecipeThatOversells(t *testing.T) {
	f := newFixture(t)
	for how, want := range map[string]struct {
		first, second int // what the buyers are answered
		sold          int
	}{
		"none":         {http.StatusOK, http.StatusOK, 2},
		"write-only":   {http.StatusOK, http.StatusOK, 2},
		"first-access": {http.StatusServiceUnavailable, http.StatusOK, 1},
		"as-read":      {http.StatusOK, http.StatusServiceUnavailable, 1},
	} {
		for what, loseTheLock := range map[string]func(*testing.T, *redis.Client){
			"FLUSHALL": func(t *testing.T, rdb *redis.Client) {
				if err := rdb.FlushAll(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
			},
			"restart of Redis": func(*testing.T, *redis.Client) { f.redis.Restart() },
		} {
			t.Run(fmt.Sprintf("%s, %s", how, what), func(t *testing.T) {
				at := newSteps(t, "a", "b")
				// The TTL is long, so that the first server does not learn of its loss.
				s := f.open(t, options{recipe: how, stock: 50, ttl: 10 * time.Minute, pause: at.URL})
				defer s.end()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				buy := func(n int, buyer string) <-chan int {
					answered := make(chan int, 1)
					// Owned by the subtest, ended by ctx at the latest; its answer is waited for.
					go func() {
						status, err := buyOnce(ctx, s.url(n), buyer)
						if err != nil {
							t.Error(err)
						}
						answered <- status
					}()
					return answered
				}
				first := buy(0, "a")
				at.hasRead(t, "a")
				loseTheLock(t, f.redis.Client())
				second := buy(1, "b")
				at.hasRead(t, "b")
				close(at.goOn["a"])
				if status := <-first; status != want.first {
					t.Errorf("the first owner was answered %d, want %d", status, want.first)
				}
				close(at.goOn["b"])
				if status := <-second; status != want.second {
					t.Errorf("the second owner was answered %d, want %d", status, want.second)
				}
				left, sold := f.count(t)
				if sold != want.sold || left != 49 {
					t.Errorf("%d sold, and 49 of 50 left: got %d left; want %d sold", sold, left, want.sold)
				}
			})
		}
	}
}
