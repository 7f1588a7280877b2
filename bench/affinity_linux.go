package main

import (
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// startOn starts a program on one processor, together with whatever the program starts, because a
// child inherits the affinity of the thread that made it. With a negative number the system chooses.
func startOn(cmd *exec.Cmd, cpu int) error {
	if cpu < 0 {
		return cmd.Start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	err := cmd.Start()
	if back := unix.SchedSetaffinity(0, &before); err == nil {
		err = back
	}
	return err
}

// processors returns the processor for the server and the one for all clients, or -1 twice
// where there is only one.
func processors() (server, clients int) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil || allowed.Count() < 2 {
		return -1, -1
	}
	server, clients = -1, -1
	for cpu := 0; clients < 0; cpu++ {
		switch {
		case !allowed.IsSet(cpu):
		case server < 0:
			server = cpu
		default:
			clients = cpu
		}
	}
	return server, clients
}
