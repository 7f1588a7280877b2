package leased_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// What Unlock returns where Redis answers with errors, or too late.

const outOfOrder = "ERR out of order"

// The end of the maximum is a loss, whatever becomes of the release.
func TestAnUnlockAfterTheMaximumHoldTellsOfTheLossThoughTheReleaseFails(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := newClient(t, s, out.option(), leased.WithMaxHold(2*time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))
		err := c.Mutex("x").Do(context.Background(), func(ctx context.Context) error {
			<-ctx.Done()
			s.Mini.SetError(outOfOrder)
			return nil
		})
		isAll(t, err, leased.ErrLeaseLost, leased.ErrNotReleased)
		s.Mini.SetError("")
		c.Mutex("y").Lock()
		time.Sleep(2 * time.Second)
		s.Mini.SetError(outOfOrder)
		c.Mutex("y").Unlock() // has no error to return
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "not confirmed"); n != 1 {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
		rdb := s.connect(t)
		gone, err := s.open(t, rdb, out.option(), leased.WithMaxHold(2*time.Second), leased.WithLossHandler(func(leased.LossEvent) {}))
		must(t, err)
		defer gone.Close()
		s.Mini.SetError("")
		gone.Mutex("w").Lock()
		time.Sleep(2 * time.Second)
		for _, one := range s.alike(rdb) {
			must(t, one.Close())
		}
		gone.Mutex("w").Unlock()
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "a release was not confirmed, because a client was closed"); n != 1 {
			t.Errorf("logged %q", out.messages())
		}
		z := newClient(t, s, leased.WithMaxHold(2*time.Second), leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		s.Mini.SetError("")
		l := lock(t, z.Mutex("z"))
		<-l.Context().Done()
		s.Mini.SetError(outOfOrder)
		unlocked := make(chan error, 1)
		go func() { unlocked <- l.Unlock() }() // ended by Close, waited for through unlocked
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		isAll(t, l.UnlockContext(ctx), leased.ErrLeaseLost, leased.ErrNotReleased, context.DeadlineExceeded)
		if err := z.Close(); !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "not confirmed") || strings.Contains(err.Error(), "not unlocked") {
			t.Errorf("Close: %v", err)
		}
		isAll(t, <-unlocked, leased.ErrLeaseLost, leased.ErrNotReleased, leased.ErrClosed)
		s.Mini.SetError("")
		time.Sleep(time.Minute)
	})
}

// Nothing is known then of who had the lock, and the error also says why.
func TestAnUnlockThatRedisNeverAnswersTellsOfALossAndOfTheLastError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, wire := onLine(t, s, leased.WithReleaseTimeout(time.Hour), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		wire.cut()
		err := l.Unlock()
		isAll(t, err, leased.ErrLeaseLost, errCut)
		if !strings.Contains(err.Error(), errCut.Error()) {
			t.Errorf("it says %q", err)
		}
		wire.mend()
	})
}

// Only the canceler knows of the lock by then.
func TestShutdownWaitsForAnUnlockThatWaitsForItsCancel(t *testing.T) {
	const away, limit = time.Second, 3 * time.Second
	for _, back := range []bool{true, false} {
		t.Run(fmt.Sprintf("Redis comes back=%v", back), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				c := newClient(t, s, leased.WithReleaseTimeout(time.Minute))
				warm(t, s, c)
				l := take(t, c.Mutex("x").LockContext)
				s.Mini.SetError(outOfOrder)
				unlocked := make(chan error, 1)
				go func() { unlocked <- l.Unlock() }() // ended by Shutdown at the latest, waited for through unlocked
				synctest.Wait()
				if back {
					time.AfterFunc(away, func() { s.Mini.SetError("") })
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				began := time.Now()
				if err := c.Shutdown(ctx); (err == nil) != back {
					t.Errorf("Shutdown: %v", err)
				}
				err, took := <-unlocked, time.Since(began)
				if back && (err != nil || took < away || took >= limit || !s.clean(t, "x")) {
					t.Errorf("Unlock returned %v, Shutdown took %v", err, took)
				}
				if !back {
					isAll(t, err, leased.ErrNotReleased, leased.ErrClosed)
					if took != limit {
						t.Errorf("Shutdown took %v", took)
					}
				}
				s.Mini.SetError("")
				time.Sleep(time.Minute)
			})
		})
	}
}

// The second one asks when the first has handed it to the canceler.
func TestASecondUnlockOfWhatWasNotReleasedNamesNoTimeItDoesNotKnow(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		warm(t, s, c)
		mu := c.Mutex("x")
		l := take(t, mu.LockContext)
		s.Mini.SetError(outOfOrder)
		mu.Unlock()
		err := l.Unlock()
		isAll(t, err, leased.ErrNotReleased)
		if strings.Contains(err.Error(), "0001-") || errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("Unlock: %v", err)
		}
		s.Mini.SetError("")
		time.Sleep(time.Minute)
	})
}

// answerLosing loses the next commands to each server, or the answers to them.
type answerLosing struct {
	commands atServers // are not sent
	answers  atServers // single commands whose answers are lost
	batches  atServers // pipelines whose answers are lost, or single cancels on a quorum, which sends them so
	quorum   bool
}

type atServers [suiteMembers]atomic.Int32

func (at *atServers) Store(n int32) {
	for i := range at {
		at[i].Store(n)
	}
}

// lost returns on how many servers everything was lost that was to be.
func (h *answerLosing) lost() int {
	n := 0
	for i := range suiteMembers {
		if h.commands[i].Load()+h.answers[i].Load()+h.batches[i].Load() == 0 {
			n++
		}
	}
	return n
}

// losingAt is the hook of one server's client.
type losingAt struct {
	*answerLosing
	server int
}

func (h losingAt) DialHook(next redis.DialHook) redis.DialHook { return next }

// counts takes one of n, if there is one.
func (h losingAt) counts(at *atServers) bool {
	n := &at[h.server]
	for {
		left := n.Load()
		if left == 0 || n.CompareAndSwap(left, left-1) {
			return left > 0
		}
	}
}

func (h losingAt) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "evalsha" && cmd.Name() != "eval" {
			return next(ctx, cmd)
		}
		if h.counts(&h.commands) {
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		err := next(ctx, cmd)
		if (err == nil || !redis.HasErrorPrefix(err, "NOSCRIPT")) && (h.counts(&h.answers) || h.quorum && h.counts(&h.batches)) {
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

func (h losingAt) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if (err == nil || !redis.HasErrorPrefix(err, "NOSCRIPT")) && h.counts(&h.batches) {
			for _, cmd := range cmds {
				cmd.SetErr(io.ErrUnexpectedEOF)
			}
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

// onLosing returns a client whose commands can be lost.
func onLosing(t *testing.T, s place, opts ...leased.Option) (*leased.Client, *answerLosing) {
	rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	h := answerLosing{quorum: s.members != nil}
	for i, one := range s.alike(rdb) {
		one.AddHook(losingAt{&h, i})
	}
	c := clientOn(t, s, rdb, opts...)
	warm(t, s, c) // a client that has just begun asks once more than the tests count
	return c, &h
}

func TestAnUnlockWithoutAnswerIsNilWhereItIsProvedThatTheLockWasOurs(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		for what, lose := range map[string]func(*answerLosing){
			"the release ran":                  func(h *answerLosing) { h.answers.Store(1) },
			"the release was lost":             func(h *answerLosing) { h.commands.Store(1) },
			"an answer to the cancel was lost": func(h *answerLosing) { h.commands.Store(1); h.batches.Store(1) },
		} {
			for how, acquire := range map[string]func(c *leased.Client) *leased.Lease{
				"a writer": func(c *leased.Client) *leased.Lease { return take(t, c.RWMutex("x").LockContext) },
				"a reader": func(c *leased.Client) *leased.Lease { return take(t, c.RWMutex("x").RLockContext) },
				"a writer of the process after another": func(c *leased.Client) *leased.Lease {
					first := take(t, c.RWMutex("x").LockContext)
					next := taking(t, c.RWMutex("x").LockContext)
					unlock(t, first)
					return <-next
				},
			} {
				c, h := onLosing(t, s)
				l := acquire(c)
				lose(h)
				if err := l.Unlock(); err != nil {
					t.Errorf("%s, %s: %v", how, what, err)
				}
				if h.lost() < s.most() {
					t.Errorf("%s, %s: nothing was lost", how, what)
				}
				s.becomesClean(t, "x")
			}
		}
	})
}

func TestAnUnlockWithoutAnswerIsALossWhereTheLockMayHaveBeenAnothers(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var another *leased.Lease
		for what, meanwhile := range map[string]func(){
			"nobody remembers": func() {},
			"another owns it":  func() { another = lock(t, newClient(t, s).Mutex("x")) },
			"another had it":   func() { unlock(t, lock(t, newClient(t, s).Mutex("x"))) },
			"a foreign owner has it": func() {
				unlock(t, lock(t, newClient(t, s).Mutex("x")))
				s.rdb.Set(context.Background(), "x", "somebody", 0)
			},
		} {
			for _, lose := range []func(*answerLosing){
				func(h *answerLosing) { h.answers.Store(1) }, func(h *answerLosing) { h.commands.Store(1) }, func(h *answerLosing) { h.answers.Store(1); h.batches.Store(2) },
			} {
				lost := make(chan leased.LossEvent, 10)
				c, h := onLosing(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
				l := lock(t, c.Mutex("x"))
				time.Sleep(time.Millisecond) // no two grants are of one microsecond
				s.forget(t)
				meanwhile()
				value := s.value(t, "x")
				synctest.Wait() // or a command of another cause would be lost instead
				lose(h)
				err := l.Unlock()
				isAll(t, err, leased.ErrLeaseLost)
				if err != nil && (errors.Is(err, leased.ErrNotReleased) || !strings.Contains(err.Error(), "got no reply")) {
					t.Errorf("%s: %v", what, err)
				}
				if now := s.value(t, "x"); now != value {
					t.Errorf("%s: %q owns after %q", what, now, value)
				}
				time.Sleep(time.Millisecond)
				if len(lost) != 1 {
					t.Fatalf("%s: told of %d losses", what, len(lost))
				}
				if ev := <-lost; ev.Token != l.Token() || !strings.Contains(ev.Reason, "got no reply") {
					t.Errorf("%s: told of %+v", what, ev)
				}
				if another != nil {
					unlock(t, another)
					another = nil
				}
				s.rdb.FlushAll(context.Background())
			}
		}
	})
}

// The message of a grant can overtake a re-check whose answer is then lost. Whether that has granted the lock anew,
// after another owner, only the release can tell, and it hands the lock on at once.
func TestAnUnlockIsNilThoughARecheckHadNoAnswerAndOthersWait(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		if s.members != nil {
			t.Skip("a quorum, which may serve the third before the second then, has tests of its own")
		}
		for _, local := range []bool{false, true} { // whether a caller of its process waits, too
			owner := lock(t, newClient(t, s).Mutex("x"))
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			h := &answerHolding{held: make(chan struct{}), lose: make(chan struct{})}
			rdb.AddHook(h)
			c := clientOn(t, s, rdb)
			mu := c.Mutex("x", leased.WithLocalHandoffs(1, time.Millisecond))
			second := locking(t, mu)
			s.queued(t, "x", 1)
			third := locking(t, newClient(t, s).Mutex("x"))
			s.queued(t, "x", 2)
			h.next.Store(true)
			<-h.held // a re-check
			unlock(t, owner)
			l := <-second
			close(h.lose)
			var fourth <-chan *leased.Lease
			if local {
				fourth = locking(t, mu)
			}
			time.Sleep(2 * time.Millisecond) // longer than it may hand over within its process
			unlock(t, l)
			unlock(t, <-third)
			if local {
				unlock(t, <-fourth)
			}
			if n := c.Stats().Lost; n != 0 {
				t.Errorf("a caller of its process waits %v: %d losses", local, n)
			}
			s.becomesClean(t, "x")
		}
	})
}

// answerHolding holds up the answer to the next command until lose is closed, and loses it then.
type answerHolding struct {
	next atomic.Bool
	held chan struct{} // closed when an answer is held up
	lose chan struct{}
}

func (h *answerHolding) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *answerHolding) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() != "evalsha" || !h.next.CompareAndSwap(true, false) {
			return err
		}
		close(h.held)
		select {
		case <-h.lose:
		case <-ctx.Done():
		}
		cmd.SetErr(io.ErrUnexpectedEOF)
		return io.ErrUnexpectedEOF
	}
}

func (h *answerHolding) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Mutex.Unlock returns no error, so the loss handler is called as for any loss.
func TestAMutexWhoseUnlockProvedNothingTellsTheLossHandler(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		lost := make(chan leased.LossEvent, 10)
		c, h := onLosing(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
		mu := c.Mutex("x")
		mu.Lock()
		time.Sleep(time.Millisecond)
		s.forget(t)
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		h.answers.Store(1)
		mu.Unlock()
		time.Sleep(time.Millisecond)
		if len(lost) != 1 {
			t.Fatalf("told of %d losses", len(lost))
		}
		if n := c.Stats().Lost; n != 1 {
			t.Errorf("%d lost", n)
		}
	})
}

// How long Unlock waits says nothing of how long the server may take.
func TestAReleaseTimeoutDoesNotCutTheReleaseOff(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &faraway{Conn: conn, delay: 20 * time.Millisecond} })
		}), leased.WithReleaseTimeout(5*time.Millisecond), out.option())
		mine := lock(t, c.Mutex("x"))
		theirs := locking(t, newClient(t, s).Mutex("x"))
		s.queued(t, "x", 1)
		time.Sleep(time.Second) // the owner has been told
		began := time.Now()
		isAll(t, mine.Unlock(), leased.ErrNotReleased)
		if took := time.Since(began); took != 5*time.Millisecond {
			t.Errorf("Unlock took %v", took)
		}
		unlock(t, <-theirs)
		time.Sleep(time.Minute)
		if n := c.Stats().Lost; n != 0 || len(out.messages()) > 0 {
			t.Errorf("%d lost, logged: %q", n, out.messages())
		}
	})
}

// To make a connection takes several round trips, and so longer than Unlock waits if the server is far away.
func TestAReleaseThatMakesAConnectionIsNotCutOff(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			wrapConns(o, func(conn net.Conn) net.Conn { return &faraway{Conn: conn, delay: 350 * time.Millisecond} })
			o.ConnMaxIdleTime = 2 * time.Second
		}), out.option())
		next := newClient(t, s)
		for range 2 { // the first time, the scripts are loaded as well
			var all sync.WaitGroup
			for i := range 5 {
				name := fmt.Sprint("lock ", i)
				mine := lock(t, c.Mutex(name))
				theirs := locking(t, next.Mutex(name))
				s.queued(t, name, 1)
				all.Go(func() {
					time.Sleep(5 * time.Second)
					if err := mine.Unlock(); err != nil && !errors.Is(err, leased.ErrNotReleased) {
						t.Errorf("Unlock: %v", err)
					}
				})
				all.Go(func() { unlock(t, <-theirs) })
			}
			all.Wait()
			time.Sleep(time.Minute)
		}
		if n := c.Stats().Lost; n != 0 || len(out.messages()) > 0 {
			t.Errorf("%d lost, logged: %q", n, out.messages())
		}
	})
}

func TestUnlockInAnOutageSaysNotReleasedAndTheClientReleasesLater(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		strain := redistest.NewStrain(t)
		wire := s.proxy(t)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr })
		c := clientOn(t, s, rdb, leased.WithTTL(time.Hour), leased.WithReleaseTimeout(150*time.Millisecond))
		for what, unlock := range map[string]func(l *leased.Lease) error{
			"Lease.Unlock": (*leased.Lease).Unlock,
			"Mutex.Unlock": func(l *leased.Lease) error { c.Mutex("x").Unlock(); return l.Unlock() },
		} {
			l := lock(t, c.Mutex("x"))
			wire.BlackHole()
			began := time.Now()
			err := unlock(l)
			if what == "Lease.Unlock" && !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("%s: %v", what, err)
			}
			if took := time.Since(began); took < 150*time.Millisecond || took > time.Second+strain.Since(began) {
				t.Errorf("%s took %v", what, took)
			}
			if s.value(t, "x") == "" {
				t.Fatal("the lock was released all the same: the test proves nothing")
			}
			if l.Context().Err() == nil {
				t.Errorf("%s: the lease's context goes on", what)
			}
			wire.Heal()
			wire.Cut()
			eventually(t, "the lock is released", func() bool { return s.value(t, "x") == "" })
		}
	})
}

func TestAnUnconfirmedReleaseThatRedisCarriedOutHarmsNobody(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr })
		c := clientOn(t, s, rdb, leased.WithReleaseTimeout(150*time.Millisecond))
		// The server knows the scripts then, however long it takes to learn them.
		unlock(t, lock(t, c.Mutex("x", leased.WithReleaseTimeout(patience))))
		l := lock(t, c.Mutex("x"))
		// A connection that is new would have no answer even to its greeting.
		eventually(t, "a connection is free for the release", func() bool { return rdb.PoolStats().IdleConns > 0 })
		wire.DropReplies()
		isAll(t, l.Unlock(), leased.ErrNotReleased)
		next := lock(t, newClient(t, s).Mutex("x"))
		untouched := s.unchanged(t, "x")
		wire.Heal()
		wire.Cut()
		if err := c.Close(); err != nil { // whatever it repeats, it has repeated
			t.Error(err)
		}
		untouched()
		unlock(t, next)
	})
}

// The pool has a connection that looks free, and finds it closed when it takes it.
func TestUnlockIsBoundedWhenItsConnectionIsDeadAndDialingHangs(t *testing.T) {
	t.Parallel()
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		s := placeAt(target, target.NewClient(t))
		wire := s.proxy(t)
		var shut atomic.Bool
		var once sync.Once
		noticed, open := make(chan struct{}), make(chan struct{})
		c, err := s.open(t, s.connect(t, func(o *redis.Options) {
			o.Addr = wire.Addr
			direct := redis.NewDialer(o)
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if shut.Load() {
					once.Do(func() { close(noticed) })
					select {
					case <-open:
					case <-ctx.Done():
					}
					return nil, errors.New("nobody there")
				}
				return direct(ctx, network, addr)
			}
		}), leased.WithKeyPrefix(s.Prefix), leased.WithReleaseTimeout(200*time.Millisecond), leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		shut.Store(true)
		wire.Cut()
		// The inbox's connection ends with those of the pool, and shows it by dialing anew.
		// If the others ended later, Unlock would notice one step later, with the same bound.
		closesSoon(t, "the inbox finds its connection closed", noticed)
		strain, began := redistest.NewStrain(t), time.Now()
		done := make(chan error, 1)
		go func() { done <- l.Unlock() }()
		isAll(t, closesSoon(t, "Unlock returns", done), leased.ErrNotReleased)
		if took := time.Since(began); took > 3*time.Second+strain.Since(began) { // dialing may take 5 s
			t.Errorf("Unlock, bounded by 200 ms, took %v", took)
		}
		close(open)
		_ = c.Close()
	})
}

// A cancel is under way when Shutdown gives up what is left to cancel, and fails afterwards.
func TestAnUnlockWhoseCancelOutlivesItsClientEnds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		c := clientOn(t, s, s.connect(t, way.change))
		warm(t, s, c)
		mu := c.Mutex("x")
		mu.Lock()
		way.start()
		unlocked := make(chan error, 1)
		go func() { unlocked <- mu.UnlockContext(context.Background()) }() // ended by Shutdown, waited for through unlocked
		time.Sleep(3 * time.Second)                                        // the release has failed after 2
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if err := c.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) {
			t.Errorf("Shutdown: %v", err)
		}
		select {
		case err := <-unlocked:
			isAll(t, err, leased.ErrNotReleased, leased.ErrClosed)
		case <-time.After(time.Hour):
			t.Error("an hour after the client was closed, its UnlockContext waits still")
		}
		way.end(t)
		time.Sleep(time.Minute)
	})
}

// It is the only one that is told: neither Unlock nor Do has said anything but that Redis did not answer.
func TestALossThatRedisTellsOfAfterUnlockHasStoppedWaitingIsReported(t *testing.T) {
	for what, use := range map[string]func(t *testing.T, mu *leased.Mutex, work func()){
		"Unlock": func(_ *testing.T, mu *leased.Mutex, work func()) {
			mu.Lock()
			work()
			mu.Unlock()
		},
		"Do": func(t *testing.T, mu *leased.Mutex, work func()) {
			must(t, mu.Do(context.Background(), func(context.Context) error { work(); return nil }))
		},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				told := make(chan leased.LossEvent, 9)
				c, wire := onLine(t, s, leased.WithLossHandler(func(ev leased.LossEvent) { told <- ev }))
				warm(t, s, c)
				var other *leased.Lease
				use(t, c.Mutex("x"), func() {
					time.Sleep(time.Millisecond) // or the other's token is the same
					s.forget(t)
					other = lock(t, newClient(t, s).Mutex("x"))
					wire.cut()
				})
				if !open(told) {
					t.Error("told of a loss before Redis has answered")
				}
				wire.mend()
				time.Sleep(time.Minute)
				if n := len(told); n != 1 || c.Stats().Lost != 1 {
					t.Errorf("told of %d losses, and %d are counted", n, c.Stats().Lost)
				}
				unlock(t, other)
			})
		})
	}
}

// Operators are told to go by the time in the error's text.
func TestAnUnlockThatIsNotConfirmedSaysByWhenTheLockExpires(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(ttl))
		warm(t, s, c)
		l := lock(t, c.Mutex("x"))
		granted := time.Now()
		time.Sleep(5 * time.Second)
		way.shut.Store(true)
		unlocked := time.Now()
		err := l.Unlock()
		way.shut.Store(false)
		isAll(t, err, leased.ErrNotReleased)
		_, text, _ := strings.Cut(fmt.Sprint(err), `release of lock "x" not confirmed by Redis; still trying; the lock expires by `)
		text, _, _ = strings.Cut(text, "Z")
		by, bad := time.Parse(time.RFC3339Nano, text+"Z")
		if bad != nil || by.Before(granted.Add(ttl)) || by.After(unlocked.Add(ttl)) {
			t.Errorf("granted at %v, unlocked at %v: %v", granted.UTC(), unlocked.UTC(), err)
		}
		time.Sleep(ttl)
	})
}

func TestUnlockContextSaysWhatUnlockPanicsWith(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		background := context.Background()
		rw := c.RWMutex("x")
		notLocked := func(err error) {
			t.Helper()
			isAll(t, err, leased.ErrNotLocked)
			if want := `leased: lock "x" not unlocked: not locked by this client`; err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
		notLocked(rw.UnlockContext(background))
		notLocked(rw.RUnlockContext(background))
		notLocked(c.Mutex("x").UnlockContext(background))

		rw.Lock()
		notLocked(rw.RUnlockContext(background))
		notLocked(other.Mutex("x").UnlockContext(background))
		must(t, rw.UnlockContext(background))
		rw.RLock()
		notLocked(rw.UnlockContext(background))
		must(t, rw.RUnlockContext(background))
		notLocked(rw.RUnlockContext(background))
		unlock(t, lock(t, other.Mutex("x"))) // it is free

		l := lock(t, c.Mutex("x"))
		must(t, c.Mutex("x").UnlockContext(background))
		if l.Context().Err() == nil {
			t.Error("the lease goes on")
		}
		must(t, l.Unlock())
		var none context.Context
		rw.Lock()
		if err := rw.UnlockContext(none); err == nil || errors.Is(err, leased.ErrNotLocked) {
			t.Errorf("without a context: %v", err)
		}
		rw.Unlock()
	})
}

func TestUnlockContextSaysThatTheLeaseWasLost(t *testing.T) {
	for _, read := range []bool{false, true} {
		inVirtualTime(t, func(t *testing.T, s place) {
			c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
			take, leave := waysIn(c.RWMutex("x"), read)
			take()
			s.Mini.FlushAll()
			err := leave(context.Background())
			isAll(t, err, leased.ErrLeaseLost)
			if !strings.HasPrefix(err.Error(), `leased: lock "x" lost (token `) {
				t.Errorf("read %v: %v", read, err)
			}
		})
	}
}

// waysIn returns how a writer, or a reader, locks and unlocks by name.
func waysIn(rw *leased.RWMutex, read bool) (take func(), leave func(context.Context) error) {
	if read {
		return rw.RLock, rw.RUnlockContext
	}
	return rw.Lock, rw.UnlockContext
}

func TestUnlockContextWaitsUntilItsContextEnds(t *testing.T) {
	for _, option := range []time.Duration{time.Millisecond, time.Minute} { // which does not matter
		for _, read := range []bool{false, true} {
			inTurn(t, func(t *testing.T, s place) { unlockContextWaits(t, s, option, read) })
		}
	}
}

func unlockContextWaits(t *testing.T, s place, option time.Duration, read bool) {
	wire := s.proxy(t)
	rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr; o.ContextTimeoutEnabled = true })
	c := clientOn(t, s, rdb, leased.WithReleaseTimeout(option))
	take, leave := waysIn(c.RWMutex("x"), read)
	take()
	wire.BlackHole()
	strain, began := redistest.NewStrain(t), time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	err := leave(ctx)
	isAll(t, err, leased.ErrNotReleased, context.DeadlineExceeded)
	// A command without answer takes 2 s.
	if took := time.Since(began); took < 100*time.Millisecond || took > time.Second+strain.Since(began) {
		t.Errorf("it took %v", took)
	}
	isAll(t, leave(ctx), leased.ErrNotLocked) // it was unlocked all the same
	wire.Heal()
	wire.Cut()
	unlock(t, lock(t, newClient(t, s).Mutex("x")))
}

func TestALeaseIsUnlockedWithAContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		var none context.Context
		if err := l.UnlockContext(none); err == nil {
			t.Error("without a context it returns nil")
		}
		must(t, l.UnlockContext(context.Background()))
		must(t, l.Unlock()) // a later call does nothing
		l = lock(t, c.Mutex("x"))
		s.Mini.FlushAll()
		for range 2 {
			isAll(t, l.UnlockContext(context.Background()), leased.ErrLeaseLost)
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		if l = new(leased.Lease); l.UnlockContext(context.Background()) == nil || l.UnlockContext(none) == nil {
			t.Error("a lease that was not made is unlocked")
		}
	})
}

// What another call of the same lease waits for is not this one's affair.
func TestASecondUnlockWaitsNoLongerThanItMay(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hole
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute), leased.WithReleaseTimeout(4*time.Second))
		l := lock(t, c.Mutex("x"))
		warm(t, s, c)
		way.shut.Store(true)
		var all sync.WaitGroup
		check := func(call func() error, want time.Duration, is ...error) {
			all.Go(func() {
				began := time.Now()
				err := call()
				if took := time.Since(began); took != want {
					t.Errorf("it returned %v after %v, want %v", err, took, want)
				}
				isAll(t, err, append(is, leased.ErrNotReleased)...)
				if errors.Is(err, leased.ErrLeaseLost) || !strings.Contains(err.Error(), `lock "x"`) {
					t.Errorf("it returned %v", err)
				}
			})
			synctest.Wait()
		}
		within := func(limit time.Duration) func() error {
			return func() error {
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				return l.UnlockContext(ctx)
			}
		}
		check(within(6*time.Second), 6*time.Second, context.DeadlineExceeded)
		check(l.Unlock, 4*time.Second)
		check(within(50*time.Millisecond), 50*time.Millisecond, context.DeadlineExceeded)
		check(within(0), 0, context.DeadlineExceeded)
		check(within(time.Hour), 6*time.Second, context.DeadlineExceeded) // that of the first
		all.Wait()
		before := l.Unlock()
		isAll(t, before, leased.ErrNotReleased)
		way.shut.Store(false)
		if after := l.Unlock(); after != before { // the very same error
			t.Errorf("a later call returned %v", after)
		}
		time.Sleep(5 * time.Second) // until it is released
	})
}

func TestALeaseIsUnlockedThoughItsContextHasEnded(t *testing.T) {
	inTurn(t, func(t *testing.T, s place) {
		wire := s.proxy(t)
		rdb := s.connect(t, func(o *redis.Options) { o.Addr = wire.Addr; o.ContextTimeoutEnabled = true })
		l := lock(t, clientOn(t, s, rdb, leased.WithReleaseTimeout(time.Hour)).Mutex("x"))
		wire.BlackHole()
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		err := l.UnlockContext(ended)
		isAll(t, err, leased.ErrNotReleased, context.Canceled)
		if again := l.Unlock(); again != err { // the very same error
			t.Errorf("a later Unlock returned %v", again)
		}
		wire.Heal()
		wire.Cut()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
	})
}
