// Command measure prints what leased costs on this machine, each figure beside a
// baseline of the same run and, where there is one, beside its goal:
//
//	go run ./internal/measure [-quick] [-only cycle,handoff,…]
//
// No figure makes it fail: a machine that is busy with other things misses goals that
// the code meets. Read ratios, not times, and run it twice.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// section is one thing to measure, on a server of its own.
type section struct {
	name string
	run  func(*bench) error
}

var sections = []section{
	{"cycle", cycle},
	{"handoff", handoff},
	{"crowd", crowd},
	{"waiting", waiting},
	{"standing", standing},
	{"killed", killed},
	{"cancel", cancellation},
	{"many", many},
	{"grants", grants},
	{"readers", readers},
}

// bench is what a section works with.
type bench struct {
	server *redistest.Instance
	rdb    *redis.Client
	quick  bool
	rows   *table
}

// pick returns n, or few in a quick run.
func (b *bench) pick(n, few int) int {
	if b.quick {
		return few
	}
	return n
}

// client makes a client of leased with connections of its own.
func (b *bench) client(opts ...leased.Option) (*leased.Client, error) {
	return leased.New(b.server.Client(), append([]leased.Option{leased.WithLogger(quiet)}, opts...)...)
}

var quiet = slog.New(slog.DiscardHandler)

func main() {
	logging.Disable() // it logs the faults that we cause
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(role); err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		return
	}
	only := flag.String("only", "", "comma-separated `sections`, default all: "+names())
	quick := flag.Bool("quick", false, "fewer rounds")
	cpu := flag.String("cpuprofile", "", "write a CPU profile to `file`")
	mem := flag.String("memprofile", "", "write the heap profile of section many to `file`")
	flag.Parse()
	heapFile = *mem
	some, err := chosen(*only)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	if *cpu != "" {
		f, err := os.Create(*cpu)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fmt.Println(err)
			return
		}
		defer f.Close()
		defer pprof.StopCPUProfile()
	}
	began := time.Now()
	for i, s := range some {
		if err := measure(s, *quick, i == 0); err != nil {
			fmt.Printf("%s: not measured: %v\n", s.name, err)
		}
	}
	fmt.Printf("\ntook %v\n", time.Since(began).Round(time.Second))
}

func names() string {
	var all []string
	for _, s := range sections {
		all = append(all, s.name)
	}
	return strings.Join(all, ", ")
}

// chosen returns the sections that are listed in only, in the order in which they are run.
func chosen(only string) ([]section, error) {
	if only == "" {
		return sections, nil
	}
	listed := strings.Split(only, ",")
	for _, name := range listed {
		if !slices.ContainsFunc(sections, func(s section) bool { return s.name == name }) {
			return nil, fmt.Errorf("-only: there is no section %q; there are %s", name, names())
		}
	}
	return slices.DeleteFunc(slices.Clone(sections), func(s section) bool { return !slices.Contains(listed, s.name) }), nil
}

func measure(s section, quick, first bool) error {
	server, err := redistest.Start()
	if err != nil {
		return err
	}
	defer server.Close()
	b := &bench{server: server, rdb: server.Client(), quick: quick, rows: &table{}}
	if first {
		head(b.rdb)
	}
	err = s.run(b)
	fmt.Printf("\n%s\n", s.name)
	b.rows.print(os.Stdout)
	return err
}

// head prints the versions and the machine that the figures belong to.
func head(rdb *redis.Client) {
	version := "unknown"
	if info, err := rdb.Info(context.Background(), "server").Result(); err == nil {
		for line := range strings.Lines(info) {
			if v, ok := strings.CutPrefix(line, "redis_version:"); ok {
				version = strings.TrimSpace(v)
			}
		}
	}
	fmt.Printf("redis %s on loopback, go-redis %s, %s %s/%s, %d CPUs%s, %s\n", version, redis.Version(),
		runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), model(), time.Now().UTC().Format("2006-01-02"))
}

// model names the processor if the system shows it.
func model() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if field, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(field) == "model name" {
			return " (" + strings.TrimSpace(value) + ")"
		}
	}
	return ""
}
