package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

// The program stands in the README as it is, address included. So the test runs a copy
// with the address of its own server.
func TestTheReadmesProgramRuns(t *testing.T) {
	server := redistest.Server(t)
	text, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"localhost:6379"`) {
		t.Fatal("main.go has no address to replace")
	}
	program := filepath.Join(t.TempDir(), "main.go")
	text = []byte(strings.Replace(string(text), "localhost:6379", server.Addr, 1))
	if err := os.WriteFile(program, text, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "go", "run", program).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "no other process is in here") {
		t.Errorf("it ended with %v and printed %q", err, out)
	}
}
