package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// A worker is a process with clients of one contender: this program, started once more, or a program
// for a library in another language. It gets orders and answers them one after the other, each as a
// line of JSON. Instants are passed as wall time, which the processes of a machine share.

// roleVariable is the environment variable that makes this program a worker. It has the worker's role.
const roleVariable = "LEASED_BENCH_WORKER"

type role struct {
	Contender string
	Serve     bool   // the worker is the contender's server, not a client
	Dir       string // the directory that all workers of a measurement share

	Addr    string
	TTL     time.Duration
	Renew   bool
	First   int // the number of its first client
	Clients int // in this process
	All     int // clients in all processes
}

type order struct {
	Do         string
	Name       string        // of the lock
	Names      bool          // cycle: another lock each time
	For        time.Duration // how long to go on
	Count      int           // of locks; cycle: how many cycles to do first, without measuring
	Goroutines int           // on each client
	Reads      int           // contend: percentage of leases that are readers'
}

type answer struct {
	Failed  string // what went wrong, "" if nothing
	Addr    string
	At      time.Time
	Figures figures
	Waits   histogram
	Trouble string // the first error of calls that failed while others went on
}

// figures are what was measured, by name.
type figures map[string]float64

type worker struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan answer
}

func startWorker(r role, cpu int) (*worker, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	argv := []string{program}
	if c, err := find(r.Contender); err == nil && c.program != nil {
		argv = c.program()
	}
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), roleVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := startOn(cmd, cpu); err != nil {
		return nil, err
	}
	w := &worker{cmd, in, make(chan answer, 4)}
	// The goroutine ends with the worker's output. kill waits for it, by draining answers.
	go func() {
		defer close(w.answers)
		for d := json.NewDecoder(bufio.NewReader(out)); ; {
			var a answer
			if d.Decode(&a) != nil {
				return
			}
			w.answers <- a
		}
	}()
	return w, nil
}

func (w *worker) tell(o order) error {
	text, err := json.Marshal(o)
	if err == nil {
		_, err = w.in.Write(append(text, '\n'))
	}
	return err
}

func (w *worker) hear(within time.Duration) (answer, error) {
	select {
	case a, ok := <-w.answers:
		switch {
		case !ok:
			return a, errors.New("a worker ended")
		case a.Failed != "":
			return a, errors.New("a worker failed: " + a.Failed)
		}
		return a, nil
	case <-time.After(within):
		return answer{}, fmt.Errorf("a worker has not answered for %v", within)
	}
}

// kill ends the worker by SIGKILL: what its clients leave in Redis ends with the server.
func (w *worker) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.in.Close()
	for range w.answers { // until its output has ended
	}
	_ = w.cmd.Wait()
}

// work is the main function of a worker, and returns only if something is wrong. The worker ends with
// its input, so it does not outlive the process that started it.
func work(text string) error {
	var r role
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return err
	}
	orders := make(chan order)
	go func() {
		for d := json.NewDecoder(os.Stdin); ; {
			var o order
			if d.Decode(&o) != nil {
				os.Exit(0)
			}
			orders <- o
		}
	}()
	out := json.NewEncoder(os.Stdout)
	ready, serve, err := begin(r)
	for {
		if err != nil {
			ready.Failed = err.Error()
		}
		if err := out.Encode(ready); err != nil {
			return err
		}
		ready, err = serve(<-orders)
	}
}

// begin makes the clients or the server of a role, and returns the function that carries out orders.
func begin(r role) (answer, func(order) (answer, error), error) {
	idle := func(order) (answer, error) { return answer{}, errors.New("it takes no orders") }
	c, err := find(r.Contender)
	if err != nil {
		return answer{}, idle, err
	}
	if r.Serve {
		addr, err := c.serve(r.Dir)
		return answer{Addr: addr}, idle, err
	}
	inside, err := openInside(filepath.Join(r.Dir, "inside"))
	if err != nil {
		return answer{}, idle, err
	}
	p := &process{inside: inside}
	rdb := connect(r.Addr)
	for i := range r.Clients {
		l, err := c.open(setup{Addr: r.Addr, TTL: r.TTL, Renew: r.Renew, Client: r.First + i, Clients: r.All, redis: rdb})
		if err != nil {
			return answer{}, idle, err
		}
		if !c.floor { // a ring has only one turn, which must not be used up
			unlock, err := l.lock(context.Background(), fmt.Sprintf("warm:%d", r.First+i))
			if err != nil {
				return answer{}, idle, err
			}
			_ = unlock() // nobody else wants it
		}
		p.clients = append(p.clients, l)
	}
	runtime.GC()
	return answer{}, p.carryOut, nil
}

// process is the state of a worker.
type process struct {
	clients []locker
	inside  *atomic.Int64 // how many have the lock, in all processes: see aWriter
	unlock  func() error  // unlocks the lock that it was ordered to take
	taken   []func() error
}

func (p *process) carryOut(o order) (answer, error) {
	switch o.Do {
	case "cycle":
		return p.cycles(o)
	case "lock":
		unlock, err := p.clients[0].lock(context.Background(), o.Name)
		p.unlock = unlock
		return answer{At: time.Now()}, err
	case "unlock":
		at := time.Now()
		return answer{At: at}, p.unlock()
	case "contend":
		return p.contend(o)
	case "warm":
		_, err := each(64, func(i int) error { return cycle(p.clients[0], "warm:"+strconv.Itoa(i)) })
		return answer{}, err
	case "take":
		return p.take(o)
	case "give":
		return p.give()
	}
	return answer{}, errors.New("there is no order " + o.Do)
}

func cycle(l locker, name string) error {
	unlock, err := l.lock(context.Background(), name)
	if err != nil {
		return err
	}
	return unlock()
}

// cycles locks and unlocks a lock that nobody else wants.
func (p *process) cycles(o order) (answer, error) {
	l := p.clients[0]
	names := []string{o.Name}
	if o.Names {
		names = make([]string, 10_000)
		for i := range names {
			names[i] = o.Name + ":" + strconv.Itoa(i)
		}
	}
	for range o.Count {
		if err := cycle(l, o.Name); err != nil {
			return answer{}, err
		}
	}
	took := make([]time.Duration, 0, 100_000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for began := time.Now(); time.Since(began) < o.For && len(took) < cap(took); {
		at := time.Now()
		if err := cycle(l, names[len(took)%len(names)]); err != nil {
			return answer{}, err
		}
		took = append(took, time.Since(at))
	}
	runtime.ReadMemStats(&after)
	slices.Sort(took)
	n := float64(len(took))
	return answer{Figures: figures{
		"cycles": n,
		"p50":    took[len(took)/2].Seconds(),
		"p99":    took[len(took)*99/100].Seconds(),
		"allocs": float64(after.Mallocs-before.Mallocs) / n,
		"bytes":  float64(after.TotalAlloc-before.TotalAlloc) / n,
	}}, nil
}

// sharer is a locker that has locks for readers as well.
type sharer interface {
	// share is like lock, for a reader or for a writer.
	share(ctx context.Context, name string, read bool) (unlock func() error, err error)
}

// aWriter is what a writer, or the owner of an exclusive lock, adds to the word that counts those
// inside. It is so far below zero that no number of readers makes up for it.
const aWriter = -1 << 40

// contend has all clients lock and unlock one lock for a time, and checks that nobody is inside who
// must not be. If there are readers, only the waits of writers are measured.
func (p *process) contend(o order) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), o.For)
	defer cancel()
	take := func(l locker, _ bool) (func() error, error) { return l.lock(ctx, o.Name) }
	if o.Reads > 0 {
		if _, ok := p.clients[0].(sharer); !ok {
			return answer{}, errors.New("it has no lock for readers")
		}
		take = func(l locker, read bool) (func() error, error) { return l.(sharer).share(ctx, o.Name, read) }
	}
	type seat struct {
		leases, overlaps int64
		reads            int64 // leases that are readers'
		longest          time.Duration
		failed           int64
		trouble          error    // the first one
		_                [64]byte // keeps the figures of another goroutine off its cache line
	}
	seats := make([]seat, len(p.clients)*o.Goroutines)
	var waits [bins]atomic.Int64
	var all sync.WaitGroup
	for i := range seats {
		s, l := &seats[i], p.clients[i%len(p.clients)]
		all.Go(func() {
			for ctx.Err() == nil {
				read := o.Reads > 0 && rand.IntN(100) < o.Reads
				asked := time.Now()
				unlock, err := take(l, read)
				waited := time.Since(asked)
				if !read {
					s.longest = max(s.longest, min(waited, o.For)) // also a wait that the end cut short
				}
				if err != nil {
					if ctx.Err() == nil {
						s.failed, s.trouble = s.failed+1, cmp.Or(s.trouble, err)
					}
					continue
				}
				s.leases++
				if read {
					if p.inside.Add(1) <= 0 {
						s.overlaps++
					}
					s.reads++
					p.inside.Add(-1)
				} else {
					if p.inside.Add(aWriter) != aWriter {
						s.overlaps++
					}
					waits[bin(waited)].Add(1)
					p.inside.Add(-aWriter)
				}
				if err := unlock(); err != nil {
					s.failed, s.trouble = s.failed+1, cmp.Or(s.trouble, err)
				}
			}
		})
	}
	all.Wait()
	f := figures{"least": float64(seats[0].leases)}
	a := answer{Figures: f, Waits: histogram{}}
	for i := range seats {
		s := &seats[i]
		f["failed"] += float64(s.failed)
		f["leases"] += float64(s.leases)
		f["reads"] += float64(s.reads)
		f["overlaps"] += float64(s.overlaps)
		f["longest"] = max(f["longest"], s.longest.Seconds())
		f["least"] = min(f["least"], float64(s.leases))
		f["most"] = max(f["most"], float64(s.leases))
		if a.Trouble == "" && s.trouble != nil {
			a.Trouble = s.trouble.Error()
		}
	}
	for i := range waits {
		if n := waits[i].Load(); n > 0 {
			a.Waits[i] = n
		}
	}
	return a, nil
}

// each calls do with 0 to n-1, from 64 goroutines, and returns how long that took.
func each(n int, do func(i int) error) (time.Duration, error) {
	var next atomic.Int64
	errs := make([]error, 64)
	began := time.Now()
	var all sync.WaitGroup
	for w := range errs {
		all.Go(func() {
			for errs[w] == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				errs[w] = do(i)
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return time.Since(began), err
		}
	}
	return time.Since(began), nil
}

// take locks many names and keeps the locks.
func (p *process) take(o order) (answer, error) {
	l := p.clients[0]
	names := make([]string, o.Count)
	for i := range names {
		names[i] = o.Name + ":" + strconv.Itoa(i)
	}
	p.taken = make([]func() error, o.Count)
	before := memory()
	took, err := each(o.Count, func(i int) (err error) {
		p.taken[i], err = l.lock(context.Background(), names[i])
		return err
	})
	n := float64(o.Count)
	return answer{Figures: figures{"seconds": took.Seconds(), "memory": (memory() - before) / n}}, err
}

func (p *process) give() (answer, error) {
	took, err := each(len(p.taken), func(i int) error { return p.taken[i]() })
	return answer{Figures: figures{"seconds": took.Seconds(), "locks": float64(len(p.taken))}}, err
}

// memory returns the bytes in use, including stacks, so that a goroutine counts toward the lock that needs
// it.
func memory() float64 {
	debug.FreeOSMemory()
	runtime.GC() // what had a finalizer or was in a pool is freed the second time
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

// histogram counts durations by bin.
type histogram map[int]int64

const bins = 64 * 8

// bin returns the bin of a duration: each power of two is divided into eight bins.
func bin(d time.Duration) int {
	n := uint64(max(d, 8))
	power := bits.Len64(n)
	return power<<3 | int(n>>(power-4)&7)
}

// upTo returns the least duration that is above bin i.
func upTo(i int) time.Duration { return time.Duration(uint64(i&7+9) << (i>>3 - 4)) }

func (h histogram) add(other histogram) {
	for i, n := range other {
		h[i] += n
	}
}

// quantile returns a bound below which the given share of the durations is.
func (h histogram) quantile(share float64) time.Duration {
	var all, below int64
	for _, n := range h {
		all += n
	}
	for i := range bins {
		if below += h[i]; float64(below) >= share*float64(all) && below > 0 {
			return upTo(i)
		}
	}
	return 0
}
