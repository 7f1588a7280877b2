package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased"
)

// stock is what is left of each item, kept in Redis beside the greatest token of a
// lease under which it was read.
type stock struct {
	rdb    *redis.Client
	locks  *leased.Client
	tracer trace.Tracer
	prefix string        // of all keys
	think  time.Duration // how long a decision takes
}

const stockLife = 10 * time.Minute // keys expire even if nobody deletes them

var (
	errSoldOut  = errors.New("sold out")
	errOvertook = errors.New("another lease was here: this order's was lost")
)

func stockKey(prefix, item string) string { return prefix + "stock:" + item }
func lockPrefix(prefix string) string     { return prefix + "lock:" }
func lockName(item string) string         { return "stock:" + item }

// reserve takes pieces of item and returns how many are left and the token of the
// lease. Read, think, write: without the lock two orders could read the same number.
//
// ctx bounds the wait and is the parent of the spans leased.wait and leased.hold.
// The work runs under lease.Context(), so its spans are children of leased.hold, and
// it stops when the lease is lost. The client who ordered may hang up meanwhile:
// that ends ctx and not the lease.
func (s *stock) reserve(ctx context.Context, item string, pieces int) (left int, token uint64, err error) {
	lease, err := s.locks.Mutex(lockName(item)).LockContext(ctx)
	if err != nil {
		return 0, 0, err
	}
	written := false
	defer func() {
		// It may be the only sign that another process was inside. What was written holds
		// all the same: nobody else had read the item since we did.
		if e := lease.Unlock(); !written {
			err = errors.Join(err, e)
		}
	}()

	work := lease.Context()
	if left, err = s.read(work, item, lease.Token()); err != nil {
		return 0, 0, err
	}
	if left < pieces {
		return left, 0, errSoldOut
	}
	if err := s.decide(work); err != nil {
		return 0, 0, err
	}
	if err := s.write(work, item, left-pieces, lease.Token()); err != nil {
		return 0, 0, err
	}
	written = true
	return left - pieces, lease.Token(), nil
}

// present is the first access to an item under a lease. It stores the lease's token and reads the stock,
// unless a lease with the same or a greater token has been here; from then on, leases with smaller tokens
// are refused. If tokens were compared at the write only, two owners that have read the same number could
// both write.
var present = redis.NewScript(`
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'token') or '0') >= tonumber(ARGV[1]) then return -1 end
redis.call('HSET', KEYS[1], 'token', ARGV[1])
return tonumber(redis.call('HGET', KEYS[1], 'left') or '0')`)

func (s *stock) read(ctx context.Context, item string, token uint64) (int, error) {
	ctx, span := s.tracer.Start(ctx, "stock.read")
	defer span.End()
	left, err := present.Run(ctx, s.rdb, []string{stockKey(s.prefix, item)}, token).Int()
	if err == nil && left < 0 {
		return 0, errOvertook
	}
	return left, err
}

// decide stands for what a shop has to think about: fraud, credit, shipping.
func (s *stock) decide(ctx context.Context) error {
	ctx, span := s.tracer.Start(ctx, "stock.decide")
	defer span.End()
	select {
	case <-time.After(s.think):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// put writes what is left, if no other lease was here since it was read.
var put = redis.NewScript(`
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'left', ARGV[1])
return 1`)

func (s *stock) write(ctx context.Context, item string, left int, token uint64) error {
	ctx, span := s.tracer.Start(ctx, "stock.write", trace.WithAttributes(attribute.Int("stock.left", left)))
	defer span.End()
	written, err := put.Run(ctx, s.rdb, []string{stockKey(s.prefix, item)}, left, token).Int()
	switch {
	case err != nil:
		return fmt.Errorf("cannot write the stock: %w", err)
	case written == 0:
		return errOvertook
	}
	return nil
}

// fill puts pieces of item on the shelf.
func fill(ctx context.Context, rdb *redis.Client, prefix, item string, pieces int) error {
	key := stockKey(prefix, item)
	if err := rdb.HSet(ctx, key, "left", pieces, "token", 0).Err(); err != nil {
		return err
	}
	return rdb.Expire(ctx, key, stockLife).Err()
}
