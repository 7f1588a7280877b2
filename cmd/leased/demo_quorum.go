package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
)

// The demonstration of a quorum. The lock lives on five servers, two of which die in the middle of
// the sale and come back empty. The stock is kept on a sixth server.

const quorumServers = 5

// dying are the servers that die.
var dying = []int{1, 3}

// lockServers are the embedded servers of the quorum.
type lockServers struct {
	prefix string
	all    []*lockServer
}

// lockServer is one of the servers. While it is dead it hangs up on everybody, so that nobody else
// gets its port.
type lockServer struct {
	addr  string
	redis *miniredis.Miniredis
	dead  net.Listener // nil while it is alive
	over  chan struct{}
}

// startLockServers starts servers whose locks have the prefix, and makes them count as old enough
// to vote: for a while, new servers would all have to be there.
func startLockServers(prefix string) (*lockServers, error) {
	s := &lockServers{prefix: prefix}
	for range quorumServers {
		m, err := embeddedRedis()
		if err != nil {
			s.close()
			return nil, err
		}
		s.all = append(s.all, &lockServer{addr: m.Addr(), redis: m})
		if err := m.Set(protocol.MarkKey(prefix), "1"); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

func (s *lockServers) addrs() []string {
	if s == nil {
		return nil
	}
	var all []string
	for _, one := range s.all {
		all = append(all, one.addr)
	}
	return all
}

func (s *lockServers) close() {
	for _, one := range s.all {
		one.hangUp()
		one.redis.Close()
	}
}

// die ends a server, with everything that it knew.
func (s *lockServer) die() error {
	s.redis.Close()
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", s.addr)
	if err != nil {
		return err
	}
	s.dead, s.over = l, make(chan struct{})
	// This is ended by hangUp, which waits for it.
	go func() {
		defer close(s.over)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	return nil
}

func (s *lockServer) hangUp() {
	if s.dead != nil {
		s.dead.Close()
		<-s.over
		s.dead = nil
	}
}

// comeBack starts the server again, without data.
func (s *lockServer) comeBack() error {
	s.hangUp()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if err := m.StartAddr(s.addr); err != nil {
		return err
	}
	s.redis = m
	return nil
}

// lockClient returns a client of the library for the demo's locks, which are in the Redis of the
// stock or on a quorum of the servers at addrs. disconnect closes whatever else it made.
func lockClient(rdb redis.UniversalClient, addrs []string, opts ...leased.Option) (client *leased.Client, disconnect func(), err error) {
	if len(addrs) == 0 {
		client, err = leased.New(rdb, opts...)
		return client, func() {}, err
	}
	var rdbs []redis.UniversalClient
	disconnect = func() {
		for _, rdb := range rdbs {
			rdb.Close()
		}
	}
	for _, addr := range addrs {
		at := address{Redis: addr}
		o, err := at.options()
		if err != nil {
			return nil, disconnect, err
		}
		o.MaxRetries = -1 // the other servers answer in the meantime
		rdbs = append(rdbs, redis.NewUniversalClient(o))
	}
	// The demo itself tells of the servers that go away, so the client need not log them.
	client, err = leased.NewQuorum(rdbs, append(opts, leased.WithLogger(slog.New(slog.DiscardHandler)))...)
	return client, disconnect, err
}

// performOnQuorum runs the sale.
func (d *demo) performOnQuorum(ctx context.Context) error {
	d.screen.beat(ctx)
	d.screen.line("")
	pieces := min(d.options.stock, d.options.workers*d.options.buyers)
	s, err := d.sell(ctx, order{Lock: true, PauseAt: []int{d.options.stock - pieces/3, d.options.stock - 2*pieces/3}})
	if err != nil {
		return err
	}
	d.screen.line("")
	return d.withLock(s)
}

// disturb is called while a buyer stays inside the lock. Servers die while the first such buyer is
// inside, and come back while the second one is. Then disturb lets the buyer go on.
func (d *demo) disturb(ctx context.Context, s *sale, e event) error {
	named := "Servers " + serverNumbers()
	switch {
	case !s.without:
		info, err := d.awaitAll(ctx)
		if err != nil {
			return err
		}
		d.screen.line("   Process %d is inside, and has read a stock of %d. %s", e.from.number, e.Seen, ownerOnQuorum(info))
		for _, i := range dying {
			if err := d.locks.all[i].die(); err != nil {
				return err
			}
		}
		s.without = true
		d.screen.line("   %s %s with all they knew. %s", named, d.screen.bad("die"), d.whoOwns(ctx))
		d.screen.beat(ctx)
	case !s.returned:
		d.screen.line("   %s went on without them, down to a stock of %d. %s", d.screen.good("The sale"), e.Seen, d.whoOwns(ctx))
		for _, i := range dying {
			if err := d.locks.all[i].comeBack(); err != nil {
				return err
			}
		}
		s.returned = true
		d.screen.line("   %s are back, empty. They may have forgotten an owner, so their votes do not count for a minute.", named)
		d.screen.beat(ctx)
	}
	_, err := d.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, goOnKey(d.prefix)) // what was for a buyer who had lost the lock
		p.RPush(ctx, goOnKey(d.prefix), "go on")
		p.Expire(ctx, goOnKey(d.prefix), keyLife)
		return nil
	})
	return err
}

// awaitAll waits until all servers stand behind the owner. If three servers granted a lease and the
// other two had let another process in first, it is a lease; but if two of the three then die at
// once, nobody can prove anymore that it was kept. With its first renewal, the other servers grant
// it too.
func (d *demo) awaitAll(ctx context.Context) (info leased.Info, err error) {
	for until := time.Now().Add(d.options.ttl); time.Now().Before(until) && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		if info, err = d.client.Inspect(ctx, lockName); err == nil && info.Behind == info.Servers {
			break
		}
		d.screen.progress("   until the lease is renewed, not all servers have granted it")
	}
	return info, err
}

// whoOwns says how many of the servers name an owner at present.
func (d *demo) whoOwns(ctx context.Context) string {
	info, err := d.client.Inspect(ctx, lockName)
	if err != nil {
		return "Inspect says: " + err.Error()
	}
	return ownerOnQuorum(info)
}

func ownerOnQuorum(info leased.Info) string {
	text := fmt.Sprintf("Of %d servers, %d answer", info.Servers, info.Answered)
	if len(info.Owners) == 0 {
		return text + ", and the lock is free."
	}
	return text + fmt.Sprintf(", and %d name %s as the owner.", info.Behind, info.Owners[0].Client)
}

// serverNumbers names the servers that die, counting from 1.
func serverNumbers() string {
	var all []string
	for _, i := range dying {
		all = append(all, fmt.Sprint(i+1))
	}
	return strings.Join(all, " and ")
}

// behind says how many servers stood behind the leases of a sale.
func (d *demo) behind(behind [8]int64) {
	d.screen.line("   How many of the %d servers stood behind the leases when they were unlocked:", quorumServers)
	for n, leases := range slices.Backward(behind[:]) {
		if leases > 0 {
			d.screen.line("   %5d  leases: %s", leases, count(n, "server", "servers"))
		}
	}
}

// checkQuorum returns the first mistake in the flags of --quorum.
func (o *demoOptions) checkQuorum() error {
	switch {
	case o.at.Redis != "" || o.at.Cluster || o.at.Sentinel != "":
		return usagef("--quorum has five servers of its own, two of which it ends, so it excludes --redis")
	case o.kill:
		return usagef("--quorum ends servers, and --kill a process: choose one of them")
	case min(o.stock, o.workers*o.buyers) < 3:
		return usagef("--quorum needs --stock 3 or more, and as many buyers: servers die after some sales, and come back after some more")
	}
	return nil
}

// awaitGoOn keeps a buyer inside the lock until the parent lets it go on.
func (b *buyer) awaitGoOn(ctx context.Context) error {
	return b.rdb.BLPop(ctx, time.Minute, goOnKey(b.prefix)).Err()
}
