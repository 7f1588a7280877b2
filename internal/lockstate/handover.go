package lockstate

// Successors that are prepared while the grant is held: a place in the queue behind our own
// readers, and a downgrade.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// reserve takes a place in the queue for a writer that waits for readers of its own process.
// Otherwise readers of other processes would keep entering until ours have left. The yield of our
// last reader queues the same request. A yield enqueues a request only once, so the place is
// kept.
//
// The place cannot be served while our readers own the lock. It is asked for again only to extend
// its lease in the queue, no matter which TTL ends earlier. While there is a place, "wanted"
// messages to our readers are ignored: our writer keeps all newcomers out anyway, and the
// cancel of its place sends "wanted" again if others still wait.
func (l *Lock) reserve(now time.Time, fx *Effects) {
	g, head := &l.grant, l.waiting.first
	if g.state != Held || g.req.Mode != protocol.Shared || l.pending.verb != protocol.None {
		return
	}
	if head == nil || head.Mode != protocol.Exclusive || l.anyOrphans() {
		l.cancelPlace(now, fx)
		return
	}
	if l.members == nil {
		return // the yield comes next
	}
	if g.next == nil {
		if l.env.InboxPending() {
			return // the place's id must say that the client can be notified
		}
		g.next = &successor{ticket: l.newTicket(head, now), role: byPlace}
	}
	place := g.next
	if l.instant(now) < place.recheckAt {
		return
	}
	l.pending = pending{verb: protocol.Acquire}
	fx.Send = protocol.Command{Verb: protocol.Acquire, ID: place.req.ID, TTL: place.req.TTL, Wait: true, Own: g.req.ID, Told: place.told, Recheck: place.sent, At: now}
}

// cancelPlace gives up the place, if there is one, because the writer no longer waits or does
// not get the lock from this grant.
func (l *Lock) cancelPlace(now time.Time, fx *Effects) {
	if g := &l.grant; g.role() == byPlace {
		l.cancelIfSent(&g.next.ticket, now, fx)
		g.next = nil
	}
}

// reserved handles the answer to the acquire for the place.
func (l *Lock) reserved(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	place := l.grant.next
	if fail != nil {
		l.failed(&place.ticket, fail, pause, now, fx)
		if fail.LacksReplicas {
			l.placeGranted(now, fx)
		}
		return
	}
	place.sent = true
	if a.Outcome == protocol.Granted {
		l.placeGranted(now, fx)
		return
	}
	// A message that comes instead of the answer to the yield is trusted from this command's sending.
	place.proved, place.token = c.At, a.Floor()
	every := place.regularPause()
	place.recheckAt = l.instant(now).add(every - time.Duration(float64(every)/3*l.env.Jitter()))
	place.told = a.Told
	if a.Told > 0 || a.Unfinished || l.pending.stale { // in the first two cases the call has left something to do
		place.recheckAt = l.instant(now)
	}
}

// placeGranted handles the news that the place was served, even if that grant is not confirmed. Redis never
// grants a writer the lock beside readers, so our readers do not own it anymore. They stay inside, and the
// writer waits for them. So the place is given up, and others may have the lock meanwhile.
func (l *Lock) placeGranted(now time.Time, fx *Effects) {
	l.grant.next.sent = true
	l.lost = &lostGrant{l.grant.req, time.Time{}, l.lost} // a minority of a quorum's servers may still have the grant
	l.lose(givenToWriter, now, fx)
}

// Downgrade is the event that c, which is inside, wants to continue as a reader. done is closed
// when the downgrade is settled, whether it succeeded or not.
func (l *Lock) Downgrade(c *Caller, done chan struct{}, now time.Time, fx *Effects) {
	g := &l.grant
	switch {
	case c.Mode == protocol.Shared || c.Phase != Inside || c.Ended == ByLoss || g.state != Held:
		fx.Done = append(fx.Done, done)
		return
	case g.next == nil:
		from := protocol.Origin{Token: c.Token}
		if hold := c.Events.HoldSpan(); hold != nil {
			from.Span = *hold
		}
		g.next = &successor{ticket: ticket{req: l.env.NewRequest(protocol.Shared, g.req.TTL, g.opts.IdleHold > 0, from), opts: g.opts}, role: byDowngrade}
	}
	g.next.done = append(g.next.done, done)
	l.applyRules(now, fx)
}

// sendDowngrade sends a downgrade that was asked for, and sends it again after a failure. Until
// it is answered, either id may own the lock. So no caller is admitted, and a renewal that finds
// the old id gone is no loss. It is not sent again for a lease that is over, because it would extend the
// grant.
func (l *Lock) sendDowngrade(now time.Time, fx *Effects) {
	g := &l.grant
	if g.role() != byDowngrade || l.pending.verb != protocol.None || l.members == nil || !l.needsRenewal() || l.instant(now) < g.next.recheckAt {
		return
	}
	l.pending = pending{verb: protocol.Downgrade}
	g.next.sent = true
	fx.Send = protocol.Command{Verb: protocol.Downgrade, ID: g.req.ID, Next: g.next.req.ID, Last: l.drawn(), Link: l.members.Events.HoldSpan(), At: now}
}

// downgraded handles the answer to a downgrade.
func (l *Lock) downgraded(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	if g.role() != byDowngrade || c.ID != g.req.ID {
		return // the grant was lost meanwhile, and both ids were canceled, or the new one after an eviction
	}
	next := g.next
	switch {
	case fail != nil && l.members != nil:
		next.recheckAt = l.instant(now).add(pause)
		l.checked(c.At, false, fail.Err, fx)
		return
	case fail != nil:
		l.abortDowngrade(now, fx)
		return
	case a.Outcome != protocol.Granted:
		l.lose(notDowngraded, now, fx)
		l.cancelLost(c.ID, fx)
		l.cancelLost(c.Next, fx) // an earlier try may have made it a reader, which writers wait for
		return
	case l.members != nil && l.members.Ended == ByLoss: // its maximum hold is over, and it stays a writer until its Unlock
		l.continueGranting(a, c.ID, fx)
		l.lost = &lostGrant{next.req, time.Time{}, l.lost}
		l.lose(Overlong, now, fx)
		return
	default:
		since := g.since
		l.continueGranting(a, c.ID, fx)
		l.cancelLate(now, fx)
		l.becomeNext()
		a.Link = c.Link
		l.hold(a, c.At, viaFree, now)
		g.since, g.served = since, 1
		if w := l.members; w != nil {
			w.Events.add(Event{At: now, What: EventDowngraded, Token: w.Token})
			w.Mode, w.Token = protocol.Shared, g.readers
		}
	}
	fx.Done = append(fx.Done, next.done...)
}

// abortDowngrade ends a downgrade whose lease was unlocked. If the downgrade was sent and had no
// answer, either of its ids may own the lock, and both are canceled.
func (l *Lock) abortDowngrade(now time.Time, fx *Effects) {
	g := &l.grant
	next := g.next
	g.next = nil
	fx.Done = append(fx.Done, next.done...)
	if !next.sent {
		return
	}
	old := l.endingGrant()
	l.cancelUnconfirmed(&old, l.drawn(), now, fx, next.req)
	l.becomeNone()
}
