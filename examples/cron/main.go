// Command cron runs a job each minute on one machine of many, by the machines' own clocks.
// These never quite agree, and a job can be shorter than the difference; so the lock stays
// taken for most of the minute, however soon the job is done.
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
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address, *every); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address string, every time.Duration) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb)
	if err != nil {
		return err
	}
	// The clocks of the machines may differ by a sixth of the period, 10 s of a minute.
	hold := (every * 5 / 6).Truncate(time.Millisecond)
	mu := locks.Mutex("cron:cleanup", leased.WithMinHold(hold))
	for ctx.Err() == nil {
		select {
		case <-time.After(time.Until(time.Now().Truncate(every).Add(every))): // the next full minute
			ran, err := once(ctx, mu, cleanUp)
			fmt.Println(time.Now().Format(time.TimeOnly), "ran here:", ran, err)
		case <-ctx.Done():
		}
	}
	return errors.Join(locks.Close(), rdb.Close())
}

func cleanUp(context.Context) error { return nil }

// once runs the job, unless another machine runs it now or has run it this time.
func once(ctx context.Context, mu *leased.Mutex, job func(context.Context) error) (ran bool, err error) {
	lease, err := mu.TryLockContext(ctx)
	if errors.Is(err, leased.ErrLocked) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, lease.Unlock()) }()
	work, cancel := lease.With(ctx)
	defer cancel()
	return true, job(work)
}
