package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"
)

// Workers are this program, started once more, so the test's binary has to be able to be one.
func TestMain(m *testing.M) {
	logging.Disable()
	if text := os.Getenv(roleVariable); text != "" {
		println(work(text).Error())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// moment is enough to see that something is measured.
var moment = effort{
	rounds: 1, warm: 500 * time.Millisecond, cycles: 50 * time.Millisecond, handoffs: 3, contend: 500 * time.Millisecond,
	settle: time.Second, watch: 100 * time.Millisecond, waiters: 2, locks: 50, killed: 3 * time.Second,
	growing: 500 * time.Millisecond, held: 30 * time.Second, kept: 100 * time.Millisecond,
	waiting: []int{1, 10}, holding: []int{1, 50}, processes: []int{1, 2},
}

func needRedis(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath(redisServer()); err != nil {
		if os.Getenv("LEASED_REQUIRE_REDIS") == "1" {
			t.Fatal(err)
		}
		t.Skipf("%v; install Debian's package redis-server, or its like", err)
	}
}

// measured runs a measurement, all figures of which must be numbers, and the wanted ones positive. On a
// machine that is busy with other things, a moment can pass without a single lease, so it tries up to three
// times.
func measured(t *testing.T, c contender, measure func(*stage) (figures, error), wanted ...string) figures {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for try := 1; ; try++ {
		f, err := run(ctx, c, moment, false, measure)
		for name, value := range f {
			if math.IsNaN(value) || math.IsInf(value, 0) {
				t.Errorf("%s: %s is %v", c.name, name, value)
			}
		}
		for _, name := range wanted {
			if err == nil && f[name] <= 0 {
				err = errors.New(name + " is not positive")
			}
		}
		if err == nil {
			if f["overlaps"] != 0 {
				t.Errorf("%s: two were inside at once %v times", c.name, f["overlaps"])
			}
			if f["least"] > f["most"] || f["most"] > f["leases"] {
				t.Errorf("%s: least %v, most %v of %v", c.name, f["least"], f["most"], f["leases"])
			}
			return f
		}
		if try == 3 {
			t.Fatalf("%s: %v: %v", c.name, err, f)
		}
	}
}

// positive are the figures of a scenario that cannot be 0.
var positive = map[string][]string{
	"cycle":        {"cycles", "p50", "p99", "allocs", "bytes"},
	"cycle-names":  {"cycles", "p50", "p99", "allocs", "bytes"},
	"cycle-free":   {"cycles", "p50", "p99"},
	"handoff":      {"p50", "p99"},
	"handoff-free": {"p50", "p99"},
	"contend-1x64": {"leases", "rate", "each", "longest", "p99"},
	"contend-4x16": {"leases", "rate", "each", "longest", "p99", "requests"},
	"contend-8x1":  {"leases", "rate", "each", "longest", "p99", "requests"},
	"readers-1x64": {"leases", "rate", "reads", "longest", "p99"},
	"readers-4x16": {"leases", "rate", "reads", "longest", "p99"},
	"waiting":      nil,                      // waiting may cost nothing
	"many":         {"rate", "each", "keys"}, // fifty locks may take less memory than the rest of the process frees meanwhile
	"killed":       {"left"},
}

func TestEveryScenarioMeasuresEveryoneThatTakesPart(t *testing.T) {
	needRedis(t)
	for _, s := range scenarios {
		for _, c := range contenders {
			// The short measurements suffice to show that the other libraries are used correctly.
			if !c.takesPart(s.name) || c.floor && s.name == "waiting" || c.serve != nil || c.optional != "" ||
				!c.floor && c.name != ours && s.name != "cycle" && s.name != "handoff" && s.name != "many" {
				continue
			}
			t.Run(s.name+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				wanted, found := positive[s.name]
				if !found {
					t.Fatal("which figures does it have?")
				}
				f := measured(t, c, s.measure, wanted...)
				switch s.name {
				case "handoff":
					if f["handoffs"] != float64(moment.handoffs) {
						t.Errorf("%v hand-offs, want %d", f["handoffs"], moment.handoffs)
					}
				case "many":
					if f["returned"] != float64(moment.locks) {
						t.Errorf("%v locks were returned, want %d", f["returned"], moment.locks)
					}
					if f["keys"] < 1 {
						t.Errorf("%v keys a lock", f["keys"])
					}
				}
			})
		}
	}
}

func TestEveryGrowthMeasuresItsSizes(t *testing.T) {
	needRedis(t)
	ours, err := find(ours)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range growths {
		n := slices.Max(g.sizes(moment))
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			f := measured(t, ours, func(s *stage) (figures, error) { return g.measure(s, n) }, "each", "rate")
			if _, ok := f[g.figure]; !ok {
				t.Errorf("the picture's %s is not among %v", g.figure, f)
			}
		})
	}
}

// The workers of a measurement share a word of memory. If it did not show that two are inside, a lock that
// excludes nobody would pass.
func TestOwnersInTwoProcessesAtOnceAreNoticed(t *testing.T) {
	needRedis(t)
	t.Parallel()
	c, err := find(brokenName)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 { // because the two processes have to run at the same moment
		f, err := run(t.Context(), c, moment, false, func(s *stage) (figures, error) { return s.contended(2, 8) })
		if err != nil {
			t.Fatal(err)
		}
		if f["overlaps"] > 0 {
			return
		}
	}
	t.Error("a lock that lets everybody in at once was taken for one that works")
}

// A reader beside a writer is noticed, and readers beside each other are no error.
func TestAReaderInsideWithAWriterIsNoticed(t *testing.T) {
	needRedis(t)
	t.Parallel()
	for name, broken := range map[string]bool{brokenName: true, "package sync": false} {
		c, err := find(name)
		if err != nil {
			t.Fatal(err)
		}
		overlaps := 0.0
		for range 20 {
			f, err := run(t.Context(), c, moment, false, func(s *stage) (figures, error) { return s.readersAndWriters(1, 8) })
			if err != nil {
				t.Fatal(err)
			}
			if overlaps += f["overlaps"]; overlaps > 0 || !broken {
				break
			}
		}
		if broken != (overlaps > 0) {
			t.Errorf("%s: %v times two were inside who must not be", name, overlaps)
		}
	}
}

const brokenName = "no lock at all"

func init() {
	contenders = append(contenders, contender{
		name: brokenName, only: []string{"none"},
		open: func(setup) (locker, error) { return open{}, nil },
	})
}

type open struct{}

func (open) lock(context.Context, string) (func() error, error) {
	return func() error { return nil }, nil
}

func (open) share(context.Context, string, bool) (func() error, error) {
	return func() error { return nil }, nil
}

// Redisson's worker gets the same orders as ours, and gives the same figures. Building it needs Maven, a
// JDK and Maven's registry, so this test runs only on request.
func TestRedissonMeasuresEveryScenario(t *testing.T) {
	if os.Getenv("LEASED_BENCH_REDISSON") == "" {
		t.Skip("set LEASED_BENCH_REDISSON=1, where Maven and a JDK are installed, to have it built and run")
	}
	needRedis(t)
	if err := buildRedisson(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := find("Redisson")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			wanted := slices.DeleteFunc(slices.Clone(positive[s.name]), func(figure string) bool {
				return figure == "allocs" || figure == "bytes" // the JVM does not give them for all threads together
			})
			f := measured(t, c, s.measure, wanted...)
			several := []string{"contend-4x16", "contend-8x1", "readers-4x16", "waiting"}
			if shared := f["shared"] == 1; shared != slices.Contains(several, s.name) {
				t.Errorf("clients share a JVM: %v", shared)
			}
		})
	}
}

// invented has an invented figure for everything that is printed or drawn.
func invented() *report {
	r := &report{About: "invented", Settings: plan{}.settings()}
	for i, c := range contenders {
		for _, s := range scenarios {
			for round := range 3 {
				f := figures{}
				for _, line := range rows {
					if line.scenario == s.name {
						f[line.figure] = float64(i+1) * float64(round+2) * 1e-4
					}
				}
				if c.takesPart(s.name) {
					r.Measurements = append(r.Measurements, measurement{Scenario: s.name, Contender: c.name, Round: round, Figures: f})
				}
			}
		}
		for _, g := range growths {
			for _, n := range g.sizes(full) {
				if _, in := g.contenders[c.name]; in {
					r.Measurements = append(r.Measurements, measurement{Scenario: g.name, Contender: c.name, N: n,
						Figures: figures{g.figure: float64(i+1) * 1e-4, "requests": 2, "waiting-server": 0.01, "rate": 10, "memory": 400}})
				}
			}
		}
	}
	return r
}

func TestTheTableHasEachRowAndRatiosOfOneRound(t *testing.T) {
	r := &report{}
	for round, mine := range []float64{30e-6, 11e-6, 80e-6} {
		floor := []float64{10e-6, 10e-6, 40e-6}[round]
		r.Measurements = append(r.Measurements,
			measurement{Scenario: "cycle", Contender: ours, Round: round, Figures: figures{"p50": mine}},
			measurement{Scenario: "cycle", Contender: "two commands", Round: round, Figures: figures{"p50": floor}},
			measurement{Scenario: "many", Contender: ours, Round: round, Figures: figures{"rate": 50_000}},
			measurement{Scenario: "many", Contender: "two commands", Round: round, Figures: figures{"rate": 75_000}})
	}
	r.Measurements = append(r.Measurements, measurement{Scenario: "handoff", Contender: ours, Failed: "lost"})
	want := "| | floor | Leased |\n|---|---|---|\n" +
		"| uncontended lock and unlock, one name | 10 µs, two commands | 30 µs (2×, 1.1× to 3×) |\n" +
		"| 10,000 locks in one process: acquired a second | 75,000, two commands | 50,000 (1.5×, 1.5× to 1.5×) |\n"
	if got := r.table(true); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if err := r.failures(); err == nil || !strings.Contains(err.Error(), "handoff, Leased: lost") {
		t.Errorf("the failure is not reported: %v", err)
	}
	all := invented().table(false)
	for _, line := range rows {
		if !strings.Contains(all, "| "+line.title+" | ") {
			t.Errorf("the table has no row %q", line.title)
		}
	}
}

func TestFiguresHaveThreeDigits(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{duration(1.5), "1.5 s"}, {duration(0.01234), "12.3 ms"}, {duration(123.4e-6), "123 µs"}, {duration(0.9999e-3), "1 ms"},
		{duration(-0.0021), "-2.1 ms"}, {duration(45e-9), "45 ns"}, {duration(0), "0 ns"},
		{count(1234567), "1,230,000"}, {count(999), "999"}, {count(1000), "1,000"}, {count(0), "0"},
		{number(99.96), "100"}, {number(12.345), "12.3"}, {number(0.004), "0"}, {number(2), "2"},
		{bytesOf(1106), "1,110 B"}, {bytesOf(20480), "20 KB"}, {times(1.125), "1.12×"},
	} {
		if c.got != c.want {
			t.Errorf("got %s, want %s", c.got, c.want)
		}
	}
}

func TestFiguresOfClientsInOneProcessAreMarked(t *testing.T) {
	r := &report{Measurements: []measurement{
		{Scenario: "contend-8x1", Contender: ours, Figures: figures{"rate": 1000}},
		{Scenario: "contend-8x1", Contender: "Redisson", Figures: figures{"rate": 100, "shared": 1}},
		{Scenario: "cycle", Contender: "Redisson", Figures: figures{"p50": 1e-3}},
	}}
	table := r.table(false)
	for _, want := range []string{"| 1,000 | 100 † |", "|  |  | 1 ms |", "\n† in one process"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
}

func TestQuantilesAreBoundsOfTheirBins(t *testing.T) {
	for d := time.Duration(1); d < time.Hour; d = d*5/4 + 1 {
		h := histogram{bin(d): 1}
		if up := h.quantile(.99); up < d || d >= 8 && up > d+d/8+1 {
			t.Errorf("%v is said to be below %v", d, up)
		}
	}
	h := histogram{bin(time.Millisecond): 98, bin(time.Second): 2}
	if half, most := h.quantile(.5), h.quantile(.99); half > 2*time.Millisecond || most < time.Second {
		t.Errorf("half are below %v, 99 of 100 below %v", half, most)
	}
}

func TestPicturesAreTheSameEachTimeAndWellFormed(t *testing.T) {
	r := invented()
	for name, draw := range map[string]func() ([]byte, error){"growth": r.growthPicture, "peers": r.peersPicture, "nothing": (&report{}).growthPicture} {
		first, err := draw()
		if err != nil {
			t.Fatal(name, err)
		}
		second, err := draw()
		if err != nil || !bytes.Equal(first, second) {
			t.Errorf("%s is drawn otherwise the second time: %v", name, err)
		}
		for d := xml.NewDecoder(bytes.NewReader(first)); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(name, err)
			}
		}
		for _, part := range []string{"prefers-color-scheme: dark", "<title>", "var(--c"} {
			if !bytes.Contains(first, []byte(part)) {
				t.Errorf("%s has no %s", name, part)
			}
		}
		if _, drawn, _ := bytes.Cut(first, []byte("</style>")); bytes.Contains(drawn, []byte("#")) {
			t.Errorf("%s has colors that do not change on a dark page", name)
		}
	}
}

// The page in the tree has the marks that publish needs, and publish renews what is between them.
func TestThePageCanBeRenewed(t *testing.T) {
	page, err := os.ReadFile("../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "performance.md")
	if err := os.WriteFile(file, page, 0o600); err != nil {
		t.Fatal(err)
	}
	var renewed []byte
	for range 2 {
		if err := invented().publish(dir); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(file); err != nil {
			t.Fatal(err)
		} else if renewed != nil && !bytes.Equal(renewed, text) {
			t.Error("renewed twice it is another page")
		} else {
			renewed = text
		}
	}
	part := &report{About: "another run"}
	for _, m := range invented().Measurements {
		if m.Scenario == "locks" {
			part.Measurements = append(part.Measurements, m)
		}
	}
	if err := part.publish(dir); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(file); err != nil || !bytes.Equal(renewed, text) {
		t.Errorf("what was not measured does not stay: %v", err)
	}
	if !bytes.Contains(renewed, []byte("invented.\n")) {
		t.Error("it is not renewed")
	}
	for _, name := range []string{"performance-growth.svg", "performance-peers.svg"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
		if !bytes.Contains(page, []byte("("+name+")")) {
			t.Errorf("the page does not show %s", name)
		}
	}
}

func TestWhatWasMeasuredCanBeReadAgain(t *testing.T) {
	dir, r := t.TempDir(), invented()
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	again, err := load(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	if again.table(true) != r.table(true) {
		t.Error("it is another table")
	}
	text, err := os.ReadFile(filepath.Join(dir, "comparison.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range growths {
		if !strings.Contains(string(text), r.growthTable(g)) {
			t.Errorf("there is no table of %s", g.name)
		}
	}
}
