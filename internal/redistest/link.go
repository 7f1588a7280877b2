package redistest

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// link is one client's connection through a [Proxy], together with the proxy's connection
// to the server.
type link struct {
	client net.Conn
	gone   chan struct{} // closed once nothing of the link is left
	mute   bool          // SUBSCRIBE is refused

	// mu guards the fields below. The lock order is Proxy.mu, link.mu.
	mu     sync.Mutex
	fault  fault
	server net.Conn // nil until dialed
	hears  bool     // the client has subscribed
	left   bool     // the client's end is closed
	closed bool     // both ends are closed, or will be as soon as they exist
}

func newLink(client net.Conn, f fault, mute bool) *link {
	return &link{client: client, gone: make(chan struct{}), fault: f, mute: mute}
}

func (l *link) subscribed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hears
}

// subscribes reports whether the client's request is a subscription. go-redis sends the
// command on its own, after its handshake was answered.
func subscribes(request []byte) bool {
	return bytes.HasPrefix(request, []byte("*")) && bytes.Contains(request[:min(len(request), 32)], []byte("\r\n$9\r\nsubscribe\r\n"))
}

// inject gives the link a fault. A link in a black hole stays there when told only to drop replies.
func (l *link) inject(f fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = max(l.fault, f)
}

func (l *link) has(f fault) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fault >= f
}

func (l *link) clientGone() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left || l.closed
}

// run returns when both ends are closed. If the link starts in a black hole, it has no
// server's end, because no packet would have reached the server.
func (l *link) run(target string) {
	if l.has(blackHole) {
		l.passRequests(nil)
		l.close()
		return
	}
	server, err := net.DialTimeout("tcp", target, time.Second)
	if err != nil || !l.attach(server) {
		l.close()
		return
	}
	var replies sync.WaitGroup
	// Owned by l, ended by the closing of the server's end, waited for just below.
	replies.Go(func() { l.passReplies(server) })
	l.passRequests(server)
	replies.Wait()
	l.close()
}

// attach reports false if Cut came before the dialing was done.
func (l *link) attach(server net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.server = server
	if l.closed {
		_ = server.Close()
	}
	return !l.closed
}

func (l *link) passRequests(server net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := l.client.Read(buf)
		switch {
		case err != nil && l.has(blackHole):
			l.leave()
			return
		case err != nil:
			l.close()
			return
		case l.has(blackHole):
		case subscribes(buf[:n]) && l.mute:
			_, _ = l.client.Write([]byte("-ERR unknown command 'subscribe'\r\n"))
		default:
			if subscribes(buf[:n]) {
				l.mu.Lock()
				l.hears = true
				l.mu.Unlock()
			}
			// What a dead server does not take is lost; passReplies notices its end.
			_, _ = server.Write(buf[:n])
		}
	}
}

func (l *link) passReplies(server net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := server.Read(buf)
		switch {
		case err != nil && l.has(blackHole):
			return // the client is not told, and closes its end some day
		case err != nil:
			l.close()
			return
		case l.has(dropReplies):
		default:
			_, _ = l.client.Write(buf[:n]) // a write that fails is noticed by passRequests
		}
	}
}

// leave closes the client's end without the server noticing.
func (l *link) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = true
	_ = l.client.Close()
}

// closeOrphan closes the server's end if the client has left.
func (l *link) closeOrphan() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left {
		l.closeLocked()
	}
}

func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closeLocked()
}

func (l *link) closeLocked() {
	l.closed = true
	_ = l.client.Close()
	if l.server != nil {
		_ = l.server.Close()
	}
}
