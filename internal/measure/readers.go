package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// rwLocker is what a reader/writer lock and its baseline have in common.
type rwLocker interface {
	sync.Locker
	RLock()
	RUnlock()
}

// readers measures what concurrent reading costs, and how readers and a writer
// share a lock.
func readers(b *bench) error {
	if err := readTogether(b); err != nil {
		return err
	}
	return readAndWrite(b)
}

// readTogether has the goroutines of one process read without a pause.
func readTogether(b *bench) error {
	ctx := context.Background()
	const goroutines = 64
	length := time.Duration(b.pick(1500, 400)) * time.Millisecond
	read := func(rw rwLocker) (n int64) {
		var total atomic.Int64
		until := time.Now().Add(length)
		var all sync.WaitGroup
		for range goroutines {
			all.Go(func() {
				own := int64(0)
				for ; own%64 != 0 || time.Now().Before(until); own++ {
					rw.RLock()
					rw.RUnlock() //nolint:staticcheck // an empty section is what is measured
				}
				total.Add(own)
			})
		}
		all.Wait()
		return total.Load()
	}
	c, err := b.client()
	if err != nil {
		return err
	}
	defer c.Close()
	before, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	n := read(c.RWMutex("x"))
	after, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	plain := read(&sync.RWMutex{})
	commands := float64(after.Sub(before)["evalsha"]) / float64(max(1, n))
	b.rows.add(fmt.Sprintf("%d goroutines read: commands per lease", goroutines), fmt.Sprintf("%.6f", commands), "raw 2", atMost("0.01", commands <= 0.01))
	b.rows.add("  leases per second", fmt.Sprintf("%.0f", float64(n)/length.Seconds()),
		fmt.Sprintf("sync.RWMutex %.0f", float64(plain)/length.Seconds()), "")
	return nil
}

// sharedUse is what readers and a writer of one lock achieved.
type sharedUse struct {
	reads  int64
	writes times // how long each write waited
	delays times // how long each read waited
}

// readAndWrite has four clients read for 100 µs at a time, and one write every
// 10 ms.
func readAndWrite(b *bench) error {
	ctx := context.Background()
	const clients, goroutines, stay, every = 4, 4, 100 * time.Microsecond, 10 * time.Millisecond
	length := time.Duration(b.pick(4000, 1000)) * time.Millisecond
	run := func(writer rwLocker, all []rwLocker) (u sharedUse) {
		until := time.Now().Add(length)
		var mu sync.Mutex // guards u.reads and u.delays
		var done sync.WaitGroup
		for _, rw := range all {
			for range goroutines {
				done.Go(func() {
					var delays times
					for time.Now().Before(until) {
						began := time.Now()
						rw.RLock()
						delays = append(delays, time.Since(began))
						time.Sleep(stay)
						rw.RUnlock()
					}
					mu.Lock()
					defer mu.Unlock()
					u.reads, u.delays = u.reads+int64(len(delays)), append(u.delays, delays...)
				})
			}
		}
		beat := time.NewTicker(every)
		defer beat.Stop()
		for time.Now().Before(until) {
			<-beat.C
			began := time.Now()
			writer.Lock()
			u.writes = append(u.writes, time.Since(began))
			writer.Unlock()
		}
		done.Wait()
		return u
	}
	var all []rwLocker
	var made []*leased.Client
	for range clients + 1 {
		c, err := b.client()
		if err != nil {
			return err
		}
		defer c.Close()
		made, all = append(made, c), append(all, c.RWMutex("mixed"))
	}
	before, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	got := run(all[0], all[1:])
	after, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	var rw sync.RWMutex
	plain := run(&rw, []rwLocker{&rw, &rw, &rw, &rw})
	rate := func(n int64) string { return fmt.Sprintf("%.0f", float64(n)/length.Seconds()) }
	b.rows.add(fmt.Sprintf("%d clients read, %d goroutines each, another writes each %v: reads/s", clients, goroutines, every),
		rate(got.reads), "sync.RWMutex "+rate(plain.reads), "")
	b.rows.add("  writes/s", rate(int64(len(got.writes))), "sync.RWMutex "+rate(int64(len(plain.writes))), "")
	for _, w := range []struct {
		what       string
		got, plain times
	}{{"  a writer waits", got.writes, plain.writes}, {"  a reader waits", got.delays, plain.delays}} {
		b.rows.add(w.what, fmt.Sprintf("%v max %s", w.got, short(w.got.at(1))), fmt.Sprintf("sync.RWMutex %v max %s", w.plain, short(w.plain.at(1))), "")
	}
	b.rows.add("  commands per read or write", fmt.Sprintf("%.3f", float64(after.Sub(before)["evalsha"])/float64(got.reads+int64(len(got.writes)))), "raw 2", "")
	var direct int64
	for _, c := range made {
		direct += c.Stats().Direct
	}
	b.rows.add("  of them entered by a message", fmt.Sprintf("%d of %d", direct, got.reads+int64(len(got.writes))), "", "")
	return nil
}
