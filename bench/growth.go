package main

import "time"

// growth is a measurement of how a cost grows with the number of clients, locks or processes.
type growth struct {
	name       string
	title      string // of the panel
	across, up string // labels of the panel's axes
	figure     string // what the panel shows; times scale it is in the unit of up
	scale      float64
	contenders map[string]int // the greatest number each is measured with; 0 is no limit
	sizes      func(effort) []int
	measure    func(*stage, int) (figures, error)
}

// A contender is left out beyond what it is made for: pollers load the server in proportion to
// their number, and a lock that wakes all waiters at once does so in proportion to its square.
var growths = []growth{
	{
		name: "waiters", title: "Many clients want one lock",
		across: "clients, in up to 10 processes", up: "µs, lease to lease", figure: "each", scale: 1e6,
		contenders: map[string]int{ours: 0, "rueidislock": 1000, "redislock": 100, "PUBLISH": 1000},
		sizes:      func(e effort) []int { return e.waiting },
		measure:    (*stage).crowdOf,
	},
	{
		name: "locks", title: "One process holds many locks",
		across: "locks held", up: "server, ms a second", figure: "holding-server", scale: 1e3,
		contenders: map[string]int{ours: 0, "rueidislock": 0},
		sizes:      func(e effort) []int { return e.holding },
		measure: func(s *stage, n int) (figures, error) {
			s.renew, s.ttl = true, s.held
			return s.hold(n, s.kept) // for one TTL, in which each contender renews a lock a whole number of times
		},
	},
	{
		name: "processes", title: "Many processes take turns",
		across: "processes, one goroutine each", up: "µs, lease to lease", figure: "each", scale: 1e6,
		contenders: map[string]int{ours: 0, "rueidislock": 0, "redislock": 0, "PUBLISH": 0},
		sizes:      func(e effort) []int { return e.processes },
		measure: func(s *stage, n int) (figures, error) {
			s.contend = s.growing
			return s.contended(n, 1)
		},
	},
}

// crowdOf has n clients wait behind an owner for a while, and then take turns.
func (s *stage) crowdOf(n int) (figures, error) {
	s.renew = true
	processes := min(n, 10)
	n -= n % processes
	if s.floor { // in a ring there is no owner to wait behind
		ws, err := s.start(processes, n/processes, 0, n)
		if err != nil {
			return nil, err
		}
		return s.race(ws, order{Do: "contend", Name: "invoice", Goroutines: 1, For: s.growing}, nil)
	}
	owner, err := s.start(1, 1, n, n+1)
	if err != nil {
		return nil, err
	}
	others, err := s.start(processes, n/processes, 0, n+1)
	if err != nil {
		return nil, err
	}
	// Each client has to ask for the lock before it waits.
	settle := s.settle + time.Duration(n)*3*time.Millisecond
	// The further behind a waiter of Leased is, the less often it checks whether it still has its place:
	// see design.md. So what waiting costs shows only if it is watched for as long as the longest of these
	// pauses.
	s.watch = min(s.watch+time.Duration(n)*10*time.Millisecond, 21*time.Second)
	return s.crowd(owner[0], others, n, 1, settle, s.growing)
}
