package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

// effort is how long and how large the measurements are.
type effort struct {
	rounds   int
	cycles   time.Duration
	handoffs int
	contend  time.Duration
	settle   time.Duration // until those that wait do nothing but wait
	watch    time.Duration
	waiters  int // in each of ten processes
	locks    int
	killed   time.Duration // the TTL of an owner that is killed

	growing   time.Duration
	held      time.Duration // the TTL of many locks
	kept      time.Duration // how long they are held
	waiting   []int         // clients on one lock
	holding   []int         // locks of one client
	processes []int
}

var (
	full = effort{
		rounds: 3, cycles: 700 * time.Millisecond, handoffs: 80, contend: time.Second,
		settle: time.Second, watch: 1500 * time.Millisecond, waiters: 20, locks: 10_000, killed: 2 * time.Second,
		growing: 1500 * time.Millisecond, held: 6 * time.Second, kept: 6 * time.Second, waiting: []int{1, 10, 100, 1000, 10_000},
		holding: []int{1, 10, 100, 1000, 10_000, 100_000}, processes: []int{1, 2, 4, 8, 16, 32, 64},
	}
	quick = effort{
		rounds: 1, cycles: 300 * time.Millisecond, handoffs: 30, contend: 500 * time.Millisecond,
		settle: 500 * time.Millisecond, watch: time.Second, waiters: 20, locks: 2000, killed: 2 * time.Second,
		growing: 500 * time.Millisecond, held: 6 * time.Second, kept: 6 * time.Second, waiting: []int{1, 10, 100}, holding: []int{1, 100, 10_000}, processes: []int{1, 4, 16},
	}
)

// stage is one measurement of one contender: a server of its own, and workers.
type stage struct {
	context.Context
	effort
	contender
	*server
	workers    []*worker
	ttl        time.Duration
	renew      bool
	clientsCPU int
}

// scenario is what the contenders are compared in.
type scenario struct {
	name, title string
	measure     func(*stage) (figures, error)
}

var scenarios = []scenario{
	{"cycle", "uncontended, one lock", func(s *stage) (figures, error) { return s.uncontended(false) }},
	{"cycle-names", "uncontended, another lock each time", func(s *stage) (figures, error) { return s.uncontended(true) }},
	{"handoff", "hand-off to another process", (*stage).handOff},
	{"contend-1x64", "64 goroutines of one process", func(s *stage) (figures, error) { return s.contended(1, 64) }},
	{"contend-4x16", "16 goroutines in each of 4 processes", func(s *stage) (figures, error) { return s.contended(4, 16) }},
	{"contend-8x1", "one goroutine in each of 8 processes", func(s *stage) (figures, error) { return s.contended(8, 1) }},
	{"waiting", "waiting", (*stage).wait},
	{"many", "many locks", (*stage).many},
	{"killed", "the owner is killed", (*stage).kill9},
}

// run carries a measurement out, from the server's start to its end.
func run(ctx context.Context, c contender, e effort, pin bool, measure func(*stage) (figures, error)) (figures, error) {
	serverCPU, clientsCPU := -1, -1
	if pin {
		serverCPU, clientsCPU = processors()
	}
	server, err := startServer(ctx, c, serverCPU)
	if err != nil {
		return nil, err
	}
	defer server.stop()
	s := &stage{Context: ctx, effort: e, contender: c, server: server, ttl: 30 * time.Second, clientsCPU: clientsCPU}
	defer func() {
		for _, w := range s.workers {
			w.kill()
		}
	}()
	return measure(s)
}

// start starts processes with some clients in each. First is the number of their first client of all.
func (s *stage) start(processes, clients, first, all int) ([]*worker, error) {
	var some []*worker
	for i := range processes {
		w, err := startWorker(role{
			Contender: s.name, Dir: s.dir, Addr: s.addr, TTL: s.ttl, Renew: s.renew,
			First: first + i*clients, Clients: clients, All: all,
		}, s.clientsCPU)
		if err != nil {
			return nil, err
		}
		some, s.workers = append(some, w), append(s.workers, w)
	}
	for _, w := range some {
		if _, err := w.hear(2 * time.Minute); err != nil {
			return nil, err
		}
	}
	return some, nil
}

// ask gives an order and waits for its answer, longer if it is about many locks.
func (s *stage) ask(w *worker, o order) (answer, error) {
	if err := w.tell(o); err != nil {
		return answer{}, err
	}
	return w.hear(o.For + 30*time.Second + time.Duration(o.Count)*time.Millisecond)
}

// pause lets time pass for those that are measured, unless the program is to end.
func (s *stage) pause(d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-s.Done():
		return s.Err()
	}
}

func (s *stage) uncontended(names bool) (figures, error) {
	ws, err := s.start(1, 1, 0, 1)
	if err != nil {
		return nil, err
	}
	a, err := s.ask(ws[0], order{Do: "cycle", Name: "invoice", Names: names, For: s.cycles})
	return a.Figures, err
}

// handOff measures from before the owner's Unlock until the other process has the lock,
// which by then has been waiting for some milliseconds.
func (s *stage) handOff() (figures, error) {
	ws, err := s.start(2, 1, 0, 2)
	if err != nil {
		return nil, err
	}
	owner, waiter := ws[0], ws[1]
	if _, err := s.ask(owner, order{Do: "lock", Name: "invoice"}); err != nil {
		return nil, err
	}
	const unmeasured = 5
	var took []time.Duration
	for i := range s.handoffs + unmeasured {
		if err := waiter.tell(order{Do: "lock", Name: "invoice"}); err != nil {
			return nil, err
		}
		// Where polls fall must not depend on when the owner unlocks.
		if err := s.pause(5*time.Millisecond + time.Duration(rand.Int64N(int64(2*time.Millisecond)))); err != nil {
			return nil, err
		}
		from, err := s.ask(owner, order{Do: "unlock"})
		if err != nil {
			return nil, err
		}
		to, err := waiter.hear(30 * time.Second)
		if err != nil {
			return nil, err
		}
		if i >= unmeasured {
			took = append(took, to.At.Sub(from.At))
		}
		owner, waiter = waiter, owner
	}
	slices.Sort(took)
	return figures{
		"handoffs": float64(len(took)),
		"p50":      took[len(took)/2].Seconds(),
		"p99":      took[len(took)*99/100].Seconds(),
	}, nil
}

// contended has goroutines of processes lock and unlock one lock as fast as they can.
func (s *stage) contended(processes, goroutines int) (figures, error) {
	ws, err := s.start(processes, 1, 0, processes)
	if err != nil {
		return nil, err
	}
	return s.race(ws, order{Do: "contend", Name: "invoice", Goroutines: goroutines, For: s.contend}, nil)
}

// race gives all workers one order and adds up what they answer. If there is an owner,
// it unlocks when the others have been waiting for a while, and only what comes then counts.
func (s *stage) race(ws []*worker, o order, release func() error) (figures, error) {
	f, waits := figures{}, histogram{}
	before, err := s.spent(s)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	for _, w := range ws {
		if err := w.tell(o); err != nil {
			return nil, err
		}
	}
	if release != nil {
		if err := release(); err != nil {
			return nil, err
		}
		if before, err = s.spent(s); err != nil {
			return nil, err
		}
		f["seconds"] = o.For.Seconds() - before.at.Sub(began).Seconds()
	} else {
		f["seconds"] = o.For.Seconds()
	}
	if err := s.pause(time.Until(began.Add(o.For))); err != nil {
		return nil, err
	}
	after, err := s.spent(s)
	if err != nil {
		return nil, err
	}
	first := ""
	for i, w := range ws {
		a, err := w.hear(2 * time.Minute)
		if err != nil {
			return nil, err
		}
		if first == "" {
			first = a.Trouble
		}
		for _, sum := range []string{"leases", "overlaps", "failed"} {
			f[sum] += a.Figures[sum]
		}
		for _, greatest := range []string{"longest", "most"} {
			f[greatest] = max(f[greatest], a.Figures[greatest])
		}
		if i == 0 || a.Figures["least"] < f["least"] {
			f["least"] = a.Figures["least"]
		}
		waits.add(a.Waits)
	}
	// An overloaded machine makes single commands late, and that is not what is compared.
	if f["failed"] > f["leases"]/100 {
		return nil, fmt.Errorf("%.0f calls failed beside %.0f leases; the first: %s", f["failed"], f["leases"], first)
	}
	did := after.since(before)
	f["rate"] = f["leases"] / f["seconds"]
	if f["leases"] > 0 {
		f["each"] = f["seconds"] / f["leases"]
		f["requests"] = did.requests / f["leases"]
		f["server"] = did.cpu.Seconds() / f["leases"]
		f["p99"] = waits.quantile(.99).Seconds()
	}
	return f, nil
}

// wait measures what 200 waiters cost while the lock is held.
func (s *stage) wait() (figures, error) {
	s.renew = true
	ws, err := s.start(11, 1, 0, 11)
	if err != nil {
		return nil, err
	}
	return s.crowd(ws[0], ws[1:], 1, s.waiters, s.settle, 0)
}

// crowd measures those that wait behind an owner, and then, if after is not 0, how fast they
// get through once it has unlocked.
func (s *stage) crowd(owner *worker, others []*worker, clients, goroutines int, settle, after time.Duration) (figures, error) {
	if _, err := s.ask(owner, order{Do: "lock", Name: "invoice"}); err != nil {
		return nil, err
	}
	var idle figures
	release := func() error {
		if err := s.calm(settle, len(others)*clients*goroutines); err != nil {
			return err
		}
		before, err := s.spent(s)
		if err != nil {
			return err
		}
		if err := s.pause(s.watch); err != nil {
			return err
		}
		end, err := s.spent(s)
		if err != nil {
			return err
		}
		did, seconds := end.since(before), end.at.Sub(before.at).Seconds()
		idle = figures{"waiting-requests": did.requests / seconds, "waiting-server": did.cpu.Seconds() / seconds}
		_, err = s.ask(owner, order{Do: "unlock"})
		return err
	}
	o := order{Do: "contend", Name: "invoice", Goroutines: goroutines, For: settle + s.watch + max(after, 200*time.Millisecond)}
	f, err := s.race(others, o, release)
	if err != nil {
		return nil, err
	}
	maps.Copy(f, idle)
	return f, nil
}

// calm waits until those that wait have all asked for the lock: until they send little, or for
// as long as they may take. Pollers send as much as before.
func (s *stage) calm(most time.Duration, waiters int) error {
	const look = 500 * time.Millisecond
	end := time.Now().Add(most)
	last, err := s.spent(s)
	if err != nil {
		return err
	}
	for quiet := 0; quiet < 2; {
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		if err := s.pause(min(look, left)); err != nil {
			return err
		}
		now, err := s.spent(s)
		if err != nil {
			return err
		}
		if quiet++; now.since(last).requests > float64(waiters)*look.Seconds()/2 {
			quiet = 0
		}
		last = now
	}
	return nil
}

// many measures locks that one process holds at once.
func (s *stage) many() (figures, error) {
	s.renew = true
	return s.hold(s.locks, 0)
}

// hold takes locks, keeps them for a time and gives them back.
func (s *stage) hold(locks int, keep time.Duration) (figures, error) {
	ws, err := s.start(1, 1, 0, 1)
	if err != nil {
		return nil, err
	}
	ask := func(do string) (figures, error) {
		a, err := s.ask(ws[0], order{Do: do, Name: "invoice", Count: locks})
		return a.Figures, err
	}
	// Connections, buffers and goroutines that all locks share are no part of one.
	if _, err := ask("warm"); err != nil {
		return nil, err
	}
	before, err := s.spent(s)
	if err != nil {
		return nil, err
	}
	took, err := ask("take")
	if err != nil {
		return nil, err
	}
	held, err := s.spent(s)
	if err != nil {
		return nil, err
	}
	n := float64(locks)
	f := figures{"rate": n / took["seconds"], "each": took["seconds"] / n, "memory": took["memory"]}
	if s.rdb != nil {
		f["keys"] = (held.keys - before.keys) / n
		f["redis"] = (held.dataset - before.dataset) / n
	}
	if keep > 0 {
		if err := s.pause(keep); err != nil {
			return nil, err
		}
		kept, err := s.spent(s)
		if err != nil {
			return nil, err
		}
		did, seconds := kept.since(held), kept.at.Sub(held.at).Seconds()
		f["holding-requests"] = did.requests / seconds
		f["holding-server"] = did.cpu.Seconds() / seconds
	}
	gave, err := ask("give")
	if err != nil {
		return nil, err
	}
	f["returned"] = gave["locks"]
	return f, nil
}

// kill9 measures how long after the end of a killed owner's TTL its successor is inside.
func (s *stage) kill9() (figures, error) {
	s.renew, s.ttl = true, s.killed
	ws, err := s.start(2, 1, 0, 2)
	if err != nil {
		return nil, err
	}
	if _, err := s.ask(ws[0], order{Do: "lock", Name: "invoice"}); err != nil {
		return nil, err
	}
	if err := ws[1].tell(order{Do: "lock", Name: "invoice"}); err != nil {
		return nil, err
	}
	// It may have renewed the lock long ago or just now.
	if err := s.pause(s.ttl/4 + time.Duration(rand.Int64N(int64(s.ttl/2)))); err != nil {
		return nil, err
	}
	_ = ws[0].cmd.Process.Kill()
	_ = ws[0].cmd.Wait() // no command of its is under way any more
	asked := time.Now()
	left, err := s.left(s, "invoice")
	if err != nil {
		return nil, err
	}
	a, err := ws[1].hear(s.ttl + 30*time.Second)
	if err != nil {
		return nil, err
	}
	return figures{"after": a.At.Sub(asked.Add(left)).Seconds(), "left": left.Seconds()}, nil
}
