package redisserver

import (
	"context"
	"sync/atomic"
	"time"
)

// Deadlines makes the contexts that commands are sent under. A context with a deadline costs five
// allocations and a timer, and those of a lock and its unlock would be a third of what these
// allocate, on a quorum five times as many. So commands that begin within a short time share one:
// all they have in common is when they are given up. It is safe for concurrent use.
type Deadlines struct {
	Base  context.Context                   // which they all end with
	slots [7]atomic.Pointer[sharedDeadline] // see slot: a client has few limits
}

// sharedDeadline is the context of all commands that may take as long as limit and begin before a
// certain time. Nobody cancels it, because nobody knows whether another one needs it; its
// deadline ends it.
type sharedDeadline struct {
	ctx    context.Context
	stop   context.CancelFunc
	limit  time.Duration
	before time.Time
}

// sharedPart is the part of a limit that a command can lose because it shares its context with an
// earlier one.
const sharedPart = 32

// Within returns a context that ends when limit is over, or a little earlier, and not later.
func (d *Deadlines) Within(limit time.Duration) context.Context {
	now := time.Now()
	slot := d.slot(limit)
	if s := slot.Load(); s != nil && s.limit == limit && now.Before(s.before) {
		return s.ctx
	}
	s := &sharedDeadline{limit: limit, before: now.Add(limit / sharedPart)}
	s.ctx, s.stop = context.WithDeadline(d.Base, now.Add(limit))
	slot.Store(s)
	return s.ctx
}

// slot returns that of limit: the first, from the one that its remainder says on, that has this
// limit or none yet. Two limits in turn in one slot would have each command begin a context, which
// nobody may end before its deadline.
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
