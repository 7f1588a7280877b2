package leased

import (
	"context"
	"sync"
	"time"
)

// reaper cancels requests that nobody wants and that may still wait or own in
// Redis, so that nothing is left behind there: after a caller gave up, after a
// release without an answer, after a message about a request nobody knows. One
// cancel a request, many in a round trip, one round trip at a time; when, its
// schedule says.
type reaper struct {
	client *Client
	alarm  alarm

	mu       sync.Mutex // guards what follows; only watchdog.mu is locked under it
	schedule cancelSchedule
	reaping  bool
	idle     chan struct{} // made by drain; closed when all that is due was tried
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
	r.mu.Lock()
	added := r.schedule.add(g, time.Now())
	r.mu.Unlock()
	if added {
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
		r.answered(batch, r.send(batch))
	}
}

// send cancels. What a panic of the user's code leaves without answer has none.
func (r *reaper) send(batch []*ghost) (results []cancelled) {
	ctx, stop := context.WithTimeout(r.client.base, commandTimeout)
	defer stop()
	defer func() {
		for len(results) < len(batch) {
			results = append(results, cancelled{fail: &failure{errPanicked, noAnswer}})
		}
	}()
	defer r.client.survive("a hook of the Redis client")
	return r.client.server.cancel(ctx, batch)
}

// take returns ghosts that are due. With none left it sets the alarm for the next
// and ends the reaping.
func (r *reaper) take() []*ghost {
	r.mu.Lock()
	defer r.mu.Unlock()
	batch := r.schedule.take(time.Now())
	if len(batch) > 0 {
		return batch
	}
	r.reaping = false
	if r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
	if next := r.schedule.next(); !next.IsZero() {
		r.client.dog.set(&r.alarm, next)
	}
	return nil
}

func (r *reaper) answered(batch []*ghost, results []cancelled) {
	var told []settlement
	now := time.Now()
	r.mu.Lock()
	for i, g := range batch {
		if s := r.schedule.answered(g, results[i], now); len(s.callers) > 0 {
			told = append(told, s)
		}
	}
	r.mu.Unlock()
	for _, s := range told {
		s.entry.step(func(now time.Time, fx *effects) { s.entry.lock.cancelled(&s, now, fx) })
	}
	for i, g := range batch {
		if fail := results[i].fail; fail != nil {
			r.client.journal.trouble(g.keys.name, fail.err)
		}
	}
}

// giveUp: the client has stopped; TTLs end what is left.
func (r *reaper) giveUp() {
	r.mu.Lock()
	all := r.schedule.pending
	r.schedule, r.reaping = cancelSchedule{}, false
	r.mu.Unlock()
	for _, g := range all {
		for ; g != nil; g = g.then {
			if s := (settlement{entry: g.entry, callers: g.gone, fail: &failure{ErrClosed, clientClosed}}); len(s.callers) > 0 {
				s.entry.step(func(now time.Time, fx *effects) { s.entry.lock.cancelled(&s, now, fx) })
			}
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
