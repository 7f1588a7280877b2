//go:build unix

package dbtest

import (
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
)

// Postgres starts a PostgreSQL on the loopback that ends with the test, and returns its URL, for a driver
// that calls itself "pgx". Where none is installed the test is skipped, or fails when the environment has
// LEASED_REQUIRE_POSTGRES=1.
func Postgres(t *testing.T) string {
	t.Helper()
	programs, err := findPostgres()
	if err != nil {
		lacking(t, "LEASED_REQUIRE_POSTGRES", err)
	}
	// Not t.TempDir, whose parents only their owner may enter.
	dir, err := os.MkdirTemp("", "dbtest") //nolint:usetesting // see above
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
	port := strconv.Itoa(freePort(t))
	cmd := exec.Command(filepath.Join(programs, "postgres"), "-D", filepath.Join(dir, "data"), "-p", port,
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=200",
		"-c", "fsync=off", "-c", "timezone=UTC", "-c", "log_timezone=UTC")
	own := *attr
	cmd.Dir, cmd.SysProcAttr = dir, &own
	// SIGINT ends connections, and then itself. SIGKILL would leave its children.
	s := server{name: "PostgreSQL", cmd: cmd, end: syscall.SIGINT, kill: syscall.SIGQUIT}
	url = fmt.Sprintf("postgres://%s@127.0.0.1:%s/postgres?sslmode=disable", owner, port)
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	return url, s.start(t, db)
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
	lacking(t, "LEASED_REQUIRE_POSTGRES", why)
	return nil, ""
}
