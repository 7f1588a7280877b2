package leased

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	reloadEvery   = 500 * time.Millisecond // at most
	reloadFor     = 5 * time.Second        // after the last failure: commands that fail are repeated before that
	reloadHedge   = 250 * time.Millisecond // a reload that takes longer may have asked the node that is frozen
	reloadsAtOnce = 4                      // of which that can be true at most
	reloadAwaited = 500 * time.Millisecond // by commands: time for a second one
	reloadTakes   = 100 * time.Millisecond // usually less, of a ReloadState, which does not say when it is done
)

// slotMap has the client of a Redis Cluster learn again which node serves which slot.
// go-redis does so once a minute, and when a node answers that a slot has moved. A node
// that is dead or frozen answers nothing, and one that was taken out of its cluster
// answers only that it serves no slots; so commands would go on being sent there for up to
// a minute after a replica was promoted, which is longer than the usual lease.
//
// After a command failed in such a way the map is reloaded each half second, until none has
// failed for some time. After each reload a lock that waits out a pause is asked for. What
// would be sent while a failure has a reload begin waits for that a little: at a node that is
// frozen it would be lost, and hold its lock up, for another time-out.
//
// go-redis asks a node chosen by chance, and one that is frozen for its whole read time-out,
// which is 5 s by default. Its ReloadState does one reload after the other, so that
// one would hold up all. ForEachMaster reloads first as well, each call separately: where a
// reload does not come back another one is begun. (A deadline would not do: when it ends no
// node is left to ask, and go-redis forgets all but the addresses it was made with.)
type slotMap struct {
	alarm
	client *Client
	rdb    stateReloader // nil where there are no slots

	stale atomic.Bool // fresh is not nil; written under mu

	mu     sync.Mutex    // guards what follows; only watchdog.mu is locked under it
	began  time.Time     // the last reload
	back   bool          // it has come back
	until  time.Time     // reloading goes on until then
	number int           // of the last reload
	atOnce int           // goroutines that are at it
	fresh  chan struct{} // closed when a reload comes back; nil if commands need not wait for one
}

// stateReloader is a *redis.ClusterClient, or what embeds one.
type stateReloader interface{ ReloadState(context.Context) }

// masterVisitor is a stateReloader that can reload several times at once.
type masterVisitor interface {
	ForEachMaster(context.Context, func(context.Context, *redis.Client) error) error
}

func newSlotMap(c *Client, rdb redis.UniversalClient) *slotMap {
	m := &slotMap{client: c}
	m.rdb, _ = rdb.(stateReloader)
	return m
}

// commandFailed reloads where the node that was asked may not be the right one any more.
// What a node answers says that it is there, except that the slot is not served.
func (m *slotMap) commandFailed(fail *protocol.Failure) {
	if fail == nil {
		return
	}
	switch {
	case fail.Kind == protocol.NeverSent, fail.Kind == protocol.NoAnswer:
	case redis.HasErrorPrefix(fail.Err, "CLUSTERDOWN"):
	case redis.HasErrorPrefix(fail.Err, "MOVED"): // what was sent to one node, as with WithReplicas, is not sent on
	default:
		return
	}
	m.reload()
}

// reload reloads the map soon: now, or half a second after the last time.
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

// await waits for the reload that a failure has begun, if there is one, but not for long.
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
		m.refreshedLocked()
	}
}

func (m *slotMap) refreshedLocked() {
	if m.fresh != nil {
		close(m.fresh)
		m.fresh = nil
		m.stale.Store(false)
	}
}

// fire reloads the map if it is time, in a goroutine: a wrapper of the user's may block.
func (m *slotMap) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	m.mu.Lock()
	due := m.began.Add(reloadEvery)
	if !m.back {
		due = m.began.Add(reloadHedge)
	}
	begin := !now.Before(due) && m.atOnce < reloadsAtOnce
	next := due
	if !now.Before(due) {
		m.began, m.back = now, !begin
		next = now.Add(reloadHedge)
	}
	if begin {
		m.number++
		m.atOnce++
	}
	number := m.number
	if next.Before(m.until) {
		m.client.watchdog.set(m, next)
	} else {
		m.until = time.Time{}
	}
	m.mu.Unlock()
	if begin && !m.client.group.start(func() { m.run(number) }) {
		m.ended(number)
	}
	return batch
}

// run is owned by the client, ends when the reload does, and is waited for by Close.
func (m *slotMap) run(number int) {
	takes := time.Duration(0)
	defer func() { m.client.outage.probeSoon(time.Now().Add(takes)) }()
	defer m.ended(number)
	defer m.client.recoverPanic("the Redis client, which was to read its Cluster's slots,")
	if all, ok := m.rdb.(masterVisitor); ok {
		// Not ended by Close: see the type. go-redis' own time-outs end it.
		var mu sync.Mutex // each is called for in a goroutine of its own
		var masters []string
		err := all.ForEachMaster(context.WithoutCancel(m.client.base), func(_ context.Context, node *redis.Client) error {
			mu.Lock()
			defer mu.Unlock()
			masters = append(masters, node.Options().Addr)
			return nil
		})
		if err == nil {
			m.client.inbox.mastersAre(masters)
		}
		return
	}
	takes = reloadTakes
	m.rdb.ReloadState(m.client.base)
}

func (m *slotMap) ended(number int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.atOnce--
	m.refreshedLocked()
	if number == m.number {
		m.back = true
	}
}
