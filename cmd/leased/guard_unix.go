//go:build unix

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// runGuard is the guard of a run; see run_unix.go. From stdin it reads deadlines, of which the last one
// counts. It kills its process group when that has passed, or when stdin ends without "done", which means
// that the process that holds the lease is gone.
//
// Where there is no boot clock, the guard goes by the wall clock alone. If that is set back, the guard is
// late; the other process, unless it is stopped or dead, is not. If it is set ahead by more than the lease
// has left, the guard kills a command whose lease is good.
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
	var v vigil
	for {
		select {
		case line, more := <-lines:
			if !more {
				if tick != nil {
					return syscall.Kill(0, syscall.SIGKILL)
				}
				return nil // there has been no command yet
			}
			if line == guardDone {
				return nil
			}
			until, err := parseDeadline(line)
			if err != nil {
				return err
			}
			if v.until = until; tick == nil {
				tick = time.Tick(50 * time.Millisecond)
			}
		case <-tick:
			if v.isOver(readClocks()) {
				return syscall.Kill(0, syscall.SIGKILL)
			}
		}
	}
}
