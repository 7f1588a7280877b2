// Command migrate shows the way from other lock libraries to Leased: old.go has the old code,
// new.go the new one. Both use the same key, and exclude each other, so that a service can be
// rolled out process by process. The program lets them all count in one Redis, at once.
//
//	go run ./migrate -redis localhost:6379
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis; the keys counter and counter-lock are replaced")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		log.Fatal(err)
	}
}

// lockName is the lock's name, and its key in Redis, for all libraries.
const lockName = "counter-lock"

func run(ctx context.Context, address string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb) // no WithKeyPrefix, unless the old names have that prefix too
	if err != nil {
		return err
	}
	if err := rdb.Del(ctx, lockName, "counter").Err(); err != nil {
		return err
	}
	ways := []func(context.Context, func(context.Context) error) error{
		func(ctx context.Context, work func(context.Context) error) error { return withRedsync(ctx, rdb, work) },
		func(ctx context.Context, work func(context.Context) error) error {
			return withRedislock(ctx, rdb, work)
		},
		func(ctx context.Context, work func(context.Context) error) error {
			return withLeased(ctx, locks, work)
		},
	}
	var all sync.WaitGroup
	failures := make(chan error, len(ways))
	for _, way := range ways {
		all.Go(func() { failures <- takeTurns(ctx, rdb, way) })
	}
	all.Wait()
	close(failures)
	for e := range failures {
		err = errors.Join(err, e)
	}
	n, e := rdb.Get(ctx, "counter").Int()
	fmt.Printf("%d ways took %d turns each, and counted to %d\n", len(ways), turns, n)
	return errors.Join(err, e, locks.Close(), rdb.Close())
}

const turns = 10

// takeTurns counts under a lock, by reading and writing, which loses counts without one.
// The pause between two turns leaves the lock free: see docs/migration.md on why.
func takeTurns(ctx context.Context, rdb *redis.Client, way func(context.Context, func(context.Context) error) error) error {
	for range turns {
		err := way(ctx, func(ctx context.Context) error {
			n, err := rdb.Get(ctx, "counter").Int()
			if err != nil && !errors.Is(err, redis.Nil) {
				return err
			}
			time.Sleep(time.Millisecond)
			return rdb.Set(ctx, "counter", n+1, 0).Err()
		})
		if err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}
