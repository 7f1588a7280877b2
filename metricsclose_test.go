package leased_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased"
)

// A short job is over before anybody collects, and closes its client first, as
// WithTracerProvider says.
func TestWhatWasCountedIsCollectedAfterClose(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, c.Mutex("x")))
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		got := m.collect(t)
		if n := sum(t, got["leased.leases"], "leased.via", "free"); n != 1 {
			t.Errorf("%d leases", n)
		}
		if n := sum(t, got["leased.commands"]); n != c.Stats().Commands {
			t.Errorf("%d commands of %d", n, c.Stats().Commands)
		}
	})
}

// A counter that falls looks like a restart of the process, and what is left of it
// like so many new leases.
func TestCountersOfSeveralClientsAddUpAndNeverFall(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		leases := func() int64 { return sum(t, m.collect(t)["leased.leases"], "leased.via", "free") }
		held := func() int64 { return sum(t, m.collect(t)["leased.held"]) }
		a, b := newClient(t, s, leased.WithMeterProvider(m)), newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, a.Mutex("x")))
		x, y := lock(t, a.Mutex("x")), lock(t, b.Mutex("y"))
		if n := leases(); n != 3 {
			t.Errorf("%d leases", n)
		}
		if n := held(); n != 2 {
			t.Errorf("%d held", n)
		}
		unlock(t, x)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if n := leases(); n != 3 {
			t.Errorf("%d leases after one client was closed", n)
		}
		if n := held(); n != 1 {
			t.Errorf("%d held after one client was closed", n)
		}
		unlock(t, y)
	})
}

func TestEveryReaderCountsTheSame(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		readers := []*sdkmetric.ManualReader{sdkmetric.NewManualReader(), sdkmetric.NewManualReader(
			sdkmetric.WithTemporalitySelector(func(sdkmetric.InstrumentKind) metricdata.Temporality { return metricdata.DeltaTemporality }))}
		mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(readers[0]), sdkmetric.WithReader(readers[1]))
		c := newClient(t, s, leased.WithMeterProvider(mp))
		total := make([]int64, len(readers))
		for range 3 {
			unlock(t, lock(t, c.Mutex("x")))
			for i, r := range readers {
				n := sum(t, meter{mp, r}.collect(t)["leased.leases"], "leased.via", "free")
				if i == 0 {
					total[i] = n
				} else {
					total[i] += max(n, 0)
				}
			}
		}
		if total[0] != 3 || total[1] != 3 {
			t.Errorf("%d leases in all", total)
		}
	})
}

// Somebody else's callback blocks the collecting, and with it the end of ours. In
// real time: the SDK waits for a sync.Mutex, during which virtual time stands.
func TestACollectionThatHangsHoldsUpShutdownNoLongerThanItsContext(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		m := newMeter(t)
		entered, freed := make(chan struct{}), make(chan struct{})
		_, err := m.Meter("other").Int64ObservableGauge("slow", metric.WithInt64Callback(func(context.Context, metric.Int64Observer) error {
			close(entered)
			<-freed
			return nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		c := newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, c.Mutex("x")))
		collected, shut := make(chan error, 1), make(chan error, 1)
		go func() { collected <- m.reader.Collect(context.Background(), &metricdata.ResourceMetrics{}) }()
		closesSoon(t, "the collecting begins", entered)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		go func() { shut <- c.Shutdown(ctx) }()
		select {
		case err := <-shut:
			if !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "metrics") {
				t.Errorf("Shutdown does not say what it did not wait for: %v", err)
			}
		case <-time.After(patience):
			t.Error("Shutdown waits for a callback that is not ours")
		}
		close(freed)
		if err := closesSoon(t, "the collecting ends", collected); err != nil {
			t.Error(err)
		}
	})
}
