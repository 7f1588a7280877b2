package syncsuite

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// flags are for the go command that runs Go's tests.
var flags []string

func TestGoSyncMutexTests(t *testing.T) {
	runSuite(t, "mutex_test.go", "TestMutex", "TestMutexMisuse", "TestMutexFairness")
}

// runSuite runs the tests of one of Go's files against a real server, and fails when
// one of them fails or did not run, or when one of those expected is not in it.
func runSuite(t *testing.T, file string, expected ...string) {
	t.Helper()
	got := adapted(t, file)
	for _, n := range expected {
		if !slices.Contains(got.Tests, n) {
			t.Errorf("Go's %s has no %s anymore", file, n)
		}
	}
	in := redistest.Server(t)

	args := []string{
		"test", "-overlay", overlay(t, file, got.Code), "-vet=off", "-count=1", "-v",
		"-timeout", "3m", "-run", "^(" + strings.Join(got.Tests, "|") + ")$",
	}
	if testing.Short() {
		args = append(args, "-short")
	}
	args = append(args, flags...)
	// The child's own limit comes first and tells where it hangs.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append(args, "./target")...)
	cmd.Env = append(os.Environ(), "LEASED_SYNC_ADDR="+in.Addr)
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	t.Logf("go %s\n%s", strings.Join(cmd.Args[1:], " "), out)
	if err != nil {
		t.Errorf("go test: %v", err)
	}

	passed := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^--- PASS: (\S+)`).FindAllStringSubmatch(string(out), -1) {
		passed[m[1]] = true
	}
	for _, n := range got.Tests {
		if passed[n] {
			t.Logf("ran and passed: %s", n)
		} else {
			t.Errorf("did not pass: %s", n)
		}
	}
	t.Logf("left out, because they test the inside of sync: %q", got.Dropped)
}

// overlay writes code where only the go command sees it, as a file of package target,
// and returns the name of the file that says so.
func overlay(t *testing.T, name string, code []byte) string {
	t.Helper()
	dir := t.TempDir()
	virtual, err := filepath.Abs(filepath.Join("target", "zz_sync_"+name))
	if err != nil {
		t.Fatal(err)
	}
	real := filepath.Join(dir, name)
	plan, err := json.Marshal(map[string]map[string]string{"Replace": {virtual: real}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(real, code, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, plan, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
