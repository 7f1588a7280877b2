package redisserver

import (
	"context"
	"sync/atomic"
	"time"
)

// Deadlines makes the contexts that commands are sent with. A context with a deadline costs five
// allocations and a timer. The contexts for locking and unlocking would be a third of all
// allocations of these two calls, and on a quorum there would be five times as many contexts. So
// commands that begin within a short time share a context; they share nothing but the time at which
// they are given up. A Deadlines is safe for concurrent use.
type Deadlines struct {
	Base  context.Context                   // the parent of all contexts
	slots [7]atomic.Pointer[sharedDeadline] // see slot; a client has few limits
}

// sharedDeadline is the context of all commands that have the same limit and begin before a certain
// time. It is never canceled, because another command may still need it; its deadline ends it.
type sharedDeadline struct {
	ctx    context.Context
	stop   context.CancelFunc // never called: see above; go vet wants it kept
	limit  time.Duration
	before time.Time
}

// sharedDivisor is the divisor of a limit that gives the most time a command can lose by sharing its
// context with an earlier command.
const sharedDivisor = 32

// Within returns a context that ends after limit or a little earlier, but never later.
func (d *Deadlines) Within(limit time.Duration) context.Context {
	now := time.Now()
	slot := d.slot(limit)
	if s := slot.Load(); s != nil && s.limit == limit && now.Before(s.before) {
		return s.ctx
	}
	s := &sharedDeadline{limit: limit, before: now.Add(limit / sharedDivisor)}
	s.ctx, s.stop = context.WithDeadline(d.Base, now.Add(limit))
	slot.Store(s)
	return s.ctx
}

// slot returns the slot of limit: starting at the slot that the remainder selects, the first one
// that is empty or holds this limit, or the starting slot if there is none. If two limits alternated
// in one slot, every command would create a context, and none of these contexts may be canceled
// before its deadline.
func (d *Deadlines) slot(limit time.Duration) *atomic.Pointer[sharedDeadline] {
	n := uint64(len(d.slots))
	home := uint64(limit) % n
	for i := range n {
		slot := &d.slots[(home+i)%n]
		if s := slot.Load(); s == nil || s.limit == limit {
			return slot
		}
	}
	return &d.slots[home]
}
