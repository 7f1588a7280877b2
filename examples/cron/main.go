// Command cron runs a job each minute on one machine of many, by the machines' own clocks.
// These never quite agree, and a job can be shorter than the difference; so the lock stays
// taken for half of the minute, however soon the job is done. A machine that wakes too late,
// after a pause, skips the run.
//
//	go run ./cron -redis localhost:6379    # on several machines, or in several terminals
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis")
	every := flag.Duration("every", time.Minute, "how often the job runs")
	patient := flag.Bool("wait", false, "wait for a Redis that does not answer when the job is due")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address, *every, *patient); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address string, every time.Duration, patient bool) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb)
	if err != nil {
		return err
	}
	// A run may be late by a third of the period. Then the clocks of the machines may differ by a
	// sixth, 10 s of a minute, before a late run repeats the job or keeps the lock from the next run.
	hold, late := (every / 2).Truncate(time.Millisecond), every/3
	mu := locks.Mutex("cron:cleanup", leased.WithMinHold(hold))
	lock := mu.TryLockContext
	if patient {
		lock = mu.LockContext
	}
	for ctx.Err() == nil {
		due := time.Now().Truncate(every).Add(every) // the next full minute; this machine may wake much later
		select {
		case <-time.After(time.Until(due)):
			ran, err := once(ctx, lock, due.Add(late), cleanUp)
			fmt.Println(time.Now().Format(time.TimeOnly), "ran here:", ran, err)
		case <-ctx.Done():
		}
	}
	return errors.Join(locks.Close(), rdb.Close())
}

func cleanUp(context.Context) error { return nil }

// once runs the job, unless another machine runs it now or has run it this time, or latest is over.
// lock is TryLockContext of the job's Mutex, or LockContext.
func once(ctx context.Context, lock func(context.Context) (*leased.Lease, error), latest time.Time,
	job func(context.Context) error) (ran bool, err error) {
	inTime, cancel := context.WithDeadline(ctx, latest)
	lease, err := lock(inTime)
	cancel()
	if errors.Is(err, leased.ErrLocked) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, lease.Unlock()) }()
	if time.Now().After(latest) { // the machine stood still while it waited
		return false, context.DeadlineExceeded
	}
	work, cancel := lease.With(ctx)
	defer cancel()
	return true, job(work)
}
