package quorum

import (
	"testing"
	"testing/synctest"
	"time"
)

// A decision may need two answers of one server, one after the other.
func TestADecisionWaitsForTheMostDistantServerThatOwesAnAnswer(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		trips  []time.Duration // 0: of a server that never answered
		owes   []bool
		passes time.Duration // since the commands were sent
		want   time.Duration
	}{
		{[]time.Duration{ms, 2 * ms, 60 * ms}, []bool{true, true, true}, 0, minPatience},
		{[]time.Duration{ms, 2 * ms, 100 * ms}, []bool{true, true, true}, 0, 1600 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []bool{true, true, false}, 0, 1600 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []bool{true, true, true}, 801 * ms, 3200 * ms},
		{[]time.Duration{ms, 100 * ms, 200 * ms}, []bool{true, true, true}, 1601 * ms, minPatience}, // they are away
		{[]time.Duration{ms, 2 * ms, time.Minute}, []bool{true, true, true}, 0, 2 * maxPatience},
		{[]time.Duration{ms, 2 * ms, 0}, []bool{true, true, true}, 0, 2 * maxPatience},
		{[]time.Duration{ms, 2 * ms, 0}, []bool{true, true, true}, maxPatience + 1, minPatience},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &Server{base: t.Context(), start: func(func()) bool { return true }}
			for i, trip := range c.trips {
				m := &member{owner: s}
				if trip > 0 {
					m.roundTrip.Took(trip)
				}
				if c.owes[i] {
					m.sending()
				}
				s.members = append(s.members, m)
			}
			time.Sleep(c.passes)
			if got := s.patience(); got != c.want {
				t.Errorf("%v after %v: it waits for %v, want %v", c.trips, c.passes, got, c.want)
			}
		})
	}
}
