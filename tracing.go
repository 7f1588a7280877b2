package leased

import (
	"context"
	"reflect"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

const modulePath = "github.com/leasedmutex/leased"

// The names of spans and attributes. There are only three span names, so that backends can group by
// them; the lock is an attribute.
const (
	spanWait    = "leased.wait"
	spanHold    = "leased.hold"
	spanRelease = "leased.release"

	attrLock           = attribute.Key("leased.lock")   // the lock's name, without the prefix; in metrics, the lock's label
	attrPrefix         = attribute.Key("leased.prefix") // of the keys; only if there is one
	attrMode           = attribute.Key("leased.mode")
	attrWaitOutcome    = attribute.Key("leased.wait.outcome")
	attrHoldOutcome    = attribute.Key("leased.hold.outcome")
	attrRenewalOutcome = attribute.Key("leased.renewal.outcome")
	attrVia            = attribute.Key("leased.via")
	attrToken          = attribute.Key("leased.token")
	attrPlace          = attribute.Key("leased.place")       // how many callers of its process were ahead
	attrRedisPlace     = attribute.Key("leased.redis_place") // how many requests of other processes were ahead
	attrBlocker        = attribute.Key("leased.blocker")
	attrReason         = attribute.Key("leased.reason")
	attrKind           = attribute.Key("leased.kind")
	attrCommand        = attribute.Key("leased.command")
	attrInbox          = attribute.Key("leased.inbox")
	attrServers        = attribute.Key("leased.servers")      // how many the quorum has
	attrHoldServers    = attribute.Key("leased.hold.servers") // how many of them stood behind a lease at its Unlock
	attrWaitServers    = attribute.Key("leased.wait.servers") // how many of them stood behind a lease when its wait ended
	attrAnswering      = attribute.Key("leased.answering")    // how many of them were not known to be away when a wait failed
	attrServerState    = attribute.Key("leased.server.state")
	attrOwner          = attribute.Key("leased.owner") // the owner label of the client that made the span

	attrErrorType = attribute.Key("error.type") // of a span whose status is an error: its outcome; of a command: what failed
)

// tracing makes spans from the event logs of callers. The spans of a call are started on the caller's own
// goroutine, and there its wait is measured, and its hold after the release: a sampler, an OnStart or an
// instrument that blocks keeps that caller, even once it has the lock. There its spans also get what they say of
// the wait and the hold. They are ended, and commands are measured, in order on a separate goroutine, so that
// an SDK delays no release, renewal or deadline of a lock.
type tracing struct {
	client  *Client
	given   trace.TracerProvider // nil: the global one at the time of use
	every   bool                 // whether Lock and the like have spans even if nothing waited
	more    []attribute.KeyValue // that every span has
	cache   atomic.Pointer[providersTracer]
	queue   asyncQueue[delivery]
	overdue atomic.Pointer[<-chan struct{}] // of a delivery that a call has waited for in vain; nil if there was none
}

// maxDeliveries bounds the queue; further deliveries are dropped.
const maxDeliveries = 8192

func newTracing(c *Client, o *clientOptions) *tracing {
	t := &tracing{client: c, given: o.tracers, every: o.everySpan, more: spanAttributes(o)}
	t.queue.limit, t.queue.what, t.queue.hideNames = maxDeliveries, "a sampler, span processor or instrument", o.hideNames
	t.queue.deliver = func(d delivery) {
		if d.delivered != nil {
			defer close(d.delivered)
		}
		if d.f != nil {
			d.f()
		}
		if d.span != nil {
			endAt(d.span, d.at)
		}
	}
	if t.given != nil {
		t.cache.Store(newProvidersTracer(t.given))
	}
	return t
}

// providersTracer is a provider and the tracer that it made for this package.
type providersTracer struct {
	provider trace.TracerProvider
	tracer   trace.Tracer // nil if the provider makes no spans
}

func newProvidersTracer(p trace.TracerProvider) *providersTracer {
	c := &providersTracer{provider: p}
	if _, none := p.(noop.TracerProvider); !none {
		c.tracer = p.Tracer(modulePath, trace.WithInstrumentationVersion(moduleVersion()))
	}
	return c
}

// tracer returns nil while there is no SDK that makes spans.
func (t *tracing) tracer() trace.Tracer {
	if t.given != nil {
		return t.cache.Load().tracer
	}
	provider := otel.GetTracerProvider()
	if c := t.cache.Load(); c != nil && c.provider == provider {
		return c.tracer
	}
	c := newProvidersTracer(provider)
	if placeholder(provider) {
		c.tracer = nil
	}
	if reflect.ValueOf(provider).Comparable() {
		t.cache.Store(c)
	}
	return c.tracer
}

// placeholder reports whether p is the provider, of tracers or of meters, that the API uses until an SDK is
// set. Its type is not exported. If placeholder did not recognize it, spans that record nothing would be
// started, at their small cost.
func placeholder(p any) bool {
	typ := reflect.TypeOf(p)
	return typ.Kind() == reflect.Pointer && typ.Elem().PkgPath() == "go.opentelemetry.io/otel/internal/global"
}

// moduleVersion returns this module's version as recorded in the program's build, or "" if none is
// recorded, as in a build of a working copy.
var moduleVersion = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			// If a directory replaces a module, the recorded version is not that of its code.
			if m.Path == modulePath && m.Version != "(devel)" && m.Replace == nil {
				return m.Version
			}
		}
	}
	return ""
})

// startWaitSpan starts the wait span of w, which asks for the lock with ctx. It returns nil for a caller
// that is not traced. It also returns nil for a caller of Lock and the like, unless all of them
// have spans: their spans have no parent, and are made only if it turns out that the call waited.
func (t *tracing) startWaitSpan(ctx context.Context, name string, w *call, began time.Time) trace.Span {
	tracer := t.tracer()
	if tracer == nil {
		return nil
	}
	if !w.Leased && !t.every {
		w.startTrace(trace.SpanContext{})
		return nil
	}
	_, span := tracer.Start(ctx, spanWait, trace.WithTimestamp(began), t.attributes(name, w.Mode))
	w.extend().under = span // even if it is not sampled: then its commands are not either
	if !span.IsRecording() {
		return nil
	}
	w.startTrace(trace.SpanContextFromContext(ctx))
	if span.SpanContext().IsSampled() {
		w.Events.Wait = spanRefOf(span.SpanContext())
	}
	return span
}

// attributes returns the attributes that a span has from its start, so that samplers see them.
func (t *tracing) attributes(lock string, m protocol.Mode) trace.SpanStartEventOption {
	all := make([]attribute.KeyValue, 0, len(t.more)+2)
	return trace.WithAttributes(append(append(all, attrLock.String(lock), attrMode.String(m.String())), t.more...)...)
}

// spanAttributes returns the attributes that every span of a client has.
func spanAttributes(o *clientOptions) []attribute.KeyValue {
	all := []attribute.KeyValue{attrOwner.String(o.owner)}
	if o.prefix != "" {
		all = append(all, attrPrefix.String(o.prefix))
	}
	return append(all, o.attributes...)
}

// waitRecord describes a wait that has ended.
type waitRecord struct {
	handle *handle
	entry  *entry // nil if the wait ended before the caller had one
	call   *call
	err    error
	began  time.Time
	ended  time.Time
}

// endWaitSpan ends the wait span of r's caller and, if the caller was admitted, starts its hold span. By
// then the hold may have ended, because any goroutine may unlock. It returns the wait span, or nil
// if there is none. For a caller that was not admitted, it also returns a channel that is closed when
// the span has ended.
func (t *tracing) endWaitSpan(ctx context.Context, span trace.Span, r *waitRecord) (trace.Span, <-chan struct{}) {
	w := r.call
	events, from, blocker, behind := r.takeEvents()
	tracer := t.tracer()
	if span == nil && tracer != nil && len(events) > 0 {
		_, span = tracer.Start(ctx, spanWait, trace.WithTimestamp(r.began), t.attributes(r.handle.keys.Name(), w.Mode))
		if !span.IsRecording() {
			r.declineSpans()
			return nil, nil
		}
	}
	if span == nil {
		r.skipSpan() // the event log stays: another caller may yet wait for this one
		return nil, nil
	}
	t.describeWait(span, r, behind)
	noteBlocker(span, from, blocker)
	notePlaces(span, events)
	addEvents(span, events)
	if r.err != nil {
		delivered := make(chan struct{})
		t.endSpan(span, r.ended, delivered)
		return span, delivered
	}
	t.endSpan(span, r.ended, nil)
	if !w.trace().parent.IsValid() {
		ctx = trace.ContextWithSpan(ctx, span) // so that wait and hold are in one trace
	}
	r.entry.mu.Lock()
	mine := w.trace().claimHoldSpan()
	w.trace().waitUnreported = false
	since := r.entry.client.began.Add(w.Since) // when it was admitted, and others may have begun to wait for it
	r.entry.mu.Unlock()
	if mine {
		t.startHoldSpan(ctx, r.entry, w, r.ended.Add(since.Sub(r.ended))) // on the wall clock, see onWallClock
	}
	return span, nil
}

// describeWait sets what a wait span says of how the wait ended. behind is how many servers of a quorum
// stood behind the lease by then, 0 if that is not known.
func (t *tracing) describeWait(span trace.Span, r *waitRecord, behind int) {
	w := r.call
	outcome := waitOutcome(r.err)
	span.SetAttributes(attrWaitOutcome.String(outcome.String()))
	if r.err == nil {
		span.SetAttributes(attrVia.String(w.Via.String()), attrToken.Int64(int64(w.Token)))
	}
	if q := t.client.quorum; q != nil {
		switch answering, of := q.Answering(); {
		case r.err != nil:
			span.SetAttributes(attrAnswering.Int(answering), attrServers.Int(of))
		case behind > 0:
			span.SetAttributes(attrWaitServers.Int(behind), attrServers.Int(of))
		}
	}
	if outcome.bad() {
		span.SetStatus(codes.Error, r.err.Error())
		span.SetAttributes(attrErrorType.String(outcome.String()))
	}
}

// noteBlocker sets what a caller waited for: the hold that handed the lock over, or else the client that
// was last known to have it.
func noteBlocker(span trace.Span, from *protocol.Span, blocker string) {
	if from != nil {
		span.AddLink(trace.Link{SpanContext: spanContextOf(from)})
	} else if name := blockerName(blocker); name != "" {
		span.SetAttributes(attrBlocker.String(name))
		if who, ok := protocol.OwnerOf(blocker); ok && who.Origin.Span.Valid() {
			span.AddLink(trace.Link{SpanContext: spanContextOf(&who.Origin.Span)})
		}
	}
}

// notePlaces sets the caller's places in the queue.
func notePlaces(span trace.Span, events []lockstate.Event) {
	for _, ev := range events {
		if key := placeKey(ev.What); key != "" {
			span.SetAttributes(key.Int(ev.Place))
		}
	}
}

// skipSpan notes that the wait gets no span. The hold gets one if another caller already waits
// for it, or if it has already ended, and not well.
func (r *waitRecord) skipSpan() {
	if r.err != nil {
		return
	}
	e, w := r.entry, r.call
	e.mu.Lock()
	defer e.mu.Unlock()
	w.trace().waitUnreported = false
	defer e.restLocked()
	switch {
	case w.Reported && w.trace().end.how != holdReleased && !w.Leased && w.trace().claimHoldSpan():
		e.beginHoldSpanLocked(w)
	case e.stateLocked().Contended():
		e.traceHolderLocked(w)
	}
}

// declineSpans notes that the sampler does not want the wait, which is the root of a trace. The hold gets no span
// either: it would be another root, for which the sampler would be asked anew.
func (r *waitRecord) declineSpans() {
	if r.entry == nil {
		return
	}
	r.entry.mu.Lock()
	defer r.entry.mu.Unlock()
	t := r.call.trace()
	t.waitUnreported, t.declined = false, true
	r.entry.restLocked()
}

// takeEvents removes the events of the wait from the caller's log. It also returns what the wait
// span refers to: the hold span that let the caller in or, if the caller was not admitted, the hold
// span that blocked it. If the blocker has no span here, it returns the value of the owner's key
// instead. behind is how many servers of a quorum stand behind the lease, 0 if that is not known or
// the lease is over.
func (r *waitRecord) takeEvents() (events []lockstate.Event, from *protocol.Span, blocker string, behind int) {
	log := r.call.trace()
	if r.entry == nil {
		return log.List, nil, "", 0
	}
	r.entry.mu.Lock()
	defer r.entry.mu.Unlock()
	events, from, blocker = log.TakeWaitEvents(), log.From, log.Blocker
	if r.err != nil {
		defer r.entry.restLocked()
		if owner := r.entry.stateLocked().Holders(); owner != nil {
			from = owner.Events.HoldSpan()
		} else {
			blocker = r.entry.stateLocked().Blocker()
		}
	}
	behind, _ = r.entry.behindLocked(r.call)
	return events, from, blocker, behind
}

// traceHoldersLocked has the hold spans of all holders started when the lock becomes
// contended. It is called after every step.
func (e *entry) traceHoldersLocked() {
	contended := e.stateLocked().Contended()
	if contended && !e.awake.contended {
		for c := e.stateLocked().Holders(); c != nil; c = c.NextHolder() {
			e.traceHolderLocked(callOf(c))
		}
	}
	e.awake.contended = contended
}

// traceHolderLocked has the hold span of w started, so that the waiter's span can link to it,
// unless w has one or its own caller will start it. The waiter does not depend on that: if the hold
// ends before its span has started, the waiter's span has no link.
func (e *entry) traceHolderLocked(w *call) {
	if w.Phase != lockstate.Inside || w.Leased || w.Reported || w.Events == nil || w.trace().waitUnreported || !w.trace().claimHoldSpan() {
		return
	}
	e.beginHoldSpanLocked(w)
}

// beginHoldSpanLocked has the hold span of w, which was claimed, begun as the root of a trace.
func (e *entry) beginHoldSpanLocked(w *call) {
	t, since := e.client.tracing, onWallClock(e.client.began.Add(w.Since))
	t.later(func() { t.startHoldSpan(context.Background(), e, w, since) })
}

// startHoldSpan starts the hold span of a caller that was admitted at since. Only the goroutine that
// claimed the span calls it. If the hold has ended in the meantime, startHoldSpan also ends the span.
func (t *tracing) startHoldSpan(ctx context.Context, e *entry, w *call, since time.Time) {
	span := t.newHoldSpan(ctx, &holdRecord{entry: e, since: since, mode: w.Mode, via: w.Via, token: w.Token})
	if span == nil {
		return
	}
	ref := spanRefOf(span.SpanContext())
	e.mu.Lock()
	log := w.trace()
	log.span, w.extend().under = span, span
	if trace.TraceFlags(ref.Flags).IsSampled() {
		log.Hold = ref
	}
	over := !log.end.at.IsZero()
	r := holdRecord{entry: e, mode: w.Mode, token: w.Token, holdEnd: log.end, span: span, behind: w.Behind}
	if over {
		r.events = log.TakeHoldEvents()
	}
	e.mu.Unlock()
	if over {
		if r.at.Before(since) {
			r.at = since
		}
		t.endHoldSpan(&r, nil)
	}
}

// newHoldSpan starts a hold span whose start time is h.since. It returns nil if the span would not be
// recorded.
func (t *tracing) newHoldSpan(ctx context.Context, h *holdRecord) trace.Span {
	tracer := t.tracer()
	if tracer == nil {
		return nil
	}
	_, span := tracer.Start(ctx, spanHold, trace.WithTimestamp(h.since), t.attributes(h.entry.keys.Name(), h.mode))
	if !span.IsRecording() {
		return nil
	}
	span.SetAttributes(attrVia.String(h.via.String()), attrToken.Int64(int64(h.token)))
	return span
}

// holdEnd is how and when a hold ended.
type holdEnd struct {
	how     holdResult
	why     error     // the cause, if it was not released; can be user code
	at      time.Time // zero if it has not ended
	settled time.Time // when Unlock had finished waiting for Redis; zero if it did not wait
}

// holdRecord describes a hold that has ended.
type holdRecord struct {
	holdEnd
	entry  *entry
	since  time.Time
	mode   protocol.Mode
	via    lockstate.Via
	token  uint64
	behind int8 // how many servers of a quorum stood behind it at its Unlock, 0 if not known
	ends   spanEnding
	span   trace.Span // nil if there is none
	events []lockstate.Event
}

// spanEnding says who ends the span of a hold that has ended.
type spanEnding uint8

const (
	noSpan        spanEnding = iota // there is none
	endsHere                        // recordHold
	dueHere                         // recordHold, which also begins it: there was none, but the hold did not end well
	endsElsewhere                   // the goroutine that begins it; see startHoldSpan
)

// takeHoldLocked returns the record of w's hold, once: in later calls ok is false.
func (e *entry) takeHoldLocked(w *call, end holdEnd) (r holdRecord, ok bool) {
	if w.Reported {
		return r, false
	}
	w.Reported = true
	since := e.client.began.Add(w.Since)
	since = end.at.Add(since.Sub(end.at)) // on the wall clock, which end.at has just read; see onWallClock
	if end.at.Before(since) {             // an Unlock by name that read the clock before this reader came
		end.at = since
	}
	r = holdRecord{holdEnd: end, entry: e, since: since, mode: w.Mode, via: w.Via, token: w.Token, behind: w.Behind}
	if end.how == holdLost || end.how == holdForced {
		r.behind = 0
	}
	t := w.trace()
	if t == nil {
		return r, true
	}
	t.end = end
	switch {
	case t.span != nil:
		r.ends, r.span, r.events = endsHere, t.span, t.TakeHoldEvents()
	case t.waitUnreported: // whoever reports the wait begins the span, and ends it
	case end.how != holdReleased && !w.Leased && t.claimHoldSpan():
		r.ends, r.events = dueHere, t.TakeHoldEvents()
	case t.spanClaimed:
		r.ends = endsElsewhere
	}
	return r, true
}

// recordHold measures a hold that has ended, and ends its span. It returns a channel that is closed
// when the span has ended, or nil if there is no span.
func (c *Client) recordHold(of *holdRecord) <-chan struct{} {
	if of.ends == noSpan && !c.metrics.measuresHolds() {
		return nil // and the record has not escaped
	}
	r := new(holdRecord)
	*r = *of
	if r.ends == dueHere {
		r.span = c.tracing.newHoldSpan(context.Background(), r)
	}
	c.metrics.recordHold(r)
	if r.span == nil && r.ends != endsElsewhere {
		return nil
	}
	delivered := make(chan struct{})
	if r.span != nil {
		c.tracing.endHoldSpan(r, delivered)
	} else {
		c.tracing.enqueue(delivery{delivered: delivered})
	}
	return delivered
}

// endHoldSpan ends a hold span.
func (t *tracing) endHoldSpan(r *holdRecord, delivered chan struct{}) {
	r.span.SetAttributes(attrHoldOutcome.String(r.how.String()), attrMode.String(r.mode.String()), attrToken.Int64(int64(r.token)))
	if r.behind > 0 {
		_, of := t.client.quorum.Answering()
		r.span.SetAttributes(attrHoldServers.Int(int(r.behind)), attrServers.Int(of))
	}
	addEvents(r.span, r.events)
	if r.how == holdUnconfirmed && r.why != nil {
		r.span.SetAttributes(attrReason.String(r.why.Error()))
	}
	if r.how != holdReleased {
		r.span.SetStatus(codes.Error, r.how.String())
		r.span.SetAttributes(attrErrorType.String(r.how.String()))
	}
	if !r.settled.IsZero() {
		t.later(func() { t.addReleaseSpan(r) })
	}
	t.endSpan(r.span, r.at, delivered)
}

// addReleaseSpan makes the span of the time for which Unlock waited for Redis. It does so afterwards,
// because starting the span earlier would call a sampler before the lock is released.
func (t *tracing) addReleaseSpan(r *holdRecord) {
	tracer := t.tracer()
	if tracer == nil {
		return
	}
	_, span := tracer.Start(trace.ContextWithSpan(context.Background(), r.span), spanRelease, trace.WithTimestamp(r.at),
		t.attributes(r.entry.keys.Name(), r.mode))
	span.SetAttributes(attrHoldOutcome.String(r.how.String()), attrToken.Int64(int64(r.token)))
	if r.how != holdReleased {
		span.SetStatus(codes.Error, r.how.String())
		span.SetAttributes(attrErrorType.String(r.how.String()))
	}
	endAt(span, r.settled)
}

// addEvents adds the events of a caller's log to a span.
func addEvents(span trace.Span, events []lockstate.Event) {
	for _, ev := range events {
		var more []attribute.KeyValue
		if key := placeKey(ev.What); key != "" {
			more = append(more, key.Int(ev.Place))
		}
		if ev.What == lockstate.EventDowngraded {
			more = append(more, attrToken.Int64(int64(ev.Token)))
		}
		if ev.Err != nil {
			ev.Text = ev.Err.Error()
		}
		if ev.What == lockstate.EventQueuedInRedis {
			ev.Text = blockerName(ev.Text)
		}
		if ev.Text != "" {
			more = append(more, textKey(ev.What).String(ev.Text))
		}
		span.AddEvent(ev.What.String(), trace.WithTimestamp(ev.At), trace.WithAttributes(more...))
	}
}

// placeKey returns the attribute for the place of an event, or "" if the event has none.
func placeKey(k lockstate.EventKind) attribute.Key {
	switch k {
	case lockstate.EventQueued:
		return attrPlace
	case lockstate.EventQueuedInRedis:
		return attrRedisPlace
	}
	return ""
}

// textKey returns the attribute for the text of an event.
func textKey(k lockstate.EventKind) attribute.Key {
	if k == lockstate.EventQueuedInRedis {
		return attrBlocker
	}
	return attrReason
}

// commandContext returns the context of a command that is sent under span, which may be nil. An
// instrumentation of the Redis client, such as redisotel, makes the command's span a child of it.
func (c *Client) commandContext(span trace.Span) context.Context {
	if span == nil {
		return c.base
	}
	return trace.ContextWithSpan(c.base, span)
}

// spanOfRenewals returns the span that a batch of renewals is sent under. If the batch is about one
// lock, that is the span of a caller inside. A batch about several locks is not part of one
// caller's trace.
func spanOfRenewals(batch []protocol.Renewal) trace.Span {
	if len(batch) != 1 {
		return nil
	}
	e := batch[0].Owner.(*entry)
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.restLocked()
	if c := e.stateLocked().Holders(); c != nil {
		return callOf(c).under()
	}
	return nil
}

// spanOfCancels returns the span that a batch of cancels is sent under: if there is only one
// cancel, the span of the caller that gave up, or of the caller whose Unlock waits for the cancel.
func spanOfCancels(batch []*lockstate.Cancellation) trace.Span {
	if len(batch) != 1 {
		return nil
	}
	if e, ok := batch[0].Owner.(*entry); ok && len(batch[0].Callers) > 0 {
		e.mu.Lock()
		defer e.mu.Unlock()
		return callOf(batch[0].Callers[0]).under()
	}
	span, _ := batch[0].Under.(trace.Span)
	return span
}

// delivery is a call of the SDK that the queue's goroutine makes: f, or the end of a span.
type delivery struct {
	f         func()
	span      trace.Span
	at        time.Time
	delivered chan struct{} // closed when the delivery has been made or dropped; may be nil
}

// deliveryWait bounds how long Unlock, and a call that did not get its lock, wait for their spans to
// end, so that a flush of the provider finds them.
const deliveryWait = 5 * time.Millisecond

// awaitDelivery waits for a delivery, unless span processors are slow: once it has waited in vain, it does
// not wait again before that delivery is made. The lock was given back before.
func (t *tracing) awaitDelivery(delivered <-chan struct{}) {
	if delivered == nil || isClosed(delivered) {
		return
	}
	if waitedFor := t.overdue.Load(); waitedFor != nil && !isClosed(*waitedFor) {
		return
	}
	timer := time.NewTimer(deliveryWait)
	defer timer.Stop()
	select {
	case <-delivered:
	case <-timer.C:
		t.overdue.Store(&delivered)
	}
}

// endSpan ends a span on the queue's goroutine, as of at. It drops the span if span processors are so
// slow that the queue is full.
func (t *tracing) endSpan(span trace.Span, at time.Time, delivered chan struct{}) {
	t.enqueue(delivery{span: span, at: at, delivered: delivered})
}

// endAt ends a span as of at. If the wall clock was set back since the span began, it would end before its
// begin; then it lasts for its time on the monotonic clock. A span that does not tell when it began ends at at.
func endAt(span trace.Span, at time.Time) {
	if s, ok := span.(interface{ StartTime() time.Time }); ok { // one of the SDK
		if began := s.StartTime(); at.Round(0).Before(began.Round(0)) {
			at = began.Add(at.Sub(began))
		}
	}
	span.End(trace.WithTimestamp(at))
}

// later calls f, which calls the SDK, on the queue's goroutine.
func (t *tracing) later(f func()) { t.enqueue(delivery{f: f}) }

func (t *tracing) enqueue(d delivery) {
	if !t.queue.add(d) {
		t.client.log.spansDropped()
		if d.delivered != nil {
			close(d.delivered) // there is nothing to wait for
		}
	}
}

// spanRefOf converts a span context to the form that lockstate and protocol use.
func spanRefOf(s trace.SpanContext) *protocol.Span {
	return &protocol.Span{TraceID: s.TraceID(), SpanID: s.SpanID(), Flags: byte(s.TraceFlags()), Remote: s.IsRemote()}
}

// spanContextOf is the inverse of spanRefOf.
func spanContextOf(s *protocol.Span) trace.SpanContext {
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: s.TraceID, SpanID: s.SpanID, TraceFlags: trace.TraceFlags(s.Flags), Remote: s.Remote,
	})
}

// callTrace is what is traced of a call: the lock's events, and the spans made from them.
type callTrace struct {
	lockstate.EventLog
	parent         trace.SpanContext // of the spans
	span           trace.Span        // of the hold, nil until it has begun
	waitUnreported bool              // the caller has not reported its wait yet, and may begin the hold's span when it does
	spanClaimed    bool              // a goroutine is beginning, or has begun, the span of the hold
	declined       bool              // the sampler did not want the wait, so there is no span of the hold either
	end            holdEnd           // for a hold that was over before it had a span
}

// startTrace starts to record the events of w, for spans under parent.
func (w *call) startTrace(parent trace.SpanContext) {
	t := &callTrace{parent: parent, waitUnreported: true}
	t.Maker = t
	w.Events = &t.EventLog
}

// trace returns what is traced of w, or nil if w is not traced.
func (w *call) trace() *callTrace {
	if w.Events == nil {
		return nil
	}
	return w.Events.Maker.(*callTrace)
}

// context returns ctx with the hold span as the current one, if ctx carries the span under which
// the call was made.
func (t *callTrace) context(ctx context.Context) context.Context {
	if t == nil || t.span == nil || !trace.SpanContextFromContext(ctx).Equal(t.parent) {
		return ctx
	}
	return trace.ContextWithSpan(ctx, t.span)
}

// underHoldSpan returns ctx as context does for w, which was admitted.
func (e *entry) underHoldSpan(ctx context.Context, w *call) (work context.Context) {
	e.leaveOnPanic(w, func() { work = w.trace().context(ctx) }) //nolint:fatcontext // once; a method of ctx may panic
	return work
}

// claimHoldSpan reports whether the calling goroutine is to begin the span of the hold: exactly one
// goroutine does.
func (t *callTrace) claimHoldSpan() bool {
	if t == nil || t.spanClaimed || t.declined {
		return false
	}
	t.spanClaimed = true
	return true
}
