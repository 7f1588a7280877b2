package leased

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// buckets cover what locks take, in seconds: a local hand-off, a round trip, a contended
// wait, a TTL, minutes.
var buckets = []float64{
	0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05,
	0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
}

// metrics measures waits and holds as they end. Everything else is read from the counters
// of Stats when the metrics are collected, and costs the locks nothing.
type metrics struct {
	client  *Client
	byName  bool // the lock's name is an attribute
	wait    metric.Float64Histogram
	hold    metric.Float64Histogram
	collect metric.Registration // nil if the callback could not be registered
	refresh ticker

	mu     sync.Mutex // guards reported of totals
	totals []total
}

// total is one series of a counter, updated on collection and at Close. The counters are
// synchronous, because an observable counter would be unregistered with its client: the
// increments not yet collected would be lost, and the series, which is the sum over all
// clients of the process, would go down by that client's share.
type total struct {
	counter  metric.Int64Counter
	labels   []metric.AddOption
	now      func() int64
	reported int64 // the value of now that the counter has been brought up to
}

func newMetrics(c *Client, o *clientOptions) *metrics {
	provider := o.meters
	if provider == nil {
		provider = otel.GetMeterProvider() // it delegates to a provider that is set later
	}
	i := instruments{provider.Meter(modulePath, metric.WithInstrumentationVersion(moduleVersion()))}
	m := &metrics{client: c, byName: o.nameInMetrics}
	m.wait = i.histogram("leased.wait.duration", "From the call for a lock until it was acquired or given up.")
	m.hold = i.histogram("leased.hold.duration", "From acquired until released or lost.")
	leases := i.counter("leased.leases", "{lease}", "Callers that were let in, by how the lock came.")
	handoffs := i.counter("leased.handoffs", "{handoff}", "Local: callers let in by or beside another of their process. Direct: releases that made another process owner.")
	losses := i.counter("leased.losses", "{lease}", "Leases that ended before their Unlock.")
	renewals := i.counter("leased.renewals", "{renewal}", "Renewals by outcome: renewed, lost, failed.")
	commands := i.counter("leased.commands", "{command}", "Commands sent to Redis.")
	waiting := i.upDownCounter("leased.waiting", "{caller}", "Callers that wait, for others or for Redis.")
	held := i.upDownCounter("leased.held", "{lease}", "Leases held.")
	oldestWait := i.gauge("leased.wait.oldest", "For how long the caller has waited that has waited the longest; 0 if none waits.")
	oldestHold := i.gauge("leased.hold.oldest", "For how long the lease has been held that has been held the longest; 0 if none is.")
	for v := range c.stats.by {
		m.count(leases, c.stats.by[v].Load, attrVia.String(lockstate.Via(v).String()))
	}
	m.count(handoffs, c.stats.by[lockstate.ViaLocal].Load, attrKind.String("local"))
	m.count(handoffs, c.stats.given.Load, attrKind.String("direct"))
	m.count(losses, c.stats.lost.Load)
	for r := range c.stats.renewals {
		m.count(renewals, c.stats.renewals[r].Load, attrOutcome.String(renewalResult(r).String()))
	}
	m.count(commands, func() int64 { return c.Stats().Commands })
	collect, err := i.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		m.update()
		m.observeLocks(o, &gauges{waiting, held, oldestWait, oldestHold})
		return nil
	}, waiting, held, oldestWait, oldestHold)
	if err != nil {
		otel.Handle(err)
	} else {
		m.collect = collect
	}
	m.refresh.init(c, refreshEvery, func(time.Time) { c.tracing.later(m.update) })
	return m
}

// refreshEvery is how often the counters are brought up to date while locks are in use.
// The callback does it at each collection, but is not called where the user's views drop
// all that it observes.
const refreshEvery = 10 * time.Second

// used is called when a lock comes into use.
func (m *metrics) used() { m.refresh.start() }

// count adds a series whose value is read by now.
func (m *metrics) count(counter metric.Int64Counter, now func() int64, attrs ...attribute.KeyValue) {
	with := []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
	m.totals = append(m.totals, total{counter: counter, labels: with, now: now})
}

// update brings the counters up to date, including those that are still 0.
func (m *metrics) update() {
	for i := range m.totals {
		t := &m.totals[i]
		m.mu.Lock()
		n := t.now()
		more := n - t.reported
		t.reported = n
		m.mu.Unlock()
		t.counter.Add(context.Background(), more, t.labels...)
	}
}

// gauges are what is observed of the locks at each collection.
type gauges struct {
	waiting, held          metric.Int64Observable
	oldestWait, oldestHold metric.Float64Observable
}

// usage is what is observed of one lock, or of all.
type usage struct {
	waiting, held          int64
	oldestWait, oldestHold time.Duration
}

func (g *gauges) observe(o metric.Observer, u *usage, name ...metric.ObserveOption) {
	o.ObserveInt64(g.waiting, u.waiting, name...)
	o.ObserveInt64(g.held, u.held, name...)
	o.ObserveFloat64(g.oldestWait, u.oldestWait.Seconds(), name...)
	o.ObserveFloat64(g.oldestHold, u.oldestHold.Seconds(), name...)
}

// observeLocks observes the callers that wait and those that hold, for each lock if the name
// is an attribute.
func (m *metrics) observeLocks(o metric.Observer, g *gauges) {
	now := time.Since(m.client.began)
	var all usage
	for _, e := range m.client.entries() {
		e.mu.Lock()
		outside, within := e.lock.Counts()
		wait, hold := e.lock.Oldest()
		e.mu.Unlock()
		one := usage{waiting: int64(outside), held: int64(within)}
		if wait >= 0 {
			one.oldestWait = now - wait
		}
		if hold >= 0 {
			one.oldestHold = now - hold
		}
		if m.byName {
			g.observe(o, &one, labels(attrLock.String(e.keys.Name)))
		}
		all.waiting, all.held = all.waiting+one.waiting, all.held+one.held
		all.oldestWait, all.oldestHold = max(all.oldestWait, one.oldestWait), max(all.oldestHold, one.oldestHold)
	}
	if !m.byName {
		g.observe(o, &all)
	}
}

// waited measures a wait. span is its span or nil; the SDK may keep the measurement as an
// exemplar that refers to it.
func (m *metrics) waited(ctx context.Context, span trace.Span, name string, c *call, r waitResult, took time.Duration) {
	if span != nil {
		ctx = trace.ContextWithSpan(ctx, span)
	}
	if !m.byName {
		m.wait.Record(ctx, took.Seconds(), waitOptions()[r][c.Via][modeIndex(c.Mode)]...)
	} else if m.wait.Enabled(ctx) {
		m.wait.Record(ctx, took.Seconds(), labels(append(waitAttributes(r, c.Via, c.Mode), attrLock.String(name))...))
	}
}

// released measures a hold.
func (m *metrics) released(h *holdRecord) {
	took := h.at.Sub(h.since)
	ctx := context.Background()
	if h.span != nil {
		ctx = trace.ContextWithSpan(ctx, h.span)
	}
	if !m.byName {
		m.hold.Record(ctx, took.Seconds(), holdOptions()[h.how][modeIndex(h.mode)]...)
	} else if m.hold.Enabled(ctx) {
		m.hold.Record(ctx, took.Seconds(), labels(append(holdAttributes(h.how, h.mode), attrLock.String(h.entry.keys.Name))...))
	}
}

// stop brings the counters up to date and unregisters the callback, and reports whether
// that was done before ctx ended. It waits for a collection under way, which may run
// callbacks of other packages.
func (m *metrics) stop(ctx context.Context) bool {
	ended := make(chan struct{})
	go func() { // ends with the collection under way; Shutdown waits for it as long as ctx lasts
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				reportPanic("an instrument", p)
			}
		}()
		m.update()
		if m.collect != nil {
			_ = m.collect.Unregister() // the SDK never returns an error, and there is nothing to do about one
		}
	}()
	return waitFor(ctx, ended)
}

// waitResult is how a wait ended, as spans and metrics name it.
type waitResult uint8

const (
	waitAcquired waitResult = iota
	waitLocked              // a Try found the lock held or waited for
	waitTimeout
	waitCanceled
	waitClosed
	waitRefused // Redis refused a command
	waitResults
)

func (r waitResult) String() string {
	return [...]string{"acquired", "locked", "timeout", "canceled", "closed", "refused"}[r]
}

// bad reports whether the wait's span gets an error status. Contention is not an error.
func (r waitResult) bad() bool { return r == waitClosed || r == waitRefused }

// waitOutcome classifies the error of a wait.
func waitOutcome(err error) waitResult {
	if err == nil {
		return waitAcquired
	}
	return refusalOutcome(err)
}

func refusalOutcome(err error) waitResult {
	refusal, ok := err.(*notAcquired) //nolint:errorlint // as wait returns it; the fast path, for thousands may give up together
	if !ok && !errors.As(err, &refusal) {
		return waitRefused
	}
	// Only why the wait ended counts, not the last error of Redis, which err matches too.
	switch why := refusal.reason; {
	case errors.Is(why, ErrLocked):
		return waitLocked
	case errors.Is(why, ErrClosed):
		return waitClosed
	case errors.Is(why, context.DeadlineExceeded):
		return waitTimeout
	case errors.Is(why, context.Canceled):
		return waitCanceled
	}
	return waitRefused
}

// holdResult is how a hold ended, as spans and metrics name it.
type holdResult uint8

const (
	holdReleased holdResult = iota
	holdLost
	holdForced      // an operator evicted it
	holdUnconfirmed // unlocked, but Redis did not confirm the release in time
	holdAbandoned   // the client was closed first
	holdResults
)

func (r holdResult) String() string {
	return [...]string{"released", "lost", "forced", "not_released", "abandoned"}[r]
}

// holdOutcome is called under the entry's mutex, so it must not call methods of err, which
// may wrap an error of user code.
func holdOutcome(c *call, err error) holdResult {
	switch {
	case c.Ended == lockstate.ByLoss:
		return holdLost
	case err == nil:
		return holdReleased
	}
	return holdUnconfirmed
}

// renewalResult is the outcome of a renewal.
type renewalResult uint8

const (
	renewalRenewed renewalResult = iota
	renewalLost
	renewalFailed
	renewalResults
)

func (r renewalResult) String() string { return [...]string{"renewed", "lost", "failed"}[r] }

// instruments makes instruments. An instrument that the provider cannot make is reported
// to otel.Handle and replaced by a no-op.
type instruments struct{ metric.Meter }

func (m instruments) histogram(name, text string) metric.Float64Histogram {
	i, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text),
		metric.WithExplicitBucketBoundaries(buckets...))
	return orNoop[metric.Float64Histogram](i, err, noop.Float64Histogram{})
}

func (m instruments) counter(name, unit, text string) metric.Int64Counter {
	i, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
	return orNoop[metric.Int64Counter](i, err, noop.Int64Counter{})
}

func (m instruments) upDownCounter(name, unit, text string) metric.Int64ObservableUpDownCounter {
	i, err := m.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
	return orNoop[metric.Int64ObservableUpDownCounter](i, err, noop.Int64ObservableUpDownCounter{})
}

func (m instruments) gauge(name, text string) metric.Float64ObservableGauge {
	i, err := m.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(text))
	return orNoop[metric.Float64ObservableGauge](i, err, noop.Float64ObservableGauge{})
}

// orNoop returns i, or none if the provider returned no instrument, and reports err.
func orNoop[T any](i T, err error, none T) T {
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

// The options of all measurements without the lock's name, built once.
var (
	waitOptions = sync.OnceValue(func() *[waitResults][lockstate.Vias][2][]metric.RecordOption {
		var all [waitResults][lockstate.Vias][2][]metric.RecordOption
		for r := range waitResults {
			for v := range lockstate.Vias {
				for i, m := range [...]protocol.Mode{protocol.Exclusive, protocol.Shared} {
					all[r][v][i] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(waitAttributes(r, v, m)...))}
				}
			}
		}
		return &all
	})
	holdOptions = sync.OnceValue(func() *[holdResults][2][]metric.RecordOption {
		var all [holdResults][2][]metric.RecordOption
		for r := range holdResults {
			for i, m := range [...]protocol.Mode{protocol.Exclusive, protocol.Shared} {
				all[r][i] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(holdAttributes(r, m)...))}
			}
		}
		return &all
	})
)

func waitAttributes(r waitResult, v lockstate.Via, m protocol.Mode) []attribute.KeyValue {
	all := []attribute.KeyValue{attrMode.String(m.String()), attrOutcome.String(r.String())}
	if r == waitAcquired {
		all = append(all, attrVia.String(v.String()))
	}
	return all
}

func holdAttributes(r holdResult, m protocol.Mode) []attribute.KeyValue {
	return []attribute.KeyValue{attrMode.String(m.String()), attrOutcome.String(r.String())}
}

// modeIndex returns the index of a mode in the arrays of options.
func modeIndex(m protocol.Mode) int {
	if m == protocol.Shared {
		return 1
	}
	return 0
}
