package protocol

import (
	"strings"
	"testing"
)

func TestASpanIsWrittenAsATraceparentAndReadBack(t *testing.T) {
	s := spanOf(0xab, 1)
	text := FormatSpan(s)
	if text != "00-000000000000000000000000000000ab-0000000000000001-01" {
		t.Errorf("written as %s", text)
	}
	got := parseSpan(text)
	s.Remote = true
	if got == nil || *got != *s {
		t.Errorf("read as %v", got)
	}
	for _, none := range []*Span{nil, {}} {
		if text := FormatSpan(none); text != "-" {
			t.Errorf("none is written as %q", text)
		}
	}
}

func FuzzParseSpan(f *testing.F) {
	good := FormatSpan(spanOf(1, 2))
	for _, text := range []string{
		"", "-", good, good + "00", good + "-", good[1:], "01" + good[2:], strings.ToUpper(FormatSpan(spanOf(0xab, 0xcd))),
		strings.Repeat("0", 55), "00-" + strings.Repeat("0", 32) + good[35:], good[:53] + "zz", good[:36] + strings.Repeat("0", 16) + good[52:],
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s := parseSpan(text)
		if s == nil {
			return
		}
		if !s.Valid() || !s.Remote {
			t.Errorf("%q is read as %v", text, s)
		}
		if again := FormatSpan(s); !strings.EqualFold(again, text) {
			t.Errorf("%q is written again as %q", text, again)
		}
	})
}

func spanOf(id, span byte) *Span {
	return &Span{TraceID: [16]byte{15: id}, SpanID: [8]byte{7: span}, Flags: 1}
}
