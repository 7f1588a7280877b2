// Command redlock measures locks on a quorum of five servers beside redsync on the same five,
// and beside a single server, in one run. It is a module of its own, so that redsync is no
// dependency of the library:
//
//	cd internal/measure/redlock && go run . [-seconds 3] [-only uncontended,handoff,contended,processes] [-profile file]
//
// Clients have separate connections. In the first three parts they are in one process; in the
// last each is a process of its own. Read ratios, not times.
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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

var (
	profile = flag.String("profile", "", "file for a CPU profile of this process")
	seconds = flag.Float64("seconds", 3, "for how long each case runs")
	only    = flag.String("only", "uncontended,handoff,contended,processes", "what is measured")
)

func main() {
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	var err error
	if text := os.Getenv(workerVariable); text != "" {
		err = work(text)
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
	all   []*redistest.Instance
	rdbs  []*redis.Client // to ask them
	addrs []string
}

func (s *servers) start(n int) error {
	for range n {
		in, err := redistest.Start()
		if err != nil {
			return err
		}
		rdb := in.Client()
		s.all, s.rdbs, s.addrs = append(s.all, in), append(s.rdbs, rdb), append(s.addrs, in.Addr)
		// It has had its data for long: it may vote.
		if err := rdb.Set(context.Background(), "leased:quorum:mark", "1", 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *servers) close() {
	for _, in := range s.all {
		in.Close()
	}
}

// cpu is the processor time that the servers have used.
func (s *servers) cpu() (sum time.Duration) {
	for _, rdb := range s.rdbs {
		text, _ := rdb.Info(context.Background(), "cpu").Result()
		for line := range strings.SplitSeq(text, "\r\n") {
			k, v, _ := strings.Cut(line, ":")
			if k == "used_cpu_sys" || k == "used_cpu_user" {
				f, _ := strconv.ParseFloat(v, 64)
				sum += time.Duration(f * float64(time.Second))
			}
		}
	}
	return sum
}

// commands is how many the servers have run, those within scripts included.
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
	for _, part := range []struct {
		name    string
		measure func(*servers) error
	}{
		{"uncontended", uncontended},
		{"handoff", inOneProcess},
		{"contended", contendedInOneProcess},
		{"processes", betweenProcesses},
	} {
		if !slices.Contains(strings.Split(*only, ","), part.name) {
			continue
		}
		if err := part.measure(s); err != nil {
			return err
		}
	}
	return nil
}

// uncontended measures a lock that nobody else wants: locked again at once, and at rest.
func uncontended(s *servers) error {
	type contender struct {
		kind        string
		l           locker
		locks, both []time.Duration
		allocs      uint64
		cpu         time.Duration
	}
	var cases []*contender
	for _, kind := range []string{onOne, onQuorum, byRedsync} {
		l, err := open(kind, "free:"+kind, s.addrs)
		if err != nil {
			return err
		}
		cases = append(cases, &contender{kind: kind, l: l})
	}
	cases = append(cases, &contender{kind: "floor: EVALSHA", l: openFloor(s.addrs)})
	for _, c := range cases { // connects
		for range 50 {
			c.l.lock()()
		}
	}
	for _, way := range []struct {
		name  string
		pause time.Duration
	}{{"one after the other", 0}, {"1 ms apart", time.Millisecond}} {
		fmt.Printf("uncontended, one client locks and unlocks, %s\n", way.name)
		for round := range 3 {
			for _, c := range cases {
				c.locks, c.both, c.allocs, c.cpu = nil, nil, 0, 0
			}
			// In turns, so that what else the machine does hits all.
			for until := time.Now().Add(time.Duration(*seconds * float64(time.Second))); time.Now().Before(until); {
				for _, c := range cases {
					var before, after runtime.MemStats
					runtime.ReadMemStats(&before)
					spent := ownCPU() + s.cpu()
					for range 50 {
						time.Sleep(way.pause)
						began := time.Now()
						unlock := c.l.lock()
						c.locks = append(c.locks, time.Since(began))
						unlock()
						c.both = append(c.both, time.Since(began))
					}
					time.Sleep(time.Millisecond) // what is left over of the last one ends
					c.cpu += ownCPU() + s.cpu() - spent
					runtime.ReadMemStats(&after)
					c.allocs += after.Mallocs - before.Mallocs
				}
			}
			for _, c := range cases {
				n := len(c.both)
				fmt.Printf("  round %d %-20s lock p50 %v p99 %v, cycle p50 %v, CPU of servers and client %v, allocations %.0f\n", round+1, c.kind,
					at(c.locks, 50), at(c.locks, 99), at(c.both, 50), (c.cpu / time.Duration(n)).Round(time.Microsecond), float64(c.allocs)/float64(n))
			}
			fmt.Printf("  round %d quorum, redsync = 1: lock %.2f, cycle %.2f\n", round+1,
				float64(at(cases[1].locks, 50))/float64(at(cases[2].locks, 50)), float64(at(cases[1].both, 50))/float64(at(cases[2].both, 50)))
		}
	}
	return nil
}

// inOneProcess measures hand-offs between two clients of this process.
func inOneProcess(s *servers) error {
	fmt.Println("hand-off between two clients: from the call of Unlock to the return of Lock")
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
				times[i] = append(times[i], handoffs(pair, 20)...)
			}
		}
		single, five := at(times[0], 50), at(times[1], 50)
		fmt.Printf("  round %d p50: one server %v, quorum of five %v, %.2f times\n", round+1, single, five, float64(five)/float64(single))
	}
	return nil
}

// handoffs measures n hand-offs, of a lock that the other has begun to wait for.
func handoffs(pair [2]locker, n int) []time.Duration {
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
		time.Sleep(3 * time.Millisecond) // it waits by then
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

func at(all []time.Duration, percent int) time.Duration {
	slices.Sort(all)
	if len(all) == 0 {
		return 0
	}
	return all[len(all)*percent/100].Round(time.Microsecond)
}
