//go:build unix

package main

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// terminal is the controlling terminal, if this process is not in a pipeline, and its input is the
// terminal, or a file where it is a shell's job by itself. In a pipeline (leased run … | less), the other
// processes need the foreground too, so the command stays in the background there, and signals of the
// terminal are passed on like any others. The same is so where a script has started this process in the
// background, and in the script's own group. giveIfOurs and takeBack work on nil.
type terminal struct {
	file   *os.File
	own    int // our process group
	before *term.State
	given  int // the group in the foreground, 0 if it is ours
}

func openTerminal() *terminal {
	in, err := os.Stdin.Stat()
	leads := syscall.Getpgrp() == os.Getpid()
	if err != nil || !isTerminal(os.Stdin) && !(in.Mode().IsRegular() && leads) {
		return nil
	}
	out, err := os.Stdout.Stat()
	if err != nil || out.Mode()&(os.ModeNamedPipe|os.ModeSocket) != 0 {
		return nil
	}
	file, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return &terminal{file: file, own: syscall.Getpgrp()}
}

func (t *terminal) foreground() int {
	group, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return group
}

// give puts group in the foreground, which only a process of the foreground may do.
func (t *terminal) give(group int) {
	t.before, _ = term.GetState(int(t.file.Fd())) // nil: there is nothing to restore
	if unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, group) == nil {
		t.given = group
	}
}

func (t *terminal) giveIfOurs(group int) (given bool) {
	if t == nil || t.foreground() != t.own {
		return false
	}
	t.give(group)
	return true
}

// takeBack puts our own group back in the foreground if the command's group is there, and reports
// whether it was. restore also resets the terminal to its state before the command, which a command
// that was killed could not do.
func (t *terminal) takeBack(restore bool) bool {
	if t == nil || t.given == 0 || t.foreground() != t.given {
		return false
	}
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, t.own) // the terminal may be gone
	t.given = 0
	if restore && t.before != nil {
		_ = term.Restore(int(t.file.Fd()), t.before) // likewise
	}
	return true
}
