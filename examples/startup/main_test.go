package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/leasedmutex/leased/examples/internal/testclient"
)

func TestOfEightInstancesOneMigratesAndAllServe(t *testing.T) {
	_, rdb := testclient.Redis(t)
	var runs [2]atomic.Int32
	var inside, crowded atomic.Int32
	count := func(n int) step {
		return func(context.Context) error {
			if inside.Add(1) > 1 {
				crowded.Add(1)
			}
			runs[n].Add(1)
			inside.Add(-1)
			return nil
		}
	}
	var all sync.WaitGroup
	for range 8 {
		locks := testclient.Process(t, rdb)
		all.Go(func() {
			if err := migrate(t.Context(), locks, database{rdb}, []step{count(0), count(1)}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if runs[0].Load() != 1 || runs[1].Load() != 1 || crowded.Load() != 0 {
		t.Errorf("the steps ran %d and %d times, %d times two at once", runs[0].Load(), runs[1].Load(), crowded.Load())
	}
}

func TestAStepThatFailsIsTriedByTheNextInstance(t *testing.T) {
	_, rdb := testclient.Redis(t)
	broken := errors.New("broken")
	failing := []step{func(context.Context) error { return nil }, func(context.Context) error { return broken }}
	if err := migrate(t.Context(), testclient.Process(t, rdb), database{rdb}, failing); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	ran := 0
	again := []step{func(context.Context) error { t.Error("the first step ran twice"); return nil }, func(context.Context) error { ran++; return nil }}
	if err := migrate(t.Context(), testclient.Process(t, rdb), database{rdb}, again); err != nil || ran != 1 {
		t.Errorf("the step that had failed ran %d times: %v", ran, err)
	}
}

// The lock is taken away in the middle of a step, and another instance migrates.
func TestAnInstanceThatLostTheLockFindsTheSchemaUpToDate(t *testing.T) {
	_, rdb := testclient.Redis(t)
	first, second := testclient.Process(t, rdb), testclient.Process(t, rdb)
	nothing := func(context.Context) error { return nil }
	ran := 0
	overtaken := func(context.Context) error {
		ran++
		if _, err := second.ForceUnlock(context.Background(), "app:schema-lock"); err != nil {
			t.Error(err)
		}
		if err := migrate(context.Background(), second, database{rdb}, []step{nothing, nothing}); err != nil {
			t.Error(err)
		}
		return nil
	}
	again := func(context.Context) error { t.Error("the second step ran again"); return nil }
	if err := migrate(t.Context(), first, database{rdb}, []step{overtaken, again}); err != nil || ran != 1 {
		t.Errorf("its step ran %d times: %v", ran, err)
	}
	if version, err := (database{rdb}).version(t.Context()); version != 2 || err != nil {
		t.Errorf("the version is %d, %v", version, err)
	}
}

// The lock's key is lost, as in a failover, and both instances believe that they have the
// lock: nothing keeps a step from running twice at once.
func TestTwoInstancesInOneStepBothFindTheSchemaUpToDate(t *testing.T) {
	_, rdb := testclient.Redis(t)
	inside, both := make(chan struct{}, 2), make(chan struct{})
	steps := []step{func(context.Context) error {
		inside <- struct{}{}
		<-both
		return nil
	}, func(context.Context) error { return nil }}
	ended := make(chan error, 2)
	for range 2 {
		locks := testclient.Process(t, rdb)
		go func() { ended <- migrate(t.Context(), locks, database{rdb}, steps) }()
		<-inside
		if err := rdb.Del(t.Context(), "app:schema-lock").Err(); err != nil {
			t.Error(err)
		}
	}
	close(both)
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if version, err := (database{rdb}).version(t.Context()); version != 2 || err != nil {
		t.Errorf("the version is %d, %v", version, err)
	}
}

func TestAVersionThatAnotherInstanceHasStoredIsKept(t *testing.T) {
	_, rdb := testclient.Redis(t)
	db := database{rdb}
	for _, c := range []struct{ from, want int }{{0, 1}, {1, 2}, {0, 2}, {1, 2}} {
		if version, err := db.advance(t.Context(), c.from); version != c.want || err != nil {
			t.Errorf("from %d to %d, want %d: %v", c.from, version, c.want, err)
		}
	}
}

func TestTheProgramRuns(t *testing.T) {
	server, _ := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Error(err)
	}
}
