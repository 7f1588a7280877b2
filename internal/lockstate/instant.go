package lockstate

import "time"

// Instant is a moment on the monotonic clock: nanoseconds since just before a start that is
// agreed on, which for a lock is Environment.Start. 0 is none. It has a third of the size of a
// time.Time, for a client may hold very many locks.
type Instant int64

// start is the instant of the start itself.
const start Instant = 1

// InstantOf returns t as an instant, counted from began.
func InstantOf(t, began time.Time) Instant { return start.add(t.Sub(began)) }

// Time returns what InstantOf made an instant of; the zero value for none.
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
