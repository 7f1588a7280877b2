//go:build unix && !linux

package dbtest

import "syscall"

func dieWithParent(*syscall.SysProcAttr) {}
