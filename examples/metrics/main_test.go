package main

import (
	"slices"
	"strings"
	"sync/atomic"
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
