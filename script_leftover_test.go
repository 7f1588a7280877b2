package leased

import (
	"testing"
	"time"
)

// What an earlier owner or waiter has left behind does not count.

func TestAReleaseGrantsNobodyWhoseWaitingLeaseIsOver(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, alive := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(dead), 0)
		s.waits(s.acquire(alive), 1)
		s.dies(dead)
		s.is(s.release(owner, 0), done)
		if st := s.look(); st.value != alive || len(st.queue) != 0 {
			t.Errorf("the owner is %q, queued are %q", st.value, st.queue)
		}
		s.clear()
	})
}

func TestAMarkerLivesNoLongerThanTheReadersThatAWriterCutDown(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader := s.id("A", shared, 20*time.Second)
		s.readsFor(reader, 300_000) // the clock went back five minutes
		s.raw("PEXPIRE", s.keys.lock, 300_000)
		s.raw("PEXPIRE", s.keys.readers(), 300_000)
		s.waits(s.acquire(s.writer("B")), 0)
		if st := s.look(); st.left(st.ends[0]) > 20_000 {
			t.Errorf("the reader is cut to 20 s, its marker lives for %d ms", st.left(st.ends[0]))
		}
		s.clear()
	})
}

func TestACancelledReaderWhoseMarkerIsGoneLeavesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader := s.reader("A")
		s.gets(s.acquire(reader))
		s.raw("DEL", s.keys.lock)
		s.cancel(reader, 0)
		if st := s.look(); len(st.readers) != 0 {
			t.Errorf("readers: %v", st.readers)
		}
		s.clear()
	})
}
