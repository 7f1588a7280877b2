package lockstate

import (
	"container/heap"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	// latestArrival is for how long a command without answer can still arrive. We give it
	// up after 2 s and close its connection, but what was written by then may be in the
	// network, or in the buffers of a server that hangs.
	latestArrival = time.Minute

	firstCancelAgain = 50 * time.Millisecond // without answer, while an Unlock waits for it
	cancelAgain      = time.Second
	longCancelAgain  = 30 * time.Second
	cancelProbeEvery = 2 * time.Second

	cancelsAtOnce  = 250
	mostCancels    = 100_000 // a flood of forged messages must not fill the memory
	cancelGrid     = 100 * time.Millisecond
	cancelPatience = time.Minute
)

// arrives returns until when a command that has no answer by now may still arrive, for an id
// with that TTL. After its TTL it would find no trace of its purpose. Safety does not depend on
// the bound, only how soon the harm ends: the request of a command that arrives later is
// cancelled after the first message about it (rule 5), or ends with its TTL.
func arrives(now time.Time, ttl time.Duration) time.Time {
	return now.Add(min(ttl, latestArrival))
}

// CancelSchedule decides when each request is cancelled. Like a Lock it has no goroutine and no
// clock and sends nothing: its owner serializes the calls, sends what Take returns, and reports
// the outcome to Answered.
//
//   - A request is cancelled at once. If that has no answer, or is refused, it is tried
//     again: soon if an Unlock waits for it, then more and more rarely, but as many as fit in
//     one round trip every 2 s. The first answer to any cancel makes all that had none due
//     again.
//   - Once answered, it is cancelled again for as long as an earlier command of its id can
//     arrive: a second later, for that is when a server that hung reads what it was sent;
//     then every half minute; and a last time when that is over.
//   - Without an answer it is given up when the request has expired by its TTL.
type CancelSchedule struct {
	Pending cancelHeap
	base    time.Time // what the grid is counted from
	rare    int       // of those pending, how many are tried more rarely than each second for want of an answer
	heard   bool      // an answer came, so those are due again
}

// Add schedules g from now on. It returns false if there are too many.
func (s *CancelSchedule) Add(g *Cancellation, now time.Time) bool {
	if len(s.Pending) >= mostCancels && !g.awaited() {
		return false
	}
	g.nextAt = now
	if s.base.IsZero() {
		s.base = now
	}
	if g.giveUp.IsZero() {
		who, _ := protocol.ParseID(g.ID)
		g.giveUp = now.Add(max(who.TTL, cancelPatience))
	}
	heap.Push(&s.Pending, g)
	return true
}

// Take returns the cancels that are due, as many as go in one round trip. Each must be passed to
// Answered before it is sent again.
func (s *CancelSchedule) Take(now time.Time) []*Cancellation {
	s.hasten()
	var batch []*Cancellation
	for len(s.Pending) > 0 && len(batch) < cancelsAtOnce && !s.Pending[0].nextAt.After(now) {
		g := heap.Pop(&s.Pending).(*Cancellation)
		if g.rare {
			g.rare = false
			s.rare--
		}
		g.sentAt = now
		batch = append(batch, g)
	}
	return batch
}

// Next returns when Take has something to return, zero if not before another is added.
func (s *CancelSchedule) Next() time.Time {
	s.hasten()
	if len(s.Pending) == 0 {
		return time.Time{}
	}
	return s.Pending[0].nextAt
}

// hasten makes cancels without an answer due again, if another has been answered since.
func (s *CancelSchedule) hasten() {
	if !s.heard {
		return
	}
	s.heard = false
	if s.rare == 0 {
		return
	}
	for _, g := range s.Pending {
		if g.rare {
			g.rare, g.pause = false, cancelAgain
			g.nextAt = Earlier(g.nextAt, g.sentAt.Add(cancelAgain))
		}
	}
	s.rare = 0
	heap.Init(&s.Pending)
}

// Answered is the event that the cancel of g has the outcome r. It returns which callers are
// settled by that, and how.
func (s *CancelSchedule) Answered(g *Cancellation, r protocol.Cancelled, now time.Time) Settlement {
	done := r.Fail == nil
	if done {
		s.heard = true
		g.proved = g.proved || r.Owned && !g.doubted || r.Proved || r.Token != 0 && r.Token == g.proof
	}
	closed := !done && r.Fail.Kind == protocol.ClientClosed
	over := closed || !now.Before(g.giveUp)
	var told Settlement
	if done || over {
		if next := g.Then; next != nil {
			g.Then, next.proved = nil, g.proved
			s.Add(next, now)
		}
		told = Settlement{Owner: g.Owner, Callers: g.Callers, proved: g.proved, Fail: r.Fail}
		g.Callers = nil
	}
	switch {
	case over:
		return told
	case !done:
		first := cancelAgain
		if g.awaited() {
			first = firstCancelAgain
		}
		trips := time.Duration(1 + len(s.Pending)/cancelsAtOnce)
		g.pause = max(first, min(2*g.pause, trips*cancelProbeEvery, longCancelAgain))
		g.nextAt = now.Add(g.pause)
		if g.pause > cancelAgain {
			g.rare = true
			s.rare++
		}
	case !g.sentAt.Before(g.until): // no earlier command can arrive any more
		return told
	default:
		pause := cancelAgain
		if g.repeated {
			pause = longCancelAgain
		}
		g.repeated, g.pause = true, 0
		g.nextAt = s.onGrid(Earlier(now.Add(pause), g.until))
	}
	heap.Push(&s.Pending, g)
	return told
}

// onGrid moves an instant to the next one that many cancels share, so that they leave together.
// It keeps to the monotonic clock, unlike Truncate: the wall clock may be set back.
func (s *CancelSchedule) onGrid(t time.Time) time.Time {
	if past := t.Sub(s.base) % cancelGrid; past > 0 {
		return t.Add(cancelGrid - past)
	}
	return t
}

// Settlement is the outcome of a cancel for the callers whose Unlock waits for it.
type Settlement struct {
	Owner   any
	Callers []*Caller
	proved  bool              // the lock was theirs when it was released
	Fail    *protocol.Failure // nil if Redis answered
}

// awaited reports whether an Unlock waits for g to be cancelled, or for one of those after it.
func (g *Cancellation) awaited() bool {
	return g != nil && (len(g.Callers) > 0 || g.Then.awaited())
}

type cancelHeap []*Cancellation

func (h cancelHeap) Len() int           { return len(h) }
func (h cancelHeap) Less(i, j int) bool { return h[i].nextAt.Before(h[j].nextAt) }
func (h cancelHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *cancelHeap) Push(x any)        { *h = append(*h, x.(*Cancellation)) }

func (h *cancelHeap) Pop() any {
	old := *h
	g := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return g
}
