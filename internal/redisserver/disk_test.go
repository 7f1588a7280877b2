package redisserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A snapshot fails here as on a full disk. Unlike a full memory, that stops renewals and releases, too.
func TestAServerThatCannotSaveRefusesEveryCommandOfALock(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		owner, other := s.writer("A"), s.writer("B")
		s.gets(s.acquire(owner))
		dir := s.rdb.ConfigGet(t.Context(), "dir").Val()["dir"]
		if err := os.MkdirAll(filepath.Join(dir, "dump.rdb", "in the way"), 0o700); err != nil {
			t.Fatal(err)
		}
		s.raw("CONFIG", "SET", "save", "3600 1000000") // Redis 6.2 keeps the first of two flags --save
		s.raw("BGSAVE")
		cannotSave := func() bool { return redis.HasErrorPrefix(s.rdb.Ping(t.Context()).Err(), "MISCONF") }
		for tries := 0; !cannotSave(); tries++ {
			if tries == 1000 {
				t.Fatal("the snapshot did not fail within 10 s")
			}
			time.Sleep(10 * time.Millisecond) // the pause of a poll
		}
		refused := func(what string, err error) {
			t.Helper()
			if fail := Classify(err); fail == nil || fail.Kind != protocol.RefusedNow || !strings.Contains(err.Error(), "MISCONF") {
				t.Errorf("%s: %v", what, err)
			}
		}
		_, err := s.do(s.acquireOf(other))
		refused("an acquire", err)
		_, err = s.do(protocol.Command{Verb: protocol.Release, ID: owner})
		refused("a release", err)
		batch := []protocol.Renewal{{Keys: &s.keys, Req: protocol.Request{ID: owner, TTL: long}}}
		s.srv.Renew(t.Context(), batch)
		refused("a renewal", batch[0].Err)

		s.raw("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
		if !s.renew(owner) {
			t.Error("not renewed, though a snapshot that fails stops no writes anymore")
		}
		s.is(s.release(owner, 0), protocol.Done)
	})
}
