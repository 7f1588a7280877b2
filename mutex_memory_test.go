package leased

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// What is written before an Unlock is seen after the next Lock of the client.
// The race detector proves it, for nothing but the client orders these accesses;
// without it, lost updates and the atomic count would show.

func TestUnlockSynchronizesBeforeTheNextLockOfManyGoroutines(t *testing.T) {
	underTraffic(t, func(t *testing.T, c *Client) {
		const callers = 64
		n := rounds(100)
		g := newGuarded()
		together(callers, func(who int) {
			mu := c.Mutex("x")
			for range n {
				mu.Lock()
				g.write(t, who)
				mu.Unlock()
			}
		})
		g.check(t, callers*n)
		for who, k := range g.by {
			if k != n {
				t.Errorf("caller %d entered %d times", who, k)
			}
		}
	})
}

// With one caller at a time the lock is forgotten after each Unlock and made anew by the
// next Lock: what orders them is the table.
func TestUnlockSynchronizesBeforeTheNextLockOfAForgottenLock(t *testing.T) {
	c := onStub(t, 0, 0)
	g := newGuarded()
	n := rounds(2000)
	together(2, func(who int) {
		mu := c.Mutex("x")
		for range n {
			mu.Lock()
			g.write(t, who)
			mu.Unlock()
		}
	})
	g.check(t, 2*n)
}

func TestAnIdleGrantsNextLockSeesWhatWasWrittenBefore(t *testing.T) {
	c := onStub(t, 0, 0, WithIdleHold(time.Hour))
	g := newGuarded()
	n := rounds(2000)
	together(4, func(who int) {
		for range n {
			l, err := c.Mutex("x").LockContext(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			g.write(t, who)
			g.tokens = append(g.tokens, l.Token())
			if err := l.Unlock(); err != nil {
				t.Error(err)
			}
		}
	})
	g.check(t, 4*n)
	for i := 1; i < len(g.tokens); i++ {
		if g.tokens[i] <= g.tokens[i-1] {
			t.Fatalf("token %d after %d", g.tokens[i], g.tokens[i-1])
		}
	}
}

func TestAnotherGoroutinesUnlockSynchronizesToo(t *testing.T) {
	c := onStub(t, 0, 0)
	g := newGuarded()
	n := rounds(1000)
	together(8, func(who int) {
		mu := c.Mutex("x")
		for range n {
			mu.Lock()
			g.write(t, who)
			unlocked := make(chan struct{})
			go func() {
				defer close(unlocked)
				g.n++ // under the other's Lock
				mu.Unlock()
			}()
			<-unlocked
		}
	})
	if g.n != 16*n || len(g.entries) != 8*n {
		t.Errorf("count %d, %d entries", g.n, len(g.entries))
	}
}

func TestTryLockThatSucceedsSynchronizesLikeLock(t *testing.T) {
	underTraffic(t, func(t *testing.T, c *Client) {
		g := newGuarded()
		n := rounds(200)
		var got atomic.Int64
		together(16, func(who int) {
			mu := c.Mutex("x")
			for i := range n {
				if i%2 == 0 {
					mu.Lock()
				} else if !mu.TryLock() {
					continue
				}
				got.Add(1)
				g.write(t, who)
				mu.Unlock()
			}
		})
		g.check(t, int(got.Load()))
	})
}

// A cancellation that crosses the hand-off leaves the lock to the next caller: no caller
// enters twice, and none is forgotten.
func TestACancellationThatCrossesTheHandoverKeepsTheOrder(t *testing.T) {
	underTraffic(t, func(t *testing.T, c *Client) {
		g := newGuarded()
		n := rounds(200)
		var got, gaveUp atomic.Int64
		together(32, func(who int) {
			mu := c.Mutex("x")
			for i := range n {
				ctx, cancel := context.WithCancel(context.Background())
				if i%2 == 0 {
					go func() {
						for range rand.IntN(200) {
							_ = ctx.Err() // takes about as long as a hand-off
						}
						cancel()
					}()
				}
				l, err := mu.LockContext(ctx)
				switch {
				case err == nil:
					got.Add(1)
					g.write(t, who)
					if err := l.Unlock(); err != nil {
						t.Error(err)
					}
				case errors.Is(err, context.Canceled):
					gaveUp.Add(1)
				default:
					t.Error(err)
				}
				cancel()
			}
		})
		g.check(t, int(got.Load()))
		if total := got.Load() + gaveUp.Load(); total != int64(32*n) {
			t.Errorf("%d calls ended, want %d", total, 32*n)
		}
		if got.Load() < int64(16*n) {
			t.Errorf("only %d entered: those who were not canceled are %d", got.Load(), 16*n)
		}
	})
}

func TestReadersSeeWhatWritersWroteAndWritersWaitForReaders(t *testing.T) {
	underTraffic(t, func(t *testing.T, c *Client) {
		g := newGuarded()
		n := rounds(100)
		var all sync.WaitGroup
		for who := range 8 {
			all.Go(func() {
				rw := c.RWMutex("x")
				for range n {
					rw.Lock()
					g.write(t, who)
					rw.Unlock()
				}
			})
		}
		for range 24 {
			all.Go(func() {
				rw := c.RWMutex("x")
				for range n {
					rw.RLock()
					g.read(t)
					rw.RUnlock()
				}
			})
		}
		all.Wait()
		g.check(t, 8*n)
	})
}

// Downgrade: no writer comes in between, so a reader by it sees its own writes
// unchanged. Readers that enter beside it see them as well.
func TestADowngradedLeaseSeesItsOwnWritesUntilItIsUnlocked(t *testing.T) {
	underTraffic(t, func(t *testing.T, c *Client) {
		g := newGuarded()
		n := rounds(50)
		together(24, func(who int) {
			for range n {
				if who >= 16 {
					rw := c.RWMutex("x")
					rw.RLock()
					g.read(t)
					rw.RUnlock()
					continue
				}
				l, err := c.RWMutex("x").LockContext(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				g.write(t, who)
				mine := g.n
				if err := l.Downgrade(context.Background()); err != nil {
					t.Error(err)
				}
				g.read(t)
				if g.n != mine {
					t.Errorf("count %d, left it at %d", g.n, mine)
				}
				if err := l.Unlock(); err != nil {
					t.Error(err)
				}
			}
		})
		g.check(t, 16*n)
	})
}

// Close while many callers come and go: a caller that got in is alone, and any other gets
// an error.
func TestCloseAmongManyCallersKeepsTheExclusion(t *testing.T) {
	for range rounds(20) {
		c := onStub(t, 0.3, 0.3)
		g := newGuarded()
		var got atomic.Int64
		together(16, func(who int) {
			for {
				l, err := c.Mutex("x").LockContext(context.Background())
				if err != nil {
					if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					return
				}
				got.Add(1)
				g.write(t, who)
				_ = l.Unlock()
				if who == 0 && got.Load() > 50 {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		})
		g.check(t, int(got.Load()))
	}
}

// guarded is what a lock guards: plain memory, and an atomic count of the holders.
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

// traffic is what the stub server may say, by name.
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
			f(t, onStub(t, tr.others, tr.crossed, WithLocalHandoffs(4, time.Millisecond)))
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
