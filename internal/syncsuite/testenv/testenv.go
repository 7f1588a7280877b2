// Package testenv stands in for the one function of Go's internal/testenv that the
// tests of sync use.
package testenv

import (
	"os"
	"testing"
)

// Executable returns the path of the running test program.
func Executable(tb testing.TB) string {
	tb.Helper()
	name, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	return name
}
