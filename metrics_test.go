package leased_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased"
)

// meter collects when asked.
type meter struct {
	*sdkmetric.MeterProvider
	reader *sdkmetric.ManualReader
}

func newMeter(t *testing.T, opts ...sdkmetric.Option) meter {
	t.Helper()
	reader := sdkmetric.NewManualReader()
	mp := sdkmetric.NewMeterProvider(append(opts, sdkmetric.WithReader(reader))...)
	t.Cleanup(func() { _ = mp.Shutdown(context.Background()) })
	return meter{mp, reader}
}

func (m meter) collect(t *testing.T) map[string]metricdata.Metrics {
	t.Helper()
	var got metricdata.ResourceMetrics
	if err := m.reader.Collect(context.Background(), &got); err != nil {
		t.Fatal(err)
	}
	all := map[string]metricdata.Metrics{}
	for _, scope := range got.ScopeMetrics {
		if scope.Scope.Name != "github.com/leasedmutex/leased" || scope.Scope.Version == "(devel)" {
			t.Errorf("scope %+v", scope.Scope)
		}
		for _, one := range scope.Metrics {
			all[one.Name] = one
		}
	}
	return all
}

// matches reports whether set is of exactly these: key, value, key, value.
func matches(set attribute.Set, labels []string) bool {
	var want []attribute.KeyValue
	for i := 0; i < len(labels); i += 2 {
		want = append(want, attribute.String(labels[i], labels[i+1]))
	}
	other := attribute.NewSet(want...)
	return set.Equals(&other)
}

// sum returns the value of a counter under these labels, -1 if it has none.
func sum(t *testing.T, m metricdata.Metrics, labels ...string) int64 {
	t.Helper()
	data, ok := m.Data.(metricdata.Sum[int64])
	if !ok {
		t.Fatalf("%s is a %T", m.Name, m.Data)
	}
	for _, p := range data.DataPoints {
		if matches(p.Attributes, labels) {
			return p.Value
		}
	}
	return -1
}

// times returns a histogram's point under these labels.
func times(t *testing.T, m metricdata.Metrics, labels ...string) (p metricdata.HistogramDataPoint[float64]) {
	t.Helper()
	data, ok := m.Data.(metricdata.Histogram[float64])
	if !ok || m.Unit != "s" {
		t.Fatalf("%s is a %T in %q", m.Name, m.Data, m.Unit)
	}
	for _, p := range data.DataPoints {
		if matches(p.Attributes, labels) {
			return p
		}
	}
	return p
}

func near(a, b float64) bool { return math.Abs(a-b) < 0.001 }

func TestMetricsOfWaitsAndHoldsByOutcome(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLossHandler(func(leased.LossEvent) {}))
		mu := c.Mutex("x")
		first := lock(t, mu)
		synctest.Wait()
		second := locking(t, mu)
		synctest.Wait()
		held := m.collect(t)
		if w, h := sum(t, held["leased.waiting"]), sum(t, held["leased.held"]); w != 1 || h != 1 {
			t.Errorf("%d waiting, %d held", w, h)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if _, err := mu.LockContext(ctx); err == nil {
			t.Error("two inside")
		}
		time.Sleep(400 * time.Millisecond)
		unlock(t, first)
		l := <-second
		s.rdb.Del(context.Background(), "x")
		<-l.Context().Done()
		_ = l.Unlock()
		rw := c.RWMutex("y")
		rw.RLock()
		time.Sleep(time.Minute)
		rw.RUnlock()
		synctest.Wait()

		got := m.collect(t)
		waits, holds := got["leased.wait.duration"], got["leased.hold.duration"]
		local := times(t, waits, "leased.mode", "exclusive", "leased.wait.outcome", "acquired", "leased.via", "local")
		if local.Count != 1 || !near(local.Sum, 0.5) {
			t.Errorf("waited %d times, %v s", local.Count, local.Sum)
		}
		late := times(t, waits, "leased.mode", "exclusive", "leased.wait.outcome", "timeout")
		if late.Count != 1 || !near(late.Sum, 0.1) {
			t.Errorf("timed out %d times, %v s", late.Count, late.Sum)
		}
		if n := times(t, waits, "leased.mode", "shared", "leased.wait.outcome", "acquired", "leased.via", "free").Count; n != 1 {
			t.Errorf("%d waits of readers", n)
		}
		if h := times(t, holds, "leased.mode", "exclusive", "leased.hold.outcome", "released"); h.Count != 1 || !near(h.Sum, 0.5) {
			t.Errorf("held %d times, %v s", h.Count, h.Sum)
		}
		if h := times(t, holds, "leased.mode", "exclusive", "leased.hold.outcome", "lost"); h.Count != 1 || h.Sum > 11 {
			t.Errorf("lost %d times, %v s", h.Count, h.Sum)
		}
		h := times(t, holds, "leased.mode", "shared", "leased.hold.outcome", "released")
		if h.Count != 1 || !near(h.Sum, 60) {
			t.Errorf("read %d times, %v s", h.Count, h.Sum)
		}
		if h.Bounds[0] != 0.000_05 || h.Bounds[len(h.Bounds)-1] != 600 {
			t.Errorf("buckets %v", h.Bounds)
		}
		stats := c.Stats()
		for _, want := range []struct {
			name   string
			value  int64
			labels []string
		}{
			{"leased.leases", 2, []string{"leased.via", "free"}},
			{"leased.leases", 1, []string{"leased.via", "local"}},
			{"leased.handoffs", 1, []string{"leased.kind", "local"}},
			{"leased.handoffs", 0, []string{"leased.kind", "direct"}},
			{"leased.losses", 1, nil},
			{"leased.renewals", stats.Renewals, []string{"leased.renewal.outcome", "renewed"}},
			{"leased.renewals", 1, []string{"leased.renewal.outcome", "lost"}},
			{"leased.renewals", 0, []string{"leased.renewal.outcome", "failed"}},
			{"leased.commands", stats.Commands, nil},
			{"leased.waiting", 0, nil},
			{"leased.held", 0, nil},
		} {
			if v := sum(t, got[want.name], want.labels...); v != want.value {
				t.Errorf("%s %v is %d, want %d", want.name, want.labels, v, want.value)
			}
		}
	})
}

func TestMetricsHaveTheLocksNameIfAskedFor(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLockNameInMetrics())
		l := lock(t, c.Mutex("x"))
		if n := sum(t, m.collect(t)["leased.held"], "leased.lock", "x"); n != 1 {
			t.Errorf("%d held", n)
		}
		unlock(t, l)
		got := m.collect(t)
		if n := times(t, got["leased.wait.duration"], "leased.lock", "x", "leased.mode", "exclusive",
			"leased.wait.outcome", "acquired", "leased.via", "free").Count; n != 1 {
			t.Errorf("%d waits", n)
		}
		if n := times(t, got["leased.hold.duration"], "leased.lock", "x", "leased.mode", "exclusive",
			"leased.hold.outcome", "released").Count; n != 1 {
			t.Errorf("%d holds", n)
		}
	})
}

func TestMetricsKeepTheTraceAsExemplar(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m, r := newMeter(t), newRecorder(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithTracerProvider(r))
		unlock(t, lockUnder(t, r.under(t, "caller"), c.Mutex("x")))
		synctest.Wait()
		got := m.collect(t)
		for metric, span := range map[string]string{"leased.wait.duration": "leased.wait", "leased.hold.duration": "leased.hold"} {
			want := r.last(t, span).SpanContext.SpanID()
			points := got[metric].Data.(metricdata.Histogram[float64]).DataPoints
			if len(points) != 1 || len(points[0].Exemplars) != 1 {
				t.Fatalf("%s: %+v", metric, points)
			}
			if id := points[0].Exemplars[0].SpanID; string(id) != string(want[:]) {
				t.Errorf("%s: exemplar %x, span %v", metric, id, want)
			}
		}
	})
}

// The span of a Lock is made when it has waited, and still is what its measurement refers to.
func TestMetricsKeepTheTraceOfAContendedLockAsExemplar(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m, r := newMeter(t), newRecorder(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithTracerProvider(r))
		mu := c.Mutex("x")
		mu.Lock()
		done := make(chan struct{})
		go func() {
			defer close(done)
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // its measurements are what is tested
		}()
		synctest.Wait()
		time.Sleep(time.Second)
		mu.Unlock()
		<-done
		wait := r.last(t, "leased.wait").SpanContext.SpanID()
		p := times(t, m.collect(t)["leased.wait.duration"], "leased.mode", "exclusive", "leased.wait.outcome", "acquired", "leased.via", "local")
		if len(p.Exemplars) != 1 || string(p.Exemplars[0].SpanID) != string(wait[:]) {
			t.Errorf("exemplars %+v, want span %v", p.Exemplars, wait)
		}
	})
}

// far is a hook of the Redis client that makes the way to the server a millisecond long, and notes
// the longest pipeline.
type far struct {
	mu      sync.Mutex
	longest int
}

func (f *far) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *far) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		time.Sleep(time.Millisecond) // of virtual time: the way
		return next(ctx, cmd)
	}
}

func (f *far) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		f.mu.Lock()
		f.longest = max(f.longest, len(cmds))
		f.mu.Unlock()
		time.Sleep(time.Millisecond) // of virtual time: the way
		return next(ctx, cmds)
	}
}

func TestCommandsThatShareAPipelineAreMeasuredOneByOne(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithMeterProvider(m))
		unlock(t, lock(t, c.Mutex("first"))) // which may ask twice, as the inbox begins
		synctest.Wait()
		before := m.collect(t)["leased.command.duration"]
		way := &far{}
		s.hook(rdb, way)
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				l, err := c.Mutex(fmt.Sprint(i)).LockContext(context.Background())
				if err == nil {
					err = l.Unlock()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		synctest.Wait()
		if way.longest < 2 {
			t.Error("no commands have left together")
		}
		got := m.collect(t)["leased.command.duration"]
		for _, command := range []string{"acquire", "release"} {
			is, was := times(t, got, "leased.command", command), times(t, before, "leased.command", command)
			if n, took := is.Count-was.Count, is.Sum-was.Sum; n != 20 || took < 0.020 || took > 0.080 {
				t.Errorf("%d of %s were measured, %v s", n, command, took)
			}
		}
	})
}

// refusingOnce is a meter that does not register its first callback.
type refusingOnce struct {
	metric.Meter
	refused bool
}

// Registering reports an error by the handler of OpenTelemetry, which may close clients.
func TestTheHandlerOfOTelErrorsMayCloseAClientWhoseGaugesAreRefused(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		provider := oneMeter{m, &refusingOnce{Meter: m.Meter("github.com/leasedmutex/leased", metric.WithInstrumentationVersion("v1"))}}
		first := newClient(t, s, leased.WithMeterProvider(m))
		handled := false
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(error) {
			handled = true
			_ = first.Close()
		}))
		defer otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Print(err) })) // as by default
		newClient(t, s, leased.WithMeterProvider(provider))
		if !handled {
			t.Error("no error was handled")
		}
	})
}

func (m *refusingOnce) RegisterCallback(f metric.Callback, on ...metric.Observable) (metric.Registration, error) {
	if !m.refused {
		m.refused = true
		return nil, errors.New("refused")
	}
	return m.Meter.RegisterCallback(f, on...)
}

// panickingOnce is a meter that panics when its first callback is registered.
type panickingOnce struct {
	metric.Meter
	panicked bool
}

func (m *panickingOnce) RegisterCallback(f metric.Callback, on ...metric.Observable) (metric.Registration, error) {
	if !m.panicked {
		m.panicked = true
		panic("a meter's bug")
	}
	return m.Meter.RegisterCallback(f, on...)
}

func TestAMeterThatPanicsAtOneClientsGaugesHasThoseOfTheNext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		meter := m.Meter("github.com/leasedmutex/leased", metric.WithInstrumentationVersion("v1"))
		provider := leased.WithMeterProvider(oneMeter{m, &panickingOnce{Meter: meter}})
		if panics(func() { _, _ = leased.New(s.rdb, provider) }) == nil {
			t.Fatal("New did not panic")
		}
		newClient(t, s, provider)
		if _, ok := m.collect(t)["leased.held"]; !ok {
			t.Error("the second client has no gauges")
		}
	})
}

// busyMeter is a meter that does something else while its first callback is registered, and may refuse it then.
type busyMeter struct {
	metric.Meter
	first   func()
	refuses bool
}

func (m *busyMeter) RegisterCallback(f metric.Callback, on ...metric.Observable) (metric.Registration, error) {
	if first := m.first; first != nil {
		m.first = nil
		first()
		if m.refuses {
			return nil, errors.New("refused")
		}
	}
	return m.Meter.RegisterCallback(f, on...)
}

func TestAClientMadeWhileAnothersGaugesAreRegisteredHasGauges(t *testing.T) {
	for _, refuses := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			m := newMeter(t)
			meter := &busyMeter{Meter: m.Meter("github.com/leasedmutex/leased", metric.WithInstrumentationVersion("v1")), refuses: refuses}
			provider := leased.WithMeterProvider(oneMeter{m, meter})
			var l *leased.Lease
			held := func(when string, want int64) {
				if got, ok := m.collect(t)["leased.held"]; !ok || sum(t, got) != want {
					t.Errorf("%s, refused %v: leased.held: %v", when, refuses, got.Data)
				}
			}
			meter.first = func() {
				l = lock(t, newClient(t, s, provider).Mutex("x"))
				held("meanwhile", 1)
			}
			own := lock(t, newClient(t, s, provider).Mutex("y"))
			held("afterward", 2)
			unlock(t, own)
			unlock(t, l)
		})
	}
}

func TestClientsOfAMeterThatAreMadeAtOnceLeaveOneCallback(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		count := &callbackMeter{}
		meter := &busyMeter{Meter: count}
		provider := leased.WithMeterProvider(oneMeter{noop.NewMeterProvider(), meter})
		var second *leased.Client
		meter.first = func() { second = newClient(t, s, provider) }
		first := newClient(t, s, provider)
		for _, want := range []struct {
			callbacks int32
			c         *leased.Client
		}{{1, first}, {1, second}} {
			if n := count.registered.Load(); n != want.callbacks {
				t.Errorf("%d callbacks are registered", n)
			}
			must(t, want.c.Close())
		}
		if n := count.registered.Load(); n != 0 {
			t.Errorf("%d callbacks are registered after both are closed", n)
		}
	})
}

// oneMeter is a provider with one meter.
type oneMeter struct {
	metric.MeterProvider
	meter metric.Meter
}

func (p oneMeter) Meter(string, ...metric.MeterOption) metric.Meter { return p.meter }

func TestAMeterThatRefusesOneClientsGaugesHasThoseOfTheNext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		provider := oneMeter{m, &refusingOnce{Meter: m.Meter("github.com/leasedmutex/leased", metric.WithInstrumentationVersion("v1"))}}
		newClient(t, s, leased.WithMeterProvider(provider))
		newClient(t, s, leased.WithMeterProvider(provider))
		if _, ok := m.collect(t)["leased.held"]; !ok {
			t.Error("the second client has no gauges")
		}
	})
}

func TestMetricsOfAClosedClientAreNotCollected(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		if _, ok := m.collect(t)["leased.held"]; !ok {
			t.Error("not collected before")
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if _, ok := m.collect(t)["leased.held"]; ok {
			t.Error("collected after Close")
		}
	})
}

// A short job is over before anybody collects, and closes its client first, as
// WithTracerProvider says.
func TestWhatWasCountedIsCollectedAfterClose(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, c.Mutex("x")))
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		got := m.collect(t)
		if n := sum(t, got["leased.leases"], "leased.via", "free"); n != 1 {
			t.Errorf("%d leases", n)
		}
		if n := sum(t, got["leased.commands"]); n != c.Stats().Commands {
			t.Errorf("%d commands of %d", n, c.Stats().Commands)
		}
	})
}

// A counter that falls looks like a restart of the process, and what is left of it
// like so many new leases.
func TestCountersOfSeveralClientsAddUpAndNeverFall(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		leases := func() int64 { return sum(t, m.collect(t)["leased.leases"], "leased.via", "free") }
		held := func() int64 { return sum(t, m.collect(t)["leased.held"]) }
		a, b := newClient(t, s, leased.WithMeterProvider(m)), newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, a.Mutex("x")))
		x, y := lock(t, a.Mutex("x")), lock(t, b.Mutex("y"))
		if n := leases(); n != 3 {
			t.Errorf("%d leases", n)
		}
		if n := held(); n != 2 {
			t.Errorf("%d held", n)
		}
		unlock(t, x)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if n := leases(); n != 3 {
			t.Errorf("%d leases after one client was closed", n)
		}
		if n := held(); n != 1 {
			t.Errorf("%d held after one client was closed", n)
		}
		unlock(t, y)
	})
}

func TestEveryReaderCountsTheSame(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		readers := []*sdkmetric.ManualReader{sdkmetric.NewManualReader(), sdkmetric.NewManualReader(
			sdkmetric.WithTemporalitySelector(func(sdkmetric.InstrumentKind) metricdata.Temporality { return metricdata.DeltaTemporality }))}
		mp := sdkmetric.NewMeterProvider(sdkmetric.WithReader(readers[0]), sdkmetric.WithReader(readers[1]))
		c := newClient(t, s, leased.WithMeterProvider(mp))
		total := make([]int64, len(readers))
		for range 3 {
			unlock(t, lock(t, c.Mutex("x")))
			for i, r := range readers {
				n := sum(t, meter{mp, r}.collect(t)["leased.leases"], "leased.via", "free")
				if i == 0 {
					total[i] = n
				} else {
					total[i] += max(n, 0)
				}
			}
		}
		if total[0] != 3 || total[1] != 3 {
			t.Errorf("%d leases in all", total)
		}
	})
}

// Somebody else's callback blocks the collecting, and with it the end of ours. In
// real time: the SDK waits for a sync.Mutex, during which virtual time stands.
func TestACollectionThatHangsHoldsUpShutdownNoLongerThanItsContext(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		m := newMeter(t)
		entered, freed := make(chan struct{}), make(chan struct{})
		_, err := m.Meter("other").Int64ObservableGauge("slow", metric.WithInt64Callback(func(context.Context, metric.Int64Observer) error {
			close(entered)
			<-freed
			return nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		c := newClient(t, s, leased.WithMeterProvider(m))
		unlock(t, lock(t, c.Mutex("x")))
		collected, shut := make(chan error, 1), make(chan error, 1)
		go func() { collected <- m.reader.Collect(context.Background(), &metricdata.ResourceMetrics{}) }()
		closesSoon(t, "the collecting begins", entered)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		go func() { shut <- c.Shutdown(ctx) }()
		select {
		case err := <-shut:
			if !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "metrics") {
				t.Errorf("Shutdown does not say what it did not wait for: %v", err)
			}
		case <-time.After(patience):
			t.Error("Shutdown waits for a callback that is not ours")
		}
		close(freed)
		if err := closesSoon(t, "the collecting ends", collected); err != nil {
			t.Error(err)
		}
	})
}

// What a context was canceled for can be anything, also an error of another lock.
func TestAWaitThatIsCanceledCountsAsCanceledWhateverTheCause(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		l := lock(t, newClient(t, s).Mutex("x"))
		causes := []error{context.DeadlineExceeded, leased.ErrLocked, leased.ErrClosed, errors.New("other")}
		for _, cause := range causes {
			ctx, cancel := context.WithCancelCause(context.Background())
			time.AfterFunc(time.Second, func() { cancel(fmt.Errorf("a request failed: %w", cause)) })
			_, err := c.Mutex("x").LockContext(ctx)
			isAll(t, err, leased.ErrNotAcquired, context.Canceled)
			if !errors.Is(err, leased.ErrLocked) || errors.Is(err, cause) == errors.Is(cause, leased.ErrClosed) {
				t.Errorf("canceled for %v while the lock is taken: %v", cause, err)
			}
		}
		waits := m.collect(t)["leased.wait.duration"]
		if n := times(t, waits, "leased.mode", "exclusive", "leased.wait.outcome", "canceled").Count; n != uint64(len(causes)) {
			t.Errorf("%d of %d waits were canceled", n, len(causes))
		}
		unlock(t, l)
	})
}

func TestRenewalsWithoutAConfirmationAreCountedAsFailed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		warm(t, s, c)
		l := lock(t, c.Mutex("x"))
		before := c.Stats().Renewals
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		time.Sleep(15 * time.Second)
		if n := c.Stats().Renewals; n != before {
			t.Errorf("%d renewals were confirmed by a server that answers none", n-before)
		}
		if n := sum(t, m.collect(t)["leased.renewals"], "leased.renewal.outcome", "failed"); n == 0 {
			t.Error("no renewal is counted as failed")
		}
		s.Mini.SetError("")
		unlock(t, l)
	})
}

// What the series of a client are told apart by: commands and their failures, the inbox, and
// what a user chooses.

// commands returns how often a command was measured, by what failed; "" for nothing.
func (m meter) commands(t *testing.T, command string) map[string]uint64 {
	t.Helper()
	found := map[string]uint64{}
	data, ok := m.collect(t)["leased.command.duration"].Data.(metricdata.Histogram[float64])
	if !ok {
		t.Fatal("commands are not measured")
	}
	for _, p := range data.DataPoints {
		if v, _ := p.Attributes.Value("leased.command"); v.AsString() == command {
			failed, _ := p.Attributes.Value("error.type")
			found[failed.AsString()] += p.Count
		}
	}
	return found
}

func TestMetricsOfCommandsByWhatFailed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithMeterProvider(m), leased.WithLossHandler(func(leased.LossEvent) {}))
		warm(t, s, c)
		synctest.Wait()
		before := m.commands(t, "acquire")
		s.hook(rdb, distant(20*time.Millisecond))
		l := lock(t, c.Mutex("x"))
		time.Sleep(11 * time.Second)
		unlock(t, l)
		synctest.Wait()
		if n := m.commands(t, "acquire")[""] - before[""]; n != 1 {
			t.Errorf("%d acquires", n)
		}
		release := times(t, m.collect(t)["leased.command.duration"], "leased.command", "release")
		if longest, _ := release.Max.Value(); !near(longest, 0.02) {
			t.Errorf("the longest release took %v s", longest)
		}
		if n := m.commands(t, "renew")[""]; n == 0 {
			t.Error("no renewals")
		}
		for text, kind := range map[string]string{
			"LOADING Redis is loading the dataset in memory": "refused",
			"NOAUTH Authentication required.":                "needs_operator",
		} {
			s.Mini.SetError(text)
			_, _ = c.Mutex("x").TryLockContext(context.Background())
			if _, err := c.Inspect(context.Background(), "x"); err == nil {
				t.Error("no error")
			}
			s.Mini.SetError("")
			synctest.Wait()
			for _, command := range []string{"acquire", "inspect"} {
				if n := m.commands(t, command)[kind]; n == 0 {
					t.Errorf("%s of %s was not measured", kind, command)
				}
			}
			time.Sleep(time.Minute)
		}
		s.rdb.LPush(context.Background(), "list", "x")
		_, _ = c.Mutex("list").TryLockContext(context.Background())
		synctest.Wait()
		if n := m.commands(t, "acquire")["wrong_type"]; n == 0 {
			t.Error("no acquire of another type")
		}
		s.rdb.Del(context.Background(), "list")
	})
}

// commandMeters measures commands by the user's code, and nothing else.
type commandMeters struct {
	noop.MeterProvider
	code *usersCode
}

func (m commandMeters) Meter(string, ...metric.MeterOption) metric.Meter {
	return commandMeter{code: m.code}
}

type commandMeter struct {
	noop.Meter
	code *usersCode
}

func (m commandMeter) Float64Histogram(name string, opts ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	if name == "leased.command.duration" {
		return usersHistogram{code: m.code}, nil
	}
	return m.Meter.Float64Histogram(name, opts...)
}

// An instrument that blocks is the collector's trouble, and none of the locks'.
func TestMetricsOfCommandsHoldUpNoLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		freed := make(chan struct{})
		u := &usersCode{do: func() { <-freed }}
		c := newClient(t, s, leased.WithMeterProvider(commandMeters{code: u}), leased.WithTTL(3*time.Second))
		mu := c.Mutex("x")
		l := lock(t, mu)
		synctest.Wait()
		u.armed.Store(true)
		time.Sleep(time.Minute)
		if err := context.Cause(l.Context()); err != nil {
			t.Errorf("the lease was not renewed: %v", err)
		}
		began := time.Now()
		unlock(t, l)
		if took := time.Since(began); took != 0 {
			t.Errorf("Unlock took %v", took)
		}
		if u.calls.Load() == 0 {
			t.Error("no command was measured")
		}
		close(freed)
	})
}

func TestMetricsSayHowMessagesReachTheClient(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c, wire := onLine(t, s, leased.WithMeterProvider(m))
		reach := func(want string) {
			t.Helper()
			got := m.collect(t)["leased.clients"]
			for _, way := range []string{"unused", "connecting", "subscribed", "polling"} {
				n := sum(t, got, "leased.inbox", way)
				if want == way && n != 1 || want != way && n != 0 {
					t.Errorf("%d %s, want it %s", n, way, want)
				}
			}
		}
		reach("unused")
		wire.cut()
		_, _ = c.Mutex("x").TryLockContext(context.Background())
		synctest.Wait()
		reach("connecting")
		wire.mend()
		warm(t, s, c)
		reach("subscribed")
	})
}

func TestMetricsSayThatAClientPolls(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithMeterProvider(m))
		s.Mini.SetError("NOPERM no permissions to access the channel")
		_, _ = c.Mutex("x").TryLockContext(context.Background())
		synctest.Wait()
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "polling"); n != 1 {
			t.Errorf("%d clients poll", n)
		}
		s.Mini.SetError("")
		time.Sleep(time.Hour)
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "subscribed"); n != 1 {
			t.Errorf("%d clients are subscribed when Redis allows it", n)
		}
	})
}

func TestMetricsSayThatAClientWhoseScriptsMayNotPublishPolls(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		theirs := lock(t, newClient(t, s).Mutex("x"))
		s.mute(t)
		mine := locking(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "polling"); n != 1 {
			t.Errorf("%d clients poll", n)
		}
		s.Mini.SetPreHook(nil)
		time.Sleep(time.Minute)
		if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "subscribed"); n < 1 {
			t.Errorf("%d clients are subscribed when Redis allows it to publish", n)
		}
		unlock(t, theirs)
		unlock(t, <-mine)
	})
}

// So they do if nobody waits for its locks anymore, and none is held for long: commands that take a free lock, or
// release one, do not tell.
func TestMetricsSayThatAClientMayPublishAgainThoughNobodyWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum's servers are asked by waiters and renewals only")
		}
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		theirs := lock(t, newClient(t, s).Mutex("x"))
		s.mute(t)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		polling := func(want int64) {
			t.Helper()
			if n := sum(t, m.collect(t)["leased.clients"], "leased.inbox", "polling"); n != want {
				t.Errorf("%d clients poll", n)
			}
		}
		busy := func() {
			for range 250 {
				time.Sleep(100 * time.Millisecond)
				unlock(t, lock(t, c.Mutex("y")))
			}
		}
		busy()
		polling(1)
		s.Mini.SetPreHook(nil)
		busy()
		synctest.Wait()
		polling(0)
		unlock(t, theirs)
	})
}

func TestMetricsOfLocksWithOneLabelAreOne(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		kind := func(name string) string { label, _, _ := strings.Cut(name, ":"); return label }
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLockLabelInMetrics(kind), leased.WithKeyPrefix("app:"))
		var held []*leased.Lease
		for i := range 100 {
			held = append(held, lock(t, c.Mutex(fmt.Sprint("order:", i))))
		}
		held = append(held, lock(t, c.Mutex("stock:1")))
		var waiting []<-chan *leased.Lease
		for i := range 3 {
			waiting = append(waiting, locking(t, c.Mutex(fmt.Sprint("order:", i))))
		}
		time.Sleep(time.Second)
		got := m.collect(t)
		if n := sum(t, got["leased.waiting"], "leased.lock", "order", "leased.prefix", "app:"); n != 3 {
			t.Errorf("%d wait", n)
		}
		for label, want := range map[string]int64{"order": 100, "stock": 1} {
			if n := sum(t, got["leased.held"], "leased.lock", label, "leased.prefix", "app:"); n != want {
				t.Errorf("%d of %s held", n, label)
			}
		}
		if n := len(got["leased.held"].Data.(metricdata.Sum[int64]).DataPoints); n != 2 {
			t.Errorf("%d series", n)
		}
		for _, l := range held {
			unlock(t, l)
		}
		for _, l := range waiting {
			unlock(t, <-l)
		}
		holds := m.collect(t)["leased.hold.duration"]
		if n := times(t, holds, "leased.lock", "order", "leased.prefix", "app:", "leased.mode", "exclusive", "leased.hold.outcome", "released").Count; n != 103 {
			t.Errorf("%d holds", n)
		}
	})
}

// The function is the user's: it may be slow, which costs whoever makes a handle, or panic.
func TestALabelFunctionIsCalledOnceForAHandleAndMayPanic(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		var log bytes.Buffer
		var calls []string
		var c *leased.Client
		c = newClient(t, s, leased.WithMeterProvider(m), leased.WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
			leased.WithLockLabelInMetrics(func(name string) string {
				calls = append(calls, name)
				switch name {
				case "bad":
					panic("no label")
				case "plain":
					return ""
				}
				if c != nil && name == "x" {
					lock(t, c.Mutex("inner")).Unlock() // nothing is locked meanwhile
				}
				return "kind"
			}))
		mu := c.Mutex("x")
		for range 10 {
			unlock(t, lock(t, mu))
			mu.Lock()
			_ = c.Stats()
			m.collect(t)
			mu.Unlock()
		}
		if want := []string{"x", "inner"}; !slices.Equal(calls, want) {
			t.Errorf("called for %v", calls)
		}
		unlock(t, lock(t, c.Mutex("bad")))
		unlock(t, lock(t, c.Mutex("plain")))
		synctest.Wait()
		if n := times(t, m.collect(t)["leased.hold.duration"], "leased.mode", "exclusive", "leased.hold.outcome", "released").Count; n != 2 {
			t.Errorf("%d holds without label", n)
		}
		if !strings.Contains(log.String(), "WithLockLabelInMetrics panicked") {
			t.Errorf("the panic is not logged: %s", log.String())
		}
	})
}

func TestAttributesOfTheUserAreOnEverySpanAndEverySeries(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m, r := newMeter(t), newRecorder(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithTracerProvider(r),
			leased.WithAttributes(attribute.String("tenant", "a")), leased.WithAttributes(attribute.Int("shard", 7)))
		unlock(t, lock(t, c.Mutex("x")))
		synctest.Wait()
		for _, span := range r.kept.GetSpans() {
			has(t, span, "tenant", "a", "shard", int64(7))
		}
		if n := len(r.kept.GetSpans()); n != 3 {
			t.Errorf("%d spans", n)
		}
		for name, one := range m.collect(t) {
			for _, set := range attributeSets(t, one) {
				tenant, _ := set.Value("tenant")
				shard, _ := set.Value("shard")
				if tenant.AsString() != "a" || shard.AsInt64() != 7 {
					t.Errorf("%s has %v", name, set.ToSlice())
				}
			}
		}
	})
}

// attributeSets returns those of the series of a metric.
func attributeSets(t *testing.T, m metricdata.Metrics) (sets []attribute.Set) {
	t.Helper()
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range data.DataPoints {
			sets = append(sets, p.Attributes)
		}
	case metricdata.Gauge[float64]:
		for _, p := range data.DataPoints {
			sets = append(sets, p.Attributes)
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			sets = append(sets, p.Attributes)
		}
	case metricdata.Histogram[int64]:
		for _, p := range data.DataPoints {
			sets = append(sets, p.Attributes)
		}
	default:
		t.Fatalf("%s is a %T", m.Name, m.Data)
	}
	return sets
}

func TestSpansHaveTheKeyPrefix(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t)
		c := newClient(t, s, leased.WithTracerProvider(r), leased.WithKeyPrefix("app:"), leased.WithOwner("me"))
		unlock(t, lock(t, c.Mutex("x")))
		synctest.Wait()
		for _, name := range []string{"leased.wait", "leased.hold", "leased.release"} {
			has(t, r.last(t, name), "leased.lock", "x", "leased.prefix", "app:", "leased.owner", "me")
		}
	})
}

func TestOfLabelsAndOfAttributesWithOneKeyTheLastCounts(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m, r := newMeter(t), newRecorder(t)
		kind := leased.WithLockLabelInMetrics(func(string) string { return "kind" })
		for want, opts := range map[string][]leased.Option{
			"x": {kind, leased.WithLockNameInMetrics()}, "kind": {leased.WithLockNameInMetrics(), kind},
		} {
			c := newClient(t, s, append(opts, leased.WithMeterProvider(m), leased.WithTracerProvider(r),
				leased.WithAttributes(attribute.String("tenant", "a")), leased.WithAttributes(attribute.String("tenant", "b")))...)
			l := lock(t, c.Mutex("x"))
			if n := sum(t, m.collect(t)["leased.held"], "leased.lock", want, "tenant", "b"); n != 1 {
				t.Errorf("%d held with the label %s", n, want)
			}
			unlock(t, l)
			synctest.Wait()
			has(t, r.last(t, "leased.hold"), "tenant", "b")
		}
	})
}

// An SDK keeps a limited number of series, 2,000 by default, and puts the others into one.
func TestTheOldestLocksHaveSeriesWhereAnSDKHasNoRoomForAll(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const room = 10
		m := newMeter(t, sdkmetric.WithCardinalityLimit(room))
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLockNameInMetrics())
		stuck := lock(t, c.Mutex("stuck"))
		time.Sleep(time.Minute)
		var others []*leased.Lease
		for i := range 3 * room {
			others = append(others, lock(t, c.Mutex(fmt.Sprint("lock", i))))
			time.Sleep(time.Second)
		}
		for range 10 { // the series of a map come in any order
			all := m.collect(t)
			points := all["leased.hold.oldest"].Data.(metricdata.Gauge[float64]).DataPoints
			var rest float64
			for _, p := range points {
				if over, _ := p.Attributes.Value("otel.metric.overflow"); over.AsBool() {
					rest = p.Value
				}
			}
			// The other places belong to the oldest of the others. Of what has none, the oldest is seen.
			if n := sum(t, all["leased.held"], "leased.lock", "stuck"); n != 1 || len(points) != room || rest != 3*room-(room-2) {
				t.Fatalf("%d times held, %d series; the oldest of the others: %v s", n, len(points), rest)
			}
		}
		unlock(t, stuck)
		for _, l := range others {
			unlock(t, l)
		}
	})
}

// A view can drop the label. Then one series is about all locks.
func TestTheOldestLockIsSeenWhereAViewDropsTheLabel(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t, sdkmetric.WithView(sdkmetric.NewView(sdkmetric.Instrument{Name: "leased.*"},
			sdkmetric.Stream{AttributeFilter: attribute.NewDenyKeysFilter("leased.lock")})))
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLockNameInMetrics())
		oldest := lock(t, c.Mutex("oldest"))
		waiting := locking(t, c.Mutex("oldest"))
		time.Sleep(time.Minute)
		for i := range 10 {
			l := lock(t, c.Mutex(fmt.Sprint("lock", i)))
			defer unlock(t, l)
		}
		for range 10 {
			all := m.collect(t)
			if hold, wait := seconds(t, all["leased.hold.oldest"]), seconds(t, all["leased.wait.oldest"]); !near(hold, 60) || !near(wait, 60) {
				t.Fatalf("the oldest hold: %v s; the oldest wait: %v s", hold, wait)
			}
		}
		unlock(t, oldest)
		unlock(t, <-waiting)
	})
}

// Where metrics are pushed, the last value that was sent stands for minutes.
func TestALabelThatIsNoLongerInUseHasTheValueZeroForAWhile(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLockNameInMetrics())
		l := lock(t, c.Mutex("x"))
		held := func() int64 {
			all := m.collect(t)["leased.held"]
			if all.Data == nil {
				return -1
			}
			return sum(t, all, "leased.lock", "x")
		}
		if n := held(); n != 1 {
			t.Errorf("held %d times", n)
		}
		unlock(t, l)
		for range 7 {
			if n := held(); n != 0 {
				t.Errorf("after the unlock, held %d times", n)
			}
			time.Sleep(16 * time.Second)
		}
		time.Sleep(10 * time.Second)
		if n := held(); n != -1 {
			t.Errorf("after two minutes, held %d times", n)
		}
		again := lock(t, c.Mutex("x"))
		if n := held(); n != 1 {
			t.Errorf("held %d times", n)
		}
		unlock(t, again)
	})
}
