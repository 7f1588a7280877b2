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

// common is the one server of the process. The mutex guards its start.
var common struct {
	sync.Mutex
	inMain bool // somebody will end the server
	server *Instance
	err    error
}

// Main runs the tests, collecting less often unless GOGC is set, and then ends the server of
// [Shared] and all [Deployments]:
//
//	func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }
func Main(m *testing.M) int {
	common.Lock()
	common.inMain = true
	common.Unlock()

	// Each script makes the embedded server a new Lua state, so that by default a third of
	// all processor time goes into the collection of garbage while little is in use.
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

// Shared returns the server that all tests of the process use together; it is
// started when first asked for and ended by [Main]. It cannot be frozen, killed or
// restarted, and nobody may flush it. Keys go under the test's own [Prefix].
//
// Where no TestMain calls Main, the server is tb's own.
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

// Prefix returns a key prefix that no other call returns, with the test's name in
// it, which is what a MONITOR or a leaked key shows. It has no braces, so it never
// changes the slot of a key, and no pattern characters.
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
