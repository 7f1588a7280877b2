package leased

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// What a user has to be allowed besides its keys and its channels. On Redis 6.2 name
// "+pubsub" instead of "+pubsub|numsub"; client setinfo is for go-redis.
var neededCommands = []any{
	"-@all", "+eval", "+evalsha", "+ping", "+hello", "+subscribe", "+unsubscribe", "+publish", "+pubsub|numsub",
	"+get", "+set", "+del", "+exists", "+pexpire", "+pexpireat", "+pttl", "+time",
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
			s.acquire(s.id("C", shared, long))
		}
		s.is(s.release(a, 1), done)
		s.owned(b)
		if m := inbox.heard(); len(m) != 1 || m[0].kind != "granted" {
			t.Errorf("heard %+v", m)
		}
		if !s.renew(b) {
			t.Error("not renewed")
		}
		s.is(s.yield(b, c, 1), enqueued)
		s.cancel(c, 0)
		s.gets(s.acquire(r))
		if !s.renew(r) {
			t.Error("reader not renewed")
		}
		s.evict()
		s.gets(s.acquire(a))
		s.gets(s.downgrade(a, s.reader("A"), 1))
		for range 110 { // so many that telling them goes on
			s.gets(s.acquire(s.id("D", shared, long+time.Duration(s.made)*time.Second)))
		}
		if w := s.acquire(s.writer("B")); w.told == 0 || w.echo == echoDenied {
			t.Errorf("%+v", w)
		}
		if _, err := s.srv.inspect(context.Background(), &s.keys); err != nil {
			t.Error(err)
		}
		s.evict()
	}
	admin.FlushAll(context.Background())
}
