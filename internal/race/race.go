//go:build race

// Package race tells tests whether the race detector is on. It makes a test some ten times as
// slow, and finds nothing where one goroutine does all the work: such a test has fewer rounds
// there, and all of them without it.
package race

// Enabled reports that the race detector is on.
const Enabled = true
