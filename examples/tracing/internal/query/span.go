package query

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Names that the library gives its spans.
const (
	Wait = "leased.wait"
	Hold = "leased.hold"
)

// Begin returns the time at which the span began.
func (s *Span) Begin() time.Time { return time.UnixMicro(s.StartTime) }

// End returns the time at which it ended.
func (s *Span) End() time.Time { return time.UnixMicro(s.StartTime + s.Duration) }

// Took returns how long it lasted.
func (s *Span) Took() time.Duration { return time.Duration(s.Duration) * time.Microsecond }

// Tag returns an attribute as text, "" without one.
func (s *Span) Tag(key string) string { return find(s.Tags, key) }

func find(tags []Tag, key string) string {
	for _, t := range tags {
		if t.Key != key {
			continue
		}
		if n, ok := t.Value.(float64); ok { // JSON has no other numbers; tokens are below 2^53
			return fmt.Sprintf("%.0f", n)
		}
		return fmt.Sprint(t.Value)
	}
	return ""
}

// Events returns the names of the span's events, in order.
func (s *Span) Events() []string {
	var names []string
	for _, l := range s.Logs {
		names = append(names, find(l.Fields, "event"))
	}
	return names
}

// Links returns the spans that this one links to, its parent not among them.
func (s *Span) Links() []Reference {
	var links []Reference
	for _, r := range s.References {
		if r.RefType == "FOLLOWS_FROM" {
			links = append(links, r)
		}
	}
	return links
}

// Sender returns the process that sent s, by its instance id if it told one.
func (t *Trace) Sender(s *Span) string {
	p := t.Processes[s.ProcessID]
	return cmp.Or(find(p.Tags, "service.instance.id"), p.ServiceName)
}

// Parent returns the parent of s, nil for a root.
func (t *Trace) Parent(s *Span) *Span {
	for _, r := range s.References {
		if r.RefType != "CHILD_OF" || r.TraceID != t.TraceID {
			continue
		}
		for _, p := range t.Spans {
			if p.SpanID == r.SpanID {
				return p
			}
		}
	}
	return nil
}

// Named returns the first span with a name, nil without one.
func (t *Trace) Named(name string) *Span {
	for _, s := range t.Ordered() {
		if s.OperationName == name {
			return s
		}
	}
	return nil
}

// Depth returns how many parents s has in t.
func (t *Trace) Depth(s *Span) int {
	depth := 0
	for p := t.Parent(s); p != nil && depth < len(t.Spans); p = t.Parent(p) {
		depth++
	}
	return depth
}

// Ordered returns the spans in the order they began, parents before children.
func (t *Trace) Ordered() []*Span {
	spans := slices.Clone(t.Spans)
	slices.SortStableFunc(spans, func(a, b *Span) int {
		return cmp.Or(cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(t.Depth(a), t.Depth(b)))
	})
	return spans
}

// Pair is a caller who waited, and the lease that it waited for.
type Pair struct {
	Waiter, Holder *Trace
	Wait, Hold     *Span
}

// Between says whether the two were in different processes.
func (p Pair) Between() bool {
	return p.Waiter.Sender(p.Wait) != p.Holder.Sender(p.Hold)
}

// Share returns how much of the wait was spent on this hold, from 0 to 1.
func (p Pair) Share() float64 {
	both := min(p.Wait.StartTime+p.Wait.Duration, p.Hold.StartTime+p.Hold.Duration) - max(p.Wait.StartTime, p.Hold.StartTime)
	return float64(max(both, 0)) / float64(max(p.Wait.Duration, 1))
}

// Pairs returns every wait whose link leads to a hold span in the same answer, in
// the order the waits ended.
func (a *Answer) Pairs() []Pair {
	type place struct {
		trace *Trace
		span  *Span
	}
	places := map[Reference]place{}
	for _, t := range a.Data {
		for _, s := range t.Spans {
			places[Reference{TraceID: t.TraceID, SpanID: s.SpanID}] = place{t, s}
		}
	}
	var pairs []Pair
	for _, t := range a.Data {
		for _, s := range t.Spans {
			if s.OperationName != Wait {
				continue
			}
			for _, l := range s.Links() {
				if p, ok := places[Reference{TraceID: l.TraceID, SpanID: l.SpanID}]; ok && p.span.OperationName == Hold {
					pairs = append(pairs, Pair{t, p.trace, s, p.span})
				}
			}
		}
	}
	slices.SortFunc(pairs, func(a, b Pair) int { return a.Wait.End().Compare(b.Wait.End()) })
	return pairs
}
