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

// mayAnswer reports whether the server has commands that it has not answered, and is not away.
func (m *member) mayAnswer() bool {
	if m.isAway() {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.out > 0
}

// patience returns for how long the server may leave commands unanswered before it counts as away.
func (m *member) patience() time.Duration {
	far := m.roundTrip.WithConnection()
	if far == 0 {
		return maxPatience
	}
	return max(minPatience, min(far, maxPatience))
}

// patience returns for how long a decision waits. It may need two commands one after the other, because a
// lease's token may have to be stored, so it is twice as long as the most distant server may take, of those
// that are far away and owe an answer.
func (s *Server) patience() time.Duration {
	longest := minPatience
	for _, m := range s.members {
		if one := m.patience(); one > minPatience && m.mayAnswer() {
			longest = max(longest, 2*one)
		}
	}
	return longest
}
