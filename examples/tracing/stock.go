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

// stock is what is left of each item, kept in Redis beside the token of the lease
// under which it was written last.
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
	errOvertook = errors.New("a later lease has written already: this order's was lost")
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
	// Its error says that the lease was lost or that Redis did not confirm the end.
	// Neither spoils what was written: write compares tokens.
	defer func() { _ = lease.Unlock() }()

	work := lease.Context()
	if left, err = s.read(work, item); err != nil {
		return 0, 0, err
	}
	if left < pieces {
		return left, 0, errSoldOut
	}
	if err := s.decide(work); err != nil {
		return 0, 0, err
	}
	return left - pieces, lease.Token(), s.write(work, item, left-pieces, lease.Token())
}

func (s *stock) read(ctx context.Context, item string) (int, error) {
	ctx, span := s.tracer.Start(ctx, "stock.read")
	defer span.End()
	left, err := s.rdb.HGet(ctx, stockKey(s.prefix, item), "left").Int()
	if errors.Is(err, redis.Nil) {
		return 0, nil
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

// newest writes what is left unless a later lease has written before. This is where
// a fencing token earns its keep: an owner that has lost the lock and does not know
// it yet is refused.
var newest = redis.NewScript(`
if tonumber(redis.call('HGET', KEYS[1], 'token') or '0') > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'left', ARGV[1], 'token', ARGV[2])
return 1`)

func (s *stock) write(ctx context.Context, item string, left int, token uint64) error {
	ctx, span := s.tracer.Start(ctx, "stock.write", trace.WithAttributes(attribute.Int("stock.left", left)))
	defer span.End()
	written, err := newest.Run(ctx, s.rdb, []string{stockKey(s.prefix, item)}, left, token).Int()
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
