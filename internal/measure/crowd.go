package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// crowd measures many goroutines on one lock.
func crowd(b *bench) error {
	ctx := context.Background()
	length := time.Duration(b.pick(1500, 400)) * time.Millisecond
	const goroutines = 64
	local := func(lockers []sync.Locker) (total int64, least, most int64) {
		served := make([]atomic.Int64, goroutines)
		until := time.Now().Add(length)
		var all sync.WaitGroup
		for i := range served {
			all.Go(func() {
				mu := lockers[i%len(lockers)]
				for time.Now().Before(until) {
					mu.Lock()
					served[i].Add(1)
					mu.Unlock()
				}
			})
		}
		all.Wait()
		var counts []int64
		for i := range served {
			counts = append(counts, served[i].Load())
			total += served[i].Load()
		}
		return total, slices.Min(counts), slices.Max(counts)
	}
	for _, processes := range []int{1, 2, 8} {
		var clients []*leased.Client
		var lockers []sync.Locker
		for range processes {
			c, err := b.client()
			if err != nil {
				return err
			}
			defer c.Close()
			clients, lockers = append(clients, c), append(lockers, c.Mutex("x"))
		}
		before, err := redistest.Calls(ctx, b.rdb)
		if err != nil {
			return err
		}
		n, least, most := local(lockers)
		after, err := redistest.Calls(ctx, b.rdb)
		if err != nil {
			return err
		}
		plain, fewest, greatest := local([]sync.Locker{&sync.Mutex{}})
		commands := float64(after.Sub(before)["evalsha"]) / float64(n)
		goal := ""
		if processes == 1 {
			goal = atMost("0.1", commands <= 0.1)
		}
		what := fmt.Sprintf("%d goroutines, %d clients: ", goroutines, processes)
		b.rows.add(what+"commands per lease", fmt.Sprintf("%.4f", commands), "raw 2", goal)
		b.rows.add("  leases per second", fmt.Sprintf("%.0f", float64(n)/length.Seconds()),
			fmt.Sprintf("sync.Mutex %.0f", float64(plain)/length.Seconds()), "")
		b.rows.add("  least / most served", fmt.Sprintf("%d / %d", least, most),
			fmt.Sprintf("sync.Mutex %d / %d", fewest, greatest), "")
		var sum leased.Stats
		for _, c := range clients {
			s := c.Stats()
			sum.Leases, sum.Local, sum.Direct = sum.Leases+s.Leases, sum.Local+s.Local, sum.Direct+s.Direct
		}
		b.rows.add("  local / direct", fmt.Sprintf("%d / %d of %d", sum.Local, sum.Direct, sum.Leases), "", "")
	}
	return nil
}

// waiting measures what waiting costs while nothing happens.
func waiting(b *bench) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	const clients = 100
	holder, err := b.client()
	if err != nil {
		return err
	}
	defer holder.Close()
	l, err := holder.Mutex("x").LockContext(ctx)
	if err != nil {
		return err
	}
	rdb := b.server.Client()
	var all sync.WaitGroup
	for range clients {
		c, err := leased.New(rdb, leased.WithLogger(quiet))
		if err != nil {
			return err
		}
		defer c.Close()
		all.Go(func() {
			if l, err := c.Mutex("x").LockContext(ctx); err == nil {
				_ = l.Unlock() // the measurement is over
			}
		})
	}
	if err := untilQueued(ctx, b.rdb, "x", clients, time.Millisecond); err != nil {
		return err
	}
	time.Sleep(500 * time.Millisecond) // until subscriptions are confirmed, and each waiter has looked again
	length := time.Duration(b.pick(10, 3)) * time.Second
	before, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	time.Sleep(length)
	after, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	each := float64(after.Sub(before)["evalsha"]) / clients / length.Seconds()
	b.rows.add(fmt.Sprintf("%d clients waiting %v: commands/s each", clients, length), fmt.Sprintf("%.3f", each),
		"polling each 50 ms: 20", atMost("0.5", each <= 0.5))
	cancel()
	all.Wait()
	return l.Unlock()
}
