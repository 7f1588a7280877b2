package main

import (
	"context"
	"errors"
	"log"
	"sync"
	"time"

	"github.com/leasedmutex/leased"
)

// withLeased replaces all of old.go. The lock is renewed for as long as the work takes, and
// the work's context ends if it is lost.
func withLeased(ctx context.Context, locks *leased.Client, work func(context.Context) error) error {
	return locks.Mutex(lockName).Do(ctx, work)
}

// besideOld is withLeased for the time in which old processes still use a busy lock. It
// polls as they do, and does not queue: a queue hands the lock on without a moment in which
// old processes could find it free. Use withLeased when the last old process is gone.
func besideOld(ctx context.Context, locks *leased.Client, work func(context.Context) error) (err error) {
	lease, err := locks.Mutex(lockName).TryLockContext(ctx)
	for errors.Is(err, leased.ErrLocked) {
		select {
		case <-time.After(50 * time.Millisecond): // the pause of the old ones
			lease, err = locks.Mutex(lockName).TryLockContext(ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lease.Unlock()) }()
	workCtx, cancel := lease.With(ctx)
	defer cancel()
	return work(workCtx)
}

// lockWithCancel has the shape of rueidislock's WithContext: the lock is released by the function that it
// returns, and by the end of ctx.
func lockWithCancel(ctx context.Context, locks *leased.Client, name string) (context.Context, context.CancelFunc, error) {
	lease, err := locks.Mutex(name).LockContext(ctx)
	if err != nil {
		return nil, nil, err
	}
	work, cancel := lease.With(ctx)
	release := sync.OnceFunc(func() {
		cancel()
		if err := lease.Unlock(); err != nil {
			log.Print(err)
		}
	})
	context.AfterFunc(work, release) // the end of ctx unlocks, and so does a loss, even if the work goes on
	return work, release, nil
}
