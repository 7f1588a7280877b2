// Package certmagiclock makes the processes of github.com/caddyserver/certmagic coordinate
// with locks of package leased, whatever storage holds the certificates:
//
//	certmagic.Default.Storage = certmagiclock.New(storage, client)
//
// A process waits in a queue and is woken when it gets the lock. The locks of a process
// that died are free after their TTL. Leases are renewed for as long as an order takes, so
// certmagic's own renewal of locks (LockLeaseRenewer) is not needed.
//
// certmagic does not work under the context of a lease, so it does not notice that a lease
// was lost; as the documentation of its Locker says, it tolerates that. The client logs the loss,
// or calls the handler of leased.WithLossHandler.
// The locks have the names that certmagic gives them, under the client's key prefix
// (leased.WithKeyPrefix).
package certmagiclock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/caddyserver/certmagic"

	"github.com/leasedmutex/leased"
)

// Storage is a certmagic.Storage and a certmagic.TryLocker that uses the locks of a
// leased.Client. It is safe for concurrent use.
type Storage struct {
	certmagic.Storage // for everything but locks

	client *leased.Client
	opts   []leased.LockOption
	held   sync.Map // leases by name; a lease is renewed only while it is referred to
}

var (
	_ certmagic.Storage   = (*Storage)(nil)
	_ certmagic.TryLocker = (*Storage)(nil)
)

// New returns storage with the locks of client. The locks of storage are no longer used, so
// all processes must switch at the same time, unless these locks are strings under the same
// keys in the same Redis.
func New(storage certmagic.Storage, client *leased.Client, opts ...leased.LockOption) *Storage {
	return &Storage{Storage: storage, client: client, opts: opts}
}

// Lock implements certmagic.Locker. The error is that of leased.Mutex.LockContext.
func (s *Storage) Lock(ctx context.Context, name string) error {
	lease, err := s.client.Mutex(name, s.opts...).LockContext(ctx)
	if err == nil {
		s.held.Store(name, lease)
	}
	return err
}

// TryLock implements certmagic.TryLocker. If the lock is taken or waited for, it returns
// false and no error.
func (s *Storage) TryLock(ctx context.Context, name string) (bool, error) {
	lease, err := s.client.Mutex(name, s.opts...).TryLockContext(ctx)
	switch {
	case errors.Is(err, leased.ErrLocked):
		return false, nil
	case err != nil:
		return false, err
	}
	s.held.Store(name, lease)
	return true, nil
}

// Unlock implements certmagic.Locker. It does not use the context, which at the end of an order
// never ends: it waits for Redis for at most the time set by leased.WithReleaseTimeout. The error
// matches leased.ErrNotReleased if Redis did not confirm the release in time, or leased.ErrNotLocked if
// the lock was not held through s. It is nil if the lease was lost, since there is nothing left to
// release: certmagic keeps a lock whose Unlock failed in a list of those to be cleaned up.
func (s *Storage) Unlock(_ context.Context, name string) error {
	lease, held := s.held.LoadAndDelete(name)
	if !held {
		return fmt.Errorf("certmagiclock: %q: %w", name, leased.ErrNotLocked)
	}
	err := lease.(*leased.Lease).Unlock()
	if errors.Is(err, leased.ErrLeaseLost) && !errors.Is(err, leased.ErrNotReleased) {
		return nil
	}
	return err
}

// String returns what the storage says of itself, or its type. certmagic logs the storage, and one that has
// passwords leaves them out there.
func (s *Storage) String() string {
	if own, ok := s.Storage.(fmt.Stringer); ok {
		return own.String()
	}
	return fmt.Sprintf("%T", s.Storage)
}
