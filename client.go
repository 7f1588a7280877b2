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

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// The Client, its table of the locks in use, and its shutdown, which waits for the client's goroutines as
// long as its context lasts, and for finalWait at least; the last column says what waits:
//
//	goroutine         runs                          ends with                waited for by
//	watchdog          from the first lock on        watchdog.halt            group.wait
//	inbox             from the first lock on        inbox.halt               group.wait
//	senders           for a command or a batch,     the reply or a timeout   group.wait
//	                  in a Cluster while a master
//	                  has cancels to carry out
//	dividers          while batches for a Cluster   the masters being named  group.wait
//	                  are divided among masters
//	spreaders         while batches of renewals     the batches' time, halt  group.wait
//	                  wait for their turn
//	slot readers      after a command that failed   the reload's end         group.wait
//	askers            for Inspect and ForceUnlock,  the answer or a timeout  group.wait
//	                  and whether scripts may
//	                  publish, where they may not
//	pool checks       after a command without       the last PING's answer   group.wait
//	                  an answer                     or timeout
//	closers           of a broken subscription      its closing              group.wait
//	members           of a quorum: senders, probes  idleness, an answer,     leaveMembers, which does not
//	                  and cancels                   or the client's end      wait for servers that hang
//	async queues      while they have items         an empty queue           asyncQueue.wait
//	last measurement  during Shutdown               a collection under way   metrics.stop

// A Client creates locks that live in one Redis deployment. Redis sees it as one owner: its
// locks exclude those of other clients, and its callers exclude each other as users of
// sync.Mutex do. Create one Client per process and keep it. It is safe for concurrent use.
//
// Two goroutines last as long as a Client that is in use: the watchdog, which has every lease
// renewed, and the inbox, which receives notifications from Redis; a client of [NewQuorum] has an
// inbox for each server. They start when the first lock is asked for, and end in Close. Close a Client
// that is no longer needed even if it was never used: until then the package's metrics keep it in memory.
//
// The methods of a Client that is nil, or that was not made by [New] or NewQuorum, fail: those that return an
// error return one, Stats returns zeros, and locks fail when they are used.
type Client struct {
	server   server
	opts     clientOptions
	id       string
	began    time.Time
	proof    protocol.Proof // in ids, once the inbox is confirmed
	once     sync.Once      // starts the watchdog and the inbox
	inbox    inboxes
	alone    *inbox         // the only element of inbox; nil for a quorum, which probes and doubts its inboxes itself
	quorum   *quorum.Server // nil for a single deployment, else the same as server
	members  group          // goroutines that send to a quorum's servers
	late     lateInboxes    // of a quorum
	watchdog *watchdog
	canceler *canceler
	outage   *outage
	pool     *poolCheck // nil for a quorum
	downtime downtime

	roundTrip protocol.RoundTrip // of locks' commands

	slotMap *slotMap
	log     *throttledLog
	losses  asyncQueue[LossEvent]
	tracing *tracing
	metrics *metrics
	slow    *slowWatch
	group   group
	stats   counters
	signals sync.Pool // see newSignal; not shared, because a channel belongs to one test's bubble
	recent  recentLocks

	// unlocks counts the calls of Unlock that are waiting. Shutdown waits for them, even if
	// their lock was already removed from the table and only a cancel is still to be confirmed.
	unlocks atomic.Int32

	base      context.Context // of every command; Shutdown ends it with stop
	stop      context.CancelFunc
	deadlines redisserver.Deadlines // of the commands of locks

	// mu guards what follows. Mutexes are locked in this order:
	//
	//	Client.mu -> entry.mu -> inbox.mu -> watchdog.mu
	//	entry.mu -> quorum.Server.mu -> inbox.mu, serversClock.mu, or a member's -> group.mu of members
	//	entry.mu -> canceler.mu or leaseContexts.mu
	//	canceler.mu, outage.mu, downtime.mu or slotMap.mu -> watchdog.mu
	//	poolCheck.mu -> group.mu
	//	entry.mu or downtime.mu -> asyncQueue.mu, of the queue of spans or of log lines
	//
	// metrics.mu, sharedGauges.mu and every other group.mu are never held together with another mutex. No
	// mutex is held during network calls, logging, or calls of user code.
	mu      sync.Mutex
	table   map[string]*entry // locks in use, by their key in Redis
	closing chan struct{}     // closed when Shutdown begins
	drained chan struct{}     // closed once Shutdown has begun, no lock is in use and no Unlock waits
	stopped chan struct{}     // closed when Shutdown is done
	unused  chan struct{}     // closed when a lock is removed from the table; nil if nobody waits for that
	outcome error             // what Shutdown returned; written before stopped is closed
}

// server is where locks live: one Redis deployment, or the servers of a quorum. Its methods
// block on the network and are safe for concurrent use.
type server interface {
	// HonorsDeadlines reports whether commands end at the deadline of their context, whatever
	// the network does.
	HonorsDeadlines() bool
	// Commands returns how many commands were sent.
	Commands() int64
	// Do runs one command. After an error its outcome is unknown.
	Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error)
	// Renew renews many grants that one server has, together, and notes each outcome in batch. It
	// takes one round trip, and another one if the server did not know a script; either is repeated
	// once if it met a stale connection. Unless ctx has a deadline, each may take
	// protocol.CommandTimeout.
	Renew(ctx context.Context, batch []protocol.Renewal)
	// Touch extends the expiry of the last token of locks that are held for long, if a renewal
	// that was granted asks for that. It takes no longer than a round trip of Renew. No lease
	// depends on it: a token has to outlive its lock only if the server's clock is set back, and
	// two more tries, at least, follow before the token expires.
	Touch(ctx context.Context, batch []protocol.Renewal) error
	// Cancel ends many requests that one server has, together; results[i] is about batch[i].
	Cancel(ctx context.Context, batch []protocol.CancelRequest) (results []protocol.Canceled)
	// Echo publishes a nonce to an inbox and returns the number of its receivers. It takes no
	// longer than a round trip of Renew.
	Echo(ctx context.Context, k *protocol.Keys, channel, nonce string) (int, error)
	// Evict takes the lock from its owners, notifies them, and lets the next request in. It
	// returns on how many servers there were owners.
	Evict(ctx context.Context, k *protocol.Keys) (on int, err error)
	// Inspect returns what is known of the lock, and changes nothing.
	Inspect(ctx context.Context, k *protocol.Keys) (protocol.Snapshot, error)
}

// New returns a client for the deployment that rdb talks to: a single node, one behind Sentinel, or a
// Cluster. It does no I/O, so it works while Redis is down, and it never closes rdb. Two copies of one client
// must never run, as in a virtual machine and a clone of it: call New after a snapshot has been restored. It
// refuses a *redis.Ring, because that chooses shards by name, so messages would not arrive. It cannot
// tell if redis.ClusterOptions.ClusterSlots makes a cluster of standalone servers, where many messages do
// not arrive either, and waits take up to seconds longer. It treats the client of
// redis.NewFailoverClusterClient as a Cluster's, so behind Sentinel use redis.NewFailoverClient.
// Errors match [ErrInvalidOption].
//
// A *redis.Client should have ContextTimeoutEnabled set. Otherwise its commands cannot be
// bounded one by one, and the locks use a clone of it on the same connection pool, with
// separate timeouts. Hooks that were added to rdb are called when the clone dials, but not for
// its commands. A *redis.ClusterClient is not cloned, so New logs a warning if it lacks that option.
// A hook must not send a lock's command a second time: its error would then be about the second time only.
//
// rdb may also be your own type around one of these. If it has the method Options of a
// *redis.Client, as it does if it embeds one, it is treated as a *redis.Client, except that it
// is never cloned, so ContextTimeoutEnabled should be set. Nothing is known about any other
// type: its commands are not bounded, a waiter that died is not skipped, a *redis.Ring inside it is not
// noticed, and New logs that it does not know the type. One that embeds the interface redis.UniversalClient
// has no method Options: pass New the client inside it.
func New(rdb redis.UniversalClient, opts ...Option) (*Client, error) {
	o, err := newClientOptions(opts)
	if err != nil {
		return nil, err
	}
	if o.quarantine > 0 {
		return nil, invalid("WithQuarantine is for NewQuorum")
	}
	d, err := deploymentOf(rdb)
	if err != nil {
		return nil, err
	}
	if o.replicas > 0 && d.ReadTimeout > 0 && d.ReadTimeout <= o.replicasWait {
		return nil, invalid("timeout %v for replicas must be shorter than the Redis client's ReadTimeout of %v, which ends the wait for them", o.replicasWait, d.ReadTimeout)
	}
	server := redisserver.New(rdb, o.prefix)
	c := newClient(o, d.Proof())
	c.pool = &poolCheck{client: c, server: server}
	server.OnSilence = c.pool.hadNoAnswer
	c.server = withReplicas(server, &o)
	c.alone = newInbox(c, server.Deployment)
	c.inbox = inboxes{c.alone}
	c.slotMap = newSlotMap(c, d)
	switch {
	case d.Kind == redisserver.UnknownKind:
		c.log.unknownClient()
	case !server.Bounded: // it may be, where the client is not
		c.log.unbounded()
	}
	if d.KeepsSentinel() {
		c.log.keepsSentinel()
	}
	c.metrics.register()
	return c, nil
}

// newClient returns a client that has no server yet.
func newClient(o clientOptions, proof protocol.Proof) *Client {
	c := &Client{
		opts:    o,
		id:      protocol.NewClientID(o.owner),
		began:   time.Now(),
		proof:   proof,
		table:   map[string]*entry{},
		closing: make(chan struct{}),
		drained: make(chan struct{}),
		stopped: make(chan struct{}),
	}
	c.base, c.stop = context.WithCancel(context.Background())
	c.deadlines.Base = c.base
	c.log = newThrottledLog(&o)
	c.watchdog = newWatchdog(c)
	c.canceler = newCanceler(c)
	c.outage = newOutage(c)
	c.downtime.client = c
	c.losses.deliver, c.losses.limit, c.losses.what, c.losses.hideNames = o.onLoss, maxLosses, "the loss handler", o.hideNames
	if o.onLoss == nil {
		c.losses.deliverAll = c.log.lost
	}
	c.tracing = newTracing(c, &c.opts)
	c.metrics = newMetrics(c, &c.opts)
	c.slow = newSlowWatch(c, o.slow)
	c.late.client = c
	return c
}

// unmade reports whether c is nil or the zero value, neither of which New returns.
func (c *Client) unmade() bool { return c == nil || c.server == nil }

// maxLosses bounds the losses that are queued for a loss handler that blocks.
const maxLosses = 100_000

// deploymentOf returns what is known about rdb, or an error if that cannot keep locks.
func deploymentOf(rdb redis.UniversalClient) (redisserver.Deployment, error) {
	if isNil(rdb) {
		return redisserver.Deployment{}, invalid("the Redis client is nil")
	}
	d := redisserver.DeploymentOf(rdb)
	if d.Kind == redisserver.Ring {
		return d, invalid("a *redis.Ring cannot keep locks: it picks shards by name, so messages about a lock reach another shard; " +
			"use a *redis.Client for one of its nodes, or a Cluster")
	}
	return d, nil
}

// begin starts the goroutines that last as long as the client.
func (c *Client) begin() {
	c.once.Do(func() {
		c.group.start(c.watchdog.run)
		for _, in := range c.inbox {
			c.group.start(in.run)
		}
	})
}

// environment is the Client as the state machines of its locks see it, under entry.mu. It is a
// separate type so that these methods are not part of Client's API.
type environment Client

var _ lockstate.Environment = (*environment)(nil)

// NewRequest returns a request under a new id. The id carries the proof that messages reach
// this client, if there is one.
func (c *environment) NewRequest(m protocol.Mode, ttl time.Duration, idles bool, from protocol.Origin) protocol.Request {
	proof := protocol.Unproved
	if c.inbox.confirmed() {
		proof = c.proof
	}
	return protocol.NewRequest(c.id, m, ttl, idles, proof, from)
}

// Client returns the client's name in ids.
func (c *environment) Client() string { return c.id }

// InboxPending reports whether messages do not arrive yet but soon will. If ids never carry a
// proof, there is none to wait for.
func (c *environment) InboxPending() bool {
	return c.proof != protocol.Unproved && !c.inbox.settled()
}

// HasInbox reports whether messages reach this client, so that waiting needs no polling.
func (c *environment) HasInbox() bool { return !c.inbox.polls() }

// Subscribed reports whether the inbox is confirmed.
func (c *environment) Subscribed() bool { return c.inbox.confirmed() }

// Jitter returns a random number in [0, 1).
func (c *environment) Jitter() float64 { return rand.Float64() }

// HoldsMany is watchdog.holdsMany.
func (c *environment) HoldsMany() bool { return c.watchdog.holdsMany() }

// RoundTrip returns how long Redis takes to answer a lock's command.
func (c *environment) RoundTrip() time.Duration { return c.roundTrip.Estimate() }

// Start returns the instant from which the grid of renewals is counted.
func (c *environment) Start() time.Time { return c.began }

// find returns the entry for k. If there is none, it makes one, with a label for metrics; but
// after Close it makes none and returns nil.
func (c *Client) find(k *protocol.Keys, label *string) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.table[k.Lock]
	if e == nil && !c.closes() {
		e = &entry{client: c, keys: *k, label: label}
		c.table[k.Lock] = e
		c.metrics.noteUse()
		c.slow.noteUse()
	}
	return e
}

// anyInUse reports whether any lock is in the table.
func (c *Client) anyInUse() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.table) > 0
}

func (c *Client) lookup(key string) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table[key]
}

// retire removes e from the table if it is still idle.
func (c *Client) retire(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead || !e.stateLocked().Idle() {
		return
	}
	e.dead = true
	if e.lastKnownLocked() == (lastKnown{}) { // otherwise a caller whose wait ends now may need it
		e.sleepLocked()
	}
	c.watchdog.remove(&e.alarm)
	delete(c.table, e.keys.Lock)
	if c.unused != nil {
		close(c.unused)
		c.unused = nil
	}
	c.drainLocked()
}

// awaitUnused waits until no caller of a client that is being closed uses the lock with this key anymore,
// or Shutdown is done.
func (c *Client) awaitUnused(key string) {
	for {
		c.mu.Lock()
		if c.table[key] == nil {
			c.mu.Unlock()
			return
		}
		if c.unused == nil {
			c.unused = make(chan struct{})
		}
		unused := c.unused
		c.mu.Unlock()
		select {
		case <-unused:
		case <-c.stopped:
			return
		}
	}
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

// stepAll gives each lock an event.
func (c *Client) stepAll(event func(l *lockstate.Lock, now time.Time, fx *lockstate.Effects)) {
	for _, e := range c.entries() {
		e.step(func(now time.Time, fx *lockstate.Effects) { event(e.stateLocked(), now, fx) })
	}
}

// Close shuts the client down and waits up to 5 s for leases to be unlocked; see Shutdown. It
// returns nil if all were unlocked and nothing else was left. It may be called from any
// goroutine, and more than once.
func (c *Client) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	return c.Shutdown(ctx)
}

// Shutdown closes the client. It admits no new callers, rejects waiters with [ErrClosed], ends the
// contexts of all leases with that cause, and waits for the leases to be unlocked, until ctx ends or
// 100 ms have passed, whichever is later; meanwhile they are still renewed. A lease that is not unlocked
// by then is not released, since its holder may still be working under it; it is left to expire. Idle
// grants are released. rdb stays open.
//
// Calls that are waiting return ErrClosed; Lock and RLock, which return no error, panic with it. While
// another goroutine of the client holds the lock, for reading or for writing, they panic only once it
// is unlocked, or Shutdown is done, because an Unlock deferred before that Lock would end that hold;
// TryLock returns false until then. Stop the goroutines that call Lock before you close the client, or
// use LockContext.
//
// Commands, releases and cancels that are under way have 100 ms, even if ctx ends before. Then Shutdown
// stops the client's goroutines. It waits for them, and for the calls of the logger, the loss handler and
// OpenTelemetry, until ctx ends, but for up to 100 ms even if ctx has ended by then.
// Anything slower, such as a command without a reply or a handler that blocks, is left to end by
// itself. So Shutdown may be called from anywhere, even from a loss handler, in which case it waits for
// its own caller until ctx ends.
//
// If Redis has not answered for a release, as during an outage, Shutdown keeps trying until ctx ends.
// So it does for the cancel of a request that was given up. If that request had no answer either, a server
// that hung may still carry it out, so once Redis answers, the cancel is repeated a second later. Shutdown
// does not wait for a cancel that is refused or cannot be sent, nor on a quorum for servers that do not
// answer.
//
// Shutdown returns nil if nothing was left. Otherwise the error matches ErrClosed, says how many leases
// were not unlocked (naming at most three of their locks), how many releases Redis did not confirm, how
// many requests were not canceled, and what Shutdown did not wait for. It does not count releases that
// can no longer be tried because rdb was closed first: only their Unlock and the log tell of those.
// Later and concurrent calls wait for the first one and return the same error, or the error of their
// own ctx if that ends before.
func (c *Client) Shutdown(ctx context.Context) error {
	switch {
	case c.unmade():
		return errClientUnmade
	case ctx == nil:
		return errNilContext
	}
	c.mu.Lock()
	if c.closes() {
		c.mu.Unlock()
		if !waitFor(ctx, c.stopped) {
			return ended(ctx)
		}
		return c.outcome
	}
	close(c.closing)
	c.drainLocked()
	c.mu.Unlock()
	defer close(c.stopped)

	c.stepAll((*lockstate.Lock).Close)
	var left []string
	ifCutShort(func() { // by a method of ctx, so nothing is waited for anymore
		c.halt(over(), c.abandoned())
	}, func() { left = c.awaitUnlocks(ctx) })
	c.halt(ctx, left)
	return c.outcome
}

// halt ends all that the client does. It waits for its goroutines as awaitGoroutines says, and sets the
// outcome of Shutdown; left says what could not be waited for so far.
func (c *Client) halt(ctx context.Context, left []string) {
	c.stop()
	c.watchdog.halt()
	c.inbox.halt()
	c.group.close()
	c.haltQuorum()
	defer func() {
		if left != nil {
			c.outcome = fmt.Errorf("%w, but %s", ErrClosed, strings.Join(left, "; "))
		}
	}()
	ifCutShort(func() { // by a method of ctx
		left = append(left, c.awaitGoroutines(over())...)
	}, func() { left = append(left, c.awaitGoroutines(ctx)...) })
}

// over returns a context that has ended.
func over() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// awaitUnlocks waits, until ctx ends and for at least finalWait, for the leases to be unlocked and for
// Redis to confirm the releases and cancels. It returns what is left then.
func (c *Client) awaitUnlocks(ctx context.Context) (left []string) {
	least, cancel := context.WithTimeout(context.Background(), finalWait)
	defer cancel()
	unlocked := waitFor(ctx, c.drained)
	if unlocked {
		c.canceler.drain(ctx)
	}
	if ctx.Err() != nil {
		ctx, unlocked = least, waitFor(least, c.drained)
		c.canceler.drain(ctx)
	}
	if !unlocked {
		return c.abandoned()
	}
	left = c.unanswered(0, 0)
	c.drainQuorum(ctx)
	return left
}

// awaitGoroutines waits, until ctx ends and for at least finalWait, for what the client's goroutines still
// do. It returns what it could not wait for.
func (c *Client) awaitGoroutines(ctx context.Context) (left []string) {
	ctx, cancel := atLeast(ctx, finalWait)
	defer cancel()
	await := func(what string, wait func(context.Context) bool) {
		if !wait(ctx) {
			left = append(left, "not waited for: "+what)
		}
	}
	// In this order, because each may give work to those after it: ending a lease calls the
	// loss handler, and nearly all of them may log.
	await("commands under way, or hooks of the Redis client", c.group.wait)
	c.leaveMembers()
	c.canceler.giveUp()
	await("metrics being collected", c.metrics.stop)
	await("the loss handler", c.losses.wait)
	await("spans and measurements still being delivered", c.tracing.queue.wait)
	await("the logger", c.log.lines.wait)
	return left
}

// logFailure logs that a command about a lock failed, unless the end of this client cut it short.
func (c *Client) logFailure(lock string, fail *protocol.Failure) {
	if !c.cutShort(fail) {
		c.log.commandsFailed(failedCommand{lock, fail})
	}
}

// cutShort reports whether a command may have failed because this client has stopped, which cancels its
// commands, or because the Redis client was closed afterwards.
func (c *Client) cutShort(fail *protocol.Failure) bool {
	if c.base.Err() == nil {
		return false
	}
	return fail.Kind == protocol.NoAnswer || fail.Kind == protocol.NeverSent || fail.Kind == protocol.ClientClosed
}

// closes reports whether Shutdown has begun.
func (c *Client) closes() bool { return isClosed(c.closing) }

// isClosed reports whether a channel on which nothing is sent is closed.
func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// unlocked ends the wait of an Unlock that was counted in unlocks.
func (c *Client) unlocked() {
	c.unlocks.Add(-1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drainLocked()
}

// drainLocked closes drained once its condition holds.
func (c *Client) drainLocked() {
	if c.closes() && len(c.table) == 0 && c.unlocks.Load() == 0 && !isClosed(c.drained) {
		close(c.drained)
	}
}

// abandoned says what was not released, and records the holds that end unreleased.
func (c *Client) abandoned() (left []string) {
	held, releasing, asking := 0, 0, 0
	var names []string
	for _, e := range c.entries() {
		e.mu.Lock()
		_, inside := e.stateLocked().Counts()
		held += inside
		switch {
		case inside > 0:
			names = append(names, e.keys.Name())
		case e.stateLocked().Granted():
			releasing++
		case e.stateLocked().CommandInFlight():
			asking++ // what it obtains is canceled by nobody
		}
		for w := e.stateLocked().Holders(); w != nil; w = w.NextHolder() {
			if r, first := e.takeHoldLocked(callOf(w), holdEnd{how: holdAbandoned, at: time.Now()}); first {
				c.tracing.later(func() { c.recordHold(&r) })
			}
		}
		e.mu.Unlock()
	}
	if held > 0 {
		what, then := "1 lease was", "it is no longer renewed and expires with its TTL"
		if held > 1 {
			what, then = fmt.Sprint(held, " leases were"), "they are no longer renewed and expire with their TTLs"
		}
		left = append(left, fmt.Sprintf("%s not unlocked (%s): %s", what, someNames(names), then))
	}
	return append(left, c.unanswered(releasing, asking)...)
}

// unanswered says which releases and cancels had no answer. releasing is how many releases are under way, and
// asking how many requests for a lock.
func (c *Client) unanswered(releasing, asking int) (left []string) {
	releases, requests := c.canceler.unanswered()
	requests += asking
	switch n := max(releasing+releases, int(c.unlocks.Load())); {
	case n == 1:
		left = append(left, "1 release was not confirmed: if Redis did not carry it out, the lease expires with its TTL")
	case n > 1:
		left = append(left, fmt.Sprint(n, " releases were not confirmed: where Redis did not carry them out, the leases expire with their TTLs"))
	}
	switch {
	case requests == 1:
		left = append(left, "1 request that was given up was not canceled: if Redis has it, or still carries it out, its lock may be taken until the TTL ends")
	case requests > 1:
		left = append(left, fmt.Sprint(requests, " requests that were given up were not canceled: where Redis has them, or still carries them out, their locks may be taken until the TTLs end"))
	}
	return left
}

// finalWait is the least time for which Shutdown waits, once for commands, releases and cancels that are
// under way, and once for goroutines, handlers and processors: if leases were not unlocked, ctx has ended
// before their turn comes. On a quorum, leaveMembers can add it a third time.
const finalWait = 100 * time.Millisecond

// atLeast returns a context that ends once parent has ended and d has passed.
func atLeast(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(parent))
	began := time.Now()
	stop := context.AfterFunc(parent, func() { time.AfterFunc(d-time.Since(began), cancel) })
	return ctx, func() {
		stop()
		cancel()
	}
}

// await waits for what only a client that is not closed does, and returns why it has stopped
// waiting: because ctx or the client has ended.
func (c *Client) await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	case <-c.base.Done():
	}
	switch {
	case isClosed(done):
		return nil
	case ctx.Err() != nil:
		return c.ended(ctx)
	}
	return ErrClosed
}

// withReplicas returns s, or a server that waits for as many replicas as the options ask for.
func withReplicas(s *redisserver.Server, o *clientOptions) server {
	if o.replicas > 0 {
		return redisserver.Replicated(s, o.replicas, o.replicasWait)
	}
	return s
}
