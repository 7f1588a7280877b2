//go:build unix

package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

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
	if got := invoke(t, "inspect", "job", "--quorum", "--quarantine", "20s", "--redis", all); got.status != 0 {
		t.Errorf("a quarantine shorter than the default TTL: %+v", got)
	}
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
		{[]string{"inspect", "job", "--quorum", "--quarantine", "50ms", "--redis", all}, "quarantine"},
		{[]string{"inspect", "job", "--quarantine", "5m", "--redis", addrs[2]}, "--quorum"},
		{[]string{"run", "job", "--quorum", "--quarantine", "1m", "--ttl", "2m", "--redis", all, "--", "true"}, "TTL 2m0s is longer than the quarantine of 1m0s"},
		{[]string{"run", "job", "--quorum", "--ttl", "2m", "--redis", all, "--", "true"}, "needs --quarantine"},
	} {
		if got := invoke(t, bad.args...); got.status == 0 || !strings.Contains(got.err, bad.want) {
			t.Errorf("%q: status %d, %q", bad.args, got.status, got.err)
		}
	}
}

// Each has its own reason.
func TestEachServerOfAQuorumThatDoesNotAnswerIsNamed(t *testing.T) {
	answers, wantsPassword, isDown := redistest.MiniTCP(t), redistest.MiniTCP(t), redistest.MiniTCP(t)
	wantsPassword.RequireAuth("hush")
	addrs := []string{wantsPassword.Addr(), answers.Addr(), isDown.Addr()}
	isDown.Close()
	got := invoke(t, "inspect", "job", "--quorum", "--redis", strings.Join(addrs, ","))
	lines := strings.Split(got.err, "\n")
	if got.status != 1 || len(lines) != 4 || !strings.HasPrefix(lines[0], "leased: 1 of the 3 servers answered, which is not a majority:") ||
		!strings.HasPrefix(lines[1], "  "+addrs[0]+": it requires a password: give it in the URL") ||
		!strings.HasPrefix(lines[2], "  "+addrs[2]+": ") {
		t.Errorf("%+v", got)
	}
}

// Servers that came back empty may vote again once their quarantine is over, which is as long as the application's.
func TestRunTakesTheQuarantineOfTheApplication(t *testing.T) {
	var addrs []string
	var servers []*miniredis.Miniredis
	now := time.Now()
	for range 3 {
		m := redistest.MiniTCP(t)
		m.SetTime(now)
		addrs, servers = append(addrs, m.Addr()), append(servers, m)
	}
	for _, c := range []struct {
		age   time.Duration // of two servers that have come back empty, and were asked then
		flags []string
		want  int
	}{
		{0, nil, 0}, // all three are new, and answer
		{2 * time.Minute, []string{"--quarantine", "5m"}, 1},
		{2 * time.Minute, []string{"--ttl", "5m", "--quarantine", "10m"}, 1},
		{12 * time.Minute, []string{"--ttl", "5m", "--quarantine", "10m"}, 0},
		{2 * time.Minute, []string{"--ttl", "1m"}, 0},
		{2 * time.Minute, nil, 0},
	} {
		run := func(flags ...string) (int, string) {
			status, _, errs := runResult(t, strings.Join(addrs, ","), append(flags, "--quorum", "-w", "0.5", "job", "--", "true")...)
			return status, errs
		}
		pass := func(d time.Duration) {
			now = now.Add(d)
			for _, m := range servers {
				m.SetTime(now)
			}
		}
		if c.age > 0 {
			pass(time.Hour) // the third one is old
			for _, m := range servers[:2] {
				m.FlushAll()
			}
			if status, _ := run(); status == 0 { // marks them
				t.Fatal("servers that have just come back empty voted")
			}
			pass(c.age)
		}
		if status, errs := run(c.flags...); (status != 0) != (c.want != 0) {
			t.Errorf("%v after two servers came back empty, with %q: status %d, %s", c.age, c.flags, status, errs)
		}
	}
}

func TestRunTakesALockWhoseNameBeginsWithADash(t *testing.T) {
	addr := redistest.MiniTCP(t).Addr()
	for want, args := range map[string][]string{
		"-nightly":           {"--", "-nightly", "--", "printenv", "LEASED_NAME"},
		"--":                 {"--", "--", "--", "printenv", "LEASED_NAME"},
		`name of one lock`:   {"--", "-nightly", "printenv"},
		`needs "--" before`:  {"nightly"},
		`needs a command af`: {"nightly", "--"},
	} {
		if _, out, errs := runResult(t, addr, args...); !strings.Contains(out+errs, want) {
			t.Errorf("run %q: stdout %q, stderr %q", args, out, errs)
		}
	}
}
