//go:build !linux

package redistest

import "os/exec"

// dieWithParent works on Linux only; elsewhere a server outlives a test process that was
// killed.
func dieWithParent(*exec.Cmd) {}
