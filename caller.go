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
	unheard bool // its Unlock has returned before it was settled
	via     via
	ended   ending
	opts    *lockOptions
	err     error // turned away: why; left: what Unlock returns
	token   uint64
	since   time.Duration // it entered so long after env.start()
	ahead   time.Duration // how far the token is ahead of the server's clock
	till    time.Time     // waiting: see attends; inside: end of its maximum hold, zero if none; lost or left: what its trust window was

	prev, next *caller
	then       *caller // effects.woken

	ready  chan struct{} // closed on leaving phase waiting; nil if it never waited
	gone   chan struct{} // closed when settled; nil if nobody waits for it
	cancel func(error)   // ends its context; nil if nobody asked for one
	trail  *trail        // what its spans will tell; nil if it is not traced
}

// attends reports whether c, who only tries, waits for an owner that may be idle.
func (c *caller) attends() bool { return c.try && !c.till.IsZero() }

// ending says whether a lease ended before its Unlock.
type ending uint8

const (
	notYet ending = iota
	byClose
	byLoss // whatever else ended it before
)

// cause is what ends the lease's context.
func (e ending) cause() error { return [...]error{nil, ErrClosed, ErrLeaseLost}[e] }

// callers is a FIFO from which any member can leave.
type callers struct {
	first, last *caller
	n           int
}

func (q *callers) push(c *caller) {
	q.n++
	c.prev, c.next = q.last, nil
	if q.last == nil {
		q.first = c
	} else {
		q.last.next = c
	}
	q.last = c
}

func (q *callers) remove(c *caller) {
	q.n--
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

// settle ends the leaving of c: err is what its Unlock returns, besides the loss of
// the lease if it was lost before.
func (c *caller) settle(err error, fx *effects) {
	if c.settled {
		return
	}
	c.settled = true
	c.err = err
	if c.ended == byLoss {
		c.err = lostToo(err)
	}
	if c.gone != nil {
		fx.gone = append(fx.gone, c)
	}
}
