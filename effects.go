package leased

import "time"

// effects are what is to be done once the lock's owner has let go of it.
type effects struct {
	send   command
	woken  *caller // first of those admitted or refused, linked by then
	tail   *caller
	ended  []loss
	gone   []*caller       // whose release was settled
	ghosts []ghost         // requests to be cancelled
	done   []chan struct{} // downgrades that are settled
	renew  bool            // the grant, in the next batch
	touch  time.Duration
}

func (fx *effects) wake(c *caller) {
	if fx.woken == nil {
		fx.woken = c
	} else {
		fx.tail.then = c
	}
	fx.tail = c
}

// loss is a lease that ended before its Unlock.
type loss struct {
	caller *caller
	why    string // "": the client was closed
}

// ghost is a request that may still wait or own in Redis although nobody wants
// it. It is cancelled again and again until an answer comes, and once answered
// until no earlier command about it can still arrive.
type ghost struct {
	keys   *keys
	entry  *entry // of gone
	id     string
	last   uint64    // last token given out under it
	proof  uint64    // as long as it is the lock's last token, nobody else was let in since; 0 if none is known
	link   *spanRef  // hold span of the lease that let go
	until  time.Time // zero: one answer is enough
	gone   []*caller // to be told when it is cancelled
	then   *ghost    // to be cancelled when this one is
	giveUp time.Time // without an answer; zero: after its TTL, or a minute if that is longer

	// the schedule's:
	nextAt   time.Time
	sentAt   time.Time
	pause    time.Duration // since the last try, which had no answer
	rare     bool          // is counted in rare
	repeated bool          // although it was answered
	proved   bool          // that the lock was ours when it was let go
}
