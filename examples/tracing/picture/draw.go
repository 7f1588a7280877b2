package main

import (
	"errors"
	"fmt"
	"html"
	"strings"
	"time"

	"github.com/leasedmutex/leased/examples/tracing/internal/query"
)

// Sizes in pixels, and where the axis of time begins and ends.
const (
	width     = 900
	left      = 190
	right     = width - 125
	rowHeight = 24
	barHeight = 15
	headroom  = 62 // above the first trace
	laneTitle = 30 // above the spans of a trace
	footer    = 66
)

// The card has a background of its own, so that it reads on any page; where the
// reader prefers dark, it is dark.
const style = `
  .card { fill: #ffffff; stroke: #d0d7de }
  .text { fill: #1f2328 } .faint { fill: #59636e } .grid { stroke: #d8dee4 }
  .request { fill: #8c959f } .wait { fill: #f2a33c } .hold { fill: #2f8f5b } .work { fill: #7fb4e6 }
  .link { stroke: #c2255c; fill: none } .tip { fill: #c2255c }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d }
    .text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #2d333b }
    .request { fill: #6e7681 } .wait { fill: #d98e2b } .hold { fill: #3fa56b } .work { fill: #4f8fcb }
    .link { stroke: #ff7aa8 } .tip { fill: #ff7aa8 }
  }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
  .title { font-size: 16px; font-weight: 600 } .lane { font-weight: 600 } .small { font-size: 11.5px }
`

// canvas is an SVG under way.
type canvas struct {
	strings.Builder
	begin time.Time
	span  time.Duration // of the whole axis
	y     int           // of the next row's top
	rows  map[*query.Span]int
}

// draw renders an answer in which one wait links to a hold.
func draw(text []byte) (string, error) {
	answer, err := query.Parse(text)
	if err != nil {
		return "", err
	}
	pairs := answer.Pairs()
	if len(pairs) == 0 {
		return "", errors.New("no span leased.wait in it links to a span leased.hold")
	}
	pair := pairs[len(pairs)-1]
	traces := []*query.Trace{pair.Holder, pair.Waiter}
	if pair.Holder == pair.Waiter {
		traces = traces[:1]
	}

	c := &canvas{y: headroom, rows: map[*query.Span]int{}}
	c.measure(traces)
	lanes := &canvas{begin: c.begin, span: c.span, y: c.y, rows: c.rows}
	for _, t := range traces {
		lanes.lane(t)
	}
	lanes.link(pair)
	height := lanes.y + footer

	c.line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title note">`, width, height, width, height)
	c.line(`<style>%s</style>`, style)
	c.line(`<rect class="card" x="0.5" y="0.5" width="%d" height="%d" rx="8"/>`, width-1, height-1)
	c.line(`<text id="title" class="text title" x="20" y="30">%s</text>`, html.EscapeString(headline(pair)))
	c.axis(lanes.y)
	c.WriteString(lanes.String())
	c.line(`<text id="note" class="faint small" x="20" y="%d">Rendered from the answer of Jaeger’s API (/api/traces?traceID=…&amp;traceID=…) by examples/tracing/picture.</text>`, height-16)
	c.line(`</svg>`)
	return c.String(), nil
}

func headline(p query.Pair) string {
	return fmt.Sprintf("An order in %s waited %s, and its link says for whom: %s", p.Waiter.Sender(p.Wait),
		milliseconds(p.Wait.Took()), p.Holder.Sender(p.Hold))
}

func (c *canvas) line(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

// measure finds the axis: from the first span's begin to the last one's end.
func (c *canvas) measure(traces []*query.Trace) {
	var end time.Time
	for _, t := range traces {
		for _, s := range t.Spans {
			if c.begin.IsZero() || s.Begin().Before(c.begin) {
				c.begin = s.Begin()
			}
			if s.End().After(end) {
				end = s.End()
			}
		}
	}
	c.span = max(end.Sub(c.begin), time.Microsecond)
}

func (c *canvas) x(at time.Time) float64 {
	return left + float64(at.Sub(c.begin))/float64(c.span)*(right-left)
}

// axis draws the grid down to y, and its numbers.
func (c *canvas) axis(y int) {
	step := tick(c.span)
	for at := time.Duration(0); at <= c.span; at += step {
		x := c.x(c.begin.Add(at))
		c.line(`<line class="grid" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`, x, headroom-10, x, y+4)
		c.line(`<text class="faint small" x="%.1f" y="%d" text-anchor="middle">%s</text>`, x, y+20, milliseconds(at))
	}
}

// tick returns a round step that divides the axis into five to twelve.
func tick(span time.Duration) time.Duration {
	for step := time.Microsecond; ; step *= 10 {
		for _, n := range []time.Duration{1, 2, 5} {
			if span/(n*step) < 10 {
				return n * step
			}
		}
	}
}

// lane draws a trace, a row a span.
func (c *canvas) lane(t *query.Trace) {
	spans := t.Ordered()
	c.line(`<text class="text lane" x="20" y="%d">%s</text>`, c.y+14, html.EscapeString(t.Sender(spans[0])))
	c.line(`<text class="faint small" x="110" y="%d">trace %s</text>`, c.y+14, html.EscapeString(t.TraceID))
	c.y += laneTitle
	for _, s := range spans {
		c.rows[s] = c.y
		middle := c.y + barHeight - 3
		c.line(`<text class="text" x="%d" y="%d">%s</text>`, 20+14*t.Depth(s), middle, html.EscapeString(s.OperationName))
		x1, x2 := c.x(s.Begin()), c.x(s.End())
		c.line(`<rect class="%s" x="%.1f" y="%d" width="%.1f" height="%d" rx="2"/>`, kind(s), x1, c.y, max(x2-x1, 2), barHeight)
		c.line(`<text class="faint small" x="%.1f" y="%d">%s</text>`, max(x2, x1+2)+6, middle, html.EscapeString(remark(s)))
		c.y += rowHeight
	}
	c.y += 10
}

func kind(s *query.Span) string {
	switch {
	case s.OperationName == query.Wait:
		return "wait"
	case s.OperationName == query.Hold:
		return "hold"
	case strings.HasPrefix(s.OperationName, "stock."):
		return "work"
	}
	return "request"
}

// remark is what stands beside a span's bar.
func remark(s *query.Span) string {
	text := milliseconds(s.Took())
	switch s.OperationName {
	case query.Wait:
		text += ", " + s.Tag("leased.via")
	case query.Hold:
		text += ", " + s.Tag("leased.hold.outcome")
	}
	return text
}

// link draws the arrow from the wait's row to the hold's, where the one ended
// because the other did.
func (c *canvas) link(p query.Pair) {
	from, to := float64(c.rows[p.Wait]), float64(c.rows[p.Hold]+barHeight)
	x1, x2 := c.x(p.Wait.End())-5, c.x(p.Hold.End())-5
	c.line(`<path class="link" stroke-width="2" d="M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f"/>`,
		x1, from, x1-46, from-24, x2-46, to+34, x2-2, to+8)
	c.line(`<path class="tip" d="M%.1f %.1f l-10 5 l7 6 z"/>`, x2, to+1)
	c.line(`<text class="tip small" x="%.1f" y="%.1f" text-anchor="end">link</text>`, (x1+x2)/2-44, (from+to)/2+4)
}

func milliseconds(d time.Duration) string {
	if d%time.Millisecond == 0 {
		return fmt.Sprintf("%d ms", d/time.Millisecond)
	}
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}
