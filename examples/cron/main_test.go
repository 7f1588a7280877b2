package main

import (
	"context"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/internal/testclient"
)

// The clocks of three machines differ: each looks when the one before it is done already.
func TestOfThreeMachinesWhoseClocksDifferOneRunsTheJob(t *testing.T) {
	_, rdb := testclient.Redis(t)
	const hold = 300 * time.Millisecond
	var machines []*leased.Client
	for range 3 {
		machines = append(machines, testclient.Process(t, rdb))
	}
	minute := func(opts ...leased.LockOption) (runs int) {
		for _, machine := range machines {
			ran, err := once(t.Context(), machine.Mutex("cron:cleanup", opts...), func(context.Context) error { return nil })
			if err != nil {
				t.Error(err)
			}
			if ran {
				runs++
			}
		}
		return runs
	}
	for n := range 2 {
		began := time.Now()
		if runs := minute(leased.WithMinHold(hold)); runs != 1 && time.Since(began) < hold {
			t.Errorf("in minute %d the job ran %d times", n, runs)
		}
		// The next minute begins when the lock is free again, for which this one queues.
		if err := machines[0].Mutex("cron:cleanup").Do(t.Context(), func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	if runs := minute(); runs != 3 {
		t.Errorf("without WithMinHold the job ran %d times, so this test shows nothing", runs)
	}
}

func TestTheProgramRunsTheJobAndEnds(t *testing.T) {
	server, _ := testclient.Redis(t)
	ctx, stop := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer stop()
	if err := run(ctx, server.Addr, 100*time.Millisecond); err != nil {
		t.Error(err)
	}
}
