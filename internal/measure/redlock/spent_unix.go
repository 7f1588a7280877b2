//go:build unix

package main

import (
	"syscall"
	"time"
)

// ownCPU returns the processor time that this process has used. On a machine that does other
// things, too, it says more than the clock.
func ownCPU() time.Duration {
	var ru syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}
