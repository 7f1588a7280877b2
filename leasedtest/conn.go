package leasedtest

import (
	"bytes"
	"net"
	"strconv"
	"syscall"

	"github.com/leasedmutex/leased/internal/memconn"
)

// conn is a client's end of a connection. It can lose messages, and sets the server's clock
// when the client writes.
type conn struct {
	net.Conn
	server *Server

	// What was read but is not a whole frame yet, and what can be returned. They are used
	// only by Read, which go-redis calls from one goroutine at a time.
	partial, ready []byte
}

// dial connects a client. If the server was stopped, dial does not fail; the first command
// notices. The reason is that a pool that has failed to dial as often as it has places
// keeps trying in the background and does not wait for that when it is closed, which no
// bubble of testing/synctest survives.
func (s *Server) dial() (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped > 0 {
		here, _ := net.Pipe()
		return refused{here}, nil
	}
	inner, err := s.mini.Dial()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: memconn.Buffered(inner), server: s}
	s.conns[c] = struct{}{}
	return c, nil
}

func (c *conn) Close() error {
	c.server.mu.Lock()
	delete(c.server.conns, c)
	c.server.mu.Unlock()
	return c.Conn.Close()
}

func (c *conn) Write(p []byte) (int, error) {
	c.server.tick()
	return c.Conn.Write(p)
}

// Read returns whole messages only, so that it can leave some out. After an error, such as
// a deadline's, it continues where it stopped.
func (c *conn) Read(p []byte) (int, error) {
	for len(c.ready) == 0 {
		var chunk [4096]byte
		n, err := c.Conn.Read(chunk[:])
		c.partial = append(c.partial, chunk[:n]...)
		c.sort()
		if err != nil && len(c.ready) == 0 {
			return 0, err
		}
	}
	n := copy(p, c.ready)
	c.ready = c.ready[n:]
	return n, nil
}

// sort moves whole replies and messages from partial to ready, and drops messages if it
// should.
func (c *conn) sort() {
	for {
		size := replySize(c.partial)
		if size == 0 {
			return // the rest is still to come
		}
		if c.server.dropping.Load() == 0 || !bytes.HasPrefix(c.partial, message) {
			c.ready = append(c.ready, c.partial[:size]...)
		}
		c.partial = c.partial[size:]
	}
}

// message is how a published message begins in RESP3, the protocol that go-redis asks for.
var message = []byte(">3\r\n$7\r\nmessage\r\n")

// replySize returns the length of the first reply in b, or 0 if the reply is not complete.
func replySize(b []byte) int {
	at := 0
	for replies := 1; replies > 0; replies-- {
		line := bytes.IndexByte(b[at:], '\n')
		if line < 0 {
			return 0
		}
		n, _ := strconv.Atoi(string(bytes.TrimSpace(b[at+1 : at+line]))) // -1 for nil
		n = max(n, 0)
		kind, text := b[at], n > 0 || bytes.Equal(b[at+1:at+line], []byte("0\r"))
		at += line + 1
		switch kind {
		case '$', '=', '!': // text of n bytes
			if text {
				at += n + len("\r\n")
			}
		case '*', '~', '>': // n replies
			replies += n
		case '%', '|': // n pairs
			replies += 2 * n
		}
		if at > len(b) {
			return 0
		}
	}
	return at
}

// refused is a connection to a server that has been stopped.
type refused struct{ net.Conn }

var errRefused = &net.OpError{Op: "dial", Net: "leasedtest", Err: syscall.ECONNREFUSED}

func (refused) Read([]byte) (int, error)  { return 0, errRefused }
func (refused) Write([]byte) (int, error) { return 0, errRefused }
