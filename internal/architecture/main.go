// Command architecture prints the picture of docs/architecture.md: functions by package, and
// the calls among them on two ways through the library. A way is a list of functions; whether
// they exist, where they stand and which of them calls which is read from the code. With
// -write it puts the picture into the page.
package main

import (
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/leasedmutex/leased/internal/source"
)

// way is one path through the library: functions, of which the first has to lead to all others
// by calls among them.
type way struct {
	arrow string // how mermaid draws a call that only this way has
	stops []string
}

// A function is named by its package's last element and, for a method, its type.
var ways = []way{
	{"-->", []string{ // LockContext on a lock that another process has
		"leased.Mutex.LockContext", "leased.handle.lease", "leased.handle.acquire", "leased.handle.wait", "leased.handle.enter",
		"lockstate.Lock.Enter", "lockstate.Lock.applyRules", "lockstate.Lock.admit", "lockstate.Lock.ask",
		"leased.entry.perform", "leased.entry.dispatch", "leased.entry.run",
		"redisserver.Server.Do", "redisserver.Server.voteAcquire", "redisserver.Server.send", "redisserver.parseAnswer", "protocol.FormatSpan",
		"leased.entry.answered", "leased.entry.step", "leased.entry.endStepLocked", "lockstate.Lock.Answered", "lockstate.Lock.acquired", "lockstate.Lock.acquireEnqueued", "lockstate.Lock.enqueued",
		"leased.newLease",
	}},
	{"-.->", []string{ // the message that makes its process the owner
		"leased.inbox.run", "leased.inbox.attempt", "leased.inbox.listen", "leased.inbox.receive", "protocol.ParseMessage", "protocol.ParseID",
		"leased.entry.step", "leased.entry.endStepLocked", "lockstate.Lock.Receive", "lockstate.Lock.grantedByMessage",
		"lockstate.Lock.hold", "lockstate.Lock.applyRules", "lockstate.Lock.admit", "leased.entry.perform",
	}},
}

func main() {
	write := flag.Bool("write", false, "put the picture into docs/architecture.md, in the current directory")
	flag.Parse()
	text, err := picture()
	if err == nil && *write {
		err = replace(filepath.Join("docs", "architecture.md"), text)
	} else if err == nil {
		fmt.Print(text)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const opening, closing = "```mermaid\n", "```\n"

// split returns what stands before the page's picture, the picture, and what stands behind it.
func split(page string) (before, text, after string, err error) {
	before, rest, found := strings.Cut(page, opening)
	text, after, closed := strings.Cut(rest, closing)
	if !found || !closed {
		return "", "", "", errors.New("there is no mermaid block in the page")
	}
	return before, opening + text + closing, after, nil
}

func replace(file, text string) error {
	page, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, _, after, err := split(string(page))
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(before+text+after), 0o644)
}

// picture returns the mermaid block.
func picture() (string, error) {
	l, err := load()
	if err != nil {
		return "", err
	}
	type call struct{ from, to string }
	arrows := map[call]string{}
	var order []call
	var all []string
	for _, w := range ways {
		for _, name := range w.stops {
			if l.functions[name] == nil {
				return "", fmt.Errorf("there is no %s anymore: bring internal/architecture and docs/architecture.md up to date", name)
			}
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
		}
		for _, from := range w.stops {
			for _, to := range w.stops {
				if to == from || !l.leads(from, to, w.stops) {
					continue
				}
				c := call{from, to}
				if arrows[c] == "" {
					order = append(order, c)
					arrows[c] = w.arrow
				} else if arrows[c] != w.arrow {
					arrows[c] = "==>"
				}
			}
		}
		if lost := l.unreached(w.stops); len(lost) > 0 {
			return "", fmt.Errorf("%s does not lead to %s anymore: bring internal/architecture and docs/architecture.md up to date",
				w.stops[0], strings.Join(lost, ", "))
		}
	}
	var b strings.Builder
	b.WriteString(opening + "flowchart TB\n")
	for _, pkg := range l.packages {
		if !slices.ContainsFunc(all, func(name string) bool { return l.functions[name].pkg == pkg }) {
			continue // neither way leads through it
		}
		title := "internal/" + pkg
		if pkg == path.Base(source.Module) {
			title = pkg
		}
		fmt.Fprintf(&b, "  subgraph %s [\"%s\"]\n", pkg, title)
		for _, name := range all {
			if f := l.functions[name]; f.pkg == pkg {
				fmt.Fprintf(&b, "    %s[\"%s<br/>%s\"]\n", node(name), strings.TrimPrefix(name, pkg+"."), f.file)
			}
		}
		b.WriteString("  end\n")
	}
	for _, c := range order {
		fmt.Fprintf(&b, "  %s %s %s\n", node(c.from), arrows[c], node(c.to))
	}
	b.WriteString(closing)
	return b.String(), nil
}

func node(name string) string { return strings.ReplaceAll(name, ".", "_") }

// function is one function of the library, and which others its body mentions.
type function struct {
	pkg, file string
	uses      map[string]bool
}

type library struct {
	packages  []string // by name, each before those that it imports
	functions map[string]*function
	names     map[string]bool // of all that is declared: functions, types, and their methods and fields
	imports   map[string]bool // names of packages beyond the library that it imports
}

// leads reports whether from uses to. If no stop does, a helper of from's package that is
// no stop may stand between the two.
func (l *library) leads(from, to string, stops []string) bool {
	f := l.functions[from]
	if slices.ContainsFunc(stops, func(s string) bool { return s != to && l.functions[s].uses[to] }) {
		return f.uses[to]
	}
	for by := range f.uses {
		if h := l.functions[by]; h != nil && h.pkg == f.pkg && h.uses[to] {
			return true
		}
	}
	return false
}

// unreached returns the stops that the first one does not lead to.
func (l *library) unreached(stops []string) (lost []string) {
	seen := map[string]bool{stops[0]: true}
	for again := true; again; {
		again = false
		for _, from := range stops {
			for _, to := range stops {
				if seen[from] && !seen[to] && l.leads(from, to, stops) {
					seen[to], again = true, true
				}
			}
		}
	}
	for _, s := range stops {
		if !seen[s] {
			lost = append(lost, s)
		}
	}
	return lost
}

// load reads the packages that the library consists of. Of packages beyond it, the standard
// library included, nothing is read: what is made of their types stays unknown, which
// hides none of the library's own functions.
func load() (*library, error) {
	packages, err := source.Packages()
	if err != nil {
		return nil, err
	}
	l := &library{functions: map[string]*function{}, names: map[string]bool{}, imports: map[string]bool{}}
	known := source.Importer{}
	abstract := map[string][]*function{} // who mentions a method of an interface, by the method's name
	for _, p := range packages {
		set := token.NewFileSet()
		files, err := p.Parse(set)
		if err != nil {
			return nil, err
		}
		info := &types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
		check := types.Config{Importer: known, Error: func(error) {}}
		known[p.Path], _ = check.Check(p.Path, set, files, info)
		l.packages = append(l.packages, path.Base(p.Path))
		l.declare(known[p.Path])
		for _, file := range files {
			for _, d := range file.Decls {
				decl, ok := d.(*ast.FuncDecl)
				if !ok || decl.Body == nil {
					continue
				}
				f := &function{pkg: path.Base(p.Path), file: filepath.Base(set.Position(decl.Pos()).Filename), uses: map[string]bool{}}
				name, _ := nameOf(info.Defs[decl.Name])
				l.functions[name] = f
				ast.Inspect(decl.Body, func(n ast.Node) bool {
					if id, ok := n.(*ast.Ident); ok {
						if used, ofInterface := nameOf(info.Uses[id]); ofInterface {
							abstract[id.Name] = append(abstract[id.Name], f)
						} else if used != "" {
							f.uses[used] = true
						}
					}
					return true
				})
			}
		}
	}
	// A call through an interface counts as one of every method of that name.
	for name := range l.functions {
		for _, f := range abstract[name[strings.LastIndex(name, ".")+1:]] {
			f.uses[name] = true
		}
	}
	for name, pkg := range known {
		if !source.Own(name) {
			l.imports[pkg.Name()] = true
		}
	}
	slices.Reverse(l.packages)
	return l, nil
}

// declare takes in the names of a package.
func (l *library) declare(pkg *types.Package) {
	for _, name := range pkg.Scope().Names() {
		full := path.Base(pkg.Path()) + "." + name
		l.names[full] = true
		typ, ok := pkg.Scope().Lookup(name).(*types.TypeName)
		if !ok {
			continue
		}
		if named, ok := typ.Type().(*types.Named); ok {
			for m := range named.Methods() {
				l.names[full+"."+m.Name()] = true
			}
		}
		switch t := typ.Type().Underlying().(type) {
		case *types.Struct:
			for f := range t.Fields() {
				l.names[full+"."+f.Name()] = true
			}
		case *types.Interface:
			for m := range t.Methods() {
				l.names[full+"."+m.Name()] = true
			}
		}
	}
}

// nameOf returns the name of a function of the library, "" if it is none, and whether it is
// a method of one of its interfaces.
func nameOf(o types.Object) (name string, abstract bool) {
	f, ok := o.(*types.Func)
	if !ok || f.Pkg() == nil {
		return "", false
	}
	pkg := path.Base(f.Pkg().Path())
	recv := f.Origin().Signature().Recv()
	if recv == nil {
		return pkg + "." + f.Name(), false
	}
	t := recv.Type()
	if p, ok := t.(*types.Pointer); ok {
		t = p.Elem()
	}
	if types.IsInterface(t) {
		return "", true
	}
	if named, ok := t.(*types.Named); ok {
		return pkg + "." + named.Obj().Name() + "." + f.Name(), false
	}
	return "", false
}
