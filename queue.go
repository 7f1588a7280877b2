package leased

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// How user code learns of what happens in goroutines that others depend on: the logger, the loss
// handler and OpenTelemetry each have a queue.

// gathering is how long a queue waits for more items to deliver together. It is shorter than the
// least time for which Shutdown waits for the queues.
const gathering = 50 * time.Millisecond

// asyncQueue passes items to deliver, in order, in its own goroutine, which lives while there are items. A
// call that blocks delays later calls; for a moment, it also delays Shutdown, and a call whose span it ends
// (see awaitDelivery). A call that panics ends nothing; only the first panic is reported.
type asyncQueue[T any] struct {
	deliver func(T)

	// deliverAll, if not nil, is called instead of deliver, with all items that have come within
	// gathering.
	deliverAll func([]T)

	// limit bounds the number of items, not counting those that are being delivered. Further ones are
	// dropped and counted. 0: no limit.
	limit     int
	what      string // what is called, for the report of a panic
	hideNames bool   // whether that report leaves out the value, which may name a lock

	dropped  atomic.Int64
	reported atomic.Bool

	mu    sync.Mutex // guards what follows; nothing else is locked under it
	items []T
	done  chan struct{} // closed when the goroutine ends; nil if there is none
}

// add queues an item, and reports whether there was room.
func (q *asyncQueue[T]) add(item T) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.limit > 0 && len(q.items) >= q.limit {
		q.dropped.Add(1)
		return false
	}
	q.items = append(q.items, item)
	if q.done == nil {
		q.done = make(chan struct{})
		go q.run(q.done)
	}
	return true
}

// run is the queue's goroutine: owned by the client, ended by an empty queue, and waited for by
// Shutdown, but only until its context ends, because deliver may be what called Shutdown.
func (q *asyncQueue[T]) run(done chan struct{}) {
	unlabeled()
	var batch []T
	next, ended := 0, false
	defer func() {
		if ended {
			return
		}
		// A delivery ended this goroutine, as testing.T.FailNow does. Another one continues.
		q.mu.Lock()
		defer q.mu.Unlock()
		q.items = append(batch[next:], q.items...)
		go q.run(done)
	}()
	if q.deliverAll != nil {
		time.Sleep(gathering)
	}
	for {
		q.mu.Lock()
		if len(q.items) == 0 {
			q.done, ended = nil, true
			close(done)
			q.mu.Unlock()
			return
		}
		batch, q.items = q.items, batch[:0]
		q.mu.Unlock()
		next = len(batch)
		if q.deliverAll != nil {
			q.call(func() { q.deliverAll(batch) })
			clear(batch)
			continue
		}
		for next = 0; next < len(batch); {
			item := batch[next]
			next++
			q.call(func() { q.deliver(item) })
		}
		clear(batch)
	}
}

// call calls user code, and reports the first panic.
func (q *asyncQueue[T]) call(f func()) {
	defer func() {
		if p := recover(); p != nil && q.reported.CompareAndSwap(false, true) {
			reportPanic(q.what, p, q.hideNames)
		}
	}()
	f()
}

// wait waits until all items were delivered or ctx ends, and reports whether they were.
func (q *asyncQueue[T]) wait(ctx context.Context) bool {
	q.mu.Lock()
	done := q.done
	q.mu.Unlock()
	return done == nil || waitFor(ctx, done)
}

// reportPanic writes to the default log that user code panicked where the user could not recover
// it; hideNames leaves out the value. That log may be what panicked.
func reportPanic(what string, p any, hideNames bool) {
	defer func() { _ = recover() }()
	if hideNames {
		p = onlyType(p)
	}
	slog.Default().Error("leased: "+what+" panicked; locks go on", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
}

// onlyType says of what type a value is that may name a lock.
func onlyType(p any) string { return fmt.Sprintf("a value of type %T", p) }
