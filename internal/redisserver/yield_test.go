package redisserver

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A yield needs a new id: if its sender could keep the lock under the old one, a late copy of the
// yield would give that lock away.
func TestALateCopyOfYieldGivesNothingAway(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, other := s.writer("A"), s.writer("A"), s.writer("B")
		token := s.gets(s.acquire(old))
		kept := s.gets(s.yield(old, next, 0)) // the queue is empty, so it is granted at once
		if kept <= token {
			t.Errorf("token %d after %d", kept, token)
		}
		s.waits(s.acquire(other), 0)
		if late := s.gets(s.yield(old, next, 0)); late != kept {
			t.Errorf("the copy says token %d, want %d", late, kept)
		}
		s.owned(next)
		s.queued(other)

		s.release(next, 0)
		s.is(s.yield(old, next, 0), protocol.NotOurs) // later still
		s.owned(other)
		s.queued()
	})
}

// The client's acquire of next arrives before the yield to next, which was delayed.
func TestYieldAndAcquireEnqueueOnce(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, other := s.writer("A"), s.writer("A"), s.writer("B")
		s.gets(s.acquire(old))
		s.waits(s.acquire(next), 0) // arrives before the yield, which was sent earlier
		s.waits(s.acquire(next), 0)
		s.waits(s.acquire(other), 1)
		s.gets(s.yield(old, next, 0))
		s.owned(next)
		s.queued(other)
		s.waits(s.acquire(other), 0)
		s.queued(other)
	})
}

// The request may wait already if it is a writer's, behind readers of its own process.
func TestAYieldToARequestThatWaitsAlreadyKeepsItsPlace(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, elsewhere := s.reader("A"), s.reader("B")
		place, behind, later := s.writer("A"), s.writer("C"), s.reader("D")
		s.gets(s.acquire(old))
		s.gets(s.acquire(elsewhere))
		s.waits(s.acquire(place), 0)
		s.waits(s.acquire(behind), 1)
		s.waits(s.acquire(later), 2)
		s.waits(s.yield(old, place, 0), 0)
		s.waits(s.yield(old, place, 0), 0) // a late copy
		s.queued(place, behind, later)
		s.release(elsewhere, 0)
		s.owned(place)
		s.queued(behind, later)
	})
}

func TestAYieldToAReservedPlaceSaysThatTheOldRequestDidNotOwn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, place, other := s.reader("A"), s.writer("A"), s.writer("B")
		s.gets(s.acquire(old))
		s.waits(s.acquire(place), 0)
		s.evict() // which grants the lock to place
		if a := s.yield(old, place, 0); s.gets(a) == 0 || !a.Gone {
			t.Errorf("answers %+v", a)
		}
		s.clear()
		s.gets(s.acquire(old))
		s.waits(s.acquire(other), 0)
		s.waits(s.acquire(place), 1)
		s.evict()
		if a := s.waits(s.yield(old, place, 0), 0); !a.Gone {
			t.Errorf("answers %+v", a)
		}
		s.clear()
		s.gets(s.acquire(old))
		s.waits(s.acquire(place), 0)
		if a := s.yield(old, place, 0); s.gets(a) == 0 || a.Gone {
			t.Errorf("answers %+v", a)
		}
	})
}

func TestYieldGoesBehindAllWhoWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, b, c := s.writer("A"), s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(old))
		s.acquire(b)
		s.acquire(c)
		a := s.waits(s.yield(old, next, 0), 1)
		if a.Blocker != b {
			t.Errorf("blocked by %q, want %q", a.Blocker, b)
		}
		s.owned(b)
		s.queued(c, next)
	})
}

func TestAYieldSaysUpToWhereReadersWereTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var readers []string
		for i := range 150 {
			readers = append(readers, s.id("A", protocol.Shared, ample+time.Duration(i)*time.Second))
			s.gets(s.acquire(readers[i]))
		}
		inbox, w := s.listen("A"), s.id("B", protocol.Exclusive, ample)
		ask := s.acquireOf(w)
		if ask.Told = s.waits(s.yield(readers[0], w, 0), 0).Told; ask.Told == 0 {
			t.Error("all are told, it says")
		}
		s.must(s.do(ask))
		if n := len(inbox.received()); n != 149 {
			t.Errorf("%d of 149 were told", n)
		}
		s.evict()
	})
}

// A server of a quorum that has restarted without its data no longer knows the owner, nor the next request.
// From the time and the mark in its answer the client learns that it has only forgotten them.
func TestAYieldOfWhatAQuorumsServerHasForgottenTellsItsMark(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.srv.Rdb, strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", "")), time.Minute)
		for _, age := range []time.Duration{0, 30 * time.Second} {
			old, next := s.writer("A"), s.writer("A")
			s.raw("DEL", s.srv.mark)
			if age > 0 {
				s.raw("SET", s.srv.mark, strconv.FormatInt(s.now()*1000-age.Microseconds(), 10))
			}
			a := s.yield(old, next, 0)
			s.is(a, protocol.NotOurs)
			since := time.Duration(int64(a.Clock)-int64(a.Mark)) * time.Microsecond
			if a.Clock == 0 || a.Mark == 0 || (since-age).Abs() > 10*time.Second {
				t.Errorf("%v after a restart: %+v", age, a)
			}
		}
		s.raw("DEL", s.srv.mark)
		s.clear()
	})
}
