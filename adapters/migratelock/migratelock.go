// Package migratelock makes github.com/golang-migrate/migrate migrate a database from one
// process at a time, with a lock of package leased. It wraps a database driver of migrate
// and replaces the driver's own lock. Use it for a database without locks, or to wait for
// other instances with a limit.
//
// It cannot replace the lock that some drivers take when they are opened, to create the table that has the
// version: migrate's drivers for PostgreSQL and SQL Server do, and MySQL's does unless its NoLock is set.
// Behind a pooler that breaks such locks, opening the driver may wait forever; so open it over a direct
// connection.
//
//	driver = migratelock.New(driver, client.Mutex("migrations"), 10*time.Second)
//	m, err := migrate.NewWithInstance("iofs", source, "shop", driver)
package migratelock

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/golang-migrate/migrate/v4/database"

	"github.com/leasedmutex/leased"
)

// New returns driver with mutex as its lock. All processes that migrate a database must use
// the same name for mutex. Lock waits for at most wait, which must be positive. Make wait shorter than
// migrate.Migrate.LockTimeout (15 s by default): after that time migrate gives up without
// telling the driver, which would then get the lock later, with nobody to use it. If
// migrations may take longer than that, raise LockTimeout and wait, or other instances fail.
func New(driver database.Driver, mutex *leased.Mutex, wait time.Duration) database.Driver {
	return &locked{Driver: driver, mutex: mutex, wait: wait}
}

type locked struct {
	database.Driver

	mutex *leased.Mutex
	wait  time.Duration

	mu    sync.Mutex    // guards lease
	lease *leased.Lease // nil while not locked
}

// Open opens another driver, which shares the lock.
func (d *locked) Open(url string) (database.Driver, error) {
	driver, err := d.Driver.Open(url)
	if err != nil {
		return nil, err
	}
	return New(driver, d.mutex, d.wait), nil
}

// Lock implements database.Driver. If the lock is not acquired within wait, because another
// process holds it or because Redis does not answer, the error matches database.ErrLocked
// and leased.ErrNotAcquired, and its text says which it was.
func (d *locked) Lock() error {
	ctx, cancel := context.WithTimeout(context.Background(), d.wait)
	defer cancel()
	lease, err := d.mutex.LockContext(ctx)
	if ctx.Err() != nil && err != nil {
		return errors.Join(database.ErrLocked, err)
	} else if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lease = lease
	return nil
}

// Unlock implements database.Driver. The error matches leased.ErrLeaseLost if the lock was
// lost while it was held, leased.ErrNotReleased if Redis did not confirm the release, and
// database.ErrNotLocked if it was not held. After an error, make a new migrate.Migrate: the old one
// believes that it still has the lock, and returns migrate.ErrLocked.
func (d *locked) Unlock() error {
	d.mu.Lock()
	lease := d.lease
	d.lease = nil
	d.mu.Unlock()
	if lease == nil {
		return database.ErrNotLocked
	}
	return lease.Unlock()
}

// Run implements database.Driver. It first asks Redis whether the lock is still held, and begins no
// migration if it was lost.
func (d *locked) Run(migration io.Reader) error {
	if err := d.lost(); err != nil {
		return err
	}
	return d.Driver.Run(migration)
}

// SetVersion implements database.Driver. It first asks Redis whether the lock is still held, and sets no
// version if it was lost: another process may have migrated the database since. After a migration that had
// begun before, the version stays dirty, so that nobody migrates the database any further before somebody
// has looked at it.
func (d *locked) SetVersion(version int, dirty bool) error {
	if err := d.lost(); err != nil {
		return err
	}
	return d.Driver.SetVersion(version, dirty)
}

// Drop implements database.Driver. It first asks Redis whether the lock is still held, and drops nothing
// if it was lost.
func (d *locked) Drop() error {
	if err := d.lost(); err != nil {
		return err
	}
	return d.Driver.Drop()
}

// lost returns why the lock was lost, nil if it was not or is not held. If Redis does not answer, the lock
// counts as held until its lease ends by the local clock.
func (d *locked) lost() error {
	d.mu.Lock()
	lease := d.lease
	d.mu.Unlock()
	if lease == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), d.wait)
	defer cancel()
	err := lease.Check(ctx)
	switch {
	case errors.Is(err, leased.ErrLeaseLost):
		return err
	case lease.Context().Err() != nil:
		return context.Cause(lease.Context())
	case !time.Now().Before(lease.TrustedUntil()): // the context ends a moment after the machine has woken
		return leased.ErrLeaseLost
	}
	return nil
}
