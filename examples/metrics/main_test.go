package main

import (
	"errors"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	redisserver "github.com/alicebob/miniredis/v2/server"
)

func TestAWorkerThatFailsEndsTheOthers(t *testing.T) {
	provider, _, err := newProvider()
	if err != nil {
		t.Fatal(err)
	}
	m := miniredis.RunT(t)
	const refusal = "NOPERM this user has no permissions to run the 'evalsha' command"
	var refused atomic.Bool
	m.Server().SetPreHook(func(c *redisserver.Peer, cmd string, args ...string) bool {
		isOrder := slices.ContainsFunc(args, func(arg string) bool { return strings.Contains(arg, "order:") })
		if !strings.HasPrefix(cmd, "EVAL") || !isOrder || refused.Swap(true) {
			return false
		}
		c.WriteError(refusal)
		return true
	})
	worked := make(chan error, 1)
	go func() { worked <- work(t.Context(), m.Addr(), provider) }() // ends with the test's context
	select {
	case err := <-worked:
		if err == nil || !strings.Contains(err.Error(), refusal) {
			t.Errorf("work returned %v", err)
		}
	case <-time.After(patience):
		t.Error("three workers go on after the fourth has failed")
	}
	if err := provider.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTheWorkEndsIfTheAddressOfTheProgramIsTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if err := run(t.Context(), taken.Addr().String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("run returned %v", err)
	}
	stacks := make([]byte, 1<<20)
	for began := time.Now(); ; {
		running := string(stacks[:runtime.Stack(stacks, true)])
		if !strings.Contains(running, "metrics.work") {
			return
		}
		if time.Since(began) > 10*time.Second {
			t.Fatalf("a goroutine of the work is left:\n%s", running)
		}
		time.Sleep(time.Millisecond) // the pause of a poll: one that has said that it ends is still there for an instant
	}
}
