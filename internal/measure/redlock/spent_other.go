//go:build !unix

package main

import "time"

// ownCPU is zero where the processor time is not known.
func ownCPU() time.Duration { return 0 }
