//go:build unix

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// guard is the process that leads the command's process group.
type guard struct {
	pid      int
	cmd      *exec.Cmd
	lines    *os.File // its stdin
	deadline deadline // see until
	ended    bool
}

// startGuard starts the guard, and returns once the guard ignores signals.
func startGuard() (*guard, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, guardName) //nolint:noctx // ended by end, or by the end of this process
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	theirs, ours, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	cmd.Stdin = theirs
	ready, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		ours.Close()
		return nil, err
	}
	g := &guard{pid: cmd.Process.Pid, cmd: cmd, lines: ours}
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		g.end()
		return nil, err
	}
	return g, nil
}

// guardWait is how long a guard that is stopped is waited for once the pipe to it is full. A line is written
// as a whole or not at all.
const guardWait = 100 * time.Millisecond

// until tells the guard to kill the group at t, unless it hears otherwise.
func (g *guard) until(t time.Time) {
	g.deadline = deadlineAt(t, time.Now(), readClocks())
	_ = g.lines.SetWriteDeadline(time.Now().Add(guardWait))
	fmt.Fprintln(g.lines, g.deadline)
}

// isDue reports whether the guard kills the group now, or has killed it, whatever it hears.
func (g *guard) isDue() bool { return g.deadline.passed(readClocks()) }

// mayHaveKilled reports whether the guard has had a reason to kill the group.
func (g *guard) mayHaveKilled() bool { return g.isDue() || g.deadline.passedOnWall(readClocks()) }

// signal sends s to the command and everything that it started. Until the guard has been waited
// for, no other group can have its number.
func (g *guard) signal(s syscall.Signal) {
	if !g.ended {
		_ = syscall.Kill(-g.pid, s) // an error says that it has ended
	}
}

// end ends the guard and leaves its group alone. It may be called twice.
func (g *guard) end() {
	if g.ended {
		return
	}
	g.ended = true
	fmt.Fprintln(g.lines, guardDone)
	g.lines.Close()
	_ = g.cmd.Wait() // it may have been killed with its group
}

const guardDone = "done"

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
