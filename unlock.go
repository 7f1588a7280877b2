package leased

import (
	"context"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// What every unlocking method does: the caller leaves the lock and waits for Redis to confirm the release, and
// the outcome becomes an error. Like acquiring, all of it runs in the caller's own goroutine.

// releaseWait says how long an Unlock waits for Redis: until ctx ends or, if ctx is nil, as long as the
// options of its caller say.
type releaseWait struct{ ctx context.Context }

// minInline is the least time for which Unlock runs its release itself. The command ends with that
// time, and then counts as one without an answer, so too short a time would cut off what Redis is about
// to answer: if the next owner has unlocked before the release is repeated, the lease counts as lost.
const minInline = time.Second

// inline returns for how long the Unlock of w may run its release in its own goroutine, 0 if it has to be
// able to stop waiting sooner than the command.
func (t releaseWait) inline(e *entry, w *call) time.Duration {
	switch {
	case t.ctx == nil && w.Opts.ReleaseTimeout >= max(minInline, e.client.roundTrip.WithConnection()):
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
	caller := pick(e.stateLocked())
	if caller == nil {
		e.mu.Unlock()
		return false, nil
	}
	w := callOf(caller)
	ends := e.stateLocked().EndsBy(caller, now)
	e.noteBehindLocked(w)
	e.stateLocked().Leave(caller, now, &fx)
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
		ifCutShort(func() { e.perform(&fx, idle, 0) }, func() { inlineFor = t.inline(e, w) }) // a method of t.ctx may panic
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
	held, first := e.takeHoldLocked(w, holdEnd{how: holdOutcome(w, err), why: why, at: at, settled: settled})
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
	if never, ok := e.neverConfirmed(err, ends); ok {
		err = never
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

// neverConfirmed returns the error of a release that nothing will confirm anymore, with the lock's name, if
// err says so. The lock expires at ends.
func (e *entry) neverConfirmed(err error, ends time.Time) (*notReleased, bool) {
	over, ok := err.(*lockstate.ReleaseUnconfirmed) //nolint:errorlint // methods of err can be user code, and e.mu is locked
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
		if never, ok := e.neverConfirmed(too.Release, time.Time{}); ok {
			lost.release = never
		}
	case *notReleased:
		lost.release = too
	}
	return lost
}
