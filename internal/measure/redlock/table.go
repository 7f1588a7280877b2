package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// table is that of docs/redlock.md: a row for each figure, a column for each distance.
type table struct {
	rows  []string // in the order in which they were first set
	cells map[string]map[time.Duration]string
	rtts  []time.Duration
}

// set gives a row its value at a distance.
func (t *table) set(row string, rtt time.Duration, format string, args ...any) {
	if t.cells == nil {
		t.cells = map[string]map[time.Duration]string{}
	}
	if t.cells[row] == nil {
		t.cells[row] = map[time.Duration]string{}
		t.rows = append(t.rows, row)
	}
	if !slices.Contains(t.rtts, rtt) {
		t.rtts = append(t.rtts, rtt)
	}
	t.cells[row][rtt] = fmt.Sprintf(format, args...)
}

// String is the table in Markdown.
func (t *table) String() string {
	var b strings.Builder
	b.WriteString("| round trip to the servers |")
	for _, rtt := range t.rtts {
		if rtt == 0 {
			b.WriteString(" loopback |")
		} else {
			fmt.Fprintf(&b, " %s |", duration(rtt))
		}
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(t.rtts)) + "\n")
	for _, row := range t.rows {
		fmt.Fprintf(&b, "| %s |", row)
		for _, rtt := range t.rtts {
			fmt.Fprintf(&b, " %s |", t.cells[row][rtt])
		}
		b.WriteString("\n")
	}
	return b.String()
}

// duration writes d with two digits or three, in a unit that fits.
func duration(d time.Duration) string {
	switch {
	case d >= time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= 10*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
	case d >= time.Millisecond:
		return strings.Replace(fmt.Sprintf("%.1f ms", d.Seconds()*1e3), ".0 ms", " ms", 1)
	}
	return fmt.Sprintf("%d µs", d.Microseconds())
}

// spread is the median of several rounds with the least and the most.
func spread(all []float64) string {
	s := slices.Sorted(slices.Values(all))
	return fmt.Sprintf("%.2f (%.2f to %.2f)", s[len(s)/2], s[0], s[len(s)-1])
}

// middle is the median.
func middle[T float64 | time.Duration](all []T) T {
	s := slices.Sorted(slices.Values(all))
	return s[len(s)/2]
}
