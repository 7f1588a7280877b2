package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// demo sells one stock twice, with the same buyers in the same processes: first without a lock,
// then with one.
type demo struct {
	options    demoOptions
	prefix     string
	server     *miniredis.Miniredis  // nil with a real one
	rdb        redis.UniversalClient // for the stock
	client     *leased.Client        // to inspect the lock; it never acquires it
	locks      *lockServers          // nil if the lock is in the Redis of the stock
	disconnect func()                // closes the client's connections to them
	workers    *workers
	screen     *screen
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
	var at address
	var place string
	var err error
	if d.server, at, place, err = embeddedUnless(d.options.at); err != nil {
		return err
	}
	if d.rdb, err = at.connectWhole(ctx); err != nil {
		return err
	}
	if d.options.quorum {
		if d.locks, err = startLockServers(lockPrefix(d.prefix)); err != nil {
			return err
		}
	}
	if d.client, d.disconnect, err = lockClient(d.rdb, d.locks.addrs(), leased.WithKeyPrefix(lockPrefix(d.prefix))); err != nil {
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
func demoPrefix() string { return "leased-demo:" + randomName() + ":" }

// embeddedUnless starts a server unless the command line named one, and returns the address of the server to
// use, and what to print behind it.
func embeddedUnless(named address) (m *miniredis.Miniredis, at address, place string, err error) {
	if named.Redis != "" {
		return nil, named, "", nil
	}
	if m, err = embeddedRedis(); err != nil {
		return nil, named, "", err
	}
	return m, address{Redis: m.Addr()}, ", inside this program", nil
}

// embeddedRedis starts a server. It listens on loopback, because the workers are separate processes.
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
		case e := <-d.workers.events:
			if e.Kind != ready {
				return e.failure()
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
	if d.disconnect != nil {
		d.disconnect()
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
		case e := <-d.workers.events:
			switch {
			case e.Kind == done, e.ended && s.killed != nil && s.killed.process == e.from.number:
				working--
			case e.Kind == inside:
				interfere := d.killWorker
				if d.locks != nil {
					interfere = d.disturb
				}
				if err := interfere(ctx, s, e); err != nil {
					return nil, err
				}
				continue
			case e.Kind != sold && e.Kind != refused:
				return nil, e.failure()
			}
			waiting := s.killed != nil && s.killed.next == 0
			s.add(e.from.number, e.message)
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
func (d *demo) killWorker(ctx context.Context, s *sale, e event) error {
	if err := e.from.kill(); err != nil {
		return fmt.Errorf("cannot kill process %d: %w", e.from.number, err)
	}
	s.killed = &killRecord{process: e.from.number, pid: e.from.pid(), token: e.Token, at: time.Now()}
	info, err := d.client.Inspect(ctx, lockName)
	if err != nil {
		return err
	}
	for _, owner := range info.Owners {
		if owner.Client == ownerLabel(s.killed.process, s.killed.pid) {
			s.killed.left = owner.TTL
		}
	}
	d.killedInside(s, e.Seen)
	return nil
}

// failure returns the error for a process that did not do its part.
func (e event) failure() error {
	switch {
	case e.Kind == failed:
		return fmt.Errorf("process %d: %s", e.from.number, e.Error)
	case e.err != nil:
		return fmt.Errorf("process %d ended too early: %w", e.from.number, e.err)
	case e.ended:
		return fmt.Errorf("process %d ended too early", e.from.number)
	}
	return fmt.Errorf("process %d sent %q out of turn", e.from.number, e.Kind)
}
