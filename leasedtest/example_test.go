package leasedtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/leasedtest"
)

// A shop is the code under test. It imports products, and stops when it may not go on.
type shop struct {
	locks    *leased.Client
	next     func(ctx context.Context) error // imports one product
	imported int
}

func (s *shop) importAll(ctx context.Context) error {
	return s.locks.Mutex("import").Do(ctx, func(ctx context.Context) error {
		for ctx.Err() == nil {
			if err := s.next(ctx); err != nil {
				return err
			}
			s.imported++
		}
		return context.Cause(ctx)
	})
}

func TestAnImportNeedsNoRedis(t *testing.T) {
	s := &shop{
		locks: leasedtest.New(t),
		next:  func(context.Context) error { return io.EOF },
	}
	if err := s.importAll(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("the import ended with %v", err)
	}
}

func TestAnImportStopsWhenTheLeaseIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // virtual time: ten minutes pass at once
		s := &shop{
			locks: leasedtest.New(t),
			next:  func(context.Context) error { time.Sleep(time.Minute); return nil },
		}
		ended := make(chan error, 1)
		go func() { ended <- s.importAll(t.Context()) }()

		time.Sleep(10*time.Minute + time.Second)
		leasedtest.Lose(t, s.locks, "import")
		if err := <-ended; !errors.Is(err, leased.ErrLeaseLost) || s.imported != 11 {
			t.Errorf("after %d products it ended with %v", s.imported, err)
		}
	})
}

func TestAnImportStopsBeforeAnotherBeginsItIfRedisGoesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		s := &shop{locks: server.Client(leased.WithTTL(30 * time.Second))}
		s.next = func(context.Context) error {
			if s.imported == 4 {
				server.Stop() // what is sent from now on gets no answer
			}
			time.Sleep(time.Second)
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		// Another process can get the lock 30 s after the lease began, which was not renewed.
		if err := s.importAll(ctx); !errors.Is(err, leased.ErrLeaseLost) || s.imported < 5 || s.imported > 30 {
			t.Errorf("after %d products it ended with %v", s.imported, err)
		}
	})
}

// exampleT takes the place of a *testing.T in an example.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (t *exampleT) Helper()                        {}
func (t *exampleT) Output() io.Writer              { return io.Discard }
func (t *exampleT) Cleanup(f func())               { t.cleanups = append(t.cleanups, f) }
func (t *exampleT) Errorf(format string, v ...any) { log.Panicf(format, v...) }
func (t *exampleT) Fatalf(format string, v ...any) { log.Panicf(format, v...) }

func (t *exampleT) end() {
	for i := len(t.cleanups) - 1; i >= 0; i-- {
		t.cleanups[i]()
	}
}

// In a test, t is the test's *testing.T, and there is no end to call.
func ExampleNew() {
	t := &exampleT{}
	defer t.end()

	client := leasedtest.New(t)
	n := 0
	err := client.Mutex("counter").Do(context.Background(), func(context.Context) error {
		n++
		return nil
	})
	fmt.Println(n, err)
	// Output: 1 <nil>
}

// What the code under test does when its lease is lost.
func ExampleLose() {
	t := &exampleT{}
	defer t.end()

	client := leasedtest.New(t)
	working := make(chan struct{})
	ended := make(chan error)
	go func() {
		ended <- client.Mutex("report").Do(context.Background(), func(ctx context.Context) error {
			close(working)
			<-ctx.Done() // stands for work that ends with ctx
			return nil
		})
	}()
	<-working
	leasedtest.Lose(t, client, "report")
	fmt.Println(errors.Is(<-ended, leased.ErrLeaseLost))
	// Output: true
}

// What the code under test does while another process holds the lock.
func ExampleServer_Client() {
	t := &exampleT{}
	defer t.end()

	server := leasedtest.NewServer(t)
	here, there := server.Client(), server.Client()
	lease, err := there.Mutex("nightly").LockContext(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	_, err = here.Mutex("nightly").TryLockContext(context.Background())
	fmt.Println(errors.Is(err, leased.ErrLocked))
	fmt.Println(lease.Unlock())
	// Output:
	// true
	// <nil>
}

// A lease that cannot be renewed ends before its TTL does.
func ExampleServer_FreezeRenewals() {
	t := &exampleT{}
	defer t.end()

	server := leasedtest.NewServer(t)
	client := server.Client(leased.WithTTL(300 * time.Millisecond))
	err := client.Mutex("report").Do(context.Background(), func(ctx context.Context) error {
		resume := server.FreezeRenewals()
		defer resume()
		<-ctx.Done()
		return nil
	})
	fmt.Println(errors.Is(err, leased.ErrLeaseLost))
	// Output: true
}

// Calls that are made while Redis is away wait, and continue when it is back.
func ExampleServer_Stop() {
	t := &exampleT{}
	defer t.end()

	server := leasedtest.NewServer(t)
	client := server.Client()
	start := server.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := client.Mutex("report").LockContext(ctx)
	fmt.Println(errors.Is(err, leased.ErrNotAcquired))

	start()
	fmt.Println(client.Mutex("report").Do(context.Background(), func(context.Context) error { return nil }))
	// Output:
	// true
	// <nil>
}

// A lost message delays a hand-off, but does not prevent it.
func ExampleServer_DropMessages() {
	t := &exampleT{}
	defer t.end()

	server := leasedtest.NewServer(t)
	here, there := server.Client(leased.WithTTL(300*time.Millisecond)), server.Client()
	lease, err := there.Mutex("report").LockContext(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	deliver := server.DropMessages()
	defer deliver()
	unlocked := make(chan error, 1)
	time.AfterFunc(50*time.Millisecond, func() { unlocked <- lease.Unlock() })
	fmt.Println(here.Mutex("report").Do(context.Background(), func(context.Context) error { return nil }))
	fmt.Println(<-unlocked)
	// Output:
	// <nil>
	// <nil>
}

// Two processes believe that the lock is theirs, because the first one stood still: the
// resource has to compare tokens.
func ExampleServer_Advance() {
	t := &exampleT{}
	defer t.end()

	server := leasedtest.NewServer(t)
	slow, next := server.Client(leased.WithTTL(time.Minute)), server.Client()
	first, err := slow.Mutex("stock").LockContext(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	server.Advance(time.Minute)
	second, err := next.Mutex("stock").LockContext(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	fmt.Println("the second token is greater:", second.Token() > first.Token())
	fmt.Println(errors.Is(first.Unlock(), leased.ErrLeaseLost), second.Unlock())
	// Output:
	// the second token is greater: true
	// true <nil>
}
