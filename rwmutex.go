package leased

import (
	"context"
	"sync"
)

// RWMutex is a reader/writer mutual exclusion lock among all processes that use
// its name in one Redis: held by any number of readers or by one writer. All
// that Mutex says holds here too; the two are one lock if they have one name.
//
// While a call of Lock waits, later calls of RLock wait behind it, in every process
// that has heard of it, so neither readers nor writers starve: a writer waits for the
// readers that are inside when it comes, of its own process and of others. RLock
// must not be called while holding RLock: a writer may have come in between.
//
// All readers that wait right behind a writer enter together. The readers of
// one process share one grant, so that a further RLock costs no round trip; once a
// writer of another process is known to wait, the grant admits no new readers. The
// readers of each process have an expiry of their own: those of a crashed process delay
// a writer by their own TTL at most, whatever other readers do.
//
// The fencing tokens of readers are in no order among processes; see Lease.Token.
//
// There is no upgrade from reader to writer, as in sync.RWMutex: two readers
// that both wanted it would wait for each other for ever. Unlock, Lock, and look
// again at what was read.
//
// In the terminology of the Go memory model, the n'th call of Unlock
// synchronizes before the m'th return of Lock of the same Client for any n < m;
// and for any call of RLock there is an n such that the n'th Unlock synchronizes
// before the return of RLock, and the RUnlock belonging to it before the return
// of the n+1'th Lock.
type RWMutex struct {
	_      noCopy
	handle handle
}

var _ sync.Locker = (*RWMutex)(nil)

// RWMutex returns a handle of the lock called name; see Client.Mutex.
func (c *Client) RWMutex(name string, opts ...LockOption) *RWMutex {
	return &RWMutex{handle: c.handle(name, opts)}
}

// Lock locks rw for writing, waiting as long as it takes; see Mutex.Lock.
func (rw *RWMutex) Lock() { rw.handle.lock(exclusive) }

// RLock locks rw for reading, waiting as long as it takes; see Mutex.Lock.
func (rw *RWMutex) RLock() { rw.handle.lock(shared) }

// TryLock locks rw for writing if it is free and not waited for; see Mutex.TryLock.
func (rw *RWMutex) TryLock() bool { return rw.handle.tryLock(exclusive) }

// TryRLock locks rw for reading if no writer has it or waits for it; see
// Mutex.TryLock.
func (rw *RWMutex) TryRLock() bool { return rw.handle.tryLock(shared) }

// Unlock unlocks rw for writing. It panics if rw is not locked for writing in
// this client; see Mutex.Unlock.
func (rw *RWMutex) Unlock() { rw.handle.unlock(exclusive) }

// RUnlock undoes one RLock. It panics if rw is not locked for reading in this
// client; see Mutex.Unlock. While leases of RLockContext are held too, it ends the
// reading of a caller of RLock.
func (rw *RWMutex) RUnlock() { rw.handle.unlock(shared) }

// RLocker returns a sync.Locker whose Lock and Unlock are RLock and RUnlock.
func (rw *RWMutex) RLocker() sync.Locker { return (*rlocker)(rw) }

type rlocker RWMutex

func (r *rlocker) Lock()   { (*RWMutex)(r).RLock() }
func (r *rlocker) Unlock() { (*RWMutex)(r).RUnlock() }

// LockContext locks rw for writing; see Mutex.LockContext.
func (rw *RWMutex) LockContext(ctx context.Context) (*Lease, error) {
	return rw.handle.lease(ctx, &caller{mode: exclusive})
}

// TryLockContext locks rw for writing if it is free and not waited for; see
// Mutex.TryLockContext.
func (rw *RWMutex) TryLockContext(ctx context.Context) (*Lease, error) {
	return rw.handle.lease(ctx, &caller{mode: exclusive, try: true})
}

// RLockContext locks rw for reading; see Mutex.LockContext.
func (rw *RWMutex) RLockContext(ctx context.Context) (*Lease, error) {
	return rw.handle.lease(ctx, &caller{mode: shared})
}

// TryRLockContext locks rw for reading if no writer has it or waits for it; see
// Mutex.TryLockContext.
func (rw *RWMutex) TryRLockContext(ctx context.Context) (*Lease, error) {
	return rw.handle.lease(ctx, &caller{mode: shared, try: true})
}

// Do runs f while rw is locked for writing; see Mutex.Do.
func (rw *RWMutex) Do(ctx context.Context, f func(context.Context) error) error {
	return rw.handle.do(ctx, exclusive, f)
}

// RDo runs f while rw is locked for reading; see Mutex.Do.
func (rw *RWMutex) RDo(ctx context.Context, f func(context.Context) error) error {
	return rw.handle.do(ctx, shared, f)
}
