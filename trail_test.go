package leased

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
)

func span(id, span byte) *spanRef {
	s := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{15: id}, SpanID: trace.SpanID{7: span}, TraceFlags: trace.FlagsSampled,
	})
	return &s
}

func TestASpanIsWrittenAsATraceparentAndReadBack(t *testing.T) {
	s := span(0xab, 1)
	text := formatSpan(s)
	if text != "00-000000000000000000000000000000ab-0000000000000001-01" {
		t.Errorf("written as %s", text)
	}
	got := parseSpan(text)
	if got == nil || !got.Equal(s.WithRemote(true)) {
		t.Errorf("read as %v", got)
	}
	for _, none := range []*spanRef{nil, {}} {
		if text := formatSpan(none); text != "-" {
			t.Errorf("none is written as %q", text)
		}
	}
}

func FuzzParseSpan(f *testing.F) {
	good := formatSpan(span(1, 2))
	for _, text := range []string{
		"", "-", good, good + "00", good + "-", good[1:], "01" + good[2:], strings.ToUpper(formatSpan(span(0xab, 0xcd))),
		strings.Repeat("0", 55), "00-" + strings.Repeat("0", 32) + good[35:], good[:53] + "zz", good[:36] + strings.Repeat("0", 16) + good[52:],
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s := parseSpan(text)
		if s == nil {
			return
		}
		if !s.IsValid() || !s.IsRemote() {
			t.Errorf("%q is read as %v", text, s)
		}
		if again := formatSpan(s); !strings.EqualFold(again, text) {
			t.Errorf("%q is written again as %q", text, again)
		}
	})
}

// Whoever may publish can send nonsense for a span. The lock it is about comes all
// the same.
func TestGarbageInPlaceOfASpanGrantsAllTheSame(t *testing.T) {
	for _, text := range []string{"-", "x", "00-zz-zz-01", strings.Repeat("f", 400), formatSpan(span(0, 0))} {
		c := writer()
		c.trail = &trail{}
		h, req := queueing(t, c)
		token := h.token()
		m, ok := parseMessage("leased1:granted " + strconv.FormatUint(token, 10) + " " + strconv.FormatUint(h.clock(), 10) + " 0 " + text + " " + req.id + " x")
		if !ok {
			t.Fatalf("%q: not read", text)
		}
		h.step(func(now time.Time, fx *effects) { h.l.receive(&m, now, fx) })
		h.in(c)
		if c.trail.from != nil {
			t.Errorf("%q: a link to %v", text, c.trail.from)
		}
	}
}
