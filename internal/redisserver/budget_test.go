package redisserver

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// The work of one call is bounded, so that the server can serve other clients between calls.
// The answer says whether the client has to continue.

// ample is a TTL that does not end while a test makes hundreds of requests, even on a machine
// under load.
const ample = 10 * time.Minute

// deadHeads puts n dead requests at the head of the queue: without a waiting lease, a request counts
// as one whose lease has expired.
func (s *scene) deadHeads(n int) {
	s.t.Helper()
	add := []any{"ZADD", s.keys.Queue()}
	for i := range n {
		add = append(add, -n+i, s.writer("D"))
	}
	s.raw(add...)
	s.raw("PEXPIRE", s.keys.Queue(), 600_000)
}

func TestACallDropsAtMost500DeadEntriesAndSaysThatMoreMayBeThere(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id, next := s.id("A", protocol.Exclusive, ample), s.id("B", protocol.Exclusive, ample)
		s.deadHeads(1_500)
		for i := range 2 {
			if a := s.try(id); a.Outcome != protocol.Refused || !a.Unfinished {
				t.Fatalf("try %d: %+v", i, a)
			}
			if n := len(s.look().queue); n < 1_500-600*(i+1) || n > 1_500-500*(i+1) {
				t.Fatalf("try %d: %d entries are left", i, n)
			}
		}
		for range 3 {
			if a := s.try(id); a.Outcome == protocol.Granted {
				break
			}
		}
		s.owned(id)
		s.queued()

		s.deadHeads(600)
		if a := s.acquire(next); a.Outcome != protocol.Enqueued || !a.Unfinished {
			t.Errorf("waits: %+v", a)
		}
		if a := s.waits(s.acquire(next), 100); a.Unfinished { // a request this far back leaves dead entries to others
			t.Errorf("it is to go on at once: %+v", a)
		}
		s.deadHeads(600)
		if a := s.release(id, 0); a.Outcome != protocol.Done || !a.Unfinished || a.Handed != 0 {
			t.Errorf("release: %+v", a)
		}
		s.cancel(id, 0)
		s.owned(next)
		s.queued()
		s.clear()
	})
}

func TestACallLetsAtMost100InAndACancelGoesOnUntilAllAre(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, down := s.id("A", protocol.Exclusive, ample), s.id("A", protocol.Shared, ample)
		var readers []string
		crowd := 250
		if race.Enabled {
			crowd = 110 // still more readers than one call lets in
		}
		for range crowd {
			readers = append(readers, s.id("B", protocol.Shared, ample))
		}
		last := s.id("C", protocol.Exclusive, ample)
		begin := func() {
			s.clear()
			s.gets(s.acquire(owner))
			for _, id := range append(slices.Clone(readers), last) {
				s.acquire(id)
			}
		}
		all := func(more ...string) {
			t.Helper()
			s.owned(append(slices.Clone(readers), more...)...)
			s.queued(last)
		}
		inbox := s.listen("B")

		begin()
		if a := s.release(owner, 0); a.Outcome != protocol.Done || a.Handed != 100 || !a.Unfinished {
			t.Errorf("release: %+v", a)
		}
		s.cancel(owner, 0)
		all()
		told := map[string]int{}
		for _, m := range inbox.received() {
			if m.Kind == protocol.MessageGranted {
				told[m.ID]++
			}
		}
		if len(told) != len(readers) {
			t.Errorf("%d of %d readers were told", len(told), len(readers))
		}

		begin()
		if a := s.downgrade(owner, down, 0); a.Outcome != protocol.Granted || a.Handed != 100 || !a.Unfinished {
			t.Errorf("downgrade: %+v", a)
		}
		s.cancel(owner, 0)
		all(down)

		begin()
		next := s.id("A", protocol.Exclusive, ample)
		if a := s.yield(owner, next, 0); a.Outcome != protocol.Enqueued || a.Handed != 100 || !a.Unfinished {
			t.Errorf("yield: %+v", a)
		}
		for range 2 {
			s.acquire(next)
		}
		s.owned(readers...)
		s.queued(last, next)

		begin()
		s.cancel(owner, 0)
		all()

		begin()
		s.evict()
		all()

		begin()
		s.raw("DEL", s.keys.Lock)
		if a := s.acquire(readers[0]); a.Outcome != protocol.Granted || a.Handed != 99 || !a.Unfinished {
			t.Errorf("acquire: %+v", a)
		}
		s.cancel(owner, 0)
		all()
		s.clear()
	})
}

func TestNobodyIsUnfinishedWhenTheLastOf100IsIn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.id("A", protocol.Exclusive, ample)
		s.gets(s.acquire(owner))
		for range 100 {
			s.acquire(s.id("B", protocol.Shared, ample))
		}
		if a := s.release(owner, 0); a.Handed != 100 || a.Unfinished {
			t.Errorf("%+v", a)
		}
		s.clear()
	})
}

// Between the calls, some of the notified readers release the lock and others renew. No reader
// may be skipped.
func TestAllReadersAreToldOfAWriterThoughACallTellsAbout100(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var readers []string
		for i := range 350 {
			ttl := ample + time.Duration(i%200)*time.Second
			readers = append(readers, s.id("A", protocol.Shared, ttl))
			s.gets(s.acquire(readers[i]))
		}
		inbox, w := s.listen("A"), s.acquireOf(s.id("B", protocol.Exclusive, ample))
		told, calls := map[string]bool{}, 0
		for ; calls == 0 || w.Told > 0; calls++ {
			if calls > 10 {
				t.Fatal("it goes on forever")
			}
			a := s.waits(s.must(s.do(w)), 0)
			w.Told = a.Told
			got := inbox.received()
			if len(got) > 150 {
				t.Errorf("one call tells %d readers", len(got))
			}
			for i, m := range got {
				told[m.ID] = true
				if i%3 == 0 {
					s.release(m.ID, 0)
				}
			}
			s.renew(readers[calls])
		}
		if calls < 3 {
			t.Errorf("%d calls", calls)
		}
		for _, id := range readers {
			if !told[id] {
				t.Errorf("%s was not told", id)
			}
		}
		s.evict()
	})
}

// Leases of readers that were granted together end at the same time. The next call continues after
// such a time, so one call has to notify all of these readers.
func TestReadersWhoseLeasesEndTogetherAreAllTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		ends := s.now() + 500_000
		for i := range 150 {
			id := s.id("A", protocol.Shared, ample)
			if i == 0 {
				s.gets(s.acquire(id))
			}
			s.raw("ZADD", s.keys.Readers(), ends, id)
		}
		later := s.id("A", protocol.Shared, ample)
		s.gets(s.acquire(later))
		inbox, w := s.listen("A"), s.acquireOf(s.id("B", protocol.Exclusive, ample))
		a := s.waits(s.must(s.do(w)), 0)
		if n := len(inbox.received()); n != 150 || a.Told == 0 {
			t.Errorf("%d were told, up to %d", n, a.Told)
		}
		w.Told = a.Told
		a = s.must(s.do(w))
		if all := inbox.received(); len(all) != 1 || all[0].ID != later || a.Told != 0 {
			t.Errorf("then %d were told, up to %d", len(all), a.Told)
		}
		s.evict()
	})
}

func TestAReadersScoreThatIsNoTimeEndsTheTelling(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for range 120 {
			s.gets(s.acquire(s.id("A", protocol.Shared, ample)))
		}
		for i := range 120 {
			s.raw("ZADD", s.keys.Readers(), "+inf", fmt.Sprintf("leased2:%d", i))
		}
		w := s.acquireOf(s.id("B", protocol.Exclusive, ample))
		for calls := 0; calls == 0 || w.Told > 0; calls++ {
			if calls > 3 {
				t.Fatal("it goes on forever")
			}
			w.Told = s.waits(s.must(s.do(w)), 0).Told
		}
		s.clear()
	})
}
