package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// table is the table of docs/redlock.md: a row for each figure, a column for each distance.
type table struct {
	rows  []string // in the order in which they were first set
	cells map[string]map[distance]string
	at    []distance // in the order in which they were first set
}

// set gives a row its value at a distance.
func (t *table) set(row string, d distance, format string, args ...any) {
	if t.cells == nil {
		t.cells = map[string]map[distance]string{}
	}
	if t.cells[row] == nil {
		t.cells[row] = map[distance]string{}
		t.rows = append(t.rows, row)
	}
	if !slices.Contains(t.at, d) {
		t.at = append(t.at, d)
	}
	t.cells[row][d] = fmt.Sprintf(format, args...)
}

// String returns the table in Markdown.
func (t *table) String() string {
	var b strings.Builder
	b.WriteString("| round trip to the servers |")
	for _, d := range t.at {
		fmt.Fprintf(&b, " %v |", d)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(t.at)) + "\n")
	for _, row := range t.rows {
		fmt.Fprintf(&b, "| %s |", row)
		for _, d := range t.at {
			fmt.Fprintf(&b, " %s |", t.cells[row][d])
		}
		b.WriteString("\n")
	}
	return b.String()
}

// duration formats d with two or three digits, in a unit that fits.
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

// spread formats the median of several rounds, with the least and the greatest.
func spread(all []float64) string {
	s := slices.Sorted(slices.Values(all))
	return fmt.Sprintf("%.2f (%.2f to %.2f)", s[len(s)/2], s[0], s[len(s)-1])
}
