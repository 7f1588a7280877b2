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
)

const modulePath = "github.com/leasedmutex/leased"

// What spans say. A name that ends in .wait or .hold is all there is, so that
// backends can group by it; which lock it was is an attribute.
const (
	spanWait = "leased.wait"
	spanHold = "leased.hold"

	attrLock    = attribute.Key("leased.lock")
	attrMode    = attribute.Key("leased.mode")
	attrOutcome = attribute.Key("leased.outcome")
	attrVia     = attribute.Key("leased.via")
	attrToken   = attribute.Key("leased.token")
	attrPlace   = attribute.Key("leased.place")
	attrBlocker = attribute.Key("leased.blocker")
	attrReason  = attribute.Key("leased.reason")
	attrKind    = attribute.Key("leased.kind")
)

// tracing makes spans of the trails of callers. A caller's own goroutine begins the
// spans of its call, for its context needs them; all else that calls an SDK, which
// is its samplers, span processors and instruments, is done in a goroutine of its
// own, in order: one that is slow, or blocks, holds up no lock's release, renewal or
// end.
type tracing struct {
	client *Client
	given  trace.TracerProvider // nil: the global one of the moment
	every  bool                 // Lock has spans even if nobody waited
	cache  atomic.Pointer[providersTracer]
	told   backlog[telling]
}

// providersTracer is our tracer of a provider; nil if that provider makes no spans.
type providersTracer struct {
	provider trace.TracerProvider
	tracer   trace.Tracer
}

// telling is what an SDK is yet to be told: that a span ended, or what f says.
type telling struct {
	f    func()
	span trace.Span
	at   time.Time
}

const mostTold = 8192

func newTracing(c *Client, o *clientOptions) *tracing {
	t := &tracing{client: c, given: o.tracers, every: o.everySpan}
	t.told.most, t.told.what = mostTold, "a sampler, span processor or instrument"
	t.told.deliver = func(it telling) {
		if it.f != nil {
			it.f()
		} else {
			it.span.End(trace.WithTimestamp(it.at))
		}
	}
	if t.given != nil {
		t.cache.Store(newProvidersTracer(t.given))
	}
	return t
}

// tracer returns nil while no SDK is there to make spans.
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

func newProvidersTracer(p trace.TracerProvider) *providersTracer {
	c := &providersTracer{provider: p}
	if _, none := p.(noop.TracerProvider); !none {
		c.tracer = p.Tracer(modulePath, trace.WithInstrumentationVersion(moduleVersion()))
	}
	return c
}

// placeholder reports whether p is what the API has until an SDK is set. It has
// no name outside the API; if it were not recognized, spans that record nothing
// would be begun, at their small cost.
func placeholder(p trace.TracerProvider) bool {
	typ := reflect.TypeOf(p)
	return typ.Kind() == reflect.Pointer && typ.Elem().PkgPath() == "go.opentelemetry.io/otel/internal/global"
}

// moduleVersion is what the program's build says of this module.
var moduleVersion = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			// One that was replaced by a directory has a version that names nothing.
			if m.Path == modulePath && m.Version != "" && m.Replace == nil {
				return m.Version
			}
		}
	}
	return "(devel)"
})

// begin starts the wait span of w, who asks for the lock with ctx. It returns nil
// for a caller who is not traced, and for one of Lock and its like: these have no
// parent, and have spans only if it turns out that they waited.
func (t *tracing) begin(ctx context.Context, w *caller, began time.Time) trace.Span {
	tracer := t.tracer()
	if tracer == nil {
		return nil
	}
	if !w.leased {
		w.trail = &trail{untold: true}
		return nil
	}
	_, span := tracer.Start(ctx, spanWait, trace.WithTimestamp(began))
	if !span.IsRecording() {
		return nil
	}
	w.trail = &trail{untold: true, parent: trace.SpanContextFromContext(ctx)}
	return span
}

// waited is what there is to tell of a wait that has ended.
type waited struct {
	handle *handle
	entry  *entry // nil if it ended before there was one
	caller *caller
	err    error
	began  time.Time
	ended  time.Time
}

// waited ends the wait span of w's caller and, if he was let in, begins the hold
// span. He may have left already: who unlocks need not be who locked.
func (t *tracing) waited(ctx context.Context, span trace.Span, w *waited) {
	c := w.caller
	notes, from, blocker := w.look()
	tracer := t.tracer()
	if span == nil && tracer != nil && (t.every || len(notes) > 0) {
		if _, span = tracer.Start(ctx, spanWait, trace.WithTimestamp(w.began)); !span.IsRecording() {
			span = nil
		}
	}
	if span == nil {
		w.spanless() // the trail stays: somebody may come to wait for this one
		return
	}
	span.SetAttributes(attrLock.String(w.handle.keys.name), attrMode.String(c.mode.String()),
		attrOutcome.String(waitOutcome(w.err).String()))
	if w.err == nil {
		span.SetAttributes(attrVia.String(c.via.String()), attrToken.Int64(int64(c.token)))
	}
	for _, n := range notes {
		if n.what == noteQueued || n.what == noteQueuedInRedis {
			span.SetAttributes(attrPlace.Int(n.place))
		}
	}
	if from != nil {
		span.AddLink(trace.Link{SpanContext: *from})
	} else if w.err != nil && blocker != "" {
		span.SetAttributes(attrBlocker.String(blocker))
	}
	if waitOutcome(w.err).bad() {
		span.SetStatus(codes.Error, w.err.Error())
	}
	tell(span, notes)
	t.end(span, w.ended)
	if w.err != nil {
		return
	}
	if !c.trail.parent.IsValid() {
		ctx = trace.ContextWithSpan(ctx, span) // one trace, not two
	}
	w.entry.mu.Lock()
	mine := c.trail.claim()
	c.trail.untold = false
	w.entry.mu.Unlock()
	if mine {
		t.hold(ctx, w.entry, c, w.ended)
	}
}

// spanless: the wait has no span. If somebody waits for its caller, its hold gets one.
func (w *waited) spanless() {
	if w.err != nil {
		return
	}
	w.entry.mu.Lock()
	defer w.entry.mu.Unlock()
	w.caller.trail.untold = false
	if w.entry.lock.sought() {
		w.entry.showLocked(w.caller)
	}
}

// look takes the notes of the wait off the trail.
func (w *waited) look() (notes []note, from *spanRef, blocker string) {
	trail := w.caller.trail
	if w.entry == nil {
		return trail.notes, nil, ""
	}
	w.entry.mu.Lock()
	defer w.entry.mu.Unlock()
	n := len(trail.notes)
	if w.err == nil {
		n = trail.own
	}
	notes, trail.notes, trail.own = trail.notes[:n:n], trail.notes[n:], 0
	from = trail.from
	if w.err != nil {
		if owner := w.entry.lock.inside.first; owner != nil {
			from = owner.trail.ref()
		} else {
			blocker = blockerName(w.entry.lock.blocker)
		}
	}
	return notes, from, blocker
}

// tell makes events of notes.
func tell(span trace.Span, notes []note) {
	for _, n := range notes {
		var more []attribute.KeyValue
		if n.what == noteQueued || n.what == noteQueuedInRedis {
			more = append(more, attrPlace.Int(n.place))
		}
		if n.err != nil {
			n.text = n.err.Error()
		}
		if n.text != "" {
			more = append(more, n.what.key().String(n.text))
		}
		span.AddEvent(n.what.String(), trace.WithTimestamp(n.at), trace.WithAttributes(more...))
	}
}

func (k noteKind) String() string {
	return [...]string{"queued", "queued in Redis", "trouble", "woken", "wanted", "downgraded", "lost"}[k]
}

// key is the attribute that a note's text becomes.
func (k noteKind) key() attribute.Key {
	if k == noteQueuedInRedis {
		return attrBlocker
	}
	return attrReason
}

// end has a span ended as of then. Where processors are so slow that thousands
// wait for them, it is dropped.
func (t *tracing) end(span trace.Span, at time.Time) { t.tell(telling{span: span, at: at}) }

// later has f called, which calls an SDK.
func (t *tracing) later(f func()) { t.tell(telling{f: f}) }

func (t *tracing) tell(it telling) {
	if !t.told.add(it) {
		t.client.journal.dropped()
	}
}
