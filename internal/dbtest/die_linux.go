package dbtest

import "syscall"

// dieWithParent has the kernel end the program when the test ends without having
// cleaned up, as after a timeout.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGQUIT }
