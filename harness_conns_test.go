package leased_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// stamps remembers when each command was sent. It is a Limiter, which go-redis
// asks before each command or pipeline, for a hook does not see the commands of
// a client that go-redis derived from its own.
type stamps struct {
	mu    sync.Mutex // guards times
	times []time.Time
}

func (st *stamps) Allow() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.times = append(st.times, time.Now())
	return nil
}

func (st *stamps) ReportResult(error) {}

func (st *stamps) all() []time.Time {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Clone(st.times)
}

// wrapConns has o make the connections that wrap returns.
func wrapConns(o *redis.Options, wrap func(net.Conn) net.Conn) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wrap(conn), nil
	}
}

// faraway is a connection to a server that is far away: what it answers arrives after the delay.
type faraway struct {
	net.Conn
	delay time.Duration

	mu    sync.Mutex // guards what follows
	until time.Time  // the read deadline
	asked time.Time  // when something was last written
}

func (c *faraway) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.until = t
	c.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}

func (c *faraway) SetDeadline(t time.Time) error {
	c.mu.Lock()
	c.until = t
	c.mu.Unlock()
	return c.Conn.SetDeadline(t)
}

func (c *faraway) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.asked = time.Now()
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *faraway) Read(p []byte) (int, error) {
	c.mu.Lock()
	until, arrives := c.until, c.asked.Add(c.delay)
	c.mu.Unlock()
	if !until.IsZero() && until.Before(arrives) {
		time.Sleep(time.Until(until)) // in virtual time, like the next
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(time.Until(arrives)) // so long the answer is on its way
	return c.Conn.Read(p)
}

// subscribes reports whether what is written to a connection subscribes it.
func subscribes(p []byte) bool {
	return bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n"))
}

var errCut = errors.New("the line is cut")

// line is the connection of a client to an embedded server, which a test can cut. It
// works in virtual time, where a proxy does not.
type line struct {
	settle func() // of the place

	mu    sync.Mutex // guards what follows
	isCut bool
	conns []net.Conn
}

// onLine returns a client behind a line.
func onLine(t *testing.T, s place, opts ...leased.Option) (*leased.Client, *line) {
	t.Helper()
	rdb, l := s.lineOf(t)
	return clientOn(t, s, rdb, opts...), l
}

// lineOf returns a Redis client behind a line.
func (s place) lineOf(t *testing.T, change ...func(*redis.Options)) (*redis.Client, *line) {
	t.Helper()
	l := &line{settle: s.settle}
	return s.connect(t, append(change, func(o *redis.Options) {
		direct := o.Dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.isCut {
				return nil, errCut
			}
			conn, err := direct(ctx, network, addr)
			if err == nil {
				l.conns = append(l.conns, conn)
			}
			return conn, err
		}
	})...), l
}

func (l *line) cut() {
	l.settle()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = true
	for _, conn := range slices.Backward(l.conns) {
		conn.Close()
	}
	l.conns = nil
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = false
}

// roomy is a connection whose writes never wait for the reader, as a socket's
// seldom do. On a bare pipe, a large pipeline and its replies wait for each other.
type roomy struct {
	net.Conn
	out  chan []byte
	quit context.CancelFunc
}

func onRoomyLines(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn {
		open, quit := context.WithCancel(context.Background())
		c := &roomy{conn, make(chan []byte, 100), quit}
		go func() { // owned by the connection and ended by Close
			for {
				select {
				case p := <-c.out:
					_, _ = conn.Write(p)
				case <-open.Done():
					return
				}
			}
		}()
		return c
	})
}

func (c *roomy) Write(p []byte) (int, error) {
	c.out <- bytes.Clone(p)
	return len(p), nil
}

func (c *roomy) Close() error {
	c.quit()
	return c.Conn.Close()
}

// wards makes connections of which the subscribed ones can become half-open: the server
// takes them for alive, and nothing arrives.
type wards struct{ frozen atomic.Int64 } // how many generations

type ward struct {
	net.Conn
	all     *wards
	born    int64
	listens atomic.Bool
}

func (w *wards) change(o *redis.Options) {
	wrapConns(o, func(conn net.Conn) net.Conn {
		return &ward{Conn: conn, all: w, born: w.frozen.Load()}
	})
}

func (c *ward) Write(p []byte) (int, error) {
	if subscribes(p) {
		c.listens.Store(true)
	}
	return c.Conn.Write(p)
}

// Read discards what arrives, so that the server does not block.
func (c *ward) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.listens.Load() || c.all.frozen.Load() == c.born {
			return n, err
		}
	}
}
