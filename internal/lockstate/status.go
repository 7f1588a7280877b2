package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Status is a copy of a lock's state. The simulation and other tests compare it with what Redis
// has.
type Status struct {
	State       grantState
	InFlight    protocol.Verb
	Req         protocol.Request
	Next        string // id of the request that replaces Req, empty if there is none
	Token       uint64
	Proved      time.Time
	Since       time.Time
	Trust       time.Time
	Downgrading bool // a downgrade was asked for
	Reserving   bool // a place in the queue behind the grant is reserved, or asked for
	Renewed     bool // the grant needs renewals
	Wanted      bool // the process knows that others wait for what it owns, or may own

	ttl time.Duration // TTL that the last proof was for
}

// Status returns the lock's status.
func (l *Lock) Status() Status {
	g := &l.grant
	v := Status{
		State: g.state, InFlight: l.pending.verb, Req: g.req, Token: g.token, Proved: g.proved, Since: l.time(g.since),
		Trust: g.trust(), Downgrading: g.role() == byDowngrade, Reserving: g.role() == byPlace, Renewed: l.needsRenewal(), Wanted: g.wanted, ttl: g.ttl(),
	}
	if g.next != nil {
		v.Next = g.next.req.ID
	}
	return v
}

// Asking reports whether the lock was requested, and Redis has neither granted nor queued the request.
func (l *Lock) Asking() bool { return l.grant.state == Asking }

// MayOwn reports whether the grant is held and, as far as we know, under id.
func (v *Status) MayOwn(id string) bool {
	return v.State == Held && (id == v.Req.ID || v.Downgrading && id == v.Next)
}

func (v *Status) String() string {
	switch {
	case v.Downgrading:
		return "downgrading"
	case v.Reserving:
		return "reserving"
	}
	return [...]string{"none", "asking", "queued", "held", "releasing"}[v.State]
}

// Counts returns how many callers wait and how many are inside.
func (l *Lock) Counts() (outside, within int) { return l.waiting.n, l.inside.n }

// KeptPastLease reports whether callers are inside, and none of them has a lease that goes on: it was lost,
// or its maximum hold is over. Only an Unlock of theirs lets in others of the process.
func (l *Lock) KeptPastLease() bool {
	for c := l.inside.first; c != nil; c = c.next {
		if c.Ended != ByLoss {
			return false
		}
	}
	return l.inside.first != nil
}

// Oldest returns since when the longest-waiting caller has waited, and since when the caller
// that has been inside the longest has been there. Both are counted from Environment.Start and
// -1 if there is no such caller.
func (l *Lock) Oldest() (waiting, inside time.Duration) {
	waiting, inside = -1, -1
	if c := l.waiting.first; c != nil {
		waiting = c.Since
	}
	if c := l.inside.first; c != nil {
		inside = c.Since
	}
	return waiting, inside
}

// Slow returns the caller that has waited the longest and the one that has been inside the longest, each
// only if that began at since or earlier and SetSlow was not called for it; otherwise nil. waits and holds
// say whether it looks at either.
func (l *Lock) Slow(since time.Duration, waits, holds bool) (waiting, inside *Caller) {
	first := func(c *Caller, looks bool) *Caller {
		if !looks || c == nil || c.slow || c.Since > since {
			return nil
		}
		return c
	}
	return first(l.waiting.first, waits), first(l.inside.first, holds)
}

// SetSlow notes that c was reported as slow, also in its log of events.
func (c *Caller) SetSlow(now time.Time) {
	c.slow = true
	c.Events.add(Event{At: now, What: eventSlow})
}

// Served returns the caller that the command in flight is for: the last one that unlocked, one
// that is inside and keeps the grant, or the first one that waits, even if it is a writer whose place
// is reserved while readers are inside. It returns nil if the command is for no caller, as in the
// release of an idle grant.
func (l *Lock) Served() *Caller {
	switch {
	case l.pending.verb == protocol.Release || l.pending.verb == protocol.Yield:
		return l.leaving.last
	case l.members != nil && (l.pending.verb != protocol.Acquire || l.pending.question):
		return l.members
	}
	return l.waiting.first
}

// Holders returns the first caller inside, nil if there is none. NextHolder returns the others.
func (l *Lock) Holders() *Caller { return l.inside.first }

// NextHolder returns the caller inside that entered after c, nil if there is none.
func (c *Caller) NextHolder() *Caller { return c.next }

// Drifted reports whether the wall clock and the monotonic clock have moved apart since
// ownership was proved.
func (v *Status) Drifted(now time.Time) bool { return between(v.Proved, now).drifted(v.ttl) }
