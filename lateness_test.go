package leased_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// hole is the way to a server that stops to answer while its connections stay open.
type hole struct{ shut atomic.Bool }

type holed struct {
	net.Conn
	hole *hole
}

func (h *hole) change(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		return &holed{conn, h}, err
	}
}

// Read drops what arrives while the hole is shut, so that the server is not held up.
func (c *holed) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.hole.shut.Load() {
			return n, err
		}
	}
}

// The contract's 10 ms are for the scheduler. In virtual time, where only timers and
// sleeps take time, a wait has to return at the very instant at which its context ends,
// in whatever stage it is. What it takes on a machine is printed by make measure.
func TestVirtualNoTimerLiesBetweenAContextsEndAndTheReturnOfItsWait(t *testing.T) {
	calls := map[string]func(*leased.Client, context.Context) (*leased.Lease, error){
		"LockContext": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.Mutex("x").LockContext(ctx)
		},
		"RLockContext": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.RWMutex("x").RLockContext(ctx)
		},
		"TryLockContext, free": func(c *leased.Client, ctx context.Context) (*leased.Lease, error) {
			return c.Mutex("free").TryLockContext(ctx)
		},
	}
	for _, redis := range []string{"answers", "does not answer", "answers with errors"} {
		for name, call := range calls {
			t.Run(name+", Redis "+redis, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					var h hole
					held := lock(t, newClient(t, s, leased.WithTTL(time.Hour)).Mutex("x"))
					c := clientOn(t, s, s.connect(t, h.change), leased.WithTTL(time.Hour))
					unlock(t, lock(t, c.Mutex("warm")))
					switch redis {
					case "does not answer":
						h.shut.Store(true)
					case "answers with errors":
						s.Mini.SetError("LOADING Redis is loading the dataset in memory")
					}
					waits := 0
					// Odd times fall into pauses, re-checks and commands under way.
					for after := 100 * time.Microsecond; after < 20*time.Second; after = after*7/5 + 13*time.Microsecond {
						ctx, cancel := context.WithTimeout(context.Background(), after)
						ends, _ := ctx.Deadline()
						l, err := call(c, ctx)
						cancel()
						if l != nil { // a lock that was free, on a Redis that answers
							unlock(t, l)
							continue
						}
						if !errors.Is(err, context.DeadlineExceeded) {
							continue // a try is refused before that
						}
						waits++
						if late := time.Since(ends); late != 0 {
							t.Errorf("a wait of %v returned %v after its context's end", after, late)
						}
					}
					if waits == 0 && name == "LockContext" {
						t.Error("no wait ended with its context")
					}
					s.Mini.SetError("")
					h.shut.Store(false)
					unlock(t, held)
					time.Sleep(time.Minute) // what was under way comes to its end
					synctest.Wait()
				})
			})
		}
	}
}
