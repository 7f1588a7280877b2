package leased_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Each benchmark stands beside a baseline with the same name and lock=raw (the
// textbook lock: SET NX PX, and a script that deletes what is still one's own),
// lock=publish or lock=sync. Compare them within one run only.

// commands reports how many commands, scripts and their baselines alike, the
// server was sent for each operation. What a script calls is no command.
func commands(b *testing.B, rdb *redis.Client, what ...string) (report func()) {
	b.Helper()
	before, err := redistest.Calls(b.Context(), rdb)
	if err != nil {
		b.Fatal(err)
	}
	return func() {
		b.StopTimer()
		after, err := redistest.Calls(b.Context(), rdb)
		if err != nil {
			b.Fatal(err)
		}
		sent := after.Sub(before)
		var n int64
		for _, name := range what {
			n += sent[name]
		}
		b.ReportMetric(float64(n)/float64(b.N), "commands/op")
	}
}

func benchClient(b *testing.B, s *redistest.Instance, opts ...leased.Option) *leased.Client {
	b.Helper()
	c, err := leased.New(s.Client(), opts...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := c.Close(); err != nil {
			b.Error(err)
		}
	})
	return c
}

// textbook is the lock of the baselines.
type textbook struct {
	rdb   *redis.Client
	next  atomic.Int64
	owner string
}

func newTextbook(s *redistest.Instance) *textbook {
	return &textbook{rdb: s.Client(), owner: "owner-of-the-baseline"}
}

// lock polls, as users of the textbook lock do.
func (l *textbook) lock(b *testing.B, name string, poll time.Duration) (unlock func()) {
	ctx := b.Context()
	value := fmt.Sprint(l.owner, l.next.Add(1))
	for {
		ok, err := l.rdb.SetNX(ctx, name, value, 30*time.Second).Result()
		if err != nil {
			b.Error(err)
		}
		if ok || err != nil {
			break
		}
		time.Sleep(poll) // between two tries
	}
	return func() {
		if err := deleteOwn.Run(ctx, l.rdb, []string{name}, value).Err(); err != nil {
			b.Error(err)
		}
	}
}

// cycle has one goroutine lock and unlock.
func cycle(b *testing.B, look *redis.Client, mu sync.Locker) {
	mu.Lock()   // so that the server knows the scripts
	mu.Unlock() //nolint:staticcheck // an empty section is what is measured
	b.ReportAllocs()
	report := commands(b, look, "evalsha")
	for b.Loop() {
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // the same
	}
	report()
}

// cycleContext is cycle with LockContext and the lease's Unlock.
func cycleContext(b *testing.B, mu *leased.Mutex) {
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		l, err := mu.LockContext(ctx)
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Unlock(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUncontended(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	b.Run("lock=raw", func(b *testing.B) {
		l := newTextbook(s)
		l.lock(b, "raw", 0)()
		b.ReportAllocs()
		report := commands(b, look, "setnx", "set", "evalsha")
		for b.Loop() {
			l.lock(b, "raw", 0)()
		}
		report()
	})
	c := benchClient(b, s)
	mu := c.Mutex("uncontended")
	b.Run("lock=leased/call=Lock", func(b *testing.B) { cycle(b, look, mu) })
	b.Run("lock=leased/call=LockContext", func(b *testing.B) {
		report := commands(b, look, "evalsha")
		cycleContext(b, mu)
		report()
	})
}

// share has goroutines do b.N operations together.
func share(b *testing.B, goroutines int, do func(goroutine int)) {
	var left atomic.Int64
	left.Store(int64(b.N))
	var all sync.WaitGroup
	for i := range goroutines {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				do(i)
			}
		})
	}
	all.Wait()
}

// Operations are divided among goroutines by hand: b.Loop counts in one only.
func BenchmarkContended(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	b.Run("lock=raw/goroutines=64/clients=1", func(b *testing.B) {
		l := newTextbook(s)
		b.ReportAllocs()
		report := commands(b, look, "setnx", "set", "evalsha")
		share(b, 64, func(int) { l.lock(b, "raw", time.Millisecond)() })
		report()
	})
	b.Run("lock=sync/goroutines=64/clients=1", func(b *testing.B) {
		var mu sync.Mutex
		b.ReportAllocs()
		share(b, 64, func(int) {
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // an empty section is what is measured
		})
	})
	for _, clients := range []int{1, 8} {
		b.Run(fmt.Sprintf("lock=leased/goroutines=64/clients=%d", clients), func(b *testing.B) {
			var all []*leased.Mutex
			for range clients {
				all = append(all, benchClient(b, s).Mutex("contended"))
			}
			b.ReportAllocs()
			report := commands(b, look, "evalsha")
			share(b, 64, func(i int) {
				mu := all[i%clients]
				mu.Lock()
				mu.Unlock() //nolint:staticcheck // the same
			})
			report()
		})
	}
}

// BenchmarkHandoff has the lock go to and fro between two clients: an operation is
// one Unlock of one of them until the other is inside.
func BenchmarkHandoff(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	b.Run("lock=publish", func(b *testing.B) {
		ctx := b.Context()
		var ends [2]*redis.PubSub
		rdbs := [2]*redis.Client{s.Client(), s.Client()}
		names := [2]string{"ping", "pong"}
		for i := range ends {
			ends[i] = rdbs[i].Subscribe(ctx, names[i])
			defer ends[i].Close()
			if _, err := ends[i].Receive(ctx); err != nil {
				b.Fatal(err)
			}
		}
		pass := func(from, to int) {
			if err := rdbs[from].Publish(ctx, names[to], "x").Err(); err != nil {
				b.Error(err)
			}
			if _, err := ends[to].ReceiveMessage(ctx); err != nil {
				b.Error(err)
			}
		}
		b.ReportAllocs()
		report := commands(b, look, "publish")
		for turn := 0; b.Loop(); turn = 1 - turn {
			pass(turn, 1-turn)
		}
		report()
	})
	b.Run("lock=leased", func(b *testing.B) {
		// At most one lease for each tenure: both want the lock all the time.
		clients := [2]*leased.Client{
			benchClient(b, s, leased.WithLocalHandoffs(1, 0)),
			benchClient(b, s, leased.WithLocalHandoffs(1, 0)),
		}
		ctx, cancel := context.WithCancel(b.Context())
		turns := make(chan struct{})
		var all sync.WaitGroup
		for _, c := range clients {
			all.Go(func() {
				mu := c.Mutex("handoff")
				for ctx.Err() == nil {
					l, err := mu.LockContext(ctx)
					if err != nil {
						return // canceled
					}
					select {
					case turns <- struct{}{}:
					case <-ctx.Done():
					}
					if err := l.Unlock(); err != nil {
						b.Error(err)
					}
				}
			})
		}
		defer all.Wait()
		defer cancel()
		<-turns
		b.ReportAllocs()
		report := commands(b, look, "evalsha")
		for b.Loop() {
			<-turns
		}
		report()
		if s := clients[0].Stats(); s.Leases > 10 && s.Direct < s.Leases/2 {
			b.Errorf("only %d of %d leases came by hand-off", s.Direct, s.Leases)
		}
	})
}

// BenchmarkManyLocks has each goroutine lock and unlock a lock of its own.
func BenchmarkManyLocks(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	for _, goroutines := range []int{1, 8, 64} {
		run := func(b *testing.B, cycle func(name string), what ...string) {
			names := make([]string, goroutines)
			for i := range names {
				names[i] = fmt.Sprint("many", i)
				cycle(names[i])
			}
			b.ReportAllocs()
			report := commands(b, look, what...)
			b.ResetTimer()
			share(b, goroutines, func(i int) { cycle(names[i]) })
			report()
		}
		b.Run(fmt.Sprint("lock=raw/goroutines=", goroutines), func(b *testing.B) {
			l := newTextbook(s)
			run(b, func(name string) { l.lock(b, name, 0)() }, "setnx", "set", "evalsha")
		})
		b.Run(fmt.Sprint("lock=leased/goroutines=", goroutines), func(b *testing.B) {
			c := benchClient(b, s)
			run(b, func(name string) {
				mu := c.Mutex(name)
				mu.Lock()
				mu.Unlock() //nolint:staticcheck // an empty section is what is measured
			}, "evalsha") // SET is what our scripts call, not what we send
		})
	}
}

// BenchmarkLocal has two goroutines of one client pass the lock to each other.
func BenchmarkLocal(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	run := func(b *testing.B, mu sync.Locker) {
		ctx, cancel := context.WithCancel(b.Context())
		var other sync.WaitGroup
		defer other.Wait()
		defer cancel()
		other.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				mu.Unlock() //nolint:staticcheck // an empty section is what is measured
			}
		})
		cycle(b, look, mu)
	}
	b.Run("lock=sync", func(b *testing.B) { run(b, &sync.Mutex{}) })
	b.Run("lock=leased", func(b *testing.B) { run(b, benchClient(b, s).Mutex("local")) })
}

// BenchmarkIdleHold locks again what this process kept.
func BenchmarkIdleHold(b *testing.B) {
	s := redistest.Server(b)
	look := s.Client()
	b.Run("lock=sync", func(b *testing.B) { cycle(b, look, &sync.Mutex{}) })
	b.Run("lock=leased", func(b *testing.B) {
		cycle(b, look, benchClient(b, s).Mutex("idle", leased.WithIdleHold(time.Minute)))
	})
}

// BenchmarkKeptLock and BenchmarkKeptRLock lock what the process keeps. Calls without a lease
// take a short cut; LockContext, beside them, does not.
func BenchmarkKeptLock(b *testing.B) {
	var plain sync.Mutex
	b.Run("lock=sync", func(b *testing.B) { keptCycle(b, plain.Lock, plain.Unlock) })
	mu := benchClient(b, redistest.Server(b)).Mutex("kept", leased.WithIdleHold(time.Hour))
	b.Run("lock=leased", func(b *testing.B) { keptCycle(b, mu.Lock, mu.Unlock) })
	b.Run("lock=leased/call=LockContext", func(b *testing.B) { cycleContext(b, mu) })
}

func BenchmarkKeptRLock(b *testing.B) {
	var plain sync.RWMutex
	b.Run("lock=sync", func(b *testing.B) { keptCycle(b, plain.RLock, plain.RUnlock) })
	b.Run("lock=sync/goroutines=parallel", func(b *testing.B) { keptParallel(b, plain.RLock, plain.RUnlock) })
	rw := benchClient(b, redistest.Server(b)).RWMutex("kept", leased.WithIdleHold(time.Hour))
	b.Run("lock=leased", func(b *testing.B) { keptCycle(b, rw.RLock, rw.RUnlock) })
	b.Run("lock=leased/goroutines=parallel", func(b *testing.B) { keptParallel(b, rw.RLock, rw.RUnlock) })
}

func keptCycle(b *testing.B, lock, unlock func()) {
	for range 3 { // the first asks Redis, the second finds the lock kept
		lock()
		unlock()
	}
	b.ReportAllocs()
	for b.Loop() {
		lock()
		unlock()
	}
}

func keptParallel(b *testing.B, lock, unlock func()) {
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			lock()
			unlock()
		}
	})
}

// What tracing and metrics cost, on a lock that the process has kept, so that no
// round trip hides it. The baseline is otel=none.
func BenchmarkTelemetry(b *testing.B) {
	s := redistest.Server(b)
	traced := func(sampler sdk.Sampler) leased.Option {
		tp := sdk.NewTracerProvider(sdk.WithSampler(sampler), sdk.WithBatcher(tracetest.NewNoopExporter()))
		b.Cleanup(func() { _ = tp.Shutdown(context.Background()) })
		return leased.WithTracerProvider(tp)
	}
	measured := func() leased.Option {
		mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
		b.Cleanup(func() { _ = mp.Shutdown(context.Background()) })
		return leased.WithMeterProvider(mp)
	}
	for _, otel := range []struct {
		name string
		opts []leased.Option
	}{
		{"none", nil},
		{"unsampled", []leased.Option{traced(sdk.NeverSample())}},
		{"sampled", []leased.Option{traced(sdk.AlwaysSample())}},
		{"metrics", []leased.Option{measured()}},
	} {
		c := benchClient(b, s, append(otel.opts, leased.WithIdleHold(time.Hour))...)
		b.Run("call=Lock/otel="+otel.name, func(b *testing.B) {
			mu := c.Mutex("x")
			b.ReportAllocs()
			for b.Loop() {
				mu.Lock()
				mu.Unlock() //nolint:staticcheck // the pair is what is measured
			}
		})
		b.Run("call=LockContext/otel="+otel.name, func(b *testing.B) { cycleContext(b, c.Mutex("x")) })
		_ = c.Close() // or it would keep the lock
	}
}

// A free lock on five servers. Beside redsync and one server: internal/measure/redlock.
func BenchmarkQuorumLockUnlock(b *testing.B) {
	var rdbs []redis.UniversalClient
	for range 5 {
		s := redistest.Server(b)
		if err := s.Client().Set(context.Background(), "leased:quorum:mark", "1", 0).Err(); err != nil { // it may vote
			b.Fatal(err)
		}
		rdbs = append(rdbs, s.Client())
	}
	c, err := leased.NewQuorum(rdbs)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	mu := c.Mutex("x")
	for range 20 {
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // it connects
	}
	b.ReportAllocs()
	for b.Loop() {
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // that is what is measured
	}
}

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
