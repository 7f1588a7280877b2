// Package certmagiclock has github.com/caddyserver/certmagic coordinate its processes by
// locks of package leased, whatever storage the certificates are in:
//
//	certmagic.Default.Storage = certmagiclock.New(storage, client)
//
// A process waits in a queue and is woken when the lock is its own, and the locks of one
// that died are free after their TTL. Leases are renewed for as long as an order takes, so
// certmagic's own renewal of locks (LockLeaseRenewer) is not needed.
//
// certmagic does not work under the context of a lease, and so does not notice that one was
// lost before it unlocks; as its Locker says, it tolerates that. Its locks have the names
// that it gives them, under the key prefix of the client (leased.WithKeyPrefix).
package certmagiclock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/caddyserver/certmagic"

	"github.com/leasedmutex/leased"
)

// Storage is a certmagic.Storage, and a certmagic.TryLocker, whose locks are those of a
// leased.Client. It is safe for concurrent use.
type Storage struct {
	certmagic.Storage // for everything but locks

	client *leased.Client
	opts   []leased.LockOption
	held   sync.Map // leases by name, which are renewed as long as they are referred to
}

var (
	_ certmagic.Storage   = (*Storage)(nil)
	_ certmagic.TryLocker = (*Storage)(nil)
)

// New returns storage with the locks of client. The locks of storage are not used any more,
// so all processes have to change over together.
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

// TryLock implements certmagic.TryLocker. It returns false and no error if the lock is
// taken or waited for.
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

// Unlock implements certmagic.Locker. It waits for Redis until ctx ends. The error is that
// of leased.Mutex.UnlockContext: it matches leased.ErrLeaseLost if the lock was lost while
// it was held, and leased.ErrNotLocked if it was not held through s.
func (s *Storage) Unlock(ctx context.Context, name string) error {
	if _, held := s.held.LoadAndDelete(name); !held {
		return fmt.Errorf("certmagiclock: %q: %w", name, leased.ErrNotLocked)
	}
	return s.client.Mutex(name, s.opts...).UnlockContext(ctx)
}
