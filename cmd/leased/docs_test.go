package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
)

// Whatever the pages show of this program has to be a command line that it takes.
func TestTheCommandLinesOfThePagesAreUnderstood(t *testing.T) {
	found := 0
	for _, file := range []string{"../../docs/cli.md", "../../README.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			_, line, shown := strings.Cut(" "+strings.TrimSpace(line), " leased ")
			if !shown || line == "run" || strings.HasPrefix(line, "…") || !regexp.MustCompile(`^(run|inspect|ls|top|unlock|doctor|bench|demo|man|completion) ?`).MatchString(line) {
				continue
			}
			// Prose and what an aligned column says about a command are not part of it.
			line, _, _ = strings.Cut(line, "  ")
			line, _, _ = strings.Cut(line, " | ")
			line = strings.NewReplacer("'", "", "[flags] ", "", "[ARGUMENT...]", "").Replace(line)
			if strings.ContainsAny(line, "`") {
				continue
			}
			args := strings.Fields(line)
			c, rest, err := newRoot(streams{strings.NewReader(""), io.Discard, io.Discard}).Find(args)
			if err == nil {
				err = c.ParseFlags(rest)
			}
			if err == nil && c.Args != nil {
				err = c.ValidateArgs(c.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: leased %s: %v", file, line, err)
			}
			found++
		}
	}
	if found < 15 {
		t.Errorf("only %d command lines were found", found)
	}
}
