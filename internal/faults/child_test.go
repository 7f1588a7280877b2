//go:build unix

package faults

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A child is this test program, started once more with a role to play. It reads lines with
// commands from its standard input and reports what happened in lines on its standard
// output: a word, then fields. It ends when its input ends.
const (
	roleVariable   = "LEASED_FAULTS_ROLE"
	addrVariable   = "LEASED_FAULTS_ADDR"
	prefixVariable = "LEASED_FAULTS_PREFIX"
	ttlVariable    = "LEASED_FAULTS_TTL"
)

type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string // closed when the child's standard output ends
}

func spawn(t *testing.T, role, addr, prefix string, ttl time.Duration) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), roleVariable+"="+role, addrVariable+"="+addr,
		prefixVariable+"="+prefix, ttlVariable+"="+ttl.String())
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: cmd, stdin: stdin, lines: make(chan string, 64)}
	read := make(chan struct{})
	// Owned by c, ended by the end of the child, waited for by the cleanup.
	go func() {
		defer close(read)
		defer close(c.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			c.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = stdin.Close()
		c.signal(syscall.SIGKILL) // it also ends a stopped child
		for range c.lines {
		}
		<-read
		_ = cmd.Wait()
	})
	return c
}

func (c *child) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

func (c *child) tell(word string) {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.stdin, word); err != nil {
		c.t.Fatal(err)
	}
}

// hear waits for a line that begins with word and returns its other fields.
func (c *child) hear(word string) []string {
	c.t.Helper()
	late := time.After(patience)
	for {
		select {
		case line, ok := <-c.lines:
			fields := strings.Fields(line)
			switch {
			case !ok:
				c.t.Fatalf("child ended, no %q heard", word)
			case len(fields) > 0 && fields[0] == word:
				return fields[1:]
			case len(fields) > 0 && fields[0] == "failed":
				c.t.Fatalf("child: %s", line)
			}
		case <-late:
			c.t.Fatalf("child did not say %q", word)
		}
	}
}

// kill kills the child and returns when the servers have read everything that the child ever
// sent: a renewal sent just before the signal would otherwise restart the TTL later.
func (c *child) kill(rdbs ...*redis.Client) {
	c.t.Helper()
	c.signal(syscall.SIGKILL)
	for range c.lines { // until the child is dead
	}
	name := " name=" + connectionName(c.cmd.Process.Pid) + " "
	for _, rdb := range rdbs {
		eventually(c.t, "the end of the child's connections", func() bool {
			list, err := rdb.ClientList(c.t.Context()).Result()
			return err == nil && !strings.Contains(list, name)
		})
	}
}

// connectionName is the name of a child's connections in the server's client list.
func connectionName(pid int) string { return fmt.Sprintf("child-%d", pid) }

// owns returns the instants between which the child's lease of x will expire, and false if
// it has already expired.
func (c *child) owns(look *leased.Client) (earliest, latest time.Time, ok bool) {
	c.t.Helper()
	before := time.Now()
	info, err := look.Inspect(c.t.Context(), "x")
	if err != nil {
		c.t.Fatal(err)
	}
	after := time.Now()
	for _, o := range info.Owners {
		if strings.HasSuffix(o.Client, fmt.Sprintf(":%d", c.cmd.Process.Pid)) {
			// Redis counts in whole milliseconds.
			return before.Add(o.TTL - time.Millisecond), after.Add(o.TTL + time.Millisecond), true
		}
	}
	return time.Time{}, time.Time{}, false
}

// end lets the child finish by itself and waits for it.
func (c *child) end() {
	c.t.Helper()
	_ = c.stdin.Close()
	c.hear("bye")
}

// actor is the child's side.
type actor struct {
	client   *leased.Client
	rdb      *redis.Client
	prefix   string
	commands *bufio.Scanner
	ended    bool // the client was closed with an error, which a second Close may repeat
}

var roles = map[string]func(*actor) error{}

func play(role string) int {
	ttl, err := time.ParseDuration(os.Getenv(ttlVariable))
	if err != nil {
		return fail(err)
	}
	o := redistest.Options(os.Getenv(addrVariable))
	o.ClientName = connectionName(os.Getpid())
	rdb := redis.NewClient(o)
	defer rdb.Close()
	prefix := os.Getenv(prefixVariable)
	client, err := leased.New(rdb, leased.WithKeyPrefix(prefix), leased.WithTTL(ttl),
		leased.WithReleaseTimeout(patience), leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return fail(err)
	}
	a := &actor{client: client, rdb: rdb, prefix: prefix, commands: bufio.NewScanner(os.Stdin)}
	if err := roles[role](a); err != nil {
		return fail(err)
	}
	if err := client.Close(); err != nil && !a.ended {
		return fail(err)
	}
	say("bye")
	return 0
}

// say sends the parent a line.
func say(format string, args ...any) {
	fmt.Println(strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " "))
}

// fail tells the parent why the child ends, and returns the child's exit status.
func fail(err error) int {
	say("failed %v", err)
	return 1
}

// told waits for the parent's next word and returns it, or "" at the end of the input.
func (a *actor) told() string {
	if !a.commands.Scan() {
		return ""
	}
	return a.commands.Text()
}
