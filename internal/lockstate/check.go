package lockstate

// A check: a caller inside asks Redis whether its grant is still ours, instead of waiting for
// the next renewal. A check is a renewal that a caller waits for.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Check is one caller's question. Only a command that was sent after the caller asked answers
// it, whether it was sent for this check, for another one, or by the watchdog.
type Check struct {
	caller *Caller
	at     time.Time
	sent   bool // the renewal in flight was sent for this check, too
	done   chan struct{}

	// Valid when done is closed. If neither is set, the lock is still ours.
	Over bool  // the lease had ended, or ended in the meantime
	Err  error // why Redis did not answer
}

// checking is the state of a lock's checks.
type checking struct {
	waiting []*Check
	asked   string    // id that the renewal in flight is about, empty if none is in flight
	sent    time.Time // when that renewal was sent
}

// Check is the event that c asks whether the lock is still ours. When k has the answer, the
// effects include done, to be closed.
func (l *Lock) Check(k *Check, c *Caller, done chan struct{}, now time.Time, fx *Effects) {
	k.caller, k.at, k.done = c, now, done
	if l.checking == nil {
		l.checking = &checking{}
	}
	l.checking.waiting = append(l.checking.waiting, k)
	l.applyRules(now, fx)
}

// settleChecks answers the checks that can be answered and asks Redis for the others. It sends
// one renewal at a time, which answers all checks that were waiting when it was sent.
func (l *Lock) settleChecks(now time.Time, fx *Effects) {
	if l.checking == nil {
		return
	}
	g := &l.grant
	overtaken := l.acquireOvertaken()
	l.answerChecks(fx, func(k *Check) bool {
		k.Over = k.caller.Phase != Inside || k.caller.Ended == ByLoss
		return k.Over || !overtaken && g.proved.After(k.at) // a caller whose lease is not over is a member
	})
	if l.checking == nil || overtaken || g.role() == byDowngrade { // a downgrade's answer is a proof, under another id
		return
	}
	if l.checking.asked != g.req.ID {
		l.checking.asked, l.checking.sent = g.req.ID, now
		for _, k := range l.checking.waiting {
			k.sent = true
		}
		fx.Check = &protocol.Renewal{Req: g.req, At: now}
	}
}

// acquireOvertaken reports whether an acquire of the held grant is in flight whose answer was overtaken by
// the message of the grant. It makes the grant anew if that is gone when it arrives. Only its answer tells
// whether that happened, and no renewal proves anything before it.
func (l *Lock) acquireOvertaken() bool {
	return l.grant.state == Held && l.pending.verb == protocol.Acquire && !l.pending.question && l.grant.role() != byPlace
}

// endsCheck reports whether r, which has an outcome, is the renewal that was sent for checks.
func (l *Lock) endsCheck(r *protocol.Renewal) bool {
	if l.checking == nil || l.checking.asked != r.Req.ID || !l.checking.sent.Equal(r.At) {
		return false
	}
	l.checking.asked = ""
	return true
}

// checked answers the checks that waited for a command, which was sent at sentAt. It found that the
// lock is ours, or had no answer because of err. own says that it was sent for checks.
func (l *Lock) checked(sentAt time.Time, own bool, err error, fx *Effects) {
	l.answerChecks(fx, func(k *Check) bool {
		if own && k.sent || sentAt.After(k.at) {
			k.Err = err
			return true
		}
		return false
	})
}

// answerChecks settles the checks for which answer returns true.
func (l *Lock) answerChecks(fx *Effects, answer func(*Check) bool) {
	if l.checking == nil {
		return
	}
	var left []*Check
	for _, k := range l.checking.waiting {
		if answer(k) {
			fx.Done = append(fx.Done, k.done)
		} else {
			left = append(left, k)
		}
	}
	l.checking.waiting = left
	if left == nil {
		l.checking = nil
	}
}
