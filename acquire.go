package leased

import (
	"context"
	"errors"
	"runtime/pprof"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// What every locking method does, in the order in which it happens: a caller enters the lock's
// FIFO, waits, perhaps gives up, and later unlocks. All of it runs in the caller's own goroutine;
// nothing here starts another.

// call is a lockstate.Caller as this package sees it. It is a separate type because the lock's
// state machine need not know what these methods return, and it uses the Caller's memory because a
// client may hold very many leases. The entry's mutex guards it. These fields of a Caller belong to
// its maker:
//
//	Ready     receives a value when the wait is over; nil if there was none. It belongs to the
//	          waiting goroutine.
//	Reported  is whether its hold was recorded.
//	Again     is whether it entered by reenter, so that nothing refers to it once it has left.
//	Behind    is how many servers of a quorum stood behind it at its Unlock, 0 if not known.
//	More      has the rest: an *extras, nil if there is none.
type call lockstate.Caller

func callOf(c *lockstate.Caller) *call { return (*call)(c) }

func (w *call) caller() *lockstate.Caller { return (*lockstate.Caller)(w) }

// extras are the parts of a call that most calls do not have.
type extras struct {
	gone     chan struct{}  // closed when the release is settled; nil if no Unlock waits for that
	contexts *leaseContexts // nil until one is asked for
	under    trace.Span     // the span that its commands are sent under: of its wait, then of its hold; nil if there is none
	site     string         // file and line of the user's call, with WithSlowThreshold
}

var noExtras extras

// extras returns the extras of w, to be read only. It does not copy them: a goroutine that was told
// of one of them, such as gone, reads it without the entry's mutex while another one is written.
func (w *call) extras() *extras {
	if x, ok := w.More.(*extras); ok {
		return x
	}
	return &noExtras
}

// extend returns the extras of w, to be written to. The calling goroutine holds the entry's mutex,
// unless w has not entered the lock yet.
func (w *call) extend() *extras {
	x, ok := w.More.(*extras)
	if !ok {
		x = &extras{}
		w.More = x
	}
	return x
}

// under returns the span that commands for w are sent under, nil if there is none.
func (w *call) under() trace.Span { return w.extras().under }

// newSignal returns a channel with room for one value, to be used once. Its receiver gives it back
// with received; a receiver that stops waiting leaves it to the garbage collector.
func (c *Client) newSignal() chan struct{} {
	if s, ok := c.signals.Get().(chan struct{}); ok {
		return s
	}
	return make(chan struct{}, 1)
}

func (c *Client) received(signal chan struct{}) { c.signals.Put(signal) }

// acquire waits for the lock, and measures and traces the wait. began is when that began.
func (h *handle) acquire(ctx context.Context, w *call, began time.Time) (*entry, error) {
	if h.err != nil {
		return nil, h.misused("acquired", h.err, ErrNotAcquired)
	}
	if ctx == nil {
		return nil, h.misused("acquired", errNilContext, ErrNotAcquired)
	}
	c := h.client
	if c.slow.threshold > 0 {
		w.extend().site = callSite()
	}
	span := c.tracing.startWaitSpan(ctx, h.keys.Name(), w, began)
	reported := w.Events != nil || c.metrics.wait.Enabled(ctx)
	e, err := h.wait(ctx, w, began)
	if reported { // reading the clock again would be a twentieth of what a hand-off costs
		now := time.Now()
		report := func() {
			var delivered <-chan struct{}
			if w.Events != nil {
				span, delivered = c.tracing.endWaitSpan(ctx, span, &waitRecord{h, e, w, err, began, now})
			}
			c.metrics.recordWait(ctx, span, h.label, w, waitOutcome(err), now.Sub(began))
			c.tracing.awaitDelivery(delivered)
		}
		if err != nil { // it has left already, and would end another one's hold now
			report()
		} else {
			e.leaveOnPanic(w, report)
		}
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// wait waits until the caller is admitted or rejected, or ctx ends. If ctx ends while the lease is
// being handed over, the hand-over has happened: wait gives the lease back, without waiting for
// Redis, and returns ctx's error. Together with an error it returns the entry, if the caller had
// entered one.
func (h *handle) wait(ctx context.Context, w *call, began time.Time) (*entry, error) {
	if ctx.Err() != nil {
		return nil, h.refusal(nil, h.client.ended(ctx), began)
	}
	done := ctx.Done()
	var inlineFor time.Duration
	if done == nil {
		inlineFor = protocol.CommandTimeout // no cancellation has to interrupt the command
	}
	now := began
	if w.under() != nil { // beginning the span was user code, which can take long, even if it is not recorded
		now = time.Now()
	}
	e, err := h.enter(w, now, inlineFor)
	if err != nil {
		return nil, h.refusal(nil, err, began)
	}
	if w.Ready != nil {
		var admitted bool
		if h.client.opts.profileLabels {
			e.leaveOnPanic(w, func() { admitted = h.awaitLabeled(ctx, w) }) // a method of ctx may panic
		} else {
			admitted = w.await(h.client, done)
		}
		if !admitted {
			known := e.giveUp(w)
			return e, h.refusal(&known, h.client.ended(ctx), began)
		}
	}
	if !w.Entered {
		e.mu.Lock()
		known := e.lastKnownLocked()
		e.mu.Unlock()
		return e, h.refusal(&known, w.caller().Outcome(), began)
	}
	if lead := w.caller().ClockLead(); lead > 0 {
		waitForClock(lead)
	}
	return e, nil
}

// await waits until the caller is admitted or rejected, and returns true, or until done is closed,
// and returns false.
func (w *call) await(c *Client, done <-chan struct{}) bool {
	if done == nil { // a plain receive costs a third of a select
		<-w.Ready
	} else {
		select {
		case <-w.Ready:
		case <-done:
			return false
		}
	}
	c.received(w.Ready)
	w.Ready = nil // no longer needed, and a lease is kept small
	return true
}

// awaitLabeled is await with the lock's name and mode as profiler labels of the goroutine.
func (h *handle) awaitLabeled(ctx context.Context, w *call) (admitted bool) {
	pprof.Do(ctx, pprof.Labels(string(attrLock), h.keys.Name(), string(attrMode), w.Mode.String()), func(context.Context) {
		admitted = w.await(h.client, ctx.Done())
	})
	return admitted
}

// enter puts a caller into the lock's FIFO, or admits or rejects it at once. A command that follows
// from that may run in the caller's goroutine for as long as inlineFor.
func (h *handle) enter(w *call, now time.Time, inlineFor time.Duration) (*entry, error) {
	w.Opts = &h.opts.Terms
	h.client.begin()
	for {
		e := h.client.find(&h.keys, h.label)
		if e == nil {
			return nil, ErrClosed
		}
		var fx lockstate.Effects
		e.mu.Lock()
		if e.dead { // removed since it was found
			e.mu.Unlock()
			continue
		}
		e.state().Enter(w.caller(), now, &fx)
		if w.Phase == lockstate.Waiting {
			w.Ready = h.client.newSignal()
		}
		idle := e.rearmLocked(&fx)
		e.mu.Unlock()
		e.leaveOnPanic(w, func() { e.perform(&fx, idle, inlineFor) })
		return e, nil
	}
}

// giveUp takes w out of the FIFO or, if w was admitted already, releases its lease at once. It is called
// once at most. It locks the entry's mutex only once, because callers queue for it when thousands give up
// together.
func (e *entry) giveUp(w *call) (known lastKnown) {
	var contexts *leaseContexts
	var cause error
	var held holdRecord
	var endsHold bool
	e.step(func(now time.Time, fx *lockstate.Effects) {
		known = e.lastKnownLocked()
		if _, inside := e.state().Counts(); w.Phase == lockstate.Inside {
			known.here = inside > 1 // others than w
		}
		known.silent = e.state().Asking()
		known.owned = e.ownedElsewhereLocked()
		if !e.state().Abandon(w.caller(), now, fx) {
			if c := e.state().GiveBack(w.caller(), now, fx); c != nil && c != w.caller() { // whoever unlocked by name meant this one
				left := callOf(c)
				contexts, cause = left.extras().contexts, e.causeLocked(left)
				held, endsHold = e.takeHoldLocked(left, holdEnd{how: holdOutcome(left, nil), at: now})
			}
		}
		for i := range fx.Cancels {
			fx.Cancels[i].Under = w.under()
		}
	})
	contexts.end(cause)
	if endsHold {
		_ = e.client.recordHold(&held)
	}
	return known
}

// leaveOnPanic runs f, which calls user code. If that code panics, or ends the goroutine, w leaves
// the lock, because its caller will never unlock it.
func (e *entry) leaveOnPanic(w *call, f func()) {
	ifCutShort(func() {
		if e != nil {
			e.giveUp(w)
		}
	}, f)
}

// waitForClock waits until the server's clock has reached the caller's token, so that
// tokens stay behind that clock and keep growing after a flush.
func waitForClock(lead time.Duration) {
	end := time.Now().Add(lead)
	for i := 0; time.Now().Before(end); i++ {
		if i > 100 {
			time.Sleep(time.Microsecond)
		}
	}
}

// lastKnown is what a lock knew from Redis when a caller's wait ended.
type lastKnown struct {
	err     error  // the last error, nil after a reply
	blocker string // the value of the key's owner
	owned   bool   // when a context ended: see ownedElsewhereLocked
	here    bool   // a caller of this process was inside
	silent  bool   // Redis had been asked for the lock, and had not answered
}

// ownedElsewhereLocked reports whether Redis has said of the present request that another client had the lock; of a
// quorum's servers, a majority has.
func (e *entry) ownedElsewhereLocked() bool {
	l := e.state()
	owner := l.Blocker()
	if owner == "" || l.Asking() || l.Unconfirmed() {
		return false
	}
	if who, err := protocol.ParseID(owner); err == nil && who.Client == e.client.id {
		return false // a failover has undone its release, and nobody has the lock
	}
	return e.client.quorum == nil || e.client.quorum.Blocked(&e.keys, l.Request().ID)
}

func (e *entry) lastKnownLocked() (known lastKnown) {
	known.err, known.blocker = e.state().LastErr(), e.state().Blocker()
	_, inside := e.state().Counts()
	known.here = inside > 0
	return known
}

// refusal returns the error of a caller that was not admitted; known is nil if the caller had not
// entered the lock.
func (h *handle) refusal(known *lastKnown, reason error, began time.Time) error {
	r := &notAcquired{name: h.keys.Name(), waited: time.Since(began), reason: reason, unasked: known == nil}
	if known != nil {
		r.lastErr, r.blocker, r.here, r.silent = known.err, blockerName(known.blocker), known.here, known.silent
		_, r.minHold = protocol.ParseCooldown(known.blocker)
		r.taken = known.err == nil && (known.here || known.owned) && ofContext(reason)
	}
	return r
}

// ended returns the error of a context that has ended, with its cause if the cause is another
// error.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(err, cause) {
		return err
	}
	return &contextEnded{err, cause}
}

// ended returns the error of a context that has ended. It matches ErrClosed if the context is one that the
// client has ended because it was closed.
func (c *Client) ended(ctx context.Context) error {
	return c.orClosed(ended(ctx), context.Cause(ctx))
}

// orClosed returns err, or one that also matches ErrClosed if cause is that with which this client ends
// contexts as it is closed.
func (c *Client) orClosed(err, cause error) error {
	if c.closes() && errors.Is(cause, ErrClosed) {
		return &about{err.Error(), []error{err, ErrClosed}}
	}
	return err
}

// contextEnded is the error of a context that ended with a cause of its own. err, and not what the cause
// matches, says how the context ended.
type contextEnded struct{ err, cause error }

func (e *contextEnded) Error() string   { return e.err.Error() + ": " + e.cause.Error() }
func (e *contextEnded) Unwrap() []error { return []error{e.err, &causeOfEnd{e.cause}} }

// causeOfEnd is the cause of a context's end. It matches what the cause matches but for the errors of this
// package: a lease's context ends with one when that lease is lost, say, and then the context's error is no
// loss of the lock that it is about.
type causeOfEnd struct{ cause error }

func (e *causeOfEnd) Error() string { return e.cause.Error() }

func (e *causeOfEnd) Is(target error) bool {
	return !slices.Contains(sentinels, target) && errors.Is(e.cause, target)
}

func (e *causeOfEnd) As(target any) bool {
	switch target.(type) {
	case **leaseLost, **notReleased, **notAcquired:
		return false
	}
	return errors.As(e.cause, target)
}

// releaseWait says how long an Unlock waits for Redis: until ctx ends or, if ctx is nil, as long as the
// options of its caller say.
type releaseWait struct{ ctx context.Context }

// shortestInline is the least time for which Unlock runs its release itself. The command ends with that
// time, and then counts as one without an answer, so a much shorter time would cut off what Redis is about
// to answer.
const shortestInline = time.Second

// inline returns for how long the Unlock of w may run its release in its own goroutine, 0 if it has to be
// able to stop waiting sooner than the command.
func (t releaseWait) inline(w *call) time.Duration {
	switch {
	case t.ctx == nil && w.Opts.ReleaseTimeout >= shortestInline:
		return w.Opts.ReleaseTimeout
	case t.ctx != nil && t.ctx.Done() == nil:
		return protocol.CommandTimeout
	}
	return 0
}

// await waits until done is closed, and reports whether it was. The Unlock of w began at began. late is the
// error of the context that ended the wait, nil if none did.
func (t releaseWait) await(w *call, began time.Time, done <-chan struct{}) (closed bool, late error) {
	if t.ctx != nil {
		if waitFor(t.ctx, done) {
			return true, nil
		}
		return false, ended(t.ctx)
	}
	timer := time.NewTimer(max(0, w.Opts.ReleaseTimeout-time.Since(began)))
	defer timer.Stop()
	select {
	case <-done:
		return true, nil
	case <-timer.C:
		return false, nil
	}
}

// unlock ends, now, the lease of the caller that pick chooses. If the outcome depends on Redis, it waits
// for Redis to confirm the release, for as long as t says. It returns false if pick chooses no caller.
//
// Hooks of the Redis client may panic in it, or end the goroutine. Then the caller has left the lock
// all the same, and its hold ends with what is known by then.
func (e *entry) unlock(t releaseWait, now time.Time, pick func(*lockstate.Lock) *lockstate.Caller) (found bool, err error) {
	var fx lockstate.Effects
	e.mu.Lock()
	caller := pick(e.state())
	if caller == nil {
		e.mu.Unlock()
		return false, nil
	}
	w := callOf(caller)
	ends := e.state().EndsBy(caller, now)
	e.noteBehindLocked(w)
	e.state().Leave(caller, now, &fx)
	waits, contexts, cause := !w.Settled, w.extras().contexts, e.causeLocked(w)
	if waits {
		e.client.unlocks.Add(1) // before the entry can be removed
		defer e.client.unlocked()
	}
	idle := e.rearmLocked(&fx)
	e.mu.Unlock()
	var late error
	defer func() { err = e.finishUnlock(w, ends, now, waits, late) }() // even if a hook panics
	contexts.end(cause)
	var inlineFor time.Duration
	if waits && fx.Send.Verb != protocol.Acquire { // else this caller does not wait for the command
		ifCutShort(func() { e.perform(&fx, idle, 0) }, func() { inlineFor = t.inline(w) }) // a method of t.ctx may panic
	}
	e.perform(&fx, idle, inlineFor)
	if waits {
		late = e.awaitSettled(t, w, now)
	}
	return true, nil
}

// awaitSettled waits until w, which left at began, is settled, for as long as t says. It returns the error
// of the context that ended the wait, nil if none did.
func (e *entry) awaitSettled(t releaseWait, w *call, began time.Time) (late error) {
	e.mu.Lock()
	gone := w.extras().gone
	if gone == nil && w.caller().Await() { // usually settled by now, if the command ran here
		gone = make(chan struct{})
		w.extend().gone = gone
	}
	e.mu.Unlock()
	if gone != nil {
		_, late = t.await(w, began, gone)
	}
	return late
}

// finishUnlock ends an Unlock of w: it records the hold and returns the result. at is when the hold ended,
// and ends when the lock expires by itself; waited says whether Unlock has waited for Redis, and late is
// the error of the context that ended this wait, nil if none did.
func (e *entry) finishUnlock(w *call, ends, at time.Time, waited bool, late error) error {
	e.mu.Lock()
	err, why := e.concludeLocked(w, ends, late)
	var settled time.Time
	if waited {
		settled = time.Now()
	}
	held, first := e.takeHoldLocked(w, holdEnd{holdOutcome(w, err), why, at, settled})
	e.mu.Unlock()
	if first {
		e.client.tracing.awaitDelivery(e.client.recordHold(&held))
	}
	return err
}

// onWallClock returns t with its wall-clock reading corrected. A time computed from an earlier one keeps that
// one's wall clock, which may have been set since, or have gone on while the machine slept.
func onWallClock(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	now := time.Now()
	return now.Add(t.Sub(now))
}

// conclude returns the result of the Unlock of w, as far as it is known.
func (e *entry) conclude(w *call) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err, _ := e.concludeLocked(w, time.Time{}, nil)
	return err
}

// concludeLocked ends the Unlock of w, which does not listen any longer (see Caller.LeaveUnsettled). It
// returns the result and what to name as its cause.
func (e *entry) concludeLocked(w *call, ends time.Time, late error) (err, why error) {
	caller := w.caller()
	err = caller.Outcome()
	why = err
	if named, ok := e.named(err, ends); ok {
		err = named
	} else if caller.LeaveUnsettled() {
		lastErr := e.lastKnownLocked().err
		err = &notReleased{name: e.keys.Name(), ends: onWallClock(ends), lastErr: lastErr, ended: late}
		why = lastErr
		if lastErr == nil {
			why = late
		}
	}
	if w.Ended == lockstate.ByLoss {
		err = e.lostLocked(w, err)
	}
	return err, why
}

// named returns the error of a release that nothing will confirm anymore, with the lock's name, if err
// says so. The lock expires at ends.
func (e *entry) named(err error, ends time.Time) (*notReleased, bool) {
	over, ok := err.(*lockstate.Unconfirmed) //nolint:errorlint // methods of err can be user code, and e.mu is locked
	if !ok {
		return nil, false
	}
	return &notReleased{name: e.keys.Name(), ends: onWallClock(ends), lastErr: over.Why, over: true}, true
}

// causeLocked returns the cause with which the contexts of the lease end, or nil if the lease goes on.
func (e *entry) causeLocked(w *call) error {
	switch {
	case w.Ended == lockstate.ByLoss:
		return e.lostLocked(w, nil)
	case w.Ended != lockstate.NotYet:
		return ErrClosed
	case w.Phase == lockstate.Left:
		return context.Canceled
	}
	return nil
}

// lostLocked returns the error of a lost lease. err is the error of its release so far, or nil if
// the lease has not been released or the release went well.
func (e *entry) lostLocked(w *call, err error) error {
	lost := &leaseLost{name: e.keys.Name(), token: w.Token, why: w.Why}
	switch too := err.(type) { //nolint:errorlint // methods of err can be user code, and e.mu is locked
	case *lockstate.LostToo:
		lost.release = too.Release
		if named, ok := e.named(too.Release, time.Time{}); ok {
			lost.release = named
		}
	case *notReleased:
		lost.release = too
	}
	return lost
}
