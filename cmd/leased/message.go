package main

import (
	"time"

	"github.com/leasedmutex/leased"
)

// The parent and its workers exchange lines of JSON: on its stdin a worker gets a setup and then
// orders, on its stdout it sends messages. The worker ends when its stdin does, even if that is
// because the parent died.

// setup is the first line that a worker gets. It is not passed on the command line, which every
// user of the machine can read, because a URL may contain a password.
type setup struct {
	At      address
	Prefix  string
	Process int
	Buyers  int
	TTL     time.Duration
	Locks   []string // addresses of the servers of a quorum, if the locks live on one
}

// order starts a sale.
type order struct {
	Lock bool
	// HoldAt makes the first buyer who reads this stock stay inside the lock until its process is
	// killed. If it is 0, no buyer stays.
	HoldAt int
	// PauseAt makes the buyers who read one of these stocks stay inside until they are told to go
	// on.
	PauseAt []int
}

// message is a line from a worker.
type message struct {
	Kind  kind
	Seen  int           // sold, inside: the stock that the buyer read
	Token uint64        // sold, inside: of the buyer's lease, 0 without a lock
	Wait  time.Duration // sold, refused: how long the buyer waited for the lock
	Stats leased.Stats  // done
	Error string        // failed
}

type kind string

const (
	ready   kind = "ready"   // connected, waiting for orders
	sold    kind = "sold"    // a buyer got a piece; sent before it unlocks
	refused kind = "refused" // a buyer was told "sold out"
	inside  kind = "inside"  // a buyer holds the lock and stays, until it is killed or told to go on
	done    kind = "done"    // this process's part of the sale is over
	failed  kind = "failed"  // an error ended the process's part of the sale
)
