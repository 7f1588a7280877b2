package leased

import "context"

// Closed reports whether Close or Shutdown of c was called.
func Closed(c *Client) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closes()
}

// Drain returns when nothing that c has sent to the servers of a quorum is under way, where they
// answer, or when ctx ends.
func Drain(ctx context.Context, c *Client) { c.drainQuorum(ctx) }

// Subscribed reports whether messages of all servers reach c.
func Subscribed(c *Client) bool {
	for _, in := range c.inbox {
		if !in.confirmed() {
			return false
		}
	}
	return true
}
