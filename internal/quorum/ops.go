package quorum

// The commands of the state machine. Each becomes commands for the servers. answers.go notes their
// answers, and decide.go determines when they are enough.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Op is a command, a cancel or a renewal of the state machine that awaits its decision. Its
// results are set once the Op is in Effects.Done.
type Op struct {
	Answer   protocol.Answer
	Canceled protocol.Canceled
	Renewed  protocol.Outcome
	Clock    uint64
	Err      error // why nothing could be decided, else nil

	Tag any // the caller's

	kind       Kind
	verb       protocol.Verb
	cmd        protocol.Command
	at         time.Time
	req, next  *request
	outcomes   []outcome // by server: what the server said to the command
	before     []before  // by server, nil unless held
	olds       []outcome // yield, downgrade: by server: whether the old request owned there
	held       bool      // the request had been granted before
	fails      []*protocol.Failure
	handed     int
	unfinished bool
	proved     bool // release: see request.doubted
	decided    bool
	expired    bool
	sending    bool // its commands are still being sent, so it is not decided yet
}

// before is what a part of a held request was when an op about it began.
type before struct {
	stood  bool // the request owned there, as far as was known
	owned  bool // the part was owned, else others may still have owned there
	breaks int  // the part's
}

type outcome uint8

const (
	outcomePending   outcome = iota
	outcomeYes               // granted, renewed, released or canceled as its owner
	outcomeUnproved          // released as its owner, but perhaps granted anew before; see request.doubted
	outcomeNo                // any other answer
	outcomeLost              // not the owner, or granted anew, although it was ours
	outcomeRestarted         // the server has restarted without its data, whatever it answered
	outcomeOvertaken         // the answer is older than what is known
	outcomeFailed            // no answer
	outcomeSkipped           // the server was not asked, because there is nothing to ask it
)

// newOp returns an op about r. at is when its command was decided on. If r holds the lease, the op notes on
// which servers it stands before any of them has answered.
func (l *Lock) newOp(kind Kind, verb protocol.Verb, r *request, at, now time.Time) *Op {
	op := &Op{kind: kind, verb: verb, req: r, at: at, held: r != nil && r.token != 0,
		outcomes: make([]outcome, l.cfg.N), fails: make([]*protocol.Failure, l.cfg.N), sending: true}
	if op.held {
		op.before = make([]before, l.cfg.N)
		for i := range r.parts {
			p := &r.parts[i]
			// If lost, the answer under way decides.
			op.before[i] = before{stood: p.stands(now) || p.lost, owned: p.state == owned, breaks: p.breaks}
		}
	}
	return op
}

// Decided reports whether the op's results are set.
func (op *Op) Decided() bool { return op.decided }

// awaits reports whether the op, which is not decided, waits for an answer of server i.
func (op *Op) awaits(i int) bool {
	asks := op.req
	if op.next != nil {
		asks = op.next
	}
	return op.outcomes[i] == outcomePending || op.olds != nil && op.olds[i] == outcomePending || asks.parts[i].adopting
}

// settle notes the outcome on a server, unless there is one already.
func (op *Op) settle(i int, o outcome) {
	if op.outcomes[i] == outcomePending {
		op.outcomes[i] = o
	}
}

// settleGiven notes whether the request owned on a server until it was given back there.
func (op *Op) settleGiven(i int, o outcome) {
	if op.olds != nil {
		op.settleOld(i, o)
		return
	}
	op.settle(i, o)
}

// settleOld does the same for the old request of a yield or downgrade, if there is one.
func (op *Op) settleOld(i int, o outcome) {
	if op.olds != nil && op.olds[i] == outcomePending {
		op.olds[i] = o
	}
}

// fail notes why a server did not answer.
func (op *Op) fail(i int, f *protocol.Failure) { op.fails[i] = f }

// notSent settles the op on a server to which nothing is sent: it is away, or an earlier command has no
// answer yet.
func (op *Op) notSent(i int, why error) {
	op.fail(i, &protocol.Failure{Err: why, Kind: protocol.NeverSent})
	op.settle(i, outcomeFailed)
	op.settleOld(i, outcomeFailed)
}

// whyAway returns why a server is away.
func (l *Lock) whyAway(server int) error {
	if l.cfg.Why == nil {
		return errAway
	}
	return l.cfg.Why(server)
}

// Do is the event that the state machine sends a command.
func (l *Lock) Do(c *protocol.Command, now time.Time, fx *Effects) *Op {
	r := l.request(c.ID)
	if c.Verb == protocol.Acquire && !c.Question && r.token != 0 && !l.lasts(r, now) {
		// Nothing that is known of the grant, or is still said of it, helps the next one.
		r.last = max(r.last, c.Last)
		l.retreat(r, fx)
		l.drop(r, now, fx)
		r = l.request(c.ID)
	}
	op := l.newOp(Do, c.Verb, r, c.At, now)
	op.cmd = *c
	r.op = op
	switch c.Verb {
	case protocol.Acquire:
		if r.basis.IsZero() {
			r.basis = c.At
		}
		r.unbroken = r.unbroken && c.Question
		r.forgetAt, r.evictionTold = time.Time{}, false // the state machine did not believe that the lease was lost
		for i := range r.parts {
			r.parts[i].more = r.parts[i].more && !c.Question // the answers will say
			l.ask(op, r, i, fx)
		}
	case protocol.Release:
		r.last = max(r.last, c.Last)
		for i := range r.parts {
			l.release(op, i, now, fx)
		}
	default:
		r.last = max(r.last, c.Last)
		op.next = l.request(c.Next)
		op.next.op = op
		if c.Verb == protocol.Downgrade {
			r.downgradesTo, op.next.downgradeOf = op.next, r
			op.next.ticket = r.ticket // on a server that has to be won back, those behind the writer are behind the reader, too
			r.forgetAt, op.next.forgetAt = time.Time{}, time.Time{}
		}
		if op.next.basis.IsZero() {
			op.next.basis = c.At
		}
		op.olds = make([]outcome, l.cfg.N)
		for i := range r.parts {
			l.move(op, i, now, fx)
		}
	}
	op.sending = false
	l.evaluate(op, now, fx)
	return op
}

// lasts reports whether a majority of servers has granted the request and cannot have given the lock to
// others since, as far as is known.
func (l *Lock) lasts(r *request, now time.Time) bool {
	n := 0
	for i := range r.parts {
		if p := &r.parts[i]; p.stands(now) && p.lasts(r, now) {
			n++
		}
	}
	return n >= l.cfg.need()
}

// ask sends an acquire for a part.
func (l *Lock) ask(op *Op, r *request, i int, fx *Effects) {
	if l.cfg.Away(i) {
		op.notSent(i, l.whyAway(i))
		return
	}
	p := l.identify(r, i, fx)
	if p.asking && p.unprompted && (p.askNext == nil || p.askNext.decided) {
		p.askNext = op
		return
	}
	if p.asking {
		op.notSent(i, errBusy)
		return
	}
	if p.state == absent {
		p.state = asked
	}
	if p.proved.IsZero() {
		p.proved = op.at
	}
	p.asking, p.adoptFailed = true, false
	// A held request may be in the queue of a server that has another owner, and stays there if it is
	// refused.
	waits := op.cmd.Wait || op.kind == Renew || op.cmd.Verb != protocol.Acquire || r.token != 0
	question := p.state == owned && (op.cmd.Question || op.verb == protocol.Downgrade)
	c := protocol.Command{Verb: protocol.Acquire, ID: p.id, TTL: r.who.TTL, Wait: waits, First: !p.sent, Told: p.told, Place: op.cmd.Place, Question: question, At: op.at, Ticket: r.ticket}
	if own := l.reqs[op.cmd.Own]; op.cmd.Own != "" && own != nil {
		c.Own = own.parts[i].id
	}
	l.send(&Send{Server: i, Kind: Do, Cmd: c, Probes: op.cmd.Recheck, req: r, op: op}, fx)
}

// release sends a release for a part that is owned, and a cancel for one that may be.
func (l *Lock) release(op *Op, i int, now time.Time, fx *Effects) {
	r := op.req
	p := &r.parts[i]
	switch {
	case p.id == "" || !p.lostAndAsked() && (p.ended && !p.unasked() || p.state == absent && !p.asking && !p.unasked()):
		op.settle(i, outcomeSkipped)
	case l.cfg.Away(i):
		op.notSent(i, l.whyAway(i))
	case p.lostAndAsked():
		l.awaitLost(op, i, fx)
	case p.state == owned || p.unasked():
		l.withdraw(r, i)
		if (r.doubted || p.doubted) && p.inDoubt() {
			l.endDoubted(op, i, fx)
			return
		}
		p.state, p.ended = ending, false
		l.send(&Send{Server: i, Kind: Do, req: r, op: op, Cmd: protocol.Command{
			Verb: protocol.Release, ID: p.id, Last: p.lastFor(r), Link: op.cmd.Link, Cooldown: op.cmd.Cooldown, At: op.at}}, fx)
	default:
		if op.held && p.stands(now) && !p.broken {
			op.settle(i, outcomeRestarted) // the server lost its data, and its grants have not counted since
		}
		l.cancel(op, r, i, op.cmd.Link, op.cmd.Cooldown, fx)
		op.settle(i, outcomeNo)
	}
}

// awaitLost gives back a part that lostAndAsked reports. The op waits for the answer to the acquire,
// which a cancel follows in the lane.
func (l *Lock) awaitLost(op *Op, i int, fx *Effects) {
	p := &op.req.parts[i]
	p.waiting, p.ended = append(p.waiting, op), false
	l.sendCancel(nil, op.req, i, op.cmd.Link, op.cmd.Cooldown, fx)
}

// endDoubted gives back a part that is in doubt. It sends a cancel, because the answer to a cancel
// has the lock's last token from before the next owner: if that is our grant's, nobody else has
// owned the lock there.
func (l *Lock) endDoubted(op *Op, i int, fx *Effects) {
	l.cancel(op, op.req, i, op.cmd.Link, op.cmd.Cooldown, fx)
}

// cancel sends a cancel for a part, unless nothing about the part was sent to its server.
func (l *Lock) cancel(op *Op, r *request, i int, link *protocol.Span, cooldown time.Duration, fx *Effects) {
	p := &r.parts[i]
	if !l.withdraw(r, i) {
		p.state, p.ended = absent, true
		if op != nil {
			op.settle(i, outcomeNo)
		}
		return
	}
	l.sendCancel(op, r, i, link, cooldown, fx)
}

// sendCancel is cancel for a part whose acquire is not withdrawn, or was sent.
func (l *Lock) sendCancel(op *Op, r *request, i int, link *protocol.Span, cooldown time.Duration, fx *Effects) {
	p := &r.parts[i]
	proves := op != nil && (r.doubted || p.doubted)
	p.state = ending
	s := &Send{Server: i, Kind: Cancel, req: r, op: op,
		Cancel: protocol.CancelRequest{Keys: l.keys, ID: p.id, Last: p.lastFor(r), Link: link, Cooldown: cooldown, Prove: proves}}
	s.Cmd.ID = p.id
	l.send(s, fx)
}

// move sends a yield or a downgrade for a part that is owned. A part that is not owned is canceled, and an
// acquire of the new request is sent to its server. For a downgrade that is a question, and only if an earlier
// try has had the new request granted there: an acquire without answer would leave a doubt.
func (l *Lock) move(op *Op, i int, now time.Time, fx *Effects) {
	r := op.req
	p, q := &r.parts[i], &op.next.parts[i]
	if l.cfg.Away(i) {
		op.notSent(i, l.whyAway(i))
		return
	}
	if op.verb == protocol.Downgrade && p.state == ending && !p.ended { // the answer to the first try, or to a cancel, will tell
		op.notSent(i, errBusy)
		return
	}
	again := op.verb == protocol.Downgrade && p.state == asked && p.known != 0 && !p.ended && !p.asking // the first try had no answer
	unasked := op.verb == protocol.Yield && p.unasked()
	if p.lostAndAsked() || p.state != owned && !again && !unasked {
		switch {
		case p.lostAndAsked():
			l.awaitLost(op, i, fx)
		case op.held && p.stands(now) && !p.broken:
			op.settleOld(i, outcomeRestarted)
		default:
			op.settleOld(i, outcomeNo)
		}
		if p.id != "" && p.goesOn() && p.state != absent {
			l.cancel(nil, r, i, nil, op.cmd.Cooldown, fx)
		}
		if op.verb == protocol.Yield || q.state == owned {
			l.ask(op, op.next, i, fx)
		} else {
			op.settle(i, outcomeNo)
		}
		return
	}
	if op.verb == protocol.Yield && (r.doubted || p.doubted) && p.inDoubt() {
		l.endDoubted(op, i, fx)
		l.ask(op, op.next, i, fx)
		return
	}
	passes := op.verb == protocol.Downgrade && p.givenBack(r) == outcomeYes && !p.inDoubt()
	p.state, p.ended = ending, false
	q = l.identify(op.next, i, fx)
	q.passes = passes
	if q.proved.IsZero() {
		q.proved = op.at
	}
	if q.state == absent {
		q.state = asked
	}
	q.asking = true
	l.send(&Send{Server: i, Kind: Do, req: r, next: op.next, op: op, Cmd: protocol.Command{
		Verb: op.verb, ID: p.id, Next: q.id, Last: p.lastFor(r), Link: op.cmd.Link, Cooldown: op.cmd.Cooldown, At: op.at, Ticket: op.next.ticket}}, fx)
}

// CancelRequest is the event that the state machine cancels a request.
func (l *Lock) CancelRequest(g *protocol.CancelRequest, now time.Time, fx *Effects) *Op {
	r := l.reqs[g.ID]
	op := l.newOp(Cancel, protocol.None, r, now, now)
	if r == nil { // the request was never sent, or nothing is left to do
		op.decided = true
		fx.Done = append(fx.Done, op)
		return op
	}
	r.op = op
	r.last = max(r.last, g.Last)
	for i := range r.parts {
		p := &r.parts[i]
		switch {
		case p.confirmed, r.writerConfirmed(i):
			op.settle(i, outcomeYes)
		case p.restarted && p.ended, r.writerRestarted(i):
			op.settle(i, outcomeRestarted)
		case l.cfg.Away(i) && r.awaitsWriter(i):
			op.notSent(i, l.whyAway(i))
		case r.awaitsWriter(i):
			if r.downgradeOf.parts[i].state != ending {
				l.cancel(nil, r.downgradeOf, i, nil, 0, fx) // an earlier one had no answer, or was never sent
			}
			op.notSent(i, errBusy) // the answer will tell
		case p.id == "" || p.ended:
			op.settle(i, outcomeNo)
		case l.cfg.Away(i):
			op.notSent(i, l.whyAway(i))
		default:
			l.cancel(op, r, i, g.Link, g.Cooldown, fx)
		}
	}
	op.sending = false
	l.evaluate(op, now, fx)
	return op
}

// writerConfirmed reports whether the server has said that the request that is being downgraded to r was
// ours until it was canceled there. Then the downgrade was not carried out, and cannot be anymore.
func (r *request) writerConfirmed(server int) bool {
	return r.downgradeOf != nil && r.downgradeOf.parts[server].confirmed
}

// writerRestarted is writerConfirmed for a server that had lost its data by then.
func (r *request) writerRestarted(server int) bool {
	return r.downgradeOf != nil && r.downgradeOf.parts[server].restarted && r.downgradeOf.parts[server].ended
}

// awaitsWriter reports whether the server has yet to say what became there of the request that is being
// downgraded to r, which had owned there.
func (r *request) awaitsWriter(server int) bool {
	if r.downgradeOf == nil {
		return false
	}
	p := &r.downgradeOf.parts[server]
	return p.id != "" && p.known != 0 && !p.ended
}

// Renew is the event that the state machine renews a grant. An acquire is sent to the servers that
// have not granted the request, or have lost it.
func (l *Lock) Renew(b *protocol.Renewal, now time.Time, fx *Effects) *Op {
	r := l.reqs[b.Req.ID]
	op := l.newOp(Renew, protocol.None, r, b.At, now)
	if r == nil {
		op.decided, op.Renewed = true, protocol.NotOurs
		fx.Done = append(fx.Done, op)
		return op
	}
	r.forgetAt = time.Time{}
	for i := range r.parts {
		p := &r.parts[i]
		switch {
		case p.state == ending:
			op.settle(i, outcomeSkipped)
		case l.cfg.Away(i):
			op.notSent(i, l.whyAway(i))
		case p.state == owned:
			s := &Send{Server: i, Kind: Renew, req: r, op: op}
			s.Cmd.ID = p.id
			s.Renew = protocol.Renewal{Keys: l.keys, At: b.At, Touch: b.Touch,
				Req: protocol.Request{ID: p.id, Mode: r.who.Mode, TTL: r.who.TTL}}
			l.send(s, fx)
		case p.asking:
			p.waiting = append(p.waiting, op)
		case r.downgradesTo != nil: // the new request may own there
			op.settle(i, outcomeSkipped)
		default:
			l.ask(op, r, i, fx)
		}
	}
	op.sending = false
	l.evaluate(op, now, fx)
	return op
}

// Expire is the event that an op has waited long enough for its answers.
func (l *Lock) Expire(op *Op, now time.Time, fx *Effects) {
	op.expired = true
	for i := range op.outcomes {
		if op.awaits(i) && op.fails[i] == nil {
			op.fail(i, &protocol.Failure{Err: errAway, Kind: protocol.NoAnswer})
		}
		if op.held && op.req.parts[i].lost && (op.kind == Renew || op.verb == protocol.Acquire) {
			op.settle(i, outcomeLost)
		}
		op.settle(i, outcomeFailed)
		op.settleOld(i, outcomeFailed)
	}
	l.evaluate(op, now, fx)
}
