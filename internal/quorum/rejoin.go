package quorum

// Requests that wait on a server whose messages may have been missed ask that server again.

import (
	"maps"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// askLater runs an op that was put off until its server had answered an earlier acquire.
func (l *Lock) askLater(op *Op, r *request, i int, now time.Time, fx *Effects) {
	switch p := &r.parts[i]; {
	case op == nil || r.dropped:
	case op.decided && r.isWaiting():
		l.lookAt(r, i, now, fx)
	case op.decided:
	case p.state == ending:
		op.notSent(i, errBusy)
		l.evaluate(op, now, fx)
	default:
		l.ask(op, r, i, fx)
		l.evaluate(op, now, fx) // if the server is away by now, nothing was sent
	}
}

// Rejoined is the event that the client's subscription to one server was confirmed again. Messages
// of that server may have been missed, so the requests that wait ask it, and it alone. The state
// machine is told what follows from the answers as if they were messages. An acquire that is under
// way may have been answered before the confirmation, so it is followed by another.
func (l *Lock) Rejoined(server int, now time.Time, fx *Effects) {
	for _, id := range slices.Sorted(maps.Keys(l.reqs)) {
		r := l.reqs[id]
		if !r.isWaiting() {
			continue
		}
		p := &r.parts[server]
		switch {
		case p.state == ending || p.adopting:
		case !p.asking:
			l.lookAt(r, server, now, fx)
		case p.askNext == nil:
			p.askNext = l.look(r, now)
		}
	}
}

// isWaiting reports whether the request waits: the state machine has asked for it, has not been told
// of a grant, and has not given the request up.
func (r *request) isWaiting() bool {
	if r.token != 0 || r.basis.IsZero() || r.downgradeOf != nil || !r.forgetAt.IsZero() {
		return false
	}
	if r.op == nil {
		return true
	}
	return r.op.verb == protocol.Acquire && r.op.cmd.Wait || r.op.verb == protocol.Yield && r.op.next == r
}

// lookAt asks a server for a request again, unless it is being asked.
func (l *Lock) lookAt(r *request, i int, now time.Time, fx *Effects) {
	p := &r.parts[i]
	if !p.asking {
		l.ask(l.look(r, now), r, i, fx)
		p.unprompted = p.asking
	}
}

// look returns an op that asks a server for a request again, as a renewal would. Nobody waits for
// its decision.
func (l *Lock) look(r *request, now time.Time) *Op {
	op := l.newOp(Renew, protocol.None, r, now, now)
	op.decided = true
	return op
}

// putOff drops the op that was to ask the part's server later; it is decided without this server.
func (p *part) putOff(i int) {
	if p.askNext != nil {
		p.askNext.notSent(i, errBusy)
		p.askNext = nil
	}
}
