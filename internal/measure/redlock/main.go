// Command redlock measures locks on a quorum of five servers beside redsync on the same five,
// and beside a single server, in one run. It is a module of its own, so that redsync is no
// dependency of the library:
//
//	cd internal/measure/redlock && go run . [-seconds 3] [-rtt 0,500us,1ms,600us-1400us] [-only uncontended,handoff,contended,processes] [-profile file]
//
// Clients have separate connections. In the first three parts they are in one process; in the
// last each is a process of its own. Everything is measured at each distance of -rtt (see
// distance.go); at 0 the clients are connected directly to the servers. The program ends by
// printing the table of docs/redlock.md. Read ratios, not times.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/measure/figures"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

var (
	profile = flag.String("profile", "", "file for a CPU profile of this process")
	seconds = flag.Float64("seconds", 3, "for how long each case runs")
	only    = flag.String("only", "uncontended,handoff,processes", "what is measured; contended is 8 clients of one process")
	rtts    = flag.String("rtt", "0,500us,1ms,600us-1400us", "the times that a network between clients and servers adds to a round trip; in a range, another one for each server")
)

func main() {
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	var err error
	if text := os.Getenv(workerVariable); text != "" {
		err = work(text)
	} else if text := os.Getenv(proxyVariable); text != "" {
		err = proxy(text)
	} else {
		flag.Parse()
		err = measure()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// servers are the five that all locks are on.
type servers struct {
	all      []*redistest.Instance
	rdbs     []*redis.Client // for questions about them, in the order of all
	near     []string        // their own addresses
	addrs    []string        // the addresses that lockers use: those of far, if it is set
	far      *proxies
	distance distance // what far adds
	table    table
}

func (s *servers) start(n int) error {
	for range n {
		in, err := redistest.Start()
		if err != nil {
			return err
		}
		rdb := in.Client()
		s.all, s.rdbs, s.near = append(s.all, in), append(s.rdbs, rdb), append(s.near, in.Addr)
		// The mark is old, so the server is not in quarantine and may vote.
		if err := rdb.Set(context.Background(), protocol.MarkKey(""), "1", 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *servers) close() {
	if s.far != nil {
		s.far.end()
	}
	for _, in := range s.all {
		in.Close()
	}
}

// cpu returns the processor time that the servers have used. A server that does not answer
// counts as one that used none.
func (s *servers) cpu() (sum time.Duration) {
	for _, rdb := range s.rdbs {
		if used, err := figures.ProcessorTime(context.Background(), rdb); err == nil {
			sum += used
		}
	}
	return sum
}

// commands returns how many commands the servers have run, those within scripts included.
func (s *servers) commands() (n int64) {
	for _, rdb := range s.rdbs {
		tally, err := redistest.Calls(context.Background(), rdb)
		if err == nil {
			n += tally.Total()
		}
	}
	return n
}

func measure() error {
	some, err := chosen(*only)
	if err != nil {
		return err
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	s := &servers{}
	defer s.close()
	if err := s.start(5); err != nil {
		return err
	}
	for text := range strings.SplitSeq(*rtts, ",") {
		d, err := parseDistance(text)
		if err != nil {
			return err
		}
		if err := s.at(d); err != nil {
			return err
		}
		for _, p := range some {
			if err := p.measure(s); err != nil {
				return err
			}
		}
	}
	fmt.Printf("\n%v", &s.table)
	return nil
}

// part is one thing to measure.
type part struct {
	name    string
	measure func(*servers) error
}

var parts = []part{
	{"uncontended", uncontended},
	{"handoff", inOneProcess},
	{"contended", contendedInOneProcess},
	{"processes", betweenProcesses},
}

// chosen returns the parts that are listed in only, in the order in which they are measured.
func chosen(only string) ([]part, error) {
	listed := strings.Split(only, ",")
	for _, name := range listed {
		if !slices.ContainsFunc(parts, func(p part) bool { return p.name == name }) {
			return nil, fmt.Errorf("-only: there is no part %q; there are uncontended, handoff, contended, processes", name)
		}
	}
	return slices.DeleteFunc(slices.Clone(parts), func(p part) bool { return !slices.Contains(listed, p.name) }), nil
}

// contender is a lock that nobody else wants, and what it has cost in a round.
type contender struct {
	kind        string
	l           locker
	locks, both []time.Duration // until Lock returned, and until Unlock did
	allocs      uint64
	cpu, served time.Duration // of servers and client, and of the servers alone
	commands    int64
}

// uncontended measures a lock that nobody else wants: locked again at once, and after a pause.
func uncontended(s *servers) error {
	var cases []*contender
	defer func() {
		for _, c := range cases {
			c.l.close()
		}
	}()
	for _, kind := range []string{onOne, onQuorum, byRedsync} {
		l, err := open(kind, "free:"+kind, s.addrs)
		if err != nil {
			return err
		}
		cases = append(cases, &contender{kind: kind, l: l})
	}
	cases = append(cases, &contender{kind: "floor: EVALSHA", l: openFloor(s.addrs)})
	for _, c := range cases { // makes the connections
		for range 50 {
			c.l.lock()()
		}
	}
	s.free(cases, "1 ms apart", time.Millisecond)
	s.free(cases, "one after the other", 0)
	return nil
}

// free measures three rounds with a pause before each lock, and fills the table's rows of them.
func (s *servers) free(cases []*contender, way string, pause time.Duration) {
	fmt.Printf("uncontended, one client locks and unlocks, %s\n", way)
	five, redsync, floor := cases[1], cases[2], cases[3]
	var lock, cycle, cpu []float64
	overFloor, commands := map[string][]float64{}, map[string][]float64{}
	for round := range 3 {
		for _, c := range cases {
			*c = contender{kind: c.kind, l: c.l}
		}
		// In turns, so that whatever else the machine does affects all.
		for until := time.Now().Add(time.Duration(*seconds * float64(time.Second))); time.Now().Before(until); {
			for _, c := range cases {
				c.run(s, 50, pause)
			}
		}
		for _, c := range cases {
			n := time.Duration(len(c.both))
			fmt.Printf("  round %d %-20s lock p50 %v p99 %v, cycle p50 %v, CPU of servers and client %v, of the servers %v, allocations %.0f\n",
				round+1, c.kind, percentile(c.locks, 50), percentile(c.locks, 99), percentile(c.both, 50),
				(c.cpu / n).Round(time.Microsecond), (c.served / n).Round(time.Microsecond), float64(c.allocs)/float64(n))
		}
		lock = append(lock, figures.Ratio(percentile(five.locks, 50), percentile(redsync.locks, 50)))
		cycle = append(cycle, figures.Ratio(percentile(five.both, 50), percentile(redsync.both, 50)))
		cpu = append(cpu, figures.Ratio(five.cpu/time.Duration(len(five.both)), redsync.cpu/time.Duration(len(redsync.both))))
		for _, c := range []*contender{five, redsync} {
			overFloor[c.kind] = append(overFloor[c.kind], figures.Ratio(percentile(c.both, 50), percentile(floor.both, 50)))
			commands[c.kind] = append(commands[c.kind], float64(c.commands)/float64(len(c.both)*len(s.near)))
		}
		fmt.Printf("  round %d quorum, redsync = 1: lock %.2f, cycle %.2f, CPU %.2f\n", round+1, lock[round], cycle[round], cpu[round])
	}
	s.table.set("lock and unlock a free lock "+way+", redsync = 1", s.distance, "%s", spread(cycle))
	s.table.set("the same until `Lock` returns, "+way, s.distance, "%s", spread(lock))
	if pause > 0 {
		s.table.set("the same, processor time of client and servers", s.distance, "%s", spread(cpu))
		s.table.set("the same as a multiple of an empty script on all servers; redsync", s.distance, "%.1f; %.1f",
			figures.Median(overFloor[onQuorum]), figures.Median(overFloor[byRedsync]))
		s.table.set("commands that it runs on each server, within scripts or without; redsync", s.distance, "%.0f; %.0f",
			figures.Median(commands[onQuorum]), figures.Median(commands[byRedsync]))
	}
}

// run locks and unlocks n times with a pause before each, and adds what that costs.
func (c *contender) run(s *servers, n int, pause time.Duration) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	own, spent, ran := ownCPU(), s.cpu(), s.commands()
	for range n {
		time.Sleep(pause)
		began := time.Now()
		unlock := c.l.lock()
		c.locks = append(c.locks, time.Since(began))
		unlock()
		c.both = append(c.both, time.Since(began))
	}
	time.Sleep(time.Millisecond) // until commands that the last cycle did not wait for have ended
	c.commands += s.commands() - ran
	spent = s.cpu() - spent
	c.served += spent
	c.cpu += spent + ownCPU() - own
	runtime.ReadMemStats(&after)
	c.allocs += after.Mallocs - before.Mallocs
}

// inOneProcess measures hand-offs between two clients of this process.
func inOneProcess(s *servers) error {
	fmt.Println("hand-off between two clients: from the call of Unlock to the return of Lock")
	var ratios []float64
	for round := range 3 {
		kinds := []string{onOne, onQuorum}
		var pairs [][2]locker
		for _, kind := range kinds {
			var pair [2]locker
			for i := range pair {
				l, err := open(kind, "hand:"+kind, s.addrs)
				if err != nil {
					return err
				}
				pair[i] = l
			}
			pairs = append(pairs, pair)
		}
		times := make([][]time.Duration, len(kinds))
		for range 20 {
			for i, pair := range pairs {
				times[i] = append(times[i], handoffs(pair, 20, s.distance.farthest)...)
			}
		}
		for _, pair := range pairs {
			pair[0].close()
			pair[1].close()
		}
		single, five := percentile(times[0], 50), percentile(times[1], 50)
		ratios = append(ratios, figures.Ratio(five, single))
		fmt.Printf("  round %d p50: one server %v, quorum of five %v, %.2f times\n", round+1, single, five, float64(five)/float64(single))
	}
	s.table.set("hand-off between two clients of one process, as a multiple of one server's", s.distance, "%s", spread(ratios))
	return nil
}

// untilItWaits is the time after which a client is sure to be in the servers' queues.
const untilItWaits = 3 * time.Millisecond

// handoffs measures n hand-offs to the other client, which is already waiting.
func handoffs(pair [2]locker, n int, distance time.Duration) []time.Duration {
	var times []time.Duration
	unlock := pair[0].lock()
	pairOf := func(i int) locker { return pair[(i+1)%2] }
	for i := range n {
		type entered struct {
			at     time.Time
			unlock func()
		}
		ch := make(chan entered, 1)
		go func() {
			u := pairOf(i).lock()
			ch <- entered{time.Now(), u}
		}()
		time.Sleep(untilItWaits + 2*distance)
		began := time.Now()
		go unlock()
		e := <-ch
		times = append(times, e.at.Sub(began))
		unlock = e.unlock
	}
	unlock()
	return times[n/10:]
}

// contendedInOneProcess measures 8 clients of this process.
func contendedInOneProcess(s *servers) error {
	fmt.Println("contended: 8 clients lock and unlock as fast as they can")
	kinds := []string{onOne, onQuorum, byRedsync, byRedsync2ms}
	crowds := map[string][]locker{}
	for _, kind := range kinds {
		for range 8 {
			l, err := open(kind, "crowd:"+kind, s.addrs)
			if err != nil {
				return err
			}
			l.lock()()
			defer l.close()
			crowds[kind] = append(crowds[kind], l)
		}
	}
	for round := range 3 {
		for _, kind := range kinds {
			crowd := crowds[kind]
			before, cpu1, cpu2 := s.commands(), s.cpu(), ownCPU()
			counts := make([]int, len(crowd))
			var wg sync.WaitGroup
			until := time.Now().Add(time.Duration(*seconds * float64(time.Second)))
			for i, l := range crowd {
				wg.Go(func() {
					for time.Now().Before(until) {
						unlock := l.lock()
						counts[i]++
						unlock()
					}
				})
			}
			wg.Wait()
			n := 0
			for _, each := range counts {
				n += each
			}
			cpu1, cpu2 = s.cpu()-cpu1, ownCPU()-cpu2
			spent := s.commands() - before
			each := time.Duration(max(n, 1))
			fmt.Printf("  round %d %-20s %6.0f leases/s, turns %v to %v, %5.1f commands a lease and those in scripts, CPU a lease: servers %v, clients %v\n",
				round+1, kind, float64(n)/(*seconds), slices.Min(counts), slices.Max(counts), float64(spent)/float64(max(n, 1)),
				(cpu1 / each).Round(time.Microsecond), (cpu2 / each).Round(time.Microsecond))
		}
	}
	return nil
}

// percentile returns a percentile in whole microseconds.
func percentile(all []time.Duration, percent int) time.Duration {
	return figures.Quantile(all, float64(percent)/100).Round(time.Microsecond)
}
