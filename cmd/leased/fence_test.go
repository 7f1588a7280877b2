package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

var updateFiles = flag.Bool("update", false, "write docs/fencing.svg and docs/leased.1 anew")

func TestFencingHelpsOnlyAtTheFirstAccess(t *testing.T) {
	onServers(t, func(t *testing.T, flags []string, leftovers func() []string) {
		got := invoke(t, append([]string{"demo", "--fence", "--stock", "6"}, flags...)...)
		if got.status != 0 || got.err != "" {
			t.Fatalf("status %d, stderr %q, stdout:\n%s", got.status, got.err, got.out)
		}
		rest := got.out
		for _, want := range []string{
			"Without tokens", "A writes 5: accepted", "B writes 5: accepted", "12 sold from a stock of 6: 6 too many.",
			"at the write only", "A writes 5: accepted", "B writes 5: accepted", "12 sold from a stock of 6: 6 too many.",
			"at the first access", "A writes 5: refused", "B writes 5: accepted", "6 sold from a stock of 6, 6 refused, none too many.",
		} {
			_, after, found := strings.Cut(rest, want)
			if !found {
				t.Fatalf("no %q at its place in:\n%s", want, got.out)
			}
			rest = after
		}
		if left := leftovers(); len(left) > 0 {
			t.Errorf("left in Redis: %q", left)
		}
	})
}

func TestThePictureOfFencingIsOfARealRun(t *testing.T) {
	m := redistest.MiniTCP(t)
	std := discard()
	sales, err := sellFenced(t.Context(), address{Redis: m.Addr()}, 10, newScreen(std.out))
	if err != nil {
		t.Fatal(err)
	}
	const file = "../../docs/fencing.svg"
	drawn := drawFencing(sales)
	if *updateFiles {
		if err := os.WriteFile(file, []byte(drawn), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(kept) != drawn {
		t.Errorf("%s is not what a run gives: go test ./cmd/leased -run Picture -update", file)
	}
}

// drawFencing draws the first pair of sales by each kind of fencing, as sequences. Tokens
// are numbered in their order, because those of each run are others.
func drawFencing(sales []*fenceSale) string {
	const (
		panel   = 300
		top     = 96
		row     = 40
		a, s, b = 55, 150, 245 // the lifelines of A, the stock and B
		rows    = 7
		width   = 3*panel + 2*10
		height  = top + rows*row + 70
	)
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title note">`, width, height, width, height)
	line(`<style>
  .card { fill: #ffffff; stroke: #d0d7de }
  .text { fill: #1f2328 } .faint { fill: #59636e } .life { stroke: #d8dee4 } .split { stroke: #d8dee4 }
  .read { stroke: #2a6fb0; fill: none } .good { stroke: #2f8f5b; fill: none } .bad { stroke: #c2255c; fill: none }
  .goodtext { fill: #23774a } .badtext { fill: #c2255c }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d }
    .text { fill: #e6edf3 } .faint { fill: #9198a1 } .life { stroke: #3d444d } .split { stroke: #2d333b }
    .read { stroke: #7fb4e6 } .good { stroke: #3fa56b } .bad { stroke: #ff7aa8 }
    .goodtext { fill: #56c288 } .badtext { fill: #ff7aa8 }
  }
  text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
  .title { font-size: 16px; font-weight: 600 } .lane { font-weight: 600 } .small { font-size: 11px }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/></marker></defs>`)
	line(`<rect class="card" x="0.5" y="0.5" width="%d" height="%d" rx="8"/>`, width-1, height-1)
	line(`<text id="title" class="text title" x="20" y="30">The lock&#8217;s key is deleted while A is at work, and B gets the lock as well</text>`)
	for i, sale := range sales {
		x := 10 + i*panel
		if i > 0 {
			line(`<line class="split" x1="%d" y1="48" x2="%d" y2="%d"/>`, x, x, height-20)
		}
		line(`<text class="text lane" x="%d" y="60">%s</text>`, x+10, strings.Replace(sale.title, "With the t", "T", 1))
		for n, name := range []string{"A", "stock", "B"} {
			at := x + []int{a, s, b}[n]
			line(`<text class="faint small" x="%d" y="80" text-anchor="middle">%s</text>`, at, name)
			line(`<line class="life" x1="%d" y1="88" x2="%d" y2="%d"/>`, at, at, top+rows*row-8)
		}
		ordinals := map[uint64]int{}
		for n, step := range sale.sample {
			y := top + n*row + 18
			if step.verb == verbDeletes {
				line(`<text class="faint small" x="%d" y="%d" text-anchor="middle">the lock&#8217;s key is deleted</text>`, x+s, y+4)
				continue
			}
			from, to := x+a, x+s
			if step.owner == 1 {
				from = x + b
			}
			middle := (from + to) / 2
			switch step.verb {
			case verbLocks:
				ordinals[step.token] = len(ordinals) + 7
				line(`<text class="text small" x="%d" y="%d" text-anchor="middle">has the lock,</text>`, from, y-2)
				line(`<text class="text small" x="%d" y="%d" text-anchor="middle">token %d</text>`, from, y+12, ordinals[step.token])
			case verbReads:
				line(`<line class="read" x1="%d" y1="%d" x2="%d" y2="%d" marker-end="url(#tip)"/>`, from, y, to, y)
				line(`<text class="text small" x="%d" y="%d" text-anchor="middle">reads %d</text>`, middle, y-6, step.value)
			case verbWrites:
				class, verdict := "good", "sold"
				if step.refused {
					class, verdict = "bad", "refused"
				}
				line(`<line class="%s" x1="%d" y1="%d" x2="%d" y2="%d" marker-end="url(#tip)"/>`, class, from, y, to, y)
				line(`<text class="text small" x="%d" y="%d" text-anchor="middle">writes %d</text>`, middle, y-6, step.value)
				line(`<text class="%stext small" x="%d" y="%d" text-anchor="middle">%s</text>`, class, middle, y+14, verdict)
			}
		}
		y := height - 42
		if n := sale.tooMany(); n > 0 {
			line(`<text class="badtext lane" x="%d" y="%d">%d sold from %d: %d too many</text>`, x+10, y, sale.sold, sale.stock, n)
		} else {
			line(`<text class="goodtext lane" x="%d" y="%d">%d sold from %d, none too many</text>`, x+10, y, sale.sold, sale.stock)
		}
	}
	line(`<text id="note" class="faint small" x="20" y="%d">Drawn from a run of leased demo --fence; the tokens of A and B are numbered 7 and 8.</text>`, height-16)
	line(`</svg>`)
	return out.String()
}
