package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// childEndsIn is how long a process of the service may take to end by itself.
const childEndsIn = 6 * time.Second

// child is a program that we started. It is over when done is closed, and by then
// it was waited for.
type child struct {
	name string
	cmd  *exec.Cmd
	ask  func() error // asks it to end; nil: it is killed
	log  *tail
	done chan struct{}
}

// launch starts a program and returns once it runs. What it writes is kept for
// error messages, unless cmd says where it goes.
func launch(name string, cmd *exec.Cmd, ask func() error) (*child, error) {
	c := &child{name: name, cmd: cmd, ask: ask, log: &tail{}, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = c.log
	}
	if cmd.Stderr == nil {
		cmd.Stderr = c.log
	}
	cmd.WaitDelay = time.Second // a grandchild may keep the pipes open
	dieWithParent(cmd)

	started := make(chan error, 1)
	// Owned by c, ended by the end of the program, waited for by end through done.
	// It keeps its thread, because Linux counts the thread that started a program,
	// not the process, as the parent whose death the program is to share.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(c.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	return c, nil
}

// end ends the program and waits for it.
func (c *child) end() error {
	if c.ask != nil {
		_ = c.ask() // it may have ended already
		select {
		case <-c.done:
			return nil
		case <-time.After(childEndsIn):
		}
	}
	select {
	case <-c.done:
		return nil
	default:
	}
	_ = c.cmd.Process.Kill() // an error says that it has ended meanwhile
	<-c.done
	if c.ask != nil {
		return fmt.Errorf("%s did not end within %v, and was killed:\n%s", c.name, childEndsIn, c.log)
	}
	return nil
}

// errTaken says that somebody else got a port that was free a moment ago.
var errTaken = errors.New("a port is taken")

// await returns when ready does not return an error anymore, or why it never will.
func (c *child) await(ctx context.Context, limit time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-c.done:
			if bytes.Contains(bytes.ToLower([]byte(c.log.String())), []byte("address already in use")) {
				return fmt.Errorf("%s: %w", c.name, errTaken)
			}
			return fmt.Errorf("%s ended while starting:\n%s", c.name, c.log)
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w\n%s", c.name, err, c.log)
		case <-tick.C:
		}
	}
}

// onFreePorts calls start with n loopback addresses that nobody listened on a moment
// ago, again with others if one was taken meanwhile.
func onFreePorts(n int, start func(addresses []string) error) error {
	var err error
	for range 5 {
		var addresses []string
		if addresses, err = freePorts(n); err != nil {
			return err
		}
		if err = start(addresses); !errors.Is(err, errTaken) {
			return err
		}
	}
	return err
}

func freePorts(n int) ([]string, error) {
	var addresses []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not wait
		if err != nil {
			return nil, err
		}
		defer l.Close() // all of them stay taken until the last was found
		addresses = append(addresses, net.JoinHostPort("127.0.0.1", strconv.Itoa(l.Addr().(*net.TCPAddr).Port)))
	}
	return addresses, nil
}

// tail keeps the last part of what a program wrote. The mutex guards kept: two
// goroutines of exec.Cmd may write while an error message reads.
type tail struct {
	mu   sync.Mutex
	kept []byte
}

const tailSize = 4 << 10

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

// together lets several programs write to one writer. The mutex guards out.
type together struct {
	mu  sync.Mutex
	out io.Writer
}

func (w *together) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}

// firstLine passes on the first line that is written to it, and drops the rest.
// Only one goroutine may write.
type firstLine struct {
	line chan []byte // room for one
	text []byte
	done bool
}

func (f *firstLine) Write(p []byte) (int, error) {
	if f.done {
		return len(p), nil
	}
	f.text = append(f.text, p...)
	if line, _, found := bytes.Cut(f.text, []byte("\n")); found {
		f.done = true
		f.line <- line
	}
	return len(p), nil
}
