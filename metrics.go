package leased

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
)

// buckets suit what locks take: a local hand-off, a round trip, a contended wait,
// a TTL, minutes. In seconds.
var buckets = []float64{
	0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05,
	0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
}

// metrics measures waits and holds as they end; all else is read from the
// counters of Stats when somebody collects, and costs the locks nothing.
type metrics struct {
	client  *Client
	byName  bool // the lock's name is an attribute
	wait    metric.Float64Histogram
	hold    metric.Float64Histogram
	collect metric.Registration // nil if it failed

	mu     sync.Mutex // guards told of totals
	totals []total
}

// total is one series of a counter. What it has grown by is told when somebody
// collects and at Close: an observable counter would go with its client, before
// the last was collected, and take its share of the sum that those of all clients
// are.
type total struct {
	counter metric.Int64Counter
	labels  []metric.AddOption
	now     func() int64
	told    int64
}

func newMetrics(c *Client, o *clientOptions) *metrics {
	provider := o.meters
	if provider == nil {
		provider = otel.GetMeterProvider() // which passes on to one that is set later
	}
	k := kit{provider.Meter(modulePath, metric.WithInstrumentationVersion(moduleVersion()))}
	m := &metrics{client: c, byName: o.nameInMetrics}
	m.wait = k.histogram("leased.wait.duration", "From the call for a lock until it was acquired or given up.")
	m.hold = k.histogram("leased.hold.duration", "From acquired until released or lost.")
	leases := k.counter("leased.leases", "{lease}", "Callers that were let in, by how the lock came.")
	handoffs := k.counter("leased.handoffs", "{handoff}", "Local: callers let in by or beside another of their process. Direct: releases that made another process owner.")
	losses := k.counter("leased.losses", "{lease}", "Leases that ended before their Unlock.")
	renewals := k.counter("leased.renewals", "{renewal}", "Renewals by outcome: renewed, lost, failed.")
	commands := k.counter("leased.commands", "{command}", "Commands sent to Redis.")
	waiting := k.level("leased.waiting", "{caller}", "Callers that wait, for others or for Redis.")
	held := k.level("leased.held", "{lease}", "Leases held.")
	for v := range c.stats.by {
		m.count(leases, c.stats.by[v].Load, attrVia.String(via(v).String()))
	}
	m.count(handoffs, c.stats.by[viaLocal].Load, attrKind.String("local"))
	m.count(handoffs, c.stats.given.Load, attrKind.String("direct"))
	m.count(losses, c.stats.lost.Load)
	for r := range c.stats.renewals {
		m.count(renewals, c.stats.renewals[r].Load, attrOutcome.String(renewalResult(r).String()))
	}
	m.count(commands, func() int64 { return c.Stats().Commands })
	collect, err := k.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		m.tell()
		m.observeLocks(o, waiting, held)
		return nil
	}, waiting, held)
	if err != nil {
		otel.Handle(err)
	} else {
		m.collect = collect
	}
	return m
}

func (m *metrics) count(counter metric.Int64Counter, now func() int64, attrs ...attribute.KeyValue) {
	with := []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
	m.totals = append(m.totals, total{counter: counter, labels: with, now: now})
}

// tell brings the counters up to date, also those that stand at 0.
func (m *metrics) tell() {
	for i := range m.totals {
		t := &m.totals[i]
		m.mu.Lock()
		n := t.now()
		more := n - t.told
		t.told = n
		m.mu.Unlock()
		t.counter.Add(context.Background(), more, t.labels...)
	}
}

// observeLocks counts callers, those of each lock if names are asked for.
func (m *metrics) observeLocks(o metric.Observer, waiting, held metric.Int64Observable) {
	var out, in int64
	for _, e := range m.client.entries() {
		e.mu.Lock()
		w, h := int64(e.lock.waiting.n), int64(e.lock.inside.n)
		e.mu.Unlock()
		if m.byName {
			name := labels(attrLock.String(e.keys.name))
			o.ObserveInt64(waiting, w, name)
			o.ObserveInt64(held, h, name)
		}
		out, in = out+w, in+h
	}
	if !m.byName {
		o.ObserveInt64(waiting, out)
		o.ObserveInt64(held, in)
	}
}

// kit makes instruments. What a provider or its views cannot make is told to
// OpenTelemetry's error handler, and measured by nobody: locks do without.
type kit struct{ metric.Meter }

func (k kit) histogram(name, text string) metric.Float64Histogram {
	i, err := k.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text),
		metric.WithExplicitBucketBoundaries(buckets...))
	return sound[metric.Float64Histogram](i, err, noop.Float64Histogram{})
}

func (k kit) counter(name, unit, text string) metric.Int64Counter {
	i, err := k.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
	return sound[metric.Int64Counter](i, err, noop.Int64Counter{})
}

func (k kit) level(name, unit, text string) metric.Int64ObservableUpDownCounter {
	i, err := k.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
	return sound[metric.Int64ObservableUpDownCounter](i, err, noop.Int64ObservableUpDownCounter{})
}

// sound returns i, or none in its place if there is no i.
func sound[T any](i T, err error, none T) T {
	if err != nil {
		otel.Handle(err)
	}
	if any(i) == nil {
		return none
	}
	return i
}

func labels(attrs ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributes(attrs...)
}

// The options of all measurements without a name, built once.
var (
	waitOptions = sync.OnceValue(func() *[waitResults][vias][2][]metric.RecordOption {
		var all [waitResults][vias][2][]metric.RecordOption
		for r := range waitResults {
			for v := range vias {
				for i, m := range [...]mode{exclusive, shared} {
					all[r][v][i] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(waitAttributes(r, v, m)...))}
				}
			}
		}
		return &all
	})
	holdOptions = sync.OnceValue(func() *[holdResults][2][]metric.RecordOption {
		var all [holdResults][2][]metric.RecordOption
		for r := range holdResults {
			for i, m := range [...]mode{exclusive, shared} {
				all[r][i] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(holdAttributes(r, m)...))}
			}
		}
		return &all
	})
)

func waitAttributes(r waitResult, v via, m mode) []attribute.KeyValue {
	all := []attribute.KeyValue{attrMode.String(m.String()), attrOutcome.String(r.String())}
	if r == waitAcquired {
		all = append(all, attrVia.String(v.String()))
	}
	return all
}

func holdAttributes(r holdResult, m mode) []attribute.KeyValue {
	return []attribute.KeyValue{attrMode.String(m.String()), attrOutcome.String(r.String())}
}

// index is the mode's place in an array.
func (m mode) index() int {
	if m == shared {
		return 1
	}
	return 0
}

// waited measures a wait. span is its span, if it has one: the measurement may be
// kept as that span's exemplar.
func (m *metrics) waited(ctx context.Context, span trace.Span, name string, c *caller, r waitResult, took time.Duration) {
	if span != nil {
		ctx = trace.ContextWithSpan(ctx, span)
	}
	if !m.byName {
		m.wait.Record(ctx, took.Seconds(), waitOptions()[r][c.via][c.mode.index()]...)
	} else if m.wait.Enabled(ctx) {
		m.wait.Record(ctx, took.Seconds(), labels(append(waitAttributes(r, c.via, c.mode), attrLock.String(name))...))
	}
}

// released measures a hold.
func (m *metrics) released(h *released) {
	took := h.at.Sub(h.since)
	ctx := context.Background()
	if h.span != nil {
		ctx = trace.ContextWithSpan(ctx, h.span)
	}
	if !m.byName {
		m.hold.Record(ctx, took.Seconds(), holdOptions()[h.how][h.mode.index()]...)
	} else if m.hold.Enabled(ctx) {
		m.hold.Record(ctx, took.Seconds(), labels(append(holdAttributes(h.how, h.mode), attrLock.String(h.entry.keys.name))...))
	}
}

// stop ends the collecting, and reports whether that was done before ctx ended. It
// waits for a collection under way, which calls others' callbacks.
func (m *metrics) stop(ctx context.Context) bool {
	ended := make(chan struct{})
	go func() { // ended by the collection's end, waited for by Shutdown as long as ctx lasts
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				reportPanic("an instrument", p)
			}
		}()
		m.tell()
		if m.collect != nil {
			_ = m.collect.Unregister() // it never fails in the SDK, and nothing could be done
		}
	}()
	return endsBefore(ctx, ended)
}
