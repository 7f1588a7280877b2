package leased

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// downgrade.lua on servers that refuse: full ones, and those whose ACL forbids.

func (s *scene) downgrade(old, next string, last uint64) answer {
	s.t.Helper()
	return s.must(s.do(command{verb: downgrade, id: old, next: next, last: last}))
}

// Rule 12, for it keeps what one has.
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
			s.is(s.release(id, 0), done)
		}
		s.owned(last)
		s.is(s.downgrade(owner, next, 0), notOurs)
		s.owned(last)
	})
}

// An ACL can forbid a single command, and so stop a script half-way. Whatever it
// forbids, one of the two ids goes on owning: no writer comes in between, and
// the same command comes through when it is allowed again.
func TestADowngradeThatAnACLStopsHalfWayLeavesTheLockOwned(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	acl := func(rules ...any) {
		if err := admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	acl("on", ">pass", "~*", "&*", "+@all")
	s := newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "app", "pass" }), "", "x")
	for _, forbidden := range []string{"get", "set", "pexpire", "pexpireat", "zadd", "zremrangebyscore", "zrevrange", "zcard", "zrange", "time"} {
		owner, next, other := s.writer("A"), s.reader("A"), s.writer("B")
		s.gets(s.acquire(owner))
		acl("-" + forbidden)
		_, err := s.do(command{verb: downgrade, id: owner, next: next})
		acl("+" + forbidden)
		if err == nil {
			t.Errorf("-%s: it is not needed, and the test proves nothing", forbidden)
		}
		if a := s.try(other); a.outcome != refused {
			t.Errorf("-%s: a writer got in: %+v", forbidden, a)
			s.clear()
			continue
		}
		s.gets(s.downgrade(owner, next, 0))
		s.owned(next)
		s.is(s.release(next, 0), done)
		s.owned()
	}
}
