package redistest

import (
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// common is the one shared server of the process. The mutex guards its start.
var common struct {
	sync.Mutex
	inMain bool // Main is running and will end the server
	server *Instance
	err    error
}

// Main runs the tests and then ends the server of [Shared] and all [Deployments]. Unless
// GOGC is set, it makes the garbage collector run less often:
//
//	func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }
func Main(m *testing.M) int {
	common.Lock()
	common.inMain = true
	common.Unlock()

	// For each script the embedded server makes a new Lua state. With the default setting, a third
	// of all processor time would go into garbage collection, although little memory is in use.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	if strconv.IntSize < 64 { // see Needs64Bits; an example cannot skip itself
		flag.Parse()
		if skip := flag.Lookup("test.skip"); skip != nil && skip.Value.String() == "" {
			_ = skip.Value.Set("^Example")
		}
	}
	code := m.Run()

	common.Lock()
	defer common.Unlock()
	common.inMain = false
	if common.server != nil {
		common.server.Close()
		common.server = nil
	}
	deployments.host.end()
	return code
}

// Shared returns the server that all tests of the process use together. It is started
// on first use and ended by [Main]. It cannot be frozen, killed or restarted, and no
// test may flush it. A test's keys go under its own [Prefix].
//
// If no TestMain calls Main, the server belongs to tb alone.
func Shared(tb testing.TB) *Instance {
	tb.Helper()
	_ = need(tb)
	common.Lock()
	defer common.Unlock()
	if !common.inMain {
		return Server(tb)
	}
	if common.server == nil && common.err == nil {
		common.server, common.err = Start()
	}
	if common.err != nil {
		tb.Fatal(common.err)
	}
	view := &Instance{
		Addr:    common.server.Addr,
		tb:      tb,
		shared:  true,
		running: common.server.running,
	}
	tb.Cleanup(view.Close)
	return view
}

var prefixes atomic.Int64

// Prefix returns a key prefix that no other call returns. It contains the test's name,
// so that the output of MONITOR and leaked keys name their test. It has no braces, so it
// never changes the slot of a key, and no characters that are special in patterns.
func Prefix(tb testing.TB) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '/':
			return r
		}
		return '-'
	}, tb.Name())
	if len(name) > 80 {
		name = name[:80]
	}
	return fmt.Sprintf("%s.%d.%d:", name, os.Getpid(), prefixes.Add(1))
}
