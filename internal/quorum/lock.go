// Package quorum runs the protocol on several independent servers. To own the lock is to own it
// on a majority of them. To the state machine, a quorum looks like one server: it takes the same
// commands, and combines the servers' answers or messages into one.
//
// Lock makes the decisions, without I/O, clocks or goroutines: it is given events and the current
// time, and returns effects. The events are the state machine's commands (ops.go, decide.go), the
// servers' answers (this file) and messages (messages.go), a subscription that is confirmed again
// (rejoin.go), and the end of a pause (partial.go). server.go and member.go perform the effects.
// operator.go asks the servers without a Lock.
package quorum

import (
	"fmt"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Config is what the locks of a client share.
type Config struct {
	N    int // number of servers
	Need int // how many of them are a majority
	// NewID returns a request id that was never used.
	NewID func(like protocol.Identity) string
	// Proof returns the letter that a new id for this server has to carry.
	Proof func(server int) protocol.Proof
	// Ticket returns the number that places a request made now in the queues of all servers:
	// the first server's clock in µs, as far as it is known.
	Ticket func() uint64
	// Away reports whether a server is known not to answer. Nothing is sent to such a server.
	Away func(server int) bool
	// Why returns why a server is away. It may be nil.
	Why func(server int) error
}

// Majority returns how many of n servers are a majority.
func Majority(n int) int { return n/2 + 1 }

// Lock is the state of one client's requests for one lock on all servers. The caller of its
// methods must serialize the calls, and must perform the effects afterwards.
type Lock struct {
	cfg   *Config
	keys  *protocol.Keys
	reqs  map[string]*request // keyed by the ids that the state machine knows
	parts map[string]*request // keyed by the ids that the servers know
	lanes []lane
	dueAt time.Time  // when Tick has to look at the requests again; zero for never
	past  []pastPart // a ring buffer of at most mostPast entries
	ended int        // how many entries were ever added to past
}

// pastPart is a part that was released, cancelled or yielded recently. A message that its server
// sent before it learned of this is no reason to cancel the part.
type pastPart struct {
	id     string
	server int
	at     time.Time
}

const mostPast = 32

// crossing is for how long after a part has ended a message about it is taken for one that the
// server sent before it learned of the end.
const crossing = time.Second

// lane holds the commands for one server about the lock. They are sent one at a time, so that
// none overtakes another.
type lane struct {
	busy  bool
	queue []*Send
}

// request is one request of the state machine.
type request struct {
	id    string
	base  string // the id of all parts except those that needed another one
	who   protocol.Identity
	parts []part
	// ticket is the request's place in the queue of each server. Because it is the same on all
	// servers, they let in the same request next, and a lock is rarely split.
	ticket      uint64
	basis       time.Time      // only proofs since then count for a message to the state machine
	token       uint64         // the grant's token; 0 until the state machine is told of the grant
	whole       bool           // the request has owned a majority without a break since it was granted
	last        uint64         // the last token assigned under the request, as the state machine says
	link        *protocol.Span // hold span of the lease that was given back for this one, from the last message
	forgetAt    time.Time      // when to forget the request, because its release or cancel failed; else zero
	op          *Op            // the undecided command or cancel of the state machine about the request
	poked       bool           // the state machine was told to ask again, and no server has granted the request since
	ofDowngrade bool           // a downgrade's new request; only the downgrade's answer announces it to the state machine
	// doubted: an acquire of a lease that the state machine held had no answer. So the state machine
	// trusts a release only if it proves that no other client has owned the lock since the grant.
	doubted     bool
	keptAt      time.Time // when a majority was last known to have kept the lease
	evicted     bool      // an operator has evicted the lease on some server since keptAt
	downgrading bool      // a downgrade of the request was sent, and its answer decides about the request
	dropped     bool      // the state machine no longer knows the request
	abandoned   bool      // the state machine was told that the lease is lost; the request ends when its op is decided
}

// part is a request on one server.
type part struct {
	history

	id    string // "" until there is an id for this server
	state partState
	// proved is when the last command that proved ownership was sent. Before a grant it is when
	// the first acquire was sent, or the last one that was answered with "queued".
	proved time.Time
	floor  uint64 // queued: the lock's last token there
	token  uint64 // owned: the grant's token
	known  uint64 // owned: the greatest token of the lock that the server is known to have stored
	clock  uint64 // the server's clock in µs when it last said that we own the lock
	told   uint64 // time up to which readers were notified
	more   bool   // owned: others wait on this server
	asking bool   // an acquire is under way or waits in the lane
	// unsure: a command without an answer may still arrive, or may have been executed after a
	// restart of the server that we have not learned of. unheard: a message said that we own the
	// lock, and the server has not said since whether it is in quarantine.
	unsure  bool
	unheard bool
	refused bool  // its server had another owner, and the request did not wait
	adopts  bool  // an adopt is under way
	forgets bool  // an adopt failed
	also    []*Op // renewals, releases, yields and downgrades that wait for the answer to another op's acquire
	// looks is set while the acquire under way is one of Rejoined, or a yield that gives a partial grant
	// back is under way. later is the op that asks the server once that is answered.
	looks bool
	later *Op
	late  bool // the server granted the part again only after quarantineEnd
	// evicted is the greatest token of the lock that a message about the part's eviction had: what the
	// server granted with it, or with an earlier one, is gone.
	evicted uint64
	// doubted: an acquire of a part that its server had granted had no answer. So the server may have
	// granted it anew under the same id, after another owner, and only the lock's last token shows that.
	doubted bool

	blocker  string
	left     time.Time // when the owner's lease ends there; zero if unknown
	endless  bool
	place    int
	noNotify bool

	sent       bool // a command with the part's id has left the lane
	ended      bool // the server no longer has the part: it was released, cancelled, refused or never sent
	confirmed  bool // the part was ours until it ended
	downgraded bool // the part was ours until a downgrade passed it to the next request
	follows    bool // a downgrade passed to this part what was ours until then
	again      bool // the server had lost its data when the part ended, and its grants did not count meanwhile
}

// history is what is known of a request on one server whatever id it has there: see identify.
type history struct {
	since    time.Time // when the part became owned; if its server lost its data, before that
	young    time.Time // until then a grant of the server does not count for a majority
	regrants int       // how often the part's grant was given back
	lost     bool      // a renewal found the part lost, and the acquire that follows has no answer yet
	anew     bool      // granted anew since a majority was last known to have kept the lease: others may have owned there in between
	anews    int       // how often the part was found granted anew, or evicted
	// quarantineEnd is set for a part that was owned when its server lost its data: the end of the server's
	// quarantine, before which no other client can count the server's vote.
	quarantineEnd time.Time
	// lostToken is the token of the grant that the server seems to have lost with its data, while the lease
	// was held; else 0. A message that the grant was evicted says otherwise. lostID is the id that the part
	// had then, if it has another one now.
	lostToken uint64
	lostID    string
}

type partState uint8

const (
	absent partState = iota // the server does not have the part, or nothing is known
	asked                   // sent, no answer yet
	queued
	owned
	ending // a release, yield, downgrade or cancel is under way
)

// Send is a command for one server. Its outcome is reported by the event Answered.
type Send struct {
	Server int
	Kind   Kind
	Cmd    protocol.Command       // Do
	Cancel protocol.CancelRequest // Cancel
	Renew  protocol.Renewal       // Renew
	Keys   *protocol.Keys
	ID     string // Adopt: the owner
	Token  uint64 // Adopt
	Probes bool   // Do: the command may also probe the inbox at this server

	req, next *request
	op        *Op
}

// Requests returns the state machine's ids of the requests that the command is about, for tests.
func (s *Send) Requests() (id, next string) {
	if s.next != nil {
		next = s.next.id
	}
	return s.req.id, next
}

// Kind is the kind of a Send.
type Kind uint8

// The kinds of sends.
const (
	Do Kind = iota
	Cancel
	Renew
	Adopt // store a token, if the id is still the owner
)

// Result is a server's answer to a Send.
type Result struct {
	Answer    protocol.Answer
	Cancelled protocol.Cancelled
	Renewed   protocol.Outcome
	Clock     uint64
	Young     time.Duration // for how long the server's grants do not count yet
	Fail      *protocol.Failure
}

// Effects are the actions that follow from an event.
type Effects struct {
	Sends    []*Send
	Done     []*Op              // the ops that were decided
	Messages []protocol.Message // for the state machine
	Strays   []Stray            // requests that a server may still have
}

// Stray is a request that one server may still have, or get, although its Lock no longer needs it.
type Stray struct {
	Server int
	Keys   *protocol.Keys
	ID     string
	Last   uint64
	TTL    time.Duration
	Late   bool // a command about it had no answer, and may still arrive
	Ends   bool // the server has been told, or is about to be, that the request has ended
}

// ScheduleIn has the stray cancelled, on behalf of owner.
func (s *Stray) ScheduleIn(all *lockstate.CancelSchedule, owner any, now time.Time) {
	c := &lockstate.Cancellation{Owner: owner, ID: s.ID, Last: s.Last}
	if s.Late {
		c.RepeatFor(s.TTL, now)
	}
	if s.Ends { // what ends it may have a cool-down, and so has to come first, or to have failed
		now = now.Add(protocol.CommandTimeout + time.Second)
	}
	all.Add(c, now)
}

// NewLock returns a lock without requests.
func NewLock(cfg *Config, keys *protocol.Keys) *Lock {
	k := *keys
	return &Lock{cfg: cfg, keys: &k, reqs: map[string]*request{}, parts: map[string]*request{}, lanes: make([]lane, cfg.N)}
}

// Idle reports whether the lock can be forgotten: it has no requests, and no command is under way.
func (l *Lock) Idle() bool {
	if len(l.reqs) > 0 {
		return false
	}
	for i := range l.lanes {
		if l.lanes[i].busy {
			return false
		}
	}
	return true
}

// Due returns when Tick must be called next, zero for never.
func (l *Lock) Due() time.Time { return l.dueAt }

// request returns the request with this id, and creates it if there is none. The servers never see
// the id: the state machine may use it again after the parts were cancelled, whereas no id that a
// server has seen may be used again.
func (l *Lock) request(id string) *request {
	r := l.reqs[id]
	if r == nil {
		who, _ := protocol.ParseID(id)
		r = &request{id: id, who: who, parts: make([]part, l.cfg.N)}
		r.base, r.ticket = l.cfg.NewID(who), l.cfg.Ticket()
		l.reqs[id] = r
	}
	return r
}

// identify returns the part of r on server i, with an id under which that server can be asked.
func (l *Lock) identify(r *request, i int, fx *Effects) *part {
	p := &r.parts[i]
	if p.id != "" && p.state != ending && !p.ended {
		return p
	}
	old := *p
	old.putOff(i)
	if old.unsure {
		fx.Strays = append(fx.Strays, l.stray(r, i))
	}
	*p = part{history: old.history}
	if old.lostToken != 0 && (old.token != 0 || old.lostID == "") {
		p.lostID = old.id
	}
	if old.id == "" && l.cfg.Proof(i) == r.who.Proof {
		p.id = r.base
	} else {
		p.id = l.newID(r, i)
	}
	l.forgetPart(old.id, r)
	l.forgetPart(old.lostID, r)
	l.parts[p.id] = r
	return p
}

func (l *Lock) newID(r *request, i int) string {
	like := r.who
	like.Proof = l.cfg.Proof(i)
	return l.cfg.NewID(like)
}

// forgetPart removes a part's id unless another part of r has the same one.
func (l *Lock) forgetPart(id string, r *request) {
	if l.parts[id] == r && !slices.ContainsFunc(r.parts, func(p part) bool { return p.id == id || p.lostID == id }) {
		delete(l.parts, id)
	}
}

// drop forgets a request that the state machine no longer needs. Parts that servers may still have,
// and that no command under way ends, become strays.
func (l *Lock) drop(r *request, now time.Time, fx *Effects) {
	if r.dropped {
		return
	}
	r.dropped = true
	delete(l.reqs, r.id)
	for i := range r.parts {
		p := &r.parts[i]
		if p.id == "" {
			continue
		}
		if l.parts[p.lostID] == r {
			delete(l.parts, p.lostID)
		}
		if p.unsure || !p.ended && p.state != ending {
			fx.Strays = append(fx.Strays, l.stray(r, i))
		} else {
			l.remember(p.id, i, now)
		}
		if l.parts[p.id] == r {
			delete(l.parts, p.id)
		}
	}
}

// remember notes that a part has ended, or that the command that ends it is under way. If that
// command fails, the part becomes a stray.
func (l *Lock) remember(id string, server int, now time.Time) {
	if p := (pastPart{id, server, now}); len(l.past) < mostPast {
		l.past = append(l.past, p)
	} else {
		l.past[l.ended%mostPast] = p
	}
	l.ended++
}

// crossed reports whether a message with this id is about a part that has just ended.
func (l *Lock) crossed(id string, server int, now time.Time) bool {
	return slices.ContainsFunc(l.past, func(p pastPart) bool {
		return p.id == id && p.server == server && now.Sub(p.at) < crossing
	})
}

func (l *Lock) stray(r *request, i int) Stray {
	p := &r.parts[i]
	return Stray{Server: i, Keys: l.keys, ID: p.id, Last: p.lastFor(r), TTL: r.who.TTL, Late: p.unsure, Ends: p.ended || p.state == ending}
}

// lastFor returns the last token that a release has to tell the server, 0 if the server knows it.
func (p *part) lastFor(r *request) uint64 {
	last := max(r.last, r.token)
	if last > p.known {
		return last
	}
	return 0
}

// send sends a command through the server's lane; only renewals bypass it.
func (l *Lock) send(s *Send, fx *Effects) {
	s.Keys = l.keys
	if s.Kind == Renew {
		fx.Sends = append(fx.Sends, s)
		return
	}
	ln := &l.lanes[s.Server]
	if ln.busy {
		ln.queue = append(ln.queue, s)
		return
	}
	ln.busy = true
	s.leave(fx)
}

// leave takes a command out of its lane, to be sent.
func (s *Send) leave(fx *Effects) {
	for _, r := range []*request{s.req, s.next} {
		if r == nil {
			continue
		}
		if p := &r.parts[s.Server]; p.id == s.Cmd.ID || p.id == s.Cmd.Next {
			p.sent = true
		}
	}
	fx.Sends = append(fx.Sends, s)
}

// withdraw removes a part's acquires that have not left the lane. So a server that answers slowly
// works at one request at a time, and its lane does not grow, however many requests begin and end
// on the other servers meanwhile. It reports whether the part's id was sent to the server, or will
// be.
func (l *Lock) withdraw(r *request, i int) bool {
	ln, p := &l.lanes[i], &r.parts[i]
	ln.queue = slices.DeleteFunc(ln.queue, func(s *Send) bool {
		if s.req != r || s.Kind != Do || s.Cmd.Verb != protocol.Acquire || s.Cmd.ID != p.id {
			return false
		}
		p.asking, p.looks = false, false
		p.putOff(i)
		if s.op != nil {
			s.op.away(i, errBusy)
		}
		return true
	})
	return p.sent || slices.ContainsFunc(ln.queue, func(s *Send) bool { return s.Cmd.Next == p.id })
}

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
		l.cancelled(s, res, now, fx)
	case Renew:
		l.renewed(s, res, now, fx)
	case Adopt:
		p := &s.req.parts[i]
		if p.id == s.ID {
			p.adopts = false
			if p.forgets = res.Fail != nil || res.Answer.Outcome != protocol.Done; !p.forgets {
				p.known = max(p.known, s.Token)
			}
		}
		l.review(s.req, now, fx)
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
	r, i, a := s.req, s.Server, res.Answer
	p := s.part()
	if p == nil {
		// The part has another id by now, and nothing uses this one.
		if res.Fail.MayRun() || a.Outcome == protocol.Granted || a.Outcome == protocol.Enqueued {
			fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: s.Cmd.ID, TTL: r.who.TTL, Late: res.Fail.MayRun()})
		}
		return
	}
	// Whether the server had granted the part before this answer.
	had := p.state == owned && !a.Kept || p.lost || !p.quarantineEnd.IsZero()
	wasLost, ops, later := p.lost, p.also, p.later
	p.asking, p.looks, p.also, p.later = false, false, nil, nil
	if s.op != nil {
		ops = append(ops, s.op)
	}
	if res.Young > 0 {
		p.young = now.Add(res.Young)
	} else if res.Fail == nil {
		p.young = time.Time{}
	}
	if !s.Cmd.Held || res.Fail == nil { // an owner's question gives the part nothing
		p.heard(a.Outcome, res.Fail)
		p.doubted = p.doubted || res.Fail.MayRun() && p.known != 0
	}
	if s.Cmd.Held && p.state != ending && !r.dropped && l.askedInVain(s, a, ops, now, fx) {
		return
	}
	outcome := outcomeFailed
	switch {
	case p.state == ending: // a later command in the lane ends the part
		if wasLost && res.Fail == nil {
			outcome = lostUnless(res.Young > 0 && !p.anew && !a.Kept) // kept: the answer is older than the loss
			p.again = outcome == outcomeAgain
		}
		if (res.Fail != nil || res.Young == 0) && (wasLost || p.missed(a, res.Fail)) {
			p.brokeOff()
		}
	case res.Fail != nil:
		for _, op := range ops {
			op.fail(i, res.Fail)
		}
		if wasLost {
			outcome = outcomeLost
			p.brokeOff()
		}
		// The acquire did not run, and no earlier one may have: the server does not have the part.
		if !p.unsure && p.state == asked {
			p.state, p.ended = absent, true
		}
	case a.Outcome == protocol.Granted && a.Token <= p.evicted: // the message of the eviction was faster
		outcome = outcomeNo
		if had {
			outcome = outcomeLost
		}
		p.state, p.ended = absent, true
	case a.Outcome == protocol.Granted:
		outcome = outcomeYes
		if had && (p.state != owned || a.Token != p.token) {
			// Granted anew: others may have had it there in between, unless the server has lost its data. An
			// answer that it was kept is older than the loss that a renewal has found.
			older := wasLost && a.Kept && p.state != owned
			outcome = lostUnless(res.Young > 0 && p.lasts(r, now) && !older)
			if outcome == outcomeLost {
				p.brokeOff()
			} else if r.token != 0 {
				p.lostToken = max(p.lostToken, p.token)
			}
		}
		r.own(p, a, s.Cmd.At, now, res.Young > 0)
		if a.Kept && r.token == 0 { // it may have been granted anew meanwhile, after another owner
			p.token, p.known = max(p.token, a.Token), max(p.known, a.Token)
		}
	case a.Outcome == protocol.Enqueued:
		outcome = outcomeNo
		if p.state == owned && a.Token < p.token { // the message of a later grant was faster
			outcome = outcomeOvertaken
			if wasLost { // by which it was granted anew
				if outcome = lostUnless(now.Before(s.Cmd.At.Add(res.Young))); outcome == outcomeLost {
					p.brokeOff()
				}
			}
			break
		}
		if had || p.state == owned {
			outcome = p.displaced(s, res, now)
		}
		p.state, p.ended, p.proved, p.floor, p.token, p.known = queued, false, s.Cmd.At, a.Floor(), 0, 0
		p.told = a.Told
		p.blockedBy(&a, now)
	case a.Outcome == protocol.Refused:
		outcome = outcomeNo
		if had || p.state == owned {
			outcome = p.displaced(s, res, now)
		}
		p.state, p.refused = absent, true
		p.ended = true // the part was never queued there, or no longer is
		p.blockedBy(&a, now)
	}
	p.lost = false
	if r.dropped && (p.state == owned || p.state == queued || res.Fail.MayRun()) {
		fx.Strays = append(fx.Strays, l.stray(r, i))
	}
	for _, op := range ops {
		if r.dropped && op.kind != Renew { // nobody may be told of what is given back
			continue
		}
		op.handed = max(op.handed, a.Handed)
		op.unfinished = op.unfinished || a.Unfinished
		if op.req == r {
			op.settleGiven(i, outcome)
		} else {
			op.settle(i, outcome)
		}
		l.evaluate(op, now, fx)
	}
	if r.dropped {
		return
	}
	l.heed(r, now, fx)
	l.askLater(later, r, i, now, fx)
	l.review(r, now, fx)
}

// askedInVain takes an answer to an owner's question, if it says that the server no longer has what it
// granted us, or a renewal has said so meanwhile. An acquire follows, which finds out why, as after
// a renewal; ops wait for it. Otherwise askedInVain does nothing and returns false.
func (l *Lock) askedInVain(s *Send, a protocol.Answer, ops []*Op, now time.Time, fx *Effects) bool {
	p := &s.req.parts[s.Server]
	switch {
	case p.lost:
	case a.Outcome != protocol.NotOurs || p.state != owned || s.Cmd.At.Before(p.proved): // a command that was sent later proved it
		return false
	default:
		p.lose(s.req, now)
	}
	for _, op := range ops {
		l.askLost(op, s.Server, fx)
	}
	for _, op := range ops {
		l.evaluate(op, now, fx)
	}
	l.heed(s.req, now, fx)
	return true
}

// lostUnless is the outcome for a server that no longer has what it granted us. A young server lost
// its data, and whoever it has granted the lock to since cannot count that grant.
func lostUnless(young bool) outcome {
	if young {
		return outcomeAgain
	}
	return outcomeLost
}

// displaced returns the outcome for a server that had granted the part and says now that we are not
// the owner. The quarantine is counted from when the command was sent, so that it ends here before
// it does for any other client.
func (p *part) displaced(s *Send, res Result, now time.Time) outcome {
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

// lasts reports whether what the server granted cannot have ended there yet.
func (p *part) lasts(r *request, now time.Time) bool {
	return p.state != owned || lockstate.Elapsed(p.proved, now) < r.who.TTL
}

// inQuarantine reports whether the part was owned when its server lost its data, and the server is still in
// quarantine. quarantineOver reports whether that quarantine has ended since.
func (p *part) inQuarantine(now time.Time) bool {
	return !p.quarantineEnd.IsZero() && lockstate.Elapsed(p.quarantineEnd, now) < 0
}

func (p *part) quarantineOver(now time.Time) bool {
	return !p.quarantineEnd.IsZero() && !p.inQuarantine(now)
}

// brokeOff notes that others may have owned the lock on the part's server since a majority was last
// known to have kept the lease.
func (p *part) brokeOff() {
	p.anew, p.lostToken = true, 0
	p.anews++
}

// missed reports whether the answer to an acquire of a part that is being given back says that the part
// was no longer owned. An answer that it was queued may be older than the message that granted it.
func (p *part) missed(a protocol.Answer, fail *protocol.Failure) bool {
	switch {
	case fail != nil || p.known == 0:
		return false
	case a.Outcome == protocol.Granted:
		return !a.Kept
	}
	return a.Token >= p.known
}

// stands reports whether no other client can have counted the server's vote since the part was
// first granted there, provided that the part is not late.
func (p *part) stands(now time.Time) bool { return p.state == owned || p.inQuarantine(now) }

// heard notes the answer to a command that may place the part, or its failure. An answer shows
// whether the server is in quarantine. But while an earlier command without an answer may still run,
// only the answer "granted" counts: a message may have been sent after a later restart.
func (p *part) heard(o protocol.Outcome, fail *protocol.Failure) {
	switch {
	case fail.MayRun():
		p.unsure = true
	case fail != nil:
	case o == protocol.Granted || !p.unsure:
		p.unheard = false
	}
}

// own notes that the part's server made us the owner, or extended our lease, after a command sent at
// from. inQuarantine says that the server was still in quarantine then.
func (r *request) own(p *part, a protocol.Answer, from, now time.Time, inQuarantine bool) {
	if p.state != owned {
		r.poked = false // it may complete a majority
		if !p.lost && p.quarantineEnd.IsZero() {
			p.since = now
		}
		p.late = !inQuarantine && p.quarantineOver(now)
		if p.late {
			p.brokeOff()
		}
	}
	p.quarantineEnd = time.Time{}
	if p.state != owned || !a.Kept {
		p.token, p.known = a.Token, a.Token
	}
	if p.state != owned || from.After(p.proved) {
		p.proved = from
	}
	p.state, p.ended = owned, false
	p.clock, p.more = max(p.clock, a.Clock), p.more || a.More
}

func (p *part) blockedBy(a *protocol.Answer, now time.Time) {
	p.blocker, p.place, p.noNotify = a.Blocker, a.Place, a.NoNotify
	p.endless, p.left = a.Left == protocol.Endless, time.Time{}
	if a.Left >= 0 {
		p.left = now.Add(a.Left)
	}
}

// String describes the requests, for tests.
func (l *Lock) String() string {
	text := ""
	for id, r := range l.reqs {
		text += fmt.Sprintf("%s token %d op %v:", id, r.token, r.op != nil)
		for i := range r.parts {
			text += fmt.Sprintf(" %d/ended %v/asking %v", r.parts[i].state, r.parts[i].ended, r.parts[i].asking)
		}
		text += "; "
	}
	for i := range l.lanes {
		text += fmt.Sprintf(" lane %v %d", l.lanes[i].busy, len(l.lanes[i].queue))
	}
	return text
}
