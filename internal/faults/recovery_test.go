//go:build unix

package faults

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// sluggish is a back-off policy that makes the longest possible pause from the start, as a
// usual policy does after a minute of an outage. It reports when it is asked for a pause,
// which is when a command has failed and the client has read the failure.
type sluggish struct{ pauses chan struct{} }

func newSluggish() *sluggish { return &sluggish{make(chan struct{}, 1000)} }

func (s *sluggish) option() leased.Option {
	return leased.WithBackOff(func() leased.BackOff { return s })
}

func (s *sluggish) NextBackOff() time.Duration {
	select {
	case s.pauses <- struct{}{}:
	default: // no test counts that far
	}
	return 30 * time.Second
}

// paused waits until n pauses have begun.
func (s *sluggish) paused(t *testing.T, n int) {
	t.Helper()
	late := time.After(patience)
	for i := range n {
		select {
		case <-s.pauses:
		case <-late:
			t.Fatalf("%d commands failed, want %d", i, n)
		}
	}
}

// probes is how long the end of an outage may go unnoticed. tooLate is a bound far below the
// pauses of the policy.
const (
	probes  = 2 * time.Second
	tooLate = 12 * time.Second
)

// trouble is an outage that a subscription survives, so no event announces its end.
type trouble struct {
	name       string
	begin, end func(*testing.T, *redistest.Instance, *redistest.Proxy)
}

func set(name, value string) func(*testing.T, *redistest.Instance, *redistest.Proxy) {
	return func(t *testing.T, s *redistest.Instance, _ *redistest.Proxy) {
		t.Helper()
		if err := s.Client().ConfigSet(t.Context(), name, value).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

var troubles = []trouble{
	{"read-only", func(_ *testing.T, s *redistest.Instance, _ *redistest.Proxy) { s.Isolate() },
		func(_ *testing.T, s *redistest.Instance, _ *redistest.Proxy) { s.Promote() }},
	{"full", set("maxmemory", "1"), set("maxmemory", "0")},
	{"too few replicas", set("min-replicas-to-write", "1"), set("min-replicas-to-write", "0")},
	{"frozen", func(_ *testing.T, s *redistest.Instance, _ *redistest.Proxy) { s.Stop() },
		func(_ *testing.T, s *redistest.Instance, _ *redistest.Proxy) { s.Cont() }},
	{"paused", func(t *testing.T, s *redistest.Instance, _ *redistest.Proxy) {
		if err := s.Client().Do(t.Context(), "CLIENT", "PAUSE", 600_000, "WRITE").Err(); err != nil {
			t.Fatal(err)
		}
	}, func(t *testing.T, s *redistest.Instance, _ *redistest.Proxy) {
		if err := s.Client().Do(t.Context(), "CLIENT", "UNPAUSE").Err(); err != nil {
			t.Fatal(err)
		}
	}},
	{"replies lost", func(_ *testing.T, _ *redistest.Instance, p *redistest.Proxy) { p.DropReplies() },
		func(_ *testing.T, _ *redistest.Instance, p *redistest.Proxy) { p.Heal() }},
}

// recovering returns a client of a server behind a proxy. Its inbox is behind the proxy, too:
// when replies are lost, the inbox is deaf, and nothing tells the client.
func recovering(t *testing.T, opts ...leased.Option) (*redistest.Instance, *redistest.Proxy, *leased.Client) {
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	p := redistest.NewProxy(t, s.Addr)
	rdb := redis.NewClient(redistest.Options(p.Addr))
	t.Cleanup(func() { _ = rdb.Close() })
	c := newClient(t, rdb, "", opts...)
	mustUnlock(t, mustLock(t, c.Mutex("warm")))
	eventually(t, "its inbox", func() bool { return s.Subscribers() == 1 })
	return s, p, c
}

func TestAFreeLockIsEnteredSoonAfterAnOutageWhateverTheBackOffHasBecome(t *testing.T) {
	t.Parallel()
	for _, o := range troubles {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel()
			strain := redistest.NewStrain(t)
			policy := newSluggish()
			s, p, c := recovering(t, policy.option())
			const locks = 20
			o.begin(t, s, p)
			ended := false
			defer func() {
				if !ended {
					o.end(t, s, p)
				}
			}()
			var waits []<-chan outcome
			ctx := within(t, 2*patience)
			for i := range locks {
				waits = append(waits, wait(ctx, c.Mutex(fmt.Sprint("free", i))))
			}
			policy.paused(t, locks/2) // not every lock has to ask by itself
			o.end(t, s, p)
			ended = true
			at := time.Now()
			var worst time.Duration
			for _, w := range waits {
				select {
				case r := <-w:
					if r.err != nil {
						t.Fatal(r.err)
					}
					worst = max(worst, r.at.Sub(at))
					mustUnlock(t, r.lease)
				case <-time.After(time.Until(at.Add(tooLate))):
					t.Fatalf("a free lock was not entered %v after the outage", tooLate)
				}
			}
			// A probe under way may first have to time out.
			if bound := probes + 2*time.Second + slack + strain.Since(at); worst > bound {
				t.Errorf("entered %v after the outage", worst)
			}
			t.Logf("the last of %d entered %v after the outage", locks, worst)
		})
	}
}

func TestAfterAnOutageOfTwentySecondsEveryFreeLockIsEnteredSoon(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes that long; run it without -short")
	}
	t.Parallel()
	strain := redistest.NewStrain(t)
	s, _, c := recovering(t) // with the usual policy
	const locks, outage = 100, 20 * time.Second
	s.Isolate()
	began := time.Now()
	ctx := within(t, 3*patience)
	var waits []<-chan outcome
	for i := range locks {
		waits = append(waits, wait(ctx, c.Mutex(fmt.Sprint("free", i))))
	}
	time.Sleep(outage / 2) // the length of the outage is what is tested
	half := c.Stats().Commands
	time.Sleep(time.Until(began.Add(outage))) // likewise
	sent := c.Stats().Commands - half
	s.Promote()
	at := time.Now()
	var worst time.Duration
	for _, w := range waits {
		r := entered(t, w)
		worst = max(worst, r.at.Sub(at))
		mustUnlock(t, r.lease)
	}
	if worst > probes+slack+strain.Since(at) {
		t.Errorf("the last of %d locks was entered %v after an outage of %v", locks, worst, outage)
	}
	// Each lock asks at its own pace and one of them more often: an outage must not cause a storm of
	// commands.
	if sent > 3*locks {
		t.Errorf("%d locks sent %d commands in the second half of the outage", locks, sent)
	}
	t.Logf("%d locks sent %d commands in the second half of %v, and the last was entered after %v", locks, sent, outage, worst)
}

// The server hangs for longer than a command may take, and then executes what it was asked.
// So the lock has an owner that does not know it owns the lock, and that hears it is wanted.
func TestAnOwnerThatGaveItsAcquireUpAsLostHearsThatItIsWanted(t *testing.T) {
	t.Parallel()
	strain := redistest.NewStrain(t)
	policy := newSluggish()
	s, _, c := recovering(t, policy.option(), leased.WithTTL(time.Minute))
	others := newClient(t, s.Client(), "", leased.WithTTL(time.Minute))
	another := newClient(t, s.Client(), "", leased.WithTTL(time.Minute))
	mustUnlock(t, mustLock(t, others.Mutex("warm")))
	mustUnlock(t, mustLock(t, another.Mutex("warm")))

	s.Stop()
	first := wait(within(t, 2*patience), c.Mutex("x"))
	policy.paused(t, 1)
	s.Cont()
	eventually(t, "the server has done what it was asked", func() bool {
		info, err := others.Inspect(t.Context(), "x")
		return err == nil && len(info.Owners) == 1
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	at := time.Now()
	waits := []<-chan outcome{first, wait(ctx, others.Mutex("x")), wait(ctx, another.Mutex("x"))}
	var entering sync.WaitGroup
	for i, w := range waits {
		// Owned by the test, ended by the bound, waited for below.
		entering.Go(func() {
			select {
			case r := <-w:
				if r.err != nil {
					t.Error(r.err)
					return
				}
				took := r.at.Sub(at)
				t.Logf("process %d entered after %v", i, took)
				if i == 0 && took > probes/2+strain.Since(at) { // a probe could come as late as probes
					t.Errorf("the owner learned that it owns the lock only %v after others began to want it", took)
				}
				if err := r.lease.Unlock(); err != nil {
					t.Error(err)
				}
			case <-time.After(tooLate):
				t.Errorf("process %d did not enter within %v", i, tooLate)
			}
		})
	}
	entering.Wait()
}
