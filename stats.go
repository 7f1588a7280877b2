package leased

import (
	"sync/atomic"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Stats counts what a client has done since it was made. Counters only grow.
type Stats struct {
	// Leases counts the callers that were admitted, including the few whose context ended at that
	// very moment and that therefore got an error.
	Leases int64

	Local  int64 // of Leases: handed over by, or shared with, another caller of this process
	Idle   int64 // of Leases: the process had kept the lock idle
	Direct int64 // of Leases: handed over by another process's release, through a message; not with WithReplicas

	// Handed counts the processes that a command of this client made owners. Most often that is a
	// release, but an acquire that finds a dead owner lets in whoever is next. Cancels are not
	// counted.
	Handed int64

	Renewals int64 // confirmed renewals
	Lost     int64 // of Leases: that ended before their Unlock
	Commands int64 // commands that the client tried to send to Redis, with or without a connection

	// Behind[n], for a client of [NewQuorum], is the number of leases that n servers stood behind
	// just before Unlock: servers that had granted or renewed the lease, and whose answers had
	// arrived. A lease that is unlocked at once may be ahead of some servers' answers.
	Behind [8]int64
}

// Stats returns the client's counters. It reads them one after another, so they need not be
// consistent with each other.
func (c *Client) Stats() Stats {
	if c.unmade() {
		return Stats{}
	}
	s := Stats{
		Local:    c.stats.by[lockstate.ViaLocal].Load(),
		Idle:     c.stats.by[lockstate.ViaIdle].Load(),
		Direct:   c.stats.by[lockstate.ViaDirect].Load(),
		Handed:   c.stats.given.Load(),
		Renewals: c.stats.renewals[renewalRenewed].Load(),
		Lost:     c.stats.lost.Load(),
		Commands: c.server.Commands(),
	}
	for i := range c.stats.by {
		s.Leases += c.stats.by[i].Load()
	}
	for i := range c.stats.behind {
		s.Behind[i] = c.stats.behind[i].Load()
	}
	return s
}

// counters is what Stats and the metrics read.
type counters struct {
	by          [lockstate.Vias]atomic.Int64
	renewals    [renewalResults]atomic.Int64
	behind      [8]atomic.Int64 // leases, by the number of a quorum's servers that stood behind them
	given, lost atomic.Int64
}

func (s *counters) countAdmission(v lockstate.Via) { s.by[v].Add(1) }

func (s *counters) countHandoffs(n int) {
	if n > 0 {
		s.given.Add(int64(n))
	}
}

func (s *counters) countRenewal(o protocol.Outcome) {
	switch o {
	case protocol.Granted:
		s.renewals[renewalRenewed].Add(1)
	case protocol.NotOurs:
		s.renewals[renewalLost].Add(1)
	default:
		s.renewals[renewalFailed].Add(1)
	}
}
