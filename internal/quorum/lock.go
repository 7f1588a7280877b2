// Package quorum runs the protocol on several independent servers. To own the lock is to own it
// on a majority of them. To the state machine, a quorum looks like one server: it takes the same
// commands, and combines the servers' answers or messages into one.
//
// Lock makes the decisions, without I/O, clocks or goroutines: it is given events and the current
// time, and returns effects. The events are the state machine's commands (ops.go, decide.go), the
// servers' answers (answers.go) and messages (messages.go), a subscription that is confirmed again
// (rejoin.go), and the end of a pause (partial.go). What is known of a request on one server is in
// part.go. server.go and member.go perform the effects. operator.go asks the servers without a Lock.
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
	N int // number of servers
	// NewID returns a request id that was never used.
	NewID func(like protocol.Identity) string
	// Proof returns the letter that a new id for this server has to carry.
	Proof func(server int) protocol.Proof
	// Ticket returns the number that places a request made now in the queues of all servers:
	// the first server's clock in µs, as far as it is known.
	Ticket func() uint64
	// Away reports whether a server is known not to answer. Nothing is sent to such a server but what takes
	// back something that it may have given.
	Away func(server int) bool
	// RoundTrip returns how long a server takes to answer, as far as it is known.
	RoundTrip func(server int) time.Duration
	// Why returns why a server is away. It may be nil.
	Why func(server int) error
}

// Majority returns how many of n servers are a majority.
func Majority(n int) int { return n/2 + 1 }

// need returns how many servers are a majority.
func (c *Config) need() int { return Majority(c.N) }

// tooMany reports whether n servers that cannot be counted leave the others no majority.
func (c *Config) tooMany(n int) bool { return n > c.N-c.need() }

// Lock is the state of one client's requests for one lock on all servers. The caller of its
// methods must serialize the calls, and must perform the effects afterwards.
type Lock struct {
	cfg    *Config
	keys   *protocol.Keys
	reqs   map[string]*request // keyed by the ids that the state machine knows
	parts  map[string]*request // keyed by the ids that the servers know
	lanes  []lane
	dueAt  time.Time  // when Tick has to look at the requests again; zero for never
	past   []pastPart // a ring buffer of at most maxPast entries
	oldest int        // index of the first to be overwritten, once past is full
}

// pastPart is a part that was released, canceled or yielded recently. A message that its server
// sent before it learned of this is no reason to cancel the part.
type pastPart struct {
	id     string
	server int
	at     time.Time
}

const maxPast = 32

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
	ticket    uint64
	basis     time.Time      // only proofs since then count for a message to the state machine
	token     uint64         // the grant's token; 0 until the state machine is told of the grant
	unbroken  bool           // the request has owned a majority without a break since it was granted
	last      uint64         // the last token assigned under the request, as the state machine says
	link      *protocol.Span // hold span of the lease that was given back for this one, from the last message
	forgetAt  time.Time      // when to forget the request, because its release or cancel failed or its lease is lost; else zero
	op        *Op            // the undecided command or cancel of the state machine about the request
	toldToAsk bool           // the state machine was told to ask again, and no server has granted the request since
	// doubted: an acquire of a lease that the state machine held had no answer. So the state machine
	// trusts a release only if it proves that no other client has owned the lock since the grant.
	doubted      bool
	keptAt       time.Time // when a majority was last known to have kept the lease
	evicted      bool      // an operator has evicted the lease on some server since keptAt
	evictionTold bool      // the state machine was told that the lease was evicted, and has not asked for it since
	// A downgrade was sent, and is not known to be done: then downgradesTo is its new request, and
	// downgradeOf, of the new one, the old. Only the downgrade's answer announces the new request to the
	// state machine.
	downgradesTo, downgradeOf *request
	dropped                   bool // the state machine no longer knows the request
}

// Send is a command for one server. Its outcome is reported by the event Answered.
type Send struct {
	Server int
	Kind   Kind
	Cmd    protocol.Command       // Do; of the other kinds only the ID, which is the part's
	Cancel protocol.CancelRequest // Cancel
	Renew  protocol.Renewal       // Renew
	Keys   *protocol.Keys
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

// Kind is the kind of a Send, or of an Op, which is never Adopt.
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
	Canceled  protocol.Canceled
	Renewed   protocol.Outcome
	Clock     uint64
	Young     time.Duration // for how long the server's grants do not count yet
	VoteClock uint64        // the server's clock in µs at the end of its quarantine, 0 if it does not say when that is
	Repeated  bool          // acquire: an earlier copy of it had no answer
	Fail      *protocol.Failure
}

// mayArrive reports whether a copy of the command may still arrive.
func (r *Result) mayArrive() bool { return r.Fail.MayRun() || r.Repeated }

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

// ScheduleIn has the stray canceled, on behalf of owner.
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
// the id: the state machine may use it again after the parts were canceled, whereas no id that a
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
	if p.id != "" && p.goesOn() {
		return p
	}
	old := *p
	old.putOff(i)
	if old.mayArrive {
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
		if p.mayArrive || p.goesOn() {
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
	if p := (pastPart{id, server, now}); len(l.past) < maxPast {
		l.past = append(l.past, p)
	} else {
		l.past[l.oldest] = p
		l.oldest = (l.oldest + 1) % maxPast
	}
}

// crossed reports whether a message with this id is about a part that has just ended.
func (l *Lock) crossed(id string, server int, now time.Time) bool {
	return slices.ContainsFunc(l.past, func(p pastPart) bool {
		return p.id == id && p.server == server && now.Sub(p.at) < crossing
	})
}

func (l *Lock) stray(r *request, i int) Stray {
	p := &r.parts[i]
	return Stray{Server: i, Keys: l.keys, ID: p.id, Last: p.lastFor(r), TTL: r.who.TTL, Late: p.mayArrive, Ends: !p.goesOn()}
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
		p.asking, p.unprompted = false, false
		p.putOff(i)
		if s.op != nil {
			s.op.notSent(i, errBusy)
		}
		return true
	})
	return p.sent || slices.ContainsFunc(ln.queue, func(s *Send) bool { return s.Cmd.Next == p.id })
}

// Has reports whether a request goes on under this id on a server, for tests: it has not been given
// back there.
func (l *Lock) Has(id string, server int) bool {
	r := l.parts[id]
	return r != nil && r.parts[server].id == id && r.parts[server].state != ending
}

// Owns reports whether a server has granted the lock to this id, as far as is known here, for tests.
func (l *Lock) Owns(id string, server int) bool {
	return l.Has(id, server) && l.parts[id].parts[server].state == owned
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
