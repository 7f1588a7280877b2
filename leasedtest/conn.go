package leasedtest

import (
	"bytes"
	"net"
	"strconv"
	"syscall"

	"github.com/leasedmutex/leased/internal/memconn"
)

// conn is a client's end of a connection. Messages can be lost on it, and the server's
// clock follows what is written.
type conn struct {
	net.Conn
	server *Server

	// What was read and is not a whole frame yet, and what can be returned. Only Read uses
	// them, which go-redis calls from one goroutine at a time.
	partial, ready []byte
}

// dial connects a client. A server that was stopped is noticed by the first command: a
// pool that fails to dial as often as it has places tries on in the background, and waits
// for nobody when it is closed, which no bubble of testing/synctest survives.
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

// Read returns whole messages, so that it can leave some out. After an error, such as the
// deadline's, it continues where it was.
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
// is to.
func (c *conn) sort() {
	for {
		size := replySize(c.partial)
		if size == 0 {
			return // the rest of it comes
		}
		if c.server.dropping.Load() == 0 || !bytes.HasPrefix(c.partial, message) {
			c.ready = append(c.ready, c.partial[:size]...)
		}
		c.partial = c.partial[size:]
	}
}

// message is how a published message begins in RESP3, which go-redis asks for.
var message = []byte(">3\r\n$7\r\nmessage\r\n")

// replySize returns the length of the first reply in b, 0 if b does not have all of it.
func replySize(b []byte) int {
	at := 0
	for replies := 1; replies > 0; replies-- {
		line := bytes.IndexByte(b[at:], '\n')
		if line < 0 {
			return 0
		}
		n, _ := strconv.Atoi(string(bytes.TrimSpace(b[at+1 : at+line]))) // -1 for what is nil
		n = max(n, 0)
		kind, text := b[at], n > 0 || bytes.Equal(b[at+1:at+line], []byte("0\r"))
		at += line + 1
		switch kind {
		case '$', '=', '!': // text of that length
			if text {
				at += n + len("\r\n")
			}
		case '*', '~', '>': // that many replies
			replies += n
		case '%', '|': // that many pairs
			replies += 2 * n
		}
		if at > len(b) {
			return 0
		}
	}
	return at
}

// refused is a connection to a server that is not there.
type refused struct{ net.Conn }

var errRefused = &net.OpError{Op: "dial", Net: "leasedtest", Err: syscall.ECONNREFUSED}

func (refused) Read([]byte) (int, error)  { return 0, errRefused }
func (refused) Write([]byte) (int, error) { return 0, errRefused }
