package leased

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

const (
	reloadEvery   = 500 * time.Millisecond // at most this often
	reloadFor     = 5 * time.Second        // after the last failure; commands that fail are repeated sooner than that
	reloadHedge   = 250 * time.Millisecond // a reload that takes longer may have asked a frozen node
	reloadsAtOnce = 4                      // at most so many reloads of the last reloadStuck may be under way
	reloadStuck   = 2 * time.Second        // one that takes longer may go on for half a minute: its node's host has vanished
	reloadsInAll  = 24                     // at most so many may be under way
	reloadAwaited = 500 * time.Millisecond // how long commands wait for a reload: time for a second one
	reloadTakes   = 100 * time.Millisecond // allowed for a ReloadState, which does not say when it is done; it usually takes less
	movingTime    = 3 * time.Second        // for how long commands of a lock may meet nodes that name other ones before that is an outage
	movedBefore   = 10 * time.Second       // a lock whose commands have met no such node for this long has stopped moving
	reloadTries   = 4                      // how often one reload asks for the slots if a node names no master
)

// slotMap makes the client of a Redis Cluster learn again which node serves which slot. go-redis
// does so once a minute, and when a node answers that a slot has moved. But a node that is dead or
// frozen answers nothing, and a node that was taken out of its cluster answers only that it serves
// no slots. So commands would continue to be sent there for up to a minute after a replica was
// promoted, which is longer than the usual lease.
//
// After a command has failed in such a way, the map is reloaded every half second until no command
// has failed for some time. After each reload, one lock that waits out a pause probes Redis. While
// the first reload after a failure is under way, commands wait a little for it: at a frozen node
// they would be lost, and hold up their locks for another timeout.
//
// go-redis reloads the map from a node chosen at random, and if that node is frozen, waits for its
// whole read timeout, which is 5 s by default. Its ReloadState does one reload after another, so a
// frozen node would hold up all of them. ForEachMaster begins with a reload too, but separately in
// each call, so if one does not come back, another one is started. (A deadline would not do: when
// it ends, no node is left to ask, and go-redis forgets all addresses except those that it was made
// with.) Where a node's host has vanished, go-redis dials it five times, for 5 s each, before it asks
// another node.
type slotMap struct {
	alarm
	client  *Client
	rdb     redisserver.Slots   // nil where there are no slots
	visitor redisserver.Visitor // reloads what rdb does, several times at once; nil if there is none
	masters redisserver.Masters // nil where one node has all locks

	stale atomic.Bool // whether fresh is set; written under mu

	mu      sync.Mutex        // guards what follows; only watchdog.mu is locked under it
	began   time.Time         // when the last reload began
	back    bool              // whether that reload has come back
	until   time.Time         // reloading goes on until then
	number  int               // of the last reload
	running map[int]time.Time // when the reloads under way began, by number
	fresh   chan struct{}     // closed when a reload comes back; nil if commands need not wait for one

	moved map[string]movement // by key, of locks whose commands meet nodes that name other ones; empty unless the map is being reloaded
}

// movement is when commands of one lock met nodes that named other ones.
type movement struct{ first, last time.Time }

func newSlotMap(c *Client, of redisserver.Deployment) *slotMap {
	return &slotMap{client: c, rdb: of.Slots, visitor: of.Visitor, masters: of.Masters, running: map[int]time.Time{}, moved: map[string]movement{}}
}

// moves notes that a command of a lock met a node that named another one, and reports whether that is passing, until
// the map is reloaded and the command repeated. It is if it has gone on for less than movingTime, and than most.
// Where there are no slots, none moves.
func (m *slotMap) moves(key string, most time.Duration, now time.Time) bool {
	if m.rdb == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	move, met := m.moved[key]
	if !met {
		move.first = now
	}
	move.last = now
	m.moved[key] = move
	return now.Sub(move.first) < min(movingTime, most)
}

// commandFailed reloads the map if the node that was asked may no longer be the right one. A node
// that answers is there, so only the answer that it does not serve the slot counts. It calls no method of
// the error, which can be user code: a lock must not miss its step, nor a canceler its next cancel, because
// that panics.
func (m *slotMap) commandFailed(fail *protocol.Failure) {
	if fail == nil {
		return
	}
	switch {
	case fail.Kind == protocol.NeverSent, fail.Kind == protocol.NoAnswer:
	case fail.Moved:
	default:
		return
	}
	m.reload()
}

// reload reloads the map soon: at once, or half a second after the last reload began.
func (m *slotMap) reload() {
	if m.rdb == nil {
		return
	}
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.began.Add(reloadEvery)
	if at.Before(now) {
		at = now
	}
	if (at.Equal(now) || !m.back) && m.fresh == nil {
		m.fresh = make(chan struct{})
		m.stale.Store(true)
	}
	if !m.until.After(now) { // else the alarm is set
		m.client.watchdog.set(m, at)
	}
	m.until = now.Add(reloadFor)
}

// await waits, but not for long, for the reload that a failure has started, if there is one.
func (m *slotMap) await(ctx context.Context) {
	if !m.stale.Load() {
		return
	}
	m.mu.Lock()
	fresh := m.fresh
	m.mu.Unlock()
	if fresh == nil {
		return
	}
	timer := time.NewTimer(reloadAwaited)
	defer timer.Stop()
	select {
	case <-fresh:
	case <-ctx.Done():
	case <-timer.C:
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.fresh == fresh { // otherwise that reload is back, and another one under way
			m.refreshedLocked()
		}
	}
}

func (m *slotMap) refreshedLocked() {
	if m.fresh != nil {
		close(m.fresh)
		m.fresh = nil
		m.stale.Store(false)
	}
}

// fire reloads the map if it is time to, in a goroutine, because a user's wrapper may block.
func (m *slotMap) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	m.mu.Lock()
	due := m.began.Add(reloadEvery)
	if !m.back {
		due = m.began.Add(reloadHedge)
	}
	begin := !now.Before(due) && m.mayBeginLocked(now)
	next := due
	if !now.Before(due) {
		m.began, m.back = now, !begin
		next = now.Add(reloadHedge)
	}
	if begin {
		m.number++
		m.running[m.number] = now
	}
	number := m.number
	if next.Before(m.until) {
		m.client.watchdog.set(m, next)
		maps.DeleteFunc(m.moved, func(_ string, move movement) bool { return now.Sub(move.last) >= movedBefore })
	} else {
		m.until = time.Time{}
		clear(m.moved)
	}
	m.mu.Unlock()
	if begin && !m.client.group.start(func() { m.run(number) }) {
		m.ended(number)
	}
	return batch
}

// mayBeginLocked reports whether another reload may begin.
func (m *slotMap) mayBeginLocked(now time.Time) bool {
	recent := 0
	for _, began := range m.running {
		if now.Sub(began) < reloadStuck {
			recent++
		}
	}
	return recent < reloadsAtOnce && len(m.running) < reloadsInAll
}

// run is a goroutine owned by the client, ended with the reload, and waited for by Shutdown.
func (m *slotMap) run(number int) {
	takes := time.Duration(0)
	defer func() { m.client.outage.probeSoon(time.Now().Add(takes)) }()
	defer m.ended(number)
	defer m.client.recoverPanic("the Redis client, which was to read its Cluster's slots,")
	if m.visitor != nil {
		// Close does not end this: see the type. go-redis's own timeouts do.
		ctx := context.WithoutCancel(m.client.base)
		masters, err := mastersOf(ctx, m.visitor)
		// A node that has lost its part in the Cluster names no master, and go-redis believes it.
		for range reloadTries - 1 {
			if err != nil || len(masters) > 0 || m.client.base.Err() != nil {
				break
			}
			masters, err = mastersOf(ctx, m.visitor)
		}
		if err == nil {
			m.client.inbox.mastersAre(masters)
		}
		return
	}
	takes = reloadTakes
	m.rdb.ReloadState(m.client.base)
}

// mastersOf has the map reloaded, and returns the addresses of the masters that it names.
func mastersOf(ctx context.Context, all redisserver.Visitor) (masters []string, err error) {
	var mu sync.Mutex // the function is called in a goroutine for each master
	err = all.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		masters = append(masters, node.Options().Addr)
		return nil
	})
	return masters, err
}

func (m *slotMap) ended(number int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, number)
	m.refreshedLocked()
	if number == m.number {
		m.back = true
	}
}

// byMaster calls send with each part of a batch that another master of the Cluster has to answer.
// In one pipeline, all would wait for the master that answers last, and one that hangs would cost
// what the others hold. What belongs to masters that cannot be named is one part, under nil.
//
// To name a master, go-redis may have to read the slots from Redis, and the client may be a user's
// type. So this is not called by the watchdog, nor under a mutex, and waits no longer than a second,
// half of it for a reload that is under way. If a user's code panics or ends the goroutine, the batch is
// sent as one part. So send must not call a user's code itself.
func byMaster[T any](c *Client, batch []T, keys func(T) *protocol.Keys, send func(master *redis.Client, part []T)) {
	parts := map[*redis.Client][]T{}
	named := false
	defer func() {
		if !named {
			parts = map[*redis.Client][]T{nil: batch}
		}
		for master, part := range parts {
			send(master, part)
		}
	}()
	defer c.recoverPanic("the Redis client, which was to name the master of a key,")
	c.slotMap.await(c.base)
	ctx, stop := context.WithTimeout(c.base, reloadAwaited)
	defer stop()
	for _, one := range batch {
		var master *redis.Client
		if ctx.Err() == nil {
			if found, err := c.slotMap.masters.MasterForKey(ctx, keys(one).Lock); err == nil {
				master = found
			}
		}
		parts[master] = append(parts[master], one)
	}
	named = true
}
