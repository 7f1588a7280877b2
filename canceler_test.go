package leased

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// tryingAgain refuses releases, as a slot on its way does, and cancels as well until it is
// there. Then the first cancel finds that the id owns.
type tryingAgain struct {
	*stubServer
	mu        sync.Mutex
	there     bool
	cancelled int
	id        string
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

func (s *tryingAgain) Cancel(_ context.Context, batch []protocol.CancelRequest) []protocol.Cancelled {
	s.mu.Lock()
	defer s.mu.Unlock()
	results := make([]protocol.Cancelled, len(batch))
	for i := range batch {
		if !s.there {
			results[i].Fail = &protocol.Failure{Err: errors.New("TRYAGAIN"), Kind: protocol.RefusedNow}
			continue
		}
		results[i].Owned = s.cancelled == 0
		s.cancelled++
	}
	return results
}

// A waiter looks again, and has the server say that the lock is wanted, while an Unlock
// whose release was refused is still to be proved by a cancel. That message is about an id
// that no lock knows, which is cancelled as well.
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
			t.Errorf("remembered for ever: %v", c.canceler.awaited)
		}
	})
}

// pipelines is a stub server that notes how many cancels come at once, and refuses them from the
// n-th time on.
type pipelines struct {
	stubServer
	refuses int
	sizes   []int
}

func (s *pipelines) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Cancelled {
	s.sizes = append(s.sizes, len(batch))
	results := s.stubServer.Cancel(ctx, batch)
	for i := range results {
		if len(s.sizes) >= s.refuses {
			results[i].Fail = &protocol.Failure{Err: errNoAnswer, Kind: protocol.NoAnswer}
		}
	}
	return results
}

// The server would serve nobody else meanwhile. But a server that does not answer is asked once.
func TestManyCancelsLeaveInBatchesAsLongAsTheyAreAnswered(t *testing.T) {
	const n = 3*cancelsPerBatch + 1
	for _, c := range []struct{ refuses, trips, answered int }{{9, 4, n}, {1, 1, 0}, {3, 3, 2 * cancelsPerBatch}} {
		client := onStub(t, 0, 0)
		s := &pipelines{stubServer: stubServer{client: client}, refuses: c.refuses}
		client.server = s
		keys, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		var batch []*lockstate.Cancellation
		for range n {
			batch = append(batch, &lockstate.Cancellation{Owner: &keys, ID: "x"})
		}
		answered := 0
		for _, r := range client.canceler.send(batch) {
			if r.Fail == nil {
				answered++
			}
		}
		if len(s.sizes) != c.trips || answered != c.answered || s.sizes[0] != cancelsPerBatch {
			t.Errorf("%+v: %d answered in %v", c, answered, s.sizes)
		}
	}
}
