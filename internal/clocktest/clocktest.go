// Package clocktest makes times whose wall clock and monotonic clock disagree.
package clocktest

import (
	"testing"
	"time"
	"unsafe"
)

// Asleep returns the time d after before, as seen by a machine that was suspended in
// between: its wall clock has moved by d, and its monotonic clock has not moved. The time
// package offers no way to make such a Time, so Asleep changes the Time's memory.
func Asleep(t testing.TB, before time.Time, d time.Duration) time.Time {
	t.Helper()
	now := before.Add(d)
	inner := (*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&now))
	inner.ext -= int64(d)
	if now.Sub(before) != 0 || now.Round(0).Sub(before.Round(0)) != d {
		t.Fatal("the memory layout of time.Time has changed, so Asleep cannot set its clocks apart")
	}
	return now
}
