package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased"
)

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
		c := newClient(t, s, leased.WithMeterProvider(m))
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

// So they do if nobody waits for its locks any more, and none is held for long: commands that take a free lock, or
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
		time.Sleep(time.Second)
		got := m.collect(t)
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
		holds := m.collect(t)["leased.hold.duration"]
		if n := times(t, holds, "leased.lock", "order", "leased.prefix", "app:", "leased.mode", "exclusive", "leased.hold.outcome", "released").Count; n != 100 {
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
				if name == "bad" {
					panic("no label")
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
		synctest.Wait()
		if n := times(t, m.collect(t)["leased.hold.duration"], "leased.mode", "exclusive", "leased.hold.outcome", "released").Count; n != 1 {
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
