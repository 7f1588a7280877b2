package quorum

// Partial grants, which are those of fewer servers than a majority. They are given back if others
// wait behind them, so that clients with a few servers each do not wait for each other forever.

import (
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A partial grant is given back after minKeep if others wait behind it. The request with the
// smallest ticket gets it. If that is the same request, it keeps the grant for twice as long,
// up to maxKeep.
//
// A hand-off reaches a far server later than a near one, and its message takes longer to come back. So a
// near server's grant is kept for longer, by the lag of the servers that would complete a majority. No two
// messages take equally long over a network, and the round trips that are known are the shortest, so a
// quarter of theirs is added.
//
// Two requests that each have one of two servers and wait at the other would give both back at the same
// time, again and again, if they kept them for the same time: each would get what the other gave back. So
// the time is shortened by up to a half, by a part that depends on the id.
//
// Servers may place requests whose tickets are nearly equal in different orders. Then each of them
// would get back what it gave back, forever. So from the time patientGiveBacks on, the request gets
// a later ticket: by one to two times setBack, and twice as much each further time.
const (
	minKeep          = 2 * time.Millisecond
	maxKeep          = time.Second
	patientGiveBacks = 4
	setBack          = 4 // in µs
	maxDoublings     = 10
	jitter           = 4 // a round trip may take longer by this part of the shortest one
)

// later returns a later ticket for a request that gives back a grant for the n-th time. Requests whose
// tickets are equal get different ones, as far as their ids differ.
func (r *request) later(n int, id string) uint64 {
	if n < patientGiveBacks {
		return r.ticket
	}
	least := uint64(setBack) << min(n-patientGiveBacks, maxDoublings)
	return r.ticket + least + hashOf(id)%least
}

// plan sets when Tick looks at the request's partial grants that may have to be given back.
func (l *Lock) plan(r *request, now time.Time) {
	for i := range r.parts {
		if !r.blocks(i) {
			continue
		}
		at := r.parts[i].since.Add(l.keepFor(r, i))
		if at.Before(now) {
			at = now
		}
		l.dueBy(at)
	}
}

func (l *Lock) dueBy(at time.Time) {
	if l.dueAt.IsZero() || at.Before(l.dueAt) {
		l.dueAt = at
	}
}

// forgetLater sets when to forget a request whose release or cancel failed, or whose lease is lost, in case
// the state machine gives up before a cancel succeeds.
func (l *Lock) forgetLater(r *request, now time.Time) {
	if r.forgetAt.IsZero() {
		r.forgetAt = now.Add(max(r.who.TTL, time.Minute))
	}
	l.dueBy(r.forgetAt)
}

// keepFor returns for how long a partial grant is kept.
func (l *Lock) keepFor(r *request, i int) time.Duration {
	p := &r.parts[i]
	longest := min(minKeep<<min(p.giveBacks, maxDoublings), maxKeep)
	return l.lag(r, i) + longest - time.Duration(hashOf(p.id)%uint64(longest/2))
}

// lag returns how much longer the round trip to the servers that would complete a majority may be than that
// to server i: those where the request waits, the nearest first.
func (l *Lock) lag(r *request, i int) time.Duration {
	missing := l.cfg.need()
	var trips []time.Duration
	for j := range r.parts {
		switch r.parts[j].state {
		case owned:
			missing--
		case queued:
			if !l.cfg.Away(j) {
				trips = append(trips, l.cfg.RoundTrip(j))
			}
		}
	}
	if missing < 1 || missing > len(trips) {
		return 0
	}
	slices.Sort(trips)
	last := trips[missing-1]
	return max(0, min(last+last/jitter-l.cfg.RoundTrip(i), maxKeep))
}

func hashOf(id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(id))
	return h.Sum64()
}

// blocks reports whether others wait behind a partial grant while its request waits on other
// servers. Clients with a few servers each would otherwise block each other forever. Giving such
// grants back ends that, because all servers prefer the smallest ticket. A request whose token is being
// stored has a majority.
func (r *request) blocks(i int) bool {
	p := &r.parts[i]
	if r.dropped || r.token != 0 || p.state != owned || !p.more || p.asking || r.writing() {
		return false
	}
	return slices.ContainsFunc(r.parts, func(q part) bool { return q.state == queued })
}

// Tick is the event that the time of Due has come.
func (l *Lock) Tick(now time.Time, fx *Effects) {
	if l.dueAt.IsZero() || now.Before(l.dueAt) {
		return
	}
	l.dueAt = time.Time{}
	for _, id := range slices.Sorted(maps.Keys(l.reqs)) {
		r := l.reqs[id]
		if !r.forgetAt.IsZero() && r.op == nil {
			if !now.Before(r.forgetAt) {
				l.drop(r, now, fx)
			} else {
				l.dueBy(r.forgetAt)
			}
			continue
		}
		if r.op != nil && r.op.verb != protocol.Acquire {
			continue
		}
		l.giveBackAll(r, now, fx)
		l.plan(r, now)
	}
}

// giveBackAll gives back the request's partial grants whose time has come. If it gets a later ticket,
// it is placed anew on the servers where it is queued, so that its place is the same everywhere.
func (l *Lock) giveBackAll(r *request, now time.Time, fx *Effects) {
	var given []int
	most := 0
	for i := range r.parts {
		if p := &r.parts[i]; r.blocks(i) && now.Sub(p.since) >= l.keepFor(r, i) {
			given, most = append(given, i), max(most, p.giveBacks+1)
		}
	}
	if len(given) == 0 {
		return
	}
	before := r.ticket
	r.ticket = r.later(most, l.newID(r, given[0]))
	for _, i := range given {
		l.giveBack(r, i, now, fx)
	}
	for i := range r.parts {
		if p := &r.parts[i]; r.ticket != before && p.state == queued && !p.asking && !p.mayArrive && !l.cfg.Away(i) {
			l.placeAnew(r, i, now, fx)
		}
	}
}

// placeAnew enters a server's queue under a new id with the request's present ticket, and then leaves its
// old place. The other way round, those behind it could enter in between.
func (l *Lock) placeAnew(r *request, i int, now time.Time, fx *Effects) {
	p := &r.parts[i]
	old := *p
	l.remember(old.id, i, now)
	p.ended = true // so that it gets another id
	l.lookAt(r, i, now, fx)
	l.send(&Send{Server: i, Kind: Cancel, req: r, Cmd: protocol.Command{ID: old.id},
		Cancel: protocol.CancelRequest{Keys: l.keys, ID: old.id, Last: old.lastFor(r)}}, fx)
}

// giveBack yields a partial grant to the first in its server's queue, and queues there again under
// a new id and the request's ticket.
func (l *Lock) giveBack(r *request, i int, now time.Time, fx *Effects) {
	p := &r.parts[i]
	if p.mayArrive {
		s := l.stray(r, i)
		s.Ends = true // by the yield
		fx.Strays = append(fx.Strays, s)
	} else {
		l.remember(p.id, i, now)
	}
	old := *p
	// The request has no lease yet, so there is no loss to remember.
	*p = part{history: history{countsFrom: old.countsFrom, giveBacks: old.giveBacks + 1, breaks: old.breaks},
		id: l.newID(r, i), state: asked, proved: now, asking: true, unprompted: true}
	l.forgetPart(old.id, r)
	l.forgetPart(old.lostID, r)
	l.parts[p.id] = r
	if op := r.op; op != nil && op.kind == Do && op.outcomes[i] == outcomeYes {
		op.outcomes[i] = outcomeNo // the server has answered, but the request waits there again
	}
	l.send(&Send{Server: i, Kind: Do, req: r, next: r,
		Cmd: protocol.Command{Verb: protocol.Yield, ID: old.id, Next: p.id, At: now, Ticket: r.ticket}}, fx)
}
