package quorum

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A server that does not answer must not hold up a decision for long, and one that is far away must have the
// time to answer. A command that finds a connection in the pool takes one round trip, and one that has to
// make a connection takes several. Each server has the time for those, and minPatience at least. How long a
// round trip takes is known from the first answer on. Until then the server may be at any distance, and has
// maxPatience.
const (
	minPatience = 500 * time.Millisecond
	// maxPatience is shorter than the time limit of a command, so that a decision does not end in the same
	// moment as the commands that it waits for.
	maxPatience = protocol.CommandTimeout - 200*time.Millisecond
	// minLimit is how long a decision may wait, however short the TTL is.
	minLimit = 20 * time.Millisecond
	// lookAgain is how soon a decision that waits for longer than minPatience notices that a server is away.
	lookAgain = 100 * time.Millisecond
)

// limitFor returns for how long at most a decision about a lock with this TTL waits for answers, because
// that time is lost to the lease.
func limitFor(ttl time.Duration) time.Duration { return max(minLimit, ttl/10) }

// patience returns for how long the server may leave commands unanswered before it counts as away.
func (m *member) patience() time.Duration {
	far := m.roundTrip.WithConnection()
	if far == 0 {
		return maxPatience
	}
	return max(minPatience, min(far, maxPatience))
}

// patience returns for how long a decision waits: for minPatience or, if that is longer, for as long as a
// server may take that is not away. awaited is how many commands each may still have to answer, one after
// the other.
func (s *Server) patience(awaited []int) time.Duration {
	longest := minPatience
	for i, m := range s.members {
		if one := m.patience(); one > minPatience && !m.isAway() {
			longest = max(longest, time.Duration(awaited[i])*one)
		}
	}
	return longest
}

// awaited returns how many commands each server may still have to answer until the ops are decided: one of
// them, and another if the token of a lease may have to be stored.
func (s *Server) awaited(ops []*Op) []int {
	commands := make([]int, len(s.members))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, op := range ops {
		if op.Decided() {
			continue
		}
		for i := range commands {
			switch {
			case !op.awaits(i):
			case op.kind == Do:
				commands[i] = 2
			default:
				commands[i] = max(commands[i], 1)
			}
		}
	}
	return commands
}
