package leased

import "time"

// lock is the whole state of one name in one client: who waits, who is inside,
// and how this process stands with Redis (grant.go). It has no goroutine, no
// clock, no Redis and no logger: each method takes an event and the time and
// adds to effects what follows from it. Whoever owns the lock serializes the
// calls and performs the effects afterwards.
//
// After every event five rules are applied, in this order; nothing else
// decides anything:
//
//	admit   the grant is held, trusted, of the caller's mode, and its tenure is
//	        not over: the head of the FIFO enters. This is hand-over inside the
//	        process, entry of further readers, and re-use of an idle grant.
//	reserve a writer waits for readers of its own process: it takes a place in
//	        the queue meanwhile (reserve.go).
//	ask     callers wait and there is no grant: ask for one.
//	lower   a writer wants to go on as a reader (downgrade.go)
//	let go  nobody is inside and nobody can be admitted, and the grant is wanted
//	        or its idle time is over: release it, or yield it if callers wait.
//
// At most one command of a lock is in flight, renewals and cancels apart. The
// request belongs to the lock, not to the caller who caused it: one that gives
// up leaves it to the next.
type lock struct {
	env       surroundings
	waiting   callers
	inside    callers
	departing callers // left, and to be told how the letting go went
	closed    bool
	missed    bool   // messages may have been, since the command in flight was sent
	strays    int32  // callers inside whose grant is gone
	trouble   error  // last error of Redis, nil after an answer
	blocker   string // who had the lock when Redis was last asked
	last      uint64 // last token given out; never goes back
	grant     grant
	overAt    time.Time  // earliest end of a maximum hold inside, zero if there is none
	lost      *lostGrant // that ended unproved while callers were inside
	passed    *spanRef   // hold span of the lease that last let somebody in
}

// surroundings are what a lock needs besides events.
type surroundings interface {
	newRequest(m mode, ttl time.Duration) request
	jitter() float64 // in [0, 1)
	// pushed reports whether messages reach this client, so that waiting needs
	// no polling.
	pushed() bool
	// start is some fixed instant: renewals fall on a grid counted from it, so
	// that those of many locks leave together.
	start() time.Time
}

// enter: c wants the lock.
func (l *lock) enter(c *caller, now time.Time, fx *effects) {
	switch {
	case l.closed:
		l.turnAway(c, ErrClosed, fx)
		return
	case c.try && (l.waiting.first != nil || !l.compatible(c.mode)):
		l.turnAway(c, ErrLocked, fx)
		return
	}
	l.waiting.push(c)
	ahead, others := l.waiting.n-1, l.inside.n
	l.settle(now, fx)
	if c.phase == waiting && ahead+others > 0 {
		c.trail.note(note{at: now, what: noteQueued, place: ahead})
	}
	if c.try && c.phase == waiting && l.inside.first != nil {
		l.reject(c, ErrLocked, fx) // others read, but nobody new is let in
	}
}

// abandon: c gives up. It returns false if c was admitted or turned away first.
func (l *lock) abandon(c *caller, now time.Time, fx *effects) bool {
	if c.phase != waiting {
		return false
	}
	l.waiting.remove(c)
	c.phase = turnedAway
	l.settle(now, fx)
	return true
}

// leave: c unlocks. Where the lock then goes back to Redis, c is settled when
// that was answered; otherwise it is settled on return.
func (l *lock) leave(c *caller, now time.Time, fx *effects) {
	if c.phase != inside {
		return
	}
	l.inside.remove(c)
	c.phase, c.till = left, earlier(now, l.trustedUntil(c))
	l.departing.push(c)
	if c.stray {
		l.strays--
	} else {
		l.passed = c.trail.ref()
		l.grant.idleTill = now.Add(c.opts.idleHold)
	}
	if l.member() == nil && l.grant.lowering() && l.grant.inFlight != downgrade {
		l.forsake(now, fx)
	}
	l.settle(now, fx)
}

// finish: the client is closed. Who waits is turned away; who is inside is told,
// and keeps the grant until Unlock.
func (l *lock) finish(now time.Time, fx *effects) {
	if l.closed {
		return
	}
	l.closed = true
	for l.waiting.first != nil {
		l.reject(l.waiting.first, ErrClosed, fx)
	}
	for c := l.inside.first; c != nil; c = c.next {
		if c.ended == notYet {
			c.ended = byClose
			fx.ended = append(fx.ended, loss{caller: c})
		}
	}
	l.settle(now, fx)
}

// anyInside returns a caller of mode m that is inside, for an Unlock that does
// not say whose lease it ends: rather one that has no Lease of its own.
func (l *lock) anyInside(m mode) *caller {
	if l.inside.first == nil || l.inside.first.mode != m {
		return nil
	}
	for c := l.inside.first; c != nil; c = c.next {
		if !c.leased {
			return c
		}
	}
	return l.inside.first
}

// member returns the first caller inside on the grant there is now, nil if none.
func (l *lock) member() *caller {
	c := l.inside.first
	for c != nil && c.stray {
		c = c.next
	}
	return c
}

// idle reports whether nothing would be forgotten with the lock.
func (l *lock) idle() bool {
	return l.waiting.first == nil && l.inside.first == nil && l.grant.state == none &&
		l.grant.inFlight == nothing && l.departing.first == nil && l.lost == nil
}

// compatible reports whether a caller of mode m may be inside beside those who
// are, as in sync.Mutex and sync.RWMutex, whatever became of their leases.
func (l *lock) compatible(m mode) bool {
	return l.inside.first == nil || (m == shared && l.inside.first.mode == shared)
}

func (l *lock) trustedUntil(c *caller) time.Time {
	if c.phase == inside && c.ended != byLoss {
		return l.grant.trust()
	}
	return c.till
}

func (l *lock) settle(now time.Time, fx *effects) {
	l.admit(now, fx)
	l.reserve(now, fx)
	l.ask(now, fx)
	l.lower(now, fx)
	l.letGo(now, fx)
	l.dismiss(now, fx)
	g := &l.grant
	g.fresh, g.idle = false, g.state == held && l.member() == nil && g.inFlight == nothing
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
			c.via, g.since, g.served = viaIdle, now, 1
		case g.served > 0:
			c.via = viaLocal
		default:
			c.via = g.via
		}
		g.idle = false
		c.token, c.ahead = l.nextToken(now)
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
	if g.state == held {
		if l.member() != nil || head == nil || g.trusted(now) {
			return
		}
		// A grant that nobody vouches for any more is confirmed under its id
		// before anybody enters on it.
		l.unreserve(now, fx)
		g.state, g.wanted = asking, false
		g.ask = &inquiry{known: true, basis: now, floor: g.token}
	}
	if g.state != none && (head == nil || g.req.mode != head.mode) {
		l.drop(now, fx)
	}
	if head == nil || !l.compatible(head.mode) {
		return
	}
	if g.state == none {
		*g = grant{state: asking, req: l.env.newRequest(head.mode, head.opts.ttl), opts: head.opts, ask: &inquiry{basis: now}}
	}
	if now.Before(g.ask.checkAt) {
		return
	}
	g.inFlight, l.missed = acquire, false
	fx.send = command{verb: acquire, id: g.req.id, ttl: g.req.ttl, wait: l.anyoneWaits(), check: g.state == queued, at: now}
}

// next begins to hand the grant over to what head asks for.
func (l *lock) next(head *caller, now time.Time) *handOver {
	return &handOver{next: l.env.newRequest(head.mode, head.opts.ttl), opts: head.opts, ask: inquiry{basis: now}}
}

func (l *lock) anyoneWaits() bool {
	for c := l.waiting.first; c != nil; c = c.next {
		if !c.try {
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
			fx.ghosts = append(fx.ghosts, ghost{id: req.id, last: l.last, until: now.Add(req.ttl)})
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

// reject turns away one who waits.
func (l *lock) reject(c *caller, err error, fx *effects) {
	l.waiting.remove(c)
	l.turnAway(c, err, fx)
}

func (l *lock) turnAway(c *caller, err error, fx *effects) {
	c.phase, c.err = turnedAway, err
	fx.wake(c)
}

// rejectTries turns away those who do not wait for others.
func (l *lock) rejectTries(err error, fx *effects) {
	for c := l.waiting.first; c != nil; {
		next := c.next
		if c.try {
			l.reject(c, err, fx)
		}
		c = next
	}
}

// end ends the lease of c, who stays inside until Unlock.
func (l *lock) end(c *caller, why string, now time.Time, fx *effects) {
	if c.ended != byLoss {
		c.till, c.ended = earlier(now, l.grant.trust()), byLoss
		c.trail.note(note{at: now, what: noteLost, text: why})
		fx.ended = append(fx.ended, loss{c, why})
	}
}
