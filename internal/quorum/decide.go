package quorum

// How the servers' answers decide a command of the state machine: when they leave no doubt, and
// what the command's answer is then.

import (
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// evaluate decides an op if the answers leave no doubt.
func (l *Lock) evaluate(op *Op, now time.Time, fx *Effects) {
	if op.decided || op.sending {
		return
	}
	switch {
	case op.kind == Cancel:
		l.evaluateCancel(op, now, fx)
	case op.kind == Renew:
		l.evaluateRenewal(op, now, fx)
	case op.verb == protocol.Acquire:
		l.evaluateAcquire(op, op.req, now, fx)
	case op.verb == protocol.Release:
		l.evaluateRelease(op, now, fx)
	default:
		l.evaluateMove(op, now, fx)
	}
}

// decide ends an op whose Answer, Canceled, Renewed or Err is set.
func (l *Lock) decide(op *Op, now time.Time, fx *Effects) {
	op.decided = true
	for _, r := range []*request{op.req, op.next} {
		if r != nil && r.op == op {
			r.op = nil
			if r.evictionTold && op.verb == protocol.Acquire && !op.gives() {
				l.retreat(r, fx) // the state machine has nothing to cancel, and may ask under its id again
				l.drop(r, now, fx)
			}
		}
	}
	op.Answer.Handed, op.Answer.Unfinished, op.Answer.Proved = op.handed, op.unfinished, op.proved
	if op.verb == protocol.Acquire && !op.cmd.Question && op.Err != nil && op.req.token != 0 {
		op.req.doubted = true
	}
	fx.Done = append(fx.Done, op)
}

// gives reports whether an acquire was answered with the lock, or with a place. Then the state machine uses
// the request, or cancels it.
func (op *Op) gives() bool {
	return op.Err == nil && (op.Answer.Outcome == protocol.Granted || op.Answer.Outcome == protocol.Enqueued)
}

// decideWithError decides an op that has no result: too few servers answered, or too few of them agreed.
func (l *Lock) decideWithError(op *Op, now time.Time, fx *Effects) {
	op.Err = l.noQuorum(op)
	l.decide(op, now, fx)
}

// noQuorum returns the error of an op that has no other result.
func (l *Lock) noQuorum(op *Op) *noQuorum {
	e := &noQuorum{n: l.cfg.N, need: l.cfg.need(), kind: protocol.NeverSent}
	lasting := map[protocol.FailureKind]int{}
	for i, f := range op.fails {
		switch {
		case f == nil:
			e.answered++
			continue
		case f.Lasts():
			lasting[f.Kind]++
		case f.Kind == protocol.NoAnswer:
			e.kind = protocol.NoAnswer
		case f.Kind == protocol.RefusedNow && e.kind == protocol.NeverSent:
			e.kind = protocol.RefusedNow
		}
		e.why = append(e.why, serverError{i, f.Err})
	}
	for kind, n := range lasting { // too many for the others to be a majority
		if l.cfg.tooMany(n) {
			e.kind = kind
		}
	}
	return e
}

// count returns how many outcomes are one of which.
func count(all []outcome, which ...outcome) int {
	n := 0
	for _, o := range all {
		if slices.Contains(which, o) {
			n++
		}
	}
	return n
}

// open returns how many outcomes are still pending.
func open(all []outcome) int { return count(all, outcomePending) }

// evaluateAcquire decides an acquire of r, and what a yield or downgrade asks for its successor r. It is
// granted if a majority grants it, and waits or is refused once no majority can. It fails if too few
// servers have answered for either.
func (l *Lock) evaluateAcquire(op *Op, r *request, now time.Time, fx *Effects) {
	if l.granted(op, r, now, fx) || r.writing() && !op.expired {
		return
	}
	yes, no := count(op.outcomes, outcomeYes), count(op.outcomes, outcomeNo, outcomeLost, outcomeOvertaken)
	switch {
	case l.cfg.tooMany(no): // no majority can be had now
		l.notGranted(op, r, now, fx)
	case open(op.outcomes) > 0:
	case no > 0 && yes+no >= l.cfg.need():
		l.notGranted(op, r, now, fx)
	default:
		l.noMajority(op, r, now, fx)
	}
}

// notGranted decides an acquire that a majority has answered, but not granted: the request waits, was
// refused, or has lost the lease that it was about.
func (l *Lock) notGranted(op *Op, r *request, now time.Time, fx *Effects) {
	held := op.held && r == op.req
	switch {
	case held && op.standing(now) >= l.cfg.need(): // the servers that did not answer may still have the lease
		l.decideWithError(op, now, fx)
	case held: // lost, although servers may have granted it again, so no release could tell
		op.Answer = protocol.Answer{Outcome: protocol.Enqueued, Token: r.token}
		l.describeWait(op, r)
		r.token, r.unbroken, r.basis = 0, false, op.at
		for i := range r.parts {
			p := &r.parts[i]
			p.quarantineEnd, p.grantedLate, p.lostToken, p.broken = time.Time{}, false, 0, false
		}
		l.decide(op, now, fx)
	case r.token != 0: // a message announced the grant first
		op.Answer = protocol.Answer{Outcome: protocol.Enqueued}
		l.describeWait(op, r)
		l.decide(op, now, fx)
	case op.verb == protocol.Downgrade: // done, and not known to be: it is repeated
		l.decideWithError(op, now, fx)
	case op.cmd.Wait || op.verb != protocol.Acquire:
		op.Answer = protocol.Answer{Outcome: protocol.Enqueued}
		l.describeWait(op, r)
		r.basis = op.at
		l.decide(op, now, fx)
		l.plan(r, now)
	default:
		op.Answer = protocol.Answer{Outcome: protocol.Refused, Split: l.isSplit(r)}
		l.describeWait(op, r)
		l.decide(op, now, fx)
		l.retreat(r, fx)
		l.drop(r, now, fx)
	}
}

// writing reports whether a majority has granted, but the token is still being written back.
func (r *request) writing() bool {
	return slices.ContainsFunc(r.parts, func(p part) bool { return p.adopting })
}

// standing returns on how many servers a request that was held before the op still owns, or may
// own, without a break. A server that did not answer counts as long as its grant lasts: for a TTL
// since ownership was last proved there.
//
// Servers that have restarted without their data count as well, unless all N have and no server
// counts otherwise: only then can other clients have counted them.
func (op *Op) standing(now time.Time) int {
	n, restarted, young := 0, 0, 0
	for i, was := range op.before {
		p := &op.req.parts[i]
		if op.outcomes[i] == outcomeRestarted || now.Before(p.countsFrom) {
			young++
		}
		if !was.stood || was.breaks != p.breaks || p.grantedLate || p.quarantineOver(now) {
			continue
		}
		switch op.outcomes[i] {
		case outcomeLost, outcomeNo, outcomeSkipped:
		case outcomeRestarted:
			restarted++
		case outcomeYes, outcomePending:
			n++
		default:
			if !p.quarantineEnd.IsZero() || !p.lost && lockstate.Elapsed(p.proved, now) < op.req.who.TTL {
				n++
			}
		}
	}
	if n > 0 || young < len(op.before) {
		n += restarted
	}
	return n
}

// sure returns how many servers have said that a request that was held before the op is still owner,
// and have not granted it anew since a majority was last known to have kept it.
// It leaves out servers that the request has gained if others can have owned a majority with them before.
func (op *Op) sure() int {
	n, gained, others := 0, 0, count(op.outcomes, outcomeLost, outcomeNo, outcomeSkipped)
	for i, was := range op.before {
		switch {
		case op.outcomes[i] != outcomeYes:
		case !was.stood || op.req.parts[i].broken:
			others++
		case op.req.gained(i):
			gained++
		default:
			n++
		}
	}
	if gained+others < Majority(len(op.outcomes)) {
		n += gained
	}
	return n
}

// gained reports whether a server is known to have granted a lease only since a majority was last known
// to have kept it. Until then another client may have owned there.
func (r *request) gained(i int) bool {
	if r.downgradeOf != nil { // it has only what it was passed
		return r.downgradeOf.gained(i)
	}
	return !r.keptAt.IsZero() && r.parts[i].since.After(r.keptAt)
}

// granted decides an op if a majority has granted r, and reports whether it did.
func (l *Lock) granted(op *Op, r *request, now time.Time, fx *Effects) bool {
	if !l.majority(r, op.at, now) {
		return false
	}
	// A message announced the grant first if there is a token, unless a server has granted it anew since.
	a := protocol.Answer{Outcome: protocol.Granted, More: r.anyMore(), Kept: r.token != 0 && count(op.outcomes, outcomeLost) == 0}
	if op.held && r == op.req {
		kept := 0
		for i, was := range op.before {
			if was.stood && op.outcomes[i] == outcomeYes {
				kept++
			}
		}
		if kept < l.cfg.need() && open(op.outcomes) > 0 {
			return false
		}
		a.Kept = op.standing(now) >= l.cfg.need()
	}
	token, clock, kept := l.tokenOf(r, !a.Kept, now)
	if a.Kept {
		token = r.token
	} else if !kept {
		l.writeBack(r, token, fx)
		return false
	}
	a.Token, a.Clock = token, clock
	r.token = token
	r.noteMajority()
	switch {
	case op.verb == protocol.Downgrade: // the lease goes on, with what is known of it
		r.keptAt, r.downgradeOf = now, nil
	case !a.Kept:
		r.noteKept(nil, now)
	case r == op.req && op.sure() >= l.cfg.need():
		r.noteKept(op, now)
	}
	op.Answer = a
	l.decide(op, now, fx)
	return true
}

// noteMajority notes that the request owns a majority, and that nobody else can have owned one since
// it was granted.
func (r *request) noteMajority() {
	r.unbroken = true
	for i := range r.parts {
		r.parts[i].grantedLate = false
	}
}

// noteKept notes that a majority of servers has answered that it kept the lease. Until then, a server that
// granted anew proves nothing, because a silent server may be part of the majority. The answers are as
// old as the op that asked for them. They say nothing of servers that granted anew since: another client
// may have owned there, and on a server that had already answered. If op is nil, the grant is new, and
// no part counts as granted anew.
func (r *request) noteKept(op *Op, now time.Time) {
	broken := false
	if op != nil {
		now = op.at
	}
	if now.After(r.keptAt) { // else a renewal was answered after a later one
		r.keptAt = now
	}
	for i := range r.parts {
		p := &r.parts[i]
		if op == nil || op.before[i].owned && op.before[i].breaks == p.breaks {
			p.broken = false
		}
		broken = broken || p.broken
	}
	r.evicted = r.evicted && broken
}

// noMajority decides an acquire that too few servers answered or could vote for. The grants of the
// others are given back: a client that cannot own the lock must not keep out those that can. A
// downgrade's grants are kept, because they are what is left of a lease.
func (l *Lock) noMajority(op *Op, r *request, now time.Time, fx *Effects) {
	e := l.noQuorum(op)
	op.Err = e
	l.decide(op, now, fx)
	if e.answered >= l.cfg.need() {
		e.young = l.untilEnoughVote(r, now)
	}
	if r.token == 0 && op.verb != protocol.Downgrade {
		l.retreat(r, fx)
		l.drop(r, now, fx) // the state machine may ask under its id again: see request
	}
}

// untilEnoughVote returns for how long too few of the servers that granted r may vote; 0 if none is in quarantine.
func (l *Lock) untilEnoughVote(r *request, now time.Time) time.Duration {
	lacking := l.cfg.need()
	var young []time.Duration
	for i := range r.parts {
		switch p := &r.parts[i]; {
		case p.state != owned:
		case now.Before(p.countsFrom):
			young = append(young, p.countsFrom.Sub(now))
		default:
			lacking--
		}
	}
	if len(young) == 0 {
		return 0
	}
	slices.Sort(young)
	return young[min(max(lacking, 1), len(young))-1]
}

// retreat cancels a request on all servers that have granted or queued it, or may.
func (l *Lock) retreat(r *request, fx *Effects) {
	for i := range r.parts {
		p := &r.parts[i]
		if p.id != "" && p.goesOn() && (p.state == owned || p.state == queued || p.asking) {
			l.cancel(nil, r, i, nil, 0, fx)
		}
	}
}

// describeWait adds to the answer of op what r waits for: the blocker on the server that is expected to
// complete its majority. What a server that has not answered said before is old, and does not count.
func (l *Lock) describeWait(op *Op, r *request) {
	a := &op.Answer
	lacking := l.cfg.need()
	var in []*part
	for i := range r.parts {
		p := &r.parts[i]
		switch o := op.outcomes[i]; {
		case p.state == owned:
			lacking--
		case o == outcomeFailed || o == outcomePending:
		case p.blocker != "" || p.state == queued:
			in = append(in, p)
		}
	}
	slices.SortStableFunc(in, func(x, y *part) int {
		if x.endless != y.endless {
			if x.endless {
				return 1
			}
			return -1
		}
		return x.left.Compare(y.left)
	})
	if len(in) == 0 {
		a.Left = protocol.Ownerless
		return
	}
	p := in[min(max(lacking, 1), len(in))-1]
	a.Blocker, a.Place, a.NoNotify = p.blocker, p.place, p.noNotify
	if i := slices.IndexFunc(in, func(q *part) bool { return q.blocker != "" && !r.isOurs(q.blocker) }); i >= 0 && r.isOurs(p.blocker) {
		a.Blocker = in[i].blocker // p is blocked only by an earlier request of ours, which is leaving
	}
	switch {
	case p.endless:
		a.Left = protocol.Endless
	case p.left.IsZero():
		a.Left = protocol.Ownerless
	default:
		a.Left = max(0, p.left.Sub(op.at))
	}
	a.Echo = protocol.NoEcho
	for _, each := range in {
		a.Place, a.Told = min(a.Place, each.place), max(a.Told, each.told)
	}
}

// isSplit reports whether a request was refused because of writers of which none is known to own a
// majority. If several clients ask for a free lock at once, each may be granted it by a few servers, so
// that all are refused. Where a client does own a majority, or the lock is the readers' or in a cool-down,
// nobody has to ask again.
func (l *Lock) isSplit(r *request) bool {
	on := map[string]int{}
	for i := range r.parts {
		p := &r.parts[i]
		if p.state == owned || p.blocker == "" {
			continue
		}
		who, err := protocol.ParseID(p.blocker)
		if err != nil || who.Mode != protocol.Exclusive {
			return false
		}
		if on[who.Client]++; on[who.Client] >= l.cfg.need() {
			return false
		}
	}
	return len(on) > 0
}

// isOurs reports whether the request's blocker is another request of the same client.
func (r *request) isOurs(blocker string) bool {
	who, err := protocol.ParseID(blocker)
	return err == nil && who.Client == r.who.Client
}

// tally returns on how many servers the request is proven to have owned until it was given back, and
// on how many that can no longer be proven. Servers that have lost their data meanwhile count as
// proven, unless all N have and no server proves it otherwise: only then can other clients have
// counted them. Servers that the request has gained are none if others can have owned a majority
// with them before.
func (op *Op) tally(outcomes []outcome, now time.Time) (proven, not int) {
	proven, not = count(outcomes, outcomeYes, outcomeUnproved), count(outcomes, outcomeLost, outcomeNo, outcomeSkipped)
	restarted, young := count(outcomes, outcomeRestarted), 0
	for i, o := range outcomes {
		if o == outcomeRestarted || now.Before(op.req.parts[i].countsFrom) {
			young++
		}
	}
	gained, gainedRestarted := 0, 0
	for i, o := range outcomes {
		switch {
		case !op.req.gained(i):
		case o == outcomeYes:
			gained++
		case o == outcomeRestarted:
			gainedRestarted++
		}
	}
	if gained+gainedRestarted+not >= Majority(len(outcomes)) {
		proven, restarted, not = proven-gained, restarted-gainedRestarted, not+gained+gainedRestarted
	}
	switch {
	case proven > 0:
		return proven + restarted, not
	case young == len(outcomes):
		return 0, not + restarted
	case open(outcomes) > 0: // it may turn out that all have
		return 0, not
	}
	return restarted, not
}

// proves reports whether the answers of the servers to which a request was given back prove that no
// other client has owned the lock since the grant; see request.doubted.
func (l *Lock) proves(op *Op, outcomes []outcome, now time.Time) bool {
	sure := slices.Clone(outcomes)
	for i, o := range sure {
		if o == outcomeUnproved {
			sure[i] = outcomeNo
		}
	}
	yes, _ := op.tally(sure, now)
	return yes >= l.cfg.need()
}

// evaluateRelease decides a release: whether the request owned on a majority until it was given back there.
func (l *Lock) evaluateRelease(op *Op, now time.Time, fx *Effects) {
	yes, never := op.tally(op.outcomes, now)
	op.proved = !op.req.doubted || l.proves(op, op.outcomes, now)
	switch {
	case yes >= l.cfg.need() && !op.proved && open(op.outcomes) > 0:
		return // the others may prove it
	case yes >= l.cfg.need():
		op.Answer = protocol.Answer{Outcome: protocol.Done}
	case l.cfg.tooMany(never):
		op.Answer = protocol.Answer{Outcome: protocol.NotOurs}
	case open(op.outcomes) > 0:
		return
	default:
		l.decideWithError(op, now, fx) // a cancel follows
		l.forgetLater(op.req, now)
		return
	}
	l.decide(op, now, fx)
	l.drop(op.req, now, fx)
}

// evaluateMove decides a yield or downgrade: first whether the old request owned on a majority until
// now, and if so, as an acquire, what became of the new one.
func (l *Lock) evaluateMove(op *Op, now time.Time, fx *Effects) {
	yes, never := op.tally(op.olds, now)
	if op.verb == protocol.Downgrade {
		for i := range op.next.parts {
			// Done by an earlier try, and not lost since.
			if q := &op.next.parts[i]; q.state == owned && op.olds[i] == outcomeNo && op.req.parts[i].downgraded && !q.broken && !q.doubted {
				yes, never = yes+1, never-1
			}
		}
	}
	switch {
	case l.cfg.tooMany(never):
		op.Answer = protocol.Answer{Outcome: protocol.NotOurs}
		l.decide(op, now, fx)
		l.drop(op.req, now, fx)
		l.retreat(op.next, fx)
		l.drop(op.next, now, fx)
		return
	case yes >= l.cfg.need():
	case open(op.olds) > 0:
		return
	default:
		l.decideWithError(op, now, fx)
		l.forgetLater(op.req, now)
		if op.verb == protocol.Downgrade {
			l.forgetLater(op.next, now)
		}
		return
	}
	if op.verb == protocol.Downgrade && op.next.token == 0 {
		op.next.unbroken = true // the old request owned a majority until now
	}
	l.evaluateAcquire(op, op.next, now, fx)
	switch {
	case op.decided && op.Err == nil:
		l.drop(op.req, now, fx)
	case op.decided && op.verb == protocol.Downgrade:
		l.forgetLater(op.req, now)
		l.forgetLater(op.next, now)
	}
}

// evaluateCancel decides a cancel. It succeeds once a majority says whether the request owned there, and
// says that the request owned the lock if it did so on a majority. Where a downgrade was sent and may have
// been carried out, the cancel of the new request follows, and proves the lease on those servers together
// with the others.
func (l *Lock) evaluateCancel(op *Op, now time.Time, fx *Effects) {
	r := op.req
	outcomes, passed := op.withoutPassed()
	yes, no := op.tally(outcomes, now)
	pending := open(op.outcomes)
	owned := r.token != 0 || r.downgradeOf != nil
	switch {
	case owned && yes >= l.cfg.need():
		op.Canceled = protocol.Canceled{Owned: true, Proved: true}
	case passed > 0 && yes+passed >= l.cfg.need():
	case owned && l.cfg.tooMany(no), !owned && yes+no >= l.cfg.need():
	case pending > 0:
		return
	default:
		e := l.noQuorum(op)
		op.Err = e
		l.decide(op, now, fx)
		l.forgetLater(r, now)
		op.Canceled = protocol.Canceled{Fail: &protocol.Failure{Err: e, Kind: e.kind}}
		return
	}
	l.decide(op, now, fx)
	l.drop(r, now, fx)
}

// withoutPassed returns the outcomes of a cancel without those of servers where the request did not own any
// more because a downgrade may have passed on what it had, and how many these are. They say nothing of the
// lease.
func (op *Op) withoutPassed() (outcomes []outcome, passed int) {
	lower := op.req.downgradesTo
	if lower == nil {
		return op.outcomes, 0
	}
	outcomes = slices.Clone(op.outcomes)
	for i, o := range outcomes {
		if o == outcomeNo && (lower.parts[i].byDowngrade || lower.parts[i].passes) {
			outcomes[i] = outcomeFailed
			passed++
		}
	}
	return outcomes, passed
}

// evaluateRenewal decides a renewal. It succeeds if a majority has renewed the lease or grants it
// now, and a majority of servers had granted it before and are not known to have lost it. Otherwise
// another client may have owned the lock in between.
func (l *Lock) evaluateRenewal(op *Op, now time.Time, fx *Effects) {
	r := op.req
	renewed, n := 0, 0
	for i := range r.parts {
		if p := &r.parts[i]; p.state == owned && !p.proved.Before(op.at) {
			n++
			if op.held && op.before[i].stood && op.outcomes[i] == outcomeYes {
				renewed++
			}
		}
	}
	switch {
	case !op.held || op.standing(now) < l.cfg.need():
		op.Renewed = protocol.NotOurs // if the state machine still holds the lease, it cancels the request
		l.decide(op, now, fx)
		if r.token != 0 && r.op == nil {
			l.forgetLater(r, now)
		}
		return
	case renewed >= l.cfg.need(), n >= l.cfg.need() && open(op.outcomes) == 0:
		op.Renewed = protocol.Granted
		_, op.Clock, _ = l.tokenOf(r, false, now)
		r.noteMajority()
		if op.sure() >= l.cfg.need() {
			r.noteKept(op, now)
		}
	case open(op.outcomes) > 0:
		return
	default:
		op.Renewed = protocol.Unanswered
		l.decideWithError(op, now, fx)
		return
	}
	l.decide(op, now, fx)
}
