package redisserver

import (
	"testing"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Rule 12: a downgrade only keeps what the client has, so it needs no memory.
func TestAFullServerCarriesOutADowngrade(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		owner, behind, last := s.writer("A"), s.reader("B"), s.writer("C")
		next := s.reader("A")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(behind), 0)
		s.waits(s.acquire(last), 1)
		used := s.look().token() + 3_600_000_000
		s.fill()
		defer s.room()
		if token := s.gets(s.downgrade(owner, next, used)); token != used+1 {
			t.Errorf("token %d after %d", token, used)
		}
		for range 2 { // late copies
			s.gets(s.downgrade(owner, next, used))
			s.owned(next, behind)
			s.queued(last)
		}
		for _, id := range []string{next, behind} {
			if !s.renew(id) {
				t.Errorf("%s is not renewed", id)
			}
			s.is(s.release(id, 0), protocol.Done)
		}
		s.owned(last)
		s.is(s.downgrade(owner, next, 0), protocol.NotOurs)
		s.owned(last)
	})
}

// An ACL can forbid a single command, and so stop a script halfway. Whichever command it forbids,
// one of the two ids still owns the lock, no other writer gets in, and the same downgrade succeeds
// once the command is allowed again.
func TestADowngradeThatAnACLStopsHalfWayLeavesTheLockOwned(t *testing.T) {
	s, acl := limitedScene(t)
	for _, forbidden := range []string{"get", "set", "pexpire", "pexpireat", "zadd", "zremrangebyscore", "zrevrange", "zcard", "zrange", "time"} {
		owner, next, other := s.writer("A"), s.reader("A"), s.writer("B")
		s.gets(s.acquire(owner))
		acl("-" + forbidden)
		_, err := s.do(protocol.Command{Verb: protocol.Downgrade, ID: owner, Next: next})
		acl("+" + forbidden)
		if err == nil {
			t.Errorf("-%s: it is not needed, and the test proves nothing", forbidden)
		}
		if a := s.try(other); a.Outcome != protocol.Refused {
			t.Errorf("-%s: a writer got in: %+v", forbidden, a)
			s.clear()
			continue
		}
		s.gets(s.downgrade(owner, next, 0))
		s.owned(next)
		s.is(s.release(next, 0), protocol.Done)
		s.owned()
	}
}

// A late copy finds that old no longer owns the lock. While next does, its grant is confirmed and
// no writer gets in; afterwards the copy changes nothing.
func TestADowngradeLetsReadersInAndItsLateCopyGivesNothingAway(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, r, w := s.writer("A"), s.reader("A"), s.reader("B"), s.writer("C")
		token := s.gets(s.acquire(old))
		s.acquire(r)
		s.acquire(w)
		down := func() protocol.Answer {
			return s.must(s.do(protocol.Command{Verb: protocol.Downgrade, ID: old, Next: next}))
		}
		if lower := s.gets(down()); lower <= token {
			t.Errorf("token %d after %d", lower, token)
		}
		s.owned(next, r)
		s.queued(w)
		s.gets(down())
		s.owned(next, r)
		s.release(r, 0)
		s.release(next, 0)
		s.owned(w)
		s.is(down(), protocol.NotOurs)
		s.owned(w)
		s.queued()
	})
}

func TestADowngradeLeavesALaterFormatsMetaAlone(t *testing.T) {
	const newer = "leased2:w:1:c:else"
	onScripts(t, func(t *testing.T, s *scene) {
		owner, next := s.writer("A"), s.reader("A")
		last := s.gets(s.acquire(owner)) + 3_600_000_000
		s.raw("SET", s.keys.Meta(), newer, "PX", 60_000)
		if token := s.gets(s.downgrade(owner, next, last)); token <= last {
			t.Errorf("token %d after %d", token, last)
		}
		s.owned(next)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}
		s.gets(s.acquire(next))
		s.is(s.release(next, 0), protocol.Done)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}
		s.clear()
	})
}
