package quorum

// The commands of the state machine. Each becomes commands for the servers, whose answers are
// noted here. decide.go determines when they are enough.

import (
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Op is a command, a cancel or a renewal of the state machine that awaits its decision. Its
// results are set once the Op is in Effects.Done.
type Op struct {
	Answer    protocol.Answer
	Cancelled protocol.Cancelled
	Renewed   protocol.Outcome
	Clock     uint64
	Err       error // why nothing could be decided, else nil

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
	proved     bool // release, yield: see request.doubted
	decided    bool
	expired    bool
	sending    bool // its commands are still being sent, so it is not decided yet
}

// before is what a part of a held request was when an op about it began.
type before struct {
	stood bool // the request owned there, as far as was known
	owned bool // the part was owned, else others may still have owned there
	anews int  // the part's
}

type outcome uint8

const (
	outcomePending   outcome = iota
	outcomeYes               // granted, renewed, released or cancelled as its owner
	outcomeUnproved          // released as its owner, but perhaps granted anew before; see request.doubted
	outcomeNo                // any other answer
	outcomeLost              // not the owner, or granted anew, although it was ours
	outcomeAgain             // the server has restarted without its data, whatever it answered
	outcomeOvertaken         // the answer is older than what is known
	outcomeFailed            // no answer
	outcomeSkipped           // the server was not asked, because there is nothing to ask it
)

// newOp returns an op about r, whose command was decided on at the time at. If r holds the lease, the op
// notes on which servers it stands before any of them has answered.
func (l *Lock) newOp(kind Kind, verb protocol.Verb, r *request, at, now time.Time) *Op {
	op := &Op{kind: kind, verb: verb, req: r, at: at, held: r != nil && r.token != 0,
		outcomes: make([]outcome, l.cfg.N), fails: make([]*protocol.Failure, l.cfg.N), sending: true}
	if op.held {
		op.before = make([]before, l.cfg.N)
		for i := range r.parts {
			p := &r.parts[i]
			// If lost, the answer under way decides.
			op.before[i] = before{stood: p.stands(now) || p.lost, owned: p.state == owned, anews: p.anews}
		}
	}
	return op
}

// Decided reports whether the op's results are set.
func (op *Op) Decided() bool { return op.decided }

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

// settleOld does the same for the old request of a yield or downgrade.
func (op *Op) settleOld(i int, o outcome) {
	if op.olds[i] == outcomePending {
		op.olds[i] = o
	}
}

// fail notes why a server did not answer.
func (op *Op) fail(i int, f *protocol.Failure) { op.fails[i] = f }

// away settles the op on a server to which nothing is sent, because it is away.
func (op *Op) away(i int, err error) {
	op.fail(i, &protocol.Failure{Err: err, Kind: protocol.NeverSent})
	op.settle(i, outcomeFailed)
	if op.olds != nil {
		op.settleOld(i, outcomeFailed)
	}
}

func (l *Lock) whyAway(server int) error {
	if l.cfg.Why == nil {
		return errAway
	}
	return l.cfg.Why(server)
}

// Do is the event that the state machine sends a command.
func (l *Lock) Do(c *protocol.Command, now time.Time, fx *Effects) *Op {
	r := l.request(c.ID)
	op := l.newOp(Do, c.Verb, r, c.At, now)
	op.cmd = *c
	r.op = op
	switch c.Verb {
	case protocol.Acquire:
		if r.basis.IsZero() {
			r.basis = c.At
		}
		r.whole = r.whole && c.Held
		for i := range r.parts {
			r.parts[i].more = r.parts[i].more && !c.Held // the answers will say
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
			r.downgrading, op.next.ofDowngrade = true, true
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

// ask sends an acquire for a part.
func (l *Lock) ask(op *Op, r *request, i int, fx *Effects) {
	if l.cfg.Away(i) {
		op.away(i, l.whyAway(i))
		return
	}
	p := l.identify(r, i, fx)
	if p.asking && p.looks && (p.later == nil || p.later.decided) {
		p.later = op
		return
	}
	if p.asking {
		op.away(i, errBusy)
		return
	}
	if p.state == absent {
		p.state = asked
	}
	if p.proved.IsZero() {
		p.proved = op.at
	}
	p.asking, p.forgets = true, false
	// A held request may be in the queue of a server that has another owner, and stays there if it is refused.
	waits := op.cmd.Wait || op.kind == Renew || op.cmd.Verb != protocol.Acquire || r.token != 0
	held := op.cmd.Held && p.state == owned
	c := protocol.Command{Verb: protocol.Acquire, ID: p.id, TTL: r.who.TTL, Wait: waits, First: !p.sent, Told: p.told, Place: op.cmd.Place, Held: held, At: op.at, Ticket: r.ticket}
	if own := l.reqs[op.cmd.Own]; op.cmd.Own != "" && own != nil {
		c.Own = own.parts[i].id
	}
	l.send(&Send{Server: i, Kind: Do, Cmd: c, Probes: op.cmd.Check, req: r, op: op}, fx)
}

// release sends a release for a part that is owned, and a cancel for one that may be.
func (l *Lock) release(op *Op, i int, now time.Time, fx *Effects) {
	r := op.req
	p := &r.parts[i]
	switch {
	case p.id == "" || !p.lostAndAsked() && (p.ended && !p.unasked() || p.state == absent && !p.asking && !p.unasked()):
		op.settle(i, outcomeSkipped)
	case l.cfg.Away(i):
		op.away(i, l.whyAway(i))
	case p.lostAndAsked():
		l.awaitLost(op, i, fx)
	case p.state == owned || p.unasked():
		if l.withdraw(r, i); (r.doubted || p.doubted) && p.inDoubt() {
			l.endDoubted(op, i, fx)
			return
		}
		p.state, p.ended = ending, false
		l.send(&Send{Server: i, Kind: Do, req: r, op: op, Cmd: protocol.Command{
			Verb: protocol.Release, ID: p.id, Last: p.lastFor(r), Link: op.cmd.Link, Cooldown: op.cmd.Cooldown, At: op.at}}, fx)
	default:
		if op.held && p.stands(now) && !p.anew {
			op.settle(i, outcomeAgain) // the server lost its data, and its grants have not counted since
		}
		l.cancel(op, r, i, op.cmd.Link, op.cmd.Cooldown, fx)
		op.settle(i, outcomeNo)
	}
}

// unasked reports whether a late answer to a renewal has found the part lost, and nobody has asked why
// since. The answer to a release or yield says whether its server has only lost its data.
func (p *part) unasked() bool { return p.lost && p.ended && !p.asking }

// lostAndAsked reports whether a renewal has found the part lost, and the answer to the acquire that
// followed will say whether its server has only lost its data.
func (p *part) lostAndAsked() bool { return p.lost && p.asking && p.state != ending }

// awaitLost gives back a part that lostAndAsked reports. The op waits for the answer to the acquire,
// which a cancel follows in the lane.
func (l *Lock) awaitLost(op *Op, i int, fx *Effects) {
	p := &op.req.parts[i]
	p.also, p.ended = append(p.also, op), false
	l.sendCancel(nil, op.req, i, op.cmd.Link, op.cmd.Cooldown, fx)
}

// inDoubt reports whether an acquire of an owned part has no answer. Then the part may have been
// granted anew after another owner, so an answer that we own it does not prove that we always did.
func (p *part) inDoubt() bool { return p.asking || p.unsure }

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

// move sends a yield or a downgrade for a part that is owned. A part that is not owned is cancelled,
// and an acquire of the new request is sent to its server, for a downgrade only if the new request
// is owned there already.
func (l *Lock) move(op *Op, i int, now time.Time, fx *Effects) {
	r := op.req
	p, q := &r.parts[i], &op.next.parts[i]
	if l.cfg.Away(i) {
		op.away(i, l.whyAway(i))
		return
	}
	again := op.verb == protocol.Downgrade && p.state == asked && p.id != "" && !p.ended && !p.asking // the first try had no answer
	unasked := op.verb == protocol.Yield && p.unasked()
	if p.lostAndAsked() || p.state != owned && !again && !unasked {
		switch {
		case p.lostAndAsked():
			l.awaitLost(op, i, fx)
		case op.held && p.stands(now) && !p.anew:
			op.settleOld(i, outcomeAgain)
		default:
			op.settleOld(i, outcomeNo)
		}
		if p.id != "" && !p.ended && p.state != absent && p.state != ending {
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
	p.state, p.ended = ending, false
	q = l.identify(op.next, i, fx)
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

// released takes a server's answer to a release.
func (l *Lock) released(s *Send, res Result, now time.Time, fx *Effects) {
	p := s.part()
	if p == nil {
		return
	}
	switch {
	case res.Fail != nil:
		s.op.fail(s.Server, res.Fail)
		s.op.settle(s.Server, outcomeFailed)
		p.state = asked
		if s.req.dropped {
			fx.Strays = append(fx.Strays, l.stray(s.req, s.Server))
		}
	case res.Answer.Outcome == protocol.Done:
		p.ended, p.confirmed = true, p.givenBack(s.req) == outcomeYes
		s.op.settle(s.Server, p.givenBack(s.req))
		s.op.unfinished = s.op.unfinished || res.Answer.Unfinished
	default:
		p.ended, p.again = true, p.forgotten(s.req, res, now)
		s.op.settle(s.Server, lostUnless(p.again))
	}
	s.op.handed = max(s.op.handed, res.Answer.Handed)
	l.evaluate(s.op, now, fx)
}

// givenBack is the outcome for a part whose server says that it was ours until it was given back.
func (p *part) givenBack(r *request) outcome {
	switch {
	case !p.anew && (r.doubted || !p.doubted):
		return outcomeYes
	case r.doubted:
		return outcomeUnproved
	}
	return outcomeLost
}

// forgotten reports whether a part that its server no longer knows was ours until the server lost
// its data: the lease there had not ended yet. Then others can have owned there only since the
// restart, in quarantine, when the server's grants do not count.
func (p *part) forgotten(r *request, res Result, now time.Time) bool {
	return res.Young > 0 && p.known != 0 && !p.late && !p.anew && lockstate.Elapsed(p.proved, now) < r.who.TTL
}

// moved takes a server's answer to a yield or a downgrade: one of the state machine, or a yield
// that gave back a partial grant.
func (l *Lock) moved(s *Send, res Result, now time.Time, fx *Effects) {
	i, a, op := s.Server, res.Answer, s.op
	r, q := s.next, &s.next.parts[i]
	if q.id != s.Cmd.Next {
		q = nil
	}
	var p *part
	if op != nil {
		p = s.part()
	}
	notOwner := outcomeLost
	if p != nil {
		notOwner = lostUnless(op.verb == protocol.Yield && p.forgotten(s.req, res, now))
	}
	var old outcome
	outcome := outcomeNo
	if q != nil {
		q.asking, q.looks = false, false
		if later := q.later; later != nil {
			q.later = nil
			defer func() { l.askLater(later, r, i, now, fx) }()
		}
	}
	switch {
	case res.Fail != nil:
		if q != nil {
			q.heard(a.Outcome, res.Fail)
		}
		old, outcome = outcomeFailed, outcomeFailed
		if op != nil {
			op.fail(i, res.Fail)
		} else {
			// A partial grant was given back: the old id may be owner still, or the new one may wait.
			fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: s.Cmd.ID, TTL: r.who.TTL})
		}
		if p != nil {
			p.state = asked
		}
		if p != nil && s.req.dropped {
			fx.Strays = append(fx.Strays, l.stray(s.req, i))
		}
	case a.Outcome == protocol.NotOurs:
		old = notOwner
		if q != nil && q.state == asked {
			q.state = absent
		}
		if p != nil {
			p.ended, p.again = true, old == outcomeAgain
		}
	default:
		old = outcomeYes
		if a.Gone {
			old = notOwner
		}
		if p != nil {
			if old == outcomeYes {
				old = p.givenBack(s.req)
			}
			p.ended, p.again = true, old == outcomeAgain
			p.confirmed, p.downgraded = old == outcomeYes && op.verb == protocol.Yield, old == outcomeYes && op.verb == protocol.Downgrade
		}
		if q == nil {
			break
		}
		if res.Young > 0 {
			q.young = now.Add(res.Young)
		}
		q.heard(a.Outcome, nil)
		if a.Outcome == protocol.Granted && a.Token <= q.evicted {
			q.state, q.ended = absent, true
		} else if a.Outcome == protocol.Granted {
			outcome = outcomeYes
			r.own(q, a, s.Cmd.At, now, res.Young > 0)
			q.follows = p != nil && p.downgraded
			if p != nil && old == outcomeYes && !s.req.gained(i) { // nobody can have owned there in between
				q.since = p.since
			}
		} else if q.state != owned || a.Token >= q.token {
			q.state, q.ended, q.proved, q.floor, q.token, q.known = queued, false, s.Cmd.At, a.Floor(), 0, 0
			q.told = a.Told
			q.blockedBy(&a, now)
		}
	}
	if r.dropped && q != nil && (q.state == owned || q.state == queued || res.Fail.MayRun()) {
		fx.Strays = append(fx.Strays, l.stray(r, i))
	}
	if op == nil {
		if !r.dropped {
			l.review(r, now, fx)
		}
		return
	}
	op.handed = max(op.handed, a.Handed)
	op.unfinished = op.unfinished || a.Unfinished
	op.settleOld(i, old)
	if a.Outcome == protocol.NotOurs && op.verb == protocol.Yield && !op.decided && !r.dropped {
		l.ask(op, r, i, fx) // the new request has to wait there, too
	} else {
		op.settle(i, outcome)
	}
	l.evaluate(op, now, fx)
	if !r.dropped {
		l.review(r, now, fx)
	}
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
		case p.confirmed:
			op.settle(i, outcomeYes)
		case p.again && p.ended:
			op.settle(i, outcomeAgain)
		case p.id == "" || p.ended:
			op.settle(i, outcomeNo)
		case l.cfg.Away(i):
			op.away(i, l.whyAway(i))
		default:
			l.cancel(op, r, i, g.Link, g.Cooldown, fx)
		}
	}
	op.sending = false
	l.evaluate(op, now, fx)
	return op
}

// cancelled takes a server's answer to a cancel.
func (l *Lock) cancelled(s *Send, res Result, now time.Time, fx *Effects) {
	r, i := s.req, s.Server
	p := s.part()
	c := res.Cancelled
	switch {
	case p == nil:
		if c.Fail != nil {
			fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: s.Cmd.ID, Last: s.Cancel.Last, TTL: r.who.TTL})
		}
	case c.Fail != nil:
		p.state = asked
		if s.op != nil {
			s.op.fail(i, c.Fail)
			s.op.settleGiven(i, outcomeFailed)
		}
		if r.dropped {
			fx.Strays = append(fx.Strays, l.stray(r, i))
		}
	default:
		// The part was ours until the cancel if the server says that we were still owner, or if the
		// lock's last token is the last one that we assigned; or if an earlier release, whose answer
		// came late, said so.
		proof := max(p.known, s.Cancel.Last)
		last := c.Token != 0 && c.Token == proof && p.known != 0
		p.ended = true
		ours := !r.ofDowngrade || r.token != 0 || p.follows // else it may be a new grant, after another owner
		stood := ours && p.inQuarantine(now)
		owned := ours && (c.Owned || last)
		p.confirmed = p.confirmed || owned && !p.again && !p.anew && (!r.doubted && !p.doubted || last)
		p.again = !p.confirmed && (p.again || stood && !p.anew && !r.doubted && !p.doubted || ours && p.forgotten(r, res, now))
		owned = owned || stood
		if s.op != nil && (s.op.kind == Cancel || s.Cancel.Prove) {
			switch {
			case !p.confirmed && owned && s.op.kind == Do && r.doubted:
				s.op.settleGiven(i, outcomeUnproved)
			case p.confirmed:
				s.op.settleGiven(i, outcomeYes)
			case p.again:
				s.op.settleGiven(i, outcomeAgain)
			default:
				s.op.settleGiven(i, outcomeNo)
			}
		}
	}
	if s.op != nil {
		l.evaluate(s.op, now, fx)
	}
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
	for i := range r.parts {
		p := &r.parts[i]
		switch {
		case p.state == ending:
			op.settle(i, outcomeSkipped)
		case l.cfg.Away(i):
			op.away(i, l.whyAway(i))
		case p.state == owned:
			s := &Send{Server: i, Kind: Renew, req: r, op: op}
			s.Cmd.ID = p.id
			s.Renew = protocol.Renewal{Keys: l.keys, At: b.At, Touch: b.Touch,
				Req: protocol.Request{ID: p.id, Mode: r.who.Mode, TTL: r.who.TTL}}
			l.send(s, fx)
		case p.asking:
			p.also = append(p.also, op)
		case r.downgrading: // the new request may own there
			op.settle(i, outcomeSkipped)
		default:
			l.ask(op, r, i, fx)
		}
	}
	op.sending = false
	l.evaluate(op, now, fx)
	return op
}

// renewed takes a server's answer to a renewal.
func (l *Lock) renewed(s *Send, res Result, now time.Time, fx *Effects) {
	p := s.part()
	i, op := s.Server, s.op
	switch {
	case p == nil || p.state != owned:
		l.askLost(op, i, fx) // another renewal may have found the part lost
	case res.Renewed == protocol.Granted:
		if s.Renew.At.After(p.proved) {
			p.proved = s.Renew.At
		}
		p.clock = max(p.clock, res.Clock)
		op.settle(i, outcomeYes)
		if op.decided && op.Renewed == protocol.Granted && op.sure() >= l.cfg.Need { // a late answer made it sure
			op.req.noteKept(op, now)
		}
	case res.Renewed == protocol.NotOurs:
		if s.Renew.At.Before(p.proved) { // ownership was proved by a later command
			op.settle(i, outcomeOvertaken)
			break
		}
		p.lose(op.req, now)
		l.askLost(op, i, fx)
	default:
		op.fail(i, res.Fail)
		op.settle(i, outcomeFailed)
	}
	l.evaluate(op, now, fx)
	l.heed(op.req, now, fx)
}

// lose notes that the server no longer has what it granted us.
func (p *part) lose(r *request, now time.Time) {
	p.lostToken = max(p.lostToken, p.token)
	if !p.lasts(r, now) { // it may have ended there before the server lost its data
		p.brokeOff()
	}
	p.state, p.ended, p.lost = absent, true, true
}

// askLost sends an acquire to a server that no longer has what it granted us, and has the renewal
// wait for the answer, which says whether the server lost its data.
func (l *Lock) askLost(op *Op, i int, fx *Effects) {
	p := &op.req.parts[i]
	switch {
	case op.decided:
	case op.req.dropped || p.state == ending:
		op.settle(i, outcomeSkipped)
	case op.req.downgrading:
		op.settle(i, outcomeLost)
	case p.asking:
		p.also = append(p.also, op)
	case !p.lost:
		op.settle(i, outcomeSkipped)
	default:
		if l.ask(op, op.req, i, fx); !p.asking {
			op.outcomes[i] = outcomeLost
		}
	}
}

// Expire is the event that an op has waited long enough for its answers.
func (l *Lock) Expire(op *Op, now time.Time, fx *Effects) {
	op.expired = true
	asks := op.req
	if op.next != nil {
		asks = op.next
	}
	for i := range op.outcomes {
		if asks.parts[i].adopts && op.fails[i] == nil {
			op.fail(i, &protocol.Failure{Err: errAway, Kind: protocol.NoAnswer})
		}
		if op.outcomes[i] == outcomePending || op.olds != nil && op.olds[i] == outcomePending {
			if op.fails[i] == nil {
				op.fail(i, &protocol.Failure{Err: errAway, Kind: protocol.NoAnswer})
			}
			if op.held && op.req.parts[i].lost && (op.kind == Renew || op.verb == protocol.Acquire) {
				op.settle(i, outcomeLost)
			}
			op.settle(i, outcomeFailed)
			if op.olds != nil {
				op.settleOld(i, outcomeFailed)
			}
		}
	}
	l.evaluate(op, now, fx)
}
