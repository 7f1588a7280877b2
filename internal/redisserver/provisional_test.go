package redisserver

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Provisional grants (docs/design.md, section 4): where no count proves a waiter gone, one that
// is notified of its grant owns for protocol.ProvisionalTTL, until it says that it is there.

// ownsFor returns for how much longer id owns the lock, 0 if it does not.
func (s *scene) ownsFor(id string) time.Duration {
	s.t.Helper()
	st := s.look()
	ends := st.readers[id]
	if st.value == id {
		ends = st.ends[0]
	} else if st.value != protocol.MarkerValue {
		return 0
	}
	return time.Duration(max(0, st.left(ends))) * time.Millisecond
}

// handing are all ways in which a script makes a waiter owner and notifies it.
var handing = map[string]func(s *scene, owner string){
	"release":        func(s *scene, owner string) { s.is(s.release(owner, 0), protocol.Done) },
	"a later token":  func(s *scene, owner string) { s.is(s.release(owner, uint64(s.now())*1000+5_000_000), protocol.Done) },
	"yield":          func(s *scene, owner string) { s.is(s.yield(owner, s.writer("A"), 0), protocol.Enqueued) },
	"cancel":         func(s *scene, owner string) { s.cancel(owner, 0) },
	"evict":          func(s *scene, _ string) { s.evict() },
	"another's look": func(s *scene, _ string) { s.raw("DEL", s.keys.Lock); s.is(s.acquire(s.writer("C")), protocol.Enqueued) },
}

func TestAWaiterWithAPOwnsForAShortTimeUntilItSaysThatItIsThere(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for how, hand := range handing {
			for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
				for what, confirm := range map[string]func(id string){
					"renew":   func(id string) { s.renew(id) },
					"acquire": func(id string) { s.gets(s.acquire(id)) },
					"try":     func(id string) { s.gets(s.try(id)) },
				} {
					owner, next := s.writer("A"), provisional(s.id("B", m, long))
					s.gets(s.acquire(owner))
					s.waits(s.acquire(next), 0)
					hand(s, owner)
					if d := s.ownsFor(next); d <= 0 || d > protocol.ProvisionalTTL {
						t.Errorf("%s, %v: it owns for %v", how, m, d)
					}
					if s.look().ends[4]-s.look().clock < 500_000 {
						t.Errorf("%s, %v: the last token is forgotten too soon", how, m)
					}
					confirm(next)
					if d := s.ownsFor(next); d <= long/2 || d > long {
						t.Errorf("%s, %v: after %s it owns for %v", how, m, what, d)
					}
					s.clear()
				}
			}
		}
	})
}

func TestAWaiterWithAPOfAShortTTLOwnsForThat(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for how, hand := range handing {
			for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
				owner, next := s.writer("A"), provisional(s.id("B", m, protocol.ProvisionalTTL/2))
				s.gets(s.acquire(owner))
				s.waits(s.acquire(next), 0)
				hand(s, owner)
				if d := s.ownsFor(next); d > protocol.ProvisionalTTL/2 {
					t.Errorf("%s, %v: it owns for %v", how, m, d)
				}
				s.clear()
			}
		}
	})
}

func TestAWaiterWithoutAPOwnsForItsTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		for how, hand := range handing {
			for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
				for _, next := range []string{s.id("B", m, long), counted(s.id("B", m, long))} {
					owner := s.writer("A")
					s.gets(s.acquire(owner))
					s.waits(s.acquire(next), 0)
					hand(s, owner)
					if d := s.ownsFor(next); d <= long/2 {
						t.Errorf("%s: %s owns for %v", how, next, d)
					}
					s.clear()
				}
			}
		}
	})
}

// A request that learns of its grant from the answer is known to be alive.
func TestAWaiterWithAPThatIsAnsweredOwnsForItsTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			for what, take := range map[string]func(owner, id string){
				"a free lock": func(owner, id string) { s.release(owner, 0); s.gets(s.acquire(id)) },
				"its turn": func(owner, id string) {
					s.acquire(id)
					s.raw("DEL", s.keys.Lock)
					s.gets(s.acquire(id))
				},
				"a yield": func(owner, id string) { s.gets(s.yield(owner, id, 0)) },
			} {
				owner, id := s.writer("A"), provisional(s.id("A", m, long))
				s.gets(s.acquire(owner))
				take(owner, id)
				if d := s.ownsFor(id); d <= long/2 {
					t.Errorf("%s, %v: it owns for %v", what, m, d)
				}
				s.clear()
			}
		}
		owner, id := s.writer("A"), provisional(s.reader("A"))
		s.gets(s.acquire(owner))
		s.gets(s.downgrade(owner, id, 0))
		if d := s.ownsFor(id); d <= long/2 {
			t.Errorf("after a downgrade it owns for %v", d)
		}
	})
}

// The marker lives as long as the longest of their leases.
func TestAWaiterWithAPDoesNotShortenTheLeasesOfReadersBesideIt(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, sure, dead := s.writer("A"), s.reader("B"), provisional(s.reader("C"))
		s.gets(s.acquire(owner))
		s.acquire(sure)
		s.acquire(dead)
		s.release(owner, 0)
		s.owned(sure, dead)
		st := s.look()
		if d := st.left(st.ends[0]); d <= long.Milliseconds()/2 {
			t.Errorf("the marker lives for %d ms", d)
		}
		if d := s.ownsFor(dead); d > protocol.ProvisionalTTL {
			t.Errorf("the unconfirmed reader owns for %v", d)
		}
		if d := s.ownsFor(sure); d <= long/2 {
			t.Errorf("the other owns for %v", d)
		}
	})
}

// Each is made owner in turn, by the re-check of the one that is alive, which passes no other.
func TestAWaiterWithAPThatIsDeadIsFollowedByTheNextWhenItsTimeIsOver(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, alive := s.writer("A"), provisional(s.writer("D"))
		s.gets(s.acquire(owner))
		dead := []string{provisional(s.writer("B")), provisional(s.reader("C")), provisional(s.writer("B"))}
		for i, id := range append(dead, alive) {
			s.waits(s.acquire(id), i)
		}
		s.release(owner, 0)
		for i, id := range dead {
			s.owned(id)
			if a := s.waits(s.acquire(alive), len(dead)-1-i); a.Left > protocol.ProvisionalTTL {
				t.Errorf("it is told to wait for %v", a.Left)
			}
			s.raw("DEL", s.keys.Lock) // its provisional lease has ended
			s.raw("DEL", s.keys.Readers())
			late := s.acquire(alive)
			if i == len(dead)-1 {
				s.gets(late)
			}
		}
		s.owned(alive)
		// The waiter taken for dead was only slow.
		for _, id := range dead {
			if s.renew(id) {
				t.Errorf("%s renewed what is another's", id)
			}
			s.is(s.release(id, 0), protocol.NotOurs)
		}
		s.owned(alive)
		s.waits(s.acquire(dead[0]), 0) // it waits anew, at the tail
	})
}
