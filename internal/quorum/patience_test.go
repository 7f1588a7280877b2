package quorum

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestADecisionWaitsForTheMostDistantServerThatOwesAnAnswer(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		trips   []time.Duration // 0: of a server that never answered
		awaited []int
		passes  time.Duration // since a command was sent to each
		want    time.Duration
	}{
		{[]time.Duration{ms, 2 * ms, 60 * ms}, []int{2, 2, 2}, 0, minPatience},
		{[]time.Duration{ms, 2 * ms, 100 * ms}, []int{2, 2, 2}, 0, 1600 * ms},
		{[]time.Duration{ms, 2 * ms, 100 * ms}, []int{1, 1, 1}, 0, 800 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []int{2, 2, 0}, 0, 1600 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []int{2, 2, 2}, 801 * ms, 3200 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []int{2, 2, 2}, 1601 * ms, minPatience}, // they are away
		{[]time.Duration{ms, 2 * ms, time.Minute}, []int{2, 2, 2}, 0, 2 * maxPatience},
		{[]time.Duration{ms, 2 * ms, 0}, []int{2, 2, 2}, 0, 2 * maxPatience},
		{[]time.Duration{ms, 2 * ms, 0}, []int{2, 2, 2}, maxPatience + 1, minPatience},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &Server{base: t.Context(), start: func(func()) bool { return true }}
			for _, trip := range c.trips {
				m := &member{quorum: s}
				if trip > 0 {
					m.roundTrip.Took(trip)
				}
				m.sending()
				s.members = append(s.members, m)
			}
			time.Sleep(c.passes)
			if got := s.patience(c.awaited); got != c.want {
				t.Errorf("%v after %v: it waits for %v, want %v", c.trips, c.passes, got, c.want)
			}
		})
	}
}
