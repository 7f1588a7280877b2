package leased_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAProviderThatIsANilPointerIsRefused(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for name, opt := range map[string]leased.Option{
			"tracer": leased.WithTracerProvider((*sdk.TracerProvider)(nil)),
			"meter":  leased.WithMeterProvider((*sdkmetric.MeterProvider)(nil)),
		} {
			var err error
			if with := panics(func() { _, err = leased.New(s.connect(t), opt) }); with != nil {
				t.Errorf("%s: panics: %v", name, with)
			} else if !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// wrapped is comparable as a type, and not as a value.
type wrapped struct {
	trace.TracerProvider
	more any
}

func TestAGlobalProviderThatCannotBeComparedMakesSpans(t *testing.T) {
	if !alone(t) {
		return
	}
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		otel.SetTracerProvider(wrapped{r, []string{"a slice"}})
		c := newClient(t, s)
		for range 2 {
			unlock(t, lock(t, c.Mutex("x")))
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if n := len(r.kept.GetSpans()); n != 6 {
			t.Errorf("%d spans", n)
		}
	})
}

// Telemetry is not what a program should fail for.
func TestAViewThatNoInstrumentFitsLeavesLocksAlone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var told []error
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { told = append(told, err) }))
		defer otel.SetErrorHandler(otel.ErrorHandlerFunc(func(error) {}))
		all := sdkmetric.NewView(sdkmetric.Instrument{Name: "*"}, sdkmetric.Stream{Aggregation: sdkmetric.AggregationLastValue{}})
		mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()), sdkmetric.WithView(all))
		unlock(t, lock(t, newClient(t, s, leased.WithMeterProvider(mp)).Mutex("x")))
		if len(told) == 0 {
			t.Error("nobody was told")
		}
	})
}

// alone runs t in a separate process, because the global providers can be set only once
// in a process. It reports whether this is that process.
func alone(t *testing.T) bool {
	t.Helper()
	const child = "LEASED_TEST_GLOBAL_PROVIDERS"
	if os.Getenv(child) != "" {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

func TestProvidersThatAreSetAfterNewAreHonored(t *testing.T) {
	if !alone(t) {
		return
	}
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		unlock(t, lock(t, c.Mutex("x"))) // without a provider
		kept := tracetest.NewInMemoryExporter()
		tp := sdk.NewTracerProvider(sdk.WithSyncer(kept))
		m := newMeter(t)
		otel.SetTracerProvider(tp)
		otel.SetMeterProvider(m)
		unlock(t, lock(t, c.Mutex("x")))
		synctest.Wait()
		if n := len(kept.GetSpans()); n != 3 {
			t.Errorf("%d spans", n)
		}
		if n := times(t, m.collect(t)["leased.wait.duration"], "leased.mode", "exclusive", "leased.wait.outcome", "acquired",
			"leased.via", "free").Count; n != 1 {
			t.Errorf("%d waits measured", n)
		}
	})
}

// showsTheHoldsOf checks that the gauge of the oldest hold shows a lock that one client holds, whichever it
// is.
func showsTheHoldsOf(t *testing.T, m meter, clients ...*leased.Client) {
	t.Helper()
	for _, c := range clients {
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Second)
		if hold := seconds(t, m.collect(t)["leased.hold.oldest"]); !near(hold, 1) {
			t.Errorf("the oldest hold: %v s", hold)
		}
		unlock(t, l)
	}
}

// Whoever asks for the global provider before it is set gets another one than those who ask later.
func TestClientsFromBeforeAndAfterAProviderIsSetShareItsGauges(t *testing.T) {
	if !alone(t) {
		return
	}
	inVirtualTime(t, func(t *testing.T, s place) {
		before := newClient(t, s)
		m := newMeter(t)
		otel.SetMeterProvider(m)
		after := newClient(t, s)
		showsTheHoldsOf(t, m, before, after)
	})
}

// The global provider can become one that a client was given before.
func TestClientsShareGaugesIfTheirProviderBecomesTheGlobalOne(t *testing.T) {
	if !alone(t) {
		return
	}
	inVirtualTime(t, func(t *testing.T, s place) {
		global := newClient(t, s)
		m := newMeter(t)
		given := newClient(t, s, leased.WithMeterProvider(m))
		otel.SetMeterProvider(m)
		showsTheHoldsOf(t, m, global, given)
	})
}

// collecting is a provider that is collected from while other packages are given their meters.
type collecting struct {
	metric.MeterProvider
	collect func()
}

func (p collecting) Meter(name string, opts ...metric.MeterOption) metric.Meter {
	if strings.HasPrefix(name, "another") {
		p.collect()
	}
	return p.MeterProvider.Meter(name, opts...)
}

// OpenTelemetry locks its placeholder while it passes on the meters that it has, one after the other. A
// collection can come in between.
func TestACollectionWhileTheProviderIsBeingSetEnds(t *testing.T) {
	if !alone(t) {
		return
	}
	rdb := redis.NewClient(redistest.Options("127.0.0.1:1")) // nothing is sent
	defer func() { _ = rdb.Close() }()
	reader := sdkmetric.NewManualReader()
	mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	for _, opts := range [][]leased.Option{nil, {leased.WithMeterProvider(mp)}} { // the second has a callback from the beginning
		c, err := leased.New(rdb, opts...)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
	for i := range 20 { // the order in which they are passed on is random
		otel.Meter(fmt.Sprint("another", i))
	}
	otel.SetMeterProvider(collecting{mp, func() {
		done := make(chan error)
		go func() { done <- reader.Collect(context.Background(), new(metricdata.ResourceMetrics)) }() // ended by the collection, waited for below
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second): // a deadlock has no event
			t.Log("the collection waits for the provider to be set, and that for the collection")
			os.Exit(1) // Close would wait as well
		}
	}})
}

// listedMeter is comparable as a type, and not as a value.
type listedMeter struct {
	metric.Meter
	more any
}

type listedMeters struct{ metric.MeterProvider }

func (p listedMeters) Meter(name string, opts ...metric.MeterOption) metric.Meter {
	return listedMeter{p.MeterProvider.Meter(name, opts...), []string{"a slice"}}
}

func TestAMeterThatCannotBeComparedMeasures(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		a, b := newClient(t, s, leased.WithMeterProvider(listedMeters{m})), newClient(t, s, leased.WithMeterProvider(listedMeters{m}))
		x, y := lock(t, a.Mutex("x")), lock(t, b.Mutex("y"))
		if n := sum(t, m.collect(t)["leased.held"]); n != 2 {
			t.Errorf("%d held", n)
		}
		unlock(t, x)
		unlock(t, y)
	})
}
