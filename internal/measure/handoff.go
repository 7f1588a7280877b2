package main

import (
	"context"
	"fmt"
	"time"
)

const rawChannel = "raw"

// handoff measures how long it takes from Unlock in this process until the next
// waiter runs in another, beside a message from one to the other.
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

	message := func() (time.Duration, error) {
		if err := other.tell("hear - 0"); err != nil {
			return 0, err
		}
		time.Sleep(time.Millisecond) // the child is asleep in its read, as a waiter is
		if err := b.rdb.LLen(ctx, rawChannel).Err(); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := b.rdb.Publish(ctx, rawChannel, "x").Err(); err != nil {
			return 0, err
		}
		at, err := other.instant()
		return at.Sub(began), err
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
		for waits := int64(0); waits < int64(clients); {
			time.Sleep(100 * time.Microsecond)
			if waits, err = b.rdb.LLen(ctx, fmt.Sprintf("%s:{%s}:queue", name, name)).Result(); err != nil {
				return 0, spent{}, err
			}
		}
		time.Sleep(time.Millisecond)
		before, err := spend(ctx, b.rdb, "evalsha")
		if err != nil {
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
		var messages, passes times
		var ratios, calls []float64
		var scripts, publishes spent
		for round := range b.pick(10, 4) {
			var some, others times
			before, err := spend(ctx, b.rdb, "publish")
			if err != nil {
				return err
			}
			for range 20 {
				d, err := message()
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
				d, s, err := pass(clients)
				if err != nil {
					return err
				}
				others, scripts = append(others, d), scripts.add(s)
				// Each hand-off is a release; the last release hands the lock to nobody.
				calls = append(calls, float64(s.calls-1)/float64(clients))
			}
			if round > 0 {
				messages, passes = append(messages, some...), append(passes, others...)
				ratios = append(ratios, ratio(others.at(.5), some.at(.5)))
			}
		}
		r := median(ratios)
		b.rows.add(fmt.Sprintf("to another process, %d waiting", clients), passes.String(),
			fmt.Sprintf("PUBLISH %v, × %.2f", messages, r), atMost("1.35 (p50)", r <= 1.35))
		n := median(calls)
		b.rows.add("  script calls per hand-off", fmt.Sprintf("%.2f", n), "", "1: "+mark(n == 1))
		b.rows.add("  inside the server, mean of all releases", scripts.each(int(scripts.calls)), publishes.each(int(publishes.calls)), "")
	}
	return nil
}
