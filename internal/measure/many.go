package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// heapFile is where section many writes a heap profile; "" is nowhere.
var heapFile string

// warm has c open as many connections as it will use at once, because their buffers are not part
// of a lease.
func warm(ctx context.Context, c *leased.Client, at int) error {
	return byWorkers(at, 100*at, func(i int) error {
		return c.Mutex(fmt.Sprintf("warm:%d", i%at)).Do(ctx, func(context.Context) error { return nil })
	})
}

// many measures one client that holds ten thousand leases.
func many(b *bench) error {
	ctx := context.Background()
	const leases, workers, ttl = 10_000, 8, 3 * time.Second
	c, err := b.client(leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := warm(ctx, c, workers); err != nil {
		return err
	}
	names := make([]string, leases)
	for i := range names {
		names[i] = fmt.Sprintf("invoice:%08d", i)
	}
	held := make([]*leased.Lease, leases)
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what had a finalizer or was in a pool is freed the second time
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	goroutines, bytes := runtime.NumGoroutine(), heap()
	began := time.Now()
	if err := byWorkers(workers, leases, func(i int) (err error) {
		held[i], err = c.Mutex(names[i]).LockContext(ctx)
		return err
	}); err != nil {
		return err
	}
	took := time.Since(began)
	each := float64(heap()-bytes) / leases
	if heapFile != "" {
		f, err := os.Create(heapFile)
		if err != nil {
			return err
		}
		if err := errors.Join(pprof.WriteHeapProfile(f), f.Close()); err != nil {
			return err
		}
	}
	more := runtime.NumGoroutine() - goroutines

	before, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	start := time.Now()
	most := more
	for time.Since(start) < 3*ttl {
		time.Sleep(20 * time.Millisecond)
		most = max(most, runtime.NumGoroutine()-goroutines)
	}
	after, err := redistest.Calls(ctx, b.rdb)
	if err != nil {
		return err
	}
	lost := c.Stats().Lost
	renewals := float64(after.Sub(before)["evalsha"]) / (3 * ttl).Seconds()
	b.rows.add(fmt.Sprintf("%d leases: heap bytes each", leases), fmt.Sprintf("%.0f", each), "", atMost("768", each <= 768))
	b.rows.add("  goroutines more, at rest / at most", fmt.Sprintf("%d / %d", more, most), "", "")
	b.rows.add("  lost in three TTLs of 3 s", fmt.Sprint(lost), "", "0: "+mark(lost == 0))
	b.rows.add("  renewals per second", fmt.Sprintf("%.0f", renewals), fmt.Sprintf("3 each TTL: %.0f", leases/ttl.Seconds()*3), "")
	b.rows.add("  taking them", short(took), "", "")
	began = time.Now()
	err = byWorkers(workers, leases, func(i int) error { return held[i].Unlock() })
	b.rows.add("  giving them back", short(time.Since(began)), "", "")
	return err
}
