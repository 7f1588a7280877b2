// Package memconn makes in-memory connections buffer and report errors as sockets do.
package memconn

import (
	"net"
	"sync"
)

// Buffered returns conn, which is one end of a net.Pipe, with a buffer for what was written
// but not read yet. Without the buffer, the writer of a long pipeline and the writer of the
// answers to its first commands would wait for each other.
func Buffered(conn net.Conn) net.Conn { return &buffered{Conn: conn} }

type buffered struct {
	net.Conn

	mu      sync.Mutex // guards the fields below
	written []byte     // not sent yet
	sending bool
	err     error // the error of a send
	closed  bool
}

// Read tells, as a socket does, when this end was closed and not the other one: by net.ErrClosed.
func (b *buffered) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	if err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.closed {
			err = net.ErrClosed
		}
	}
	return n, err
}

func (b *buffered) Close() error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	return b.Conn.Close()
}

func (b *buffered) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return 0, net.ErrClosed
	}
	if b.err != nil {
		return 0, b.err
	}
	b.written = append(b.written, p...)
	if !b.sending {
		b.sending = true
		go b.send()
	}
	return len(p), nil
}

// send is owned by the connection. It ends when everything has been sent or when the
// connection is closed. Nobody waits for it.
func (b *buffered) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.written) > 0 && b.err == nil {
		p := b.written
		b.written = nil
		b.mu.Unlock()
		_, err := b.Conn.Write(p)
		b.mu.Lock()
		b.err = err
	}
	b.sending = false
}
