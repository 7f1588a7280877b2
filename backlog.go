package leased

import (
	"context"
	"sync"
)

// backlog hands items to deliver in order, in a goroutine of its own that lives
// while there are any: a call of the user's code that blocks holds up the later
// ones and nothing else.
type backlog[T any] struct {
	deliver func(T)
	most    int // further items are dropped; 0: none is

	mu    sync.Mutex // guards what follows
	queue []T
	done  chan struct{} // closed when the running goroutine ends; nil if none runs
}

// add reports whether there was room.
func (b *backlog[T]) add(item T) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.most > 0 && len(b.queue) >= b.most {
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
	defer close(done)
	var batch []T
	for {
		b.mu.Lock()
		if len(b.queue) == 0 {
			b.done = nil
			b.mu.Unlock()
			return
		}
		batch, b.queue = b.queue, batch[:0]
		b.mu.Unlock()
		for _, item := range batch {
			b.deliver(item)
		}
		clear(batch)
	}
}

// wait returns when all items were delivered, or ctx ends.
func (b *backlog[T]) wait(ctx context.Context) {
	b.mu.Lock()
	done := b.done
	b.mu.Unlock()
	if done == nil {
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}
