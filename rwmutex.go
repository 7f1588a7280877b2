package leased

import (
	"context"
	"sync"

	"github.com/leasedmutex/leased/internal/protocol"
)

// RWMutex is a reader/writer mutual exclusion lock shared by all processes that use its
// name in one Redis. It can be held by any number of readers or by one writer. The comment
// on Mutex applies here too; an RWMutex and a Mutex of the same name are the same lock.
//
// While a call of Lock waits, later calls of RLock wait behind it, in every process that
// has learned of it. So neither readers nor writers starve: a writer waits only for those
// that are inside or ahead of it in the queue when it arrives, and for readers that
// enter in processes that have not yet learned of the writer. A caller that
// holds RLock must not call RLock again, because a writer may have come in between.
//
// All readers that wait directly behind a writer enter together. The readers of one process
// share one grant, so a further RLock costs no round trip. Once a writer of another process
// is known to wait, the grant admits no new readers, until that writer has had its turn or
// has given up. The readers of each process have their own expiry: those of a crashed
// process delay a writer by at most their own TTL, whatever other readers do.
//
// The fencing tokens of readers in different processes are in no particular order; see
// [Lease.Token].
//
// As in [sync.RWMutex], a reader cannot become a writer: two readers that both upgraded
// would wait for each other forever. Instead, Unlock, Lock, and read again.
//
// In the terminology of the Go memory model, the n'th call of Unlock synchronizes before
// the m'th return of Lock of the same Client for any n < m; and for any call of RLock there
// is an n such that the n'th Unlock synchronizes before the return of RLock, and the
// matching RUnlock before the return of the n+1'th Lock. The package comment says which other
// calls count as these.
type RWMutex struct {
	_      noCopy
	handle handle
}

var _ sync.Locker = (*RWMutex)(nil)

// use returns rw's handle, or one that holds an error if rw was not made by Client.RWMutex.
func (rw *RWMutex) use() *handle {
	if rw == nil || rw.handle.unmade() {
		return &handle{err: errRWMutexUnmade}
	}
	return &rw.handle
}

// RWMutex returns a handle of the lock called name; see [Client.Mutex].
func (c *Client) RWMutex(name string, opts ...LockOption) *RWMutex {
	rw := &RWMutex{}
	rw.handle.init(c, name, opts)
	return rw
}

// Lock locks rw for writing, waiting as long as it takes; see [Mutex.Lock].
func (rw *RWMutex) Lock() { rw.use().lock(protocol.Exclusive) }

// RLock locks rw for reading, waiting as long as it takes; see [Mutex.Lock].
func (rw *RWMutex) RLock() { rw.use().lock(protocol.Shared) }

// TryLock locks rw for writing if it is free and no request waits for it; see
// [Mutex.TryLock].
func (rw *RWMutex) TryLock() bool { return rw.use().tryLock(protocol.Exclusive) }

// TryRLock locks rw for reading if no writer holds it or waits for it; see [Mutex.TryLock].
// A writer whose process was killed counts as waiting until its TTL is over, or for some
// seconds longer.
func (rw *RWMutex) TryRLock() bool { return rw.use().tryLock(protocol.Shared) }

// Unlock unlocks rw for writing. It panics if rw is not locked for writing in this client;
// see [Mutex.Unlock].
func (rw *RWMutex) Unlock() { rw.use().unlock(protocol.Exclusive) }

// RUnlock undoes one RLock. It panics if rw is not locked for reading in this client; see
// [Mutex.Unlock]. If leases of RLockContext are held as well, RUnlock ends the hold of a
// caller of RLock, not one of theirs; if only leases are held, it ends one of them.
func (rw *RWMutex) RUnlock() { rw.use().unlock(protocol.Shared) }

// UnlockContext unlocks rw for writing; see [Mutex.UnlockContext]. After LockContext, keep the [Lease]
// reachable until then.
func (rw *RWMutex) UnlockContext(ctx context.Context) error {
	return rw.use().unlockContext(ctx, protocol.Exclusive)
}

// RUnlockContext undoes one RLock; see RUnlock and [Mutex.UnlockContext]. If several callers of RLock
// are inside, it may end the hold of another of them, and report on that one. A reader
// that has to know whether it kept its lease uses RLockContext, and unlocks the [Lease]. After
// RLockContext, keep the Lease reachable until then.
func (rw *RWMutex) RUnlockContext(ctx context.Context) error {
	return rw.use().unlockContext(ctx, protocol.Shared)
}

// RLocker returns a [sync.Locker] whose Lock and Unlock methods call RLock and RUnlock, and so
// panic in the same cases.
func (rw *RWMutex) RLocker() sync.Locker { return (*rlocker)(rw) }

type rlocker RWMutex

func (r *rlocker) Lock()   { (*RWMutex)(r).RLock() }
func (r *rlocker) Unlock() { (*RWMutex)(r).RUnlock() }

// LockContext locks rw for writing; see [Mutex.LockContext].
func (rw *RWMutex) LockContext(ctx context.Context) (*Lease, error) {
	return rw.use().lease(ctx, &call{Mode: protocol.Exclusive})
}

// TryLockContext locks rw for writing if it is free and no request waits for it; see
// [Mutex.TryLockContext].
func (rw *RWMutex) TryLockContext(ctx context.Context) (*Lease, error) {
	return rw.use().lease(ctx, &call{Mode: protocol.Exclusive, Try: true})
}

// RLockContext locks rw for reading; see [Mutex.LockContext].
func (rw *RWMutex) RLockContext(ctx context.Context) (*Lease, error) {
	return rw.use().lease(ctx, &call{Mode: protocol.Shared})
}

// TryRLockContext locks rw for reading if no writer holds it or waits for it; see TryRLock
// and [Mutex.TryLockContext].
func (rw *RWMutex) TryRLockContext(ctx context.Context) (*Lease, error) {
	return rw.use().lease(ctx, &call{Mode: protocol.Shared, Try: true})
}

// Do runs f while rw is locked for writing; see [Mutex.Do].
func (rw *RWMutex) Do(ctx context.Context, f func(context.Context) error) error {
	return rw.use().do(ctx, protocol.Exclusive, f)
}

// RDo runs f while rw is locked for reading; see [Mutex.Do].
func (rw *RWMutex) RDo(ctx context.Context, f func(context.Context) error) error {
	return rw.use().do(ctx, protocol.Shared, f)
}
