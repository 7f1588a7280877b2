package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/source"
)

// A mutant whose text is gone tests nothing, and nobody would notice; so every
// run of the tests checks the list, which is cheap.
func TestEveryMutantsTextStandsExactlyOnce(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		if names[m.name] {
			t.Errorf("%s: listed twice", m.name)
		}
		names[m.name] = true
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
		} else if n := strings.Count(string(text), m.old); n != 1 {
			t.Errorf("%s: its text stands %d times in %s", m.name, n, m.file)
		}
	}
}

// A run of a mutant begins with these tests; without any the run ends with an error. A name that has been
// changed must not go unnoticed among others.
func TestEveryMutantNamesATest(t *testing.T) {
	type each struct{ name, file, tests string }
	var every []each
	for _, m := range mutants {
		for _, name := range strings.Split(m.tests, "|") {
			every = append(every, each{m.name, m.file, name})
		}
	}
	all := map[string][]string{} // the tests of a package
	for _, m := range every {
		run, err := regexp.Compile(m.tests)
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if !slices.ContainsFunc(testedBy(m.file), func(pkg string) bool {
			if all[pkg] == nil {
				all[pkg], err = testNames(filepath.Join("..", ".."), pkg)
				if err != nil {
					t.Fatal(err)
				}
			}
			return slices.ContainsFunc(all[pkg], run.MatchString)
		}) {
			t.Errorf("%s: no test is called like %q", m.name, m.tests)
		}
	}
}

// docs/reliability.md says how many mutants there are, by the folder of the file that they break, and
// names some of them, each with a test that is among those named for it.
func TestThePageCountsTheMutants(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	text, err := os.ReadFile(filepath.FromSlash("../../docs/reliability.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, begins := strings.Cut(string(text), "\n<!-- mutants -->\n")
	section, _, ends := strings.Cut(section, "\n<!-- end -->\n")
	if !begins || !ends {
		t.Fatal("docs/reliability.md has no section of mutants")
	}
	if want := fmt.Sprintf("The list has %d mutants:\n", len(mutants)); !strings.HasPrefix(section, want) {
		t.Errorf("docs/reliability.md does not say %q", want)
	}
	counts, names := map[string]int{}, map[string]mutant{}
	for _, m := range mutants {
		counts[path.Dir(m.file)]++
		names[m.name] = m
	}
	for _, row := range regexp.MustCompile("(?m)^\\| (?:`(.+)`|root package) \\| (\\d+) \\|").FindAllStringSubmatch(section, -1) {
		folder := path.Clean(row[1])
		if want := strconv.Itoa(counts[folder]); row[2] != want {
			t.Errorf("docs/reliability.md counts %s mutants in %s, and there are %s", row[2], folder, want)
		}
		delete(counts, folder)
	}
	for folder := range counts {
		t.Errorf("docs/reliability.md does not count the mutants in %s", folder)
	}
	examples := regexp.MustCompile("(?m)^\\| (.+) \\| `(.+)` \\|$").FindAllStringSubmatch(section, -1)
	for _, row := range examples {
		m, ok := names[row[1]]
		if !ok {
			t.Errorf("docs/reliability.md names the mutant %q, which is not in the list", row[1])
			continue
		}
		named := slices.ContainsFunc(testedBy(m.file), func(pkg string) bool {
			tests, err := testNames(filepath.Join("..", ".."), pkg)
			if err != nil {
				t.Fatal(err)
			}
			return slices.Contains(tests, row[2])
		})
		if !named || !regexp.MustCompile(m.tests).MatchString(row[2]) {
			t.Errorf("docs/reliability.md has %s notice %q, for which another one is named", row[2], row[1])
		}
	}
	if len(examples) < 10 {
		t.Errorf("only %d examples were found", len(examples))
	}
}

// A mutant that does not compile is an error only when it is run, which may be long after it was listed.
// Building all of them takes an hour, so instead their types are checked: for each mutant only the
// functions of the file that it changes, with imported packages of other modules empty.
func TestEveryMutantCompiles(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	all := readLibrary(t)
	before := map[string][]string{} // errors in a file without mutants, because other packages are empty
	for _, m := range mutants {
		if !strings.HasSuffix(m.file, ".go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(m.file)))
		if err != nil {
			t.Fatal(err)
		}
		if before[m.file] == nil {
			before[m.file] = append(all.wrong(t, m.file, string(text)), "")
		}
		for _, what := range all.wrong(t, m.file, strings.Replace(string(text), m.old, m.new, 1)) {
			if !slices.Contains(before[m.file], what) && !ofOthers.MatchString(what) {
				t.Errorf("%s: %s", m.name, what)
			}
		}
	}
}

// ofOthers matches what the type checker says about a name from a package that was left empty.
var ofOthers = regexp.MustCompile(`^undefined: [a-z]+\.[A-Z]\w*$`)

// libraryCode is the library without the bodies of functions.
type libraryCode struct {
	set      *token.FileSet
	files    map[string]map[string]*ast.File // by the package's folder and the file's name
	packages source.Importer                 // those that are not the library's are empty
}

func readLibrary(t *testing.T) *libraryCode {
	packages, err := source.Packages()
	if err != nil {
		t.Fatal(err)
	}
	l := &libraryCode{set: token.NewFileSet(), files: map[string]map[string]*ast.File{}, packages: source.Importer{}}
	for _, p := range packages {
		parsed, err := p.Parse(l.set)
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]*ast.File{}
		for i, f := range parsed {
			for _, d := range f.Decls {
				if f, ok := d.(*ast.FuncDecl); ok {
					f.Body = nil
				}
			}
			files[p.Files[i]] = f
		}
		l.files[path.Clean(strings.TrimPrefix(strings.TrimPrefix(p.Path, source.Module), "/"))] = files
		l.packages[p.Path], _ = l.check(p.Path, files)
	}
	return l
}

func (l *libraryCode) check(name string, files map[string]*ast.File) (pkg *types.Package, wrong []string) {
	some := make([]*ast.File, 0, len(files))
	for _, f := range files {
		some = append(some, f)
	}
	c := types.Config{Importer: l.packages, Error: func(err error) { wrong = append(wrong, err.(types.Error).Msg) }}
	pkg, _ = c.Check(name, l.set, some, nil)
	return pkg, wrong
}

// wrong returns the type errors of a file if it has the given text.
func (l *libraryCode) wrong(t *testing.T, file, text string) []string {
	f, err := parser.ParseFile(l.set, file, text, parser.SkipObjectResolution)
	if err != nil {
		return []string{err.Error()}
	}
	dir := path.Dir(file)
	if l.files[dir] == nil {
		t.Fatalf("%s is not of the library", file)
	}
	files := map[string]*ast.File{path.Base(file): f}
	for name, f := range l.files[dir] {
		if name != path.Base(file) {
			files[name] = f
		}
	}
	_, wrong := l.check(path.Join(source.Module, dir), files)
	return wrong
}

// A mutant that shares no binary takes a minute or more to build; all those that do take as long as one.
func TestNearlyAllMutantsShareBinaries(t *testing.T) {
	if race.Enabled {
		t.Skip("one goroutine reads the code")
	}
	x, err := combine(filepath.Join("..", ".."), t.TempDir(), mutants)
	if err != nil {
		t.Fatal(err)
	}
	var alone []string
	for _, m := range mutants {
		if _, shares := x.numbers[m.name]; !shares && (!x.scripts || !isScript(m.file)) {
			alone = append(alone, m.name)
		}
	}
	if len(alone) > len(mutants)/20 {
		t.Errorf("%d of %d mutants are built by themselves: %q", len(alone), len(mutants), alone)
	}
}
