//go:build unix

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
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
	answered := p.work(t, 3*time.Second)
	entered := make(chan error, 1)
	next := testclient.Process(t, rdb)
	go func() {
		entered <- next.Mutex("work").Do(context.Background(), func(context.Context) error { return nil })
	}()
	for queue := 0; queue == 0; time.Sleep(time.Millisecond) { // Redis has no event for it
		info, err := next.Inspect(t.Context(), "work")
		if err != nil {
			t.Fatal(err)
		}
		if queue = info.Queue; len(entered) > 0 {
			t.Fatalf("it did not wait for the pod's lock: %v", <-entered)
		}
	}
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

// A lock that no request holds, as one of a worker, is unlocked when its context ends.
func TestALockThatIsHeldBesideTheRequestsIsGivenBack(t *testing.T) {
	_, rdb := testclient.Redis(t)
	locks, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := locks.Mutex("work").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlocked := make(chan error, 2)
	context.AfterFunc(lease.Context(), func() {
		unlocked <- context.Cause(lease.Context())
		unlocked <- lease.Unlock()
	})
	if err := giveBack(locks); err != nil {
		t.Error(err)
	}
	next, err := testclient.Process(t, rdb).Mutex("work").TryLockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if cause, err := <-unlocked, <-unlocked; !errors.Is(cause, leased.ErrClosed) || err != nil {
		t.Errorf("the lease ended with %v, and Unlock returned %v", cause, err)
	}
	if err := next.Unlock(); err != nil {
		t.Error(err)
	}
}

// seconds returns the number behind the first occurrence of key in text.
func seconds(t *testing.T, text, key string) time.Duration {
	t.Helper()
	_, after, _ := strings.Cut(text, key)
	var n int
	if _, err := fmt.Sscan(after, &n); err != nil {
		t.Fatalf("no number behind %q: %v", key, err)
	}
	return time.Duration(n) * time.Second
}

func TestTheGracePeriodIsLongerThanWhatAPodTakes(t *testing.T) {
	text, err := os.ReadFile("deployment.yaml")
	if err != nil {
		t.Fatal(err)
	}
	preStop := seconds(t, string(text), "\n          lifecycle:\n            preStop:\n              sleep: {seconds: ")
	if preStop < 5*time.Second {
		t.Errorf("the pod is sent requests for up to 5 s, and SIGTERM comes after %v", preStop)
	}
	takes := preStop + finishRequests + giveBackLocks
	if grace := seconds(t, string(text), "\n      terminationGracePeriodSeconds: "); grace < takes+5*time.Second {
		t.Errorf("the grace period is %v, and ending takes up to %v", grace, takes)
	}
}
