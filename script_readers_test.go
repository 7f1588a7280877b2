package leased

import (
	"testing"
	"time"
)

// readsFor makes an owner of id and sets when its lease ends: ms from now.
func (s *scene) readsFor(id string, ms int64) {
	s.t.Helper()
	s.gets(s.acquire(id))
	s.raw("ZADD", s.keys.readers(), "XX", s.now()+ms, id)
}

// B6, rule 13: each reader's lease is cut by the TTL in its own id, and a
// foreign member's never.
func TestReadersAreClampedEachByItsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		brief, patient, late := s.id("A", shared, 20*time.Second), s.id("B", shared, 50*time.Second), s.id("C", shared, 10*time.Second)
		before := s.now()
		s.readsFor(brief, 300_000) // the clock went back five minutes
		s.readsFor(patient, 40_000)
		between := s.now()
		s.gets(s.acquire(late)) // sees it
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
		owner, other := s.writer("A"), s.id("B", exclusive, 5*time.Second)
		s.gets(s.acquire(owner))
		s.raw("PEXPIRE", s.keys.lock, 300_000)
		s.waits(s.acquire(other), 0)
		if st := s.look(); st.left(st.ends[0]) > 30_000 || st.left(st.ends[0]) < 20_000 {
			t.Errorf("%d ms left of a TTL of 30 s", st.left(st.ends[0]))
		}
		for _, foreign := range []string{"foreign", "leased2:w:5:c:a:b"} {
			s.raw("SET", s.keys.lock, foreign, "PX", 300_000)
			s.acquire(other)
			if st := s.look(); st.left(st.ends[0]) < 290_000 {
				t.Errorf("%q was cut to %d ms", foreign, st.left(st.ends[0]))
			}
		}
	})
}

// B7: the marker lives as long as the longest reader, whoever came last.
func TestTheMarkerLivesAsLongAsTheLongestReader(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		patient, brief := s.id("A", shared, 50*time.Second), s.id("B", shared, 20*time.Second)
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
		if v := s.raw("SET", s.keys.lock, "foreign", "NX", "PX", 1000); v != nil {
			t.Error("a foreign SET NX got in beside readers")
		}
		s.is(s.release(patient, 0), done)
		marked("the long reader left", brief) // P7: and blocks nobody longer
	})
}

// B7: one reader's renewal or end does not touch another's.
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

// P7: the name must be the marker and the score ahead.
func TestAReaderOwnsOnlyWhileMarkerAndScoreStand(t *testing.T) {
	breakage := map[string]func(s *scene, id string){
		"the marker is gone":    func(s *scene, _ string) { s.raw("DEL", s.keys.lock) },
		"a foreigner took over": func(s *scene, _ string) { s.raw("SET", s.keys.lock, "foreign", "PX", 60_000) },
		"its lease is over":     func(s *scene, id string) { s.raw("ZADD", s.keys.readers(), "XX", s.now()-1, id) },
		"its score is gone":     func(s *scene, id string) { s.raw("ZREM", s.keys.readers(), id) },
	}
	ask := map[string]func(s *scene, id string) bool{
		"renewal": func(s *scene, id string) bool { return s.renew(id) },
		"release": func(s *scene, id string) bool { return s.release(id, 0).outcome == done },
		"yield":   func(s *scene, id string) bool { return s.yield(id, s.reader("A"), 0).outcome != notOurs },
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

// P7: somebody deleted the marker, or it was evicted; the reader works on.
func TestAWriterWaitsForALiveReaderWithoutItsMarker(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r, w := s.reader("A"), s.writer("B")
		s.gets(s.acquire(r))
		s.raw("DEL", s.keys.lock)
		s.is(s.try(w), refused)
		s.waits(s.acquire(w), 0)
		s.raw("ZADD", s.keys.readers(), "XX", s.now()-1, r)
		s.gets(s.acquire(w))
		s.owned(w)
	})
}

// P5: they need not wait for a re-check.
func TestCancellingAWaitingWriterLetsReadersBehindItIn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("C")
		a, w, c := s.reader("A"), s.writer("B"), counted(s.reader("C"))
		s.gets(s.acquire(a))
		s.waits(s.acquire(w), 0)
		s.waits(s.acquire(c), 1)
		inbox.hears("")
		s.cancel(w, 0)
		s.owned(a, c)
		s.queued()
		inbox.hears(c, "granted")
	})
}

// Section 4, grant-next: after a reader, the readers right behind it, and no further.
func TestAReleaseLetsInAllReadersBeforeTheNextWriter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, r1, r2, w, r3 := s.writer("A"), s.reader("B"), s.reader("C"), s.writer("D"), s.reader("E")
		s.gets(s.acquire(owner))
		for i, id := range []string{r1, r2, w, r3} {
			s.waits(s.acquire(id), i)
		}
		if a := s.release(owner, 0); a.handed != 2 {
			t.Errorf("%d were made owner, want 2", a.handed)
		}
		s.owned(r1, r2)
		s.queued(w, r3)
		s.release(r1, 0)
		s.owned(r2)
		if a := s.release(r2, 0); a.handed != 1 {
			t.Errorf("%d were made owner, want 1", a.handed)
		}
		s.owned(w)
		s.queued(r3)
	})
}

func TestAReaderDoesNotOvertakeAWaitingWriter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		a, w, c := s.reader("A"), s.writer("B"), s.reader("C")
		s.gets(s.acquire(a))
		s.waits(s.acquire(w), 0)
		s.is(s.try(c), refused)
		s.waits(s.acquire(c), 1)
		s.owned(a)
	})
}

// P6: a shared lock has several owners, and each may be the one that keeps it.
func TestEveryReaderHearsWantedOnceAndAgainAtTheHeadsRecheck(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxA, inboxB := s.listen("A"), s.listen("B")
		a, b, w, later := s.reader("A"), s.reader("B"), s.writer("C"), s.writer("D")
		s.gets(s.acquire(a))
		s.gets(s.acquire(b))
		inboxA.hears(a)
		s.acquire(w)
		inboxA.hears(a, "wanted")
		inboxB.hears(b, "wanted")
		s.acquire(later) // new behind an owner: says so once
		inboxA.hears(a, "wanted")
		s.acquire(later) // not the head: says nothing more
		inboxA.hears(a)
		s.acquire(w) // the head: a message may have been lost
		inboxA.hears(a, "wanted")
		inboxB.heard()
	})
}

// It could hear of it after the writer gave up, and keep new readers out for nobody.
func TestAReaderIsNotToldWantedByAWriterOfItsOwnProcess(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r, other, place := s.reader("A"), s.reader("B"), s.writer("A")
		s.gets(s.acquire(r))
		s.gets(s.acquire(other))
		a, b := s.listen("A"), s.listen("B")
		ask := s.acquireOf(place)
		ask.own = r
		for range 2 {
			s.waits(s.must(s.do(ask)), 0)
			a.hears("")
			b.hears(other, "wanted")
		}
		s.acquire(s.writer("C"))
		a.hears(r, "wanted")
		b.hears(other, "wanted")
	})
}

// Its marker was deleted, so it no longer owns, and it is told so. The next
// reader's marker must not make an owner of one who believes to be none: nobody
// would renew or release for it.
func TestAReaderThatWasRefusedIsNoOwnerLater(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id, head, w := s.reader("A"), s.reader("B"), s.writer("C")
		s.gets(s.acquire(id))
		for i, waiter := range []string{head, w} {
			s.raw("ZADD", s.keys.queue(), i, waiter)
			s.raw("ZADD", s.keys.waiters(), s.now()+30_000, waiter)
		}
		s.raw("PEXPIRE", s.keys.queue(), 60_000)
		s.raw("PEXPIRE", s.keys.waiters(), 60_000)
		s.raw("DEL", s.keys.lock)
		s.is(s.try(id), refused)
		s.owned(head)
	})
}

// The head planned its re-check by the end of a reader that has left meanwhile.
func TestTheHeadHearsWhenTheRemainingReadersEnd(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("C")
		for _, leave := range []func(id string){func(id string) { s.release(id, 0) }, func(id string) { s.cancel(id, 0) }} {
			patient, brief, w := s.id("A", shared, 2*long), s.reader("B"), s.writer("C")
			s.gets(s.acquire(patient))
			s.gets(s.acquire(brief))
			s.waits(s.acquire(w), 0)
			leave(patient)
			if m := inbox.hears(w, "ends")[0]; m.left <= 0 || m.left > long {
				t.Errorf("told %v of a reader with %v", m.left, long)
			}
			s.release(brief, 0)
			inbox.hears(w, "granted")
			s.release(w, 0)
		}
	})
}
