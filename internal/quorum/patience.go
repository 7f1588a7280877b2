package quorum

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A server that does not answer must not hold up a decision for long, and one that is far away must have the
// time to answer. A command that finds a connection in the pool takes one round trip. One that has to make
// a connection takes several: for TCP, for TLS, for what go-redis sends first (HELLO, and up to two
// batches of CLIENT commands), for itself, and once more if the server does not have the script yet. So each server
// has patience for as many round trips as that takes, and for minPatience at least. How long one takes is
// known from the first answer on. Until then the server may be at any distance, and has maxPatience.
const (
	tripsToAnswer = 8
	minPatience   = 500 * time.Millisecond
	// maxPatience is shorter than the time limit of a command, so that a decision does not end in the same
	// moment as the commands that it waits for.
	maxPatience = protocol.CommandTimeout - 200*time.Millisecond
	// minLimit is how long a decision may wait, however short the TTL is.
	minLimit = 20 * time.Millisecond
)

// limitFor returns for how long at most a decision about a lock with this TTL waits for answers, because
// that time is lost to the lease.
func limitFor(ttl time.Duration) time.Duration { return max(minLimit, ttl/10) }

// patience returns for how long the server may leave commands unanswered before it counts as away.
func (m *member) patience() time.Duration {
	trip := m.roundTrip.Estimate()
	if trip == 0 {
		return maxPatience
	}
	return max(minPatience, min(tripsToAnswer*trip, maxPatience))
}

// patience returns for how long a decision waits: as long as the most distant server may take, of those that
// are not away.
func (s *Server) patience() time.Duration {
	longest := minPatience
	for _, m := range s.members {
		if !m.isAway() {
			longest = max(longest, m.patience())
		}
	}
	return longest
}
