//go:build unix

package dbtest

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// MariaDB starts a MariaDB on the loopback that ends with the test, and returns the data source name of its
// database test, for a driver that calls itself "mysql". Where none is installed the test is skipped, or
// fails when the environment has LEASED_REQUIRE_MARIADB=1.
func MariaDB(t *testing.T) string {
	t.Helper()
	install, err := exec.LookPath("mariadb-install-db")
	_, err2 := exec.LookPath("my_print_defaults") // which the former needs
	program, err3 := findMariaDB()
	if err := errors.Join(err, err2, err3); err != nil {
		lacking(t, "LEASED_REQUIRE_MARIADB", fmt.Sprintf("%v: install Debian's packages mariadb-server-core and mariadb-client-core, or their like", err))
	}
	dir := t.TempDir()
	args := []string{"--no-defaults", "--datadir=" + filepath.Join(dir, "data")}
	if os.Getuid() == 0 {
		args = append(args, "--user=root") // it refuses to be root's unless told so
	}
	made, err := exec.CommandContext(t.Context(), install, append(args, "--auth-root-authentication-method=normal")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, made)
	}
	for range 5 { // somebody else may take the port in between
		port := freePort(t)
		cmd := exec.Command(program, append(args, "--socket="+filepath.Join(dir, "socket"), "--bind-address=127.0.0.1", // the cleanup ends it
			fmt.Sprint("--port=", port), "--innodb-flush-log-at-trx-commit=0")...)
		s := server{name: "MariaDB", cmd: cmd, end: syscall.SIGTERM, kill: syscall.SIGKILL}
		source := fmt.Sprintf("root@tcp(127.0.0.1:%d)/test", port)
		db, err := sql.Open("mysql", source)
		if err != nil {
			t.Fatal(err)
		}
		ok := s.start(t, db)
		_ = db.Close()
		if ok {
			return source
		}
	}
	t.Fatal("MariaDB did not start")
	return ""
}

// findMariaDB looks also where Debian has the server, which need not be in a user's PATH.
func findMariaDB() (string, error) {
	path, err := exec.LookPath("mariadbd")
	if err != nil {
		if other, err := exec.LookPath("/usr/sbin/mariadbd"); err == nil {
			return other, nil
		}
	}
	return path, err
}
