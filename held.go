package leased

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// released is what there is to tell of a hold.
type released struct {
	entry *entry
	since time.Time
	mode  mode
	via   via
	token uint64
	how   holdResult
	at    time.Time
	late  bool       // it is to be told of, and has no span
	span  trace.Span // nil if there is none
	notes []note
}

// closedLocked takes out what there is to tell of w's hold, once. If its span is
// yet to begin, whoever begins it will tell.
func (e *entry) closedLocked(w *caller, how holdResult, at time.Time) (r released, ok bool) {
	if w.since < 0 {
		return r, false
	}
	r = released{entry: e, since: e.client.began.Add(w.since), mode: w.mode, via: w.via, token: w.token, how: how, at: at}
	w.since = -1
	if t := w.trail; t != nil {
		t.how, t.ended = how, at
		switch {
		case t.span != nil:
			r.span, r.notes = t.span, t.rest()
		case how != holdReleased && !w.leased && t.claim():
			r.late, r.notes = true, t.rest()
		}
	}
	return r, true
}

// left measures and traces a hold that has ended.
func (c *Client) left(r *released) {
	if r.late {
		r.span = c.tracing.newHold(context.Background(), r) // nobody waited for it, but this is to be told
	}
	c.metrics.released(r)
	if r.span != nil {
		c.tracing.released(r)
	}
}

// released ends the hold span.
func (t *tracing) released(r *released) {
	r.span.SetAttributes(attrOutcome.String(r.how.String()), attrMode.String(r.mode.String()), attrToken.Int64(int64(r.token)))
	tell(r.span, r.notes)
	if r.how != holdReleased {
		r.span.SetStatus(codes.Error, r.how.String())
	}
	t.end(r.span, r.at)
}

// showLocked has the hold of c get a span, for a link to lead to, now that somebody
// waits for it; unless it has one, or its caller will begin it. Nobody waits for that:
// a lease that ends before its span has begun is let go without the link.
func (e *entry) showLocked(c *caller) {
	if c.phase != inside || c.leased || c.since < 0 || c.trail == nil || c.trail.untold || !c.trail.claim() {
		return
	}
	t, since := e.client.tracing, e.client.began.Add(c.since)
	t.later(func() { t.hold(context.Background(), e, c, since) })
}

// showAllLocked does that for all who are inside, when somebody begins to wait.
func (e *entry) showAllLocked() {
	sought := e.lock.sought()
	if sought && !e.sought {
		for c := e.lock.inside.first; c != nil; c = c.next {
			e.showLocked(c)
		}
	}
	e.sought = sought
}

// hold begins the hold span of a caller who is inside since then, for the one who
// claimed to. What became of the hold meanwhile it is the span's to tell.
func (t *tracing) hold(ctx context.Context, e *entry, c *caller, since time.Time) {
	span := t.newHold(ctx, &released{entry: e, since: since, mode: c.mode, via: c.via, token: c.token})
	if span == nil {
		return
	}
	ref := span.SpanContext()
	e.mu.Lock()
	trail := c.trail
	trail.span = span
	if ref.IsSampled() {
		trail.hold = &ref
	}
	over := !trail.ended.IsZero()
	r := released{mode: c.mode, token: c.token, how: trail.how, at: trail.ended, span: span}
	if over {
		r.notes = trail.rest()
	}
	e.mu.Unlock()
	if over {
		if r.at.Before(since) {
			r.at = since
		}
		t.released(&r)
	}
}

// newHold begins a hold span, now or for a time before.
func (t *tracing) newHold(ctx context.Context, h *released) trace.Span {
	tracer := t.tracer()
	if tracer == nil {
		return nil
	}
	_, span := tracer.Start(ctx, spanHold, trace.WithTimestamp(h.since))
	if !span.IsRecording() {
		return nil
	}
	span.SetAttributes(attrLock.String(h.entry.keys.name), attrMode.String(h.mode.String()), attrVia.String(h.via.String()),
		attrToken.Int64(int64(h.token)))
	return span
}
