package leased

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// buckets cover the durations, in seconds, of what locks do: a local hand-off, a round trip, a
// contended wait, a TTL, minutes.
var buckets = []float64{
	0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05,
	0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
}

// metrics measures waits and holds as they end, on a quorum also how many servers stood behind a hold, and
// commands as they are answered. Everything else is read from the counters of Stats when the metrics are
// collected, and every 10 s, which costs the locks nothing.
type metrics struct {
	client  *Client
	wait    metric.Float64Histogram
	hold    metric.Float64Histogram
	command metric.Float64Histogram
	behind  metric.Int64Histogram
	more    []attribute.KeyValue // that every series has
	options *measureOptions
	gauges  *gauges // once the client is complete, those that it shares
	refresh ticker

	mu     sync.Mutex // guards total.reported and inUse
	totals []total
	inUse  map[string]time.Time // if locks have labels: when each was last seen in use
}

// total is one series of a counter, updated on collection, every 10 s and at Close. The counters are
// synchronous, because an observable counter would be unregistered with its client. Then the
// increments not yet collected would be lost, and the series, which is the sum over all clients of
// the process, would go down by that client's share.
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
	i := instruments{meterOf(provider)}
	m := &metrics{client: c, more: o.attributes, options: plainOptions(), inUse: map[string]time.Time{}}
	if len(m.more) > 0 {
		m.options = newMeasureOptions(m.more)
	}
	m.wait = i.histogram("leased.wait.duration", "From the call for a lock until it was acquired or given up.")
	m.hold = i.histogram("leased.hold.duration", "From acquired until released or lost.")
	m.command = i.histogram("leased.command.duration", "Round trips of commands to Redis, by command, and by what failed.")
	m.behind = i.serverHistogram("leased.hold.servers", "Servers of a quorum that stood behind a lease just before its Unlock.")
	leases := i.counter("leased.leases", "{lease}", "Leases given to callers, by how they got the lock.")
	handoffs := i.counter("leased.handoffs", "{handoff}", "Local: callers let in by or beside another of their process. Direct: processes that a command, most often a release, made owners.")
	losses := i.counter("leased.losses", "{lease}", "Leases that ended before their Unlock.")
	renewals := i.counter("leased.renewals", "{renewal}", "Renewals by outcome: renewed, lost, failed.")
	commands := i.counter("leased.commands", "{command}", "Commands sent to Redis, or that could not be sent.")
	m.gauges = &gauges{
		provider:   provider,
		meter:      i.Meter,
		waiting:    i.upDownCounter("leased.waiting", "{caller}", "Callers that wait, for others or for Redis."),
		held:       i.upDownCounter("leased.held", "{lease}", "Leases held."),
		clients:    i.upDownCounter("leased.clients", "{client}", "Clients, by how messages of other processes reach them: subscribed, connecting, polling, unused."),
		servers:    i.upDownCounter("leased.servers", "{server}", "Servers of quorums, by whether they answer and may vote, for each client."),
		oldestWait: i.gauge("leased.wait.oldest", "How long the longest-waiting caller has waited so far; 0 if none waits."),
		oldestHold: i.gauge("leased.hold.oldest", "How long the longest-held lease has been held so far; 0 if none is."),
	}
	for v := range c.stats.by {
		m.addSeries(leases, c.stats.by[v].Load, attrVia.String(lockstate.Via(v).String()))
	}
	m.addSeries(handoffs, c.stats.by[lockstate.ViaLocal].Load, attrKind.String("local"))
	m.addSeries(handoffs, c.stats.given.Load, attrKind.String("direct"))
	m.addSeries(losses, c.stats.lost.Load)
	for r := range c.stats.renewals {
		m.addSeries(renewals, c.stats.renewals[r].Load, attrRenewalOutcome.String(renewalResult(r).String()))
	}
	m.addSeries(commands, func() int64 { return c.server.Commands() }) // there is no server yet
	m.refresh.init(c, refreshEvery, func(time.Time) { c.tracing.later(m.update) })
	return m
}

func meterOf(provider metric.MeterProvider) metric.Meter {
	return provider.Meter(modulePath, metric.WithInstrumentationVersion(moduleVersion()))
}

// refreshEvery is how often the counters are brought up to date while locks are in use. The
// callback also does that at each collection, but is not called if the user's views drop all that
// it observes.
const refreshEvery = 10 * time.Second

// noteUse is called when a lock comes into use.
func (m *metrics) noteUse() { m.refresh.start() }

// addSeries adds a series whose value is read by now.
func (m *metrics) addSeries(counter metric.Int64Counter, now func() int64, attrs ...attribute.KeyValue) {
	with := []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(slices.Concat(attrs, m.more)...))}
	m.totals = append(m.totals, total{counter: counter, labels: with, now: now})
}

// update brings the counters up to date, including those that are still 0. Before the program has set a global
// provider, nothing keeps what is added.
func (m *metrics) update() {
	if placeholder(m.gauges.provider) && otel.GetMeterProvider() == m.gauges.provider {
		return
	}
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

// gauges are the instruments that are observed at each collection. The clients of a meter share them,
// with one callback, because an SDK keeps only the last of several observations with the same
// attributes: if each client observed its own oldest lease, the other leases would not be seen.
type gauges struct {
	provider                        metric.MeterProvider
	meter                           metric.Meter
	delegate                        atomic.Pointer[metric.Meter] // see currentMeter
	waiting, held, clients, servers metric.Int64Observable
	oldestWait, oldestHold          metric.Float64Observable

	// Guarded by sharedGauges.mu:
	members []*metrics          // of the clients that are not closed
	collect metric.Registration // of the callback; nil if the client's own gauges are not used
}

// sharedGauges are the gauges that have members. Their callbacks are registered.
var sharedGauges struct {
	mu  sync.Mutex
	all []*gauges
}

// register has the gauges of the client observed, together with those of the other clients of its
// meter. It is called once the client is complete, because the metrics may be collected at once.
//
// Only gauges whose callback is registered are joined, and observed, because it may be refused, or panic. So
// clients of one meter that are made at once each register a callback, and all but the first give theirs up again.
func (m *metrics) register() {
	sharedGauges.mu.Lock()
	joined := m.joinLocked()
	sharedGauges.mu.Unlock()
	if joined {
		return
	}
	own := m.gauges
	collect, err := own.meter.RegisterCallback(own.observe, own.waiting, own.held, own.oldestWait, own.oldestHold, own.clients, own.servers)
	sharedGauges.mu.Lock()
	if joined = m.joinLocked(); !joined && err == nil {
		own.collect, own.members = collect, []*metrics{m}
		sharedGauges.all = append(sharedGauges.all, own)
	}
	sharedGauges.mu.Unlock()
	switch { // what follows is user code
	case err != nil:
		otel.Handle(err)
	case joined:
		_ = collect.Unregister()
	}
}

// joinLocked adds the client to the gauges that its meter has, and reports whether there are any.
func (m *metrics) joinLocked() bool {
	for _, g := range sharedGauges.all {
		if sameMeter(g.meter, m.gauges.meter) {
			g.members = append(g.members, m)
			m.gauges = g
			return true
		}
	}
	return false
}

// sameMeter reports whether two meters are one. Those of a user's own type need not be comparable,
// and == would panic.
func sameMeter(a, b metric.Meter) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// leave ends the observation of a client. If it is the last one, the callback is unregistered, which
// waits for a collection under way.
func (g *gauges) leave(m *metrics) {
	sharedGauges.mu.Lock()
	g.members = slices.DeleteFunc(g.members, func(each *metrics) bool { return each == m })
	over := len(g.members) == 0
	if over {
		sharedGauges.all = slices.DeleteFunc(sharedGauges.all, func(each *gauges) bool { return each == g })
	}
	sharedGauges.mu.Unlock()
	if over && g.collect != nil {
		_ = g.collect.Unregister() // the SDK never returns an error, and there is nothing to do about one
	}
}

// currentMeter returns the meter that the gauges belong to now. If they were made before the program set a
// global provider, that is the one of that provider, once it is set.
//
// The API's placeholder must not be asked while the provider is being set. It is locked meanwhile, and
// waits for the collection under way, which waits for this callback.
func (g *gauges) currentMeter() metric.Meter {
	if m := g.delegate.Load(); m != nil {
		return *m
	}
	if !placeholder(g.provider) || otel.GetMeterProvider() == g.provider { // the latter changes last
		return g.meter
	}
	m := meterOf(g.provider)
	g.delegate.Store(&m)
	return m
}

// observe is the callback. A client that is closed meanwhile may be observed once more.
func (g *gauges) observe(_ context.Context, o metric.Observer) error {
	sharedGauges.mu.Lock()
	all := slices.Clone(sharedGauges.all)
	sharedGauges.mu.Unlock()
	own := g.currentMeter()
	all = slices.DeleteFunc(all, func(other *gauges) bool { return other != g && !sameMeter(other.currentMeter(), own) })
	if len(all) == 0 || all[0] != g {
		return nil // the first one observes the clients of all
	}
	sharedGauges.mu.Lock()
	var members []*metrics
	for _, each := range all {
		members = append(members, each.members...)
	}
	sharedGauges.mu.Unlock()
	locks := map[attribute.Distinct]*labeledUsage{}
	for _, m := range members {
		m.update()
		m.addLocks(locks)
		m.observeInbox(o, g.clients)
		m.observeServers(o, g.servers)
	}
	oldest := slices.SortedFunc(maps.Values(locks), func(a, b *labeledUsage) int {
		return cmp.Compare(max(b.oldestWait, b.oldestHold), max(a.oldestWait, a.oldestHold))
	})
	for _, u := range oldest { // they come first, because an SDK keeps a limited number of series
		with := metric.WithAttributeSet(u.labels)
		o.ObserveInt64(g.waiting, u.waiting, with)
		o.ObserveInt64(g.held, u.held, with)
		o.ObserveFloat64(g.oldestWait, u.oldestWait.Seconds(), with)
		o.ObserveFloat64(g.oldestHold, u.oldestHold.Seconds(), with)
	}
	// Where an SDK has no room, or a view drops a label, it puts series together and keeps what is observed last.
	observeRising(o, g.oldestWait, oldest, func(u *labeledUsage) time.Duration { return u.oldestWait })
	observeRising(o, g.oldestHold, oldest, func(u *labeledUsage) time.Duration { return u.oldestHold })
	return nil
}

// observeRising observes a gauge of all series, the greatest value last.
func observeRising(o metric.Observer, gauge metric.Float64Observable, all []*labeledUsage, of func(*labeledUsage) time.Duration) {
	if len(all) < 2 {
		return
	}
	slices.SortFunc(all, func(a, b *labeledUsage) int { return cmp.Compare(of(a), of(b)) })
	for _, u := range all {
		o.ObserveFloat64(gauge, of(u).Seconds(), metric.WithAttributeSet(u.labels))
	}
}

// usage is what is observed of one lock, or of several.
type usage struct {
	waiting, held          int64
	oldestWait, oldestHold time.Duration
}

func (u *usage) add(v usage) {
	u.waiting, u.held = u.waiting+v.waiting, u.held+v.held
	u.oldestWait, u.oldestHold = max(u.oldestWait, v.oldestWait), max(u.oldestHold, v.oldestHold)
}

// labeledUsage is the usage of a series.
type labeledUsage struct {
	usage
	labels attribute.Set
}

// usageLocked returns who waits for a lock and holds it at now, a time since the client was made.
func (e *entry) usageLocked(now time.Duration) (u usage) {
	if e.awake == nil { // to wake all locks of a client takes too long
		if since, held := e.resting.HeldSince(); held {
			u.held, u.oldestHold = 1, now-since
		}
		return u
	}
	waiting, held := e.awake.lock.Counts()
	u.waiting, u.held = int64(waiting), int64(held)
	wait, hold := e.awake.lock.Oldest()
	if wait >= 0 {
		u.oldestWait = now - wait
	}
	if hold >= 0 {
		u.oldestHold = now - hold
	}
	return u
}

// addLocks adds the client's callers that wait and those that hold: for all locks together or, if
// locks have labels, for each label that is in use or was lately.
func (m *metrics) addLocks(sum map[attribute.Distinct]*labeledUsage) {
	now := time.Since(m.client.began)
	all := map[string]usage{}
	if m.client.opts.lockLabel == nil {
		all[""] = usage{} // the series exists, with the value 0, while no lock is in use
	}
	for _, e := range m.client.entries() {
		e.mu.Lock()
		one := e.usageLocked(now)
		e.mu.Unlock()
		var label string
		if e.label != nil {
			label = *e.label
		}
		one.add(all[label])
		all[label] = one
	}
	m.addUnused(all)
	for label, u := range all {
		labels := attribute.NewSet(m.seriesAttributes(label)...)
		if other := sum[labels.Equivalent()]; other != nil { // of another client
			u.add(other.usage)
		}
		sum[labels.Equivalent()] = &labeledUsage{u, labels}
	}
}

const (
	// keepsUnused is for how long a label that is no longer in use is observed with the value 0: longer than
	// most programs wait between two exports. A backend to which metrics are pushed shows the last value that it
	// was sent, for minutes, so without a 0 a lock would look as if it were still held.
	keepsUnused = 2 * time.Minute
	maxUnused   = 1000
)

// addUnused adds the labels that were in use lately, and notes those that are.
func (m *metrics) addUnused(all map[string]usage) {
	if m.client.opts.lockLabel == nil {
		return
	}
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for label, last := range m.inUse {
		switch _, used := all[label]; {
		case used:
		case now.Sub(last) < keepsUnused:
			all[label] = usage{}
		default:
			delete(m.inUse, label)
		}
	}
	for label, u := range all {
		if _, known := m.inUse[label]; (u.waiting > 0 || u.held > 0) && (known || len(m.inUse) < maxUnused) {
			m.inUse[label] = now
		}
	}
}

// seriesAttributes returns the attributes of a series: those of all series, attrs, and the label of a lock,
// if it has one.
func (m *metrics) seriesAttributes(label string, attrs ...attribute.KeyValue) []attribute.KeyValue {
	all := make([]attribute.KeyValue, 0, len(attrs)+len(m.more)+2)
	all = append(append(all, attrs...), m.more...)
	if label != "" {
		all = append(all, attrLock.String(label))
		if prefix := m.client.opts.prefix; prefix != "" {
			all = append(all, attrPrefix.String(prefix))
		}
	}
	return all
}

// inboxReach is how messages of other processes reach a client.
type inboxReach uint8

const (
	inboxUnused inboxReach = iota // no lock was asked for yet
	inboxConnecting
	inboxSubscribed
	inboxPolling // Redis refuses the subscription, or none can be made, so waiters poll
	inboxReaches
)

func (r inboxReach) String() string {
	return [...]string{"unused", "connecting", "subscribed", "polling"}[r]
}

// observeInbox observes how messages reach the client: 1 for the way in which they do, 0 for the
// others.
func (m *metrics) observeInbox(o metric.Observer, clients metric.Int64Observable) {
	reach := m.client.inbox.reach()
	for r := range inboxReaches {
		var n int64
		if r == reach {
			n = 1
		}
		o.ObserveInt64(clients, n, metric.WithAttributes(m.seriesAttributes("", attrInbox.String(r.String()))...))
	}
}

// observeServers observes how many servers of a quorum may vote, and how many may not, by the reason.
func (m *metrics) observeServers(o metric.Observer, servers metric.Int64Observable) {
	if m.client.quorum == nil {
		return
	}
	voting, young, away := m.client.quorum.States()
	o.ObserveInt64(servers, int64(voting), metric.WithAttributes(m.seriesAttributes("", attrServerState.String("answering"))...))
	o.ObserveInt64(servers, int64(young), metric.WithAttributes(m.seriesAttributes("", attrServerState.String("quarantine"))...))
	o.ObserveInt64(servers, int64(away), metric.WithAttributes(m.seriesAttributes("", attrServerState.String("away"))...))
}

// recordWait measures a wait for a lock with this label. span is the wait's span or nil; the SDK may
// keep the measurement as an exemplar that refers to the span.
func (m *metrics) recordWait(ctx context.Context, span trace.Span, label *string, c *call, r waitResult, took time.Duration) {
	if span != nil {
		ctx = trace.ContextWithSpan(ctx, span)
	}
	if label == nil {
		m.wait.Record(ctx, took.Seconds(), m.options.wait[r][c.Via][modeIndex(c.Mode)]...)
	} else if m.wait.Enabled(ctx) {
		m.wait.Record(ctx, took.Seconds(), metric.WithAttributes(m.seriesAttributes(*label, waitAttributes(r, c.Via, c.Mode)...)...))
	}
}

// recordHold measures a hold.
func (m *metrics) recordHold(h *holdRecord) {
	took := h.at.Sub(h.since)
	ctx := context.Background()
	if h.span != nil {
		ctx = trace.ContextWithSpan(ctx, h.span)
	}
	if label := h.entry.label; label == nil {
		m.hold.Record(ctx, took.Seconds(), m.options.hold[h.how][modeIndex(h.mode)]...)
	} else if m.hold.Enabled(ctx) {
		m.hold.Record(ctx, took.Seconds(), metric.WithAttributes(m.seriesAttributes(*label, holdAttributes(h.how, h.mode)...)...))
	}
	if h.behind > 0 && m.behind.Enabled(ctx) {
		var label string
		if h.entry.label != nil {
			label = *h.entry.label
		}
		m.behind.Record(ctx, int64(h.behind), metric.WithAttributes(m.seriesAttributes(label, attrMode.String(h.mode.String()))...))
	}
}

// measuresHolds reports whether recordHold records anything.
func (m *metrics) measuresHolds() bool {
	ctx := context.Background()
	return m.hold.Enabled(ctx) || m.behind.Enabled(ctx)
}

// commandStart is when a command was sent; zero if the command is not measured.
type commandStart time.Time

// startTiming is called before a command is sent.
func (m *metrics) startTiming(ctx context.Context) commandStart {
	if !m.command.Enabled(ctx) {
		return commandStart{}
	}
	return commandStart(time.Now())
}

// elapsed returns how long the command took, or a negative duration if that is not measured.
func (s commandStart) elapsed() time.Duration {
	if time.Time(s).IsZero() {
		return -1
	}
	return time.Since(time.Time(s))
}

// recordCommand measures a command that failed with fail or, if fail is nil, succeeded. It calls the
// instrument on the queue of spans, because locks depend on the goroutines that send commands.
func (m *metrics) recordCommand(ctx context.Context, k commandKind, took time.Duration, fail *protocol.Failure) {
	if took < 0 {
		return
	}
	with := m.options.command[k][0]
	if fail != nil {
		with = m.options.command[k][1+fail.Kind]
	}
	ctx = context.WithoutCancel(ctx)
	m.client.tracing.later(func() { m.command.Record(ctx, took.Seconds(), with...) })
}

// stop brings the counters up to date and ends the observation of the gauges, and reports whether
// that was done before ctx ended. If no other client shares the gauges, it waits for a collection
// under way, which may run callbacks of other packages.
func (m *metrics) stop(ctx context.Context) bool {
	ended := make(chan struct{})
	go func() { // ends with the collection under way; Shutdown waits for it as long as ctx lasts
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				reportPanic("an instrument", p, m.client.opts.hideNames)
			}
		}()
		defer m.gauges.leave(m) // even if an instrument panics
		m.update()
	}()
	if ctx.Err() != nil { // it needs a moment to begin
		soon, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Millisecond)
		defer cancel()
		ctx = soon
	}
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
	// What counts is why the wait ended, not the last error of Redis, which err matches too, nor the cause of a
	// context, which can be anything.
	why := refusal.reason
	if of := new(contextEnded); errors.As(why, &of) {
		why = of.err
	}
	switch {
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
	case c.Ended == lockstate.ByLoss && c.Why == lockstate.Evicted:
		return holdForced
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

// serverHistogram makes a histogram of numbers of servers.
func (m instruments) serverHistogram(name, text string) metric.Int64Histogram {
	i, err := m.Int64Histogram(name, metric.WithUnit("{server}"), metric.WithDescription(text),
		metric.WithExplicitBucketBoundaries(0, 1, 2, 3, 4, 5, 6, 7))
	return orNoop[metric.Int64Histogram](i, err, noop.Int64Histogram{})
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

// orNoop returns i or, if the provider returned no instrument, none. It reports err to otel.Handle.
func orNoop[T any](i T, err error, none T) T {
	if err != nil {
		otel.Handle(err)
	}
	if any(i) == nil {
		return none
	}
	return i
}

// measureOptions has the options of all measurements of locks that have no label, built once.
type measureOptions struct {
	wait    [waitResults][lockstate.Vias][2][]metric.RecordOption
	hold    [holdResults][2][]metric.RecordOption
	command [commandKinds][1 + protocol.FailureKinds][]metric.RecordOption // without failure, and by its kind
}

// plainOptions are the options of clients without attributes of their own.
var plainOptions = sync.OnceValue(func() *measureOptions { return newMeasureOptions(nil) })

// newMeasureOptions makes the attribute sets of all measurements in advance, because making one
// allocates. Each set ends with more.
func newMeasureOptions(more []attribute.KeyValue) *measureOptions {
	o := &measureOptions{}
	with := func(attrs ...attribute.KeyValue) []metric.RecordOption {
		return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(slices.Concat(attrs, more)...))}
	}
	for i, mode := range [...]protocol.Mode{protocol.Exclusive, protocol.Shared} {
		for r := range waitResults {
			for v := range lockstate.Vias {
				o.wait[r][v][i] = with(waitAttributes(r, v, mode)...)
			}
		}
		for r := range holdResults {
			o.hold[r][i] = with(holdAttributes(r, mode)...)
		}
	}
	for k := range commandKinds {
		o.command[k][0] = with(attrCommand.String(k.String()))
		for f := range protocol.FailureKinds {
			o.command[k][1+f] = with(attrCommand.String(k.String()), attrErrorType.String(f.String()))
		}
	}
	return o
}

// commandKind is a kind of command, or of round trip with several commands, as metrics name it.
type commandKind uint8

const (
	commandAcquire commandKind = iota
	commandYield
	commandRelease
	commandDowngrade
	commandRenew
	commandCancel
	commandEcho
	commandInspect
	commandEvict
	commandKinds
)

func (k commandKind) String() string {
	return [...]string{"acquire", "yield", "release", "downgrade", "renew", "cancel", "echo", "inspect", "evict"}[k]
}

func commandOf(v protocol.Verb) commandKind {
	switch v {
	case protocol.Yield:
		return commandYield
	case protocol.Release:
		return commandRelease
	case protocol.Downgrade:
		return commandDowngrade
	}
	return commandAcquire
}

func waitAttributes(r waitResult, v lockstate.Via, m protocol.Mode) []attribute.KeyValue {
	all := []attribute.KeyValue{attrMode.String(m.String()), attrWaitOutcome.String(r.String())}
	if r == waitAcquired {
		all = append(all, attrVia.String(v.String()))
	}
	return all
}

func holdAttributes(r holdResult, m protocol.Mode) []attribute.KeyValue {
	return []attribute.KeyValue{attrMode.String(m.String()), attrHoldOutcome.String(r.String())}
}

// modeIndex returns the index of a mode in the arrays of options.
func modeIndex(m protocol.Mode) int {
	if m == protocol.Shared {
		return 1
	}
	return 0
}
