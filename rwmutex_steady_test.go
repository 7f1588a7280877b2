package leased_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// stay is the time that one reader was inside.
type stay struct {
	process     int
	from, until time.Time
}

// readership is the readers of four processes that keep a lock from ever being free.
type readership struct {
	mu    sync.Mutex // guards stays
	stays []stay
	all   sync.WaitGroup
	end   context.CancelFunc
}

// read starts a readership. The readers of one process relieve each other, so that some
// of them are inside at any time.
func read(t *testing.T, processes []*leased.Client, length func(process int) time.Duration) *readership {
	t.Helper()
	const readers = 4
	ctx, end := context.WithCancel(context.Background())
	s := &readership{end: end}
	for process, c := range processes {
		for turn := range readers {
			s.all.Go(func() { // ended and waited for by stop
				d := length(process)
				time.Sleep(d * time.Duration(turn) / readers) // of virtual time: they relieve each other
				for ctx.Err() == nil {
					l, err := c.RWMutex("x").RLockContext(ctx)
					if err != nil {
						return // stopped
					}
					from := time.Now()
					time.Sleep(d) // of virtual time: it reads
					s.mu.Lock()
					s.stays = append(s.stays, stay{process, from, time.Now()})
					s.mu.Unlock()
					unlock(t, l)
				}
			})
		}
	}
	return s
}

func (s *readership) stop() {
	s.end()
	s.all.Wait()
}

// A writer waits for the readers inside, and later readers of any process wait for it: it
// is not starved, and waits for the longest stay at most.
func TestAWriterAmongSteadyReadersOfFourProcessesWaitsForOneStay(t *testing.T) {
	const four, writes = 4, 20
	for _, c := range []struct{ own, others time.Duration }{
		{0, 10 * time.Millisecond}, // a fifth process writes
		{10 * time.Millisecond, 10 * time.Millisecond},
		{100 * time.Millisecond, 10 * time.Millisecond},
		{10 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("own=%v/others=%v", c.own, c.others), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var clients []*leased.Client
				for range four + 1 {
					clients = append(clients, newClient(t, s))
				}
				warm(t, s, clients...)
				own := four
				if c.own > 0 {
					own = 0
				}
				readers := read(t, clients[:four], func(process int) time.Duration {
					if process == own {
						return c.own
					}
					return c.others
				})
				var longest time.Duration
				for turn := range writes {
					time.Sleep(3*max(c.own, c.others) + time.Duration(turn)*time.Millisecond) // at any phase
					called := time.Now()
					l := take(t, clients[own].RWMutex("x").LockContext)
					in := time.Now()
					unlock(t, l)
					longest = max(longest, in.Sub(called))
					readers.later(t, called, in)
				}
				readers.stop()
				// A token can be a few microseconds ahead of the server's clock, which are waited out.
				if longest > max(c.own, c.others)+20*time.Microsecond || longest < max(c.own, c.others)/2 { // at less, the lock was free now and then
					t.Errorf("waited up to %v", longest)
				}
			})
		})
	}
}

// later fails the test if a reader entered after the writer had called.
func (s *readership) later(t *testing.T, called, in time.Time) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.stays {
		if st.from.After(called) && st.from.Before(in) {
			t.Errorf("a reader of process %d entered %v after the writer's call", st.process, st.from.Sub(called))
		}
	}
}

// Readers ignore "wanted" while a writer of their own process has a place behind them.
// When that writer gives up, they learn of the other waiters.
func TestReadersWhoseWriterGaveUpHearThatAnotherProcessWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		warm(t, s, a, b)
		first := take(t, a.RWMutex("x").RLockContext)
		giveUp := mayGiveUp(t, a.RWMutex("x").LockContext)
		synctest.Wait()
		writer := taking(t, b.RWMutex("x").LockContext)
		synctest.Wait()
		giveUp()
		synctest.Wait()
		if l, err := a.RWMutex("x").TryRLockContext(context.Background()); err == nil {
			t.Error("a reader entered before the writer who waits")
			unlock(t, l)
		}
		unlock(t, first)
		unlock(t, <-writer)
	})
}

// The yield that is to give the lost lock back brings in the writer's place, too.
func TestAReaderWithAWriterOfItsProcessBehindItIsToldAtUnlockThatItsLockWasLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		warm(t, s, c)
		l := take(t, c.RWMutex("x").RLockContext)
		writer := taking(t, c.RWMutex("x").LockContext)
		synctest.Wait()
		_, readers, _, _ := s.helperKeys("x")
		s.rdb.Del(context.Background(), "x", readers)
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		began := time.Now()
		unlock(t, <-writer)
		if waited := time.Since(began); waited > time.Millisecond {
			t.Errorf("the writer waited %v for a free lock", waited)
		}
	})
}
