//go:build unix

package faults

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// outage is a way in which Redis does not answer.
type outage struct {
	name  string
	begin func(*redistest.Instance, *redistest.Proxy)
}

var outages = []outage{
	{"stopped", func(s *redistest.Instance, _ *redistest.Proxy) { s.Stop() }},
	{"black-holed", func(_ *redistest.Instance, p *redistest.Proxy) { p.BlackHole() }},
	{"refusing", func(_ *redistest.Instance, p *redistest.Proxy) { p.Refuse(); p.Cut() }},
	{"killed", func(s *redistest.Instance, _ *redistest.Proxy) { s.Kill() }},
}

// behind returns a server and a client of it that has a proxy in between, and
// checks that the test leaves no goroutine.
func behind(t *testing.T) (*redistest.Instance, *redistest.Proxy, *redis.Client) {
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	p := redistest.NewProxy(t, s.Addr)
	rdb := redis.NewClient(redistest.Options(p.Addr))
	t.Cleanup(func() { rdb.Close() })
	return s, p, rdb
}

func TestACanceledWaitReturnsAtOnceWhateverRedisDoes(t *testing.T) {
	for _, o := range append(slices.Clone(outages), outage{name: "healthy"}) {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel()
			s, p, rdb := behind(t)
			strain := redistest.NewStrain(t)
			holder := newClient(t, s.Client(), "")
			c := newClient(t, rdb, "")
			held := mustLock(t, holder.Mutex("x"))
			mustUnlock(t, mustLock(t, c.Mutex("free"))) // now the connections, the inbox and the scripts exist

			healthy := o.begin == nil
			if !healthy {
				o.begin(s, p)
			}
			var late []time.Duration
			for i := range 40 {
				ctx, cancel := context.WithCancel(t.Context())
				name := "x"
				if i%2 == 1 && !healthy {
					name = "free"
				}
				got := wait(ctx, c.Mutex(name))
				for until := time.Now().Add(time.Duration(i) * 300 * time.Microsecond); time.Now().Before(until); {
					runtime.Gosched() // to cancel at every stage of the request
				}
				at := time.Now()
				cancel()
				r := <-got
				late = append(late, r.at.Sub(at))
				// Waiting for a command would take 2 s. That it returns at once is tested in virtual time.
				if took := r.at.Sub(at); took > slack+strain.Since(at) {
					t.Errorf("LockContext returned %v after the end of ctx", took)
				}
				if !errors.Is(r.err, leased.ErrNotAcquired) || !errors.Is(r.err, context.Canceled) {
					t.Fatalf("it returned %v", r.err)
				}
			}
			slices.Sort(late)
			t.Logf("%s: p50 %v, worst %v after the end of ctx", o.name, late[len(late)/2], late[len(late)-1])
			if healthy {
				mustUnlock(t, held)
				nothingLeft(t, holder, "x")
			}
		})
	}
}

func TestManyCanceledWaitsLeaveNothingPiledUp(t *testing.T) {
	calls := 10_000
	if testing.Short() {
		calls = 2_000
	}
	s := redistest.Server(t)
	look, rdb := s.Client(), s.Client()
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	holder := newClient(t, look, "")
	c := newClient(t, rdb, "")
	held := mustLock(t, holder.Mutex("x"))
	mustUnlock(t, mustLock(t, c.Mutex("warm")))
	eventually(t, "both inboxes", func() bool {
		return len(look.PubSubChannels(t.Context(), "*").Val()) == 2
	})

	connections := connected(t, look)
	goroutines := runtime.NumGoroutine()
	s.Stop()
	mu := c.Mutex("x")
	work := make(chan struct{})
	var workers sync.WaitGroup
	for range 64 {
		workers.Go(func() {
			for range work {
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				if _, err := mu.LockContext(ctx); !errors.Is(err, leased.ErrNotAcquired) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("it returned %v", err)
				}
				cancel()
			}
		})
	}
	for range calls {
		work <- struct{}{}
	}
	close(work)
	workers.Wait()
	// The goroutines of the last calls may be about to end. Anything that had piled up would
	// stay for as long as a command may take on a server that is stopped.
	done := time.Now()
	more := runtime.NumGoroutine() - goroutines
	for more > 3 && time.Since(done) <= slack+strain.Since(done) {
		runtime.Gosched()
		more = runtime.NumGoroutine() - goroutines
	}
	t.Logf("%d goroutines more, %d connections in the pool", more, rdb.PoolStats().TotalConns)
	if more > 3 {
		var stacks [64 << 10]byte
		t.Errorf("%d goroutines more after %d canceled calls:\n%s", more, calls, stacks[:runtime.Stack(stacks[:], true)])
	}

	s.Cont()
	eventually(t, "the server rid of connections, but for one more", func() bool {
		return connected(t, look) <= connections+1
	})
	eventually(t, "the queue empty", func() bool {
		info, err := holder.Inspect(t.Context(), "x")
		return err == nil && info.Queue == 0 && len(info.Owners) == 1
	})
	mustUnlock(t, held)
	nothingLeft(t, holder, "x")
	if err := c.Close(); err != nil { // it waits for what is under way
		t.Error(err)
	}
	for _, key := range look.Keys(t.Context(), "*").Val() {
		if !strings.HasSuffix(key, ":meta") {
			t.Errorf("left in Redis: %s", key)
		}
	}
}

func connected(t *testing.T, rdb *redis.Client) int {
	t.Helper()
	list, err := rdb.ClientList(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(list, "\n")
}
