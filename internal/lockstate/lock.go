// Package lockstate decides which caller enters a lock and what to ask Redis. It does no I/O,
// starts no goroutine and reads no clock: it is given events and the time, and returns effects.
package lockstate

import (
	"math"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Lock is the state of one lock in one client: which callers wait, which are inside, and
// what the client has in Redis (grant.go). Each method takes an event and the time, and adds
// what follows from the event to the effects. Whoever calls these methods must serialize the
// calls, and performs the effects afterwards.
//
// An event after which a rule may apply ends with applyRules, which applies these rules in this order; before
// them it ends what has expired, and after them it settles callers that left, and checks. Reenter and
// LeaveKept skip the rules: they refuse every case in which one other than admit could apply.
//
//	admit      If the grant is held, trusted and of the caller's mode, and its tenure is
//	           not over, the head of the FIFO enters. This covers hand-off inside the
//	           process, entry of further readers, and re-use of an idle grant.
//	reserve    If a writer waits for readers of its own process, take a place in the
//	           queue for it meanwhile (handover.go).
//	ask        If callers wait and there is no grant, ask for one. End a request that no
//	           caller waits for anymore, or that could never be served. Ask about a grant
//	           that is held if a message may have been missed, or if readers are kept out
//	           because others wait (question.go).
//	downgrade  If a writer wants to continue as a reader, send the downgrade (handover.go).
//	release    If no member is inside, and a caller waits that could not be admitted, yield
//	           the grant; but release it if that caller has to wait for an orphan. Without a
//	           waiting caller, release the grant if it is wanted or not trusted, its idle
//	           time is over, a minimum hold is not, or the client is closed.
//
// At most one command of a lock is in flight, apart from renewals and cancels. The request
// belongs to the lock, not to the caller that caused it: a caller that gives up leaves the
// request to the next caller.
//
// This file has the rules, and how callers enter, give up and leave. A downgrade is in
// handover.go, a check in check.go, answers and messages from Redis in events.go, re-checks in
// recheck.go, and what time does in timers.go.
type Lock struct {
	env            Environment
	waiting        callers
	inside         callers // callers whose grant is gone, then the members of the present grant
	members        *Caller // the first member, nil if there is none
	leaving        callers // callers that unlocked and wait for the outcome of the release
	closed         bool
	lackedReplicas bool // see LackedReplicas
	refusedOnce    bool // a request that must not queue was refused, so the next one may; see makeRequest
	pending        pending
	lastErr        error   // last error from Redis, nil after an answer
	blocker        string  // value of the lock's own key when Redis was last asked
	last           uint64  // last token given to a caller; never decreases
	inboxWaitUntil Instant // no request queues until the inbox is confirmed, or until then
	grant          grant
	maxHoldAt      Instant        // earliest end of a maximum hold inside, zero if there is none
	checking       *checking      // the checks that callers wait for, nil if there are none
	lost           *lostGrant     // grants that ended unproved while callers were inside
	prevHoldSpan   *protocol.Span // hold span of the lease that precedes the next caller's
	proof          proof          // see trusts
}

// Environment is what a lock needs from its client besides events.
type Environment interface {
	// NewRequest returns a request under a new id. idles says that its grant may be kept
	// with no caller inside; from says what the request is made for.
	NewRequest(m protocol.Mode, ttl time.Duration, idles bool, from protocol.Origin) protocol.Request
	// Client returns the client's name as it appears in ids.
	Client() string
	// Jitter returns a random number in [0, 1).
	Jitter() float64
	// HoldsMany reports whether the client holds so many locks that the server would notice
	// if all of them were renewed at the same time.
	HoldsMany() bool
	// HasInbox reports whether messages reach this client, so that its waiters need not
	// poll.
	HasInbox() bool
	// Subscribed reports whether the client is subscribed to its messages, so that new ids say so.
	Subscribed() bool
	// InboxPending reports whether messages do not reach this client yet but are expected
	// to: Subscribed or SubscribeFailed follows. The id of a request made until then does
	// not let others tell whether the client is alive.
	InboxPending() bool
	// RoundTrip returns how long Redis takes to answer, 0 if that is not known.
	RoundTrip() time.Duration
	// Start is a fixed instant. Renewals fall on a grid that starts there, so that the
	// renewals of many locks leave together.
	Start() time.Time
}

// Enter is the event that c wants the lock.
func (l *Lock) Enter(c *Caller, now time.Time, fx *Effects) {
	switch {
	case l.closed:
		finishRejected(c, protocol.ErrClosed, fx)
		return
	case c.Try && !l.compatible(c.Mode):
		why := errHeldHere
		if l.KeptPastLease() {
			why = errKeptHere
		}
		finishRejected(c, why, fx)
		return
	case c.Try && l.waiting.first != nil && !l.askedByReaders(c):
		finishRejected(c, errWantedHere, fx)
		return
	}
	c.Since = now.Sub(l.env.Start())
	if last := l.waiting.last; c.Try && last != nil && last.awaitsIdleOwner() { // and so do all before it
		c.until = last.until
	}
	l.waiting.push(c)
	ahead, others := l.waiting.n-1, l.inside.n
	l.applyRules(now, fx)
	if c.Phase == Waiting && ahead+others > 0 {
		c.Events.add(Event{At: now, What: EventQueued, Place: ahead})
	}
	if c.Try && c.Phase == Waiting && l.members != nil && !l.pending.question {
		l.reject(c, ErrLocked, fx) // readers are inside, but no more are admitted
	}
	if c.Phase == Waiting && l.waiting.n == 1 {
		l.addEventInside(Event{At: now, What: eventWantedHere})
	}
}

// Abandon is the event that c gives up. It returns false if c was already admitted or rejected.
func (l *Lock) Abandon(c *Caller, now time.Time, fx *Effects) bool {
	if c.Phase != Waiting {
		return false
	}
	l.waiting.remove(c)
	c.Phase = Rejected
	l.applyRules(now, fx)
	return true
}

// GiveBack is the event that c, which was admitted, does not take the lock. Nothing was done
// under the lock, so c has no minimum hold, and if the lease turns out to be lost, that is no loss.
//
// Another reader's Unlock may have picked c meanwhile, before c's call had returned: see PickHolder.
// Then that reader is still inside, and nobody else will unlock for it. GiveBack returns whose hold it has
// ended. It must be called only once for c.
func (l *Lock) GiveBack(c *Caller, now time.Time, fx *Effects) (left *Caller) {
	if c.Phase == Left && c.Mode == protocol.Shared {
		other := l.PickHolder(protocol.Shared)
		if other != nil {
			l.Leave(other, now, fx)
		}
		return other
	}
	c.unused = true
	switch {
	case c.Phase != Inside:
	case !c.Orphaned:
		l.grant.minHoldUntil = 0
	case c.Mode == protocol.Exclusive: // the only one inside, so what was lost was its own
		for lost := l.lost; lost != nil; lost = lost.next {
			lost.keep = time.Time{}
		}
	}
	l.Leave(c, now, fx)
	return c
}

// Leave is the event that c unlocks. If the lock is then given back to Redis, c is settled
// when Redis has answered. Otherwise c is settled on return.
func (l *Lock) Leave(c *Caller, now time.Time, fx *Effects) {
	if c.Phase != Inside {
		return
	}
	if l.closed { // there may be no more ticks, and no answer to the release
		l.expire(now, fx)
	}
	l.drawToken(c, now)
	l.letOut(c)
	c.Phase, c.until = Left, l.instant(earlierOf(now, l.TrustedUntil(c, now)))
	if c.Orphaned {
		c.settle(nil, fx) // its grant is gone
	} else {
		l.leaving.push(c)
		l.prevHoldSpan = c.Events.HoldSpan()
		if l.members == nil {
			l.grant.idleTill = l.grant.idlesAfter(c, l.instant(now))
		}
	}
	if l.members == nil && l.grant.role() == byDowngrade && l.pending.verb != protocol.Downgrade {
		l.abortDowngrade(now, fx)
	}
	l.applyRules(now, fx)
}

// letOut removes c from the callers inside.
func (l *Lock) letOut(c *Caller) {
	if c == l.members {
		l.members = c.next
	}
	l.inside.remove(c)
	if l.inside.first == nil {
		l.maxHoldAt = 0
	}
}

// Most locks that a process keeps are locked and unlocked repeatedly with nothing else to
// decide. Reenter and LeaveKept are Enter and Leave for that case: they establish that only
// the rule admit can apply and that no effect follows, without evaluating every rule.

// Reenter is the event that c, which has no lease and no event log, wants the lock. It succeeds
// only if c enters at once and nothing else follows. Otherwise it changes nothing and returns
// false, and Enter decides.
//
// Nobody sees the token of such a caller unless its lease is lost. So the caller draws a token
// only when that happens, or when an event other than LeaveKept ends its hold; see drawToken.
// Without a token it need not wait for the server's clock, which tokens must not overtake. A
// caller that finds the grant idle does not need the next tick any earlier than it was due.
func (l *Lock) Reenter(c *Caller, now time.Time) bool {
	at := l.instant(now)
	if !l.quiescent() || c.Opts.MaxHold != 0 || c.Opts.MinHold != 0 || !l.mayEnter(c.Mode, at, now) {
		return false
	}
	l.letIn(c, at, now)
	if c.Mode == protocol.Shared {
		c.Token = l.grant.readers
	}
	return true
}

// LeaveKept is the event that c, which is inside and has no event log, unlocks. It succeeds only
// if the client keeps the grant, because others are inside or because the grant may idle, and
// nothing else follows; then c is settled. Otherwise it changes nothing and returns false, and
// Leave decides. While others are still inside, the next tick need not come any earlier than it
// was due.
func (l *Lock) LeaveKept(c *Caller, now time.Time) bool {
	g, at := &l.grant, l.instant(now)
	if !l.quiescent() || c.Ended != NotYet || l.closed || g.state != Held || !l.trusts(at, now) {
		return false
	}
	last := c == l.members && c.next == nil
	if last && (g.wanted || g.opts.IdleHold == 0 || c.Opts.IdleHold == 0 || at < g.minHoldUntil) {
		return false
	}
	l.letOut(c)
	c.Phase, c.until, c.Settled = Left, at, true
	l.prevHoldSpan = nil
	if g.idle = last; last {
		g.idleTill = g.idlesAfter(c, at)
	}
	return true
}

// IdleUntil returns when the grant is given back if no caller comes, 0 if callers are inside.
func (l *Lock) IdleUntil() Instant {
	if l.members != nil {
		return 0
	}
	return l.grant.idleTill
}

// quiescent reports whether no rule applies before the next event: nobody waits for the lock or
// for an answer, and all callers inside are members without a maximum hold.
func (l *Lock) quiescent() bool {
	g := &l.grant
	return l.waiting.first == nil && l.leaving.first == nil && !l.anyOrphans() && l.pending.verb == protocol.None &&
		g.next == nil && !g.askDue && l.maxHoldAt == 0 && l.checking == nil
}

// drawToken gives c, which is inside, a token if it entered without one.
func (l *Lock) drawToken(c *Caller, now time.Time) {
	if c.Token == 0 {
		c.Token, _ = l.nextToken(now)
	}
}

// Close is the event that the client is closed. Waiters are rejected; holders are notified
// and keep the grant until Unlock.
func (l *Lock) Close(now time.Time, fx *Effects) {
	if l.closed {
		return
	}
	l.closed = true
	for l.waiting.first != nil {
		l.reject(l.waiting.first, protocol.ErrClosed, fx)
	}
	for c := l.inside.first; c != nil; c = c.next {
		if c.Ended == NotYet {
			c.Ended = byClose
			fx.Ended = append(fx.Ended, Loss{Caller: c})
		}
	}
	l.applyRules(now, fx)
}

// PickHolder returns a caller of mode m that is inside, nil if there is none. It serves an
// Unlock that does not say whose lease it ends, so it prefers a caller without a Lease. Readers
// without one are alike, so which of them has left matters only to their number. An orphan comes first: the
// Unlock of the reader that it is must not end the hold of another one.
func (l *Lock) PickHolder(m protocol.Mode) *Caller {
	if l.inside.first == nil || l.inside.first.Mode != m {
		return nil
	}
	for c := l.inside.first; c != nil; c = c.next {
		if !c.Leased {
			return c
		}
	}
	return l.inside.first
}

// anyOrphans reports whether callers are inside whose grant is gone. They come first in inside,
// because they entered before all members.
func (l *Lock) anyOrphans() bool { return l.inside.first != l.members }

// Granted reports whether the process has a grant, in use, idle, or being given back.
func (l *Lock) Granted() bool { return l.grant.state == Held || l.grant.state == Releasing }

// Idle reports whether the lock has no state worth keeping.
func (l *Lock) Idle() bool {
	return l.waiting.first == nil && l.inside.first == nil && l.grant.state == none &&
		l.pending.verb == protocol.None && l.leaving.first == nil && l.lost == nil
}

// compatible reports whether a caller of mode m may join the callers inside, as in
// sync.Mutex and sync.RWMutex. Orphans count too: an orphan stays inside until its Unlock.
func (l *Lock) compatible(m protocol.Mode) bool {
	return l.inside.first == nil || (m == protocol.Shared && l.inside.first.Mode == protocol.Shared)
}

// TrustedUntil returns the end of the trust window of c's lease.
func (l *Lock) TrustedUntil(c *Caller, now time.Time) time.Time {
	if c.Phase == Inside && c.Ended != ByLoss {
		l.grant.watch(now)
		return l.grant.trust()
	}
	return l.time(c.until)
}

// reject ends the wait of c with err.
func (l *Lock) reject(c *Caller, err error, fx *Effects) {
	l.waiting.remove(c)
	finishRejected(c, err, fx)
}

// finishRejected ends the call of c, which is in no list, with err.
func finishRejected(c *Caller, err error, fx *Effects) {
	c.Phase = Rejected
	c.setOutcome(err)
	fx.Woken.add(c)
}

// rejectTries rejects callers of the Try methods with err. If err is ErrLocked, it spares a
// caller that waits for an idle owner.
func (l *Lock) rejectTries(err error, fx *Effects) {
	for c := l.waiting.first; c != nil; {
		next := c.next
		if c.Try && !(c.awaitsIdleOwner() && err == ErrLocked) {
			l.reject(c, err, fx)
		}
		c = next
	}
}

// tryIdleOwner lets a Try caller wait for an owner that may be idle. An idle owner releases the lock as
// soon as it learns that the lock is wanted, and only a queued request tells it. The caller waits, too, if
// a quorum's servers are split among several that asked at once: otherwise none of them might get the lock;
// once they are queued, the first one does. Readers that try wait together. They do not wait behind a
// reader that waits anyway: see askedByReaders.
func (l *Lock) tryIdleOwner(a protocol.Answer, now time.Time) {
	first := l.waiting.first
	if first == nil || !first.Try || first.awaitsIdleOwner() || a.Place != 0 {
		return
	}
	who, err := protocol.ParseID(a.Blocker)
	// Queued behind nobody: the messages of a quorum's servers that grant it were faster than their
	// answers.
	granting := a.Outcome == protocol.Enqueued && !a.Brief && a.Blocker == "" && a.Left == protocol.Ownerless
	if !a.Split && !granting && (err != nil || !who.Idles) {
		return
	}
	for c := first; c != nil && c.Try && (c == first || c.Mode == protocol.Shared && first.Mode == protocol.Shared); c = c.next {
		l.awaitIdleOwner(c, now)
	}
}

// end ends the lease of c. The caller stays inside until its Unlock.
func (l *Lock) end(c *Caller, why Reason, now time.Time, fx *Effects) {
	if c.Ended != ByLoss {
		l.drawToken(c, now)
		c.until, c.Ended, c.Why = l.instant(earlierOf(now, l.grant.trust())), ByLoss, why
		reportLoss(c, now, fx)
	}
}

// LastErr returns the last error from Redis, nil after an answer.
func (l *Lock) LastErr() error { return l.lastErr }

// Blocker returns the value of the lock's own key when Redis was last asked.
func (l *Lock) Blocker() string { return l.blocker }

// LackedReplicas reports whether a grant was given up because too few replicas had it, since a caller was last
// admitted. Other clients are as likely as not to give up theirs for the same reason.
func (l *Lock) LackedReplicas() bool { return l.lackedReplicas }

// EndsBy returns the time by which the lease of c, if it is given back now, expires in Redis even if
// nothing is heard from now on. It is zero if that is unknown or c is not inside. It counts a TTL from now,
// since a command without an answer, or the release that made us the owner, may have been carried out a
// moment ago.
func (l *Lock) EndsBy(c *Caller, now time.Time) time.Time {
	g := &l.grant
	if c.Phase != Inside || g.state != Held && g.state != Releasing {
		return time.Time{}
	}
	if g.minHoldUntil > l.instant(now) { // Redis keeps the lock for the rest of it from when the release arrives, see arrives
		return l.time(max(l.instant(now).add(g.req.TTL), g.minHoldUntil.add(min(g.req.TTL, latestArrival))))
	}
	return l.time(l.instant(now).add(g.req.TTL))
}

// Request returns the present request, the zero value if there is none.
func (l *Lock) Request() protocol.Request { return l.grant.req }

// CommandInFlight reports whether a command awaits its answer.
func (l *Lock) CommandInFlight() bool { return l.pending.verb != protocol.None }

// applyRules ends what has expired and applies the rules in the order of Lock's comment. Then
// it settles callers that left, unless Redis has yet to decide their outcome, and answers checks.
func (l *Lock) applyRules(now time.Time, fx *Effects) {
	l.endInboxWait(now)
	l.expire(now, fx)
	l.admit(now, fx)
	l.reserve(now, fx)
	l.ask(now, fx)
	l.sendDowngrade(now, fx)
	l.releaseGrant(now, fx)
	l.settleLeft(now, fx)
	l.settleChecks(now, fx)
	g := &l.grant
	// A question does not interrupt the idle time, unless others wait.
	busy := l.pending.verb != protocol.None && (!l.pending.question || g.wanted)
	// A grant that no option keeps idle stands empty while the answer to one holds up its release. It passes to the
	// next caller as ever.
	g.fresh, g.idle = false, g.state == Held && l.members == nil && !busy && g.idleTill != 0
	if l.members != nil { // before the next caller's lease comes theirs
		l.prevHoldSpan = nil
	}
	g.watch(now)
}

// admit lets callers enter from the head of the FIFO while the grant allows it.
func (l *Lock) admit(now time.Time, fx *Effects) {
	if l.waiting.first == nil {
		return
	}
	at := l.instant(now)
	for c := l.waiting.first; c != nil && l.mayEnter(c.Mode, at, now); c = l.waiting.first {
		l.waiting.remove(c)
		l.letIn(c, at, now)
		var lead time.Duration
		c.Token, lead = l.nextToken(now)
		c.clockLead = int32(lead) // at most a little more than maxAhead
		fx.Woken.add(c)
	}
}

// mayEnter reports whether the grant lets a caller of mode m enter now. at is now as an
// Instant.
func (l *Lock) mayEnter(m protocol.Mode, at Instant, now time.Time) bool {
	g := &l.grant
	return !l.closed && g.state == Held && at >= g.minHoldUntil && g.role() != byDowngrade && g.req.Mode == m && l.compatible(m) &&
		l.trusts(at, now) && !l.tenureOver(at)
}

// letIn makes c, which may enter, a member. It gives c no token; that is left to its caller.
func (l *Lock) letIn(c *Caller, at Instant, now time.Time) {
	g := &l.grant
	c.Phase, c.Entered = Inside, true
	switch {
	case g.idle:
		c.Via, g.since, g.served = ViaIdle, at, 0
	case g.served > 0:
		c.Via = ViaLocal
	default:
		c.Via = g.via
	}
	g.idle, g.idleTill = false, 0
	c.Since, c.slow = at.sub(start), false
	l.watchMaxHold(c)
	if c.Mode == protocol.Exclusive && c.Opts.MinHold > 0 {
		g.minHoldUntil = minHoldOf(c)
	}
	g.served = min(g.served, math.MaxInt32-1) + 1 // with readers that always overlap, the count has no bound
	passed := l.prevHoldSpan
	if c.Mode == protocol.Shared && !g.fresh {
		passed = nil // it follows no lease: a writer before it gave up
	}
	c.Events.admitted(c.Via, passed, l.blocker, now)
	l.inside.push(c)
	if l.members == nil {
		l.members = c
	}
}

// ask sends an acquire if there is something to ask for, and cancels a request that no caller
// waits for anymore.
func (l *Lock) ask(now time.Time, fx *Effects) {
	g := &l.grant
	if l.pending.verb != protocol.None {
		return
	}
	if l.questionDue(now) || l.asksForReaders(now) {
		l.sendQuestion(now, fx)
		return
	}
	head := l.waiting.first
	if g.state == Held {
		// Callers that left still wait for the outcome of the release, which the answer
		// to an acquire would not give.
		if l.members != nil || head == nil || l.trusts(l.instant(now), now) || l.leaving.first != nil {
			return
		}
		// An idle grant outside its trust window is confirmed under its own id before the
		// next caller enters. The old proof and token stay, because a message may be about
		// a grant made after the one that they prove and before this command.
		l.becomeAsking(ticket{req: g.req, opts: g.opts, sent: true,
			lateUntil: g.lateUntil, doubtUntil: g.doubtUntil, proved: g.proved, token: g.token})
	}
	if g.state != none && (head == nil || g.req.Mode != head.Mode) {
		l.cancelRequest(now, fx)
	}
	if g.state == Asking && g.mayNotQueue && !l.env.InboxPending() {
		l.cancelRequest(now, fx) // unanswered so far; a request that may queue gets another id
	}
	if g.state == queued && l.looksDead(now) {
		l.cancelRequest(now, fx) // releases pass over it, so it would never be served
	}
	if head == nil || !l.compatible(head.Mode) || g.state == none && l.inboxWaitUntil != 0 {
		return
	}
	if g.state == none {
		l.makeRequest(head, now)
	}
	if l.instant(now) < g.recheckAt {
		return
	}
	l.pending = pending{verb: protocol.Acquire}
	fx.Send = protocol.Command{Verb: protocol.Acquire, ID: g.req.ID, TTL: g.req.TTL, Wait: l.anyoneWaits() && !g.mayNotQueue, First: !g.sent, Told: g.told, Last: l.last,
		Recheck: g.state == queued, Place: g.place, Waits: g.lease, Until: l.briefly(now), At: now}
}

// makeRequest makes a request for head. One that is made before the inbox is confirmed may take a free lock
// but must not queue, because its id could not prove that its process has died. If it is refused it ends,
// and a request under another id follows later; see endInboxWait. InboxPending is read before the id is
// made, because the inbox may be confirmed in between.
func (l *Lock) makeRequest(head *Caller, now time.Time) {
	inboxPending := l.env.InboxPending()
	l.becomeAsking(l.newTicket(head, now))
	l.grant.mayNotQueue = inboxPending && !l.refusedOnce
}

// looksDead reports whether the request's id says that its client can be seen to be subscribed, and Redis
// has answered for a while although the client is not.
func (l *Lock) looksDead(now time.Time) bool {
	g := &l.grant
	if g.pollsSince == 0 || l.instant(now) < g.pollsSince.add(deadAfter) || l.env.HasInbox() || l.env.Subscribed() {
		return false
	}
	own, err := protocol.ParseID(g.req.ID)
	return err == nil && own.Proof == protocol.Counted
}

// newRequest returns a request with a new id for what head asks for. The id refers to the trace
// of head, for those who wait behind the request, unless the grant may idle: then it can serve
// callers long after head.
func (l *Lock) newRequest(head *Caller) protocol.Request {
	var from protocol.Origin
	idles := head.Opts.IdleHold > 0
	if head.Events != nil && head.Events.Wait != nil && !idles {
		from.Span = *head.Events.Wait
	}
	return l.env.NewRequest(head.Mode, head.Opts.TTL, idles, from)
}

// newTicket returns a ticket for what head asks for, to be sent now or later.
func (l *Lock) newTicket(head *Caller, now time.Time) ticket {
	return ticket{req: l.newRequest(head), opts: head.Opts, proved: now}
}

// endInboxWait lets callers queue once the inbox is confirmed or refused, or once they have
// waited for it long enough.
func (l *Lock) endInboxWait(now time.Time) {
	if l.inboxWaitUntil == 0 || l.env.InboxPending() && l.instant(now) < l.inboxWaitUntil {
		return
	}
	l.inboxWaitUntil = 0
	for c := l.waiting.first; c != nil && c.awaitsIdleOwner(); c = c.next {
		l.awaitIdleOwner(c, now)
	}
}

// awaitIdleOwner lets c, a Try caller, wait briefly for an owner that may be idle. What has to travel is
// c's request, the message to the owner, its release and the message to c: half a round trip each, if the
// owner is no farther away than c. Twice that is allowed for.
func (l *Lock) awaitIdleOwner(c *Caller, now time.Time) {
	c.until = l.instant(now.Add(idleOwnersTime + min(4*l.env.RoundTrip(), maxSilence)))
}

// anyoneWaits reports whether a caller waits that may queue in Redis.
func (l *Lock) anyoneWaits() bool {
	for c := l.waiting.first; c != nil; c = c.next {
		if !c.Try || c.awaitsIdleOwner() {
			return true
		}
	}
	return false
}

// releaseGrant gives up the grant if it has no members and there is a reason to.
func (l *Lock) releaseGrant(now time.Time, fx *Effects) {
	g := &l.grant
	if g.state != Held || l.pending.verb != protocol.None || l.members != nil {
		return
	}
	cmd := protocol.Command{ID: g.req.ID, Last: l.drawn(), Link: l.prevHoldSpan, Cooldown: cooldown(l.time(g.minHoldUntil), now), At: now}
	doubted := l.inDoubt()
	switch head := l.waiting.first; {
	case head != nil && l.compatible(head.Mode) && !doubted: // but could not be admitted
		if g.next == nil { // no place is reserved
			g.next = &successor{ticket: l.newTicket(head, now)}
		}
		g.next.role = byYield
		cmd.Verb, cmd.Next = protocol.Yield, g.next.req.ID
	case !l.mayIdle(now):
		cmd.Verb, cmd.Heard = protocol.Release, g.wanted
		if doubted {
			cmd.Proof = max(g.token, cmd.Last)
		}
		if g.role() == byPlace { // it is asked about when the lock is given back
			g.next.role = byYield
		}
	default:
		return
	}
	l.becomeReleasing(cmd.Verb)
	fx.Send = cmd
}

// mayIdle reports whether the grant, if it has no members, is kept for callers to come.
func (l *Lock) mayIdle(now time.Time) bool {
	g, at := &l.grant, l.instant(now)
	return l.waiting.first == nil && !g.wanted && !l.closed && at >= g.minHoldUntil && at < g.idleTill && l.trusts(at, now)
}

// settleLeft settles the callers that left, if no outcome is awaited for them: the grant serves
// others, or idles, or is gone. A release waits for the answer to a question that is in flight; a
// grant that idles does not. It also cancels lost grants once no caller works under any of them.
func (l *Lock) settleLeft(now time.Time, fx *Effects) {
	if !l.awaitsRelease(now) {
		l.settleLeaving(fx)
	}
	if !l.anyOrphans() {
		for ; l.lost != nil; l.lost = l.lost.next {
			req := l.lost.req
			fx.Cancels = append(fx.Cancels, Cancellation{ID: req.ID, Last: l.last, Keep: l.lost.keep, until: arrives(now, req.TTL), giveUp: now.Add(req.TTL), lost: true})
		}
	}
}

// awaitsRelease reports whether the grant is being given back, or will be after the answer that is
// awaited.
func (l *Lock) awaitsRelease(now time.Time) bool {
	switch {
	case l.grant.state == Releasing:
		return true
	case l.grant.state != Held || l.members != nil || l.pending.verb == protocol.None:
		return false
	}
	return !l.pending.question || !l.mayIdle(now)
}

// settleLeaving settles the callers that left.
func (l *Lock) settleLeaving(fx *Effects) {
	for c := l.leaving.first; c != nil; c = l.leaving.first {
		l.leaving.remove(c)
		c.settle(nil, fx)
	}
}
