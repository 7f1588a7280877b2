// Package syncsuite runs the tests that Go has for sync.Mutex and sync.RWMutex
// against the locks of package leased.
//
// Nothing of Go is kept here. Its test files are read from the Go installation that
// runs the tests, changed in memory as [Adapt] says, and put into package target by
// the go command's -overlay.
package syncsuite

import (
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"slices"
	"strconv"
	"strings"
)

const (
	base        = "github.com/leasedmutex/leased/internal/syncsuite/"
	packageName = "target"
)

// replaced are the imports that stand for something else in our module.
var replaced = map[string]string{
	"sync":             base + "syncshim",
	"internal/testenv": base + "testenv",
}

// Adapted is one of Go's test files, ready for package target.
type Adapted struct {
	Code    []byte
	Tests   []string // the test functions in it
	Dropped []string // declarations left out because they need a hook
}

// Hooks returns what a file declares at its top level. Of sync's export_test.go
// these are the names through which Go's tests reach into the package, and which no
// other implementation has.
func Hooks(name string, code []byte) (map[string]bool, error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, code, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	hooks := map[string]bool{}
	for _, d := range file.Decls {
		for _, n := range declared(d) {
			hooks[n] = true
		}
	}
	return hooks, nil
}

// Adapt makes one of Go's test files a file of package target:
//
//   - Declarations that name a hook are left out, and those that name what was left
//     out.
//   - The import of sync becomes that of syncshim, and that of Go's internal testenv
//     ours. Imports that nobody uses anymore are left out.
//   - The deferred recover around the misuse cases is left out. In Go a misuse ends
//     the program and recover cannot stop it, which the test makes sure of; ours is
//     a panic, and the test's child is to die of it.
//
// All else stays as it is, to the letter. What is not as expected is an error: Go's
// tests have changed, and somebody has to look.
func Adapt(name string, code []byte, hooks map[string]bool) (Adapted, error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, code, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return Adapted{}, err
	}
	e := &edits{set: set}
	e.replace(file.Name, packageName)

	kept, dropped := sift(file.Decls, hooks)
	out := Adapted{}
	for _, d := range dropped {
		out.Dropped = append(out.Dropped, declared(d)...)
		e.removeDecl(d)
	}
	misuse, recovers := false, 0
	for _, d := range kept {
		for _, n := range declared(d) {
			misuse = misuse || n == "misuseTests"
		}
		if f, ok := d.(*ast.FuncDecl); ok && isTest(f) {
			out.Tests = append(out.Tests, f.Name.Name)
		}
		ast.Inspect(d, func(n ast.Node) bool {
			if s, ok := n.(*ast.DeferStmt); ok && onlyRecovers(s) {
				recovers++
				e.remove(s.Pos(), s.End())
			}
			return true
		})
	}
	if misuse != (recovers == 1) || recovers > 1 {
		return Adapted{}, fmt.Errorf("%s: misuse cases: %t, deferred recovers: %d", name, misuse, recovers)
	}
	if err := e.imports(file, kept); err != nil {
		return Adapted{}, fmt.Errorf("%s: %w", name, err)
	}
	head := "// Code generated from Go's own sync/" + name + " by internal/syncsuite. DO NOT EDIT.\n\n"
	out.Code, err = format.Source(append([]byte(head), e.apply(code)...))
	if err != nil {
		return Adapted{}, fmt.Errorf("%s, adapted: %w", name, err)
	}
	return out, nil
}

// sift parts what names a hook, or something that does, from the rest.
func sift(decls []ast.Decl, hooks map[string]bool) (kept, dropped []ast.Decl) {
	gone := maps.Clone(hooks)
	out := map[ast.Decl]bool{}
	for again := true; again; {
		again = false
		for _, d := range decls {
			if !out[d] && !isImport(d) && names(d, gone) {
				out[d], again = true, true
				for _, n := range declared(d) {
					gone[n] = true
				}
			}
		}
	}
	for _, d := range decls {
		if out[d] {
			dropped = append(dropped, d)
		} else {
			kept = append(kept, d)
		}
	}
	return kept, dropped
}

// names reports whether d mentions one of the names other than as x.Name.
func names(d ast.Decl, set map[string]bool) bool {
	found := false
	ast.Inspect(d, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			ast.Inspect(n.X, func(x ast.Node) bool {
				id, ok := x.(*ast.Ident)
				found = found || ok && set[id.Name]
				return true
			})
			return false
		case *ast.Ident:
			found = found || set[n.Name]
		}
		return true
	})
	return found
}

// declared returns the names that a top-level declaration makes. Methods and init
// make none.
func declared(d ast.Decl) []string {
	var out []string
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil && d.Name.Name != "init" {
			out = append(out, d.Name.Name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				out = append(out, s.Name.Name)
			case *ast.ValueSpec:
				for _, id := range s.Names {
					out = append(out, id.Name)
				}
			}
		}
	}
	return slices.DeleteFunc(out, func(n string) bool { return n == "_" })
}

func isImport(d ast.Decl) bool {
	g, ok := d.(*ast.GenDecl)
	return ok && g.Tok == token.IMPORT
}

func isTest(f *ast.FuncDecl) bool {
	return f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") && f.Name.Name != "TestMain"
}

// onlyRecovers recognizes defer func() { recover() }().
func onlyRecovers(s *ast.DeferStmt) bool {
	f, ok := s.Call.Fun.(*ast.FuncLit)
	if !ok || len(f.Body.List) != 1 {
		return false
	}
	e, ok := f.Body.List[0].(*ast.ExprStmt)
	if !ok {
		return false
	}
	call, ok := e.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	id, ok := call.Fun.(*ast.Ident)
	return ok && id.Name == "recover"
}

// used are the packages that the declarations name, by the name before the dot.
func used(decls []ast.Decl) map[string]bool {
	out := map[string]bool{}
	for _, d := range decls {
		ast.Inspect(d, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if id, ok := s.X.(*ast.Ident); ok {
					out[id.Name] = true
				}
			}
			return true
		})
	}
	return out
}

func importPath(s *ast.ImportSpec) string {
	path, _ := strconv.Unquote(s.Path.Value) // the parser has checked it
	return path
}
