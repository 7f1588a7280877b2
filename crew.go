package leased

import "sync"

// crew is a set of goroutines with one owner, who waits for all of them.
type crew struct {
	mu   sync.Mutex
	n    int
	done chan struct{} // made by wait; closed when n is 0
}

// start runs f in a goroutine of the crew, or returns false after wait was called.
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
// after wait was called.
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

func (c *crew) wait() {
	c.mu.Lock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.n == 0 {
			close(c.done)
		}
	}
	done := c.done
	c.mu.Unlock()
	<-done
}
