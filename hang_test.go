package leased_test

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// hang is the way from a client to an embedded server that can hold up what is sent,
// also that of connections given up meanwhile, and bring it all later.
type hang struct {
	mu    sync.Mutex // guards what follows
	hangs bool
	conns []*hangingConn
}

type hangingConn struct {
	net.Conn
	way    *hang
	held   []byte
	closed bool
}

func (w *hang) change(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c := &hangingConn{Conn: conn, way: w}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.conns = append(w.conns, c)
		return c, nil
	}
}

func (c *hangingConn) Write(p []byte) (int, error) {
	c.way.mu.Lock()
	if c.way.hangs {
		c.held = append(c.held, p...)
		c.way.mu.Unlock()
		return len(p), nil
	}
	c.way.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *hangingConn) Close() error {
	c.way.mu.Lock()
	defer c.way.mu.Unlock()
	if c.closed = true; len(c.held) > 0 {
		return nil
	}
	return c.Conn.Close()
}

func (w *hang) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangs = true
}

// end brings what was held up.
func (w *hang) end(t *testing.T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangs = false
	for _, c := range w.conns {
		if len(c.held) == 0 {
			continue
		}
		_ = c.Conn.SetDeadline(time.Time{}) // it may have passed
		if c.closed {                       // nobody reads the answers
			t.Cleanup(func() { _ = c.Conn.Close() })
			go func() { _, _ = io.Copy(io.Discard, c.Conn) }() // ends with the connection
		}
		if _, err := c.Conn.Write(c.held); err != nil {
			t.Errorf("what was held up does not arrive: %v", err)
		}
		c.held = nil
	}
}

func TestVirtualAnOwnerThatAHangingServerMadeHearsThatOthersWait(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way hang
		a := clientOn(t, s, s.connect(t, way.change))
		unlock(t, lock(t, a.Mutex("another"))) // its inbox hears
		time.Sleep(time.Second)
		way.start()
		owner := locking(t, a.Mutex("x"))
		time.Sleep(3*time.Minute + 11*time.Second) // its pauses have grown by then
		way.end(t)
		time.Sleep(time.Millisecond) // an acquire that was given up is carried out
		if s.value(t, "x") == "" {
			t.Fatal("nobody was made owner")
		}
		began := time.Now()
		waiters := []<-chan *leased.Lease{locking(t, newClient(t, s).Mutex("x")), locking(t, newClient(t, s).Mutex("x"))}
		unlock(t, <-owner)
		first, second := waiters[0], waiters[1]
		for range waiters {
			select {
			case l := <-first:
				unlock(t, l)
				first = nil
			case l := <-second:
				unlock(t, l)
				second = nil
			}
		}
		if d := time.Since(began); d > 10*time.Millisecond {
			t.Errorf("two others waited %v for an owner that did not know of it", d)
		}
	})
}
