package leased

import (
	"context"
	"testing"
)

// answerOf cancels id and returns the answer.
func (s *scene) answerOf(id string, last uint64) cancelled {
	s.t.Helper()
	r := s.srv.cancel(context.Background(), []*ghost{{id: id, keys: &s.keys, last: last}})[0]
	if r.fail != nil {
		s.t.Fatal(r.fail.err)
	}
	return r
}

func TestCancelAnswersWhetherTheIDOwnedAndTheLastTokenBeforeTheNextOwners(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		for _, request := range []func(string) string{s.writer, s.reader} {
			first, waiter := request("A"), s.writer("B")
			token := s.gets(s.acquire(first))
			if r := s.answerOf(waiter, 0); r.owned || r.token != token {
				t.Errorf("a stranger's cancel: %+v, the token is %d", r, token)
			}
			s.waits(s.acquire(waiter), 0)
			if r := s.answerOf(first, token+5); !r.owned || r.token != token+5 {
				t.Errorf("the owner's cancel: %+v, the last token was %d", r, token+5)
			}
			// It was handed on.
			if r := s.answerOf(first, token+5); r.owned || r.token <= token+5 {
				t.Errorf("the next owner's token is not told of: %+v", r)
			}
			if r := s.answerOf(waiter, 0); !r.owned {
				t.Errorf("the next owner's cancel: %+v", r)
			}
		}
	})
}

func TestCancelAnswersNoTokenWhereItProvesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.writer("A")
		if r := s.answerOf(id, 7); r.owned || r.token != 0 {
			t.Errorf("of a lock that nobody had: %+v", r)
		}
		token := s.gets(s.acquire(id))
		s.raw("SET", s.keys.lock, "foreign")
		if r := s.answerOf(id, token); r.owned || r.token != 0 {
			t.Errorf("beside a foreign owner: %+v", r)
		}
		s.raw("DEL", s.keys.lock)
		if r := s.answerOf(id, token); r.owned || r.token != token {
			t.Errorf("of a lock that was deleted: %+v, the token was %d", r, token)
		}
		s.raw("SET", s.keys.meta(), "leased2:9:9", "PX", 60_000)
		if r := s.answerOf(id, token); r.owned || r.token != 0 {
			t.Errorf("of a lock whose token a later version keeps: %+v", r)
		}
	})
}

// A late copy of an acquire, say, whose request nobody repeats.
func TestThoseWhoWaitNoMoreAreForgottenWhileTheLockIsBusy(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.gets(s.acquire(s.writer("A")))
		first, gone, last := s.writer("B"), s.writer("C"), s.writer("D")
		s.waits(s.acquire(first), 0)
		s.waits(s.acquire(gone), 1)
		s.dies(gone)
		s.acquire(last)
		if s.raw("ZSCORE", s.keys.waiters(), gone) != nil {
			t.Error("still among those who wait")
		}
		for _, id := range []string{first, last} {
			if s.raw("ZSCORE", s.keys.waiters(), id) == nil {
				t.Errorf("%s is not among those who wait any more", id)
			}
		}
	})
}
