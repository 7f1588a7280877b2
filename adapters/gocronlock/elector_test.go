package gocronlock_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gocronlock"
	"github.com/leasedmutex/leased/leasedtest"
)

// A candidate is a process whose scheduler runs two jobs each minute if it is the leader.
type candidate struct {
	client  *leased.Client
	elector *gocronlock.Elector
	stop    func()
	runs    atomic.Int32
}

func newCandidate(t *testing.T, server *leasedtest.Server) *candidate {
	t.Helper()
	c := &candidate{client: server.Client()}
	c.elector = gocronlock.NewElector(c.client.Mutex("leader"))
	s, err := gocron.NewScheduler(gocron.WithDistributedElector(c.elector))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		if _, err := s.NewJob(gocron.DurationJob(time.Minute), gocron.NewTask(func() { c.runs.Add(1) }), gocron.WithName(name)); err != nil {
			t.Fatal(err)
		}
	}
	c.stop = sync.OnceFunc(func() {
		if err := s.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		c.stop()
		if err := c.elector.Resign(); err != nil && !errors.Is(err, leased.ErrLeaseLost) {
			t.Error(err)
		}
	})
	s.Start()
	return c
}

// leader returns the one of cs that has run jobs since their counts were before, and fails unless
// it ran both.
func leader(t *testing.T, cs []*candidate, before []int32) int {
	t.Helper()
	found := -1
	for i, c := range cs {
		switch n := c.runs.Load() - before[i]; {
		case n == 0:
		case n == 2 && found == -1:
			found = i
		default:
			t.Errorf("process %d ran %d jobs of a minute, after process %d", i, n, found)
		}
	}
	if found == -1 {
		t.Error("no process ran a job")
	}
	return found
}

func counts(cs []*candidate) []int32 {
	all := make([]int32, len(cs))
	for i, c := range cs {
		all[i] = c.runs.Load()
	}
	return all
}

// aMinute lets the jobs of a minute run, and returns which process ran them.
func aMinute(t *testing.T, cs []*candidate) int {
	t.Helper()
	before := counts(cs)
	time.Sleep(time.Minute)
	synctest.Wait()
	return leader(t, cs, before)
}

func TestOneLeaderRunsAllJobsUntilItResigns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var cs []*candidate
		for range 5 {
			cs = append(cs, newCandidate(t, server))
		}
		time.Sleep(30 * time.Second) // between two runs
		first := aMinute(t, cs)
		for range 10 {
			if now := aMinute(t, cs); now != first {
				t.Fatalf("process %d became leader although process %d had not resigned", now, first)
			}
		}
		cs[first].stop()
		if err := cs[first].elector.Resign(); err != nil {
			t.Fatal(err)
		}
		if now := aMinute(t, cs); now == first {
			t.Error("the leader that resigned ran jobs")
		}
	})
}

// The second process's clock is behind: its jobs are due two seconds later. The first one runs a job, and resigns
// before it is due there.
func TestARunBetweenTwoLeadersWhoseClocksDifferIsDoneTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		ahead := newCandidate(t, server)
		time.Sleep(2 * time.Second)
		behind := newCandidate(t, server)
		time.Sleep(time.Minute - time.Second) // a second after the first one's run
		synctest.Wait()
		if n := ahead.runs.Load(); n == 0 {
			t.Fatal("the leader has run nothing")
		}
		ahead.stop()
		if err := ahead.elector.Resign(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if a, b := ahead.runs.Load(), behind.runs.Load(); a != b {
			t.Errorf("the first one ran %d jobs, and the second one %d", a, b)
		}
		behind.stop()
	})
}

func TestAnotherProcessBecomesLeaderWhenTheLeaderDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		cs := []*candidate{newCandidate(t, server), newCandidate(t, server)}
		time.Sleep(30 * time.Second)
		first := aMinute(t, cs)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := cs[first].client.Shutdown(ctx); err == nil {
			t.Error("Shutdown says nothing of the lease that is left")
		}
		if now := aMinute(t, cs); now == first {
			t.Error("the dead leader ran jobs")
		}
	})
}

func TestALeaderThatLostItsLeaseStandsForElectionAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		cs := []*candidate{newCandidate(t, server)}
		time.Sleep(30 * time.Second)
		aMinute(t, cs)
		other := gocronlock.NewElector(server.Client().Mutex("leader"))
		if err := other.IsLeader(t.Context()); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("IsLeader beside a leader returned %v, want ErrLocked", err)
		}
		if _, err := server.Client().ForceUnlock(t.Context(), "leader"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := other.IsLeader(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := cs[0].elector.IsLeader(t.Context()); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("IsLeader after a loss to another leader returned %v, want ErrLocked", err)
		}
		if err := other.Resign(); err != nil {
			t.Error(err)
		}
		aMinute(t, cs)
	})
}

func TestAllCallersOfALeaderAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		elector := gocronlock.NewElector(server.Client().Mutex("leader"))
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := elector.IsLeader(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := elector.Resign(); err != nil {
			t.Error(err)
		}
		if err := elector.Resign(); err != nil {
			t.Errorf("Resign of one that is not the leader returned %v", err)
		}
	})
}

func TestAnElectionWithoutAServerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		elector := gocronlock.NewElector(server.Client().Mutex("leader"))
		start := server.Stop()
		if err := elector.IsLeader(t.Context()); err == nil || errors.Is(err, leased.ErrLocked) {
			t.Errorf("IsLeader without a server returned %v", err)
		}
		start()
		if err := elector.IsLeader(t.Context()); err != nil {
			t.Error(err)
		}
		if err := elector.Resign(); err != nil {
			t.Error(err)
		}
	})
}

// hang is a hook that keeps scripts from being sent until it is closed, or their context ends.
type hang chan struct{}

func (h hang) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h hang) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			select {
			case <-h:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return next(ctx, cmd)
	}
}

func (h hang) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// whileRedisHangs runs f in a bubble with an elector whose Redis hangs until f closes h. f leaves this process
// as the leader, which resigns after it.
func whileRedisHangs(t *testing.T, f func(t *testing.T, elector *gocronlock.Elector, h hang)) {
	synctest.Test(t, func(t *testing.T) {
		rdb := leasedtest.NewServer(t).Redis()
		h := make(hang)
		rdb.AddHook(h)
		client, err := leased.New(rdb)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		elector := gocronlock.NewElector(client.Mutex("leader"))
		f(t, elector, h)
		if err := elector.Resign(); err != nil {
			t.Error(err)
		}
	})
}

func TestACallBehindAnotherOneEndsWithItsContext(t *testing.T) {
	whileRedisHangs(t, func(t *testing.T, elector *gocronlock.Elector, h hang) {
		first := make(chan error)
		go func() { first <- elector.IsLeader(t.Context()) }()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := elector.IsLeader(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("IsLeader behind a call that hangs returned %v after its context was canceled", err)
		}
		close(h)
		if err := <-first; err != nil {
			t.Error(err)
		}
	})
}

// Jobs that are due at once would otherwise be late by two seconds for each one before them.
func TestCallersAtTheSameTimeShareOneTryOfARedisThatHangs(t *testing.T) {
	whileRedisHangs(t, func(t *testing.T, elector *gocronlock.Elector, h hang) {
		began := time.Now()
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				err := elector.IsLeader(t.Context())
				if took := time.Since(began); err == nil || errors.Is(err, leased.ErrLocked) || took > 3*time.Second {
					t.Errorf("IsLeader returned %v after %v", err, took)
				}
			})
		}
		wg.Wait()
		close(h)
		if err := elector.IsLeader(t.Context()); err != nil {
			t.Errorf("once Redis answered, IsLeader returned %v", err)
		}
	})
}

func TestACallBehindOneThatWasCanceledAsksRedisItself(t *testing.T) {
	whileRedisHangs(t, func(t *testing.T, elector *gocronlock.Elector, h hang) {
		ctx, cancel := context.WithCancel(t.Context())
		first, second := make(chan error), make(chan error)
		go func() { first <- elector.IsLeader(ctx) }()
		synctest.Wait()
		go func() { second <- elector.IsLeader(t.Context()) }()
		synctest.Wait()
		cancel()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("the call that was canceled returned %v", err)
		}
		close(h)
		if err := <-second; err != nil {
			t.Errorf("the one behind it returned %v", err)
		}
	})
}

// asked counts the errors of an elector.
type asked struct {
	gocron.Elector
	failed atomic.Int32
}

func (e *asked) IsLeader(ctx context.Context) error {
	err := e.Elector.IsLeader(ctx)
	if err != nil {
		e.failed.Add(1)
	}
	return err
}

func TestWithoutRedisAnElectorsErrorIsToldToNoListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		elector := &asked{Elector: gocronlock.NewElector(server.Client().Mutex("leader"))}
		defer server.Stop()()
		s, err := gocron.NewScheduler(gocron.WithDistributedElector(elector))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
		}()
		told := func(uuid.UUID, string, error) { t.Error("a listener was told") }
		if _, err := s.NewJob(gocron.DurationJob(time.Minute), gocron.NewTask(func() { t.Error("the job ran") }),
			gocron.WithEventListeners(gocron.AfterLockError(told), gocron.AfterJobRunsWithError(told))); err != nil {
			t.Fatal(err)
		}
		s.Start()
		time.Sleep(90 * time.Second)
		if elector.failed.Load() == 0 {
			t.Error("the elector was not asked, or had no error")
		}
	})
}
