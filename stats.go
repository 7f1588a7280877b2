package leased

import "sync/atomic"

// Stats counts what a client has done since it was made.
type Stats struct {
	Leases   int64 // callers that were let in
	Local    int64 // of them, by another caller of this process; Redis is asked only once a second whether others wait
	Idle     int64 // of them, because the process had kept the lock
	Direct   int64 // of them, by another process' release, through a message
	Handed   int64 // processes that this client made owner, by a release as a rule
	Renewals int64 // confirmed
	Lost     int64 // leases that ended before their Unlock
	Commands int64 // sent to Redis
}

// Stats returns the client's counters. They are read one by one, so they may be
// a little apart.
func (c *Client) Stats() Stats {
	s := Stats{
		Local:    c.stats.by[viaLocal].Load(),
		Idle:     c.stats.by[viaIdle].Load(),
		Direct:   c.stats.by[viaDirect].Load(),
		Handed:   c.stats.given.Load(),
		Renewals: c.stats.renewals[renewalRenewed].Load(),
		Lost:     c.stats.lost.Load(),
	}
	for i := range c.stats.by {
		s.Leases += c.stats.by[i].Load()
	}
	if r, ok := c.server.(*redisServer); ok {
		s.Commands = r.sent.Load()
	}
	return s
}

type counters struct {
	by          [vias]atomic.Int64
	renewals    [renewalResults]atomic.Int64
	given, lost atomic.Int64
}

func (s *counters) admitted(v via) { s.by[v].Add(1) }
func (s *counters) handed(n int) {
	if n > 0 {
		s.given.Add(int64(n))
	}
}

func (s *counters) renewed(o outcome) {
	switch o {
	case granted:
		s.renewals[renewalRenewed].Add(1)
	case notOurs:
		s.renewals[renewalLost].Add(1)
	default:
		s.renewals[renewalFailed].Add(1)
	}
}
