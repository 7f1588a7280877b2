//go:build unix

package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased/examples/internal/testclient"
)

// The test program is started again as the server.
func TestMain(m *testing.M) {
	if os.Getenv("SHUTDOWN_SERVER") != "" {
		os.Args = append(os.Args[:1], strings.Fields(os.Getenv("SHUTDOWN_SERVER"))...)
		main()
		return
	}
	os.Exit(m.Run())
}

// pod is the server as a process.
type pod struct {
	cmd    *exec.Cmd
	output *bufio.Scanner
	url    string
}

func start(t *testing.T, redis string) *pod {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{cmd: exec.Command(program)}
	p.cmd.Env = append(os.Environ(), "SHUTDOWN_SERVER=-redis "+redis+" -listen 127.0.0.1:0")
	p.cmd.Stderr = os.Stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	p.output = bufio.NewScanner(stdout)
	p.url = "http://" + strings.TrimPrefix(p.says(t, "listening on "), "listening on ")
	return p
}

// says returns the next line that begins so.
func (p *pod) says(t *testing.T, prefix string) string {
	t.Helper()
	for p.output.Scan() {
		if strings.HasPrefix(p.output.Text(), prefix) {
			return p.output.Text()
		}
	}
	t.Fatalf("it never said %q", prefix)
	return ""
}

// work asks the pod to work for that long, and returns what comes of it later.
func (p *pod) work(t *testing.T, lasts time.Duration) <-chan string {
	t.Helper()
	answered := make(chan string, 1)
	go func() {
		r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, fmt.Sprint(p.url, "/work?for=", lasts), nil)
		if err != nil {
			answered <- err.Error()
			return
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			answered <- err.Error()
			return
		}
		answered <- answer.Status
		_ = answer.Body.Close()
	}()
	p.says(t, "working")
	return answered
}

func TestAPodThatIsToldToEndFinishesItsRequestAndGivesTheLockBack(t *testing.T) {
	server, rdb := testclient.Redis(t)
	next := testclient.Process(t, rdb)
	p := start(t, server.Addr)
	answered := p.work(t, 300*time.Millisecond)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := <-answered; got != "200 OK" {
		t.Errorf("the request was answered with %q", got)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	// The TTL is 10 s: only a lock that was given back is free now.
	lease, err := next.Mutex("work").TryLockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Unlock(); err != nil {
		t.Error(err)
	}
}

func TestThePodsLocksAreFreeForTheNextInItsQueueAtOnce(t *testing.T) {
	server, rdb := testclient.Redis(t)
	p := start(t, server.Addr)
	answered := p.work(t, 300*time.Millisecond)
	entered := make(chan error, 1)
	next := testclient.Process(t, rdb)
	go func() {
		entered <- next.Mutex("work").Do(context.Background(), func(context.Context) error { return nil })
	}()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := <-answered; got != "200 OK" {
		t.Errorf("the request was answered with %q", got)
	}
	began := time.Now()
	if err := <-entered; err != nil || time.Since(began) > 5*time.Second {
		t.Errorf("the next one was let in after %v: %v", time.Since(began), err)
	}
	_ = p.cmd.Wait()
}

func TestTheGracePeriodIsLongerThanWhatTheProgramTakes(t *testing.T) {
	text, err := os.ReadFile("deployment.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "\n      terminationGracePeriodSeconds: ")
	var seconds int
	if _, err := fmt.Sscan(after, &seconds); err != nil || time.Duration(seconds)*time.Second <= finishRequests+giveBackLocks {
		t.Errorf("the grace period is %d s, and ending takes up to %v (%v)", seconds, finishRequests+giveBackLocks, err)
	}
}
