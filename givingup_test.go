package leased

import (
	"testing"
	"time"
)

// Thousands may give up together, and each holds the lock's mutex meanwhile.
func TestGivingUpCostsTheSameHoweverManyWait(t *testing.T) {
	cost := func(crowd int) time.Duration {
		h := drive(t)
		opts := &lockOptions{ttl: defaultTTL, handoffs: defaultHandoffs, tenure: defaultTenure}
		all := make([]caller, crowd)
		for i := range all {
			all[i] = caller{mode: exclusive, opts: opts}
			var fx effects
			h.l.enter(&all[i], noon, &fx)
			if fx.send.verb == acquire {
				h.l.answered(&fx.send, answer{outcome: enqueued, left: time.Hour}, nil, 0, noon, &effects{})
			}
		}
		const some = 64
		began := time.Now()
		for i := crowd - some; i < crowd; i++ {
			var fx effects
			if !h.l.abandon(&all[i], noon, &fx) {
				t.Fatal("it does not wait")
			}
		}
		return time.Since(began)
	}
	few, many := time.Hour, time.Hour
	for range 20 { // the least of many runs is the machine's best
		few, many = min(few, cost(100)), min(many, cost(100_000))
	}
	if many > 20*few {
		t.Errorf("%v among 100, %v among 100,000", few, many)
	}
}
