package leased

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/leasedmutex/leased"

// allowedImports is what each package of the library may import besides the standard
// library. A lock library ends up everywhere in a program, so it brings along what it
// needs to talk to Redis and OpenTelemetry's API, and neither an SDK nor an exporter. The
// state machine knows neither: that it does no I/O is its worth.
var allowedImports = map[string][]string{
	".": {
		module + "/internal/lockstate",
		module + "/internal/protocol",
		module + "/internal/quorum",
		module + "/internal/redisserver",
		"github.com/redis/go-redis/v9",
		"github.com/cenkalti/backoff/v4",
		"go.opentelemetry.io/otel",
		"go.opentelemetry.io/otel/attribute",
		"go.opentelemetry.io/otel/codes",
		"go.opentelemetry.io/otel/metric",
		"go.opentelemetry.io/otel/metric/noop",
		"go.opentelemetry.io/otel/trace",
		"go.opentelemetry.io/otel/trace/noop",
	},
	"internal/lockstate":   {module + "/internal/protocol"},
	"internal/protocol":    nil,
	"internal/quorum":      {module + "/internal/lockstate", module + "/internal/protocol", module + "/internal/redisserver"},
	"internal/redisserver": {module + "/internal/protocol", "github.com/redis/go-redis/v9"},
}

func TestEachPackageImportsOnlyWhatItMay(t *testing.T) {
	for dir, allowed := range allowedImports {
		used := map[string]bool{}
		for name, f := range sources(t, dir) {
			for _, spec := range f.Imports {
				path, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					t.Fatal(err)
				}
				if host, _, _ := strings.Cut(path, "/"); strings.Contains(host, ".") {
					used[path] = true
					if !slices.Contains(allowed, path) {
						t.Errorf("%s imports %s", name, path)
					}
				}
			}
		}
		for _, path := range allowed {
			if !used[path] {
				t.Errorf("%s may import %s and does not", dir, path)
			}
		}
	}
}

// The state machine is given the time with each event, and nothing in it waits, locks,
// logs or runs beside its caller. It carries channels of its callers' and does nothing to them.
func TestTheStateMachineHasNoClockAndNoGoroutine(t *testing.T) {
	// None of these does I/O, has state that goroutines share or, without the functions below, tells
	// the time.
	allowed := []string{"container/heap", "errors", "math", "strconv", "strings", "time", module + "/internal/protocol"}
	for name, f := range sources(t, "internal/lockstate") {
		for _, spec := range f.Imports {
			if path, _ := strconv.Unquote(spec.Path.Value); !slices.Contains(allowed, path) {
				t.Errorf("%s imports %s", name, path)
			}
			if spec.Name != nil {
				t.Errorf("%s gives %s another name, which hides what it is used for", name, spec.Path.Value)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt:
				t.Errorf("%s starts a goroutine or uses a channel", name)
			case *ast.UnaryExpr:
				if n.Op == token.ARROW {
					t.Errorf("%s receives from a channel", name)
				}
			case *ast.CallExpr:
				if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "close" {
					t.Errorf("%s closes a channel", name)
				}
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" {
					switch n.Sel.Name {
					case "Now", "Since", "Until", "After", "AfterFunc", "Sleep", "NewTimer", "NewTicker", "Tick":
						t.Errorf("%s uses time.%s", name, n.Sel.Name)
					}
				}
			}
			return true
		})
	}
}

// sources returns the files of a package, without its tests.
func sources(t *testing.T, dir string) map[string]*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]*ast.File{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = f
	}
	if len(files) == 0 {
		t.Fatalf("there is nothing in %s", dir)
	}
	return files
}

func dependencies(t *testing.T, args ...string) []string {
	t.Helper()
	out, err := exec.Command("go", append([]string{"list", "-deps"}, args...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

func TestNoSDKOrExporterIsAmongTheLibrarysDependencies(t *testing.T) {
	deps := dependencies(t, ".")
	if !slices.Contains(deps, "go.opentelemetry.io/otel/trace") {
		t.Fatalf("these cannot be all: %v", deps)
	}
	for _, dep := range deps {
		for _, heavy := range []string{"go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters", "google.golang.org/grpc", "github.com/alicebob"} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("it depends on %s", dep)
			}
		}
	}
}

// What a build imports is what go mod tidy writes into a user's go.mod. docs/design.md
// says of each of these why it is there.
func TestUsersGetNoFurtherModule(t *testing.T) {
	t.Setenv("GOFLAGS", "-mod=readonly") // with the versions that go.mod names, also where CI tests newer ones
	wanted := []string{
		module,
		"github.com/cenkalti/backoff/v4",
		"github.com/cespare/xxhash/v2",
		"github.com/go-logr/logr",
		"github.com/go-logr/stdr",
		"github.com/redis/go-redis/v9",
		"go.opentelemetry.io/auto/sdk",
		"go.opentelemetry.io/otel",
		"go.opentelemetry.io/otel/metric",
		"go.opentelemetry.io/otel/trace",
		"go.uber.org/atomic",
		"golang.org/x/sys",
	}
	got := slices.Compact(slices.Sorted(slices.Values(dependencies(t, "-f", "{{with .Module}}{{.Path}}{{end}}", "."))))
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		t.Errorf("users get %v, want %v", got, wanted)
	}
	page := readDesign(t)
	for _, path := range wanted[1:] {
		for _, host := range []string{"github.com/", "go.opentelemetry.io/otel/"} {
			path = strings.TrimPrefix(path, host)
		}
		if !strings.Contains(page, path) {
			t.Errorf("docs/design.md does not say why users get %s", path)
		}
	}
}

func readDesign(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The command line has libraries of its own, so it is a module of its own: its requirements
// do not become those of every program that imports the library. The workspace builds both,
// and must not build the library with newer versions than its own go.mod names.
func TestTheCommandsLibrariesStayOutOfTheLibrarysModule(t *testing.T) {
	list := func(work string) map[string]string {
		cmd := exec.Command("go", "list", "-m", "all")
		cmd.Env = append(cmd.Environ(), "GOFLAGS=-mod=readonly", "GOWORK="+work)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		versions := map[string]string{}
		for line := range strings.Lines(string(out)) {
			path, version, _ := strings.Cut(strings.TrimSpace(line), " ")
			versions[path] = version
		}
		return versions
	}
	work, err := filepath.Abs("go.work")
	if err != nil {
		t.Fatal(err)
	}
	alone, together := list("off"), list(work)
	const cli = "github.com/spf13/cobra"
	if _, in := alone[cli]; in {
		t.Errorf("the library requires %s", cli)
	}
	if _, in := together[cli]; !in {
		t.Fatalf("the workspace has no %s, so this test compares nothing: %v", cli, together)
	}
	for path, version := range alone {
		if together[path] != version {
			t.Errorf("the workspace builds %s %s, the library wants %s", path, together[path], version)
		}
	}
}

// Its tests are the ones that are run after each line, so they are quick to build.
func TestTheStateMachinesTestsNeedNoServerAndNoSDK(t *testing.T) {
	for _, dep := range dependencies(t, "-test", "./internal/lockstate") {
		for _, heavy := range []string{"github.com/redis", "github.com/alicebob", "go.opentelemetry.io"} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("they depend on %s", dep)
			}
		}
	}
}
