package protocol

import (
	"testing"
	"time"
)

func TestARoundTripIsTheShortestLatelyAndGrowsSlowly(t *testing.T) {
	var r RoundTrip
	if r.Estimate() != 0 {
		t.Errorf("before the first answer: %v", r.Estimate())
	}
	for _, c := range []struct{ took, want time.Duration }{
		{0, 1}, // the first answer came without delay, as it can in virtual time: it counts as one
		{320, 10},
		{10, 10},
		{330, 20}, // slower by 320
		{5, 5},
		{4, 4},
		{5, 4}, // too little slower to show
	} {
		if r.Took(c.took); r.Estimate() != c.want {
			t.Errorf("after an answer in %d, the estimate is %d, want %d", c.took, r.Estimate(), c.want)
		}
	}
}
