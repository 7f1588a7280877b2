package leased_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A quorum of five real servers that fail.

// realQuorum is five servers, each behind a proxy.
type realQuorum struct {
	servers []*redistest.Instance
	proxies []*redistest.Proxy
	made    []*redis.Client // of the last client
}

func newRealQuorum(t *testing.T) *realQuorum {
	t.Helper()
	q := &realQuorum{}
	for range 5 {
		in := redistest.Server(t)
		q.servers = append(q.servers, in)
		q.proxies = append(q.proxies, redistest.NewProxy(t, in.Addr))
	}
	return q
}

// old makes the servers old enough to vote.
func (q *realQuorum) old(t *testing.T) {
	t.Helper()
	for _, in := range q.servers {
		if err := in.Client().Set(context.Background(), "leased:quorum:mark", "1", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func (q *realQuorum) client(t *testing.T, opts ...leased.Option) *leased.Client {
	t.Helper()
	var all []redis.UniversalClient
	q.made = nil
	for _, p := range q.proxies {
		o := redistest.Options(p.Addr)
		o.ContextTimeoutEnabled = true
		rdb := redis.NewClient(o)
		t.Cleanup(func() { _ = rdb.Close() })
		all, q.made = append(all, rdb), append(q.made, rdb)
	}
	var out logs
	c, err := leased.NewQuorum(all, append([]leased.Option{out.option()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// faults are what can befall one server, and how it ends.
var memberFaults = []struct {
	name       string
	begin, end func(q *realQuorum, i int)
}{
	{"killed", func(q *realQuorum, i int) { q.servers[i].Kill() }, func(q *realQuorum, i int) { q.servers[i].Restart() }},
	{"frozen", func(q *realQuorum, i int) { q.servers[i].Stop() }, func(q *realQuorum, i int) { q.servers[i].Cont() }},
	{"black-holed", func(q *realQuorum, i int) { q.proxies[i].BlackHole() }, func(q *realQuorum, i int) { q.proxies[i].Heal() }},
}

func TestAQuorumGoesOnWithoutAMinorityAndStopsWithoutAMajority(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes seconds; run it without -short")
	}
	for _, fault := range memberFaults {
		t.Run(fault.name, func(t *testing.T) {
			t.Parallel()
			q := newRealQuorum(t)
			q.old(t)
			a, b := q.client(t, leased.WithTTL(3*time.Second)), q.client(t, leased.WithTTL(3*time.Second))
			last := uint64(0)
			cycle := func(c *leased.Client, within time.Duration) error {
				ctx, cancel := context.WithTimeout(t.Context(), within)
				defer cancel()
				l, err := c.Mutex("x").LockContext(ctx)
				if err != nil {
					return err
				}
				if l.Token() <= last {
					t.Errorf("token %d after %d", l.Token(), last)
				}
				last = l.Token()
				return l.Unlock()
			}
			for range 20 {
				for _, c := range []*leased.Client{a, b} {
					if err := cycle(c, patience); err != nil {
						t.Fatal(err)
					}
				}
			}
			held, err := a.Mutex("held").LockContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			fault.begin(q, 0)
			fault.begin(q, 3)
			began := time.Now()
			for range 50 {
				for _, c := range []*leased.Client{a, b} {
					if err := cycle(c, patience); err != nil {
						t.Fatal(err)
					}
				}
			}
			t.Logf("100 cycles without two servers took %v", time.Since(began))
			eventually(t, "it is renewed for longer than a TTL", func() bool {
				return held.Context().Err() != nil || held.TrustedUntil().After(began.Add(6*time.Second))
			})
			if err := held.Context().Err(); err != nil {
				t.Fatalf("a lease was lost with a minority of the servers: %v", context.Cause(held.Context()))
			}
			fault.begin(q, 4)
			err = cycle(b, 2*time.Second)
			if !errors.Is(err, leased.ErrNoQuorum) || !errors.Is(err, leased.ErrNotAcquired) {
				t.Errorf("without a majority: %v", err)
			}
			if !regexp.MustCompile(`[0-2] of 5 servers answered, but 3 are needed; `).MatchString(err.Error()) {
				t.Errorf("the error reads %q", err)
			}
			eventually(t, "nothing is left", func() bool {
				for _, i := range []int{1, 2} {
					keys, err := redistest.Keys(t.Context(), q.servers[i].Client(), "x")
					if err != nil || len(keys) > 1 { // the last token stays
						return false
					}
				}
				return true
			})
			closesSoon(t, "the lease ends without a majority", held.Context().Done())
			for _, i := range []int{0, 3, 4} {
				fault.end(q, i)
			}
			if fault.name == "killed" {
				q.old(t) // else they are in quarantine
			}
			began = time.Now()
			if err := cycle(b, patience); err != nil {
				t.Errorf("when they are back: %v", err)
			}
			t.Logf("the first lock after the outage came after %v", time.Since(began))
			_ = held.Unlock()
		})
	}
}

func TestServersOfAQuorumThatRestartEmptyDoNotVote(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes seconds; run it without -short")
	}
	q := newRealQuorum(t)
	q.old(t)
	a := q.client(t, leased.WithTTL(5*time.Second), leased.WithQuarantine(5*time.Second))
	b := q.client(t, leased.WithTTL(5*time.Second), leased.WithQuarantine(5*time.Second))
	q.servers[3].Kill()
	q.servers[4].Kill()
	l, err := a.Mutex("x").LockContext(t.Context()) // on 0, 1 and 2
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{1, 2} {
		q.servers[i].Kill()
	}
	for _, i := range []int{1, 2, 3, 4} {
		q.servers[i].Restart()
	}
	q.proxies[0].Cut()
	for until := time.Now().Add(3 * time.Second); time.Now().Before(until); {
		other, err := b.Mutex("x").TryLockContext(t.Context())
		if err == nil && l.Context().Err() == nil && time.Now().Before(l.TrustedUntil()) {
			t.Fatalf("two owners: tokens %d and %d", l.Token(), other.Token())
		}
		if err == nil {
			_ = other.Unlock()
		}
		time.Sleep(20 * time.Millisecond) // between two tries
	}
	_ = l.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	next, err := b.Mutex("x").LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if next.Token() <= l.Token() {
		t.Errorf("token %d after %d", next.Token(), l.Token())
	}
	_ = next.Unlock()
}

func TestTheErrorOfAQuorumNamesHowManyAnswered(t *testing.T) {
	t.Parallel()
	var all []redis.UniversalClient
	for i := range 3 {
		o := redistest.Options(fmt.Sprintf("127.0.0.1:%d", i+1)) // nobody listens
		o.DialerRetries = 1                                      // or it takes 0.4 s to find out
		rdb := redis.NewClient(o)
		defer rdb.Close()
		all = append(all, rdb)
	}
	var out logs
	c, err := leased.NewQuorum(all, out.option())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err = c.Mutex("x").LockContext(ctx)
	isAll(t, err, leased.ErrNoQuorum, leased.ErrNotAcquired, context.DeadlineExceeded)
	if !strings.Contains(err.Error(), "0 of 3 servers answered, but 2 are needed; ") {
		t.Errorf("the error reads %q", err)
	}
}

// sentTo counts what a client sends to one server, other than to hear whether it answers, for
// which connections are made.
type sentTo struct {
	n     atomic.Int64
	ended atomic.Int64 // how many of them were answered or given up
}

// count counts those of the commands that matter, and returns what to call when they have ended.
func (s *sentTo) count(cmds ...redis.Cmder) (end func()) {
	var n int64
	for _, cmd := range cmds {
		if !slices.Contains([]string{"ping", "hello", "client"}, cmd.Name()) {
			n++
		}
	}
	s.n.Add(n)
	return func() { s.ended.Add(n) }
}

func (s *sentTo) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s *sentTo) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		defer s.count(cmd)()
		return next(ctx, cmd)
	}
}

func (s *sentTo) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		defer s.count(cmds...)()
		return next(ctx, cmds)
	}
}

func TestFrozenServersOfAQuorumAreNotAskedOnceNoticed(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds; run it without -short")
	}
	q := newRealQuorum(t)
	q.old(t)
	var sent [5]sentTo
	c := q.client(t)
	for i := range sent {
		q.made[i].AddHook(&sent[i])
	}
	const cycles = 100
	cycle := func() time.Duration {
		began := time.Now()
		for range cycles {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			l, err := c.Mutex("x").LockContext(ctx)
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			unlock(t, l)
		}
		return time.Since(began)
	}
	cycle()
	healthy := cycle()
	frozen := []int{0, 3}
	for _, i := range frozen {
		q.servers[i].Stop()
		defer q.servers[i].Cont()
	}
	asked := func() (n, ended int64) {
		for _, i := range frozen {
			ended += sent[i].ended.Load()
		}
		for _, i := range frozen {
			n += sent[i].n.Load()
		}
		return n, ended
	}
	// A request that was sent before a server was noticed is withdrawn there once it has had no answer.
	eventually(t, "the frozen servers are asked no more, and nothing is under way to them", func() bool {
		before, ended := asked()
		cycle()
		n, _ := asked()
		return n == before && ended == before
	})
	before, _ := asked()
	took := min(cycle(), cycle(), cycle())
	if n, _ := asked(); n != before {
		t.Errorf("%d commands for frozen servers in %d acquisitions", n-before, 3*cycles)
	}
	t.Logf("%d leases took %v with all servers, and %v when two of five were known to be frozen: %.2f times", cycles, healthy, took, float64(took)/float64(healthy))
}

func TestCloseBesideServersOfAQuorumThatDoNotAnswer(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds; run it without -short")
	}
	for what, c := range map[string]struct {
		fault int   // of memberFaults
		at    []int // servers
		known bool  // it was noticed before Close
	}{
		"a frozen one":          {1, []int{2}, false},
		"a frozen one, noticed": {1, []int{2}, true},
		"three dead":            {0, []int{0, 2, 3}, false},
		"three dead, noticed":   {0, []int{0, 2, 3}, true},
		"three frozen":          {1, []int{0, 2, 3}, false},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			q := newRealQuorum(t)
			q.old(t)
			redistest.CheckLeaks(t, nil, "")
			client := q.client(t, leased.WithTTL(time.Minute))
			// Nobody is inside, and it is owned until Close.
			mu := client.Mutex("x", leased.WithIdleHold(time.Hour))
			l, err := mu.LockContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			unlock(t, l)
			for _, i := range c.at {
				memberFaults[c.fault].begin(q, i)
			}
			if c.known {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				if l, err := client.Mutex("another").LockContext(ctx); err == nil {
					_ = l.Unlock()
				}
				cancel()
			}
			began := time.Now()
			closed := make(chan error, 1)
			go func() { closed <- client.Close() }()
			err = closesSoon(t, "Close returns", closed)
			t.Logf("Close took %v: %v", time.Since(began), err)
			eventually(t, "nothing is left on the servers that answer", func() bool {
				for i, in := range q.servers {
					if slices.Contains(c.at, i) {
						continue
					}
					if n, err := in.Client().Exists(context.Background(), "x").Result(); err != nil || n != 0 {
						return false
					}
				}
				return true
			})
			for _, i := range c.at {
				memberFaults[c.fault].end(q, i)
			}
		})
	}
}
