//go:build !linux

package program

import (
	"os/exec"
	"syscall"
)

func dieWithParent(*exec.Cmd, syscall.Signal) {}
