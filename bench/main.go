// Command bench compares Leased with other distributed locks for Go, and with the least that a
// lock has to do, on this machine:
//
//	go run .                       all of it, 10 to 15 minutes
//	go run . -quick                a first impression, two to three minutes
//	go run -tags etcd . -redisson -docs ../docs   what docs/performance.md shows
//
// For each measurement it starts a redis-server of its own on a loopback port, and processes that
// lock, and ends them afterwards. Where the system allows it, the server runs on one processor and
// all other processes on a second one: left to itself, the system of a small machine puts client and
// server sometimes on one processor and sometimes on two, which changes a round trip by a factor of five.
//
// In each round every contender is measured once in each scenario, in a different order each time. Ratios
// are taken within a round, so that whatever else the machine does changes both of their terms; round trips
// and hand-offs, which it changes most, are measured alternately with the floor's, some milliseconds apart.
// The printed figures are medians of the rounds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9/logging"
)

func main() {
	log.SetFlags(0)
	logging.Disable() // it logs connections that end with killed processes
	if text := os.Getenv(roleVariable); text != "" {
		log.Fatal(work(text))
	}
	if err := compare(); err != nil {
		log.Fatal(err)
	}
}

// plan is what the flags select.
type plan struct {
	effort
	pin   bool
	only  []string // scenarios; all if there are none
	among []string // contenders; all if there are none
	with  []string // the optional contenders that take part
}

func compare() error {
	var (
		out    = flag.String("out", "results", "`directory` for results.json, the tables and the pictures")
		docs   = flag.String("docs", "", "also renew the tables and pictures of performance.md in this `directory`")
		from   = flag.String("from", "", "measure nothing: take results.json of an earlier run from this `file`")
		brief  = flag.Bool("quick", false, "one round of short measurements: a look, nothing to rely on")
		rounds = flag.Int("rounds", 0, "how `many` rounds; the default is 3, or 1 with -quick")
		only   = flag.String("only", "", "comma-separated `scenarios`: "+strings.Join(names(), ", "))
		among  = flag.String("lockers", "", "comma-separated `contenders`: "+strings.Join(contenderNames(), ", "))
		pin    = flag.Bool("pin", true, "keep the server on one processor and all clients on another one")
		java   = flag.Bool("redisson", false, "let Redisson take part, a library for Java: up to ten minutes more; needs Maven and a JDK")
	)
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), `Compares Leased with other locks on a redis-server of its own, and shows what each costs
as waiters, locks and processes become more. It takes 10 to 15 minutes, with -quick two to three.
With "go run -tags etcd ." etcd takes part as well.

`)
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("there are no arguments besides flags: %s", flag.Arg(0))
	}
	p := plan{effort: full, pin: *pin, only: list(*only), among: list(*among)}
	if *brief {
		p.effort = quick
	}
	if *rounds > 0 {
		p.rounds = *rounds
	}
	for _, name := range p.only {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("there is no scenario %s", name)
		}
	}
	for _, name := range p.among {
		if _, err := find(name); err != nil {
			return err
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var r *report
	var err error
	if *from != "" {
		if r, err = load(*from); err != nil {
			return err
		}
	} else {
		began := time.Now()
		if *java {
			if err := buildRedisson(ctx); err != nil {
				return err
			}
			p.with = append(p.with, "redisson")
		}
		r, err = p.measure(ctx, func(format string, args ...any) {
			fmt.Printf("%5.0f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
		})
	}
	if r == nil {
		return err
	}
	if err := errors.Join(err, r.write(*out)); err != nil { // an error loses nothing that was measured before it
		return err
	}
	if *docs != "" {
		if err := r.publish(*docs); err != nil {
			return err
		}
	}
	fmt.Printf("\n%s\n%s is written\n", r.table(true), filepath.Join(*out, "comparison.md"))
	if n := r.overlaps(); n > 0 {
		return fmt.Errorf("two owners were inside at once %d times", n)
	}
	return r.failures()
}

func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

func names() []string {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	for _, g := range growths {
		all = append(all, g.name)
	}
	return all
}

func contenderNames() []string {
	var all []string
	for _, c := range contenders {
		all = append(all, c.name)
	}
	return all
}

func (p plan) wants(scenario string) bool { return p.only == nil || slices.Contains(p.only, scenario) }

func (p plan) includes(c contender) bool {
	return (p.among == nil || slices.Contains(p.among, c.name)) && (c.optional == "" || slices.Contains(p.with, c.optional))
}

// measure runs everything. A measurement in which a contender fails is reported and left out.
func (p plan) measure(ctx context.Context, progress func(string, ...any)) (*report, error) {
	r := &report{About: about(ctx, p), Settings: p.settings()}
	progress("%s", r.About)
	one := func(c contender, scenario string, round, n int, pin bool, do func(*stage) (figures, error)) error {
		f, err := run(ctx, c, p.effort, pin, do)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		m := measurement{Scenario: scenario, Contender: c.name, Round: round, N: n, Figures: f}
		if err != nil {
			m.Failed = err.Error()
			progress("%s, %s: not measured: %v", scenario, c.name, err)
		}
		r.Measurements = append(r.Measurements, m)
		return nil
	}
	for round := range p.rounds {
		for _, s := range scenarios {
			if !p.wants(s.name) {
				continue
			}
			progress("round %d of %d: %s", round+1, p.rounds, s.title)
			for _, i := range rand.Perm(len(contenders)) {
				c := contenders[i]
				if c.floor && s.name == "waiting" || !c.takesPart(s.name) || !p.includes(c) {
					continue
				}
				if err := one(c, s.name, round, 0, p.pin && !s.free, s.measure); err != nil {
					return r, err
				}
			}
		}
	}
	for _, g := range growths {
		if !p.wants(g.name) {
			continue
		}
		for _, n := range g.sizes(p.effort) {
			progress("%s: %d", g.name, n)
			for _, c := range contenders {
				most, in := g.contenders[c.name]
				if !in || most > 0 && n > most || !p.includes(c) {
					continue
				}
				if err := one(c, g.name, 0, n, p.pin, func(s *stage) (figures, error) { return g.measure(s, n) }); err != nil {
					return r, err
				}
			}
		}
	}
	return r, nil
}
