package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
)

// Who waited behind another process is led to the trace that had the lock, also where no
// hand-off says whose lease it follows: the id of a request refers to the span for which it
// was made.

// givesUp returns the span of a caller of c that waited for x a second in vain.
func givesUp(t *testing.T, c *leased.Client, r recorder) tracetest.SpanStub {
	t.Helper()
	ctx, cancel := context.WithTimeout(r.under(t, "waiter"), time.Second)
	defer cancel()
	if l, err := c.Mutex("x").LockContext(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v, %v", l, err)
	}
	synctest.Wait()
	return r.last(t, "leased.wait")
}

func TestTraceOfOneThatGivesUpLinksTheWaitOfTheProcessThatBlocksIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r, far := newRecorder(t), newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		other := newClient(t, s, leased.WithTracerProvider(far), leased.WithOwner("other"))
		l := lockUnder(t, far.under(t, "holder"), other.Mutex("x", leased.WithMinHold(3*time.Second)))
		synctest.Wait()
		gone := givesUp(t, c, r)
		has(t, gone, "leased.wait.outcome", "timeout", "leased.blocker", "other")
		links(t, gone, far.last(t, "leased.wait"), true)
		unlock(t, l)
		cooling := givesUp(t, c, r) // the minimum hold goes on
		has(t, cooling, "leased.blocker", "other")
		links(t, cooling, far.last(t, "leased.wait"), true)
		time.Sleep(time.Minute)
	})
}

func TestTraceOfASuccessorLeadsToTheOwnerThatDidNotHandOver(t *testing.T) {
	const ttl = 10 * time.Second
	for what, end := range map[string]func(t *testing.T, s place, other *leased.Client){
		"was evicted": func(t *testing.T, s place, other *leased.Client) {
			if err := other.ForceUnlock(context.Background(), "x"); err != nil {
				t.Error(err)
			}
		},
		"died": func(_ *testing.T, _ place, other *leased.Client) { _ = other.Close() },
		"lost its key": func(t *testing.T, s place, _ *leased.Client) {
			if err := s.rdb.Del(context.Background(), "x").Err(); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				r, far := newRecorder(t), newRecorder(t)
				c := newClient(t, s, leased.WithTracerProvider(r))
				warm(t, s, c)
				other, err := s.open(t, s.connect(t), leased.WithTracerProvider(far), leased.WithOwner("other"), leased.WithTTL(ttl),
					leased.WithLogger(slog.New(slog.DiscardHandler)))
				if err != nil {
					t.Fatal(err)
				}
				lost := lockUnder(t, far.under(t, "holder"), other.Mutex("x"))
				synctest.Wait()
				entered := make(chan *leased.Lease, 1)
				ctx := r.under(t, "waiter")
				go func() {
					l, err := c.Mutex("x").LockContext(ctx)
					if err != nil {
						t.Error(err)
					}
					entered <- l
				}()
				s.queued(t, "x", 1)
				synctest.Wait()
				end(t, s, other)
				unlock(t, <-entered)
				synctest.Wait()
				wait := r.last(t, "leased.wait")
				has(t, wait, "leased.wait.outcome", "acquired", "leased.blocker", "other")
				links(t, wait, far.spans("leased.wait")[0], true)
				noError(t, wait)
				_ = lost.Unlock()
				_ = other.Close()
			})
		})
	}
}

func TestTraceOfAHandOffLinksTheHoldAndNothingElse(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r, far := newRecorder(t), newRecorder(t)
		c, other := newClient(t, s, leased.WithTracerProvider(r)), newClient(t, s, leased.WithTracerProvider(far))
		warm(t, s, c, other)
		l := lockUnder(t, far.under(t, "holder"), other.Mutex("x"))
		waiter := make(chan *leased.Lease, 1)
		ctx := r.under(t, "waiter")
		go func() {
			l, err := c.Mutex("x").LockContext(ctx)
			if err != nil {
				t.Error(err)
			}
			waiter <- l
		}()
		s.queued(t, "x", 1)
		synctest.Wait()
		unlock(t, l)
		unlock(t, <-waiter)
		synctest.Wait()
		wait := r.last(t, "leased.wait")
		has(t, wait, "leased.via", "direct", "leased.blocker", nil)
		links(t, wait, far.last(t, "leased.hold"), true)

		// A later wait that nobody blocks has nothing of this.
		unlock(t, lockUnder(t, r.under(t, "alone"), c.Mutex("x")))
		synctest.Wait()
		alone := r.last(t, "leased.wait")
		if has(t, alone, "leased.blocker", nil); len(alone.Links) != 0 {
			t.Errorf("%d links", len(alone.Links))
		}
	})
}

// A grant that may idle serves callers long after the one that it was asked for.
func TestTheIDOfAGrantThatMayIdleRefersToNoSpan(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		for _, c := range []struct {
			client *leased.Client
			traced bool
		}{
			{newClient(t, s, leased.WithTracerProvider(r)), true},
			{newClient(t, s, leased.WithTracerProvider(r), leased.WithIdleHold(time.Millisecond)), false},
			{newClient(t, s), false},
		} {
			l := lockUnder(t, r.under(t, "holder"), c.client.Mutex("x"))
			if random := strings.Split(s.value(t, "x"), ":")[4]; len(random) != map[bool]int{false: 16, true: 16 + 33}[c.traced] {
				t.Errorf("traced %v: the id has %q", c.traced, random)
			}
			unlock(t, l)
			time.Sleep(time.Second)
		}
	})
}

func TestADowngradedLeaseKeepsTheWritersTokenAndTimeForOperatorsAndTraces(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r, far := newRecorder(t), newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		other := newClient(t, s, leased.WithTracerProvider(far), leased.WithOwner("other"))
		began := time.Now()
		l := lockUnder(t, far.under(t, "writer"), other.RWMutex("x"))
		written := l.Token()
		time.Sleep(5 * time.Second)
		if err := l.Downgrade(context.Background()); err != nil {
			t.Fatal(err)
		}
		reader := take(t, newClient(t, s).RWMutex("x").RLockContext) // whose token and time are others
		info, err := c.Inspect(context.Background(), "x")
		if err != nil || len(info.Owners) != 2 {
			t.Fatalf("%+v, %v", info, err)
		}
		for _, o := range info.Owners {
			switch {
			case o.Client != "other":
				if o.Token != 0 || !o.Since.IsZero() {
					t.Errorf("the other reader: %+v", o)
				}
			case o.Token != written || !o.Shared || o.Since.Sub(began).Abs() > time.Millisecond:
				t.Errorf("%+v, had token %d since %v", o, written, began)
			}
		}
		unlock(t, reader)
		time.Sleep(time.Second) // in which the servers of a quorum that were slow let it go, too
		gone := givesUp(t, c, r)
		has(t, gone, "leased.blocker", "other")
		unlock(t, l)
		synctest.Wait()
		hold := far.last(t, "leased.hold")
		links(t, gone, hold, true)
		for _, ev := range hold.Events {
			if ev.Name != "downgraded" {
				continue
			}
			if len(ev.Attributes) != 1 || ev.Attributes[0].Key != "leased.token" || ev.Attributes[0].Value.AsInt64() != int64(written) {
				t.Errorf("the writer's token was %d, the event has %v", written, ev.Attributes)
			}
			return
		}
		t.Error("no event of the downgrade")
	})
}

func TestTraceOfAnUnconfirmedReleaseSaysWhy(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hold := ends(t, s, func(_ *testing.T, _ *leased.Client, l *leased.Lease) {
			s.Mini.SetError("LOADING Redis is loading the dataset in memory")
			_ = l.Unlock()
			s.Mini.SetError("")
			time.Sleep(time.Minute)
		})
		has(t, hold, "leased.hold.outcome", "not_released", "leased.reason", s.saying("LOADING Redis is loading the dataset in memory"))
	})
}
