package leased

// Closed reports whether Close or Shutdown of c was called.
func Closed(c *Client) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closedLocked()
}
