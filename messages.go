package leased

import "time"

// receive takes a message about one of this lock's requests.
func (l *lock) receive(m *message, now time.Time, fx *effects) {
	switch m.kind {
	case "granted":
		l.heard(m.id, answer{outcome: granted, token: m.token, clock: m.clock, more: m.more, link: m.link}, now, fx)
	case "wanted":
		l.wanted(m.id, now, fx)
	case "ends":
		l.ends(m.id, m.left, now, fx)
	case "revoked":
		l.revoked(m.id, m.token, now, fx)
	}
}

// heard: a message says that id was granted. If no request of that id waits or
// holds, the server is told so.
func (l *lock) heard(id string, a answer, now time.Time, fx *effects) {
	g := &l.grant
	switch {
	case id == g.req.id && (g.state == asking || g.state == queued):
		if a.token <= g.ask.floor {
			return
		}
		if g.over(g.ask.basis, now) {
			l.askAgain(g.ask, now) // too late to be believed
		} else {
			l.hold(a, g.ask.basis, viaDirect, now)
		}
	case id == g.req.id && g.state == held:
		if a.token <= g.token {
			return // of the grant that is held
		}
		if g.req.mode == exclusive {
			g.early = true // Redis is asked: messages can be forged
		} else {
			l.grantedAnew(now, fx)
		}
	case id == g.req.id && g.state == lettingGo && a.token <= g.token:
		return // of the grant that is being let go
	case id == g.req.id && g.state == lettingGo:
		l.loseDeparting(lostAtRelease, now, fx) // and what came in its place is let go
	case g.reserves(id):
		l.overtaken(now, fx)
	case g.state == lettingGo && g.hand != nil && id == g.hand.next.id:
		if g.hand.ask.known {
			l.missed = true // a place may have been served before the yield came: its answer tells
			return
		}
		next := g.hand.inherit(g.inFlight)
		if next.over(next.ask.basis, now) {
			l.missed = true // too late to be believed: ask, if the answer is older
			return
		}
		l.outlive(now, fx)
		if l.doubted() {
			l.haunt(l.last, max(l.last, g.token), now, fx, g.req)
		}
		*g = next
		l.depart(fx) // the yield was done
		l.hold(a, g.ask.basis, viaDirect, now)
	default:
		l.disown(id, time.Time{}, fx)
	}
	l.settle(now, fx)
}

// disown has a request of ours that nobody here knows cancelled: a late copy of
// a command made it. One that was lost while callers are inside waits for them.
// Earlier commands about it may arrive until then, if that is not zero.
func (l *lock) disown(id string, until time.Time, fx *effects) {
	for lost := l.lost; lost != nil; lost = lost.next {
		if lost.req.id == id {
			return
		}
	}
	fx.ghosts = append(fx.ghosts, ghost{id: id, last: l.last, until: until})
}

// askAgain: the server did something for a request of ours and we do not know. The
// answer to a command under way may be older than that.
func (l *lock) askAgain(ask *inquiry, now time.Time) {
	ask.known, ask.checkAt = true, now
	l.missed = l.grant.inFlight != nothing
}

// wanted: a message says that somebody is queued behind id. Where we only wait, the
// server takes us for the owner: a message was lost, or it carried out a command that
// we gave up.
func (l *lock) wanted(id string, now time.Time, fx *effects) {
	g := &l.grant
	switch {
	case g.state == lettingGo && id == g.req.id:
		return
	case g.state == lettingGo && g.hand != nil && id == g.hand.next.id:
		l.missed = true
		return
	case g.lowering() && id == g.hand.next.id:
		g.wanted = true
	case g.reserving() && id == g.req.id:
		return // who wants it may have given up when our writer does
	case g.reserves(id):
		l.askAgain(&g.hand.ask, now)
	case g.state == none || id != g.req.id:
		l.disown(id, time.Time{}, fx)
	case g.state == queued:
		l.askAgain(g.ask, now)
	case g.state == asking:
		l.askAgain(g.ask, now)
		g.wanted = true // also if the answer, which may be older, does not say so
	default:
		if !g.wanted {
			l.noteInside(note{at: now, what: noteWanted})
		}
		g.wanted = true
	}
	l.settle(now, fx)
}

// ends: a message says that who is before id will be gone by itself after left,
// which may be sooner than was thought.
func (l *lock) ends(id string, left time.Duration, now time.Time, fx *effects) {
	g := &l.grant
	if g.ask == nil || id != g.req.id {
		return
	}
	g.ask.endsAt = now.Add(left + afterExpiry) // for the answer too that this overtakes
	if g.state == queued {
		g.ask.checkAt = earlier(g.ask.checkAt, g.ask.endsAt)
		l.settle(now, fx)
	}
}

const evicted = "an operator evicted its owner"

// revoked: a message says that the grant of id with that token, or a later one,
// was taken away. A token of 0 says that Redis had forgotten the lock's last one.
func (l *lock) revoked(id string, token uint64, now time.Time, fx *effects) {
	g := &l.grant
	mine := id == g.req.id || g.lowering() && id == g.hand.next.id
	if g.state == held && mine && (token == 0 || token >= g.token) {
		l.lose(evicted, now, fx)
		l.settle(now, fx)
	}
}

// subscribed: the inbox is (again) confirmed; messages may have been missed.
// The answer to a command in flight may be older than this.
func (l *lock) subscribed(now time.Time, fx *effects) {
	l.missed = l.grant.inFlight != nothing
	if g := &l.grant; g.ask != nil {
		g.ask.checkAt = now
	}
	l.settle(now, fx)
}

// reachable: Redis is well again, or may be; a command after the last of this lock
// that failed need not wait for the rest of its pause. It reports whether one is sent.
func (l *lock) reachable(now time.Time, fx *effects) bool {
	g := &l.grant
	ask := g.ask
	if ask == nil && g.state == held && g.hand != nil {
		ask = &g.hand.ask
	}
	if g.inFlight != nothing || ask == nil || !ask.checkAt.After(now) {
		return false
	}
	ask.checkAt = now
	l.settle(now, fx)
	return fx.send.verb != nothing
}

// messageless: the inbox's first subscription was refused, or had no answer.
func (l *lock) messageless(now time.Time, fx *effects) { l.settle(now, fx) }

// holds reports whether the grant is that of id.
func (l *lock) holds(id string) bool { return l.grant.state == held && l.grant.req.id == id }

// renewed: the outcome of a renewal. It is about a request, not about whatever
// the lock holds now; and what comes after the trust window revives nothing.
func (l *lock) renewed(r *renewal, now time.Time, fx *effects) {
	g := &l.grant
	if !l.holds(r.req.id) {
		return
	}
	switch r.outcome {
	case notOurs:
		if g.lowering() {
			break // the other id may own by now; the downgrade's answer tells
		}
		if r.at.Before(g.proved) {
			g.renewAt = now // it was proved ours since this was sent: ask again
			break
		}
		l.lose("Redis says that it is not ours any more", now, fx)
	case granted:
		if g.over(g.proved, now) {
			break
		}
		if r.at.After(g.proved) {
			g.proved = r.at
			if next := l.onGrid(r.at.Add(g.req.ttl / 3)); next.After(g.renewAt) {
				g.renewAt = next
			}
		}
		g.rebase(r.clock, r.at, now)
		l.trouble = nil
	default:
		l.trouble = r.err
		l.noteInside(note{at: now, what: noteTrouble, err: r.err})
		g.renewAt = earlier(g.renewAt, now.Add(min(g.req.ttl/10, time.Second)))
	}
	l.settle(now, fx)
}
