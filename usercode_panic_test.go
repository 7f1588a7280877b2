package leased_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// A lock calls the user's code in the middle of Lock and Unlock: samplers, span
// processors, instruments. A caller that recovers from their panic, as net/http does, has
// no lease to unlock.

// broken is a sampler that panics for spans of that name.
type broken struct{ name string }

func (b broken) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	if p.Name == b.name {
		panic("a sampler's bug")
	}
	return sdk.AlwaysSample().ShouldSample(p)
}

func (b broken) Description() string { return "broken" }

func TestALockWhoseUserPanicsInItIsLeft(t *testing.T) {
	calls := []struct {
		what string
		call func(c *leased.Client)
	}{
		{"LockContext", func(c *leased.Client) { _, _ = c.Mutex("x").LockContext(context.Background()) }},
		{"Lock", func(c *leased.Client) { c.Mutex("x").Lock() }},
		{"RLock", func(c *leased.Client) { c.RWMutex("x").RLock() }},
	}
	for _, to := range calls {
		for _, span := range []string{"leased.wait", "leased.hold"} {
			t.Run(to.what+" at "+span, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					r := newRecorder(t, sdk.WithSampler(broken{span}))
					c := newClient(t, s, leased.WithTracerProvider(r), leased.WithUncontendedSpans())
					if p := panics(func() { to.call(c) }); p != "a sampler's bug" {
						t.Fatalf("panicked with %v", p)
					}
					synctest.Wait()
					if n := s.rdb.Exists(context.Background(), "x").Val(); n != 0 {
						t.Error("the lock is held, and nobody will ever unlock it")
					}
				})
			})
		}
	}
}

// A lease that had no span gets one when a caller waits for it, in a goroutine where no
// user code could recover a panic.
func TestALockWhoseSpanPanicsWhileItIsHeldIsUnlocked(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		r := newRecorder(t, sdk.WithSampler(broken{"leased.hold"}))
		c := newClient(t, s, leased.WithTracerProvider(r))
		mu := c.Mutex("x")
		mu.Lock()
		synctest.Wait() // subscribed: it will be notified that the lock is wanted
		var next *leased.Lease
		var waiting sync.WaitGroup
		waiting.Go(func() { next = lock(t, newClient(t, s).Mutex("x")) })
		synctest.Wait()
		mu.Unlock()
		waiting.Wait()
		if next != nil {
			unlock(t, next)
		}
	})
}

// once panics at its first call.
type once struct{ calls atomic.Int32 }

func (o *once) NextBackOff() time.Duration {
	if o.calls.Add(1) == 1 {
		panic("a policy's bug")
	}
	return time.Millisecond
}

// Lock and Unlock send commands in their caller's goroutine, and so call its
// back-off policy, its logger and the hooks of its Redis client.
func TestACommandWhoseUserPanicsInItHoldsUpNobody(t *testing.T) {
	for name, call := range map[string]func(s place, mu *leased.Mutex){
		"Lock": func(s place, mu *leased.Mutex) {
			s.Mini.SetError("LOADING for a moment")
			mu.Lock()
		},
		"Unlock": func(s place, mu *leased.Mutex) {
			mu.Lock()
			synctest.Wait() // a client that has just begun asks once more
			s.Mini.SetError("LOADING for a moment")
			mu.Unlock()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				policy := &once{}
				c := newClient(t, s, leased.WithBackOff(func() leased.BackOff { return policy }))
				synctest.Wait()
				mu := c.Mutex("x")
				if p := panics(func() { call(s, mu) }); p != "a policy's bug" {
					t.Fatalf("panicked with %v", p)
				}
				s.Mini.SetError("")
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				defer cancel()
				l, err := mu.LockContext(ctx)
				if err != nil {
					t.Fatal(err)
				}
				unlock(t, l)
			})
		})
	}
}

// A release for the next caller finds the loss, and a goroutine that holds up no caller
// reports it.
func TestAPanicWhenALossIsToldHoldsUpNobody(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := &brokenMeter{}
		c := newClient(t, s, leased.WithMeterProvider(m), leased.WithLossHandler(func(leased.LossEvent) {}))
		rw := c.RWMutex("x")
		rw.Lock()
		next := taking(t, rw.RLockContext)
		synctest.Wait()
		s.rdb.Del(context.Background(), "x")
		m.armed.Store(true)
		rw.Unlock()
		l := closesSoon(t, "who waits gets in", next)
		synctest.Wait() // or the lease that has just begun has the panic
		if m.armed.Load() {
			t.Error("the instrument has not panicked")
		}
		unlock(t, l)
	})
}

// callbackMeter is a meter whose counters panic once they are armed. It counts the registered callbacks.
type callbackMeter struct {
	noop.Meter
	armed      atomic.Bool
	registered atomic.Int32
}

func (m *callbackMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return brokenCounter{armed: &m.armed}, nil
}

func (m *callbackMeter) RegisterCallback(metric.Callback, ...metric.Observable) (metric.Registration, error) {
	m.registered.Add(1)
	return callbackRegistration{m: m}, nil
}

type brokenCounter struct {
	noop.Int64Counter
	armed *atomic.Bool
}

func (b brokenCounter) Add(context.Context, int64, ...metric.AddOption) {
	if b.armed.Load() {
		panic("an instrument's bug")
	}
}

type callbackRegistration struct {
	noop.Registration
	m *callbackMeter
}

func (r callbackRegistration) Unregister() error {
	r.m.registered.Add(-1)
	return nil
}

// The callback would keep the closed client forever, and observe it.
func TestACounterThatPanicsInShutdownLeavesNoCallback(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := &callbackMeter{}
		c := newClient(t, s, leased.WithMeterProvider(oneMeter{noop.NewMeterProvider(), m}))
		m.armed.Store(true)
		must(t, c.Close())
		if n := m.registered.Load(); n != 0 {
			t.Errorf("%d callbacks are registered after Close", n)
		}
	})
}

// brokenMeter's instrument for holds panics once it is armed, once.
type brokenMeter struct {
	noop.MeterProvider
	armed atomic.Bool
}

func (m *brokenMeter) Meter(string, ...metric.MeterOption) metric.Meter {
	return meterWith{holds: brokenHistogram{armed: &m.armed}}
}

type meterWith struct {
	noop.Meter
	holds metric.Float64Histogram
}

func (m meterWith) Float64Histogram(name string, opts ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	if name == "leased.hold.duration" {
		return m.holds, nil
	}
	return m.Meter.Float64Histogram(name, opts...)
}

type brokenHistogram struct {
	noop.Float64Histogram
	armed *atomic.Bool
}

func (b brokenHistogram) Enabled(context.Context) bool { return true }

func (b brokenHistogram) Record(context.Context, float64, ...metric.RecordOption) {
	if b.armed.CompareAndSwap(true, false) {
		panic("an instrument's bug")
	}
}

// tardy is a context that ends in the moment in which its caller is admitted.
type tardy struct{ context.Context }

func (c tardy) Done() <-chan struct{} {
	time.Sleep(time.Second) // called once before the caller comes, and once more when it waits
	ended := make(chan struct{})
	close(ended)
	return ended
}

// brokenWaits is a meter whose instruments panic at the waits of tardy callers.
type brokenWaits struct{ noop.MeterProvider }

func (brokenWaits) Meter(string, ...metric.MeterOption) metric.Meter { return brokenWaitsMeter{} }

type brokenWaitsMeter struct{ noop.Meter }

func (brokenWaitsMeter) Float64Histogram(string, ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return tardyHistogram{}, nil
}

type tardyHistogram struct{ noop.Float64Histogram }

func (tardyHistogram) Enabled(context.Context) bool { return true }

func (tardyHistogram) Record(ctx context.Context, _ float64, _ ...metric.RecordOption) {
	if _, is := ctx.(tardy); is {
		panic("an instrument's bug")
	}
}

// Readers without a lease of their own are alike, so a caller that gave up twice would end another one's
// hold.
func TestACallThatGaveUpAndPanicsEndsNoOtherReadersHold(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithMeterProvider(brokenWaits{}), leased.WithProfileLabels())
		other := newClient(t, s)
		for range 20 { // where two things have happened, select chooses one
			writer := lock(t, other.Mutex("x"))
			reader, panicked := make(chan *leased.Lease, 1), make(chan any, 1)
			go func() {
				l, err := c.RWMutex("x").RLockContext(context.Background())
				if err != nil {
					t.Error(err)
				}
				reader <- l
			}()
			synctest.Wait()
			go func() {
				panicked <- panics(func() { _, _ = c.RWMutex("x").RLockContext(tardy{context.Background()}) })
			}()
			time.Sleep(1500 * time.Millisecond)
			unlock(t, writer)
			l := <-reader
			if <-panicked == nil {
				t.Fatal("the instrument has not panicked")
			}
			synctest.Wait()
			if _, err := other.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
				t.Fatalf("a reader is inside, and a writer gets %v", err)
			}
			unlock(t, l)
		}
	})
}

// The caller that gives up is the only one of its process, also if it had been admitted by then.
func TestACallerThatGivesUpIsNotToldOfItself(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithProfileLabels())
		other := newClient(t, s)
		gaveUp := 0
		for range 20 { // where two things have happened, select chooses one
			owner := lock(t, other.Mutex("x"))
			outcome := make(chan error, 1)
			go func() {
				l, err := c.Mutex("x").LockContext(tardy{context.Background()})
				if err == nil {
					unlock(t, l)
				}
				outcome <- err
			}()
			time.Sleep(1500 * time.Millisecond)
			unlock(t, owner)
			if err := <-outcome; err != nil {
				gaveUp++
				if strings.Contains(err.Error(), "of this process") {
					t.Error(err)
				}
			}
			synctest.Wait()
		}
		if gaveUp == 0 {
			t.Error("nobody gave up")
		}
	})
}

// Of two leases, RUnlock ends that of the call that has not returned yet, which then gives up: so it is the
// other lease that has ended.
func TestALeaseWhoseHoldEndsInAnothersPlaceHasEnded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		m := newMeter(t)
		c := newClient(t, s, leased.WithProfileLabels(), leased.WithMeterProvider(m))
		other := newClient(t, s)
		rw := c.RWMutex("x")
		gaveUp := 0
		for range 20 { // where two things have happened, select chooses one
			writer := lock(t, other.Mutex("x"))
			reader, tardily := make(chan *leased.Lease, 1), make(chan *leased.Lease, 1)
			go func() {
				l, _ := rw.RLockContext(tardy{context.Background()})
				tardily <- l
			}()
			time.Sleep(1200 * time.Millisecond)
			go func() {
				l, err := rw.RLockContext(context.Background())
				if err != nil {
					t.Error(err)
				}
				reader <- l
			}()
			time.Sleep(300 * time.Millisecond)
			unlock(t, writer)
			l := <-reader
			work := l.Context()
			rw.RUnlock()
			if late := <-tardily; late != nil {
				_ = late.Unlock()
				unlock(t, l)
				continue
			}
			gaveUp++
			synctest.Wait()
			if work.Err() == nil {
				t.Fatal("the lease's context goes on")
			}
			unlock(t, lock(t, other.Mutex("x")))
			_ = l.Unlock()
		}
		if gaveUp == 0 {
			t.Error("no call gave up after its admission")
		}
		if n := times(t, m.collect(t)["leased.hold.duration"], "leased.mode", "shared", "leased.hold.outcome", "released").Count; n != 40 {
			t.Errorf("%d holds were measured", n)
		}
	})
}

// Whoever asked for the Unlock has left all the same, and its release is sent.
func TestAnUnlockWhoseContextPanicsLeavesTheLockUsable(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for what, unlocks := range map[string]func(mu *leased.Mutex, l *leased.Lease){
			"Mutex.UnlockContext": func(mu *leased.Mutex, _ *leased.Lease) { _ = mu.UnlockContext(struct{ context.Context }{}) },
			"Lease.UnlockContext": func(_ *leased.Mutex, l *leased.Lease) { _ = l.UnlockContext(struct{ context.Context }{}) },
		} {
			mu := c.Mutex("x")
			l := lock(t, mu)
			if panics(func() { unlocks(mu, l) }) == nil {
				t.Errorf("%s: a context without methods is a context", what)
			}
			_ = l.Unlock() // it says what was known when the context panicked
			unlock(t, lock(t, newClient(t, s).Mutex("x")))
			unlock(t, lock(t, mu))
		}
	})
}

// A caller that fails before it waits takes no other caller's place with it.
func TestACallWhoseContextPanicsLeavesOthersWaiting(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		first := lock(t, c.Mutex("x"))
		next := locking(t, c.Mutex("x"))
		synctest.Wait()
		if panics(func() { _, _ = c.Mutex("x").LockContext(struct{ context.Context }{}) }) == nil {
			t.Error("a context without methods is a context")
		}
		unlock(t, first)
		unlock(t, closesSoon(t, "who waits gets in", next))
	})
}

// faulty is a hook of the Redis client that calls breaks at the next commands or pipelines once they
// are counted, and panics if there is no breaks.
type faulty struct {
	faults atomic.Int32
	breaks func()
	only   string // the name of the command in which it breaks; "" for all
}

func (f *faulty) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *faulty) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		f.count(cmd)
		return next(ctx, cmd)
	}
}

func (f *faulty) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		f.count(cmds[0])
		return next(ctx, cmds)
	}
}

func (f *faulty) count(cmd redis.Cmder) {
	if f.only != "" && cmd.Name() != f.only || f.faults.Add(-1) < 0 {
		return
	}
	if f.breaks != nil {
		f.breaks()
	}
	panic("a hook's bug")
}

// Cancels are sent in a goroutine of the client, where no user code could recover.
func TestACancelWhoseHookPanicsIsSentAgain(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hook := &faulty{}
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, hook)
		c := clientOn(t, s, rdb)
		held := lock(t, newClient(t, s).Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		var waiting sync.WaitGroup
		waiting.Go(func() { _, _ = c.Mutex("x").LockContext(ctx) })
		synctest.Wait()
		queued := func() int64 { return s.rdb.ZCard(context.Background(), "x:{x}:queue").Val() }
		if n := queued(); n != 1 {
			t.Fatalf("%d wait in Redis", n)
		}
		hook.faults.Store(1)
		cancel()
		waiting.Wait()
		time.Sleep(3 * time.Second)
		if n := queued(); n != 0 || hook.faults.Load() >= 0 {
			t.Errorf("%d are left waiting in Redis; panics left: %d", n, hook.faults.Load())
		}
		unlock(t, held)
	})
}

// brokenDial calls breaks at the next dials once they are counted.
type brokenDial struct {
	dials  atomic.Int32
	breaks func()
}

func (b *brokenDial) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if b.dials.Add(-1) >= 0 {
			b.breaks()
		}
		return next(ctx, network, addr)
	}
}

func (b *brokenDial) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (b *brokenDial) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// The inbox dials in a goroutine of the client, where no user code could recover.
func TestAnInboxWhoseDialerPanicsIsMadeAnew(t *testing.T) {
	inEachWayToBreak(t, func(t *testing.T, s place, _ string, breaks func()) {
		hook := &brokenDial{breaks: breaks}
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, hook)
		must(t, rdb.Ping(context.Background()).Err()) // a connection for the commands
		c := clientOn(t, s, rdb)
		other := newClient(t, s)
		hook.dials.Store(3)
		unlock(t, lock(t, c.Mutex("x"))) // has the inbox dial
		time.Sleep(time.Millisecond)     // of virtual time: there is a pause before the next one
		if n := hook.dials.Load(); n != 2 && s.members == nil {
			t.Fatalf("%d dials are left to break", n)
		}
		time.Sleep(3 * time.Second)
		if n := hook.dials.Load(); n >= 0 {
			t.Fatalf("%d dials are left to break", n)
		}
		held := lock(t, other.Mutex("x"))
		next := locking(t, c.Mutex("x"))
		synctest.Wait()
		began := time.Now()
		unlock(t, held)
		unlock(t, closesSoon(t, "who waits gets in", next))
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("heard of the hand-off after %v", took)
		}
	})
}

func TestAnInboxWhoseSubscribePanicsIsMadeAnew(t *testing.T) {
	inEachWayToBreak(t, func(t *testing.T, s place, _ string, breaks func()) {
		if s.members != nil {
			t.Skip("about a client of one server")
		}
		var calls atomic.Int32
		calls.Store(3)
		c := clientOn(t, s, around.Node{
			Client: s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true }),
			BeforeSubscribe: func() {
				if calls.Add(-1) >= 0 {
					breaks()
				}
			},
		})
		unlock(t, lock(t, c.Mutex("x"))) // has the inbox subscribe
		time.Sleep(10 * time.Second)
		if n := calls.Load(); n >= 0 || !leased.Subscribed(c) {
			t.Errorf("subscribed: %v, and %d calls are left to break", leased.Subscribed(c), n)
		}
	})
}

// What an operator asks a quorum, and the PINGs to a server that does not answer, are sent in goroutines
// of the client, too.
func TestAHookThatPanicsKeepsNoServerOfAQuorumAway(t *testing.T) {
	operators := func(call func(*leased.Client) error) func(*testing.T, *leased.Client, *faulty, []*mortal) {
		return func(t *testing.T, c *leased.Client, hook *faulty, servers []*mortal) {
			hook.faults.Store(int32(len(servers)))
			began := time.Now()
			if err := call(c); err == nil || time.Since(began) > 0 {
				t.Errorf("without an answer it returned %v after %v", err, time.Since(began))
			}
		}
	}
	for what, fault := range map[string]func(*testing.T, *leased.Client, *faulty, []*mortal){
		"Inspect":     operators(func(c *leased.Client) error { _, err := c.Inspect(context.Background(), "x"); return err }),
		"ForceUnlock": operators(func(c *leased.Client) error { return forceUnlock(context.Background(), c, "x") }),
		"PING": func(t *testing.T, c *leased.Client, hook *faulty, servers []*mortal) {
			servers[0].die()
			for range 2 { // the first may find only that a connection broke
				unlock(t, lock(t, c.Mutex("x")))
				time.Sleep(time.Second) // for the PING that makes sure of it
			}
			hook.faults.Store(1)
			time.Sleep(10 * time.Second) // of virtual time: it is probed
			servers[0].comeBack()
			time.Sleep(10 * time.Second) // the same: and found back
		},
	} {
		t.Run(what, func(t *testing.T) {
			onMortals(t, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
				hook := &faulty{}
				if what == "PING" { // and what is canceled meanwhile goes on
					hook.only = "ping"
				}
				c := openHooked(t, servers, hook)
				unlock(t, lock(t, c.Mutex("x")))
				synctest.Wait()
				fault(t, c, hook, servers)
				if n := hook.faults.Load(); n > 0 {
					t.Fatalf("%d panics are left", n)
				}
				for range 3 {
					time.Sleep(time.Minute) // for so long no server is heard of
					l, err := c.Mutex("x").TryLockContext(context.Background())
					if err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					stands(t, c, len(servers), len(servers))
					unlock(t, l)
				}
			})
		})
	}
}

// ending is a hook of the Redis client that ends the goroutine of the next pipeline, as testing.T.FailNow
// does.
type ending struct{ armed atomic.Bool }

func (r *ending) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (r *ending) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (r *ending) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if r.armed.CompareAndSwap(true, false) {
			runtime.Goexit()
		}
		return next(ctx, cmds)
	}
}

// Cancels are sent by one goroutine, which a hook may end.
func TestACancelWhoseHookEndsItsGoroutineIsSentAgain(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hook := &ending{}
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, hook)
		c := clientOn(t, s, rdb)
		warm(t, s, c)
		held := lock(t, newClient(t, s).Mutex("x"))
		queued := func() int64 { return s.rdb.ZCard(context.Background(), "x:{x}:queue").Val() }
		for _, arm := range []bool{true, false} {
			ctx, cancel := context.WithCancel(context.Background())
			var waiting sync.WaitGroup
			waiting.Go(func() { _, _ = c.Mutex("x").LockContext(ctx) })
			synctest.Wait()
			hook.armed.Store(arm)
			cancel()
			waiting.Wait()
			time.Sleep(5 * time.Second)
			// On a quorum the cancels of a lock are sent one by one, in no pipeline.
			if n, armed := queued(), hook.armed.Load() && s.members == nil; n != 0 || armed {
				t.Errorf("%d are left waiting in Redis; still armed: %v", n, armed)
			}
		}
		unlock(t, held)
	})
}

// waysToBreak are how user code can leave a function without returning from it.
var waysToBreak = map[string]func(){
	"panics":             func() { panic("a hook's bug") },
	"ends its goroutine": runtime.Goexit,
}

// inEachWayToBreak runs f in virtual time with each of waysToBreak.
func inEachWayToBreak(t *testing.T, f func(t *testing.T, s place, how string, breaks func())) {
	for how, breaks := range waysToBreak {
		t.Run(how, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) { f(t, s, how, breaks) })
		})
	}
}

// The deferred Unlock that an earlier one is repeated by must not say that all is well.
func TestAnUnlockAfterOneThatDidNotReturnSaysThatNothingWasConfirmed(t *testing.T) {
	for how, breaks := range waysToBreak {
		for what, test := range map[string]struct {
			held    time.Duration
			outcome string
			matches []error
		}{
			"a lease":      {time.Second, "not_released", []error{leased.ErrNotReleased}},
			"a lost lease": {11 * time.Second, "lost", []error{leased.ErrNotReleased, leased.ErrLeaseLost, leased.ErrMaxHold}},
		} {
			t.Run(what+" whose hook "+how, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					if s.members != nil {
						t.Skip("a quorum sends in goroutines of the client")
					}
					m, r, hook := newMeter(t), newRecorder(t), &faulty{breaks: breaks}
					rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
					s.hook(rdb, hook)
					c := clientOn(t, s, rdb, leased.WithMeterProvider(m), leased.WithTracerProvider(r), leased.WithMaxHold(10*time.Second))
					warm(t, s, c)
					l := lockUnder(t, r.under(t, "holder"), c.Mutex("x"))
					time.Sleep(test.held)
					synctest.Wait()
					hook.faults.Store(1)
					s.Mini.SetError(outOfOrder) // or the cancel that follows could confirm it in time
					var calling sync.WaitGroup
					calling.Go(func() {
						defer func() { _ = recover() }()
						t.Errorf("it returned %v", l.Unlock())
					})
					calling.Wait()
					err := l.Unlock()
					isAll(t, err, test.matches...)
					if lost := test.outcome == "lost"; errors.Is(err, leased.ErrLeaseLost) != lost {
						t.Errorf("Unlock returned %v", err)
					}
					synctest.Wait()
					has(t, r.last(t, "leased.hold"), "leased.hold.outcome", test.outcome)
					if n := times(t, m.collect(t)["leased.hold.duration"], "leased.mode", "exclusive", "leased.hold.outcome", test.outcome).Count; n != 1 {
						t.Errorf("%d holds were measured", n)
					}
					s.Mini.SetError("")
					time.Sleep(5 * time.Second) // of virtual time: the cancel is sent
					if !s.clean(t, "x") {
						t.Error("the lock is held, and nobody will ever unlock it")
					}
					isAll(t, l.Unlock(), test.matches...)
				})
			})
		}
	}
}

// A check waits for the outcome of the renewal that it has caused.
func TestACheckWhoseHookEndsItsGoroutineHasNoAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		hook := &ending{}
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, hook)
		c := clientOn(t, s, rdb)
		l := lock(t, c.Mutex("x"))
		synctest.Wait()
		hook.armed.Store(true)
		began := time.Now()
		err := l.Check(context.Background())
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %v", took)
		}
		if s.members == nil && (err == nil || errors.Is(err, leased.ErrLeaseLost)) { // on a quorum, others answer
			t.Errorf("Check: %v", err)
		}
		if hook.armed.Load() {
			t.Error("the hook saw no pipeline")
		}
		must(t, l.Check(context.Background()))
		unlock(t, l)
	})
}

// brittle is a context whose Value panics, as long as it is told to.
type brittle struct {
	context.Context
	panics *atomic.Bool
}

func (b brittle) Value(key any) any {
	if b.panics.Load() {
		panic("a context's bug")
	}
	return b.Context.Value(key)
}

// busybody is a context that counts how often it is asked, as package context asks the parent of what is
// canceled.
type busybody struct {
	context.Context
	asked *atomic.Int64
}

func (b busybody) Value(key any) any {
	b.asked.Add(1)
	return b.Context.Value(key)
}

func (b busybody) Done() <-chan struct{} {
	b.asked.Add(1)
	return b.Context.Done()
}

// It could block the watchdog, or an Unlock.
func TestTheEndOfALeaseCallsNoMethodOfAContextOfUsers(t *testing.T) {
	for what, end := range map[string]func(s place, c *leased.Client, l *leased.Lease){
		"Unlock":       func(_ place, _ *leased.Client, l *leased.Lease) { _ = l.Unlock() },
		"Mutex.Unlock": func(_ place, c *leased.Client, _ *leased.Lease) { c.Mutex("x").Unlock() },
		"maximum hold": func(place, *leased.Client, *leased.Lease) { time.Sleep(time.Minute) }, // of virtual time
		"loss": func(s place, _ *leased.Client, l *leased.Lease) {
			s.rdb.Del(context.Background(), "x")
			time.Sleep(20 * time.Second) // of virtual time
		},
		"Close": func(_ place, c *leased.Client, _ *leased.Lease) { _ = c.Close() },
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := clientOn(t, s, s.connect(t), leased.WithMaxHold(50*time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))
				l := lock(t, c.Mutex("x"))
				asked := new(atomic.Int64)
				work, stop := l.With(context.WithValue(busybody{t.Context(), asked}, valueKey{}, "v"))
				defer stop()
				other, stopOther := l.With(context.WithValue(busybody{context.Background(), asked}, valueKey{}, "v"))
				defer stopOther()
				asked.Store(0)
				end(s, c, l)
				if n := asked.Load(); n > 0 || work.Err() == nil || other.Err() == nil {
					t.Errorf("asked %d times; the contexts' errors are %v and %v", n, work.Err(), other.Err())
				}
				if work.Value(valueKey{}) != "v" || other.Value(valueKey{}) != "v" {
					t.Error("a context has lost its values")
				}
				_ = l.Unlock()
			})
		})
	}
}

// Once a traced call was admitted, its context is asked once more for the span that it carries.
func TestAContextWhoseValuePanicsAfterATracedWaitLeavesTheLockFree(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		provider := sdk.NewTracerProvider()
		c := newClient(t, s, leased.WithTracerProvider(provider))
		b := brittle{context.Background(), new(atomic.Bool)}
		owner := lock(t, newClient(t, s).Mutex("x"))
		mu := c.Mutex("x")
		var p any
		done := make(chan struct{})
		go func() {
			defer close(done)
			p = panics(func() { _, _ = mu.LockContext(b) })
		}()
		synctest.Wait()
		b.panics.Store(true) // a request's context that is used again, although its goroutine still waits
		unlock(t, owner)
		<-done
		if p != "a context's bug" {
			t.Fatalf("panicked with %v", p)
		}
		synctest.Wait()
		s.settle()
		if !s.clean(t, "x") {
			t.Error("the lock is held, and nobody will ever unlock it")
		}
		unlock(t, lock(t, mu))
	})
}

func TestAContextWhoseValuePanicsLeavesTheLockFree(t *testing.T) {
	for what, opts := range map[string][]leased.Option{"Do": nil, "Do, at its end": nil, "a wait with labels": {leased.WithProfileLabels()}} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s, opts...)
				ctx, stop := context.WithCancel(context.Background())
				defer stop()
				b := brittle{ctx, new(atomic.Bool)}
				mu := c.Mutex("x")
				switch what {
				case "Do, at its end":
					p := panics(func() {
						_ = mu.Do(b, func(context.Context) error { b.panics.Store(true); return nil })
					})
					if p != "a context's bug" {
						t.Fatalf("panicked with %v", p)
					}
				case "Do":
					b.panics.Store(true)
					p := panics(func() {
						_ = mu.Do(b, func(context.Context) error { t.Error("called"); return nil })
					})
					if p != "a context's bug" {
						t.Fatalf("panicked with %v", p)
					}
				default:
					owner := lock(t, newClient(t, s).Mutex("x"))
					b.panics.Store(true)
					if p := panics(func() { _, _ = mu.LockContext(b) }); p != "a context's bug" {
						t.Fatalf("panicked with %v", p)
					}
					unlock(t, owner)
				}
				synctest.Wait()
				s.settle()
				if !s.clean(t, "x") {
					t.Error("the lock is held or waited for, and nobody will ever unlock it")
				}
				unlock(t, lock(t, mu))
			})
		})
	}
}
