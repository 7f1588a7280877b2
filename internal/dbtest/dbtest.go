//go:build unix

// Package dbtest starts a PostgreSQL or a MariaDB for a test. Its callers import the drivers, so
// that this module needs none.
package dbtest

import (
	"bytes"
	"database/sql"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/program"
)

// lacking skips the test for a reason, or fails it when the variable forbids skipping.
func lacking(t *testing.T, variable string, why any) {
	t.Helper()
	if os.Getenv(variable) == "1" {
		t.Fatalf("%v; %s=1 forbids skipping this test", why, variable)
	}
	t.Skip(why)
}

// freePort returns a port of the loopback that nobody had a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// server is a program that serves until the test ends.
type server struct {
	name      string
	cmd       *exec.Cmd
	end, kill syscall.Signal // to end it, and to end it when it does not
}

// start starts the server and waits until a database answers. It reports false if the server ended
// instead, as it does when another program has taken its port.
func (s *server) start(t *testing.T, db *sql.DB) bool {
	t.Helper()
	var log bytes.Buffer
	s.cmd.Stdout, s.cmd.Stderr = &log, &log
	done, err := program.Start(s.cmd, syscall.SIGQUIT) // PostgreSQL's for an immediate end, with its children
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.cmd.Process.Signal(s.end)
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			_ = s.cmd.Process.Signal(s.kill)
			<-done
		}
		if t.Failed() {
			t.Logf("%s: %s", s.name, &log)
		}
	})
	for range 3000 { // nothing tells when it listens
		if db.PingContext(t.Context()) == nil {
			return true
		}
		select {
		case <-done:
			t.Logf("%s ended while starting: %s", s.name, &log)
			return false
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Fatalf("%s does not answer", s.name)
	return false
}
