package leased_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/leasedmutex/leased"
)

// How waits and holds end, as their spans show.

func TestTraceOfATryThatFindsTheLockHeld(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		held := lock(t, newClient(t, s, leased.WithOwner("other")).Mutex("x"))
		if _, err := c.Mutex("x").TryLockContext(r.under(t, "try")); !errors.Is(err, leased.ErrLocked) {
			t.Error(err)
		}
		unlock(t, held)
		synctest.Wait()
		wait := r.last(t, "leased.wait")
		has(t, wait, "leased.wait.outcome", "locked", "leased.blocker", "other")
		noError(t, wait)
	})
}

// deliberates is a sampler that takes a while to decide about a wait.
type deliberates struct{ declines bool }

func (d deliberates) Description() string { return "deliberates" }

func (d deliberates) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	if p.Name == "leased.wait" {
		time.Sleep(time.Second) // the deliberation, in virtual time
		if d.declines {
			return sdk.SamplingResult{Decision: sdk.Drop}
		}
	}
	return sdk.SamplingResult{Decision: sdk.RecordAndSample}
}

// The span of the wait of a Lock begins when that is over. If the lease is lost meanwhile, its hold is no other root.
func TestTheHoldOfALockThatIsLostWhileItsWaitIsReportedBelongsToThatWait(t *testing.T) {
	for _, declines := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			r := newRecorder(t, sdk.WithSampler(deliberates{declines}))
			c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) {}))
			mu := c.Mutex("x")
			first := lock(t, mu)
			locked := make(chan struct{})
			go func() {
				mu.Lock()
				close(locked)
			}()
			synctest.Wait()
			time.Sleep(10 * time.Millisecond)
			unlock(t, first)
			time.Sleep(500 * time.Millisecond) // the second is inside, and the sampler is at work
			if err := forceUnlock(context.Background(), c, "x"); err != nil {
				t.Error(err)
			}
			<-locked
			mu.Unlock()
			synctest.Wait()
			var waits, forced []tracetest.SpanStub
			for _, span := range r.kept.GetSpans() {
				switch {
				case span.Name == "leased.wait":
					waits = append(waits, span)
				case span.Status.Description == "forced":
					forced = append(forced, span)
				}
			}
			switch {
			case declines:
				if len(forced) != 0 {
					t.Error("the hold has a span, and its wait has none")
				}
			case len(waits) == 0 || len(forced) != 1 || forced[0].Parent.SpanID() != waits[len(waits)-1].SpanContext.SpanID():
				t.Errorf("waits %v, holds that were lost %v", waits, forced)
			}
		})
	}
}

func TestTraceOfAWaitThatRedisOrCloseRefuses(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		s.rdb.LPush(context.Background(), "list", "x")
		if _, err := c.Mutex("list").LockContext(r.under(t, "refused")); err == nil {
			t.Error("a list is not a lock")
		}
		synctest.Wait()
		refused := r.last(t, "leased.wait")
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if _, err := c.Mutex("x").LockContext(r.under(t, "closed")); !errors.Is(err, leased.ErrClosed) {
			t.Error(err)
		}
		synctest.Wait()
		closed := r.last(t, "leased.wait")
		has(t, refused, "leased.wait.outcome", "refused")
		has(t, closed, "leased.wait.outcome", "closed")
		for _, wait := range []tracetest.SpanStub{refused, closed} {
			if wait.Status.Code != codes.Error || wait.Status.Description == "" {
				t.Errorf("status %v", wait.Status)
			}
		}
		s.rdb.Del(context.Background(), "list")
	})
}

// ends runs one hold, which how ends, and returns its span.
func ends(t *testing.T, s place, how func(t *testing.T, c *leased.Client, l *leased.Lease), opts ...leased.Option) tracetest.SpanStub {
	t.Helper()
	r := newRecorder(t)
	c := newClient(t, s, append(opts, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) {}))...)
	l := lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
	how(t, c, l)
	_ = l.Unlock()
	synctest.Wait()
	if n := len(r.spans("leased.hold")); n != 1 {
		t.Fatalf("%d holds", n)
	}
	return r.last(t, "leased.hold")
}

// Its lease was lost after its wait, whose span says nothing of that.
func TestTraceOfAWaitThatIsGivenUpAfterTheCallerWasAdmittedHasNoEventOfTheHold(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) {}), leased.WithProfileLabels())
		gaveUp := 0
		for range 20 { // where two things have happened, select chooses one
			l, err := c.Mutex("x", leased.WithMaxHold(time.Second/2)).LockContext(tardy{r.under(t, "tardy")})
			if err == nil {
				_ = l.Unlock()
			} else {
				gaveUp++
			}
			synctest.Wait()
			if got := events(r.last(t, "leased.wait")); len(got) != 0 {
				t.Errorf("after %v: events %v", err, got)
			}
		}
		if gaveUp == 0 {
			t.Error("nobody gave up")
		}
	})
}

func TestTraceOfALostLeaseEndsAtTheLossWithAnError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hold := ends(t, s, func(t *testing.T, c *leased.Client, l *leased.Lease) {
			s.rdb.Del(context.Background(), "x")
			<-l.Context().Done()
			time.Sleep(time.Hour)
		})
		has(t, hold, "leased.hold.outcome", "lost")
		if !slices.Equal(events(hold), []string{"lost"}) || hold.Status.Code != codes.Error {
			t.Errorf("events %v, status %v", events(hold), hold.Status)
		}
		if held := hold.EndTime.Sub(hold.StartTime); held > 11*time.Second {
			t.Errorf("it ended after %v, not with the loss", held)
		}
	})
}

func TestTraceOfALeaseLostInAnOutageTellsOfTheErrorBefore(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hold := ends(t, s, func(t *testing.T, c *leased.Client, l *leased.Lease) {
			s.Mini.SetError("LOADING Redis is loading the dataset in memory")
			<-l.Context().Done()
			s.Mini.SetError("")
		})
		has(t, hold, "leased.hold.outcome", "lost")
		names := events(hold)
		if len(names) < 2 || names[0] != "error" || names[len(names)-1] != "lost" {
			t.Fatalf("events %v", names)
		}
		first := attribute.NewSet(hold.Events[0].Attributes...)
		if why, _ := first.Value("leased.reason"); !strings.Contains(why.AsString(), "LOADING") {
			t.Errorf("error with %q", why.AsString())
		}
		if held := hold.EndTime.Sub(hold.StartTime); held != 30*time.Second-302*time.Millisecond {
			t.Errorf("it ended after %v", held)
		}
	})
}

func TestTraceOfALeaseThatAnOperatorForced(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hold := ends(t, s, func(t *testing.T, c *leased.Client, l *leased.Lease) {
			synctest.Wait() // the inbox is there
			if _, err := newClient(t, s).ForceUnlock(context.Background(), "x"); err != nil {
				t.Error(err)
			}
			<-l.Context().Done()
		})
		has(t, hold, "leased.hold.outcome", "forced")
		if hold.Status.Code != codes.Error {
			t.Errorf("status %v", hold.Status)
		}
	})
}

func TestTraceOfALeaseThatRedisDoesNotConfirmTheReleaseOf(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hold := ends(t, s, func(t *testing.T, c *leased.Client, l *leased.Lease) {
			s.Mini.SetError("LOADING Redis is loading the dataset in memory")
			if err := l.Unlock(); !errors.Is(err, leased.ErrNotReleased) {
				t.Error(err)
			}
			s.Mini.SetError("")
			time.Sleep(time.Minute)
		})
		has(t, hold, "leased.hold.outcome", "not_released")
		if hold.Status.Code != codes.Error {
			t.Errorf("status %v", hold.Status)
		}
	})
}

func TestTraceShowsForHowLongUnlockWaitedForRedis(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithTracerProvider(r), leased.WithOwner("me"))
		warm(t, s, c)
		l := lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
		time.Sleep(time.Second)
		s.hook(rdb, distant(30*time.Millisecond))
		unlock(t, l)
		hold, release := r.last(t, "leased.hold"), r.last(t, "leased.release")
		if took := release.EndTime.Sub(release.StartTime); took != 30*time.Millisecond || !release.StartTime.Equal(hold.EndTime) {
			t.Errorf("it took %v from %v on, and the hold ended %v", took, release.StartTime, hold.EndTime)
		}
		if release.Parent.SpanID() != hold.SpanContext.SpanID() {
			t.Error("it is not a child of the hold")
		}
		has(t, release, "leased.lock", "x", "leased.owner", "me", "leased.hold.outcome", "released", "leased.token", int64(l.Token()))
		noError(t, release)
		l = lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		if err := l.Unlock(); !errors.Is(err, leased.ErrNotReleased) {
			t.Error(err)
		}
		s.Mini.SetError("")
		if release = r.last(t, "leased.release"); release.Status.Code != codes.Error || release.EndTime.Sub(release.StartTime) != time.Second {
			t.Errorf("not confirmed: status %v after %v", release.Status, release.EndTime.Sub(release.StartTime))
		}
		time.Sleep(time.Minute)

		n := len(r.spans("leased.release"))
		first := lockUnder(t, r.under(t, "holder"), c.Mutex("y"))
		second := locking(t, c.Mutex("y"))
		synctest.Wait()
		unlock(t, first)
		if more := len(r.spans("leased.release")) - n; more != 0 {
			t.Errorf("%d spans of releases that went to another caller here", more)
		}
		unlock(t, <-second)
	})
}

// distant is a hook that makes each command's round trip as long.
type distant time.Duration

func (d distant) DialHook(next redis.DialHook) redis.DialHook { return next }

func (d distant) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		time.Sleep(time.Duration(d)) // of virtual time: the way
		return next(ctx, cmd)
	}
}

func (d distant) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestTraceOfALeaseThatCloseAbandoned(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		l := lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
		if err := c.Close(); err == nil {
			t.Error("the lease was abandoned, and Close does not say so")
		}
		synctest.Wait()
		has(t, r.last(t, "leased.hold"), "leased.hold.outcome", "abandoned")
		_ = l.Unlock()
		if n := len(r.spans("leased.hold")); n != 1 {
			t.Errorf("%d holds", n)
		}
		time.Sleep(time.Minute)
	})
}

func TestTraceOfADowngradedLeaseIsOneHoldThatBecomesShared(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r))
		reader := newRecorder(t)
		l := lockUnder(t, r.under(t, "writer"), c.RWMutex("x"))
		synctest.Wait() // the inbox is there
		entered := make(chan *leased.Lease, 1)
		ctx := reader.under(t, "reader")
		rw := newClient(t, s, leased.WithTracerProvider(reader)).RWMutex("x")
		go func() {
			l, err := rw.RLockContext(ctx)
			if err != nil {
				t.Error(err)
			}
			entered <- l
		}()
		synctest.Wait()
		if err := l.Downgrade(context.Background()); err != nil {
			t.Error(err)
		}
		unlock(t, <-entered)
		unlock(t, l)
		synctest.Wait()
		hold := r.last(t, "leased.hold")
		has(t, hold, "leased.mode", "shared", "leased.hold.outcome", "released", "leased.token", int64(l.Token()))
		if got := events(hold); !slices.Equal(got, []string{"wanted", "downgraded"}) {
			t.Errorf("events %v", got)
		}
		links(t, reader.last(t, "leased.wait"), hold, true)
	})
}

// The head of a queue of readers brings all of them in: each is linked to the
// writer that let go.
func TestTraceLinksAllReadersToTheWriterThatLetThemIn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		writer := newClient(t, s, leased.WithTracerProvider(r))
		readers := newRecorder(t)
		rw := newClient(t, s, leased.WithTracerProvider(readers)).RWMutex("x")
		l := lockUnder(t, r.under(t, "writer"), writer.RWMutex("x"))
		entered := make(chan *leased.Lease, 3)
		for range 3 {
			ctx := readers.under(t, "reader")
			go func() {
				l, err := rw.RLockContext(ctx)
				if err != nil {
					t.Error(err)
				}
				entered <- l
			}()
		}
		synctest.Wait()
		unlock(t, l)
		for range 3 {
			unlock(t, <-entered)
		}
		synctest.Wait()
		waits := readers.spans("leased.wait")
		if len(waits) != 3 {
			t.Fatalf("%d waits", len(waits))
		}
		for _, wait := range waits {
			links(t, wait, r.last(t, "leased.hold"), true)
		}
	})
}

func TestTraceOfALeaseOfLockThatIsLostTellsOfItThoughNobodyWaited(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		lost := make(chan struct{})
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithLossHandler(func(leased.LossEvent) { close(lost) }))
		mu := c.Mutex("x")
		began := time.Now()
		mu.Lock()
		time.Sleep(time.Second)
		s.rdb.Del(context.Background(), "x")
		<-lost
		later := locking(t, mu) // it waits for a lease that has a span by now
		synctest.Wait()
		mu.Unlock()
		unlock(t, <-later)
		synctest.Wait()
		holds := r.spans("leased.hold")
		if len(holds) != 2 {
			t.Fatalf("%d holds", len(holds))
		}
		has(t, holds[0], "leased.hold.outcome", "lost", "leased.lock", "x", "leased.via", "free")
		if took := holds[0].EndTime.Sub(began); took != 10*time.Second || !slices.Equal(events(holds[0]), []string{"lost"}) {
			t.Errorf("it ended after %v, events %v", took, events(holds[0]))
		}
	})
}

// slowly ends spans a moment later, as a processor does that is not a batcher.
type slowly struct{ *tracetest.InMemoryExporter }

func (s slowly) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	time.Sleep(time.Millisecond) // of virtual time: the moment
	return s.InMemoryExporter.ExportSpans(ctx, spans)
}

// The provider is shut down right after the client, which has given the lease up because
// the time of Close was over.
func TestTraceOfALeaseThatCloseAbandonedIsToldBeforeCloseReturns(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		kept := tracetest.NewInMemoryExporter()
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSyncer(slowly{kept}))))
		l := lock(t, c.Mutex("x"))
		if err := c.Close(); err == nil {
			t.Error("the lease was abandoned, and Close does not say so")
		}
		if n := len(kept.GetSpans()); n != 2 {
			t.Errorf("%d spans", n)
		}
		_ = l.Unlock()
		time.Sleep(time.Minute)
	})
}
