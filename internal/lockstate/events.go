package lockstate

// Events from Redis: answers to commands, messages in the inbox, outcomes of renewals and
// cancels. Between them are the ways in which a grant ends.

import (
	"math"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Answered is the event that the command in flight was answered or failed. After a failure
// nothing is tried again for pause.
func (l *Lock) Answered(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	l.lastErr = nil
	if fail != nil {
		l.lastErr = fail.Err
	}
	switch c.Verb {
	case protocol.Acquire:
		l.acquired(c, a, fail, pause, now, fx)
	case protocol.Yield:
		l.yielded(c, a, fail, pause, now, fx)
	case protocol.Release:
		l.released(c, a, fail, pause, now, fx)
	case protocol.Downgrade:
		l.downgraded(c, a, fail, pause, now, fx)
	}
	if fail != nil && !fail.Again && now.Sub(c.At) >= maxSilence {
		l.rejectTries(fail.Err, fx) // they do not wait for another answer, whatever this command was for
	}
	l.pending = pending{}
	l.applyRules(now, fx)
}

// acquired handles the answer to an acquire.
func (l *Lock) acquired(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	switch {
	case g.role() == byPlace && c.ID == g.next.req.ID: // it is about the place behind the held grant
		l.reserved(c, a, fail, pause, now, fx)
	case c.ID != g.req.ID:
		l.acquiredInVain(c, a, fail, now, fx)
	case fail != nil:
		l.acquireFailed(c, fail, pause, now, fx)
	default:
		before := g.sent
		g.sent = true
		switch a.Outcome {
		case protocol.Granted:
			l.acquireGranted(c, a, now, fx)
		case protocol.Enqueued:
			l.acquireEnqueued(c, a, now, fx)
		case protocol.Refused, protocol.NotOurs: // the latter to an owner's question
			l.acquireRefused(a, before, now, fx)
		}
	}
}

// acquiredInVain handles the answer to an acquire whose request was lost meanwhile. Nobody uses what
// the command gave it, or may still give it.
func (l *Lock) acquiredInVain(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, now time.Time, fx *Effects) {
	switch {
	case fail.MayRun() || fail != nil && fail.LacksReplicas:
		l.cancelUnknown(c.ID, arrives(now, c.TTL), fx)
	case fail != nil && fail.Partly || a.Outcome == protocol.Granted || a.Outcome == protocol.Enqueued:
		l.cancelUnknown(c.ID, time.Time{}, fx)
	}
}

func (l *Lock) acquireFailed(c *protocol.Command, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	switch {
	case g.state != Held:
		l.failed(&g.ticket, fail, pause, now, fx)
		if fail.LacksReplicas {
			l.lackedReplicas = true
			l.replaceRequest(now, fx)
		}
	case c.Question: // which gives the id nothing, however late it arrives
		l.questionFailed(fail, pause, now, fx)
	case fail.MayRun():
		g.lateUntil = l.instant(arrives(now, c.TTL))
		g.doubtUntil = g.lateUntil
	}
}

// replaceRequest gives up the request, whose grant was not confirmed, and goes on with another one.
func (l *Lock) replaceRequest(now time.Time, fx *Effects) {
	recheckAt := l.grant.recheckAt
	l.grant.sent = true
	l.cancelRequest(now, fx)
	if head := l.waiting.first; head != nil && l.compatible(head.Mode) {
		l.makeRequest(head, now)
		l.grant.recheckAt = recheckAt
	}
}

func (l *Lock) acquireGranted(c *protocol.Command, a protocol.Answer, now time.Time, fx *Effects) {
	g := &l.grant
	greater := a.Token > g.token && !(a.Kept && (g.req.Mode == protocol.Shared || a.Forgot))
	switch {
	case g.state == Held && (greater || c.Question && !a.Kept):
		// The held grant was given anew. A greater token alone does not show that: the
		// answer to an extension carries the token of the last reader that entered, or
		// a new token if Redis had forgotten the old one. Nor does a smaller token rule
		// it out: Redis may have forgotten the last token and its clock gone back.
		l.lostAndGrantedAnew(now, fx)
		return
	case g.state != Held && a.Token <= l.pending.revoked:
		l.askAgain(&g.ticket, now)
		return
	case c.Question:
		l.questionAnswered(c, a, now, fx)
	case c.Recheck:
		l.hold(a, c.At, viaRecheck, now)
	default:
		l.hold(a, c.At, viaFree, now)
	}
	if a.Unfinished {
		l.continueGranting(a, l.env.NewRequest(g.req.Mode, g.req.TTL, false, protocol.Origin{}).ID, fx)
	}
}

func (l *Lock) acquireEnqueued(c *protocol.Command, a protocol.Answer, now time.Time, fx *Effects) {
	g := &l.grant
	if g.state == Held {
		// A message overtook this answer. But if the lock's last token was already ours
		// when Redis answered, we had lost the lock and wait again. A brief answer has no
		// token, and says that the request had not been granted by then. If Redis had
		// forgotten the token, only a question tells.
		switch {
		case a.Token >= g.token:
			l.lostAndGrantedAnew(now, fx)
		case a.Token == 0 && !a.Brief:
			g.askDue = true
			g.lateUntil = max(g.lateUntil, l.instant(arrives(now, c.TTL))) // if it is lost, it waits in the queue
		}
		return
	}
	if !a.Unfinished { // else only dead entries may be in the way
		l.tryIdleOwner(a, now)
		l.rejectTries(ErrLocked, fx)
	}
	if a.Brief {
		l.stillWaits(c, a, now)
		return
	}
	l.enqueued(a, c.At, now)
	l.cancelForgotten(a.Blocker, fx)
}

// cancelForgotten cancels owner, the id that owns the lock while our request waits, if it is another one of
// this client. Nobody here holds it then, so nobody would give it back: a failover has undone its release.
func (l *Lock) cancelForgotten(owner string, fx *Effects) {
	g := &l.grant
	if g.state != queued || owner == g.req.ID {
		return
	}
	if who, err := protocol.ParseID(owner); err == nil && who.Client == l.env.Client() {
		l.cancelUnknown(owner, time.Time{}, fx)
	}
}

// acquireRefused handles the answer that the request was not queued, or that the id of a question does not
// own the lock. sent says whether Redis may have seen the request before.
func (l *Lock) acquireRefused(a protocol.Answer, sent bool, now time.Time, fx *Effects) {
	g := &l.grant
	l.blocker = a.Blocker
	if a.Unfinished && g.state != Held {
		g.sent, g.recheckAt = sent, l.instant(now)
		return
	}
	l.tryIdleOwner(a, now)
	l.rejectTries(ErrLocked, fx)
	if g.state == Asking && g.mayNotQueue {
		l.refusedOnce = true
		if l.env.InboxPending() {
			l.inboxWaitUntil = l.instant(now).add(maxInboxWait)
		}
	}
	switch {
	case g.state == Held:
		g.renewAt = l.instant(now) // the renewal, or the release, tells whether it is still ours
		if l.members == nil {
			g.idleTill = 0
		} else if l.keepsReadersOut() {
			g.wanted = true // nobody is to enter before that
			l.putOffQuestion(now)
		}
	case !g.mayNotQueue && l.waiting.first != nil && l.waiting.first.awaitsIdleOwner(): // asks again, and then queues
	case sent: // an earlier command may have queued the request
		l.cancelRequest(now, fx)
	default:
		l.becomeNone()
	}
}

// failed handles the failure of an acquire of t, or of the yield that t came from: the command
// had no answer, or the server refused it or a part of it.
func (l *Lock) failed(t *ticket, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	if l.pending.stale && !fail.LacksReplicas { // else the news was about the grant that is given up
		pause = 0
	}
	t.recheckInFull(l.instant(now).add(pause))
	if fail.MayRun() {
		t.sent = true
		t.lateUntil = l.instant(arrives(now, t.req.TTL))
	} else if fail.Partly {
		t.sent = true
	}
	if head := l.waiting.first; head != nil {
		head.Events.add(Event{At: now, What: eventError, Err: fail.Err})
	}
	if !fail.Again {
		l.rejectTries(fail.Err, fx)
	}
	l.rejectLasting(fail, fx)
}

// rejectLasting rejects the callers that do not wait for the end of a failure that lasts.
func (l *Lock) rejectLasting(fail *protocol.Failure, fx *Effects) {
	if !fail.Lasts() {
		return
	}
	for w := l.waiting.first; w != nil; {
		next := w.next
		if !w.RetryFatal || fail.Hopeless() {
			l.reject(w, fail.Err, fx)
		}
		w = next
	}
}

// hold handles a proof of ownership. Its command was sent at sentAt. A grant that is already held is
// extended, because the server has given it its full TTL again.
func (l *Lock) hold(a protocol.Answer, sentAt time.Time, how Via, now time.Time) {
	g := &l.grant
	extended := g.state == Held && g.notified == 0
	if a.Forgot { // from now on Redis remembers this one
		g.token = max(g.token, a.Token)
	}
	switch {
	case g.state != Held:
		l.becomeHeld(a, sentAt, how, now)
	case g.notified != 0 && (a.Token < g.token || g.over(now)):
		// The proof is about an earlier grant of the id, and the full TTL of that grant says
		// nothing about the provisional one. Or the provisional one may have ended, and the
		// proof be about a later one.
	case sentAt.After(g.proved):
		g.prove(sentAt)
		g.rebase(a.Clock, l.instant(sentAt), l.instant(now))
	}
	if g.role() != byPlace { // else the waiter may be our own writer
		g.wanted = g.wanted || a.More
	}
	if g.wanted {
		l.putOffQuestion(now)
	}
	switch {
	case g.notified != 0:
		g.renewAt = l.instant(now)
	case extended: // the next renewal stays due, because it also has the lock's last token kept
	default:
		g.renewAt = l.firstRenewal(sentAt, how, now)
	}
}

// firstRenewal returns when a grant is renewed for the first time. The command that proves it was sent at
// sentAt.
func (l *Lock) firstRenewal(sentAt time.Time, how Via, now time.Time) Instant {
	g := &l.grant
	if how == ViaDirect {
		// The next regular renewal confirms the grant, or an earlier one if less than half of the
		// TTL is left.
		return min(g.onGrid(l.instant(now).add(g.req.TTL/3)), l.instant(sentAt).add(g.req.TTL/2))
	}
	due := g.req.TTL / 3
	if l.env.HoldsMany() { // perhaps it took them together: their first renewals come apart
		due -= time.Duration(l.env.Jitter() * float64(g.req.TTL/4))
	}
	return g.onGrid(l.instant(sentAt).add(due))
}

// yielded handles the answer to a yield.
func (l *Lock) yielded(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	if g.state != Releasing { // a message overtook the answer and settled the callers that left
		if g.state == Held && fail == nil && a.Outcome == protocol.Granted {
			l.hold(a, c.At, viaFree, now)
		}
		return
	}
	old, placed := l.endingGrant(), g.next.sent
	if fail == nil {
		l.cancelLate(now, fx)
	}
	l.becomeNext()
	if a.Gone && placed {
		// Redis knew the successor by its reserved place, not by this yield, so the old
		// grant had been lost before. The script has not checked whether the lock is free now.
		l.settleLost(now, fx)
		l.pending.stale = true
	}
	switch {
	case fail != nil:
		// The old request may still own the lock, and the new one may wait. So the old one is
		// canceled, and the new one is asked about. A late copy of the yield harms neither.
		l.cancelUnconfirmed(&old, c.Last, now, fx)
		l.failed(&g.ticket, fail, pause, now, fx)
	case a.Outcome == protocol.NotOurs:
		l.settleLost(now, fx)
		l.cancelLost(old.req.ID, fx)
		// A reserved place may still be in the queue, if another program's key kept the script from
		// looking, or if an acquire for it is late.
		g.sent = placed
		l.cancelRequest(now, fx)
	case a.Outcome == protocol.Granted && a.Token <= l.pending.revoked:
		l.settleLeaving(fx)
		l.askAgain(&g.ticket, now)
	case a.Outcome == protocol.Granted:
		l.settleLeaving(fx)
		a.Link = c.Link
		l.hold(a, c.At, ViaLocal, now) // no other process wanted the lock
		l.continueGranting(a, old.req.ID, fx)
	default:
		l.settleLeaving(fx)
		if !a.Unfinished {
			l.tryIdleOwner(a, now)
			l.rejectTries(ErrLocked, fx)
		}
		l.enqueued(a, c.At, now)
	}
}

// released handles the answer to a release.
func (l *Lock) released(c *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	old, placed := l.endingGrant(), l.grant.role() == byYield
	if fail == nil {
		l.cancelLate(now, fx)
	}
	if placed {
		l.becomeNext()
		l.grant.recheckInFull(l.instant(now)) // it may have been served
	} else {
		l.becomeNone()
	}
	switch {
	case fail != nil:
		l.cancelUnconfirmed(&old, c.Last, now, fx)
		if placed {
			l.failed(&l.grant.ticket, fail, pause, now, fx)
		}
	case a.Outcome == protocol.NotOurs:
		l.settleLost(now, fx)
		l.cancelLost(old.req.ID, fx)
	default:
		if old.doubted && !a.Proved {
			l.cancelUnconfirmed(&old, c.Last, now, fx)
		}
		l.settleLeaving(fx)
		l.continueGranting(a, old.req.ID, fx)
	}
}

// lostAndGrantedAnew ends a held grant after Redis has granted or enqueued its id as if the id
// did not own the lock. Others may have had the lock in between. So the grant is lost, and what
// Redis has given to the id instead is given back.
func (l *Lock) lostAndGrantedAnew(now time.Time, fx *Effects) {
	id, next := l.grant.req.ID, l.grant.next
	l.lose(notKept, now, fx)
	l.cancelUnknown(id, time.Time{}, fx)
	if next != nil && next.role == byDowngrade && next.sent { // the downgrade may have been carried out
		l.cancelUnknown(next.req.ID, time.Time{}, fx)
	}
}

// continueGranting follows up a command whose answer a says that it could not admit all waiters
// that may enter. It cancels id, which Redis does not know, because the script of a cancel admits
// more of them.
func (l *Lock) continueGranting(a protocol.Answer, id string, fx *Effects) {
	if a.Unfinished {
		fx.Cancels = append(fx.Cancels, Cancellation{ID: id, Last: l.last, Link: l.prevHoldSpan})
	}
}

// inDoubt reports whether a successful release proves nothing for the callers that left: an
// acquire of the held grant had no answer, and may have been granted the lock anew after another
// owner. The lock's last token then decides, as after a release without answer. The release of a
// quorum has checked that token, and its answer says whether it proves that there was no other
// owner.
func (l *Lock) inDoubt() bool {
	till := l.grant.doubtUntil
	for c := l.leaving.first; c != nil && till != 0; c = c.next {
		if c.Since < till.sub(start) {
			return true
		}
	}
	return false
}

// cancelLate cancels the id of a grant that ends, if an acquire of it may still arrive. That
// acquire would own the lock, or wait for it, without anybody to use it.
func (l *Lock) cancelLate(now time.Time, fx *Effects) {
	if g := &l.grant; g.lateUntil > l.instant(now) {
		l.cancelUnknown(g.req.ID, l.time(g.lateUntil), fx)
	}
}

// endingGrant is what remains to be known of a grant while its release has no answer.
type endingGrant struct {
	req     protocol.Request
	token   uint64
	keep    time.Time // end of its minimum hold
	doubted bool      // the result of inDoubt
}

// endingGrant describes the present grant.
func (l *Lock) endingGrant() endingGrant {
	g := &l.grant
	return endingGrant{req: g.req, token: g.token, keep: l.time(g.minHoldUntil), doubted: l.inDoubt()}
}

// cancelUnconfirmed cancels a grant whose release had no answer. The callers that left are
// settled when the cancel succeeds. last is the last token given out under the grant, 0 if that is
// its own. If the grant may have become another one meanwhile, next is the request of that one. Then
// both are canceled, in the order in which a late command may turn the first into the second.
func (l *Lock) cancelUnconfirmed(old *endingGrant, last uint64, now time.Time, fx *Effects, next ...protocol.Request) {
	requests := append([]protocol.Request{old.req}, next...)
	chain := make([]Cancellation, len(requests))
	for i, req := range requests {
		chain[i] = Cancellation{ID: req.ID, Last: last, Link: l.prevHoldSpan, until: arrives(now, req.TTL), giveUp: now.Add(req.TTL), doubted: old.doubted}
		if i > 0 {
			chain[i-1].Then = &chain[i]
		}
	}
	chain[0].proof, chain[0].Keep = max(old.token, last), old.keep
	end := &chain[len(chain)-1]
	end.Release = true
	for c := l.leaving.first; c != nil; c = l.leaving.first {
		l.leaving.remove(c)
		end.Callers = append(end.Callers, c)
	}
	fx.Cancels = append(fx.Cancels, chain[0])
}

// Canceled is the event that a grant whose release had no answer, or proved nothing (see inDoubt),
// was canceled, or that its cancel was given up. Unlock reports success only if it is proved that the
// lock was ours until the release: the id still owned it when it was canceled, or the lock's last token
// is still the last that we gave out, so no other owner came in between.
func (l *Lock) Canceled(s *Settlement, now time.Time, fx *Effects) {
	for _, c := range s.Callers {
		var err error
		switch {
		case s.proved:
		case s.Fail != nil && s.Fail.Kind == protocol.ClientClosed:
			err = &ReleaseUnconfirmed{s.Fail.Err}
		case c.Ended == ByLoss:
			if s.Fail != nil {
				err = &ReleaseUnconfirmed{s.Fail.Err}
			}
		default:
			c.Ended, c.Why = ByLoss, LostUnproved
			if s.Fail != nil {
				err = s.Fail.Err
			}
			if !c.unheard || s.Fail == nil { // else its Unlock has already returned ErrNotReleased
				reportLoss(c, now, fx)
			}
		}
		c.settle(err, fx)
	}
}

// settleLost settles the callers that left after the release found the grant lost.
func (l *Lock) settleLost(now time.Time, fx *Effects) {
	l.loseLeaving(LostAtRelease, now, fx)
	l.settleLeaving(fx)
}

// loseLeaving ends the leases of the callers that left and are not settled.
func (l *Lock) loseLeaving(why Reason, now time.Time, fx *Effects) {
	for c := l.leaving.first; c != nil; c = c.next {
		if c.Ended != ByLoss {
			c.Ended, c.Why = ByLoss, why
			reportLoss(c, now, fx)
		}
	}
}

// reportLoss reports that the lease of c was lost, for the reason in c.Why.
func reportLoss(c *Caller, now time.Time, fx *Effects) {
	c.Events.add(Event{At: now, What: eventLost, Text: c.Why.String()})
	if !c.unused {
		fx.Ended = append(fx.Ended, Loss{c, c.Why})
	}
}

// cancelRequest gives up the request, because no caller waits for it anymore.
func (l *Lock) cancelRequest(now time.Time, fx *Effects) {
	l.cancelIfSent(&l.grant.ticket, now, fx)
	l.becomeNone()
}

// cancelIfSent cancels t if Redis may know of it.
func (l *Lock) cancelIfSent(t *ticket, now time.Time, fx *Effects) {
	if t.sent {
		var until time.Time
		if t.lateUntil > l.instant(now) {
			until = l.time(t.lateUntil)
		}
		fx.Cancels = append(fx.Cancels, Cancellation{ID: t.req.ID, Last: l.last, until: until})
	}
}

// lose ends a held grant that is not ours, or cannot be believed anymore. Callers stay inside
// until their Unlock, as in sync.Mutex.
func (l *Lock) lose(why Reason, now time.Time, fx *Effects) {
	for c := l.members; c != nil; c = c.next {
		l.end(c, why, now, fx)
		c.Orphaned = true
	}
	l.members = nil
	l.loseLeaving(why, now, fx) // their grant had yet to be released
	l.cancelPlace(now, fx)
	if next := l.grant.next; next != nil {
		fx.Done = append(fx.Done, next.done...)
	}
	l.cancelLate(now, fx)
	l.becomeNone()
}

// Receive is the event that a message about one of this lock's requests arrived.
func (l *Lock) Receive(m *protocol.Message, now time.Time, fx *Effects) {
	switch m.Kind {
	case protocol.MessageGranted:
		l.grantedByMessage(m.ID, protocol.Answer{Outcome: protocol.Granted, Token: m.Token, Clock: m.Clock, More: m.More, Link: m.Link}, m.Proved, now, fx)
	case protocol.MessageWanted:
		l.wanted(m.ID, now, fx)
	case protocol.MessageUnwanted:
		l.unwanted(m.ID, now, fx)
	case protocol.MessageEnds:
		l.Ends(m.ID, m.Left, now, fx)
	case protocol.MessageRevoked:
		l.Revoked(m.ID, m.Token, now, fx)
	}
}

// grantedByMessage handles a message that id was granted, which is as old as proved says if that is not
// zero. It cancels an id that neither waits nor holds.
func (l *Lock) grantedByMessage(id string, a protocol.Answer, proved, now time.Time, fx *Effects) {
	g := &l.grant
	switch {
	case id == g.req.ID && g.requested():
		g.provedAt(proved)
		if a.Token <= max(g.token, l.pending.revoked) || g.opts.Confirm || g.late(now) {
			l.askAgain(&g.ticket, now) // the message is old or too late, or is not believed alone
		} else {
			l.hold(a, g.proved, ViaDirect, now)
		}
	case id == g.req.ID && g.state == Held:
		if a.Token <= g.token {
			return // it is about the grant that is held
		}
		if g.req.Mode == protocol.Exclusive {
			g.askDue = true // has an acquire sent, because messages can be forged
		} else { // no answer can tell: the token of an extension may be another reader's
			l.lostAndGrantedAnew(now, fx)
		}
	case id == g.req.ID && g.state == Releasing && a.Token <= g.token:
		return // it is about the grant that is being released
	case id == g.req.ID && g.state == Releasing:
		l.loseLeaving(LostAtRelease, now, fx) // the release gives back what came in the grant's place
	case g.role() == byPlace && id == g.next.req.ID:
		l.placeGranted(now, fx)
	case g.role() == byYield && id == g.next.req.ID:
		g.next.provedAt(proved)
		if !l.yieldedByMessage(a, now, fx) {
			return
		}
	default:
		l.cancelUnknown(id, time.Time{}, fx)
	}
	l.applyRules(now, fx)
}

// yieldedByMessage handles a message that the successor was granted, while a yield has no answer. It
// reports whether the message is believed, so that the yield is over. Otherwise the yield's answer
// decides.
func (l *Lock) yieldedByMessage(a protocol.Answer, now time.Time, fx *Effects) bool {
	g := &l.grant
	if g.next.sent {
		l.pending.stale = true // the place may have been served before the yield, and its answer says whether it was
		return false
	}
	g.next.sent = true
	if a.Token <= l.pending.revoked || g.next.opts.Confirm || g.next.late(now) {
		l.pending.stale = true // evicted, or too late to be believed: ask again if the yield's answer is older
		return false
	}
	l.cancelLate(now, fx)
	l.becomeNext()
	l.settleLeaving(fx) // the yield was carried out
	l.hold(a, g.proved, ViaDirect, now)
	return true
}

// cancelUnknown cancels an id of ours that the lock does not know, or no longer: a late copy of a command
// may have made the request, or a failover have brought it back. It leaves a lost grant alone: that is
// canceled when its last caller has left. If until is not zero, earlier commands about id may arrive until
// then.
func (l *Lock) cancelUnknown(id string, until time.Time, fx *Effects) {
	for lost := l.lost; lost != nil; lost = lost.next {
		if lost.req.ID == id {
			return
		}
	}
	fx.Cancels = append(fx.Cancels, Cancellation{ID: id, Last: l.last, until: until})
}

// cancelLost cancels the id of a grant that Redis says is not ours. A failover can have undone the hand-off
// that made it the owner. Then the request is back in the queue, and nobody would ask for it again. At the
// head it would keep those behind it from telling the old owner, which Redis has recorded again, that the
// lock is wanted. The cancel removes it and tells the old owner.
func (l *Lock) cancelLost(id string, fx *Effects) {
	for i := range fx.Cancels {
		if fx.Cancels[i].ID == id {
			return
		}
	}
	l.cancelUnknown(id, time.Time{}, fx)
}

// askAgain makes the lock ask for t at once, because the server did something for it that we do not
// know about. The answer to a command in flight may be older than that.
func (l *Lock) askAgain(t *ticket, now time.Time) {
	t.sent = true
	t.recheckInFull(l.instant(now))
	l.pending.stale = l.pending.verb != protocol.None
}

// wanted handles a message that a request is queued behind id. If id is only waiting as far as
// we know, the server takes it for the owner: a message was lost, or a command that we gave up
// was carried out.
func (l *Lock) wanted(id string, now time.Time, fx *Effects) {
	g := &l.grant
	switch {
	case g.state == Releasing && id == g.req.ID:
		return
	case g.role() == byYield && id == g.next.req.ID:
		l.pending.stale, g.next.wanted = true, true
		return
	case g.role() == byDowngrade && id == g.next.req.ID:
		g.wanted, g.next.wanted = true, true // the answer that makes it the owner may be older, and not say so
	case g.role() == byPlace && id == g.req.ID:
		return // the cancel of our writer's place will tell whether the grant is wanted
	case g.role() == byPlace && id == g.next.req.ID:
		l.askAgain(&g.next.ticket, now)
	case g.state == none || id != g.req.ID:
		l.cancelUnknown(id, time.Time{}, fx)
	case g.requested():
		l.askAgain(&g.ticket, now)
		g.wanted = true // an answer "granted" that is in flight may be older than the message, and not say so
	default:
		if !g.wanted {
			l.addEventInside(Event{At: now, What: eventWanted})
		}
		g.wanted, l.pending.stale = true, l.pending.stale || l.pending.question
		l.putOffQuestion(now)
	}
	l.applyRules(now, fx)
}

// Ends is the event that a message says when the lease of the owner ahead of id expires: in
// left, which may be sooner than expected.
func (l *Lock) Ends(id string, left time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	t := &g.ticket
	switch {
	case g.requested() && id == g.req.ID:
	case g.role() == byYield && id == g.next.req.ID:
		t = &g.next.ticket
	default:
		return
	}
	t.endsAt = l.instant(now).add(left + AfterExpiry) // kept for an answer that this message overtakes, too
	t.fullAt = min(t.fullAt, t.endsAt)
	if g.state == queued {
		g.recheckAt = min(g.recheckAt, g.endsAt)
		l.applyRules(now, fx)
	}
}

// Revoked is the event that a message says that the grant of id was taken away, if its token is
// not greater than token. A token of 0 means that Redis had forgotten the lock's last token. The
// message may overtake the answer that gives the grant, because it comes by another connection. Then
// the answer is not believed, and Redis is asked again.
func (l *Lock) Revoked(id string, token uint64, now time.Time, fx *Effects) {
	g := &l.grant
	if token == 0 {
		token = math.MaxUint64
	}
	switch {
	case g.state == Held && token >= g.token && (id == g.req.ID || g.role() == byDowngrade && id == g.next.req.ID):
		next := g.next
		l.lose(Evicted, now, fx)
		if next != nil && next.role == byDowngrade && next.sent { // on a quorum, by a server that is not evicted
			l.cancelUnknown(next.req.ID, arrives(now, next.req.TTL), fx)
		}
		l.applyRules(now, fx)
	case g.requested() && id == g.req.ID, g.role() == byYield && id == g.next.req.ID:
		l.pending.revoked = max(l.pending.revoked, token)
		if token != math.MaxUint64 && g.requested() {
			g.token = max(g.token, token) // the message of the grant may come later still
		}
	}
}

// Subscribed is the event that the inbox was confirmed, for the first time or again, or that it
// receives nothing anymore. Messages may have been missed, and the answer to a command in flight
// may be older than those.
func (l *Lock) Subscribed(now time.Time, fx *Effects) {
	l.pending.stale = l.pending.verb != protocol.None
	if g := &l.grant; g.requested() {
		g.recheckInFull(l.instant(now))
		g.hastened = true
	}
	l.applyRules(now, fx)
}

// Reachable is the event that Redis answers again, or may do so. A command that waits out a
// pause after a failure is sent at once. Reachable reports whether there is one.
func (l *Lock) Reachable(now time.Time, fx *Effects) bool {
	g := &l.grant
	t := &g.ticket
	switch {
	case g.state == Held && g.next != nil:
		t = &g.next.ticket
	case !g.requested() && !(g.wanted && l.keepsReadersOut()):
		return false
	}
	if l.pending.verb != protocol.None || t.recheckAt <= l.instant(now) {
		return false
	}
	t.recheckAt = l.instant(now)
	l.applyRules(now, fx)
	return fx.Send.Verb != protocol.None
}

// Reconnected is the event that connections to Redis had fallen silent and were discarded, while it answers on new
// ones. A renewal that has had no answer may have been sent on such a connection, so another one is sent at once.
func (l *Lock) Reconnected(now time.Time, fx *Effects) {
	if g := &l.grant; g.state == Held && l.needsRenewal() && now.Sub(g.proved) >= g.req.TTL/3 {
		g.renewAt = l.instant(now)
	}
	l.applyRules(now, fx)
}

// SubscribeFailed is the event that the inbox's first subscription was refused or had no answer.
func (l *Lock) SubscribeFailed(now time.Time, fx *Effects) { l.applyRules(now, fx) }

// Holds reports whether the lock is held under id.
func (l *Lock) Holds(id string) bool { return l.grant.state == Held && l.grant.req.ID == id }

// Renewed is the event that a renewal has an outcome. It counts only for the request that was
// renewed, whatever the lock holds now, and after the trust window it revives nothing.
func (l *Lock) Renewed(r *protocol.Renewal, now time.Time, fx *Effects) {
	g := &l.grant
	sent := l.instant(r.At)
	own := l.endsCheck(r)
	if !l.Holds(r.Req.ID) {
		return
	}
	switch r.Outcome {
	case protocol.NotOurs:
		if g.role() == byDowngrade {
			break // the new id may own by now, and the downgrade's answer decides
		}
		if r.At.Before(g.proved) || sent < g.notified {
			g.renewAt = l.instant(now) // ownership was proved after this renewal was sent, so ask again
			break
		}
		l.lose(NotOurs, now, fx)
		l.cancelLost(r.Req.ID, fx)
	case protocol.Granted:
		if g.over(now) || sent < g.notified { // in the latter case it may be about an earlier grant of the id
			break
		}
		if r.At.After(g.proved) || g.notified != 0 {
			g.prove(r.At)
			if !own { // else the next renewal stays due, because it also has the lock's last token kept
				g.renewAt = max(g.renewAt, g.onGrid(sent.add(g.req.TTL/3)))
			}
		}
		g.rebase(r.Clock, sent, l.instant(now))
		// A grant that is in use is offered to others once in a while. One that idles is not, nor one that
		// idles between its callers, so if no message can say that others wait, the lock asks.
		g.askDue = g.askDue || (l.members == nil || g.opts.IdleHold > 0) && !l.env.HasInbox()
		if !l.acquireOvertaken() {
			l.checked(r.At, own, nil, fx)
		}
		l.lastErr = nil
	default:
		l.lastErr = r.Err
		l.checked(r.At, own, r.Err, fx)
		l.addEventInside(Event{At: now, What: eventError, Err: r.Err})
		g.renewAt = min(g.renewAt, l.instant(now).add(min(g.ttl()/10, time.Second)))
	}
	l.applyRules(now, fx)
}
