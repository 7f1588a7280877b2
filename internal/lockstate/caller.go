package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Phase is how far a call has come.
type Phase uint8

const (
	Waiting  Phase = iota
	Inside         // admitted, and not unlocked; its lease may have ended
	Left           // unlocked
	Rejected       // not admitted, or given up
)

// Caller is one call of Lock or of a method like it, from its arrival until its Unlock is
// settled. The code that makes the Caller sets Mode, Try, RetryFatal, Leased, Opts and Events. All
// other fields belong to the lock, except those marked as the maker's. A Caller has 112 bytes, a
// size class of Go's allocator, because a client may hold very many locks.
type Caller struct {
	Mode       protocol.Mode
	Try        bool // does not wait for other holders
	RetryFatal bool // keeps waiting through errors that only an operator can fix
	noRenew    bool // inside, but needs no renewal of the grant
	Settled    bool // left, and its outcome is known
	Entered    bool // was admitted; set once, unlike Phase, before the caller is woken, so it may be read without the mutex
	Phase      Phase
	Leased     bool // has a Lease
	Orphaned   bool // inside, but the grant that it entered on is gone
	awaited    bool // its Unlock waits until it is settled, see Await
	unheard    bool // its Unlock returned before it was settled, see LeaveUnsettled
	slow       bool // its long wait or hold was reported, see SetSlow
	unused     bool // it gave the lock back at once, see GiveBack; that this lease was lost concerns nobody
	Via        Via
	Ended      ending
	Why        Reason // why the lease was lost
	Reported   bool   // the maker's, like the next two: see call in acquire.go of the root package
	Again      bool
	Behind     int8
	clockLead  int32 // ns, see ClockLead
	Opts       *Terms
	outcome    *error // see Outcome; nil if the error is nil, as it is for nearly all callers
	Token      uint64
	Since      time.Duration // when it came or, once inside, when it was admitted; counted from Environment.Start

	// until is, for a Try caller that waits, until when it waits for an owner that may be idle,
	// 0 if it does not. For a caller that lost its lease or has left, it is the end of the trust
	// window.
	until Instant

	prev, next *Caller
	Events     *EventLog // for its spans; nil if it is not traced

	Ready chan struct{} // the maker's, like the next
	More  any
}

// Outcome returns why a caller was rejected, or what the Unlock of a caller that left returns.
func (c *Caller) Outcome() error {
	if c.outcome == nil {
		return nil
	}
	return *c.outcome
}

func (c *Caller) setOutcome(err error) {
	c.outcome = nil
	if err != nil {
		kept := err // so that only a non-nil error is allocated
		c.outcome = &kept
	}
}

// ClockLead returns how far the token is ahead of the server's clock.
func (c *Caller) ClockLead() time.Duration { return time.Duration(c.clockLead) }

// awaitsIdleOwner reports whether c is a Try caller that waits for an owner that may be idle. It
// is meaningful only while c waits.
func (c *Caller) awaitsIdleOwner() bool { return c.Try && c.until != 0 }

// ending says whether a lease ended before its Unlock.
type ending uint8

const (
	NotYet ending = iota
	byClose
	ByLoss // even if a Close had ended it before
)

// callers is a FIFO that any member can leave at any time.
type callers struct {
	first, last *Caller
	n           int
}

func (q *callers) push(c *Caller) {
	q.n++
	c.prev, c.next = q.last, nil
	if q.last == nil {
		q.first = c
	} else {
		q.last.next = c
	}
	q.last = c
}

func (q *callers) remove(c *Caller) {
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

// settle fixes the outcome of c, which left. err is what its Unlock returns, joined with the
// loss of the lease if there was one.
func (c *Caller) settle(err error, fx *Effects) {
	if c.Settled {
		return
	}
	c.Settled = true
	if c.Ended == ByLoss {
		if err == nil {
			err = ErrLeaseLost
		} else {
			err = &LostToo{err}
		}
	}
	c.setOutcome(err)
	if c.awaited {
		fx.Gone = append(fx.Gone, c)
	}
}

// Await requests an effect for when c, which left, is settled. It returns false if c is already
// settled.
func (c *Caller) Await() bool {
	if c.Settled {
		return false
	}
	c.awaited = true
	return true
}

// LeaveUnsettled says that the Unlock of c returns now, and reports whether c is not settled yet.
// A loss that is found later is then reported as an effect, because no Unlock returns it.
func (c *Caller) LeaveUnsettled() bool {
	c.unheard = !c.Settled
	return c.unheard
}

// Terms are the options of a lock.
type Terms struct {
	TTL      time.Duration
	MaxHold  time.Duration // 0: none
	IdleHold time.Duration
	MinHold  time.Duration // of an exclusive lease, see grant.minHoldUntil; 0: none
	Handoffs int           // how many leases one grant may give before others are served
	Tenure   time.Duration // how long one grant may be handed on before others are served
	Confirm  bool          // a message alone does not make an owner; the answer to an acquire does

	ReleaseTimeout time.Duration // how long Unlock waits for Redis; the lock's state does not use it
}
