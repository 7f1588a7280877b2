package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/metric/noop"
	trace "go.opentelemetry.io/otel/trace/noop"

	"github.com/leasedmutex/leased"
)

// An example of each option, and of each method that example_test.go has none of.

// A prefix keeps the locks of one application apart from those of others, and is what an
// ACL names.
func ExampleWithKeyPrefix() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithKeyPrefix("billing:"))
	defer client.Close()

	mu := client.Mutex("invoice:42")
	mu.Lock()
	defer mu.Unlock()
	fmt.Println(rdb.Exists(context.Background(), "billing:invoice:42").Val())
	// Output: 1
}

// The label tells operators which process owns a lock.
func ExampleWithOwner() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithOwner("worker-7"))
	defer client.Close()

	err := client.Mutex("report").Do(context.Background(), func(ctx context.Context) error {
		info, err := client.Inspect(ctx, "report")
		if err == nil {
			fmt.Println(info.Owners[0].Client)
		}
		return err
	})
	fmt.Println(err)
	// Output:
	// worker-7
	// <nil>
}

// Lines about a lock name it, unless names are kept out of the log.
func ExampleWithLogger() {
	rdb, stop := embeddedRedis()
	defer stop()
	plain := slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch a.Key {
		case slog.TimeKey, "token", "reason":
			return slog.Attr{}
		}
		return a
	}}
	for _, more := range [][]leased.Option{nil, {leased.WithoutLockNamesInLogs()}} {
		logger := slog.New(slog.NewTextHandler(os.Stdout, &plain))
		client := mustNew(rdb, append(more, leased.WithLogger(logger))...)
		lease, err := client.Mutex("salary:4711").LockContext(context.Background())
		if err != nil {
			log.Panic(err)
		}
		if _, err := client.ForceUnlock(context.Background(), "salary:4711"); err != nil {
			log.Panic(err)
		}
		_ = lease.Unlock() // leased.ErrLeaseLost
		_ = client.Close() // waits for the logger
	}
	// Output:
	// level=ERROR msg="leased: lease lost before Unlock" lock=salary:4711 ttl=30s
	// level=ERROR msg="leased: lease lost before Unlock" ttl=30s
}

// Any policy with the method NextBackOff will do. Locks never share one.
func ExampleWithBackOff() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithBackOff(func() leased.BackOff {
		return backoff.NewConstantBackOff(100 * time.Millisecond)
	}))
	defer client.Close()

	fmt.Println(client.Mutex("report").TryLock())
	client.Mutex("report").Unlock()
	// Output: true
}

// Without these options the global providers are used. Here one client gets none, so that
// nothing is traced or measured.
func ExampleWithTracerProvider() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb,
		leased.WithTracerProvider(trace.NewTracerProvider()),
		leased.WithMeterProvider(noop.NewMeterProvider()))
	defer client.Close()

	fmt.Println(client.Mutex("report").TryLock())
	client.Mutex("report").Unlock()
	// Output: true
}

// What costs more than most want: spans of every Lock, and series for each lock.
func ExampleWithUncontendedSpans() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithUncontendedSpans(), leased.WithLockNameInMetrics())
	defer client.Close()

	fmt.Println(client.Mutex("report").TryLock())
	client.Mutex("report").Unlock()
	// Output: true
}

// A lock that is held or waited for suspiciously long is logged while it still is.
func ExampleWithSlowThreshold() {
	rdb, stop := embeddedRedis()
	defer stop()
	slow := make(chan string, 10)
	client := mustNew(rdb,
		leased.WithSlowThreshold(20*time.Millisecond),
		leased.WithLogger(slog.New(handler(func(r slog.Record) { slow <- r.Message }))))
	defer client.Close()

	err := client.Mutex("report").Do(context.Background(), func(context.Context) error {
		for line := range slow {
			if strings.Contains(line, "held") { // not that it has waited
				fmt.Println(line)
				return nil
			}
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// leased: a lock has been held for a long time
	// <nil>
}

// handler is a slog.Handler that is a function.
type handler func(slog.Record)

func (h handler) Enabled(context.Context, slog.Level) bool      { return true }
func (h handler) Handle(_ context.Context, r slog.Record) error { h(r); return nil }
func (h handler) WithAttrs([]slog.Attr) slog.Handler            { return h }
func (h handler) WithGroup(string) slog.Handler                 { return h }

// A short TTL lets others in soon after the owner has died, and costs more renewals.
func ExampleWithTTL() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	lease, err := client.Mutex("leader", leased.WithTTL(5*time.Second)).LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	rest := time.Until(lease.TrustedUntil())
	fmt.Println(rest > 4*time.Second, rest < 5*time.Second)
	fmt.Println(lease.Unlock())
	// Output:
	// true true
	// <nil>
}

// A holder that is stuck keeps others out no longer than this and a TTL.
func ExampleWithMaxHold() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithLossHandler(func(leased.LossEvent) {}))
	defer client.Close()

	mu := client.Mutex("report", leased.WithMaxHold(50*time.Millisecond))
	err := mu.Do(context.Background(), func(ctx context.Context) error {
		<-ctx.Done() // stuck
		return nil
	})
	fmt.Println(errors.Is(err, leased.ErrMaxHold), errors.Is(err, leased.ErrLeaseLost))
	// Output: true true
}

// A process that locks the same name again and again keeps the lock in between, as long as
// no other process wants it.
func ExampleWithIdleHold() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithIdleHold(time.Second))
	defer client.Close()

	mu, n := client.Mutex("counter"), 0
	for range 3 {
		mu.Lock()
		n++
		mu.Unlock()
	}
	fmt.Println(client.Stats().Idle, "of", client.Stats().Leases, "without asking Redis")
	// Output: 2 of 3 without asking Redis
}

// With 1, each release hands the lock to another process that waits: the order is fairer
// among processes, and each hand-off costs a command.
func ExampleWithLocalHandoffs() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithLocalHandoffs(1, 0))
	defer client.Close()

	var callers sync.WaitGroup
	mu := client.Mutex("counter")
	n := 0
	for range 10 {
		callers.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			n++
		})
	}
	callers.Wait()
	fmt.Println(n)
	// Output: 10
}

// How long an Unlock may wait for Redis. What is not confirmed by then is released in the
// background.
func ExampleWithReleaseTimeout() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithReleaseTimeout(5*time.Second))
	defer client.Close()

	lease, err := client.Mutex("report").LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	if err := lease.Unlock(); errors.Is(err, leased.ErrNotReleased) {
		fmt.Println("others may have to wait for a TTL")
	} else {
		fmt.Println(err)
	}
	// Output: <nil>
}

// With one primary and two replicas: a lease counts once one of the replicas has it too.
func ExampleWithReplicas() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client := mustNew(rdb, leased.WithReplicas(1, 100*time.Millisecond))
	defer client.Close()

	_, err := client.Mutex("report").TryLockContext(context.Background())
	if errors.Is(err, leased.ErrNoReplicas) {
		log.Println("replication is too slow, or there is none")
	}
}

// For code that locks in one function and unlocks in another, and keeps no lease.
func ExampleMutex_UnlockContext() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	mu := client.Mutex("report")
	mu.Lock()
	fmt.Println(mu.UnlockContext(context.Background()))
	fmt.Println(errors.Is(mu.UnlockContext(context.Background()), leased.ErrNotLocked))
	// Output:
	// <nil>
	// true
}

// Readers that try do not wait for a writer.
func ExampleRWMutex_TryRLockContext() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb)
	defer here.Close()
	defer there.Close()

	prices := there.RWMutex("prices")
	prices.Lock()
	_, err := here.RWMutex("prices").TryRLockContext(context.Background())
	fmt.Println(errors.Is(err, leased.ErrLocked))
	prices.Unlock()
	// Output: true
}

// RLocker fits where a sync.Locker is wanted.
func ExampleRWMutex_RLocker() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	readers := client.RWMutex("prices").RLocker() // a sync.Locker
	readers.Lock()
	fmt.Println("a writer beside it:", client.RWMutex("prices").TryLock())
	readers.Unlock()
	// Output: a writer beside it: false
}

// A lease that several requests share: the work for one ends with its request or with the
// lease, whichever is first.
func ExampleLease_With() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	lease, err := client.Mutex("leader").LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	request, done := context.WithCancel(context.Background())
	work, stopWork := lease.With(request)
	defer stopWork()
	done()
	<-work.Done()
	fmt.Println(context.Cause(work), "but the lease goes on:", lease.Context().Err() == nil)
	fmt.Println(lease.Unlock())
	// Output:
	// context canceled but the lease goes on: true
	// <nil>
}

// Before a step that cannot be undone, and cannot present the token.
func ExampleLease_Check() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithLossHandler(func(leased.LossEvent) {}))
	defer client.Close()
	ctx := context.Background()

	lease, err := client.Mutex("import").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	for step := 0; err == nil; step++ {
		if step == 2 {
			rdb.Del(ctx, "import") // as FLUSHALL, or an eviction, does
		}
		err = lease.Check(ctx)
	}
	fmt.Println(errors.Is(err, leased.ErrLeaseLost))
	fmt.Println(errors.Is(lease.Unlock(), leased.ErrLeaseLost))
	// Output:
	// true
	// true
}

// Work may go on by itself while it is far from the end of the trust window.
func ExampleLease_TrustedUntil() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb) // with a TTL of 30 s
	defer client.Close()

	lease, err := client.Mutex("import").LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	fmt.Println("time for a step of 10 s:", time.Until(lease.TrustedUntil()) > 10*time.Second)
	fmt.Println(lease.Unlock())
	// Output:
	// time for a step of 10 s: true
	// <nil>
}

// An operator ends the ownership of a process that is known to be gone or wrong.
func ExampleClient_ForceUnlock() {
	rdb, stop := embeddedRedis()
	defer stop()
	stuck, operator := mustNew(rdb, leased.WithLossHandler(func(leased.LossEvent) {})), mustNew(rdb)
	defer stuck.Close()
	defer operator.Close()
	ctx := context.Background()

	mu := stuck.Mutex("import")
	mu.Lock()
	defer mu.Unlock()
	fmt.Println(operator.Mutex("import").TryLock())
	fmt.Println(operator.ForceUnlock(ctx, "import"))
	fmt.Println(operator.Mutex("import").Do(ctx, func(context.Context) error { return nil }))
	// Output:
	// false
	// 1 <nil>
	// <nil>
}

// A process that is told to end lets its callers finish, for as long as its context says.
func ExampleClient_Shutdown() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)

	lease, err := client.Mutex("report").LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	go func() {
		<-lease.Context().Done() // with the cause ErrClosed
		if err := lease.Unlock(); err != nil {
			log.Print(err)
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	fmt.Println(client.Shutdown(ctx))
	// Output: <nil>
}

// How often Redis had to be asked.
func ExampleClient_Stats() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	if mu := client.Mutex("counter"); mu.TryLock() {
		mu.Unlock()
	}
	s := client.Stats()
	fmt.Println(s.Leases, "lease, of which", s.Local, "were handed on locally;", s.Lost, "lost")
	// Output: 1 lease, of which 0 were handed on locally; 0 lost
}

// A goroutine profile says which goroutines wait for which lock.
func ExampleWithProfileLabels() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithProfileLabels())
	defer client.Close()

	mu := client.Mutex("report")
	mu.Lock()
	waiting := make(chan struct{})
	go func() {
		defer close(waiting)
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // that it waits is the point
	}()
	var profile strings.Builder
	until := time.Now().Add(30 * time.Second)
	for !strings.Contains(profile.String(), `"leased.lock":"report"`) {
		if time.Now().After(until) {
			log.Fatal("nobody waits for report")
		}
		time.Sleep(time.Millisecond) // nothing tells that a goroutine waits
		profile.Reset()
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println("somebody waits for report")
	mu.Unlock()
	<-waiting
	// Output: somebody waits for report
}
