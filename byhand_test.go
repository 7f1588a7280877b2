package leased

import (
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"
)

// hand drives one pure lock: each event, answer and instant is given by the test,
// which sees every effect. After every step it checks what must always hold.
type hand struct {
	t        testing.TB
	l        lock
	now      time.Time
	ids      int
	luck     float64 // what jitter returns
	polling  bool    // messages do not reach us
	flight   *command
	woken    []*caller // admitted or turned away so far
	ghosts   []ghost
	losses   []loss
	renewals []renewal
	top      uint64 // greatest token given out
	onRenew  func(renewal)
	server   func() uint64 // its clock, if that is not ours
	connects bool          // the inbox was not confirmed yet
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

func drive(t testing.TB) *hand {
	h := &hand{t: t, now: noon}
	h.l.env = h
	return h
}

func (h *hand) newRequest(m mode, ttl time.Duration, idles bool) request {
	h.ids++
	flags := "c"
	if idles {
		flags += "i"
	}
	return request{fmt.Sprintf("leased1:%c:%d:%s:%016d:AAAAAAAAAAAAAAAA:hand", m, ttl.Milliseconds(), flags, h.ids), m, ttl}
}

func (h *hand) jitter() float64 { return h.luck }

func (h *hand) pushed() bool { return !h.polling }

func (h *hand) joining() bool { return h.connects }

func (h *hand) start() time.Time { return noon }

// step gives the lock an event and takes its effects.
func (h *hand) step(event func(now time.Time, fx *effects)) {
	h.t.Helper()
	var fx effects
	event(h.now, &fx)
	for c := fx.woken; c != nil; {
		h.woken = append(h.woken, c)
		if c.entered {
			h.admitted(c)
		}
		c, c.then = c.then, nil
	}
	h.losses = append(h.losses, fx.ended...)
	h.ghosts = append(h.ghosts, fx.ghosts...)
	for _, c := range fx.gone {
		close(c.gone)
	}
	for _, done := range fx.done {
		close(done)
	}
	if fx.send.verb != nothing {
		if h.flight != nil {
			h.t.Fatalf("sends %+v while %+v is under way", fx.send, *h.flight)
		}
		cmd := fx.send
		h.flight = &cmd
	}
	if fx.renew {
		r := renewal{req: h.l.grant.req, at: h.now}
		h.renewals = append(h.renewals, r)
		if h.onRenew != nil {
			h.onRenew(r)
		}
	}
	h.sound()
}

// admitted is checked for every caller that enters.
func (h *hand) admitted(c *caller) {
	h.t.Helper()
	g := &h.l.grant
	if !g.trusted(h.now) || h.now.Sub(g.proved) >= g.req.ttl {
		h.t.Errorf("a caller entered when the grant was not trusted: proved %v ago", h.now.Sub(g.proved))
	}
	if c.mode == exclusive && c.token <= h.top || c.token < h.top {
		h.t.Errorf("token %d after %d", c.token, h.top)
	}
	h.top = max(h.top, c.token)
}

// sound checks what holds after every step.
func (h *hand) sound() {
	h.t.Helper()
	l, g := &h.l, &h.l.grant
	flying := nothing
	if h.flight != nil {
		flying = h.flight.verb
	}
	if g.inFlight != flying {
		h.t.Fatalf("believes %d to be in flight, it is %d", g.inFlight, flying)
	}
	n := 0
	for c := l.inside.first; c != nil; c = c.next {
		if n++; n > 1 && (c.mode == exclusive || l.inside.first.mode == exclusive) {
			h.t.Fatal("a writer is inside with another")
		}
		if c.phase != inside || c.ended == notYet && g.state != held {
			h.t.Fatalf("one inside has phase %d, ended %v, and the grant's state is %d", c.phase, c.ended, g.state)
		}
	}
	if l.departing.first != nil && flying == nothing {
		h.t.Fatal("one who left waits for nothing")
	}
	if c := l.waiting.first; c != nil && flying == nothing && l.due().IsZero() && l.compatible(c.mode) {
		h.t.Fatal("one who waits waits for nothing")
	}
}

// pass lets time go by, ringing the alarm when it is due.
func (h *hand) pass(d time.Duration) {
	h.t.Helper()
	end := h.now.Add(d)
	for {
		due := h.l.due()
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
	h.step(h.l.tick)
	if due := h.l.due(); !due.IsZero() && !due.After(h.now) {
		h.t.Fatalf("after a tick the next is due %v ago, in state %d", h.now.Sub(due), h.l.grant.state)
	}
}

// slept and asleep move the wall clock by d, and the monotonic one not at all, as on a
// machine that was suspended. Nothing but its own memory has a Time do that.
func (h *hand) slept(d time.Duration) {
	h.t.Helper()
	h.now = asleep(h.t, h.now, d)
}

func asleep(t testing.TB, before time.Time, d time.Duration) time.Time {
	t.Helper()
	now := before.Add(d)
	inner := (*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&now))
	inner.ext -= int64(d)
	if now.Sub(before) != 0 || now.Round(0).Sub(before.Round(0)) != d {
		t.Fatal("a Time is not what it was, so its clocks cannot be set apart")
	}
	return now
}

// with returns a caller's options.
func with(change ...func(*lockOptions)) *lockOptions {
	o := &lockOptions{ttl: handTTL, releaseTimeout: time.Second, handoffs: 64, tenure: 10 * time.Millisecond}
	for _, f := range change {
		f(o)
	}
	return o
}

func writer(change ...func(*lockOptions)) *caller {
	return &caller{mode: exclusive, opts: with(change...)}
}

func reader(change ...func(*lockOptions)) *caller {
	return &caller{mode: shared, opts: with(change...)}
}

func trying(c *caller) *caller {
	c.try = true
	return c
}

// enter has callers come, one after the other, and returns the last.
func (h *hand) enter(cs ...*caller) *caller {
	h.t.Helper()
	for _, c := range cs {
		h.step(func(now time.Time, fx *effects) { h.l.enter(c, now, fx) })
	}
	return cs[len(cs)-1]
}

func (h *hand) leave(c *caller) {
	h.t.Helper()
	h.step(func(now time.Time, fx *effects) {
		h.l.leave(c, now, fx)
		if !c.settled && c.gone == nil {
			c.gone = make(chan struct{}) // as Unlock does it: not before
		}
	})
}

func (h *hand) abandon(c *caller) {
	h.t.Helper()
	h.step(func(now time.Time, fx *effects) { h.l.abandon(c, now, fx) })
}

func (h *hand) close() {
	h.t.Helper()
	h.step(h.l.finish)
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

func (h *hand) grant() answer {
	return answer{outcome: granted, token: h.token(), clock: h.clock()}
}

// olderQueue is queue, answered before the last token was given.
func (h *hand) olderQueue() answer {
	a := h.queue()
	a.token--
	return a
}

// queue is the answer that the request waits behind an owner with all its TTL.
func (h *hand) queue() answer {
	return answer{outcome: enqueued, token: max(h.clock()-1, h.top), clock: h.clock(), left: handTTL, blocker: "another"}
}

func (h *hand) answer(a answer) {
	h.t.Helper()
	h.reply(a, nil, 0)
}

func (h *hand) reply(a answer, err error, pause time.Duration) {
	h.t.Helper()
	if h.flight == nil {
		h.t.Fatal("nothing is under way")
	}
	cmd := *h.flight
	h.flight = nil
	h.step(func(now time.Time, fx *effects) { h.l.answered(&cmd, a, classify(err), pause, now, fx) })
}

// hears has a message arrive.
func (h *hand) hears(kind, id string, token uint64) {
	h.t.Helper()
	m := message{kind: kind, id: id, key: "x", token: token, clock: h.clock()}
	h.step(func(now time.Time, fx *effects) { h.l.receive(&m, now, fx) })
}

// renewed has the outcome of a renewal arrive.
func (h *hand) renewed(r renewal, o outcome) {
	h.t.Helper()
	if r.outcome, r.clock = o, h.clock(); o == unanswered {
		r.err = errSilence
	}
	h.step(func(now time.Time, fx *effects) { h.l.renewed(&r, now, fx) })
}

// keep has every renewal succeed at once.
func (h *hand) keep() *hand {
	h.onRenew = func(r renewal) {
		h.onRenew = nil
		h.renewed(r, granted)
		h.keep()
	}
	return h
}

// holding returns a lock whose caller is inside, by an answer that came at once.
func holding(t testing.TB, c *caller) *hand {
	t.Helper()
	h := drive(t)
	h.enter(c)
	h.sends(acquire)
	h.answer(h.grant())
	h.in(c)
	return h
}

// queueing returns a lock whose caller waits in the queue, and its request.
func queueing(t testing.TB, c *caller) (*hand, request) {
	t.Helper()
	h := drive(t)
	h.enter(c)
	h.sends(acquire)
	h.answer(h.queue())
	h.sendsNothing()
	return h, h.l.grant.req
}
