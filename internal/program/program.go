// Package program starts the server programs of tests.
package program

import (
	"context"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"syscall"
)

// Start starts a program and returns once it runs. The channel is closed when it has ended and has
// been waited for: nothing of it is left in the process table then. How it ended is told nobody, and
// is in what it wrote.
//
// On Linux, the kernel sends the program the signal if this process ends without cleaning up, for
// example by the panic of a test that ran into its time limit. Elsewhere the program outlives it.
func Start(cmd *exec.Cmd, ifOrphaned syscall.Signal) (ended <-chan struct{}, err error) {
	dieWithParent(cmd, ifOrphaned)
	started, done := make(chan error, 1), make(chan struct{})
	// Owned by the caller, ended by the end of the program, waited for through ended.
	// It keeps its thread: dieWithParent ties the program to the life of its parent, which for
	// Linux is the thread that started it, not the process.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		// The program may outlive the test that happened to start it: see redistest.CheckLeaks.
		pprof.SetGoroutineLabels(context.Background())
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
		close(done)
	}()
	return done, <-started
}
