package syncsuite

import (
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sources is the directory of Go's package sync.
func sources(t *testing.T) string {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		t.Skipf("no go command: %v", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(root)), "src", "sync")
	if _, err := os.Stat(filepath.Join(dir, "mutex_test.go")); err != nil {
		t.Skipf("this Go came without its tests: %v", err)
	}
	return dir
}

func adapted(t *testing.T, name string) Adapted {
	t.Helper()
	dir := sources(t)
	export, err := os.ReadFile(filepath.Join(dir, "export_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	hooks, err := Hooks("export_test.go", export)
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	out, err := Adapt(name, code, hooks)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAdaptKeepsWhatNeedsNoHook(t *testing.T) {
	for _, test := range []struct {
		file    string
		tests   []string
		dropped []string
		without []string
	}{
		{
			file:    "mutex_test.go",
			tests:   []string{"TestMutex", "TestMutexMisuse", "TestMutexFairness"},
			dropped: []string{"HammerSemaphore", "TestSemaphore", "BenchmarkContendedSemaphore"},
			without: []string{"Runtime_", `"internal/`, `"sync"`, "recover()", "sync_test"},
		},
		{
			file:    "rwmutex_test.go",
			tests:   []string{"TestParallelReaders", "TestRWMutex", "TestRLocker"},
			without: []string{`"internal/`, `"sync"`, "sync_test"},
		},
	} {
		t.Run(test.file, func(t *testing.T) {
			got := adapted(t, test.file)
			for _, n := range test.tests {
				if !slices.Contains(got.Tests, n) {
					t.Errorf("%s is missing in %q", n, got.Tests)
				}
			}
			for _, n := range test.dropped {
				if !slices.Contains(got.Dropped, n) {
					t.Errorf("%s was not dropped, only %q", n, got.Dropped)
				}
			}
			for _, s := range test.without {
				if strings.Contains(string(got.Code), s) {
					t.Errorf("%s is still there", s)
				}
			}
			if _, err := parser.ParseFile(token.NewFileSet(), test.file, got.Code, 0); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAdaptRefusesWhatItDoesNotKnow(t *testing.T) {
	hooks := map[string]bool{"Hook": true}
	for name, code := range map[string]string{
		"a file without sync":          `package sync_test`,
		"an unknown internal package":  `package sync_test; import ("internal/race"; . "sync"); var _ = race.Enabled; var _ Mutex`,
		"misuse cases without recover": `package sync_test; import . "sync"; var misuseTests = []Mutex{}`,
		"a recover without cases":      `package sync_test; import . "sync"; func f(m *Mutex) { defer func() { recover() }() }`,
		"no Go":                        `package`,
	} {
		t.Run(name, func(t *testing.T) {
			if out, err := Adapt("x_test.go", []byte(code), hooks); err == nil {
				t.Errorf("adapted to:\n%s", out.Code)
			}
		})
	}
}

func TestAdaptDropsWhatNamesSomethingDropped(t *testing.T) {
	const code = `package sync_test

import (
	"os"
	. "sync"
	"testing"
)

// help is the only one to use os.
func help() { Hook(os.Args) }

func TestGone(t *testing.T) { help() }

// TestStays mentions x.Hook, which is something else.
func TestStays(t *testing.T) { new(Mutex).Lock(); x.Hook() }
`
	out, err := Adapt("x_test.go", []byte(code), map[string]bool{"Hook": true})
	if err != nil {
		t.Fatal(err)
	}
	if got := string(out.Code); strings.Contains(got, `"os"`) || strings.Contains(got, "help") {
		t.Errorf("left in:\n%s", got)
	}
	if want := []string{"help", "TestGone"}; !slices.Equal(out.Dropped, want) {
		t.Errorf("dropped %q, want %q", out.Dropped, want)
	}
	if want := []string{"TestStays"}; !slices.Equal(out.Tests, want) {
		t.Errorf("tests %q, want %q", out.Tests, want)
	}
}
