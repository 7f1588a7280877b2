package leased

import (
	"testing"
	"time"
)

// Rule 1: nobody releases, renews or extends what another id owns.

func TestAStrangersScriptsChangeNothingOfAnOwner(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, stranger, next := s.writer("A"), s.writer("B"), s.writer("B")
		token := s.gets(s.acquire(owner))
		before := s.look()
		s.is(s.release(stranger, token+5), notOurs)
		s.is(s.yield(stranger, next, token+5), notOurs)
		s.cancel(stranger, token+5)
		if s.renew(stranger) {
			t.Error("a stranger renewed")
		}
		for _, id := range []string{stranger, next} {
			if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) || after.token() != token || after.drift(before, 5) != "" {
				t.Errorf("%s changed\n%+v\nto\n%+v", id, before, after)
			}
		}
	})
}

func TestAStrangersScriptsChangeNothingOfAReader(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, stranger, next := s.reader("A"), s.reader("B"), s.reader("B")
		token := s.gets(s.acquire(owner))
		before := s.look()
		s.is(s.release(stranger, token+5), notOurs)
		s.is(s.yield(stranger, next, token+5), notOurs)
		s.cancel(stranger, token+5)
		if s.renew(stranger) {
			t.Error("a stranger renewed")
		}
		after := s.look()
		if after.shape(&ranks{}) != before.shape(&ranks{}) || after.token() != token || after.drift(before, 5) != "" {
			t.Errorf("changed\n%+v\nto\n%+v", before, after)
		}
	})
}

func TestAForeignOwnerIsNeitherReleasedNorRenewedNorExtended(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.writer("A")
		s.raw("SET", s.keys.lock, "foreign", "PX", 60_000)
		before := s.look()
		s.is(s.release(id, 0), notOurs)
		s.is(s.yield(id, s.writer("A"), 0), notOurs)
		s.cancel(id, 0)
		if s.renew(id) || s.renew(s.reader("A")) {
			t.Error("renewed")
		}
		if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) || after.drift(before, 5) != "" {
			t.Errorf("changed\n%+v\nto\n%+v", before, after)
		}
	})
}

// Rule 1, of the half that is ours: renewal gives the id's own TTL again.
func TestRenewalExtendsToTheIdsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			id := s.id("A", m, long)
			s.gets(s.acquire(id))
			s.raw("PEXPIRE", s.keys.lock, 9000)
			if m == shared {
				s.raw("ZADD", s.keys.readers(), s.now()+9000, id)
			}
			before := s.now()
			if !s.renew(id) {
				t.Fatalf("%v: not renewed", m)
			}
			st := s.look()
			if full := before + long.Milliseconds(); st.ends[0] < full-fuzz || m == shared && st.readers[id] < full {
				t.Errorf("%v: %d ms left, reader's %v", m, st.left(st.ends[0]), st.readers)
			}
			s.release(id, 0)
		}
	})
}

// B4: trusted from its own sending, so the key has to live as long from then.
func TestARepeatedAcquireExtendsToTheFullTTLUnderTheSameToken(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			id := s.id("A", m, long)
			token := s.gets(s.acquire(id))
			s.raw("PEXPIRE", s.keys.lock, 9000)
			if m == shared {
				s.raw("ZADD", s.keys.readers(), s.now()+9000, id)
			}
			before := s.now()
			if again := s.gets(s.acquire(id)); again != token {
				t.Errorf("%v: token %d, then %d", m, token, again)
			}
			st := s.look()
			if full := before + long.Milliseconds(); st.ends[0] < full-fuzz || m == shared && st.readers[id] < full {
				t.Errorf("%v: %d ms left, reader's %v", m, st.left(st.ends[0]), st.readers)
			}
			s.release(id, 0)
		}
	})
}

// B2: keeping under the same id would make a copy give away what was kept.
func TestALateCopyOfYieldGivesNothingAway(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, other := s.writer("A"), s.writer("A"), s.writer("B")
		token := s.gets(s.acquire(old))
		kept := s.gets(s.yield(old, next, 0)) // nobody waits: granted at once
		if kept <= token {
			t.Errorf("token %d after %d", kept, token)
		}
		s.waits(s.acquire(other), 0)
		if late := s.gets(s.yield(old, next, 0)); late != kept {
			t.Errorf("the copy says token %d, want %d", late, kept)
		}
		s.owned(next)
		s.queued(other)

		s.release(next, 0)
		s.is(s.yield(old, next, 0), notOurs) // later still
		s.owned(other)
		s.queued()
	})
}

// B19: the client asked for new before the late yield arrived.
func TestYieldAndAcquireEnqueueOnce(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, other := s.writer("A"), s.writer("A"), s.writer("B")
		s.gets(s.acquire(old))
		s.waits(s.acquire(next), 0) // ahead of the yield it follows
		s.waits(s.acquire(next), 0)
		s.waits(s.acquire(other), 1)
		s.gets(s.yield(old, next, 0))
		s.owned(next)
		s.queued(other)
		s.waits(s.acquire(other), 0)
		s.queued(other)
	})
}

// As for a writer behind readers of its own process.
func TestAYieldToARequestThatWaitsAlreadyKeepsItsPlace(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, elsewhere := s.reader("A"), s.reader("B")
		place, behind, later := s.writer("A"), s.writer("C"), s.reader("D")
		s.gets(s.acquire(old))
		s.gets(s.acquire(elsewhere))
		s.waits(s.acquire(place), 0)
		s.waits(s.acquire(behind), 1)
		s.waits(s.acquire(later), 2)
		s.waits(s.yield(old, place, 0), 0)
		s.waits(s.yield(old, place, 0), 0) // a late copy
		s.queued(place, behind, later)
		s.release(elsewhere, 0)
		s.owned(place)
		s.queued(behind, later)
	})
}

func TestAYieldToAReservedPlaceSaysThatTheOldRequestDidNotOwn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, place, other := s.reader("A"), s.writer("A"), s.writer("B")
		s.gets(s.acquire(old))
		s.waits(s.acquire(place), 0)
		s.evict() // and the place is served
		if a := s.yield(old, place, 0); s.gets(a) == 0 || !a.gone {
			t.Errorf("answers %+v", a)
		}
		s.clear()
		s.gets(s.acquire(old))
		s.waits(s.acquire(other), 0)
		s.waits(s.acquire(place), 1)
		s.evict()
		if a := s.waits(s.yield(old, place, 0), 0); !a.gone {
			t.Errorf("answers %+v", a)
		}
		s.clear()
		s.gets(s.acquire(old))
		s.waits(s.acquire(place), 0)
		if a := s.yield(old, place, 0); s.gets(a) == 0 || a.gone {
			t.Errorf("answers %+v", a)
		}
	})
}

func TestYieldGoesBehindAllWhoWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, b, c := s.writer("A"), s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(old))
		s.acquire(b)
		s.acquire(c)
		a := s.waits(s.yield(old, next, 0), 1)
		if a.blocker != b {
			t.Errorf("blocked by %q, want %q", a.blocker, b)
		}
		s.owned(b)
		s.queued(c, next)
	})
}

// B2 of downgrade: the copy finds old gone, and no writer got in between.
func TestADowngradeLetsReadersInAndItsLateCopyGivesNothingAway(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		old, next, r, w := s.writer("A"), s.reader("A"), s.reader("B"), s.writer("C")
		token := s.gets(s.acquire(old))
		s.acquire(r)
		s.acquire(w)
		down := func() answer { return s.must(s.do(command{verb: downgrade, id: old, next: next})) }
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
		s.is(down(), notOurs)
		s.owned(w)
		s.queued()
	})
}

// P10: what is repeated or late finds the id gone.
func TestAnEndedRequestRenewsNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			id := s.id("A", m, long)
			s.gets(s.acquire(id))
			s.is(s.release(id, 0), done)
			if s.renew(id) {
				t.Errorf("%v: renewed after its release", m)
			}
			s.owned()
		}
	})
}

// A message about an owner that has just let go is answered with cancel (§9, 13). If
// that had the next owner told, who may have let go too by then, it would go round.
func TestACancelThatFindsNothingTellsNobodyAndOneOfAPlaceTellsTheOwnersThatOthersWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			gone, owner, place, other := s.writer("B"), s.id("A", m, long), s.writer("B"), s.writer("C")
			a := s.listen("A")
			s.gets(s.acquire(owner))
			s.acquire(place)
			s.acquire(other)
			a.heard()
			s.cancel(gone, 0)
			a.hears("")
			s.cancel(place, 0)
			a.hears(owner, "wanted")
			s.cancel(place, 0)
			a.hears("")
			s.clear()
		}
	})
}

func TestCancelGivesBackWhatWasGrantedMeanwhile(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			id, next := s.id("A", m, long), s.writer("B")
			s.gets(s.acquire(id))
			s.waits(s.acquire(next), 0)
			s.cancel(id, 0)
			s.owned(next)
			s.release(next, 0)
		}
	})
}

// P9: one that is late belongs to a grant of before, which its token tells.
func TestRevokedCarriesTheTokenOfTheEvictedGrant(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		id, next := s.writer("A"), s.writer("B")
		token := s.gets(s.acquire(id))
		s.waits(s.acquire(next), 0)
		inbox.hears(id, "wanted")
		if owners := s.evict(); len(owners) != 1 || owners[0] != id {
			t.Errorf("evicted %q", owners)
		}
		if m := inbox.hears(id, "revoked")[0]; m.token != token {
			t.Errorf("revoked token %d, want %d", m.token, token)
		}
		s.owned(next)
		if st := s.look(); st.token() <= token {
			t.Errorf("the next owner has token %d, the evicted one %d", st.token(), token)
		}
	})
}

func TestAllReadersAreEvictedAndTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxA, inboxB := s.listen("A"), s.listen("B")
		a, b := s.reader("A"), s.reader("B")
		s.gets(s.acquire(a))
		token := s.gets(s.acquire(b))
		if owners := s.evict(); len(owners) != 2 {
			t.Errorf("evicted %q", owners)
		}
		if m := inboxA.hears(a, "revoked")[0]; m.token < token {
			t.Errorf("revoked token %d below %d", m.token, token)
		}
		inboxB.hears(b, "revoked")
		s.owned()
	})
}

// P3, rule 13's half of it: the winner's TTL is its own id's.
func TestAHandedLockLivesAsLongAsTheNewOwnersIdSays(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			owner, next := s.writer("A"), s.id("B", m, 3*long)
			s.gets(s.acquire(owner))
			s.waits(s.acquire(next), 0)
			before := s.now()
			s.is(s.release(owner, 0), done)
			s.owned(next)
			st := s.look()
			if want := before + (3 * long).Milliseconds(); st.ends[0] < want-fuzz || st.ends[0] > want+time.Minute.Milliseconds() {
				t.Errorf("%v: expires in %d ms", m, st.left(st.ends[0]))
			}
			s.release(next, 0)
		}
	})
}

// A release that fails has released nothing, and one that releases does not fail.
func TestAReadersReleaseBesideABrokenMetaEitherWorksOrChangesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.reader("A")
		s.gets(s.acquire(id))
		s.raw("DEL", s.keys.meta())
		s.raw("HSET", s.keys.meta(), "a", "b")
		s.raw("PEXPIRE", s.keys.meta(), 60_000)
		before := s.photo()
		if _, err := s.do(command{verb: release, id: id}); err != nil && s.photo() != before {
			t.Errorf("%v, after it had made of\n%s\nthis\n%s", err, before, s.photo())
		}
		s.clear()
	})
}
