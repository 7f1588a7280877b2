package gocronlock

import (
	"context"
	"time"

	"github.com/leasedmutex/leased"
)

// NewElector returns an elector for gocron.WithDistributedElector. The process that holds mutex is
// the leader, and only the leader's scheduler runs jobs. Give each process an elector whose mutex
// has the same name, and that nothing else locks.
func NewElector(mutex *leased.Mutex) *Elector {
	return &Elector{mutex: mutex, turn: make(chan struct{}, 1)}
}

// An Elector stands for election whenever a job is due. A leader stays leader, however long no
// job is due, until it resigns, loses its lease, or dies; another process becomes leader when its
// next job is due, after a death not before the lease has expired.
//
// A job that runs is not stopped when its process ceases to be the leader, so for a moment jobs can
// run in two processes. What must not run twice at once should take a lock itself, with
// leased.Mutex.Do. A run that is due between two leaders is skipped, or run by both if the clock of the new
// leader is behind the old one's, or if the new leader's run had to wait: for Redis, or in a queue of gocron.
//
// An Elector may be used by several schedulers of a process, and is safe for concurrent use.
type Elector struct {
	mutex *leased.Mutex
	turn  chan struct{} // holds a value while a call uses lease
	lease *leased.Lease // of this process as leader; nil if it is not
}

// IsLeader implements gocron.Elector. It returns nil if this process is the leader or can become
// it now. The error matches leased.ErrLocked if another process is the leader. While this process
// is the leader, IsLeader asks the local clock and not Redis.
func (e *Elector) IsLeader(ctx context.Context) error {
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if e.lease != nil {
		// The context of a lease that expired while the machine slept ends a moment after the machine
		// wakes.
		if e.lease.Context().Err() == nil && time.Now().Before(e.lease.TrustedUntil()) {
			return nil
		}
		_ = e.lease.Unlock() // it was lost, and the client has logged that
		e.lease = nil
	}
	lease, err := e.mutex.TryLockContext(ctx)
	if err != nil {
		return err
	}
	e.lease = lease
	return nil
}

// Resign ends the leadership of this process, if it is the leader, so that another process need
// not wait for the lease to expire. Call it when the scheduler has been shut down and before the
// client is closed: a scheduler that still runs would be elected again. It returns the error of
// leased.Lease.Unlock.
func (e *Elector) Resign() error {
	e.turn <- struct{}{}
	defer func() { <-e.turn }()
	if e.lease == nil {
		return nil
	}
	lease := e.lease
	e.lease = nil
	return lease.Unlock()
}
