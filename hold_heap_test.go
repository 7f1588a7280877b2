package leased

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/leasedmutex/leased/internal/race"
)

// maxHeldBytes is what a held lock that nobody waits for may take of the heap. It takes 402: 160
// for the entry, 112 for the call, 64 for the lease and 16 for its guard, and the rest for its places
// in the table and among the alarms. If it does not rest it takes more than twice that.
const maxHeldBytes = 420

func TestAHeldLockTakesLittleOfTheHeap(t *testing.T) {
	if race.Enabled {
		t.Skip("counts bytes, and takes seconds with the race detector; run it without")
	}
	writer := func(c *Client, name string) (*Lease, error) { return c.Mutex(name).LockContext(context.Background()) }
	reader := func(c *Client, name string) (*Lease, error) {
		return c.RWMutex(name).RLockContext(context.Background())
	}
	for _, m := range []struct {
		name string
		lock func(c *Client, name string) (*Lease, error)
		opts []Option
	}{
		{"writers", writer, nil},
		{"readers", reader, nil},
		{"writers with limits", writer, []Option{WithMaxHold(time.Hour), WithMinHold(time.Millisecond)}},
	} {
		t.Run(m.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 10_000
				c := settled(t, onStub(t, 0, 0, append(m.opts, WithTTL(time.Hour))...))
				names := make([]string, n)
				for i := range names {
					names[i] = fmt.Sprintf("invoice:%08d", i)
				}
				held := make([]*Lease, n)
				before := heapBytes()
				for i := range held {
					var err error
					if held[i], err = m.lock(c, names[i]); err != nil {
						t.Fatal(err)
					}
				}
				each := (heapBytes() - before) / n
				t.Logf("%d bytes", each)
				if each > maxHeldBytes {
					t.Errorf("a held lock takes %d bytes of the heap, at most %d are right", each, maxHeldBytes)
				}
				for _, l := range held {
					if err := l.Unlock(); err != nil {
						t.Fatal(err)
					}
				}
			})
		})
	}
}

// Renewals that were due together must not keep their locks from being collected.
func TestALockThatWasRenewedAndUnlockedIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0, WithTTL(3*time.Second)))
		held, entries := make([]*Lease, 500), make([]weak.Pointer[entry], 500)
		for i := range held {
			var err error
			if held[i], err = c.Mutex(fmt.Sprint(i)).LockContext(context.Background()); err != nil {
				t.Fatal(err)
			}
			entries[i] = weak.Make(held[i].entry)
		}
		time.Sleep(2500 * time.Millisecond)
		for _, l := range held {
			if err := l.Unlock(); err != nil {
				t.Fatal(err)
			}
		}
		clear(held)
		time.Sleep(time.Hour)
		heapBytes()
		kept := 0
		for _, e := range entries {
			if e.Value() != nil {
				kept++
			}
		}
		if kept > len(c.recent.places) {
			t.Errorf("%d of %d are kept", kept, len(entries))
		}
	})
}

// A leader's lease may last for weeks.
func TestContextsOfWithThatEndedByThemselvesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0))
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		const used = 3 * minSweep
		var inUse []context.Context
		for i := range 100 * minSweep {
			ctx, end := context.WithCancel(context.Background())
			work, stop := l.With(ctx)
			defer stop()
			if i < used {
				defer end()
				inUse = append(inUse, work)
				continue
			}
			end()
		}
		_, together := l.contexts()
		if n := len(together.works); n < used || n > 2*used+minSweep {
			t.Errorf("%d contexts are kept", n)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
		for i, work := range inUse {
			if work.Err() == nil {
				t.Fatalf("context %d has not ended with the lease", i)
			}
		}
	})
}

// settled returns c, which is in a bubble, once its inbox is known not to be confirmed soon: no lock
// rests before.
func settled(t *testing.T, c *Client) *Client {
	t.Helper()
	c.begin()
	time.Sleep(time.Minute) // it dials some times
	if !c.inbox.settled() {
		t.Fatal("the first subscription has not failed")
	}
	return c
}

// heapBytes returns how much of the heap is in use.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC() // what had a finalizer or sat in a pool goes the second time
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
