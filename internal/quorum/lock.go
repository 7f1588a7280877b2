// Package quorum runs the protocol on several independent servers. To own the lock is to own it
// on a majority of them. To the state machine, a quorum looks like one server: it takes the same
// commands, and combines the servers' answers or messages into one.
//
// Lock decides, without I/O, a clock or a goroutine: it is given events and the time, and returns
// effects. The events are what the state machine asks for (ops.go, decide.go), the servers'
// answers (this file) and messages (messages.go), the return of a subscription (rejoin.go), and
// the end of a pause (partial.go). server.go and member.go perform the effects.
package quorum

import (
	"fmt"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Config is what the locks of a client share.
type Config struct {
	N    int // number of servers
	Need int // how many of them are a majority
	// NewID returns a request id that was never used.
	NewID func(like protocol.Identity) string
	// Proof is the letter that ids for a server carry now.
	Proof func(server int) protocol.Proof
	// Ticket returns the number that places a request made now in the queues of all servers:
	// the first server's clock, µs, as far as that is known.
	Ticket func() uint64
	// Away reports whether a server is known not to answer, so that nothing is sent to it.
	Away func(server int) bool
	// Why returns why a server is away. It may be nil.
	Why func(server int) error
}

// Majority returns how many of n servers are a majority.
func Majority(n int) int { return n/2 + 1 }

// Lock is what one client has on the servers for one lock. Whoever calls its methods must
// serialize the calls, and performs the effects afterwards.
type Lock struct {
	cfg   *Config
	keys  *protocol.Keys
	reqs  map[string]*request // by the ids that the state machine knows
	parts map[string]*request // by the ids that the servers know
	lanes []lane
	dueAt time.Time  // when to look at partial grants again, zero for never
	past  []pastPart // a ring of mostPast
	ended int        // how many were put into past
}

// pastPart is a part that was released, cancelled or yielded lately. A message about it that its
// server sent before it learned of that is no reason to cancel the part.
type pastPart struct {
	id     string
	server int
	at     time.Time
}

const mostPast = 32

// crossing is how long after the end of a part a message about it may have crossed with that end.
const crossing = time.Second

// lane holds what is sent to one server about the lock: one command at a time, so that none
// overtakes another.
type lane struct {
	busy  bool
	queue []*Send
}

// request is one request of the state machine.
type request struct {
	id    string
	base  string // the id of the parts, but for those that had to get another
	who   protocol.Identity
	parts []part
	// ticket places it in the queue of each server. Since it is the same on all, they let the
	// same request in next, and few grants are no majority.
	ticket uint64
	basis  time.Time      // what the state machine trusts a message from
	token  uint64         // of the grant; 0 until the state machine was told of it
	whole  bool           // it has owned a majority without a break since it was granted
	last   uint64         // last token that it says was given out under the request
	link   *protocol.Span // hold span of the lease that made way for it on a server, by the last message
	until  time.Time      // its release or cancel failed: it is forgotten then; else zero
	op     *Op            // the command of the state machine about it, that awaits its answer
	poked  bool           // the state machine was asked to ask again
	lowers bool           // it is that of a downgrade, of which only the downgrade's answer tells the state machine
	// doubted: the state machine had no answer to an acquire of what it held. So it believes a
	// release only if that proves that no other client has owned the lock since the grant.
	doubted bool
	lowered bool // a downgrade of it was sent, whose answer decides what becomes of it
	over    bool // the state machine does not know it any more
	ends    bool // the state machine was told that it is lost: it is over when its op is decided
}

// part is a request on one server.
type part struct {
	id    string // "" if the server has never been sent one
	state partState
	// proved is the sending of the last command that proved ownership; until it is
	// granted, that of the first acquire, or of the last one that was answered queued.
	proved   time.Time
	floor    uint64 // queued: the lock's last token there
	token    uint64 // owned: the grant's
	known    uint64 // owned: the greatest token of the lock that the server is known to keep
	clock    uint64 // the server's, µs, when it last said that we own
	told     uint64 // up to which end of a lease readers were notified
	more     bool   // owned: others wait there
	since    time.Time
	regrants int       // how often it was given back
	young    time.Time // until then a grant of the server does not count for a majority
	asking   bool      // an acquire is on its way or waits in the lane
	// unsure: a command that had no answer may arrive yet, or may have been executed after a
	// restart of the server that we do not know of. unheard: a message said that we own, and
	// the server has not told us since whether it is in quarantine.
	unsure  bool
	unheard bool
	refused bool  // its server had another owner, and the request did not wait
	adopts  bool  // an adopt is on its way
	forgets bool  // an adopt failed
	lost    bool  // a renewal found it lost, and what it is asked then has no answer yet
	also    []*Op // renewals that wait for the answer to an acquire of another one
	// looks is set while the acquire on its way is one of Rejoined, and later is what its server is
	// asked for when that is answered.
	looks bool
	later *Op
	// until is for a part that was owned when its server lost its data: up to then the server
	// is in quarantine, so that no other client can count its vote. late is set if it granted
	// again only after that.
	until time.Time
	late  bool
	anew  bool // granted anew since a majority was last known to have kept the lease: others may have had it there in between
	anews int  // how often it was found granted anew
	// doubted: an acquire of what its server had granted had no answer. So it may be granted anew under
	// the same id, after another owner, and only the lock's last token tells.
	doubted bool

	blocker  string
	left     time.Time // when the owner's lease ends there; zero if unknown
	endless  bool
	place    int
	noNotify bool

	sent      bool // a command with its id has left its lane
	ended     bool // released or cancelled, as the server has answered
	confirmed bool // it was ours until then
	lowered   bool // it was ours until a downgrade, which gave it to the next request
	follows   bool // a downgrade gave it what was ours until then
	again     bool // its server had lost its data by then, and let nobody in who counts
}

type partState uint8

const (
	absent partState = iota // the server does not know it, or nothing is known
	asked                   // sent, no answer yet
	queued
	owned
	ending // a release, yield or cancel is on its way
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
	Probes bool   // Do: the server's inbox may be probed by this command

	req, next *request
	op        *Op
}

// Requests returns the ids that the state machine knows of what the command is about, for tests.
func (s *Send) Requests() (id, next string) {
	if s.next != nil {
		next = s.next.id
	}
	return s.req.id, next
}

// Kind is what a Send is.
type Kind uint8

// The kinds of sends.
const (
	Do Kind = iota
	Cancel
	Renew
	Adopt // keep a token, if the id is still owner
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

// Effects are what follows from an event.
type Effects struct {
	Sends    []*Send
	Done     []*Op              // decided
	Messages []protocol.Message // for the state machine
	Strays   []Stray            // requests that a server may still have
}

// Stray is a request that one server may still have although its lock is done with it.
type Stray struct {
	Server int
	Keys   *protocol.Keys
	ID     string
	Last   uint64
	TTL    time.Duration
}

// NewLock returns a lock without requests.
func NewLock(cfg *Config, keys *protocol.Keys) *Lock {
	k := *keys
	return &Lock{cfg: cfg, keys: &k, reqs: map[string]*request{}, parts: map[string]*request{}, lanes: make([]lane, cfg.N)}
}

// Idle reports whether the lock has nothing worth keeping.
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

// request returns the request with this id, and makes it if there is none. The servers never see
// the id: the state machine may ask for it again after its parts were cancelled, and no id that a
// server has seen is used twice.
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

// identify returns the part, with an id under which its server can be asked.
func (l *Lock) identify(r *request, i int) *part {
	p := &r.parts[i]
	if p.id != "" && p.state != ending && !p.ended {
		return p
	}
	old := *p
	old.putOff(i)
	*p = part{young: old.young, until: old.until, lost: old.lost, anew: old.anew, anews: old.anews}
	if old.id == "" && l.cfg.Proof(i) == r.who.Proof {
		p.id = r.base
	} else {
		p.id = l.newID(r, i)
	}
	l.forgetPart(old.id, r)
	l.parts[p.id] = r
	return p
}

func (l *Lock) newID(r *request, i int) string {
	like := r.who
	like.Proof = l.cfg.Proof(i)
	return l.cfg.NewID(like)
}

// forgetPart removes an id unless a part of r has it.
func (l *Lock) forgetPart(id string, r *request) {
	if l.parts[id] == r && !slices.ContainsFunc(r.parts, func(p part) bool { return p.id == id }) {
		delete(l.parts, id)
	}
}

// drop forgets a request that the state machine is done with. What servers may still have of it,
// and are not being told to end now, becomes strays.
func (l *Lock) drop(r *request, now time.Time, fx *Effects) {
	if r.over {
		return
	}
	r.over = true
	delete(l.reqs, r.id)
	for i := range r.parts {
		p := &r.parts[i]
		if p.id == "" {
			continue
		}
		if !p.ended && p.state != ending {
			fx.Strays = append(fx.Strays, l.stray(r, i))
		} else if !p.unsure {
			l.remember(p.id, i, now)
		}
		if l.parts[p.id] == r {
			delete(l.parts, p.id)
		}
	}
}

// remember notes that a part has ended, or that its end is on its way: if that fails, it
// becomes a stray.
func (l *Lock) remember(id string, server int, now time.Time) {
	if p := (pastPart{id, server, now}); len(l.past) < mostPast {
		l.past = append(l.past, p)
	} else {
		l.past[l.ended%mostPast] = p
	}
	l.ended++
}

// crossed reports whether a message is about a part that has just ended.
func (l *Lock) crossed(id string, server int, now time.Time) bool {
	return slices.ContainsFunc(l.past, func(p pastPart) bool {
		return p.id == id && p.server == server && now.Sub(p.at) < crossing
	})
}

func (l *Lock) stray(r *request, i int) Stray {
	p := &r.parts[i]
	return Stray{Server: i, Keys: l.keys, ID: p.id, Last: p.lastFor(r), TTL: r.who.TTL}
}

// lastFor returns the last token that a release tells the server of: none if it knows it.
func (p *part) lastFor(r *request) uint64 {
	last := max(r.last, r.token)
	if last > p.known {
		return last
	}
	return 0
}

// send puts a command into the server's lane.
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

// leave has a command sent.
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

// withdraw removes the acquires of a part that have not left the lane. So a server that answers
// slowly, and its lane, are not given more than one request at a time, however many are made and
// ended on the others meanwhile. It reports whether the server has been sent the part's id, or
// will be.
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

// Answered is the event that a server answered, or did not. The next command of its lane
// follows.
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

// take gives a server's answer to the request it is about.
func (l *Lock) take(s *Send, res Result, now time.Time, fx *Effects) {
	i := s.Server
	if a := &res.Answer; s.Kind == Do && a.Unfinished && a.Outcome != protocol.Enqueued && a.Outcome != protocol.Refused {
		// More may enter there: any cancel admits them.
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

// part returns the part that the send is about, nil if it has another id by now.
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
		// The part has another id by now; this one has no user.
		if res.Fail.MayRun() || a.Outcome == protocol.Granted || a.Outcome == protocol.Enqueued {
			fx.Strays = append(fx.Strays, Stray{Server: i, Keys: l.keys, ID: s.Cmd.ID, TTL: r.who.TTL})
		}
		return
	}
	// Whether the server had granted it before it answered.
	had := p.state == owned && !a.Kept || p.lost || !p.until.IsZero()
	wasLost, ops, later := p.lost, p.also, p.later
	p.asking, p.looks, p.lost, p.also, p.later = false, false, false, nil, nil
	if s.op != nil {
		ops = append(ops, s.op)
	}
	if res.Young > 0 {
		p.young = now.Add(res.Young)
	} else if res.Fail == nil {
		p.young = time.Time{}
	}
	p.heard(a.Outcome, res.Fail)
	p.doubted = p.doubted || res.Fail.MayRun() && p.known != 0
	outcome := outcomeFailed
	switch {
	case p.state == ending: // what follows in the lane ends it
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
		// Refused, and never sent without an answer: the server does not know it.
		if !p.unsure && p.state == asked {
			p.state, p.ended = absent, true
		}
	case a.Outcome == protocol.Granted:
		outcome = outcomeYes
		if had && (p.state != owned || a.Token != p.token) {
			outcome = lostUnless(res.Young > 0) // granted anew: others may have had it there in between
			if outcome == outcomeLost {
				p.brokeOff()
			}
		}
		l.own(p, a, s.Cmd.At, now, res.Young > 0)
	case a.Outcome == protocol.Enqueued:
		outcome = outcomeNo
		if p.state == owned && a.Token < p.token { // a message was faster
			outcome = outcomeOvertaken
			if wasLost { // by which it was granted anew
				if outcome = lostUnless(now.Before(s.Cmd.At.Add(res.Young))); outcome == outcomeLost {
					p.brokeOff()
				}
			}
			break
		}
		if had || p.state == owned {
			outcome = p.displaced(s, res)
		}
		p.state, p.proved, p.floor, p.token, p.known = queued, s.Cmd.At, a.Token, 0, 0
		p.told = a.Told
		p.blockedBy(&a, now)
	case a.Outcome == protocol.Refused:
		outcome = outcomeNo
		if had || p.state == owned {
			outcome = p.displaced(s, res)
		}
		p.state, p.refused = absent, true
		p.ended = true // it was never queued there, or is not any more
		p.blockedBy(&a, now)
	}
	if r.over {
		if p.state == owned || p.state == queued || res.Fail.MayRun() {
			fx.Strays = append(fx.Strays, l.stray(r, i))
		}
		return
	}
	for _, op := range ops {
		op.handed = max(op.handed, a.Handed)
		op.unfinished = op.unfinished || a.Unfinished
		op.settle(i, outcome)
		l.evaluate(op, now, fx)
	}
	l.askLater(later, r, i, now, fx)
	l.review(r, now, fx)
}

// lostUnless is the outcome of asking a server that does not own what it had granted: it lost
// its data if it is young, and then whoever it granted since cannot count it.
func lostUnless(young bool) outcome {
	if young {
		return outcomeAgain
	}
	return outcomeLost
}

// displaced takes the answer of a server that had granted the part and does not own it now.
// The quarantine is counted from the sending, which is earlier than any other client's view of it.
func (p *part) displaced(s *Send, res Result) outcome {
	p.until = time.Time{}
	if res.Young > 0 && s.req.token != 0 {
		p.until = s.Cmd.At.Add(res.Young)
	}
	if res.Young == 0 {
		p.brokeOff()
	}
	return lostUnless(res.Young > 0)
}

// brokeOff notes that others may have had the part since a majority was last known to have kept the lease.
func (p *part) brokeOff() {
	p.anew = true
	p.anews++
}

// missed reports whether the answer to an acquire of a part that is being given back says that it was not
// owned any more. A message may have been faster than one that it waits.
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
// granted there first, unless it is late.
func (p *part) stands(now time.Time) bool { return p.state == owned || now.Before(p.until) }

// heard notes that a command which may place the part was answered, or was not. An answer
// shows whether the server is in quarantine, but a message may be of a later restart if an
// earlier command is under way still.
func (p *part) heard(o protocol.Outcome, fail *protocol.Failure) {
	switch {
	case fail.MayRun():
		p.unsure = true
	case fail != nil:
	case o == protocol.Granted || !p.unsure:
		p.unheard = false
	}
}

// own takes the news that the part's server made us owner, or extended that. With inQuarantine
// the server was still in quarantine when it said so.
func (l *Lock) own(p *part, a protocol.Answer, from, now time.Time, inQuarantine bool) {
	if p.state != owned {
		p.since = now
		if p.late = !p.until.IsZero() && !inQuarantine && !now.Before(p.until); p.late {
			p.brokeOff()
		}
	}
	p.until = time.Time{}
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
