package gocronlock

import (
	"context"
	"sync"
	"time"

	"github.com/leasedmutex/leased"
)

// NewElector returns an elector for gocron.WithDistributedElector. The process that holds mutex is
// the leader, and only the leader's scheduler runs jobs. Give each process an elector whose mutex
// has the same name, and that nothing else locks.
func NewElector(mutex *leased.Mutex) *Elector {
	return &Elector{mutex: mutex}
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

	mu   sync.Mutex // guards turn, and lease while there is no turn
	turn *turn      // nil if nobody stands for election or resigns
	// lease is of this process as leader; nil if it is not. It is written under mu by the call that has
	// the turn, which therefore may read it without.
	lease *leased.Lease
}

// A turn is a call that stands for election or resigns. Calls that come meanwhile wait for its end, and
// share its error: if each stood by itself while Redis hangs, a job would wait for the tries of all that
// are due with it.
type turn struct {
	ended chan struct{} // closed when the call has ended
	err   error         // why Redis did not make this process the leader; for others once ended is closed
}

// IsLeader implements gocron.Elector. It returns nil if this process is the leader or can become
// it now. The error matches leased.ErrLocked if another process is the leader. While this process
// is the leader, IsLeader asks the local clock and not Redis. Of calls at the same time, one asks
// Redis, and all return its answer, which for a call that came later can be older than the call.
func (e *Elector) IsLeader(ctx context.Context) error {
	for {
		mine, t := e.takeTurn(true)
		if t == nil {
			return nil
		}
		if mine {
			return e.stand(ctx, t)
		}
		select {
		case <-t.ended:
			if t.err != nil {
				return t.err
			}
			// This process may be the leader now. If it is not, a resignation has ended, or the
			// context of the call that stood, which says nothing of this one's.
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeTurn begins a turn, unless another call has one: then it returns that call's. For an election
// it returns no turn if this process is the leader already.
func (e *Elector) takeTurn(election bool) (mine bool, t *turn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.turn != nil {
		return false, e.turn
	}
	// The context of a lease that expired while the machine slept ends a moment after the machine
	// wakes.
	if election && e.lease != nil && e.lease.Context().Err() == nil && time.Now().Before(e.lease.TrustedUntil()) {
		return false, nil
	}
	e.turn = &turn{ended: make(chan struct{})}
	return true, e.turn
}

// endTurn leaves this process with lease, and lets others have their turn.
func (e *Elector) endTurn(t *turn, lease *leased.Lease) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lease, e.turn = lease, nil
	close(t.ended)
}

// stand asks Redis for the leadership.
func (e *Elector) stand(ctx context.Context, t *turn) error {
	var lease *leased.Lease
	defer func() { e.endTurn(t, lease) }() // even if a hook of the Redis client panics
	if e.lease != nil {
		_ = e.lease.Unlock() // it was lost, and the client has logged that
	}
	lease, err := e.mutex.TryLockContext(ctx)
	if ctx.Err() == nil {
		t.err = err
	}
	return err
}

// Resign ends the leadership of this process, if it is the leader, so that another process need
// not wait for the lease to expire. Call it when the scheduler has been shut down and before the
// client is closed: a scheduler that still runs would be elected again. It returns the error of
// leased.Lease.Unlock.
func (e *Elector) Resign() error {
	mine, t := e.takeTurn(false)
	for !mine {
		<-t.ended
		mine, t = e.takeTurn(false)
	}
	defer e.endTurn(t, nil)
	if e.lease == nil {
		return nil
	}
	return e.lease.Unlock()
}
