package leased

import "time"

// tick: time has passed.
func (l *lock) tick(now time.Time, fx *effects) {
	l.settle(now, fx)
	// Only what is still held then: nothing is renewed that is being let go.
	g := &l.grant
	if g.state == held && l.keeps() && (!now.Before(g.renewAt) || g.drifted(now)) {
		fx.renew = true
		fx.touch = g.touch(now)
		g.renewAt = l.onGrid(now.Add(g.req.ttl / 3))
	}
}

// expire ends what is over by now, on whichever clock says so first.
func (l *lock) expire(now time.Time, fx *effects) {
	if !l.overAt.IsZero() && !now.Before(l.overAt) {
		l.endOverlong(now, fx)
	}
	if c := l.waiting.first; c != nil && c.attends() && !now.Before(c.till) {
		l.reject(c, ErrLocked, fx) // the owner was not idle
	}
	if g := &l.grant; g.state == held && l.member() != nil && g.over(g.proved, now) {
		l.lost = &lostGrant{g.req, l.lost}
		if g.lowering() {
			l.lost = &lostGrant{g.hand.next, l.lost}
		}
		l.lose("Redis did not confirm it in time", now, fx)
	}
}

// due returns when tick must be called next, zero for never.
func (l *lock) due() time.Time {
	g := &l.grant
	due := l.overAt
	earliest := func(t time.Time) {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	if c := l.waiting.first; c != nil && c.attends() {
		earliest(c.till)
	}
	switch {
	case g.state == held:
		if l.keeps() {
			earliest(g.renewAt)
		}
		if l.member() != nil {
			earliest(g.trust())
		} else if g.inFlight == nothing {
			earliest(g.trust())
			earliest(g.idleTill)
		}
		if g.hand != nil && g.inFlight == nothing {
			earliest(g.hand.ask.checkAt)
		}
	case g.state == none && l.waiting.first != nil:
		earliest(l.deafTill)
	case g.inFlight == nothing && g.ask != nil:
		earliest(g.ask.checkAt)
	}
	return due
}

// endOverlong ends the leases held for their maximum. Renewal goes on as long as
// another lease of the grant is within its own.
func (l *lock) endOverlong(now time.Time, fx *effects) {
	l.overAt = time.Time{}
	for c := l.inside.first; c != nil; c = c.next {
		switch {
		case c.over || c.ended == byLoss || c.till.IsZero():
		case !now.Before(c.till):
			c.over = true
			l.end(c, "it was held for its maximum", now, fx)
		case l.overAt.IsZero() || c.till.Before(l.overAt):
			l.overAt = c.till
		}
	}
}

// keeps reports whether somebody wants the grant renewed.
func (l *lock) keeps() bool {
	if l.member() == nil {
		return true // idle, or waiting for its turn to be let go
	}
	for c := l.member(); c != nil; c = c.next {
		if !c.over {
			return true
		}
	}
	return false
}

// abandoned: the lease of c was garbage-collected; nobody can unlock it but
// through the mutex, so it is not renewed for its sake.
func (l *lock) abandoned(c *caller) bool {
	if c.phase != inside || c.over {
		return false
	}
	c.over = true
	return true
}
