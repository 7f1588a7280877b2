package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/race"
)

func readPage(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestThePictureIsWhatTheCodeDoes(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	want, err := picture()
	if err != nil {
		t.Fatal(err)
	}
	_, got, _, err := split(readPage(t, "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("docs/architecture.md shows another picture: go run ./internal/architecture -write\n%s", want)
	}
}

// pages are those that say how the code works, and so have to change with it.
var pages = []string{"architecture.md", "design.md"}

// inCode calls f for each text that a page has in code spans, and fails if these are few. Blocks
// of code, and the picture, are left out.
func inCode(t *testing.T, name, pattern string, f func(groups []string)) {
	t.Helper()
	text := regexp.MustCompile("(?ms)^```.*?^```$").ReplaceAllString(readPage(t, name), "")
	all := regexp.MustCompile("`"+pattern+"`").FindAllStringSubmatch(text, -1)
	if len(all) < 20 {
		t.Errorf("%s: only %d names were found", name, len(all))
	}
	for _, groups := range all {
		f(groups)
	}
}

// Functions are written as Type.method, fields as Type.Field, both with or without the package's
// name before them; calls may follow with arguments. Names of telemetry begin with "leased." too:
// a test of the root package compares them.
func TestThePagesNameFunctionsThatExist(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	l, err := load()
	if err != nil {
		t.Fatal(err)
	}
	others := map[string]bool{"mu": true, "error": true} // a variable of an example; the attribute error.type
	for _, name := range pages {
		inCode(t, name, `\*?([A-Za-z]+)\.([A-Za-z]+)(?:\([^`+"`"+`]*\))?`, func(m []string) {
			typ, member := m[1], m[2]
			switch {
			case member == "go" || member == "lua" || member == "md" || member == "mod" || member == "work":
				return
			case l.imports[typ] || others[typ]:
				return
			case typ == "leased" && strings.ToLower(member) == member:
				return
			}
			if !slices.ContainsFunc(l.packages, func(pkg string) bool {
				return l.names[pkg+"."+typ+"."+member] || pkg == typ && l.names[typ+"."+member]
			}) {
				t.Errorf("%s names %s.%s, which does not exist", name, typ, member)
			}
		})
	}
}

// A word in a code span is the name of something: in Go, in a script, or of a value.
func TestThePagesNameOnlyWhatTheCodeHas(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	words := map[string]bool{}
	for _, pattern := range []string{"*.go", "go.mod", "Makefile", "leasedtest/*.go", "internal/*/*.go", "internal/redisserver/scripts/*.lua"} {
		files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(pattern)))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, word := range regexp.MustCompile(`\w+`).FindAllString(string(text), -1) {
				words[word] = true
			}
			words[filepath.Base(file)] = true
		}
	}
	for _, name := range pages {
		inCode(t, name, `(\w+)(?:\([^`+"`"+`]*\))?`, func(m []string) {
			if !words[m[1]] {
				t.Errorf("%s names %s, which no code has", name, m[1])
			}
		})
	}
}

// Where a folder is plain from the text, a page names the file alone.
func TestThePagesNameFilesThatExist(t *testing.T) {
	folders := []string{".", "docs", "internal/lockstate", "internal/protocol", "internal/quorum", "internal/redisserver", "internal/redisserver/scripts", "internal/simulation"}
	for _, name := range pages {
		inCode(t, name, `([a-z0-9_/-]+\.(?:go|lua|json|md|yaml))`, func(m []string) {
			if !slices.ContainsFunc(folders, func(folder string) bool {
				_, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(folder), filepath.FromSlash(m[1])))
				return err == nil
			}) {
				t.Errorf("%s names %s, which does not exist", name, m[1])
			}
		})
	}
}
