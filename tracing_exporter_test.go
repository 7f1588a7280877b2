package leased_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
)

// clogged is a span processor that blocks until it is freed, like an exporter without a
// batcher whose collector does not respond.
type clogged struct {
	freed chan struct{}
	ended atomic.Int64
}

func (s *clogged) OnStart(context.Context, sdk.ReadWriteSpan) {}

func (s *clogged) OnEnd(sdk.ReadOnlySpan) {
	select {
	case <-s.freed:
	case <-time.After(time.Minute): // or a test that waits for it would never end
	}
	s.ended.Add(1)
}

func (s *clogged) Shutdown(context.Context) error   { return nil }
func (s *clogged) ForceFlush(context.Context) error { return nil }

func TestAnExporterThatBlocksDelaysNoLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		blocked := &clogged{freed: make(chan struct{})}
		tp := sdk.NewTracerProvider(sdk.WithSpanProcessor(blocked))
		c := newClient(t, s, leased.WithTracerProvider(tp))
		other := newClient(t, s, leased.WithTracerProvider(tp))
		began := time.Now()
		const leases = 1000
		for range leases / 2 { // of which only the first waits for its spans
			unlock(t, lock(t, c.Mutex("x")))
			unlock(t, lock(t, other.Mutex("x")))
		}
		l := lock(t, c.Mutex("x"))
		s.rdb.Del(context.Background(), "x") // a loss is reported at once, too
		<-l.Context().Done()
		if err := l.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
			t.Error(err)
		}
		if took := time.Since(began); took > 11*time.Second {
			t.Errorf("it took %v", took)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := c.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "spans") {
			t.Errorf("Shutdown does not say what it did not wait for: %v", err)
		}
		if n := blocked.ended.Load(); n != 0 {
			t.Errorf("%d spans exported", n)
		}
		close(blocked.freed)
		synctest.Wait()
		if n := blocked.ended.Load(); n != 3*leases+2 { // the lost one had no release to wait for
			t.Errorf("%d spans exported in the end", n)
		}
	})
}

// A short job unlocks, flushes and is gone.
func TestAFlushAfterUnlockFindsTheSpans(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		kept := tracetest.NewInMemoryExporter()
		tp := sdk.NewTracerProvider(sdk.WithBatcher(kept))
		t.Cleanup(func() { _ = tp.Shutdown(context.Background()) })
		c := newClient(t, s, leased.WithTracerProvider(tp))
		mu := c.Mutex("x")
		flushed := func(what string, want ...string) {
			t.Helper()
			if err := tp.ForceFlush(context.Background()); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, span := range kept.GetSpans() {
				names = append(names, span.Name)
			}
			if slices.Sort(names); !slices.Equal(names, want) {
				t.Errorf("%s: found %v, want %v", what, names, want)
			}
			kept.Reset()
		}
		for range 100 {
			began := time.Now()
			unlock(t, lock(t, mu))
			flushed("LockContext", "leased.hold", "leased.release", "leased.wait")
			if took := time.Since(began); took > time.Millisecond {
				t.Fatalf("it took %v", took)
			}
		}
		held := lock(t, newClient(t, s).Mutex("x"))
		if _, err := mu.TryLockContext(context.Background()); err == nil {
			t.Error("two inside")
		}
		flushed("TryLockContext in vain", "leased.wait")
		unlock(t, held)
		mu.Lock()
		entered := locking(t, newClient(t, s).Mutex("x"))
		synctest.Wait()
		mu.Unlock()
		flushed("Lock that was waited for", "leased.hold", "leased.release")
		unlock(t, <-entered)
	})
}

// Once Unlock has waited for a processor in vain, it does not wait again before that has
// come to an end; then it does.
func TestUnlockWaitsOnceForASpanProcessorThatBlocks(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		blocked := &clogged{freed: make(chan struct{})}
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(blocked))))
		once := func(want time.Duration) {
			t.Helper()
			l := lock(t, c.Mutex("x"))
			began := time.Now()
			unlock(t, l)
			if took := time.Since(began); took != want {
				t.Errorf("Unlock took %v, want %v", took, want)
			}
		}
		once(5 * time.Millisecond)
		once(0)
		close(blocked.freed)
		synctest.Wait()
		once(0)
		blocked.freed = make(chan struct{})
		once(5 * time.Millisecond)
		once(0)
		close(blocked.freed)
	})
}

// A processor that is slow, but goes on, is not waited for each time that it has made one of the deliveries
// in its queue.
func TestUnlockDoesNotWaitAgainForASpanProcessorThatDoesNotKeepUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(unhurried(20*time.Millisecond)))))
		inVain := 0
		for range 1000 {
			l := lock(t, c.Mutex("x"))
			began := time.Now()
			unlock(t, l)
			if time.Since(began) > 0 {
				inVain++
			}
			time.Sleep(time.Millisecond)
		}
		if inVain == 0 || inVain > 3 { // for the first, after 20 ms; for one of those that came meanwhile; and so on
			t.Errorf("%d calls of Unlock waited", inVain)
		}
		time.Sleep(time.Minute) // until all has been delivered
	})
}

// unhurried is a span processor that takes so long for each span.
type unhurried time.Duration

func (unhurried) OnStart(context.Context, sdk.ReadWriteSpan) {}
func (d unhurried) OnEnd(sdk.ReadOnlySpan)                   { time.Sleep(time.Duration(d)) } // of virtual time
func (unhurried) Shutdown(context.Context) error             { return nil }
func (unhurried) ForceFlush(context.Context) error           { return nil }

func TestSpansThatNobodyTakesAreDroppedAndThatIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		blocked := &clogged{freed: make(chan struct{})}
		var log bytes.Buffer
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(blocked))),
			leased.WithIdleHold(time.Hour), leased.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		const leases = 6000
		for range leases {
			unlock(t, lock(t, c.Mutex("x")))
		}
		synctest.Wait()
		close(blocked.freed)
		synctest.Wait()
		if n := blocked.ended.Load(); n >= 2*leases || n < 8192 { // a lock that is kept idle is not released
			t.Errorf("%d spans of %d were exported", n, 2*leases)
		}
		if n := strings.Count(log.String(), "spans and measurements of locks are dropped"); n != 1 {
			t.Errorf("%d lines in the log:\n%s", n, log.String())
		}
	})
}
