package redistest

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Instance is a running Redis server on a loopback port of its own. It keeps nothing on
// disk. Its methods are safe for concurrent use.
//
// If an operation fails, the test fails, or the method panics if [Start] started the server.
type Instance struct {
	// Addr is "127.0.0.1:port". It stays the same across Kill and Restart.
	Addr string

	program string
	args    []string
	dir     string
	ownDir  bool        // Close removes dir
	tb      testing.TB  // nil after Start
	shared  bool        // a view of the server that other tests also use
	tls     *tls.Config // of its clients; nil if connections are unencrypted

	// mu guards the fields below. It is not held while a program starts or ends, except in
	// Restart and Close, which no other operation may overtake.
	mu      sync.Mutex
	running *process
	clients []*redis.Client
}

// Server starts a real redis-server for tb and ends it in tb's cleanup. The
// arguments are appended to the command line: Server(t, "--maxmemory", "1mb").
// It cannot start a server that does not listen on a plain TCP port; see
// [TLSServer].
//
// If no redis-server is installed, tb is skipped, or fails if the environment has
// LEASED_REQUIRE_REDIS=1.
func Server(tb testing.TB, args ...string) *Instance {
	tb.Helper()
	return startFor(tb, usual(need(tb), tb.TempDir(), args))
}

// Start is [Server] for programs that have no testing.TB. The caller must call Close.
func Start(args ...string) (*Instance, error) {
	program, err := find()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return nil, err
	}
	in, err := startAs(usual(program, dir, args))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	in.ownDir = true
	return in, nil
}

// ErrNoServer is returned by [Start] if no redis-server program is installed.
var ErrNoServer = errors.New("redistest: no redis-server in PATH: install Debian's package redis-server, or its like")

// find looks for the program that LEASED_REDIS_SERVER names, which can be another
// version or Valkey. The default is redis-server.
func find() (string, error) {
	name := os.Getenv("LEASED_REDIS_SERVER")
	if name == "" {
		name = "redis-server"
	}
	program, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w (%w)", ErrNoServer, err)
	}
	if name != "redis-server" {
		tellVersion.Do(func() {
			version, err := exec.Command(program, "--version").Output()
			if err != nil {
				version = []byte(err.Error())
			}
			fmt.Fprintf(os.Stderr, "redistest: %s: %s\n", program, bytes.TrimSpace(version))
		})
	}
	return program, nil
}

// tellVersion makes a run against a server other than the usual one print its version, once.
var tellVersion sync.Once

func need(tb testing.TB) string {
	tb.Helper()
	program, err := find()
	switch {
	case err == nil:
	case os.Getenv("LEASED_REQUIRE_REDIS") == "1":
		tb.Fatalf("%v; LEASED_REQUIRE_REDIS=1 forbids skipping this test", err)
	default:
		tb.Skip(err)
	}
	return program
}

// plan is what startAs needs to know about a server, except the port, which it chooses.
type plan struct {
	program string
	dir     string
	port    func() (int, error) // nil means FreePort
	args    func(port int) ([]string, error)
	tls     *tls.Config
	// lacking reports whether an error says that the program cannot do what the test needs, so that
	// the test is skipped. nil means that there is no such error.
	lacking func(error) bool
}

// usual is the plan of a server with the usual arguments, and more.
func usual(program, dir string, args []string) plan {
	p := plan{program: program, dir: dir, args: func(port int) ([]string, error) {
		return append(usualArgs(port), args...), nil
	}}
	if slices.Contains(args, "--cluster-enabled") { // its bus listens, too
		p.port = clusterPort
	}
	return p
}

// startFor starts a server for tb, and ends it in tb's cleanup.
func startFor(tb testing.TB, p plan) *Instance {
	tb.Helper()
	in, err := startAs(p)
	if err != nil {
		if p.lacking != nil && p.lacking(err) {
			tb.Skip(err)
		}
		tb.Fatal(err)
	}
	in.tb = tb
	tb.Cleanup(in.Close)
	return in
}

// usualArgs makes a server listen on one loopback port and keep nothing on disk.
func usualArgs(port int) []string {
	return []string{"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"}
}

// startAs tries several ports, because somebody else may take a port between FreePort and
// the server's own bind.
func startAs(p plan) (*Instance, error) {
	if p.port == nil {
		p.port = FreePort
	}
	for try := 1; ; try++ {
		port, err := p.port()
		if err != nil {
			return nil, err
		}
		args, err := p.args(port)
		if err != nil {
			return nil, err
		}
		in := &Instance{
			Addr:    net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
			program: p.program,
			dir:     p.dir,
			args:    args,
			tls:     p.tls,
		}
		if err = in.run(); err == nil {
			return in, nil
		}
		if !errors.Is(err, errPort) || try == 20 {
			return nil, err
		}
	}
}

// run starts the server, waits until it answers and sets running. Nobody else may change running meanwhile.
func (in *Instance) run() error {
	p, err := launch(in.program, in.dir, in.args)
	if err != nil {
		return err
	}
	if err := p.await(in.Addr, in.tls); err != nil {
		p.kill()
		return err
	}
	in.running = p
	return nil
}

// Options returns fresh options for a client of the server.
func (in *Instance) Options() *redis.Options {
	o := Options(in.Addr)
	if in.tls != nil {
		o.TLSConfig = in.tls.Clone()
	}
	return o
}

// Client returns a new client whose options the given functions may change. It is closed
// before the server is ended.
func (in *Instance) Client(change ...func(*redis.Options)) *redis.Client {
	o := in.Options()
	for _, c := range change {
		c(o)
	}
	rdb := redis.NewClient(o)
	in.mu.Lock()
	defer in.mu.Unlock()
	in.clients = append(in.clients, rdb)
	return rdb
}

// Pid returns the process id of the server. Restart changes it.
func (in *Instance) Pid() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.running.pid()
}

// Log returns the last part of what the server wrote.
func (in *Instance) Log() string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.running.log.String()
}

// Kill ends the server abruptly and waits for its end: clients see their connections
// closed, and all keys are gone. The server may already be dead.
func (in *Instance) Kill() {
	in.helper()
	if in.refuseShared("kill") {
		return
	}
	in.mu.Lock()
	p := in.running
	in.mu.Unlock()
	p.kill()
}

// Restart ends the server if it is running, and starts it again, empty, on the same port.
func (in *Instance) Restart() {
	in.helper()
	if in.refuseShared("restart") {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.running.kill()
	err := errPort
	// The port was free a moment ago; whoever has it now will not keep it for long.
	for range 5 {
		if err = in.run(); !errors.Is(err, errPort) {
			break
		}
	}
	if err != nil {
		in.fail(err)
	}
}

// Close closes the clients and ends the server, frozen or not. [Server] arranges for it.
// Of a shared server, Close ends only the clients that came from this Instance.
func (in *Instance) Close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, rdb := range in.clients {
		_ = rdb.Close() // a test may have closed it already
	}
	in.clients = nil
	if in.shared {
		return
	}
	in.running.thaw()
	in.running.kill()
	if in.ownDir {
		_ = os.RemoveAll(in.dir)
	}
}

func (in *Instance) refuseShared(what string) bool {
	in.helper()
	if in.shared {
		in.fail(fmt.Errorf("redistest: will not %s the server that other tests use: use Server", what))
	}
	return in.shared
}

func (in *Instance) fail(err error) {
	if in.tb == nil {
		panic(err)
	}
	in.tb.Helper()
	in.tb.Error(err)
}

func (in *Instance) helper() {
	if in.tb != nil {
		in.tb.Helper()
	}
}
