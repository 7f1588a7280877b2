package leased

import (
	"context"
	"sync"
)

// crew is a set of goroutines with one owner, who waits for all of them.
type crew struct {
	mu   sync.Mutex
	n    int
	done chan struct{} // made by close; closed when n is 0
}

// start runs f in a goroutine of the crew, or returns false after close.
func (c *crew) start(f func()) bool {
	if !c.enter() {
		return false
	}
	go func() {
		defer c.leave()
		f()
	}()
	return true
}

// enter counts the caller's goroutine in until it calls leave, or returns false
// after close.
func (c *crew) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done != nil {
		return false
	}
	c.n++
	return true
}

func (c *crew) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n--
	if c.n == 0 && c.done != nil {
		close(c.done)
	}
}

// close admits no more.
func (c *crew) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.n == 0 {
			close(c.done)
		}
	}
}

// wait returns after close when all have left, or when ctx ends, and reports which.
func (c *crew) wait(ctx context.Context) (left bool) {
	c.mu.Lock()
	done := c.done
	c.mu.Unlock()
	return endsBefore(ctx, done)
}
