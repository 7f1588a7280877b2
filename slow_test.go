package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased"
)

// seconds returns the value of a gauge under these labels, -1 if it has none.
func seconds(t *testing.T, m metricdata.Metrics, labels ...string) float64 {
	t.Helper()
	data, ok := m.Data.(metricdata.Gauge[float64])
	if !ok || m.Unit != "s" {
		t.Fatalf("%s is a %T in %q", m.Name, m.Data, m.Unit)
	}
	for _, p := range data.DataPoints {
		if matches(p.Attributes, labels) {
			return p.Value
		}
	}
	return -1
}

// The measurements of a wait and of a hold come when they end. One that does not end shows in
// the gauges.
func TestMetricsShowALockThatIsStuck(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m, named := newMeter(t), newMeter(t)
		c := newClient(t, s, leased.WithMeterProvider(m))
		byName := newClient(t, s, leased.WithMeterProvider(named), leased.WithLockNameInMetrics())
		if got := m.collect(t); seconds(t, got["leased.wait.oldest"]) != 0 || seconds(t, got["leased.hold.oldest"]) != 0 {
			t.Error("something is old though no lock is in use")
		}
		held := lock(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		unlock(t, lock(t, c.Mutex("y")))
		inside := locking(t, c.Mutex("x"))
		outside := locking(t, byName.Mutex("x"))
		other := lock(t, byName.Mutex("z"))
		time.Sleep(14 * time.Second)
		later := locking(t, c.Mutex("x"))
		time.Sleep(time.Second)
		got, gotNamed := m.collect(t), named.collect(t)
		if wait, hold := seconds(t, got["leased.wait.oldest"]), seconds(t, got["leased.hold.oldest"]); !near(wait, 15) || !near(hold, 25) {
			t.Errorf("the oldest wait %v s, the oldest hold %v s", wait, hold)
		}
		for name, want := range map[string][2]float64{"x": {15, 0}, "z": {0, 15}} {
			wait := seconds(t, gotNamed["leased.wait.oldest"], "leased.lock", name)
			hold := seconds(t, gotNamed["leased.hold.oldest"], "leased.lock", name)
			if !near(wait, want[0]) || !near(hold, want[1]) {
				t.Errorf("%s: the oldest wait %v s, the oldest hold %v s", name, wait, hold)
			}
		}
		unlock(t, held)
		unlock(t, other)
		var all sync.WaitGroup
		for _, l := range []<-chan *leased.Lease{inside, later, outside} {
			all.Go(func() { unlock(t, <-l) })
		}
		all.Wait()
	})
}

// An SDK keeps the last of several observations with the same attributes.
func TestTheOldestOfSeveralClientsIsTheOldestOfAnyOfThem(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		open := func(opts ...leased.Option) *leased.Client {
			return newClient(t, s, append(opts, leased.WithMeterProvider(m))...)
		}
		before, c, after := open(), open(), open()
		apart := open(leased.WithAttributes(attribute.String("tenant", "a")))
		check := func(what string, wait, hold float64, labels ...string) {
			t.Helper()
			got := m.collect(t)
			if w, h := seconds(t, got["leased.wait.oldest"], labels...), seconds(t, got["leased.hold.oldest"], labels...); !near(w, wait) || !near(h, hold) {
				t.Errorf("%s: the oldest wait %v s, the oldest hold %v s; want %v and %v", what, w, h, wait, hold)
			}
		}
		held := lock(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		inside := locking(t, c.Mutex("x"))
		separate := lock(t, apart.Mutex("y"))
		later := lock(t, after.Mutex("z"))
		time.Sleep(15 * time.Second)
		check("of three clients", 15, 25)
		check("with attributes of its own", 0, 15, "tenant", "a")
		if n := sum(t, m.collect(t)["leased.held"]); n != 2 {
			t.Errorf("%d held", n)
		}
		if err := before.Close(); err != nil {
			t.Error(err)
		}
		check("of two clients", 15, 25)
		unlock(t, held)
		unlock(t, <-inside)
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		check("of the last client", 0, 15)
		unlock(t, later)
		unlock(t, separate)
		for _, last := range []*leased.Client{after, apart} {
			if err := last.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, ok := m.collect(t)["leased.hold.oldest"]; ok {
			t.Error("collected after the last Close")
		}
		again := open()
		held = lock(t, again.Mutex("x"))
		time.Sleep(time.Second)
		check("of one that was opened later", 0, 1)
		unlock(t, held)
	})
}

// An SDK calls no callback whose instruments are all dropped.
func TestCountersGoOnWhereViewsDropAllGauges(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		reader := sdkmetric.NewManualReader()
		var views []sdkmetric.Option
		for _, name := range []string{"leased.waiting", "leased.held", "leased.*.oldest", "leased.clients", "leased.servers"} {
			views = append(views, sdkmetric.WithView(sdkmetric.NewView(sdkmetric.Instrument{Name: name}, sdkmetric.Stream{Aggregation: sdkmetric.AggregationDrop{}})))
		}
		m := meter{sdkmetric.NewMeterProvider(append(views, sdkmetric.WithReader(reader))...), reader}
		c := newClient(t, s, leased.WithMeterProvider(m))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		if n := sum(t, m.collect(t)["leased.renewals"], "leased.renewal.outcome", "renewed"); n < 4 || n > 6 {
			t.Errorf("%d renewals in a minute", n)
		}
		unlock(t, l)
		for range 7 {
			unlock(t, lock(t, c.Mutex("x")))
		}
		time.Sleep(11 * time.Second)
		got := m.collect(t)
		if n := sum(t, got["leased.leases"], "leased.via", "free"); n != 8 {
			t.Errorf("%d leases", n)
		}
		if _, ok := got["leased.waiting"]; ok {
			t.Error("the view drops nothing")
		}
	})
}

// logLines is what a logger wrote.
type logLines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logLines) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

// When the caller that has waited longest gives up, the next one has waited longest, and so on.
func TestCallersThatTimeOutInTurnHaveALineAMinuteForEachLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := newClient(t, s, leased.WithSlowThreshold(time.Second), out.option())
		var all sync.WaitGroup
		for _, name := range []string{"x", "y"} {
			held := lock(t, c.Mutex(name))
			all.Go(func() {
				for range 40 { // two minutes
					ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
					_, err := c.Mutex(name).LockContext(ctx)
					cancel()
					isAll(t, err, context.DeadlineExceeded)
				}
				unlock(t, held)
			})
		}
		all.Wait()
		synctest.Wait()
		waits, holds := out.count(slog.LevelWarn, "a caller has waited a long time for a lock"), out.count(slog.LevelWarn, "a lock has been held for a long time")
		if waits != 4 || holds != 2 {
			t.Errorf("in two minutes, two locks have %d lines of waits and %d of holds: %q", waits, holds, out.messages())
		}
	})
}

func TestASlowHoldNamesTheLineThatCallsPackageSyncOrNone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))), leased.WithSlowThreshold(time.Second))
		logged := func() string {
			time.Sleep(2 * time.Second)
			synctest.Wait()
			defer text.Reset()
			return text.String()
		}
		mu := c.Mutex("x")
		cond := sync.NewCond(mu)
		mu.Lock()
		time.AfterFunc(time.Millisecond, cond.Signal)
		cond.Wait() // locks again
		if text := logged(); !strings.Contains(text, "held for a long time") || !strings.Contains(text, "slow_test.go:") {
			t.Errorf("after sync.Cond locked it, logged: %s", text)
		}
		mu.Unlock()
		mu = c.Mutex("y")
		go mu.Lock()
		if text := logged(); !strings.Contains(text, "held for a long time") || strings.Contains(text, "locked_at") {
			t.Errorf("after a go statement locked it, logged: %s", text)
		}
		mu.Unlock()
	})
}

func TestACallerThatWaitsOrHoldsForLongIsLoggedOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logLines
		logged := func() (lines []string) {
			synctest.Wait()
			for line := range strings.Lines(out.take()) {
				_, line, _ = strings.Cut(line, "level=")
				lines = append(lines, strings.TrimSpace(line))
			}
			return lines
		}
		want := func(what string, lines ...string) {
			t.Helper()
			got := logged()
			if strings.Join(got, "\n") != strings.Join(lines, "\n") {
				t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(lines, "\n"))
			}
		}
		logger := leased.WithLogger(slog.New(slog.NewTextHandler(&out, nil)))
		c := newClient(t, s, logger, leased.WithSlowThreshold(20*time.Second), leased.WithOwner("a"))
		b := newClient(t, s, leased.WithOwner("b"))
		first := lock(t, c.Mutex("x"))
		second := locking(t, c.Mutex("x"))
		elsewhere := lock(t, b.Mutex("y"))
		third := locking(t, c.Mutex("y"))
		time.Sleep(19 * time.Second)
		want("after 19 s")
		time.Sleep(6 * time.Second)
		got := logged()
		if len(got) != 3 {
			t.Errorf("%d lines: %q", len(got), got)
		}
		for _, line := range got {
			if !regexp.MustCompile(`(locked|called)_at=\S+_test\.go:\d+$`).MatchString(line) {
				t.Errorf("it does not say which line of this test has called: %s", line)
			}
		}
		for _, line := range []string{
			fmt.Sprintf(`WARN msg="leased: a lock has been held for a long time" lock=x held=20s token=%d waiting=1`, first.Token()),
			`WARN msg="leased: a caller has waited a long time for a lock" lock=x waited=20s owner="this process" waiting=1`,
			`WARN msg="leased: a caller has waited a long time for a lock" lock=y waited=20s owner=b waiting=1`,
		} {
			if !strings.Contains(strings.Join(got, "\n"), line) {
				t.Errorf("%q is not logged, but %q", line, got)
			}
		}
		time.Sleep(time.Minute)
		want("later")
		unlock(t, first)
		unlock(t, <-second)
		time.Sleep(time.Minute)
		want("with one who waits still")
		unlock(t, elsewhere)
		l := <-third
		time.Sleep(25 * time.Second)
		if got := logged(); len(got) != 1 || !strings.Contains(got[0], "held for a long time") || !strings.Contains(got[0], "lock=y held=20s") {
			t.Errorf("who waited for long and then held for long: %q", got)
		}
		unlock(t, l)
		want("at the end")
	})
}

// A release that did not reach Redis leaves the client's own id in the key of the lock. Its label would read
// like that of another process.
func TestAnOwnerOfThisClientThatRedisStillHasIsNamedAsThisProcess(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logLines
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&out, nil))), leased.WithSlowThreshold(10*time.Second), leased.WithOwner("a"))
		l := lock(t, c.Mutex("x"))
		id := s.rdb.Get(t.Context(), "x").Val()
		unlock(t, l)
		must(t, s.rdb.Set(t.Context(), "x", id, time.Minute).Err())
		s.Mini.SetPreHook(func(p *mini.Peer, cmd string, args ...string) bool {
			if !strings.HasPrefix(cmd, "EVAL") || !slices.Contains(args, id) { // else it is to be given back
				return false
			}
			p.WriteError("LOADING Redis is loading")
			return true
		})
		waiting := locking(t, c.Mutex("x"))
		time.Sleep(15 * time.Second)
		synctest.Wait()
		if text := out.take(); !strings.Contains(text, `has waited a long time for a lock" lock=x waited=10s owner="this process" waiting=1`) {
			t.Errorf("logged: %s", text)
		}
		s.Mini.SetPreHook(nil)
		unlock(t, <-waiting)
	})
}

// A holder that is slow within a minute of another line about its lock is logged when the minute is over:
// it may be the one that never unlocks.
func TestAHolderThatIsStuckIsLoggedEvenIfAnotherOneWasSlowJustBefore(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := newClient(t, s, leased.WithSlowThreshold(10*time.Second), out.option())
		mu := c.Mutex("x")
		l := lock(t, mu)
		time.Sleep(15 * time.Second)
		unlock(t, l)
		l = lock(t, mu)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "a lock has been held for a long time"); n != 2 {
			t.Errorf("%d lines, want one for each hold: %q", n, out.messages())
		}
		unlock(t, l)
	})
}

func TestLocksThatAreSlowTogetherAreTenLinesAndACount(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) { slowTogether(t, s, func(string) {}) })
}

// The state machine of a lock that nobody else wants rests, and is looked at in another way.
func TestLocksThatAreSlowTogetherAndWantedAreTenLinesAndACount(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		others := newClient(t, s)
		var waiting sync.WaitGroup
		slowTogether(t, s, func(name string) {
			waiting.Go(func() {
				if err := others.Mutex(name).Do(context.Background(), func(context.Context) error { return nil }); err != nil {
					t.Error(err)
				}
			})
		})
		waiting.Wait()
	})
}

// slowTogether has 13 locks held for long, and calls use with the name of each.
func slowTogether(t *testing.T, s place, use func(name string)) {
	t.Helper()
	var out logLines
	c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&out, nil))), leased.WithSlowThreshold(20*time.Second))
	var leases []*leased.Lease
	for i := range 13 {
		name := fmt.Sprint("x", i)
		leases = append(leases, lock(t, c.Mutex(name)))
		use(name)
	}
	time.Sleep(22 * time.Second)
	synctest.Wait()
	got := out.take()
	if n := strings.Count(got, "a lock has been held for a long time"); n != 10 {
		t.Errorf("%d locks have a line of their own", n)
	}
	if n := strings.Count(got, "other locks"); n != 1 || !strings.Contains(got, `msg="leased: other locks have also had long holds or waits" locks=3`) {
		t.Errorf("%d lines count the rest, which are 3:\n%s", n, got)
	}
	for _, l := range leases[:2] {
		unlock(t, l)
	}
	time.Sleep(5 * time.Second) // the next look
	synctest.Wait()
	got += out.take()
	for i, l := range leases[2:] {
		if name := fmt.Sprint("lock=x", i+2, " "); strings.Count(got, name) != 1 {
			t.Errorf("%d lines about %s, which is still held", strings.Count(got, name), name)
		}
		unlock(t, l)
	}
}

// However many locks are slow at once, the one that is stuck is named some time.
func TestOfManyLocksThatAreSlowTogetherTheStuckOneIsNamed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const many = 190
		var out logLines
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&out, nil))), leased.WithSlowThreshold(time.Second))
		var leases []*leased.Lease
		for i := range many {
			leases = append(leases, lock(t, c.Mutex(fmt.Sprint("x", i))))
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		got := out.take()
		for i, l := range leases {
			if name := fmt.Sprint("lock=x", i, " "); strings.Count(got, name) != 1 {
				t.Errorf("%d lines about %s", strings.Count(got, name), name)
			}
			unlock(t, l)
		}
	})
}
