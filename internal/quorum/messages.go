package quorum

// Messages of the servers, and what follows from them.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Receive is the event of a message from a server.
func (l *Lock) Receive(server int, m *protocol.Message, now time.Time, fx *Effects) {
	r := l.parts[m.ID]
	var p *part
	if r != nil {
		p = &r.parts[server]
		if p.id != m.ID && (m.Kind != protocol.MessageRevoked || p.lostID != m.ID) {
			p = nil
		}
	}
	if p == nil {
		if (m.Kind == protocol.MessageGranted || m.Kind == protocol.MessageWanted) && !l.crossed(m.ID, server, now) {
			who, _ := protocol.ParseID(m.ID)
			fx.Strays = append(fx.Strays, Stray{Server: server, Keys: l.keys, ID: m.ID, TTL: who.TTL})
		}
		return
	}
	if m.Kind == protocol.MessageRevoked {
		l.revoked(r, p, m, now, fx)
		return
	}
	if p.state == ending || p.ended && !p.asking { // an acquire under way may place it there again
		return
	}
	switch m.Kind {
	case protocol.MessageGranted:
		if p.state == owned || m.Token <= max(p.floor, p.evicted) || p.proved.IsZero() {
			return
		}
		a := &protocol.Answer{Token: m.Token, Clock: m.Clock, More: m.More}
		r.own(p, a, p.proved, now, false)
		p.quarantineUnknown = p.asking || p.mayArrive
		if m.Link != nil { // kept, because the state machine may be told only after a further answer
			r.link = m.Link
		}
		l.review(r, now, fx)
	case protocol.MessageWanted:
		if p.state != owned { // the server says that we are the owner: the message "granted" was lost
			pass(r, m, fx)
			return
		}
		p.more = true
		if r.token == 0 {
			l.plan(r, now)
		} else {
			pass(r, m, fx)
		}
	case protocol.MessageUnwanted:
		p.more = false
		if p.state == owned && r.token != 0 && !l.moreWait(r) { // else a server has yet to say so
			pass(r, m, fx)
		}
	case protocol.MessageEnds:
		pass(r, m, fx)
	}
}

// moreWait reports whether others wait on a server that can still say that they gave up.
func (l *Lock) moreWait(r *request) bool {
	for i := range r.parts {
		if p := &r.parts[i]; p.state == owned && p.more && !l.cfg.Away(i) {
			return true
		}
	}
	return false
}

// revoked takes a server's message that an operator has evicted a part. It may be about a grant that
// the server seems to have lost with its data, and come only when the part has another grant, or id.
func (l *Lock) revoked(r *request, p *part, m *protocol.Message, now time.Time, fx *Effects) {
	if p.id == m.ID {
		if p.state == ending {
			return
		}
		p.evicted, r.evicted = max(p.evicted, m.Token), true
		if p.state == owned && (m.Token == 0 || m.Token >= p.token) {
			p.state, p.ended = absent, true
			p.brokeOff()
		}
	}
	if p.lostToken != 0 && (m.Token == 0 || m.Token >= p.lostToken) { // not by a restart, or before it
		r.evicted = true
		p.brokeOff()
	}
	l.heed(r, now, fx)
}

// heed ends a lease that an operator has evicted on some servers if the others are no majority that
// may have kept it. A server that has granted it since a majority was last known to have kept it may
// have had another owner in between. Where a renewal was the first to say that the lease is gone, the
// answer to the acquire that follows decides, because the server may only have lost its data.
func (l *Lock) heed(r *request, now time.Time, fx *Effects) {
	if !r.evicted || r.token == 0 || r.dropped || r.leaves() {
		return
	}
	n := 0
	for i := range r.parts {
		if p := &r.parts[i]; (p.stands(now) && p.lasts(r, now) || p.lost && p.asking) && !p.broken && !r.gained(i) {
			n++
		}
	}
	if n < l.cfg.need() {
		if !r.evictionTold {
			r.evictionTold = true
			fx.Messages = append(fx.Messages, protocol.Message{Kind: protocol.MessageRevoked, ID: r.id, Key: l.keys.Lock, Token: r.token})
		}
		if r.op == nil { // else the state machine needs the request for the answer, and looks again when that comes
			l.retreat(r, fx)
			l.drop(r, now, fx)
		}
	}
}

// leaves reports whether the state machine gives the lease back, has lost it, or has it downgraded. Then
// parts are not owned because of that, and the servers' answers decide whether the lease was kept.
func (r *request) leaves() bool {
	return !r.forgetAt.IsZero() || r.op != nil && r.op.verb != protocol.Acquire
}

// pass passes a message to the state machine, under the id that the state machine knows.
func pass(r *request, m *protocol.Message, fx *Effects) {
	copied := *m
	copied.ID = r.id
	fx.Messages = append(fx.Messages, copied)
}
