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

// workers are the demo's worker processes. Only one goroutine may call the methods of workers.
type workers struct {
	processes []*process
	events    chan event // what the processes report; the events of each process are in order
	stop      context.CancelFunc
	readers   sync.WaitGroup // one goroutine per process
}

// process is a worker as its parent sees it.
type process struct {
	number int
	cmd    *exec.Cmd
	orders io.WriteCloser // the worker's stdin; the worker ends when it is closed
}

// event is a message of a process, or how the process ended.
type event struct {
	from *process
	message
	ended bool
	err   error
}

// workerTimeout is how long a worker may take to exit before it is killed.
const workerTimeout = 5 * time.Second

// startWorkers starts a process for each setup. If it cannot start one of them, it ends the others.
func startWorkers(ctx context.Context, stderr io.Writer, setups []setup) (*workers, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot start myself again: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	w := &workers{events: make(chan event), stop: stop}
	for _, s := range setups {
		if err := w.start(ctx, program, stderr, s); err != nil {
			w.shutDown()
			return nil, fmt.Errorf("cannot start process %d: %w", s.Process, err)
		}
	}
	return w, nil
}

func (w *workers) start(ctx context.Context, program string, stderr io.Writer, s setup) error {
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
	// When ctx ends, the worker is asked to exit, and killed if it does not.
	cmd.Cancel = orders.Close
	cmd.WaitDelay = workerTimeout
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{number: s.Process, cmd: cmd, orders: orders}
	w.processes = append(w.processes, p)
	// This is owned by workers, ends with the process, and is waited for by shutDown.
	w.readers.Go(func() { w.listen(ctx, p, output) })
	return p.send(s)
}

// listen passes on the messages of p until p ends. Once ctx has ended, it drops them.
func (w *workers) listen(ctx context.Context, p *process, output io.Reader) {
	send := func(e event) {
		e.from = p
		select {
		case w.events <- e:
		case <-ctx.Done():
		}
	}
	in := json.NewDecoder(output)
	var err error
	for err == nil {
		var m message
		if err = in.Decode(&m); err == nil {
			send(event{message: m})
		}
	}
	// Output that is not a message is read as well, otherwise the worker would block writing it.
	_, _ = io.Copy(io.Discard, output)
	ended := p.cmd.Wait()
	if !errors.Is(err, io.EOF) {
		ended = errors.Join(ended, err)
	}
	send(event{ended: true, err: ended})
}

// send writes one line to the worker.
func (p *process) send(line any) error {
	if err := json.NewEncoder(p.orders).Encode(line); err != nil {
		return fmt.Errorf("process %d takes no orders: %w", p.number, err)
	}
	return nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the process without giving it a chance to unlock anything.
func (p *process) kill() error { return p.cmd.Process.Kill() }

// shutDown ends all processes and waits for them.
func (w *workers) shutDown() {
	w.stop()
	w.readers.Wait()
}
