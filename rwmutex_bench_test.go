package leased_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
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

// BenchmarkReaders has 64 goroutines of one process read. In "idle=0" there is now and
// then no reader, and the process releases the lock.
func BenchmarkReaders(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	read := func(b *testing.B, rw rwLocker) {
		rw.RLock()
		rw.RUnlock() //nolint:staticcheck // an empty section is what is measured
		b.ReportAllocs()
		report := commands(b, look, "evalsha")
		b.ResetTimer()
		share(b, 64, func(int) {
			rw.RLock()
			rw.RUnlock() //nolint:staticcheck // the same
		})
		report()
	}
	b.Run("lock=sync/goroutines=64", func(b *testing.B) { read(b, &sync.RWMutex{}) })
	b.Run("lock=raw/goroutines=64", func(b *testing.B) {
		l := newTextbook(s) // which knows no readers
		b.ReportAllocs()
		report := commands(b, look, "setnx", "set", "evalsha")
		share(b, 64, func(int) { l.lock(b, "raw", time.Millisecond)() })
		report()
	})
	for _, idle := range []time.Duration{0, 10 * time.Millisecond} {
		b.Run(fmt.Sprintf("lock=leased/goroutines=64/idle=%v", idle), func(b *testing.B) {
			read(b, benchClient(b, s).RWMutex("readers", leased.WithIdleHold(idle)))
		})
	}
	b.Run("lock=leased/goroutines=64/one=inside", func(b *testing.B) {
		rw := benchClient(b, s).RWMutex("readers")
		rw.RLock()
		defer rw.RUnlock()
		read(b, rw)
	})
}

// BenchmarkReadersAndAWriter has 4 clients with 4 goroutines each read for 100 µs
// at a time, and another client write every 10 ms. An operation is one read. To
// Redis and to each other clients are processes, with an inbox and connections of
// their own; but all run in this one, on its processors and with its collector.
func BenchmarkReadersAndAWriter(b *testing.B) {
	const clients, goroutines = 4, 4
	run := func(b *testing.B, writer rwLocker, readers []rwLocker) {
		var left atomic.Int64
		left.Store(int64(b.N))
		stop := make(chan struct{})
		var writes int
		var waited, longest time.Duration
		var write, read sync.WaitGroup
		b.ResetTimer()
		write.Go(func() {
			beat := time.NewTicker(10 * time.Millisecond)
			defer beat.Stop()
			for {
				select {
				case <-beat.C:
				case <-stop:
					return
				}
				began := time.Now()
				writer.Lock()
				d := time.Since(began)
				writer.Unlock()
				writes++
				waited, longest = waited+d, max(longest, d)
			}
		})
		for _, rw := range readers {
			for range goroutines {
				read.Go(func() {
					for left.Add(-1) >= 0 {
						rw.RLock()
						time.Sleep(100 * time.Microsecond) // it reads
						rw.RUnlock()
					}
				})
			}
		}
		read.Wait()
		b.StopTimer()
		close(stop)
		write.Wait()
		seconds := b.Elapsed().Seconds()
		b.ReportMetric(float64(b.N)/seconds, "reads/s")
		b.ReportMetric(float64(writes)/seconds, "writes/s")
		b.ReportMetric(float64(waited.Microseconds())/float64(max(1, writes)), "µs/write-wait")
		b.ReportMetric(float64(longest.Microseconds()), "µs/longest-write-wait")
	}
	b.Run("lock=sync", func(b *testing.B) {
		var rw sync.RWMutex
		run(b, &rw, []rwLocker{&rw, &rw, &rw, &rw})
	})
	s := redistest.Server(b)
	b.Run("lock=leased", func(b *testing.B) {
		var readers []rwLocker
		for range clients {
			readers = append(readers, benchClient(b, s).RWMutex("mixed"))
		}
		run(b, benchClient(b, s).RWMutex("mixed"), readers)
	})
}
