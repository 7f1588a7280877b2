package main

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

// withRedsync is how redsync is used: on one server, with an expiry that nobody extends.
func withRedsync(ctx context.Context, rdb *redis.Client, work func(context.Context) error) (err error) {
	mu := redsync.New(goredis.NewPool(rdb)).NewMutex(lockName, redsync.WithExpiry(30*time.Second), redsync.WithTries(1000))
	if err := mu.LockContext(ctx); err != nil {
		return err
	}
	defer func() {
		_, e := mu.UnlockContext(ctx)
		err = errors.Join(err, e)
	}()
	return work(ctx)
}

// withRedislock is how bsm/redislock is used.
func withRedislock(ctx context.Context, rdb *redis.Client, work func(context.Context) error) (err error) {
	lock, err := redislock.Obtain(ctx, rdb, lockName, 30*time.Second, &redislock.Options{
		RetryStrategy: redislock.LimitRetry(redislock.LinearBackoff(50*time.Millisecond), 1000),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release(ctx)) }()
	return work(ctx)
}
