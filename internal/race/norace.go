//go:build !race

// Package race tells tests whether the race detector is on; see race.go.
package race

// Enabled reports that the race detector is on.
const Enabled = false
