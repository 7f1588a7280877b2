//go:build !unix

package main

import "sync/atomic"

// openInside returns a word of this process alone: on this system, owners in two processes go unnoticed.
func openInside(string) (*atomic.Int64, error) { return new(atomic.Int64), nil }
