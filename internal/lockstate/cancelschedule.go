package lockstate

import (
	"container/heap"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// CancelsAtOnce is how many cancels fit in one round trip.
const CancelsAtOnce = 250

// MaxCancels bounds the cancels that confirm no release, so that a flood of forged messages cannot fill
// the memory.
const MaxCancels = 100_000

const (
	// latestArrival is how long an unanswered command may take to arrive. We give it up after
	// 2 s and close its connection, but what was written by then may still be in the network,
	// or in the buffers of a server that hangs.
	latestArrival = time.Minute

	firstCancelAgain = 50 * time.Millisecond // after no answer, while an Unlock waits for it
	cancelAgain      = time.Second
	longCancelAgain  = 30 * time.Second
	cancelProbeEvery = 2 * time.Second

	minHoldsRemembered = 10_000 // hardly more releases at once are undone by a failover

	cancelGrid     = 100 * time.Millisecond
	cancelPatience = time.Minute
)

// arrives returns until when a command that has had no answer so far may still arrive, for an id
// with this TTL. After the TTL the command would find no trace of what it is about. Safety does
// not depend on the bound, which only decides how soon the harm ends: the request of a command
// that arrives later is canceled after the first message about it (rule 5), or ends with its
// TTL.
func arrives(now time.Time, ttl time.Duration) time.Time {
	return now.Add(min(ttl, latestArrival))
}

// CancelSchedule decides when each request is canceled. Like a Lock it has no goroutine and no
// clock, and sends nothing: its owner serializes the calls, sends what Take returns, and passes
// the outcome to Answered.
//
//   - A request is canceled at once. A cancel that has no answer or is refused is tried again:
//     soon if an Unlock waits for it, and then less and less often, until there is one round
//     trip's worth of cancels every 2 s, however many are pending. The first answer to any cancel
//     makes all unanswered ones due again.
//   - Once answered, the cancel is repeated for as long as an earlier command about its id can
//     arrive: after a second, because that is when a server that hung reads what it was sent;
//     then every half minute; and one last time when that period is over.
//   - Without an answer, it is tried a last time and given up when the request has expired by its
//     TTL.
type CancelSchedule struct {
	Pending   cancelHeap
	base      time.Time // origin of the grid
	rare      int       // how many pending cancels are tried less often than each second for want of an answer
	heard     bool      // an answer came, so those cancels are due again
	lingering int       // see Lingering

	// Of the last requests that were released with a minimum hold:
	minHolds map[string]time.Time // by id, until when it lasts
	released []releasedRequest    // in the order of their releases
}

type releasedRequest struct {
	id  string
	end time.Time // when its minimum hold is over or, if that is before, its TTL, and Redis cannot name it anymore
}

// Released is the event that a request is given back with a minimum hold that lasts until then. If a failover
// undoes that, Redis names the request as the owner again. Whoever wants the lock then asks its client, which
// cancels it, and must not give up the rest of the minimum hold by that.
func (s *CancelSchedule) Released(id string, until, now time.Time) {
	if s.minHolds == nil {
		s.minHolds = map[string]time.Time{}
	}
	for len(s.released) >= minHoldsRemembered || len(s.released) > 0 && !now.Before(s.released[0].end) {
		delete(s.minHolds, s.released[0].id)
		s.released = s.released[1:]
	}
	if _, ok := s.minHolds[id]; !ok {
		who, _ := protocol.ParseID(id)
		s.released = append(s.released, releasedRequest{id, earlierOf(until, now.Add(who.TTL))})
	}
	s.minHolds[id] = until
}

// Add schedules g from now on. It returns false if too many cancels are pending.
func (s *CancelSchedule) Add(g *Cancellation, now time.Time) bool {
	if len(s.Pending) >= MaxCancels && !g.confirms() {
		return false
	}
	if g.Keep.IsZero() {
		g.Keep = s.minHolds[g.ID]
	} else {
		s.Released(g.ID, g.Keep, now)
	}
	g.nextAt = now
	if s.base.IsZero() {
		s.base = now
	}
	if g.giveUp.IsZero() {
		who, _ := protocol.ParseID(g.ID)
		g.giveUp = now.Add(max(who.TTL, cancelPatience))
	}
	s.linger(g, !g.lost && !g.confirms())
	heap.Push(&s.Pending, g)
	return true
}

// Take returns the cancels that are due, at most as many as fit in one round trip. Each must be
// passed to Answered before it can be sent again.
func (s *CancelSchedule) Take(now time.Time) []*Cancellation {
	s.hasten()
	var batch []*Cancellation
	for len(s.Pending) > 0 && len(batch) < CancelsAtOnce && !s.Pending[0].nextAt.After(now) {
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

// Next returns when Take will have something to return, zero if not before the next Add.
func (s *CancelSchedule) Next() time.Time {
	s.hasten()
	if len(s.Pending) == 0 {
		return time.Time{}
	}
	return s.Pending[0].nextAt
}

// hasten makes unanswered cancels due again if another one has been answered since.
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
			g.nextAt = earlierOf(g.nextAt, g.sentAt.Add(cancelAgain))
		}
	}
	s.rare = 0
	heap.Init(&s.Pending)
}

// Answered is the event that the cancel of g has the outcome r. It returns the callers that this
// settles, and how.
func (s *CancelSchedule) Answered(g *Cancellation, r protocol.Canceled, now time.Time) Settlement {
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
		told = Settlement{Owner: g.Owner, Callers: g.Callers, Release: g.Release, proved: g.proved, Fail: r.Fail}
		g.Callers, g.Release = nil, false
	}
	switch {
	case over:
		s.linger(g, false)
		return told
	case !done:
		if r.Fail.Kind != protocol.NoAnswer {
			s.linger(g, false)
		}
		first := cancelAgain
		if g.awaited() {
			first = firstCancelAgain
		}
		trips := time.Duration(1 + len(s.Pending)/CancelsAtOnce)
		g.pause = max(first, min(2*g.pause, trips*cancelProbeEvery))
		g.nextAt = earlierOf(now.Add(g.pause), g.giveUp) // an Unlock that waits for it returns then
		if g.pause > cancelAgain {
			g.rare = true
			s.rare++
		}
	case !g.sentAt.Before(g.until): // no earlier command can arrive anymore
		s.linger(g, false)
		return told
	default:
		pause := cancelAgain
		if g.repeated {
			pause = longCancelAgain
			s.linger(g, false)
		}
		g.repeated, g.pause = true, 0
		g.nextAt = s.onGrid(earlierOf(now.Add(pause), g.until))
	}
	heap.Push(&s.Pending, g)
	return told
}

// Lingering returns how many requests that were given up may still get their lock, because no cancel has been
// answered yet. Where an earlier command about them had no answer either, the first answer to a cancel is not
// enough, because a server that hung carries out what it was sent in any order, but the one to the repeat a second
// later is. A request does not count anymore once its cancel is refused, or there is no connection for it. Releases
// that a cancel is to confirm, and leases whose loss was reported, are not counted.
func (s *CancelSchedule) Lingering() int { return s.lingering }

// linger notes whether g counts as lingering.
func (s *CancelSchedule) linger(g *Cancellation, lingers bool) {
	switch {
	case lingers && !g.lingers:
		s.lingering++
	case !lingers && g.lingers:
		s.lingering--
	}
	g.lingers = lingers
}

// onGrid moves an instant to the next one that many cancels share, so that they leave together.
// Unlike Truncate it uses the monotonic clock, because the wall clock may be set back.
func (s *CancelSchedule) onGrid(t time.Time) time.Time {
	if past := t.Sub(s.base) % cancelGrid; past > 0 {
		return t.Add(cancelGrid - past)
	}
	return t
}

// Settlement is the outcome of a cancel for those who wait for it.
type Settlement struct {
	Owner   any
	Callers []*Caller
	Release bool              // a release is confirmed, or given up
	proved  bool              // it is proved that the lock was theirs when it was released
	Fail    *protocol.Failure // nil if Redis answered
}

// confirms reports whether c, or one that follows it, confirms a release.
func (c *Cancellation) confirms() bool {
	return c != nil && (c.Release || c.Then.confirms())
}

// awaited reports whether an Unlock waits for c, or one that follows it, to be canceled.
func (c *Cancellation) awaited() bool {
	return c != nil && (len(c.Callers) > 0 || c.Then.awaited())
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
