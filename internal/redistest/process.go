package redistest

import (
	"crypto/tls"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/leasedmutex/leased/internal/program"
)

// process is one run of a server program. When done is closed, the program has ended and
// has been waited for: nothing of it is left in the process table.
type process struct {
	cmd  *exec.Cmd
	log  *tail
	done <-chan struct{}
}

// launch starts a program and returns once it is running.
func launch(file, dir string, args []string) (*process, error) {
	p := &process{cmd: exec.Command(file, args...), log: &tail{}}
	p.cmd.Dir = dir
	p.cmd.Stdout = p.log
	p.cmd.Stderr = p.log
	// A child forked by the server may keep the pipe open after the server has died.
	p.cmd.WaitDelay = time.Second
	var err error
	if p.done, err = program.Start(p.cmd, syscall.SIGKILL); err != nil {
		return nil, fmt.Errorf("redistest: start %s: %w", file, err)
	}
	return p, nil
}

// kill ends the program, frozen or not, and waits for it.
func (p *process) kill() {
	// SIGTERM will not do: a server that is running a busy script ignores it, and a primary
	// first waits for lagging replicas. An error means that the program has already ended.
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *process) pid() int { return p.cmd.Process.Pid }

var (
	errEnded   = errors.New("redistest: the server ended while starting")
	errPort    = errors.New("redistest: the port is taken")
	errUnready = errors.New("redistest: the server does not answer")
)

// await returns nil once the program answers on addr. Asking is cheap and a server
// is up in some 15 ms, so it asks every 2 ms.
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

// tail keeps the last part of what a program wrote. The mutex guards kept, because the
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
