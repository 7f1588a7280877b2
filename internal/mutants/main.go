// Command mutants breaks the library on purpose, one rule at a time, and shows
// for each break the test that notices. It exits with status 1 if one survives.
//
//	go run ./internal/mutants [-only text] [-v]
//
// Nothing in the tree is changed: the broken file is laid over the real one for
// the compiler only (go test -overlay).
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

// mutant is one break: a text that stands exactly once in a file, and what to
// put in its place.
type mutant struct {
	name     string
	file     string
	old, new string
	tests    string // which tests to try first, as for -run; then a long simulation, then all of the package
}

const patience = 4 * time.Minute

func main() {
	only := flag.String("only", "", "run only mutants whose name contains this")
	verbose := flag.Bool("v", false, "show the output of the test that noticed")
	jobs := flag.Int("jobs", 2, "how many at once")
	first := flag.Int("from", 0, "run only mutants from this place of the list on")
	flag.BoolVar(&quick, "quick", false, "only the tests named for a mutant")
	flag.StringVar(&without, "without", "", "as -simulate.without of the tests: what of the simulation to leave out")
	flag.Parse()
	mutants = mutants[min(*first, len(mutants)):]
	if err := run(*only, *verbose, *jobs); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

var (
	quick   bool
	without string
)

func run(only string, verbose bool, jobs int) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	var chosen []mutant
	for _, m := range mutants {
		if strings.Contains(m.name, only) {
			chosen = append(chosen, m)
		}
	}
	results := make([]result, len(chosen))
	slots := make(chan struct{}, max(1, jobs))
	var wg sync.WaitGroup
	for i, m := range chosen {
		wg.Add(1)
		slots <- struct{}{}
		go func() { // owned by this function, ends with its mutant, waited for below
			defer wg.Done()
			defer func() { <-slots }()
			results[i] = try(root, m)
			results[i].print(m, verbose)
		}()
	}
	wg.Wait()
	var alive []string
	for i, r := range results {
		if r.killer == "" {
			alive = append(alive, chosen[i].name)
		}
	}
	fmt.Printf("%d mutants, %d killed\n", len(chosen), len(chosen)-len(alive))
	if len(alive) > 0 {
		return fmt.Errorf("survived: %s", strings.Join(alive, "; "))
	}
	return nil
}

type result struct {
	killer string // the test that noticed
	output string
	took   time.Duration
	err    error
}

func (r result) print(m mutant, verbose bool) {
	switch {
	case r.err != nil:
		fmt.Printf("ERROR    %-58s %v\n", m.name, r.err)
	case r.killer == "":
		fmt.Printf("SURVIVED %-58s %5.1fs\n", m.name, r.took.Seconds())
	default:
		fmt.Printf("killed   %-58s %5.1fs  %s\n", m.name, r.took.Seconds(), r.killer)
	}
	if verbose || r.err != nil {
		fmt.Println(r.output)
	}
}

func try(root string, m mutant) result {
	began := time.Now()
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return result{err: err}
	}
	defer os.RemoveAll(dir)
	overlay, err := lay(root, dir, m)
	if err != nil {
		return result{err: err}
	}
	// One binary for all stages: linking takes as long as many a test.
	binary := filepath.Join(dir, "broken.test")
	if err := build(root, overlay, binary); err != nil {
		return result{err: err}
	}
	var r result
	for _, args := range [][]string{
		{"-test.short", "-test.run=" + m.tests},
		{"-test.run=^TestSimulation$", "-simulate.seeds=5000"},
		{"-test.short", "-test.skip=^TestSimulation$"},
	} {
		r = test(root, binary, args)
		r.took = time.Since(began)
		if r.killer != "" || r.err != nil || quick {
			return r
		}
	}
	return r
}

// build makes the test binary of the root package with the overlay.
func build(root, overlay, binary string) error {
	cmd := exec.Command("go", "test", "-c", "-o", binary, "-overlay="+overlay, ".")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("it does not compile: %v\n%s", err, out)
	}
	return nil
}

// lay writes the broken file and the overlay that puts it over the real one.
func lay(root, dir string, m mutant) (string, error) {
	path := filepath.Join(root, m.file)
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return "", fmt.Errorf("the text to break stands %d times in %s: bring the list up to date", n, m.file)
	}
	broken := filepath.Join(dir, filepath.Base(m.file))
	if err := os.WriteFile(broken, []byte(strings.Replace(string(text), m.old, m.new, 1)), 0o600); err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {path: broken}})
	if err != nil {
		return "", err
	}
	return overlay, os.WriteFile(overlay, b, 0o600)
}

var (
	failed    = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)
	panicking = regexp.MustCompile(`(?m)^panic: .*`)
)

// test runs tests of the root package and returns the innermost one that failed.
func test(root, binary string, args []string) result {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args = append([]string{"-test.failfast", "-test.timeout=3m", "-simulate.without=" + without}, args...)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	r := result{output: string(out)}
	if err == nil {
		return r
	}
	names := failed.FindAllStringSubmatch(r.output, -1)
	switch {
	case len(names) > 0:
		r.killer = names[len(names)-1][1]
	case strings.Contains(r.output, "test timed out"):
		r.killer = "a test that hangs"
	case panicking.MatchString(r.output):
		r.killer = panicking.FindString(r.output)
	default:
		r.killer = "exit status"
	}
	return r
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", err
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return "", fmt.Errorf("run it inside the module")
	}
	return filepath.Dir(mod), nil
}
