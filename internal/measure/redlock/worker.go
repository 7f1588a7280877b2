package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/measure/figures"
)

// A worker is this program, started once more: a process with one locker of each kind. It gets
// orders and answers them one after the other, each as a line of JSON. Instants are passed as
// wall time, which the processes of a machine share.

// workerVariable is the environment variable that makes this program a worker. It has the
// servers' addresses and the locks' name.
const workerVariable = "LEASED_REDLOCK_WORKER"

type role struct {
	Addrs []string
	Name  string
	Kinds []string
}

type order struct {
	Do   string // lock, unlock or contend
	Kind string
	From time.Time // contend: when it begins
	For  time.Duration
}

type answer struct {
	Failed   string
	At       time.Time // when Lock had returned, or Unlock was called
	Leases   int
	Attempts int64
	Sent     int64
	CPU      time.Duration
	Direct   int64 // leases that were handed over by a message
	Longest  time.Duration
}

type worker struct{ *child }

// startWorker returns a worker that is ready. With an error, too, it may return one, which has
// been started and has to be ended.
func startWorker(r role) (*worker, error) {
	c, err := startChild(workerVariable, r)
	if err != nil {
		return nil, err
	}
	w := &worker{c}
	_, err = w.hear() // it is ready
	return w, err
}

func startWorkers(n int, r role) (all []*worker, err error) {
	for range n {
		w, err := startWorker(r)
		if w != nil {
			all = append(all, w)
		}
		if err != nil {
			endAll(all)
			return nil, err
		}
	}
	return all, nil
}

func (w *worker) tell(o order) error {
	text, err := json.Marshal(o)
	if err == nil {
		_, err = w.in.Write(append(text, '\n'))
	}
	return err
}

func (w *worker) hear() (a answer, err error) {
	if err := w.out.Decode(&a); err != nil {
		return a, errors.Join(errors.New("a worker ended"), err)
	}
	if a.Failed != "" {
		return a, errors.New("a worker failed: " + a.Failed)
	}
	return a, nil
}

func (w *worker) ask(o order) (answer, error) {
	if err := w.tell(o); err != nil {
		return answer{}, err
	}
	return w.hear()
}

// endAll ends workers by closing their input.
func endAll(all []*worker) {
	for _, w := range all {
		w.end()
	}
}

// work is the main function of a worker.
func work(text string) error {
	var r role
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	lockers := map[string]locker{}
	for _, kind := range r.Kinds {
		l, err := open(kind, r.Name+kind, r.Addrs)
		if err != nil {
			return out.Encode(answer{Failed: err.Error()})
		}
		for range 20 { // makes the connections
			l.lock()()
		}
		lockers[kind] = l
	}
	if err := out.Encode(answer{}); err != nil {
		return err
	}
	var unlock func()
	for in := json.NewDecoder(os.Stdin); ; {
		var o order
		if err := in.Decode(&o); err != nil {
			return nil //nolint:nilerr // the parent is done
		}
		var a answer
		switch l := lockers[o.Kind]; {
		case l == nil:
			a.Failed = fmt.Sprintf("no such kind: %q", o.Kind)
		case o.Do == "lock":
			unlock = l.lock()
			a.At = time.Now()
		case o.Do == "unlock":
			a.At = time.Now()
			unlock()
		case o.Do == "contend":
			a = contend(l, o)
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

// contend locks and unlocks as fast as it can.
func contend(l locker, o order) (a answer) {
	own, isOurs := l.(ours)
	if isOurs {
		a.Direct = -own.client.Stats().Direct
	}
	time.Sleep(time.Until(o.From))
	a.Attempts, a.Sent, a.CPU = -attempts.Load(), -sent.Load(), -ownCPU()
	for until := o.From.Add(o.For); ; {
		began := time.Now()
		if !began.Before(until) {
			break
		}
		unlock := l.lock()
		a.Longest = max(a.Longest, time.Since(began))
		a.Leases++
		unlock()
	}
	a.Attempts, a.Sent, a.CPU = a.Attempts+attempts.Load(), a.Sent+sent.Load(), a.CPU+ownCPU()
	if isOurs {
		a.Direct += own.client.Stats().Direct
	}
	return a
}

// betweenProcesses measures hand-offs between two processes, and eight processes that contend.
func betweenProcesses(s *servers) error {
	fmt.Println("hand-off between two processes: from the call of Unlock to the return of Lock")
	pair, err := startWorkers(2, role{s.addrs, "pair:", []string{onOne, onQuorum}})
	if err != nil {
		return err
	}
	defer endAll(pair)
	var ratios []float64
	var both [][]time.Duration
	for round := range 3 {
		times := map[string][]time.Duration{}
		for range 20 { // in turns, so that whatever else the machine does affects both
			for _, kind := range []string{onOne, onQuorum} {
				some, err := passOn(pair, kind, 20, s.distance.farthest)
				if err != nil {
					return err
				}
				times[kind] = append(times[kind], some[2:]...)
			}
		}
		one, five := times[onOne], times[onQuorum]
		fmt.Printf("  round %d one server p50 %v p99 %v, quorum of five p50 %v p99 %v: %.2f times at p50\n", round+1,
			percentile(one, 50), percentile(one, 99), percentile(five, 50), percentile(five, 99), figures.Ratio(percentile(five, 50), percentile(one, 50)))
		ratios = append(ratios, figures.Ratio(percentile(five, 50), percentile(one, 50)))
		both = append(both, []time.Duration{percentile(five, 50), percentile(one, 50)})
	}
	s.table.set("hand-off to a waiter in another process, as a multiple of one server's", s.distance, "%s", spread(ratios))
	median := both[slices.Index(ratios, figures.Median(ratios))]
	s.table.set("the same; one server's", s.distance, "%s; %s", duration(median[0]), duration(median[1]))

	fmt.Println("contended: 8 processes lock and unlock as fast as they can")
	kinds := []string{onOne, onQuorum, byRedsync, byRedsync2ms}
	crowd, err := startWorkers(8, role{s.addrs, "crowd:", kinds})
	if err != nil {
		return err
	}
	defer endAll(crowd)
	seen := map[string][]contest{}
	for round := range 3 {
		for _, kind := range kinds {
			c, err := s.contended(crowd, kind, round+1)
			if err != nil {
				return err
			}
			seen[kind] = append(seen[kind], c)
		}
	}
	s.report(seen)
	return nil
}

// report fills the table with what 8 processes did.
func (s *servers) report(seen map[string][]contest) {
	five, redsync, polling := seen[onQuorum], seen[byRedsync], seen[byRedsync2ms]
	against := func(others []contest) string {
		var ratios []float64
		for i := range five {
			ratios = append(ratios, five[i].rate/others[i].rate)
		}
		return spread(ratios)
	}
	all := func(figure func(c contest) string) string {
		var texts []string
		for _, rounds := range [][]contest{five, redsync, polling} {
			slices.SortFunc(rounds, func(a, b contest) int { return cmp.Compare(a.rate, b.rate) })
			texts = append(texts, figure(rounds[len(rounds)/2]))
		}
		return strings.Join(texts, "; ")
	}
	s.table.set("8 processes that lock all the time: leases, redsync with its defaults = 1", s.distance, "%s", against(redsync))
	s.table.set("the same, redsync polling every 2 ms = 1", s.distance, "%s", against(polling))
	const of = "; redsync's; polling every 2 ms"
	s.table.set("leases a second"+of, s.distance, "%s", all(func(c contest) string { return fmt.Sprintf("%.0f", c.rate) }))
	s.table.set("leases of the process with the fewest and the most"+of, s.distance, "%s", all(func(c contest) string { return fmt.Sprintf("%d–%d", slices.Min(c.turns), slices.Max(c.turns)) }))
	s.table.set("longest wait"+of, s.distance, "%s", all(func(c contest) string { return duration(c.longest) }))
	s.table.set("attempts a lease"+of, s.distance, "%s", all(func(c contest) string { return fmt.Sprintf("%.2f", c.attempts) }))
	s.table.set("commands sent a lease"+of, s.distance, "%s", all(func(c contest) string { return fmt.Sprintf("%.0f", c.sent) }))
	s.table.set("the same, those within scripts counted"+of, s.distance, "%s", all(func(c contest) string { return fmt.Sprintf("%.0f", c.commands) }))
	s.table.set("processor time of a lease, servers and clients"+of, s.distance, "%s", all(func(c contest) string { return duration(c.cpu) }))
}

// passOn measures n hand-offs to the other process, which is already waiting.
func passOn(pair []*worker, kind string, n int, distance time.Duration) ([]time.Duration, error) {
	if _, err := pair[0].ask(order{Do: "lock", Kind: kind}); err != nil {
		return nil, err
	}
	var times []time.Duration
	for i := range n {
		has, waits := pair[i%2], pair[(i+1)%2]
		if err := waits.tell(order{Do: "lock", Kind: kind}); err != nil {
			return nil, err
		}
		time.Sleep(untilItWaits + 2*distance)
		left, err := has.ask(order{Do: "unlock", Kind: kind})
		if err != nil {
			return nil, err
		}
		entered, err := waits.hear()
		if err != nil {
			return nil, err
		}
		times = append(times, entered.At.Sub(left.At))
	}
	_, err := pair[n%2].ask(order{Do: "unlock", Kind: kind})
	return times, err
}

// contest is what 8 processes did in one round.
type contest struct {
	rate                     float64 // leases a second
	turns                    []int   // leases of each process
	longest                  time.Duration
	attempts, sent, commands float64 // per lease
	cpu                      time.Duration
}

// contended has all workers contend for a while.
func (s *servers) contended(crowd []*worker, kind string, round int) (c contest, err error) {
	length := time.Duration(*seconds * float64(time.Second))
	before, cpu := s.commands(), s.cpu()
	o := order{Do: "contend", Kind: kind, From: time.Now().Add(100 * time.Millisecond), For: length}
	for _, w := range crowd {
		if err := w.tell(o); err != nil {
			return c, err
		}
	}
	var sum answer
	var turns []int
	for _, w := range crowd {
		a, err := w.hear()
		if err != nil {
			return c, err
		}
		turns = append(turns, a.Leases)
		sum.Leases += a.Leases
		sum.Attempts += a.Attempts
		sum.Sent += a.Sent
		sum.CPU += a.CPU
		sum.Direct += a.Direct
		sum.Longest = max(sum.Longest, a.Longest)
	}
	cpu, spent := s.cpu()-cpu, s.commands()-before
	n := float64(max(sum.Leases, 1))
	voters := float64(len(s.addrs))
	if kind == onOne {
		voters = 1
	}
	each := time.Duration(max(sum.Leases, 1))
	fmt.Printf("  round %d %-20s %6.0f leases/s, turns %v to %v, longest wait %v, %.2f attempts a lease, %.1f commands a lease and those in scripts, %.1f%% by hand-off, CPU a lease: servers %v, clients %v\n",
		round, kind, n/length.Seconds(), slices.Min(turns), slices.Max(turns), sum.Longest.Round(time.Millisecond), float64(sum.Attempts)/n/voters,
		float64(spent)/n, 100*float64(sum.Direct)/n, (cpu / each).Round(time.Microsecond), (sum.CPU / each).Round(time.Microsecond))
	return contest{n / length.Seconds(), turns, sum.Longest, float64(sum.Attempts) / n / voters, float64(sum.Sent) / n, float64(spent) / n, (cpu + sum.CPU) / each}, nil
}
