package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/measure/figures"
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
	p := &passer{b: b, other: other, client: c}
	for _, clients := range []int{1, 8, 64} {
		if err := p.pass(clients); err != nil {
			return err
		}
	}
	return nil
}

// passer hands on messages and locks to another process.
type passer struct {
	b      *bench
	other  *child
	client *leased.Client
	locks  int // how many there have been, each with a name of its own
}

// pass measures hand-offs while that many clients wait.
func (p *passer) pass(clients int) error {
	ctx, b := context.Background(), p.b
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
			d, err := p.publish(ctx)
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
			d, err := p.least(ctx)
			if err != nil {
				return err
			}
			bare = append(bare, d)
		}
		for range 20 {
			d, s, err := p.lock(ctx, clients)
			if err != nil {
				return err
			}
			others, scripts = append(others, d), scripts.add(s)
			// Each hand-off is a release; the last release hands the lock to nobody.
			calls = append(calls, float64(s.calls-1)/float64(clients))
		}
		if round > 0 {
			messages, leasts, passes = append(messages, some...), append(leasts, bare...), append(passes, others...)
			ratios = append(ratios, figures.Ratio(others.at(.5), some.at(.5)))
			overLeast = append(overLeast, figures.Ratio(others.at(.5), bare.at(.5)))
		}
	}
	r := figures.Median(ratios)
	b.rows.add(fmt.Sprintf("to another process, %d waiting", clients), passes.String(),
		fmt.Sprintf("PUBLISH %v, × %.2f", messages, r), atMost("1.35 (p50)", r <= 1.35))
	b.rows.add("  beside the least script", "", fmt.Sprintf("%v, × %.2f", leasts, figures.Median(overLeast)), "")
	n := figures.Median(calls)
	b.rows.add("  script calls per hand-off", fmt.Sprintf("%.2f", n), "", "1: "+mark(n == 1))
	b.rows.add("  inside the server, mean of all releases", scripts.each(int(scripts.calls)), publishes.each(int(publishes.calls)), "")
	return nil
}

// settle returns when the other process is asleep and the server has just answered.
func (p *passer) settle(ctx context.Context) error {
	time.Sleep(time.Millisecond) // until the child is asleep in its read
	return p.b.rdb.LLen(ctx, rawChannel).Err()
}

// message returns how long it takes until the other process has the message that send sends.
func (p *passer) message(ctx context.Context, send func() error) (time.Duration, error) {
	if err := p.other.tell("hear - 0"); err != nil {
		return 0, err
	}
	if err := p.settle(ctx); err != nil {
		return 0, err
	}
	began := time.Now()
	if err := send(); err != nil {
		return 0, err
	}
	at, err := p.other.instant()
	return at.Sub(began), err
}

// publish measures a bare message.
func (p *passer) publish(ctx context.Context) (time.Duration, error) {
	return p.message(ctx, func() error { return p.b.rdb.Publish(ctx, rawChannel, "x").Err() })
}

// least measures the message of leastScript.
func (p *passer) least(ctx context.Context) (time.Duration, error) {
	const owner = "leased1:w:30000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:" // as long as ours
	rdb := p.b.rdb
	if err := errors.Join(rdb.Set(ctx, "least", owner, time.Minute).Err(), rdb.RPush(ctx, "least:queue", owner).Err()); err != nil {
		return 0, err
	}
	return p.message(ctx, func() error {
		return leastScript.Run(ctx, rdb, []string{"least", "least:queue"}, owner, "30000", rawChannel).Err()
	})
}

// lock measures a hand-off to the first of that many waiting clients, and what the server
// spends on it and on those that follow.
func (p *passer) lock(ctx context.Context, clients int) (time.Duration, spent, error) {
	p.locks++
	name := fmt.Sprintf("h%d", p.locks)
	l, err := p.client.Mutex(name).LockContext(ctx)
	if err != nil {
		return 0, spent{}, err
	}
	if err := p.other.tell("queue %s %d", name, clients); err != nil {
		return 0, spent{}, err
	}
	if err := untilQueued(ctx, p.b.rdb, name, clients, 100*time.Microsecond); err != nil {
		return 0, spent{}, err
	}
	before, err := spend(ctx, p.b.rdb, "evalsha")
	if err != nil {
		return 0, spent{}, err
	}
	if err := p.settle(ctx); err != nil {
		return 0, spent{}, err
	}
	began := time.Now()
	if err := l.Unlock(); err != nil {
		return 0, spent{}, err
	}
	at, err := p.other.instant()
	if err != nil {
		return 0, spent{}, err
	}
	after, err := spend(ctx, p.b.rdb, "evalsha")
	return at.Sub(began), after.sub(before), err
}
