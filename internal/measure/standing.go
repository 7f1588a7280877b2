package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/measure/figures"
	"github.com/leasedmutex/leased/internal/redistest"
)

// standing measures what a long queue that does not move costs the server. Each waiter is a
// client with a subscription of its own, as if it were alone in its process; a thousand of them
// share a process and its connections for commands. The server's processor time is measured, and
// not the time by the clock, because the waiters run on the same processors.
func standing(b *bench) error {
	ctx := context.Background()
	waiters, window := b.pick(10_000, 1000), time.Duration(b.pick(30, 10))*time.Second
	const (
		each   = 1000
		name   = "x"
		settle = 80 * time.Second // until those far behind demand echoes at their usual pace
		spare  = 4000             // connections for commands, and replacements of broken ones
	)
	rdb := b.server.Client(func(o *redis.Options) { o.ReadTimeout = time.Minute }) // because all join at once
	if err := rdb.ConfigSet(ctx, "maxclients", fmt.Sprint(waiters+spare)).Err(); err != nil {
		return err // the system allows the server fewer open files
	}
	idle, ping, err := connections(ctx, b.server.Addr, rdb, waiters)
	if err != nil {
		return err
	}
	// Otherwise the server refuses the next connections.
	if err := until(100*time.Millisecond, "the server has not seen all connections end", func() (bool, error) {
		n, err := connected(ctx, rdb)
		return n <= 100, err
	}); err != nil {
		return err
	}

	owner, err := b.client()
	if err != nil {
		return err
	}
	defer shut(owner)
	if _, err := owner.Mutex(name).LockContext(ctx); err != nil {
		return err
	}
	for n := 0; n < waiters; n += each {
		c, err := spawn("standing", b.server.Addr)
		if err != nil {
			return err
		}
		defer c.kill() // its clients still wait; the server ends soon, too
		if err := c.tell("%s %d", name, min(each, waiters-n)); err != nil {
			return err
		}
	}
	for until, n := time.Now().Add(5*time.Minute), int64(0); n < int64(waiters); {
		if time.Now().After(until) {
			return fmt.Errorf("%d of %d wait", n, waiters)
		}
		time.Sleep(100 * time.Millisecond)
		if n, err = rdb.ZCard(ctx, name+":{"+name+"}:queue").Result(); err != nil {
			return err
		}
	}
	time.Sleep(settle)

	u, err := during(ctx, rdb, window)
	if err != nil {
		return err
	}
	share := u.share()
	second := func(name string) string { return fmt.Sprintf("%.0f", float64(u.calls[name])/window.Seconds()) }
	b.rows.add(fmt.Sprintf("%d processes wait for one lock: the server's processor", waiters), percent(share),
		"as many idle connections "+percent(idle), atMost("5 % of a core", share <= 0.05))
	b.rows.add("  looks a second, and echoes", second("evalsha")+", "+second("publish"), "", "")
	b.rows.add("  the server's time for a look, idle connections apart",
		short(time.Duration((share-idle)*float64(window))/time.Duration(max(1, u.calls["evalsha"]))), "a PING "+short(ping), "")
	b.rows.add("  of it inside the script", u.scripts.each(int(u.scripts.calls)), "", "")
	b.rows.add("  other commands a second", fmt.Sprintf("%.1f", float64(u.calls.Total()-inScripts(u.calls))/window.Seconds()), "", "")
	return nil
}

// inScripts returns how many of the calls are looks, or are made by looks.
func inScripts(calls redistest.Tally) (n int64) {
	for _, name := range []string{"evalsha", "publish", "mget", "zrank", "zrange", "time", "pttl", "zscore", "zrem", "zadd", "get", "zcard", "zrevrange", "exists", "pexpire"} {
		n += calls[name]
	}
	return n
}

// connections returns what n idle connections cost the server, as a share of a core, and what a
// PING costs it if each comes on another one of these connections.
func connections(ctx context.Context, addr string, rdb *redis.Client, n int) (idle float64, ping time.Duration, err error) {
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return 0, 0, err
		}
		conns = append(conns, c)
	}
	time.Sleep(time.Second) // the server accepts them
	const span, every = 5 * time.Second, 2 * time.Millisecond
	u, err := during(ctx, rdb, span)
	if err != nil {
		return 0, 0, err
	}
	var failed error
	var done sync.WaitGroup
	done.Go(func() {
		beat := time.NewTicker(every)
		defer beat.Stop()
		for i := 0; i < int(span/every) && failed == nil; i++ {
			<-beat.C
			c := conns[i*37%n]
			var pong [7]byte
			if _, failed = c.Write([]byte("PING\r\n")); failed == nil {
				_, failed = c.Read(pong[:])
			}
		}
	})
	pinged, err := during(ctx, rdb, span)
	done.Wait()
	if err := errors.Join(err, failed); err != nil {
		return 0, 0, err
	}
	ping = time.Duration((pinged.share()-u.share())*float64(span)) / time.Duration(max(1, pinged.calls["ping"]))
	return u.share(), ping, nil
}

// connected returns how many connections the server has.
func connected(ctx context.Context, rdb *redis.Client) (n int, err error) {
	info, err := rdb.Info(ctx, "clients").Result()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(info) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "connected_clients:"); ok {
			return strconv.Atoi(text)
		}
	}
	return 0, errors.New("the server does not say how many connections it has")
}

// used is what the server did in a period of time.
type used struct {
	processor, while time.Duration
	calls            redistest.Tally
	scripts          spent
}

// share is the share of a core that the server used.
func (u used) share() float64 { return float64(u.processor) / float64(max(u.while, 1)) }

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// during returns what the server does in the time that begins now.
func during(ctx context.Context, rdb *redis.Client, while time.Duration) (u used, err error) {
	look := func() (at time.Time, processor time.Duration, calls redistest.Tally, scripts spent) {
		at = time.Now()
		if err == nil {
			processor, err = figures.ProcessorTime(ctx, rdb)
		}
		if err == nil {
			calls, err = redistest.Calls(ctx, rdb)
		}
		if err == nil {
			scripts, err = spend(ctx, rdb, "evalsha")
		}
		return at, processor, calls, scripts
	}
	began, processor, calls, scripts := look()
	time.Sleep(while)
	ended, processorThen, callsThen, scriptsThen := look()
	return used{processorThen - processor, ended.Sub(began), callsThen.Sub(calls), scriptsThen.sub(scripts)}, err
}

// playStanding has n clients wait for a lock until the process is killed.
func playStanding(rdb *redis.Client, name string, n int) error {
	for range n {
		time.Sleep(10 * time.Millisecond) // because the server's backlog of new connections is short
		c, err := leased.New(rdb, leased.WithLogger(quiet))
		if err != nil {
			return err
		}
		go func() { // ends with the process
			for {
				_, _ = c.Mutex(name).LockContext(context.Background()) // after an error, which is a refusal by Redis, it waits again
			}
		}()
	}
	select {}
}
