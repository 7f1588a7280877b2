package leased

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// Lease is what a caller of LockContext holds until Unlock. It is safe for
// concurrent use.
//
// Keep it reachable while the work goes on: a lease that is garbage-collected
// together with its contexts, without Unlock, is not renewed any more, which is
// logged, and keeps the callers of this process out until Mutex.Unlock.
type Lease struct {
	entry  *entry
	caller *caller
	parent context.Context // values and trace of the context it was asked with
	once   sync.Once
	result error
	guard  runtime.Cleanup

	mu  sync.Mutex // guards ctx
	ctx context.Context
}

func newLease(ctx context.Context, e *entry, w *caller) *Lease {
	l := &Lease{entry: e, caller: w, parent: ctx}
	l.guard = runtime.AddCleanup(l, func(o orphan) { o.entry.collected(o.caller) }, orphan{e, w})
	return l
}

// orphan is what remains of a lease that nobody can reach.
type orphan struct {
	entry  *entry
	caller *caller
}

func (e *entry) collected(w *caller) {
	e.mu.Lock()
	mine := e.lock.abandoned(w)
	e.mu.Unlock()
	if mine {
		e.client.journal.collected()
	}
}

// Token returns the lease's fencing token, positive and below 2^53, so it fits a
// BIGINT and a JSON number. A writer's token is greater than that of every earlier
// lease of the lock. A reader's is greater than that of every earlier writer and
// smaller than that of every later one; the tokens of readers in different processes
// are in no order, so compare a reader's with a writer's only.
//
// A resource is safe from owners that do not know yet that they lost the lock if it
// keeps the greatest token of a writer, and every access presents the lease's: the
// first access of a writer raises the kept token, its writes require that token to be
// the kept one still, and whatever comes with a smaller one is refused. So is a first
// access with an equal one: while two own the lock, as after a FLUSHALL, both draw tokens
// from one clock, and can draw the same. Comparing at
// the write only does not protect what was read before. A reader's token is compared and
// never kept; after Downgrade the lease has a reader's token.
func (l *Lease) Token() uint64 {
	l.entry.mu.Lock() // a downgrade changes it
	defer l.entry.mu.Unlock()
	return l.caller.token
}

// TrustedUntil returns until when the lease may be believed on this machine's
// clock, as far as is known now: each renewal moves it. After the end of the
// lease it is not in the future.
func (l *Lease) TrustedUntil() time.Time {
	l.entry.mu.Lock()
	defer l.entry.mu.Unlock()
	return l.entry.lock.trustedUntil(l.caller, time.Now())
}

// Context returns a context for the work done under the lease. It has the values
// of the context given to LockContext, not its cancellation or deadline, and ends
// when the lease does: at Unlock, or with cause ErrLeaseLost (see the package's
// limits for how soon), or with cause ErrClosed when the client is closed.
func (l *Lease) Context() context.Context {
	return leaseContext{l.base(), l}
}

// leaseContext keeps its lease from being collected.
type leaseContext struct {
	context.Context
	lease *Lease
}

// base is the lease's context without a reference to the lease, made when it is
// first asked for.
func (l *Lease) base() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx != nil {
		return l.ctx
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(l.parent))
	l.ctx = ctx
	w := l.caller
	l.entry.mu.Lock()
	w.cancel = cancel
	cause := w.ended.cause()
	if cause == nil && w.phase == left {
		cause = context.Canceled
	}
	l.entry.mu.Unlock()
	if cause != nil {
		cancel(cause)
	}
	return l.ctx
}

// With returns a context that ends with ctx, and with the lease, for work that
// belongs to another request than the one that locked. The cause says which; for
// a lost lease it is ErrLeaseLost. Its spans are children of the lease's if ctx has
// the span that LockContext was called in. Call the function returned when the work
// is done.
func (l *Lease) With(ctx context.Context) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(l.caller.trail.context(ctx))
	base := l.base()
	if base.Err() != nil {
		cancel(context.Cause(base))
	}
	stop := context.AfterFunc(base, func() { cancel(context.Cause(base)) })
	return leaseContext{inner, l}, func() {
		stop()
		cancel(context.Canceled)
	}
}

// Unlock ends the lease. It waits for Redis at most WithReleaseTimeout, and not
// at all if the lock goes to another caller of this process. It returns
// ErrLeaseLost if the lease ended before, or if the release had no answer and it could
// not be proved afterwards that the lock was ours until it was let go; ErrNotReleased
// if Redis did not confirm in time (or, with ErrClosed, never will, as the client is
// closed); and both where both happened. The caller has left the lock in all cases. Do
// not drop the error: it may be the only sign that another process was inside. Later
// calls do nothing and return the same, also after Mutex.Unlock.
func (l *Lease) Unlock() error {
	l.once.Do(func() {
		l.guard.Stop()
		_, l.result = l.entry.unlock(func(*lock) *caller { return l.caller })
	})
	return l.result
}

// LossEvent describes a lease that ended before its Unlock.
type LossEvent struct {
	Name   string // of the lock
	Token  uint64 // of the lease
	Reason string // for people
}

// tellLoss is the loss handler, or what stands for it.
func (c *Client) tellLoss(ev LossEvent) {
	if c.opts.onLoss != nil {
		c.opts.onLoss(ev)
	} else {
		c.journal.lost(ev)
	}
}
