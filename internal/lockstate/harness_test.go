package lockstate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"

	"github.com/leasedmutex/leased/internal/protocol"
)

// hand drives one pure lock: each event, answer and instant is given by the test,
// which sees every effect. After every step it checks what must always hold.
type hand struct {
	t        testing.TB
	l        Lock
	began    time.Time
	now      time.Time
	ids      int
	luck     float64 // what jitter returns
	many     bool    // what holdsMany returns
	polling  bool    // messages do not reach us
	flight   *protocol.Command
	woken    []*Caller      // admitted or turned away so far
	unwanted []Cancellation // what was to be canceled
	losses   []Loss
	told     []*Caller // whose leaving was settled after it was waited for
	renewals []protocol.Renewal
	top      uint64 // greatest token given out
	onRenew  func(protocol.Renewal)
	server   func() uint64 // its clock, if that is not ours
	connects bool          // the inbox was not confirmed yet
	joins    bool          // and is at the very moment after the next id was made
	proof    protocol.Proof
	cutIn    int           // who entered by the short cut
	cutOut   int           // who left by it
	trip     time.Duration // what RoundTrip returns
	rested   int           // after how many events the lock came to rest
}

const (
	handTTL    = 10 * time.Second
	handMargin = 102 * time.Millisecond
	handWindow = handTTL - handMargin
)

var (
	errSilence = errors.New("no answer came")
	noon       = time.UnixMilli(1_700_000_000_000)
)

func drive(t testing.TB) *hand { return driveFrom(t, noon) }

func driveFrom(t testing.TB, began time.Time) *hand {
	h := &hand{t: t, began: began, now: began, proof: protocol.Counted}
	h.l.env = h
	return h
}

func (h *hand) NewRequest(m protocol.Mode, ttl time.Duration, idles bool, from protocol.Origin) protocol.Request {
	h.ids++
	flags := string(rune(h.proof))
	if h.joins {
		h.connects, h.joins = false, false
	}
	if idles {
		flags += "i"
	}
	req, err := protocol.RequestOf(fmt.Sprintf("leased1:%c:%d:%s:%016d:%s", m, ttl.Milliseconds(), flags, h.ids, h.Client()))
	if err != nil {
		h.t.Fatal(err)
	}
	return req
}

func (h *hand) Client() string { return "AAAAAAAAAAAAAAAA:hand" }

func (h *hand) Jitter() float64 { return h.luck }

func (h *hand) HoldsMany() bool { return h.many }

func (h *hand) HasInbox() bool   { return !h.polling }
func (h *hand) Subscribed() bool { return h.proof == protocol.Counted }

func (h *hand) InboxPending() bool { return h.connects }

func (h *hand) RoundTrip() time.Duration { return h.trip }

func (h *hand) Start() time.Time { return h.began }

// due is when the alarm rings next, the zero value for never.
func (h *hand) due() time.Time { return h.l.Due().Time(h.began) }

// step gives the lock an event and takes its effects.
func (h *hand) step(event func(now time.Time, fx *Effects)) {
	h.t.Helper()
	var fx Effects
	event(h.now, &fx)
	for c := range fx.Woken.All {
		h.woken = append(h.woken, c)
		if c.Entered {
			h.admitted(c)
		}
	}
	h.losses = append(h.losses, fx.Ended...)
	h.unwanted = append(h.unwanted, fx.Cancels...)
	h.told = append(h.told, fx.Gone...)
	for _, done := range fx.Done {
		close(done)
	}
	if fx.Send.Verb != protocol.None {
		if h.flight != nil {
			h.t.Fatalf("sends %+v while %+v is under way", fx.Send, *h.flight)
		}
		cmd := fx.Send
		h.flight = &cmd
	}
	if fx.Check != nil {
		h.renewals = append(h.renewals, *fx.Check)
	}
	if fx.Renew {
		r := protocol.Renewal{Req: h.l.grant.req, At: h.now, Spare: fx.Spare}
		h.renewals = append(h.renewals, r)
		if h.onRenew != nil {
			h.onRenew(r)
		}
	}
	h.sound()
	var r Resting
	if h.l.Rest(&r) {
		h.rested++
		h.l = Lock{}
		h.l.Wake(&r, h)
	}
}

// trusted is what Lock.trusts has to say, without what that remembers of a proof.
func (g *grant) trusted(now time.Time) bool { return !g.over(now) && !g.drifted(now) }

// admitted is checked for every caller that enters.
func (h *hand) admitted(c *Caller) {
	h.t.Helper()
	g := &h.l.grant
	if !g.trusted(h.now) || h.now.Sub(g.proved) >= g.req.TTL {
		h.t.Errorf("a caller entered when the grant was not trusted: proved %v ago", h.now.Sub(g.proved))
	}
	if c.Mode == protocol.Exclusive && c.Token <= h.top || c.Token < h.top {
		h.t.Errorf("token %d after %d", c.Token, h.top)
	}
	h.top = max(h.top, c.Token)
}

// sound checks what holds after every step.
func (h *hand) sound() {
	h.t.Helper()
	l, g := &h.l, &h.l.grant
	flying := protocol.None
	if h.flight != nil {
		flying = h.flight.Verb
	}
	if l.pending.verb != flying {
		h.t.Fatalf("believes %d to be in flight, it is %d", l.pending.verb, flying)
	}
	n := 0
	for c := l.inside.first; c != nil; c = c.next {
		if n++; n > 1 && (c.Mode == protocol.Exclusive || l.inside.first.Mode == protocol.Exclusive) {
			h.t.Fatal("a writer is inside with another")
		}
		if c.Phase != Inside || c.Ended == NotYet && g.state != Held {
			h.t.Fatalf("one inside has phase %d, ended %v, and the grant's state is %d", c.Phase, c.Ended, g.state)
		}
	}
	if l.leaving.first != nil && flying == protocol.None {
		h.t.Fatal("one who left waits for nothing")
	}
	if c := l.waiting.first; c != nil && c.Mode == protocol.Exclusive && flying == protocol.None && g.state == Held && g.req.Mode == protocol.Shared &&
		l.members != nil && !l.anyOrphans() && g.next == nil && !h.connects {
		h.t.Fatal("a writer behind its process's readers has no place")
	}
	if c := l.waiting.first; c != nil && flying == protocol.None && l.Due() == 0 && l.compatible(c.Mode) {
		h.t.Fatal("one who waits waits for nothing")
	}
}

// pass lets time go by, ringing the alarm when it is due.
func (h *hand) pass(d time.Duration) {
	h.t.Helper()
	end := h.now.Add(d)
	for {
		due := h.due()
		if due.IsZero() || due.After(end) {
			h.now = h.now.Add(max(0, end.Sub(h.now)))
			return
		}
		h.now = h.now.Add(max(0, due.Sub(h.now))) // an alarm's own wall clock may be another
		h.ring()
	}
}

// ring ticks once; afterwards the alarm must not ask for the same again.
func (h *hand) ring() {
	h.t.Helper()
	h.step(h.l.Tick)
	if due := h.due(); !due.IsZero() && !due.After(h.now) {
		h.t.Fatalf("after a tick the next is due %v ago, in state %d", h.now.Sub(due), h.l.grant.state)
	}
}

// slept has the machine be suspended for d.
func (h *hand) slept(d time.Duration) {
	h.t.Helper()
	h.now = clocktest.Asleep(h.t, h.now, d)
}

// with returns a caller's options.
func with(change ...func(*Terms)) *Terms {
	o := &Terms{TTL: handTTL, Handoffs: 64, Tenure: 10 * time.Millisecond}
	for _, f := range change {
		f(o)
	}
	return o
}

func writer(change ...func(*Terms)) *Caller {
	return &Caller{Mode: protocol.Exclusive, Opts: with(change...)}
}

func reader(change ...func(*Terms)) *Caller {
	return &Caller{Mode: protocol.Shared, Opts: with(change...)}
}

func trying(c *Caller) *Caller {
	c.Try = true
	return c
}

// enter has callers come, one after the other, and returns the last.
func (h *hand) enter(cs ...*Caller) *Caller {
	h.t.Helper()
	for _, c := range cs {
		h.step(func(now time.Time, fx *Effects) { h.l.Enter(c, now, fx) })
	}
	return cs[len(cs)-1]
}

// reenter has c come by the short cut, and reports whether it is inside. It may have no token.
func (h *hand) reenter(c *Caller) bool {
	h.t.Helper()
	before := h.l.Due()
	if !h.l.Reenter(c, h.now) {
		return false
	}
	if due := h.l.Due(); c.Via == ViaIdle && due != 0 && (before == 0 || due < before) {
		h.t.Errorf("a tick is due at %d, and was at %d", due, before)
	}
	h.cutIn++
	h.woken = append(h.woken, c)
	if c.Token != 0 {
		h.admitted(c)
	}
	h.sound()
	return true
}

// leaveKept has c leave by the short cut, and reports whether it did.
func (h *hand) leaveKept(c *Caller) bool {
	h.t.Helper()
	before := h.l.Due()
	left := h.l.LeaveKept(c, h.now)
	if left {
		if due := h.l.Due(); h.l.members != nil && due != 0 && (before == 0 || due < before) {
			h.t.Errorf("a tick is due at %d, and was at %d", due, before)
		}
		h.cutOut++
	}
	h.sound()
	return left
}

func (h *hand) leave(c *Caller) {
	h.t.Helper()
	h.step(func(now time.Time, fx *Effects) {
		h.l.Leave(c, now, fx)
		c.Await() // as Unlock does it: not before
	})
}

func (h *hand) abandon(c *Caller) {
	h.t.Helper()
	h.step(func(now time.Time, fx *Effects) { h.l.Abandon(c, now, fx) })
}

func (h *hand) close() {
	h.t.Helper()
	h.step(h.l.Close)
}

// clock is the server's, µs.
func (h *hand) clock() uint64 {
	if h.server != nil {
		return h.server()
	}
	return uint64(h.now.UnixMicro())
}

// token is what the server would give now.
func (h *hand) token() uint64 { return max(h.clock(), h.top+1) }

func (h *hand) grant() protocol.Answer {
	return protocol.Answer{Outcome: protocol.Granted, Token: h.token(), Clock: h.clock()}
}

// kept is the answer that the request owned already, and what the lock's last token is.
func (h *hand) kept(last uint64) protocol.Answer {
	return protocol.Answer{Outcome: protocol.Granted, Token: last, Clock: h.clock(), Kept: true}
}

// olderQueue is queue, answered before the last token was given.
func (h *hand) olderQueue() protocol.Answer {
	a := h.queue()
	a.Token--
	return a
}

// queue is the answer that the request waits behind an owner with all its TTL.
func (h *hand) queue() protocol.Answer {
	return protocol.Answer{Outcome: protocol.Enqueued, Token: max(h.clock()-1, h.top), Clock: h.clock(), Left: handTTL, Blocker: "another"}
}

func (h *hand) answer(a protocol.Answer) {
	h.t.Helper()
	h.reply(a, nil, 0)
}

func (h *hand) reply(a protocol.Answer, err error, pause time.Duration) {
	h.t.Helper()
	if h.flight == nil {
		h.t.Fatal("nothing is under way")
	}
	cmd := *h.flight
	h.flight = nil
	h.step(func(now time.Time, fx *Effects) { h.l.Answered(&cmd, a, failureOf(err), pause, now, fx) })
}

// hears has a message arrive.
func (h *hand) hears(kind protocol.MessageKind, id string, token uint64) {
	h.t.Helper()
	m := protocol.Message{Kind: kind, ID: id, Key: "x", Token: token, Clock: h.clock()}
	h.step(func(now time.Time, fx *Effects) { h.l.Receive(&m, now, fx) })
}

// renewed has the outcome of a renewal arrive.
func (h *hand) renewed(r protocol.Renewal, o protocol.Outcome) {
	h.t.Helper()
	r.Outcome, r.Clock = o, h.clock()
	if o == protocol.Unanswered {
		r.Err = errSilence
	}
	h.step(func(now time.Time, fx *Effects) { h.l.Renewed(&r, now, fx) })
}

// renewedAndAsked has the renewal succeed, and the owner's question that follows be answered: whether
// others wait.
func (h *hand) renewedAndAsked(waits bool) {
	h.t.Helper()
	h.renewed(h.renewals[0], protocol.Granted)
	if c := h.sends(protocol.Acquire); !c.Question {
		h.t.Fatalf("sends %+v", c)
	}
	said := h.kept(h.l.grant.token)
	said.More = waits
	h.answer(said)
}

// keep has every renewal succeed at once, and if the grant idles, the question that follows says that
// nobody waits.
func (h *hand) keep() *hand {
	h.onRenew = func(r protocol.Renewal) {
		h.onRenew = nil
		h.renewed(r, protocol.Granted)
		if h.flight != nil && h.flight.Question && h.l.members == nil {
			h.answer(h.kept(h.l.grant.token))
		}
		h.keep()
	}
	return h
}

// holding returns a lock whose caller is inside, by an answer that came at once.
func holding(t testing.TB, c *Caller) *hand {
	t.Helper()
	h := drive(t)
	h.enter(c)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(c)
	return h
}

// overtaken returns a lock whose caller is inside by a message, and the id of its request,
// about which a re-check is under way.
func overtaken(t testing.TB, c *Caller) (h *hand, id string) {
	t.Helper()
	h, req := queueing(t, c)
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageGranted, req.ID, h.token())
	h.in(c)
	return h, req.ID
}

// queueing returns a lock whose caller waits in the queue, and its request.
func queueing(t testing.TB, c *Caller) (*hand, protocol.Request) {
	t.Helper()
	h := drive(t)
	h.enter(c)
	h.sends(protocol.Acquire)
	h.answer(h.queue())
	h.sendsNothing()
	return h, h.l.grant.req
}

// refusal is an answer of Redis that says no.
type refusal string

func (r refusal) Error() string { return string(r) }

// The failures of a command that granted the lock: too few replicas had the grant, or Redis refused to
// count them.
var errUnconfirmed, errWaitRefused = errors.New("too few replicas"), errors.New("WAIT was refused")

// The failure of a script that lacks the right to one of its commands.
var errHalfRun = errors.New("the script was stopped half-way")

// failureOf is what an error of these tests means for a lock.
func failureOf(err error) *protocol.Failure {
	var no refusal
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnconfirmed):
		return &protocol.Failure{Err: err, Kind: protocol.RefusedNow, LacksReplicas: true}
	case errors.Is(err, errWaitRefused):
		return &protocol.Failure{Err: err, Kind: protocol.NeedsOperator, LacksReplicas: true}
	case errors.Is(err, errHalfRun):
		return &protocol.Failure{Err: err, Kind: protocol.NeedsOperator, Partly: true}
	case !errors.As(err, &no):
		return &protocol.Failure{Err: err, Kind: protocol.NoAnswer}
	case strings.HasPrefix(string(no), "NOPERM"):
		return &protocol.Failure{Err: err, Kind: protocol.NeedsOperator}
	}
	return &protocol.Failure{Err: err, Kind: protocol.RefusedNow}
}
