package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// telemetry is a set of names, each with what is said of it: of a span or an event nothing, of
// an attribute what carries it, of a metric its kind and unit.
type telemetry struct {
	spans, events, attributes, metrics map[string][]string
	values                             map[string]string // of attributes: the texts seen, or the cell that lists them
}

func newTelemetry() *telemetry {
	return &telemetry{map[string][]string{}, map[string][]string{}, map[string][]string{}, map[string][]string{}, map[string]string{}}
}

// note adds more to the sorted set under a name.
func note(all map[string][]string, name string, more ...string) {
	set := append(all[name], more...)
	slices.Sort(set)
	all[name] = slices.Compact(set)
}

// listed reads the tables of docs/telemetry.md.
func listed(t *testing.T) *telemetry {
	t.Helper()
	page := newTelemetry()
	name := regexp.MustCompile("`([^`]+)`")
	part := ""
	for line := range strings.SplitSeq(readText(t, "docs/telemetry.md"), "\n") {
		if title, ok := strings.CutPrefix(line, "## "); ok {
			part = title
		}
		cells := strings.Split(line, " | ")
		if !strings.HasPrefix(line, "| `") || len(cells) < 3 {
			continue
		}
		first := name.FindStringSubmatch(cells[0])[1]
		var second []string
		for _, m := range name.FindAllStringSubmatch(cells[1], -1) {
			second = append(second, m[1])
		}
		switch part {
		case "Spans":
			note(page.spans, first)
		case "Events":
			note(page.events, first, second...)
		case "Attributes":
			note(page.attributes, first, second...)
			page.values[first] = cells[2]
		case "Metrics":
			note(page.metrics, first, cells[1], name.FindStringSubmatch(cells[2])[1])
		}
	}
	return page
}

// emitted is what the SDK got.
func emitted(t *testing.T, r recorder, m meter) *telemetry {
	t.Helper()
	got := newTelemetry()
	carries := func(what string, attrs []attribute.KeyValue) {
		for _, a := range attrs {
			note(got.attributes, string(a.Key), what)
			if a.Value.Type() == attribute.STRING {
				got.values[string(a.Key)] += "\n" + a.Value.AsString()
			}
		}
	}
	for _, span := range r.kept.GetSpans() {
		if span.InstrumentationScope.Name != "github.com/leasedmutex/leased" {
			continue
		}
		note(got.spans, span.Name)
		carries(span.Name, span.Attributes)
		for _, ev := range span.Events {
			note(got.events, ev.Name, span.Name)
			carries(ev.Name, ev.Attributes)
		}
	}
	for name, one := range m.collect(t) {
		kind := "gauge"
		switch data := one.Data.(type) {
		case metricdata.Histogram[float64]:
			kind = "histogram"
		case metricdata.Sum[int64]:
			if data.IsMonotonic {
				kind = "counter"
			}
		case metricdata.Histogram[int64]:
			kind = "histogram"
		}
		note(got.metrics, name, kind, one.Unit)
		for _, set := range attributeSets(t, one) {
			carries(name, set.ToSlice())
		}
	}
	return got
}

// A dashboard is made from the page, so what the page names must exist, and what exists be named.
func TestTheTelemetryPageListsWhatIsEmitted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r, m := newRecorder(t), newMeter(t)
		s.Prefix = "app:"
		opts := []leased.Option{leased.WithTracerProvider(r), leased.WithMeterProvider(m), leased.WithLockNameInMetrics(),
			leased.WithSlowThreshold(20 * time.Second), leased.WithLossHandler(func(leased.LossEvent) {}), leased.WithUncontendedSpans()}
		a, b := newClient(t, s, opts...), newClient(t, s, opts...)
		warm(t, s, a, b)
		everything(t, s, a, b)
		onThreeServers(t, append(opts, leased.WithKeyPrefix(s.Prefix)))
		got, page := emitted(t, r, m), listed(t)
		for what, sets := range map[string][2]map[string][]string{
			"span": {got.spans, page.spans}, "event": {got.events, page.events},
			"attribute": {got.attributes, page.attributes}, "metric": {got.metrics, page.metrics},
		} {
			if len(sets[1]) == 0 {
				t.Errorf("the page has no table of each %s, or it is no longer found", what)
			}
			for _, name := range slices.Sorted(maps.Keys(sets[0])) {
				if said, ok := sets[1][name]; !ok {
					t.Errorf("%s %s is emitted and not on the page", what, name)
				} else if !slices.Equal(said, sets[0][name]) {
					t.Errorf("%s %s: emitted with %q, the page says %q", what, name, sets[0][name], said)
				}
			}
			for _, name := range slices.Sorted(maps.Keys(sets[1])) {
				if _, ok := sets[0][name]; !ok {
					t.Errorf("%s %s is on the page and not emitted", what, name)
				}
			}
		}
		for _, key := range []string{"leased.mode", "leased.wait.outcome", "leased.hold.outcome", "leased.renewal.outcome",
			"leased.via", "leased.server.state", "leased.kind", "leased.command", "leased.inbox", "error.type"} {
			for v := range strings.SplitSeq(strings.TrimSpace(got.values[key]), "\n") {
				if outcome := key == "error.type" && strings.Contains(page.values["leased.wait.outcome"]+page.values["leased.hold.outcome"], "`"+v+"`"); !outcome &&
					!strings.Contains(page.values[key], "`"+v+"`") {
					t.Errorf("%s is %q, which is not on the page", key, v)
				}
			}
		}
	})
}

// everything has two clients do what each name is about.
func everything(t *testing.T, s place, a, b *leased.Client) {
	t.Helper()
	background := context.Background()
	soon := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(background, d)
		t.Cleanup(cancel)
		return ctx
	}
	// In turn here, and by another process, which waits for long.
	x := a.Mutex("x")
	held := lock(t, x)
	here, there := locking(t, x), locking(t, b.Mutex("x"))
	time.Sleep(30 * time.Second)
	if _, err := b.Mutex("x").LockContext(soon(time.Second)); err == nil {
		t.Error("two inside")
	}
	unlock(t, held)
	for range 2 {
		select { // in whichever order
		case l := <-here:
			unlock(t, l)
		case l := <-there:
			unlock(t, l)
		}
	}

	y := a.RWMutex("y")
	writer := take(t, y.LockContext)
	reading := make(chan *leased.Lease)
	go func() { reading <- take(t, b.RWMutex("y").RLockContext) }()
	time.Sleep(time.Second)
	downgrade(t, writer)
	unlock(t, writer)
	unlock(t, <-reading)

	// Redis fails under a lease and a wait, which last longer, and at the release of another.
	lost, kept := lock(t, a.Mutex("lost")), lock(t, a.Mutex("kept"))
	s.Mini.SetError("LOADING Redis is loading the dataset in memory")
	if _, err := b.Mutex("z").LockContext(soon(time.Second)); err == nil {
		t.Error("locked")
	}
	if err := kept.Unlock(); err == nil {
		t.Error("released")
	}
	time.Sleep(time.Minute)
	s.Mini.SetError("NOAUTH Authentication required.")
	if _, err := b.Mutex("z").LockContext(background); err == nil {
		t.Error("locked")
	}
	s.Mini.SetError("")
	_ = lost.Unlock()
	time.Sleep(time.Minute)

	forced := lock(t, a.Mutex("forced"))
	if _, err := b.Inspect(background, "forced"); err != nil {
		t.Error(err)
	}
	if _, err := b.ForceUnlock(background, "forced"); err != nil {
		t.Error(err)
	}
	synctest.Wait()
	_ = forced.Unlock()

	// Held, and waited for, when the metrics are collected.
	held = lock(t, x)
	late := locking(t, b.Mutex("x"))
	time.Sleep(time.Second)
	t.Cleanup(func() {
		unlock(t, held)
		unlock(t, <-late)
	})
}

// onThreeServers has a client of a quorum hold a lock, and wait for it in vain.
func onThreeServers(t *testing.T, opts []leased.Option) {
	t.Helper()
	var rdbs []redis.UniversalClient
	for range 3 {
		rdbs = append(rdbs, redistest.MiniClient(t, redistest.Mini(t)))
	}
	c, err := leased.NewQuorum(rdbs, append(opts, leased.WithLogger(slog.New(slog.DiscardHandler)))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	l := lock(t, c.Mutex("x"))
	if _, err := c.Mutex("x").TryLockContext(context.Background()); err == nil {
		t.Error("locked")
	}
	unlock(t, l)
}

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

// What was counted is added when there is somebody to count it.
func TestWhatWasCountedBeforeAProviderIsSetIsNotLost(t *testing.T) {
	if !alone(t) {
		return
	}
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		m := newMeter(t)
		otel.SetMeterProvider(m)
		if n := sum(t, m.collect(t)["leased.leases"], "leased.via", "free"); n != 1 {
			t.Errorf("%d leases", n)
		}
		unlock(t, l)
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

// What a goroutine profile says of a client's goroutines and of those that wait for locks.

// goroutines returns the groups of a goroutine profile in whose stack the function is.
func goroutines(t *testing.T, function string) (groups []string) {
	t.Helper()
	var text strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
		t.Fatal(err)
	}
	for group := range strings.SplitSeq(text.String(), "\n\n") {
		if strings.Contains(group, function) {
			groups = append(groups, group)
		}
	}
	return groups
}

// labeled runs f with a profiler label that no other test uses.
func labeled(value string, f func(ctx context.Context)) {
	pprof.Do(context.Background(), pprof.Labels("request", value), f)
}

// haveNoLabel checks that there are goroutines in each of the functions, and that none has the profiler label.
func haveNoLabel(t *testing.T, value string, functions ...string) {
	t.Helper()
	for _, function := range functions {
		groups := goroutines(t, function)
		if len(groups) == 0 {
			t.Errorf("no goroutine in %s", function)
		}
		for _, group := range groups {
			if strings.Contains(group, value) {
				t.Errorf("%s has the label of a caller:\n%s", function, group)
			}
		}
	}
}

// A profile by labels is for finding out which request costs what. The first one to lock would
// be charged with the client's goroutines for as long as the client lives.
func TestGoroutinesOfTheClientHaveNoLabelsOfTheFirstCaller(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		blocked := make(chan struct{})
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) { <-blocked }))
		labeled("first", func(context.Context) {
			l := lock(t, c.Mutex("x"))
			time.Sleep(time.Second)
			s.rdb.Del(context.Background(), "x")
			if err := l.Check(context.Background()); err == nil {
				t.Error("the lease is not lost")
			}
			_ = l.Unlock()
		})
		synctest.Wait()
		haveNoLabel(t, "first", "(*watchdog).run", "(*inbox).run", "(*asyncQueue")
		close(blocked)
	})
}

func TestGoroutinesOfAQuorumHaveNoLabelsOfACaller(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		unlock(t, lock(t, c.Mutex("x")))
		servers[0].die()
		labeled("first", func(context.Context) {
			for range 3 { // it is known to be away by then
				time.Sleep(time.Second)
				unlock(t, lock(t, c.Mutex("x")))
			}
		})
		synctest.Wait()
		haveNoLabel(t, "first", "(*Server).sender", "(*member).pingUntilAnswered")
	})
}

func TestGoroutinesThatWaitAreLabeledWithTheLocksNameIfAskedFor(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, on := range []bool{false, true} {
			var opts []leased.Option
			if on {
				opts = append(opts, leased.WithProfileLabels())
			}
			c := newClient(t, s, opts...)
			mu, rw := c.Mutex("stock"), c.RWMutex("ledger")
			held, written := lock(t, mu), take(t, rw.LockContext)
			var after []string
			done := make(chan struct{})
			go func() {
				defer close(done)
				labeled("order", func(ctx context.Context) {
					l, err := rw.RLockContext(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					after = goroutines(t, "TestGoroutinesThatWait")
					unlock(t, l)
				})
			}()
			entered := locking(t, mu)
			synctest.Wait()
			var waiting string
			for _, group := range goroutines(t, "(*handle).wait") {
				waiting += group
			}
			for _, label := range []string{`"leased.lock":"stock"`, `"leased.lock":"ledger"`, `"leased.mode":"shared"`} {
				if got := strings.Contains(waiting, label); got != on {
					t.Errorf("with labels: %v; %s is there: %v:\n%s", on, label, got, waiting)
				}
			}
			unlock(t, held)
			unlock(t, <-entered)
			unlock(t, written)
			<-done
			if all := strings.Join(after, "\n"); strings.Contains(all, "leased.lock") || !strings.Contains(all, `"request":"order"`) {
				t.Errorf("after the wait the goroutine's labels are not those of its context:\n%s", all)
			}
		}
	})
}
