package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// crew is the demo's worker processes. Its methods belong to one goroutine.
type crew struct {
	processes []*process
	news      chan news // what the processes say, each in its own order
	stop      context.CancelFunc
	readers   sync.WaitGroup // one goroutine a process
}

// process is a worker seen by its parent.
type process struct {
	number int
	cmd    *exec.Cmd
	orders io.WriteCloser // the worker's stdin, whose end ends it
}

// news is a message of a process, or how the process ended.
type news struct {
	from *process
	message
	ended bool
	err   error
}

// dismissal is how long a worker may take to end by itself.
const dismissal = 5 * time.Second

// newCrew starts a process for each setup. Those of an incomplete crew are ended.
func newCrew(ctx context.Context, stderr io.Writer, setups []setup) (*crew, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot start myself again: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	c := &crew{news: make(chan news), stop: stop}
	for _, s := range setups {
		if err := c.start(ctx, program, stderr, s); err != nil {
			c.dismiss()
			return nil, fmt.Errorf("cannot start process %d: %w", s.Process, err)
		}
	}
	return c, nil
}

func (c *crew) start(ctx context.Context, program string, stderr io.Writer, s setup) error {
	cmd := exec.CommandContext(ctx, program, workerCommand)
	cmd.Stderr = stderr
	orders, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	// At the end of ctx a worker is asked to end, and killed if it does not.
	cmd.Cancel = orders.Close
	cmd.WaitDelay = dismissal
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{number: s.Process, cmd: cmd, orders: orders}
	c.processes = append(c.processes, p)
	// Owned by the crew, ended by the end of the process, waited for by dismiss.
	c.readers.Go(func() { c.listen(ctx, p, output) })
	return p.send(s)
}

// listen passes on what p says until it ends. After the end of ctx nobody hears it.
func (c *crew) listen(ctx context.Context, p *process, output io.Reader) {
	tell := func(n news) {
		n.from = p
		select {
		case c.news <- n:
		case <-ctx.Done():
		}
	}
	in := json.NewDecoder(output)
	var err error
	for err == nil {
		var m message
		if err = in.Decode(&m); err == nil {
			tell(news{message: m})
		}
	}
	// What is no message would block the worker in writing, if nobody read it.
	_, _ = io.Copy(io.Discard, output)
	ended := p.cmd.Wait()
	if !errors.Is(err, io.EOF) {
		ended = errors.Join(ended, err)
	}
	tell(news{ended: true, err: ended})
}

// send writes one line to the worker.
func (p *process) send(line any) error {
	if err := json.NewEncoder(p.orders).Encode(line); err != nil {
		return fmt.Errorf("process %d takes no orders: %w", p.number, err)
	}
	return nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the process the hard way: it gets no chance to unlock anything.
func (p *process) kill() error { return p.cmd.Process.Kill() }

// dismiss ends all processes and waits for them.
func (c *crew) dismiss() {
	c.stop()
	c.readers.Wait()
}
