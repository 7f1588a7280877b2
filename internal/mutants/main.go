// Command mutants breaks the library on purpose, one rule at a time, and prints
// for each break the test that notices it. It exits with status 1 if a mutant survives.
//
//	go run ./internal/mutants [-only regexp] [-from place] [-jobs n] [-quick] [-alone] [-v]
//
// An error is not a verdict: it means that the mutant does not compile, that its text or its tests
// are not found, or that the baseline fails, which is the test that noticed, run without the mutant.
//
// Nothing in the tree is changed: only the compiler sees the broken file in place of
// the real one (go test -overlay).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// mutant is one break: a text that occurs exactly once in a file, and the text
// that replaces it.
type mutant struct {
	name     string
	file     string
	old, new string
	tests    string // the tests to try first, as for -run; then comes a long simulation, then all tests of the packages
}

const patience = 4 * time.Minute

// settings are what the command line says.
type settings struct {
	only                  string
	from, jobs            int
	quick, alone, verbose bool
}

func main() {
	var s settings
	flag.StringVar(&s.only, "only", "", "run only mutants whose name matches this regular expression")
	flag.IntVar(&s.from, "from", 0, "run only mutants from this place of the list on; the first one's is 0")
	flag.IntVar(&s.jobs, "jobs", 2, "how many at once")
	flag.BoolVar(&s.quick, "quick", false, "only the tests named for a mutant")
	flag.BoolVar(&s.alone, "alone", false, "build each mutant by itself")
	flag.BoolVar(&s.verbose, "v", false, "show the output of the test that noticed")
	flag.Parse()
	if err := run(s); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// choose returns the mutants of a list that are to be run.
func (s settings) choose(all []mutant) (chosen []mutant, err error) {
	named, err := regexp.Compile(s.only)
	if err != nil {
		return nil, err
	}
	if s.from < 0 || s.from >= len(all) {
		return nil, fmt.Errorf("-from: the places are 0 to %d", len(all)-1)
	}
	for _, m := range all[s.from:] {
		if named.MatchString(m.name) {
			chosen = append(chosen, m)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no mutant is called like %q", s.only)
	}
	return chosen, nil
}

func run(s settings) error {
	chosen, err := s.choose(mutants)
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	shared := chosen
	if s.alone {
		shared = nil
	}
	x, err := combine(root, dir, shared)
	if err != nil {
		return err
	}
	results := make([]result, len(chosen))
	slots := make(chan struct{}, max(1, s.jobs))
	var wg sync.WaitGroup
	for i, m := range chosen {
		slots <- struct{}{}
		wg.Go(func() { // owned by this function, ends with its mutant, waited for below
			defer func() { <-slots }()
			results[i] = try(m, x, s.quick)
			results[i].print(m, s.verbose)
		})
	}
	wg.Wait()
	x.verify(results)
	for i, r := range results {
		if errors.Is(r.err, errBaseline) {
			r.print(chosen[i], s.verbose)
		}
	}
	return summary(chosen, results)
}

// summary prints how many mutants were killed, and returns an error that names the others, and why.
func summary(chosen []mutant, results []result) error {
	var alive, untried, unsound []string
	for i, r := range results {
		switch {
		case errors.Is(r.err, errBaseline):
			unsound = append(unsound, chosen[i].name)
		case r.err != nil:
			untried = append(untried, chosen[i].name)
		case r.killer == "":
			alive = append(alive, chosen[i].name)
		}
	}
	fmt.Printf("%d mutants, %d killed\n", len(chosen), len(chosen)-len(alive)-len(untried)-len(unsound))
	var errs []error
	for _, of := range []struct {
		what  string
		names []string
	}{{"survived", alive}, {"baseline fails", unsound}, {"no verdict on", untried}} {
		if len(of.names) > 0 {
			errs = append(errs, fmt.Errorf("%s: %s", of.what, strings.Join(of.names, "; ")))
		}
	}
	return errors.Join(errs...)
}

type result struct {
	killer  string // the test that noticed, or the crash
	crashed bool   // no test was reported as failed
	output  string
	took    time.Duration
	err     error

	pkg  string   // of the tests that noticed
	args []string // the arguments with which they were run
}

// print writes at once what several goroutines would otherwise write among each other's lines.
func (r result) print(m mutant, verbose bool) {
	text := fmt.Sprintf("killed   %-58s %5.1fs  %s\n", m.name, r.took.Seconds(), r.killer)
	switch {
	case r.err != nil:
		text = fmt.Sprintf("ERROR    %-58s %v\n", m.name, r.err)
	case r.killer == "":
		text = fmt.Sprintf("SURVIVED %-58s %5.1fs\n", m.name, r.took.Seconds())
	}
	if verbose || r.err != nil {
		text += r.output + "\n"
	}
	fmt.Print(text)
}

// try runs tests with a mutant, which is in the shared binaries of x or is built by itself. If it
// is to be quick, only the tests named for the mutant are run.
func try(m mutant, x *together, quick bool) result {
	root, began := x.root, time.Now()
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return result{err: err}
	}
	defer os.RemoveAll(dir)
	env, shared, err := x.with(m)
	if err != nil {
		return result{err: err}
	}
	overlay := ""
	if !shared {
		if overlay, err = lay(root, dir, m); err != nil {
			return result{err: err}
		}
	}
	binaries := map[string]string{} // by package, because linking one takes as long as many tests do
	binaryOf := func(pkg string) (string, error) {
		if shared {
			return x.binary(pkg)
		}
		if binaries[pkg] == "" {
			binary := filepath.Join(dir, strings.ReplaceAll(pkg, "/", "_")+".test")
			if err := build(root, overlay, pkg, binary); err != nil {
				return "", err
			}
			binaries[pkg] = binary
		}
		return binaries[pkg], nil
	}
	stage := func(pkgs []string, args ...string) (r result) {
		for _, pkg := range pkgs {
			binary, err := binaryOf(pkg)
			if err != nil {
				return result{err: err}
			}
			r = test(filepath.Join(root, pkg), binary, env, args)
			r.pkg, r.args, r.took = pkg, args, time.Since(began)
			if r.killer != "" || r.err != nil {
				break
			}
		}
		return r
	}
	pkgs := testedBy(m.file)
	named, err := withTests(root, pkgs, m.tests)
	if err != nil {
		return result{err: err}
	}
	r := stage(named, "-test.short", "-test.run="+m.tests)
	if r.killer == "" && r.err == nil && !quick && slices.Contains(pkgs, simulator) {
		r = stage([]string{simulator}, "-test.run=^TestSimulation$", "-simulate.seeds=5000")
	}
	if r.killer == "" && r.err == nil && !quick {
		r = stage(pkgs, "-test.short", "-test.skip=^TestSimulation$")
	}
	return r
}

// withTests returns those of pkgs that have a test whose name matches: the others need not be built.
func withTests(root string, pkgs []string, pattern string) (found []string, err error) {
	run, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	for _, pkg := range pkgs {
		names, err := testNames(root, pkg)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(names, run.MatchString) {
			found = append(found, pkg)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no test is called like %q", pattern)
	}
	return found, nil
}

// testNames returns the names of the tests in a package's files.
func testNames(root, pkg string) (names []string, err error) {
	files, err := filepath.Glob(filepath.Join(root, pkg, "*_test.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range testFunc.FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}
	return names, nil
}

var testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)

const simulator = "internal/simulation"

// testedBy returns the packages whose tests can notice a change of file, the quickest
// first.
func testedBy(file string) []string {
	switch filepath.ToSlash(filepath.Dir(file)) {
	case ".":
		return []string{"."}
	case "internal/quorum":
		return []string{"internal/quorum", simulator, "."}
	case "internal/lockstate":
		return []string{"internal/lockstate", simulator, "."}
	case "internal/protocol":
		return []string{"internal/protocol", "internal/lockstate", simulator, "internal/redisserver", "."}
	}
	return []string{"internal/redisserver", simulator, "."}
}

// errBaseline is the error of a mutant if the test that noticed it fails without the mutant, too.
var errBaseline = errors.New("baseline fails")

// build makes the test binary of a package with the overlay.
func build(root, overlay, pkg, binary string) error {
	cmd := exec.Command("go", "test", "-c", "-o", binary, "-overlay="+overlay, "./"+pkg)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("it does not compile: %w\n%s", err, out)
	}
	return nil
}

// lay writes the broken file and the overlay that puts it in place of the real one.
func lay(root, dir string, m mutant) (string, error) {
	path := filepath.Join(root, m.file)
	text, err := broken(root, m)
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, filepath.Base(m.file))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {path: file}})
	if err != nil {
		return "", err
	}
	return overlay, os.WriteFile(overlay, b, 0o600)
}

// broken returns the text of a mutant's file with the mutant in it.
func broken(root string, m mutant) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return "", fmt.Errorf("the text to break stands %d times in %s: bring the list up to date", n, m.file)
	}
	return strings.Replace(string(text), m.old, m.new, 1), nil
}

var (
	failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)
	crash  = regexp.MustCompile(`(?m)^(panic|fatal error): .*`)
)

// test runs tests of the package in dir, with env in the environment if it is not "".
func test(dir, binary, env string, args []string) result {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args = append([]string{"-test.failfast", "-test.timeout=3m"}, args...)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = dir
	if env != "" {
		cmd.Env = append(os.Environ(), env)
	}
	out, err := cmd.CombinedOutput()
	return verdict(string(out), err)
}

// verdict interprets the output of a test run that ended with err. Of the tests that failed it names
// the innermost one.
func verdict(output string, err error) result {
	r := result{output: output}
	if err == nil {
		if strings.Contains(output, "testing: warning: no tests to run") {
			r.err = errors.New("no tests to run")
		}
		return r
	}
	names := failed.FindAllStringSubmatch(output, -1)
	switch {
	case len(names) > 0:
		r.killer = names[len(names)-1][1]
	case strings.Contains(output, "test timed out"):
		r.killer, r.crashed = "a test that hangs", true
	case crash.MatchString(output):
		r.killer, r.crashed = crash.FindString(output), true
	default: // no test is reported as failed: the runner is wrong, or the tests are
		r.err = fmt.Errorf("the tests failed without naming one: %w", err)
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
		return "", errors.New("run it inside the module")
	}
	return filepath.Dir(mod), nil
}
