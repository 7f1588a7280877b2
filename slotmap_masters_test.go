package leased

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// twoMasters is the client of a Cluster of two masters. One of them hangs, and has the locks whose
// names begin with h.
type twoMasters struct{ hanging, well *redis.Client }

func newTwoMasters() *twoMasters { return &twoMasters{new(redis.Client), new(redis.Client)} }

func (m *twoMasters) MasterForKey(_ context.Context, key string) (*redis.Client, error) {
	if strings.HasPrefix(key, "h") {
		return m.hanging, nil
	}
	return m.well, nil
}

// halfHanging is a stub server that is such a Cluster. As go-redis does, it answers a batch when the
// last of its masters has answered. It notes the batches: the first letters of the locks' names.
type halfHanging struct {
	*stubServer
	takes time.Duration // until the master that hangs has answered

	mu      sync.Mutex
	renewed []string
	cancels []string
	now     int // cancels of the master that hangs which are under way
	most    int
}

func (s *halfHanging) Renew(ctx context.Context, batch []protocol.Renewal) {
	var names string
	for i := range batch {
		names += batch[i].Keys.Lock[:1]
	}
	s.mu.Lock()
	s.renewed = append(s.renewed, names)
	s.mu.Unlock()
	if strings.Contains(names, "h") {
		time.Sleep(protocol.CommandTimeout) // of virtual time: until it is given up
	}
	s.stubServer.Renew(ctx, batch)
	for i := range batch {
		if batch[i].Keys.Lock[0] == 'h' {
			batch[i] = protocol.Renewal{Owner: batch[i].Owner, Keys: batch[i].Keys, Req: batch[i].Req, At: batch[i].At, Err: errNoAnswer}
		}
	}
}

func (s *halfHanging) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	var names string
	for i := range batch {
		names += batch[i].Keys.Lock[:1]
	}
	hangs := strings.Contains(names, "h")
	s.mu.Lock()
	takes := s.takes
	if hangs {
		s.now++
	}
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	if hangs {
		select {
		case <-time.After(takes): // of virtual time: the answer comes
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if hangs {
		s.now--
	}
	if ctx.Err() != nil {
		results := make([]protocol.Canceled, len(batch))
		for i := range results {
			results[i].Fail = &protocol.Failure{Err: ctx.Err(), Kind: protocol.NoAnswer}
		}
		return results
	}
	s.cancels = append(s.cancels, names)
	return s.stubServer.Cancel(ctx, batch)
}

func (s *halfHanging) answersAfter(takes time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.takes = takes
}

func (s *halfHanging) canceled() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.cancels)
}

// onHalfHanging returns a client of such a Cluster.
func onHalfHanging(t *testing.T, masters clusterNodes, opts ...Option) (*Client, *halfHanging) {
	c := onStub(t, 0, 0, append([]Option{WithLossHandler(func(LossEvent) {})}, opts...)...)
	s := &halfHanging{stubServer: c.server.(*stubServer), takes: time.Second}
	c.server = s
	c.slotMap.masters = masters
	return c, s
}

// lockThem locks one lock of each name.
func lockThem(t *testing.T, c *Client, names ...string) (leases []*Lease) {
	t.Helper()
	for _, name := range names {
		l, err := c.Mutex(name).LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	return leases
}

func TestVirtualAMasterThatHangsDelaysNoRenewalAtTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c, s := onHalfHanging(t, newTwoMasters(), WithTTL(ttl))
		began := time.Now()
		held := lockThem(t, c, "h1", "w1", "h2", "w2", "w3")
		time.Sleep(ttl/3 + time.Millisecond) // to the first renewals
		for _, l := range held {
			if name := l.entry.keys.Name(); name[0] == 'w' && l.TrustedUntil().Before(began.Add(ttl)) {
				t.Errorf("%s has no outcome", name)
			}
		}
		s.mu.Lock()
		slices.Sort(s.renewed)
		if got := fmt.Sprint(s.renewed); got != "[hh www]" {
			t.Errorf("renewed in batches of %s", got)
		}
		s.mu.Unlock()
		time.Sleep(10 * ttl)
		for _, l := range held {
			if name, err := l.entry.keys.Name(), l.Unlock(); errors.Is(err, ErrLeaseLost) != (name[0] == 'h') {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// finder is a MasterForKey of the user's.
type finder func(ctx context.Context) error

func (f finder) MasterForKey(ctx context.Context, _ string) (*redis.Client, error) {
	return nil, f(ctx)
}

func TestVirtualRenewalsWhoseMasterCannotBeNamedGoTogether(t *testing.T) {
	for what, f := range map[string]finder{
		"an error":               func(context.Context) error { return errNoAnswer },
		"a panic":                func(context.Context) error { panic("a user's type") },
		"the goroutine's end":    func(context.Context) error { runtime.Goexit(); return nil },
		"nothing, for some time": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		synctest.Test(t, func(t *testing.T) {
			const ttl = 3 * time.Second
			c, s := onHalfHanging(t, f, WithTTL(ttl))
			held := lockThem(t, c, "w1", "w2", "w3")
			time.Sleep(10 * ttl)
			s.mu.Lock()
			if len(s.renewed) < 20 || slices.ContainsFunc(s.renewed, func(names string) bool { return names != "www" }) {
				t.Errorf("%s: renewed in batches of %v", what, s.renewed)
			}
			s.mu.Unlock()
			unlockAll(t, held)
		})
	}
}

// A user's type may do anything in MasterForKey, so the watchdog must not wait for it.
func TestVirtualALossIsToldThoughNoMasterIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c, _ := onHalfHanging(t, finder(func(context.Context) error {
			time.Sleep(time.Hour) // of virtual time: it hangs
			return errNoAnswer
		}), WithTTL(ttl))
		began := time.Now()
		for _, l := range lockThem(t, c, "w1", "w2") {
			<-l.Context().Done()
			if took := time.Since(began); took > ttl {
				t.Errorf("%s: the loss was told after %v", l.entry.keys.Name(), took)
			}
			if err := l.Unlock(); !errors.Is(err, ErrLeaseLost) {
				t.Errorf("%s: %v", l.entry.keys.Name(), err)
			}
		}
		time.Sleep(2 * time.Hour) // both lookups end
	})
}

// cancel has the client cancel an unknown request.
func cancel(t *testing.T, c *Client, name string) {
	t.Helper()
	keys, err := protocol.NewKeys("", name)
	if err != nil {
		t.Fatal(err)
	}
	c.canceler.add(&lockstate.Cancellation{Owner: &keys, ID: "unknown " + name})
}

func TestVirtualAMasterThatHangsDelaysNoCancelAtTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		c.group.start(c.watchdog.run)
		is := func(after string, want ...string) {
			t.Helper()
			synctest.Wait()
			if got := s.canceled(); !slices.Equal(got, want) {
				t.Errorf("%s, canceled %q, want %q", after, got, want)
			}
		}
		cancel(t, c, "h1")
		is("at first")
		for _, name := range []string{"w1", "h2", "w2", "h3"} {
			cancel(t, c, name)
			synctest.Wait()
		}
		is("at once", "w", "w")
		time.Sleep(s.takes)
		is("when the first has an answer", "w", "w", "h")
		time.Sleep(s.takes)
		is("when those that waited for it have", "w", "w", "h", "hh")
		if s.most != 1 {
			t.Errorf("%d round trips at a time to the master that hangs", s.most)
		}
	})
}

// A cancel without an answer is sent again after a second.
func TestVirtualACancelAtAMasterThatHangsIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		c.group.start(c.watchdog.run)
		s.answersAfter(time.Minute)
		cancel(t, c, "h")
		time.Sleep(protocol.CommandTimeout + time.Second/2)
		s.answersAfter(0)
		if got := s.canceled(); len(got) != 0 {
			t.Fatalf("canceled %q", got)
		}
		time.Sleep(time.Second)
		if got := s.canceled(); !slices.Equal(got, []string{"h"}) {
			t.Errorf("canceled %q", got)
		}
	})
}

func TestVirtualCloseWaitsForTheCancelsOfEachMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		for _, name := range []string{"h1", "w1", "h2"} {
			cancel(t, c, name)
			synctest.Wait()
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if got := s.canceled(); !slices.Equal(got, []string{"w", "h", "h"}) {
			t.Errorf("canceled %q", got)
		}
	})
}
