package simulation

import (
	"time"
	"unsafe"
)

// The world's time is nobody's clock: each process and the server have clocks of their
// own, which run at different rates, jump, and stand still.

var simEpoch = time.UnixMilli(1_700_000_000_000)

// simTime returns what time.Now would return after the given times since the world's
// beginning have passed on the wall clock and on the monotonic clock. The two move apart
// on a machine that sleeps.
func simTime(wall, mono time.Duration) time.Time {
	const unixTo1885 = (1969*365+1969/4-1969/100+1969/400)*86400 - (1884*365+1884/4-1884/100+1884/400)*86400
	at := simEpoch.Add(wall)
	var t time.Time
	inner := (*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&t))
	inner.wall = 1<<63 | uint64(at.Unix()+unixTo1885)<<30 | uint64(at.Nanosecond())
	inner.ext = int64(time.Hour + mono)
	return t
}

// faster returns how much time has passed after d on a clock that is fast by ppm.
func faster(d time.Duration, ppm int64) time.Duration {
	return d + time.Duration(int64(d)/1_000_000*ppm+int64(d)%1_000_000*ppm/1_000_000)
}

// serverNow is the server's clock.
func (w *world) serverNow() time.Time {
	return simEpoch.Add(faster(w.now.Sub(simEpoch), w.rate)).Add(w.offset)
}

// now is the client's clock.
func (c *simClient) now() time.Time {
	wall := faster(c.w.now.Sub(simEpoch), c.rate)
	return simTime(wall, wall-c.slept)
}

// world returns the world's time at which the client's monotonic clock shows t.
func (c *simClient) world(t time.Time) time.Time {
	d := t.Sub(simTime(0, 0)) + c.slept
	at := simEpoch.Add(faster(d, -c.rate))
	for wall := faster(at.Sub(simEpoch), c.rate); wall < d; wall = faster(at.Sub(simEpoch), c.rate) {
		at = at.Add(d - wall)
	}
	return at
}

// sleep suspends the client's machine; wake resumes it.
func (c *simClient) sleep() {
	c.paused, c.asleep, c.woke = true, true, c.w.now
}

func (c *simClient) wake() {
	w := c.w
	if c.asleep {
		c.slept += faster(w.now.Sub(simEpoch), c.rate) - faster(c.woke.Sub(simEpoch), c.rate)
	}
	c.paused, c.asleep, c.woke = false, false, w.now
}

// drowsy reports whether the client has slept and cannot have noticed it yet: it looks at a
// grant once in a third of the grant's TTL.
func (c *simClient) drowsy() bool {
	g := c.status()
	return c.asleep || c.slept > 0 && c.w.now.Sub(c.woke) < g.Req.TTL/3+g.Req.TTL/300+10*time.Millisecond
}
