package leased_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var pages = []string{"README.md", "docs/architecture.md", "docs/design.md", "docs/reliability.md", "docs/deployments.md", "CHANGELOG.md", "CONTRIBUTING.md"}

// A snippet that is never compiled is wrong sooner or later. So the README's are parts
// of example_test.go, which is compiled and run.
func TestReadmeShowsOnlyCodeFromTheExamples(t *testing.T) {
	readme, examples := readText(t, "README.md"), readText(t, "example_test.go")
	blocks := fenced(readme, "go")
	if len(blocks) == 0 {
		t.Fatal("README.md has no ```go block, or they are no longer found")
	}
	for _, block := range blocks {
		if diff := missing(block, examples); diff != "" {
			t.Errorf("README.md:%d: not in example_test.go; nearest (- README, + example):\n%s", block.line, diff)
		}
	}
}

// The statements, the right ones and the wrong ones, are run against PostgreSQL there.
func TestReadmeShowsOnlySQLFromTheFlashSale(t *testing.T) {
	readme, store := readText(t, "README.md"), readText(t, "examples/flashsale/store.go")
	blocks := fenced(readme, "sql")
	if len(blocks) == 0 {
		t.Fatal("README.md has no ```sql block, or they are no longer found")
	}
	for _, block := range blocks {
		for i, line := range block.lines {
			if line = strings.TrimSpace(strings.Replace(line, "--", "//", 1)); !strings.Contains(store, line) {
				t.Errorf("README.md:%d: not in examples/flashsale/store.go: %s", block.line+i, line)
			}
		}
	}
}

// The error of Unlock may be the only sign that another process was inside, so no page,
// comment or example drops it by a bare defer. Locks of the sync API have no error to drop.
func TestReadmeAndExamplesKeepTheErrorOfEveryUnlock(t *testing.T) {
	dropped := regexp.MustCompile(`(?m)^.*defer (lease|l|first|second|writer)\.Unlock\(\).*$`)
	files := append([]string{"example_test.go", "examples/tracing/stock.go", "examples/flashsale/server.go"}, pages...)
	library, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range library {
		if !strings.HasSuffix(name, "_test.go") {
			files = append(files, name)
		}
	}
	for _, name := range files {
		for _, line := range dropped.FindAllString(readText(t, name), -1) {
			t.Errorf("%s drops the error: %s", name, strings.TrimSpace(line))
		}
	}
}

func TestReadmeCheckNoticesOneChangedLine(t *testing.T) {
	const code = "func f() {\n\tif a {\n\t\tb()\n\t}\n\tc()\n}\n"
	for _, c := range []struct {
		block string
		want  string // the diff, "" if the block is found
	}{
		{"if a {\n\tb()\n}\nc()", ""},
		{"    if a {\n    \tb()\n    }", ""}, // indented otherwise as a whole
		{"if a {\n\tB()\n}", "  if a {\n- \tB()\n+ \tb()\n  }\n"},
		{"if a {\nb()\n}", "  if a {\n- b()\n+ \tb()\n  }\n"},
		{"b()\nc()", "- b()\n+ }\n  c()\n"}, // a line was left out
	} {
		if got := missing(snippet{lines: strings.Split(c.block, "\n")}, code); got != c.want {
			t.Errorf("block\n%s\ngot diff\n%swant\n%s", c.block, got, c.want)
		}
	}
	if blocks := fenced("text\n```go\na()\n```\n```sh\nb\n```\n  ```go\n  c()\n  ```\n", "go"); len(blocks) != 2 ||
		blocks[0].line != 3 || strings.TrimSpace(blocks[1].lines[0]) != "c()" {
		t.Errorf("got blocks %+v, want a() from line 3 and c()", blocks)
	}
}

// A dashboard or a query made from the page has to find something.
func TestReadmeNamesTheInstrumentsAndAttributesThatExist(t *testing.T) {
	var library strings.Builder
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") && name != "doc.go" {
			library.WriteString(readText(t, name))
		}
	}
	named := regexp.MustCompile("`(leased\\.[a-z_.]+)`").FindAllStringSubmatch(readText(t, "README.md"), -1)
	if len(named) < 10 {
		t.Fatalf("only %d names were found", len(named))
	}
	for _, m := range named {
		if !strings.Contains(library.String(), `"`+m[1]+`"`) {
			t.Errorf("README.md names %s, which the library does not", m[1])
		}
	}
}

// Pages name files of this tree; one that was renamed leaves a dead link.
func TestReadmeAndDocsLinkToFilesThatExist(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]+)[^)]*\)`)
	seen := 0
	for _, page := range pages {
		for _, m := range link.FindAllStringSubmatch(readText(t, page), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			seen++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), filepath.FromSlash(m[1]))); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
			}
		}
	}
	if seen == 0 {
		t.Error("no links were found")
	}
}

// The design's table of files is how a newcomer finds the way.
func TestReadmeAndDocsNameEveryFileOfThePackage(t *testing.T) {
	page := readText(t, "docs/design.md")
	_, table, _ := strings.Cut(page, "\n## 8. ")
	table, _, found := strings.Cut(table, "\nLater: ")
	if !found {
		t.Fatal("docs/design.md has no table of files, or it is no longer found")
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`([a-z_]+\\.go)`").FindAllStringSubmatch(table, -1) {
		named[m[1]] = true
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") && !named[name] {
			t.Errorf("docs/design.md does not name %s", name)
		}
		delete(named, name)
	}
	for name := range named {
		t.Errorf("docs/design.md names %s, which does not exist", name)
	}
}

// So are tests, whose names say what they prove.
func TestReadmeAndDocsNameTestsThatExist(t *testing.T) {
	var tests strings.Builder
	for _, dir := range []string{".", "internal/faults", "internal/lockstate", "internal/protocol", "internal/redisserver", "internal/simulation", "internal/syncsuite", "examples/tracing", "examples/flashsale"} {
		files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			tests.WriteString(readText(t, name))
		}
	}
	seen := 0
	for _, page := range pages {
		for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(readText(t, page), -1) {
			seen++
			if !strings.Contains(tests.String(), "\nfunc "+name) { // or its beginning, as of -run
				t.Errorf("%s names %s, which does not exist", page, name)
			}
		}
	}
	if seen == 0 {
		t.Error("no names of tests were found")
	}
}

// snippet is one fenced block of code.
type snippet struct {
	line  int // of its first line of code, from 1
	lines []string
}

// fenced returns the blocks of a language.
func fenced(text, language string) []snippet {
	var blocks []snippet
	inside := false
	for i, line := range strings.Split(text, "\n") {
		switch fence := strings.TrimSpace(line); {
		case !inside && fence == "```"+language:
			inside = true
			blocks = append(blocks, snippet{line: i + 2})
		case inside && fence == "```":
			inside = false
		case inside:
			last := &blocks[len(blocks)-1]
			last.lines = append(last.lines, line)
		}
	}
	return blocks
}

// missing returns "" if the block's lines follow one another in code, indented
// as a whole by any amount, or else how they differ from the likest lines there.
func missing(block snippet, code string) string {
	want := dedent(block.lines)
	lines := strings.Split(code, "\n")
	var nearest []string
	most := -1
	for i := 0; i+len(want) <= len(lines); i++ {
		got := dedent(lines[i : i+len(want)])
		equal := 0
		for j := range want {
			if got[j] == want[j] {
				equal++
			}
		}
		if equal > most {
			nearest, most = got, equal
		}
	}
	if most == len(want) {
		return ""
	}
	var b strings.Builder
	for j, line := range want {
		switch {
		case j < len(nearest) && nearest[j] == line:
			fmt.Fprintf(&b, "  %s\n", line)
		case j < len(nearest):
			fmt.Fprintf(&b, "- %s\n+ %s\n", line, nearest[j])
		default:
			fmt.Fprintf(&b, "- %s\n", line)
		}
	}
	return b.String()
}

// dedent removes the white space that all lines begin with, but for empty ones.
func dedent(lines []string) []string {
	indent, found := "", false
	for _, line := range lines {
		text := strings.TrimLeft(line, " \t")
		if text == "" {
			continue
		}
		if own := line[:len(line)-len(text)]; !found || len(own) < len(indent) {
			indent, found = own, true
		}
	}
	out := make([]string, len(lines))
	for i, line := range lines {
		out[i] = strings.TrimRight(strings.TrimPrefix(line, indent), " \t\r")
	}
	return out
}

func readText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
