package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
)

// This file has the locks that are measured. Each locker has connections of its own.

// locker is a client that locks one name.
type locker interface {
	lock() (unlock func())
	close()
}

// The kinds of lockers.
const (
	onOne        = "one server"
	onQuorum     = "quorum of five"
	byRedsync    = "redsync, defaults"
	byRedsync2ms = "redsync, retry 2 ms"
)

// attempts counts the commands that the lockers of a process have sent to get a lock, once for each
// server, and sent counts all commands that they have sent.
var attempts, sent atomic.Int64

// countCommands is a hook that counts them.
type countCommands struct{}

func (countCommands) DialHook(next redis.DialHook) redis.DialHook { return next }
func (countCommands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		sent.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

func (countCommands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		sent.Add(1)
		switch args := cmd.Args(); cmd.Name() {
		case "set", "setnx": // redsync
			attempts.Add(1)
		case "evalsha":
			switch args[1] {
			case redisserver.VoteAcquireScript.Sha, redisserver.VoteYieldScript.Sha, redisserver.AcquireScript.Sha, redisserver.YieldScript.Sha:
				attempts.Add(1)
			}
		}
		return next(ctx, cmd)
	}
}

func connectOptions(addr string) *redis.Options {
	o := redistest.Options(addr)
	o.ContextTimeoutEnabled = true
	return o
}

func connect(addr string) *redis.Client {
	rdb := redis.NewClient(connectOptions(addr))
	rdb.AddHook(countCommands{})
	return rdb
}

// open returns a locker of the given kind. A quorum and redsync use all servers, and onOne uses the
// one in the middle.
func open(kind, name string, addrs []string) (locker, error) {
	switch kind {
	case onOne:
		rdb := connect(addrs[len(addrs)/2]) // neither the nearest nor the farthest
		c, err := leased.New(rdb)
		if err != nil {
			return nil, err
		}
		return ours{c.Mutex(name), c, []redis.UniversalClient{rdb}}, nil
	case onQuorum:
		var rdbs []redis.UniversalClient
		for _, addr := range addrs {
			rdbs = append(rdbs, connect(addr))
		}
		c, err := leased.NewQuorum(rdbs)
		if err != nil {
			return nil, err
		}
		return ours{c.Mutex(name), c, rdbs}, nil
	case byRedsync, byRedsync2ms:
		var pools []redsyncredis.Pool
		var rdbs []*redis.Client
		for _, addr := range addrs {
			rdb := connect(addr)
			rdbs, pools = append(rdbs, rdb), append(pools, goredis.NewPool(rdb))
		}
		var opts []redsync.Option
		if kind == byRedsync2ms {
			opts = []redsync.Option{redsync.WithRetryDelay(2 * time.Millisecond), redsync.WithTries(1 << 30)}
		}
		return theirs{redsync.New(pools...), name, opts, rdbs}, nil
	}
	return nil, fmt.Errorf("no such kind: %q", kind)
}

type ours struct {
	mu     *leased.Mutex
	client *leased.Client
	rdbs   []redis.UniversalClient
}

func (o ours) close() {
	_ = o.client.Close()
	for _, rdb := range o.rdbs {
		_ = rdb.Close()
	}
}

func (o ours) lock() func() {
	o.mu.Lock()
	return o.mu.Unlock
}

type theirs struct {
	rs   *redsync.Redsync
	name string
	opts []redsync.Option
	rdbs []*redis.Client
}

func (r theirs) close() {
	for _, rdb := range r.rdbs {
		_ = rdb.Close()
	}
}

func (r theirs) lock() func() {
	for {
		m := r.rs.NewMutex(r.name, r.opts...)
		if m.Lock() == nil {
			return func() { _, _ = m.Unlock() }
		}
	}
}

// floor is the least that a lock on all servers costs: a script that does nothing, sent from
// five goroutines, where the caller waits until the third of them has returned.
type floor []*redis.Client

func openFloor(addrs []string) floor {
	var f floor
	for _, addr := range addrs {
		f = append(f, connect(addr))
	}
	return f
}

var nothing = redis.NewScript("return 1")

func (f floor) lock() func() {
	f.send()
	return f.send
}

func (f floor) close() {
	for _, rdb := range f {
		_ = rdb.Close()
	}
}

func (f floor) send() {
	done := make(chan error, len(f))
	for _, c := range f {
		go func() { done <- nothing.Run(context.Background(), c, []string{"floor"}).Err() }()
	}
	for range len(f)/2 + 1 {
		if err := <-done; err != nil {
			panic(err)
		}
	}
}
