package protocol

import (
	"sync/atomic"
	"time"
)

// RoundTrip estimates how long a server takes to answer. It may be used by several goroutines at once.
type RoundTrip struct{ ns atomic.Int64 } // 0 before the first answer

// Estimate returns the estimate, 0 before the first answer.
func (r *RoundTrip) Estimate() time.Duration { return time.Duration(r.ns.Load()) }

// tripsToConnect is how many round trips a command may take that has to make a connection: one for TCP, up to
// two for TLS, three for what go-redis sends first (HELLO, and two batches of CLIENT commands), one for
// itself, and one more if the server does not have the script yet.
const tripsToConnect = 8

// WithConnection returns how long an answer may take if a connection has to be made first, 0 before the
// first answer.
func (r *RoundTrip) WithConnection() time.Duration { return tripsToConnect * r.Estimate() }

// Took notes how long an answer took. None is faster than the distance allows, but much can slow one down.
// So a shorter time counts fully, and a longer one only a little, in case the distance has changed.
func (r *RoundTrip) Took(d time.Duration) {
	before := r.ns.Load()
	if late := int64(d) - before; before != 0 && late > 0 {
		d = time.Duration(before + late/32)
	}
	r.ns.Store(max(1, int64(d))) // if two answers come at once, one measurement is lost, which is harmless
}
