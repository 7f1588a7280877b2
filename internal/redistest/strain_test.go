package redistest

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestStrainIsNothingOnAMachineWithoutLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // in a bubble timers are exact
		s, began := NewStrain(t), time.Now()
		time.Sleep(time.Minute)
		if got := s.Since(began); got != 0 {
			t.Errorf("the strain of an idle minute is %v, want 0", got)
		}
	})
}

func TestStrainIsTheLatenessOfTimersSinceAnInstant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		s := &Strain{
			due: now.Add(-60 * time.Millisecond), // the beat that has not come yet
			lates: []late{
				{now.Add(-1000 * time.Millisecond), 300 * time.Millisecond},
				{now.Add(-500 * time.Millisecond), 200 * time.Millisecond},
			},
		}
		for _, c := range []struct{ ago, want time.Duration }{
			{2000, 560},
			{1000, 560},
			{900, 460},
			{600, 260},
			{400, 160},
			{100, 60},
			{20, 20},
		} {
			if got := s.Since(now.Add(-c.ago * time.Millisecond)); got != c.want*time.Millisecond {
				t.Errorf("in the last %d ms: %v, want %d ms", c.ago, got, c.want)
			}
		}
	})
}
