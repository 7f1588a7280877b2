package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/leasedmutex/leased/internal/measure/figures"
)

// table is the result of a section.
type table struct{ rows []row }

type row struct{ what, figure, baseline, goal string }

func (t *table) add(what, figure, baseline, goal string) {
	t.rows = append(t.rows, row{what, figure, baseline, goal})
}

func (t *table) print(w io.Writer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "  what\tfigure\tbaseline\tgoal")
	for _, r := range t.rows {
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\n", r.what, r.figure, r.baseline, r.goal)
	}
	_ = tw.Flush()
}

// times are samples of one thing.
type times []time.Duration

// at returns the quantile q.
func (t times) at(q float64) time.Duration { return figures.Quantile(t, q) }

func (t times) String() string {
	return fmt.Sprintf("p50 %s p99 %s", short(t.at(.5)), short(t.at(.99)))
}

// short is d with three digits.
func short(d time.Duration) string {
	unit := time.Nanosecond
	for d.Abs()/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit).String()
}

func mark(met bool) string {
	if met {
		return "met"
	}
	return "MISSED"
}

// atMost is a goal, and whether it was met.
func atMost(goal string, met bool) string { return "≤ " + goal + ": " + mark(met) }
