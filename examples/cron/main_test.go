package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/internal/testclient"
	"github.com/leasedmutex/leased/leasedtest"
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
			lock := machine.Mutex("cron:cleanup", opts...).TryLockContext
			ran, err := once(t.Context(), lock, time.Now().Add(testclient.Patience), cleanUp)
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

// What the machines of the tests in virtual time go by: the shares of the period are those of run.
const (
	every = time.Minute
	hold  = every / 2
	late  = every / 3
	apart = every / 6 // the clocks differ by less
)

// twoMachines returns what each of two machines calls when the job is due. They try, or wait.
func twoMachines(server *leasedtest.Server, waits bool) (first, second func(due time.Time) (bool, error)) {
	machine := func() func(time.Time) (bool, error) {
		locks := server.Client()
		mu := locks.Mutex("cron:cleanup", leased.WithMinHold(hold))
		lock := mu.TryLockContext
		if waits {
			lock = mu.LockContext
		}
		return func(due time.Time) (bool, error) { return once(context.Background(), lock, due.Add(late), cleanUp) }
	}
	return machine(), machine()
}

func TestAMachineThatWakesTooLateNeitherRepeatsTheJobNorCostsTheNextRun(t *testing.T) {
	for _, waits := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			first, second := twoMachines(leasedtest.NewServer(t), waits)
			due := time.Now()
			if ran, err := first(due); !ran || err != nil {
				t.Errorf("waits %v: the machine that was in time ran: %v, %v", waits, ran, err)
			}
			time.Sleep(hold + time.Second) // the other machine was paused for that long
			if ran, err := second(due); ran || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("waits %v: the late machine ran: %v, %v", waits, ran, err)
			}
			due = due.Add(every)
			time.Sleep(time.Until(due.Add(-apart))) // by a clock that is fast
			if ran, err := first(due.Add(-apart)); !ran || err != nil {
				t.Errorf("waits %v: the next run: %v, %v", waits, ran, err)
			}
		})
	}
}

// All machines may have been paused, so that the first to wake is as late as it may be.
func TestARunThatIsAsLateAsItMayBeIsNotRepeatedAndDoesNotCostTheNextOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := twoMachines(leasedtest.NewServer(t), false)
		due := time.Now()
		time.Sleep(late - time.Millisecond)
		if ran, err := first(due); !ran || err != nil {
			t.Errorf("the first machine ran: %v, %v", ran, err)
		}
		time.Sleep(apart) // the other one is as late, by a clock that is slow
		if ran, err := second(due.Add(apart)); ran || err != nil {
			t.Errorf("the second machine ran: %v, %v", ran, err)
		}
		due = due.Add(every - apart)
		time.Sleep(time.Until(due))
		if ran, err := second(due); !ran || err != nil {
			t.Errorf("the next run: %v, %v", ran, err)
		}
	})
}

func TestAMachineThatWaitsCanTellWhetherAnotherOneHasRunTheJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		first, second := twoMachines(server, true)
		due := time.Now()
		start := server.Stop()
		ran := make(chan bool, 2)
		for _, machine := range []func(time.Time) (bool, error){first, second} {
			go func() {
				did, err := machine(due)
				if err != nil {
					t.Error(err)
				}
				ran <- did
			}()
		}
		time.Sleep(late / 2)
		start()
		if one, two := <-ran, <-ran; one == two {
			t.Errorf("after an outage that ended in time, the machines ran the job: %v, %v", one, two)
		}
		time.Sleep(time.Until(due.Add(every)))
		due = time.Now()
		defer server.Stop()()
		if ran, err := first(due); ran || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, leased.ErrLocked) {
			t.Errorf("in an outage the machine ran the job: %v, %v", ran, err)
		}
	})
}

// Three machines that were started two seconds apart try every six seconds each.
func TestMachinesThatCountFromTheirOwnStartAreSpacedByTheMinimumHold(t *testing.T) {
	const pause, minutes = 6 * time.Second, 10
	for hold, want := range map[time.Duration]int{
		pause / 2:      minutes * 15, // every four seconds
		pause * 9 / 10: minutes * 10,
	} {
		synctest.Test(t, func(t *testing.T) {
			server := leasedtest.NewServer(t)
			var machines []*leased.Mutex
			for range 3 {
				machines = append(machines, server.Client().Mutex("cron:cleanup", leased.WithMinHold(hold)))
			}
			runs := 0
			for tick := range minutes * 30 {
				lock := machines[tick%3].TryLockContext
				ran, err := once(t.Context(), lock, time.Now().Add(time.Second), cleanUp)
				if err != nil {
					t.Error(err)
				}
				if ran {
					runs++
				}
				time.Sleep(pause / 3)
			}
			if runs != want {
				t.Errorf("with a minimum hold of %v the job ran %d times, want %d", hold, runs, want)
			}
		})
	}
}

// The owner that a minority of a quorum names has not got the lock.
func TestAMinorityOfAQuorumDoesNotTellThatTheJobHasRun(t *testing.T) {
	var servers []redis.UniversalClient
	for range 3 {
		_, rdb := testclient.Redis(t)
		servers = append(servers, rdb)
	}
	if err := servers[0].Set(t.Context(), "cron:cleanup", "somebody else", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := servers[2].Close(); err != nil { // this server cannot be reached
		t.Fatal(err)
	}
	locks, err := leased.NewQuorum(servers)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := locks.Mutex("cron:cleanup").LockContext(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, leased.ErrLocked) {
		t.Errorf("the wait ended with %v", err)
	}
}

func TestTheProgramRunsTheJobAndEnds(t *testing.T) {
	server, _ := testclient.Redis(t)
	ctx, stop := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer stop()
	if err := run(ctx, server.Addr, 100*time.Millisecond, true); err != nil {
		t.Error(err)
	}
}
