package quorum

// What waits at a server whose messages may have been missed asks that server again.

import (
	"maps"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// askLater asks a server for what was put off until it had answered.
func (l *Lock) askLater(op *Op, r *request, i int, now time.Time, fx *Effects) {
	switch p := &r.parts[i]; {
	case op == nil || r.over:
	case op.decided && r.isWaiting():
		l.lookAt(r, i, now, fx)
	case op.decided:
	case p.state == ending:
		op.away(i, errBusy)
		l.evaluate(op, now, fx)
	default:
		l.ask(op, r, i, fx)
		l.evaluate(op, now, fx) // the server may be away by now
	}
}

// Rejoined is the event that the client's subscription at one server was confirmed again. Messages
// of that server may have been missed, so what waits there asks it, and it alone; the state
// machine is told what follows from the answers, as if they were messages. What is asked already
// may be answered as things were before, and is asked for once more then.
func (l *Lock) Rejoined(server int, now time.Time, fx *Effects) {
	for _, id := range slices.Sorted(maps.Keys(l.reqs)) {
		r := l.reqs[id]
		if !r.isWaiting() {
			continue
		}
		p := &r.parts[server]
		switch {
		case p.state == ending || p.adopts:
		case !p.asking:
			l.lookAt(r, server, now, fx)
		case p.later == nil:
			p.later = l.look(r, now)
		}
	}
}

// isWaiting reports whether the state machine has asked for a request that it wants to wait, and
// has not been told that it is granted, nor has given it up.
func (r *request) isWaiting() bool {
	if r.token != 0 || r.basis.IsZero() || r.lowers || !r.until.IsZero() {
		return false
	}
	if r.op == nil {
		return true
	}
	return r.op.verb == protocol.Acquire && r.op.cmd.Wait || r.op.verb == protocol.Yield && r.op.next == r
}

func (l *Lock) lookAt(r *request, i int, now time.Time, fx *Effects) {
	p := &r.parts[i]
	if !p.asking {
		l.ask(l.look(r, now), r, i, fx)
		p.looks = p.asking
	}
}

// look returns an op by which a server is asked for a request again, as a renewal would. Nobody
// waits for it.
func (l *Lock) look(r *request, now time.Time) *Op {
	op := l.newOp(Renew, protocol.None, r, now, now)
	op.decided = true
	return op
}

// putOff has what was to ask the part's server later do without it.
func (p *part) putOff(i int) {
	if p.later != nil {
		p.later.away(i, errBusy)
		p.later = nil
	}
}
