package leased

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	firstReap     = 50 * time.Millisecond
	reapEvery     = time.Second
	ghostsAtOnce  = 250
	mostGhosts    = 100_000 // a flood of false messages must not fill the memory
	ghostPatience = time.Minute
)

// reaper cancels requests that nobody wants and that may still wait or own in
// Redis, so that nothing is left behind there: after a caller gave up, after a
// release without an answer, after a message about a request nobody knows. One
// cancel a request, many in a round trip, one round trip at a time; those that
// fail, or whose commands may still arrive, again each second.
type reaper struct {
	client *Client
	alarm  alarm

	mu      sync.Mutex // guards what follows; only watchdog.mu is locked under it
	ghosts  []*ghost
	reaping bool
	idle    chan struct{} // made by drain; closed when every ghost was tried
}

func newReaper(c *Client) *reaper {
	r := &reaper{client: c}
	r.alarm.owner = r
	return r
}

func (r *reaper) ring(_ time.Time, batch []renewal) []renewal {
	r.begin()
	return batch
}

// add has g cancelled, from now on.
func (r *reaper) add(g *ghost) {
	now := time.Now()
	g.nextAt = now
	if g.giveUp.IsZero() {
		g.giveUp = g.until
	}
	if g.giveUp.IsZero() {
		g.giveUp = now.Add(ghostPatience)
	}
	r.mu.Lock()
	full := len(r.ghosts) >= mostGhosts && !g.awaited()
	if !full {
		r.ghosts = append(r.ghosts, g)
	}
	r.mu.Unlock()
	if !full {
		r.begin()
	}
}

// begin reaps what is due unless that is under way.
func (r *reaper) begin() {
	r.mu.Lock()
	if r.reaping {
		r.mu.Unlock()
		return
	}
	r.reaping = true
	r.mu.Unlock()
	if !r.client.crew.start(r.reap) {
		r.giveUp()
	}
}

// reap is a sender, like entry.run; there is never more than one.
func (r *reaper) reap() {
	for {
		batch := r.take()
		if len(batch) == 0 {
			return
		}
		ctx, stop := context.WithTimeout(r.client.base, commandTimeout)
		errs := r.client.server.cancel(ctx, batch)
		stop()
		r.answered(batch, errs)
	}
}

// take returns ghosts that are due, taking them out. With none left it sets the
// alarm for the next and ends the reaping.
func (r *reaper) take() []*ghost {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	var batch []*ghost
	var next time.Time
	rest := r.ghosts[:0]
	for _, g := range r.ghosts {
		switch {
		case len(batch) < ghostsAtOnce && !g.nextAt.After(now):
			batch = append(batch, g)
			continue
		case next.IsZero() || g.nextAt.Before(next):
			next = g.nextAt
		}
		rest = append(rest, g)
	}
	clear(r.ghosts[len(rest):])
	r.ghosts = rest
	if len(batch) > 0 {
		return batch
	}
	r.reaping = false
	if r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
	if !next.IsZero() {
		r.client.dog.set(&r.alarm, next)
	}
	return nil
}

func (r *reaper) answered(batch []*ghost, errs []error) {
	now := time.Now()
	var again []*ghost
	for i, g := range batch {
		err := errs[i]
		if err == nil {
			g.tell(nil)
		} else {
			r.client.journal.trouble(g.keys.name, err)
		}
		over := !now.Before(g.giveUp)
		if over {
			g.tell(nil) // by now its TTL has ended it
		}
		if next := g.then; next != nil && (err == nil || over) {
			g.then = nil
			r.add(next)
		}
		if over || err == nil && g.until.IsZero() {
			continue
		}
		g.pause = reapEvery
		if err != nil && g.awaited() {
			g.pause = firstReap // somebody waits to hear of it
		}
		g.nextAt = now.Add(g.pause)
		again = append(again, g)
	}
	r.mu.Lock()
	r.ghosts = append(r.ghosts, again...)
	r.mu.Unlock()
}

// awaited reports whether somebody is to hear of its cancel, or of what comes after.
func (g *ghost) awaited() bool {
	return g != nil && (len(g.gone) > 0 || g.then.awaited())
}

// tell settles those who wait for the cancelling.
func (g *ghost) tell(err error) {
	if len(g.gone) == 0 {
		return
	}
	gone := g.gone
	g.gone = nil
	g.entry.step(func(_ time.Time, fx *effects) {
		for _, c := range gone {
			c.settle(err, fx)
		}
	})
}

// giveUp: the client has stopped; TTLs end what is left.
func (r *reaper) giveUp() {
	r.mu.Lock()
	all := r.ghosts
	r.ghosts, r.reaping = nil, false
	r.mu.Unlock()
	for _, g := range all {
		for ; g != nil; g = g.then {
			g.tell(errors.Join(ErrNotReleased, ErrClosed))
		}
	}
}

// drain waits until all ghosts were tried, or ctx ends.
func (r *reaper) drain(ctx context.Context) {
	r.mu.Lock()
	if !r.reaping {
		r.mu.Unlock()
		return
	}
	if r.idle == nil {
		r.idle = make(chan struct{})
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
