package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/leasedtest"
)

func TestTheLockWithACancelIsReleasedByItAndByTheEndOfItsParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		locks, others := server.Client(), server.Client()
		for _, way := range []string{"the cancel", "the parent"} {
			parent, end := context.WithCancel(t.Context())
			work, cancel, err := lockWithCancel(parent, locks, "job")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := others.Mutex("job").TryLockContext(t.Context()); !errors.Is(err, leased.ErrLocked) {
				t.Errorf("before %s: %v", way, err)
			}
			if way == "the cancel" {
				cancel()
			} else {
				end()
			}
			synctest.Wait()
			if work.Err() == nil {
				t.Errorf("after %s the work's context goes on", way)
			}
			for _, client := range []*leased.Client{others, locks} {
				lease, err := client.Mutex("job").TryLockContext(t.Context())
				if err != nil {
					t.Fatalf("after %s: %v", way, err)
				}
				if err := lease.Unlock(); err != nil {
					t.Error(err)
				}
			}
			cancel() // again
			end()
		}
	})
}
