package leased

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// guarded is what a lock guards: plain memory, and an atomic count of those who
// are inside.
type guarded struct {
	n       int
	entries []int
	by      map[int]int
	tokens  []uint64
	holders atomic.Int32
	readers atomic.Int32
}

func newGuarded() *guarded { return &guarded{by: map[int]int{}} }

func (g *guarded) write(t *testing.T, who int) {
	if n := g.holders.Add(1); n != 1 || g.readers.Load() != 0 {
		t.Errorf("%d writers and %d readers inside", n, g.readers.Load())
	}
	g.n++
	g.entries = append(g.entries, who)
	g.by[who]++
	g.holders.Add(-1)
}

func (g *guarded) read(t *testing.T) {
	g.readers.Add(1)
	if n := g.holders.Load(); n != 0 {
		t.Errorf("%d writers inside with a reader", n)
	}
	if len(g.entries) != g.n {
		t.Errorf("%d entries, count %d", len(g.entries), g.n)
	}
	g.readers.Add(-1)
}

func (g *guarded) check(t *testing.T, n int) {
	t.Helper()
	if g.n != n || len(g.entries) != n {
		t.Errorf("%d and %d entries, want %d", g.n, len(g.entries), n)
	}
}

// traffic is what the mirror may say, by name.
var traffic = map[string]struct{ others, crossed float64 }{
	"alone":              {0, 0},
	"others wait":        {0.5, 0},
	"messages cross":     {0, 0.7},
	"both":               {0.5, 0.5},
	"all by a message":   {1, 1},
	"always others wait": {1, 0},
}

func underTraffic(t *testing.T, f func(t *testing.T, c *Client)) {
	for name, tr := range traffic {
		t.Run(name, func(t *testing.T) {
			f(t, onMirror(t, tr.others, tr.crossed, WithLocalHandoffs(4, time.Millisecond)))
		})
	}
}

// together has callers do something at once, and waits for all of them.
func together(callers int, f func(who int)) {
	var all sync.WaitGroup
	for who := range callers {
		all.Go(func() { f(who) })
	}
	all.Wait()
}

func rounds(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}
