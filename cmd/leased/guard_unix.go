//go:build unix

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// runGuard is the guard of a run; see run_unix.go. From stdin it reads the time until which the
// lease will last, in nanoseconds since 1970. It kills its process group when that time comes, or
// when stdin ends without "done", which means that the process that holds the lease is gone.
//
// The guard uses the wall clock, because both processes have that. If the wall clock is set back,
// the guard is late; the other process, unless it is stopped or dead, is not.
func runGuard(std streams) error {
	if syscall.Getpgrp() != os.Getpid() {
		return fmt.Errorf("%s is started by 'leased run' only", guardName)
	}
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGPIPE)
	fmt.Fprintln(std.out, "ready")

	lines := make(chan string)
	// This is owned by the process, and ends with it.
	go func() {
		defer close(lines)
		for in := bufio.NewScanner(std.in); in.Scan(); {
			lines <- in.Text()
		}
	}()
	// The guard wakes twenty times a second, but only once it has been told a time, so a run that
	// waits for its lock costs nothing. A timer would not count the time during which the machine
	// sleeps.
	var tick <-chan time.Time
	var until int64
	for {
		select {
		case line, more := <-lines:
			if !more {
				if until != 0 {
					return syscall.Kill(0, syscall.SIGKILL)
				}
				return nil // there has been no command yet
			}
			if line == guardDone {
				return nil
			}
			at, err := strconv.ParseInt(line, 10, 64)
			if err != nil {
				return err
			}
			if until = at; tick == nil {
				tick = time.Tick(50 * time.Millisecond)
			}
		case now := <-tick:
			if now.UnixNano() > until {
				return syscall.Kill(0, syscall.SIGKILL)
			}
		}
	}
}
