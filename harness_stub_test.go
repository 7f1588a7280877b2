package leased

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// stubServer is a server that agrees to everything at once. It shares no memory and
// no socket with its client's goroutines, nor among them: what the race detector
// finds in order was put in order by the client.
//
// A server with a single client would reply the same. others, from 0 to 1, is how often
// it claims that other processes wait; crossed, how often it queues a request and grants
// it by a message, which crosses the reply.
type stubServer struct {
	client          *Client
	others, crossed float64
}

// All its grants have the same token, because it remembers none: so none looks like a
// later grant of the same request. The tokens of leases then follow the clock.
const (
	stubFloor = 1
	stubToken = 2
)

func (m *stubServer) HonorsDeadlines() bool { return rand.IntN(2) == 0 } // both ways of sending

func (m *stubServer) Commands() int64 { return 0 } // a count would be shared memory

func (m *stubServer) Do(_ context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	now := uint64(time.Now().UnixMicro())
	id := c.ID
	switch c.Verb {
	case protocol.Release:
		return protocol.Answer{Outcome: protocol.Done}, nil
	case protocol.Yield, protocol.Downgrade:
		id = c.Next
	}
	if m.reads(k, id) {
		return protocol.Answer{Outcome: protocol.Enqueued, Token: stubFloor, Clock: now, Left: time.Minute}, nil
	}
	if token, ok := m.holds(k, id); ok {
		return protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: now, Kept: true, Echo: protocol.NoEcho}, nil
	}
	if c.Wait && rand.Float64() < m.crossed {
		msg := protocol.Message{Kind: protocol.MessageGranted, ID: id, Key: k.Lock, Token: stubToken, Clock: now}
		if !m.client.group.start(func() { m.tell(&msg) }) {
			return protocol.Answer{}, ErrClosed
		}
		return protocol.Answer{Outcome: protocol.Enqueued, Token: stubFloor, Clock: now, Left: time.Minute}, nil
	}
	return protocol.Answer{Outcome: protocol.Granted, Token: stubToken, Clock: now, More: rand.Float64() < m.others, Echo: protocol.NoEcho}, nil
}

// reads reports whether id asks for a place behind readers of the client, which is
// not granted then. Only the client knows, and what this locks, the taking of the
// answer will lock right after it: it puts nothing else in order.
func (m *stubServer) reads(k *protocol.Keys, id string) bool {
	e := m.client.lookup(k.Lock)
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.stateLocked().Status()
	return v.Reserving && v.Next == id
}

// holds returns the token of the grant that id has already. As for reads, only the
// client knows.
func (m *stubServer) holds(k *protocol.Keys, id string) (uint64, bool) {
	e := m.client.lookup(k.Lock)
	if e == nil {
		return 0, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stateLocked().Status().Token, e.stateLocked().Holds(id)
}

// tell delivers a message as the inbox does.
func (m *stubServer) tell(msg *protocol.Message) {
	if e := m.client.lookup(msg.Key); e != nil {
		e.step(func(now time.Time, fx *lockstate.Effects) { e.stateLocked().Receive(msg, now, fx) })
	}
}

func (m *stubServer) Renew(_ context.Context, batch []protocol.Renewal) {
	for i := range batch {
		batch[i].Outcome, batch[i].Clock = protocol.Granted, uint64(time.Now().UnixMicro())
	}
}

func (m *stubServer) Touch(context.Context, []protocol.Renewal) error { return nil }

func (m *stubServer) Cancel(_ context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	results := make([]protocol.Canceled, len(batch))
	for i := range results {
		results[i].Owned = true
	}
	return results
}

func (m *stubServer) Evict(context.Context, *protocol.Keys) (int, error) { return 0, nil }
func (m *stubServer) Echo(context.Context, *protocol.Keys, string, string) (int, error) {
	return 1, nil
}

func (m *stubServer) Inspect(context.Context, *protocol.Keys) (protocol.Snapshot, error) {
	return protocol.Snapshot{}, nil
}

// onStub returns a client that needs no Redis; its inbox finds none.
func onStub(t *testing.T, others, crossed float64, opts ...Option) *Client {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{
		Addr:   "127.0.0.1:1",
		Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("there is no Redis") },
	})
	t.Cleanup(func() { rdb.Close() })
	redistest.CheckLeaks(t, nil, "")
	c, err := New(rdb, append([]Option{WithLogger(slog.New(slog.DiscardHandler)), WithReleaseTimeout(time.Minute)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	c.server = &stubServer{client: c, others: others, crossed: crossed}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close at the end of the test: %v", err)
		}
		if n := len(c.table); n != 0 {
			t.Errorf("%d locks are left in the table", n)
		}
	})
	return c
}

var errNoAnswer = errors.New("no answer came")

// request returns what the lock has asked for, or holds.
func (e *entry) request() protocol.Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stateLocked().Request()
}
