package leased_test

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// roomy is a connection whose writes never wait for the reader, as a socket's
// seldom do. On a bare pipe, a large pipeline and its replies wait for each other.
type roomy struct {
	net.Conn
	out  chan []byte
	quit context.CancelFunc
}

func onRoomyLines(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		if err != nil {
			return nil, err
		}
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
		return c, nil
	}
}

func (c *roomy) Write(p []byte) (int, error) {
	c.out <- bytes.Clone(p)
	return len(p), nil
}

func (c *roomy) Close() error {
	c.quit()
	return c.Conn.Close()
}

// wards are connections of which those that listen to messages can go half-open:
// the server thinks them alive, and nothing arrives.
type wards struct{ frozen atomic.Int64 } // how many generations

type ward struct {
	net.Conn
	all     *wards
	born    int64
	listens atomic.Bool
}

func (w *wards) change(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := direct(ctx, network, addr)
		return &ward{Conn: conn, all: w, born: w.frozen.Load()}, err
	}
}

func (c *ward) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) {
		c.listens.Store(true)
	}
	return c.Conn.Write(p)
}

// Read swallows what arrives, so that the server is not held up.
func (c *ward) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.listens.Load() || c.all.frozen.Load() == c.born {
			return n, err
		}
	}
}
