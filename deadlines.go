package leased

import (
	"context"
	"sync/atomic"
	"time"
)

// The contexts that commands are sent under. One with a deadline costs five allocations and a
// timer, and those of a lock and its unlock would be a third of what these allocate. So commands
// that begin within a short time share one: all they have in common is when they are given up.

// deadlines makes contexts that end with base.
type deadlines struct {
	base  context.Context
	slots [7]atomic.Pointer[sharedDeadline] // by the limit: a client has few
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

// within returns a context that ends when limit is over, or a little earlier, and not later.
func (d *deadlines) within(limit time.Duration) context.Context {
	now := time.Now()
	slot := &d.slots[uint64(limit)%uint64(len(d.slots))]
	if s := slot.Load(); s != nil && s.limit == limit && now.Before(s.before) {
		return s.ctx
	}
	s := &sharedDeadline{limit: limit, before: now.Add(limit / sharedPart)}
	s.ctx, s.stop = context.WithDeadline(d.base, now.Add(limit))
	slot.Store(s)
	return s.ctx
}
