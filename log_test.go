package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// Lock names can be secrets.
func TestWithoutLockNamesLogsOfAnUnconfirmedReleaseDoNotNameTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithTTL(10*time.Second), leased.WithoutLockNamesInLogs(), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		mu := c.Mutex("secret-lock")
		outage := func() { s.Mini.SetError("LOADING Redis is loading the dataset in memory") }
		recover := func() {
			time.Sleep(2 * time.Minute) // the next line of the same cause is due
			s.Mini.SetError("")
			time.Sleep(time.Minute)
			synctest.Wait()
		}

		mu.Lock()
		outage()
		mu.Unlock()
		recover()
		err := mu.Do(context.Background(), func(context.Context) error {
			outage()
			return nil
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		recover()
		if n := strings.Count(text.String(), "not confirmed"); n != 2 || strings.Contains(text.String(), "secret") {
			t.Errorf("two releases were not confirmed; logged %q", text.String())
		}
	})
}

func TestWithoutLockNamesLogsOfAHookThatPanicsDoNotSayWhatWith(t *testing.T) {
	for logged, opts := range map[string][]leased.Option{
		"a value of type string": {leased.WithoutLockNamesInLogs()},
		"no rule for":            nil,
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			var text bytes.Buffer
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			hook := &carelessHook{}
			s.hook(rdb, hook)
			c := clientOn(t, s, rdb, append(opts, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))...)
			l := lock(t, c.Mutex("secret-lock"))
			hook.do = func(cmd redis.Cmder) error { panic(fmt.Sprint("no rule for ", cmd)) }
			hook.on.Store(true)
			time.Sleep(11 * time.Second) // a renewal
			hook.on.Store(false)
			unlock(t, l)
			synctest.Wait()
			if !strings.Contains(text.String(), logged) || strings.Contains(text.String(), "secret") != (opts == nil) {
				t.Errorf("logged %q, want %s", text.String(), logged)
			}
		})
	}
}

// carelessHook does what it likes instead of each command that has a script or is one of several.
type carelessHook struct {
	on atomic.Bool
	do func(redis.Cmder) error
}

func (h *carelessHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *carelessHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.on.Load() && strings.HasPrefix(cmd.Name(), "eval") {
			return h.do(cmd)
		}
		return next(ctx, cmd)
	}
}
func (h *carelessHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if h.on.Load() {
			return h.do(cmds[0])
		}
		return next(ctx, cmds)
	}
}

var debugging = &slog.HandlerOptions{Level: slog.LevelDebug}

func TestWithoutLockNamesLogsDoNotNameLocks(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithoutLockNamesInLogs(), leased.WithLogger(slog.New(slog.NewTextHandler(&text, debugging))))
		s.rdb.HSet(context.Background(), "secret-name", "field", "value")
		_, err := c.Mutex("secret-name").LockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		l, more := lock(t, c.Mutex("secret-lock")), lock(t, c.Mutex("another-secret-lock"))
		s.rdb.Del(context.Background(), "secret-lock", "another-secret-lock")
		<-l.Context().Done()
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		isAll(t, more.Unlock(), leased.ErrLeaseLost)
		for _, inbox := range s.inboxes(t) {
			must(t, s.rdb.Publish(context.Background(), inbox, "granted secret-lock").Err())
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if strings.Count(text.String(), "\n") < 4 || !strings.Contains(text.String(), "not for this client") || strings.Contains(text.String(), "secret") {
			t.Errorf("logged %q", text.String())
		}
		s.rdb.Del(context.Background(), "secret-name")
	})
}

// tardyLogs keeps the lines of a logger that blocks until it is ready.
type tardyLogs struct {
	*logs
	ready chan struct{}
}

func (l tardyLogs) Handle(ctx context.Context, r slog.Record) error {
	<-l.ready
	return l.logs.Handle(ctx, r)
}

func (l tardyLogs) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l tardyLogs) WithGroup(string) slog.Handler      { return l }

// Thousands of messages that are none, before the logger can write a line, take no other line's place.
func TestMessagesThatAreNoneDropNoOtherLine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		out := tardyLogs{new(logs), make(chan struct{})}
		c := newClient(t, s, leased.WithLogger(slog.New(out)))
		unlock(t, lock(t, c.Mutex("x")))
		s.rdb.HSet(context.Background(), "hash", "field", "value")
		time.Sleep(time.Second)
		for _, inbox := range s.inboxes(t) {
			for range 3000 {
				must(t, s.rdb.Publish(context.Background(), inbox, "x").Err())
			}
		}
		_, err := c.Mutex("hash").LockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		close(out.ready)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "not for this client"); n != 1 || out.count(slog.LevelWarn, "were dropped") != 0 {
			t.Errorf("%q", out.messages())
		}
		time.Sleep(time.Minute)
		for _, inbox := range s.inboxes(t) {
			must(t, s.rdb.Publish(context.Background(), inbox, "x").Err())
		}
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "not for this client"); n != 2 {
			t.Errorf("%d lines, one a minute", n)
		}
		s.rdb.Del(context.Background(), "hash")
	})
}

// The Redis client was closed: that has a line of its own, and no subscription can ever be made again.
func TestAClosedRedisClientIsNotLoggedAsASubscriptionThatFails(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum has a Redis client for each server")
		}
		var out logs
		rdb := s.connect(t)
		c := clientOn(t, s, rdb, out.option())
		unlock(t, lock(t, c.Mutex("x")))
		must(t, rdb.Close())
		time.Sleep(5 * time.Minute)
		if n := out.count(slog.LevelWarn, "no subscription can be made"); n != 0 {
			t.Errorf("%q", out.messages())
		}
	})
}

// Redis and proxies repeat a command's arguments in some of their errors.
func TestWithoutLockNamesErrorsInTheLogDoNotNameTheLock(t *testing.T) {
	for answer, want := range map[string]string{
		"ERR unknown command 'evalsha', with args beginning with: '0f4c' '5' 'appsecret-lockset' ": "ERR unknown command 'evalsha'",
		"DENIED key appsecret-lock:{appsecret-lock}:queue":                                         "DENIED key [secret]:{[secret]}:queue",
		"LOADING secret-lock, as secret-lockers may":                                               "LOADING [secret], as secret-lockers may",
	} {
		t.Run(want, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var text bytes.Buffer
				c := newClient(t, s, leased.WithKeyPrefix("app"), leased.WithoutLockNamesInLogs(), leased.WithReleaseTimeout(time.Second),
					leased.WithLogger(slog.New(slog.NewTextHandler(&text, debugging))))
				mu := c.Mutex("secret-lock")
				mu.Lock()
				synctest.Wait()
				s.Mini.SetError(answer)
				mu.Unlock() // which logs that it was not confirmed
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				_, err := mu.LockContext(ctx)
				isAll(t, err, leased.ErrNotAcquired)
				s.Mini.SetError("")
				time.Sleep(time.Minute)
				synctest.Wait()
				log := text.String()
				if !strings.Contains(log, want) || strings.Contains(strings.ReplaceAll(log, "secret-lockers", ""), "secret-lock") {
					t.Errorf("logged %s", log)
				}
			})
		})
	}
}

func TestLogsNameTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithTTL(10*time.Second), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		background := context.Background()
		for _, name := range []string{"hash", "other-hash"} {
			s.rdb.HSet(background, name, "field", "value")
			_, err := c.Mutex(name).LockContext(background)
			isAll(t, err, leased.ErrNotAcquired)
		}
		s.rdb.Set(background, "foreign", "value", 0)
		_, err := c.Mutex("foreign").TryLockContext(background)
		isAll(t, err, leased.ErrLocked)
		l := lock(t, c.Mutex("deleted"))
		s.rdb.Del(background, "deleted")
		<-l.Context().Done()
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		synctest.Wait() // what was lost has been canceled
		mu := c.Mutex("unconfirmed")
		mu.Lock()
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		mu.Unlock()
		s.Mini.SetError("")
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, want := range []string{
			"level=ERROR msg=\"leased: another program, such as Redisson, keeps another type of value under a lock's name; an operator has to fix this\" lock=hash error=",
			"an operator has to fix this\" lock=other-hash error=",
			"or use ForceUnlock\" lock=foreign\n",
			"level=ERROR msg=\"leased: lease lost before Unlock\" lock=deleted token=",
			"\" ttl=10s\n",
			"Redis cannot run lock commands now; trying again\" lock=unconfirmed error=",
			"a release was not confirmed; still trying\" lock=unconfirmed error=",
		} {
			if !strings.Contains(text.String(), want) {
				t.Errorf("no line has %s; logged\n%s", want, text.String())
			}
		}
		s.rdb.Del(background, "hash", "other-hash", "foreign")
	})
}

func TestCausesThatAreOverMakeRoomForOthers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		out, background := &logs{}, context.Background()
		c := newClient(t, s, out.option())
		n := 0
		refuse := func(locks, lines int) {
			t.Helper()
			before := out.count(slog.LevelError, "another type of value")
			for range locks {
				n++
				name := fmt.Sprint("hash", n)
				s.rdb.HSet(background, name, "field", "value")
				_, err := c.Mutex(name).LockContext(background)
				isAll(t, err, leased.ErrNotAcquired)
				synctest.Wait() // a separate goroutine writes the log
			}
			if got := out.count(slog.LevelError, "another type of value") - before; got != lines {
				t.Errorf("%d lines about %d locks, want %d", got, locks, lines)
			}
		}
		refuse(200, 101) // from the hundredth cause on, locks share one
		refuse(5, 0)
		time.Sleep(2 * time.Minute)
		refuse(1, 1) // of the cause that locks share, and after it there is room
		refuse(50, 50)
		s.rdb.FlushAll(background)
	})
}

func TestManyLossesAtOnceAreOneLine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		leases := make([]*leased.Lease, 57)
		for i := range leases {
			leases[i] = lock(t, c.Mutex(fmt.Sprintf("lock-%02d", i)))
		}
		time.Sleep(100 * time.Millisecond) // until the client hears messages
		for i := range leases {
			must(t, forceUnlock(context.Background(), c, fmt.Sprintf("lock-%02d", i)))
			time.Sleep(100 * time.Microsecond)
		}
		for _, l := range leases {
			<-l.Context().Done()
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		want := "level=ERROR msg=\"leased: leases lost before Unlock\" leases=57 reason=\"an operator evicted its owner\" " +
			`locks="\"lock-00\", \"lock-01\", \"lock-02\" and 54 more"`
		if strings.Count(text.String(), "\n") != 1 || !strings.Contains(text.String(), want) {
			t.Errorf("logged\n%swant %s", text.String(), want)
		}
	})
}

func TestOnlyLossesWithinFiftyMillisecondsShareALine(t *testing.T) {
	for apart, shared := range map[time.Duration]bool{45 * time.Millisecond: true, 60 * time.Millisecond: false, 100 * time.Millisecond: false} {
		t.Run(apart.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				c := newClient(t, s, out.option())
				first, second := lock(t, c.Mutex("x")), lock(t, c.Mutex("y"))
				time.Sleep(100 * time.Millisecond) // until the client hears messages
				must(t, forceUnlock(context.Background(), c, "x"))
				<-first.Context().Done()
				time.Sleep(apart)
				must(t, forceUnlock(context.Background(), c, "y"))
				<-second.Context().Done()
				isAll(t, first.Unlock(), leased.ErrLeaseLost)
				isAll(t, second.Unlock(), leased.ErrLeaseLost)
				time.Sleep(time.Second)
				synctest.Wait()
				together, alone := out.count(slog.LevelError, "leases lost before Unlock"), out.count(slog.LevelError, "lease lost before Unlock")
				if shared && (together != 1 || alone != 0) || !shared && (together != 0 || alone != 2) {
					t.Errorf("logged %q", out.messages())
				}
			})
		})
	}
}

func TestTheEndOfAnOutageIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(44*time.Second + time.Millisecond)
		s.Mini.SetError("")
		unlock(t, closesSoon(t, "it gets in", waiter))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if want := "level=INFO msg=\"leased: Redis answers again after 4"; strings.Count(text.String(), want) != 1 {
			t.Errorf("logged\n%s", text.String())
		}
		if strings.Contains(text.String(), cannotSubscribe) {
			t.Errorf("no command worked either, and logged was\n%s", text.String())
		}
		if strings.Contains(text.String(), "let this client subscribe") {
			t.Errorf("a server that is loading forbids nothing, and logged was\n%s", text.String())
		}
	})
}

const answersAgain = "INFO leased: Redis answers again after "

// outageLines returns what out has of outages.
func outageLines(out *logs) (lines []string) {
	for _, line := range out.messages() {
		if strings.Contains(line, "Redis does not answer") || strings.Contains(line, answersAgain) {
			lines = append(lines, line)
		}
	}
	return lines
}

// A server that hangs has no command fail for 2 s at a time. Meanwhile the outage goes on, also if nothing
// but renewals could find out.
func TestTheLogSaysHowLongAServerHung(t *testing.T) {
	for what, waits := range map[string]bool{"holders only": false, "with a waiter": true} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				var way hole
				client := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute), out.option())
				l := lock(t, client.Mutex("x"))
				if waits {
					defer func(l *leased.Lease) { unlock(t, l) }(lock(t, newClient(t, s).Mutex("y")))
					ctx, cancel := context.WithCancel(context.Background())
					defer cancel()
					go func() { _, _ = client.Mutex("y").LockContext(ctx) }() // ends with ctx, at the end of the test
				}
				time.Sleep(19 * time.Second)
				way.shut.Store(true)
				time.Sleep(12 * time.Second)
				way.shut.Store(false)
				time.Sleep(20 * time.Second)
				unlock(t, l)
				lines := outageLines(&out)
				if len(lines) != 2 || !strings.HasPrefix(lines[1], answersAgain) {
					t.Fatalf("logged %q", lines)
				}
				// The first renewal that fails is sent within a second, and one that is answered within 2 s
				// of the end.
				var lasted int
				if _, err := fmt.Sscanf(strings.TrimPrefix(lines[1], answersAgain), "%d s", &lasted); err != nil || lasted < 11 || lasted > 14 {
					t.Errorf("logged %q (%v)", lines, err)
				}
			})
		})
	}
}

// Outages that follow each other have lines each, so that the last line says how things are.
func TestEachOutageHasTwoLines(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c, wire := onLine(t, s, out.option())
		unlock(t, lock(t, c.Mutex("x")))
		for range 3 {
			wire.cut()
			waiter := locking(t, c.Mutex("x"))
			time.Sleep(6 * time.Second)
			wire.mend()
			unlock(t, <-waiter)
			time.Sleep(8 * time.Second)
		}
		lines := outageLines(&out)
		for i, line := range lines {
			if strings.HasPrefix(line, answersAgain) != (i%2 == 1) {
				t.Errorf("line %d is %q", i, line)
			}
		}
		if len(lines) != 6 {
			t.Errorf("logged %q", lines)
		}
	})
}

// If nothing is sent for a time, nobody knows when the outage ended.
func TestTheLogSaysThatAnOutageLastedAtLeastSoLongIfNobodyAskedThen(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum's first command finds the servers still away, which is a failure")
		}
		var out logs
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), out.option())
		unlock(t, lock(t, c.Mutex("x")))
		way.shut.Store(true)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		time.Sleep(time.Hour)
		way.shut.Store(false)
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(6 * time.Second)
		lines := outageLines(&out)
		if last := lines[len(lines)-1]; !strings.HasPrefix(last, answersAgain) || !strings.HasSuffix(last, " s or more") {
			t.Errorf("logged %q", lines)
		}
	})
}

// A lock that was refused once is not asked for again, and another one is held and renewed.
func TestAnOutageLongAfterARefusalIsLoggedAsOneOfItsOwn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, hook, out := onRefusing(t, s)
		l := lock(t, c.Mutex("held"))
		time.Sleep(time.Second) // its owner has asked whether others wait
		hook.on.Store(true)
		if c.Mutex("x").TryLock() {
			t.Fatal("a server whose memory is full granted a lock")
		}
		hook.on.Store(false)
		time.Sleep(20 * time.Hour)
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		time.Sleep(15 * time.Second) // at least one renewal
		s.Mini.SetError("")
		time.Sleep(30 * time.Second)
		unlock(t, l)
		var took float64
		var ends []string
		for _, line := range out.messages() {
			if rest, ok := strings.CutPrefix(line, answersAgain); ok {
				ends = append(ends, rest)
			}
		}
		if len(ends) != 1 {
			t.Fatalf("logged %q", out.messages())
		}
		if _, err := fmt.Sscanf(ends[0], "%f s", &took); err != nil || took > 60 {
			t.Errorf("logged %q", out.messages())
		}
	})
}

// Nobody asks for a lock after the restart.
func TestTheEndOfAnOutageIsLoggedThoughATryWasRefusedInIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("the servers of a quorum refuse one by one, which has lines of its own")
		}
		var out logs
		c := newClient(t, s, out.option())
		l := lock(t, c.Mutex("held"))
		time.Sleep(time.Second)
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		time.Sleep(12 * time.Second) // at least one renewal
		if c.Mutex("x").TryLock() {
			t.Fatal("a server that is loading granted a lock")
		}
		s.Mini.SetError("")
		time.Sleep(5 * time.Minute)
		lines := outageLines(&out)
		if len(lines) == 0 || !strings.HasPrefix(lines[len(lines)-1], answersAgain) {
			t.Errorf("logged %q", out.messages())
		}
		unlock(t, l)
	})
}

// A server whose memory is full still says that a lock is held.
func TestAFullServerDoesNotAnswerAgainBecauseALockIsHeld(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, hook, out := onRefusing(t, s)
		l := lock(t, newClient(t, s).Mutex("held"))
		for range 20 {
			hook.on.Store(true)
			if c.Mutex("free").TryLock() {
				t.Fatal("a server whose memory is full granted a lock")
			}
			hook.on.Store(false)
			if c.Mutex("held").TryLock() {
				t.Fatal("two owners")
			}
			time.Sleep(10 * time.Second)
		}
		for _, line := range out.messages() {
			if strings.HasPrefix(line, answersAgain) {
				t.Errorf("logged %q", out.messages())
				break
			}
		}
		unlock(t, l)
	})
}

// A process that waits for another one to fail asks for its lock now and then, and never gets it.
func TestTheEndOfAnOutageIsLoggedThoughNoLockIsTakenAfterIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, hook, out := onRefusing(t, s)
		l := lock(t, newClient(t, s).Mutex("held"))
		for i := range 30 {
			hook.on.Store(i == 2) // a failover
			if c.Mutex("held").TryLock() {
				t.Fatal("two owners")
			}
			time.Sleep(10 * time.Second)
		}
		lines := outageLines(out)
		if len(lines) == 0 || !strings.HasPrefix(lines[len(lines)-1], answersAgain) {
			t.Errorf("logged %q", out.messages())
		}
		unlock(t, l)
	})
}

// refusing refuses single commands, as those are that take a lock, but no pipelines, as renewals are sent.
type refusing struct{ on atomic.Bool }

// onRefusing returns a client of a server that refuses while the hook is on, and its log.
func onRefusing(t *testing.T, s place) (*leased.Client, *refusing, *logs) {
	t.Helper()
	if s.members != nil {
		t.Skip("the servers of a quorum refuse one by one, which has lines of its own")
	}
	out, hook := &logs{}, &refusing{}
	rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	s.hook(rdb, hook)
	return clientOn(t, s, rdb, out.option()), hook, out
}

func (h *refusing) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *refusing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.on.Load() && strings.HasPrefix(cmd.Name(), "eval") {
			err := refusal("OOM command not allowed when used memory > 'maxmemory'.")
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}
func (h *refusing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if h.on.Load() && len(cmds) > 0 {
			if args := cmds[0].Args(); len(args) > 3 && fmt.Sprint(args[2]) != "1" { // a renewal has one key
				for _, cmd := range cmds {
					cmd.SetErr(refusal("OOM command not allowed when used memory > 'maxmemory'."))
				}
				return cmds[0].Err()
			}
		}
		return next(ctx, cmds)
	}
}

// refusal is an error reply of Redis.
type refusal string

func (r refusal) Error() string { return string(r) }
func (refusal) RedisError()     {}

func TestOutagesLessThanFiveSecondsApartAreOne(t *testing.T) {
	for pause, want := range map[time.Duration]int{4900 * time.Millisecond: 2, 5100 * time.Millisecond: 4} {
		t.Run(pause.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				c := newClient(t, s, out.option())
				warm(t, s, c)
				for range 2 {
					s.Mini.SetError("LOADING Redis is loading the dataset in memory")
					if _, err := c.Mutex("x").TryLockContext(context.Background()); err == nil {
						t.Error("locked")
					}
					s.Mini.SetError("")
					unlock(t, lock(t, c.Mutex("x")))
					time.Sleep(pause)
				}
				time.Sleep(10 * time.Second)
				synctest.Wait()
				lines := 0
				for _, line := range out.messages() {
					if strings.Contains(line, "cannot run lock commands now") || strings.Contains(line, answersAgain) {
						lines++
					}
				}
				if lines != want {
					t.Errorf("logged %q", out.messages())
				}
			})
		})
	}
}
