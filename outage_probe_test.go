package leased

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// What only an operator can mend is no outage of the server, and nothing ends one of a
// closed client: its locks would be probed every 2 s forever.
func TestAFailureThatLastsIsNoOutage(t *testing.T) {
	for what, c := range map[string]struct {
		err  error
		lost bool
	}{
		"a closed client":      {redisserver.ErrRedisClosed, false},
		"another type":         {otherTypeAnswer{}, false},
		"no answer":            {io.ErrUnexpectedEOF, true},
		"no answer by our own": {context.DeadlineExceeded, true},
	} {
		client, err := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}))
		if err != nil {
			t.Fatal(err)
		}
		client.outage.failed(redisserver.Classify(c.err), time.Now())
		client.alone.requireProbe(redisserver.Classify(c.err))
		client.downtime.commandFailed(redisserver.Classify(c.err), time.Now(), workTakes)
		on, suspected, logged := client.outage.on.Load(), client.inbox[0].hearing.ProbeRequired, client.downtime.ongoing.Load()
		if on != c.lost || suspected != c.lost || logged != c.lost {
			t.Errorf("%s: outage %v, inbox suspected %v, logged as an outage %v", what, on, suspected, logged)
		}
		client.inbox[0].hearing.ProbeRequired = false
		client.noteRenewals(t.Context(), []protocol.Renewal{{Keys: new(protocol.Keys), Err: c.err}}, 0)
		if suspected := client.inbox[0].hearing.ProbeRequired; suspected != c.lost {
			t.Errorf("a renewal, %s: inbox suspected %v", what, suspected)
		}
		_ = client.Close()
	}
}

// A lock's command fails while a probe looks for locks that wait out a pause. The probe does not find that
// lock, because its command was in flight, and the outage goes on: otherwise the lock's own pause, of up to
// 30 s, would have to end first. The failure may bear the time of the probe.
func TestVirtualAFailureBesideAProbeKeepsTheOutageGoing(t *testing.T) {
	for _, fails := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			c := onStub(t, 0, 0)
			fail := &protocol.Failure{Err: errNoAnswer, Kind: protocol.NoAnswer}
			c.outage.failed(fail, time.Now())
			before := c.outage.fails
			if fails {
				c.outage.failed(fail, time.Now())
			}
			c.outage.endIfQuiet(before)
			if on := c.outage.on.Load(); on != fails {
				t.Errorf("another command failed %v: the outage goes on %v", fails, on)
			}
		})
	}
}

// While Redis refuses to take locks, as when its memory is full, it renews and releases. Its replies to
// that do not end the downtime, and nor does a cancel that fails begin one whose end nobody sees.
func TestVirtualADowntimeEndsWithTheCommandsThatWereRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		c.begin()
		c.downtime.commandFailed(&protocol.Failure{Err: errNoAnswer, Kind: protocol.RefusedNow}, time.Now(), workTakes)
		for range 10 {
			c.downtime.commandAnswered(workKeeps)
			time.Sleep(answersLong)
			synctest.Wait()
			if !c.downtime.ongoing.Load() {
				t.Fatal("a renewal was answered, and the downtime is over")
			}
		}
		c.downtime.commandAnswered(workTakes)
		time.Sleep(answersLong)
		synctest.Wait()
		if c.downtime.ongoing.Load() {
			t.Error("a lock was answered, and the downtime goes on")
		}
		keys, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		cancel := &lockstate.Cancellation{Owner: &keys, ID: "x"}
		answer := func(fail *protocol.Failure) {
			c.canceler.answered([]*lockstate.Cancellation{cancel}, []protocol.Canceled{{Fail: fail}}, time.Now())
		}
		answer(&protocol.Failure{Err: errNoAnswer, Kind: protocol.NoAnswer})
		if !c.downtime.ongoing.Load() {
			t.Error("a cancel had no answer, and no downtime began")
		}
		answer(nil)
		time.Sleep(answersLong)
		synctest.Wait()
		if c.downtime.ongoing.Load() {
			t.Error("the cancel was answered, and the downtime goes on")
		}
	})
}

// A refusal for want of a right may be about the keys of one lock, and hides no other trouble.
func TestARefusalOfOneLockIsNoFailureOfAll(t *testing.T) {
	for text, hides := range map[string]bool{"NOPERM No permissions to access a key": false, "LOADING Redis is loading": true} {
		l := newThrottledLog(&clientOptions{logger: slog.New(slog.DiscardHandler)})
		done := make(chan bool)
		l.commandsFailed(failedCommand{"x", redisserver.Classify(refusal(text))})
		l.later(func() { done <- !l.failed.IsZero() })
		if got := <-done; got != hides {
			t.Errorf("%s: it counts for all locks %v", text, got)
		}
	}
}

// Close waits 5 s for a Redis that hangs. When the program closes its Redis client then, as it should, commands may
// still be under way.
func TestARedisClientThatIsClosedAfterTheClientIsNotSaidToBeClosedBefore(t *testing.T) {
	fail := redisserver.Classify(redisserver.ErrRedisClosed)
	for _, stopped := range []bool{false, true} {
		var out strings.Builder // written to, and read, by the goroutine of the lines
		c := onStub(t, 0, 0, WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
		if stopped {
			_ = c.Close()
		}
		c.logFailure("x", fail)
		said := make(chan bool)
		c.log.later(func() { said <- strings.Contains(out.String(), "was closed before the leased.Client") })
		if got := <-said; got == stopped {
			t.Errorf("after Close %v, it is said %v", stopped, got)
		}
	}
}

type refusal string

func (e refusal) Error() string { return string(e) }
func (refusal) RedisError()     {}

type otherTypeAnswer struct{}

func (otherTypeAnswer) Error() string {
	return "WRONGTYPE Operation against a key holding the wrong kind of value"
}

func (otherTypeAnswer) RedisError() {}

// unrenewing answers everything but renewals.
type unrenewing struct{ *stubServer }

func (unrenewing) Renew(_ context.Context, batch []protocol.Renewal) {
	for i := range batch {
		batch[i].Err = errNoAnswer
	}
}

// Renewals have no pauses: when they fail and no lock waits, no probe is needed, and the
// client does not check every 2 s forever whether one is.
func TestVirtualATroubleThatNoLockWaitsOutIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		well := c.server.(*stubServer)
		c.server = unrenewing{well}
		mu := c.Mutex("x")
		mu.Lock()
		time.Sleep(15 * time.Second)
		if !c.outage.on.Load() {
			t.Error("the failure of a renewal was not noticed")
		}
		mu.Unlock()
		time.Sleep(10 * time.Second)
		c.outage.mu.Lock()
		defer c.outage.mu.Unlock()
		if c.outage.on.Load() || !c.outage.next.IsZero() {
			t.Error("the trouble goes on though no lock is in it")
		}
	})
}

func TestCanceledCallsDuringAnOutageLeaveNothingPiledUp(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1", DialerRetries: 1, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
		},
	})
	defer rdb.Close()
	c, err := New(rdb, WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 1000 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		_, _ = c.Mutex("x").LockContext(ctx)
		cancel()
	}
	c.canceler.mu.Lock()
	n := len(c.canceler.schedule.Pending)
	c.canceler.mu.Unlock()
	if n > 10 {
		t.Errorf("%d requests are being canceled, each every second for a TTL; %d commands were sent", n, c.Stats().Commands)
	}
}

// refusingOnce fails the next request once it is told to.
type refusingOnce struct {
	*stubServer
	next atomic.Bool
}

func (s *refusingOnce) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	if s.next.CompareAndSwap(true, false) {
		return protocol.Answer{}, errNoAnswer
	}
	return s.stubServer.Do(ctx, k, c)
}

// slowly is a back-off policy that takes its time.
type slowly struct{}

func (slowly) NextBackOff() time.Duration {
	time.Sleep(2 * probeEvery) // of virtual time
	return time.Minute
}

// A probe may be due between the failure of a command and the pause of its lock. It finds no
// lock that waits out a pause, but that is not the end of the outage.
func TestVirtualAProbeThatOvertakesAFailureEndsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0, WithBackOff(func() BackOff { return slowly{} }))
		server := &refusingOnce{stubServer: c.server.(*stubServer)}
		c.server = server
		c.group.start(c.watchdog.run)
		c.Mutex("other").Lock()
		time.Sleep(time.Minute) // until there is no inbox to wait for
		server.next.Store(true)
		began := time.Now()
		mu := c.Mutex("x")
		mu.Lock()
		entered := time.Since(began)
		time.Sleep(time.Minute) // until all is logged
		mu.Unlock()
		c.Mutex("other").Unlock()
		if entered > 25*time.Second {
			t.Errorf("entered %v after the failure", entered)
		}
	})
}

// A failure is noted only after the step of its lock. Slots that were read again in between, when no
// outage had begun, still have a lock ask soon, once.
func TestVirtualAProbeThatIsAskedForBeforeAFailureIsNotedComesSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := onStub(t, 0, 0).outage
		next := func(what string, want time.Duration) {
			t.Helper()
			o.mu.Lock()
			defer o.mu.Unlock()
			if got := time.Until(o.next); got != want {
				t.Errorf("%s: the next probe is due in %v, want %v", what, got, want)
			}
		}
		fail := &protocol.Failure{Err: errNoAnswer, Kind: protocol.NoAnswer}
		failed := time.Now()
		time.Sleep(time.Second)
		o.probeSoon(time.Now().Add(10 * time.Millisecond))
		o.failed(fail, failed)
		next("asked for after the failure", 10*time.Millisecond)
		time.Sleep(20 * time.Millisecond)
		o.fire(time.Now(), nil) // finds no lock that waits out a pause, which ends the outage
		o.failed(fail, failed)
		next("asked for before the previous failure was noted", probeEvery)
		o.probeSoon(time.Now().Add(probeEvery + time.Second))
		next("asked for, but for later", probeEvery)
	})
}

// An outage has the renewals of all locks fail within seconds, and that is no fault of the logger.
func TestRenewalsThatFailTogetherDropNoLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &counting{Handler: slog.DiscardHandler, blocked: make(chan struct{})}
		c := settled(t, onStub(t, 0, 0, WithLogger(slog.New(out))))
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		batch := make([]protocol.Renewal, renewalsPerBatch)
		for i := range batch {
			batch[i] = protocol.Renewal{Owner: l.entry, Keys: &l.entry.keys, Req: l.entry.request(), At: time.Now(), Err: errNoAnswer}
		}
		for range 2 * maxLines / renewalsPerBatch {
			c.renewed(context.Background(), batch, -1)
		}
		close(out.blocked)
		synctest.Wait()
		if n := out.dropped.Load(); n != 0 || out.lines.Load() == 0 {
			t.Errorf("%d lines, of which %d say that some were dropped", out.lines.Load(), n)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// counting is a logger that blocks until blocked is closed.
type counting struct {
	slog.Handler
	blocked        chan struct{}
	lines, dropped atomic.Int64
}

func (h *counting) Enabled(context.Context, slog.Level) bool { return true }

func (h *counting) Handle(_ context.Context, r slog.Record) error {
	<-h.blocked
	h.lines.Add(1)
	if strings.Contains(r.Message, "dropped") {
		h.dropped.Add(1)
	}
	return nil
}
