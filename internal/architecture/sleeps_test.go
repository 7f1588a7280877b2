package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/race"
)

// In virtual time a sleep is exact: it ends when all else has come to rest. In real time one
// that stands for "until it has happened" fails on a busy machine, and costs its time on
// every other. What has to happen is waited for by an event or by polling; a sleep that is
// the workload, or a poll's own pause, says so. A wait for time.After is one too, unless the
// test fails then.
func TestEachSleepOfATestInRealTimeSaysWhy(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	virtual := 0
	for _, folder := range testFolders(t, filepath.Join("..", "..")) {
		all, err := readSleeps(token.NewFileSet(), folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.virtual {
				virtual++
			} else if !s.explained {
				t.Errorf("%s: a sleep in real time: wait for an event or poll; if the sleep is what the test is about, say why on its line or on the one above", s.at)
			}
		}
	}
	if virtual < 100 {
		t.Errorf("only %d sleeps in virtual time were found", virtual)
	}
}

func TestASleepInRealTimeIsToldFromOneInVirtualTime(t *testing.T) {
	const text = `package x_test

func bubble(t *testing.T, f func()) { synctest.Test(t, func(t *testing.T) { f() }) }

func inBubbles() { time.Sleep(virtualByItsCallers) }

func inBoth() { time.Sleep(realForOneCaller) }

func waits(t *testing.T) {
	synctest.Wait()
	time.Sleep(virtualAsItWaits)
}

func named(t *testing.T) { time.Sleep(virtualAsTheArgument) }

type world struct{}

func (w *world) pause() { time.Sleep(virtualMethod) }

func TestOne(t *testing.T) {
	bubble(t, func() {
		inBubbles()
		inBoth()
		go func() { time.Sleep(virtualInAGoroutine) }()
		(&world{}).pause()
	})
	synctest.Test(t, named)
	inBoth()
	time.Sleep(real)
	time.Sleep(realWithAComment) // it is the work
	// It is the work.
	time.Sleep(realWithACommentAbove)

	// Far above.

	time.Sleep(realWithACommentFarAbove)
	time.AfterFunc(1, func() { clock.Sleep(notOfThisPackage) })
	select {
	case <-t.Context().Done():
	case <-time.After(realAfter):
	}
	select {
	case <-t.Context().Done():
	case <-time.After(aBound):
		t.Fatal("too late")
	}
	late := time.After(aBoundOfSeveral)
	<-late
	synctest.Test(t, func(*testing.T) { <-time.After(virtualAfter) })
	<-time.After(realAfterWithAComment) // it is the work
}
`
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "x_test.go"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	all, err := readSleeps(token.NewFileSet(), folder)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range all {
		got = append(got, fmt.Sprintf("%s virtual=%t explained=%t", s.text, s.virtual, s.explained))
	}
	want := []string{
		"virtualByItsCallers virtual=true explained=false",
		"realForOneCaller virtual=false explained=false",
		"virtualAsItWaits virtual=true explained=false",
		"virtualAsTheArgument virtual=true explained=false",
		"virtualMethod virtual=true explained=false",
		"virtualInAGoroutine virtual=true explained=false",
		"real virtual=false explained=false",
		"realWithAComment virtual=false explained=true",
		"realWithACommentAbove virtual=false explained=true",
		"realWithACommentFarAbove virtual=false explained=false",
		"realAfter virtual=false explained=false",
		"virtualAfter virtual=true explained=false",
		"realAfterWithAComment virtual=false explained=true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

// testFolders returns the folders below root that have tests, those of nested modules
// included.
func testFolders(t *testing.T, root string) []string {
	t.Helper()
	var folders []string
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != root && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "testdata"):
			return fs.SkipDir
		case strings.HasSuffix(name, "_test.go") && !slices.Contains(folders, filepath.Dir(name)):
			folders = append(folders, filepath.Dir(name))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return folders
}

// sleep is one call of time.Sleep, or of time.After whose end is waited for.
type sleep struct {
	at                 token.Position
	text               string // its argument, if that is a name
	virtual, explained bool
}

// sleepReader tells what runs in virtual time from what does not, by names alone: a function
// does if it is an argument of synctest.Test, or of a function that hands it on to that, or
// stands in one that does, or if all that name it do, or if a statement of it is synctest.Wait, which
// nothing else may call. All that has one name counts as one, a variable included, so this errs
// on the side of real time.
type sleepReader struct {
	bubbles map[string]bool // functions whose function argument runs in virtual time
	inside  map[string]bool // declared functions of which all uses do
}

// readSleeps returns the sleeps in a folder's tests, in their order.
func readSleeps(set *token.FileSet, folder string) ([]sleep, error) {
	names, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		return nil, err
	}
	var files []*ast.File
	for _, name := range names {
		f, err := parser.ParseFile(set, name, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	r := &sleepReader{bubbles: map[string]bool{"synctest.Test": true}, inside: map[string]bool{}}
	for r.learn(files) {
	}
	var all []sleep
	for _, f := range files {
		comments := map[int]bool{} // the lines on which one ends
		for _, c := range f.Comments {
			comments[set.Position(c.End()).Line] = true
		}
		bounds := map[ast.Expr]bool{}
		r.visit(f, func(n ast.Node, virtual bool) {
			var call *ast.CallExpr
			switch n := n.(type) {
			case *ast.CommClause:
				if s, ok := n.Comm.(*ast.ExprStmt); ok && fails(n.Body) {
					bounds[s.X] = true
				}
			case *ast.UnaryExpr:
				if c, ok := n.X.(*ast.CallExpr); ok && n.Op == token.ARROW && !bounds[n] && called(c.Fun) == "time.After" {
					call = c
				}
			case *ast.CallExpr:
				if called(n.Fun) == "time.Sleep" {
					call = n
				}
			}
			if call == nil {
				return
			}
			s := sleep{at: set.Position(call.Pos()), virtual: virtual}
			s.explained = comments[s.at.Line] || comments[s.at.Line-1]
			if id, ok := call.Args[0].(*ast.Ident); ok {
				s.text = id.Name
			}
			all = append(all, s)
		})
	}
	return all, nil
}

// fails reports whether statements have a test fail.
func fails(body []ast.Stmt) (fails bool) {
	for _, s := range body {
		ast.Inspect(s, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				switch called(call.Fun) {
				case "Error", "Errorf", "Fatal", "Fatalf", "panic":
					fails = true
				}
			}
			return true
		})
	}
	return fails
}

// learn adds to what is known, and reports whether it did.
func (r *sleepReader) learn(files []*ast.File) (more bool) {
	inVirtual, inReal := map[string]bool{}, map[string]bool{}
	for _, f := range files {
		r.visit(f, func(n ast.Node, virtual bool) {
			if id, ok := n.(*ast.Ident); ok && virtual {
				inVirtual[id.Name] = true
			} else if ok {
				inReal[id.Name] = true
			}
		})
		for _, d := range f.Decls {
			decl, ok := d.(*ast.FuncDecl)
			if !ok || decl.Body == nil || r.bubbles[decl.Name.Name] {
				continue
			}
			for _, s := range decl.Body.List {
				if e, ok := s.(*ast.ExprStmt); ok && !r.inside[decl.Name.Name] {
					if call, ok := e.X.(*ast.CallExpr); ok && called(call.Fun) == "synctest.Wait" {
						r.inside[decl.Name.Name], more = true, true
					}
				}
			}
			params := map[string]bool{}
			for _, p := range decl.Type.Params.List {
				if _, ok := p.Type.(*ast.FuncType); ok {
					for _, name := range p.Names {
						params[name.Name] = true
					}
				}
			}
			r.visit(decl.Body, func(n ast.Node, virtual bool) {
				if id, ok := n.(*ast.Ident); ok && virtual && params[id.Name] {
					r.bubbles[decl.Name.Name], more = true, true
				}
			})
		}
	}
	for _, f := range files {
		for _, d := range f.Decls {
			if decl, ok := d.(*ast.FuncDecl); ok {
				if name := decl.Name.Name; inVirtual[name] && !inReal[name] && !r.inside[name] {
					r.inside[name], more = true, true
				}
			}
		}
	}
	return more
}

// visit calls f for each node below root, and says whether it runs in virtual time. The names
// of what is declared are left out: they are no uses.
func (r *sleepReader) visit(root ast.Node, f func(n ast.Node, virtual bool)) {
	var walk func(n ast.Node, virtual bool)
	walk = func(root ast.Node, virtual bool) {
		ast.Inspect(root, func(n ast.Node) bool {
			switch n := n.(type) {
			case nil:
				return false
			case *ast.FuncDecl:
				if n.Body != nil {
					walk(n.Body, virtual || r.inside[n.Name.Name])
				}
				return false
			case *ast.CallExpr:
				if !virtual && r.bubbles[called(n.Fun)] {
					f(n, virtual)
					for _, arg := range n.Args {
						walk(arg, true)
					}
					return false
				}
			}
			f(n, virtual)
			return true
		})
	}
	walk(root, false)
}

// called is the name of what is called, as it is written, a method's without its receiver.
func called(fun ast.Expr) string {
	switch fun := fun.(type) {
	case *ast.Ident:
		return fun.Name
	case *ast.SelectorExpr:
		if x, ok := fun.X.(*ast.Ident); ok && (x.Name == "time" || x.Name == "synctest") {
			return x.Name + "." + fun.Sel.Name
		}
		return fun.Sel.Name
	}
	return ""
}

// Who reads that a test was skipped wants to know how to have it run.
func TestATestThatShortRunsLeaveOutSaysSo(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	skip := regexp.MustCompile(`if testing\.Short\(\) \{\n\s*\w+\.Skipf?\((.*)\)`)
	found := 0
	for _, folder := range testFolders(t, filepath.Join("..", "..")) {
		files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, says := range skip.FindAllSubmatch(text, -1) {
				if found++; !strings.Contains(string(says[1]), "run it without -short") {
					t.Errorf("%s: a test that is skipped says %s, and not what to do", file, says[1])
				}
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d tests were found that short runs leave out", found)
	}
}
