package redisserver

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

func TestCancelAnswersWhetherTheIDOwnedAndTheLastTokenBeforeTheNextOwners(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		for _, request := range []func(string) string{s.writer, s.reader} {
			first, waiter := request("A"), s.writer("B")
			token := s.gets(s.acquire(first))
			if r := s.answerOf(waiter, 0); r.Owned || r.Token != token {
				t.Errorf("a stranger's cancel: %+v, the token is %d", r, token)
			}
			s.waits(s.acquire(waiter), 0)
			if r := s.answerOf(first, token+5); !r.Owned || r.Token != token+5 {
				t.Errorf("the owner's cancel: %+v, the last token was %d", r, token+5)
			}
			// The waiter owns by now.
			if r := s.answerOf(first, token+5); r.Owned || r.Token == token+5 {
				t.Errorf("the next owner's token is not told of: %+v", r)
			}
			if r := s.answerOf(waiter, 0); !r.Owned {
				t.Errorf("the next owner's cancel: %+v", r)
			}
		}
	})
}

func TestCancelAnswersNoTokenWhereItProvesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.writer("A")
		if r := s.answerOf(id, 7); r.Owned || r.Token != 0 {
			t.Errorf("of a lock that nobody had: %+v", r)
		}
		token := s.gets(s.acquire(id))
		s.raw("SET", s.keys.Lock, "foreign")
		if r := s.answerOf(id, 0); r.Owned || r.Token != 0 {
			t.Errorf("beside a foreign owner: %+v", r)
		}
		s.raw("DEL", s.keys.Lock)
		if r := s.answerOf(id, 0); r.Owned || r.Token != token {
			t.Errorf("of a lock that was deleted: %+v, the token was %d", r, token)
		}
		s.raw("SET", s.keys.Meta(), "leased2:9:9", "PX", 60_000)
		if r := s.answerOf(id, 0); r.Owned || r.Token != 0 {
			t.Errorf("of a lock whose token a later version keeps: %+v", r)
		}
	})
}

// An owner assigns tokens to its local callers. While the server's clock is behind, the next
// owner can be granted the same token.
func TestATokenDrawnByItsOwnerProvesARealReleaseOnly(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		first, second := s.writer("A"), s.writer("B")
		drawn := s.gets(s.acquire(first)) + 3_600_000_000
		s.raw("DEL", s.keys.Lock)
		s.raw("SET", s.keys.Meta(), fmt.Sprintf("leased1:%d:1", drawn-1), "PX", 600_000)
		if token := s.gets(s.acquire(second)); token != drawn {
			t.Fatalf("token %d, want %d", token, drawn)
		}
		if r := s.answerOf(first, drawn); r.Owned || r.Token != 0 {
			t.Errorf("another owner got that token: %+v", r)
		}
		s.release(second, drawn+1)
		if r := s.answerOf(first, drawn+1); r.Owned || r.Token != 0 {
			t.Errorf("another owner drew that token: %+v", r)
		}
		if r := s.answerOf(second, drawn+1); r.Owned || r.Token != drawn+1 {
			t.Errorf("of a release that was carried out: %+v", r)
		}
	})
}

// A grant may have been given anew, after another owner, by an acquire that had no answer. Its release tells
// whether the lock's last token is still the grant's, as it was before the next owner's.
func TestAReleaseInDoubtTellsWhetherTheLastTokenIsTheGrants(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		b := s.listen("B")
		span := &protocol.Span{TraceID: [16]byte{1}, SpanID: [8]byte{2}}
		give := func(id string, last, proof uint64) protocol.Answer {
			t.Helper()
			return s.must(s.do(protocol.Command{Verb: protocol.Release, ID: id, Last: last, Proof: proof, Link: span}))
		}
		for _, owner := range []string{s.writer("A"), s.reader("A")} {
			for _, drawn := range []uint64{0, 5} {
				for name, waiter := range map[string]string{"nobody": "", "a writer": s.writer("B"), "a reader": s.reader("B")} {
					for _, another := range []bool{false, true} {
						s.clear()
						token := s.gets(s.acquire(owner))
						if another {
							s.raw("DEL", s.keys.Lock, s.keys.Readers())
							s.gets(s.acquire(s.writer("C")))
							s.release(s.raw("GET", s.keys.Lock).(string), 0)
							s.gets(s.acquire(owner)) // a late copy
						}
						last := uint64(0)
						if drawn > 0 {
							last = token + drawn
						}
						// With readers, a reader enters and the next token is drawn; it waits behind a writer.
						handed := 0
						if waiter != "" && (owner[8] == 'w' || waiter[8] == 'w') {
							s.waits(s.acquire(waiter), 0)
							handed = 1
						}
						b.received()
						a := give(owner, last, max(token, last))
						if a.Outcome != protocol.Done || a.Proved == another || a.Handed != handed {
							t.Errorf("%s waits, %d tokens drawn, another owner %v: %+v", name, drawn, another, a)
						}
						if handed == 0 {
							s.owned()
							continue
						}
						s.owned(waiter)
						if all := b.receives(waiter, protocol.MessageGranted); all[0].Link == nil || all[0].Link.SpanID != span.SpanID {
							t.Errorf("the next owner is told of %v", all[0].Link)
						}
					}
				}
			}
			s.clear()
			token := s.gets(s.acquire(owner))
			s.raw("DEL", s.keys.Lock, s.keys.Readers())
			if a := give(owner, 0, token); a.Outcome != protocol.NotOurs || a.Proved {
				t.Errorf("of a lock that was deleted: %+v", a)
			}
			s.raw("HSET", s.keys.Lock, "a", "b")
			if a := give(owner, 0, token); a.Outcome != protocol.NotOurs || a.Proved {
				t.Errorf("of a lock in whose place is a hash: %+v", a)
			}
			s.raw("DEL", s.keys.Lock)
		}
	})
}

func TestCancelGivesBackWhatWasGrantedMeanwhile(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			id, next := s.id("A", m, long), s.writer("B")
			s.gets(s.acquire(id))
			s.waits(s.acquire(next), 0)
			s.cancel(id, 0)
			s.owned(next)
			s.release(next, 0)
		}
	})
}

// A message to an owner that has just released is answered with cancel (docs/design.md,
// section 9, row 13). If that cancel notified the next owner, which may have released by then,
// too, messages and cancels could follow each other without end.
func TestACancelThatFindsNothingTellsNobodyAndOneOfAPlaceTellsTheOwnersThatOthersWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			gone, owner, place, other := s.writer("B"), s.id("A", m, long), s.writer("B"), s.writer("C")
			a := s.listen("A")
			s.gets(s.acquire(owner))
			s.acquire(place)
			s.acquire(other)
			a.received()
			s.cancel(gone, 0)
			a.receives("")
			s.cancel(place, 0)
			a.receives(owner, protocol.MessageWanted)
			s.cancel(place, 0)
			a.receives("")
			s.clear()
		}
	})
}

// The readers need not wait for their re-check.
func TestCancelingAWaitingWriterLetsReadersBehindItIn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("C")
		a, w, c := s.reader("A"), s.writer("B"), counted(s.reader("C"))
		s.gets(s.acquire(a))
		s.waits(s.acquire(w), 0)
		s.waits(s.acquire(c), 1)
		inbox.receives("")
		s.cancel(w, 0)
		s.owned(a, c)
		s.queued()
		inbox.receives(c, protocol.MessageGranted, protocol.MessageUnwanted)
	})
}

func TestACanceledReaderWhoseMarkerIsGoneLeavesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader := s.reader("A")
		s.gets(s.acquire(reader))
		s.raw("DEL", s.keys.Lock)
		s.cancel(reader, 0)
		if st := s.look(); len(st.readers) != 0 {
			t.Errorf("readers: %v", st.readers)
		}
		s.clear()
	})
}

func TestAReleaseInDoubtWhoseAnswerCannotBeReadHasAnError(t *testing.T) {
	onRoad(t, &road{}, func(t *testing.T, s *Server) { // which answers with a text
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if a, err := s.Do(ctx, &k, &protocol.Command{Verb: protocol.Release, ID: "id", Proof: 1}); err == nil {
			t.Errorf("it is read as %+v", a)
		}
	})
}
