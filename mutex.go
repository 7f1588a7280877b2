package leased

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Mutex is a mutual exclusion lock among all processes that use its name in one
// Redis. Handles are cheap; all handles of a name in one Client are one lock,
// and so are a Mutex and an RWMutex of one name.
//
// In one Client it is a sync.Mutex: only one caller is inside, whatever happens
// to Redis; callers enter in the order they came; unlocking what is not locked
// panics; any goroutine and any handle of the name may unlock; it is not
// reentrant. In the terminology of the Go memory model, the n'th call of Unlock
// synchronizes before the m'th return of Lock of the same Client for any n < m.
//
// Among processes it excludes as long as leases are kept; see the package's
// limits for when one can be lost, and Lease.Token for the way to be safe then.
//
// A Mutex must not be copied after first use. Get one from Client.Mutex.
type Mutex struct {
	_      noCopy
	handle handle
}

var _ sync.Locker = (*Mutex)(nil)

// noCopy has go vet complain about copies.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}

// Mutex returns a handle of the lock called name: 1 to 512 bytes of UTF-8; braces
// only as one Redis Cluster hash tag, and with a tag not ending as the keys beside
// a lock do (:queue, :readers, :waiters, :meta). A bad name or option is
// reported on first use, by LockContext as an error, by Lock as a panic. It does no I/O.
func (c *Client) Mutex(name string, opts ...LockOption) *Mutex {
	return &Mutex{handle: c.handle(name, opts)}
}

// Lock locks m, waiting as long as it takes. While Redis is out of reach or
// refuses its commands, it logs that and keeps retrying. It panics if the name
// or an option is bad, or the client closed.
func (m *Mutex) Lock() { m.handle.lock(exclusive) }

func (h *handle) lock(m mode) {
	if _, err := h.acquire(context.Background(), &caller{mode: m, patient: true}); err != nil {
		panic(err)
	}
}

// TryLock locks m if it is free and no request waits for it, and reports whether it
// did. Where the owner may be keeping it idle (see WithIdleHold), TryLock asks for
// it and waits at most 50 ms. It returns false on any error too, after at most 1 s. It
// panics as Lock does.
func (m *Mutex) TryLock() bool { return m.handle.tryLock(exclusive) }

func (h *handle) tryLock(m mode) bool {
	ctx, cancel := context.WithTimeout(context.Background(), tryLockWait)
	defer cancel()
	_, err := h.acquire(ctx, &caller{mode: m, try: true})
	if errors.Is(err, ErrInvalidName) || errors.Is(err, ErrInvalidOption) || errors.Is(err, ErrClosed) {
		panic(err)
	}
	return err == nil
}

// Unlock unlocks m. It panics if m is not locked in this client. It also ends a
// lease of LockContext. It waits for Redis at most WithReleaseTimeout; errors are
// logged, or reported to the loss handler.
func (m *Mutex) Unlock() { m.handle.unlock(exclusive) }

func (h *handle) unlock(m mode) {
	if h.err != nil {
		panic(h.err)
	}
	var found bool
	var err error
	if e := h.client.lookup(h.keys.lock); e != nil {
		found, err = e.unlock(func(l *lock) *caller { return l.anyInside(m) })
	}
	if !found {
		panic(fmt.Sprintf("leased: %s of unlocked mutex %q", map[mode]string{exclusive: "unlock", shared: "RUnlock"}[m], h.keys.name))
	}
	if errors.Is(err, ErrNotReleased) {
		h.client.journal.unconfirmed(err)
	}
}

// LockContext locks m and returns the lease, or an error that matches
// ErrNotAcquired. ctx bounds the wait, not the hold: once it ends, LockContext
// returns within 10 ms, whatever Redis is doing, and nothing is left behind. The
// error then matches ctx's error too, and the last one of Redis if there was
// any. Transient errors, such as a lost connection, are retried. It returns at
// once where only an operator can help (NOAUTH, NOPERM, WRONGTYPE: as Redis'
// error), on a bad name or option, and with ErrClosed.
func (m *Mutex) LockContext(ctx context.Context) (*Lease, error) {
	return m.handle.lease(ctx, &caller{mode: exclusive})
}

// TryLockContext is LockContext without waiting for another owner: if the lock is
// held or waited for, it returns an error that matches ErrLocked. Where the owner may
// be keeping it idle (see WithIdleHold), it asks for it and waits at most 50 ms, and as
// long again if the client has only just begun. It returns on the first error of Redis.
func (m *Mutex) TryLockContext(ctx context.Context) (*Lease, error) {
	return m.handle.lease(ctx, &caller{mode: exclusive, try: true})
}

func (h *handle) lease(ctx context.Context, w *caller) (*Lease, error) {
	w.leased = true // before anybody can let it in: RUnlock spares it
	e, err := h.acquire(ctx, w)
	if err != nil {
		return nil, err
	}
	return newLease(w.trail.context(ctx), e, w), nil
}

// Do locks m, runs f, and unlocks, also when f panics. f's context has ctx's
// values, and ends with ctx or with the lease. The error is that of LockContext,
// or f's, joined with ErrLeaseLost if the lease was lost while f ran: then
// another process may have been inside. A release that Redis does not confirm in time is
// logged: f's work was done under the lock all the same.
func (m *Mutex) Do(ctx context.Context, f func(context.Context) error) error {
	return m.handle.do(ctx, exclusive, f)
}

func (h *handle) do(ctx context.Context, m mode, f func(context.Context) error) (err error) {
	l, err := h.lease(ctx, &caller{mode: m})
	if err != nil {
		return err
	}
	work, stop := l.With(ctx)
	defer func() {
		stop()
		if e := l.Unlock(); errors.Is(e, ErrLeaseLost) {
			err = errors.Join(err, e)
		} else if e != nil {
			h.client.journal.unconfirmed(e)
		}
	}()
	return f(work)
}
