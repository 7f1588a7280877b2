package leased

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
)

// ledger is a span processor that knows which spans were begun and not yet ended,
// and which ended without an outcome.
type ledger struct {
	mu   sync.Mutex
	open map[trace.SpanID]string
	dumb map[string]int // name: ended without an outcome
	n    int
}

func newLedger() *ledger {
	return &ledger{open: map[trace.SpanID]string{}, dumb: map[string]int{}}
}

func (a *ledger) OnStart(_ context.Context, s sdk.ReadWriteSpan) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open[s.SpanContext().SpanID()] = s.Name()
	a.n++
}

func (a *ledger) OnEnd(s sdk.ReadOnlySpan) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.open, s.SpanContext().SpanID())
	for _, kv := range s.Attributes() {
		if kv.Key == attrWaitOutcome || kv.Key == attrHoldOutcome {
			return
		}
	}
	a.dumb[s.Name()]++
}

func (a *ledger) Shutdown(context.Context) error   { return nil }
func (a *ledger) ForceFlush(context.Context) error { return nil }

// balanced fails t for spans that did not end, or do not say how.
func (a *ledger) balanced(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	open := map[string]int{}
	for _, name := range a.open {
		open[name]++
	}
	if len(open) != 0 || len(a.dumb) != 0 {
		t.Errorf("of %d spans, not ended: %v; without outcome: %v", a.n, open, a.dumb)
	}
}

// sometimes samples each span with probability one half, and is slow.
type sometimes struct{}

func (sometimes) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	time.Sleep(time.Duration(rand.IntN(20)) * time.Microsecond) // user code takes its time
	r := sdk.SamplingResult{Decision: sdk.RecordAndSample}
	if rand.IntN(4) == 0 {
		r.Decision = sdk.Drop
	}
	return r
}

func (sometimes) Description() string { return "sometimes" }

// Whoever unlocks, whatever becomes of the lease, however it crosses: every span
// that was begun is ended, and says how.
func TestEverySpanEndsWithAnOutcomeWhateverCrosses(t *testing.T) {
	underTraffic(t, func(t *testing.T, plain *Client) {
		m := plain.server.(*stubServer)
		book := newLedger()
		tp := sdk.NewTracerProvider(sdk.WithSpanProcessor(book), sdk.WithSampler(sometimes{}))
		reader := sdkmetric.NewManualReader()
		c := onStub(t, m.others, m.crossed, WithTracerProvider(tp), WithLossHandler(func(LossEvent) {}),
			WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
		stop := make(chan struct{})
		var meddlers sync.WaitGroup
		meddlers.Go(func() { // an operator, and a collector
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(rand.IntN(300)) * time.Microsecond): // at any moment
				}
				if e := c.lookup("x"); e != nil {
					e.step(func(now time.Time, fx *lockstate.Effects) {
						e.stateLocked().Revoked(e.stateLocked().Request().ID, math.MaxInt64, now, fx)
					})
				}
				var got metricdata.ResourceMetrics
				_ = reader.Collect(context.Background(), &got)
			}
		})
		together(16, func(who int) {
			rw := c.RWMutex("x")
			for range rounds(100) {
				ctx, cancel := context.WithCancel(context.Background())
				var l *Lease
				var err error
				switch rand.IntN(9) {
				case 0:
					rw.Lock()
					rw.Unlock()
				case 1:
					rw.RLock()
					rw.RUnlock()
				case 2:
					if rw.TryLock() {
						rw.Unlock()
					}
				case 3: // unlocked by another goroutine
					rw.Lock()
					var other sync.WaitGroup
					other.Go(rw.Unlock)
					other.Wait()
				case 4: // a leased lease ended through the mutex
					if l, err = rw.LockContext(ctx); err == nil {
						rw.Unlock()
					}
				case 5:
					go cancel()
					l, _ = rw.LockContext(ctx)
				case 6:
					l, _ = rw.RLockContext(ctx)
				case 7:
					if l, err = rw.LockContext(ctx); err == nil {
						_ = l.Downgrade(ctx)
					}
				case 8:
					_ = rw.Do(ctx, func(context.Context) error { return nil })
				}
				if l != nil {
					var other sync.WaitGroup
					other.Go(func() {
						_, end := l.With(ctx)
						end()
					})
					_ = l.Unlock()
					other.Wait()
				}
				cancel()
			}
		})
		close(stop)
		meddlers.Wait()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		book.balanced(t)
	})
}
