package leased

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// What one call does is bounded, so that the server serves others too; what is left
// is said in the answer, for somebody to go on at once.

// ample is a TTL that does not end while hundreds of requests are made, on a machine
// under load.
const ample = 10 * time.Minute

// deadHeads puts n requests before all others, whose waiting leases are over.
func (s *scene) deadHeads(n int) {
	s.t.Helper()
	for i := range n {
		s.raw("ZADD", s.keys.queue(), -n+i, s.writer("D"))
	}
	s.raw("PEXPIRE", s.keys.queue(), 600_000)
}

func TestACallDropsAtMost500DeadEntriesAndSaysThatMoreMayBeThere(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id, next := s.id("A", exclusive, ample), s.id("B", exclusive, ample)
		s.deadHeads(1_500)
		for i := range 2 {
			if a := s.try(id); a.outcome != refused || !a.unfinished {
				t.Fatalf("try %d: %+v", i, a)
			}
			if n := len(s.look().queue); n < 1_500-600*(i+1) || n > 1_500-500*(i+1) {
				t.Fatalf("try %d: %d entries are left", i, n)
			}
		}
		for range 3 {
			if a := s.try(id); a.outcome == granted {
				break
			}
		}
		s.owned(id)
		s.queued()

		s.deadHeads(600)
		if a := s.acquire(next); a.outcome != enqueued || !a.unfinished {
			t.Errorf("waits: %+v", a)
		}
		if a := s.waits(s.acquire(next), 0); a.unfinished {
			t.Errorf("nothing dead is left: %+v", a)
		}
		s.deadHeads(600)
		if a := s.release(id, 0); a.outcome != done || !a.unfinished || a.handed != 0 {
			t.Errorf("release: %+v", a)
		}
		s.cancel(id, 0)
		s.owned(next)
		s.queued()
		s.clear()
	})
}

func TestACallLetsAtMost100InAndACancelGoesOnUntilAllAre(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, down := s.id("A", exclusive, ample), s.id("A", shared, ample)
		var readers []string
		for range 250 {
			readers = append(readers, s.id("B", shared, ample))
		}
		last := s.id("C", exclusive, ample)
		begin := func() {
			s.clear()
			s.gets(s.acquire(owner))
			for _, id := range append(slices.Clone(readers), last) {
				s.acquire(id)
			}
		}
		all := func(more ...string) {
			t.Helper()
			s.owned(append(slices.Clone(readers), more...)...)
			s.queued(last)
		}
		inbox := s.listen("B")

		begin()
		if a := s.release(owner, 0); a.outcome != done || a.handed != 100 || !a.unfinished {
			t.Errorf("release: %+v", a)
		}
		s.cancel(owner, 0)
		all()
		told := map[string]int{}
		for _, m := range inbox.heard() {
			if m.kind == "granted" {
				told[m.id]++
			}
		}
		if len(told) != len(readers) {
			t.Errorf("%d of %d readers were told", len(told), len(readers))
		}

		begin()
		if a := s.downgrade(owner, down, 0); a.outcome != granted || a.handed != 100 || !a.unfinished {
			t.Errorf("downgrade: %+v", a)
		}
		s.cancel(owner, 0)
		all(down)

		begin()
		next := s.id("A", exclusive, ample)
		if a := s.yield(owner, next, 0); a.outcome != enqueued || a.handed != 100 || !a.unfinished {
			t.Errorf("yield: %+v", a)
		}
		for range 2 {
			s.acquire(next)
		}
		s.owned(readers...)
		s.queued(last, next)

		begin()
		s.cancel(owner, 0)
		all()

		begin()
		s.evict()
		all()

		begin()
		s.raw("DEL", s.keys.lock)
		if a := s.acquire(readers[0]); a.outcome != granted || a.handed != 99 || !a.unfinished {
			t.Errorf("acquire: %+v", a)
		}
		s.cancel(owner, 0)
		all()
		s.clear()
	})
}

func TestNobodyIsUnfinishedWhenTheLastOf100IsIn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.id("A", exclusive, ample)
		s.gets(s.acquire(owner))
		for range 100 {
			s.acquire(s.id("B", shared, ample))
		}
		if a := s.release(owner, 0); a.handed != 100 || a.unfinished {
			t.Errorf("%+v", a)
		}
		s.clear()
	})
}

// Readers who were told leave at once, and others renew, between the calls that tell
// them; nobody may be passed over.
func TestAllReadersAreToldOfAWriterThoughACallTellsAbout100(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var readers []string
		for i := range 350 {
			ttl := ample + time.Duration(i%200)*time.Second
			readers = append(readers, s.id("A", shared, ttl))
			s.gets(s.acquire(readers[i]))
		}
		inbox, w := s.listen("A"), s.acquireOf(s.id("B", exclusive, ample))
		told, calls := map[string]bool{}, 0
		for ; calls == 0 || w.told > 0; calls++ {
			if calls > 10 {
				t.Fatal("it goes on for ever")
			}
			a := s.waits(s.must(s.do(w)), 0)
			w.told = a.told
			heard := inbox.heard()
			if len(heard) > 150 {
				t.Errorf("one call tells %d readers", len(heard))
			}
			for i, m := range heard {
				told[m.id] = true
				if i%3 == 0 {
					s.release(m.id, 0)
				}
			}
			s.renew(readers[calls])
		}
		if calls < 3 {
			t.Errorf("%d calls", calls)
		}
		for _, id := range readers {
			if !told[id] {
				t.Errorf("%s was not told", id)
			}
		}
		s.evict()
	})
}

// All who enter by one hand-off end at the same time.
func TestReadersWhoseLeasesEndTogetherAreAllTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		ends := s.now() + 500_000
		for i := range 150 {
			id := s.id("A", shared, ample)
			if i == 0 {
				s.gets(s.acquire(id))
			}
			s.raw("ZADD", s.keys.readers(), ends, id)
		}
		later := s.id("A", shared, ample)
		s.gets(s.acquire(later))
		inbox, w := s.listen("A"), s.acquireOf(s.id("B", exclusive, ample))
		a := s.waits(s.must(s.do(w)), 0)
		if n := len(inbox.heard()); n != 150 || a.told == 0 {
			t.Errorf("%d were told, up to %d", n, a.told)
		}
		w.told = a.told
		a = s.must(s.do(w))
		if all := inbox.heard(); len(all) != 1 || all[0].id != later || a.told != 0 {
			t.Errorf("then %d were told, up to %d", len(all), a.told)
		}
		s.evict()
	})
}

func TestAReadersScoreThatIsNoTimeEndsTheTelling(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for range 120 {
			s.gets(s.acquire(s.id("A", shared, ample)))
		}
		for i := range 120 {
			s.raw("ZADD", s.keys.readers(), "+inf", fmt.Sprintf("leased2:%d", i))
		}
		w := s.acquireOf(s.id("B", exclusive, ample))
		for calls := 0; calls == 0 || w.told > 0; calls++ {
			if calls > 3 {
				t.Fatal("it goes on for ever")
			}
			w.told = s.waits(s.must(s.do(w)), 0).told
		}
		s.clear()
	})
}

func TestAYieldSaysUpToWhereReadersWereTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var readers []string
		for i := range 150 {
			readers = append(readers, s.id("A", shared, ample+time.Duration(i)*time.Second))
			s.gets(s.acquire(readers[i]))
		}
		inbox, w := s.listen("A"), s.id("B", exclusive, ample)
		ask := s.acquireOf(w)
		if ask.told = s.waits(s.yield(readers[0], w, 0), 0).told; ask.told == 0 {
			t.Error("all are told, it says")
		}
		s.must(s.do(ask))
		if n := len(inbox.heard()); n != 149 {
			t.Errorf("%d of 149 were told", n)
		}
		s.evict()
	})
}

func TestAllOfManyEvictedReadersAreTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		var readers []string
		for range 250 {
			readers = append(readers, s.id("A", shared, ample))
			s.gets(s.acquire(readers[len(readers)-1]))
		}
		s.raw("ZADD", s.keys.readers(), s.now()+500_000, "leased2:another") // of a later version, which is not told
		token := s.look().token()
		if owners := s.evict(); len(owners) != 251 {
			t.Errorf("%d were evicted", len(owners))
		}
		told := map[string]bool{}
		for _, m := range inbox.heard() {
			if m.kind != "revoked" || m.token != token || m.key != s.keys.lock {
				t.Fatalf("%+v, want token %d", m, token)
			}
			told[m.id] = true
		}
		if len(told) != 250 {
			t.Errorf("%d of 250 were told", len(told))
		}
		s.owned()
	})
}

func TestAnExpiryBeyondAllTimeIsReadAs100Years(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		const ms = 1 << 53 // times a million it does not fit
		s.raw("SET", s.keys.lock, "foreign", "PX", ms)
		if a := s.waits(s.acquire(s.writer("A")), 0); a.left < 90*365*24*time.Hour {
			t.Errorf("the owner has %v left", a.left)
		}
		snap, err := s.srv.inspect(t.Context(), &s.keys)
		if err != nil || snap.left < 90*365*24*time.Hour {
			t.Errorf("%v left, %v", snap.left, err)
		}
		s.raw("SET", s.keys.lock, markerValue, "PX", 60_000)
		s.raw("ZADD", s.keys.readers(), "inf", s.reader("A"))
		s.raw("PEXPIRE", s.keys.readers(), 60_000)
		if snap, err = s.srv.inspect(t.Context(), &s.keys); err != nil {
			t.Fatal(err)
		}
		if owners := snap.info("x").Owners; len(owners) != 1 || owners[0].TTL < 90*365*24*time.Hour {
			t.Errorf("owners %+v", owners)
		}
		s.clear()
	})
}

func TestADowngradeLeavesALaterFormatsMetaAlone(t *testing.T) {
	const newer = "leased2:w:1:c:else"
	onScripts(t, func(t *testing.T, s *scene) {
		owner, next := s.writer("A"), s.reader("A")
		last := s.gets(s.acquire(owner)) + 3_600_000_000
		s.raw("SET", s.keys.meta(), newer, "PX", 60_000)
		if token := s.gets(s.downgrade(owner, next, last)); token <= last {
			t.Errorf("token %d after %d", token, last)
		}
		s.owned(next)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}
		s.gets(s.acquire(next))
		s.is(s.release(next, 0), done)
		if m := s.look().meta; m != newer {
			t.Errorf("meta %q", m)
		}
		s.clear()
	})
}

// "i", idle, is a flag that later ids have.
func TestAnIdWithTheIdleFlagIsOneOfOurs(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.writer("A")
		for _, flag := range []string{":ui:", ":ci:"} {
			for _, m := range []string{"w", "r"} {
				s.clear()
				id := fmt.Sprintf("leased1:%s:30000%s%016d:%s", m, flag, 1, inboxOf("B"))
				s.gets(s.acquire(owner))
				s.raw("ZADD", s.keys.queue(), 1, id)
				s.raw("ZADD", s.keys.waiters(), s.now()+20_000, id)
				s.raw("PEXPIRE", s.keys.queue(), 60_000)
				s.raw("PEXPIRE", s.keys.waiters(), 60_000)
				a := s.release(owner, 0)
				if proved := strings.Contains(flag, "c"); proved == (a.handed == 1) {
					t.Errorf("%s: %d were let in, and nobody listens", id, a.handed)
				}
			}
		}
		s.clear()
	})
}
