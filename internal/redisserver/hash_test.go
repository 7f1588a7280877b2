//go:build go1.26

package redisserver

import (
	"os"
	"os/exec"
	"testing"
)

// In such a program any use of SHA-1 panics, and the hashes are computed when the package is loaded.
func TestScriptsRunWhereOnlyFIPSAlgorithmsAreAllowed(t *testing.T) {
	t.Parallel()
	child := exec.Command(os.Args[0], "-test.run", "^TestAllScriptsRunInClusterMode$")
	child.Env = append(os.Environ(), "GODEBUG=fips140=only")
	out, err := child.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
