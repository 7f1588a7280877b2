package main

import (
	"time"

	"github.com/leasedmutex/leased"
)

// The parent and its workers talk in lines of JSON: a setup and then orders on
// the worker's stdin, messages on its stdout. The end of stdin ends the worker,
// also when the parent died.

// setup is the first line to a worker. It does not go through the command line,
// which everybody on the machine can read, because a URL may have a password.
type setup struct {
	URL     string
	Prefix  string
	Process int
	Buyers  int
	TTL     time.Duration
}

// order starts a sale.
type order struct {
	Lock bool
	// HoldAt makes the first buyer who reads this stock stay inside the lock
	// until its process is killed. 0 means nobody.
	HoldAt int
}

// message is what a worker says.
type message struct {
	Kind  kind
	Seen  int           // sold, inside: the stock that the buyer read
	Token uint64        // sold, inside: of the buyer's lease, 0 without a lock
	Wait  time.Duration // sold, refused: for the lock
	Stats leased.Stats  // done
	Error string        // failed
}

type kind string

const (
	ready   kind = "ready"   // connected, waiting for orders
	sold    kind = "sold"    // a buyer got a piece; said before it leaves the lock
	refused kind = "refused" // a buyer was told "sold out"
	inside  kind = "inside"  // a buyer holds the lock and stays, to be killed
	done    kind = "done"    // the sale is over here
	failed  kind = "failed"  // and not as it should
)
