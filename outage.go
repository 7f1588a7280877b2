package leased

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// How a client notices that Redis works again. An outage has no goroutine: senders call it with the
// outcome of their commands, and the watchdog calls it when its alarm fires.

const (
	probeEvery = 2 * time.Second // how often one lock of a client asks whether Redis works again
	wakeEvery  = time.Second     // all locks ask at most this often, because a deployment may be only partly well
)

// outage ends the locks' pauses when Redis works again. Each lock that fails backs off separately,
// for up to 30 s, so otherwise a free lock could go unused for that long after Redis is back. While
// the server as a whole fails, one of the locks that wait out a pause asks every 2 s, or sooner
// once any command gets a reply. When a lock that had failed gets a reply, all other locks that
// wait out a pause ask too.
//
// A reply to another lock or to a renewal is only a reason to probe: in a Cluster it may come from
// another node, and a server whose memory is full still renews.
type outage struct {
	alarm
	client *Client

	// on is set when a command fails for a reason that concerns the server. It is cleared when a
	// lock that had failed gets a reply, or when no lock waits out a pause anymore. It is written
	// under mu.
	on atomic.Bool

	mu     sync.Mutex // guards what follows; only watchdog.mu is locked under it
	next   time.Time  // when the alarm fires, zero if it is not set
	wake   bool       // whether all locks ask when the alarm fires
	woken  time.Time  // when all locks last asked
	probed time.Time  // when one lock last asked, or a command failed
	fails  int        // how many failures were noted
	soon   time.Time  // what probeSoon was last called with, until a failure uses it
}

func newOutage(c *Client) *outage {
	return &outage{client: c}
}

// failed notes that a command of a lock, or a renewal, failed at that time. A failure that only an
// operator can fix does not count, because it concerns one lock or one user of Redis, not the
// server. Nor does that of a closed client, which nothing fixes.
func (o *outage) failed(fail *protocol.Failure, at time.Time) {
	if fail.Lasts() {
		return
	}
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.on.Store(true)
	o.probed = now
	o.fails++
	switch {
	case !o.soon.Before(at): // it failed before the time that probeSoon was called with
		if !o.wake && (o.next.IsZero() || o.soon.Before(o.next)) {
			o.setLocked(o.soon)
		}
		o.soon = time.Time{}
	case o.next.IsZero(): // otherwise other failures, such as those of renewals, could postpone the probe forever
		o.setLocked(now.Add(probeEvery))
	}
}

// answered notes that a command got a reply, and whether the last command of the same lock had
// failed.
func (o *outage) answered(hadFailed bool) {
	if !o.on.Load() {
		return
	}
	o.mu.Lock()
	if hadFailed {
		o.on.Store(false)
		o.wake = true
		o.setLocked(o.woken.Add(wakeEvery))
	} else if at := o.probed.Add(wakeEvery); !o.wake && at.Before(o.next) {
		o.setLocked(at)
	}
	o.mu.Unlock()
	if hadFailed {
		for _, in := range o.client.inbox {
			in.redisIsBack()
		}
	}
}

func (o *outage) setLocked(at time.Time) {
	o.next = at
	o.client.watchdog.set(o, at)
}

// probeSoon makes the next probe no later than at. It is called when commands may reach another
// server than those that failed did. An earlier failure that is noted only afterwards uses it too.
func (o *outage) probeSoon(at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.soon = at
	if o.on.Load() && !o.wake && at.Before(o.next) {
		o.setLocked(at)
	}
}

// fire makes one lock probe, or all locks ask.
func (o *outage) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	o.mu.Lock()
	wake, on, fails := o.wake, o.on.Load(), o.fails
	o.next, o.wake = time.Time{}, false
	switch {
	case wake:
		o.woken = now
	case on:
		o.probed = now
		o.setLocked(now.Add(probeEvery))
	}
	o.mu.Unlock()
	if !wake && !on {
		return batch
	}
	asked := false
	for _, e := range o.client.entries() {
		asked = e.retry() || asked
		if asked && !wake {
			break
		}
	}
	if !asked && !wake {
		o.endIfQuiet(fails)
	}
	return batch
}

// retry ends the pause of a lock whose last command failed, unless only an operator can help it, and reports
// whether the lock sends a command.
func (e *entry) retry() (asks bool) {
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	// A resting lock is not waiting out a pause. One whose failure lasts would fail again, and tells nothing of
	// the server.
	if e.dead || e.awake == nil || e.stateLocked().CommandInFlight() || e.awake.pauses == nil || e.awake.needsOperator {
		e.restLocked()
		e.mu.Unlock()
		return false
	}
	asks = e.stateLocked().Reachable(now, &fx)
	idle := e.rearmLocked(&fx)
	e.restLocked()
	e.mu.Unlock()
	e.perform(&fx, idle, 0)
	return asks
}

// endIfQuiet ends the outage unless a command has failed since a probe that found no lock that waits
// out a pause. fails is how many had failed before it. Their times do not tell: two may be one reading
// of the clock. The next failure begins another outage.
func (o *outage) endIfQuiet(fails int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fails == fails && !o.wake {
		o.on.Store(false)
		o.next = time.Time{}
		o.client.watchdog.remove(&o.alarm)
	}
}
