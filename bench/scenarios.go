package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/leasedmutex/leased"
)

// effort says how long and how large the measurements are.
type effort struct {
	rounds   int
	warm     time.Duration // how long a contender that is compiled at run time runs before it is measured
	cycles   time.Duration
	handoffs int
	contend  time.Duration
	settle   time.Duration // until waiters do nothing but wait
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
		rounds: 3, warm: 9 * time.Second, cycles: 700 * time.Millisecond, handoffs: 80, contend: time.Second,
		settle: 3 * time.Second, watch: 1500 * time.Millisecond, waiters: 20, locks: 10_000, killed: 2 * time.Second,
		growing: 1500 * time.Millisecond, held: 6 * time.Second, kept: 6 * time.Second, waiting: []int{1, 10, 100, 1000, 10_000},
		holding: []int{1, 10, 100, 1000, 10_000, 100_000}, processes: []int{1, 2, 4, 8, 16, 32, 64},
	}
	quick = effort{
		rounds: 1, warm: 3 * time.Second, cycles: 300 * time.Millisecond, handoffs: 30, contend: 500 * time.Millisecond,
		settle: time.Second, watch: time.Second, waiters: 20, locks: 2000, killed: 2 * time.Second,
		growing: 500 * time.Millisecond, held: 6 * time.Second, kept: 6 * time.Second, waiting: []int{1, 10, 100}, holding: []int{1, 100, 10_000}, processes: []int{1, 4, 16},
	}
)

// stage is one measurement of one contender: a server of its own, and workers.
type stage struct {
	ctx context.Context // of the one measurement
	effort
	contender
	*server
	workers    []*worker
	shared     bool // competing clients are in one process, and should be in several
	ttl        time.Duration
	renew      bool
	clientsCPU int
}

// scenario is a use of locks in which the contenders are compared.
type scenario struct {
	name, title string
	measure     func(*stage) (figures, error)
	free        bool // the system chooses the processors of all processes
}

var scenarios = []scenario{
	{"cycle", "uncontended, one lock", func(s *stage) (figures, error) { return s.uncontended(false) }, false},
	{"cycle-free", "uncontended, nothing bound", func(s *stage) (figures, error) { return s.uncontended(false) }, true},
	{"cycle-names", "uncontended, another lock each time", func(s *stage) (figures, error) { return s.uncontended(true) }, false},
	{"handoff", "hand-off to another process", (*stage).handOff, false},
	{"handoff-free", "hand-off, nothing bound", (*stage).handOff, true},
	{"contend-1x64", "64 goroutines of one process", func(s *stage) (figures, error) { return s.contended(1, 64) }, false},
	{"contend-4x16", "16 goroutines in each of 4 processes", func(s *stage) (figures, error) { return s.contended(4, 16) }, false},
	{"contend-8x1", "one goroutine in each of 8 processes", func(s *stage) (figures, error) { return s.contended(8, 1) }, false},
	{"readers-1x64", "readers and writers in one process", func(s *stage) (figures, error) { return s.readersAndWriters(1, 64) }, false},
	{"readers-4x16", "readers and writers in 4 processes", func(s *stage) (figures, error) { return s.readersAndWriters(4, 16) }, false},
	{"waiting", "waiting", (*stage).wait, false},
	{"many", "many locks", (*stage).many, false},
	{"killed", "the owner is killed", (*stage).kill9, false},
}

// run carries out a measurement, from the start of its server to the end of it.
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
	s := &stage{ctx: ctx, effort: e, contender: c, server: server, ttl: 30 * time.Second, clientsCPU: clientsCPU}
	defer func() {
		for _, w := range s.workers {
			w.kill()
		}
	}()
	f, err := measure(s)
	if s.shared && f != nil {
		f["shared"] = 1
	}
	return f, err
}

// start starts processes with some clients in each. The clients are numbered from first on; all is the
// number of clients in all processes.
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

// beside starts processes of a floor on the same server, one client in each, so that contender and
// floor can be measured alternately. There is none beside another floor, or on a server other than Redis.
func (s *stage) beside(floor string, processes int) ([]*worker, error) {
	if s.floor || s.rdb == nil {
		return nil, nil
	}
	c, err := find(floor)
	if err != nil {
		return nil, err
	}
	other := *s
	other.contender = c
	ws, err := other.start(processes, 1, 0, processes)
	s.workers = other.workers
	return ws, err
}

// turns is the number of parts into which a measurement is cut that alternates with the floor's. A
// disturbance of the machine lasts longer than one part, so it affects both.
const turns = 8

// contestants starts processes with some clients in each that compete for a lock. A contender whose
// processes are too large for that has all clients in one process.
func (s *stage) contestants(processes, clients, all int) ([]*worker, error) {
	if s.together && processes > 1 {
		s.shared = true
		processes, clients = 1, processes*clients
	}
	return s.start(processes, clients, 0, all)
}

// warmUp has workers that are compiled at run time do for a while what is measured afterwards.
func (s *stage) warmUp(ws []*worker, o order) error {
	if !s.warms {
		return nil
	}
	o.Name, o.For = "warm-up", s.warm
	for _, w := range ws {
		if err := w.tell(o); err != nil {
			return err
		}
	}
	for _, w := range ws {
		if _, err := w.hear(o.For + time.Minute); err != nil {
			return err
		}
	}
	return nil
}

// ask gives an order and waits for the answer, longer if the order is about many locks.
func (s *stage) ask(w *worker, o order) (answer, error) {
	if err := w.tell(o); err != nil {
		return answer{}, err
	}
	return w.hear(o.For + 30*time.Second + time.Duration(o.Count)*time.Millisecond)
}

// pause waits while the workers are measured, and returns early if the program has to end.
func (s *stage) pause(d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

func (s *stage) uncontended(names bool) (figures, error) {
	ws, err := s.start(1, 1, 0, 1)
	if err != nil {
		return nil, err
	}
	floor, err := s.beside("two commands", 1)
	if err != nil {
		return nil, err
	}
	o := order{Do: "cycle", Name: "invoice", Names: names, For: s.cycles / turns, Count: 200}
	if err := s.warmUp(ws, o); err != nil {
		return nil, err
	}
	parts, ratios := map[string][]float64{}, []float64(nil)
	for range turns {
		mine, err := s.ask(ws[0], o)
		if err != nil {
			return nil, err
		}
		for name, value := range mine.Figures {
			parts[name] = append(parts[name], value)
		}
		if floor != nil {
			its, err := s.ask(floor[0], o)
			if err != nil {
				return nil, err
			}
			ratios = append(ratios, mine.Figures["p50"]/its.Figures["p50"])
		}
		o.Count = 20
	}
	f := figures{}
	for name, values := range parts {
		f[name] = median(values)
	}
	if ratios != nil {
		f["p50"+ofFloor] = median(ratios)
	}
	return f, nil
}

// pair is two processes, one of which has the lock.
type pair struct{ owner, waiter *worker }

// passOn hands the lock to and fro between the two processes, and returns how long each hand-off took: from
// before the owner's Unlock until the other process, which has been waiting for some milliseconds, has the
// lock.
func (s *stage) passOn(p *pair, times int) ([]time.Duration, error) {
	var took []time.Duration
	for range times {
		if err := p.waiter.tell(order{Do: "lock", Name: "invoice"}); err != nil {
			return nil, err
		}
		// The pause is random, so that the Unlock does not always come at the same point between two polls.
		if err := s.pause(5*time.Millisecond + time.Duration(rand.Int64N(int64(2*time.Millisecond)))); err != nil {
			return nil, err
		}
		from, err := s.ask(p.owner, order{Do: "unlock"})
		if err != nil {
			return nil, err
		}
		to, err := p.waiter.hear(30 * time.Second)
		if err != nil {
			return nil, err
		}
		took = append(took, to.At.Sub(from.At))
		p.owner, p.waiter = p.waiter, p.owner
	}
	return took, nil
}

func (s *stage) handOff() (figures, error) {
	ws, err := s.start(2, 1, 0, 2)
	if err != nil {
		return nil, err
	}
	floor, err := s.beside("PUBLISH", 2)
	if err != nil {
		return nil, err
	}
	if err := s.warmUp(ws, order{Do: "contend", Goroutines: 1}); err != nil {
		return nil, err
	}
	pairs := []*pair{{ws[0], ws[1]}}
	if floor != nil {
		pairs = append(pairs, &pair{floor[0], floor[1]})
	}
	for _, p := range pairs {
		if _, err := s.ask(p.owner, order{Do: "lock", Name: "invoice"}); err != nil {
			return nil, err
		}
		if _, err := s.passOn(p, 5); err != nil { // not measured: warms up
			return nil, err
		}
	}
	var all []time.Duration
	var ratios []float64
	for i := range turns {
		var middle [2]float64
		for j, p := range pairs {
			took, err := s.passOn(p, s.handoffs*(i+1)/turns-s.handoffs*i/turns)
			if err != nil {
				return nil, err
			}
			middle[j] = middleOf(took)
			if j == 0 {
				all = append(all, took...)
			}
		}
		if ratio := middle[0] / middle[1]; ratio > 0 && !math.IsInf(ratio, 0) {
			ratios = append(ratios, ratio)
		}
	}
	slices.Sort(all)
	f := figures{
		"handoffs": float64(len(all)),
		"p50":      all[len(all)/2].Seconds(),
		"p99":      all[len(all)*99/100].Seconds(),
	}
	if ratios != nil {
		f["p50"+ofFloor] = median(ratios)
	}
	return f, nil
}

// middleOf returns the median in seconds, 0 if there is none.
func middleOf(took []time.Duration) float64 {
	if len(took) == 0 {
		return 0
	}
	took = slices.Sorted(slices.Values(took))
	return took[len(took)/2].Seconds()
}

// contended has goroutines of several processes lock and unlock one lock as fast as they can.
func (s *stage) contended(processes, goroutines int) (figures, error) {
	return s.compete(processes, order{Do: "contend", Name: "invoice", Goroutines: goroutines, For: s.contend})
}

// readersAndWriters does the same with a lock for readers and writers, which nine of ten callers take for
// reading.
func (s *stage) readersAndWriters(processes, goroutines int) (figures, error) {
	f, err := s.compete(processes, order{Do: "contend", Name: "invoice", Goroutines: goroutines, Reads: 90, For: 2 * s.contend})
	if f != nil {
		f["reads"] /= f["seconds"]
	}
	return f, err
}

func (s *stage) compete(processes int, o order) (figures, error) {
	ws, err := s.contestants(processes, 1, processes)
	if err != nil {
		return nil, err
	}
	if err := s.warmUp(ws, o); err != nil {
		return nil, err
	}
	return s.race(ws, o, nil)
}

// race gives all workers the same order and adds up their answers. If release is not nil, there is an
// owner, whom release has unlock when the workers have been waiting for a while, and only what comes
// afterwards counts.
func (s *stage) race(ws []*worker, o order, release func() error) (figures, error) {
	f, waits := figures{}, histogram{}
	before, err := s.spent(s.ctx)
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
		if before, err = s.spent(s.ctx); err != nil {
			return nil, err
		}
		f["seconds"] = o.For.Seconds() - before.at.Sub(began).Seconds()
	} else {
		f["seconds"] = o.For.Seconds()
	}
	if f["seconds"] < 0.1 {
		return nil, fmt.Errorf("the machine was too slow: of %v there was no time left", o.For)
	}
	if err := s.pause(time.Until(began.Add(o.For))); err != nil {
		return nil, err
	}
	after, err := s.spent(s.ctx)
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
		for _, sum := range []string{"leases", "reads", "overlaps", "failed"} {
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
	// An overloaded machine makes single commands fail, and that is not what is compared.
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
	owner, err := s.start(1, 1, 10, 11)
	if err != nil {
		return nil, err
	}
	others, err := s.contestants(10, 1, 11)
	if err != nil {
		return nil, err
	}
	s.watch *= 10 // a waiter of Leased asks every 3 s at most, and one question in fifteen seconds costs more than the others
	return s.crowd(owner[0], others, 10, s.waiters, s.settle, 0)
}

// crowd measures waiters behind an owner, some goroutines of each client, and then, if after is
// not 0, how fast they get the lock in turn once the owner has unlocked.
func (s *stage) crowd(owner *worker, others []*worker, clients, goroutines int, settle, after time.Duration) (figures, error) {
	if _, err := s.ask(owner, order{Do: "lock", Name: "invoice"}); err != nil {
		return nil, err
	}
	var idle figures
	release := func() error {
		if err := s.calm(settle, clients, clients*goroutines); err != nil {
			return err
		}
		before, err := s.spent(s.ctx)
		if err != nil {
			return err
		}
		if err := s.pause(s.watch); err != nil {
			return err
		}
		end, err := s.spent(s.ctx)
		if err != nil {
			return err
		}
		did, seconds := end.since(before), end.at.Sub(before.at).Seconds()
		idle = figures{"waiting-requests": did.requests / seconds, "waiting-server": did.cpu.Seconds() / seconds}
		_, err = s.ask(owner, order{Do: "unlock"})
		return err
	}
	o := order{Do: "contend", Name: "invoice", Goroutines: goroutines, For: settle + s.watch + max(after, 500*time.Millisecond)}
	f, err := s.race(others, o, release)
	if err != nil {
		return nil, err
	}
	maps.Copy(f, idle)
	return f, nil
}

// calm waits until all waiters have asked for the lock. Leased's Inspect shows when they have; the
// waiters of other libraries send little then, or go on polling, and are given most to get there.
func (s *stage) calm(most time.Duration, clients, waiters int) error {
	const look = 500 * time.Millisecond
	end := time.Now().Add(most)
	if s.name == ours {
		c, err := leased.New(s.rdb)
		if err != nil {
			return err
		}
		defer c.Close()
		for {
			info, err := c.Inspect(s.ctx, "invoice")
			if err != nil || info.Queue >= clients {
				return err
			}
			if time.Now().After(end) {
				return fmt.Errorf("after %v only %d of %d clients wait", most, info.Queue, clients)
			}
			if err := s.pause(look); err != nil {
				return err
			}
		}
	}
	last, err := s.spent(s.ctx)
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
		now, err := s.spent(s.ctx)
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
	// Connections, buffers and goroutines that all locks share are not part of the cost of a lock.
	if err := s.warmUp(ws, order{Do: "warm"}); err != nil {
		return nil, err
	}
	if _, err := ask("warm"); err != nil {
		return nil, err
	}
	before, err := s.spent(s.ctx)
	if err != nil {
		return nil, err
	}
	took, err := ask("take")
	if err != nil {
		return nil, err
	}
	held, err := s.spent(s.ctx)
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
		if err := s.forgetSlow(s.ctx); err != nil {
			return nil, err
		}
		if err := s.pause(keep); err != nil {
			return nil, err
		}
		longest, err := s.longest(s.ctx)
		if err != nil {
			return nil, err
		}
		f["longest-command"] = longest.Seconds()
		kept, err := s.spent(s.ctx)
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

// kill9 measures how long after the end of a killed owner's TTL its successor has the lock.
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
	// The pause is random, so that the last renewal can have been long ago or just now.
	if err := s.pause(s.ttl/4 + time.Duration(rand.Int64N(int64(s.ttl/2)))); err != nil {
		return nil, err
	}
	_ = ws[0].cmd.Process.Kill()
	_ = ws[0].cmd.Wait() // none of its commands is under way anymore
	asked := time.Now()
	left, err := s.left(s.ctx, "invoice")
	if err != nil {
		return nil, err
	}
	a, err := ws[1].hear(s.ttl + 30*time.Second)
	if err != nil {
		return nil, err
	}
	return figures{"after": a.At.Sub(asked.Add(left)).Seconds(), "left": left.Seconds()}, nil
}
