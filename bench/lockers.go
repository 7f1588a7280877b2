package main

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/leasedmutex/leased"
)

// locker is one client of a lock library, created as that library's documentation shows.
type locker interface {
	// lock waits until it owns the lock of that name or ctx ends. It is safe for concurrent
	// use, and so is unlock.
	lock(ctx context.Context, name string) (unlock func() error, err error)
}

// setup is what a locker is made from.
type setup struct {
	Addr  string        // of the server
	TTL   time.Duration // of a lock
	Renew bool          // locks are held for longer than their TTL

	// The position of a ring's client and the length of the ring, and the go-redis client that the
	// lockers of a process share.
	Client, Clients int
	redis           *redis.Client
}

// contender is a column of the table.
type contender struct {
	name     string
	module   string   // the Go module whose version is printed
	settings string   // how it is configured, and why
	floor    bool     // not a lock, but the least that any lock has to do
	only     []string // the scenarios that it takes part in; nil means all that it can
	shares   bool     // it has locks for readers, so its lockers are sharers
	optional string   // the flag with which it takes part; "" means always
	open     func(setup) (locker, error)
	serve    func(dir string) (addr string, err error) // starts a server of its own; nil means redis-server

	// For a contender that is not written in Go:
	program  func() []string // the command line of its workers
	version  func() string
	together bool // all its competing clients share one process: see stage.contestants
	warms    bool // it is compiled at run time: see stage.warmUp
}

const ours = "Leased"

var contenders = []contender{
	{
		name: ours, module: "github.com/leasedmutex/leased",
		settings: "its defaults",
		shares:   true,
		open:     openLeased,
	},
	{
		name: "rueidislock", module: "github.com/redis/rueidis",
		settings: "one key a lock (KeyMajority 1) and NoLoopTracking, as for one server; TryNextAfter 10 s, because a reply that takes longer (than 20 ms, by default) can leave the caller asleep for good; renews by itself",
		open:     openRueidislock,
	},
	{
		name: "redislock", module: "github.com/bsm/redislock",
		settings: "polls every 2 ms, which is tuned for latency: it has no default; where locks outlive their TTL, a goroutine each calls Refresh at a third of it",
		open:     openRedislock,
	},
	{
		name: "redsync", module: "github.com/go-redsync/redsync/v4",
		settings: "polls every 2 ms without a limit of tries (its default is 32 tries, 50 to 250 ms apart); where locks outlive their TTL, a goroutine each calls Extend at a third of it",
		open:     openRedsync,
	},
	{
		name: "two commands", floor: true, only: []string{"cycle", "cycle-free", "cycle-names", "many"},
		settings: "`SET NX PX` and a script that compares and deletes, by go-redis",
		open:     openTwoCommands,
	},
	{
		name: "PUBLISH", floor: true, only: []string{"handoff", "handoff-free", "contend-4x16", "contend-8x1", "processes", "waiters"},
		settings: "processes in a ring: to unlock is to send one message to the next, whose first local waiter it wakes; no key, no TTL, by go-redis",
		open:     openRing,
	},
	{
		name: "package sync", floor: true, only: []string{"readers-1x64"},
		settings: "a `sync.RWMutex`, in one process, without Redis",
		open:     func(setup) (locker, error) { return &readersWriter{}, nil },
	},
	{
		name: "channels", floor: true, only: []string{"contend-1x64"},
		settings: "a queue of Go channels and a number from the clock for each lease, in one process, without Redis",
		open:     func(setup) (locker, error) { return &channels{}, nil },
	},
}

func find(name string) (contender, error) {
	for _, c := range contenders {
		if c.name == name {
			return c, nil
		}
	}
	return contender{}, errors.New("there is no " + name)
}

// sharing are the scenarios with readers. Most libraries have no locks for them.
var sharing = []string{"readers-1x64", "readers-4x16"}

func (c contender) takesPart(scenario string) bool {
	if c.only == nil {
		return c.shares || !slices.Contains(sharing, scenario)
	}
	return slices.Contains(c.only, scenario)
}

// connect makes the go-redis client of a process, however many lockers the process has.
func connect(addr string) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
}

type leasedLocker struct{ client *leased.Client }

func openLeased(s setup) (locker, error) {
	c, err := leased.New(s.redis, leased.WithTTL(s.TTL), leased.WithLogger(slog.New(slog.DiscardHandler)))
	return leasedLocker{c}, err
}

func (l leasedLocker) lock(ctx context.Context, name string) (func() error, error) {
	lease, err := l.client.Mutex(name).LockContext(ctx)
	if err != nil {
		return nil, err
	}
	return lease.Unlock, nil
}

func (l leasedLocker) share(ctx context.Context, name string, read bool) (func() error, error) {
	m := l.client.RWMutex(name)
	take := m.LockContext
	if read {
		take = m.RLockContext
	}
	lease, err := take(ctx)
	if err != nil {
		return nil, err
	}
	return lease.Unlock, nil
}

type rueidisLocker struct{ rueidislock.Locker }

func openRueidislock(s setup) (locker, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption:   rueidis.ClientOption{InitAddress: []string{s.Addr}},
		KeyMajority:    1,
		NoLoopTracking: true,
		KeyValidity:    s.TTL,
		TryNextAfter:   10 * time.Second,
	})
	return rueidisLocker{l}, err
}

func (l rueidisLocker) lock(ctx context.Context, name string) (func() error, error) {
	_, cancel, err := l.WithContext(ctx, name)
	if err != nil {
		return nil, err
	}
	return func() error { cancel(); return nil }, nil
}

const pollInterval = 2 * time.Millisecond

type redislockLocker struct {
	setup
	client *redislock.Client
}

func openRedislock(s setup) (locker, error) { return redislockLocker{s, redislock.New(s.redis)}, nil }

func (l redislockLocker) lock(ctx context.Context, name string) (func() error, error) {
	for {
		lock, err := l.client.Obtain(ctx, name, l.TTL, &redislock.Options{RetryStrategy: redislock.LinearBackoff(pollInterval)})
		switch {
		case err == nil:
			stop := l.renew(func(ctx context.Context) error { return lock.Refresh(ctx, l.TTL, nil) })
			return func() error { stop(); return lock.Release(context.Background()) }, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, redislock.ErrNotObtained), errors.Is(err, context.DeadlineExceeded):
			// Without a deadline in ctx it would give up after a TTL, and Leased does not.
		default:
			return nil, err
		}
	}
}

type redsyncLocker struct {
	setup
	client *redsync.Redsync
}

func openRedsync(s setup) (locker, error) {
	return redsyncLocker{s, redsync.New(goredis.NewPool(s.redis))}, nil
}

func (l redsyncLocker) lock(ctx context.Context, name string) (func() error, error) {
	m := l.client.NewMutex(name, redsync.WithExpiry(l.TTL), redsync.WithRetryDelay(pollInterval), redsync.WithTries(1<<30))
	if err := m.LockContext(ctx); err != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	stop := l.renew(func(ctx context.Context) error { _, err := m.ExtendContext(ctx); return err })
	return func() error {
		stop()
		_, err := m.UnlockContext(context.Background())
		return err
	}, nil
}

// renew does what libraries without a watchdog leave to their users. Its goroutine ends with
// stop, or at the latest with the process, and nobody waits for it.
func (s setup) renew(extend func(context.Context) error) (stop func()) {
	if !s.Renew {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		tick := time.NewTicker(s.TTL / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = extend(ctx) // tried again a third of the TTL later
			case <-ctx.Done():
				return
			}
		}
	}()
	return cancel
}

// twoCommands is the textbook lock without waiting.
type twoCommands struct{ rdb *redis.Client }

var compareAndDelete = redis.NewScript(`return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1])`)

func openTwoCommands(s setup) (locker, error) { return twoCommands{s.redis}, nil }

func (l twoCommands) lock(ctx context.Context, name string) (func() error, error) {
	value := rand.Text()
	taken, err := l.rdb.SetNX(ctx, name, value, 30*time.Second).Result()
	if err == nil && !taken {
		err = errors.New("somebody else has " + name)
	}
	return func() error {
		return compareAndDelete.Run(context.Background(), l.rdb, []string{name}, value).Err()
	}, err
}

// ring passes the right to be inside from one client to the next by one message, which is the
// least that takes a lock without polling from one process to another.
type ring struct {
	rdb   *redis.Client
	next  string
	turns chan struct{}
}

func openRing(s setup) (locker, error) {
	name := func(i int) string { return "turn:" + strconv.Itoa(i%s.Clients) }
	l := &ring{rdb: s.redis, next: name(s.Client + 1), turns: make(chan struct{}, 1)}
	sub := l.rdb.Subscribe(context.Background(), name(s.Client))
	if _, err := sub.Receive(context.Background()); err != nil {
		return nil, err
	}
	// The goroutine belongs to the process and ends with it: a worker ends when it has been measured.
	go func() {
		for {
			if _, err := sub.ReceiveMessage(context.Background()); err != nil {
				return
			}
			l.turns <- struct{}{}
		}
	}()
	if s.Client == 0 {
		l.turns <- struct{}{}
	}
	return l, nil
}

func (l *ring) lock(ctx context.Context, _ string) (func() error, error) {
	select {
	case <-l.turns:
		return func() error { return l.rdb.Publish(context.Background(), l.next, "").Err() }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// channels is a lock in one process that serves its waiters in order, and whose leases have
// numbers that grow with the clock.
type channels struct {
	mu      sync.Mutex // guards what follows
	held    bool
	waiters []chan struct{}
	token   atomic.Int64
}

func (l *channels) lock(ctx context.Context, _ string) (func() error, error) {
	l.mu.Lock()
	if !l.held {
		l.held = true
		l.mu.Unlock()
		return l.enter(), nil
	}
	turn := make(chan struct{})
	l.waiters = append(l.waiters, turn)
	l.mu.Unlock()
	select {
	case <-turn:
		return l.enter(), nil
	case <-ctx.Done():
		l.mu.Lock()
		i := slices.Index(l.waiters, turn)
		if i >= 0 {
			l.waiters = slices.Delete(l.waiters, i, i+1)
		}
		l.mu.Unlock()
		if i < 0 { // it is our turn already
			_ = l.unlock()
		}
		return nil, ctx.Err()
	}
}

func (l *channels) enter() func() error {
	l.token.Store(max(l.token.Load()+1, time.Now().UnixMicro()))
	return l.unlock
}

func (l *channels) unlock() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiters) == 0 {
		l.held = false
		return nil
	}
	next := l.waiters[0]
	l.waiters = l.waiters[1:]
	close(next)
	return nil
}

// readersWriter is a lock for readers and writers in one process, without Redis.
type readersWriter struct{ sync.RWMutex }

func (l *readersWriter) lock(ctx context.Context, name string) (func() error, error) {
	return l.share(ctx, name, false)
}

func (l *readersWriter) share(_ context.Context, _ string, read bool) (func() error, error) {
	if read {
		l.RLock()
		return func() error { l.RUnlock(); return nil }, nil
	}
	l.Lock()
	return func() error { l.Unlock(); return nil }, nil
}
