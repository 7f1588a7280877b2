package leased

import "time"

// lock is the whole state of one name in one client: who waits, who is inside,
// and how this process stands with Redis (grant.go). It has no goroutine, no
// clock, no Redis and no logger: each method takes an event and the time and
// adds to effects what follows from it. Whoever owns the lock serializes the
// calls and performs the effects afterwards.
//
// After every event five rules are applied (rules.go), in this order; nothing else
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
	missed    bool      // messages may have been, since the command in flight was sent
	strays    int32     // callers inside whose grant is gone
	trouble   error     // last error of Redis, nil after an answer
	blocker   string    // who had the lock when Redis was last asked
	last      uint64    // last token given out; never goes back
	probed    bool      // it was asked for once without queueing, see ask
	deafTill  time.Time // who would wait in Redis waits until messages are heard, at most until then
	grant     grant
	overAt    time.Time  // earliest end of a maximum hold inside, zero if there is none
	lost      *lostGrant // that ended unproved while callers were inside
	passed    *spanRef   // hold span of the lease that last let somebody in
}

// surroundings are what a lock needs besides events.
type surroundings interface {
	// newRequest returns one under a new id; idles: its grant may be kept with
	// nobody inside.
	newRequest(m mode, ttl time.Duration, idles bool) request
	jitter() float64 // in [0, 1)
	// pushed reports whether messages reach this client, so that waiting needs
	// no polling.
	pushed() bool
	// joining reports that messages cannot be heard yet, but will be soon: then
	// messageless says so, or subscribed. Requests made until then carry no proof.
	joining() bool
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
	c.phase, c.till = left, earlier(now, l.trustedUntil(c, now))
	if c.stray {
		l.strays--
		c.settle(nil, fx) // its grant is gone
	} else {
		l.departing.push(c)
		l.passed = c.trail.ref()
		if l.grant.opts.idleHold > 0 { // as its id says
			l.grant.idleTill = now.Add(c.opts.idleHold)
		}
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

func (l *lock) trustedUntil(c *caller, now time.Time) time.Time {
	if c.phase == inside && c.ended != byLoss {
		l.grant.watch(now)
		return l.grant.trust()
	}
	return c.till
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

// rejectTries turns away those who do not wait for others, nor for an idle owner.
func (l *lock) rejectTries(err error, fx *effects) {
	for c := l.waiting.first; c != nil; {
		next := c.next
		if c.try && !(c.attends() && err == ErrLocked) {
			l.reject(c, err, fx)
		}
		c = next
	}
}

// attend has one who only tries wait for an owner that may be idle: it lets go at
// once if it is, when it hears that it is wanted. Nothing else would tell it so.
func (l *lock) attend(a answer, now time.Time) {
	// Who only tries has nobody of this process before it.
	if c := l.waiting.first; c != nil && c.try && !c.attends() && a.place == 0 {
		if who, err := parseID(a.blocker); err == nil && who.idles {
			c.till = now.Add(idleOwnersTime)
		}
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
