package main

import (
	"os"
	"path/filepath"
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
