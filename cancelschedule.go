package leased

import (
	"container/heap"
	"time"
)

const (
	// A command without answer can arrive for so long after it was sent. We give it
	// up after 2 s and close its connection; what was written by then may be on its
	// way, or lie before a server that hangs.
	latestArrival = time.Minute

	firstCancelAgain = 50 * time.Millisecond // without answer, while somebody waits to hear of it
	cancelAgain      = time.Second
	longCancelAgain  = 30 * time.Second
	cancelProbeEvery = 2 * time.Second

	cancelsAtOnce  = 250
	mostCancels    = 100_000 // a flood of false messages must not fill the memory
	cancelGrid     = 100 * time.Millisecond
	cancelPatience = time.Minute
)

// arrives returns until when a command of an id with that TTL may still arrive that
// has had no answer by now. After its TTL it would find nothing of what it was for,
// and nothing here depends on the bound but that the harm ends soon: one that arrives
// later is cancelled when a message tells of it (rule 5), or ends with its TTL.
func arrives(now time.Time, ttl time.Duration) time.Time {
	return now.Add(min(ttl, latestArrival))
}

// cancelSchedule says when which request is to be cancelled. Like a lock it has no
// goroutine, no clock and no Redis: whoever owns it serializes the calls, sends what
// take returns, and says what came of it.
//
//   - A request is cancelled at once. Where that has no answer, or is refused, it is
//     tried again: soon if somebody waits to hear of it, then ever more rarely, but as
//     many as fit in one round trip each 2 s. The first answer to any has all others
//     that had none tried again.
//   - Once answered, it is cancelled again for as long as an earlier command of its id
//     can arrive: a second later, for that is when a server that hung reads what it was
//     sent; then each half minute; and for the last time when that is over.
//   - Without answer it is given up when its TTL has ended what there was.
type cancelSchedule struct {
	pending cancelHeap
	rare    int  // of those pending, how many are tried more rarely than each second for want of an answer
	heard   bool // an answer came, and they are to be tried again
}

// add has g cancelled from now on. It returns false where there are too many.
func (s *cancelSchedule) add(g *ghost, now time.Time) bool {
	if len(s.pending) >= mostCancels && !g.awaited() {
		return false
	}
	g.nextAt = now
	if g.giveUp.IsZero() {
		who, _ := parseID(g.id)
		g.giveUp = now.Add(max(who.ttl, cancelPatience))
	}
	heap.Push(&s.pending, g)
	return true
}

// take returns those to be sent now, in one round trip. Each is to be given to
// answered before it is sent again.
func (s *cancelSchedule) take(now time.Time) []*ghost {
	s.hasten()
	var batch []*ghost
	for len(s.pending) > 0 && len(batch) < cancelsAtOnce && !s.pending[0].nextAt.After(now) {
		g := heap.Pop(&s.pending).(*ghost)
		if g.rare {
			g.rare = false
			s.rare--
		}
		g.sentAt = now
		batch = append(batch, g)
	}
	return batch
}

// next returns when take has something to return, zero if not before another is added.
func (s *cancelSchedule) next() time.Time {
	s.hasten()
	if len(s.pending) == 0 {
		return time.Time{}
	}
	return s.pending[0].nextAt
}

// hasten has those tried again that had no answer, where another had one since.
func (s *cancelSchedule) hasten() {
	if !s.heard {
		return
	}
	s.heard = false
	if s.rare == 0 {
		return
	}
	for _, g := range s.pending {
		if g.rare {
			g.rare, g.pause = false, cancelAgain
			g.nextAt = earlier(g.nextAt, g.sentAt.Add(cancelAgain))
		}
	}
	s.rare = 0
	heap.Init(&s.pending)
}

// answered: so the cancel of g ended. It returns who is to be told, and what.
func (s *cancelSchedule) answered(g *ghost, r cancelled, now time.Time) settlement {
	done := r.fail == nil
	if done {
		s.heard = true
		g.proved = g.proved || r.owned || r.token != 0 && r.token == g.proof
	}
	closed := !done && r.fail.kind == clientClosed
	over := closed || !now.Before(g.giveUp)
	var told settlement
	if done || over {
		if next := g.then; next != nil {
			g.then, next.proved = nil, g.proved
			s.add(next, now)
		}
		told = settlement{entry: g.entry, callers: g.gone, proved: g.proved, fail: r.fail}
		g.gone = nil
	}
	switch {
	case over:
		return told
	case !done:
		first := cancelAgain
		if g.awaited() {
			first = firstCancelAgain
		}
		trips := time.Duration(1 + len(s.pending)/cancelsAtOnce)
		g.pause = max(first, min(2*g.pause, trips*cancelProbeEvery, longCancelAgain))
		g.nextAt = now.Add(g.pause)
		if g.pause > cancelAgain {
			g.rare = true
			s.rare++
		}
	case !g.sentAt.Before(g.until): // none can arrive any more
		return told
	default:
		pause := cancelAgain
		if g.repeated {
			pause = longCancelAgain
		}
		g.repeated, g.pause = true, 0
		g.nextAt = onCancelGrid(earlier(now.Add(pause), g.until))
	}
	heap.Push(&s.pending, g)
	return told
}

// onCancelGrid moves an instant to the next one that many have in common, so that
// their cancels leave together.
func onCancelGrid(t time.Time) time.Time {
	if on := t.Truncate(cancelGrid); on.Before(t) {
		return on.Add(cancelGrid)
	}
	return t
}

// settlement is what those are to be told who wait for a cancel.
type settlement struct {
	entry   *entry
	callers []*caller
	proved  bool     // the lock was theirs when it was let go
	fail    *failure // nil if Redis answered
}

// awaited reports whether somebody is to hear of its cancel, or of what comes after.
func (g *ghost) awaited() bool {
	return g != nil && (len(g.gone) > 0 || g.then.awaited())
}

type cancelHeap []*ghost

func (h cancelHeap) Len() int           { return len(h) }
func (h cancelHeap) Less(i, j int) bool { return h[i].nextAt.Before(h[j].nextAt) }
func (h cancelHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *cancelHeap) Push(x any)        { *h = append(*h, x.(*ghost)) }

func (h *cancelHeap) Pop() any {
	old := *h
	g := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return g
}
