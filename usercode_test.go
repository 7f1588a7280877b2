package leased_test

import (
	"context"
	"errors"
	"log/slog"
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
)

// What a client calls that its user wrote, and does not end, or panics, or closes the
// client: nothing of the kind may stop renewals, the end of leases, or a hand-off.

// usersCode is called in the middle of locks. Once armed, it does something unwise.
type usersCode struct {
	armed atomic.Bool
	calls atomic.Int64
	do    func()
}

func (u *usersCode) call() {
	if u.armed.Load() {
		u.calls.Add(1)
		u.do()
	}
}

// As a sampler and a span processor.
type (
	usersSampler   struct{ *usersCode }
	usersProcessor struct{ *usersCode }
)

func (u usersSampler) ShouldSample(p sdk.SamplingParameters) sdk.SamplingResult {
	u.call()
	return sdk.AlwaysSample().ShouldSample(p)
}

func (usersSampler) Description() string { return "the user's" }

func (u usersProcessor) OnStart(context.Context, sdk.ReadWriteSpan) { u.call() }
func (u usersProcessor) OnEnd(sdk.ReadOnlySpan)                     {}
func (u usersProcessor) Shutdown(context.Context) error             { return nil }
func (u usersProcessor) ForceFlush(context.Context) error           { return nil }

// As an instrument of holds.
type usersMeters struct {
	noop.MeterProvider
	code *usersCode
}

func (m usersMeters) Meter(string, ...metric.MeterOption) metric.Meter {
	return meterWith{holds: usersHistogram{code: m.code}}
}

type usersHistogram struct {
	noop.Float64Histogram
	code *usersCode
}

func (usersHistogram) Enabled(context.Context) bool                              { return true }
func (h usersHistogram) Record(context.Context, float64, ...metric.RecordOption) { h.code.call() }

// As a log handler.
type usersLog struct {
	slog.Handler
	code *usersCode
}

func (usersLog) Enabled(context.Context, slog.Level) bool { return true }

func (l usersLog) Handle(context.Context, slog.Record) error {
	l.code.call()
	return nil
}

// usersCodes are the places, and what Shutdown calls them.
var usersCodes = map[string]struct {
	options func(*usersCode) []leased.Option
	name    string
}{
	"a sampler": {func(u *usersCode) []leased.Option {
		return []leased.Option{leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSampler(usersSampler{u})))}
	}, "spans"},
	"a span processor": {func(u *usersCode) []leased.Option {
		return []leased.Option{leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(usersProcessor{u})))}
	}, "spans"},
	"an instrument": {func(u *usersCode) []leased.Option {
		return []leased.Option{leased.WithMeterProvider(usersMeters{code: u})}
	}, "measurements"},
	"the logger": {func(u *usersCode) []leased.Option {
		return []leased.Option{leased.WithLogger(slog.New(usersLog{slog.DiscardHandler, u}))}
	}, "loss handler"}, // the default one logs
	"the loss handler": {func(u *usersCode) []leased.Option {
		return []leased.Option{leased.WithLossHandler(func(leased.LossEvent) { u.call() })}
	}, "loss handler"},
}

// losing has c hold four locks, and lose the second. It returns the contexts of the
// others.
func losing(t *testing.T, s place, c *leased.Client, u *usersCode) (kept []*leased.Lease) {
	t.Helper()
	for _, name := range []string{"a", "b", "c", "d"} {
		if name == "b" {
			c.Mutex(name).Lock() // has no span until there is something to record
		} else {
			kept = append(kept, lock(t, c.Mutex(name)))
		}
	}
	synctest.Wait()
	u.armed.Store(true)
	s.rdb.Del(context.Background(), "b")
	time.Sleep(5 * time.Second)
	if u.calls.Load() == 0 {
		t.Fatal("the user's code was not called")
	}
	return kept
}

// goesOn fails t unless leases are renewed for a minute, and end when Redis has been
// out of reach for the rest of their trust windows, to the nanosecond.
func goesOn(t *testing.T, s place, kept []*leased.Lease) {
	t.Helper()
	time.Sleep(time.Minute)
	s.Mini.SetError("LOADING Redis is loading the dataset in memory")
	var all sync.WaitGroup
	for _, l := range kept {
		if err := context.Cause(l.Context()); err != nil {
			t.Errorf("a lease was not renewed: %v", err)
			continue
		}
		all.Go(func() {
			select {
			case <-l.Context().Done():
			case <-time.After(time.Minute):
			}
			if late := time.Since(l.TrustedUntil()); late != 0 || l.Context().Err() == nil {
				t.Errorf("%v after the end of its trust window: %v", late, l.Context().Err())
			}
		})
	}
	all.Wait()
	s.Mini.SetError("")
}

func TestCodeOfTheUsersThatBlocksWhenALossIsToldStopsNoRenewalAndNoDeadline(t *testing.T) {
	for what, code := range usersCodes {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				freed := make(chan struct{})
				u := &usersCode{do: func() { <-freed }}
				c := newClient(t, s, append(code.options(u), leased.WithTTL(3*time.Second))...)
				kept := losing(t, s, c, u)
				goesOn(t, s, kept)
				close(freed)
				for _, l := range kept {
					isAll(t, l.Unlock(), leased.ErrLeaseLost)
				}
				c.Mutex("b").Unlock()
			})
		})
	}
}

func TestCodeOfTheUsersThatPanicsWhenALossIsToldEndsNothing(t *testing.T) {
	for what, code := range usersCodes {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				u := &usersCode{do: func() { panic("the user's") }}
				c := newClient(t, s, append(code.options(u), leased.WithTTL(3*time.Second))...)
				kept := losing(t, s, c, u)
				goesOn(t, s, kept)
				u.armed.Store(false)
				for _, l := range kept {
					isAll(t, l.Unlock(), leased.ErrLeaseLost)
				}
				c.Mutex("b").Unlock()
			})
		})
	}
}

// A lease without waiters has no span; the first waiter begins one, and the next owner
// does not wait for that.
func TestASpanProcessorThatIsSlowAtTheStartOfAHoldDelaysNoHandOver(t *testing.T) {
	for what, code := range usersCodes {
		if code.name != "spans" {
			continue
		}
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				u := &usersCode{do: func() { time.Sleep(500 * time.Millisecond) }}
				c := newClient(t, s, code.options(u)...)
				mu := c.Mutex("x")
				mu.Lock()
				synctest.Wait()
				u.armed.Store(true)
				next := locking(t, newClient(t, s).Mutex("x"))
				synctest.Wait()
				began := time.Now()
				unlocked := make(chan time.Duration)
				go func() {
					mu.Unlock()
					unlocked <- time.Since(began)
				}()
				unlock(t, <-next)
				if took := time.Since(began); took > time.Millisecond { // tokens do not run ahead of the clock
					t.Errorf("handed over after %v", took)
				}
				if took := <-unlocked; took > 5*time.Millisecond {
					t.Errorf("Unlock took %v", took)
				}
				time.Sleep(time.Second)
				if u.calls.Load() == 0 {
					t.Error("no span was begun")
				}
			})
		})
	}
}

func TestShutdownEndsWithItsContextWhateverBlocksAndSaysWhat(t *testing.T) {
	for what, code := range usersCodes {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				freed := make(chan struct{})
				u := &usersCode{do: func() { <-freed }}
				c := newClient(t, s, append(code.options(u), leased.WithTTL(3*time.Second))...)
				for _, l := range losing(t, s, c, u) {
					go func() { _ = l.Unlock() }() // measures, in its own time
				}
				go c.Mutex("b").Unlock()
				ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
				defer cancel()
				began := time.Now()
				var errs [2]error
				var all sync.WaitGroup
				for i := range errs {
					all.Go(func() { errs[i] = c.Shutdown(ctx) })
				}
				all.Wait()
				if took := time.Since(began); took > 300*time.Millisecond {
					t.Errorf("it took %v", took)
				}
				err := c.Close()
				if !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), code.name) {
					t.Errorf("it does not say that it did not wait for %s: %v", code.name, err)
				}
				if errs[0] != err && errs[1] != err { // the very same
					t.Errorf("%v and %v; a later Close: %v", errs[0], errs[1], err)
				}
				close(freed)
			})
		})
	}
}

// losesOne has a lease of c evicted, and unlocks it.
func losesOne(t *testing.T, c *leased.Client) {
	t.Helper()
	l := lock(t, c.Mutex("x"))
	time.Sleep(time.Second) // until the client hears messages
	must(t, forceUnlock(context.Background(), c, "x"))
	<-l.Context().Done()
	isAll(t, l.Unlock(), leased.ErrLeaseLost)
}

// However little time there is, a handler has 100 ms.
func TestShutdownWaitsATenthOfASecondForTheLossHandler(t *testing.T) {
	for takes, waited := range map[time.Duration]bool{95 * time.Millisecond: true, 105 * time.Millisecond: false} {
		t.Run(takes.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				called, ended := make(chan struct{}), make(chan struct{})
				c, err := s.open(t, s.connect(t), leased.WithLossHandler(func(leased.LossEvent) {
					defer close(ended)
					close(called)
					time.Sleep(takes)
				}))
				must(t, err)
				losesOne(t, c)
				<-called
				over, cancel := context.WithCancel(context.Background())
				cancel()
				began := time.Now()
				err = c.Shutdown(over)
				if took := time.Since(began); took != min(takes, 100*time.Millisecond) {
					t.Errorf("it took %v", took)
				}
				if (err == nil) != waited || err != nil && !strings.Contains(err.Error(), "not waited for: the loss handler") {
					t.Errorf("it returned %v", err)
				}
				<-ended
			})
		})
	}
}

// A lease that is not unlocked, and a handler that blocks, have 100 ms each, the former from the call on.
func TestShutdownReturnsWithinAFifthOfASecondOfItsContext(t *testing.T) {
	for after, takes := range map[time.Duration]time.Duration{
		0:                      200 * time.Millisecond,
		50 * time.Millisecond:  200 * time.Millisecond,
		300 * time.Millisecond: 400 * time.Millisecond,
	} {
		t.Run(after.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				called, freed := make(chan struct{}), make(chan struct{})
				c, err := s.open(t, s.connect(t), leased.WithLossHandler(func(leased.LossEvent) {
					close(called)
					<-freed
				}))
				must(t, err)
				kept := lock(t, c.Mutex("y"))
				losesOne(t, c)
				<-called
				ctx, cancel := context.WithTimeout(context.Background(), after)
				defer cancel()
				began := time.Now()
				err = c.Shutdown(ctx)
				if took := time.Since(began); took != takes || err == nil {
					t.Errorf("it took %v and returned %v", took, err)
				}
				close(freed)
				_ = kept.Unlock() // nobody renews it
			})
		})
	}
}

// hooked is a hook of the Redis client.
type hooked struct{ *usersCode }

func (h hooked) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h hooked) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.call()
		return next(ctx, cmd)
	}
}

func (h hooked) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.call()
		return next(ctx, cmds)
	}
}

// users' policies are called for a command without answer.
type usersPolicy struct{ *usersCode }

func (p usersPolicy) NextBackOff() time.Duration {
	p.call()
	return time.Second
}

func TestAHookOrPolicyThatBlocksHoldsUpShutdownNoLongerThanItsContext(t *testing.T) {
	for what, begin := range map[string]func(t *testing.T, s place, u *usersCode) *leased.Client{
		"hook": func(t *testing.T, s place, u *usersCode) *leased.Client {
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			s.hook(rdb, hooked{u})
			return clientOn(t, s, rdb)
		},
		"policy": func(t *testing.T, s place, u *usersCode) *leased.Client {
			return newClient(t, s, leased.WithBackOff(func() leased.BackOff { return usersPolicy{u} }))
		},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				freed := make(chan struct{})
				u := &usersCode{do: func() { <-freed }}
				c := begin(t, s, u)
				// The inbox is connected, or Shutdown would wait for it at the mutex that a
				// dialing PubSub holds: virtual time does not pass then.
				warm(t, s, c)
				u.armed.Store(true)
				s.Mini.SetError("LOADING Redis is loading the dataset in memory")
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				if _, err := c.Mutex("x").LockContext(ctx); err == nil {
					t.Error("there is no Redis")
				}
				began := time.Now()
				last, end := context.WithTimeout(context.Background(), 200*time.Millisecond)
				defer end()
				err := c.Shutdown(last)
				if took := time.Since(began); took > 300*time.Millisecond {
					t.Errorf("it took %v", took)
				}
				// On a quorum a hook that blocks is like a server that hangs, for which it does not wait.
				if hangs := s.members != nil && what == "hook"; !hangs && (err == nil || !strings.Contains(err.Error(), "hooks")) {
					t.Errorf("it does not say what it did not wait for: %v", err)
				}
				s.Mini.SetError("")
				close(freed)
				time.Sleep(time.Minute)
			})
		})
	}
}

// Unlock sends its release itself, so a hook that does not heed its context holds it up; LockContext is
// not. On a quorum, a goroutine of the client sends it.
func TestAHookThatIgnoresItsContextHoldsUpUnlockAndNothingElse(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const blocked = 6 * time.Second
		u := &usersCode{do: func() { time.Sleep(blocked) }}
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		s.hook(rdb, hooked{u})
		c := clientOn(t, s, rdb)
		warm(t, s, c)
		l := lock(t, c.Mutex("x"))
		u.armed.Store(true)
		began := time.Now()
		_ = l.Unlock()
		if took := time.Since(began); (took >= blocked) != (s.members == nil) {
			t.Errorf("Unlock took %v", took)
		}
		u.armed.Store(true)
		began = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Mutex("y").LockContext(ctx); time.Since(began) > time.Second {
			t.Errorf("LockContext took %v: %v", time.Since(began), err)
		}
		u.armed.Store(false)
		time.Sleep(time.Minute)
	})
}

// What calls Close from inside is what Close waits for.
func TestCloseFromInsideWhatItWaitsForEndsWithItsTime(t *testing.T) {
	for what, code := range usersCodes {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				closed := make(chan error, 100)
				u := &usersCode{}
				var c *leased.Client
				u.do = func() {
					u.armed.Store(false)
					closed <- c.Close()
				}
				c = newClient(t, s, append(code.options(u), leased.WithTTL(3*time.Second))...)
				kept := losing(t, s, c, u)
				for _, l := range kept {
					_ = l.Unlock()
				}
				c.Mutex("b").Unlock()
				began := time.Now()
				err := <-closed
				if took := time.Since(began); took > 6*time.Second {
					t.Errorf("Close took %v", took)
				}
				if again := c.Close(); again != err { // the very same
					t.Errorf("%v, and then %v", err, again)
				}
			})
		})
	}
}

// stuck is a log handler whose output is no longer read.
type stuck struct {
	slog.Handler
	on   string
	free chan struct{}
}

func (h stuck) Enabled(context.Context, slog.Level) bool { return true }

func (h stuck) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.on) {
		<-h.free
	}
	return nil
}

func TestALoggerThatBlocksHoldsUpNoDeadline(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		theirs := lock(t, newClient(t, s).Mutex("x"))
		var lines wards
		logger := stuck{slog.DiscardHandler, "no messages arrive", make(chan struct{})}
		c := clientOn(t, s, s.connect(t, lines.change), leased.WithTTL(3*time.Second), leased.WithLogger(slog.New(logger)))
		mine := lock(t, c.Mutex("mine"))
		work := mine.Context()
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(10 * time.Second)
		lines.frozen.Add(1)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if late := time.Since(mine.TrustedUntil()); late > 0 && work.Err() == nil {
			t.Errorf("the lease's context is alive %v after its trust has ended", late)
		}
		close(logger.free)
		unlock(t, theirs)
		unlock(t, <-waiter)
		_ = mine.Unlock()
	})
}
