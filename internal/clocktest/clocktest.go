// Package clocktest sets the two clocks of a time.Time apart.
package clocktest

import (
	"testing"
	"time"
	"unsafe"
)

// Asleep returns the time d after before on a machine that was suspended meanwhile: its
// wall clock moved by d, and its monotonic one not at all. The time package offers no
// way to make such a Time, so its memory is changed.
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
		t.Fatal("a Time is not what it was, so its clocks cannot be set apart")
	}
	return now
}
