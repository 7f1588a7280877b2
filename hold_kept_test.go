package leased

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// keptBy returns a lock that c, which is in a bubble, keeps, and that its calls know to be kept.
func keptBy(t *testing.T, c *Client) *RWMutex {
	t.Helper()
	rw := c.RWMutex("x", WithIdleHold(time.Hour))
	for range 2 { // the second finds that the first has kept it
		rw.Lock()
		rw.Unlock() //nolint:staticcheck // an empty section is what keeps it
		synctest.Wait()
	}
	h := &rw.handle
	if h.kept.Load() == nil {
		t.Fatal("the lock is not kept")
	}
	if !c.observed() {
		if !h.reenter(protocol.Exclusive, time.Now()) {
			t.Fatal("its calls do not know that the lock is kept")
		}
		rw.Unlock()
	}
	return rw
}

func TestCallsOfAKeptLockAllocateNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rw := keptBy(t, onStub(t, 0, 0))
		read := func() {
			rw.RLock()
			rw.RUnlock() //nolint:staticcheck // an empty section is what is measured
		}
		write := func() {
			rw.Lock()
			rw.Unlock() //nolint:staticcheck // the same
		}
		try := func() {
			if rw.TryLock() {
				rw.Unlock()
			}
		}
		check := func(what string, f func()) {
			t.Helper()
			f()
			f()
			if n := testing.AllocsPerRun(1000, f); n != 0 {
				t.Errorf("%s: %v allocations", what, n)
			}
		}
		check("Lock and Unlock", write)
		check("TryLock and Unlock", try)
		read() // which gives the writer's grant back
		check("RLock and RUnlock", read)
		rw.RLock()
		check("RLock and RUnlock beside a reader", read)
		rw.RUnlock()
	})
}

func TestCallsOfAKeptLockAreCountedAndUnlockOfNoCallPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		rw := keptBy(t, c)
		before := c.Stats()
		const n = 100
		for range n {
			rw.Lock()
			rw.Unlock() //nolint:staticcheck // that it is counted is the point
		}
		if s := c.Stats(); s.Leases-before.Leases != n || s.Idle-before.Idle != n {
			t.Errorf("%+v after %+v", s, before)
		}
		for what, unlock := range map[string]func(){"Unlock": rw.Unlock, "RUnlock": rw.RUnlock} {
			func() {
				defer func() {
					if err, ok := recover().(error); !ok || !errors.Is(err, ErrNotLocked) {
						t.Errorf("%s of no call panics with %v", what, err)
					}
				}()
				unlock()
			}()
		}
		if err := rw.UnlockContext(context.Background()); !errors.Is(err, ErrNotLocked) {
			t.Errorf("UnlockContext of no call returns %v", err)
		}
		rw.Lock()
		if rw.TryLock() || rw.TryRLock() {
			t.Error("another is inside too")
		}
		rw.Unlock()
	})
}

// A lease that was taken by a short cut is told of like any other.
func TestTheLossOfAKeptLockIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var told []LossEvent
		c := onStub(t, 0, 0, WithLossHandler(func(l LossEvent) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, l)
		}))
		rw := keptBy(t, c)
		rw.Lock()
		e := rw.handle.kept.Load()
		e.step(func(now time.Time, fx *lockstate.Effects) {
			e.stateLocked().Receive(&protocol.Message{Kind: protocol.MessageRevoked, ID: e.stateLocked().Request().ID}, now, fx)
		})
		if err := rw.UnlockContext(context.Background()); err == nil || !strings.Contains(err.Error(), "evicted") {
			t.Errorf("its Unlock returns %v", err)
		}
		c.losses.wait(context.Background())
		mu.Lock()
		defer mu.Unlock()
		if len(told) != 1 || told[0].Token == 0 || c.Stats().Lost != 1 {
			t.Errorf("told %+v, counted %d", told, c.Stats().Lost)
		}
	})
}

// Whoever watches calls sees those of a kept lock too.
func TestCallsOfAKeptLockAreMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := sdkmetric.NewManualReader()
		mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
		defer func() { _ = mp.Shutdown(context.Background()) }()
		rw := keptBy(t, onStub(t, 0, 0, WithMeterProvider(mp)))
		counts := func(name string) (n uint64) {
			var got metricdata.ResourceMetrics
			if err := reader.Collect(context.Background(), &got); err != nil {
				t.Fatal(err)
			}
			for _, m := range got.ScopeMetrics[0].Metrics {
				if h, ok := m.Data.(metricdata.Histogram[float64]); ok && m.Name == name {
					for _, p := range h.DataPoints {
						n += p.Count
					}
				}
			}
			return n
		}
		waits, holds := counts("leased.wait.duration"), counts("leased.hold.duration")
		for range 10 {
			rw.Lock()
			rw.Unlock() //nolint:staticcheck // that it is measured is the point
		}
		if w, h := counts("leased.wait.duration")-waits, counts("leased.hold.duration")-holds; w != 10 || h != 10 {
			t.Errorf("%d waits and %d holds are measured", w, h)
		}
	})
}

func TestCallsOfAKeptLockAreTraced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		tp := sdk.NewTracerProvider(sdk.WithSpanProcessor(spans))
		c := onStub(t, 0, 0, WithTracerProvider(tp), WithUncontendedSpans())
		rw := keptBy(t, c)
		c.tracing.queue.wait(context.Background())
		before := len(spans.Ended())
		rw.Lock()
		rw.Unlock() //nolint:staticcheck // that it is traced is the point
		c.tracing.queue.wait(context.Background())
		if n := len(spans.Ended()) - before; n < 2 {
			t.Errorf("%d spans", n)
		}
	})
}

func TestASlowCallerOfAKeptLockIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		rw := keptBy(t, onStub(t, 0, 0, WithLogger(log), WithSlowThreshold(50*time.Millisecond)))
		rw.Lock()
		defer rw.Unlock()
		time.Sleep(time.Second)
		synctest.Wait()
		if text := text.String(); !strings.Contains(text, "held for a long time") || !strings.Contains(text, "locked_at=") {
			t.Errorf("logged: %s", text)
		}
	})
}

// A lock that nobody waited for is lost before its caller has reported how it came in. The wait gets no span, and the
// hold, which did not end well, has one all the same.
func TestAHoldThatIsLostBeforeItsWaitIsReportedHasASpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		c := settled(t, onStub(t, 0, 0, WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(spans)))))
		ctx, h, w := context.Background(), &c.Mutex("x").handle, &call{Mode: protocol.Exclusive}
		began := time.Now()
		span := c.tracing.startWaitSpan(ctx, "x", w, began)
		e, err := h.wait(ctx, w, began)
		if err != nil {
			t.Fatal(err)
		}
		var evicted lockstate.Effects
		e.mu.Lock()
		e.stateLocked().Revoked(e.stateLocked().Request().ID, 0, time.Now(), &evicted)
		e.mu.Unlock()
		e.perform(&evicted, false, 0)
		c.tracing.endWaitSpan(ctx, span, &waitRecord{h, e, w, nil, began, time.Now()})
		c.Mutex("x").Unlock()
		synctest.Wait()
		ended := spans.Ended()
		if len(ended) != 1 || ended[0].Name() != spanHold || ended[0].Status().Description != "forced" {
			t.Errorf("spans: %v", ended)
		}
	})
}

// A hold begins when its caller is admitted, though that one's goroutine goes on later: others may begin to wait
// for it in between.
func TestAHoldSpanBeginsWhenItsCallerIsAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		c := settled(t, onStub(t, 0, 0, WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(spans)))))
		ctx, h, w := context.Background(), &c.Mutex("x").handle, &call{Mode: protocol.Exclusive, Leased: true}
		began := time.Now()
		span := c.tracing.startWaitSpan(ctx, "x", w, began)
		e, err := h.wait(ctx, w, began)
		if err != nil {
			t.Fatal(err)
		}
		admitted := time.Now()
		time.Sleep(time.Second)
		c.tracing.endWaitSpan(ctx, span, &waitRecord{h, e, w, nil, began, time.Now()})
		if err := newLease(ctx, e, w).Unlock(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		for _, span := range spans.Ended() {
			if span.Name() == spanHold {
				if after := span.StartTime().Sub(admitted); after != 0 {
					t.Errorf("it begins %v after the caller was admitted", after)
				}
				return
			}
		}
		t.Error("there is no span")
	})
}
