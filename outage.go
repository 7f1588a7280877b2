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
	// lock that had failed gets a reply, or when no lock waits out a pause any more. It is written
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

// retry ends the pause of a lock whose last command failed, and reports whether the lock
// sends a command.
func (e *entry) retry() (asks bool) {
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	if e.dead || e.awake == nil || e.state().CommandInFlight() || e.awake.pauses == nil { // who rests waits out no pause
		e.restLocked()
		e.mu.Unlock()
		return false
	}
	asks = e.state().Reachable(now, &fx)
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

// answersLong is how long no command has failed when Redis counts as answering again. If a lock waits
// for an answer, or a lease has to be renewed, a command fails more often than that: there is one every
// 2 s, and it fails after CommandTimeout.
const answersLong = 5 * time.Second

// refusalLasts is for how long a refusal counts that no other has followed, while commands of the other kind
// are answered. Whoever waits out a refusal is refused again within less. If nobody waits, nobody may ask for
// a lock for days, and what fails then is another downtime. (So where only tries are refused, and more rarely
// than once a minute, the log of a full server has an end for each.)
const refusalLasts = time.Minute

// downtime measures for the log how long Redis has not answered. That is not the time for which the locks
// wait out an outage: it lasts for as long as any lock or renewal fails. One node of a Cluster can hang
// while the others answer, and where locks are only held, nothing but renewals fails.
type downtime struct {
	alarm
	client *Client
	lasts  atomic.Bool // whether a command has failed, and the end of that was not logged yet; written under mu

	mu     sync.Mutex // guards what follows; only watchdog.mu is locked under it
	began  time.Time  // when the first command that failed was sent
	failed time.Time  // when a command last failed
	heard  time.Time  // when a command got a reply since then, zero if none did

	// refused is whether Redis refused the last command of each kind: a server whose memory is full
	// refuses those that take a lock, and renews and releases what is held.
	refused [2]bool
	kept    bool // a command of the other kind got a reply since one was refused
	whole   bool // since began, more failed than commands that take a lock and were refused
}

// workKind is the kind of a command to downtime.
type workKind int

const (
	workTakes workKind = iota // takes a lock
	workKeeps                 // keeps, ends or passes on what is held: a renewal, an owner's question, a release, yield, downgrade or cancel
	workAsks                  // would have taken a lock that was not free: its answer does not say whether one can be taken
)

// kindOfCommand returns the kind of a command. a is its answer, nil if it failed. An answer shows that
// the server lets locks be taken only if it has granted or queued a request: a server whose memory is full
// also says that a lock is held, or that it is ours. (It extends the place of a request that waits, too, but
// while one waits, another command is refused within seconds.)
func kindOfCommand(cmd *protocol.Command, a *protocol.Answer) workKind {
	switch {
	case cmd.Verb != protocol.Acquire, cmd.Held:
		return workKeeps
	case a != nil && (a.Outcome == protocol.Refused || a.Kept):
		return workAsks
	}
	return workTakes
}

// commandFailed notes that a command that was sent at that time has failed.
func (d *downtime) commandFailed(fail *protocol.Failure, sent time.Time, kind workKind) {
	if fail.Lasts() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if !d.lasts.Swap(true) || d.kept && now.Sub(d.failed) > refusalLasts {
		d.began, d.refused, d.whole = sent, [2]bool{}, false
	}
	d.failed, d.heard, d.kept = now, time.Time{}, false
	d.refused[kind] = fail.Kind == protocol.RefusedNow
	d.whole = d.whole || !d.refused[kind] || kind == workKeeps
}

// commandAnswered notes that a command got a reply. While Redis refuses commands of the other kind, that
// does not end the downtime, unless none has been refused for long, and more than those had failed or
// somebody has asked for a lock.
func (d *downtime) commandAnswered(kind workKind) {
	if !d.lasts.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if kind != workAsks {
		d.refused[kind] = false
	}
	now := time.Now()
	if d.refused[workTakes] || d.refused[workKeeps] {
		d.kept = true
		if !d.whole && kind != workAsks || now.Sub(d.failed) <= refusalLasts {
			return
		}
		d.refused = [2]bool{}
	}
	if d.lasts.Load() && d.heard.IsZero() {
		d.heard = now
		d.client.watchdog.set(d, d.heard.Add(answersLong))
	}
}

// fire logs the end, unless a command has failed since Redis was heard.
func (d *downtime) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.heard.IsZero() || now.Sub(d.heard) < answersLong {
		return batch
	}
	d.lasts.Store(false)
	if d.heard.Sub(d.failed) < answersLong {
		d.client.log.answersAgain(seconds(d.heard.Sub(d.began)))
	} else { // nothing was sent in between
		d.client.log.answersAgain(seconds(d.failed.Sub(d.began)) + " or more")
	}
	return batch
}
