package redisserver

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// eachWay has f run with a server that is used alone, and with a member of a quorum.
func (s *scene) eachWay(f func(what string)) {
	f("alone")
	s.clear()
	s.srv = NewMember(s.srv.Rdb, "", time.Minute)
	s.raw("SET", s.srv.mark, "1")
	f("of a quorum")
	s.clear()
	s.raw("DEL", s.srv.mark)
}

func (s *scene) ask(id string) protocol.Answer {
	s.t.Helper()
	return s.must(s.do(s.questionOf(id)))
}

// An owner that asks and does not own gets nothing, so a late copy of its question does no harm.
func TestAQuestionGivesNothingToWhoDoesNotOwn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.eachWay(func(what string) {
			for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
				id := s.id("A", m, long)
				for name, state := range map[string]func(){
					"free":                  func() {},
					"another's":             func() { s.gets(s.acquire(s.writer("B"))) },
					"readers'":              func() { s.gets(s.acquire(s.reader("B"))) },
					"another's, and waited": func() { s.gets(s.acquire(s.writer("B"))); s.waits(s.acquire(id), 0) },
					"a foreign program's":   func() { s.raw("SET", s.keys.Lock, "foreign", "PX", 60_000) },
				} {
					s.clear()
					state()
					before := s.look()
					s.is(s.ask(id), protocol.NotOurs)
					if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) || after.drift(before, 5) != "" {
						t.Errorf("%s, %v, %s: made of\n%+v\nthis\n%+v", what, m, name, before, after)
					}
				}
			}
		})
	})
}

func TestAQuestionSaysWhetherOthersWaitAndExtendsTheLease(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.eachWay(func(what string) {
			for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
				s.clear()
				owner, waiter := s.id("A", m, long), s.writer("B")
				token := s.gets(s.acquire(owner))
				s.raw("PEXPIRE", s.keys.Lock, 9000)
				if m == protocol.Shared {
					s.readsFor(owner, 9000)
				}
				for _, more := range []bool{false, true, false} {
					if more {
						s.waits(s.acquire(waiter), 0)
					} else {
						s.cancel(waiter, 0)
					}
					a := s.ask(owner)
					s.gets(a)
					if a.Token != token || !a.Kept || a.More != more {
						t.Errorf("%s, %v: %+v", what, m, a)
					}
				}
				if st := s.look(); st.left(st.ends[0]) < 20_000 {
					t.Errorf("%s, %v: %d ms left", what, m, st.left(st.ends[0]))
				}
			}
		})
	})
}

// Readers that keep others out for a writer that gives up are told, if it was the only one that waited.
func TestReadersHearThatNobodyWaitsAnyMore(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.eachWay(func(what string) {
			owner, first, second := s.reader("A"), s.writer("B"), s.writer("C")
			inbox := s.listen("A")
			s.gets(s.acquire(owner))
			s.waits(s.acquire(first), 0)
			s.waits(s.acquire(second), 1)
			inbox.received()
			s.cancel(first, 0)
			inbox.receives(owner, protocol.MessageWanted)
			s.cancel(second, 0)
			inbox.receives(owner, protocol.MessageUnwanted)
			s.cancel(second, 0) // a late copy
			inbox.receives(owner)
			s.is(s.release(owner, 0), protocol.Done)
			writer := s.writer("A")
			s.gets(s.acquire(writer))
			s.waits(s.acquire(first), 0)
			inbox.received()
			s.cancel(first, 0)
			inbox.receives(writer)
		})
	})
}

// A process that was killed while it waited is in the queue until its waiting lease ends. If nobody else
// asks afterwards, nobody else drops it.
func TestAQuestionOfAReaderDoesNotCountTheDead(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.eachWay(func(what string) {
			owner, dead, behind, last := s.reader("A"), s.writer("B"), s.reader("B"), s.writer("B")
			inbox := s.listen("B")
			token := s.gets(s.acquire(owner))
			s.waits(s.acquire(dead), 0)
			s.dies(dead)
			if a := s.ask(owner); a.More || a.Token != token {
				t.Errorf("%s: %+v", what, a)
			}
			s.queued()
			s.waits(s.acquire(dead), 0)
			s.waits(s.acquire(behind), 1)
			s.waits(s.acquire(last), 2)
			s.dies(dead)
			inbox.received()
			if a := s.ask(owner); !a.More || a.Token != token || a.Handed != 1 {
				t.Errorf("%s: %+v", what, a)
			}
			s.owned(owner, behind)
			s.queued(last)
			inbox.receives(behind, protocol.MessageGranted)
		})
	})
}
