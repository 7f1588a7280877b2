package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased"
)

// recorder keeps the spans of one process that have ended.
type recorder struct {
	*sdk.TracerProvider
	kept *tracetest.InMemoryExporter
}

func newRecorder(t *testing.T, opts ...sdk.TracerProviderOption) recorder {
	t.Helper()
	kept := tracetest.NewInMemoryExporter()
	tp := sdk.NewTracerProvider(append([]sdk.TracerProviderOption{sdk.WithSyncer(kept)}, opts...)...)
	t.Cleanup(func() { _ = tp.Shutdown(context.Background()) })
	return recorder{tp, kept}
}

// under returns a context with a span of a user of the lock.
func (r recorder) under(t *testing.T, name string) context.Context {
	t.Helper()
	ctx, span := r.Tracer("test").Start(context.Background(), name)
	t.Cleanup(func() { span.End() })
	return ctx
}

// spans returns those of a name, in the order of their beginning.
func (r recorder) spans(name string) []tracetest.SpanStub {
	var found []tracetest.SpanStub
	for _, s := range r.kept.GetSpans() {
		if s.Name == name {
			found = append(found, s)
		}
	}
	slices.SortStableFunc(found, func(a, b tracetest.SpanStub) int { return a.StartTime.Compare(b.StartTime) })
	return found
}

// last returns the last to begin.
func (r recorder) last(t *testing.T, name string) tracetest.SpanStub {
	t.Helper()
	found := r.spans(name)
	if len(found) == 0 {
		t.Fatalf("no span %s among %d", name, len(r.kept.GetSpans()))
	}
	return found[len(found)-1]
}

// has checks attributes: key, value, key, value.
func has(t *testing.T, s tracetest.SpanStub, want ...any) {
	t.Helper()
	set := attribute.NewSet(s.Attributes...)
	for i := 0; i < len(want); i += 2 {
		v, ok := set.Value(attribute.Key(want[i].(string)))
		if want[i+1] == nil {
			if ok {
				t.Errorf("%s: %s is %v", s.Name, want[i], v.AsInterface())
			}
		} else if v.AsInterface() != want[i+1] {
			t.Errorf("%s: %s is %v, want %v", s.Name, want[i], v.AsInterface(), want[i+1])
		}
	}
}

func events(s tracetest.SpanStub) (names []string) {
	for _, e := range s.Events {
		names = append(names, e.Name)
	}
	return names
}

// noError fails t if the span is marked as failed: contention is not an error.
func noError(t *testing.T, s tracetest.SpanStub) {
	t.Helper()
	if s.Status.Code != codes.Unset {
		t.Errorf("contention is not an error: %v", s.Status)
	}
}

// links checks that s has one link, to the span to.
func links(t *testing.T, s tracetest.SpanStub, to tracetest.SpanStub, remote bool) {
	t.Helper()
	if len(s.Links) != 1 {
		t.Fatalf("%d links", len(s.Links))
	}
	got := s.Links[0].SpanContext
	if got.TraceID() != to.SpanContext.TraceID() || got.SpanID() != to.SpanContext.SpanID() || got.IsRemote() != remote {
		t.Errorf("a link to %v (remote: %v), want %v", got, got.IsRemote(), to.SpanContext)
	}
	if got.TraceFlags() != to.SpanContext.TraceFlags() {
		t.Errorf("a link with the flags %v, want %v", got.TraceFlags(), to.SpanContext.TraceFlags())
	}
}

func lockUnder(t *testing.T, ctx context.Context, mu interface {
	LockContext(context.Context) (*leased.Lease, error)
}) *leased.Lease {
	t.Helper()
	l, err := mu.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestTraceOfAFreeLockHasAWaitAndAHoldUnderTheCallersSpan(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		ctx := r.under(t, "order")
		parent := trace.SpanContextFromContext(ctx)
		l := lockUnder(t, ctx, c.Mutex("x"))
		_, work := r.Tracer("test").Start(l.Context(), "work")
		work.End()
		time.Sleep(time.Second)
		unlock(t, l)
		synctest.Wait()

		wait, hold := r.last(t, "leased.wait"), r.last(t, "leased.hold")
		for _, span := range []tracetest.SpanStub{wait, hold} {
			if span.Parent.SpanID() != parent.SpanID() {
				t.Errorf("%s is a child of %v", span.Name, span.Parent)
			}
			if span.InstrumentationScope.Name != "github.com/leasedmutex/leased" || span.InstrumentationScope.Version == "(devel)" {
				t.Errorf("scope %+v", span.InstrumentationScope)
			}
			if span.Status.Code != codes.Unset || len(span.Events) != 0 || len(span.Links) != 0 {
				t.Errorf("%s: %v, %d events, %d links", span.Name, span.Status, len(span.Events), len(span.Links))
			}
			has(t, span, "leased.lock", "x", "leased.mode", "exclusive", "leased.via", "free", "leased.token", int64(l.Token()))
		}
		has(t, wait, "leased.wait.outcome", "acquired", "leased.place", nil)
		has(t, hold, "leased.hold.outcome", "released")
		if held := hold.EndTime.Sub(hold.StartTime); held != time.Second {
			t.Errorf("held for %v", held)
		}
		if hold.StartTime.Before(wait.EndTime) {
			t.Errorf("the hold begins %v before the wait ends", wait.EndTime.Sub(hold.StartTime))
		}
		if w := r.last(t, "work"); w.Parent.SpanID() != hold.SpanContext.SpanID() {
			t.Error("what is done under the lease is not a child of the hold")
		}
	})
}

func TestTraceLinksAWaiterToTheLeaseOfItsProcessThatLetItIn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		first := lockUnder(t, r.under(t, "first"), c.Mutex("x"))
		second := make(chan *leased.Lease, 1)
		go func() { second <- lockUnder(t, r.under(t, "second"), c.Mutex("x")) }()
		synctest.Wait()
		time.Sleep(2 * time.Second)
		unlock(t, first)
		l := <-second
		unlock(t, l)
		synctest.Wait()

		waits, holds := r.spans("leased.wait"), r.spans("leased.hold")
		if len(waits) != 2 || len(holds) != 2 {
			t.Fatalf("%d waits, %d holds", len(waits), len(holds))
		}
		wait := waits[1]
		links(t, wait, holds[0], false)
		has(t, wait, "leased.via", "local", "leased.wait.outcome", "acquired", "leased.place", int64(0))
		if got := events(wait); !slices.Equal(got, []string{"queued", "woken"}) {
			t.Errorf("events %v", got)
		}
		if took := wait.EndTime.Sub(wait.StartTime); took != 2*time.Second {
			t.Errorf("waited for %v", took)
		}
		if got := events(holds[0]); !slices.Equal(got, []string{"wanted_here"}) {
			t.Errorf("events of the hold %v", got)
		}
		if woken := wait.Events[1].Time; !woken.Equal(holds[0].EndTime) {
			t.Errorf("woken at %v, let go at %v", woken, holds[0].EndTime)
		}
	})
}

func TestTraceLinksAWaiterToTheLeaseOfAnotherProcessThatLetItIn(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		here, there := newRecorder(t), newRecorder(t)
		owner := newClient(t, s, leased.WithTracerProvider(there), leased.WithOwner("owner"))
		waiter := newClient(t, s, leased.WithTracerProvider(here))
		hears(t, s, waiter)
		first := lockUnder(t, there.under(t, "first"), owner.Mutex("x"))
		ctx := here.under(t, "second")
		second := make(chan *leased.Lease, 1)
		go func() { second <- lockUnder(t, ctx, waiter.Mutex("x")) }()
		s.queued(t, "x", 1)
		unlock(t, first)
		unlock(t, closesSoon(t, "the lock is handed over", second))
		for _, c := range []*leased.Client{owner, waiter} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}

		wait, hold := here.last(t, "leased.wait"), there.last(t, "leased.hold")
		links(t, wait, hold, true)
		has(t, wait, "leased.via", "direct")
	})
}

func TestTraceEventsOfAWaitForAnotherProcess(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		owner := newClient(t, s, leased.WithOwner("owner"))
		first := lock(t, owner.Mutex("x"))
		synctest.Wait()
		began := time.Now()
		ctx := r.under(t, "second")
		mu := newClient(t, s, leased.WithTracerProvider(r)).Mutex("x")
		second := make(chan *leased.Lease, 1)
		go func() { second <- lockUnder(t, ctx, mu) }()
		time.Sleep(time.Second)
		unlock(t, first)
		unlock(t, <-second)
		synctest.Wait()
		wait := r.last(t, "leased.wait")
		if got := events(wait); !slices.Equal(got, []string{"queued_in_redis", "woken"}) {
			t.Fatalf("events %v", got)
		}
		queued := attribute.NewSet(wait.Events[0].Attributes...)
		if v, _ := queued.Value("leased.blocker"); v.AsString() != "owner" {
			t.Errorf("blocked by %q", v.AsString())
		}
		if at := wait.Events[1].Time.Sub(began); at != time.Second {
			t.Errorf("woken after %v", at)
		}
		if len(wait.Links) != 0 {
			t.Error("a link to an owner without spans")
		}
	})
}

// seen is what a sampler is told of the spans that it decides about.
type seen struct {
	mu   sync.Mutex
	seen map[string][]attribute.Set
}

func (*seen) Description() string { return "all, and what it saw of them" }

func (s *seen) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[p.Name] = append(s.seen[p.Name], attribute.NewSet(p.Attributes...))
	return sdk.AlwaysSample().ShouldSample(p)
}

// slowSampler takes its time to record nothing.
type slowSampler struct{}

func (slowSampler) ShouldSample(sdk.SamplingParameters) sdk.SamplingResult {
	time.Sleep(300 * time.Millisecond) // in virtual time
	return sdk.SamplingResult{Decision: sdk.Drop}
}

func (slowSampler) Description() string { return "slow" }

func TestASamplerTakesNothingFromTheTimeThatALeaseIsTrusted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = time.Second
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSampler(slowSampler{}))), leased.WithTTL(ttl))
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait() // its inbox is confirmed, so no question follows, whose answer would renew the trust
		l := lock(t, c.Mutex("x"))
		if left := time.Until(l.TrustedUntil()); left < ttl*9/10 {
			t.Errorf("trusted for %v", left)
		}
		unlock(t, l)
	})
}

func TestSamplersSeeLockModeAndOwner(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		sampler := &seen{seen: map[string][]attribute.Set{}}
		r := newRecorder(t, sdk.WithSampler(sampler))
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithOwner("me"), leased.WithUncontendedSpans())
		l, err := c.RWMutex("x").RLockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		unlock(t, l)
		mu := c.RWMutex("x")
		mu.RLock()
		mu.RUnlock() //nolint:staticcheck // its spans are what is tested
		synctest.Wait()
		want := attribute.NewSet(attribute.String("leased.lock", "x"), attribute.String("leased.mode", "shared"), attribute.String("leased.owner", "me"))
		sampler.mu.Lock()
		defer sampler.mu.Unlock()
		for _, name := range []string{"leased.wait", "leased.hold"} {
			if len(sampler.seen[name]) != 2 {
				t.Errorf("%d spans %s", len(sampler.seen[name]), name)
			}
			for _, got := range sampler.seen[name] {
				if !got.Equals(&want) {
					t.Errorf("the sampler saw %v of %s", got.ToSlice(), name)
				}
			}
		}
	})
}

// slow is a sampler that takes its time with spans of one name.
type slow struct {
	name string
	took time.Duration
}

func (slow) Description() string { return "a slow one" }

func (s slow) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	if p.Name == s.name {
		time.Sleep(s.took) // in virtual time
	}
	return sdk.AlwaysSample().ShouldSample(p)
}

func TestASlowSamplerIsPartOfTheWaitAndNotOfTheHold(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const took = 100 * time.Millisecond
		r := newRecorder(t, sdk.WithSampler(slow{"leased.wait", took}))
		mu := newClient(t, s, leased.WithTracerProvider(r)).Mutex("x", leased.WithIdleHold(time.Minute))
		for range 2 { // the second time, the process has kept the lock
			unlock(t, lock(t, mu))
		}
		synctest.Wait()
		wait, hold := r.last(t, "leased.wait"), r.last(t, "leased.hold")
		if d := wait.EndTime.Sub(wait.StartTime); d != took {
			t.Errorf("the wait took %v", d)
		}
		if hold.StartTime.Before(wait.StartTime.Add(took)) {
			t.Errorf("the hold began %v after the wait", hold.StartTime.Sub(wait.StartTime))
		}
	})
}

func TestSpansOfErrorsHaveAType(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lockUnder(t, r.under(t, "user"), c.Mutex("x"))
		synctest.Wait()
		has(t, r.last(t, "leased.wait"), "error.type", nil)
		s.rdb.Del(context.Background(), "x")
		<-l.Context().Done()
		_ = l.Unlock()
		synctest.Wait()
		has(t, r.last(t, "leased.hold"), "error.type", "lost", "leased.hold.outcome", "lost")
		s.Mini.SetError("NOAUTH Authentication required.")
		if _, err := c.Mutex("y").LockContext(r.under(t, "user")); err == nil {
			t.Error("locked")
		}
		synctest.Wait()
		has(t, r.last(t, "leased.wait"), "error.type", "refused", "leased.wait.outcome", "refused")
		s.Mini.SetError("")
	})
}

// The lock is handed on inside a process whose leases have no spans: then nothing is
// linked, because the lease before would be the wrong one.
func TestTraceDoesNotLinkPastALeaseWithoutASpan(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t, sdk.WithSampler(sdk.ParentBased(sdk.NeverSample())))
		sampled := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		mu := c.Mutex("x")
		leases := make(chan *leased.Lease)
		contexts := []context.Context{sampled.under(t, "first"), context.Background(), sampled.under(t, "third")}
		first := lockUnder(t, contexts[0], mu)
		for _, ctx := range contexts[1:] {
			go func() { leases <- lockUnder(t, ctx, mu) }()
			synctest.Wait()
		}
		unlock(t, first)
		unlock(t, <-leases)
		unlock(t, <-leases)
		synctest.Wait()
		waits := r.spans("leased.wait")
		if len(waits) != 2 {
			t.Fatalf("%d waits", len(waits))
		}
		if n := len(waits[1].Links); n != 0 {
			t.Errorf("%d links", n)
		}
	})
}

// Here they are in different processes. Whoever had the lock when the last one began to wait did not let it in.
func TestTraceDoesNotLinkPastAProcessWithoutASpan(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		first, last := newClient(t, s, leased.WithTracerProvider(r), leased.WithOwner("first")), newClient(t, s, leased.WithTracerProvider(r))
		held := lockUnder(t, r.under(t, "first"), first.Mutex("x"))
		between := locking(t, newClient(t, s, leased.WithOwner("between")).Mutex("x"))
		s.queued(t, "x", 1)
		got := make(chan *leased.Lease)
		go func() { got <- lockUnder(t, r.under(t, "last"), last.Mutex("x")) }()
		s.queued(t, "x", 2)
		unlock(t, held)
		l := <-between
		time.Sleep(time.Second)
		unlock(t, l)
		unlock(t, <-got)
		synctest.Wait()
		waits := r.spans("leased.wait")
		if len(waits) != 2 {
			t.Fatalf("%d waits", len(waits))
		}
		set := attribute.NewSet(waits[1].Attributes...)
		if blocker, named := set.Value("leased.blocker"); len(waits[1].Links) != 0 || named {
			t.Errorf("links %v, blocker %q", waits[1].Links, blocker.AsString())
		}
	})
}

// declines samples nothing, and counts what it is asked about.
type declines struct {
	mu    sync.Mutex
	asked map[string]int
}

func (d *declines) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked[p.Name]++
	return sdk.SamplingResult{Decision: sdk.Drop}
}

func (d *declines) Description() string { return "declines" }

// A sampler of root spans decides once about a call of Lock. If it declines the wait, the hold is no other root.
func TestASamplerIsAskedOnceAboutTheSpansOfALockCall(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		d := &declines{asked: map[string]int{}}
		c := newClient(t, s, leased.WithTracerProvider(newRecorder(t, sdk.WithSampler(d))))
		mu := c.Mutex("x")
		mu.Lock()
		for range 3 { // each waits for the one before
			locked := make(chan struct{})
			go func() {
				mu.Lock()
				close(locked)
			}()
			synctest.Wait()
			mu.Unlock()
			<-locked
		}
		mu.Unlock()
		synctest.Wait()
		// The first did not wait, so nobody was asked about a span of its wait.
		if waits, holds := d.asked["leased.wait"], d.asked["leased.hold"]; waits != 3 || holds != 1 {
			t.Errorf("asked about %d waits and %d holds", waits, holds)
		}
	})
}

func TestTraceOfOneThatGivesUpLinksTheHoldThatBlocksItOrNamesTheBlocker(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		other := newClient(t, s, leased.WithOwner("other"))
		held := lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
		far := lock(t, other.Mutex("y"))

		give := func(name string, end func(context.Context) (context.Context, context.CancelFunc)) tracetest.SpanStub {
			t.Helper()
			ctx, cancel := end(r.under(t, "waiter"))
			defer cancel()
			if _, err := c.Mutex(name).LockContext(ctx); !errors.Is(err, ctx.Err()) {
				t.Errorf("%v", err)
			}
			synctest.Wait()
			return r.last(t, "leased.wait")
		}
		timeout := func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Second)
		}
		canceled := func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		}
		here := []tracetest.SpanStub{give("x", timeout), give("x", canceled)}
		has(t, here[0], "leased.wait.outcome", "timeout", "leased.via", nil, "leased.token", nil)
		has(t, here[1], "leased.wait.outcome", "canceled")
		away := give("y", timeout)
		has(t, away, "leased.wait.outcome", "timeout", "leased.blocker", "other")
		if len(away.Links) != 0 || away.EndTime.Sub(away.StartTime) != time.Second {
			t.Errorf("%d links after %v", len(away.Links), away.EndTime.Sub(away.StartTime))
		}
		unlock(t, held)
		unlock(t, far)
		synctest.Wait()
		for _, wait := range here {
			links(t, wait, r.spans("leased.hold")[0], false)
			noError(t, wait)
		}
	})
}

func TestTraceOfLockHasSpansOnlyWhereSomebodyWaited(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		mu := c.Mutex("x")
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // an empty section is enough
		if !mu.TryLock() {
			t.Error("TryLock of a free lock")
		}
		mu.Unlock()
		synctest.Wait()
		if n := len(r.kept.GetSpans()); n != 0 {
			t.Fatalf("%d spans though nobody waited", n)
		}

		before := time.Now()
		mu.Lock()
		began := time.Now()
		done := make(chan struct{})
		go func() {
			defer close(done)
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // as above
		}()
		synctest.Wait()
		time.Sleep(100 * time.Millisecond)
		mu.Unlock()
		<-done
		synctest.Wait()
		waits, holds := r.spans("leased.wait"), r.spans("leased.hold")
		if len(waits) != 1 || len(holds) != 2 {
			t.Fatalf("%d waits, %d holds", len(waits), len(holds))
		}
		first, second := holds[0], holds[1]
		if first.StartTime.Before(before) || first.StartTime.After(began) || first.EndTime.Sub(began) != 100*time.Millisecond ||
			first.Parent.IsValid() {
			t.Errorf("the hold that was waited for: %v to %v, parent %v", first.StartTime, first.EndTime, first.Parent)
		}
		links(t, waits[0], first, false)
		if second.Parent.SpanID() != waits[0].SpanContext.SpanID() {
			t.Error("wait and hold are not of one trace")
		}
	})
}

func TestTraceOfLockHasSpansAlwaysIfAskedFor(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		rw := newClient(t, s, leased.WithTracerProvider(r), leased.WithUncontendedSpans()).RWMutex("x")
		rw.RLock()
		rw.RLock()
		rw.RUnlock() //nolint:staticcheck // its spans are what is tested
		rw.RUnlock()
		synctest.Wait()
		waits, holds := r.spans("leased.wait"), r.spans("leased.hold")
		if len(waits) != 2 || len(holds) != 2 {
			t.Fatalf("%d waits, %d holds", len(waits), len(holds))
		}
		for _, hold := range holds {
			has(t, hold, "leased.mode", "shared", "leased.hold.outcome", "released")
		}
	})
}

func TestTraceOfALockContextWithoutAParentIsOneTrace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		unlock(t, lock(t, newClient(t, s, leased.WithTracerProvider(r)).Mutex("x")))
		synctest.Wait()
		wait, hold := r.last(t, "leased.wait"), r.last(t, "leased.hold")
		if wait.Parent.IsValid() || hold.Parent.SpanID() != wait.SpanContext.SpanID() {
			t.Errorf("parents %v, %v", wait.Parent, hold.Parent)
		}
	})
}

func TestTraceParentOfWorkInDoAndWith(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		work := func(ctx context.Context) trace.SpanID {
			_, span := r.Tracer("test").Start(ctx, "work")
			span.End()
			return r.last(t, "work").Parent.SpanID()
		}
		ctx := r.under(t, "caller")
		var inDo trace.SpanID
		if err := c.Mutex("x").Do(ctx, func(ctx context.Context) error {
			inDo = work(ctx)
			return nil
		}); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if inDo != r.last(t, "leased.hold").SpanContext.SpanID() {
			t.Error("work in Do is not a child of the hold")
		}

		l := lockUnder(t, ctx, c.Mutex("x"))
		same, stop := l.With(ctx)
		defer stop()
		other := r.under(t, "another request")
		apart, end := l.With(other)
		defer end()
		inSame, inOther := work(same), work(apart)
		unlock(t, l)
		synctest.Wait()
		if inSame != r.last(t, "leased.hold").SpanContext.SpanID() {
			t.Error("work in With(the context of LockContext) is not a child of the hold")
		}
		if inOther != trace.SpanFromContext(other).SpanContext().SpanID() {
			t.Error("work in With(the context of another request) is not a child of that request")
		}
	})
}

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
			if _, err := other.ForceUnlock(context.Background(), "x"); err != nil {
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
		hold = ends(t, s, func(_ *testing.T, _ *leased.Client, l *leased.Lease) {
			over, cancel := context.WithCancel(context.Background())
			cancel()
			_ = l.UnlockContext(over)
			time.Sleep(time.Minute)
		})
		has(t, hold, "leased.hold.outcome", "not_released", "leased.reason", context.Canceled.Error())
	})
}

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
