package leased

import (
	"errors"
	"time"
)

// answered: the command in flight was answered, or failed, in which case nothing is
// to be tried again for pause.
func (l *lock) answered(c *command, a answer, fail *failure, pause time.Duration, now time.Time, fx *effects) {
	g := &l.grant
	g.inFlight = nothing
	l.trouble = nil
	if fail != nil {
		l.trouble = fail.err
	}
	switch c.verb {
	case acquire:
		l.acquired(c, a, fail, pause, now, fx)
	case yield:
		l.yielded(c, a, fail, pause, now, fx)
	case release:
		l.released(c, a, fail, now, fx)
	case downgrade:
		l.lowered(c, a, fail, pause, now, fx)
	}
	l.settle(now, fx)
}

func (l *lock) acquired(c *command, a answer, fail *failure, pause time.Duration, now time.Time, fx *effects) {
	g := &l.grant
	if g.reserves(c.id) { // a place behind the grant that is held, not that grant
		l.reserved(c, a, fail, pause, now, fx)
		return
	}
	if c.id != g.req.id || g.state == none {
		// It was lost meanwhile. Nobody wants what this may have brought, or bring
		// yet.
		switch {
		case fail.mayRun():
			l.disown(c.id, arrives(now, c.ttl), fx)
		case a.outcome == granted || a.outcome == enqueued:
			l.disown(c.id, time.Time{}, fx)
		}
		return
	}
	if fail != nil {
		if g.state != held {
			l.failed(fail, pause, now, fx)
		} else if fail.mayRun() {
			g.late = arrives(now, c.ttl)
			g.doubt = g.late
		}
		return
	}
	before := g.ask != nil && g.ask.known
	if g.ask != nil {
		g.ask.known = true
	}
	switch a.outcome {
	case granted:
		how := viaFree
		if c.check {
			how = viaCheck
		}
		if g.state == held && a.token > g.token && !(a.kept && (g.req.mode == shared || a.forgot)) {
			// A reader's extension is answered with the token of whoever entered last, and
			// one whose token was forgotten with another.
			l.grantedAnew(now, fx)
			return
		}
		l.hold(a, c.at, how, now)
		if a.unfinished {
			l.goOn(a, l.env.newRequest(g.req.mode, g.req.ttl, false).id, fx)
		}
	case enqueued:
		if g.state == held {
			// A message was faster than this. But if the lock's last token was ours
			// already when this was answered, it says that we own no more, and wait.
			if a.token >= g.token {
				l.grantedAnew(now, fx)
			}
			return
		}
		if !a.unfinished { // else the lock may be free behind the dead
			l.rejectTries(ErrLocked, fx)
		}
		l.wait(a, c.at, now)
	case refused:
		l.blocker = a.blocker
		if a.unfinished && g.state != held {
			g.ask.known, g.ask.checkAt = before, now
			return
		}
		l.attend(a, now)
		l.rejectTries(ErrLocked, fx)
		if g.state == asking && g.ask.probe {
			l.probed = true
			if l.env.joining() {
				l.deafTill = now.Add(longestDeaf)
			}
		}
		switch {
		case g.state == held:
			g.renewAt = now // that tells, or the release
			if l.member() == nil {
				g.idleTill = time.Time{}
			}
		case g.ask.probe && !before:
			*g = grant{}
		case !g.ask.probe && l.waiting.first != nil && l.waiting.first.attends(): // asks again, to wait
		case before: // an earlier command may have queued it
			l.drop(now, fx)
		default:
			*g = grant{}
		}
	}
}

// failed: an acquire, or what became one, had no answer or was refused by the
// server as a whole.
func (l *lock) failed(fail *failure, pause time.Duration, now time.Time, fx *effects) {
	ask, ttl := l.grant.ask, l.grant.req.ttl
	if l.grant.reserving() {
		ask, ttl = &l.grant.hand.ask, l.grant.hand.next.ttl
	}
	if ask != nil {
		if l.missed {
			pause, l.missed = 0, false
		}
		ask.checkAt = now.Add(pause)
		if fail.mayRun() {
			ask.known = true
			ask.late = arrives(now, ttl)
		}
	}
	if head := l.waiting.first; head != nil {
		head.trail.note(note{at: now, what: noteTrouble, err: fail.err})
	}
	l.rejectTries(fail.err, fx)
	if fail.lasts() {
		for w := l.waiting.first; w != nil; {
			next := w.next
			if !w.patient || fail.hopeless() {
				l.reject(w, fail.err, fx)
			}
			w = next
		}
	}
}

// hold: ownership was proved by what was sent at from. A grant already held is
// extended: the server gave it its full TTL again.
func (l *lock) hold(a answer, from time.Time, how via, now time.Time) {
	g := &l.grant
	if g.state != held {
		if g.ask != nil && g.ask.late.After(g.late) {
			g.late = g.ask.late
		}
		g.early = l.env.joining() || g.ask != nil && g.ask.probe
		g.state, g.fresh, g.ask = held, true, nil
		g.via, g.since, g.served = how, now, 0
		g.token, g.clock, g.clockAt = a.token, a.clock, now
		if g.req.mode == shared {
			l.last = max(a.token, l.last+1)
			g.readers = l.last
		}
		g.proved, g.idleTill = from, time.Time{}
		l.passed = a.link
		g.touchAt = now.Add(tokenLife(g.req.ttl) / 4)
	} else if from.After(g.proved) {
		g.proved = from
		g.rebase(a.clock, from, now)
	}
	if !g.reserving() { // else it may be our own writer that waits
		g.wanted = g.wanted || a.more
	}
	g.renewAt = l.onGrid(from.Add(g.req.ttl / 3))
	if how == viaDirect {
		// Confirmed by the next regular renewal, earlier when under half of the
		// TTL is left.
		g.renewAt = earlier(l.onGrid(now.Add(g.req.ttl/3)), from.Add(g.req.ttl/2))
	}
}

// wait: the request is in the queue, as an answer to what was sent at from said.
func (l *lock) wait(a answer, from, now time.Time) {
	g := &l.grant
	if head := l.waiting.first; head != nil && head.trail != nil && g.state != queued {
		head.trail.note(note{at: now, what: noteQueuedInRedis, place: a.place, text: blockerName(a.blocker)})
	}
	g.state = queued
	g.ask.basis, g.ask.floor = from, a.token
	pause := min(g.req.ttl/3, longestPoll)
	deaf := a.echo == echoDenied || !l.env.pushed()
	if deaf || a.mute && a.place == 0 { // those behind the head hear of its release
		if a.blocker != l.blocker {
			g.ask.poll = 0 // who took turns once does so again
		}
		pause = min(pause, max(firstPoll, 2*g.ask.poll))
		g.ask.poll = pause
	} else {
		g.ask.poll = 0
	}
	l.blocker = a.blocker
	pause -= time.Duration(float64(pause) / 3 * l.env.jitter())
	if a.left >= 0 {
		pause = min(pause, a.left+afterExpiry+time.Duration(a.place)*perPlace)
	}
	if l.missed || a.unfinished || a.told > 0 {
		pause, l.missed = 0, false
	}
	g.ask.told = a.told
	g.ask.checkAt = now.Add(pause)
	if g.ask.endsAt.After(now) {
		g.ask.checkAt = earlier(g.ask.checkAt, g.ask.endsAt)
	}
}

func (l *lock) yielded(c *command, a answer, fail *failure, pause time.Duration, now time.Time, fx *effects) {
	g := &l.grant
	if g.state != lettingGo { // a message was faster, and told who left
		if g.state == held && fail == nil && a.outcome == granted {
			l.hold(a, c.at, viaFree, now)
		}
		return
	}
	old, proof, placed := g.req, max(c.last, g.token), g.hand.ask.known
	doubted := l.doubted()
	if fail == nil {
		l.outlive(now, fx)
	}
	*g = g.hand.inherit(nothing)
	if fail == nil && a.outcome != notOurs && doubted {
		l.haunt(c.last, proof, now, fx, old)
	}
	if a.gone && placed {
		// New is known by the place that was reserved, not by this yield: old was
		// lost before. Nobody has looked yet whether the lock is free now.
		l.departLost(now, fx)
		l.missed = true
	}
	switch {
	case fail != nil:
		// Old may still own, and new may wait: one is cancelled, the other
		// asked about. Late copies of the yield do no harm to either.
		l.haunt(c.last, proof, now, fx, old)
		l.failed(fail, pause, now, fx)
	case a.outcome == notOurs:
		l.departLost(now, fx)
		g.ask.known = g.ask.late.After(now) // an acquire for the place that was reserved may still arrive
		l.drop(now, fx)
	case a.outcome == granted:
		l.depart(fx)
		a.link = c.link
		l.hold(a, c.at, viaLocal, now) // nobody else was there
		l.goOn(a, old.id, fx)
	default:
		l.depart(fx)
		if !a.unfinished {
			l.rejectTries(ErrLocked, fx)
		}
		l.wait(a, c.at, now)
	}
}

func (l *lock) released(c *command, a answer, fail *failure, now time.Time, fx *effects) {
	g := &l.grant
	old, proof := g.req, max(c.last, g.token)
	doubted := l.doubted()
	if fail == nil {
		l.outlive(now, fx)
	}
	*g = grant{}
	switch {
	case fail != nil:
		l.haunt(c.last, proof, now, fx, old)
	case a.outcome == notOurs:
		l.departLost(now, fx)
	default:
		if doubted {
			l.haunt(c.last, proof, now, fx, old)
		}
		l.depart(fx)
		l.goOn(a, old.id, fx)
	}
}

// grantedAnew: Redis gave our id the lock, or a place, although it should have owned it
// already. So it did not, and others may have had the lock in between: the grant is lost,
// and what came in its place is given back.
func (l *lock) grantedAnew(now time.Time, fx *effects) {
	id := l.grant.req.id
	l.lose("Redis had not kept it for us", now, fx)
	l.disown(id, time.Time{}, fx)
}

// goOn has an id cancelled that Redis does not know any more, or never did, where the
// call so answered could not let in all who may enter: a cancel goes on with that.
func (l *lock) goOn(a answer, id string, fx *effects) {
	if a.unfinished {
		fx.ghosts = append(fx.ghosts, ghost{id: id, last: l.last, link: l.passed})
	}
}

// doubted reports that letting the grant go proves nothing for who left: an acquire of
// it had no answer while it was held, and may have had the lock granted anew after
// another had it. The lock's last token tells, as after a release without answer.
func (l *lock) doubted() bool {
	till := l.grant.doubt.Sub(l.env.start())
	for c := l.departing.first; c != nil && !l.grant.doubt.IsZero(); c = c.next {
		if c.since < till {
			return true
		}
	}
	return false
}

// outlive has the id of a grant that ends cancelled while an acquire of it may still
// arrive: it would own, or wait, for nobody.
func (l *lock) outlive(now time.Time, fx *effects) {
	if g := &l.grant; g.late.After(now) {
		l.disown(g.req.id, g.late, fx)
	}
}

// haunt has a grant cancelled whose letting go had no answer; those who left are told
// when that succeeds. If it may have several ids, they are cancelled one after the
// other, in the order in which a late command may turn one into the next. proof is the
// last token that was given out under the first of them.
func (l *lock) haunt(last, proof uint64, now time.Time, fx *effects, ids ...request) {
	chain := make([]ghost, len(ids))
	for i, req := range ids {
		chain[i] = ghost{id: req.id, last: last, link: l.passed, until: arrives(now, req.ttl), giveUp: now.Add(req.ttl)}
		if i > 0 {
			chain[i-1].then = &chain[i]
		}
	}
	chain[0].proof = proof
	end := &chain[len(ids)-1]
	for c := l.departing.first; c != nil; c = l.departing.first {
		l.departing.remove(c)
		end.gone = append(end.gone, c)
	}
	fx.ghosts = append(fx.ghosts, chain[0])
}

const lostUnproved = "its release had no answer, and the lock may have been another's meanwhile"

// cancelled: a grant whose letting go had no answer was cancelled, or that was given
// up. Who left hears that the lock was let go only where it is proved to have been
// ours until then: its id owned when it was cancelled, or the lock's last token is
// still the last that we gave out, so that nobody else was let in.
func (l *lock) cancelled(s *settlement, now time.Time, fx *effects) {
	for _, c := range s.callers {
		var err error
		switch {
		case s.proved:
		case s.fail != nil && s.fail.kind == clientClosed:
			err = errors.Join(ErrNotReleased, s.fail.err)
		case c.ended == byLoss:
			if s.fail != nil {
				err = errors.Join(ErrNotReleased, s.fail.err)
			}
		default:
			c.ended, err = byLoss, errUnproved
			if s.fail != nil {
				err = errors.Join(err, s.fail.err)
			}
			if !c.unheard { // else its Unlock has said so
				c.trail.note(note{at: now, what: noteLost, text: lostUnproved})
				fx.ended = append(fx.ended, loss{c, lostUnproved})
			}
		}
		c.settle(err, fx)
	}
}

const lostAtRelease = "the lock was not ours any more at its release"

// departLost: on letting go it turned out that the grant was not ours any more.
func (l *lock) departLost(now time.Time, fx *effects) {
	l.loseDeparting(lostAtRelease, now, fx)
	l.depart(fx)
}

// loseDeparting ends the leases of those who left but were not told yet how that went.
func (l *lock) loseDeparting(why string, now time.Time, fx *effects) {
	for c := l.departing.first; c != nil; c = c.next {
		if c.ended != byLoss {
			c.ended = byLoss
			c.trail.note(note{at: now, what: noteLost, text: why})
			fx.ended = append(fx.ended, loss{c, why})
		}
	}
}

// drop gives up a request that nobody waits for.
func (l *lock) drop(now time.Time, fx *effects) {
	g := &l.grant
	l.retract(g.req, g.ask, now, fx)
	*g = grant{}
}

// retract has what Redis may know of a request cancelled.
func (l *lock) retract(req request, ask *inquiry, now time.Time, fx *effects) {
	if ask.known {
		until := ask.late
		if !until.After(now) {
			until = time.Time{}
		}
		fx.ghosts = append(fx.ghosts, ghost{id: req.id, last: l.last, until: until})
	}
}

// lose: the grant is not ours, or cannot be believed any more. Who is inside
// stays there until Unlock, as in sync.Mutex.
func (l *lock) lose(why string, now time.Time, fx *effects) {
	for c := l.inside.first; c != nil; c = c.next {
		l.end(c, why, now, fx)
		if !c.stray {
			c.stray = true
			l.strays++
		}
	}
	l.loseDeparting(why, now, fx) // their grant was still to be let go
	l.unreserve(now, fx)
	if l.grant.lowering() {
		fx.done = append(fx.done, l.grant.hand.done...)
	}
	l.outlive(now, fx)
	l.grant = grant{inFlight: l.grant.inFlight}
}
