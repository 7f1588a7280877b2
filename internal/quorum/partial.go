package quorum

// Grants that are no majority. They are given back to their servers if others wait behind them,
// so that clients that hold some servers each do not wait for each other for ever.

import (
	"maps"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A grant that is no majority is given back after a while if others wait behind it. The first
// of these, by their tickets, gets it; if that is the request itself, it may be asked to give
// it back again only after twice as long.
const (
	patience        = 2 * time.Millisecond
	longestPatience = time.Second
)

// plan has partial grants looked at, if there are some that may have to be given back.
func (l *Lock) plan(r *request, now time.Time) {
	for i := range r.parts {
		if !l.blocks(r, i) {
			continue
		}
		at := r.parts[i].since.Add(r.parts[i].patience())
		if at.Before(now) {
			at = now
		}
		l.dueBy(at)
	}
}

func (l *Lock) dueBy(at time.Time) {
	if l.dueAt.IsZero() || at.Before(l.dueAt) {
		l.dueAt = at
	}
}

// forgetLater has a request forgotten whose release or cancel failed, if the state machine
// does not succeed in cancelling it before it gives up.
func (l *Lock) forgetLater(r *request, now time.Time) {
	if r.until.IsZero() {
		r.until = now.Add(max(r.who.TTL, time.Minute))
	}
	l.dueBy(r.until)
}

func (p *part) patience() time.Duration {
	return min(patience<<min(p.regrants, 20), longestPatience)
}

// blocks reports whether others wait behind a grant that is no majority, while the request
// waits for other servers. Without an end to that, clients that hold some each would wait for
// each other. It comes to an end because all servers prefer the smallest ticket.
func (l *Lock) blocks(r *request, i int) bool {
	p := &r.parts[i]
	if r.over || r.token != 0 || p.state != owned || !p.more || p.asking || p.adopts {
		return false
	}
	return slices.ContainsFunc(r.parts, func(q part) bool { return q.state == queued })
}

// Tick is the event that Due has come.
func (l *Lock) Tick(now time.Time, fx *Effects) {
	if l.dueAt.IsZero() || now.Before(l.dueAt) {
		return
	}
	l.dueAt = time.Time{}
	for _, id := range slices.Sorted(maps.Keys(l.reqs)) {
		r := l.reqs[id]
		if !r.until.IsZero() && r.op == nil {
			if !now.Before(r.until) {
				l.drop(r, now, fx)
			} else {
				l.dueBy(r.until)
			}
			continue
		}
		if r.op != nil && r.op.verb != protocol.Acquire {
			continue
		}
		for i := range r.parts {
			if p := &r.parts[i]; l.blocks(r, i) && now.Sub(p.since) >= p.patience() {
				l.giveBack(r, i, now, fx)
			}
		}
		l.plan(r, now)
	}
}

// giveBack gives a partial grant to the next in its server's queue, and queues behind it.
func (l *Lock) giveBack(r *request, i int, now time.Time, fx *Effects) {
	p := &r.parts[i]
	if !p.unsure {
		l.remember(p.id, i, now)
	}
	old, young, regrants, anews := p.id, p.young, p.regrants+1, p.anews
	*p = part{id: l.newID(r, i), young: young, state: asked, proved: now, asking: true, regrants: regrants, anews: anews}
	l.forgetPart(old, r)
	l.parts[p.id] = r
	l.send(&Send{Server: i, Kind: Do, req: r, next: r,
		Cmd: protocol.Command{Verb: protocol.Yield, ID: old, Next: p.id, At: now, Ticket: r.ticket}}, fx)
}
