package lockstate

import "time"

// Instant is a moment on the monotonic clock, in nanoseconds counted from just before an agreed
// start; for a lock that is Environment.Start. 0 means none. An Instant is a third the size of
// a time.Time, which matters because a client may hold very many locks.
type Instant int64

// start is the Instant of the agreed start itself.
const start Instant = 1

// InstantOf returns t as an Instant counted from began.
func InstantOf(t, began time.Time) Instant { return start.add(t.Sub(began)) }

// Time is the inverse of InstantOf. It returns the zero time for 0.
func (i Instant) Time(began time.Time) time.Time {
	if i == 0 {
		return time.Time{}
	}
	return began.Add(i.sub(start))
}

func (i Instant) add(d time.Duration) Instant { return i + Instant(d) }

// sub returns how much later than j the instant i is.
func (i Instant) sub(j Instant) time.Duration { return time.Duration(i - j) }

func (l *Lock) instant(t time.Time) Instant { return InstantOf(t, l.env.Start()) }

func (l *Lock) time(i Instant) time.Time { return i.Time(l.env.Start()) }
