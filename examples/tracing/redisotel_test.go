package main

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/extra/redisotel/v9"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/leasedtest"
)

// What docs/telemetry.md says of redisotel: its spans are below ours, ours are below none of its, and with
// WithDBStatement(false) they have neither scripts nor the names of locks.
func TestSpansOfRedisotelAreChildrenOfTheWaitAndTheHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewInMemoryExporter()
		provider := trace.NewTracerProvider(trace.WithSyncer(spans))
		rdb := leasedtest.NewServer(t).Redis()
		if err := redisotel.InstrumentTracing(rdb, redisotel.WithTracerProvider(provider), redisotel.WithDBStatement(false)); err != nil {
			t.Fatal(err)
		}
		if err := redisotel.InstrumentMetrics(rdb, redisotel.WithMeterProvider(metric.NewMeterProvider())); err != nil {
			t.Fatal(err)
		}
		c, err := leased.New(rdb, leased.WithTTL(3*time.Second), leased.WithTracerProvider(provider))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })

		ctx, request := provider.Tracer("test").Start(t.Context(), "request")
		lease, err := c.Mutex("invoice:42").LockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second) // it is renewed after a third of its TTL
		if _, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error { return p.Set(ctx, "user", 1, 0).Err() }); err != nil {
			t.Fatal(err)
		}
		if err := lease.Unlock(); err != nil {
			t.Fatal(err)
		}
		request.End()
		if err := provider.ForceFlush(context.Background()); err != nil {
			t.Fatal(err)
		}

		all := spans.GetSpans()
		byID := map[string]tracetest.SpanStub{}
		for _, s := range all {
			byID[s.SpanContext.SpanID().String()] = s
		}
		below := map[string]int{}
		for _, s := range all {
			parent := byID[s.Parent.SpanID().String()].Name
			switch {
			case strings.HasPrefix(s.Name, "leased."):
				if parent != "request" && !strings.HasPrefix(parent, "leased.") {
					t.Errorf("%s is below %q", s.Name, parent)
				}
			case strings.Contains(s.Name, "eval"):
				below[parent+" > "+strings.TrimSuffix(s.Name, "sha")]++
			case strings.HasPrefix(s.Name, "redis.pipeline set"):
				below[parent+" > "+s.Name]++
			}
			for _, a := range s.Attributes {
				if a.Key == "db.statement" {
					t.Errorf("%s has the statement %s", s.Name, a.Value.String())
				}
			}
		}
		for _, want := range []string{"leased.wait > eval", "leased.hold > redis.pipeline eval", "leased.hold > eval", "request > redis.pipeline set"} {
			if below[want] == 0 {
				t.Errorf("there is no %s among %v", want, below)
			}
		}
	})
}
