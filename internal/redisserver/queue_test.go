package redisserver

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Every call drops dead entries at the head, also while the lock is not free.
func TestADeadHeadIsDroppedAlsoWhileTheLockIsNotFree(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		reader, dead, behind := s.reader("A"), s.writer("B"), s.reader("C")
		leaving, fresh := s.reader("D"), s.reader("E")
		visits := map[string]func(){
			"acquire":  func() { s.gets(s.acquire(fresh)) },
			"try":      func() { s.gets(s.try(fresh)) },
			"re-check": func() { s.gets(s.acquire(behind)) },
			"cancel":   func() { s.cancel(fresh, 0) },
			"release":  func() { s.is(s.release(leaving, 0), protocol.Done) },
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

// The owner and the head of the queue may live for weeks, and processes come and are killed behind them.
func TestDeadRequestsBehindALiveHeadGo(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, first := s.writer("A"), s.writer("B")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(first), 0)
		const killed = 250
		for range killed {
			dead := s.writer("C")
			s.acquire(dead)
			s.dies(dead)
		}
		last := s.writer("D")
		s.acquire(last)
		for range 3 { // once in a while, as their lives come to their end
			s.raw("PEXPIRE", s.keys.Waiters(), 90_000)
			s.raw("PEXPIRE", s.keys.Queue(), 90_000)
			s.raw("PEXPIRE", s.keys.Waiters(), 50_000)
			s.waits(s.acquire(first), 0)
		}
		s.queued(first, last)
		s.waits(s.acquire(last), 1)
	})
}

// Dead waiters must not refuse a free lock for as long as the queue lives.
func TestTryGetsAFreeLockBesideDeadWaiters(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(dead)
		s.dies(dead)
		s.raw("DEL", s.keys.Lock)
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
		s.raw("DEL", s.keys.Lock) // the owner's TTL ended
		s.is(s.try(id), protocol.Refused)
		s.owned(first)
		s.queued()
	})
}

// An entry without a lease is as dead as one whose lease has ended.
func TestAWaiterWithoutALeaseIsDead(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(dead)
		s.raw("DEL", s.keys.Waiters())
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
		s.raw("ZADD", s.keys.Waiters(), "XX", s.now()+20_000, first)
		before := s.now()
		s.waits(s.acquire(first), 0)
		if st := s.look(); st.waiters[first] < before+long.Milliseconds() {
			t.Errorf("the lease ends in %d ms", st.left(st.waiters[first]))
		}
		s.queued(first, second)
	})
}

// A waiter with a short TTL must not shorten the place of one with a long TTL.
func TestTheQueueLivesAsLongAsItsLongestWaiter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, patient, brief := s.writer("A"), s.id("B", protocol.Exclusive, 50*time.Second), s.id("C", protocol.Exclusive, time.Second)
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

// Somebody may delete one of the queue's two keys. The shortcuts look at the expiry of waiters only.
func TestTheQueuesKeysLastTogetherAfterOneWasDeleted(t *testing.T) {
	for _, quorum := range []bool{false, true} {
		for _, at := range []int{0, 100} {
			onScripts(t, func(t *testing.T, s *scene) {
				if quorum {
					s.srv = NewMember(s.srv.Rdb, "", time.Minute)
				}
				ticket := uint64(0)
				ask := func(id string) protocol.Command {
					c := s.acquireOf(id)
					ticket += 10
					c.Ticket, c.First = ticket, true
					s.is(s.must(s.do(c)), protocol.Enqueued)
					c.First = false
					return c
				}
				lasts := func(what string) {
					t.Helper()
					st := s.look()
					if queue, waiters := st.left(st.ends[1]), st.left(st.ends[3]); waiters <= 0 || queue+fuzz < waiters {
						t.Errorf("quorum %v, %d wait, %s: the queue lasts %d ms, the waiting leases %d ms", quorum, at+1, what, queue, waiters)
					}
				}
				owner := s.acquireOf(s.writer("A"))
				owner.Ticket = 1
				s.gets(s.must(s.do(owner)))
				var last protocol.Command
				for range at + 1 {
					last = ask(s.writer("B"))
				}
				s.raw("DEL", s.keys.Waiters())
				s.is(s.must(s.do(last)), protocol.Enqueued)
				lasts("without waiters")
				s.raw("PEXPIRE", s.keys.Waiters(), 600_000)
				s.raw("DEL", s.keys.Queue())
				ask(s.writer("B"))
				lasts("without queue")
				s.raw("DEL", s.keys.Queue())
				s.is(s.must(s.do(last)), protocol.Enqueued)
				lasts("without queue, at a re-check")
				s.raw("DEL", s.keys.Queue())
				s.raw("ZADD", s.keys.Waiters(), 1, "dead")
				s.raw("ZREMRANGEBYSCORE", s.keys.Waiters(), 2, "+inf")
				ask(s.writer("B"))
				lasts("beside a dead waiter's lease")
				s.clear()
				if quorum {
					s.raw("DEL", s.srv.mark)
				}
			})
		}
	}
}

// Rule 13, for waiting leases: the clock went back, so a dead head would stay.
func TestAWaitingLeaseIsClampedByItsOwnTTL(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, head, id := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.acquire(head)
		s.raw("ZADD", s.keys.Waiters(), "XX", s.now()+3_600_000, head)
		s.acquire(id)
		if st := s.look(); st.left(st.waiters[head]) > 30_000 || st.left(st.waiters[head]) < 20_000 {
			t.Errorf("%d ms left of a TTL of 30 s", st.left(st.waiters[head]))
		}
	})
}

func TestWaitingLeasesBehindALiveHeadAreClampedTogether(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.gets(s.acquire(s.writer("A")))
		head := s.reader("B") // a writer would take the shortcut, as the last token is not ahead of the clock
		s.acquire(head)
		n := 700
		if !s.real {
			n = 60 // because miniredis sorts all of them for each
		}
		dead := s.crowd(n, s.now()+3_600_000)
		tooLong := func() (n int) {
			st := s.look()
			for _, id := range dead {
				if st.left(st.waiters[id]) > 30_000 {
					n++
				}
			}
			return n
		}
		s.acquire(head)
		if got := tooLong(); got != max(0, n-500) {
			t.Errorf("after one call %d of %d leases are longer than their TTL; a call shortens 500", got, n)
		}
		s.acquire(head)
		if n := tooLong(); n != 0 {
			t.Errorf("after two calls %d leases are longer than their TTL", n)
		}
		s.clear()
	})
}

// A waiter with a longer TTL hides them.
func TestWaitingLeasesAreClampedTogetherWhenTheHeadIsFoundToBeTooLong(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.writer("A")
		s.gets(s.acquire(owner))
		var dead []string
		for range 20 {
			id := s.writer("C")
			s.acquire(id)
			dead = append(dead, id)
		}
		s.acquire(s.id("B", protocol.Exclusive, 5*time.Minute))
		for _, id := range dead {
			s.raw("ZADD", s.keys.Waiters(), "XX", s.now()+100_000, id)
		}
		s.acquire(s.reader("D"))
		st := s.look()
		for i, id := range dead {
			if left := st.left(st.waiters[id]); left > 30_000 {
				t.Errorf("dead waiter %d: %d ms left of a TTL of 30 s", i, left)
			}
		}
		s.clear()
	})
}

func TestAReleaseGrantsNobodyWhoseWaitingLeaseIsOver(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, dead, alive := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(dead), 0)
		s.waits(s.acquire(alive), 1)
		s.dies(dead)
		s.is(s.release(owner, 0), protocol.Done)
		if st := s.look(); st.value != alive || len(st.queue) != 0 {
			t.Errorf("the owner is %q, queued are %q", st.value, st.queue)
		}
		s.clear()
	})
}

func TestALateCopyOfTheFirstAcquireKeepsThePlace(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.gets(s.acquire(s.writer("A")))
		ids := []string{s.writer("B"), s.writer("C"), s.writer("D")}
		for range 2 {
			for place, id := range ids {
				c := s.acquireOf(id)
				c.First = true
				s.waits(s.must(s.do(c)), place)
			}
		}
		s.queued(ids...)
	})
}

// For example, a late copy of acquire leaves a waiter that never asks again.
func TestThoseWhoWaitNoMoreAreForgottenWhileTheLockIsBusy(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.gets(s.acquire(s.writer("A")))
		first, gone, last := s.writer("B"), s.writer("C"), s.writer("D")
		s.waits(s.acquire(first), 0)
		s.waits(s.acquire(gone), 1)
		s.dies(gone)
		s.raw("PEXPIRE", s.keys.Waiters(), 2*long.Milliseconds()-1) // as it would be some time later
		s.acquire(last)
		if s.raw("ZSCORE", s.keys.Waiters(), gone) != nil {
			t.Error("still among those who wait")
		}
		for _, id := range []string{first, last} {
			if s.raw("ZSCORE", s.keys.Waiters(), id) == nil {
				t.Errorf("%s is not among those who wait anymore", id)
			}
		}
	})
}

// After a reader, grant_next goes on with the readers right behind it, and no further.
func TestAReleaseLetsInAllReadersBeforeTheNextWriter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, r1, r2, w, r3 := s.writer("A"), s.reader("B"), s.reader("C"), s.writer("D"), s.reader("E")
		s.gets(s.acquire(owner))
		for i, id := range []string{r1, r2, w, r3} {
			s.waits(s.acquire(id), i)
		}
		if a := s.release(owner, 0); a.Handed != 2 {
			t.Errorf("%d were made owner, want 2", a.Handed)
		}
		s.owned(r1, r2)
		s.queued(w, r3)
		s.release(r1, 0)
		s.owned(r2)
		if a := s.release(r2, 0); a.Handed != 1 {
			t.Errorf("%d were made owner, want 1", a.Handed)
		}
		s.owned(w)
		s.queued(r3)
	})
}

func TestAReaderDoesNotOvertakeAWaitingWriter(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		a, w, c := s.reader("A"), s.writer("B"), s.reader("C")
		s.gets(s.acquire(a))
		s.waits(s.acquire(w), 0)
		s.is(s.try(c), protocol.Refused)
		s.waits(s.acquire(c), 1)
		s.owned(a)
	})
}

// In a long queue, most of the server's work for waiters is their re-checks.
func TestAReCheckBehindAnotherWriterIsAFewCalls(t *testing.T) {
	for _, quorum := range []bool{false, true} {
		onOwnServer(t, func(t *testing.T, s *scene) {
			if quorum {
				s.srv = NewMember(s.srv.Rdb, "", time.Minute)
			}
			first := s.acquireOf(s.writer("A"))
			first.Ticket = 1
			s.gets(s.must(s.do(first)))
			var waiters []protocol.Command
			for i := range uint64(101) {
				c := s.acquireOf(s.writer("B"))
				c.Ticket = 2 + 10*i
				s.waits(s.must(s.do(c)), int(i))
				waiters = append(waiters, c)
			}
			for _, look := range []struct {
				place int
				echo  string
				brief bool
				late  bool // and so answered in full
				most  int
			}{{place: 0, most: 9}, {place: 2, echo: "7", most: 10}, {place: 100, most: 7}, {place: 2, brief: true, most: 1}, {place: 2, echo: "7", brief: true, most: 2}, {place: 2, brief: true, late: true, most: 10}} {
				c, most := waiters[look.place], look.most
				c.Echo = look.echo
				if look.brief {
					c = s.briefly(c.ID, 1)
					c.Ticket, c.Echo = waiters[look.place].Ticket, look.echo
				}
				if look.late { // somebody else has extended the lease
					c.Waits, c.Until = c.Waits-1, c.Until-1
				}
				if quorum {
					most += 2 // the mark and its time
					if look.brief {
						most = 12 // a quorum's server has no brief re-checks
					} else if look.echo == "" {
						most++ // vote_fast.lua checks whether the lock is free
					}
				}
				s.rdb.ConfigResetStat(t.Context())
				a := s.must(s.do(c))
				s.is(a, protocol.Enqueued)
				if brief := look.brief && !look.late && !quorum; a.Brief != brief || !brief && a.Place != look.place {
					t.Errorf("quorum %v, %+v: %+v", quorum, look, a)
				}
				calls := 0
				for line := range strings.Lines(s.rdb.Info(t.Context(), "commandstats").Val()) {
					name, rest, _ := strings.Cut(line, ":calls=")
					n, _, _ := strings.Cut(rest, ",")
					if made, err := strconv.Atoi(n); err == nil && !strings.HasPrefix(name, "cmdstat_eval") && !strings.HasPrefix(name, "cmdstat_config") {
						calls += made
					}
				}
				if calls == 0 || calls > most {
					t.Errorf("quorum %v, %+v: %d calls", quorum, look, calls)
				}
			}
		})
	}
}

func TestABriefReCheckThatGoesOnInFullDoesNotKeepAPlaceThatWasLost(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		late, next := s.writer("B"), s.writer("C")
		s.gets(s.acquire(s.writer("A")))
		s.waits(s.acquire(late), 0)
		s.waits(s.acquire(next), 1)
		re := s.briefly(late, 20_000)
		s.raw("ZADD", s.keys.Waiters(), "XX", s.now()-1, late)
		s.waits(s.must(s.do(re)), 1)
	})
}

// Neither the grant nor its loss left a trace but the end of the waiting lease.
func TestARequestQueuedAnewAfterItsGrantWasLostHasNotWaitedSince(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, waiter, other, last := s.writer("A"), counted(s.writer("B")), s.writer("C"), s.writer("A")
		s.listen("B")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(waiter), 0)
		s.waits(s.acquire(last), 1)
		re := s.briefly(waiter, 1)
		for began := s.now(); s.now() == began; { // the late acquire comes in another millisecond
		}
		s.release(owner, 0)
		s.owned(waiter)
		s.cancel(last, 0)
		s.raw("DEL", s.keys.Lock)
		s.gets(s.acquire(other))
		s.waits(s.acquire(waiter), 0) // a late copy of the first one
		if a := s.must(s.do(re)); a.Brief || a.Outcome != protocol.Enqueued || a.Token != s.look().token() {
			t.Errorf("it is answered %+v", a)
		}
	})
}

// Only the first hundred waiters behind a dead head drop it. If those further behind looked as well, each
// would usually just find the head alive.
func TestAReCheckFromFarBehindLeavesADeadHead(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.gets(s.acquire(s.writer("A")))
		var waiters []string
		for i := range 102 {
			waiters = append(waiters, s.writer("B"))
			s.waits(s.acquire(waiters[i]), i)
		}
		s.raw("ZADD", s.keys.Waiters(), s.now()-1000, waiters[0])
		s.waits(s.acquire(waiters[100]), 100)
		s.queued(waiters...)
		s.waits(s.acquire(waiters[99]), 98)
		s.queued(waiters[1:]...)

		// All waiters ahead may be dead, so even one this far behind looks now and then.
		last := s.writer("B")
		s.waits(s.acquire(last), 101)
		s.raw("ZADD", s.keys.Waiters(), s.now()-1000, waiters[1])
		s.waits(s.acquire(last), 101)
		c := s.acquireOf(last)
		c.Echo = "7"
		s.waits(s.must(s.do(c)), 100)
	})
}

// A re-check from behind the head cuts what the owner has left to its TTL, as any other does: the
// server's clock was set back.
func TestAReCheckFromBehindTheHeadCutsALeaseThatIsTooLong(t *testing.T) {
	for _, quorum := range []bool{false, true} {
		onScripts(t, func(t *testing.T, s *scene) {
			if quorum {
				s.srv = NewMember(s.srv.Rdb, strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", "")), time.Minute)
				defer s.raw("DEL", s.srv.mark)
			}
			owner := s.acquireOf(s.writer("A"))
			owner.Ticket = 1
			s.gets(s.must(s.do(owner)))
			var c protocol.Command
			for i := range uint64(2) {
				c = s.acquireOf(s.writer("B"))
				c.Ticket = 10 + 10*i
				s.waits(s.must(s.do(c)), int(i))
			}
			s.raw("PEXPIRE", s.keys.Lock, 7_200_000)
			if a := s.waits(s.must(s.do(c)), 1); a.Left > long {
				t.Errorf("quorum %v: the owner has %v left, its TTL is %v", quorum, a.Left, long)
			}
			if st := s.look(); st.left(st.ends[0]) > long.Milliseconds() {
				t.Errorf("quorum %v: the lock expires in %d ms", quorum, st.left(st.ends[0]))
			}
			s.clear()
		})
	}
}
