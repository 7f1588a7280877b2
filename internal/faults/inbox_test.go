//go:build unix

package faults

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// deafness makes the connections of subscriptions deaf, and no others: what the server
// sends is lost, while the server still counts a subscriber.
type deafness struct {
	mu   sync.Mutex // guards ears
	ears []*ear

	confirmed atomic.Int64 // subscriptions whose confirmation the client has read
	granted   atomic.Int64 // messages with a grant that the client has read
	lost      atomic.Int64 // messages with a grant that a deaf ear got instead
}

type ear struct {
	net.Conn
	d         *deafness
	heard     []byte // what was read until the confirmation; belongs to the reading goroutine
	confirmed atomic.Bool
	deaf      atomic.Bool
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

// listens waits until n subscriptions have been confirmed, both by the server, which counts
// a subscription from then on, and to the client.
func (d *deafness) listens(t *testing.T, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("subscription %d confirmed", n), func() bool { return d.confirmed.Load() >= n })
}

// strike makes the existing subscription deaf. Later ones hear.
func (d *deafness) strike(t *testing.T) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	struck := 0
	for _, e := range d.ears {
		if e.confirmed.Load() {
			e.deaf.Store(true)
			struck++
		}
	}
	if struck != 1 {
		t.Fatalf("%d subscriptions made deaf", struck)
	}
}

func (e *ear) Read(p []byte) (int, error) {
	for {
		n, err := e.Conn.Read(p)
		grant := e.confirmed.Load() && bytes.Contains(p[:n], []byte("leased1:granted "))
		if err == nil && e.deaf.Load() {
			if grant {
				e.d.lost.Add(1)
			}
			continue
		}
		if grant {
			e.d.granted.Add(1)
		}
		if !e.confirmed.Load() {
			// The confirmation comes after the answers to the handshake.
			e.heard = append(e.heard, p[:n]...)
			if bytes.Contains(e.heard, []byte("\r\nsubscribe\r\n")) {
				e.heard = nil
				e.confirmed.Store(true)
				e.d.confirmed.Add(1)
			}
		}
		return n, err
	}
}

// deafWaiter returns a client that waits for the lock x, which holder has, and whose inbox
// has just become deaf. The subscription is confirmed before the wait begins: a confirmation
// during the wait would make the client re-check, and find out what it did not hear.
func deafWaiter(t *testing.T, s *redistest.Instance, d *deafness, ttl time.Duration) (holder, c *leased.Client, l *leased.Lease, waiting <-chan outcome) {
	t.Helper()
	c = newClient(t, s.Client(func(o *redis.Options) { o.Dialer = d.dial }), "", leased.WithTTL(ttl))
	holder = newClient(t, s.Client(), "")
	mustUnlock(t, mustLock(t, c.Mutex("any")))
	d.listens(t, 1)
	l = mustLock(t, holder.Mutex("x"))
	waiting = wait(within(t, patience), c.Mutex("x"))
	queued(t, holder, "x", 1)
	d.strike(t)
	return holder, c, l, waiting
}

func TestADeafInboxIsRebuiltWhileWaitingGoesOn(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	const ttl = 1500 * time.Millisecond
	var d deafness
	_, c, l, waiting := deafWaiter(t, s, &d, ttl)
	began := time.Now()
	d.listens(t, 2)
	took := time.Since(began)
	// A second without a message, a re-check, and a second of waiting for the echo.
	if bound := 2*time.Second + ttl/3 + slack; took > bound+strain.Since(began) {
		t.Errorf("the inbox was rebuilt after %v", took)
	}
	look := s.Client()
	eventually(t, "nobody subscribed but the new inbox and the holder's", func() bool {
		channels := look.PubSubChannels(t.Context(), "*").Val()
		n := int64(0)
		for _, v := range look.PubSubNumSub(t.Context(), channels...).Val() {
			n += v
		}
		return len(channels) == 2 && n == 2
	})
	select {
	case r := <-waiting:
		t.Fatalf("waiting ended: %v", r.err)
	default: // it cannot end yet, because the lock is held
	}
	at := time.Now()
	mustUnlock(t, l)
	r := entered(t, waiting)
	t.Logf("rebuilt after %v, then handed over in %v", took, r.at.Sub(at))
	// We cannot check c.Stats().Direct: a re-check under way may be answered before the message is read.
	eventually(t, "the new inbox hears of the grant", func() bool { return d.granted.Load() == 1 })
	if n := d.lost.Load(); n != 0 {
		t.Errorf("the old inbox got %d grants", n)
	}
	if r.lease.Context().Err() != nil {
		t.Errorf("the lease: %v", context.Cause(r.lease.Context()))
	}
	mustUnlock(t, r.lease)
	if lost := c.Stats().Lost; lost != 0 {
		t.Errorf("%d leases lost", lost)
	}
}

func TestAGrantThatADeafInboxMissedIsFoundByTheReCheck(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	const ttl = 3 * time.Second // so that the next re-check, after ttl/3, is far from the end of the TTL
	var d deafness
	_, c, l, waiting := deafWaiter(t, s, &d, ttl)
	at := time.Now()
	mustUnlock(t, l)
	r := entered(t, waiting)
	took := r.at.Sub(at)
	t.Logf("found after %v", took)
	if took > ttl/3+slack+strain.Since(at) {
		t.Errorf("the grant was found after %v", took)
	}
	eventually(t, "the grant told to deaf ears", func() bool { return d.lost.Load() == 1 })
	if s := c.Stats(); s.Direct != 0 || s.Lost != 0 {
		t.Errorf("a deaf inbox heard: %+v", s)
	}
	if r.lease.Context().Err() != nil {
		t.Errorf("the lease: %v", context.Cause(r.lease.Context()))
	}
	mustUnlock(t, r.lease)
}

// The server counts a stopped process as a subscriber, so the process is granted the lock,
// and its TTL passes. When its inbox is flooded, the server disconnects it, and it hears nothing.
func TestASlowSubscriberHoldsUpNobodyAndFindsItsWayBack(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, "--client-output-buffer-limit", "pubsub", "64kb", "64kb", "1")
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	ctx, rdb := t.Context(), s.Client()
	// Waiters re-check within a second, and again when the stopped process's TTL ends.
	const ttl = 2 * time.Second
	c := newClient(t, rdb, "", leased.WithTTL(3*time.Second))
	other := newClient(t, s.Client(), "", leased.WithTTL(3*time.Second))
	l := mustLock(t, c.Mutex("x"))
	slow := spawn(t, "worker", s.Addr, "", ttl)
	queued(t, c, "x", 1)
	waiting := wait(within(t, patience), other.Mutex("x"))
	queued(t, c, "x", 2)
	var inbox string
	eventually(t, "the child's inbox", func() bool {
		for _, channel := range rdb.PubSubChannels(ctx, "*").Val() {
			if strings.HasSuffix(channel, headOfQueue(t, c)) {
				inbox = channel
			}
		}
		return inbox != ""
	})

	slow.signal(syscall.SIGSTOP)
	at := time.Now()
	mustUnlock(t, l) // handed to the child if its place in the queue has not expired
	if _, _, ok := slow.owns(c); !ok {
		t.Log("its place in the queue had ended: it got nothing") // everything else must hold all the same
	}
	r := entered(t, waiting)
	t.Logf("the stopped process held the others up for %v", r.at.Sub(at))
	if got := r.at.Sub(at); got > ttl+slack+strain.Since(at) {
		t.Errorf("the next owner waited %v for the stopped process", got)
	}
	junk := strings.Repeat("x", 16<<10)
	eventually(t, "the slow subscriber cut off", func() bool {
		return rdb.Publish(ctx, inbox, junk).Val() == 0
	})
	began := time.Now()
	mustUnlock(t, mustLock(t, c.Mutex("another"))) // Redis itself is not held up
	if took := time.Since(began); took > slack+strain.Since(began) {
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

// headOfQueue returns the label of the process at the head of the queue.
func headOfQueue(t *testing.T, c *leased.Client) string {
	t.Helper()
	info, err := c.Inspect(t.Context(), "x")
	if err != nil || len(info.Waiting) == 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	return info.Waiting[0].Client
}
