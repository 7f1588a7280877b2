//go:build unix

package faults

import (
	"bytes"
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// deafness makes the connections of subscriptions deaf, and only those: what the
// server says is lost, and it goes on counting a subscriber.
type deafness struct {
	mu        sync.Mutex
	ears      []*ear
	listening atomic.Int64 // subscriptions begun
}

type ear struct {
	net.Conn
	d          *deafness
	subscribed atomic.Bool
	deaf       atomic.Bool
}

func (d *deafness) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	e := &ear{Conn: c, d: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ears = append(d.ears, e)
	return e, nil
}

// strike makes the subscriptions of now deaf. Later ones hear.
func (d *deafness) strike() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.ears {
		if e.subscribed.Load() {
			e.deaf.Store(true)
		}
	}
}

func (e *ear) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) && !e.subscribed.Swap(true) {
		e.d.listening.Add(1)
	}
	return e.Conn.Write(p)
}

func (e *ear) Read(p []byte) (int, error) {
	for {
		n, err := e.Conn.Read(p)
		if err != nil || !e.deaf.Load() {
			return n, err
		}
	}
}

func TestADeafInboxIsRebuiltWhileWaitingGoesOn(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	const ttl = 1500 * time.Millisecond
	var d deafness
	c := newClient(t, s.Client(func(o *redis.Options) { o.Dialer = d.dial }), "", leased.WithTTL(ttl))
	holder := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	l := mustLock(t, holder.Mutex("x"))
	waiting := wait(within(t, patience), c.Mutex("x"))
	queued(t, holder, "x", 1)
	if n := d.listening.Load(); n != 1 {
		t.Fatalf("%d subscriptions", n)
	}
	d.strike()
	began := time.Now()
	eventually(t, "a second subscription", func() bool { return d.listening.Load() == 2 })
	took := time.Since(began)
	// A second without a sign of life, a re-check, a second without an echo.
	if took > 2*time.Second+ttl/3+slack {
		t.Errorf("the inbox was rebuilt after %v", took)
	}
	eventually(t, "one listener of the old inbox", func() bool {
		channels := s.Client().PubSubChannels(t.Context(), "*").Val()
		return len(channels) == 2
	})
	select {
	case r := <-waiting:
		t.Fatalf("waiting ended: %v", r.err)
	default:
	}
	eventually(t, "the new inbox to hear", func() bool {
		n := 0
		for _, v := range s.Client().PubSubNumSub(t.Context(), s.Client().PubSubChannels(t.Context(), "*").Val()...).Val() {
			n += int(v)
		}
		return n == 2
	})
	at := time.Now()
	mustUnlock(t, l)
	r := entered(t, waiting)
	t.Logf("rebuilt after %v, then handed over in %v", took, r.at.Sub(at))
	if direct := c.Stats().Direct; direct != 1 {
		t.Errorf("%d direct hand-offs: the new inbox did not hear", direct)
	}
	mustUnlock(t, r.lease)
}

func TestAGrantThatADeafInboxMissedIsFoundByTheReCheck(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	const ttl = 1500 * time.Millisecond
	var d deafness
	c := newClient(t, s.Client(func(o *redis.Options) { o.Dialer = d.dial }), "", leased.WithTTL(ttl))
	holder := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	l := mustLock(t, holder.Mutex("x"))
	waiting := wait(within(t, patience), c.Mutex("x"))
	queued(t, holder, "x", 1)
	d.strike()
	mustUnlock(t, l)
	at := time.Now()
	r := entered(t, waiting)
	t.Logf("found after %v", r.at.Sub(at))
	if took := r.at.Sub(at); took > ttl/3+slack {
		t.Errorf("the grant was found after %v", took)
	}
	if direct := c.Stats().Direct; direct != 0 {
		t.Error("a deaf inbox heard")
	}
	if r.lease.Context().Err() != nil {
		t.Errorf("the lease: %v", context.Cause(r.lease.Context()))
	}
	mustUnlock(t, r.lease)
}

// The server counts a stopped process as a subscriber, so it gets the lock, and
// its TTL passes. Flooded meanwhile, it is cut off, and hears of nothing.
func TestASlowSubscriberHoldsUpNobodyAndFindsItsWayBack(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, "--client-output-buffer-limit", "pubsub 64kb 64kb 1")
	redistest.CheckLeaks(t, nil, "")
	ctx, rdb := t.Context(), s.Client()
	c := newClient(t, rdb, "", leased.WithTTL(2*time.Second))
	other := newClient(t, s.Client(), "", leased.WithTTL(2*time.Second))
	l := mustLock(t, c.Mutex("x"))
	slow := spawn(t, "worker", s.Addr, "", 700*time.Millisecond)
	queued(t, c, "x", 1)
	waiting := wait(within(t, patience), other.Mutex("x"))
	queued(t, c, "x", 2)
	var inbox string
	for _, channel := range rdb.PubSubChannels(ctx, "*").Val() {
		if !strings.HasSuffix(channel, slowOwner(t, c)) {
			continue
		}
		inbox = channel
	}
	if inbox == "" {
		t.Fatalf("no inbox of the child among %q", rdb.PubSubChannels(ctx, "*").Val())
	}

	slow.signal(syscall.SIGSTOP)
	at := time.Now()
	mustUnlock(t, l) // to the child, before its place in the queue has ended
	r := entered(t, waiting)
	t.Logf("the stopped process held the others up for %v", r.at.Sub(at))
	if got := r.at.Sub(at); got > 700*time.Millisecond+slack {
		t.Errorf("the next owner waited %v for a stopped one", got)
	}
	junk := strings.Repeat("x", 16<<10)
	eventually(t, "the slow subscriber cut off", func() bool {
		return rdb.Publish(ctx, inbox, junk).Val() == 0
	})
	began := time.Now()
	mustUnlock(t, mustLock(t, c.Mutex("another"))) // Redis is not held up
	if took := time.Since(began); took > slack {
		t.Errorf("another lock took %v", took)
	}
	slow.signal(syscall.SIGCONT)
	mustUnlock(t, r.lease)
	slow.hear("locked")
	slow.tell("unlock")
	slow.hear("unlocked")
	slow.end()
	nothingLeft(t, c, "x")
}

// slowOwner returns the label of the process at the head of the queue.
func slowOwner(t *testing.T, c *leased.Client) string {
	t.Helper()
	info, err := c.Inspect(t.Context(), "x")
	if err != nil || len(info.Waiting) == 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	return info.Waiting[0].Client
}
