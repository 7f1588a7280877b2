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
	"go.mod":  "module sample\n\ngo 1.24\n",
	"code.go": "package sample\n\nfunc one() int { return 1 }\n\nfunc two() int { return 2 }\n",
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
`,
	"other_test.go": "//go:build neverbuilt\n\npackage sample\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) {}\n",
}

func TestAMutantIsKilledByATestOrByACrashOfItsOwnOnly(t *testing.T) {
	if race.Enabled {
		t.Skip("it builds and runs programs, one after the other")
	}
	root := t.TempDir()
	for name, text := range sample {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	quick = true
	defer func() { quick = false }()
	const (
		breakOne = "return 1 => return 3"
		breakTwo = "return 2 => return 3"
	)
	for tests, c := range map[string]struct{ edit, killer, err string }{
		"TestOne":          {edit: breakOne, killer: "TestOne/is_one"},
		"TestOne$":         {edit: breakTwo}, // survives
		"TestCrash$":       {edit: breakTwo, killer: "fatal error: sync: unlock of unlocked mutex"},
		"TestCrashAnyhow":  {edit: breakTwo, err: "fail without it, too: fatal error: sync"},
		"TestNoSuch":       {edit: breakOne, err: `no test is called like "TestNoSuch"`},
		"TestNotBuilt":     {edit: breakOne, err: "no tests to run"},
		"TestOne|TestNone": {edit: "return 1 => return 1 +", err: "does not compile"},
		"Test(One|None)":   {edit: "return 7 => return 8", err: "stands 0 times"},
	} {
		t.Run(tests, func(t *testing.T) {
			before, after, _ := strings.Cut(c.edit, " => ")
			r := try(root, mutant{name: "x", file: "code.go", old: before, new: after, tests: tests})
			switch {
			case r.killer != c.killer:
				t.Errorf("killed by %q, want %q; %v\n%s", r.killer, c.killer, r.err, r.output)
			case c.err == "" && r.err != nil || c.err != "" && (r.err == nil || !strings.Contains(r.err.Error(), c.err)):
				t.Errorf("%v, want %q", r.err, c.err)
			}
		})
	}
}
