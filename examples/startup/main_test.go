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
func TestAnInstanceThatLostTheLockCannotStoreItsVersion(t *testing.T) {
	_, rdb := testclient.Redis(t)
	first, second := testclient.Process(t, rdb), testclient.Process(t, rdb)
	nothing := func(context.Context) error { return nil }
	overtaken := func(context.Context) error {
		if err := second.ForceUnlock(context.Background(), "app:schema-lock"); err != nil {
			t.Error(err)
		}
		if err := migrate(context.Background(), second, database{rdb}, []step{nothing, nothing}); err != nil {
			t.Error(err)
		}
		return nil
	}
	if err := migrate(t.Context(), first, database{rdb}, []step{overtaken, nothing}); err == nil {
		t.Error("it noticed nothing")
	}
	if version, err := (database{rdb}).version(t.Context()); version != 2 || err != nil {
		t.Errorf("the version is %d, %v", version, err)
	}
}

func TestTheProgramRuns(t *testing.T) {
	server, _ := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Error(err)
	}
}
