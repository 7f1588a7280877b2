package main

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/leasedmutex/leased/internal/race"
)

func page(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash("../../docs/architecture.md"))
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
	_, got, _, err := split(page(t))
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("docs/architecture.md shows another picture: go run ./internal/architecture -write\n%s", want)
	}
}

// Functions are written as Type.method, fields as Type.Field.
func TestThePageNamesFunctionsThatExist(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	l, err := load()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, m := range regexp.MustCompile("`([A-Za-z]+)\\.([A-Za-z]+)`").FindAllStringSubmatch(page(t), -1) {
		typ, name := m[1], m[2]
		switch {
		case name == "go" || name == "lua" || name == "md" || typ == "time":
			continue
		}
		seen++
		found := false
		for _, pkg := range l.packages {
			found = found || l.names[pkg+"."+typ+"."+name] || pkg == typ && l.names[typ+"."+name]
		}
		if !found {
			t.Errorf("the page names %s.%s, which does not exist", typ, name)
		}
	}
	if seen < 20 {
		t.Errorf("only %d names were found", seen)
	}
}

// Where a folder is plain from the text, the page names the file alone.
func TestThePageNamesFilesThatExist(t *testing.T) {
	folders := []string{".", "docs", "internal/lockstate", "internal/protocol", "internal/redisserver", "internal/redisserver/scripts", "internal/simulation"}
	seen := 0
	for _, m := range regexp.MustCompile("`([a-z0-9_/-]+\\.(?:go|lua|json|md))`").FindAllStringSubmatch(page(t), -1) {
		seen++
		found := false
		for _, folder := range folders {
			_, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(folder), filepath.FromSlash(m[1])))
			found = found || err == nil
		}
		if !found {
			t.Errorf("the page names %s, which does not exist", m[1])
		}
	}
	if seen < 20 {
		t.Errorf("only %d names were found", seen)
	}
}
