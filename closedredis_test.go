package leased_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func TestAClosedRedisClientIsAnErrorAtOnce(t *testing.T) {
	for _, own := range []bool{true, false} {
		inVirtualTime(t, func(t *testing.T, s place) {
			var out logs
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = own })
			c, err := leased.New(rdb, out.option(), leased.WithReleaseTimeout(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			l := lock(t, c.Mutex("held"))
			began := time.Now()
			must(t, rdb.Close())
			_, err = c.Mutex("x").LockContext(context.Background())
			isAll(t, err, leased.ErrNotAcquired, leased.ErrClosed, redis.ErrClosed)
			if err != nil && !strings.Contains(err.Error(), "the Redis client is closed") {
				t.Error(err)
			}
			_, err = c.Mutex("x").TryLockContext(context.Background())
			isAll(t, err, redis.ErrClosed)
			for _, f := range []func(){c.Mutex("x").Lock, c.RWMutex("x").RLock, func() { c.Mutex("x").TryLock() }} {
				got, _ := panics(f).(error)
				isAll(t, got, redis.ErrClosed)
			}
			isAll(t, l.Unlock(), leased.ErrNotReleased, redis.ErrClosed)
			_, err = c.Inspect(context.Background(), "x")
			isAll(t, err, redis.ErrClosed)
			if took := time.Since(began); took != 0 {
				t.Errorf("took %v", took)
			}
			synctest.Wait() // the log has a goroutine of its own
			if n := out.count(slog.LevelError, "closed before"); n != 1 {
				t.Errorf("logged %q", out.messages())
			}
		})
	}
}

func TestAnExhaustedPoolIsSaidToBeExhausted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.PoolSize = 2 })
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Second)
		var taken []*redis.Conn
		for range 2 {
			conn := rdb.Conn()
			must(t, conn.Ping(context.Background()).Err())
			taken = append(taken, conn)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, context.DeadlineExceeded, redis.ErrPoolTimeout)
		if err != nil && !strings.Contains(err.Error(), "pool of 2 is exhausted") {
			t.Error(err)
		}
		for _, conn := range taken {
			must(t, conn.Close())
		}
		time.Sleep(time.Minute)
	})
}
