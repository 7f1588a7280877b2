package redistest

import (
	"os/exec"
	"syscall"
)

// dieWithParent has the kernel end the program when this process ends without
// having cleaned up, as after the panic of a test that ran into its time limit.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
