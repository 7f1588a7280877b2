// Command redlock measures locks on a quorum of five servers beside redsync on the same five,
// and beside a single server, in one run. It is a module of its own, so that redsync is no
// dependency of the library:
//
//	cd internal/measure/redlock && go run . [-seconds 3] [-profile file]
//
// The clients are in one process, with separate connections. Read ratios, not times.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

var profile = flag.String("profile", "", "file for a CPU profile")

var seconds = flag.Float64("seconds", 3, "for how long each case runs")

const servers = 5

// locker is a client that locks one name.
type locker interface {
	lock() (unlock func())
}

type ours struct {
	mu     *leased.Mutex
	client *leased.Client
}

func (o ours) lock() func() {
	o.mu.Lock()
	return o.mu.Unlock
}

type theirs struct {
	rs   *redsync.Redsync
	name string
	opts []redsync.Option
}

func (r theirs) lock() func() {
	for {
		m := r.rs.NewMutex(r.name, r.opts...)
		if m.Lock() == nil {
			return func() { _, _ = m.Unlock() }
		}
	}
}

// onFive is the least that a lock on all servers costs: a script that does nothing, sent from
// five goroutines, of which the third to return is waited for.
func onFive(connect func(*redistest.Instance) *redis.Client, all []*redistest.Instance) locker {
	f := floor{}
	for _, in := range all {
		f = append(f, connect(in))
	}
	return f
}

type floor []*redis.Client

var nothing = redis.NewScript("return 1")

func (f floor) lock() func() {
	f.send()
	return f.send
}

func (f floor) send() {
	done := make(chan error, len(f))
	for _, c := range f {
		go func() { done <- nothing.Run(context.Background(), c, []string{"floor"}).Err() }()
	}
	for range len(f)/2 + 1 {
		if err := <-done; err != nil {
			panic(err)
		}
	}
}

func main() {
	flag.Parse()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			_ = pprof.StartCPUProfile(f)
			defer pprof.StopCPUProfile()
		}
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var all []*redistest.Instance
	for range servers {
		in, err := redistest.Start()
		if err != nil {
			return err
		}
		defer in.Close()
		if err := redis.NewClient(in.Options()).Set(context.Background(), "leased:quorum:mark", "1", 0).Err(); err != nil {
			return err
		}
		all = append(all, in)
	}
	connect := func(in *redistest.Instance) *redis.Client {
		o := in.Options()
		o.ContextTimeoutEnabled = true
		return redis.NewClient(o)
	}
	var clients []*leased.Client
	onQuorum := func(name string) ours {
		var rdbs []redis.UniversalClient
		for _, in := range all {
			rdbs = append(rdbs, connect(in))
		}
		c, err := leased.NewQuorum(rdbs)
		if err != nil {
			panic(err)
		}
		clients = append(clients, c)
		return ours{c.Mutex(name), c}
	}
	onOne := func(name string) ours {
		c, err := leased.New(connect(all[0]))
		if err != nil {
			panic(err)
		}
		clients = append(clients, c)
		return ours{c.Mutex(name), c}
	}
	onRedsync := func(name string, opts ...redsync.Option) theirs {
		var pools []redsyncredis.Pool
		for _, in := range all {
			pools = append(pools, goredis.NewPool(connect(in)))
		}
		return theirs{redsync.New(pools...), name, opts}
	}
	// CPU time tells more than the clock on a machine that does other things, too.
	serverCPU := func() (sum time.Duration) {
		for _, in := range all {
			text, _ := in.Client().Info(context.Background(), "cpu").Result()
			for _, line := range strings.Split(text, "\r\n") {
				k, v, _ := strings.Cut(line, ":")
				if k == "used_cpu_sys" || k == "used_cpu_user" {
					f, _ := strconv.ParseFloat(v, 64)
					sum += time.Duration(f * float64(time.Second))
				}
			}
		}
		return sum
	}
	ownCPU := func() time.Duration {
		var ru syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
		return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	commands := func() (n int64) {
		for _, in := range all {
			tally, err := redistest.Calls(context.Background(), in.Client())
			if err == nil {
				n += tally.Total()
			}
		}
		return n
	}

	fmt.Println("uncontended, one client: lock and unlock")
	one, quorum, peer := onOne("free1"), onQuorum("freeq"), onRedsync("freer")
	for _, l := range []locker{one, quorum, peer} { // connects
		for range 50 {
			l.lock()()
		}
	}
	for round := range 3 {
		cases := []struct {
			name        string
			l           locker
			locks, both []time.Duration
		}{{name: "one server", l: one}, {name: "quorum of five", l: quorum}, {name: "redsync on five", l: peer}, {name: "floor: EVALSHA", l: onFive(connect, all)}}
		cases[3].l.lock()()
		// In turns, so that what else the machine does hits all.
		for until := time.Now().Add(time.Duration(*seconds * float64(time.Second))); time.Now().Before(until); {
			for i := range cases {
				c := &cases[i]
				for range 10 {
					began := time.Now()
					unlock := c.l.lock()
					c.locks = append(c.locks, time.Since(began))
					unlock()
					c.both = append(c.both, time.Since(began))
				}
				time.Sleep(time.Millisecond) // what is left over of the last one ends
			}
		}
		for _, c := range cases {
			fmt.Printf("  round %d %-16s lock p50 %v p99 %v, cycle p50 %v\n", round+1, c.name, at(c.locks, 50), at(c.locks, 99), at(c.both, 50))
		}
	}

	fmt.Println("hand-off between two clients: from the call of Unlock to the return of Lock")
	for round := range 3 {
		pairs := [][2]locker{{onOne("hand1"), onOne("hand1")}, {onQuorum("handq"), onQuorum("handq")}}
		var times [2][]time.Duration
		for range 20 {
			for i, pair := range pairs {
				times[i] = append(times[i], handoffs(pair, 20)...)
			}
		}
		single, five := at(times[0], 50), at(times[1], 50)
		fmt.Printf("  round %d p50: one server %v, quorum of five %v, %.2f times\n", round+1, single, five, float64(five)/float64(single))
	}

	fmt.Println("contended: 8 clients lock and unlock as fast as they can")
	for _, c := range []struct {
		name string
		make func() locker
	}{
		{"one server", func() locker { return onOne("crowd1") }},
		{"quorum of five", func() locker { return onQuorum("crowdq") }},
		{"redsync, defaults", func() locker { return onRedsync("crowdr") }},
		{"redsync, retry 2 ms", func() locker {
			return onRedsync("crowds", redsync.WithRetryDelay(2*time.Millisecond), redsync.WithTries(1<<30))
		}},
	} {
		var crowd []locker
		for range 8 {
			l := c.make()
			l.lock()()
			crowd = append(crowd, l)
		}
		before := commands()
		cpu1, cpu2 := serverCPU(), ownCPU()
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
		spent := commands() - before
		cpu1, cpu2 = serverCPU()-cpu1, ownCPU()-cpu2
		var own leased.Stats
		for _, l := range crowd {
			if o, ok := l.(ours); ok {
				st := o.client.Stats()
				own.Leases += st.Leases
				own.Direct += st.Direct
				own.Commands += st.Commands
			}
		}
		if own.Leases > 0 {
			fmt.Printf("  %-20s %.1f scripts sent a lease, %.1f%% of the leases by hand-off\n", "", float64(own.Commands)/float64(own.Leases), 100*float64(own.Direct)/float64(own.Leases))
		}
		each := time.Duration(max(n, 1))
		fmt.Printf("  %-20s %7.0f leases/s, turns %v to %v, %5.1f commands a lease and those in scripts, CPU a lease: servers %v, clients %v\n",
			c.name, float64(n)/(*seconds), slices.Min(counts), slices.Max(counts), float64(spent)/float64(max(n, 1)),
			(cpu1 / each).Round(time.Microsecond), (cpu2 / each).Round(time.Microsecond))
	}
	for _, c := range clients {
		_ = c.Close()
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

func at(all []time.Duration, percent int) time.Duration {
	slices.Sort(all)
	if len(all) == 0 {
		return 0
	}
	return all[len(all)*percent/100].Round(time.Microsecond)
}
