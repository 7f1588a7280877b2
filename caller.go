package leased

import "time"

type phase uint8

const (
	waiting phase = iota
	inside
	left
	turnedAway
)

// caller is one call of Lock, or one of its relatives, from its arrival until
// its Unlock is settled. All but ready, gone and cancel belong to the lock.
type caller struct {
	mode    mode
	try     bool // will not wait for another
	patient bool // waits even for what only an operator can mend
	over    bool // inside, but its lease is not to be renewed for its sake
	settled bool // left, and nothing is awaited of Redis
	entered bool // was admitted; never changes again
	phase   phase
	leased  bool // somebody has a Lease for it
	stray   bool // inside, but the grant it entered on is gone
	via     via
	opts    *lockOptions
	err     error // turned away: why; left: what Unlock returns
	ended   error // why its lease ended before Unlock, nil while it goes on
	token   uint64
	ahead   time.Duration // how far the token is ahead of the server's clock
	till    time.Time     // inside: end of its maximum hold, zero if none; lost or left: what its trust window was

	prev, next *caller
	then       *caller // effects.woken

	ready  chan struct{} // closed on leaving phase waiting; nil if it never waited
	gone   chan struct{} // closed when settled; nil if nobody waits for it
	cancel func(error)   // ends its context; nil if nobody asked for one
}

// callers is a FIFO from which any member can leave.
type callers struct{ first, last *caller }

func (q *callers) push(c *caller) {
	c.prev, c.next = q.last, nil
	if q.last == nil {
		q.first = c
	} else {
		q.last.next = c
	}
	q.last = c
}

func (q *callers) remove(c *caller) {
	if c.prev == nil {
		q.first = c.next
	} else {
		c.prev.next = c.next
	}
	if c.next == nil {
		q.last = c.prev
	} else {
		c.next.prev = c.prev
	}
	c.prev, c.next = nil, nil
}

// settle ends the leaving of c: err is what its Unlock returns, unless the lease
// was lost before.
func (c *caller) settle(err error, fx *effects) {
	if c.settled {
		return
	}
	c.settled = true
	c.err = err
	if c.ended != nil && c.ended != ErrClosed {
		c.err = c.ended
	}
	if c.gone != nil {
		fx.gone = append(fx.gone, c)
	}
}
