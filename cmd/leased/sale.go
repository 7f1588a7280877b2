package main

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/leasedmutex/leased"
)

// sale is the outcome of selling one stock.
type sale struct {
	stock  int // at the beginning
	left   int // at the end, according to Redis
	buyers int // in all processes
	parts  []part
	killed *killRecord

	// For a sale on a quorum: whether servers have died, and have come back.
	without, returned bool
}

// part is one process's share of a sale.
type part struct {
	process int
	sold    []message
	refused int
	waits   []time.Duration // for the lock, by the buyers who were sold to or refused
	stats   leased.Stats    // zero for a process that was killed
}

// killRecord describes how a process was killed inside the lock.
type killRecord struct {
	process int
	pid     int
	token   uint64        // of its lease
	at      time.Time     // when it was killed
	left    time.Duration // remaining TTL of the lease in Redis, just after the kill
	next    time.Duration // from the kill to the next sale, 0 if there was none yet
}

func newSale(stock, processes, buyers int) *sale {
	s := &sale{stock: stock, buyers: processes * buyers}
	for i := range processes {
		s.parts = append(s.parts, part{process: i + 1})
	}
	return s
}

// add counts a message from a process.
func (s *sale) add(process int, m message) {
	p := &s.parts[process-1]
	switch m.Kind {
	case sold:
		p.sold = append(p.sold, m)
		p.waits = append(p.waits, m.Wait)
		// Messages from several processes arrive in any order: only a greater token proves that
		// this sale came after the lease of the killed process.
		if k := s.killed; k != nil && k.next == 0 && m.Token > k.token {
			k.next = time.Since(k.at)
		}
	case refused:
		p.refused++
		p.waits = append(p.waits, m.Wait)
	case done:
		p.stats = m.Stats
	}
}

func (s *sale) soldCount() int {
	n := 0
	for _, p := range s.parts {
		n += len(p.sold)
	}
	return n
}

func (s *sale) refusedCount() int {
	n := 0
	for _, p := range s.parts {
		n += p.refused
	}
	return n
}

// died returns how many buyers died with their process.
func (s *sale) died() int { return s.buyers - s.soldCount() - s.refusedCount() }

func (s *sale) waits() []time.Duration {
	var all []time.Duration
	for _, p := range s.parts {
		all = append(all, p.waits...)
	}
	return all
}

// stats adds up the counters of the processes.
func (s *sale) stats() leased.Stats {
	var sum leased.Stats
	for _, p := range s.parts {
		sum.Leases += p.stats.Leases
		sum.Local += p.stats.Local
		sum.Idle += p.stats.Idle
		sum.Direct += p.stats.Direct
		sum.Commands += p.stats.Commands
		for n := range sum.Behind {
			sum.Behind[n] += p.stats.Behind[n]
		}
	}
	return sum
}

// verdict returns an error if the sale shows that the lock has failed.
func (s *sale) verdict() error {
	number, died := s.soldCount(), s.died()
	switch want := min(s.stock, s.buyers-died); {
	case died < 0:
		return fmt.Errorf("the count is wrong: %d sold and %d refused are more than the %d buyers there were", number, s.refusedCount(), s.buyers)
	case died > 0 && s.killed == nil:
		return fmt.Errorf("the count is wrong: %d of %d buyers got no answer", died, s.buyers)
	case number != want:
		return fmt.Errorf("the lock failed: %d were sold from a stock of %d, and it should have been %d", number, s.stock, want)
	case s.left != s.stock-number:
		return fmt.Errorf("the lock failed: %d of %d were sold, but Redis says %d are left", number, s.stock, s.left)
	}
	return s.orderVerdict()
}

// orderVerdict compares the order of the tokens with the order of the sales, which is known without
// a clock: each buyer read how many pieces were left.
func (s *sale) orderVerdict() error {
	var all []message
	for _, p := range s.parts {
		all = append(all, p.sold...)
	}
	slices.SortFunc(all, func(a, b message) int { return b.Seen - a.Seen })
	last := uint64(0)
	for i, m := range all {
		if m.Seen != s.stock-i {
			return fmt.Errorf("the lock failed: buyer number %d saw a stock of %d, and it should have been %d", i+1, m.Seen, s.stock-i)
		}
		if m.Token <= last {
			return fmt.Errorf("the fencing tokens failed: sale number %d has token %d after %d", i+1, m.Token, last)
		}
		last = m.Token
	}
	return nil
}

// quantile returns the smallest wait that a share q of all waits did not exceed.
func quantile(waits []time.Duration, q float64) time.Duration {
	if len(waits) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(waits))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
