package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

const (
	lockName = "stock"
	// The keys of a demo that was killed expire after this time.
	keyLife = 10 * time.Minute
)

func stockKey(prefix string) string   { return prefix + "stock" }
func victimKey(prefix string) string  { return prefix + "victim" }
func goOnKey(prefix string) string    { return prefix + "go-on" } // a list, which the buyer who may go on empties
func lockPrefix(prefix string) string { return prefix + "lock:" }

// keys returns all keys that a demo can leave in Redis.
func keys(prefix string) []string {
	return append(lockKeys(lockPrefix(prefix), lockName), stockKey(prefix), victimKey(prefix), goOnKey(prefix))
}

// errSoldOut is the error of a buyer who comes too late.
var errSoldOut = errors.New("sold out")

// buyer is the shop's code, which every buyer of a process runs.
type buyer struct {
	rdb    redis.UniversalClient
	prefix string
	lock   *leased.Mutex
	say    func(message)
}

// visit is one buyer's purchase, with or without the lock around it.
func (b *buyer) visit(ctx context.Context, o order) error {
	if !o.Lock {
		return b.report(message{}, b.buy(ctx, nil))
	}

	start := time.Now()
	lease, err := b.lock.LockContext(ctx)
	if err != nil {
		return err
	}
	m := message{Wait: time.Since(start), Token: lease.Token()}
	work, cancel := lease.With(ctx) // work also ends when the lease is lost
	defer cancel()
	// The report comes before Unlock, so that the messages of a process are in the order of the
	// sales, and so that the parent knows everything that a process sold before it was killed.
	err = b.report(m, b.buy(work, func(seen int) error { return b.hold(work, o, m, seen) }))
	return errors.Join(err, lease.Unlock())
}

// purchase is the outcome of buy: the stock that it read, or why it bought nothing.
type purchase struct {
	seen int
	err  error
}

// buy reads the stock, thinks, and writes one less, which is correct for a buyer who is alone.
// pause, if not nil, is called between reading and writing.
func (b *buyer) buy(ctx context.Context, pause func(seen int) error) purchase {
	n, err := b.rdb.Get(ctx, stockKey(b.prefix)).Int()
	if err != nil {
		return purchase{err: err}
	}
	if n < 1 {
		return purchase{err: errSoldOut}
	}
	if pause != nil {
		if err := pause(n); err != nil {
			return purchase{err: err}
		}
	}
	if err := think(ctx); err != nil {
		return purchase{err: err}
	}
	return purchase{seen: n, err: b.rdb.Set(ctx, stockKey(b.prefix), n-1, keyLife).Err()}
}

func (b *buyer) report(m message, p purchase) error {
	switch {
	case p.err == nil:
		m.Kind, m.Seen = sold, p.seen
	case errors.Is(p.err, errSoldOut):
		m.Kind = refused
	default:
		return p.err
	}
	b.say(m)
	return nil
}

// hold keeps a buyer inside the lock if the order says so. Buyers who read one of the stocks in
// o.PauseAt stay until they are told to go on. The first buyer of all processes who reads the stock
// o.HoldAt inside the lock stays until its process is killed.
func (b *buyer) hold(ctx context.Context, o order, m message, seen int) error {
	if slices.Contains(o.PauseAt, seen) {
		m.Kind, m.Seen = inside, seen
		b.say(m)
		return b.awaitGoOn(ctx)
	}
	if seen != o.HoldAt {
		return nil
	}
	first, err := b.rdb.SetNX(ctx, victimKey(b.prefix), "taken", keyLife).Result()
	if err != nil || !first {
		return err
	}
	m.Kind, m.Seen = inside, seen
	b.say(m)
	<-ctx.Done()
	return context.Cause(ctx)
}

// think takes 2 to 5 ms, and fails if ctx ends.
func think(ctx context.Context) error {
	timer := time.NewTimer(2*time.Millisecond + rand.N(3*time.Millisecond))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
