package quorum

// The servers' answers. Each is noted in the part that it is about, and as an outcome of the commands
// that asked; decide.go determines when the outcomes are enough.

import (
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Answered is the event that a server answered a command, or that the command failed. The next
// command in the lane is sent.
func (l *Lock) Answered(s *Send, res Result, now time.Time, fx *Effects) {
	l.take(s, res, now, fx)
	if s.Kind == Renew {
		return
	}
	ln := &l.lanes[s.Server]
	if len(ln.queue) == 0 {
		ln.busy = false
		return
	}
	next := ln.queue[0]
	ln.queue = slices.Delete(ln.queue, 0, 1)
	next.leave(fx)
}

// take applies a server's answer to the request that it is about.
func (l *Lock) take(s *Send, res Result, now time.Time, fx *Effects) {
	i := s.Server
	if a := &res.Answer; s.Kind == Do && a.Unfinished && a.Outcome != protocol.Enqueued && a.Outcome != protocol.Refused {
		// More waiters may enter there. A cancel of any id lets them in.
		fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: l.newID(s.req, i), TTL: time.Second})
		a.Unfinished = false
	}
	switch s.Kind {
	case Cancel:
		l.canceled(s, res, now, fx)
	case Renew:
		l.renewed(s, res, now, fx)
	case Adopt:
		l.adopted(s, res, now, fx)
	default:
		switch s.Cmd.Verb {
		case protocol.Acquire:
			l.acquired(s, res, now, fx)
		case protocol.Release:
			l.released(s, res, now, fx)
		case protocol.Yield, protocol.Downgrade:
			l.moved(s, res, now, fx)
		}
	}
}

// adopted takes a server's answer to an adopt.
func (l *Lock) adopted(s *Send, res Result, now time.Time, fx *Effects) {
	if p := s.part(); p != nil {
		p.adopting = false
		if p.adoptFailed = res.Fail != nil || res.Answer.Outcome != protocol.Done; !p.adoptFailed {
			p.known = max(p.known, s.Token)
		}
	}
	l.review(s.req, now, fx)
}

// part returns the part that the command is about, or nil if the part has another id by now.
func (s *Send) part() *part {
	p := &s.req.parts[s.Server]
	if p.id != s.Cmd.ID {
		return nil
	}
	return p
}

// acquired takes a server's answer to an acquire.
func (l *Lock) acquired(s *Send, res Result, now time.Time, fx *Effects) {
	r, i, a := s.req, s.Server, &res.Answer
	p := s.part()
	if p == nil {
		l.acquiredUnderAnOldID(s, &res, fx)
		return
	}
	// Whether the server had granted the part before this answer.
	had := p.state == owned && !a.Kept || p.lost || !p.quarantineEnd.IsZero()
	ops, later := p.waiting, p.askNext
	p.asking, p.unprompted, p.waiting, p.askNext = false, false, nil, nil
	if s.op != nil {
		ops = append(ops, s.op)
	}
	if res.Young > 0 {
		p.countsFrom = countsFrom(res.Young, now)
	} else if res.Fail == nil {
		p.countsFrom = time.Time{}
	}
	p.voteClock = max(p.voteClock, res.VoteClock)
	if res.Repeated && !s.Cmd.Question {
		p.mayArrive, p.doubted = true, p.doubted || p.known != 0
	}
	if !s.Cmd.Question || res.Fail == nil { // an owner's question gives the part nothing
		p.heard(a.Outcome, res.Fail)
		p.doubted = p.doubted || res.Fail.MayRun() && p.known != 0
	}
	if s.Cmd.Question && p.state != ending && !r.dropped && l.askedInVain(s, a, ops, now, fx) {
		return
	}
	o := p.placed(s, &res, had, now)
	p.lost = false
	if r.dropped && (p.state == owned || p.state == queued || res.mayArrive()) {
		fx.Strays = append(fx.Strays, l.stray(r, i))
	}
	l.settleAsked(ops, s, &res, o, now, fx)
	if r.dropped {
		return
	}
	l.heed(r, now, fx)
	l.askLater(later, r, i, now, fx)
	l.review(r, now, fx)
}

// acquiredUnderAnOldID takes a server's answer to an acquire of a part that has another id by now. Nothing
// uses the old one.
func (l *Lock) acquiredUnderAnOldID(s *Send, res *Result, fx *Effects) {
	if o := res.Answer.Outcome; res.mayArrive() || o == protocol.Granted || o == protocol.Enqueued {
		fx.Strays = append(fx.Strays, Stray{Server: s.Server, Keys: l.keys, ID: s.Cmd.ID, TTL: s.req.who.TTL, Late: res.mayArrive()})
	}
}

// settleAsked gives the answer to an acquire to the ops that wait for it. o is its outcome.
func (l *Lock) settleAsked(ops []*Op, s *Send, res *Result, o outcome, now time.Time, fx *Effects) {
	r, i, a := s.req, s.Server, &res.Answer
	for _, op := range ops {
		if res.Fail != nil {
			op.fail(i, res.Fail)
		}
		if r.dropped && op.kind != Renew { // nobody may be told of what is given back
			continue
		}
		op.handed = max(op.handed, a.Handed)
		op.unfinished = op.unfinished || a.Unfinished
		if op.req == r {
			op.settleGiven(i, o)
		} else {
			op.settle(i, o)
		}
		l.evaluate(op, now, fx)
	}
}

// countsFrom returns when the grants of a server begin to count. The server says that its quarantine lasts
// for left, but its clock may run 1 % slower than ours.
func countsFrom(left time.Duration, now time.Time) time.Time { return now.Add(left + left/100) }

// askedInVain takes an answer to an owner's question, if it says that the server no longer has what it
// granted us, or a renewal has said so meanwhile. An acquire follows, which finds out why, as after
// a renewal; ops wait for it. Otherwise askedInVain does nothing and returns false.
func (l *Lock) askedInVain(s *Send, a *protocol.Answer, ops []*Op, now time.Time, fx *Effects) bool {
	p := &s.req.parts[s.Server]
	switch {
	case p.lost:
	case a.Outcome != protocol.NotOurs || p.state != owned || s.Cmd.At.Before(p.proved): // a command that was sent later proved it
		return false
	default:
		p.lose(s.req, now)
	}
	for _, op := range ops {
		l.askLost(op, s.req, s.Server, fx)
	}
	for _, op := range ops {
		l.evaluate(op, now, fx)
	}
	l.heed(s.req, now, fx)
	return true
}

// placedBeforeItsEnd notes the answer to an acquire of a part that is being given back. If a renewal
// had found the part lost, it returns whether the server had only lost its data.
func (p *part) placedBeforeItsEnd(res *Result) outcome {
	a := &res.Answer
	o := outcomeFailed
	if p.lost && res.Fail == nil {
		o = lostUnless(res.Young > 0 && !p.broken && !a.Kept) // kept: the answer is older than the loss
		p.restarted = o == outcomeRestarted
	}
	if (res.Fail != nil || res.Young == 0) && (p.lost || p.missed(a, res.Fail)) {
		p.brokeOff()
	}
	return o
}

// placed notes where the answer to an acquire places the part, and returns the outcome for the
// commands that wait for it. had says whether the server had granted the part before.
func (p *part) placed(s *Send, res *Result, had bool, now time.Time) outcome {
	a := &res.Answer
	switch {
	case p.state == ending: // a later command in the lane ends the part
		return p.placedBeforeItsEnd(res)
	case res.Fail != nil:
		return p.notPlaced()
	case a.Outcome == protocol.Granted && a.Token <= p.evicted: // the message of the eviction was faster
		p.state, p.ended = absent, true
		if had {
			return outcomeLost
		}
		return outcomeNo
	case a.Outcome == protocol.Granted:
		return p.placedAsOwner(s, res, had, now)
	case a.Outcome == protocol.Enqueued && p.state == owned && a.Token < p.token: // the message of a later grant was faster
		if !p.lost {
			return outcomeOvertaken
		}
		o := lostUnless(now.Before(s.Cmd.At.Add(res.Young))) // it was granted anew by it
		if o == outcomeLost {
			p.brokeOff()
		}
		return o
	case a.Outcome == protocol.Enqueued, a.Outcome == protocol.Refused:
		o := outcomeNo
		if had || p.state == owned {
			o = p.displaced(s, res, now)
		}
		if a.Outcome == protocol.Enqueued {
			p.enqueued(a, s.Cmd.At)
		} else { // the part was never queued there, or no longer is
			p.state, p.refused, p.ended = absent, true, true
			p.blockedBy(a, s.Cmd.At)
		}
		return o
	}
	return outcomeFailed
}

// notPlaced notes that an acquire failed.
func (p *part) notPlaced() outcome {
	o := outcomeFailed
	if p.lost {
		o = outcomeLost
		p.brokeOff()
	}
	if !p.mayArrive && p.state == asked { // it did not run, nor did an earlier one: the server does not have the part
		p.state, p.ended = absent, true
	}
	return o
}

// placedAsOwner notes that an acquire was granted.
func (p *part) placedAsOwner(s *Send, res *Result, had bool, now time.Time) outcome {
	r, a := s.req, &res.Answer
	o := outcomeYes
	if had && (p.state != owned || a.Token != p.token) {
		// Granted anew: others may have had it there in between, unless the server has lost its data. An
		// answer that it was kept is older than the loss that a renewal has found.
		older := p.lost && a.Kept && p.state != owned
		o = lostUnless(res.Young > 0 && p.lasts(r, now) && !older)
		if o == outcomeLost {
			p.brokeOff()
		} else if r.token != 0 {
			p.lostToken = max(p.lostToken, p.token)
		}
	}
	r.own(p, a, s.Cmd.At, now, res.Young > 0)
	if a.Kept && r.token == 0 { // it may have been granted anew meanwhile, after another owner
		p.token, p.known = max(p.token, a.Token), max(p.known, a.Token)
	}
	return o
}

// displaced returns the outcome for a server that had granted the part and says now that we are not
// the owner. The quarantine is counted from when the command was sent, so that it ends here before
// it does for any other client.
func (p *part) displaced(s *Send, res *Result, now time.Time) outcome {
	young := res.Young > 0 && p.lasts(s.req, now)
	p.quarantineEnd = time.Time{}
	if young && s.req.token != 0 {
		p.quarantineEnd = s.Cmd.At.Add(res.Young)
		p.lostToken = max(p.lostToken, p.token)
	}
	if !young {
		p.brokeOff()
	}
	return lostUnless(young)
}

// heard notes the answer to a command that may place the part, or its failure. An answer shows
// whether the server is in quarantine. But while an earlier command without an answer may still run,
// only the answer "granted" counts: a message may have been sent after a later restart.
func (p *part) heard(o protocol.Outcome, fail *protocol.Failure) {
	switch {
	case fail.MayRun():
		p.mayArrive = true
	case fail != nil:
	case o == protocol.Granted || !p.mayArrive:
		p.quarantineUnknown = false
	}
}

// own notes that the part's server made us the owner, or extended our lease, after a command that was sent
// at sentAt. inQuarantine says that the server was still in quarantine then.
func (r *request) own(p *part, a *protocol.Answer, sentAt, now time.Time, inQuarantine bool) {
	if p.state != owned {
		r.toldToAsk = false // it may complete a majority
		if !p.lost && p.quarantineEnd.IsZero() {
			p.since = now
		}
		p.grantedLate = !inQuarantine && p.quarantineOver(now)
		if p.grantedLate {
			p.brokeOff()
		}
	}
	p.quarantineEnd = time.Time{}
	if p.state != owned || !a.Kept {
		p.token, p.known = a.Token, a.Token
	}
	if p.state != owned || sentAt.After(p.proved) {
		p.proved = sentAt
	}
	p.state, p.ended = owned, false
	p.clock, p.more = max(p.clock, a.Clock), p.more || a.More
}

// enqueued notes that the part waits in its server's queue, after a command that was sent at sentAt.
func (p *part) enqueued(a *protocol.Answer, sentAt time.Time) {
	p.state, p.ended, p.proved, p.floor, p.token, p.known = queued, false, sentAt, a.Floor(), 0, 0
	p.told = a.Told
	p.blockedBy(a, sentAt)
}

func (p *part) blockedBy(a *protocol.Answer, sentAt time.Time) {
	p.blocker, p.place, p.noNotify = a.Blocker, a.Place, a.NoNotify
	p.endless, p.left = a.Left == protocol.Endless, time.Time{}
	if a.Left >= 0 {
		p.left = sentAt.Add(a.Left)
	}
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
	default:
		p.ended, p.restarted = true, p.forgotten(s.req, &res, now)
		s.op.settle(s.Server, lostUnless(p.restarted))
	}
	s.op.handed = max(s.op.handed, res.Answer.Handed)
	l.evaluate(s.op, now, fx)
}

// givenBack is the outcome for a part whose server says that it was ours until it was given back.
func (p *part) givenBack(r *request) outcome {
	switch {
	case !p.broken && (r.doubted || !p.doubted):
		return outcomeYes
	case r.doubted:
		return outcomeUnproved
	}
	return outcomeLost
}

// forgotten reports whether a part that its server no longer knows was ours until the server lost
// its data: the lease there had not ended yet. Then others can have owned there only since the
// restart, in quarantine, when the server's grants do not count.
func (p *part) forgotten(r *request, res *Result, now time.Time) bool {
	return res.Young > 0 && p.known != 0 && !p.grantedLate && !p.broken && lockstate.Elapsed(p.proved, now) < r.who.TTL
}

// moved takes a server's answer to a yield or a downgrade: one of the state machine, or a yield
// that gave back a partial grant, for which there is no op.
func (l *Lock) moved(s *Send, res Result, now time.Time, fx *Effects) {
	i, a, op, r := s.Server, &res.Answer, s.op, s.next
	q := &r.parts[i]
	var later *Op
	if q.id != s.Cmd.Next {
		q = nil
	} else {
		later = q.askNext
		q.asking, q.unprompted, q.askNext = false, false, nil
	}
	old := l.movedFrom(s, &res, now, fx)
	o := s.movedTo(q, old, &res, now)
	if r.dropped && q != nil && (q.state == owned || q.state == queued || res.Fail.MayRun()) {
		fx.Strays = append(fx.Strays, l.stray(r, i))
	}
	if op != nil {
		op.handed = max(op.handed, a.Handed)
		op.unfinished = op.unfinished || a.Unfinished
		op.settleOld(i, old)
		if a.Outcome == protocol.NotOurs && op.verb == protocol.Yield && !op.decided && !r.dropped {
			l.ask(op, r, i, fx) // the new request has to wait there, too
		} else {
			op.settle(i, o)
		}
		l.evaluate(op, now, fx)
	}
	if !r.dropped {
		l.review(r, now, fx)
	}
	l.askLater(later, r, i, now, fx)
}

// movedFrom notes what the answer to a yield or downgrade says of the old request's part, and returns
// whether that was ours until then. Where a partial grant was given back, there is no op, and nothing of
// the old part is left: see giveBack.
func (l *Lock) movedFrom(s *Send, res *Result, now time.Time, fx *Effects) outcome {
	p, op := s.part(), s.op
	if res.Fail != nil {
		if op != nil {
			op.fail(s.Server, res.Fail)
		} else {
			// A partial grant was given back: the old id may be owner still, or the new one may wait.
			fx.Strays = append(fx.Strays, Stray{Server: s.Server, Keys: l.keys, ID: s.Cmd.ID, TTL: s.next.who.TTL})
		}
		if p != nil {
			p.state = asked
			if s.req.dropped {
				fx.Strays = append(fx.Strays, l.stray(s.req, s.Server))
			}
		}
		return outcomeFailed
	}
	ours := res.Answer.Outcome != protocol.NotOurs && !res.Answer.Gone
	switch {
	case p == nil && ours:
		return outcomeYes
	case p == nil:
		return outcomeLost
	}
	old := lostUnless(op.verb == protocol.Yield && p.forgotten(s.req, res, now))
	if ours {
		old = p.givenBack(s.req)
	}
	p.ended, p.restarted = true, old == outcomeRestarted
	p.confirmed, p.downgraded = old == outcomeYes && op.verb == protocol.Yield, old == outcomeYes && op.verb == protocol.Downgrade
	return old
}

// movedTo notes where the answer to a yield or downgrade places the new request's part q, nil if it has
// another id by now. old says whether the old request's part was ours until then.
func (s *Send) movedTo(q *part, old outcome, res *Result, now time.Time) outcome {
	a := &res.Answer
	switch {
	case res.Fail != nil:
		if q != nil {
			q.heard(a.Outcome, res.Fail)
		}
		return outcomeFailed
	case q == nil:
		return outcomeNo
	case a.Outcome == protocol.NotOurs:
		q.passes = false
		if q.state == asked {
			q.state = absent
		}
		return outcomeNo
	}
	if res.Young > 0 {
		q.countsFrom = countsFrom(res.Young, now)
	}
	q.voteClock = max(q.voteClock, res.VoteClock)
	q.heard(a.Outcome, nil)
	switch {
	case a.Outcome == protocol.Granted && a.Token <= q.evicted:
		q.state, q.ended = absent, true
	case a.Outcome == protocol.Granted:
		if q.state == ending { // a later command in the lane ends the part
			q.since = now
		} else {
			s.next.own(q, a, s.Cmd.At, now, res.Young > 0)
		}
		p := s.part()
		q.byDowngrade = p != nil && p.downgraded
		if p != nil && old == outcomeYes && !s.req.gained(s.Server) { // nobody can have owned there in between
			q.since = p.since
		}
		return outcomeYes
	case q.state == ending:
	case q.state != owned || a.Token >= q.token:
		q.enqueued(a, s.Cmd.At)
	}
	return outcomeNo
}

// canceled takes a server's answer to a cancel.
func (l *Lock) canceled(s *Send, res Result, now time.Time, fx *Effects) {
	r, i, fail := s.req, s.Server, res.Canceled.Fail
	p := s.part()
	switch {
	case p == nil && fail != nil:
		fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: s.Cmd.ID, Last: s.Cancel.Last, TTL: r.who.TTL})
	case p == nil:
	case fail != nil:
		p.state = asked
		if s.op != nil {
			s.op.fail(i, fail)
			s.op.settleGiven(i, outcomeFailed)
		}
		if r.dropped {
			fx.Strays = append(fx.Strays, l.stray(r, i))
		}
	default:
		owned := p.endedByCancel(s, &res, now)
		if s.op != nil && (s.op.kind == Cancel || s.Cancel.Prove) {
			unproved := owned && s.op.kind == Do && r.doubted
			s.op.settleGiven(i, p.untilCanceled(unproved))
		}
	}
	if s.op != nil {
		l.evaluate(s.op, now, fx)
	}
}

// endedByCancel notes that a server canceled the part, and returns whether the part was owned until then.
//
// It was if the server says so, if the lock's last token is the last one that we assigned, or if the server
// has lost it with its data and is in quarantine. The first two prove the lease unless others may have
// owned there in between; after an acquire without an answer, only the token says that they have not. An
// earlier release whose answer came late may have proved it already.
func (p *part) endedByCancel(s *Send, res *Result, now time.Time) bool {
	r, c := s.req, res.Canceled
	p.ended = true
	if r.writerConfirmed(s.Server) {
		p.confirmed = true
		return true
	}
	if r.writerRestarted(s.Server) {
		p.restarted = true
		return false
	}
	if r.downgradeOf != nil && r.token == 0 && !p.byDowngrade && !(p.passes && c.Owned) { // it may be a new grant, after another owner
		return false
	}
	last := c.Token != 0 && c.Token == max(p.known, s.Cancel.Last) && p.known != 0
	found := c.Owned || last
	stood := p.inQuarantine(now)
	doubted := r.doubted || p.doubted
	p.confirmed = p.confirmed || found && !p.restarted && !p.broken && (!doubted || last)
	p.restarted = p.restarted || stood && !p.broken && !doubted || p.forgotten(r, res, now)
	return found || stood
}

// untilCanceled is the outcome for a part that ended with a cancel. unproved says that it was owned then,
// but that this proves nothing of the lease.
func (p *part) untilCanceled(unproved bool) outcome {
	switch {
	case p.confirmed:
		return outcomeYes
	case unproved:
		return outcomeUnproved
	case p.restarted:
		return outcomeRestarted
	}
	return outcomeNo
}

// renewed takes a server's answer to a renewal.
func (l *Lock) renewed(s *Send, res Result, now time.Time, fx *Effects) {
	p := s.part()
	i, op := s.Server, s.op
	switch {
	case p == nil || p.state != owned:
		l.askLost(op, op.req, i, fx) // another renewal may have found the part lost
	case res.Renewed == protocol.Granted:
		if s.Renew.At.After(p.proved) {
			p.proved = s.Renew.At
		}
		p.clock = max(p.clock, res.Clock)
		op.settle(i, outcomeYes)
		if op.decided && op.Renewed == protocol.Granted && op.sure() >= l.cfg.need() { // a late answer made it sure
			op.req.noteKept(op, now)
		}
	case res.Renewed == protocol.NotOurs:
		if s.Renew.At.Before(p.proved) { // ownership was proved by a later command
			op.settle(i, outcomeOvertaken)
			break
		}
		p.lose(op.req, now)
		l.askLost(op, op.req, i, fx)
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

// askLost sends an acquire to a server that no longer has what it granted r, and has op wait for the
// answer, which says whether the server lost its data. A downgrade does not wait: its next try will know.
func (l *Lock) askLost(op *Op, r *request, i int, fx *Effects) {
	p := &r.parts[i]
	switch {
	case op.decided:
	case r.dropped || p.state == ending:
		op.settle(i, outcomeSkipped)
	case r.downgradesTo != nil:
		op.settle(i, outcomeLost)
	case p.asking:
		p.waiting = append(p.waiting, op)
	case !p.lost:
		op.settle(i, outcomeSkipped)
	default:
		l.ask(op, r, i, fx)
		if !p.asking {
			op.outcomes[i] = outcomeLost
		}
	}
}
