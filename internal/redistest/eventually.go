package redistest

import (
	"testing"
	"time"
)

// Eventually waits until holds returns true, and fails the test if it has not after 30 seconds; what says
// what it waited for. It polls, so it is only for what no event announces, as what servers and other
// processes do.
func Eventually(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	const patience = 30 * time.Second
	for until := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) { // the pause between two looks
		if time.Now().After(until) {
			tb.Fatalf("not within %v: %s", patience, what)
		}
	}
}
