// Package gocronlock makes each job of github.com/go-co-op/gocron run in one process at a
// time: in whichever process takes the job's lock first, or, with an Elector, in the one
// that is the leader.
//
// Give each process's scheduler a locker on the same Redis:
//
//	scheduler, err := gocron.NewScheduler(
//		gocron.WithDistributedLocker(gocronlock.New(client, 5*time.Second)))
//
// The lock of a job has the job's name, so name jobs with gocron.WithName. Use a key prefix
// to keep these locks apart from others (leased.WithKeyPrefix).
//
// Or give it an elector, so that one process runs all jobs until it ends:
//
//	elector := gocronlock.NewElector(client.Mutex("leader"))
//	scheduler, err := gocron.NewScheduler(gocron.WithDistributedElector(elector))
//
// gocron does not give a job the context of its lock, so the job does not notice when its
// lease is lost. A job that must not run twice at once should take a lock itself, with
// leased.Mutex.Do, and work under the context that Do passes to it.
package gocronlock

import (
	"context"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/leasedmutex/leased"
)

// New returns a locker for gocron.WithDistributedLocker and WithDistributedJobLocker. A
// process that finds the lock of a job taken skips this run.
//
// A lock is kept for atLeast, even if the job ends sooner (leased.WithMinHold): otherwise a
// process whose clock is behind would run a short job once more. Make atLeast longer than the clocks
// differ, plus 2 s, which a try may take where Redis is slow, plus the time for which gocron may keep a
// run in a queue of its own (gocron.LimitModeWait): it asks for the lock when the run begins. Make it
// shorter than the time between two runs by the same amounts. The processes must have the same due
// times, as with gocron.CronJob. A gocron.DurationJob counts from each scheduler's start: for that, use
// an elector, or make atLeast nearly the whole interval. atLeast must be whole milliseconds from 0 to
// 30 days. With another value or a bad option every Lock returns an
// error that matches leased.ErrInvalidOption, so gocron skips every run.
//
// The locker may be used by several schedulers, and is safe for concurrent use.
func New(client *leased.Client, atLeast time.Duration, opts ...leased.LockOption) gocron.Locker {
	return &locker{client, append([]leased.LockOption{leased.WithMinHold(atLeast)}, opts...)}
}

type locker struct {
	client *leased.Client
	opts   []leased.LockOption
}

// Lock implements gocron.Locker. The error matches leased.ErrLocked if another process
// runs the job, or has just done so.
func (l *locker) Lock(ctx context.Context, job string) (gocron.Lock, error) {
	lease, err := l.client.Mutex(job, l.opts...).TryLockContext(ctx)
	if err != nil {
		return nil, err
	}
	return lock{lease}, nil
}

type lock struct{ lease *leased.Lease }

// Unlock implements gocron.Lock. It waits for Redis for at most the time set by
// leased.WithReleaseTimeout, even if ctx has ended, as it has when the scheduler is shut
// down.
func (l lock) Unlock(context.Context) error { return l.lease.Unlock() }
