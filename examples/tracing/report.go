package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/leasedmutex/leased/examples/tracing/internal/query"
)

const arriveFor = 20 * time.Second // the longest that the last trace may take to Jaeger

// explain tells what to look for, and shows it in one pair of traces.
func (s *show) explain(ctx context.Context, began time.Time) error {
	s.screen.line(`
What to look for: the span leased.wait of a caller that had to wait has a link to the span
leased.hold of the lease that let it in, also when that was in another process.`)
	if s.jaeger.URL == "" {
		s.screen.line("Service %s, operation %s, in whatever is behind %s.", serviceName, query.Wait, s.otlp)
		return nil
	}
	answer, err := s.gather(ctx, began)
	if err != nil {
		return err
	}
	pairs := answer.Pairs()
	s.tellAll(pairs)
	best, found := clearest(pairs)
	if !found {
		return errors.New("no order waited for one of another process: try more --orders, or a longer --think")
	}
	answer, text, err := s.jaeger.Traces(ctx, best.Holder.TraceID, best.Waiter.TraceID)
	if err != nil {
		return err
	}
	if best, found = clearest(answer.Pairs()); !found {
		return errors.New("the link between two traces is gone from Jaeger")
	}
	for _, line := range picture(best) {
		s.screen.line("%s", line)
	}
	if s.options.save == "" {
		return nil
	}
	if err := os.WriteFile(s.options.save, text, 0o644); err != nil {
		return err
	}
	s.screen.line("\nJaeger's answer is in %s", s.options.save)
	return nil
}

// gather returns the traces of all orders, once Jaeger has them all.
func (s *show) gather(ctx context.Context, began time.Time) (*query.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, arriveFor)
	defer cancel()
	tick := time.NewTicker(batchFor / 2)
	defer tick.Stop()
	for arrived := 0; ; {
		answer, err := s.jaeger.Since(ctx, serviceName, began, 2*s.options.orders)
		if err == nil {
			if arrived = complete(answer); arrived >= s.options.orders {
				return answer, nil
			}
		}
		s.screen.progress("   waiting for the last traces: %d of %d", arrived, s.options.orders)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("only %d of %d traces are in Jaeger after %v: %w", arrived,
				s.options.orders, arriveFor, errors.Join(err, context.Cause(ctx)))
		}
	}
}

// complete counts the orders whose spans have arrived. A hold ends before its order.
func complete(answer *query.Answer) int {
	n := 0
	for _, t := range answer.Data {
		if t.Named(orderSpan) != nil && t.Named(query.Hold) != nil {
			n++
		}
	}
	return n
}

// clearest returns the wait for another process that is best to look at: the one that
// was spent on a single lease most of all. The others waited for several in turn, and
// their links lead to the last of them, whose own link leads to the one before.
func clearest(pairs []query.Pair) (best query.Pair, found bool) {
	for _, p := range pairs {
		if p.Between() && (!found || p.Share() > best.Share()) {
			best, found = p, true
		}
	}
	return best, found
}

// tellAll lists the waits.
func (s *show) tellAll(pairs []query.Pair) {
	s.screen.line("\nWho waited for whom, as Jaeger tells it:\n")
	s.screen.line("   %-10s %10s   %-8s %-10s %s", "process", "waited", "came by", "let in by", "its trace")
	for _, p := range pairs {
		s.screen.line("   %-10s %10s   %-8s %-10s %s", p.Waiter.Sender(p.Wait), milliseconds(p.Wait.Took()),
			p.Wait.Tag("leased.via"), p.Holder.Sender(p.Hold), p.Holder.TraceID)
	}
}

const barWidth = 40

// picture draws two traces on one axis of time, as lines of text.
func picture(p query.Pair) []string {
	traces := []*query.Trace{p.Holder, p.Waiter}
	begin, end := p.Hold.Begin(), p.Hold.End()
	for _, t := range traces {
		for _, span := range t.Spans {
			begin, end = earlier(begin, span.Begin()), later(end, span.End())
		}
	}
	perColumn := max(end.Sub(begin)/barWidth, 1)
	lines := []string{"\nOne that waited for another process, and the order that it waited for. Times are since", "the first of the two began:"}
	for _, t := range traces {
		root := t.Ordered()[0]
		lines = append(lines, "", fmt.Sprintf("   %s, trace %s", t.Sender(root), t.TraceID))
		for _, span := range t.Ordered() {
			from := int(span.Begin().Sub(begin) / perColumn)
			columns := max(int(span.End().Sub(begin)/perColumn)-from, 1)
			bar := strings.Repeat(" ", min(from, barWidth-1)) + strings.Repeat(shade(span), columns)
			name := strings.Repeat("  ", t.Depth(span)) + span.OperationName
			lines = append(lines, strings.TrimRight(fmt.Sprintf("   %-18s %9s %9s  %-*s %s", name,
				milliseconds(span.Begin().Sub(begin)), milliseconds(span.Took()), barWidth, bar, remark(p, span)), " "))
		}
	}
	return append(lines, "",
		fmt.Sprintf("   ⮡ the link: leased.wait of %s → leased.hold of %s, span %s of trace %s",
			p.Waiter.Sender(p.Wait), p.Holder.Sender(p.Hold), p.Hold.SpanID, p.Hold.TraceID))
}

// shade is what a span's bar is made of: waiting is light, holding is dark.
func shade(span *query.Span) string {
	switch span.OperationName {
	case query.Wait:
		return "░"
	case query.Hold:
		return "█"
	}
	return "─"
}

// remark says what is worth knowing of a span.
func remark(p query.Pair, span *query.Span) string {
	var words []string
	switch span.OperationName {
	case query.Wait:
		words = append(words, span.Tag("leased.via"))
	case query.Hold:
		words = append(words, span.Tag("leased.hold.outcome"))
	}
	if span == p.Wait {
		words = append(words, "⮡")
	}
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), " ")
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
