package target

import (
	"fmt"
	"os"
	"testing"

	"github.com/leasedmutex/leased/internal/syncsuite/syncshim"
)

func TestMain(m *testing.M) {
	code := m.Run()
	// TestMutexFairness leaves a goroutine that may hold its lock, or ask for it, a moment longer.
	if err := syncshim.Close(); err != nil {
		fmt.Fprintln(os.Stderr, "close:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}
