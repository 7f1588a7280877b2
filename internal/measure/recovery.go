package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

const killedTTL = time.Second

// killed measures how long after the end of a killed owner's TTL the next waiter runs.
func killed(b *bench) error {
	ctx := context.Background()
	c, err := b.client()
	if err != nil {
		return err
	}
	defer c.Close()
	var late times
	for range b.pick(8, 3) {
		owner, err := spawn("owner", b.server.Addr)
		if err != nil {
			return err
		}
		if _, err := owner.hear(); err != nil {
			return err
		}
		entered := make(chan time.Time, 1)
		var failed error
		go func() { // ended by the lease or its error, waited for below
			l, err := c.Mutex("x").LockContext(ctx)
			at := time.Now()
			if err == nil {
				err = l.Unlock()
			}
			failed = err
			entered <- at
		}()
		if err := untilQueued(ctx, b.rdb, "x", 1, 100*time.Microsecond); err != nil {
			return err
		}
		left, err := b.rdb.PTTL(ctx, "x").Result()
		if err != nil {
			return err
		}
		ends := time.Now().Add(left)
		owner.kill()
		at := <-entered
		if failed != nil {
			return failed
		}
		late = append(late, at.Sub(ends))
	}
	worst := late.at(1)
	b.rows.add(fmt.Sprintf("owner killed %d times: next runs after its TTL's end", len(late)),
		fmt.Sprintf("p50 %s max %s", short(late.at(.5)), short(worst)), "PTTL before the kill", atMost("50ms", worst <= 50*time.Millisecond))
	return nil
}

// cancellation measures how long after the end of its context LockContext returns. Each
// wait is measured by itself, because the contract's 10 ms are a bound on the worst of them;
// beside it is what a bare receive from a context's channel takes on this machine.
func cancellation(b *bench) error {
	ctx := context.Background()
	holder, err := b.client()
	if err != nil {
		return err
	}
	defer shut(holder)
	if _, err := holder.Mutex("x").LockContext(ctx); err != nil {
		return err
	}
	for _, state := range []string{"healthy", "stopped", "black-holed", "refusing"} {
		var w wires
		rdb := b.server.Client(func(o *redis.Options) { o.Dialer = w.dial })
		c, err := leased.New(rdb, leased.WithLogger(quiet))
		if err != nil {
			return err
		}
		l, err := c.Mutex("warm").LockContext(ctx)
		if err == nil {
			err = l.Unlock()
		}
		if err != nil {
			return err
		}
		switch state {
		case "stopped":
			b.server.Stop()
		case "black-holed", "refusing":
			w.cut(state)
		}
		var late, timer times
		for range b.pick(200, 50) {
			d := func(wait func(context.Context)) time.Duration {
				ctx, cancel := context.WithTimeout(ctx, 3*time.Millisecond)
				defer cancel()
				due, _ := ctx.Deadline()
				wait(ctx)
				return time.Since(due)
			}
			late = append(late, d(func(ctx context.Context) {
				if l, err := c.Mutex("x").LockContext(ctx); err == nil {
					_ = l.Unlock() // not reached: the holder keeps the lock
				}
			}))
			timer = append(timer, d(func(ctx context.Context) { <-ctx.Done() }))
		}
		if state == "stopped" {
			b.server.Cont()
		}
		shut(c)
		worst := late.at(1)
		b.rows.add("Redis "+state+": return after ctx's end", fmt.Sprintf("p50 %s max %s", short(late.at(.5)), short(worst)),
			fmt.Sprintf("<-ctx.Done() p50 %s max %s", short(timer.at(.5)), short(timer.at(1))), atMost("10ms", worst <= 10*time.Millisecond))
	}
	return nil
}

// shut closes a client, and hardly waits, because its server may be broken on purpose.
func shut(c *leased.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = c.Shutdown(ctx)
}

// wires are connections that can be cut.
type wires struct {
	mu    sync.Mutex
	state string
	all   []*wire
}

type wire struct {
	net.Conn
	w *wires
}

func (w *wires) now() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

func (w *wires) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if w.now() == "refusing" {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	k := &wire{c, w}
	w.all = append(w.all, k)
	return k, nil
}

func (w *wires) cut(state string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state = state
	if state == "refusing" {
		for _, k := range w.all {
			_ = k.Close() // go-redis closes it again
		}
	}
}

// Write discards what is sent into a black hole, so no answer comes back either.
func (k *wire) Write(p []byte) (int, error) {
	if k.w.now() == "black-holed" {
		return len(p), nil
	}
	return k.Conn.Write(p)
}
