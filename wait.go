package leased

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// handle is what Mutex and RWMutex are made of: a name and options.
type handle struct {
	client *Client
	keys   keys
	opts   *lockOptions // shared by all handles without options of their own
	err    error        // of the name or the options; told on use
}

func (c *Client) handle(name string, opts []LockOption) handle {
	h := handle{client: c}
	if c == nil {
		h.err = invalid("the client is nil")
		return h
	}
	h.keys, h.err = newKeys(c.opts.prefix, name)
	if h.err == nil {
		h.opts = &c.opts.lock
		if len(opts) > 0 {
			own, err := c.opts.lock.with(opts)
			h.opts, h.err = &own, err
		}
	}
	return h
}

// enter brings a caller into the lock's FIFO, or lets it in at once.
func (h *handle) enter(w *caller, lent time.Duration) (*entry, error) {
	w.opts = h.opts
	h.client.begin()
	for {
		e := h.client.find(&h.keys)
		if e == nil {
			return nil, ErrClosed
		}
		now := time.Now()
		var fx effects
		e.mu.Lock()
		if e.dead {
			e.mu.Unlock()
			continue
		}
		e.lock.enter(w, now, &fx)
		if w.phase == waiting {
			w.ready = make(chan struct{})
		}
		spent := e.settledLocked()
		e.mu.Unlock()
		e.orLeave(w, func() { e.perform(&fx, spent, lent) })
		return e, nil
	}
}

// acquire is wait, measured and traced.
func (h *handle) acquire(ctx context.Context, c *caller) (*entry, error) {
	if h.err != nil {
		return nil, errors.Join(ErrNotAcquired, h.err)
	}
	client := h.client
	began := time.Now()
	span := client.tracing.begin(ctx, c, began)
	e, err := h.wait(ctx, c, began)
	now := time.Now()
	e.orLeave(c, func() {
		client.metrics.waited(ctx, span, h.keys.name, c, waitOutcome(err), now.Sub(began))
		if c.trail != nil {
			client.tracing.waited(ctx, span, &waited{h, e, c, err, began, now})
		}
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// orLeave runs f, which calls the user's code. If that does not return, because
// it panics, w leaves the lock: its caller will never unlock it.
func (e *entry) orLeave(w *caller, f func()) {
	returned := false
	defer func() {
		if !returned && e != nil {
			e.giveUp(w)
		}
	}()
	f()
	returned = true
}

// wait waits until the caller is admitted or turned away, or ctx ends. When ctx
// ends while the lease is being handed over, the hand-over happened: the lease is
// given back, without waiting for Redis, and ctx's error is returned. An error
// comes with the entry if there is one.
func (h *handle) wait(ctx context.Context, w *caller, began time.Time) (*entry, error) {
	if ctx.Err() != nil {
		return nil, h.refusal(nil, ended(ctx), began)
	}
	done := ctx.Done()
	var lent time.Duration
	if done == nil {
		lent = commandTimeout
	}
	e, err := h.enter(w, lent)
	if err != nil {
		return nil, h.refusal(nil, err, began)
	}
	if w.ready != nil {
		select {
		case <-w.ready:
			w.ready = nil // nobody else looks at it any more; a lease is small
		case <-done:
			last := e.giveUp(w)
			return e, h.refusal(&last, ended(ctx), began)
		}
	}
	if !w.entered {
		e.mu.Lock()
		last := e.lastLocked()
		e.mu.Unlock()
		return e, h.refusal(&last, w.err, began)
	}
	if w.ahead > 0 {
		w.catchUp()
	}
	return e, nil
}

// ended is a context's error, and its cause where that says more.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(err, cause) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// lastHeard is what a lock knew of Redis when a caller gave up.
type lastHeard struct {
	trouble error
	blocker string // an owner's value
}

func (e *entry) lastLocked() lastHeard { return lastHeard{e.lock.trouble, e.lock.blocker} }

// giveUp takes w out of the FIFO or, if it was admitted, lets it leave at once. Where
// thousands give up together they queue for the entry's mutex, so it is taken once.
func (e *entry) giveUp(w *caller) (last lastHeard) {
	e.step(func(now time.Time, fx *effects) {
		last = e.lastLocked()
		if !e.lock.abandon(w, now, fx) {
			e.lock.leave(w, now, fx)
		}
	})
	return last
}

// refusal is the error of a caller who was not admitted.
func (h *handle) refusal(last *lastHeard, reason error, began time.Time) error {
	r := &notAcquired{name: h.keys.name, waited: time.Since(began), reason: reason}
	if last != nil {
		r.trouble, r.blocker = last.trouble, blockerName(last.blocker)
	}
	return r
}

// catchUp waits until the server's clock has reached the caller's token, so that
// tokens stay behind that clock and go on growing after a flush.
func (c *caller) catchUp() {
	till := time.Now().Add(c.ahead)
	for i := 0; time.Now().Before(till); i++ {
		if i > 100 {
			time.Sleep(time.Microsecond)
		}
	}
}

// unlock lets the caller that pick chooses leave, and waits for Redis' word on it
// if there is need. It returns false if pick chooses none.
func (e *entry) unlock(pick func(*lock) *caller) (bool, error) {
	var fx effects
	now := time.Now()
	e.mu.Lock()
	w := pick(&e.lock)
	if w == nil {
		e.mu.Unlock()
		return false, nil
	}
	var ends time.Time
	if w.phase == inside {
		ends = e.lock.grant.ends()
	}
	e.lock.leave(w, now, &fx)
	if !w.settled && w.gone == nil {
		w.gone = make(chan struct{})
	}
	gone, cancel := w.gone, w.cancel
	if gone != nil {
		e.client.unlocks.Add(1) // before the lock can be forgotten
		defer e.client.unlocked()
	}
	spent := e.settledLocked()
	e.mu.Unlock()
	if cancel != nil {
		cancel(context.Canceled)
	}
	lent := w.opts.releaseTimeout
	if gone == nil || fx.send.verb == acquire {
		lent = 0 // what there is to send, others wait for
	}
	e.perform(&fx, spent, lent)
	if gone != nil {
		select {
		case <-gone:
			gone = nil
		default:
		}
	}
	if gone != nil {
		timer := time.NewTimer(max(0, w.opts.releaseTimeout-time.Since(now)))
		defer timer.Stop()
		select {
		case <-gone:
		case <-timer.C:
		}
	}
	e.mu.Lock()
	err := w.err
	if !w.settled {
		w.unheard = true
		err = &notReleased{name: e.keys.name, ends: ends, trouble: e.lock.trouble}
		if w.ended == byLoss {
			err = lostToo(err)
		}
	}
	held, first := e.closedLocked(w, holdOutcome(w, err), now)
	e.mu.Unlock()
	if first {
		e.client.left(&held)
	}
	return true, err
}
