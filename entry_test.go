package leased

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/redis/go-redis/v9"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// granted returns a client whose lock x was granted to one caller, without a command.
func granted(t *testing.T, opts ...Option) (*Client, *entry, *call) {
	t.Helper()
	c, err := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	e := c.find(&k, nil)
	w := &call{Mode: protocol.Exclusive, Opts: &c.opts.lock.Terms}
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stateLocked().Enter(w.caller(), now, &fx)
	cmd := fx.Send
	e.stateLocked().Answered(&cmd, protocol.Answer{Outcome: protocol.Granted, Token: 1, Clock: 1}, nil, 0, now, &fx)
	return c, e, w
}

// Close ends a lease, and before that is reported another goroutine finds the lease
// lost: that is one loss, with one reason.
func TestALossBesideACloseIsToldOnce(t *testing.T) {
	told := make(chan LossEvent, 10)
	c, e, w := granted(t, WithLossHandler(func(ev LossEvent) { told <- ev }))
	var fx, byClosing, byLosing lockstate.Effects
	now := time.Now()
	e.mu.Lock()
	e.stateLocked().Close(now, &byClosing)
	e.stateLocked().Revoked(e.stateLocked().Request().ID, 1, now, &byLosing)
	e.stateLocked().Leave(w.caller(), now, &fx)
	e.mu.Unlock()
	for _, fx := range []*lockstate.Effects{&byClosing, &byLosing} {
		for _, l := range fx.Ended {
			e.end(l)
		}
	}
	c.losses.wait(t.Context())
	if n := len(told); n != 1 {
		t.Fatalf("told %d times", n)
	}
	if ev := <-told; ev.Reason != lockstate.Evicted.String() {
		t.Errorf("told %+v", ev)
	}
	c.retire(e)
}

// An eviction is recorded as such by whoever records the hold: also by an Unlock that comes
// between the message and what follows from it.
func TestAnUnlockThatOvertakesAnEvictionRecordsThatTheLeaseWasForced(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	c, e, w := granted(t, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))), WithLossHandler(func(LossEvent) {}))
	var evicted lockstate.Effects
	e.mu.Lock()
	e.stateLocked().Revoked(e.stateLocked().Request().ID, 1, time.Now(), &evicted)
	e.mu.Unlock()
	if _, err := e.unlock(releaseWait{}, time.Now(), func(*lockstate.Lock) *lockstate.Caller { return w.caller() }); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("Unlock returned %v", err)
	}
	e.perform(&evicted, false, 0)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	var got metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &got); err != nil {
		t.Fatal(err)
	}
	outcomes := map[string]uint64{}
	for _, m := range got.ScopeMetrics[0].Metrics {
		if h, ok := m.Data.(metricdata.Histogram[float64]); ok && m.Name == "leased.hold.duration" {
			for _, p := range h.DataPoints {
				how, _ := p.Attributes.Value(attrHoldOutcome)
				outcomes[how.AsString()] += p.Count
			}
		}
	}
	if len(outcomes) != 1 || outcomes["forced"] != 1 {
		t.Errorf("recorded %v", outcomes)
	}
}

// The pauses after failures go on growing, and the next reply ends the outage, if the lock was
// granted by a message in between, and renewed.
func TestALockWithPausesStaysAwake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := settled(t, onStub(t, 0, 0)).Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		e := l.entry
		e.mu.Lock()
		e.stateLocked()
		e.awake.pauses = defaultBackOff()
		e.restLocked()
		stays := e.awake != nil
		e.stateLocked()
		e.awake.pauses = nil
		e.restLocked()
		rests := e.awake == nil
		e.mu.Unlock()
		if !stays || !rests {
			t.Errorf("with pauses it stays awake: %v; without them it rests: %v", stays, rests)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// evenly is a policy whose pauses are all the same.
type evenly time.Duration

func (d evenly) NextBackOff() time.Duration { return time.Duration(d) }

// What the policy says is kept within bounds. One that has ended, as those of package backoff say by -1,
// pauses for as long as may be.
func TestAPauseIsNeitherTooShortNorTooLong(t *testing.T) {
	for said, want := range map[time.Duration]time.Duration{
		-1:          maxRetryDelay,
		0:           minRetryDelay,
		time.Second: time.Second,
		time.Hour:   maxRetryDelay,
	} {
		c, err := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), WithBackOff(func() BackOff { return evenly(said) }))
		if err != nil {
			t.Fatal(err)
		}
		e := &entry{client: c, awake: new(awake)}
		if got := e.pause(); got != want {
			t.Errorf("the policy says %v, and the pause is %v", said, got)
		}
		_ = c.Close()
	}
}

// distant is a stub server that takes its time with a request, and answers no downgrade.
type distant struct{ stubServer }

func (d *distant) HonorsDeadlines() bool { return true }

func (d *distant) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	switch c.Verb {
	case protocol.Acquire:
		time.Sleep(500 * time.Millisecond) // of virtual time: the way to a distant server
	case protocol.Downgrade:
		return protocol.Answer{}, errNoAnswer
	}
	return d.stubServer.Do(ctx, k, c)
}

// An Unlock after a loss, or after a downgrade without reply, sends no release; but the
// next caller may now send a request, and the Unlock must not wait for it.
func TestVirtualWhoLeavesDoesNotWaitForWhatTheNextAsks(t *testing.T) {
	for what, c := range map[string]struct {
		end  func(d *distant, l *Lease)
		want error
	}{
		"after a loss": {func(d *distant, l *Lease) {
			d.tell(&protocol.Message{Kind: protocol.MessageRevoked, ID: l.entry.request().ID, Key: "x", Token: l.Token()})
		}, ErrLeaseLost},
		"after a downgrade without answer": {func(_ *distant, l *Lease) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			_ = l.Downgrade(ctx)
		}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := onStub(t, 0, 0)
				d := &distant{stubServer{client: client}}
				client.server = d
				rw := client.RWMutex("x")
				first, err := rw.LockContext(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Second) // a client that has just begun asks once more
				c.end(d, first)
				done := make(chan struct{})
				go func() { // ended by the lock, waited for through done
					defer close(done)
					rw.Lock()
					rw.Unlock() //nolint:staticcheck // it had to be let in, no more
				}()
				synctest.Wait()
				began := time.Now()
				if err := first.Unlock(); !errors.Is(err, c.want) {
					t.Errorf("Unlock: %v", err)
				}
				if took := time.Since(began); took != 0 {
					t.Errorf("Unlock took %v", took)
				}
				<-done
			})
		})
	}
}

// Whoever may write to Redis can give a reader any expiry.
func TestAReadersExpiryCanBeAnything(t *testing.T) {
	for ends, want := range map[string]time.Duration{
		"inf": 90 * 365 * 24 * time.Hour, "x": 0, "-inf": math.MinInt64, "9e300": 90 * 365 * 24 * time.Hour,
	} {
		s := protocol.Snapshot{Value: protocol.MarkerValue, Clock: 1, Readers: []string{"x", ends}}
		if owners := infoOf("x", &s).Owners; len(owners) != 1 || owners[0].TTL < want {
			t.Errorf("%s: owners %+v", ends, owners)
		}
	}
}

// Its token is when it became the writer, unless the clock was set back before that: then it is the last
// token, and one more.
func TestSinceWhenADowngradedWriterOwnsIsNotInTheFuture(t *testing.T) {
	const token = 1_700_000_000_000_000
	id := protocol.NewRequest(protocol.NewClientID("a"), protocol.Shared, time.Minute, false, protocol.Counted, protocol.Origin{Token: token}).ID
	for clock, want := range map[uint64]time.Time{token + 1: time.UnixMicro(token), token - 1: {}} {
		s := protocol.Snapshot{Value: protocol.MarkerValue, Clock: clock, Readers: []string{id, "9e12"}}
		if owners := infoOf("x", &s).Owners; len(owners) != 1 || owners[0].Token != token || !owners[0].Since.Equal(want) {
			t.Errorf("at %d: owners %+v; want since %v", clock, owners, want)
		}
	}
}

// countingEchoes is a stub server that says how many receivers an echo had.
type countingEchoes struct {
	*stubServer
	receivers int
	err       error
}

func (s *countingEchoes) Echo(context.Context, *protocol.Keys, string, string) (int, error) {
	return s.receivers, s.err
}

// An echo that nobody has received shows at once that the subscription is deaf. One that was not published shows
// nothing.
func TestTheReceiversOfAnEchoTellWhetherASubscriptionIsDeaf(t *testing.T) {
	for what, x := range map[string]struct {
		receivers int
		err       error
		deaf      bool
		awaited   bool
	}{
		"one":       {receivers: 1, awaited: true},
		"none":      {receivers: 0, deaf: true, awaited: true},
		"no answer": {err: errNoAnswer},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := onStub(t, 0, 0)
			c.server = &countingEchoes{c.server.(*stubServer), x.receivers, x.err}
			keys, err := protocol.NewKeys("", "x")
			if err != nil {
				t.Fatal(err)
			}
			in := c.inbox[0]
			in.hearing.Counts = true
			in.hearing.Enter(lockstate.Joined, time.Now())
			time.Sleep(time.Minute) // until it has heard nothing for long
			in.probe(t.Context(), &keys)
			if in.broken != x.deaf || in.hearing.Due.IsZero() == x.awaited {
				t.Errorf("with receivers %s: to be rebuilt %v, due %v", what, in.broken, in.hearing.Due)
			}
			if wait := time.Until(in.hearing.Due); x.awaited && !x.deaf && wait != lockstate.EchoWait {
				t.Errorf("with receivers %s, the echo is awaited for %v more", what, wait)
			}
		})
	}
}

// A message that others wait is not due for each that comes, so not every answer tells whether
// scripts may publish: the client keeps what the last one said.
func TestWhoMayNotPublishPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		stub := &queueing{stubServer: c.server.(*stubServer)}
		c.server = stub
		for _, receivers := range []int32{1, protocol.EchoDenied, protocol.NoEcho, 1} {
			stub.receivers.Store(receivers)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if _, err := c.Mutex("x").LockContext(ctx); !errors.Is(err, ErrNotAcquired) {
				t.Fatal(err)
			}
			cancel()
			synctest.Wait()
			if reached := (*environment)(c).HasInbox(); reached != (receivers == 1) {
				t.Errorf("%d: messages reach it: %v", receivers, reached)
			}
		}
	})
}

// queueing is a server on which another process owns every lock, and an echo reaches so many.
type queueing struct {
	*stubServer
	receivers atomic.Int32
}

func (q *queueing) Do(context.Context, *protocol.Keys, *protocol.Command) (protocol.Answer, error) {
	return protocol.Answer{Outcome: protocol.Enqueued, Token: stubFloor, Clock: uint64(time.Now().UnixMicro()), Left: time.Minute, Echo: int(q.receivers.Load())}, nil
}

// A caller can come after the step that found the lock idle. If the lock were removed then, the next caller
// would find another one of that name, and two would be inside.
func TestALockThatACallerHasEnteredInTheMeantimeIsNotRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		c.retire(l.entry)
		if c.lookup(l.entry.keys.Lock) != l.entry {
			t.Error("it was removed")
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// The finalizer is the last to look at the lock until its lease expires.
func TestALockWhoseLeaseWasCollectedRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0))
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		e, g := l.entry, *l.guard
		e.mu.Lock()
		e.restLocked()
		e.mu.Unlock()
		g.collected()
		e.mu.Lock()
		if e.awake != nil {
			t.Error("it stays awake")
		}
		e.mu.Unlock()
		_ = l.Unlock()
	})
}

// The client is closed: its logger must not be called anymore, and the error of Shutdown has told of the lease.
func TestALeaseThatIsCollectedAfterShutdownIsNotLogged(t *testing.T) {
	for _, closed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true})
			defer rdb.Close()
			var text strings.Builder
			c, err := New(rdb, WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
			if err != nil {
				t.Fatal(err)
			}
			c.server = &stubServer{client: c}
			l, err := c.Mutex("x").LockContext(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			g := *l.guard
			over, cancel := context.WithCancel(context.Background())
			cancel()
			if !closed {
				g.collected()
			}
			if err := c.Shutdown(over); !errors.Is(err, ErrClosed) {
				t.Errorf("Shutdown: %v", err)
			}
			if closed {
				g.collected()
			}
			synctest.Wait()
			if logged := strings.Contains(text.String(), "garbage-collected"); logged == closed {
				t.Errorf("closed %v: logged %v", closed, logged)
			}
			_ = l.Unlock()
		})
	}
}

// A lock that a caller was let into rests when others have taken its place among the recent ones,
// of which it has one.
func TestALockRestsWhenOthersAreMoreRecent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0))
		var held []*Lease
		lock := func() *entry {
			l, err := c.Mutex(fmt.Sprint("lock ", len(held))).LockContext(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, l)
			synctest.Wait() // the sender of the command puts the lock among the recent ones
			return l.entry
		}
		rests := func(e *entry) bool {
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.awake == nil
		}
		first := lock()
		first.mu.Lock()
		if first.restAfterLocked(true) {
			t.Error("a second place is asked for")
		}
		first.mu.Unlock()
		for range len(c.recent.places) - 1 {
			lock()
		}
		if rests(first) {
			t.Error("it rests although it is among the recent ones")
		}
		second := lock()
		if !rests(first) {
			t.Error("it does not rest")
		}
		if rests(second) {
			t.Error("the last one rests")
		}
		for _, l := range held {
			if err := l.Unlock(); err != nil {
				t.Error(err)
			}
		}
	})
}

// An Unlock that comes between a loss and what follows from it ends the lease's context, which says what
// Unlock returns.
func TestAnUnlockThatOvertakesALossEndsTheContextWithIt(t *testing.T) {
	_, e, w := granted(t, WithLossHandler(func(LossEvent) {}))
	l := newLease(t.Context(), e, w)
	ctx := l.Context()
	var evicted lockstate.Effects
	e.mu.Lock()
	e.stateLocked().Revoked(e.stateLocked().Request().ID, 1, time.Now(), &evicted)
	e.mu.Unlock()
	if err := l.Unlock(); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("Unlock returned %v", err)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, ErrLeaseLost) {
		t.Errorf("its context has ended with %v", cause)
	}
	e.perform(&evicted, false, 0)
}

// An Unlock by name may have read the clock before the reader came whose hold it ends.
func TestNoHoldEndsBeforeItBegan(t *testing.T) {
	_, e, w := granted(t)
	e.mu.Lock()
	defer e.mu.Unlock()
	r, ok := e.takeHoldLocked(w, holdEnd{how: holdReleased, at: time.Now().Add(-time.Second)})
	if took := r.at.Sub(r.since); !ok || took < 0 {
		t.Errorf("%v, it took %v", ok, took)
	}
	var fx lockstate.Effects
	e.stateLocked().Leave(w.caller(), time.Now(), &fx)
}

// A cancel with another one after it has no answer before it is given up: what comes later about its id is
// canceled again.
func TestACancelThatIsGivenUpIsNotWaitedForAnyMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		c.server = silentServer{c.server}
		e := &entry{client: c}
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		e.keys = k
		w := &lockstate.Caller{Opts: &c.opts.lock.Terms}
		c.begin()
		c.canceler.add(&lockstate.Cancellation{Owner: e, ID: "first", Then: &lockstate.Cancellation{Owner: e, ID: "second", Callers: []*lockstate.Caller{w}}})
		time.Sleep(time.Hour)
		c.canceler.mu.Lock()
		defer c.canceler.mu.Unlock()
		if !w.Settled || len(c.canceler.schedule.Pending) != 0 || len(c.canceler.awaited) != 0 {
			t.Errorf("settled %v, %d to be canceled, %v waited for", w.Settled, len(c.canceler.schedule.Pending), c.canceler.awaited)
		}
	})
}

// silentServer answers no cancel.
type silentServer struct{ server }

func (silentServer) Cancel(_ context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	results := make([]protocol.Canceled, len(batch))
	for i := range results {
		results[i].Fail = &protocol.Failure{Err: errNoAnswer, Kind: protocol.NoAnswer}
	}
	return results
}

// A walk over all locks of a client that holds very many wakes only those that have something to do.
// The watchdog takes it, and meanwhile ends no lease.
func TestALockThatRestsIsNotWokenByAWalkOverAllLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0))
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		l.entry.mu.Lock()
		l.entry.restLocked()
		rests := &entry{resting: l.entry.resting} // without a client it cannot be woken
		if l.entry.awake != nil {
			t.Error("the lock does not rest")
		}
		l.entry.mu.Unlock()
		if rests.retry() {
			t.Error("a lock that rests asks Redis again")
		}
		newSlowWatch(&Client{began: c.began, table: map[string]*entry{"x": rests}}, time.Hour).look(time.Now())
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// A time counted from an earlier one carries the wall clock of that time. Here it was an hour ahead then.
func TestATimeIsShownOnTheWallClock(t *testing.T) {
	began := time.Now()
	(*[1]uint64)(unsafe.Pointer(&began))[0] += 3600 << 30 // the seconds of its wall clock
	if ahead := time.Until(began.Round(0)); ahead < 59*time.Minute {
		t.Skipf("this Go keeps times in another way: %v", ahead)
	}
	since := began.Add(time.Minute)
	got := onWallClock(since)
	if ahead := got.Round(0).Sub(time.Now().Round(0)); ahead < 59*time.Second || ahead > time.Minute {
		t.Errorf("it is shown %v ahead, want a minute", ahead)
	}
	if !got.Equal(since) {
		t.Errorf("it has become %v instead of %v", got, since)
	}
	if got := onWallClock(time.Time{}); !got.IsZero() {
		t.Errorf("no time has become %v", got)
	}
}

// A select between two that are over chooses at random, so one try would prove nothing.
func TestWhatIsDecidedCountsThoughItsContextHasEnded(t *testing.T) {
	c := onStub(t, 0, 0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	done := make(chan struct{})
	if err := c.await(ctx, done); !errors.Is(err, context.Canceled) {
		t.Errorf("what is not decided: %v", err)
	}
	close(done)
	for range 100 {
		if err := c.await(ctx, done); err != nil {
			t.Fatal(err)
		}
		if !waitFor(ctx, done) {
			t.Fatal("it has not waited")
		}
	}
}

// A connection's deadline is that of the context, and can be noticed before the context's own.
func TestACommandThatItsDeadlineEndedMatchesTheContextsError(t *testing.T) {
	c := onStub(t, 0, 0)
	passed, broken := due{t.Context(), time.Now()}, errors.New("i/o timeout")
	if err := c.unlessEnded(passed, broken); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, broken) {
		t.Error(err)
	}
	if err := c.unlessEnded(due{t.Context(), time.Now().Add(time.Hour)}, broken); !errors.Is(err, broken) || errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// due is a context that does not know yet that its deadline has passed.
type due struct {
	context.Context
	at time.Time
}

func (d due) Deadline() (time.Time, bool) { return d.at, true }

func TestTheCauseOfAContextSaysNothingOfTheCommand(t *testing.T) {
	for _, cause := range []error{answer("NOPERM for another Redis"), redis.ErrClosed} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if fail := failureOf(fmt.Errorf("wrapped: %w", ended(ctx))); fail.Kind != protocol.NoAnswer || !errors.Is(fail.Err, context.Canceled) {
			t.Errorf("%v: %v, %v", cause, fail.Kind, fail.Err)
		}
	}
	if fail := failureOf(answer("NOPERM for this one")); fail.Kind != protocol.NeedsOperator {
		t.Errorf("an error of the command: %v", fail.Kind)
	}
}

// ownedBy has requests wait for an owner, and says who that is.
type ownedBy struct {
	*stubServer
	owner string
}

func (o *ownedBy) Do(ctx context.Context, _ *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	if who, err := protocol.ParseID(c.ID); err == nil && who.Mode == protocol.Shared {
		<-ctx.Done() // it does not answer readers
		return protocol.Answer{}, ctx.Err()
	}
	return protocol.Answer{Outcome: protocol.Enqueued, Token: stubFloor, Clock: uint64(time.Now().UnixMicro()), Left: time.Minute, Blocker: o.owner}, nil
}

// After a failover that has undone a release, Redis names an owner that its client has forgotten.
func TestVirtualAnOwnerThatThisClientHasForgottenDoesNotHaveTheLock(t *testing.T) {
	for client, taken := range map[string]bool{"": false, "aaaaaaaaaaaaaaaa:another": true} {
		synctest.Test(t, func(t *testing.T) {
			c := onStub(t, 0, 0)
			c.server = &ownedBy{&stubServer{client: c}, "leased1:w:30000:u:bbbbbbbbbbbbbbbb:" + cmp.Or(client, c.id)}
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, err := c.Mutex("x").LockContext(ctx)
			if errors.Is(err, ErrLocked) != taken || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the owner is another client's: %v, %v", taken, err)
			}
		})
	}
}

// The reader was behind a writer of its process. Redis has named the owner to that one.
func TestVirtualARequestThatRedisHasNotAnsweredDoesNotSayThatTheLockWasTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		c.server = &ownedBy{&stubServer{client: c}, "leased1:w:30000:u:bbbbbbbbbbbbbbbb:aaaaaaaaaaaaaaaa:another"}
		read := make(chan error, 1)
		time.AfterFunc(time.Millisecond, func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			_, err := c.RWMutex("x").RLockContext(ctx)
			read <- err
		})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := c.RWMutex("x").LockContext(ctx); !errors.Is(err, ErrLocked) {
			t.Errorf("the writer: %v", err)
		}
		if err := <-read; errors.Is(err, ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the reader: %v", err)
		}
	})
}
