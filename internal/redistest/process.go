package redistest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"time"
)

// process is one run of a server program. It is over when done is closed, and
// by then it was waited for: nothing of it is left in the process table.
type process struct {
	cmd  *exec.Cmd
	log  *tail
	done chan struct{}
}

// launch starts a program and returns once it runs.
func launch(program, dir string, args []string) (*process, error) {
	p := &process{cmd: exec.Command(program, args...), log: &tail{}, done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Stdout = p.log
	p.cmd.Stderr = p.log
	// A child that the server forked may keep the pipe open after the server died.
	p.cmd.WaitDelay = time.Second
	dieWithParent(p.cmd)

	started := make(chan error, 1)
	// Owned by p, ended by the end of the program, waited for by kill through done.
	// It keeps its thread, because Linux counts the thread that started a program,
	// not the process, as the parent whose death the program is to share.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		// The server may outlive the test that happened to start it: see CheckLeaks.
		pprof.SetGoroutineLabels(context.Background())
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // how a server ended is in its log
		}
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("redistest: start %s: %w", program, err)
	}
	return p, nil
}

// kill ends the program, frozen or not, and waits for it.
func (p *process) kill() {
	// SIGTERM is no choice: a busy script ignores it, and lagging replicas are
	// waited for. An error says that the program has ended already.
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *process) pid() int { return p.cmd.Process.Pid }

var (
	errEnded   = errors.New("redistest: the server ended while starting")
	errPort    = errors.New("redistest: the port is taken")
	errUnready = errors.New("redistest: the server does not answer")
)

// await returns nil when the program answers on addr. Asking is cheap and a
// server is up in some 15 ms, so the pace is 2 ms.
func (p *process) await(addr string, secret *tls.Config) error {
	const pace, tries = 2 * time.Millisecond, 5000
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for range tries {
		if answers(addr, p.pid(), secret) {
			return nil
		}
		select {
		case <-p.done:
			log := p.log.String()
			if strings.Contains(log, "Address already in use") {
				return errPort
			}
			return fmt.Errorf("%w:\n%s", errEnded, log)
		case <-tick.C:
		}
	}
	return fmt.Errorf("%w:\n%s", errUnready, p.log.String())
}

// tail keeps the last part of what a program wrote. The mutex guards kept; the
// copying goroutine of exec.Cmd writes while a test may read.
type tail struct {
	mu   sync.Mutex
	kept []byte
}

const tailSize = 16 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - tailSize; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.kept)
}
