package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A mutant whose text is gone kills nothing and hides that; so the list is
// checked with every run of the tests, which is cheap.
func TestEveryMutantsTextStandsExactlyOnce(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		if names[m.name] {
			t.Errorf("%s: listed twice", m.name)
		}
		names[m.name] = true
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
		} else if n := strings.Count(string(text), m.old); n != 1 {
			t.Errorf("%s: its text stands %d times in %s", m.name, n, m.file)
		}
	}
	if len(mutants) < 25 {
		t.Errorf("only %d mutants", len(mutants))
	}
}

// Those that a run begins with; without one it is in error.
func TestEveryMutantNamesATest(t *testing.T) {
	all := map[string][]string{} // the tests of a package
	for _, m := range mutants {
		run, err := regexp.Compile(m.tests)
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if !slices.ContainsFunc(testedBy(m.file), func(pkg string) bool {
			if all[pkg] == nil {
				all[pkg], err = testNames(filepath.Join("..", ".."), pkg)
				if err != nil {
					t.Fatal(err)
				}
			}
			return slices.ContainsFunc(all[pkg], run.MatchString)
		}) {
			t.Errorf("%s: no test is called like %q", m.name, m.tests)
		}
	}
}
