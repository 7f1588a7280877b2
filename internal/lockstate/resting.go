package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Resting is the state of a lock that one caller holds and nobody waits for, in a third of the
// space: a client may hold very many of these. Such a lock rests between one event and the next.
// Its caller and its options say the rest.
type Resting struct {
	holder                           *Caller
	proved                           time.Time
	token, last, clock               uint64
	since, renewAt, touchAt, clockAt Instant
	gained                           time.Duration
	id                               protocol.ShortID
	via                              Via
	served                           int32
}

// Rest puts the state of l into r and returns true, if it fits: if Wake makes the same of it. So
// whatever else a lock may have to remember keeps it awake.
func (l *Lock) Rest(r *Resting) bool {
	g, c := &l.grant, l.members
	if g.state != Held || c == nil || c.next != nil || l.waiting.first != nil || l.lastErr != nil {
		return false // found without the comparison, which takes longer
	}
	id, ok := g.req.Short(l.env.Client())
	if !ok {
		return false
	}
	rest := Resting{
		holder: c, id: id, proved: g.proved, token: g.token, last: l.last, clock: g.clock, clockAt: g.clockAt,
		since: g.since, renewAt: g.renewAt, touchAt: g.touchAt, gained: g.gained, served: g.served, via: g.via,
	}
	var same Lock
	same.wake(&rest, g.req, l.env)
	if same != *l {
		return false
	}
	*r = rest
	return true
}

// Wake makes l what it was when it came to rest in r, and empties r. In the zero value rests a
// lock that was never used.
func (l *Lock) Wake(r *Resting, env Environment) {
	if r.holder == nil {
		*l = Lock{env: env}
		return
	}
	l.wake(r, r.id.Request(env.Client(), r.holder.Mode, r.holder.Opts.TTL), env)
	*r = Resting{}
}

func (l *Lock) wake(r *Resting, req protocol.Request, env Environment) {
	c := r.holder
	members := callers{first: c, last: c, n: 1}
	*l = Lock{env: env, inside: members, members: c, last: r.last}
	l.grant = grant{
		ticket: ticket{req: req, opts: c.Opts, proved: r.proved, token: r.token, sent: true},
		state:  Held, via: r.via, served: r.served, since: r.since, renewAt: r.renewAt, touchAt: r.touchAt,
		clock: r.clock, clockAt: r.clockAt, gained: r.gained,
	}
	if c.Mode == protocol.Shared {
		l.grant.readers = r.last
	}
	l.watchMaxHold(c)
	if c.Mode == protocol.Exclusive && c.Opts.MinHold > 0 {
		l.grant.minHoldUntil = minHoldOf(c)
	}
}
