package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

const rawChannel = "raw"

// leastScript is the least that a script can do to hand a lock on: check who owns it,
// take the next waiter, make it the owner, notify it. It knows no tokens, no clocks and
// no dead waiters; it shows how much of a hand-off any script costs, and how much ours adds.
var leastScript = redis.NewScript(`
	if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
	redis.call('SET', KEYS[1], redis.call('LPOP', KEYS[2]), 'PX', ARGV[2])
	return redis.call('PUBLISH', ARGV[3], ARGV[1])`)

// handoff measures how long it takes from Unlock in this process until the next
// waiter runs in another, and beside it a message from one to the other. Before each
// measurement all processes are asleep, and then the server answers one command.
func handoff(b *bench) error {
	ctx := context.Background()
	other, err := spawn("waiters", b.server.Addr)
	if err != nil {
		return err
	}
	defer other.end()
	if _, err := other.hear(); err != nil {
		return err
	}
	c, err := b.client()
	if err != nil {
		return err
	}
	defer c.Close()

	settle := func() error {
		time.Sleep(time.Millisecond) // until the child is asleep in its read
		return b.rdb.LLen(ctx, rawChannel).Err()
	}
	message := func(send func() error) (time.Duration, error) {
		if err := other.tell("hear - 0"); err != nil {
			return 0, err
		}
		if err := settle(); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := send(); err != nil {
			return 0, err
		}
		at, err := other.instant()
		return at.Sub(began), err
	}
	publish := func() (time.Duration, error) {
		return message(func() error { return b.rdb.Publish(ctx, rawChannel, "x").Err() })
	}
	least := func() (time.Duration, error) {
		const owner = "leased1:w:30000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:" // as long as ours
		if err := errors.Join(b.rdb.Set(ctx, "least", owner, time.Minute).Err(), b.rdb.RPush(ctx, "least:queue", owner).Err()); err != nil {
			return 0, err
		}
		return message(func() error {
			return leastScript.Run(ctx, b.rdb, []string{"least", "least:queue"}, owner, "30000", rawChannel).Err()
		})
	}
	sample := 0
	pass := func(clients int) (time.Duration, spent, error) {
		sample++
		name := fmt.Sprintf("h%d", sample)
		l, err := c.Mutex(name).LockContext(ctx)
		if err != nil {
			return 0, spent{}, err
		}
		if err := other.tell("queue %s %d", name, clients); err != nil {
			return 0, spent{}, err
		}
		if err := untilQueued(ctx, b.rdb, name, clients, 100*time.Microsecond); err != nil {
			return 0, spent{}, err
		}
		before, err := spend(ctx, b.rdb, "evalsha")
		if err != nil {
			return 0, spent{}, err
		}
		if err := settle(); err != nil {
			return 0, spent{}, err
		}
		began := time.Now()
		if err := l.Unlock(); err != nil {
			return 0, spent{}, err
		}
		at, err := other.instant()
		if err != nil {
			return 0, spent{}, err
		}
		after, err := spend(ctx, b.rdb, "evalsha")
		return at.Sub(began), after.sub(before), err
	}

	for _, clients := range []int{1, 8, 64} {
		var messages, leasts, passes times
		var ratios, overLeast, calls []float64
		var scripts, publishes spent
		for round := range b.pick(10, 4) {
			var some, bare, others times
			before, err := spend(ctx, b.rdb, "publish")
			if err != nil {
				return err
			}
			for range 20 {
				d, err := publish()
				if err != nil {
					return err
				}
				some = append(some, d)
			}
			after, err := spend(ctx, b.rdb, "publish")
			if err != nil {
				return err
			}
			publishes = publishes.add(after.sub(before))
			for range 20 {
				d, err := least()
				if err != nil {
					return err
				}
				bare = append(bare, d)
			}
			for range 20 {
				d, s, err := pass(clients)
				if err != nil {
					return err
				}
				others, scripts = append(others, d), scripts.add(s)
				// Each hand-off is a release; the last release hands the lock to nobody.
				calls = append(calls, float64(s.calls-1)/float64(clients))
			}
			if round > 0 {
				messages, leasts, passes = append(messages, some...), append(leasts, bare...), append(passes, others...)
				ratios = append(ratios, ratio(others.at(.5), some.at(.5)))
				overLeast = append(overLeast, ratio(others.at(.5), bare.at(.5)))
			}
		}
		r := median(ratios)
		b.rows.add(fmt.Sprintf("to another process, %d waiting", clients), passes.String(),
			fmt.Sprintf("PUBLISH %v, × %.2f", messages, r), atMost("1.35 (p50)", r <= 1.35))
		b.rows.add("  beside the least script", "", fmt.Sprintf("%v, × %.2f", leasts, median(overLeast)), "")
		n := median(calls)
		b.rows.add("  script calls per hand-off", fmt.Sprintf("%.2f", n), "", "1: "+mark(n == 1))
		b.rows.add("  inside the server, mean of all releases", scripts.each(int(scripts.calls)), publishes.each(int(publishes.calls)), "")
	}
	return nil
}
