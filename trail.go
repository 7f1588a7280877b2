package leased

import (
	"context"
	"encoding/hex"
	"time"

	"go.opentelemetry.io/otel/trace"
)

// trail is what happened to one caller, for its spans to tell. The lock writes it
// with its own events, so it calls no user's code and reads no clock; tracing.go
// makes spans of it afterwards. A nil trail takes no notes: most callers have none.
type trail struct {
	notes []note
	from  *spanRef // hold span of the lease that let this one in, nil if not known
	hold  *spanRef // its own, for those whom it lets in; nil if nobody would find it
	own   int      // so many notes are of the wait

	parent  trace.SpanContext // of the spans
	span    trace.Span        // of the hold, nil until it has begun
	untold  bool              // its caller is yet to tell of its wait, and may begin the span then
	claimed bool              // somebody begins, or has begun, the span of the hold
	how     holdResult        // what became of a hold that was over before it had a span
	ended   time.Time         // when, zero if it was not
}

// spanRef names a span of this or another process.
type spanRef = trace.SpanContext

type note struct {
	at    time.Time
	what  noteKind
	place int // queued: how many wait before it
	text  string
	err   error // what the text is of; read later, for its method may be a user's
}

type noteKind uint8

const (
	noteQueued        noteKind = iota // behind others of this process
	noteQueuedInRedis                 // behind others' processes; text: who blocks
	noteTrouble                       // Redis did not do what was asked
	noteWoken
	noteWanted // somebody is queued behind the grant
	noteDowngraded
	noteLost
)

const mostNotes = 64 // trouble can last; what is told besides ends it or is rare

func (t *trail) note(n note) {
	if t != nil && (n.what != noteTrouble || len(t.notes) < mostNotes) {
		t.notes = append(t.notes, n)
	}
}

// admitted: its caller enters, let in by the lease whose hold span passed is.
func (t *trail) admitted(how via, passed *spanRef, now time.Time) {
	if t == nil || len(t.notes) == 0 && how != viaDirect {
		return // it waited for nothing but the answer of Redis
	}
	t.note(note{at: now, what: noteWoken})
	t.own = len(t.notes)
	if how == viaLocal || how == viaDirect {
		t.from = passed
	}
}

// rest takes out the notes of the hold. Those of the wait stay for who waited:
// another may unlock before he has told of them.
func (t *trail) rest() []note {
	n := t.own
	rest := t.notes[n:]
	t.notes = t.notes[:n:n]
	return rest
}

// context returns ctx with the hold span as parent of what is done, if ctx has the
// parent that the spans of this trail have.
func (t *trail) context(ctx context.Context) context.Context {
	if t == nil || t.span == nil || !trace.SpanContextFromContext(ctx).Equal(t.parent) {
		return ctx
	}
	return trace.ContextWithSpan(ctx, t.span)
}

// claim reports whether the asker is to begin the span of the hold: one is.
func (t *trail) claim() bool {
	if t == nil || t.claimed {
		return false
	}
	t.claimed = true
	return true
}

// sought reports whether anybody waits for who is inside.
func (l *lock) sought() bool { return l.waiting.first != nil || l.grant.wanted }

// ref returns the caller's hold span.
func (t *trail) ref() *spanRef {
	if t == nil {
		return nil
	}
	return t.hold
}

// noteInside takes a note for everybody whose lease depends on the grant.
func (l *lock) noteInside(n note) {
	for c := l.inside.first; c != nil; c = c.next {
		if !c.stray {
			c.trail.note(n)
		}
	}
}

// noSpan stands where a command or message does not carry a span.
const noSpan = "-"

// formatSpan writes a span as the traceparent header of W3C Trace Context does.
func formatSpan(s *spanRef) string {
	if s == nil || !s.IsValid() {
		return noSpan
	}
	id, span := s.TraceID(), s.SpanID()
	b := make([]byte, 0, 55)
	b = append(b, "00-"...)
	b = hex.AppendEncode(b, id[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, span[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, []byte{byte(s.TraceFlags())})
	return string(b)
}

// parseSpan reads what formatSpan wrote; nil for anything else. It comes from
// whoever may publish.
func parseSpan(text string) *spanRef {
	if len(text) != 55 || text[:3] != "00-" || text[35] != '-' || text[52] != '-' {
		return nil
	}
	id, err := trace.TraceIDFromHex(text[3:35])
	if err != nil {
		return nil
	}
	span, err := trace.SpanIDFromHex(text[36:52])
	if err != nil {
		return nil
	}
	flags, err := hex.DecodeString(text[53:])
	if err != nil {
		return nil
	}
	s := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: id, SpanID: span, TraceFlags: trace.TraceFlags(flags[0]), Remote: true,
	})
	return &s
}
