package leased

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// tryingAgain refuses releases, as a slot on its way does, and cancels as well until it is
// there. Then the first cancel finds that the id owns.
type tryingAgain struct {
	*stubServer
	mu       sync.Mutex
	there    bool
	canceled int
	id       string
}

func (s *tryingAgain) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Verb == protocol.Release {
		return protocol.Answer{}, answer("TRYAGAIN Multiple keys request during rehashing of slot")
	}
	s.id = c.ID
	return s.stubServer.Do(ctx, k, c)
}

func (s *tryingAgain) Cancel(_ context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	s.mu.Lock()
	defer s.mu.Unlock()
	results := make([]protocol.Canceled, len(batch))
	for i := range batch {
		if !s.there {
			results[i].Fail = &protocol.Failure{Err: errors.New("TRYAGAIN"), Kind: protocol.RefusedNow}
			continue
		}
		results[i].Owned = s.canceled == 0
		s.canceled++
	}
	return results
}

// A waiter looks again, and has the server say that the lock is wanted, while an Unlock
// whose release was refused is still to be proved by a cancel. That message is about an id
// that no lock knows, which is canceled as well.
func TestVirtualAMessageWhileAnUnlockIsProvedTakesItNoProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		s := &tryingAgain{stubServer: c.server.(*stubServer)}
		c.server = s
		l, err := c.Mutex("x").LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		unlocked := make(chan error, 1)
		go func() { unlocked <- l.Unlock() }()
		time.Sleep(time.Second)
		s.mu.Lock()
		s.there = true
		id := s.id
		s.mu.Unlock()
		c.inbox[0].receive("leased1:wanted " + id + " x")
		if err := <-unlocked; err != nil {
			t.Errorf("Unlock returned %v", err)
		}
		time.Sleep(time.Minute)
		c.canceler.mu.Lock()
		defer c.canceler.mu.Unlock()
		if len(c.canceler.awaited) > 0 {
			t.Errorf("remembered forever: %v", c.canceler.awaited)
		}
	})
}

// Cancels that wait for a master of a Cluster that does not answer count toward the bound, too.
func TestAFloodOfFalseMessagesAboutAFrozenMasterDoesNotFillTheMemory(t *testing.T) {
	c := onStub(t, 0, 0)
	keys, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	c.canceler.mu.Lock()
	c.canceler.lanes = map[*redis.Client][]*lockstate.Cancellation{nil: make([]*lockstate.Cancellation, lockstate.MaxCancels)}
	c.canceler.mu.Unlock()
	c.canceler.note(&lockstate.Cancellation{Owner: &keys, ID: "x"})
	c.canceler.mu.Lock()
	if n := len(c.canceler.schedule.Pending); n > 0 {
		t.Errorf("%d more are scheduled", n)
	}
	c.canceler.mu.Unlock()
	c.canceler.note(&lockstate.Cancellation{Owner: &keys, ID: "x", Release: true})
	c.canceler.mu.Lock()
	defer c.canceler.mu.Unlock()
	if n := len(c.canceler.schedule.Pending); n != 1 {
		t.Error("a release is dropped, for which a Shutdown waits")
	}
	c.canceler.schedule, c.canceler.unconfirmed, c.canceler.flush, c.canceler.lanes = lockstate.CancelSchedule{}, 0, noFlush, nil
}

// An Unlock that waits for such a cancel would wait for as long as it may.
func TestACancelThatWaitsForItsMasterIsGivenUpWithTheClient(t *testing.T) {
	c := onStub(t, 0, 0)
	keys, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	w := &lockstate.Caller{Opts: &c.opts.lock.Terms}
	c.canceler.mu.Lock()
	c.canceler.lanes[nil] = []*lockstate.Cancellation{{Owner: &entry{client: c, keys: keys}, ID: "x", Callers: []*lockstate.Caller{w}}}
	c.canceler.mu.Unlock()
	c.canceler.giveUp()
	if !w.Settled {
		t.Error("the caller is not told")
	}
}

// Redis, or whoever may publish there, names a lock with another prefix, or a name that no lock can have.
func TestARequestForWhatIsNoLockOfThisClientIsNotCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0, WithKeyPrefix("app:")))
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		l.entry.mu.Lock()
		id := l.entry.stateLocked().Request().ID
		l.entry.mu.Unlock()
		for key, want := range map[string]int{"app:y": 1, "y": 0, "app:": 0, "app:y:{app:y}:queue": 0} {
			c.canceler.mu.Lock()
			c.canceler.flush = flushRunning // nothing is sent
			c.canceler.mu.Unlock()
			c.deliver(&protocol.Message{Kind: protocol.MessageGranted, ID: id, Key: key})
			c.canceler.mu.Lock()
			if n := len(c.canceler.schedule.Pending); n != want {
				t.Errorf("of %q, %d requests are canceled", key, n)
			}
			c.canceler.schedule, c.canceler.flush = lockstate.CancelSchedule{}, noFlush
			c.canceler.mu.Unlock()
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// What a step cancels is noted before another step can follow: one that cancels the same request, or
// removes the lock, after which Shutdown waits only for what is noted.
func TestVirtualWhatAStepCancelsIsNotedInTheStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		c.begin()
		e := c.find(&k, new(string))
		fx := lockstate.Effects{Cancels: []lockstate.Cancellation{{ID: "leased1:w:1000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:x"}}}
		e.mu.Lock()
		idle := e.rearmLocked(&fx)
		e.mu.Unlock()
		c.canceler.mu.Lock()
		if c.canceler.idleLocked() { // all that Shutdown waits for if the loss was reported: see CancelSchedule.Lingering
			t.Error("a flush that was noted is not waited for")
		}
		c.canceler.mu.Unlock()
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			c.canceler.drain(context.Background())
		}()
		synctest.Wait()
		select {
		case <-drained:
			t.Error("a Shutdown would not wait for it")
		default:
		}
		e.perform(&fx, idle, 0)
		synctest.Wait()
		select {
		case <-drained:
		default:
			t.Error("it is never sent")
		}
	})
}
