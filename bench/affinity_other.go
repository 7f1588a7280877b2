//go:build !linux

package main

import "os/exec"

// On this system a program cannot be bound to one processor.
func startOn(cmd *exec.Cmd, _ int) error { return cmd.Start() }

func processors() (server, clients int) { return -1, -1 }
