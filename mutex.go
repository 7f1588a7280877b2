package leased

import (
	"context"
	"sync"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Mutex is a mutual exclusion lock shared by all processes that use its name in one Redis.
// Handles are cheap: all handles of a name in one Client are the same lock, and so are a
// Mutex and an RWMutex of the same name.
//
// Within one Client, a Mutex is like a sync.Mutex. Only one caller is inside, whatever happens
// to Redis, and callers enter in the order in which they came. Unlocking a lock that is not
// locked panics. Any goroutine may unlock, through any handle of the name. The lock is not
// reentrant. In the terminology of the Go memory model, the n'th call of Unlock
// synchronizes before the m'th return of Lock of the same Client for any n < m.
//
// Between processes, a Mutex excludes as long as leases are kept. See the package's limits
// for when a lease can be lost, and [Lease.Token] for how to be safe even then.
//
// A Mutex must not be copied after first use. Get one from [Client.Mutex]: the methods of any
// other Mutex return an error or, if they return none, panic with it.
type Mutex struct {
	_      noCopy
	handle handle
}

var _ sync.Locker = (*Mutex)(nil)

// use returns m's handle, or one that holds an error if m was not made by Client.Mutex.
func (m *Mutex) use() *handle {
	if m == nil || m.handle.unmade() {
		return &handle{err: errMutexUnmade}
	}
	return &m.handle
}

// noCopy makes go vet report copies.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}

// Mutex returns a handle of the lock called name. It does no I/O.
//
// A name has 1 to 512 bytes of UTF-8 without control characters. If there are braces in the key prefix
// and the name together, the first { and the first } must enclose a Redis Cluster hash tag, and prefix
// and name together must not end like a helper key of a lock (:queue, :readers, :waiters, :meta).
// With or without braces, they must not end in leased:quorum:mark, the key in which a server of a
// quorum keeps its age. A bad name or option is reported on first use: LockContext returns an error,
// Lock panics.
//
// The lock is kept in Redis under the key that prefix and name form together, so no other data may be
// there: a string is taken for a foreign owner, and [Client.ForceUnlock] deletes it. If your data are
// in the same database, set a prefix of the locks' own by [WithKeyPrefix].
func (c *Client) Mutex(name string, opts ...LockOption) *Mutex {
	m := &Mutex{}
	m.handle.init(c, name, opts)
	return m
}

// Lock locks m, waiting as long as it takes. While Redis cannot be reached or refuses commands, Lock
// logs that and keeps retrying. It panics if the name or an option is bad, or if the client or its
// *redis.Client is closed, even while Lock waits; see [Client.Shutdown]. (A closed *redis.ClusterClient
// is like a Redis that does not answer.)
func (m *Mutex) Lock() { m.use().lock(protocol.Exclusive) }

// TryLock locks m if m is free and no request waits for it, and reports whether it
// succeeded. If the owner may be keeping the lock idle (see [WithIdleHold]), or several clients
// try the lock of a quorum at once, TryLock asks for it and waits at most 50 ms and four round trips,
// and up to 50 ms more if the client has only just started. On any error it returns false too, after
// at most 1 s. It panics when Lock does.
func (m *Mutex) TryLock() bool { return m.use().tryLock(protocol.Exclusive) }

// Unlock unlocks m. It panics if m is not locked in this client. It can also end a lease of
// LockContext. It waits for Redis for at most the time set by [WithReleaseTimeout]. Errors
// are logged or reported to the loss handler.
func (m *Mutex) Unlock() { m.use().unlock(protocol.Exclusive) }

// UnlockContext unlocks m. It is for code that has no Lease at hand and wants to know the outcome. It
// differs from Unlock in three ways: it returns [ErrNotLocked] instead of panicking, it waits for Redis
// until ctx ends instead of for the time set by [WithReleaseTimeout], and it returns the errors that
// [Lease.Unlock] returns. If ctx ends first, the error matches [ErrNotReleased] and ctx's error. m is
// unlocked all the same, even if ctx had ended before the call; but if ctx is nil, nothing is unlocked.
//
// Call it once for each Lock, whatever it returns: another call may end the hold of another caller.
// [Lease.UnlockContext] is safe to repeat. After LockContext, keep the Lease reachable until then: one
// that has been garbage-collected is not renewed, and the lock is lost.
func (m *Mutex) UnlockContext(ctx context.Context) error {
	return m.use().unlockContext(ctx, protocol.Exclusive)
}

// LockContext locks m and returns the lease, or an error that matches [ErrNotAcquired].
//
// ctx bounds the wait, not the hold. Once ctx ends, LockContext returns within 10 ms,
// whatever Redis is doing. Its place in the queue is given up right after that, and nothing
// is left behind unless the process ends first. The error then also matches ctx's
// error and, if there was one, the last error of Redis; or [ErrLocked], if Redis answered and another
// caller held the lock.
//
// LockContext retries transient errors, such as a lost connection. It returns at once on an
// error that only an operator can fix, such as NOAUTH, NOPERM or WRONGTYPE, which it returns;
// on a bad name or option; if ctx is nil; and, with [ErrClosed], if the client is closed.
func (m *Mutex) LockContext(ctx context.Context) (*Lease, error) {
	return m.use().lease(ctx, &call{Mode: protocol.Exclusive})
}

// TryLockContext is like LockContext but does not wait for another owner: if the lock is
// held or waited for, it returns an error that matches [ErrLocked]. If the owner may be
// keeping the lock idle (see [WithIdleHold]), or several clients try the lock of a quorum at
// once, TryLockContext asks for it and waits at most 50 ms and four round trips, and up to 50 ms more if
// the client has only just started. It returns the first error from Redis, with two exceptions. If a
// connection was broken and another one works, it asks again there. With [WithReplicas] in a Cluster, it
// waits for up to 3 s while the lock's slot moves to another master.
func (m *Mutex) TryLockContext(ctx context.Context) (*Lease, error) {
	return m.use().lease(ctx, &call{Mode: protocol.Exclusive, Try: true})
}

// Do locks m, runs f, and unlocks m, even if f panics. The context passed to f has ctx's
// values and ends with ctx or with the lease. Do returns the error of LockContext or of f.
// If the lease was lost while f ran, the error also matches [ErrLeaseLost]: another process
// may then have been in the critical section. A nil error proves nothing in the cases in
// which nobody asked Redis; see [Lease.Unlock]. If Redis does not confirm the release in
// time, or cannot because the client was closed, that is only logged. If Redis later says
// that the lock may have been lost before the release, the loss handler is called. An error
// that matches [ErrNotAcquired] may be f's own, if f takes another lock. f must not lock the
// same name: it would wait for itself until ctx ends.
//
// A call that ends the process while f runs, such as os.Exit or log.Fatal, skips the unlock:
// the lock stays taken until its TTL ends.
func (m *Mutex) Do(ctx context.Context, f func(context.Context) error) error {
	return m.use().do(ctx, protocol.Exclusive, f)
}
