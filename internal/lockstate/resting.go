package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Resting is the state of a lock that one caller holds and nobody waits for, in less than a
// sixth of the space, because a client may hold very many of these. Such a lock rests between
// one event and the next. What is missing here follows from the caller and its options.
type Resting struct {
	holder  *Caller
	more    *unusual // nil as long as all is as after the first lease of a new grant
	proved  time.Time
	clock   uint64
	clockAt int32  // ns after proved
	gained  int32  // ns
	renewAt uint32 // the number of an instant on the grid
	touchAt uint32 // likewise
	id      protocol.ShortID
}

// unusual holds what, for most resting locks, follows from the holder and a few small numbers.
type unusual struct {
	token, last                      uint64
	since, renewAt, touchAt, clockAt Instant
	gained                           time.Duration
	via                              Via
	served                           int32
}

// Rest puts the state of l into r and returns true if it fits, that is if Wake restores exactly
// that state. So anything else that a lock has to remember keeps it awake.
func (l *Lock) Rest(r *Resting) bool {
	g, c := &l.grant, l.members
	if g.state != Held || c == nil || c.next != nil || l.waiting.first != nil || l.lastErr != nil || l.blocker != "" || g.wanted {
		return false // checked first, because the comparisons below take longer
	}
	id, ok := g.req.Short(l.env.Client())
	if !ok {
		return false
	}
	rest := Resting{
		holder: c, proved: g.proved, clock: g.clock, clockAt: int32(g.clockAt.sub(l.instant(g.proved))), gained: int32(g.gained), id: id,
	}
	if grid := Instant(g.grid()); grid > 0 {
		rest.renewAt, rest.touchAt = uint32((g.renewAt-start)/grid), uint32((g.touchAt-start)/grid)
	}
	l.proof = proof{} // trusts computes it again
	var same Lock
	same.wake(&rest, nil, g.req, l.env)
	if same != *l {
		more := unusual{
			token: g.token, last: l.last, since: g.since, renewAt: g.renewAt, touchAt: g.touchAt, clockAt: g.clockAt,
			gained: g.gained, via: g.via, served: g.served,
		}
		same.wake(&rest, &more, g.req, l.env)
		if same != *l {
			return false
		}
		kept := more // so that more is allocated only if it is kept
		rest.more = &kept
	}
	*r = rest
	return true
}

// Wake restores in l the state that came to rest in r, and empties r. The zero Resting stands for
// a lock that was never used.
func (l *Lock) Wake(r *Resting, env Environment) {
	if r.holder == nil {
		*l = Lock{env: env}
		return
	}
	l.wake(r, r.more, r.id.Request(env.Client(), r.holder.Mode, r.holder.Opts.TTL), env)
	*r = Resting{}
}

// SlowHold reports whether Slow would find that the holder has been inside since then or longer.
func (r *Resting) SlowHold(since time.Duration) bool {
	return r.holder != nil && !r.holder.slow && r.holder.Since <= since
}

// HeldSince is Lock.Oldest for a lock that rests: it returns when its holder entered, or false if it has
// none.
func (r *Resting) HeldSince() (since time.Duration, held bool) {
	if r.holder == nil {
		return 0, false
	}
	return r.holder.Since, true
}

// wake makes l from r. req is the holder's request, and more what r has of an unusual grant, or nil.
func (l *Lock) wake(r *Resting, more *unusual, req protocol.Request, env Environment) {
	c := r.holder
	members := callers{first: c, last: c, n: 1}
	*l = Lock{env: env, inside: members, members: c}
	g := &l.grant
	*g = grant{ticket: ticket{req: req, opts: c.Opts, proved: r.proved, sent: true}, state: Held, clock: r.clock}
	if more == nil {
		grid := g.grid()
		more = &unusual{
			token: c.Token, last: c.Token, since: start.add(c.Since),
			renewAt: start.add(time.Duration(r.renewAt) * grid), touchAt: start.add(time.Duration(r.touchAt) * grid),
			clockAt: l.instant(r.proved).add(time.Duration(r.clockAt)), gained: time.Duration(r.gained), via: c.Via, served: 1,
		}
	}
	l.last, g.token, g.via, g.served, g.gained = more.last, more.token, more.via, more.served, more.gained
	g.since, g.renewAt, g.touchAt, g.clockAt = more.since, more.renewAt, more.touchAt, more.clockAt
	if c.Mode == protocol.Shared {
		g.readers = l.last
	}
	l.watchMaxHold(c)
	if c.Mode == protocol.Exclusive && c.Opts.MinHold > 0 {
		g.minHoldUntil = minHoldOf(c)
	}
}
