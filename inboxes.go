package leased

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
)

// inboxes are the inboxes of a client: one, or one for each server of a quorum. A majority of them
// decides what the client knows of them as a whole.
type inboxes []*inbox

// most reports whether is returns true for a majority.
func (all inboxes) most(is func(*inbox) bool) bool {
	n := 0
	for _, in := range all {
		if is(in) {
			n++
		}
	}
	return n >= quorum.Majority(len(all))
}

func (all inboxes) confirmed() bool { return all.most((*inbox).confirmed) }
func (all inboxes) polls() bool     { return all.most((*inbox).polls) }

// failing returns for how long fewer than a majority of the subscriptions have been confirmed.
func (all inboxes) failing(now time.Time) time.Duration {
	each := make([]time.Duration, len(all))
	for i, in := range all {
		each[i] = in.failing(now)
	}
	slices.Sort(each)
	return each[quorum.Majority(len(all))-1]
}

// settled reports whether the first subscription of every inbox was confirmed or failed, or took
// too long; see lateInboxes.
func (all inboxes) settled() bool {
	for _, in := range all {
		if !in.hasSettled() {
			return in.client.late.over.Load()
		}
	}
	return true
}

// reach says how messages reach the client: in the way in which they arrive from a majority of the
// servers or, if there is none, from the first server.
func (all inboxes) reach() inboxReach {
	for r := range inboxReaches {
		if all.most(func(in *inbox) bool { return in.reach() == r }) {
			return r
		}
	}
	return all[0].reach()
}

func (in *inbox) hasSettled() bool { return in.settled.Load() }

// settle notes that the first subscription was confirmed or failed, and reports whether that is
// news.
func (in *inbox) settle() bool {
	news := in.settled.CompareAndSwap(false, true)
	if news {
		in.client.late.await()
	}
	return news
}

// inboxGrace is how long the client waits for the first inboxes of a minority of the servers after
// those of the others have settled. Most often all settle within a few ms of each other.
const inboxGrace = 100 * time.Millisecond

// lateInboxes is the wait of a quorum's client for the inboxes of a minority. In a request that
// queued before they had settled, the ids for their servers would carry no proof that the process
// lives: if it were killed, those servers would make it the owner for a TTL when its turn came. But
// a server that hangs must not keep a new client from queueing.
type lateInboxes struct {
	alarm
	client *Client
	once   sync.Once
	over   atomic.Bool // whether they are no longer waited for
}

// await begins the wait when the inboxes of a majority, but not of all servers, have settled.
func (late *lateInboxes) await() {
	if all := late.client.inbox; all.most((*inbox).hasSettled) && !all.settled() {
		late.once.Do(func() { late.client.watchdog.set(late, time.Now().Add(inboxGrace)) })
	}
}

// fire is called at the end of the wait. The requests that it held up go on.
func (late *lateInboxes) fire(_ time.Time, batch []protocol.Renewal) []protocol.Renewal {
	if late.client.inbox.settled() {
		return batch
	}
	late.over.Store(true)
	late.client.stepAll((*lockstate.Lock).SubscribeFailed)
	return batch
}

func (all inboxes) halt() {
	for _, in := range all {
		in.halt()
	}
}

func (all inboxes) mastersAre(addrs []string) {
	for _, in := range all {
		in.mastersAre(addrs)
	}
}
