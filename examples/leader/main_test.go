package main

import (
	"context"
	"errors"
	"io"
	"log"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/internal/testclient"
)

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // lost leadership is what is tested
	os.Exit(m.Run())
}

// candidate is a process that wants to lead.
type candidate struct {
	stop  context.CancelFunc
	ended chan error
}

// stand starts a candidate, which says on leading with which number and token it leads.
func stand(t *testing.T, mu *leased.Mutex, n int, leading chan<- [2]uint64) candidate {
	ctx, stop := context.WithCancel(t.Context())
	c := candidate{stop, make(chan error, 1)}
	go func() {
		c.ended <- lead(ctx, mu, func(ctx context.Context, token uint64) error {
			leading <- [2]uint64{uint64(n), token}
			<-ctx.Done()
			return nil
		})
	}()
	return c
}

func next(t *testing.T, leading <-chan [2]uint64) (n int, token uint64) {
	t.Helper()
	select {
	case l := <-leading:
		return int(l[0]), l[1]
	case <-time.After(testclient.Patience):
		t.Fatal("nobody leads")
		return 0, 0
	}
}

func TestALeaderThatEndsOrLosesTheLockIsFollowedByAnother(t *testing.T) {
	_, rdb := testclient.Redis(t)
	leading := make(chan [2]uint64, 10)
	var candidates []candidate
	for n := range 3 {
		mu := testclient.Process(t, rdb).Mutex("scheduler")
		candidates = append(candidates, stand(t, mu, n, leading))
	}
	operator := testclient.Process(t, rdb)

	first, token := next(t, leading)
	candidates[first].stop() // with a TTL of 30 s, so only a hand-off is in time
	if err := <-candidates[first].ended; err != nil {
		t.Error(err)
	}
	second, greater := next(t, leading)
	if second == first || greater <= token {
		t.Errorf("after %d with %d leads %d with %d", first, token, second, greater)
	}
	if _, err := operator.ForceUnlock(t.Context(), "scheduler"); err != nil {
		t.Fatal(err)
	}
	third, greatest := next(t, leading)
	if third == second || greatest <= greater {
		t.Errorf("after %d with %d leads %d with %d", second, greater, third, greatest)
	}

	// The one that lost the lock queues again, and leads when its turn comes.
	candidates[third].stop()
	if again, _ := next(t, leading); again != second {
		t.Errorf("then leads %d, want %d", again, second)
	}
	var all sync.WaitGroup
	for n, c := range candidates {
		c.stop()
		if n != first {
			all.Go(func() {
				if err := <-c.ended; err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
}

func TestAJobThatReturnsEndsItsLeadWithItsError(t *testing.T) {
	_, rdb := testclient.Redis(t)
	mu := testclient.Process(t, rdb).Mutex("scheduler")
	for _, want := range []error{nil, io.ErrUnexpectedEOF} {
		runs := 0
		err := lead(t.Context(), mu, func(context.Context, uint64) error {
			runs++
			return want
		})
		if !errors.Is(err, want) || runs != 1 {
			t.Errorf("a job that returns %v ran %d times, and lead returned %v", want, runs, err)
		}
	}
}

func TestAJobThatFailsOnceItIsToldToEndIsHeardOf(t *testing.T) {
	_, rdb := testclient.Redis(t)
	ctx, stop := context.WithCancel(t.Context())
	err := lead(ctx, testclient.Process(t, rdb).Mutex("scheduler"), func(context.Context, uint64) error {
		stop()
		return io.ErrUnexpectedEOF
	})
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("lead returned %v", err)
	}
}

func TestTheProgramRunsUntilItIsTold(t *testing.T) {
	server, _ := testclient.Redis(t)
	ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	if err := run(ctx, server.Addr); err != nil {
		t.Error(err)
	}
}
