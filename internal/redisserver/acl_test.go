package redisserver

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// neededCommands are the ACL rules that a user needs besides those for its keys and channels.
// On Redis 6.2, write "+pubsub" instead of "+pubsub|numsub". go-redis also sends CLIENT
// SETINFO, which may be denied.
var neededCommands = []any{
	"-@all", "+eval", "+evalsha", "+ping", "+hello", "+subscribe", "+unsubscribe", "+publish", "+pubsub|numsub",
	"+get", "+mget", "+set", "+del", "+exists", "+pexpire", "+pexpireat", "+pttl", "+time",
	"+zadd", "+zcard", "+zcount", "+zrange", "+zrangebyscore", "+zrank", "+zrem", "+zremrangebyscore", "+zrevrange", "+zscore",
}

func TestAUserWithTheNeededCommandsCanDoAll(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	acl := append([]any{"ACL", "SETUSER", "app", "on", ">pass", "resetkeys", "~p:*", "resetchannels", "&p:leased:inbox:*"}, neededCommands...)
	if err := admin.Do(context.Background(), acl...).Err(); err != nil {
		t.Fatal(err)
	}
	rdb := in.Client(func(o *redis.Options) { o.Username, o.Password = "app", "pass" })
	for _, name := range []string{"x", "{x}y"} {
		s := newScene(t, rdb, "p:", name)
		inbox := s.listen("B")
		a, b, c, r := s.writer("A"), counted(s.writer("B")), s.writer("C"), s.reader("D")
		s.gets(s.acquire(a))
		s.waits(s.acquire(b), 0)
		for range 3 {
			s.acquire(s.id("C", protocol.Shared, long))
		}
		s.is(s.release(a, 1), protocol.Done)
		s.owned(b)
		if m := inbox.received(); len(m) != 1 || m[0].Kind != protocol.MessageGranted {
			t.Errorf("received %+v", m)
		}
		if !s.renew(b) {
			t.Error("not renewed")
		}
		s.is(s.yield(b, c, 1), protocol.Enqueued)
		s.cancel(c, 0)
		s.gets(s.acquire(r))
		if !s.renew(r) {
			t.Error("reader not renewed")
		}
		s.evict()
		s.gets(s.acquire(a))
		s.gets(s.downgrade(a, s.reader("A"), 1))
		for range 110 { // more readers than one call notifies
			s.gets(s.acquire(s.id("D", protocol.Shared, long+time.Duration(s.made)*time.Second)))
		}
		if w := s.acquire(s.writer("B")); w.Told == 0 || w.Echo == protocol.EchoDenied {
			t.Errorf("%+v", w)
		}
		if _, err := s.srv.Inspect(context.Background(), &s.keys); err != nil {
			t.Error(err)
		}
		s.evict()
	}
	admin.FlushAll(context.Background())
}

// A denied PUBLISH returns an error instead of a count of receivers, so the waiter is made owner
// and learns of it at its re-check.
func TestADeniedPublishIsNoProofThatTheWaiterIsGone(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	if err := admin.Do(context.Background(), "ACL", "SETUSER", "nopublish", "on", ">pass", "~*", "resetchannels", "+@all").Err(); err != nil {
		t.Fatal(err)
	}
	s := newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "nopublish", "pass" }), "", "x")
	newScene(t, admin, "", "x").listen("B")
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
		s.gets(s.acquire(owner))
		c := s.acquireOf(next)
		c.Echo = "nonce"
		if a := s.must(s.do(c)); a.Echo != protocol.EchoDenied {
			t.Errorf("%v: an echo that is denied says %d", m, a.Echo)
		}
		s.waits(s.acquire(last), 1)
		brief := s.briefly(last, 20_000)
		brief.Echo = "nonce"
		if a := s.must(s.do(brief)); !a.Brief || a.Echo != protocol.EchoDenied {
			t.Errorf("%v: a brief re-check whose echo is denied says %+v", m, a)
		}
		if a := s.acquire(next); a.Echo != protocol.EchoDenied { // it would have published wanted
			t.Errorf("%v: a denied wanted says %d", m, a.Echo)
		}
		if a := s.release(owner, 0); a.Handed != 1 {
			t.Errorf("%v: %d were made owner", m, a.Handed)
		}
		s.owned(next)
		s.queued(last)
		s.gets(s.acquire(next))
		if owners := s.evict(); !slices.Equal(owners, []string{next}) {
			t.Errorf("%v: evicted %q", m, owners)
		}
		s.owned(last)
		s.clear()
	}
	owner, behind, mine := s.writer("A"), counted(s.reader("B")), s.reader("A")
	s.gets(s.acquire(owner))
	s.waits(s.acquire(behind), 0)
	s.gets(s.downgrade(owner, mine, 0))
	s.owned(mine, behind)
	s.clear()
}

// An error from PUBSUB NUMSUB does not prove that a waiter is gone, either.
func TestWhereNobodyMayAskWhoListensAWaiterIsNotTakenForGone(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	if err := admin.Do(context.Background(), "ACL", "SETUSER", "noask", "on", ">pass", "~*", "&*", "+@all", "-pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	s := newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "noask", "pass" }), "", "x")
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(next), 0)
		s.waits(s.acquire(last), 1)
		if a := s.release(owner, 0); a.Handed != 1 {
			t.Errorf("%v: %d were made owner", m, a.Handed)
		}
		s.owned(next)
		s.queued(last)
		s.clear()
	}
}

// limitedScene returns a scene of a user who may do everything until acl is called with other rules.
func limitedScene(t *testing.T) (s *scene, acl func(rules ...any)) {
	t.Helper()
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	acl = func(rules ...any) {
		t.Helper()
		if err := admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	acl("on", ">pass", "~*", "&*", "+@all")
	return newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "app", "pass" }), "", "x"), acl
}

// An ACL can forbid a single command, and so stop a script halfway. Whichever command it forbids, a reader
// that gives the lock back still owns it then, or is gone with all that belongs to it: no marker stays
// that nobody owns, which would keep foreign clients out for a TTL.
func TestAReadersGiveBackThatAnACLStopsHalfWayLeavesNoMarkerBehind(t *testing.T) {
	s, acl := limitedScene(t)
	stopped := map[string]int{}
	for what, giveBack := range map[string]func(id string) error{
		"release": func(id string) error { _, err := s.do(protocol.Command{Verb: protocol.Release, ID: id}); return err },
		"cancel":  func(id string) error { return s.tryCancel(id, 0, 0) },
		"yield": func(id string) error {
			_, err := s.do(protocol.Command{Verb: protocol.Yield, ID: id, Next: s.writer("A")})
			return err
		},
	} {
		for _, forbidden := range []string{
			"get", "set", "del", "exists", "time", "pexpire", "pexpireat", "pttl",
			"zadd", "zcard", "zrange", "zrank", "zrem", "zremrangebyscore", "zrevrange", "zscore",
		} {
			for _, others := range []int{0, 1} {
				owner, other := s.reader("A"), s.reader("B")
				s.gets(s.acquire(owner))
				if others > 0 {
					s.gets(s.acquire(other))
				}
				acl("-" + forbidden)
				err := giveBack(owner)
				acl("+" + forbidden)
				st := s.look()
				if len(st.readers) == 0 && st.value == protocol.MarkerValue {
					t.Errorf("%s, -%s, %d others: a marker without a reader", what, forbidden, others)
				}
				if err != nil {
					stopped[what]++
				}
				if _, owns := st.readers[owner]; owns && err == nil || others > 0 && st.readers[other] == 0 {
					t.Errorf("%s, -%s, %d others: %v, and the readers are %v", what, forbidden, others, err, st.readers)
				}
				s.clear()
			}
		}
		if stopped[what] < 10 {
			t.Errorf("%s was stopped %d times", what, stopped[what])
		}
	}
}
