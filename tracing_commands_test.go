package leased_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased"
)

// Under which span commands are sent, as an instrumentation of the Redis client sees it.

// instrumented is a hook of the Redis client that notes the span it is called under.
type instrumented struct {
	mu    sync.Mutex
	spans []trace.SpanContext // of each command or pipeline
}

func (i *instrumented) note(ctx context.Context) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.spans = append(i.spans, trace.SpanContextFromContext(ctx))
}

// take returns what was noted since the last call.
func (i *instrumented) take() []trace.SpanContext {
	i.mu.Lock()
	defer i.mu.Unlock()
	spans := i.spans
	i.spans = nil
	return spans
}

func (i *instrumented) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (i *instrumented) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		i.note(ctx)
		return next(ctx, cmd)
	}
}

func (i *instrumented) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		i.note(ctx)
		return next(ctx, cmds)
	}
}

// observed returns a client whose commands are noted. Its inbox is there, and its scripts
// are known.
func observed(t *testing.T, s place, opts ...leased.Option) (*leased.Client, *instrumented) {
	t.Helper()
	rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	seen := &instrumented{}
	s.hook(rdb, seen)
	c := clientOn(t, s, rdb, opts...)
	warm(t, s, c)
	synctest.Wait()
	seen.take()
	return c, seen
}

// under fails t unless all commands were sent under one span of this id, the zero value
// for none. It returns how many there were.
func (i *instrumented) under(t *testing.T, what string, id trace.SpanID) int64 {
	t.Helper()
	all := i.take()
	for _, got := range all {
		if got.SpanID() != id {
			t.Errorf("%s: sent under %v, want %v", what, got.SpanID(), id)
		}
	}
	return int64(len(all))
}

func TestTraceHasCommandsUnderTheWaitOrTheHoldTheyServe(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c, seen := observed(t, s, leased.WithTracerProvider(r))
		other := newClient(t, s)
		mu := c.Mutex("x")

		l := lockUnder(t, r.under(t, "holder"), mu)
		synctest.Wait()
		wait := r.last(t, "leased.wait").SpanContext.SpanID()
		if n := s.share(seen.under(t, "acquire", wait)); n != 1 {
			t.Errorf("%d commands to acquire", n)
		}
		hold := trace.SpanContextFromContext(l.Context()).SpanID()
		time.Sleep(11 * time.Second)
		if n := s.share(seen.under(t, "renewal", hold)); n == 0 {
			t.Error("no renewal")
		}
		unlock(t, l)
		synctest.Wait()
		if n := s.share(seen.under(t, "release", hold)); n != 1 {
			t.Errorf("%d commands to release", n)
		}

		held := lock(t, other.Mutex("x"))
		synctest.Wait() // else what servers of a quorum grant is given back, which serves no wait alone
		ctx, cancel := context.WithTimeout(r.under(t, "in vain"), time.Second)
		defer cancel()
		if _, err := mu.LockContext(ctx); err == nil {
			t.Error("two inside")
		}
		synctest.Wait()
		wait = r.last(t, "leased.wait").SpanContext.SpanID()
		if n := s.share(seen.under(t, "acquire and cancel", wait)); n < 2 {
			t.Errorf("%d commands of a wait in vain", n)
		}
		unlock(t, held)
	})
}

// What a sampler has left out of the trace, the commands are not to begin again.
func TestTraceOfAWaitThatIsNotSampledHasNoCommandsOfItsOwn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t, sdk.WithSampler(sdk.ParentBased(sdk.NeverSample())))
		c, seen := observed(t, s, leased.WithTracerProvider(r))
		l := lockUnder(t, context.Background(), c.Mutex("x"))
		time.Sleep(11 * time.Second)
		unlock(t, l)
		all := seen.take()
		if len(all) < 3 {
			t.Errorf("%d commands", len(all))
		}
		for _, got := range all {
			if !got.IsValid() || got.IsSampled() {
				t.Errorf("sent under %v, sampled: %v", got.SpanID(), got.IsSampled())
			}
		}
	})
}

// A round trip for the locks of several callers is of none of their traces.
func TestTraceHasARoundTripForSeveralLocksUnderNone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c, seen := observed(t, s, leased.WithTracerProvider(r))
		a, b := lockUnder(t, r.under(t, "a"), c.Mutex("a")), lockUnder(t, r.under(t, "b"), c.Mutex("b"))
		synctest.Wait()
		seen.take()
		time.Sleep(11 * time.Second)
		if n := seen.under(t, "renewals", trace.SpanID{}); n == 0 {
			t.Error("no renewals")
		}
		unlock(t, a)
		unlock(t, b)
	})
}

func TestTraceOfLockHasItsCommandsUnderItsSpansIfThereAreSome(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c, seen := observed(t, s, leased.WithTracerProvider(r))
		mu := c.Mutex("x")
		mu.Lock()
		synctest.Wait() // else the last of a quorum's servers is asked once more, to cancel
		mu.Unlock()
		synctest.Wait()
		if n := s.share(seen.under(t, "an uncontended Lock", trace.SpanID{})); n != 2 {
			t.Errorf("%d commands", n)
		}
		mu.Lock()
		synctest.Wait()
		seen.take()
		entered := locking(t, newClient(t, s).Mutex("x")) // who is waited for gets a span
		synctest.Wait()
		mu.Unlock()
		synctest.Wait()
		if n := s.share(seen.under(t, "a contended Unlock", r.last(t, "leased.hold").SpanContext.SpanID())); n != 1 {
			t.Errorf("%d commands", n)
		}
		unlock(t, <-entered)

		every, seen := observed(t, s, leased.WithTracerProvider(r), leased.WithUncontendedSpans())
		mu = every.Mutex("y")
		mu.Lock()
		synctest.Wait()
		seen.under(t, "Lock with a span", r.last(t, "leased.wait").SpanContext.SpanID())
		mu.Unlock()
		synctest.Wait()
		seen.under(t, "Unlock with a span", r.last(t, "leased.hold").SpanContext.SpanID())
	})
}
