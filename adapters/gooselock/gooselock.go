// Package gooselock makes github.com/pressly/goose migrate a database from one process at a
// time, with a lock of package leased. Use it if the database has no lock that goose could
// take, or if connections go through a pooler that breaks advisory locks:
//
//	goose.NewProvider(goose.DialectClickHouse, db, migrations,
//		goose.WithSessionLocker(gooselock.New(client.Mutex("migrations"))))
//
// goose does not work under the context of a lease. If the lock is lost during a migration,
// goose notices only at the end, when Up returns an error that matches leased.ErrLeaseLost.
// Then check what was applied.
package gooselock

import (
	"context"
	"database/sql"
	"sync"

	"github.com/pressly/goose/v3/lock"

	"github.com/leasedmutex/leased"
)

// Locker is a lock.SessionLocker for goose.WithSessionLocker, and a lock.Locker for
// goose.WithLocker. Both wait for the lock until the context of the migration ends. A
// Locker may be used by several providers and is safe for concurrent use.
type Locker struct {
	mutex *leased.Mutex
	held  sync.Map // leases by connection or database
}

var (
	_ lock.SessionLocker = (*Locker)(nil)
	_ lock.Locker        = (*Locker)(nil)
)

// New returns a locker that locks mutex. All processes that migrate a database must use the
// same name for it.
func New(mutex *leased.Mutex) *Locker { return &Locker{mutex: mutex} }

// SessionLock implements lock.SessionLocker. The error is that of leased.Mutex.LockContext.
func (l *Locker) SessionLock(ctx context.Context, conn *sql.Conn) error { return l.lock(ctx, conn) }

// SessionUnlock implements lock.SessionLocker. It does not use the context, which in goose
// never ends: it waits for Redis for at most the time set by leased.WithReleaseTimeout. The error
// is that of leased.Lease.Unlock. It matches leased.ErrLeaseLost if the lock was lost while it was
// held, and leased.ErrNotReleased if Redis did not confirm the release in time; the migrations
// are done then all the same.
func (l *Locker) SessionUnlock(_ context.Context, conn *sql.Conn) error { return l.unlock(conn) }

// Lock implements lock.Locker as SessionLock does.
func (l *Locker) Lock(ctx context.Context, db *sql.DB) error { return l.lock(ctx, db) }

// Unlock implements lock.Locker as SessionUnlock does.
func (l *Locker) Unlock(_ context.Context, db *sql.DB) error { return l.unlock(db) }

// lock keeps a reference to the lease, because a lease that nothing refers to is not
// renewed.
func (l *Locker) lock(ctx context.Context, by any) error {
	lease, err := l.mutex.LockContext(ctx)
	if err == nil {
		l.held.Store(by, lease)
	}
	return err
}

func (l *Locker) unlock(by any) error {
	lease, held := l.held.LoadAndDelete(by)
	if !held {
		return leased.ErrNotLocked
	}
	return lease.(*leased.Lease).Unlock()
}
