package redistest

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy forwards TCP connections to a server, and loses what it is told to lose.
// Its methods are safe for concurrent use.
//
// Bytes written to a socket before a method call may still arrive after it: a proxy is
// exact about connections, not about single bytes.
//
//	          requests    replies     ends of connections
//	(healed)  pass        pass        pass
//	DropReplies pass      lost        pass
//	BlackHole lost        lost        lost: the server goes on counting a client
//	                                  that is gone, as it does with a pulled cable
//
// It can also serve as a fixed address for servers that take each other's place, like a
// virtual IP, a Kubernetes Service or an operator's proxy. See Lead.
type Proxy struct {
	// Addr is "127.0.0.1:port". It stays the same across Refuse and Accept.
	Addr string

	tb testing.TB

	// mu guards the fields below. It is held while starting to listen, never while dialing,
	// reading or writing.
	mu       sync.Mutex
	target   string // of new connections
	fault    fault
	mute     bool         // new connections cannot subscribe
	listener net.Listener // nil while refusing
	links    map[*link]struct{}

	// running counts the goroutines of the listener and of all links.
	running sync.WaitGroup
}

// fault is what the proxy does to a connection. A link never gets rid of its fault.
type fault int

const (
	noFault fault = iota
	dropReplies
	blackHole
)

// NewProxy listens on a free loopback port and forwards connections to target. In tb's
// cleanup it cuts all connections and waits for all goroutines.
func NewProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	l, err := listen()
	if err != nil {
		tb.Fatalf("redistest: proxy: %v", err)
	}
	p := &Proxy{Addr: l.Addr().String(), target: target, tb: tb, links: map[*link]struct{}{}}
	p.mu.Lock()
	p.serveLocked(l)
	p.mu.Unlock()
	tb.Cleanup(p.close)
	return p
}

// BlackHole swallows everything in both directions, on existing and new connections; it
// still accepts new ones. Neither end is told that its peer has gone.
func (p *Proxy) BlackHole() { p.inject(blackHole) }

// DropReplies lets requests through, on existing and new connections, and swallows the
// replies: commands are executed, but look lost to the client.
func (p *Proxy) DropReplies() { p.inject(dropReplies) }

// Heal makes new connections work. Those that have a fault keep it until their peer
// closes them or Cut does, because a stream that has lost bytes is of no use. Server-side
// connections that a black hole has kept open although their client has gone are closed.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = noFault
	for l := range p.links {
		l.closeOrphan()
	}
}

// Cut closes all connections, at both ends, and returns when nothing of them is left.
// New connections get the current fault.
func (p *Proxy) Cut() { p.cut(func(*link) bool { return true }) }

func (p *Proxy) cut(which func(*link) bool) {
	p.mu.Lock()
	var cut []*link
	for l := range p.links {
		if which(l) {
			cut = append(cut, l)
		}
	}
	p.mu.Unlock()
	for _, l := range cut {
		l.close()
		<-l.gone
	}
}

// Keep says which connections outlive a change of the server behind a [Proxy].
type Keep int

const (
	// KeepNone cuts all connections, as the end of a server or of a proxy does.
	KeepNone Keep = iota
	// KeepSubscriptions cuts the connections through which clients send commands, and keeps
	// those through which they have subscribed. A fixed address that leaves connections alone
	// ends up in this state: commands fail on the previous server and are retried on new
	// connections, whereas a subscription never fails.
	KeepSubscriptions
	// KeepAll leaves all connections on their present server.
	KeepAll
)

// Lead directs new connections to another server. It returns when all connections that are
// not to be kept are closed.
func (p *Proxy) Lead(target string, keep Keep) {
	p.mu.Lock()
	p.target = target
	p.mu.Unlock()
	p.cut(func(l *link) bool { return keep == KeepNone || keep == KeepSubscriptions && !l.subscribed() })
}

// RefuseSubscriptions imitates a proxy that does not know SUBSCRIBE: on connections made
// from now on, it answers that command with an error and lets all others pass.
func (p *Proxy) RefuseSubscriptions() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = true
}

// AllowSubscriptions ends RefuseSubscriptions, for connections made from now on.
func (p *Proxy) AllowSubscriptions() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = false
}

// Refuse stops listening: new connections are refused, existing ones continue.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// Accept listens again after Refuse, on the same port.
func (p *Proxy) Accept() {
	p.tb.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		return
	}
	var l net.Listener
	var err error
	// Another test that looks for a free port may hold this one for a moment.
	for range 1000 {
		if l, err = net.Listen("tcp", p.Addr); err == nil {
			p.serveLocked(l)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	p.tb.Error(fmt.Errorf("redistest: proxy: %w", err))
}

// Conns returns the number of client connections that neither side has closed.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.links {
		if !l.clientGone() {
			n++
		}
	}
	return n
}

func (p *Proxy) inject(f fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
	for l := range p.links {
		l.inject(f)
	}
}

func (p *Proxy) serveLocked(l net.Listener) {
	p.listener = l
	// Owned by p, ended by the closing of l, waited for by close.
	p.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.admit(c, l)
		}
	})
}

// admit starts a link for a client that l accepted. If Refuse has closed l meanwhile, the
// connection is closed.
func (p *Proxy) admit(c net.Conn, l net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != l {
		_ = c.Close()
		return
	}
	k, target := newLink(c, p.fault, p.mute), p.target
	p.links[k] = struct{}{}
	// Owned by p, ended by either peer or by Cut, waited for by close.
	p.running.Go(func() {
		k.run(target)
		p.mu.Lock()
		delete(p.links, k)
		p.mu.Unlock()
		close(k.gone)
	})
}

func (p *Proxy) close() {
	p.Refuse()
	p.Cut()
	p.running.Wait()
}
