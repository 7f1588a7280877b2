package protocol

import "encoding/hex"

// Span identifies a span of this or another process in the way of the traceparent header of
// W3C Trace Context. With it, neither this package nor the state machine depends on
// OpenTelemetry.
type Span struct {
	TraceID [16]byte
	SpanID  [8]byte
	Flags   byte
	Remote  bool // it belongs to another process
}

// NoSpan stands for a missing span in a command or message.
const NoSpan = "-"

// Valid reports whether s identifies a span. The zero value does not.
func (s *Span) Valid() bool {
	return s.TraceID != [16]byte{} && s.SpanID != [8]byte{}
}

// FormatSpan formats a span like the traceparent header, and nil as NoSpan.
func FormatSpan(s *Span) string {
	if s == nil || !s.Valid() {
		return NoSpan
	}
	b := make([]byte, 0, 55)
	b = append(b, "00-"...)
	b = hex.AppendEncode(b, s.TraceID[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, s.SpanID[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, []byte{s.Flags})
	return string(b)
}

// parseSpan is the inverse of FormatSpan. It returns nil for any other text, because any
// client with permission to publish can have sent it.
func parseSpan(text string) *Span {
	if len(text) != 55 || text[:3] != "00-" || text[35] != '-' || text[52] != '-' {
		return nil
	}
	s := Span{Remote: true}
	var flags [1]byte
	for _, part := range []struct {
		to   []byte
		from string
	}{{s.TraceID[:], text[3:35]}, {s.SpanID[:], text[36:52]}, {flags[:], text[53:]}} {
		if _, err := hex.Decode(part.to, []byte(part.from)); err != nil {
			return nil
		}
	}
	s.Flags = flags[0]
	if !s.Valid() {
		return nil
	}
	return &s
}
