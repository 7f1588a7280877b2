package leased_test

import (
	"bytes"
	"runtime/pprof"
	"testing"
	"time"
)

// senders counts the goroutines of this process that send commands to a quorum's servers, or
// wait for some to send.
func senders(t *testing.T) int {
	t.Helper()
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 2); err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b.Bytes(), []byte("internal/quorum.(*Server).sender("))
}

// The goroutines that send to a quorum's servers are used again, however many locks are taken,
// and end when there is nothing to send.
func TestVirtualSendersAreUsedAgainAndEnd(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		before := senders(t)
		c := newClient(t, s)
		mu := c.Mutex("x")
		for range 50 {
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // as often as a lock is used
		}
		// A release and an acquire may be under way to each server, and a sender be about to wait.
		if n := senders(t) - before; n < 1 || n > 4*suiteMembers {
			t.Errorf("%d goroutines send, want up to %d", n, 4*suiteMembers)
		}
		time.Sleep(time.Minute)
		if n := senders(t) - before; n > 0 {
			t.Errorf("%d goroutines are left", n)
		}
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // it goes on
	})
}
