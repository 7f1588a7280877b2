//go:build race

package syncsuite

// Who asks for the race detector wants it for Go's tests too.
func init() { flags = append(flags, "-race") }
