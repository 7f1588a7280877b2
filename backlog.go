package leased

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// backlog hands items to deliver in order, in a goroutine of its own that lives
// while there are any. It is how the user's code is told of what happens in
// goroutines that others depend on: a call that blocks holds up the later ones and
// nothing else, and one that panics is reported, once, and ends nothing.
type backlog[T any] struct {
	deliver func(T)
	most    int    // further items are dropped and counted; 0: none is
	what    string // is called, for the report of a panic

	dropped  atomic.Int64
	reported atomic.Bool

	mu    sync.Mutex // guards what follows
	queue []T
	done  chan struct{} // closed when the running goroutine ends; nil if none runs
}

// add reports whether there was room.
func (b *backlog[T]) add(item T) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.most > 0 && len(b.queue) >= b.most {
		b.dropped.Add(1)
		return false
	}
	b.queue = append(b.queue, item)
	if b.done == nil {
		b.done = make(chan struct{})
		go b.run(b.done)
	}
	return true
}

// run is owned by the client, ended by an empty queue, and waited for by Shutdown
// as long as its context lasts: what is called may be what called Shutdown.
func (b *backlog[T]) run(done chan struct{}) {
	var batch []T
	next, ended := 0, false
	defer func() {
		if ended {
			return
		}
		// A call ended this goroutine, as testing.T.FailNow does: another goes on.
		b.mu.Lock()
		defer b.mu.Unlock()
		b.queue = append(batch[next:], b.queue...)
		go b.run(done)
	}()
	for {
		b.mu.Lock()
		if len(b.queue) == 0 {
			b.done, ended = nil, true
			close(done)
			b.mu.Unlock()
			return
		}
		batch, b.queue = b.queue, batch[:0]
		b.mu.Unlock()
		for next = 0; next < len(batch); {
			item := batch[next]
			next++
			b.hand(item)
		}
		clear(batch)
		next = len(batch)
	}
}

// hand delivers one item.
func (b *backlog[T]) hand(item T) {
	defer func() {
		if p := recover(); p != nil && b.reported.CompareAndSwap(false, true) {
			reportPanic(b.what, p)
		}
	}()
	b.deliver(item)
}

// reportPanic says in the default log that code of the user's panicked where nobody
// could have recovered it. That log may be what panics.
func reportPanic(what string, p any) {
	defer func() { _ = recover() }()
	slog.Default().Error("leased: "+what+" panicked; locks go on", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
}

// wait returns when all items were delivered, or ctx ends, and reports which.
func (b *backlog[T]) wait(ctx context.Context) (delivered bool) {
	b.mu.Lock()
	done := b.done
	b.mu.Unlock()
	return done == nil || endsBefore(ctx, done)
}

// endsBefore waits for done or ctx, and reports which came; done, if both have.
func endsBefore(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}
