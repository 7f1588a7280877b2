package leased_test

import (
	"context"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

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
	if err := b.ForceUnlock(background, "forced"); err != nil {
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
