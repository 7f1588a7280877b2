package leased

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// scatterings is how many random states each property is tried on.
func scatterings() int64 {
	if testing.Short() {
		return 150
	}
	return 800
}

// Section 4: "can run twice". All but evict, which names nobody: its copy evicts
// who came next. What stands behind a writer that was just let in is looked at by
// the next call.
func TestEachScriptRunTwiceHasTheEffectOfOnce(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for seed := range scatterings() {
			x := scatter(seed, s.now())
			st := x.step(rand.New(rand.NewSource(seed)))
			s.put(x)
			before := s.look()
			if before.value == "" && len(before.readers) > 0 {
				// The marker was deleted by hand. The first run may set it up again, and
				// only then does the second see readers whose lease is to be cut.
				continue
			}
			one := s.take(st)
			mid := s.look().settled()
			two := s.take(step{what: st.what, id: st.id, next: st.next, used: min(st.used, 1)})
			after := s.look().settled()
			if mid.shape(&ranks{}) != after.shape(&ranks{}) || mid.token() != after.token() {
				t.Fatalf("seed %d: %+v\nstate\n%s\nonce (%+v)\n%s\ntwice (%+v)\n%s", seed, st, before.shape(&ranks{}), one, mid.shape(&ranks{}), two, after.shape(&ranks{}))
			}
			if d := mid.drift(after, after.clock-before.clock+5); d != "" {
				t.Fatalf("seed %d: %+v: %s\nstate\n%s\nonce (%+v)\n%s", seed, st, d, before.shape(&ranks{}), one, mid.shape(&ranks{}))
			}
			// A reader that asks again may be told of a later reader's token.
			asked := st.id
			if st.what == "yield" || st.what == "downgrade" {
				asked = st.next
			}
			token := one.token == two.token || strings.HasPrefix(asked, "leased1:r") && one.token < two.token
			token = token || newerFormat(before.meta) // a later format keeps it: an owner's is the time then
			same := one.outcome == two.outcome && token && one.blocker == two.blocker && one.place >= two.place
			if gone := st.what == "release" && one.outcome == done && two.outcome == notOurs; !same && !gone {
				t.Fatalf("seed %d: %+v\nstate\n%s\nanswers %+v, then %+v", seed, st, before.shape(&ranks{}), one, two)
			}
		}
	})
}

// A shortcut is what the long way does, in fewer calls: the same answers, the
// same messages, the same keys.
func TestTheShortcutsDoWhatTheLongWayDoes(t *testing.T) {
	quick := map[string]script{"acquire": acquireScript, "release": releaseScript}
	slow := map[string]script{"acquire": loadScript("common", "acquire"), "release": loadScript("common", "release")}
	onScripts(t, func(t *testing.T, s *scene) {
		inboxes := []*listener{s.listen("A"), s.listen("B")} // C is gone
		shortcuts := map[string]int{}
		for seed := range 3 * scatterings() {
			began := s.now()
			x := scatter(seed, began)
			rng := rand.New(rand.NewSource(seed))
			what := []string{"acquire", "release"}[rng.Intn(2)]
			id := x.ids[rng.Intn(len(x.ids))]
			switch rng.Intn(4) { // the usual cases come up too seldom by themselves
			case 0:
				x.only(map[string]int{"acquire": 4, "release": 0}[what], 4)
				id = x.ids[0]
			case 1:
				x.contested(rng, began)
				id = x.ids[0]
			}
			used := []uint64{0, 0, 1, 7_200_000_000}[rng.Intn(4)]
			var got [2]string
			var errs [2]error
			var after [2]*state
			for i, sc := range []script{quick[what], slow[what]} {
				s.put(x)
				var names ranks
				last := s.look().token()
				names.name(last)
				names.name(last + used) // what comes after must be above it
				r, short := s.runScript(what, &sc, id, map[bool]uint64{true: last + used}[used > 0])
				if short {
					shortcuts[fmt.Sprint(what, " handed ", r.handed)]++
				}
				after[i] = s.look()
				got[i] = r.meaning(&names)
				for _, l := range inboxes {
					for _, m := range l.heard() {
						got[i] += fmt.Sprint("\ntold ", m.kind, " ", m.id, " ", names.name(m.token), " ", m.token >= m.clock, " ", m.more, " ", m.link)
					}
				}
				got[i] += "\n" + after[i].shape(&names)
				errs[i] = r.err
			}
			if got[0] != got[1] {
				t.Fatalf("seed %d: %s %s\nquick %s\nslow  %s\nerrors %v and %v", seed, what, id, got[0], got[1], errs[0], errs[1])
			}
			if d := after[0].drift(after[1], after[1].clock-began+fuzz); d != "" {
				t.Fatalf("seed %d: %s %s: %s", seed, what, id, d)
			}
		}
		for _, usual := range []string{"acquire handed 0", "release handed 0", "release handed 1"} {
			if shortcuts[usual] < 5 {
				t.Errorf("the shortcuts were hardly used: %v", shortcuts)
			}
		}
	})
}

// runScript runs a script of acquire's or release's arguments and says whether
// it took a shortcut, which answers with a number alone.
func (s *scene) runScript(what string, sc *script, id string, last uint64) (r result, short bool) {
	s.t.Helper()
	all := s.keys.all()
	args := []any{s.srv.inboxes, id, strconv.FormatUint(last, 10), "span"}
	if what == "acquire" {
		ttl := ttlOf(s.t, id)
		args = []any{s.srv.inboxes, id, "1", "", milliseconds(ttl), milliseconds(tokenLife(ttl))}
	}
	cmd, err := s.srv.run(context.Background(), sc, all[:], args...)
	if err != nil {
		return result{failed: true, err: err}, false
	}
	switch reply := cmd.Val().(type) {
	case int64:
		r.answer = answer{outcome: done, handed: int(reply)}
		if what == "acquire" {
			r.answer = answer{outcome: granted, token: uint64(reply), clock: uint64(reply)}
		}
		return r, true
	case []any:
		r.answer, err = parseAnswer(reply)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return r, false
}

// photo is every key of the lock as it is, of whatever type, without expiries.
func (s *scene) photo() string {
	s.t.Helper()
	var b strings.Builder
	ctx := context.Background()
	for _, k := range s.keys.all() {
		key := k.(string)
		kind := s.rdb.Type(ctx, key).Val()
		var content any
		switch kind {
		case "string":
			content = s.rdb.Get(ctx, key).Val()
		case "list":
			content = s.rdb.LRange(ctx, key, 0, -1).Val()
		case "zset":
			content = s.rdb.ZRangeWithScores(ctx, key, 0, -1).Val()
		case "hash":
			content = s.rdb.HGetAll(ctx, key).Val()
		}
		fmt.Fprintln(&b, key, kind, content, s.rdb.PTTL(ctx, key).Val() > 0)
	}
	return b.String()
}

// A key of another type is met before anything was written. What never looks at
// that key may do its whole work beside it, and leaves it alone.
func TestAKeyOfAnotherTypeStopsAScriptBeforeItsFirstWrite(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		stopped := 0
		for seed := range scatterings() {
			rng := rand.New(rand.NewSource(seed))
			x := scatter(seed, s.now())
			st := x.step(rng)
			if rng.Intn(8) == 0 {
				st = step{what: "evict"}
			}
			st.used = 0
			s.put(x)
			broken := s.keys.all()[rng.Intn(5)]
			s.raw("DEL", broken)
			s.raw("HSET", broken, "a", "b")
			s.raw("PEXPIRE", broken, 60_000)
			before := s.photo()
			if r := s.take(st); r.failed || st.what == "renew" && r.outcome == notOurs && broken == s.keys.lock {
				stopped++
				if after := s.photo(); after != before {
					t.Errorf("seed %d: %+v with %v of another type: %v, after it had made of\n%s\nthis\n%s", seed, st, broken, r.err, before, after)
				}
			}
			if v, err := s.rdb.HGet(context.Background(), broken.(string), "a").Result(); v != "b" {
				t.Errorf("seed %d: %+v changed the key of another type: %v", seed, st, err)
			}
		}
		if stopped < int(scatterings()/4) {
			t.Errorf("only %d scripts met the key", stopped)
		}
		s.clear()
	})
}

// Section 3: what a later format wrote is waited behind, polling, and never
// parsed or overwritten; only its place in the queue ends with its lease.
func TestALaterFormatIsWaitedBehindAndNeverOverwritten(t *testing.T) {
	const newer = "leased2:w:1:c:else"
	asks := func(t *testing.T, s *scene, what string, mute bool) {
		t.Helper()
		for _, m := range []mode{exclusive, shared} {
			if a := s.try(s.id("A", m, long)); a.outcome != refused || a.mute != mute {
				t.Errorf("%s: %v: try says %+v", what, m, a)
			}
			id := s.id("A", m, long)
			if a := s.acquire(id); a.outcome != enqueued || a.mute != mute {
				t.Errorf("%s: %v: acquire says %+v", what, m, a)
			}
			s.cancel(id, 0)
		}
	}
	onScripts(t, func(t *testing.T, s *scene) {
		s.raw("SET", s.keys.lock, newer, "PX", 60_000)
		asks(t, s, "value", true)
		if v := s.look().value; v != newer {
			t.Errorf("value %q", v)
		}

		s.clear()
		s.raw("ZADD", s.keys.queue(), 1, newer)
		s.raw("ZADD", s.keys.waiters(), s.now()+60_000, newer)
		asks(t, s, "queue head", true)
		s.queued(newer)
		s.raw("ZADD", s.keys.waiters(), s.now()-1, newer)
		id := s.writer("A")
		s.gets(s.acquire(id))
		s.queued()

		s.clear()
		s.raw("SET", s.keys.meta(), newer, "PX", 60_000)
		asks(t, s, "meta", true)
		owner := s.writer("A") // from before the later version came
		s.raw("SET", s.keys.lock, owner, "PX", 60_000)
		s.acquire(owner)
		s.release(owner, 1<<50)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}

		s.clear()
		s.raw("SET", s.keys.lock, markerValue, "PX", 60_000)
		s.raw("ZADD", s.keys.readers(), s.now()+60_000, newer)
		w := s.writer("A")
		if a := s.acquire(w); a.outcome != enqueued || !a.mute || a.blocker != newer {
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
			s.raw("ZADD", s.keys.queue(), 1, garbage)
			s.raw("ZADD", s.keys.waiters(), s.now()+60_000, garbage)
			s.gets(s.acquire(id)) // dropped though its lease is live
			s.queued()
			s.clear()

			s.raw("SET", s.keys.lock, garbage, "PX", 60_000)
			if a := s.acquire(id); a.outcome != enqueued || !a.mute || a.left <= 0 {
				t.Errorf("%q owns: %+v", garbage, a)
			}
			s.clear()

			s.raw("SET", s.keys.lock, markerValue, "PX", 60_000)
			s.raw("ZADD", s.keys.readers(), s.now()+60_000, garbage)
			s.gets(s.acquire(id)) // nobody of ours could be meant
			s.owned(id)
			s.clear()
		}
	})
}

// Rule 8: nobody gives a foreign owner an expiry.
func TestAForeignOwnerWithoutExpiryIsToldSoAndGivenNone(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.raw("SET", s.keys.lock, "foreign")
		if a := s.waits(s.acquire(s.writer("A")), 0); a.left != endless || !a.mute || a.blocker != "foreign" {
			t.Errorf("%+v", a)
		}
		if ends := s.look().ends[0]; ends != -1 {
			t.Errorf("it expires at %d", ends)
		}
		s.clear()
	})
}

func TestInspectWritesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for seed := range scatterings() / 4 {
			s.put(scatter(seed, s.now()))
			before := s.photo()
			if _, err := s.srv.inspect(context.Background(), &s.keys); err != nil && !errors.Is(err, redis.Nil) {
				t.Fatal(err)
			}
			if after := s.photo(); after != before {
				t.Fatalf("seed %d: made of\n%s\nthis\n%s", seed, before, after)
			}
		}
	})
}
