package leased_test

import (
	"context"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

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
		b.Run("call=LockContext/otel="+otel.name, func(b *testing.B) {
			mu, ctx := c.Mutex("x"), context.Background()
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
		})
		_ = c.Close() // or it would keep the lock
	}
}
