package leased

import "time"

// settle ends what is over and applies the rules, in the order that lock's comment
// gives. Then those who left are told how that went, unless Redis' word on it is
// still to come.
func (l *lock) settle(now time.Time, fx *effects) {
	l.hear(now)
	l.expire(now, fx)
	l.admit(now, fx)
	l.reserve(now, fx)
	l.ask(now, fx)
	l.lower(now, fx)
	l.letGo(now, fx)
	l.dismiss(now, fx)
	g := &l.grant
	g.fresh, g.idle = false, g.state == held && l.member() == nil && g.inFlight == nothing
	g.watch(now)
}

func (l *lock) admit(now time.Time, fx *effects) {
	g := &l.grant
	for c := l.waiting.first; c != nil; c = l.waiting.first {
		if l.closed || g.state != held || g.lowering() || g.req.mode != c.mode || !l.compatible(c.mode) ||
			!g.trusted(now) || l.tenureOver(now) {
			return
		}
		l.waiting.remove(c)
		c.phase, c.entered = inside, true
		switch {
		case g.idle:
			c.via, g.since, g.served = viaIdle, now, 0
		case g.served > 0:
			c.via = viaLocal
		default:
			c.via = g.via
		}
		g.idle = false
		c.token, c.ahead = l.nextToken(now)
		c.till = time.Time{}
		if c.opts.maxHold > 0 {
			c.till = now.Add(c.opts.maxHold)
			if l.overAt.IsZero() || c.till.Before(l.overAt) {
				l.overAt = c.till
			}
		}
		g.served++
		c.since = now.Sub(l.env.start())
		passed := l.passed
		if c.mode == shared && !g.fresh {
			passed = nil // nobody left: a writer before it gave up
		}
		c.trail.admitted(c.via, passed, now)
		l.inside.push(c)
		fx.wake(c)
	}
}

func (l *lock) ask(now time.Time, fx *effects) {
	g := &l.grant
	if g.inFlight != nothing {
		return
	}
	head := l.waiting.first
	if g.state == held && g.early && !l.env.joining() && (l.member() != nil || now.Before(g.idleTill)) {
		// Whether somebody wants it could not be heard so far.
		g.early, g.inFlight, l.missed = false, acquire, false
		fx.send = command{verb: acquire, id: g.req.id, ttl: g.req.ttl, at: now}
		return
	}
	if g.state == held {
		// Who left is to hear what became of the grant, as a yield tells.
		if l.member() != nil || head == nil || g.trusted(now) || l.departing.first != nil {
			return
		}
		// An idle grant that nobody vouches for any more is confirmed under its id
		// before anybody enters on it.
		g.state, g.wanted = asking, false
		g.ask = &inquiry{known: true, late: g.late, basis: now, floor: g.token}
	}
	if g.state != none && (head == nil || g.req.mode != head.mode) {
		l.drop(now, fx)
	}
	if g.state == asking && g.ask.probe && !l.env.joining() {
		l.drop(now, fx) // it had no answer: one that may queue gets another id
	}
	if head == nil || !l.compatible(head.mode) || g.state == none && !l.deafTill.IsZero() {
		return
	}
	if g.state == none {
		// A request from before messages are heard may take a free lock, but does not
		// queue: its id could not prove that its process has died. One that is refused
		// ends, and is asked for anew under another id; see hear.
		probe := l.env.joining() && !l.probed
		*g = grant{state: asking, req: l.newRequest(head), opts: head.opts, ask: &inquiry{basis: now, probe: probe}}
	}
	if now.Before(g.ask.checkAt) {
		return
	}
	g.inFlight, l.missed = acquire, false
	fx.send = command{verb: acquire, id: g.req.id, ttl: g.req.ttl, wait: l.anyoneWaits() && !g.ask.probe, told: g.ask.told,
		check: g.state == queued, at: now}
}

func (l *lock) newRequest(head *caller) request {
	return l.env.newRequest(head.mode, head.opts.ttl, head.opts.idleHold > 0)
}

// next begins to hand the grant over to what head asks for.
func (l *lock) next(head *caller, now time.Time) *handOver {
	return &handOver{next: l.newRequest(head), opts: head.opts, ask: inquiry{basis: now}}
}

// hear lets those queue who waited until messages are heard, or have done so in vain
// for long enough.
func (l *lock) hear(now time.Time) {
	if l.deafTill.IsZero() || l.env.joining() && now.Before(l.deafTill) {
		return
	}
	l.deafTill = time.Time{}
	if c := l.waiting.first; c != nil && c.attends() {
		c.till = now.Add(idleOwnersTime)
	}
}

func (l *lock) anyoneWaits() bool {
	for c := l.waiting.first; c != nil; c = c.next {
		if !c.try || c.attends() {
			return true
		}
	}
	return false
}

func (l *lock) letGo(now time.Time, fx *effects) {
	g := &l.grant
	if g.state != held || g.inFlight != nothing || l.member() != nil {
		return
	}
	cmd := command{id: g.req.id, link: l.passed, at: now}
	if l.last > g.token {
		cmd.last = l.last
	}
	switch head := l.waiting.first; {
	case head != nil && l.compatible(head.mode): // and could not be admitted
		if g.hand == nil { // no place is reserved
			g.hand = l.next(head, now)
		}
		cmd.verb, cmd.next = yield, g.hand.next.id
	case head != nil || g.wanted || l.closed || !now.Before(g.idleTill) || !g.trusted(now):
		cmd.verb = release
	default:
		return
	}
	g.state, g.inFlight, l.missed = lettingGo, cmd.verb, false
	fx.send = cmd
}

// dismiss settles those who left when their leaving needs nothing of Redis: the
// grant serves others, or idles, or is gone.
func (l *lock) dismiss(now time.Time, fx *effects) {
	g := &l.grant
	pending := g.state == lettingGo || (g.state == held && l.member() == nil && g.inFlight != nothing)
	if !pending {
		l.depart(fx)
	}
	if l.strays == 0 {
		for ; l.lost != nil; l.lost = l.lost.next {
			req := l.lost.req
			fx.ghosts = append(fx.ghosts, ghost{id: req.id, last: l.last, until: arrives(now, req.ttl), giveUp: now.Add(req.ttl)})
		}
	}
}

// depart settles those who left.
func (l *lock) depart(fx *effects) {
	for c := l.departing.first; c != nil; c = l.departing.first {
		l.departing.remove(c)
		c.settle(nil, fx)
	}
}
