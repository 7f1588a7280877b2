package main

import (
	"context"

	"github.com/leasedmutex/leased"
)

// withLeased replaces all of old.go. The lock is renewed for as long as the work takes, and
// the work's context ends if it is lost.
func withLeased(ctx context.Context, locks *leased.Client, work func(context.Context) error) error {
	return locks.Mutex(lockName).Do(ctx, work)
}
