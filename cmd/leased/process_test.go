package main

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// longDemo starts a demo as a process, which comes to a place where it waits for a
// minute, and returns when it is there. gone is closed when the demo and all its
// workers have ended: they share the pipe it reads. said may be called then.
func longDemo(t *testing.T, flags ...string) (cmd *exec.Cmd, gone <-chan struct{}, said func() string) {
	t.Helper()
	cmd = program(t, append([]string{"demo", "--kill", "--ttl", "1m", "--workers", "3"}, flags...)...)
	ours, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = theirs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() { cmd.Process.Kill() })

	ended := make(chan struct{})
	var heard []byte
	// Ended by the last writer, waited for by who reads gone.
	go func() {
		defer close(ended)
		heard, _ = io.ReadAll(ours)
		ours.Close()
	}()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "cannot unlock anymore") {
			return cmd, ended, func() string { return string(heard) }
		}
	}
	t.Fatal("the demo ended before anybody was killed")
	return nil, nil, nil
}

// within fails t if c is not closed in time; the bound is generous.
func within(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatal(what)
	}
}

func TestCtrlCEndsAllProcessesAndLeavesNothing(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no way to send Ctrl-C to one process; run it on another system")
	}
	in := redistest.Server(t)
	cmd, gone, said := longDemo(t, "--redis", "redis://"+in.Addr)
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	within(t, gone, "a worker outlives Ctrl-C")
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 130 {
		t.Errorf("exit status %d, want 130", status)
	}
	if said() != "leased: stopped\n" {
		t.Errorf("stderr is %q", said())
	}
	left, err := redistest.Keys(t.Context(), in.Client(), "")
	if err != nil || len(left) > 0 {
		t.Errorf("left in Redis: %q, %v", left, err)
	}
}

func TestWorkersEndWithTheirParent(t *testing.T) {
	cmd, gone, _ := longDemo(t)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	within(t, gone, "a worker outlives its parent")
}

func TestAWorkerLeavesCtrlCToItsParent(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no way to send Ctrl-C to one process; run it on another system")
	}
	server := redistest.MiniTCP(t)
	cmd := program(t, workerCommand)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	say, heard := json.NewEncoder(in), json.NewDecoder(out)
	expect := func(want kind) {
		t.Helper()
		var m message
		if err := heard.Decode(&m); err != nil || m.Kind != want {
			t.Fatalf("the worker said %+v (%v), want %q", m, err, want)
		}
	}

	server.Set("p:stock", "1")
	say.Encode(setup{At: address{Redis: server.Addr()}, Prefix: "p:", Process: 1, Buyers: 1, TTL: time.Minute})
	expect(ready)
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	say.Encode(order{Lock: true})
	expect(sold)
	expect(done)
	say.Encode(order{Lock: true})
	expect(refused)
	expect(done)
	in.Close()
	ended := make(chan struct{})
	// Ended with the worker, which the end of the test kills if need be.
	go func() {
		defer close(ended)
		if err := cmd.Wait(); err != nil {
			t.Errorf("after the end of its orders the worker ended with %v", err)
		}
	}()
	within(t, ended, "the worker outlives the end of its orders")
}

func TestAWorkerStartedByHandSaysWhatItIs(t *testing.T) {
	got := invoke(t, workerCommand)
	if got.status != 1 || !strings.Contains(got.err, "started by 'leased demo' only") {
		t.Fatalf("status %d, stderr %q", got.status, got.err)
	}
}
