package redisserver

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Up to Redis 7.0 the marker may expire while the script runs that lets the next reader in. (The embedded
// server has all keys expire in the middle of scripts.)
func TestAReaderThatIsLetInAsAnotherExpiresOwnsTheLock(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		expires, leaves, dies, next := s.reader("A"), s.reader("B"), s.writer("C"), s.reader("D")
		for range 500 {
			s.clear()
			s.gets(s.acquire(expires))
			s.gets(s.acquire(leaves))
			s.waits(s.acquire(dies), 0)
			s.waits(s.acquire(next), 1)
			s.dies(dies)
			s.raw("ZADD", s.keys.Readers(), "XX", s.now()+1, expires)
			s.release(leaves, 0)
			state := s.photo()
			if !s.renew(next) {
				t.Fatalf("it does not own:\n%s", state)
			}
		}
		s.clear()
	})
}

// Rule 13: a reader's lease is cut to the TTL in its own id.
func TestReadersAreClampedEachByItsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		brief, patient, late := s.id("A", protocol.Shared, 20*time.Second), s.id("B", protocol.Shared, 50*time.Second), s.id("C", protocol.Shared, 10*time.Second)
		before := s.now()
		s.readsFor(brief, 300_000) // the clock went back five minutes
		s.readsFor(patient, 40_000)
		between := s.now()
		s.gets(s.acquire(late)) // clamps the others
		after, st := s.now(), s.look()
		if ends := st.readers[brief]; ends < between+20_000-fuzz || ends > after+20_000+fuzz {
			t.Errorf("the clamped reader has %d ms, its TTL is 20 s", ends-between)
		}
		if left := st.readers[patient] - before; left < 40_000 || left > between-before+40_000+fuzz {
			t.Errorf("a reader within its TTL was cut from 40 s to %d ms", left)
		}
		if st.ends[0] < st.readers[patient]-fuzz || st.ends[0] > st.readers[patient]+fuzz {
			t.Errorf("the marker ends %d ms from now, the last reader %d", st.left(st.ends[0]), st.left(st.readers[patient]))
		}
	})
}

func TestAWritersLeaseIsClampedByItsOwnTTLAndAForeignOneNever(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, other := s.writer("A"), s.id("B", protocol.Exclusive, 5*time.Second)
		s.gets(s.acquire(owner))
		s.raw("PEXPIRE", s.keys.Lock, 300_000)
		s.waits(s.acquire(other), 0)
		if st := s.look(); st.left(st.ends[0]) > 30_000 || st.left(st.ends[0]) < 20_000 {
			t.Errorf("%d ms left of a TTL of 30 s", st.left(st.ends[0]))
		}
		for _, foreign := range []string{"foreign", "leased2:w:5:c:a:b"} {
			s.raw("SET", s.keys.Lock, foreign, "PX", 300_000)
			s.acquire(other)
			if st := s.look(); st.left(st.ends[0]) < 290_000 {
				t.Errorf("%q was cut to %d ms", foreign, st.left(st.ends[0]))
			}
		}
	})
}

// As PERSIST does, a RESTORE without a TTL, or a tool that copies keys.
func TestALeaseWhoseKeyHasLostItsExpiryEndsWithItsTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		asks := func(c protocol.Command) { s.waits(s.must(s.do(c)), c.Place) }
		first, second := s.writer("B"), s.writer("C")
		for _, c := range []struct {
			name string
			do   func()
		}{
			{"the first that waits", func() { asks(s.newcomer(first)) }},
			{"the next", func() { next := s.newcomer(second); next.Place = 1; asks(next) }},
			{"a re-check", func() { again := s.acquireOf(first); again.Wait = true; asks(again) }},
		} {
			if c.name == "the first that waits" {
				s.gets(s.acquire(s.writer("A")))
			}
			s.raw("PERSIST", s.keys.Lock)
			c.do()
			if st := s.look(); st.left(st.ends[0]) > 30_000 || st.left(st.ends[0]) < 20_000 {
				t.Errorf("%s: %d ms left of a TTL of 30 s", c.name, st.left(st.ends[0]))
			}
		}
		s.clear()
		s.gets(s.acquire(first))
		s.must(s.do(protocol.Command{Verb: protocol.Release, ID: first, Cooldown: cool}))
		s.raw("PERSIST", s.keys.Lock)
		s.waits(s.acquire(second), 0)
		s.cooling(first, cool)
	})
}

func TestAMarkerLivesNoLongerThanTheReadersThatAWriterCutDown(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader := s.id("A", protocol.Shared, 20*time.Second)
		s.readsFor(reader, 300_000) // the clock went back five minutes
		s.raw("PEXPIRE", s.keys.Lock, 300_000)
		s.raw("PEXPIRE", s.keys.Readers(), 300_000)
		s.waits(s.acquire(s.writer("B")), 0)
		if st := s.look(); st.left(st.ends[0]) > 20_000 {
			t.Errorf("the reader is cut to 20 s, its marker lives for %d ms", st.left(st.ends[0]))
		}
		s.clear()
	})
}

// The order in which the readers came does not matter.
func TestTheMarkerLivesAsLongAsTheLongestReader(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		patient, brief := s.id("A", protocol.Shared, 50*time.Second), s.id("B", protocol.Shared, 20*time.Second)
		marked := func(when string, id string) {
			t.Helper()
			st := s.look()
			for i, what := range map[int]string{0: "marker", 2: "readers"} {
				if d := st.ends[i] - st.readers[id]; d < -fuzz || d > fuzz {
					t.Errorf("%s: the %s ends %d ms after %s", when, what, d, id)
				}
			}
		}
		s.gets(s.acquire(patient))
		s.gets(s.acquire(brief))
		marked("a short reader came", patient)
		if !s.renew(brief) {
			t.Fatal("not renewed")
		}
		marked("a short reader renewed", patient)
		s.gets(s.acquire(brief))
		marked("a short reader asked again", patient)
		if v := s.raw("SET", s.keys.Lock, "foreign", "NX", "PX", 1000); v != nil {
			t.Error("a foreign SET NX got in beside readers")
		}
		s.is(s.release(patient, 0), protocol.Done)
		marked("the long reader left", brief) // so it does not block writers any longer
	})
}

// A renewal or release of one reader does not change another's expiry.
func TestReadersExpiriesAreIndependent(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		a, b := s.reader("A"), s.reader("B")
		s.readsFor(a, 20_000)
		ends := s.look().readers[a]
		s.gets(s.acquire(b))
		s.renew(b)
		s.acquire(b)
		s.release(b, 0)
		if st := s.look(); st.readers[a] != ends || len(st.readers) != 1 {
			t.Errorf("readers %v, want only %s until %d", st.readers, a, ends)
		}
		s.owned(a)
	})
}

func TestTheLastReaderTakesTheMarkerAway(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		a, b := s.reader("A"), s.reader("B")
		s.gets(s.acquire(a))
		s.gets(s.acquire(b))
		s.release(a, 0)
		s.owned(b)
		s.release(b, 0)
		if st := s.look(); st.value != "" || len(st.readers) != 0 || st.ends[2] != 0 {
			t.Errorf("left behind: %+v", st)
		}
	})
}

// The lock's key must be the marker, and the reader's score in the future.
func TestAReaderOwnsOnlyWhileMarkerAndScoreStand(t *testing.T) {
	breakage := map[string]func(s *scene, id string){
		"the marker is gone":    func(s *scene, _ string) { s.raw("DEL", s.keys.Lock) },
		"a foreigner took over": func(s *scene, _ string) { s.raw("SET", s.keys.Lock, "foreign", "PX", 60_000) },
		"its lease is over":     func(s *scene, id string) { s.raw("ZADD", s.keys.Readers(), "XX", s.now()-1, id) },
		"its score is gone":     func(s *scene, id string) { s.raw("ZREM", s.keys.Readers(), id) },
	}
	ask := map[string]func(s *scene, id string) bool{
		"renewal": func(s *scene, id string) bool { return s.renew(id) },
		"release": func(s *scene, id string) bool { return s.release(id, 0).Outcome == protocol.Done },
		"yield":   func(s *scene, id string) bool { return s.yield(id, s.reader("A"), 0).Outcome != protocol.NotOurs },
	}
	onScripts(t, func(t *testing.T, s *scene) {
		for what, harm := range breakage {
			for verb, owns := range ask {
				s.clear()
				id, beside := s.reader("A"), s.reader("B")
				s.gets(s.acquire(id))
				s.gets(s.acquire(beside))
				harm(s, id)
				value := s.look().value
				if owns(s, id) {
					t.Errorf("%s: %s says it owns", what, verb)
				}
				st := s.look()
				if _, listed := st.readers[id]; listed && verb != "yield" {
					t.Errorf("%s: %s leaves its entry", what, verb)
				}
				if _, listed := st.readers[beside]; !listed || st.value != value {
					t.Errorf("%s: %s: value %q, readers %v", what, verb, st.value, st.readers)
				}
			}
		}
		s.clear()
	})
}

// The marker was deleted or evicted, and the reader does not know.
func TestAWriterWaitsForALiveReaderWithoutItsMarker(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r, w := s.reader("A"), s.writer("B")
		s.gets(s.acquire(r))
		s.raw("DEL", s.keys.Lock)
		s.is(s.try(w), protocol.Refused)
		s.waits(s.acquire(w), 0)
		s.raw("ZADD", s.keys.Readers(), "XX", s.now()-1, r)
		s.gets(s.acquire(w))
		s.owned(w)
	})
}

// The marker was deleted, so the reader does not own anymore, and its try says so. The next
// reader's marker must not make it an owner again: its client would neither renew nor
// release it.
func TestAReaderThatWasRefusedIsNoOwnerLater(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id, head, w := s.reader("A"), s.reader("B"), s.writer("C")
		s.gets(s.acquire(id))
		for i, waiter := range []string{head, w} {
			s.raw("ZADD", s.keys.Queue(), i, waiter)
			s.raw("ZADD", s.keys.Waiters(), s.now()+30_000, waiter)
		}
		s.raw("PEXPIRE", s.keys.Queue(), 60_000)
		s.raw("PEXPIRE", s.keys.Waiters(), 60_000)
		s.raw("DEL", s.keys.Lock)
		s.is(s.try(id), protocol.Refused)
		s.owned(head)
	})
}
