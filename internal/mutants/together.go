package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Compiling and linking the tests takes many times as long as running those that are named for a
// mutant. So nearly all mutants share one test binary per package, and a run switches one of them on:
// a function whose body is changed by mutants has, before its own statements, the changed statements
// of each of these mutants behind a condition; and scripts are read from a folder, if one is named.

// switched is the environment variable that has the mutant's number, or, for a mutant of a script,
// the folder above its scripts.
const switched = "LEASED_MUTANT"

// together has the mutants that share binaries. With none switched on, these binaries are the baseline of
// all mutants: a test that fails there says nothing about a mutant.
type together struct {
	root, dir, overlay string
	numbers            map[string]int // of those in Go files, by name
	scripts            bool           // those of scripts are among them

	mu       sync.Mutex // guards binaries, and is held while one is built
	binaries map[string]string

	baselines int // how many were run
}

// with returns the environment entry that switches m on, or false if m is built by itself.
func (x *together) with(m mutant) (env string, ok bool, err error) {
	if n, ok := x.numbers[m.name]; ok {
		return fmt.Sprint(switched, "=", n), true, nil
	}
	if !x.scripts || !isScript(m.file) {
		return "", false, nil
	}
	above, err := os.MkdirTemp(x.dir, "scripts")
	if err != nil {
		return "", false, err
	}
	scripts := filepath.Join(above, filepath.Base(filepath.Dir(m.file)))
	if err := os.CopyFS(scripts, os.DirFS(filepath.Join(x.root, filepath.Dir(m.file)))); err != nil {
		return "", false, err
	}
	text, err := broken(x.root, m)
	if err != nil {
		return "", false, err
	}
	return switched + "=" + above, true, os.WriteFile(filepath.Join(scripts, filepath.Base(m.file)), []byte(text), 0o600)
}

// binary returns the test binary of a package, with all mutants in it.
func (x *together) binary(pkg string) (string, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.binaries[pkg] == "" {
		name := filepath.Join(x.dir, strings.ReplaceAll(pkg, "/", "_")+".all.test")
		if err := build(x.root, x.overlay, pkg, name); err != nil {
			return "", fmt.Errorf("all mutants together (see -alone), or none: %w", err)
		}
		x.binaries[pkg] = name
	}
	return x.binaries[pkg], nil
}

// verify runs the tests that noticed a mutant again, without any mutant. If that fails, it puts an error in
// the result. The tests of a package are run together, because starting a binary takes longer than most
// tests do; if that fails, they are run one by one. For a crash that no test reported, all tests of that
// run are repeated.
func (x *together) verify(results []result) {
	const sep = "\x00"
	names := map[string][]string{} // of tests, by package and the other arguments
	for i := range results {
		if key, name := results[i].baseline(sep); name != "" && !slices.Contains(names[key], name) {
			names[key] = append(names[key], name)
		}
	}
	known := map[string]error{} // by package and arguments
	run := func(pkg string, args []string) error {
		key := pkg + sep + strings.Join(args, sep)
		err, is := known[key]
		if !is {
			err = x.unbroken(pkg, args)
			known[key] = err
		}
		return err
	}
	for i := range results {
		r := &results[i]
		key, name := r.baseline(sep)
		if key == "" {
			continue
		}
		args := strings.Split(key, sep)[1:]
		if name != "" {
			if run(r.pkg, append([]string{"-test.run=^(" + strings.Join(names[key], "|") + ")$"}, args...)) == nil {
				continue
			}
			args = append([]string{"-test.run=^" + name + "$"}, args...)
		}
		if err := run(r.pkg, args); err != nil {
			*r = result{err: err, output: r.output}
		}
	}
}

// baseline describes the run to repeat without the mutant: key is the package and the arguments as one
// text, "" if there is nothing to run. test is the test that noticed the mutant, for which key has no
// argument, or "" if it is not known; then key has all arguments.
func (r *result) baseline(sep string) (key, test string) {
	if r.killer == "" || r.err != nil {
		return "", ""
	}
	args := r.args
	if !r.crashed {
		test, _, _ = strings.Cut(r.killer, "/")
		args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
			return strings.HasPrefix(arg, "-test.run=") || strings.HasPrefix(arg, "-test.skip=")
		})
	}
	return r.pkg + sep + strings.Join(args, sep), test
}

// unbroken returns an error if tests of a package do not pass without any mutant.
func (x *together) unbroken(pkg string, args []string) error {
	binary, err := x.binary(pkg)
	if err != nil {
		return err
	}
	x.baselines++
	r := test(filepath.Join(x.root, pkg), binary, switched+"=", args)
	if r.err == nil && r.killer != "" {
		r.err = fmt.Errorf("%w: without the mutant, too: %s", errBaseline, r.killer)
	}
	return r.err
}

func isScript(file string) bool { return filepath.Ext(file) == ".lua" }

// loader is the file that embeds the scripts, and loaderLine is the line that does so.
const (
	loader     = "internal/redisserver/script.go"
	loaderLine = "\nvar scriptFiles embed.FS\n"
)

// loadSwitched replaces loaderLine.
const loadSwitched = `
var embedded embed.FS

var scriptFiles = func() (files interface {
	Open(name string) (fs.File, error)
	ReadFile(name string) ([]byte, error)
}) {
	files = embedded
	if above := os.Getenv("` + switched + `"); strings.ContainsRune(above, os.PathSeparator) {
		files = os.DirFS(above).(interface {
			Open(name string) (fs.File, error)
			ReadFile(name string) ([]byte, error)
		})
	}
	return files
}()
`

// combine writes the code with all mutants in it to dir. A mutant whose text is not found, or is not
// inside one function, is left out.
func combine(root, dir string, all []mutant) (*together, error) {
	x := &together{root: root, dir: dir, numbers: map[string]int{}, binaries: map[string]string{}}
	files, err := x.insert(all)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(all, func(m mutant) bool { return isScript(m.file) }) {
		x.scripts = switchScripts(root, files)
	}
	replace := map[string]string{}
	for file, text := range files {
		name := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		replace[filepath.Join(root, filepath.FromSlash(file))] = name
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	b, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return nil, err
	}
	x.overlay = filepath.Join(dir, "all.json")
	return x, os.WriteFile(x.overlay, b, 0o600)
}

// insert numbers the mutants of Go files. It returns the files that have them, and in each of their
// packages one more that says which mutant is switched on.
func (x *together) insert(all []mutant) (changed map[string]string, err error) {
	changed = map[string]string{}
	packages := map[string]string{}
	inserts := map[string]map[int]string{} // by file and offset
	for i, m := range all {
		if isScript(m.file) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(x.root, m.file))
		if err != nil {
			return nil, err
		}
		text := string(b)
		name, at, body, err := variant(m, text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.file, err)
		}
		if body == "" {
			continue
		}
		x.numbers[m.name] = i
		changed[m.file], packages[filepath.ToSlash(filepath.Dir(m.file))] = text, name
		if inserts[m.file] == nil {
			inserts[m.file] = map[int]string{}
		}
		inserts[m.file][at] += fmt.Sprintf("\nif mutantSwitched == %d {%s}\n", i, body)
	}
	for file, text := range changed {
		var places []int
		for at := range inserts[file] {
			places = append(places, at)
		}
		slices.Sort(places)
		for _, at := range slices.Backward(places) {
			text = text[:at] + inserts[file][at] + text[at:]
		}
		changed[file] = text
	}
	for folder, name := range packages {
		changed[folder+"/mutant_switched.go"] = "package " + name + `

import (
	"os"
	"strconv"
)

var mutantSwitched = func() int {
	n, err := strconv.Atoi(os.Getenv("` + switched + `"))
	if err != nil {
		return -1
	}
	return n
}()
`
	}
	return changed, nil
}

// switchScripts has the loader, in files or as it is, read the scripts from a folder that is named.
// It reports false, and changes nothing, if there is no loader with that line.
func switchScripts(root string, files map[string]string) bool {
	b, err := os.ReadFile(filepath.Join(root, loader))
	if err != nil || strings.Count(string(b), loaderLine) != 1 {
		return false
	}
	text := files[loader]
	if text == "" {
		text = string(b)
	}
	text = strings.Replace(text, loaderLine, loadSwitched, 1)
	for _, path := range []string{"io/fs", "os", "strings"} {
		if !strings.Contains(text, "\n\t\""+path+"\"\n") {
			text = strings.Replace(text, "\nimport (\n", "\nimport (\n\t\""+path+"\"\n", 1)
		}
	}
	files[loader] = text
	return true
}

// variant returns the package's name, the offset at which the statements of the function begin that m
// changes, and these statements with m, which end with a return. They are "" if m does not change the
// body of a function, or if the function has labels, because labels cannot occur in it twice.
func variant(m mutant, text string) (pkg string, at int, body string, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, m.file, text, parser.SkipObjectResolution)
	if err != nil || strings.Count(text, m.old) != 1 {
		return "", 0, "", err
	}
	begins := strings.Index(text, m.old)
	ends := begins + len(m.old)
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		first, last := set.Position(fn.Body.Lbrace).Offset+1, set.Position(fn.Body.Rbrace).Offset
		if begins < first || ends > last {
			continue
		}
		labels := false
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			_, is := n.(*ast.LabeledStmt)
			labels = labels || is
			return true
		})
		if labels {
			break
		}
		body = text[first:begins] + m.new + text[ends:last]
		if fn.Type.Results == nil {
			body += "\nreturn\n"
		}
		return f.Name.Name, first, body, nil
	}
	return "", 0, "", nil
}
