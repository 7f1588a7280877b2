//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/creack/pty"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// runResult runs "leased run" as a process and waits for it.
func runResult(t *testing.T, addr string, args ...string) (status int, out, errs string) {
	t.Helper()
	cmd := program(t, append([]string{"run", "--redis", addr}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

// begin starts a process, which the end of the test kills if need be.
func begin(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd
}

// scratch returns the name of a file for the command to write, which is not there yet.
func scratch(t *testing.T) string { return filepath.Join(t.TempDir(), "file") }

func exists(name string) bool { _, err := os.Stat(name); return err == nil }

func pidIn(t *testing.T, file string) int {
	t.Helper()
	var pid int
	eventually(t, "the command writes its process id", func() bool {
		text, err := os.ReadFile(file)
		if err != nil || !strings.HasSuffix(string(text), "\n") {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err == nil
	})
	return pid
}

// gone reports whether a process has ended; a zombie has.
func gone(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(text), ") ")
	return err == nil && strings.HasPrefix(state, "Z")
}

// holder takes a lock in this process.
func holder(t *testing.T, addr, name string, read bool) *leased.Lease {
	t.Helper()
	rdb := redis.NewClient(redistest.Options(addr))
	client, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	call := client.RWMutex(name).LockContext
	if read {
		call = client.RWMutex(name).RLockContext
	}
	lease, err := call(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		lease.Unlock() // unless the test has
		client.Close()
		rdb.Close()
	})
	return lease
}

func TestRunHasTheCommandsOutputStatusAndEnvironment(t *testing.T) {
	addr := redistest.MiniTCP(t).Addr()
	status, out, errs := runResult(t, addr, "job:1", "--", "sh", "-c", `echo "$LEASED_NAME"; test "$LEASED_TOKEN" -gt 0; exit $((7 + $?))`)
	if status != 7 || out != "job:1\n" || errs != "" {
		t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
	}
	if status, out, errs := runResult(t, addr, "a", "--", "sh", "-c", "kill -TERM $$"); status != 128+15 || out+errs != "" {
		t.Errorf("of a command ended by SIGTERM: status %d, %q %q", status, out, errs)
	}
	if status, out, errs := runResult(t, addr, "a", "--", "true"); status != 0 || out+errs != "" {
		t.Errorf("of true: status %d, %q %q", status, out, errs)
	}
}

// It does not wait for the lock, so hardly for the server.
func TestRunThatDoesNotWaitGivesUpSoonAtAServerThatHangs(t *testing.T) {
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close() // it accepts nothing
	began := time.Now()
	status, _, errs := runResult(t, hung.Addr().String(), "free", "-n", "--", "true")
	if took := time.Since(began); status != statusRunUnavailable || took >= connectTime {
		t.Errorf("status %d after %v, stderr %q", status, took, errs)
	}
}

func TestRunHasTheExitStatusesOfFlock(t *testing.T) {
	addr := redistest.MiniTCP(t).Addr()
	holder(t, addr, "taken", false)
	holder(t, addr, "read", true)
	for _, c := range []struct {
		line   string
		status int
		errs   string
	}{
		{"taken -n -- true", 1, ""},
		{"taken -n -E 9 -- true", 9, ""},
		{"taken -E 0 -w 0 -- true", 0, ""},
		{"taken -w 0.05 -E 9 -- true", 9, ""},
		{"-n -s taken -- true", 1, ""},
		{"-n -s read -- true", 0, ""},
		{"-n read -- true", 1, ""},
		{"free -n -- true", 0, ""},
		{"free -n -- no-such-command", 69, "no-such-command"},
		{"free -- /", 69, ""},
		{"free true", 64, `"--"`},
		{"free", 64, `"--"`},
		{"-- true", 64, "name of one lock"},
		{"a b -- true", 64, "name of one lock"},
		{"free --", 64, "needs a command"},
		{"free -w -3 -- true", 64, "--wait"},
		{"free -n -w 5 -- true", 64, "--nonblock does not wait, so --wait has no meaning"},
		{"free -n -w 0 -- true", 0, ""},
		{"free -w NaN -- true", 64, "--wait"},
		{"free -w 10s -- true", 64, `--wait takes seconds, such as 10, not "10s"`},
		{"free -E 256 -- true", 64, "--conflict-exit-code"},
		{"free --ttl 10ms -- true", 64, "--ttl"},
		{"free --at-least -1s -- true", 64, "--at-least"},
		{"free -s --at-least 1s -- true", 64, "--at-least"},
		{"free --cert x -- true", 64, "--cert needs --key"},
		{"a}b -- true", 64, "invalid"},
		{"free --colour -- true", 64, "colour"},
		{"free --redis 127.0.0.1:1 -- true", 64, "--redis names several servers"},
	} {
		status, out, errs := runResult(t, addr, strings.Fields(c.line)...)
		if status != c.status || out != "" || !strings.Contains(errs, c.errs) || c.errs == "" && c.status < 60 && errs != "" {
			t.Errorf("leased run %s: status %d, stdout %q, stderr %q; want status %d and %q", c.line, status, out, errs, c.status, c.errs)
		}
	}
	if status, out, errs := runResult(t, "127.0.0.1:1", "free", "--", "true"); status != 69 || out != "" || !strings.Contains(errs, "no Redis at 127.0.0.1:1") {
		t.Errorf("without Redis: status %d, stdout %q, stderr %q", status, out, errs)
	}
}

func TestTheLockIsHeldWhileTheCommandRunsAndFreeAfterwards(t *testing.T) {
	m := redistest.MiniTCP(t)
	file := scratch(t)
	cmd := begin(t, program(t, "run", "--redis", m.Addr(), "job", "--", "sh", "-c", "echo $$ >"+file+"; exec sleep 60"))
	pidIn(t, file)
	if status, _, _ := runResult(t, m.Addr(), "-n", "job", "--", "true"); status != 1 {
		t.Errorf("a second run: status %d", status)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 128+15 {
		t.Errorf("after a signal that was passed on: status %d", got)
	}
	if m.Exists("job") {
		t.Error("the lock is still held")
	}
}

func TestAtLeastKeepsTheLockAfterTheCommand(t *testing.T) {
	redistest.InTurn(t, func(t *testing.T, s redistest.Target) {
		name := "nightly"
		ran := func() int {
			status, out, errs := runResult(t, s.Addr, "--prefix", s.Prefix, "-n", "--at-least", "1m", name, "--", "true")
			if out+errs != "" {
				t.Errorf("printed %q, %q", out, errs)
			}
			return status
		}
		if first, second := ran(), ran(); first != 0 || second != 1 {
			t.Errorf("the first run has status %d, the second %d; want 0 and 1", first, second)
		}
		got := invoke(t, "inspect", name, "--redis", s.Addr, "--prefix", s.Prefix)
		if !strings.Contains(got.out, "unlocked, and kept") {
			t.Errorf("inspect: %s", got.out)
		}
		if got := invoke(t, "ls", "--redis", s.Addr, "--prefix", s.Prefix); !strings.Contains(got.out, "kept") {
			t.Errorf("ls: %+v", got)
		}
		if got := invoke(t, "top", "--count", "1", "--redis", s.Addr, "--prefix", s.Prefix); !strings.Contains(got.out, "kept") {
			t.Errorf("top: %+v", got)
		}
		if got := invoke(t, "unlock", "--force", "--yes", name, "--redis", s.Addr, "--prefix", s.Prefix); got.status != 0 {
			t.Errorf("unlock: %+v", got)
		}
		if status := ran(); status != 0 {
			t.Errorf("after unlock --force: status %d", status)
		}
	})
}

func TestASignalWhileItWaitsEndsTheRunAndLeavesNothing(t *testing.T) {
	m := redistest.MiniTCP(t)
	lease := holder(t, m.Addr(), "job", false)
	file := scratch(t)
	cmd := begin(t, program(t, "run", "--redis", m.Addr(), "job", "--", "touch", file))
	eventually(t, "the run queues", func() bool { return m.Exists("job:{job}:queue") })
	cmd.Process.Signal(syscall.SIGINT)
	cmd.Wait()
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGINT || exists(file) {
		t.Errorf("%v, command run: %v", cmd.ProcessState, exists(file))
	}
	if err := lease.Unlock(); err != nil {
		t.Error(err)
	}
	eventually(t, "the queue is empty", func() bool { return !m.Exists("job:{job}:queue") })
}

// counterScript loses increments unless it is alone, which is what it is for.
const counterScript = `n=$(cat "$0"); sleep 0.003; echo $((n + 1)) >"$0"`

func counter(t *testing.T) (file string, value func() int) {
	file = scratch(t)
	if err := os.WriteFile(file, []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file, func() int {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatalf("the counter is %q", text)
		}
		return n
	}
}

func TestAHundredRunsOfACounterLoseNothing(t *testing.T) {
	runs := 100
	if testing.Short() {
		runs = 20
	}
	in := redistest.Server(t)
	file, value := counter(t)
	var group sync.WaitGroup
	for range runs {
		group.Go(func() { // ended by its run, waited for below
			cmd := program(t, "run", "--redis", in.Addr, "counter", "--", "sh", "-c", counterScript, file)
			if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	group.Wait()
	if n := value(); n != runs {
		t.Errorf("the counter is %d after %d runs", n, runs)
	}
}

// What a killed run has not written is not there, and nobody writes what it read: no number
// is written twice.
func TestRunsThatAreKilledLetNobodyWriteTwice(t *testing.T) {
	if testing.Short() {
		t.Skip("each kill costs a TTL; run it without -short")
	}
	t.Parallel()
	in := redistest.Server(t)
	file, value := counter(t)
	// $PPID is leased run. The new value appears at once, and is noted then.
	const script = `n=$(cat "$0"); echo $PPID >"$0.$$"; mv "$0.$$" "$0.inside"; sleep 0.1
		echo $((n + 1)) >"$0.$$"; mv "$0.$$" "$0"; echo $((n + 1)) >>"$0.log"`
	const runs, kills = 20, 3
	var mu sync.Mutex // guards completed
	completed := 0
	var group sync.WaitGroup
	for range runs {
		group.Go(func() { // ended by its run, waited for below
			cmd := program(t, "run", "--redis", in.Addr, "--ttl", "1s", "counter", "--", "sh", "-c", script, file)
			if cmd.Run() == nil {
				mu.Lock()
				defer mu.Unlock()
				completed++
			}
		})
	}
	for killed := map[int]bool{}; len(killed) < kills; {
		eventually(t, "another run is inside", func() bool {
			text, _ := os.ReadFile(file + ".inside")
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil || killed[pid] {
				return false
			}
			killed[pid] = true
			return syscall.Kill(pid, syscall.SIGKILL) == nil
		})
	}
	group.Wait()
	text, err := os.ReadFile(file + ".log")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, n := range strings.Fields(string(text)) {
		if seen[n] {
			t.Errorf("%s was written twice: %s", n, strings.Fields(string(text)))
		}
		seen[n] = true
	}
	// A run that was killed may have written before.
	if n := value(); completed < runs-kills || n < completed || n > runs {
		t.Errorf("%d of %d runs completed, and the counter is %d", completed, runs, n)
	}
}

func TestWhenTheRunIsKilledSoIsAllThatItStarted(t *testing.T) {
	m := redistest.MiniTCP(t)
	file := scratch(t)
	// A process of the command's own, which ignores what it can, is what must not survive.
	cmd := begin(t, program(t, "run", "--redis", m.Addr(), "job", "--", "sh", "-c",
		`trap "" TERM HUP INT; sh -c 'trap "" TERM HUP INT; echo $$ >`+file+`; while :; do sleep 0.1; done'; true`))
	pid := pidIn(t, file)
	cmd.Process.Kill()
	cmd.Wait()
	eventually(t, "the command's process is gone", func() bool { return gone(pid) })
	if !m.Exists("job") {
		t.Error("the lock is free, although nobody can have given it back")
	}
}

func TestWhenTheRunIsStoppedTheCommandIsGoneBeforeTheLeaseEnds(t *testing.T) {
	t.Parallel()
	strain := redistest.NewStrain(t)
	in := redistest.Server(t)
	rdb := in.Client()
	file := scratch(t)
	cmd := begin(t, program(t, "run", "--redis", in.Addr, "--ttl", "5s", "job", "--", "sh", "-c", "echo $$ >"+file+"; sleep 60"))
	pid := pidIn(t, file)
	began := time.Now()
	cmd.Process.Signal(syscall.SIGSTOP)
	eventually(t, "the command is gone", func() bool { return gone(pid) })
	if left, kept := rdb.PTTL(t.Context(), "job").Val(), strain.Since(began); left <= 0 && kept < allowance {
		t.Errorf("the lease had %v left when the command was gone; the machine kept %v from us", left, kept)
	}
	cmd.Process.Signal(syscall.SIGCONT)
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != statusRunLost {
		t.Errorf("status %d", status)
	}
}

func TestASignalEndsTheRunWhileItConnects(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	cmd := begin(t, program(t, "run", "--redis", silent.Addr().String(), "job", "--", "true"))
	conn, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cmd.Process.Signal(syscall.SIGTERM)
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 128+15 {
		t.Errorf("status %d", status)
	}
}

func TestAKilledCommandIsNotedAndTheLockIsFree(t *testing.T) {
	m := redistest.MiniTCP(t)
	status, _, errs := runResult(t, m.Addr(), "job", "--", "sh", "-c", "kill -KILL $$")
	if status != 128+9 || errs != "" || m.Exists("job") {
		t.Errorf("status %d, stderr %q, lock held: %v", status, errs, m.Exists("job"))
	}
}

// allowance is how much time a machine may keep from the test before it is no wonder that a
// command was killed late, or before it had time to notice that it was told to end: half of
// the tenth of a TTL of 5 s that lies between the kill and the lease's end.
const allowance = 250 * time.Millisecond

// frozen and killed: the server's end of the two ways in which Redis does not answer.
func TestWithoutRedisTheCommandIsGoneBeforeTheLeaseEnds(t *testing.T) {
	for _, how := range []string{"frozen", "killed"} {
		for _, stubborn := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/stubborn=%v", how, stubborn), func(t *testing.T) {
				t.Parallel()
				strain := redistest.NewStrain(t)
				in := redistest.Server(t)
				rdb := in.Client()
				file, told := scratch(t), scratch(t)
				script := `trap "echo told >>` + told + `" TERM; `
				if !stubborn {
					script = `trap "echo told >>` + told + `; exit 3" TERM; `
				}
				cmd := program(t, "run", "--redis", in.Addr, "--ttl", "5s", "job", "--", "sh", "-c",
					script+"echo $$ >"+file+"; while :; do sleep 0.05; done")
				var errs bytes.Buffer
				cmd.Stderr = &errs
				begin(t, cmd)
				pid := pidIn(t, file)
				// What Redis promised last, on our clock, read before it is known to be so late.
				before := time.Now()
				left, err := rdb.PTTL(t.Context(), "job").Result()
				if err != nil {
					t.Fatal(err)
				}
				end := before.Add(left)
				if how == "frozen" {
					in.Stop()
				} else {
					in.Kill()
				}
				eventually(t, "the command is gone", func() bool { return gone(pid) })
				// A renewal in between would only have moved the end.
				kept := strain.Since(before)
				if now := time.Now(); now.After(end) && kept < allowance {
					t.Errorf("the command was gone %v after the end of its lease; the machine kept %v from us", now.Sub(end), kept)
				}
				cmd.Wait()
				says := "could not be renewed, and the command was told to end before the lease ends"
				if how == "killed" { // one that is frozen is waited for longer than that
					says += ": "
				}
				if got := cmd.ProcessState.ExitCode(); got != statusRunLost || !strings.Contains(errs.String(), says) {
					t.Errorf("status %d, stderr %q", got, errs.String())
				}
				if !exists(told) && kept < allowance {
					t.Errorf("the command was killed without being told; the machine kept %v from us", kept)
				}
			})
		}
	}
}

// A mail of cron is all that tells somebody why a job was ended.
func TestItIsSaidWhyALeaseCouldNotBeRenewed(t *testing.T) {
	in := redistest.Server(t)
	file := scratch(t)
	cmd := program(t, "run", "--redis", in.Addr, "--ttl", "5s", "job", "--", "sh", "-c", "echo $$ >"+file+"; exec sleep 60")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	begin(t, cmd)
	pidIn(t, file)
	if err := in.Client().Do(t.Context(), "ACL", "SETUSER", "default", "-evalsha", "-eval").Err(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != statusRunLost || !strings.Contains(errs.String(), "before the lease ends: "+lacksRight) {
		t.Errorf("status %d, stderr %q", got, errs.String())
	}
}

func TestALockThatIsTakenAwayEndsTheCommand(t *testing.T) {
	m := redistest.MiniTCP(t)
	file := scratch(t)
	cmd := program(t, "run", "--redis", m.Addr(), "job", "--", "sh", "-c", "trap 'exit 0' TERM; echo $$ >"+file+"; while :; do sleep 0.05; done")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	begin(t, cmd)
	pidIn(t, file)
	if got := invoke(t, "unlock", "--force", "--yes", "job", "--redis", m.Addr()); got.status != 0 || !strings.Contains(got.out, "was taken from") {
		t.Errorf("unlock: %+v", got)
	}
	cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != statusRunLost || !strings.Contains(errs.String(), "leased: lock \"job\" lost") || strings.Contains(errs.String(), "leased: leased:") {
		t.Errorf("status %d, stderr %q", got, errs.String())
	}
}

func TestCtrlCEndsTheCommandAndGivesTheTerminalBack(t *testing.T) {
	m := redistest.MiniTCP(t)
	// The script's shell waits for the run, as a deployment script would.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := `trap 'echo script interrupted' INT; "$0" run --redis "$1" job -- sh -c 'trap "echo command interrupted; exit 4" INT; echo up; while :; do sleep 0.05; done'
		echo "status $?"; read line; echo "read $line"`
	cmd := exec.Command("sh", "-c", script, self, m.Addr())
	cmd.Env = append(os.Environ(), asCommand)
	c := onConsole(t, &pty.Winsize{Rows: 24, Cols: 80}, cmd)
	c.awaits("up")
	c.types("\x03")
	c.awaits("command interrupted")
	c.awaits("status 4")
	c.types("hello\n")
	c.awaits("read hello")
}

func TestACommandReadsFromTheTerminalAndIsKilledByCtrlC(t *testing.T) {
	m := redistest.MiniTCP(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := `trap 'echo script interrupted' INT; "$0" run --redis "$1" job -- sh -c 'stty raw -echo; read line; stty -raw; echo "got $line"; exec sleep 60'
		echo "status $?"; stty -a | grep -q -- "-icanon" || echo sane; stty -a | grep -q -- "-echo " || echo echoes`
	cmd := exec.Command("sh", "-c", script, self, m.Addr())
	cmd.Env = append(os.Environ(), asCommand)
	c := onConsole(t, &pty.Winsize{Rows: 24, Cols: 80}, cmd)
	eventually(t, "the lock is taken", func() bool { return m.Exists("job") })
	c.types("words\n")
	c.awaits("got words")
	c.types("\x03")
	c.awaits("script interrupted") // as without leased run in between
	c.awaits("status 130")
	c.awaits("sane")
	c.awaits("echoes")
}

// bash goes on after a command that ended by itself, even with the status 130.
func TestCtrlCEndsTheScriptAroundTheRun(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skipf("%v; install bash", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, while := range []string{"the command runs", "it runs without the terminal", "it waits"} {
		t.Run(while, func(t *testing.T) {
			m := redistest.MiniTCP(t)
			script := `"$0" run --redis "$1" job -- sh -c 'echo u""p; exec sleep 60'; echo went on`
			if while == "it runs without the terminal" {
				script = strings.Replace(script, "; echo went", " </dev/null; echo went", 1)
			}
			if while == "it waits" {
				m.Set("job", "somebody else's") // without an expiry, which is said on the terminal
			}
			cmd := exec.Command(bash, "-c", script, self, m.Addr())
			cmd.Env = append(os.Environ(), asCommand)
			c := onConsole(t, &pty.Winsize{Rows: 24, Cols: 200}, cmd)
			if while == "it waits" {
				c.awaits("still waiting")
			} else {
				c.awaits("up\r\n")
			}
			c.types("\x03")
			<-c.over
			if shows := c.seen.String(); strings.Contains(shows, "went on") {
				t.Errorf("the script went on: %q", shows)
			}
		})
	}
}

// onShell returns a terminal with a shell that has SELF, the program, and ADDR, that of a Redis.
func onShell(t *testing.T) *console {
	t.Helper()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skipf("%v; install bash", err)
	}
	m := redistest.MiniTCP(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bash, "--norc", "--noprofile", "-i")
	cmd.Env = append(os.Environ(), asCommand, "PS1=ready> ", "SELF="+self, "ADDR="+m.Addr())
	c := onConsole(t, &pty.Winsize{Rows: 24, Cols: 200}, cmd)
	c.awaits("ready> ")
	return c
}

func TestAStoppedJobReturnsToItsShellAndContinues(t *testing.T) {
	c := onShell(t)
	c.types(`"$SELF" run --redis "$ADDR" job -- sh -c 'echo u""p; read line; echo "got: $line"'` + "\n")
	c.awaits("up\r\n")
	c.types("\x1a")
	c.awaits("Stopped")
	c.types("echo shell a\"\"live\n")
	c.awaits("shell alive")
	c.types("fg\n")
	c.types("words\n")
	c.awaits("got: words")
	c.types("echo a\"\"gain\n")
	c.awaits("again")
}

// Only the lock's output is redirected: what asks for a password still has the terminal.
func TestACommandHasTheTerminalWhereItsOutputGoesToAFile(t *testing.T) {
	c := onShell(t)
	c.types(`"$SELF" run --redis "$ADDR" job -- sh -c 'echo u""p >&2; read line < /dev/tty; echo "got: $line" >&2' > /dev/null` + "\n")
	c.awaits("up\r\n")
	c.types("words\n")
	c.awaits("got: words")
	c.types("echo a\"\"gain\n")
	c.awaits("again")
}

func TestACommandHasTheTerminalWhereItsInputIsAFile(t *testing.T) {
	c := onShell(t)
	c.types(`"$SELF" run --redis "$ADDR" job -- sh -c 'echo u""p; read line < /dev/tty; echo "got: $line"' < "$SELF"` + "\n")
	c.awaits("up\r\n")
	c.types("words\n")
	c.awaits("got: words")
}

func TestAJobThatBeganInTheBackgroundHasTheTerminalInTheForeground(t *testing.T) {
	c := onShell(t)
	c.types(`"$SELF" run --redis "$ADDR" job -- sh -c 'read line; echo "got: $line"' &` + "\n")
	eventually(t, "the shell says that the job has stopped", func() bool {
		c.types("\n")                     // it does so ahead of the next prompt
		time.Sleep(50 * time.Millisecond) // or there would be thousands of prompts
		return strings.Contains(c.seen.String(), "Stopped")
	})
	c.types("fg\n")
	c.types("words\n")
	c.awaits("got: words")
	c.types("echo a\"\"gain\n")
	c.awaits("again")
}

func TestACommandThatWantsTheTerminalInAPipelineIsReported(t *testing.T) {
	c := onShell(t)
	c.types(`"$SELF" run --redis "$ADDR" job -- sh -c 'read line < /dev/tty' | cat` + "\n")
	c.awaits("the command has stopped, because it wants the terminal")
	c.types("\x03")
	c.types("echo a\"\"gain\n")
	c.awaits("again")
}

// A program without a shell, as in ssh -t or docker run -it, is not stopped by its terminal.
func TestAStoppedCommandContinuesIfNoShellControlsIt(t *testing.T) {
	m := redistest.MiniTCP(t)
	c := onConsole(t, &pty.Winsize{Rows: 24, Cols: 200}, program(t, "run", "--redis", m.Addr(), "job", "--", "sh", "-c", `echo u""p; read line; echo "got: $line"`))
	c.awaits("up\r\n")
	c.types("\x1a")
	c.types("words\n")
	c.awaits("got: words")
	if c.cmd.Wait(); c.cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("status %d: %s", c.cmd.ProcessState.ExitCode(), c.seen.String())
	}
}

func TestACommandThatCannotBeStartedIsNoStoppedJob(t *testing.T) {
	c := onShell(t)
	script := scratch(t)
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.types(`"$SELF" run --redis "$ADDR" job -- ` + script + `; echo status=$?` + "\n")
	c.awaits("no such file or directory")
	c.awaits("status=69")
}

func TestAScriptWithoutAnInterpreterIsTheShells(t *testing.T) {
	script := scratch(t)
	if err := os.WriteFile(script, []byte("echo \"$1 of $LEASED_NAME\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if status, out, errs := runResult(t, redistest.MiniTCP(t).Addr(), "job", "--", script, "first"); status != 0 || out != "first of job\n" || errs != "" {
		t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
	}
}

// Programs other than shells take the first of two variables with one name.
func TestANestedRunHasNothingOfTheOuterOnesEnvironment(t *testing.T) {
	t.Setenv("LEASED_NAME", "outer")
	t.Setenv("LEASED_TOKEN", "7")
	status, out, errs := runResult(t, redistest.MiniTCP(t).Addr(), "inner", "--", "env")
	if status != 0 || errs != "" || strings.Count(out, "LEASED_NAME=") != 1 || strings.Count(out, "LEASED_TOKEN=") != 1 || !strings.Contains(out, "LEASED_NAME=inner\n") {
		t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
	}
}

// As one that runs as another user, whom we may not signal.
func TestACommandThatCannotBeKilledIsReported(t *testing.T) {
	var errs strings.Builder
	m := redistest.MiniTCP(t)
	r := &running{options: &runOptions{name: "job", ttl: time.Minute}, lease: holder(t, m.Addr(), "job", false), guard: &guard{ended: true},
		stderr: &errs, lost: errors.New("lost"), killAt: time.Now().Add(-time.Minute)}
	r.watchLease()
	if errs.String() != "" || r.killed.IsZero() {
		t.Errorf("at once: %q, killed %v", errs.String(), r.killed)
	}
	r.killed = r.killed.Add(-2 * time.Second)
	r.watchLease()
	r.watchLease()
	if !strings.Contains(errs.String(), `it may work beside the next owner of lock "job"`) || strings.Count(errs.String(), "\n") != 1 {
		t.Errorf("two seconds after it was killed: %q", errs.String())
	}
}

// A server that refuses even PING for a moment, because it runs somebody's long script or cannot save its data, is
// waited for.
func TestAServerThatRefusesForTheTimeBeingIsWaitedFor(t *testing.T) {
	for _, refusal := range []string{"BUSY Redis is busy running a script.", "MISCONF Redis is configured to save RDB snapshots"} {
		m := redistest.MiniTCP(t)
		m.SetError(refusal)
		mended := time.AfterFunc(time.Second, func() { m.SetError("") })
		status, out, errs := runResult(t, m.Addr(), "-w", "30", "job", "--", "echo", "done")
		if status != 0 || out != "done\n" || mended.Stop() {
			t.Errorf("%s: status %d, stdout %q, stderr %q", refusal, status, out, errs)
		}
	}
}

// The server may yet carry out what it was sent, and nobody would renew or release the lock then.
func TestARequestThatIsNotWithdrawnIsReported(t *testing.T) {
	t.Parallel()
	m := redistest.MiniTCP(t)
	hangs := make(chan struct{})
	t.Cleanup(func() { close(hangs) })
	m.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
		if strings.HasPrefix(strings.ToUpper(cmd), "EVAL") {
			<-hangs
		}
		return false
	})
	status, out, errs := runResult(t, m.Addr(), "-w", "1", "job", "--", "true")
	if status != statusRunUnavailable || out != "" || !strings.Contains(errs, "1 request that was given up was not canceled") {
		t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
	}
}

// Redis then refuses PING, and all writes: that is when somebody wants to see the locks.
func TestLocksAreShownWhileRedisCannotSaveItsData(t *testing.T) {
	in := redistest.Server(t)
	rdb := in.Client()
	rdb.ConfigSet(t.Context(), "save", "3600 1000000") // Redis 6.2 keeps the first of two flags --save
	take(t, rdb, "", "job")
	dir := rdb.ConfigGet(t.Context(), "dir").Val()["dir"]
	if err := os.MkdirAll(filepath.Join(dir, "dump.rdb", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	rdb.BgSave(t.Context())
	eventually(t, "Redis cannot save", func() bool { return redis.HasErrorPrefix(rdb.Ping(t.Context()).Err(), "MISCONF") })
	if got := invoke(t, "inspect", "job", "--redis", in.Addr); got.status != 0 || !strings.Contains(got.out, "state   held") {
		t.Errorf("inspect: %+v", got)
	}
	if got := invoke(t, "ls", "--redis", in.Addr); got.status != 0 || !strings.Contains(got.out, "job") {
		t.Errorf("ls: %+v", got)
	}
}

// An empty value is a foreign owner's like any other.
func TestALockWhoseValueIsEmptyIsNotFree(t *testing.T) {
	m := redistest.MiniTCP(t)
	m.Set("job", "")
	if got := invoke(t, "inspect", "job", "--redis", m.Addr()); got.status != 0 || !strings.Contains(got.out, "state   held") {
		t.Errorf("inspect: %+v", got)
	}
	if got := invoke(t, "unlock", "--force", "--yes", "job", "--redis", m.Addr()); got.status != 0 || m.Exists("job") {
		t.Errorf("unlock: %+v", got)
	}
}

func TestALockThatRedisRefusesWasNotContended(t *testing.T) {
	for _, c := range []struct {
		name string
		addr func() []string
		want string
	}{
		{"replica", func() []string {
			return []string{redistest.NewReplication(t, 1).Replicas()[0].Addr}
		}, `cannot get lock "job" from Redis: it is a replica: connect to its primary, or by --sentinel NAME; if you did, the Sentinels name a replica`},
		{"no memory", func() []string { return []string{full(t).Addr} }, "raise maxmemory"},
		{"no more connections", func() []string { return []string{crowded(t).Addr} }, "maxclients"},
		{"quarantine", func() []string {
			return []string{redistest.MiniTCP(t).Addr() + "," + redistest.MiniTCP(t).Addr() + ",127.0.0.1:1", "--quorum"}
		}, "too few of 3 servers may vote"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			at := c.addr()
			for _, wait := range [][]string{{"-w", "3"}, {"-w", "3", "-E", "0"}, {"-n"}} {
				args := append(append(at[1:len(at):len(at)], wait...), "job", "--", "true")
				status, out, errs := runResult(t, at[0], args...)
				if status != statusRunUnavailable || out != "" || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
					t.Errorf("run %q: status %d, stdout %q, stderr %q; want status 69 and %q", args, status, out, errs, c.want)
				}
			}
		})
	}
}

// A vote is written as o or y, of an old server or one in quarantine, in capitals where somebody has the lock, or as q
// where somebody only waits for it.
func TestWhoTheServersOfAQuorumNameHasTheLockIfTheyMayVote(t *testing.T) {
	for _, c := range []struct {
		votes    string
		n        int
		unproved bool // the last answer was that too few servers granted, or none came
		want     bool
		why      string
	}{
		{"OOO", 3, false, true, ""},
		{"OOO", 3, true, true, ""},
		{"OO", 3, true, true, ""},
		{"ooo", 3, false, true, ""}, // it was handed on, or released, a moment ago
		{"ooo", 3, true, false, "3 of 3 servers may vote, and 0 of these for an owner"},
		{"Ooo", 3, true, false, "3 of 3 servers may vote, and 1 of these for an owner"},
		{"OOy", 3, false, true, ""},
		{"OoY", 3, false, false, "2 of 3 servers may vote, and 1 of these for an owner"}, // the second server answers, but does not grant
		{"OYY", 3, false, false, "1 of 3 servers may vote: others are in quarantine"},
		{"YY", 3, false, false, "0 of 3 servers may vote: others are in quarantine, as after a restart without data, or failed"},
		{"YYY", 3, false, true, ""},
		{"YYy", 3, false, false, "all 3 servers are new"},
		{"", 3, false, false, ""}, // the error says why, or the servers failed only after it
		{"O", 3, false, false, ""},
		{"q", 3, true, false, ""},
		{"qqo", 3, true, true, ""}, // nobody has it, but others wait
		{"OOOyy", 5, true, true, ""},
		{"OOoYY", 5, false, false, "3 of 5 servers may vote, and 2 of these for an owner"},
	} {
		var votes []vote
		for _, v := range c.votes {
			is := vote{counts: strings.ContainsRune("oOq", v)}
			if v == 'q' {
				is.info.Queue = 1
			}
			if strings.ContainsRune("OY", v) {
				is.info.Owners = []leased.Owner{{}}
			}
			votes = append(votes, is)
		}
		got, why := new(runOptions).contendedOnQuorum(votes, c.n, c.unproved)
		if got != c.want || !got && (!strings.Contains(why, c.why) || c.why == "" && why != "") {
			t.Errorf("%+v: %v, %q", c, got, why)
		}
	}
}

// Each of them sees the other one as the owner on most of the servers that answer, but the servers' votes do not count.
func TestRunsThatKeepEachOtherFromServersInQuarantineAreNotContended(t *testing.T) {
	t.Parallel()
	at := redistest.MiniTCP(t).Addr() + "," + redistest.MiniTCP(t).Addr() + "," + hung(t, redistest.MiniTCP(t), time.Minute).Addr()
	var runs sync.WaitGroup
	for range 2 {
		runs.Go(func() {
			status, out, errs := runResult(t, at, "--quorum", "-w", "5", "-E", "0", "job", "--", "true")
			if status != statusRunUnavailable || out != "" || !strings.Contains(errs, "servers") || strings.Count(errs, "\n") != 1 {
				t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
			}
		})
	}
	runs.Wait()
}

// Who owns the lock on all servers has it if enough of them may vote, or if all of them are new.
func TestALockOfAQuorumIsContendedIfItsServersMayVote(t *testing.T) {
	t.Parallel()
	var servers []redis.UniversalClient
	var addrs []string
	for range 3 {
		m := redistest.MiniTCP(t)
		m.Set(protocol.MarkKey(""), "1")
		servers, addrs = append(servers, redis.NewClient(&redis.Options{Addr: m.Addr()})), append(addrs, m.Addr())
	}
	client, err := leased.NewQuorum(servers)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	lease, err := client.Mutex("job").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Unlock()
	for young, want := range []int{3, 3, statusRunUnavailable, 3} {
		if young > 0 {
			servers[young-1].Del(t.Context(), protocol.MarkKey(""))
		}
		status, out, errs := runResult(t, strings.Join(addrs, ","), "--quorum", "-w", "1", "-E", "3", "job", "--", "true")
		if status != want || out != "" || (want == 3) != (errs == "") || want != 3 && !strings.Contains(errs, "1 of 3 servers may vote: others are in quarantine") {
			t.Errorf("%d servers in quarantine: status %d, stdout %q, stderr %q", young, status, out, errs)
		}
	}
}

// hung has a Redis answer nobody who wants a lock until a time has passed since the first one asked.
func hung(t *testing.T, m *miniredis.Miniredis, d time.Duration) *miniredis.Miniredis {
	var once sync.Once
	wakes := make(chan struct{})
	wake := sync.OnceFunc(func() { close(wakes) })
	t.Cleanup(wake)
	m.Server().SetPreHook(func(_ *server.Peer, cmd string, args ...string) bool {
		if strings.HasPrefix(strings.ToUpper(cmd), "EVAL") && slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "leased1:") }) {
			once.Do(func() { time.AfterFunc(d, wake) })
			<-wakes
		}
		return false
	})
	return m
}

// reads takes the lock "job" for reading.
func reads(t *testing.T, m *miniredis.Miniredis) *leased.Lease {
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr()})
	client, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := client.RWMutex("job").RLockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = lease.Unlock() // again if the test ended early
		client.Close()
		rdb.Close()
	})
	return lease
}

// When the wait is over, the lock may be free or taken; Redis has to be asked again.
func TestALockOfARedisThatHungIsContendedIfItIsTaken(t *testing.T) {
	t.Parallel()
	args := []string{"-w", "0.3", "-E", "3", "job", "--", "true"}
	var read *leased.Lease
	for _, c := range []struct {
		what   string
		before func(m *miniredis.Miniredis)
		shared bool
		want   int
	}{
		{"is free", nil, false, statusRunUnavailable},
		{"is taken", func(m *miniredis.Miniredis) { m.Set("job", "somebody else"); m.SetTTL("job", time.Hour) }, false, 3},
		{"is read", func(m *miniredis.Miniredis) { read = reads(t, m) }, false, 3},
		{"is read by others", func(m *miniredis.Miniredis) { read = reads(t, m) }, true, statusRunUnavailable},
	} {
		m := redistest.MiniTCP(t)
		if c.before != nil {
			c.before(m)
		}
		with := args
		if c.shared {
			with = append([]string{"-s"}, args...)
		}
		status, out, errs := runResult(t, hung(t, m, time.Second).Addr(), with...)
		if status != c.want || out != "" || (c.want == 3) != (errs == "") || c.want != 3 && !strings.Contains(errs, "Redis had not answered") ||
			strings.Count(errs, "\n") > 1 {
			t.Errorf("a lock that %s: status %d, stdout %q, stderr %q", c.what, status, out, errs)
		}
		if read != nil {
			_ = read.Unlock()
			read = nil
		}
	}
	others := redistest.MiniTCP(t).Addr() + "," + redistest.MiniTCP(t).Addr() + "," + hung(t, redistest.MiniTCP(t), time.Second).Addr()
	if status, out, errs := runResult(t, others, append([]string{"--quorum"}, args...)...); status != statusRunUnavailable || out != "" ||
		strings.Count(errs, "\n") != 1 {
		t.Errorf("a quorum with one such server: status %d, stdout %q, stderr %q", status, out, errs)
	}
}

// A replica stays one, unless it is promoted while somebody waits: then go on waiting.
func TestOnlyARunThatBeginsAtAReplicaEndsThere(t *testing.T) {
	t.Parallel()
	r := redistest.NewReplication(t, 1)
	replica := r.Replicas()[0]
	for _, shared := range [][]string{nil, {"-s"}} {
		status, out, errs := runResult(t, replica.Addr, append(shared, "job", "--", "true")...)
		if status != statusRunUnavailable || out != "" || strings.Count(errs, "\n") != 1 ||
			!strings.Contains(errs, `cannot get lock "job" from Redis: it is a replica: connect to its primary, or by --sentinel NAME; if you did, the Sentinels name a replica`) {
			t.Errorf("%v at a replica: status %d, stdout %q, stderr %q", shared, status, out, errs)
		}
	}
	lease := holder(t, r.Primary().Addr, "job", false)
	cmd := program(t, "run", "--redis", r.Primary().Addr, "job", "--", "echo", "done")
	var out shared
	cmd.Stdout, cmd.Stderr = &out, &out
	begin(t, cmd)
	rdb := r.Primary().Client()
	eventually(t, "the run queues", func() bool { return rdb.Exists(t.Context(), "job:{job}:queue").Val() > 0 })
	host, port, _ := net.SplitHostPort(replica.Addr)
	if err := rdb.ReplicaOf(t.Context(), host, port).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the run is refused", func() bool {
		stats, _ := rdb.Info(t.Context(), "errorstats").Result()
		return strings.Contains(stats, "errorstat_READONLY")
	})
	if err := rdb.ReplicaOf(t.Context(), "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	lease.Unlock() // which may have been lost
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 0 || !strings.HasSuffix(out.String(), "done\n") {
		t.Errorf("at a primary that was a replica for a while: status %d, %q", status, out.String())
	}
}

// The lock is taken all the time, and Redis restarts in between.
func TestALockThatIsTakenWasContendedEvenIfRedisWasAway(t *testing.T) {
	in := redistest.Server(t, "--appendonly", "yes", "--appendfsync", "always")
	if err := in.Client().Set(t.Context(), "job", "of another library", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	cmd := program(t, "run", "--redis", in.Addr, "-w", "4", "job", "--", "true")
	var errs shared
	cmd.Stderr = &errs
	begin(t, cmd)
	eventually(t, "the run queues", func() bool { return in.Client().Exists(t.Context(), "job:{job}:queue").Val() > 0 })
	in.Restart()
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 1 || errs.String() != "" {
		t.Errorf("status %d, stderr %q", status, errs.String())
	}
}

func TestAWaitThatRedisCausesIsToldOnce(t *testing.T) {
	t.Parallel()
	in := full(t)
	cmd := program(t, "run", "--redis", in.Addr, "job", "--", "echo", "done")
	var out, errs shared
	cmd.Stdout, cmd.Stderr = &out, &errs
	begin(t, cmd)
	const want = `leased: still waiting for lock "job"; Redis is not granting it: its memory is full: raise maxmemory, or free memory (`
	eventually(t, "the run says what is wrong", func() bool { return strings.HasPrefix(errs.String(), want) })
	if err := in.Client().ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 0 || out.String() != "done\n" || strings.Count(errs.String(), "\n") != 1 {
		t.Errorf("status %d, stdout %q, stderr %q", status, out.String(), errs.String())
	}
}

func TestAWaitThatMayNeverEndIsToldOnce(t *testing.T) {
	redistest.InTurn(t, func(t *testing.T, s redistest.Target) {
		rdb, key := s.NewClient(t), s.Prefix+"job"
		if err := rdb.Set(t.Context(), key, "of another library", 0).Err(); err != nil {
			t.Fatal(err)
		}
		cmd := program(t, "run", "--redis", s.Addr, "--prefix", s.Prefix, "job", "--", "echo", "done")
		var out, errs shared
		cmd.Stdout, cmd.Stderr = &out, &errs
		begin(t, cmd)
		const want = `leased: still waiting for lock "job": a lock's key holds another program's value without an expiry, so the lock is never taken over; `
		eventually(t, "the run says what it waits for", func() bool { return strings.HasPrefix(errs.String(), want) })
		status, more, told := runResult(t, s.Addr, "--prefix", s.Prefix, "-n", "job", "--", "true")
		if status != 1 || more+told != "" {
			t.Errorf("with -n: status %d, stdout %q, stderr %q", status, more, told)
		}
		if err := rdb.Del(t.Context(), key).Err(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if status := cmd.ProcessState.ExitCode(); status != 0 || out.String() != "done\n" || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("status %d, stdout %q, stderr %q", status, out.String(), errs.String())
		}
	})
}

// The command freezes Redis, so that nothing answers the release.
func TestAnUnconfirmedReleaseSaysHowLongTheLockStaysTaken(t *testing.T) {
	t.Parallel()
	in := redistest.Server(t)
	freeze := fmt.Sprintf("kill -STOP %d; exit 3", in.Pid())
	began := time.Now()
	status, _, errs := runResult(t, in.Addr, "--ttl", "1m", "job", "--", "sh", "-c", freeze)
	before, after, found := strings.Cut(strings.TrimSpace(errs), " until ")
	if status != 3 || !found || before != `leased: release of lock "job" not confirmed by Redis: it stays taken` || strings.Contains(after, "\n") {
		t.Fatalf("status %d, stderr %q", status, errs)
	}
	told := map[string]bool{}
	for at := began.Add(time.Minute); at.Before(time.Now().Add(time.Minute)); at = at.Add(time.Second / 2) {
		told[at.Format("2006-01-02 15:04:05 -07:00")+" at most"] = true
	}
	if after = regexp.MustCompile(`\.\d{3} `).ReplaceAllString(after, " "); !told[after] { // without the milliseconds
		t.Errorf("until %q is none of %v", after, told)
	}
}

func TestACommandOfWhichTheSystemTellsNothingDoesNotCountAsDone(t *testing.T) {
	name, value, _ := strings.Cut(asCommand, "=")
	t.Setenv(name, value) // the guard is this program
	g, err := startGuard()
	if err != nil {
		t.Fatal(err)
	}
	defer g.end()
	child, err := os.StartProcess("/bin/sleep", []string{"sleep", "1h"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{Setpgid: true, Pgid: g.pid}})
	if err != nil {
		t.Fatal(err)
	}
	nobodys := awaitChange(os.Getpid()) // as if somebody else had waited for it
	if err := (&running{guard: g}).ended(nobodys); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("it ended with %v", err)
	}
	if c := awaitChange(child.Pid); c.err != nil || !c.status.Signaled() || c.status.Signal() != syscall.SIGKILL {
		t.Errorf("the command goes on: %+v", c)
	}
}

// crowded returns a server that admits no further connection.
func crowded(t *testing.T) *redistest.Instance {
	srv := redistest.Server(t)
	conn, err := net.Dial("tcp", srv.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := conn.Write([]byte("CONFIG SET maxclients 1\r\nCLIENT KILL TYPE normal\r\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	return srv
}
