//go:build !linux

package main

import "os/exec"

// dieWithParent exists on Linux only; elsewhere a Jaeger or a Redis outlives this
// process if that is killed.
func dieWithParent(*exec.Cmd) {}
