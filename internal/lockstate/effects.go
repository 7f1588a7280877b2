package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Effects are what follows from an event. The lock's owner performs them when it has unlocked
// the lock.
type Effects struct {
	Send    protocol.Command  // to be sent, unless its verb is None; its answer is an event
	Woken   Woken             // callers admitted or rejected
	Ended   []Loss            // leases that ended before their Unlock
	Gone    []*Caller         // settled, and awaited by their Unlock
	Cancels []Cancellation    // requests to be cancelled
	Done    []chan struct{}   // downgrades and checks that are settled: to be closed
	Check   *protocol.Renewal // to be sent at once, unless nil; its outcome is the event Renewed
	Renew   bool              // the grant is to be renewed, in the next batch
	Spare   time.Duration     // with Renew: for how long it may wait, so that many do not leave at once
	Touch   time.Duration     // with Renew: TTL for the lock's last token, 0 for none
}

// Woken is a list of callers. One, which is the usual case, costs no allocation.
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

// Any reports whether there are any.
func (w *Woken) Any() bool { return w.first != nil }

// All has the callers in the order in which they were woken.
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

// Cancellation is a request that may still wait or own in Redis although no caller needs it.
// It is cancelled until Redis acknowledges that, and then until no earlier command about it
// can still arrive.
type Cancellation struct {
	Owner   any // whatever the sender wants to find again in a settlement
	Under   any // whatever the sender wants to send it under
	ID      string
	Last    uint64         // last token given out under it
	proof   uint64         // while it is the lock's last token, no other owner has come in between; 0 if none is known
	Link    *protocol.Span // hold span of the lease that was released
	Keep    time.Time      // until when the lock is kept from all others if the request owned it; zero for no longer
	until   time.Time      // when earlier commands cannot arrive any more; zero if one answer is enough
	Callers []*Caller      // that left, and are settled when it is cancelled
	Then    *Cancellation  // to be cancelled when this one is
	giveUp  time.Time      // without an answer; zero for after its TTL, or a minute if that is longer

	// The schedule's own:
	nextAt   time.Time
	sentAt   time.Time
	pause    time.Duration // since the last try, if that had no answer
	rare     bool          // counted in CancelSchedule.rare
	repeated bool          // was sent again although it had been answered
	proved   bool          // that the lock was ours when it was released

	doubted bool // that it owned until it was cancelled is no proof, see Lock.inDoubt
}

// Cooldown returns for how long, from now on, the lock is kept from all others if the request
// owned it.
func (g *Cancellation) Cooldown(now time.Time) time.Duration { return cooldown(g.Keep, now) }
