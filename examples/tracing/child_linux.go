package main

import (
	"os/exec"
	"syscall"
)

// dieWithParent has the kernel end the program when this process ends without
// having cleaned up.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
