package redistest

import (
	"sync"
	"testing"
	"time"
)

// Strain measures for how long the machine kept this process from running: because others
// had the processor, a quota was used up, a virtual machine stood still, or our own
// goroutines had to queue. Anything bounded in real time takes that much longer without
// being at fault, so a test's bound is a fixed duration plus [Strain.Since]:
//
//	began := time.Now()
//	...
//	if took := time.Since(began); took > bound+strain.Since(began) {
//
// Strain is an allowance, not an excuse: on a quiet machine it is close to zero. It does
// not see delays that hit only a server or a child process. So the fixed duration should be
// generous, too, but below what the bug in question would take.
type Strain struct {
	// mu guards the fields below and is held only for an instant.
	mu    sync.Mutex
	due   time.Time // when the next beat is due
	lates []late    // sorted by due
	quit  chan struct{}
	gone  chan struct{}
}

// late is a beat that came late: when it was due and how late it was.
type late struct {
	due time.Time
	by  time.Duration
}

const (
	beat = 5 * time.Millisecond
	// grain is how late a timer is on an idle machine, rounded up, because the kernel is asked
	// for whole milliseconds.
	grain = 2 * time.Millisecond
)

// NewStrain starts watching. Its goroutine ends in tb's cleanup.
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

// Since returns for how long the process has been kept from running since began, including
// the delay of a beat that is late right now.
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
