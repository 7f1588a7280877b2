//go:build unix

package main

import (
	"syscall"
	"time"
)

// ownCPU is the processor time that this process has used. It tells more than the clock on a
// machine that does other things, too.
func ownCPU() time.Duration {
	var ru syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}
