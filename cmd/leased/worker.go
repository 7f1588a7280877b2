package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
)

// workerCommand makes this program one of the demo's processes.
const workerCommand = "demo-worker"

func workerCommandOf(std streams) *cobra.Command {
	return &cobra.Command{
		Use: workerCommand, Hidden: true, Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runWorker(c.Context(), std) },
	}
}

func runWorker(ctx context.Context, std streams) error {
	// Ctrl-C in a terminal reaches every process of the demo, but only the parent acts on it, by
	// closing our stdin. Here the signal is received and dropped; if it were ignored, Windows would
	// end the process.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := json.NewDecoder(std.in)
	var s setup
	if err := in.Decode(&s); err != nil {
		return fmt.Errorf("%s is started by 'leased demo' only: %w", workerCommand, err)
	}
	orders := make(chan order)
	// This is owned by the process, and ends with stdin or the process. It is not waited for,
	// because nothing can interrupt its read.
	go func() {
		defer cancel()
		for {
			var o order
			if in.Decode(&o) != nil {
				return
			}
			select {
			case orders <- o:
			case <-ctx.Done():
				return
			}
		}
	}()
	w := &worker{setup: s, out: json.NewEncoder(std.out)}
	return w.work(ctx, orders)
}

// worker is one process of the demo.
type worker struct {
	setup setup

	mu  sync.Mutex // guards out, so that lines do not mix
	out *json.Encoder
}

func (w *worker) say(m message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// An error means that the parent is gone; then stdin ends, and so does the worker.
	_ = w.out.Encode(m)
}

// work executes orders until ctx ends.
func (w *worker) work(ctx context.Context, orders <-chan order) error {
	rdb, err := w.setup.At.connect(ctx)
	if err != nil {
		return err
	}
	defer rdb.Close()
	client, disconnect, err := lockClient(rdb, w.setup.Locks,
		leased.WithKeyPrefix(lockPrefix(w.setup.Prefix)),
		leased.WithOwner(ownerLabel(w.setup.Process, os.Getpid())),
		leased.WithTTL(w.setup.TTL),
		// An unlock that is not confirmed ends the demo, and a machine under load may need more
		// than the default of a second.
		leased.WithReleaseTimeout(10*time.Second))
	defer disconnect()
	if err != nil {
		return err
	}
	defer shutdown(client)

	b := &buyer{rdb: rdb, prefix: w.setup.Prefix, lock: client.Mutex(lockName), say: w.say}
	w.say(message{Kind: ready})
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-orders:
			if err := w.sale(ctx, b, o); err != nil {
				w.say(message{Kind: failed, Error: err.Error()})
				continue
			}
			w.say(message{Kind: done, Stats: client.Stats()})
		}
	}
}

// sale starts all buyers at once and waits for all of them. It returns the first error.
func (w *worker) sale(ctx context.Context, b *buyer, o order) error {
	failures := make(chan error, w.setup.Buyers)
	var group sync.WaitGroup
	for range w.setup.Buyers {
		group.Go(func() { failures <- b.visit(ctx, o) }) // one purchase each, waited for below
	}
	group.Wait()
	close(failures)
	for err := range failures {
		if err != nil {
			return err
		}
	}
	return nil
}

// ownerLabel returns the name under which a process of the demo appears in Redis.
func ownerLabel(process, pid int) string { return fmt.Sprintf("demo-process-%d:%d", process, pid) }

// shutdown closes the client, and bounds how long a process of the demo takes to end.
func shutdown(client *leased.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = client.Shutdown(ctx) // an abandoned lease ends with its TTL
}
