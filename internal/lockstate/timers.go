package lockstate

// How time affects a lock: when it needs a tick, and what a tick ends or renews.

import (
	"math"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Tick is the event that time has passed. Only a tick asks for renewals.
func (l *Lock) Tick(now time.Time, fx *Effects) {
	l.applyRules(now, fx)
	g := &l.grant
	if g.lateUntil <= l.instant(now) {
		g.lateUntil = 0 // it says nothing anymore, and a lock that remembers it does not rest
	}
	// The rules come first, so that a grant that is being released is not renewed.
	if g.state == Held && l.needsRenewal() && (l.instant(now) >= g.renewAt || g.drifted(now)) {
		fx.Renew = true
		l.blocker = "" // it has been ours for a while, and a lock with a blocker does not rest
		// A regular renewal can wait until the next instant of the grid.
		if g.notified == 0 && !g.drifted(now) && l.trustEnds().sub(l.instant(now)) >= g.req.TTL/2 {
			fx.Spare = g.req.TTL / grids
		}
		fx.Touch = g.touch(l.last, l.instant(now))
		g.renewAt = g.onGrid(l.instant(now).add(g.req.TTL / 3))
		if g.notified != 0 {
			g.renewAt = l.instant(now).add(confirmTime)
		}
	}
}

// expire ends maximum holds, waits and trust windows that are over. For the trust windows, the one of
// the two clocks that says so first counts.
func (l *Lock) expire(now time.Time, fx *Effects) {
	if l.maxHoldAt != 0 && l.instant(now) >= l.maxHoldAt {
		l.endOverlong(now, fx)
	}
	for c := l.waiting.first; c != nil && c.awaitsIdleOwner() && l.instant(now) >= c.until; c = l.waiting.first {
		l.reject(c, ErrLocked, fx) // the owner is in use
	}
	if g := &l.grant; g.state == Held && l.members != nil && g.over(now) {
		l.lost = &lostGrant{g.req, l.time(g.minHoldUntil), l.lost}
		if g.role() == byDowngrade {
			l.lost = &lostGrant{g.next.req, time.Time{}, l.lost}
		}
		if !l.needsRenewal() { // so nobody had it renewed: each lease was collected, or had reached its maximum hold
			for c := l.members; c != nil; c = c.next {
				l.end(c, collected, now, fx)
			}
		}
		why := NotConfirmed
		if now.Sub(g.proved) < window(g.ttl())/2 { // by the monotonic clock, so the wall clock decided
			why = Slept
		}
		l.lose(why, now, fx)
	}
}

// Due returns when Tick must be called next, 0 for never.
func (l *Lock) Due() Instant {
	g := &l.grant
	due := l.maxHoldAt
	earliest := func(t Instant) {
		if t != 0 && (due == 0 || t < due) {
			due = t
		}
	}
	if c := l.waiting.first; c != nil && c.awaitsIdleOwner() {
		earliest(c.until)
	}
	switch {
	case g.state == Held:
		if l.needsRenewal() {
			earliest(g.renewAt)
		}
		if l.members != nil {
			earliest(l.trustEnds())
		} else if l.pending.verb == protocol.None {
			earliest(l.trustEnds())
			earliest(g.idleTill)
		}
		if g.next != nil && l.pending.verb == protocol.None && (g.role() != byDowngrade || l.needsRenewal()) {
			earliest(g.next.recheckAt)
		}
		if g.wanted && l.pending.verb == protocol.None && l.keepsReadersOut() {
			earliest(g.recheckAt)
		}
	case g.state == none && l.waiting.first != nil:
		earliest(l.inboxWaitUntil)
	case l.pending.verb == protocol.None && g.requested():
		earliest(g.recheckAt)
	}
	return due
}

// endOverlong ends the leases that reached their maximum hold. The grant is still renewed as
// long as one of its leases is within its own maximum.
func (l *Lock) endOverlong(now time.Time, fx *Effects) {
	l.maxHoldAt = 0
	for c := l.members; c != nil; c = c.next {
		switch {
		case c.noRenew || c.Opts.MaxHold == 0:
		case l.instant(now) >= maxHoldOf(c):
			c.noRenew = true
			l.end(c, Overlong, now, fx)
		default:
			l.watchMaxHold(c)
		}
	}
	if g := &l.grant; g.role() == byDowngrade && !l.needsRenewal() { // it is not sent again, so nobody need wait for it
		fx.Done = append(fx.Done, g.next.done...)
		g.next.done = nil
	}
}

// watchMaxHold makes a tick come at the end of c's maximum hold, if it has one.
func (l *Lock) watchMaxHold(c *Caller) {
	if c.Opts.MaxHold == 0 {
		return
	}
	if end := maxHoldOf(c); l.maxHoldAt == 0 || end < l.maxHoldAt {
		l.maxHoldAt = end
	}
}

// maxHoldOf returns the end of c's maximum hold, or the last instant there is if the maximum hold
// ends after it.
func maxHoldOf(c *Caller) Instant {
	since := start.add(c.Since)
	return since.add(min(c.Opts.MaxHold, time.Duration(math.MaxInt64-since)))
}

// minHoldOf returns the end of c's minimum hold.
func minHoldOf(c *Caller) Instant { return start.add(c.Since + c.Opts.MinHold) }

// needsRenewal reports whether a lease, or the process itself, needs the grant renewed.
func (l *Lock) needsRenewal() bool {
	if l.members == nil {
		return true // idle, or to be released when the command in flight is answered
	}
	for c := l.members; c != nil; c = c.next {
		if !c.noRenew {
			return true
		}
	}
	return false
}

// Collected is the event that the Lease of c was garbage-collected. The lease is not renewed any
// more, so it is lost unless it is unlocked through the mutex before. It returns false if nothing
// changed, or if the client is being closed: Shutdown tells of the leases that were not unlocked.
func (l *Lock) Collected(c *Caller) bool {
	if c.Phase != Inside || c.noRenew {
		return false
	}
	c.noRenew = true
	return !l.closed
}
