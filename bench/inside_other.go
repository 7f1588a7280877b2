//go:build !unix

package main

import "sync/atomic"

// openInside returns a word of this process: owners in two processes are not noticed here.
func openInside(string) (*atomic.Int64, error) { return new(atomic.Int64), nil }
