// Command leader runs a job in one process of many, for as long as that process lives. When
// it ends, another one takes over at once; when it dies, after the TTL.
//
//	go run ./leader -redis localhost:6379    # in several terminals; end one with Ctrl-C
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
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb, leased.WithTTL(10*time.Second)) // how long there is no leader if one dies
	if err != nil {
		return err
	}
	err = lead(ctx, locks.Mutex("scheduler"), func(ctx context.Context, token uint64) error {
		fmt.Println("leading, with token", token)
		<-ctx.Done() // stands for the job, which stops when its context ends
		fmt.Println("leading no more:", context.Cause(ctx))
		return nil
	})
	return errors.Join(err, locks.Close(), rdb.Close())
}

// lead waits until this process is the leader, and then calls job, whose context ends when
// it is not the leader anymore, or ctx ends. A leader that lost the lock waits for its
// turn again. lead returns the errors of job and of Unlock, even after ctx has ended, and nil if
// ctx ends while it waits. So a job that stops because its context ended should return nil.
//
// A leader that was stopped for a while, as by a suspended machine, may still be in job for
// a moment while the next one leads. What must not happen twice needs the token.
func lead(ctx context.Context, mu *leased.Mutex, job func(ctx context.Context, token uint64) error) error {
	for {
		led := false
		err := leadOnce(ctx, mu, func(ctx context.Context, token uint64) error {
			led = true
			return job(ctx, token)
		})
		switch {
		case ctx.Err() != nil && !led:
			return nil // it was told to end while it waited
		case ctx.Err() == nil && errors.Is(err, leased.ErrLeaseLost):
			log.Print("no longer the leader: ", err)
		default:
			return err // nil if the job is done
		}
	}
}

func leadOnce(ctx context.Context, mu *leased.Mutex, job func(ctx context.Context, token uint64) error) (err error) {
	lease, err := mu.LockContext(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lease.Unlock()) }()
	work, cancel := lease.With(ctx)
	defer cancel()
	return job(work, lease.Token())
}
