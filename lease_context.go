package leased

import (
	"context"
	"maps"
	"sync"
)

// Context returns a context for the work done under the lease. It has the values of the
// context given to LockContext, but not its cancellation or deadline. It ends with the
// lease, at Unlock or when the lease is lost, then with a cause that matches [ErrLeaseLost] and
// gives the reason (see the package's limits for how soon); and when the client is closed,
// with cause [ErrClosed], although the lease is then still held.
//
// While a context derived from it has not been canceled, or a [context.AfterFunc] on it has not been stopped,
// the lease stays reachable. If it is dropped without Unlock, this is then not noticed, and the lease is
// renewed as before. The same holds for the contexts of With.
func (l *Lease) Context() context.Context {
	own, _ := l.made().contexts()
	return leaseContext{own, l}
}

// With returns a context that ends with ctx or with the lease, for work that must stop when
// its request does. ctx may be the one given to LockContext, or that of another request. The
// context's cause is that of ctx if ctx ended; it matches [ErrLeaseLost] if the lease was lost, is [ErrClosed]
// if the client was closed, and [context.Canceled] after Unlock or a call of the returned function.
// Spans started with the context are children of the lease's span if ctx carries the span in
// which LockContext was called. Call the returned function when the work is done: until then, or
// until ctx ends, ctx keeps resources for it, even after the lease has ended. That does not unlock, and
// neither does the end of ctx: call [Lease.Unlock] as well. With panics if ctx is nil.
func (l *Lease) With(ctx context.Context) (context.Context, context.CancelFunc) {
	l.made()
	if ctx == nil {
		panic(errNilContext)
	}
	// To cancel a context calls methods of its parent, from which it removes itself. So a context of package
	// context stands in between, and the end of the lease calls no method of ctx.
	parent := l.call.trace().context(ctx)
	var leave context.CancelCauseFunc
	if parent.Done() == nil {
		parent = context.WithoutCancel(parent)
	} else {
		parent, leave = context.WithCancelCause(parent)
	}
	work, cancel := context.WithCancelCause(parent)
	_, together := l.contexts()
	together.add(&cancel, work)
	return leaseContext{work, l}, func() {
		defer together.remove(&cancel) // even if a method of ctx panics
		cancel(context.Canceled)
		if leave != nil {
			leave(context.Canceled)
		}
	}
}

// leaseContext keeps its lease from being garbage-collected.
type leaseContext struct {
	context.Context
	lease *Lease
}

// contexts returns the lease's own context, without a reference to the lease, and what ends with it.
// The first call makes both.
func (l *Lease) contexts() (own context.Context, together *leaseContexts) {
	l.entry.mu.Lock()
	defer l.entry.mu.Unlock()
	w := l.call
	if together := w.extras().contexts; together != nil {
		return l.ctx, together
	}
	// Until then ctx is the context given to LockContext. It is used for its values and
	// trace; none of its methods is called here.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(l.ctx))
	l.ctx = ctx
	together = &leaseContexts{own: ctx, cancel: cancel}
	w.extend().contexts = together
	if cause := l.entry.causeLocked(w); cause != nil {
		together.end(cause)
	}
	return ctx, together
}

// leaseContexts are the contexts that end with a lease: its own, and those of With. They end in the
// goroutine that ends the lease, so that all have ended when an Unlock returns, when a loss is reported, or
// when the lease's own context has ended. Nothing in it refers to the Lease.
type leaseContexts struct {
	own    context.Context
	cancel context.CancelCauseFunc // of own

	mu    sync.Mutex                                   // also held while contexts end, which runs no code of users
	works map[*context.CancelCauseFunc]context.Context // With's contexts that are in use
	sweep int                                          // from how many works on those that have ended are looked for
}

const minSweep = 64

// end ends them all, for the given cause, own as the last one. If another goroutine does so already, end
// waits for it. c may be nil.
func (c *leaseContexts) end(cause error) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for cancel := range c.works {
		(*cancel)(cause)
	}
	c.works = nil
	c.cancel(cause)
}

// add has a context end with the others, at once if they have ended. Those that ended by themselves, and whose
// function nobody called, are forgotten when there are twice as many contexts as after the last time.
func (c *leaseContexts) add(cancel *context.CancelCauseFunc, work context.Context) { //nolint:revive // what is added, not the context of the call
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.own.Err() != nil {
		(*cancel)(context.Cause(c.own))
		return
	}
	if c.works == nil {
		c.works, c.sweep = map[*context.CancelCauseFunc]context.Context{}, minSweep
	}
	c.works[cancel] = work //nolint:fatcontext // it is kept as it is
	if len(c.works) >= c.sweep {
		maps.DeleteFunc(c.works, func(_ *context.CancelCauseFunc, work context.Context) bool { return work.Err() != nil })
		c.sweep = max(minSweep, 2*len(c.works))
	}
}

// remove forgets a context that is no longer in use.
func (c *leaseContexts) remove(cancel *context.CancelCauseFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.works, cancel)
}
