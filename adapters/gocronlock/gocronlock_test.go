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

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gocronlock"
	"github.com/leasedmutex/leased/leasedtest"
)

const atLeast = 5 * time.Second

// process starts a scheduler, as another process would, that runs a job each minute.
func process(t *testing.T, client *leased.Client, name string, job func()) {
	t.Helper()
	s, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronlock.New(client, atLeast)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Jobs begin with each minute. While one runs, Shutdown polls without a pause, and no
		// time passes in the bubble.
		quiet := time.Now().Truncate(time.Minute).Add(30 * time.Second)
		time.Sleep(time.Until(quiet))
		if err := s.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.NewJob(gocron.DurationJob(time.Minute), gocron.NewTask(job), gocron.WithName(name)); err != nil {
		t.Fatal(err)
	}
	s.Start()
}

func TestOneOfSeveralProcessesRunsAJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var runs atomic.Int32
		for range 5 {
			process(t, server.Client(), "nightly", func() { runs.Add(1) })
		}
		for n := range int32(10) {
			time.Sleep(time.Minute)
			synctest.Wait()
			if got := runs.Load(); got != n+1 {
				t.Fatalf("after %d minutes there were %d runs", n+1, got)
			}
		}
	})
}

// gocron says nothing of a run that it skips, except to a listener.
func TestWithoutRedisARunIsSkippedOnEveryMachineAndOnlyAListenerIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var runs, skipped, told atomic.Int32
		for range 2 {
			s, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronlock.New(server.Client(), atLeast)))
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Shutdown(); err != nil {
					t.Error(err)
				}
			}()
			if _, err := s.NewJob(gocron.DurationJob(time.Minute), gocron.NewTask(func() { runs.Add(1) }), gocron.WithName("nightly"),
				gocron.WithEventListeners(gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) {
					if errors.Is(err, leased.ErrLocked) {
						skipped.Add(1)
					} else {
						told.Add(1)
					}
				}))); err != nil {
				t.Fatal(err)
			}
			s.Start()
		}
		time.Sleep(90 * time.Second)
		if runs.Load() != 1 || skipped.Load() != 1 || told.Load() != 0 {
			t.Errorf("with Redis: %d runs, %d skipped, %d errors", runs.Load(), skipped.Load(), told.Load())
		}
		start := server.Stop()
		time.Sleep(time.Minute)
		if runs.Load() != 1 || told.Load() != 2 {
			t.Errorf("without Redis: %d runs more, %d errors", runs.Load()-1, told.Load())
		}
		start()
		time.Sleep(time.Minute)
		if runs.Load() != 2 {
			t.Errorf("after the outage: %d runs more", runs.Load()-1)
		}
	})
}

// A clock that is behind is a scheduler that began later.
func TestAProcessWhoseClockIsBehindDoesNotRunAShortJobAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var runs atomic.Int32
		process(t, server.Client(), "nightly", func() { runs.Add(1) })
		time.Sleep(atLeast / 2)
		process(t, server.Client(), "nightly", func() { runs.Add(1) })
		time.Sleep(10*time.Minute + atLeast/2)
		if got := runs.Load(); got != 10 {
			t.Errorf("in ten minutes there were %d runs", got)
		}
	})
}

func TestALongJobRunsInOneProcessAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var inside, runs atomic.Int32
		var over atomic.Bool
		job := func() {
			if over.Load() {
				return
			}
			if inside.Add(1) != 1 {
				t.Error("two run at once")
			}
			runs.Add(1)
			time.Sleep(150 * time.Second)
			inside.Add(-1)
		}
		for range 3 {
			process(t, server.Client(), "nightly", job)
		}
		time.Sleep(time.Hour)
		over.Store(true)
		time.Sleep(5 * time.Minute) // the last one ends: Shutdown does not wait as long
		if got := runs.Load(); got < 15 {
			t.Errorf("in an hour there were %d runs", got)
		}
	})
}

func TestJobsOfOtherNamesRunBesideEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		var mu sync.Mutex
		runs := map[string]int{}
		for _, name := range []string{"a", "b"} {
			process(t, server.Client(), name, func() {
				mu.Lock()
				defer mu.Unlock()
				runs[name]++
			})
		}
		time.Sleep(time.Minute + time.Second)
		mu.Lock()
		defer mu.Unlock()
		if runs["a"] != 1 || runs["b"] != 1 {
			t.Errorf("there were %v runs", runs)
		}
	})
}

func TestAnotherProcessRunsTheJobOfOneThatDied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		dead := server.Client(leased.WithTTL(30 * time.Second))
		lease, err := dead.Mutex("nightly").LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := dead.Close(); err == nil {
			t.Error("Close says nothing of the lease that is left")
		}
		var runs atomic.Int32
		process(t, server.Client(), "nightly", func() { runs.Add(1) })
		time.Sleep(time.Minute + time.Second)
		if runs.Load() != 1 {
			t.Errorf("there were %d runs", runs.Load())
		}
		if err := lease.Unlock(); err == nil {
			t.Error("the dead process's Unlock returned nil")
		}
	})
}

func TestALockIsRefusedWhileItIsTakenAndWithoutAServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		here, there := gocronlock.New(server.Client(), 0), gocronlock.New(server.Client(), 0)
		lock, err := here.Lock(t.Context(), "nightly")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := there.Lock(t.Context(), "nightly"); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("a second lock returned %v, want ErrLocked", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := lock.Unlock(ctx); err != nil {
			t.Errorf("Unlock under a context that has ended returned %v", err)
		}
		defer server.Stop()()
		if _, err := there.Lock(t.Context(), "nightly"); err == nil || errors.Is(err, leased.ErrLocked) {
			t.Errorf("a lock without a server returned %v", err)
		}
	})
}
