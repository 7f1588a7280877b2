package redistest

import (
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel kill the program if this process ends without cleaning
// up, for example by the panic of a test that ran into its time limit.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
