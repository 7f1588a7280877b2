package leased_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
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
