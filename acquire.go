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
// FIFO, waits, and perhaps gives up. All of it runs in the caller's own goroutine; nothing here starts
// another.

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
				span, delivered = c.tracing.endWaitSpan(ctx, span, &waitRecord{handle: h, entry: e, call: w, err: err, began: began, ended: now})
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
// being handed over, the hand-off has happened: wait gives the lease back, without waiting for
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
		e.stateLocked().Enter(w.caller(), now, &fx)
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
		if _, inside := e.stateLocked().Counts(); w.Phase == lockstate.Inside {
			known.here, known.kept = inside > 1, false // others than w
		}
		known.silent = e.stateLocked().Asking()
		known.owned = e.ownedElsewhereLocked()
		if !e.stateLocked().Abandon(w.caller(), now, fx) {
			if c := e.stateLocked().GiveBack(w.caller(), now, fx); c != nil && c != w.caller() { // whoever unlocked by name meant this one
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
	ifCutShort(func() { e.giveUp(w) }, f)
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
	kept    bool   // see lockstate.Lock.KeptPastLease
	silent  bool   // Redis had been asked for the lock, and had not answered
	readers bool   // blocker is one of the readers that have the lock, and a writer waits ahead of this process's readers
}

// ownedElsewhereLocked reports whether Redis has said of the present request that another client had the lock; of a
// quorum's servers, a majority has.
func (e *entry) ownedElsewhereLocked() bool {
	l := e.stateLocked()
	owner := l.Blocker()
	if owner == "" || l.Asking() || l.LackedReplicas() {
		return false
	}
	if who, err := protocol.ParseID(owner); err == nil && who.Client == e.client.id {
		return false // a failover has undone its release, and nobody has the lock
	}
	return e.client.quorum == nil || e.client.quorum.Blocked(&e.keys, l.Request().ID)
}

func (e *entry) lastKnownLocked() (known lastKnown) {
	known.err, known.blocker = e.stateLocked().LastErr(), e.stateLocked().Blocker()
	_, inside := e.stateLocked().Counts()
	known.here, known.kept = inside > 0, e.stateLocked().KeptPastLease()
	l := e.stateLocked()
	if req := l.Request(); req.ID != "" && req.Mode == protocol.Shared && !l.Asking() { // queued, and not for readers alone
		owner, err := protocol.ParseID(known.blocker)
		known.readers = err == nil && owner.Mode == protocol.Shared
	}
	return known
}

// refusal returns the error of a caller that was not admitted; known is nil if the caller had not
// entered the lock.
func (h *handle) refusal(known *lastKnown, reason error, began time.Time) error {
	r := &notAcquired{name: h.keys.Name(), waited: time.Since(began), reason: reason, unasked: known == nil}
	if known != nil {
		r.lastErr, r.blocker, r.silent = known.err, blockerText(known.blocker), known.silent
		r.here, r.kept, r.readers = known.here, known.kept, known.readers && r.blocker != ""
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
		return &textError{err.Error(), []error{err, ErrClosed}}
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
