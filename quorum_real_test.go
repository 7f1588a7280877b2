package leased_test

import (
	"context"
	"errors"
	"fmt"
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
	for _, p := range q.proxies {
		o := redistest.Options(p.Addr)
		o.ContextTimeoutEnabled = true
		rdb := redis.NewClient(o)
		t.Cleanup(func() { _ = rdb.Close() })
		all = append(all, rdb)
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
	if testing.Short() {
		t.Skip("takes seconds")
	}
	for _, fault := range memberFaults {
		t.Run(fault.name, func(t *testing.T) {
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
			time.Sleep(4 * time.Second) // more than a TTL, on purpose
			if err := held.Context().Err(); err != nil {
				t.Fatalf("a lease was lost with a minority of the servers: %v", context.Cause(held.Context()))
			}
			fault.begin(q, 4)
			err = cycle(b, 2*time.Second)
			if !errors.Is(err, leased.ErrNoQuorum) || !errors.Is(err, leased.ErrNotAcquired) {
				t.Errorf("without a majority: %v", err)
			}
			t.Log(err)
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
	if testing.Short() {
		t.Skip("takes seconds")
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
		time.Sleep(20 * time.Millisecond)
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
	var all []redis.UniversalClient
	for i := range 3 {
		o := redistest.Options(fmt.Sprintf("127.0.0.1:%d", i+1)) // nobody listens
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
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = c.Mutex("x").LockContext(ctx)
	isAll(t, err, leased.ErrNoQuorum, leased.ErrNotAcquired, context.DeadlineExceeded)
	t.Log(err)
}
