package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
)

func benchCommand(std streams) *cobra.Command {
	var at address
	var length time.Duration
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure what locks cost on a Redis",
		Long: "Measures what locks cost on a Redis, from this machine, beside a bare SET NX PX with a compare-and-delete. It uses a lock of its " +
			"own under the prefix, and as much of the server as it can get while it runs.",
		Args: noArguments,
		RunE: interruptible(func(ctx context.Context, _ []string) error {
			if length < 10*time.Millisecond || length > 10*time.Minute {
				return usagef("--for must be from 10ms to 10m, not %v", length)
			}
			return bench(ctx, std, &at, length)
		}),
	}
	at.bindOne(c)
	c.Flags().DurationVar(&length, "for", time.Second, "`DURATION` of each of the four measurements")
	return c
}

// unset deletes a key if it has the caller's value. It is the unlock of a bare SET NX PX.
var unset = redis.NewScriptServerSHA(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

func bench(ctx context.Context, std streams, at *address, length time.Duration) error {
	rdb, err := at.connect(ctx, func(o *redis.UniversalOptions) { o.PoolSize = 80 })
	if err != nil {
		return err
	}
	defer rdb.Close()
	var clients [2]*leased.Client
	for i := range clients {
		if clients[i], err = newClient(rdb, at.prefix); err != nil {
			return err
		}
		defer clients[i].Close()
	}
	name := "leased-bench:" + randomName()
	bareKey := at.prefix + name + ":bare"
	defer func() { _ = deleteKeys(ctx, rdb, append(lockKeys(at.prefix, name), bareKey)) }() // if this fails, they expire

	cycle := func(c *leased.Client) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			lease, err := c.Mutex(name).LockContext(ctx)
			if err != nil {
				return err
			}
			return lease.Unlock()
		}
	}
	fmt.Fprintln(std.out, instant(time.Now()))
	rows := [][]string{}
	measure := func(what string, workers int, f func(worker int) func(ctx context.Context) error) error {
		took, lasted, err := timeAll(ctx, length, workers, f)
		if err != nil {
			return err
		}
		rows = append(rows, []string{what, fmt.Sprintf("%.0f", float64(len(took))/lasted.Seconds()), micros(quantile(took, 0.5)), micros(quantile(took, 0.99))})
		return nil
	}
	for _, m := range []struct {
		what    string
		workers int
		f       func(int) func(context.Context) error
	}{
		{"SET NX PX and compare-and-delete", 1, func(int) func(context.Context) error {
			return func(ctx context.Context) error {
				if err := rdb.SetNX(ctx, bareKey, "mine", time.Minute).Err(); err != nil {
					return err
				}
				return unset.Run(ctx, rdb, []string{bareKey}, "mine").Err()
			}
		}},
		{"lock and unlock, uncontended", 1, func(int) func(context.Context) error { return cycle(clients[0]) }},
		{"two clients, one goroutine each", 2, func(i int) func(context.Context) error { return cycle(clients[i]) }},
		{"two clients, 32 goroutines each", 64, func(i int) func(context.Context) error { return cycle(clients[i%2]) }},
	} {
		if err := measure(m.what, m.workers, m.f); err != nil {
			return at.explain(err)
		}
	}
	for _, line := range table([]column{{title: "", least: 16}, {title: "PER SECOND", right: true}, {title: "P50 µs", right: true}, {title: "P99 µs", right: true}}, rows, widthOf(std.out)) {
		fmt.Fprintln(std.out, line)
	}
	return nil
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f", float64(d)/1000) }

// timeAll has workers call their functions repeatedly, and returns how long each call took, and how
// long all of them took together.
func timeAll(ctx context.Context, length time.Duration, workers int, f func(worker int) func(context.Context) error) (took []time.Duration, lasted time.Duration, err error) {
	var mu sync.Mutex // guards took and err
	var group sync.WaitGroup
	start := time.Now()
	for worker := range workers {
		call := f(worker)
		group.Go(func() { // ends when length is over; waited for below
			var own []time.Duration
			var failed error
			for begin := time.Now(); begin.Sub(start) < length && failed == nil; {
				failed = call(ctx)
				now := time.Now()
				own = append(own, now.Sub(begin))
				begin = now
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, own...)
			if failed != nil {
				err = failed
			}
		})
	}
	group.Wait()
	return took, time.Since(start), err
}
