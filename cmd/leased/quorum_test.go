//go:build unix

package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

// --redis that is said several times, and one with commas, name the servers of a quorum.
func TestRunInspectAndUnlockOnAQuorum(t *testing.T) {
	var addrs []string
	var servers []interface{ Close() }
	for range 3 {
		m := redistest.MiniTCP(t)
		addrs, servers = append(addrs, m.Addr()), append(servers, m)
	}
	all := strings.Join(addrs, ",")
	leased := program(t).Path
	inspect := `"$0" inspect job --quorum --redis ` + all
	status, out, errs := runResult(t, addrs[0], "--quorum", "--redis", addrs[1], "--redis", addrs[2], "job", "--", "sh", "-c", inspect, leased)
	if status != 0 || !strings.Contains(out, "state   held") {
		t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
	} else if !regexp.MustCompile(`servers 3 of 3 answered, [23] of these name the owner\n`).MatchString(out) {
		t.Errorf("not how many servers: %q", out)
	}
	file := scratch(t)
	held := begin(t, program(t, "run", "--quorum", "--redis", all, "job", "--", "sh", "-c", "echo $$ > "+file+"; exec sleep 60"))
	pidIn(t, file)
	if got := invoke(t, "inspect", "job", "--json", "--quorum", "--redis", all); !regexp.MustCompile(`"servers":3,"answered":3,"behind":[23]\b`).MatchString(got.out) {
		t.Errorf("inspect --json: %+v", got)
	}
	// A machine under load may answer too late, after the owner was evicted.
	for got := (result{status: 1}); got.status != 0; {
		before := got
		got = invoke(t, "unlock", "--force", "--yes", "job", "--quorum", "--redis", all)
		late := strings.Contains(before.err, "servers answered")
		if got.status != 0 && !strings.Contains(got.err, "servers answered") || got.status == 0 && !late && !regexp.MustCompile(`was taken from \S+ on [23] of 3 servers\.\n`).MatchString(got.out) {
			t.Fatalf("unlock: %+v, then %+v", before, got)
		}
	}
	held.Wait()
	if got := held.ProcessState.ExitCode(); got != statusRunLost {
		t.Errorf("status %d after unlock --force", got)
	}
	servers[0].Close()
	if got := invoke(t, "inspect", "job", "--quorum", "--redis", all); !strings.Contains(got.out, "state   free\nservers 2 of 3 answered\n") {
		t.Errorf("with two of three servers: %+v", got)
	}
	servers[1].Close()
	if status, _, errs := runResult(t, all, "--quorum", "job", "--", "echo", "done"); status != statusRunUnavailable || !strings.Contains(errs, "1 of the 3 servers answered") {
		t.Errorf("with one of three servers: status %d, stderr %q", status, errs)
	}
	for _, bad := range []struct {
		args []string
		want string
	}{
		{[]string{"inspect", "job", "--quorum", "--redis", addrs[2]}, "3, 5 or 7 servers"},
		{[]string{"inspect", "job", "--quorum", "--cluster", "--redis", all}, "excludes"},
		{[]string{"inspect", "job", "--redis", all}, "--quorum"},
		{[]string{"ls", "--quorum", "--redis", all}, "looks at one server"},
	} {
		if got := invoke(t, bad.args...); got.status == 0 || !strings.Contains(got.err, bad.want) {
			t.Errorf("%q: status %d, %q", bad.args, got.status, got.err)
		}
	}
}
