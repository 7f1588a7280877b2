package leased

import (
	"slices"
	"sync"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased/internal/redistest"
)

// B8, B9, P4: whoever comes by drops what is dead at the head, also while the
// lock is not free.
func TestADeadHeadIsDroppedAlsoWhileTheLockIsNotFree(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader, dead, behind := s.reader("A"), s.writer("B"), s.reader("C")
		leaving, fresh := s.reader("D"), s.reader("E")
		visits := map[string]func(){
			"acquire":  func() { s.gets(s.acquire(fresh)) },
			"try":      func() { s.gets(s.try(fresh)) },
			"re-check": func() { s.gets(s.acquire(behind)) },
			"cancel":   func() { s.cancel(fresh, 0) },
			"release":  func() { s.is(s.release(leaving, 0), done) },
			"yield":    func() { s.gets(s.yield(leaving, fresh, 0)) },
		}
		for what, visit := range visits {
			s.clear()
			s.gets(s.acquire(reader))
			s.gets(s.acquire(leaving))
			s.waits(s.acquire(dead), 0)
			s.waits(s.acquire(behind), 1)
			s.dies(dead)
			visit()
			st := s.look()
			if len(st.queue) != 0 || len(st.waiters) != 0 || st.readers[behind] <= st.clock || st.readers[reader] <= st.clock {
				t.Errorf("%s: queue %q, waiters %v, readers %v", what, st.queue, st.waiters, st.readers)
			}
		}
	})
}

// P4: refused for the queue's whole life, though free.
func TestTryGetsAFreeLockBesideDeadWaiters(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(dead)
		s.dies(dead)
		s.raw("DEL", s.keys.lock)
		s.gets(s.try(id))
		s.owned(id)
		s.queued()
	})
}

func TestTryLetsALiveWaiterInFirst(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, first, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(first)
		s.raw("DEL", s.keys.lock) // the owner's TTL ended
		s.is(s.try(id), refused)
		s.owned(first)
		s.queued()
	})
}

// An entry whose lease was lost is as dead as one whose lease is over.
func TestAWaiterWithoutALeaseIsDead(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(dead)
		s.raw("DEL", s.keys.waiters())
		s.waits(s.acquire(id), 0)
		s.queued(id)
	})
}

func TestARecheckRefreshesTheWaitersLeaseAndKeepsItsPlace(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, first, second := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(first)
		s.acquire(second)
		s.raw("ZADD", s.keys.waiters(), "XX", s.now()+20_000, first)
		before := s.now()
		s.waits(s.acquire(first), 0)
		if st := s.look(); st.waiters[first] < before+long.Milliseconds() {
			t.Errorf("the lease ends in %d ms", st.left(st.waiters[first]))
		}
		s.queued(first, second)
	})
}

// B12: a short waiter must not end a long one's place.
func TestTheQueueLivesAsLongAsItsLongestWaiter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, patient, brief := s.writer("A"), s.id("B", exclusive, 50*time.Second), s.id("C", exclusive, time.Second)
		s.gets(s.acquire(owner))
		s.acquire(patient)
		before := s.look()
		for range 2 {
			s.waits(s.acquire(brief), 1)
			after := s.look()
			for i, what := range map[int]string{1: "queue", 3: "waiters"} {
				if d := after.ends[i] - before.ends[i]; d < -fuzz || d > fuzz || before.left(before.ends[i]) < 140_000 {
					t.Errorf("the %s ended in %d ms, and then %d ms later", what, before.left(before.ends[i]), d)
				}
			}
		}
	})
}

// Rule 13, of waiting leases: the clock went back, and the dead head with it.
func TestAWaitingLeaseIsClampedByItsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, head, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(head)
		s.raw("ZADD", s.keys.waiters(), "XX", s.now()+3_600_000, head)
		s.acquire(id)
		if st := s.look(); st.left(st.waiters[head]) > 30_000 || st.left(st.waiters[head]) < 20_000 {
			t.Errorf("%d ms left of a TTL of 30 s", st.left(st.waiters[head]))
		}
	})
}

// P1: the caller of grant-next is there, whatever PUBLISH would count.
func TestACallerIsGrantedByItsReplyThoughItsInboxIsDown(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, id, behind := s.writer("A"), counted(s.writer("B")), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(id), 0)
		s.acquire(behind)
		s.raw("DEL", s.keys.lock)
		if a := s.acquire(id); s.gets(a) == 0 || !a.more {
			t.Errorf("others wait, and the reply does not say so: %+v", a)
		}
		s.owned(id)
		s.queued(behind)

		next := counted(s.writer("B"))
		s.release(behind, 0)
		s.cancel(behind, 0)
		s.gets(s.yield(id, next, 0))
		s.owned(next)
	})
}

// Section 3: that nobody listens proves a "c" gone, and nothing of a "u".
func TestAWaiterWithoutInboxIsSkippedIfTheCountIsProof(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("D")
		owner, gone, goneReader, next := s.writer("A"), counted(s.writer("B")), counted(s.reader("C")), counted(s.writer("D"))
		s.gets(s.acquire(owner))
		for i, id := range []string{gone, goneReader, next} {
			s.waits(s.acquire(id), i)
		}
		if a := s.release(owner, 0); a.handed != 1 {
			t.Errorf("%d were made owner, want 1", a.handed)
		}
		s.owned(next)
		if st := s.look(); len(st.queue)+len(st.waiters)+len(st.readers) != 0 {
			t.Errorf("left behind: %+v", st)
		}
		if m := inbox.hears(next, "granted")[0]; m.token != s.look().token() || m.more {
			t.Errorf("told %+v, want token %d and that nobody waits", m, s.look().token())
		}
	})
}

func TestAWaiterWithoutInboxIsMadeOwnerIfTheCountIsNoProof(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []mode{exclusive, shared} {
			owner, id, behind := s.writer("A"), s.id("B", m, long), s.writer("C")
			s.gets(s.acquire(owner))
			s.acquire(id)
			s.acquire(behind)
			s.release(owner, 0)
			s.owned(id)
			s.queued(behind)
			s.clear()
		}
	})
}

// A reader beside one that is gone enters, and the gone one leaves nothing.
func TestOnlyTheGoneReaderIsSkipped(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("C")
		owner, gone, here := s.writer("A"), counted(s.id("B", shared, 2*long)), counted(s.reader("C"))
		s.gets(s.acquire(owner))
		s.acquire(gone)
		s.acquire(here)
		s.release(owner, 0)
		s.owned(here)
		if st := s.look(); len(st.readers) != 1 || st.left(st.ends[0]) > long.Milliseconds() {
			t.Errorf("readers %v, marker for %d ms", st.readers, st.left(st.ends[0]))
		}
	})
}

// P2, rule 12: who hears granted finds itself recorded. The embedded server
// tells us of each command of the script before it carries it out.
func TestTheOwnerIsRecordedBeforeItIsTold(t *testing.T) {
	for m, want := range map[mode][]string{
		exclusive: {"SET lock", "SET meta", "PUBLISH"},
		shared:    {"ZADD readers", "SET lock", "SET meta", "PUBLISH"},
	} {
		server := redistest.MiniTCP(t)
		s := newScene(t, clientOf(t, server.Addr()), "", "x")
		owner, next := s.writer("A"), s.id("B", m, long)
		s.gets(s.acquire(owner))
		s.acquire(next)
		var mu sync.Mutex // guards steps: the hook runs in the server's goroutine
		var steps []string
		server.Server().SetPreHook(func(_ *mini.Peer, cmd string, args ...string) bool {
			mu.Lock()
			defer mu.Unlock()
			switch cmd {
			case "PUBLISH":
				steps = append(steps, cmd)
			case "SET", "ZADD":
				what := map[string]string{s.keys.lock: "lock", s.keys.meta(): "meta", s.keys.readers(): "readers"}[args[0]]
				steps = append(steps, cmd+" "+what)
			}
			return false
		})
		s.is(s.release(owner, 0), done)
		mu.Lock()
		if !slices.Equal(steps, want) {
			t.Errorf("%v: %q, want %q", m, steps, want)
		}
		mu.Unlock()
	}
}

// P6: the next owner has to know that it cannot keep the lock.
func TestGrantedSaysWhetherOthersWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxB, inboxC := s.listen("B"), s.listen("C")
		a, b, c := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(a))
		s.acquire(b)
		s.acquire(c)
		inboxB.heard()
		s.release(a, 0)
		if m := inboxB.hears(b, "granted")[0]; !m.more {
			t.Errorf("%+v, but C waits", m)
		}
		s.release(b, 0)
		if m := inboxC.hears(c, "granted")[0]; m.more {
			t.Errorf("%+v, but nobody waits", m)
		}
		if a := s.acquire(c); a.more {
			t.Errorf("%+v, but nobody waits", a)
		}
		s.acquire(a)
		if a := s.acquire(c); !a.more {
			t.Errorf("%+v, but A waits", a)
		}
	})
}

// Rule 11.
func TestARecheckEchoesToTheAskersInboxAlone(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox, other := s.listen("A"), s.listen("B")
		owner, id := s.writer("B"), s.writer("A")
		s.gets(s.acquire(owner))
		c := s.acquireOf(id)
		c.echo = "nonce"
		if a := s.must(s.do(c)); a.echo != 1 {
			t.Errorf("%d heard the echo: %+v", a.echo, a)
		}
		if all := inbox.heard(); len(all) != 1 || all[0].kind != "echo" || all[0].nonce != "nonce" {
			t.Errorf("heard %+v", all)
		}
		other.hears(owner, "wanted")
		if a := s.acquire(id); a.echo != noEcho {
			t.Errorf("no echo was asked for: %+v", a)
		}
	})
}

func TestNothingIsPublishedUnlessSomebodyWaits(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		a, b := s.writer("A"), s.writer("A")
		s.gets(s.acquire(a))
		s.renew(a)
		s.acquire(a)
		s.gets(s.yield(a, b, 0))
		s.release(b, 0)
		s.cancel(a, 0)
		inbox.hears("")
	})
}
