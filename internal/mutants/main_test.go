package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/race"
)

// sample is a module whose code can be broken in each way that the command tells apart.
var sample = map[string]string{
	"go.mod": "module sample\n\ngo 1.24\n",
	"code.go": "package sample\n\nfunc one() int { return 1 }\n\nfunc two() int { return 2 }\n\nconst three = 3\n\n" +
		"var four int\n\nfunc init() {\nloop:\n\tfor four < 4 {\n\t\tfour++\n\t\tcontinue loop\n\t}\n}\n\nvar five int\n\nfunc init() {\n\tfive = 5\n}\n",
	"code_test.go": `package sample

import (
	"sync"
	"testing"
)

func TestOne(t *testing.T) {
	t.Run("is one", func(t *testing.T) {
		if one() != 1 {
			t.Error(one())
		}
	})
}

func TestCrash(t *testing.T) {
	if two() != 2 {
		new(sync.Mutex).Unlock()
	}
}

func TestCrashAnyhow(t *testing.T) { new(sync.Mutex).Unlock() }

func TestFailsAnyhow(t *testing.T) {
	t.Run("always", func(t *testing.T) { t.Error("whatever the code does") })
}

func TestOthers(t *testing.T) {
	if three != 3 || four != 4 || five != 5 {
		t.Error(three, four, five)
	}
}
`,
	loader: "package redisserver\n\nimport (\n\t\"embed\"\n)\n\n//go:embed scripts/*.lua\nvar scriptFiles embed.FS\n",
	"internal/redisserver/scripts/answer.lua": "return 1\n",
	"internal/redisserver/script_test.go": `package redisserver

import "testing"

func TestAnswer(t *testing.T) {
	if b, err := scriptFiles.ReadFile("scripts/answer.lua"); err != nil || string(b) != "return 1\n" {
		t.Error(string(b), err)
	}
}
`,
	"other_test.go": "//go:build neverbuilt\n\npackage sample\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) {}\n",
}

// makeSample writes the sample and returns its folder, in which the tests named for a mutant are run.
func makeSample(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range sample {
		file := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestAMutantIsKilledByATestOrByACrashOfItsOwnOnly(t *testing.T) {
	if race.Enabled {
		t.Skip("it builds and runs programs, one after the other")
	}
	alone, err := combine(makeSample(t), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	const (
		breakOne = "return 1 => return 3"
		breakTwo = "return 2 => return 3"
	)
	for tests, c := range map[string]struct{ edit, killer, err string }{
		"TestOne":          {edit: breakOne, killer: "TestOne/is_one"},
		"TestOne$":         {edit: breakTwo}, // survives
		"TestCrash$":       {edit: breakTwo, killer: "fatal error: sync: unlock of unlocked mutex"},
		"TestCrashAnyhow":  {edit: breakTwo, err: "baseline fails: without the mutant, too: fatal error: sync"},
		"TestFailsAnyhow":  {edit: breakOne, err: "baseline fails: without the mutant, too: TestFailsAnyhow/always"},
		"TestNoSuch":       {edit: breakOne, err: `no test is called like "TestNoSuch"`},
		"TestNotBuilt":     {edit: breakOne, err: "no tests to run"},
		"TestOne|TestNone": {edit: "return 1 => return 1 +", err: "does not compile"},
		"Test(One|None)":   {edit: "return 7 => return 8", err: "stands 0 times"},
	} {
		t.Run(tests, func(t *testing.T) {
			before, after, _ := strings.Cut(c.edit, " => ")
			results := []result{try(mutant{name: "x", file: "code.go", old: before, new: after, tests: tests}, alone, true)}
			alone.verify(results)
			r := results[0]
			switch {
			case r.killer != c.killer:
				t.Errorf("killed by %q, want %q; %v\n%s", r.killer, c.killer, r.err, r.output)
			case c.err == "" && r.err != nil || c.err != "" && (r.err == nil || !strings.Contains(r.err.Error(), c.err)):
				t.Errorf("%v, want %q", r.err, c.err)
			}
		})
	}
}

func TestMutantsThatShareABinaryAreToldApart(t *testing.T) {
	if race.Enabled {
		t.Skip("it builds and runs programs, one after the other")
	}
	root := makeSample(t)
	cases := []struct {
		mutant
		shares bool
		killer string
	}{
		{mutant{"one", "code.go", "return 1", "return 3", "TestOne"}, true, "TestOne/is_one"},
		{mutant{"the same", "code.go", "return 1 ", "return 1 + 1 - 1 ", "TestOne"}, true, ""},
		{mutant{"crash", "code.go", "return 2", "return 3", "TestCrash$"}, true, "fatal error: sync: unlock of unlocked mutex"},
		{mutant{"not the tests'", "code.go", " return 2", " return 4", "TestOne"}, true, ""},
		{mutant{"a constant", "code.go", "three = 3", "three = 4", "TestOthers"}, false, ""},
		{mutant{"a loop with a label", "code.go", "four < 4", "four < 5", "TestOthers"}, false, ""},
		{mutant{"no result", "code.go", "five = 5", "five = 6", "TestOthers"}, true, "TestOthers"},
		{mutant{"a script", "internal/redisserver/scripts/answer.lua", "1", "2", "TestAnswer"}, true, "TestAnswer"},
	}
	var all []mutant
	for _, c := range cases {
		all = append(all, c.mutant)
	}
	x, err := combine(root, t.TempDir(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if _, shares, err := x.with(c.mutant); shares != c.shares || err != nil {
			t.Errorf("%s: shares a binary: %v, %v", c.name, shares, err)
		}
		if !c.shares {
			continue
		}
		if r := try(c.mutant, x, true); r.killer != c.killer || r.err != nil {
			t.Errorf("%s: killed by %q, want %q; %v\n%s", c.name, r.killer, c.killer, r.err, r.output)
		}
	}
}

// A test that always fails would count as noticing each mutant for which it is named.
func TestATestThatFailsWithoutAMutantKillsNone(t *testing.T) {
	if race.Enabled {
		t.Skip("it builds and runs programs, one after the other")
	}
	all := []mutant{
		{"a test fails anyhow", "code.go", "return 1", "return 3", "TestFailsAnyhow"},
		{"the same", "code.go", "return 1 ", "return 4 ", "TestFails"},
		{"a test crashes anyhow", "code.go", "return 2", "return 3", "TestCrashAnyhow"},
		{"a script", "internal/redisserver/scripts/answer.lua", "1", "2", "TestFailsAnyhow"},
		{"killed", "code.go", "return 1 }", "return 5 }", "TestOne"},
		{"killed, too", "code.go", "return 1", "return 6", "TestO"},
		{"not in the binary", "code.go", "three = 3", "three = 4", "TestOthers"},
		{"survives", "code.go", "return 2 ", "return 2 + 1 - 1 ", "TestOne"},
	}
	x, err := combine(makeSample(t), t.TempDir(), all)
	if err != nil {
		t.Fatal(err)
	}
	results := make([]result, len(all))
	for i, m := range all {
		results[i] = try(m, x, true)
	}
	x.verify(results)
	const want = "survived: survives\nbaseline fails: a test fails anyhow; the same; a test crashes anyhow; a script"
	if err := summary(all, results); err == nil || err.Error() != want {
		t.Errorf("it says\n%v, want\n%s", err, want)
		for i, r := range results {
			t.Log(all[i].name, r.killer, r.err)
		}
	}
	if x.baselines != 5 {
		t.Errorf("%d baselines were run, want 5: one of all tests, and as that fails of each of them, and one of the crash", x.baselines)
	}

	x.baselines = 0
	sound := []mutant{all[4], all[5], all[6]}
	results = results[:0]
	for _, m := range sound {
		results = append(results, try(m, x, true))
	}
	x.verify(results)
	if err := summary(sound, results); err != nil || x.baselines != 1 {
		t.Errorf("where all noticed, %d baselines, want 1: %v", x.baselines, err)
	}
}

func TestAChoiceOfNoMutantIsRefused(t *testing.T) {
	all := []mutant{{name: "one"}, {name: "two"}, {name: "three"}}
	for s, want := range map[settings]string{
		{}:                      "one two three",
		{only: "^t"}:            "two three",
		{only: "^t", from: 2}:   "three",
		{from: -1}:              "-from: the places are 0 to 2",
		{from: 3}:               "-from: the places are 0 to 2",
		{only: "four"}:          `no mutant is called like "four"`,
		{only: "one", from: 1}:  `no mutant is called like "one"`,
		{only: "(", from: 1000}: "error parsing regexp: missing closing ): `(`",
	} {
		var names []string
		chosen, err := s.choose(all)
		for _, m := range chosen {
			names = append(names, m.name)
		}
		got := strings.Join(names, " ")
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%+v: %s, want %s", s, got, want)
		}
	}
}
