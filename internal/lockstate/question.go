package lockstate

// Questions of an owner: is the lock still ours, and do others wait? A message that they do may have been
// missed, and one that it was granted anew may be forged. While a grant of readers is wanted, further
// readers of the process are kept out, and whoever made it wanted may have given up, or died, since. A
// question extends the grant if its id still owns the lock, so a grant that nobody needs renewed is not asked
// about. An id that no longer owns the lock gets nothing: neither the lock nor a place in the queue.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	// askAfter is how long readers that are kept out wait after others have said that they wait, before
	// they ask whether those still do. Up to askSpread is added, so that processes do not ask at the same
	// time.
	askAfter  = MaxPoll + askSpread
	askSpread = MaxPoll / 6
)

// questionDue reports whether something has happened that the grant has to ask about; asksForReaders
// reports the other reason for a question. Until the inbox is confirmed, a message that the grant is wanted
// may not have reached us.
func (l *Lock) questionDue(now time.Time) bool {
	g := &l.grant
	return g.state == Held && g.askDue && l.needsRenewal() && !l.env.InboxPending() && (l.members != nil || l.instant(now) < g.idleTill)
}

// sendQuestion sends the question: an acquire whose id holds the grant already.
func (l *Lock) sendQuestion(now time.Time, fx *Effects) {
	g := &l.grant
	g.askDue, l.pending = false, pending{verb: protocol.Acquire, question: true}
	fx.Send = protocol.Command{Verb: protocol.Acquire, ID: g.req.ID, TTL: g.req.TTL, Question: true, At: now}
}

// asksForReaders reports whether it is time to ask whether others still wait for a grant of readers. A waiter
// that is alive repeats that it waits, which puts the question off.
func (l *Lock) asksForReaders(now time.Time) bool {
	at := l.instant(now)
	return l.keepsReadersOut() && at >= l.grant.recheckAt && l.tenureOver(at)
}

// keepsReadersOut reports whether a reader waits beside its process's readers, as it does if other processes
// are to be served first. A grant that nobody needs renewed is left to end.
func (l *Lock) keepsReadersOut() bool {
	g, head := &l.grant, l.waiting.first
	return g.state == Held && g.req.Mode == protocol.Shared && l.members != nil && head != nil && head.Mode == protocol.Shared &&
		l.needsRenewal()
}

// putOffQuestion postpones the question until those who wait have had time to say so again. The request at
// the head of the queue repeats it after MaxPoll at the latest, unless it came from far behind.
func (l *Lock) putOffQuestion(now time.Time) {
	l.grant.recheckAt = l.instant(now).add(askAfter + time.Duration(float64(askSpread)*l.env.Jitter()))
}

// askedByReaders reports whether only readers wait, and Redis is being asked for them, or all of them wait
// briefly for an owner that may be idle. Then c, a reader that tries, shares the answer.
func (l *Lock) askedByReaders(c *Caller) bool {
	asking := l.grant.state == Asking && l.pending.verb == protocol.Acquire || l.pending.verb == protocol.Yield || l.pending.question
	if c.Mode != protocol.Shared {
		return false
	}
	for w := l.waiting.first; w != nil; w = w.next {
		if w.Mode != protocol.Shared || !asking && !w.awaitsIdleOwner() {
			return false // also while a failed request waits to be repeated, which can take long
		}
	}
	return true
}

// questionAnswered handles the answer to an owner's question that the grant is still ours.
func (l *Lock) questionAnswered(c *protocol.Command, a protocol.Answer, now time.Time, fx *Effects) {
	g := &l.grant
	if !l.pending.stale && g.role() != byPlace {
		g.wanted, g.askedAt, g.recheckAt = false, 0, 0 // unless hold finds otherwise
		if g.req.Mode == protocol.Shared && !l.env.HasInbox() {
			g.recheckAt = l.instant(now).add(maxTenure) // nobody else says so
		}
	}
	l.hold(a, c.At, viaFree, now)
	if !g.wanted {
		return
	}
	g.askedAt = l.instant(now)
	if l.pending.stale || a.Unfinished { // the question is asked again
		g.recheckAt = g.askedAt.add(firstPoll)
	}
	if !a.Unfinished { // else only dead requests may be in the way
		l.rejectTries(ErrLocked, fx)
	}
}

// questionFailed handles the failure of an owner's question. For all that is known, others still wait.
func (l *Lock) questionFailed(fail *protocol.Failure, pause time.Duration, now time.Time, fx *Effects) {
	g := &l.grant
	if fail.Again {
		g.askDue = true // so it asks again
		return
	}
	out := l.keepsReadersOut()
	g.wanted = g.wanted || out && l.tenureOver(l.instant(now))
	if g.wanted {
		g.recheckAt = l.instant(now).add(max(pause, askAfter))
	}
	l.rejectTries(fail.Err, fx)
	if out {
		l.rejectLasting(fail, fx)
	}
}

// unwanted handles a message that no request is queued behind the readers' grant id anymore. It may be
// older than a message wanted, so only an answer tells. Questions whose answers say that others wait are
// some time apart, however many writers come and give up.
func (l *Lock) unwanted(id string, now time.Time, fx *Effects) {
	g := &l.grant
	if !l.Holds(id) || !g.wanted {
		return
	}
	g.recheckAt, l.pending.stale = l.instant(now), l.pending.stale || l.pending.question
	if g.askedAt != 0 {
		g.recheckAt = max(g.recheckAt, g.askedAt.add(firstPoll))
	}
	l.applyRules(now, fx)
}
