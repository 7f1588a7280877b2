package redistest

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy passes TCP connections on to a server, and loses what it is told to lose.
// Its methods are safe for concurrent use.
//
// What was written to a socket before a call may still arrive after it: a proxy is
// exact about connections, not about single bytes.
//
//	          requests    replies     ends of connections
//	(healed)  pass        pass        pass
//	DropReplies pass      lost        pass
//	BlackHole lost        lost        lost: the server goes on counting a client
//	                                  that is gone, as it does with a pulled cable
//
// It is also a fixed name for servers that take each other's place: a virtual IP, a
// Kubernetes Service, a proxy of an operator. See Lead.
type Proxy struct {
	// Addr is "127.0.0.1:port", the same over Refuse and Accept.
	Addr string

	tb testing.TB

	// mu guards what follows. It is held while listening, never while dialling,
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

// fault is what the proxy does to a connection. A link that has one keeps it.
type fault int

const (
	noFault fault = iota
	dropReplies
	blackHole
)

// NewProxy listens on a free loopback port and passes on to target. In tb's cleanup
// all connections are cut and all goroutines waited for.
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

// BlackHole swallows everything in both directions, on present and on new
// connections, which are still accepted. Nobody is told that a peer has gone.
func (p *Proxy) BlackHole() { p.inject(blackHole) }

// DropReplies lets requests through, on present and on new connections, and
// swallows what the server says: commands are carried out and look lost.
func (p *Proxy) DropReplies() { p.inject(dropReplies) }

// Heal makes new connections work. Those that have a fault keep it until their
// peer closes them or Cut does: a stream that lost bytes is of no use. What a
// black hole kept of connections whose client has gone is closed.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = noFault
	for l := range p.links {
		l.closeOrphan()
	}
}

// Cut closes all connections, at both ends, and returns when nothing of them is
// left. New ones meet the fault in force.
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
	// KeepNone cuts all, as the end of a server or of a proxy does.
	KeepNone Keep = iota
	// KeepSubscriptions cuts what clients send commands through and keeps what they
	// have subscribed through. This is where a fixed name that leaves connections alone
	// ends: commands fail on the server of before and are sent again through new
	// connections, whereas a subscription never fails.
	KeepSubscriptions
	// KeepAll leaves all connections to the server they have.
	KeepAll
)

// Lead has new connections reach another server, and returns when all that are not to
// be kept are closed.
func (p *Proxy) Lead(target string, keep Keep) {
	p.mu.Lock()
	p.target = target
	p.mu.Unlock()
	p.cut(func(l *link) bool { return keep == KeepNone || keep == KeepSubscriptions && !l.subscribed() })
}

// RefuseSubscriptions stands for a proxy that does not know SUBSCRIBE: on connections
// made from now on, that command is answered with an error, and all others pass.
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

// Refuse stops listening: dialling is refused, present connections go on.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// Accept listens again, on the same port, after Refuse.
func (p *Proxy) Accept() {
	p.tb.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		return
	}
	var l net.Listener
	var err error
	// Another test may be looking for a free port, and hold this one for a moment.
	for range 1000 {
		if l, err = net.Listen("tcp", p.Addr); err == nil {
			p.serveLocked(l)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	p.tb.Error(fmt.Errorf("redistest: proxy: %w", err))
}

// Conns is the number of client connections that neither side has closed.
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
	// Owned by p, ended by the close of l, waited for by close.
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

// admit starts a link for a client that l accepted. One that was accepted while
// Refuse closed l is turned away.
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
