package leased

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Downgrade turns a lease for writing into one for reading: no writer comes in
// between, and readers who wait right behind may enter. From then on the lease is
// a reader's; its token becomes that of the shared grant, which is greater. It
// goes on being renewed throughout.
//
// It waits for Redis until ctx ends; the error then matches ctx's and the last one
// of Redis. It cannot be taken back: after that the client goes on trying as long
// as the lease lasts. It returns ErrLeaseLost
// if the lease is lost or over, and nil at once if it is a reader's already.
//
// The opposite does not exist, as in sync.RWMutex: two readers that both wanted
// it would wait for each other for ever. Unlock, lock for writing, and look again
// at what was read.
func (l *Lease) Downgrade(ctx context.Context) error {
	w, e := l.caller, l.entry
	done := make(chan struct{})
	e.step(func(now time.Time, fx *effects) { e.lock.downgrade(w, done, now, fx) })
	select {
	case <-done:
	case <-e.client.base.Done(): // nobody tries any more
		return fmt.Errorf("leased: downgrade of lock %q not confirmed: %w", e.keys.name, ErrClosed)
	case <-ctx.Done():
		e.mu.Lock()
		trouble := e.lock.trouble
		e.mu.Unlock()
		err := fmt.Errorf("leased: downgrade of lock %q not confirmed: %w", e.keys.name, ended(ctx))
		if trouble != nil {
			err = fmt.Errorf("%w (last trouble with Redis: %w)", err, trouble)
		}
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if w.mode != shared {
		return errors.Join(ErrLeaseLost, fmt.Errorf("leased: lock %q not downgraded: its lease is over", e.keys.name))
	}
	return nil
}

// downgrade: c, who is inside, wants to go on as a reader. done is closed when
// that is settled, one way or the other.
func (l *lock) downgrade(c *caller, done chan struct{}, now time.Time, fx *effects) {
	g := &l.grant
	switch {
	case c.mode == shared || c.phase != inside || c.ended == byLoss || g.state != held:
		fx.done = append(fx.done, done)
		return
	case g.hand == nil:
		g.hand = &handOver{next: l.env.newRequest(shared, g.req.ttl, g.opts.idleHold > 0), opts: g.opts}
	}
	g.hand.done = append(g.hand.done, done)
	l.settle(now, fx)
}

// lower sends a downgrade that is asked for, again after a failure.
func (l *lock) lower(now time.Time, fx *effects) {
	g := &l.grant
	if !g.lowering() || g.inFlight != nothing || l.member() == nil || now.Before(g.hand.ask.checkAt) {
		return
	}
	g.inFlight, g.hand.ask.known = downgrade, true
	fx.send = command{verb: downgrade, id: g.req.id, next: g.hand.next.id, link: l.member().trail.ref(), at: now}
	if l.last > g.token {
		fx.send.last = l.last
	}
}

// lowering reports that the grant is to become shared. Until it is known to be,
// either of its ids may be the one that owns.
func (g *grant) lowering() bool {
	return g.state == held && g.hand != nil && g.req.mode == exclusive
}

// lowered: the downgrade was answered.
func (l *lock) lowered(c *command, a answer, fail *failure, pause time.Duration, now time.Time, fx *effects) {
	g := &l.grant
	if !g.lowering() || c.id != g.req.id {
		return // lost meanwhile; both ids are cancelled
	}
	hand := g.hand
	switch {
	case fail != nil && l.member() != nil:
		hand.ask.checkAt = now.Add(pause)
		return
	case fail != nil:
		l.forsake(now, fx)
		return
	case a.outcome != granted:
		l.lose("the lock was not ours any more when it was to be downgraded", now, fx)
		return
	default:
		since := g.since
		l.goOn(a, c.id, fx)
		l.outlive(now, fx)
		*g = hand.inherit(nothing)
		a.link = c.link
		l.hold(a, c.at, viaFree, now)
		g.since, g.served = since, 1
		if w := l.member(); w != nil {
			w.mode, w.token = shared, g.readers
			w.trail.note(note{at: now, what: noteDowngraded})
		}
	}
	fx.done = append(fx.done, hand.done...)
}

// forsake ends a downgrade whose lease is over. If it was sent and had no answer,
// which of its ids owns is not known, and both are given up.
func (l *lock) forsake(now time.Time, fx *effects) {
	g := &l.grant
	hand := g.hand
	g.hand = nil
	fx.done = append(fx.done, hand.done...)
	if !hand.ask.known {
		return
	}
	l.haunt(l.last, max(l.last, g.token), now, fx, g.req, hand.next)
	*g = grant{inFlight: g.inFlight}
}
