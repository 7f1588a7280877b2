package leased

import "time"

// reserve takes a place in the queue for a writer that waits for readers of its
// own process: else readers of others would go on entering until those have left.
// The request is the one that the yield of the last of them brings in; a yield
// enqueues once, so the place is kept.
//
// The place cannot be served while our readers own the lock. So it is asked for
// again only to keep its waiting lease, however soon somebody's TTL ends.
func (l *lock) reserve(now time.Time, fx *effects) {
	g, head := &l.grant, l.waiting.first
	if g.state != held || g.req.mode != shared || g.inFlight != nothing {
		return
	}
	if head == nil || head.mode != exclusive || head.try || l.strays > 0 {
		l.unreserve(now, fx)
		return
	}
	if l.member() == nil {
		return // the yield comes next
	}
	if g.hand == nil {
		if l.env.joining() {
			return // its id is to say that messages are heard
		}
		g.hand = l.next(head, now)
	}
	ask := &g.hand.ask
	if now.Before(ask.checkAt) {
		return
	}
	g.inFlight, l.missed = acquire, false
	fx.send = command{verb: acquire, id: g.hand.next.id, ttl: g.hand.next.ttl, wait: true, own: g.req.id, told: ask.told, check: ask.known, at: now}
}

// reserving reports that a place is taken, or asked for, behind readers of ours.
// That these are wanted is not heeded meanwhile: our writer keeps everybody else out
// anyway, and the cancel of its place says whether others wait then.
func (g *grant) reserving() bool {
	return g.state == held && g.hand != nil && g.req.mode == shared
}

// reserves reports whether id is the request of that place.
func (g *grant) reserves(id string) bool { return g.reserving() && g.hand.next.id == id }

// unreserve gives the place up: the writer does not wait any more, or will not
// get the lock from this grant.
func (l *lock) unreserve(now time.Time, fx *effects) {
	if g := &l.grant; g.reserving() {
		l.retract(g.hand.next, &g.hand.ask, now, fx)
		g.hand = nil
	}
}

// reserved: the acquire for the place was answered.
func (l *lock) reserved(c *command, a answer, fail *failure, pause time.Duration, now time.Time, fx *effects) {
	ask, ttl := &l.grant.hand.ask, l.grant.hand.next.ttl
	if fail != nil {
		l.failed(fail, pause, now, fx)
		return
	}
	ask.known = true
	if a.outcome == granted {
		l.overtaken(now, fx)
		return
	}
	// The yield may be answered by a message, which is trusted from here.
	ask.basis, ask.floor = c.at, a.token
	every := min(ttl/3, longestPoll)
	ask.checkAt = now.Add(every - time.Duration(float64(every)/3*l.env.jitter()))
	if ask.told = a.told; a.told > 0 || l.missed { // the other readers have to hear of it too
		ask.checkAt, l.missed = now, false
	}
}

// overtaken: the place was served, as no writer's is beside readers. So ours do
// not own the lock any more. They stay inside and the writer stays behind them, so
// the place is given up: others may have the lock meanwhile.
func (l *lock) overtaken(now time.Time, fx *effects) {
	l.grant.hand.ask.known = true
	l.lose("Redis gave the lock to a writer", now, fx)
}
