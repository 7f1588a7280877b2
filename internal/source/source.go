// Package source reads the library's own code, for programs and tests that judge it.
package source

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// Module is the path of the library's module, and of its root package.
const Module = "github.com/leasedmutex/leased"

// Own reports whether an import path is one of the library's module.
func Own(pkg string) bool { return pkg == Module || strings.HasPrefix(pkg, Module+"/") }

// Package is one of the packages that the library consists of.
type Package struct {
	Path  string   // to import it
	Dir   string   // its folder
	Files []string // the names of its files, without tests
}

// Packages returns the packages that the library consists of, each after those that it imports.
func Packages() (all []Package, err error) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{.ImportPath}}\t{{.Dir}}\t{{join .GoFiles \",\"}}", Module).Output() //nolint:noctx // it ends by itself
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		if field := strings.Split(strings.TrimSpace(line), "\t"); len(field) == 3 && Own(field[0]) {
			all = append(all, Package{field[0], field[1], strings.Split(field[2], ",")})
		}
	}
	return all, nil
}

// Parse returns the syntax of the package's files, in the order of Files.
func (p Package) Parse(set *token.FileSet) (files []*ast.File, err error) {
	for _, name := range p.Files {
		f, err := parser.ParseFile(set, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// Importer gives the type checker the packages in it, by import path, and for all others empty
// ones, which it adds: what is made of their types stays unknown.
type Importer map[string]*types.Package

var version = regexp.MustCompile(`/v\d+$`)

// Import implements [types.Importer].
func (i Importer) Import(name string) (*types.Package, error) {
	if i[name] == nil {
		own := path.Base(version.ReplaceAllString(name, ""))
		i[name] = types.NewPackage(name, strings.TrimPrefix(own, "go-")) // as package redis of go-redis
		i[name].MarkComplete()
	}
	return i[name], nil
}
