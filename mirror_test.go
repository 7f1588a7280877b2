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

	"github.com/leasedmutex/leased/internal/redistest"
)

// mirror is a server that agrees to everything at once. It shares no memory and
// no socket with its client's goroutines, nor among them: what the race detector
// finds in order was put in order by the client.
//
// With one client alone that is what a server would say. others, from 0 to 1, is
// how often it claims that other processes wait; crossed, how often it has
// enqueued a request, for a message to grant it, which crosses with the answer.
type mirror struct {
	client          *Client
	others, crossed float64
}

// All its grants have one token, for it remembers none: so none looks like a later one
// of the same request. The tokens of leases go by the clock then.
const (
	mirrorFloor = 1
	mirrorToken = 2
)

func (m *mirror) prompt() bool { return rand.IntN(2) == 0 } // both ways of sending

func (m *mirror) do(_ context.Context, k *keys, c *command) (answer, error) {
	now := uint64(time.Now().UnixMicro())
	id := c.id
	switch c.verb {
	case release:
		return answer{outcome: done}, nil
	case yield, downgrade:
		id = c.next
	}
	if m.reads(k, id) {
		return answer{outcome: enqueued, token: mirrorFloor, clock: now, left: time.Minute}, nil
	}
	if token, ok := m.holds(k, id); ok {
		return answer{outcome: granted, token: token, clock: now, kept: true}, nil
	}
	if c.wait && rand.Float64() < m.crossed {
		msg := message{kind: "granted", id: id, key: k.lock, token: mirrorToken, clock: now}
		if !m.client.crew.start(func() { m.tell(&msg) }) {
			return answer{}, ErrClosed
		}
		return answer{outcome: enqueued, token: mirrorFloor, clock: now, left: time.Minute}, nil
	}
	return answer{outcome: granted, token: mirrorToken, clock: now, more: rand.Float64() < m.others}, nil
}

// reads reports whether id asks for a place behind readers of the client, which is
// not granted then. Only the client knows, and what this locks, the taking of the
// answer will lock right after it: it puts nothing else in order.
func (m *mirror) reads(k *keys, id string) bool {
	e := m.client.lookup(k.lock)
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.lock.grant.reserves(id)
}

// holds returns the token of the grant that id has already. As for reads, only the
// client knows.
func (m *mirror) holds(k *keys, id string) (uint64, bool) {
	e := m.client.lookup(k.lock)
	if e == nil {
		return 0, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.lock.grant.token, e.lock.holds(id)
}

// tell is what the inbox does with a message.
func (m *mirror) tell(msg *message) {
	if e := m.client.lookup(msg.key); e != nil {
		e.step(func(now time.Time, fx *effects) { e.lock.receive(msg, now, fx) })
	}
}

func (m *mirror) renew(_ context.Context, batch []renewal) {
	for i := range batch {
		batch[i].outcome, batch[i].clock = granted, uint64(time.Now().UnixMicro())
	}
}

func (m *mirror) touch(context.Context, []renewal) error { return nil }

func (m *mirror) cancel(_ context.Context, batch []*ghost) []cancelled {
	results := make([]cancelled, len(batch))
	for i := range results {
		results[i].owned = true
	}
	return results
}

func (m *mirror) evict(context.Context, *keys) ([]string, error) { return nil, nil }

func (m *mirror) echo(context.Context, string, string) (int, error) { return 1, nil }

func (m *mirror) inspect(context.Context, *keys) (snapshot, error) { return snapshot{}, nil }

// onMirror returns a client that needs no Redis; its inbox finds none.
func onMirror(t *testing.T, others, crossed float64, opts ...Option) *Client {
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
	c.server = &mirror{client: c, others: others, crossed: crossed}
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
