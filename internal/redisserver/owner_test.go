package redisserver

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Rule 1: no request releases, renews or extends what another id owns.
func TestAStrangersScriptsChangeNothingOfAnOwner(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			s.clear()
			owner, stranger, next := s.id("A", m, long), s.id("B", m, long), s.id("B", m, long)
			token := s.gets(s.acquire(owner))
			before := s.look()
			s.is(s.release(stranger, token+5), protocol.NotOurs)
			s.is(s.yield(stranger, next, token+5), protocol.NotOurs)
			s.cancel(stranger, token+5)
			if s.renew(stranger) {
				t.Errorf("%v: a stranger renewed", m)
			}
			after := s.look()
			if after.shape(&ranks{}) != before.shape(&ranks{}) || after.token() != token || after.drift(before, 5) != "" {
				t.Errorf("%v: changed\n%+v\nto\n%+v", m, before, after)
			}
		}
	})
}

func TestAForeignOwnerIsNeitherReleasedNorRenewedNorExtended(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.writer("A")
		s.raw("SET", s.keys.Lock, "foreign", "PX", 60_000)
		before := s.look()
		s.is(s.release(id, 0), protocol.NotOurs)
		s.is(s.yield(id, s.writer("A"), 0), protocol.NotOurs)
		s.cancel(id, 0)
		if s.renew(id) || s.renew(s.reader("A")) {
			t.Error("renewed")
		}
		if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) || after.drift(before, 5) != "" {
			t.Errorf("changed\n%+v\nto\n%+v", before, after)
		}
	})
}

// extends fails the test unless act restores the full TTL of an owner that has little of it left.
// act gets the owner's id and token.
func (s *scene) extends(t *testing.T, act func(id string, token uint64)) {
	t.Helper()
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		id := s.id("A", m, long)
		token := s.gets(s.acquire(id))
		s.raw("PEXPIRE", s.keys.Lock, 9000)
		if m == protocol.Shared {
			s.raw("ZADD", s.keys.Readers(), s.now()+9000, id)
		}
		before := s.now()
		act(id, token)
		st := s.look()
		if full := before + long.Milliseconds(); st.ends[0] < full-fuzz || m == protocol.Shared && st.readers[id] < full {
			t.Errorf("%v: %d ms left, reader's %v", m, st.left(st.ends[0]), st.readers)
		}
		s.release(id, 0)
	}
}

// The other half of rule 1: a renewal gives the id its own TTL again.
func TestRenewalExtendsToTheIdsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.extends(t, func(id string, _ uint64) {
			if !s.renew(id) {
				t.Fatalf("%s: not renewed", id)
			}
		})
	})
}

// The client counts its trust window from when it sent the repeated acquire, so the key has to live
// for a whole TTL from then.
func TestARepeatedAcquireExtendsToTheFullTTLUnderTheSameToken(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.extends(t, func(id string, token uint64) {
			if again := s.gets(s.acquire(id)); again != token {
				t.Errorf("%s: token %d, then %d", id, token, again)
			}
		})
	})
}

// A repeated or late renewal finds that its id no longer owns the lock.
func TestAnEndedRequestRenewsNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			id := s.id("A", m, long)
			s.gets(s.acquire(id))
			s.is(s.release(id, 0), protocol.Done)
			if s.renew(id) {
				t.Errorf("%v: renewed after its release", m)
			}
			s.owned()
		}
	})
}

// The new owner's TTL is the one in its own id, not the previous owner's.
func TestAHandedLockLivesAsLongAsTheNewOwnersIdSays(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			owner, next := s.writer("A"), s.id("B", m, 3*long)
			s.gets(s.acquire(owner))
			s.waits(s.acquire(next), 0)
			before := s.now()
			s.is(s.release(owner, 0), protocol.Done)
			s.owned(next)
			st := s.look()
			if want := before + (3 * long).Milliseconds(); st.ends[0] < want-fuzz || st.ends[0] > want+time.Minute.Milliseconds() {
				t.Errorf("%v: expires in %d ms", m, st.left(st.ends[0]))
			}
			s.release(next, 0)
		}
	})
}

func TestAcquireSaysWhetherItExtended(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, id := range []string{s.writer("A"), s.reader("A")} {
			if a := s.acquire(id); a.Outcome != protocol.Granted || a.Kept {
				t.Errorf("at first: %+v", a)
			}
			if a := s.acquire(id); a.Outcome != protocol.Granted || !a.Kept {
				t.Errorf("of the owner: %+v", a)
			}
			s.is(s.release(id, 0), protocol.Done)
		}
	})
}
