package leased

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Client gives out locks that live in one Redis deployment. It is one owner in
// Redis' eyes: its locks exclude those of other clients, and its callers exclude
// each other as users of sync.Mutex do. Create one for a process and keep it; it
// is safe for concurrent use.
//
// It runs two goroutines of its own: the watchdog, which has every lease
// renewed, and the inbox, through which Redis tells of grants. Both begin with
// the first lock that is asked for and end in Close.
type Client struct {
	server  server
	opts    clientOptions
	id      string
	began   time.Time
	counts  bool // PUBLISH's count tells whether a client is there
	once    sync.Once
	inbox   *inbox
	dog     *watchdog
	reaper  *reaper
	outage  *outage
	journal *journal
	losses  backlog[LossEvent]
	tracing *tracing
	metrics *metrics
	crew    crew
	stats   counters

	// Calls of Unlock that wait. Shutdown waits for them, also where their lock is
	// forgotten and only a cancel is to be confirmed.
	unlocks atomic.Int32

	base context.Context // of every command; ends when the client has stopped
	stop context.CancelFunc

	// mu guards what follows. Lock order: mu, entry.mu, watchdog.mu. None is
	// held during network calls, logging or calls of the user's code.
	mu      sync.Mutex
	table   map[string]*entry // locks in use by key in Redis
	closing chan struct{}     // closed by Close
	drained chan struct{}     // closed when closing, and no lock is in use and no Unlock waits
	stopped chan struct{}     // closed when Close is through
	outcome error             // what it returned; written before that
}

// New returns a client for the deployment that rdb talks to: a node, one behind
// Sentinel, or a Cluster. It does no I/O, so it works while Redis is down, and it
// never closes rdb. A *redis.Ring is refused: its shards are chosen by name, so
// messages would not arrive. Errors match ErrInvalidOption.
//
// A *redis.Client should have ContextTimeoutEnabled set. Otherwise its commands
// cannot be bounded one by one, and the locks use a clone of it on the same pool
// of connections, with time-outs of their own; hooks that were added to rdb are
// not called for the commands of a clone, but for dialling.
//
// rdb may also be a type of your own around one of these. Where it has the method
// Options of a *redis.Client, as it does if it embeds one, it counts as one; it is
// never cloned, so ContextTimeoutEnabled should be set. Of any other type nothing is
// known: its commands are not bounded, a waiter that died is not skipped, and that is
// logged.
func New(rdb redis.UniversalClient, opts ...Option) (*Client, error) {
	o, err := newClientOptions(opts)
	if err != nil {
		return nil, err
	}
	kind, err := kindOf(rdb)
	if err != nil {
		return nil, err
	}
	server := newRedisServer(rdb, o.prefix)
	c := &Client{
		server:  server,
		opts:    o,
		id:      newClientID(o.owner),
		began:   time.Now(),
		counts:  kind == oneNode,
		table:   map[string]*entry{},
		closing: make(chan struct{}),
		drained: make(chan struct{}),
		stopped: make(chan struct{}),
	}
	c.base, c.stop = context.WithCancel(context.Background())
	c.journal = newJournal(o.logger)
	c.inbox = newInbox(c, server.rdb)
	c.dog = newWatchdog(c)
	c.reaper = newReaper(c)
	c.outage = newOutage(c)
	c.losses.deliver, c.losses.most, c.losses.what = c.tellLoss, mostLosses, "the loss handler"
	c.tracing = newTracing(c, &c.opts)
	c.metrics = newMetrics(c, &c.opts)
	if kind == unknownKind {
		c.journal.unknownClient()
	} else if kind == oneNode && !server.prompt() {
		c.journal.unbounded()
	}
	return c, nil
}

// kindOfRedis is what can be known of a Redis client.
type kindOfRedis uint8

const (
	unknownKind kindOfRedis = iota
	oneNode                 // the count of PUBLISH tells whether a client is there
	clustered
)

// kindOf goes by the method Options, which a type that embeds a client has too.
func kindOf(rdb redis.UniversalClient) (kindOfRedis, error) {
	if isNil(rdb) {
		return 0, invalid("the Redis client is nil")
	}
	switch rdb.(type) {
	case interface{ Options() *redis.Options }:
		return oneNode, nil
	case interface{ Options() *redis.ClusterOptions }:
		return clustered, nil
	case interface{ Options() *redis.RingOptions }:
		return 0, invalid("a *redis.Ring cannot keep locks: it picks shards by name, so messages about a lock reach another shard; " +
			"use a *redis.Client for one of its nodes, or a Cluster")
	}
	return unknownKind, nil
}

// begin starts the goroutines that last as long as the client.
func (c *Client) begin() {
	c.once.Do(func() {
		c.crew.start(c.dog.run)
		c.crew.start(c.inbox.run)
	})
}

func (c *Client) newRequest(m mode, ttl time.Duration, idles bool) request {
	return newRequest(c.id, m, ttl, idles, c.counts && c.inbox.confirmed())
}

// Where PUBLISH's count proves nothing, there is no proof to wait for.
func (c *Client) joining() bool { return c.counts && !c.inbox.settled.Load() }

func (c *Client) jitter() float64  { return rand.Float64() }
func (c *Client) pushed() bool     { return !c.inbox.denied() }
func (c *Client) start() time.Time { return c.began }

// find returns the entry for k, making it if need be; nil after Close, when no
// new ones are made.
func (c *Client) find(k *keys) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.table[k.lock]
	if e == nil && !c.closedLocked() {
		e = &entry{client: c, keys: *k}
		e.lock.env = c
		e.alarm.owner = e
		c.table[k.lock] = e
	}
	return e
}

func (c *Client) lookup(key string) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table[key]
}

// retire takes e out of the table if nothing would be forgotten with it.
func (c *Client) retire(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead || !e.lock.idle() {
		return
	}
	e.dead = true
	c.dog.remove(&e.alarm)
	delete(c.table, e.keys.lock)
	c.drainLocked()
}

func (c *Client) entries() []*entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*entry, 0, len(c.table))
	for _, e := range c.table {
		all = append(all, e)
	}
	return all
}

func (c *Client) closedLocked() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// unlocked: one that was counted in unlocks does not wait any more.
func (c *Client) unlocked() {
	c.unlocks.Add(-1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drainLocked()
}

func (c *Client) drainLocked() {
	if c.closedLocked() && len(c.table) == 0 && c.unlocks.Load() == 0 {
		select {
		case <-c.drained:
		default:
			close(c.drained)
		}
	}
}

// mostLosses is how many losses may wait for a loss handler that blocks.
const mostLosses = 100_000

// Close shuts the client down, waiting up to 5 s for leases to be unlocked; see
// Shutdown.
func (c *Client) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	return c.Shutdown(ctx)
}

// Shutdown admits no new callers, turns away those who wait with ErrClosed, ends
// the contexts of all leases with that cause, and waits until ctx ends for their
// Unlock, during which they go on being renewed. A lease that nobody unlocked is
// not released, since somebody may still be working under it: its TTL ends it.
// Idle grants are released. rdb stays open.
//
// The goroutines of the client are stopped and waited for, and so is what the
// logger, the loss handler and OpenTelemetry are being told: until ctx ends, and
// 100 ms at least. What lasts longer, as a command may that gets no answer or a
// handler that blocks, ends by itself when it can. So Shutdown may be called from
// anywhere, such as a loss handler, which then waits for itself until ctx ends.
//
// The error, which matches ErrClosed, says what was not unlocked and what was not
// waited for. Later calls, and concurrent ones, wait for the first and return the
// same, or the error of their ctx if that ends before.
func (c *Client) Shutdown(ctx context.Context) error {
	c.mu.Lock()
	if c.closedLocked() {
		c.mu.Unlock()
		if !endsBefore(ctx, c.stopped) {
			return ended(ctx)
		}
		return c.outcome
	}
	close(c.closing)
	c.drainLocked()
	c.mu.Unlock()
	defer close(c.stopped)

	for _, e := range c.entries() {
		e.step(func(now time.Time, fx *effects) { e.lock.finish(now, fx) })
	}
	var left []string
	if endsBefore(ctx, c.drained) {
		c.reaper.drain(ctx)
	} else {
		left = c.abandoned()
	}
	c.stop()
	c.dog.halt()
	c.inbox.halt()
	c.crew.close()
	last, cancel := atLeast(ctx, lastWords)
	defer cancel()
	waitFor := func(what string, wait func(context.Context) bool) {
		if !wait(last) {
			left = append(left, "not waited for: "+what)
		}
	}
	waitFor("commands under way, or hooks of the Redis client", c.crew.wait)
	c.reaper.giveUp()
	waitFor("metrics being collected", c.metrics.stop)
	waitFor("the loss handler", c.losses.wait)
	waitFor("spans and measurements being told", c.tracing.told.wait)
	waitFor("the logger", c.journal.lines.wait)
	if left != nil {
		c.outcome = fmt.Errorf("%w, but %s", ErrClosed, strings.Join(left, "; "))
	}
	return c.outcome
}

// lastWords is how long goroutines, handlers and processors are waited for at least:
// where a lease is given up, ctx has ended before these had their turn.
const lastWords = 100 * time.Millisecond

// atLeast returns a context that ends when parent has ended and d is over.
func atLeast(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(parent))
	began := time.Now()
	stop := context.AfterFunc(parent, func() { time.AfterFunc(d-time.Since(began), cancel) })
	return ctx, func() {
		stop()
		cancel()
	}
}

// abandoned says how much was not given back.
func (c *Client) abandoned() (left []string) {
	held, releasing := 0, 0
	for _, e := range c.entries() {
		e.mu.Lock()
		held += e.lock.inside.n
		if e.lock.inside.n == 0 {
			releasing++
		}
		for w := e.lock.inside.first; w != nil; w = w.next {
			if r, first := e.closedLocked(w, holdAbandoned, time.Now()); first {
				c.tracing.later(func() { c.left(&r) })
			}
		}
		e.mu.Unlock()
	}
	if held > 0 {
		left = append(left, fmt.Sprintf("%d leases were not unlocked: they are not renewed any more, and their TTL ends them", held))
	}
	if n := max(releasing, int(c.unlocks.Load())); n > 0 {
		left = append(left, fmt.Sprintf("%d releases were not confirmed: unless they were done, their TTL ends them", n))
	}
	return left
}
