package leased_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// An operator who searches a page for a line of the log has to find it there, as it is
// logged. Where the code puts a value into the text, the page has "…".
func TestDocsHaveARowForEveryLogLine(t *testing.T) {
	rows := rowsOf(t, "docs/operating.md", "Log lines")
	found := map[string]bool{}
	for _, line := range loggedLines(t) {
		found[line.text] = true
		row, ok := rows[line.text]
		switch {
		case !ok:
			t.Errorf("%s: docs/operating.md has no row for %q", line.at, line.text)
		case line.level == "Debug" && row[1] != "Debug": // the details of a line that has a row
		case line.level != "" && row[1] != line.level:
			t.Errorf("%s: docs/operating.md says that %q is logged at %s, not %s", line.at, line.text, row[1], line.level)
		}
	}
	if len(found) < 20 {
		t.Errorf("only %d lines of the log were found", len(found))
	}
	for text := range rows {
		if !found[text] {
			t.Errorf("docs/operating.md has a row for %q, which is not logged", text)
		}
	}
}

// The reason is what an operator has when a lease was lost, and its text alone does not say where to look.
func TestDocsSayWhereToLookForEveryReasonOfALoss(t *testing.T) {
	_, page, found := strings.Cut(readText(t, "docs/operating.md"), "\n### Why a lease was lost\n")
	if !found {
		t.Fatal("docs/operating.md does not say why leases are lost")
	}
	page, _, _ = strings.Cut(page, "\n### ")
	page = strings.Join(strings.Fields(page), " ")
	source := readText(t, "internal/lockstate/reason.go")
	reasons := regexp.MustCompile(`(?m)^\t\t\w+: +"(.+)",$`).FindAllStringSubmatch(source, -1)
	if len(reasons) < 10 {
		t.Errorf("only %d reasons were found", len(reasons))
	}
	for _, m := range reasons {
		if !strings.Contains(page, "`"+m[1]+"`") {
			t.Errorf("docs/operating.md does not say where to look if the reason of a loss is %q", m[1])
		}
	}
}

func TestDocsHaveARowForEverySentinel(t *testing.T) {
	rows := rowsOf(t, "docs/operating.md", "Errors")
	sentinels := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\t(Err[A-Z]\w*) += `).FindAllStringSubmatch(readText(t, "errors.go"), -1) {
		sentinels[m[1]] = true
		if rows[m[1]] == nil {
			t.Errorf("docs/operating.md has no row for %s", m[1])
		}
	}
	if len(sentinels) < 10 {
		t.Errorf("only %d sentinels were found", len(sentinels))
	}
	for name := range rows {
		if !sentinels[name] {
			t.Errorf("docs/operating.md has a row for %s, which does not exist", name)
		}
	}
}

// What Prometheus calls the metrics is not in the code. The dashboard has it, and is
// compared with what an exporter exports.
func TestDocsAlertOnWhatTheDashboardQueries(t *testing.T) {
	dashboard, n := readText(t, "docs/grafana-dashboard.json"), 0
	for _, name := range regexp.MustCompile(`\bleased_[a-z_]+`).FindAllString(readText(t, "docs/operating.md"), -1) {
		n++
		if !regexp.MustCompile(`\b` + name + `(_bucket|_count|_sum)?\b`).MatchString(dashboard) {
			t.Errorf("docs/operating.md names %s, which the dashboard does not", name)
		}
	}
	if n < 5 {
		t.Errorf("only %d names were found", n)
	}
}

// rowsOf returns the table of a page's section by the code in its first column.
func rowsOf(t *testing.T, page, section string) map[string][]string {
	t.Helper()
	_, text, found := strings.Cut(readText(t, page), "\n## "+section+"\n")
	if !found {
		t.Fatalf("%s has no section %q", page, section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	rows := map[string][]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|(.*)\\|$").FindAllStringSubmatch(text, -1) {
		cells := []string{m[1]}
		for _, cell := range strings.Split(m[2], "|") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows[m[1]] = cells
	}
	return rows
}

// logLine is a call of the library that logs.
type logLine struct{ text, level, at string }

// loggedLines finds what the library logs: the third argument of throttledLog's write and
// print, and what is given to a slog.Logger. A text that a variable holds is looked for
// in what the function assigns to it.
func loggedLines(t *testing.T) []logLine {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var lines []logLine
	set := token.NewFileSet()
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Body == nil || f.Name.Name == "write" || f.Name.Name == "print" {
				continue // these two pass on what they are given
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				method, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				at := set.Position(call.Pos()).String()
				switch verb := method.Sel.Name; {
				case (verb == "write" || verb == "print") && len(call.Args) >= 3:
					level := levelOf(call.Args[0])
					if variable, ok := call.Args[2].(*ast.Ident); ok {
						assigned := assignedTo(f, variable.Name)
						if len(assigned) == 0 {
							t.Errorf("%s: this test does not see what is logged", at)
						}
						for _, line := range assigned {
							if level != "" {
								line.level = level
							}
							line.at = at
							lines = append(lines, line)
						}
						break
					}
					text, ok := textOf(call.Args[2])
					if !ok {
						t.Errorf("%s: this test does not see what is logged", at)
					}
					lines = append(lines, logLine{text, level, at})
				case verb == "Debug" || verb == "Info" || verb == "Warn" || verb == "Error":
					if len(call.Args) == 0 {
						break // the Error of an error
					}
					if text, ok := textOf(call.Args[0]); ok && strings.HasPrefix(text, "leased: ") {
						lines = append(lines, logLine{strings.TrimPrefix(text, "leased: "), verb, at})
					}
				}
				return true
			})
		}
	}
	return lines
}

// textOf returns the text of an expression of string literals, with … for what is none.
func textOf(e ast.Expr) (text string, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		left, okLeft := textOf(e.X)
		right, okRight := textOf(e.Y)
		if !okLeft {
			left = "…"
		}
		if !okRight {
			right = "…"
		}
		return left + right, okLeft || okRight
	}
	return "", false
}

// levelOf returns "Warn" for slog.LevelWarn, and nothing for a variable.
func levelOf(e ast.Expr) string {
	if constant, ok := e.(*ast.SelectorExpr); ok {
		return strings.TrimPrefix(constant.Sel.Name, "Level")
	}
	return ""
}

// assignedTo returns the texts that a function assigns to a variable, with the levels that
// the same statements assign.
func assignedTo(f *ast.FuncDecl, variable string) []logLine {
	var lines []logLine
	ast.Inspect(f.Body, func(n ast.Node) bool {
		assign, ok := n.(*ast.AssignStmt)
		if !ok || len(assign.Lhs) != len(assign.Rhs) {
			return true
		}
		var line logLine
		seen := false
		for i, left := range assign.Lhs {
			name, ok := left.(*ast.Ident)
			if !ok {
				continue
			}
			switch name.Name {
			case variable:
				line.text, seen = textOf(assign.Rhs[i])
			case "level":
				line.level = levelOf(assign.Rhs[i])
			}
		}
		if seen {
			lines = append(lines, line)
		}
		return true
	})
	return lines
}

// pages are what a user reads: the files at the root, everything in docs, and what stands
// beside the examples.
var pages = func() []string {
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md", "examples/*.md", "examples/*/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			panic(err)
		}
		for _, name := range files {
			all = append(all, filepath.ToSlash(name))
		}
	}
	return all
}()

// shownCode is the text of the files that snippets in a language may come from. Each of
// them is compiled or run: example_test.go by this package's tests, the others by those of
// the modules under examples and adapters.
func shownCode(t *testing.T, extension string, files ...string) string {
	t.Helper()
	var code strings.Builder
	for _, name := range files {
		code.WriteString(readText(t, name) + "\n")
	}
	for _, pattern := range []string{"examples/*/*", "adapters/*/example_test"} {
		found, err := filepath.Glob(pattern + extension)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range found {
			code.WriteString(readText(t, name) + "\n")
		}
	}
	return code.String()
}

// A snippet that is never compiled is wrong sooner or later. So those of every page are
// parts of example_test.go and of the programs in examples.
func TestReadmeAndDocsShowOnlyCodeFromTheExamples(t *testing.T) {
	for _, language := range []struct {
		name, code string
		least      int // blocks, else they are no longer found
	}{
		{"go", shownCode(t, ".go", "example_test.go", "leasedtest/example_test.go"), 10},
		{"python", shownCode(t, ".py"), 1},
		{"yaml", shownCode(t, ".yaml"), 1},
	} {
		n := 0
		for _, page := range pages {
			for _, block := range fenced(readText(t, page), language.name) {
				n++
				if diff := missing(block, language.code); diff != "" {
					t.Errorf("%s:%d: not in the examples; nearest (- page, + example):\n%s", page, block.line, diff)
				}
			}
		}
		if n < language.least {
			t.Errorf("%d blocks of %s were found, want at least %d", n, language.name, language.least)
		}
	}
}

// What comes first in the README is a program that can be pasted and run, for whoever does
// not read on. The test in examples/start runs it.
func TestReadmeHasAWholeProgramInItsFirst40Lines(t *testing.T) {
	first := fenced(readText(t, "README.md"), "go")[0]
	want := strings.TrimSuffix(readText(t, "examples/start/main.go"), "\n")
	if got := strings.Join(first.lines, "\n"); got != want {
		t.Errorf("the README's first program is not examples/start/main.go:\n%s", missing(first, want))
	}
	if last := first.line + len(first.lines); last > 40 {
		t.Errorf("it ends in line %d", last)
	}
}

// The statements, the right ones and the wrong ones, are run against PostgreSQL there.
func TestDocsShowOnlySQLFromTheFlashSale(t *testing.T) {
	store, n := readText(t, "examples/flashsale/store.go")+readText(t, "examples/flashsale/snippet_test.go")+readText(t, "examples/flashsale/testdata/sell.sql"), 0
	for _, page := range pages {
		for _, block := range fenced(readText(t, page), "sql") {
			n++
			for i, line := range block.lines {
				if line = strings.TrimSpace(strings.Replace(line, "--", "//", 1)); !strings.Contains(store, line) {
					t.Errorf("%s:%d: not in examples/flashsale: %s", page, block.line+i, line)
				}
			}
		}
	}
	if n == 0 {
		t.Error("no page has a ```sql block, or they are no longer found")
	}
}

// The error of Unlock may be the only sign that another process was inside, so no page,
// comment or example drops it, unless it assigns it to _ and a comment in the same line says why.
// Locks of the sync API have no error to drop.
func TestReadmeAndExamplesKeepTheErrorOfEveryUnlock(t *testing.T) {
	const (
		ends   = `(?:Unlock|UnlockContext|Resign)\([^)]*\)`
		leases = `(?:lease|l|first|second|writer|elector)`
	)
	dropped := regexp.MustCompile(`(?m)^.*(?:(?:defer|go) ` + leases + `\.` + ends + `|_ = [\w.]+\.` + ends + `[ })(;]*$).*$|^\s*` + leases + `\.` + ends + `$`)
	for line, want := range map[string]bool{
		"\tdefer lease.UnlockContext(ctx)":          true,
		"\tgo lease.Unlock()":                       true,
		"\tlease.Unlock()":                          true,
		"\t_ = lease.UnlockContext(ctx)":            true,
		"\tdefer lease.Unlock()":                    true,
		"\t_ = lease.Unlock()":                      true,
		"\tdefer func() { _ = elector.Resign() }()": true,
		"\t_ = lease.Unlock() // it was lost":       false,
		"\terr = errors.Join(err, lease.Unlock())":  false,
		"\tmu.Lock(); defer mu.Unlock()":            false,
	} {
		if got := dropped.MatchString(line); got != want {
			t.Errorf("whether %q drops an error is judged %v", line, got)
		}
	}
	files := append([]string{"example_test.go", "example_options_test.go", "leasedtest/example_test.go"}, pages...)
	for _, pattern := range []string{"examples/*/*.go", "adapters/*/*.go"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		if len(found) == 0 {
			t.Errorf("%s has no file", pattern)
		}
		files = append(files, found...)
	}
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

// Work under the lease's context alone goes on after Ctrl-C, or after its caller's deadline.
func TestDocsHaveWorkEndWithItsCallersContextToo(t *testing.T) {
	asked := regexp.MustCompile(`(?:Cause|AfterFunc)\(lease\.Context\(\)|lease\.Context\(\)\.(?:Done|Err)\(`) // whether it has ended, and why
	for _, page := range pages {
		for _, block := range fenced(readText(t, page), "go") {
			for i, line := range block.lines {
				if strings.Contains(asked.ReplaceAllString(line, ""), "lease.Context()") {
					t.Errorf("%s:%d works under the lease's context alone: %s", page, block.line+i, strings.TrimSpace(line))
				}
			}
		}
	}
}

// go doc shows examples beside what they are of, and nobody looks for them elsewhere.
func TestEachOptionIsUsedInAnExample(t *testing.T) {
	examples := readText(t, "example_test.go") + readText(t, "example_options_test.go")
	options := regexp.MustCompile(`(?m)^func (With\w+)\(`).FindAllStringSubmatch(readText(t, "options.go"), -1)
	if len(options) < 10 {
		t.Fatalf("only %d options were found", len(options))
	}
	for _, m := range options {
		if !strings.Contains(examples, "leased."+m[1]+"(") {
			t.Errorf("no example uses %s", m[1])
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
	n := 0
	for _, page := range pages {
		for _, m := range regexp.MustCompile("`(leased\\.[a-z_.]+)`").FindAllStringSubmatch(readText(t, page), -1) {
			n++
			if !strings.Contains(library.String(), `"`+m[1]+`"`) {
				t.Errorf("%s names %s, which the library does not", page, m[1])
			}
		}
	}
	if n < 10 {
		t.Fatalf("only %d names were found", n)
	}
}

// Pages name files of this tree; one that was renamed leaves a dead link.
func TestReadmeAndDocsLinkToFilesThatExist(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)`)
	files, headings := 0, 0
	for _, page := range pages {
		prose := regexp.MustCompile("(?ms)^ *```.*?^ *```$").ReplaceAllString(readText(t, page), "")
		for _, m := range link.FindAllStringSubmatch(prose, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			files++
			target := page
			if m[1] != "" {
				target = path.Join(path.Dir(page), m[1])
			}
			if _, err := os.Stat(filepath.FromSlash(target)); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
				continue
			}
			if m[2] != "" && strings.HasSuffix(target, ".md") {
				headings++
				if !slices.Contains(anchors(readText(t, target)), m[2]) {
					t.Errorf("%s links to %s#%s, and there is no such heading", page, m[1], m[2])
				}
			}
		}
	}
	if files < 100 || headings < 20 {
		t.Errorf("only %d links were found, %d of them to headings", files, headings)
	}
}

// A page that the index does not have is found by nobody.
func TestDocsIndexNamesEveryPage(t *testing.T) {
	index, site := readText(t, "docs/README.md"), readText(t, ".site/mkdocs.yml")
	for _, page := range pages {
		name, found := strings.CutPrefix(page, "docs/")
		if !found || name == "README.md" {
			continue
		}
		if !strings.Contains(index, "]("+name) {
			t.Errorf("docs/README.md does not link to %s", name)
		}
		if !strings.Contains(site, "- "+name+"\n") {
			t.Errorf(".site/mkdocs.yml does not name %s", name)
		}
	}
}

// anchors returns what a page's headings are called in links.
func anchors(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		words := regexp.MustCompile(`\]\([^)]*\)`).ReplaceAllString(strings.ToLower(m[1]), "")
		words = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(words, "")
		all = append(all, strings.ReplaceAll(words, " ", "-"))
	}
	return all
}

// The design's table of files is how a newcomer finds the way.
func TestReadmeAndDocsNameEveryFileOfThePackage(t *testing.T) {
	page := readText(t, "docs/design.md")
	_, table, _ := strings.Cut(page, "\n## 8. ")
	table, _, found := strings.Cut(table, "\n\n**")
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
	for _, dir := range []string{".", "internal/faults", "internal/lockstate", "internal/protocol", "internal/quorum", "internal/redisserver", "internal/simulation", "internal/syncsuite", "cmd/leased", "leasedtest", "examples/*", "adapters/*", "bench"} {
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
