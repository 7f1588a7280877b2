package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// demo sells one stock twice, with the same buyers in the same processes: first without a lock,
// then with one.
type demo struct {
	options demoOptions
	prefix  string
	server  *miniredis.Miniredis  // nil with a real one
	rdb     redis.UniversalClient // for the stock
	client  *leased.Client        // to inspect the lock; it never acquires it
	locks   *lockServers          // nil if the lock is in the Redis of the stock
	done    func()                // closes the client's connections to them
	workers *workers
	screen  *screen
}

func runDemo(ctx context.Context, std streams, options demoOptions) error {
	d := &demo{options: options, screen: newScreen(std.out)}
	err := d.begin(ctx, std.err)
	if err == nil {
		err = d.perform(ctx)
	}
	err = errors.Join(err, d.end())
	if ctx.Err() != nil {
		d.screen.wipe()
		return errInterrupted // any other error is a consequence
	}
	return err
}

// begin connects to a server and starts the processes. Call end afterwards, even if begin failed.
func (d *demo) begin(ctx context.Context, stderr io.Writer) error {
	d.prefix = demoPrefix()
	at, place := d.options.at, ""
	if at.Redis == "" {
		// The server listens on loopback, because the workers are separate processes.
		var err error
		if d.server, err = embeddedRedis(); err != nil {
			return err
		}
		at, place = address{Redis: d.server.Addr()}, ", inside this program"
	}
	var err error
	if d.rdb, err = at.connectWhole(ctx); err != nil {
		return err
	}
	if d.options.quorum {
		if d.locks, err = startLockServers(lockPrefix(d.prefix)); err != nil {
			return err
		}
	}
	if d.client, d.done, err = lockClient(d.rdb, d.locks.addrs(), leased.WithKeyPrefix(lockPrefix(d.prefix))); err != nil {
		return err
	}
	options, err := at.options()
	if err != nil {
		return err
	}
	d.introduce(where(options) + place)

	var setups []setup
	for i := range d.options.workers {
		setups = append(setups, setup{
			At: at, Prefix: d.prefix,
			Process: i + 1, Buyers: d.options.buyers, TTL: d.options.ttl, Locks: d.locks.addrs(),
		})
	}
	if d.workers, err = startWorkers(ctx, stderr, setups); err != nil {
		return err
	}
	return d.awaitWorkers(ctx)
}

// demoPrefix returns a prefix for the keys of one demo.
func demoPrefix() string { return "leased-demo:" + strings.ToLower(rand.Text()[:12]) + ":" }

// embeddedRedis starts a server on loopback.
func embeddedRedis() (*miniredis.Miniredis, error) {
	if strconv.IntSize < 64 { // it would cut off what the scripts return
		return nil, errors.New("the embedded Redis needs a 64-bit processor; --redis names another one, but not for --quorum")
	}
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if err := m.Start(); err != nil {
		return nil, fmt.Errorf("cannot start the embedded Redis: %w", err)
	}
	return m, nil
}

// awaitWorkers waits until all processes are ready.
func (d *demo) awaitWorkers(ctx context.Context) error {
	for waiting := len(d.workers.processes); waiting > 0; waiting-- {
		d.screen.progress("   starting %s", count(waiting, "process", "processes"))
		select {
		case <-ctx.Done():
			return errInterrupted
		case n := <-d.workers.events:
			if n.Kind != ready {
				return n.failure()
			}
		}
	}
	d.screen.wipe()
	return nil
}

// end ends the processes first and then deletes the keys, so that no process writes a key after it
// was deleted.
func (d *demo) end() error {
	if d.server != nil {
		defer d.server.Close()
	}
	if d.locks != nil {
		defer d.locks.close()
	}
	if d.workers != nil {
		d.workers.shutDown()
	}
	if d.client != nil {
		d.client.Close() // it holds nothing, so there is no error to report
	}
	if d.done != nil {
		d.done()
	}
	if d.rdb == nil {
		return nil
	}
	defer d.rdb.Close()
	if err := deleteKeys(context.Background(), d.rdb, keys(d.prefix)); err != nil {
		return fmt.Errorf("cannot delete the keys under %s, which expire within %v: %w", d.prefix, keyLife, err)
	}
	return nil
}

// perform runs both sales or, on a quorum, the only one.
func (d *demo) perform(ctx context.Context) error {
	if d.locks != nil {
		return d.performOnQuorum(ctx)
	}
	d.screen.beat(ctx)
	d.heading("1", "Without a lock")
	free, err := d.sell(ctx, order{})
	if err != nil {
		return err
	}
	d.withoutLock(free)
	d.screen.beat(ctx)

	d.heading("2", "With a leased.Mutex around the same code")
	o := order{Lock: true}
	if d.options.kill {
		// This is in the middle of the sale.
		o.HoldAt = d.options.stock - min(d.options.stock, d.options.workers*d.options.buyers)/2
	}
	locked, err := d.sell(ctx, o)
	if err != nil {
		return err
	}
	return d.withLock(locked)
}

// sell has all processes sell one stock, and returns when each process is done or dead.
func (d *demo) sell(ctx context.Context, o order) (*sale, error) {
	s := newSale(d.options.stock, d.options.workers, d.options.buyers)
	if err := d.rdb.Set(ctx, stockKey(d.prefix), s.stock, keyLife).Err(); err != nil {
		return nil, err
	}
	for _, p := range d.workers.processes {
		if err := p.send(o); err != nil {
			return nil, err
		}
	}
	tick := time.NewTicker(100 * time.Millisecond) // to show how much time a killed lease has left
	defer tick.Stop()
	for working := len(d.workers.processes); working > 0; {
		select {
		case <-ctx.Done():
			return nil, errInterrupted
		case <-tick.C:
		case n := <-d.workers.events:
			switch {
			case n.Kind == done, n.ended && s.killed != nil && s.killed.process == n.from.number:
				working--
			case n.Kind == inside:
				interfere := d.killWorker
				if d.locks != nil {
					interfere = d.disturb
				}
				if err := interfere(ctx, s, n); err != nil {
					return nil, err
				}
				continue
			case n.Kind != sold && n.Kind != refused:
				return nil, n.failure()
			}
			waiting := s.killed != nil && s.killed.next == 0
			s.add(n.from.number, n.message)
			if waiting && s.killed.next > 0 {
				d.recovered(s)
			}
		}
		d.watch(s)
	}
	var err error
	if s.left, err = d.rdb.Get(ctx, stockKey(d.prefix)).Int(); err != nil {
		return nil, err
	}
	return s, nil
}

// killWorker kills a process that has just reported that it is inside the lock.
func (d *demo) killWorker(ctx context.Context, s *sale, n event) error {
	if err := n.from.kill(); err != nil {
		return fmt.Errorf("cannot kill process %d: %w", n.from.number, err)
	}
	s.killed = &killRecord{process: n.from.number, pid: n.from.pid(), token: n.Token, at: time.Now()}
	info, err := d.client.Inspect(ctx, lockName)
	if err != nil {
		return err
	}
	for _, owner := range info.Owners {
		if owner.Client == ownerLabel(s.killed.process, s.killed.pid) {
			s.killed.left = owner.TTL
		}
	}
	d.killedInside(s, n.Seen)
	return nil
}

// failure returns the error for a process that did not do its part.
func (n event) failure() error {
	switch {
	case n.Kind == failed:
		return fmt.Errorf("process %d: %s", n.from.number, n.Error)
	case n.err != nil:
		return fmt.Errorf("process %d ended too early: %w", n.from.number, n.err)
	case n.ended:
		return fmt.Errorf("process %d ended too early", n.from.number)
	}
	return fmt.Errorf("process %d sent %q out of turn", n.from.number, n.Kind)
}
