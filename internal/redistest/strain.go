package redistest

import (
	"sync"
	"testing"
	"time"
)

// Strain knows how much time the machine kept from this process: while others had
// the processor, a quota was used up, a virtual machine stood still, or our own
// goroutines had to queue. What is bounded in real time takes that much longer
// without anybody's fault, so a bound is a figure plus [Strain.Since]:
//
//	began := time.Now()
//	...
//	if took := time.Since(began); took > bound+strain.Since(began) {
//
// It is an allowance, no excuse: on a quiet machine it is next to nothing. It knows
// nothing of what was kept from a server or a child alone; hence the figure should
// be generous too, and below what the mistake looked for would take.
type Strain struct {
	// mu guards what follows and is held for an instant.
	mu    sync.Mutex
	due   time.Time // of the next beat
	lates []late    // by due, and so by time
	quit  chan struct{}
	gone  chan struct{}
}

// late is a beat that came late, and by how much.
type late struct {
	due time.Time
	by  time.Duration
}

const (
	beat = 5 * time.Millisecond
	// grain is the lateness of a timer on an idle machine, rounded up: the kernel
	// is asked for whole milliseconds.
	grain = 2 * time.Millisecond
)

// NewStrain begins to watch. Its goroutine ends in tb's cleanup.
func NewStrain(tb testing.TB) *Strain {
	s := &Strain{quit: make(chan struct{}), gone: make(chan struct{})}
	s.due = time.Now().Add(beat)
	// Owned by s, ended and waited for by the cleanup.
	go s.watch()
	tb.Cleanup(func() {
		close(s.quit)
		<-s.gone
	})
	return s
}

func (s *Strain) watch() {
	defer close(s.gone)
	timer := time.NewTimer(beat)
	defer timer.Stop()
	for {
		select {
		case <-s.quit:
			return
		case <-timer.C:
		}
		now := time.Now()
		s.mu.Lock()
		if by := now.Sub(s.due); by > grain {
			s.lates = append(s.lates, late{s.due, by})
		}
		s.due = now.Add(beat)
		s.mu.Unlock()
		timer.Reset(beat)
	}
}

// Since returns how much time was kept from the process since began, the beat that
// is late at this moment included.
func (s *Strain) Since(began time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var sum time.Duration
	for i := len(s.lates) - 1; i >= 0; i-- {
		l := s.lates[i]
		ended := l.due.Add(l.by)
		if !ended.After(began) {
			break
		}
		sum += min(l.by, ended.Sub(began))
	}
	if by := now.Sub(s.due); by > grain {
		sum += min(by, now.Sub(began))
	}
	return sum
}
