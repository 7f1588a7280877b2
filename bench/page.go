package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

// report has the results of a run.
type report struct {
	About        string // machine, versions, date
	Settings     string // of the contenders
	Measurements []measurement
}

type measurement struct {
	Scenario, Contender string
	Round, N            int
	Figures             figures `json:",omitempty"`
	Failed              string  `json:",omitempty"`
}

func load(file string) (*report, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &report{}
	return r, json.Unmarshal(text, r)
}

// row is a line of the table.
type row struct {
	title            string
	scenario, figure string
	print            func(float64) string
	floor            string // the contender that the others are compared with, if any
	rate             bool   // more is better
}

var rows = []row{
	{"uncontended lock and unlock, one name", "cycle", "p50", duration, "two commands", false},
	{"the same, nothing bound to a processor", "cycle-free", "p50", duration, "two commands", false},
	{"another name each time", "cycle-names", "p50", duration, "two commands", false},
	{"memory allocated for it", "cycle", "bytes", bytesOf, "two commands", false},
	{"hand-off to a waiter in another process", "handoff", "p50", duration, "PUBLISH", false},
	{"the same, nothing bound to a processor", "handoff-free", "p50", duration, "PUBLISH", false},
	{"64 goroutines of one process: leases a second", "contend-1x64", "rate", count, "channels", true},
	{"longest wait", "contend-1x64", "longest", duration, "", false},
	{"16 goroutines in each of 4 processes: leases a second", "contend-4x16", "rate", count, "PUBLISH", true},
	{"99 % of waits are shorter than", "contend-4x16", "p99", duration, "", false},
	{"longest wait", "contend-4x16", "longest", duration, "", false},
	{"one goroutine in each of 8 processes: leases a second", "contend-8x1", "rate", count, "PUBLISH", true},
	{"longest wait", "contend-8x1", "longest", duration, "", false},
	{"64 goroutines of one process, 90 % of locks for reading: reads a second", "readers-1x64", "reads", count, "package sync", true},
	{"longest wait of a writer", "readers-1x64", "longest", duration, "", false},
	{"16 goroutines in each of 4 processes, the same: reads a second", "readers-4x16", "reads", count, "", true},
	{"longest wait of a writer", "readers-4x16", "longest", duration, "", false},
	{"200 waiters in 10 processes, lock held: requests a second", "waiting", "waiting-requests", count, "", false},
	{"10,000 locks in one process: acquired a second", "many", "rate", count, "two commands", true},
	{"memory of the process, for each", "many", "memory", bytesOf, "two commands", false},
	{"keys in Redis, for each", "many", "keys", number, "two commands", false},
	{"bytes in Redis, for each", "many", "redis", bytesOf, "two commands", false},
	{"owner killed: from the end of its TTL until the next one is inside", "killed", "after", duration, "", false},
}

// of returns the figures of a contender by round, NaN for a round without one.
func (r *report) of(scenario, contender, figure string) []float64 {
	var all []float64
	for _, m := range r.Measurements {
		if m.Scenario != scenario || m.Contender != contender {
			continue
		}
		value, ok := m.Figures[figure]
		if !ok || m.Failed != "" {
			value = math.NaN()
		}
		all = append(all, value)
	}
	return all
}

// ofFloor is appended to the name of a figure for its ratio to the floor's, where the two were measured
// alternately.
const ofFloor = " of the floor's"

// against divides what a contender costs by what the floor did in the same round.
func (r *report) against(line row, contender string) []float64 {
	if ratios := slices.DeleteFunc(r.of(line.scenario, contender, line.figure+ofFloor), math.IsNaN); line.floor != "" && len(ratios) > 0 {
		return ratios
	}
	var ratios []float64
	mine, floor := r.of(line.scenario, contender, line.figure), r.of(line.scenario, line.floor, line.figure)
	for i := range min(len(mine), len(floor)) {
		ratio := mine[i] / floor[i]
		if line.rate {
			ratio = floor[i] / mine[i]
		}
		if !math.IsNaN(ratio) && !math.IsInf(ratio, 0) {
			ratios = append(ratios, ratio)
		}
	}
	return ratios
}

func median(values []float64) float64 {
	values = slices.DeleteFunc(slices.Clone(values), math.IsNaN)
	if len(values) == 0 {
		return math.NaN()
	}
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// cell formats a contender's median, and its cost as a multiple of the floor's.
func (r *report) cell(line row, contender string, spread bool) string {
	value := median(r.of(line.scenario, contender, line.figure))
	if math.IsNaN(value) {
		return ""
	}
	text := line.print(value)
	ratios := r.against(line, contender)
	if len(ratios) == 0 || line.floor == contender {
		return text
	}
	text += " (" + times(median(ratios))
	if spread && len(ratios) > 1 {
		text += fmt.Sprintf(", %s to %s", times(slices.Min(ratios)), times(slices.Max(ratios)))
	}
	return text + ")"
}

// sharedMark marks figures of clients that shared one process where they should have been in several.
const sharedMark = " †"

// table returns the comparison in Markdown. With spread it shows how far apart the rounds were.
func (r *report) table(spread bool) string {
	var columns []string
	for _, c := range contenders {
		if !c.floor && slices.ContainsFunc(r.Measurements, func(m measurement) bool { return m.Contender == c.name }) {
			columns = append(columns, c.name)
		}
	}
	shared := false
	var b strings.Builder
	b.WriteString("| | floor | " + strings.Join(columns, " | ") + " |\n|---" + strings.Repeat("|---", len(columns)+1) + "|\n")
	for _, line := range rows {
		cells, some := []string{""}, false
		if line.floor != "" {
			if cells[0] = r.cell(line, line.floor, false); cells[0] != "" {
				cells[0] += ", " + line.floor
			}
		}
		for _, name := range columns {
			text := r.cell(line, name, spread)
			if text != "" && slices.Contains(r.of(line.scenario, name, "shared"), 1) {
				text, shared = text+sharedMark, true
			}
			some = some || text != ""
			cells = append(cells, text)
		}
		if some {
			b.WriteString("| " + line.title + " | " + strings.Join(cells, " | ") + " |\n")
		}
	}
	if shared {
		b.WriteString("\n" + strings.TrimSpace(sharedMark) + " in one process, where the others had several.\n")
	}
	return b.String()
}

// growthTable returns the figures of a picture's panel, and what else was measured with them.
func (r *report) growthTable(g growth) string {
	type column struct {
		title, contender, figure string
		print                    func(float64) string
	}
	var columns []column
	unit := func(v float64) string { return number(v * g.scale) }
	for _, c := range contenders {
		if _, in := g.contenders[c.name]; in {
			columns = append(columns, column{c.name, c.name, g.figure, unit})
		}
	}
	switch g.name {
	case "waiters":
		percent := func(v float64) string { return number(100*v) + " %" }
		columns = append(columns, column{"Leased: share of the server's core while all wait", ours, "waiting-server", percent},
			column{"requests a second while all wait", ours, "waiting-requests", number},
			column{"requests a lease", ours, "requests", number})
	case "locks":
		columns = append(columns, column{"Leased: requests a second", ours, "holding-requests", number},
			column{"longest command", ours, "longest-command", atLeastSlow},
			column{"taken a second", ours, "rate", count}, column{"memory each", ours, "memory", bytesOf})
	case "processes":
		columns = append(columns, column{"Leased: requests a lease", ours, "requests", number})
	}
	var b strings.Builder
	b.WriteString("| " + g.across)
	for _, c := range columns {
		b.WriteString(" | " + c.title)
	}
	b.WriteString(" |\n|---" + strings.Repeat("|---", len(columns)) + "|\n")
	for _, n := range r.sizes(g) {
		b.WriteString("| " + count(float64(n)))
		for _, c := range columns {
			b.WriteString(" | ")
			// The memory that the process needs besides locks varies by more than a few locks take.
			if value, ok := r.at(g.name, c.contender, c.figure, n); ok && (c.figure != "memory" || n >= 1000) {
				b.WriteString(c.print(value))
			}
		}
		b.WriteString(" |\n")
	}
	return b.String()
}

// sizes returns the sizes at which a growth was measured.
func (r *report) sizes(g growth) []int {
	var all []int
	for _, m := range r.Measurements {
		if m.Scenario == g.name {
			all = append(all, m.N)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func (r *report) at(scenario, contender, figure string, n int) (float64, bool) {
	for _, m := range r.Measurements {
		if m.Scenario == scenario && m.Contender == contender && m.N == n && m.Failed == "" {
			value, ok := m.Figures[figure]
			return value, ok
		}
	}
	return 0, false
}

func (r *report) overlaps() int {
	n := 0.0
	for _, m := range r.Measurements {
		n += m.Figures["overlaps"]
	}
	return int(n)
}

// failures returns the failures of Leased and of the floors. What other libraries cannot do is no error of
// this program.
func (r *report) failures() error {
	var errs []error
	for _, m := range r.Measurements {
		c, err := find(m.Contender)
		if m.Failed != "" && (err != nil || c.floor || m.Contender == ours) {
			errs = append(errs, fmt.Errorf("%s, %s: %s", m.Scenario, m.Contender, m.Failed))
		}
	}
	return errors.Join(errs...)
}

// settings says how each contender was configured.
func (p plan) settings() string {
	var b strings.Builder
	for _, c := range contenders {
		if !p.includes(c) {
			continue
		}
		v := versionOf(c.module)
		if c.version != nil {
			v = c.version()
		}
		fmt.Fprintf(&b, "- **%s**", c.name)
		if v != "" && v != "(devel)" {
			b.WriteString(" " + v)
		}
		fmt.Fprintf(&b, ": %s.\n", c.settings)
	}
	return b.String()
}

func versionOf(module string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, m := range info.Deps {
		if m.Path == module && m.Replace == nil {
			return m.Version
		}
	}
	return ""
}

// about names the machine and the versions that the figures belong to.
func about(ctx context.Context, p plan) string {
	parts := []string{fmt.Sprintf("%d rounds", p.rounds)}
	if p.rounds == 1 {
		parts[0] = "1 round"
	}
	parts = append(parts, time.Now().UTC().Format("2006-01-02 15:04 UTC"))
	if out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--match=").Output(); err == nil {
		parts = append(parts, "commit "+strings.TrimSpace(string(out)))
	}
	cpus := fmt.Sprintf("%d processors", runtime.NumCPU())
	if name := field("/proc/cpuinfo", "model name"); name != "" {
		cpus += " (" + name + ")"
	}
	parts = append(parts, cpus)
	if server, _ := processors(); server < 0 || !p.pin {
		parts = append(parts, "nothing bound to a processor")
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		average := strings.Fields(string(load))[0]
		busy := ""
		if v, err := strconv.ParseFloat(average, 64); err == nil && v > 1.5*float64(runtime.NumCPU()) {
			busy = ": busy with other work, so not even the ratios are to be relied on"
		}
		parts = append(parts, "load before the run "+average+busy)
	}
	return strings.Join(append(parts, version(ctx), runtime.Version()+" "+runtime.GOOS+"/"+runtime.GOARCH,
		"go-redis "+strings.TrimPrefix(versionOf("github.com/redis/go-redis/v9"), "v")), ", ")
}

// field returns what a file of the system has behind a name.
func field(file, name string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if before, after, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(before) == name {
			return strings.TrimSpace(after)
		}
	}
	return ""
}

// write writes all results to a directory.
func (r *report) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	page := "# Comparison\n\n" + r.About + "\n\n" + r.table(true) + "\n"
	for _, g := range growths {
		if len(r.sizes(g)) > 0 {
			page += "## " + g.title + ": " + g.up + "\n\n" + r.growthTable(g) + "\n"
		}
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "results.json"), append(text, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "comparison.md"), []byte(page+r.Settings), 0o644),
		r.pictures(dir))
}

// publish renews the parts of performance.md that are between marks, and the pictures beside it. Whatever
// this run has not measured stays as it is.
func (r *report) publish(docs string) error {
	file := filepath.Join(docs, "performance.md")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	page := string(text)
	parts := map[string]string{}
	if r.compares() {
		parts["about"], parts["peers"], parts["settings"] = r.About+".\n", r.table(false), r.Settings
	}
	for _, g := range growths {
		if len(r.sizes(g)) > 0 {
			parts[g.name] = r.growthTable(g)
		}
	}
	for name, part := range parts {
		if page, err = between(page, name, part); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return errors.Join(os.WriteFile(file, []byte(page), 0o644), r.pictures(docs))
}

// compares reports whether there are figures for the table, and not only for how cost grows.
func (r *report) compares() bool {
	return slices.ContainsFunc(scenarios, func(s scenario) bool {
		return slices.ContainsFunc(r.Measurements, func(m measurement) bool { return m.Scenario == s.name })
	})
}

// between replaces the lines between a part's two marks.
func between(page, name, part string) (string, error) {
	begin, end := "<!-- make compare: "+name+" -->\n", "<!-- end of "+name+" -->\n"
	before, rest, found := strings.Cut(page, begin)
	_, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		return "", fmt.Errorf("it has no lines %q and %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return before + begin + "\n" + part + "\n" + end + after, nil
}

// The functions below format figures with about three digits.

func duration(seconds float64) string {
	for _, unit := range []struct {
		name string
		size float64
	}{{"s", 1}, {"ms", 1e-3}, {"µs", 1e-6}} {
		if math.Abs(seconds) >= unit.size*0.9995 {
			return number(seconds/unit.size) + " " + unit.name
		}
	}
	return number(seconds*1e9) + " ns"
}

// atLeastSlow formats the duration of a command, which the server notes only if it is at least slow.
func atLeastSlow(seconds float64) string {
	if seconds <= slow.Seconds() {
		return "< " + duration(slow.Seconds())
	}
	return duration(seconds)
}

func times(ratio float64) string { return number(ratio) + "×" }

func bytesOf(n float64) string {
	if n >= 9999.5 {
		return number(n/1024) + " KB"
	}
	return count(n) + " B"
}

// number formats v with three significant digits, and no more than two decimals.
func number(v float64) string {
	switch size := math.Abs(v); {
	case size >= 99.95:
		return count(v)
	case size >= 9.995:
		return trim(strconv.FormatFloat(v, 'f', 1, 64))
	}
	return trim(strconv.FormatFloat(v, 'f', 2, 64))
}

func trim(text string) string {
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return cmp.Or(strings.TrimPrefix(text, "-0"), "0")
}

// count rounds to three digits, with a comma before each third one.
func count(v float64) string {
	step := 1.0
	for math.Abs(v)/step >= 1000 {
		step *= 10
	}
	digits := strconv.FormatFloat(math.Round(v/step)*step, 'f', 0, 64)
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
