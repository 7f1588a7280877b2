package leased

import (
	"context"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/clocktest"
)

// Spans are on the wall clock, and last for as long as a sleep of the machine has them last. But none ends before
// it begins.
func TestASpanThatTheWallClockWasSetBackInLastsForItsTime(t *testing.T) {
	const hold = time.Second
	for by, want := range map[time.Duration]time.Duration{
		0:          hold,
		-time.Hour: hold,
		time.Hour:  hold + time.Hour,
	} {
		done := tracetest.NewInMemoryExporter()
		c := onStub(t, 0, 0, WithTracerProvider(sdk.NewTracerProvider(sdk.WithSyncer(done))))
		began := time.Now()
		_, span := c.tracing.tracer().Start(context.Background(), spanHold, trace.WithTimestamp(began))
		delivered := make(chan struct{})
		c.tracing.endSpan(span, clocktest.Asleep(t, began.Add(hold), by), delivered)
		<-delivered
		for _, s := range done.GetSpans() {
			if got := s.EndTime.Round(0).Sub(s.StartTime.Round(0)); got != want {
				t.Errorf("the clock was set by %v, and the span lasts %v, want %v", by, got, want)
			}
		}
		if n := len(done.GetSpans()); n != 1 {
			t.Errorf("%d spans ended", n)
		}
	}
}
