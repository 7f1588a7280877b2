//go:build unix

// Package pgtest starts a PostgreSQL for a test. Its caller imports a driver that calls
// itself "pgx", so that this module needs none.
package pgtest

import (
	"bytes"
	"database/sql"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// Start starts a PostgreSQL on the loopback that ends with the test, and returns its
// URL. Where none is installed the test is skipped, or fails when the environment has
// LEASED_REQUIRE_POSTGRES=1.
func Start(t *testing.T) string {
	t.Helper()
	programs, err := findPostgres()
	switch {
	case err == nil:
	case os.Getenv("LEASED_REQUIRE_POSTGRES") == "1":
		t.Fatalf("%v; LEASED_REQUIRE_POSTGRES=1 forbids to skip this test", err)
	default:
		t.Skip(err)
	}
	// Not t.TempDir, whose parents only their owner may enter.
	dir, err := os.MkdirTemp("", "pgtest") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	attr, owner := unprivileged(t, dir)

	initdb := exec.Command(filepath.Join(programs, "initdb"), "--pgdata", filepath.Join(dir, "data"), "--username", owner,
		"--auth", "trust", "--no-sync", "--encoding", "UTF8", "--locale", "C")
	initdb.Dir, initdb.SysProcAttr = dir, attr
	if out, err := initdb.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	for range 5 { // somebody else may take the port in between
		if url, ok := startPostgres(t, programs, dir, attr, owner); ok {
			return url
		}
	}
	t.Fatal("PostgreSQL did not start")
	return ""
}

func startPostgres(t *testing.T, programs, dir string, attr *syscall.SysProcAttr, owner string) (url string, ok bool) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	_ = l.Close()
	var log bytes.Buffer
	server := exec.Command(filepath.Join(programs, "postgres"), "-D", filepath.Join(dir, "data"), "-p", port,
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=200",
		"-c", "fsync=off", "-c", "timezone=UTC", "-c", "log_timezone=UTC")
	own := *attr
	dieWithParent(&own)
	server.Dir, server.SysProcAttr = dir, &own
	server.Stdout, server.Stderr = &log, &log
	started, done := make(chan error, 1), make(chan struct{})
	// Owned by the test, ended by the end of the server, waited for by the cleanup. It
	// keeps its thread, because Linux counts the thread that started a program, not the
	// process, as the parent whose death the program is to share.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(done)
		err := server.Start()
		started <- err
		if err == nil {
			_ = server.Wait() // why it ended is in its log
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGINT) // ends connections, and then itself
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			_ = server.Process.Signal(syscall.SIGQUIT) // SIGKILL would leave its children
			<-done
		}
		if t.Failed() {
			t.Logf("PostgreSQL: %s", &log)
		}
	})
	url = fmt.Sprintf("postgres://%s@127.0.0.1:%s/postgres?sslmode=disable", owner, port)
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for range 2000 { // nothing tells when it listens
		if db.PingContext(t.Context()) == nil {
			return url, true
		}
		select {
		case <-done:
			t.Logf("PostgreSQL ended while starting: %s", &log)
			return "", false
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Fatal("PostgreSQL does not answer")
	return "", false
}

// findPostgres returns the folder of the server's programs, which Debian keeps out of
// PATH, one for each version.
func findPostgres() (string, error) {
	folders, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	slices.Sort(folders)
	if program, err := exec.LookPath("initdb"); err == nil {
		if program, err = filepath.EvalSymlinks(program); err == nil {
			folders = append(folders, filepath.Dir(program))
		}
	}
	for _, f := range slices.Backward(folders) {
		_, err := os.Stat(filepath.Join(f, "initdb"))
		if _, err2 := os.Stat(filepath.Join(f, "postgres")); err == nil && err2 == nil {
			return f, nil
		}
	}
	return "", fmt.Errorf("no PostgreSQL in PATH or /usr/lib/postgresql: install Debian's package postgresql, or its like")
}

// unprivileged says how to start a program that refuses to be root's, and gives dir to
// the user that it then runs as. Who is not root starts it as is.
func unprivileged(t *testing.T, dir string) (attr *syscall.SysProcAttr, owner string) {
	t.Helper()
	if os.Getuid() != 0 {
		return &syscall.SysProcAttr{}, "tester"
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			continue
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			continue
		}
		if err := os.Chown(dir, int(uid), int(gid)); err != nil {
			t.Fatal(err)
		}
		return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, "tester"
	}
	const why = "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody"
	if os.Getenv("LEASED_REQUIRE_POSTGRES") == "1" {
		t.Fatal(why + "; LEASED_REQUIRE_POSTGRES=1 forbids to skip this test")
	}
	t.Skip(why)
	return nil, ""
}
