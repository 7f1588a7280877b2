package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Effects are what follows from an event. The owner of the lock's state performs them after
// unlocking the mutex that guards it.
type Effects struct {
	Send    protocol.Command  // to be sent, unless its verb is None; its answer is an event
	Woken   Woken             // callers admitted or rejected
	Ended   []Loss            // leases that ended before their Unlock
	Gone    []*Caller         // callers that are settled and whose Unlock waits for that
	Cancels []Cancellation    // requests to be canceled
	Done    []chan struct{}   // to be closed: downgrades and checks that are settled
	Check   *protocol.Renewal // to be sent at once, unless nil; its outcome is the event Renewed
	Renew   bool              // the grant is to be renewed in the next batch
	Spare   time.Duration     // with Renew: how long that may wait, so that not too many leave at once
	Touch   protocol.Touch    // with Renew
}

// Woken is a list of callers. A single caller, the usual case, costs no allocation.
type Woken struct {
	first *Caller
	more  []*Caller
}

func (w *Woken) add(c *Caller) {
	if w.first == nil {
		w.first = c
	} else {
		w.more = append(w.more, c)
	}
}

// Any reports whether the list has any callers.
func (w *Woken) Any() bool { return w.first != nil }

// All iterates over the callers in the order in which they were woken.
func (w *Woken) All(yield func(*Caller) bool) {
	if w.first == nil || !yield(w.first) {
		return
	}
	for _, c := range w.more {
		if !yield(c) {
			return
		}
	}
}

// Loss is a lease that ended before its Unlock.
type Loss struct {
	Caller *Caller
	Why    Reason // 0 if the client was closed
}

// Cancellation is a request that may still wait or own the lock in Redis although no caller
// needs it. Its cancel is sent until Redis acknowledges one, and then again until no earlier
// command about the request can arrive anymore.
type Cancellation struct {
	Owner   any // for the sender, to find its own again in a settlement
	Under   any // for the sender: the trace span that the cancel is sent under
	ID      string
	Last    uint64         // last token given out under ID, or by this client before; 0 if only the grant's own
	doubted bool           // that ID owned the lock until the cancel is no proof, see Lock.inDoubt
	proof   uint64         // while this is the lock's last token, no other owner has come in between; 0 if unknown
	Link    *protocol.Span // hold span of the lease that was released
	Keep    time.Time      // until when Redis keeps the lock from everybody if ID owned it; zero for no longer
	until   time.Time      // when earlier commands can no longer arrive; zero if one answer is enough
	Callers []*Caller      // callers that left, to be settled when this is canceled
	Release bool           // it confirms a release that had no answer, whether a caller waits for that or not
	lost    bool           // its loss was reported
	Then    *Cancellation  // to be canceled once this one is
	giveUp  time.Time      // when to give up without an answer; zero for after its TTL, or a minute if that is longer
	// Fields of the schedule:
	nextAt   time.Time
	sentAt   time.Time
	pause    time.Duration // since the last try, if that had no answer
	rare     bool          // counted in CancelSchedule.rare
	repeated bool          // sent again although it had been answered
	lingers  bool          // counted in CancelSchedule.lingering
	proved   bool          // it is proved that the lock was ours when it was released
}

// RepeatFor has the cancel repeated after its first answer, because a command about the request, whose TTL
// is ttl, had no answer by now and may still arrive.
func (c *Cancellation) RepeatFor(ttl time.Duration, now time.Time) { c.until = arrives(now, ttl) }

// Cooldown returns for how long from now Redis keeps the lock from everybody if the request
// owned it.
func (c *Cancellation) Cooldown(now time.Time) time.Duration { return cooldown(c.Keep, now) }
