package redisserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Clients wait behind what a later format wrote, and poll. They neither parse nor overwrite
// it; only its place in the queue ends with its waiting lease (docs/design.md, section 3).
func TestALaterFormatIsWaitedBehindAndNeverOverwritten(t *testing.T) {
	const newer = "leased2:w:1:c:else"
	asks := func(t *testing.T, s *scene, what string, noNotify bool) {
		t.Helper()
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			if a := s.try(s.id("A", m, long)); a.Outcome != protocol.Refused || a.NoNotify != noNotify || a.Blocker != newer {
				t.Errorf("%s: %v: try says %+v", what, m, a)
			}
			id := s.id("A", m, long)
			if a := s.acquire(id); a.Outcome != protocol.Enqueued || a.NoNotify != noNotify || a.Blocker != newer {
				t.Errorf("%s: %v: acquire says %+v", what, m, a)
			}
			s.cancel(id, 0)
		}
	}
	onScripts(t, func(t *testing.T, s *scene) {
		s.raw("SET", s.keys.Lock, newer, "PX", 60_000)
		asks(t, s, "value", true)
		if v := s.look().value; v != newer {
			t.Errorf("value %q", v)
		}

		s.clear()
		s.raw("ZADD", s.keys.Queue(), 1, newer)
		s.raw("ZADD", s.keys.Waiters(), s.now()+60_000, newer)
		asks(t, s, "queue head", true)
		s.queued(newer)
		s.raw("ZADD", s.keys.Waiters(), s.now()-1, newer)
		id := s.writer("A")
		s.gets(s.acquire(id))
		s.queued()

		s.clear()
		s.raw("SET", s.keys.Meta(), newer, "PX", 60_000)
		asks(t, s, "meta", true)
		owner := s.writer("A") // it owned before the later version came
		s.raw("SET", s.keys.Lock, owner, "PX", 60_000)
		s.acquire(owner)
		s.release(owner, 1<<50)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}

		s.clear()
		s.raw("SET", s.keys.Lock, protocol.MarkerValue, "PX", 60_000)
		s.raw("ZADD", s.keys.Readers(), s.now()+60_000, newer)
		w := s.writer("A")
		if a := s.acquire(w); a.Outcome != protocol.Enqueued || !a.NoNotify || a.Blocker != newer {
			t.Errorf("reader: %+v", a)
		}
		s.cancel(w, 0)
		s.gets(s.acquire(s.reader("A")))
		if st := s.look(); st.readers[newer] <= st.clock {
			t.Errorf("readers %v", st.readers)
		}
		s.clear()
	})
}

func TestGarbageIsDroppedOrForeign(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, garbage := range []string{"", "x", "leased1:", "leased0:w", "leased1:w:0:c:a:b", "leased1:x:1:c:a:b", "leased1:w:9999999999999:c:a:b"} {
			id := s.writer("A")
			s.raw("ZADD", s.keys.Queue(), 1, garbage)
			s.raw("ZADD", s.keys.Waiters(), s.now()+60_000, garbage)
			s.gets(s.acquire(id)) // dropped although its lease has not ended
			s.queued()
			s.clear()

			s.raw("SET", s.keys.Lock, garbage, "PX", 60_000)
			if a := s.acquire(id); a.Outcome != protocol.Enqueued || !a.NoNotify || a.Left <= 0 {
				t.Errorf("%q owns: %+v", garbage, a)
			}
			s.clear()

			s.raw("SET", s.keys.Lock, protocol.MarkerValue, "PX", 60_000)
			s.raw("ZADD", s.keys.Readers(), s.now()+60_000, garbage)
			s.gets(s.acquire(id)) // no client of this version can have written it
			s.owned(id)
			s.clear()
		}
	})
}

// Rule 8.
func TestAForeignOwnerWithoutExpiryIsToldSoAndGivenNone(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.raw("SET", s.keys.Lock, "foreign")
		if a := s.waits(s.acquire(s.writer("A")), 0); a.Left != protocol.Endless || !a.NoNotify || a.Blocker != "foreign" {
			t.Errorf("%+v", a)
		}
		if ends := s.look().ends[0]; ends != -1 {
			t.Errorf("it expires at %d", ends)
		}
		s.clear()
	})
}

// Another program's value in place of the lock is proof that the id owns nothing.
func TestAnOwnerWhoseKeyIsOfAnotherTypeOwnsNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			id, next := s.id("A", m, long), s.id("A", m, long)
			s.gets(s.acquire(id))
			s.raw("DEL", s.keys.Lock)
			s.raw("HSET", s.keys.Lock, "owner", "1")
			for _, c := range []protocol.Command{
				{Verb: protocol.Yield, ID: id, Next: next}, {Verb: protocol.Downgrade, ID: id, Next: next}, {Verb: protocol.Release, ID: id},
			} {
				if a := s.must(s.do(c)); a.Outcome != protocol.NotOurs {
					t.Errorf("mode %v, verb %v: %+v", m, c.Verb, a)
				}
			}
			s.clear()
		}
	})
}

func TestAnExpiryBeyondAllTimeIsReadAs100Years(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		const ms = int64(1) << 53 // does not fit in a time.Duration
		s.raw("SET", s.keys.Lock, "foreign", "PX", ms)
		if a := s.waits(s.acquire(s.writer("A")), 0); a.Left < 90*365*24*time.Hour {
			t.Errorf("the owner has %v left", a.Left)
		}
		snap, err := s.srv.Inspect(t.Context(), &s.keys)
		if err != nil || snap.Left < 90*365*24*time.Hour {
			t.Errorf("%v left, %v", snap.Left, err)
		}
		s.raw("SET", s.keys.Lock, protocol.MarkerValue, "PX", 60_000)
		s.raw("ZADD", s.keys.Readers(), "inf", s.reader("A"))
		s.raw("PEXPIRE", s.keys.Readers(), 60_000)
		if snap, err = s.srv.Inspect(t.Context(), &s.keys); err != nil {
			t.Fatal(err)
		}
		if len(snap.Readers) != 2 || snap.Readers[1] != "inf" {
			t.Errorf("readers %q", snap.Readers)
		}
		s.clear()
	})
}

// A release must not release the lock and still fail.
func TestAReadersReleaseBesideABrokenMetaEitherWorksOrChangesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.reader("A")
		s.gets(s.acquire(id))
		s.raw("DEL", s.keys.Meta())
		s.raw("HSET", s.keys.Meta(), "a", "b")
		s.raw("PEXPIRE", s.keys.Meta(), 60_000)
		before := s.photo()
		if _, err := s.do(protocol.Command{Verb: protocol.Release, ID: id}); err != nil && s.photo() != before {
			t.Errorf("%v, after it had made of\n%s\nthis\n%s", err, before, s.photo())
		}
		s.clear()
	})
}

// The flag i means that the owner may keep the lock idle.
func TestAnIdWithTheIdleFlagIsOneOfOurs(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.writer("A")
		for _, flag := range []string{":ui:", ":ci:"} {
			for _, m := range []string{"w", "r"} {
				s.clear()
				id := fmt.Sprintf("leased1:%s:30000%s%016d:%s", m, flag, 1, inboxOf("B"))
				s.gets(s.acquire(owner))
				s.raw("ZADD", s.keys.Queue(), 1, id)
				s.raw("ZADD", s.keys.Waiters(), s.now()+20_000, id)
				s.raw("PEXPIRE", s.keys.Queue(), 60_000)
				s.raw("PEXPIRE", s.keys.Waiters(), 60_000)
				a := s.release(owner, 0)
				if proved := strings.Contains(flag, "c"); proved == (a.Handed == 1) {
					t.Errorf("%s: %d were let in, and nobody listens", id, a.Handed)
				}
			}
		}
		s.clear()
	})
}

func TestOfALargeForeignValueOnlyTheBeginningIsSent(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		longest := s.id("A", protocol.Exclusive, long)
		longest += strings.Repeat("x", 256-len(longest)) // nothing longer is an id
		for value, sent := range map[string]string{
			longest:                        longest,
			longest + "x":                  longest + "x",
			strings.Repeat("large", 1<<20): strings.Repeat("large", 60),
		} {
			s.raw("SET", s.keys.Lock, value, "PX", 60_000)
			if a := s.waits(s.acquire(s.writer("B")), 0); a.Blocker != sent {
				t.Errorf("of %d bytes %d were sent", len(value), len(a.Blocker))
			}
			s.clear()
		}
	})
}
