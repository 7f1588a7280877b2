package redisserver

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Rule 12: a client that receives granted finds itself recorded as owner. The hook of the
// embedded server is called before each command of a script.
func TestTheOwnerIsRecordedBeforeItIsTold(t *testing.T) {
	for m, want := range map[protocol.Mode][]string{
		protocol.Exclusive: {"SET lock", "SET meta", "PUBLISH"},
		protocol.Shared:    {"ZADD readers", "SET lock", "SET meta", "PUBLISH"},
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
				what := map[string]string{s.keys.Lock: "lock", s.keys.Meta(): "meta", s.keys.Readers(): "readers"}[args[0]]
				steps = append(steps, cmd+" "+what)
			}
			return false
		})
		s.is(s.release(owner, 0), protocol.Done)
		mu.Lock()
		if !slices.Equal(steps, want) {
			t.Errorf("%v: %q, want %q", m, steps, want)
		}
		mu.Unlock()
	}
}

// The next owner has to know whether others wait, because then it must not keep the lock.
func TestGrantedSaysWhetherOthersWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxB, inboxC := s.listen("B"), s.listen("C")
		a, b, c := s.writer("A"), s.writer("B"), s.writer("C")
		s.gets(s.acquire(a))
		s.acquire(b)
		s.acquire(c)
		inboxB.received()
		s.release(a, 0)
		if m := inboxB.receives(b, protocol.MessageGranted)[0]; !m.More {
			t.Errorf("%+v, but C waits", m)
		}
		s.release(b, 0)
		if m := inboxC.receives(c, protocol.MessageGranted)[0]; m.More {
			t.Errorf("%+v, but nobody waits", m)
		}
		if a := s.acquire(c); a.More {
			t.Errorf("%+v, but nobody waits", a)
		}
		s.acquire(a)
		if a := s.acquire(c); !a.More {
			t.Errorf("%+v, but A waits", a)
		}
	})
}

// The request that grant_next is called for is present, whatever PUBSUB NUMSUB would return.
func TestACallerIsGrantedByItsReplyThoughItsInboxIsDown(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, id, behind := s.writer("A"), counted(s.writer("B")), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(id), 0)
		s.acquire(behind)
		s.raw("DEL", s.keys.Lock)
		if a := s.acquire(id); s.gets(a) == 0 || !a.More {
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

// A count of 0 listeners proves the client of a "c" id gone, and nothing for a "u" id
// (docs/design.md, section 3).
func TestAWaiterWithoutInboxIsSkippedIfTheCountIsProof(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("D")
		owner, gone, goneReader, next := s.writer("A"), counted(s.writer("B")), counted(s.reader("C")), counted(s.writer("D"))
		s.gets(s.acquire(owner))
		for i, id := range []string{gone, goneReader, next} {
			s.waits(s.acquire(id), i)
		}
		if a := s.release(owner, 0); a.Handed != 1 {
			t.Errorf("%d were made owner, want 1", a.Handed)
		}
		s.owned(next)
		if st := s.look(); len(st.queue)+len(st.waiters)+len(st.readers) != 0 {
			t.Errorf("left behind: %+v", st)
		}
		if m := inbox.receives(next, protocol.MessageGranted)[0]; m.Token != s.look().token() || m.More {
			t.Errorf("told %+v, want token %d and that nobody waits", m, s.look().token())
		}
	})
}

func TestAWaiterWithoutInboxIsMadeOwnerIfTheCountIsNoProof(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
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

// A reader next to one that is gone is granted, and the other leaves nothing behind.
func TestOnlyTheGoneReaderIsSkipped(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("C")
		owner, gone, here := s.writer("A"), counted(s.id("B", protocol.Shared, 2*long)), counted(s.reader("C"))
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

// counting makes the embedded server claim that client B's inbox has listen subscribers, and that each
// message to it reached receivers clients. published returns what was published to it since the last
// call.
func counting(t *testing.T, listen, receivers int) (s *scene, published func() []string) {
	t.Helper()
	server := redistest.MiniTCP(t)
	s = newScene(t, clientOf(t, server.Addr()), "", "x")
	channel := s.srv.Inboxes + inboxOf("B")
	var mu sync.Mutex // guards texts: the hook runs in the server's goroutine
	var texts []string
	server.Server().SetPreHook(func(p *mini.Peer, cmd string, args ...string) bool {
		switch {
		case cmd == "PUBSUB" && args[1] == channel:
			p.WriteLen(2)
			p.WriteBulk(channel)
			p.WriteInt(listen)
		case cmd == "PUBLISH" && args[0] == channel:
			mu.Lock()
			defer mu.Unlock()
			texts = append(texts, args[1])
			p.WriteInt(receivers)
		default:
			return false
		}
		return true
	})
	return s, func() []string {
		mu.Lock()
		defer mu.Unlock()
		all := texts
		texts = nil
		return all
	}
}

// PUBLISH also reaches subscribers of replicas, and counts only those of its own server: after
// a failover a waiter may have received a message with a count of 0.
func TestAWaiterThatWasToldStaysOwnerThoughNobodyWasCounted(t *testing.T) {
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		for _, behind := range []bool{false, true} {
			s, published := counting(t, 1, 0)
			owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
			s.gets(s.acquire(owner))
			s.acquire(next)
			if behind {
				s.acquire(last)
			}
			published()
			if a := s.release(owner, 0); a.Handed != 1 {
				t.Errorf("%v: %+v", m, a)
			}
			if all := published(); len(all) != 1 || !strings.HasPrefix(all[0], protocol.FormatTag+"granted ") {
				t.Errorf("%v: told %q", m, all)
			}
			s.owned(next)
		}
	}
}

// A grant that was never announced does not have to be taken back.
func TestNothingIsSaidToAWaiterWhoIsPassedOver(t *testing.T) {
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		for verb, let := range map[string]func(s *scene, owner string){
			"release": func(s *scene, owner string) { s.release(owner, 0) },
			"yield":   func(s *scene, owner string) { s.yield(owner, s.writer("A"), 0) },
			"cancel":  func(s *scene, owner string) { s.cancel(owner, 0) },
			"evict":   func(s *scene, owner string) { s.evict() },
			"acquire": func(s *scene, owner string) { s.raw("DEL", s.keys.Lock); s.acquire(s.writer("A")) },
		} {
			s, published := counting(t, 0, 1) // a message would arrive nevertheless
			owner, gone, next := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
			s.gets(s.acquire(owner))
			s.acquire(gone)
			s.acquire(next)
			published()
			let(s, owner)
			if all := published(); len(all) > 0 {
				t.Errorf("%v, %s: told %q", m, verb, all)
			}
			s.owned(next)
		}
	}
}

// Any of several readers may be the one that keeps the lock, so each is notified.
func TestEveryReaderHearsWantedOnceAndAgainAtTheHeadsRecheck(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxA, inboxB := s.listen("A"), s.listen("B")
		a, b, w, later := s.reader("A"), s.reader("B"), s.writer("C"), s.writer("D")
		s.gets(s.acquire(a))
		s.gets(s.acquire(b))
		inboxA.receives(a)
		s.acquire(w)
		inboxA.receives(a, protocol.MessageWanted)
		inboxB.receives(b, protocol.MessageWanted)
		s.acquire(later) // a new waiter notifies once
		inboxA.receives(a, protocol.MessageWanted)
		s.acquire(later) // its re-check does not, as it is not the head
		inboxA.receives(a)
		s.acquire(w) // the head's re-check does, since a message may have been lost
		inboxA.receives(a, protocol.MessageWanted)
		inboxB.received()
	})
}

// An owning writer learns from the first waiter, or from granted, that others wait. After that, the head of
// the queue notifies it again. Another request does while the head does not ask, and one that was sent before
// does if it is not in the queue: what Redis knows may be from before a failover.
func TestAWriterHearsWantedFromTheFirstWaiterAndFromTheHead(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		ask := func(id string, first bool, place int) {
			t.Helper()
			c := s.acquireOf(id)
			c.First = first
			s.waits(s.must(s.do(c)), place)
		}
		for _, first := range []bool{true, false} {
			owner, head := s.writer("A"), s.writer("B")
			s.gets(s.acquire(owner))
			ask(head, first, 0)
			inbox.receives(owner, protocol.MessageWanted)
			behind := s.writer("C")
			ask(behind, first, 1)
			if first {
				inbox.receives(owner)
			} else {
				inbox.receives(owner, protocol.MessageWanted)
			}
			ask(behind, false, 1)
			inbox.receives(owner)
			ask(s.id("C", protocol.Exclusive, long+time.Second), true, 2) // no shortcut, because of its TTL
			inbox.receives(owner)
			ask(head, false, 0)
			inbox.receives(owner, protocol.MessageWanted)
			s.raw("ZADD", s.keys.Waiters(), s.now()+(long-6*time.Second).Milliseconds(), head)
			ask(s.writer("C"), first, 3)
			inbox.receives(owner, protocol.MessageWanted)
			ask(behind, false, 1)
			inbox.receives(owner, protocol.MessageWanted)
			s.clear()
		}
	})
}

// A head whose process was killed stays in the queue for a TTL while somebody owns the lock.
func TestBehindAHeadThatDoesNotAskOneWaiterTellsTheOwners(t *testing.T) {
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		t.Run(string(m), func(t *testing.T) {
			onScripts(t, func(t *testing.T, s *scene) {
				inbox := s.listen("A")
				owner := s.id("A", m, long)
				s.gets(s.acquire(owner))
				waiters := []string{s.writer("B"), s.writer("C"), s.writer("D"), s.writer("E")}
				for place, id := range waiters {
					s.waits(s.acquire(id), place)
				}
				inbox.received()
				for silent := range 3 {
					s.raw("ZADD", s.keys.Waiters(), s.now()+(long-6*time.Second).Milliseconds(), waiters[silent])
					for place := silent + 1; place < len(waiters); place++ {
						s.waits(s.acquire(waiters[place]), place)
						if place == silent+1 {
							inbox.receives(owner, protocol.MessageWanted)
						} else {
							inbox.receives(owner)
						}
					}
				}
			})
		})
	}
}

// On a server of a quorum the ticket decides where in the queue a request is placed.
func TestTheShortcutOfAcquireLeavesTheOrderToTickets(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		member := NewMember(s.rdb, "", time.Minute)
		ask := func(id string, ticket uint64) protocol.Answer {
			c := s.acquireOf(id)
			c.First, c.Ticket = true, ticket
			return s.must(member.Do(t.Context(), &s.keys, &c))
		}
		made := s.writer("E") // made first, so that its id sorts before the others
		s.gets(ask(s.writer("A"), 1))
		s.waits(ask(s.writer("B"), 300), 0)
		s.waits(ask(s.writer("C"), 200), 0)
		s.waits(ask(s.writer("D"), 400), 2)
		s.waits(ask(made, 400), 3) // has the same ticket, but arrives later
		s.waits(ask(s.writer("F"), 250), 1)
		s.waits(ask(s.writer("G"), 199), 1) // the same instant as C's, and arrives later
		s.waits(ask(s.writer("H"), 200), 2)
		s.waits(ask(s.writer("I"), 190), 0)
		s.clear()
		s.raw("DEL", protocol.MarkKey(""))
	})
}

// A yield notifies the remaining owners, readers of other processes, that others wait.
func TestAReaderHearsWantedFromAYieldBesideIt(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		stays, leaves, writer := s.reader("A"), s.reader("B"), s.writer("B")
		s.gets(s.acquire(stays))
		s.gets(s.acquire(leaves))
		s.waits(s.yield(leaves, writer, 0), 0)
		inbox.receives(stays, protocol.MessageWanted)
	})
}

// The message could arrive after the writer gave up, and keep new readers out for nothing.
func TestAReaderIsNotToldWantedByAWriterOfItsOwnProcess(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r, other, place := s.reader("A"), s.reader("B"), s.writer("A")
		s.gets(s.acquire(r))
		s.gets(s.acquire(other))
		a, b := s.listen("A"), s.listen("B")
		ask := s.acquireOf(place)
		ask.Own = r
		for range 2 {
			s.waits(s.must(s.do(ask)), 0)
			a.receives("")
			b.receives(other, protocol.MessageWanted)
		}
		s.acquire(s.writer("C"))
		a.receives(r, protocol.MessageWanted)
		b.receives(other, protocol.MessageWanted)
	})
}

// The head scheduled its re-check by the lease of a reader that has left since.
func TestTheHeadHearsWhenTheRemainingReadersEnd(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("C")
		for _, leave := range []func(id string){
			func(id string) { s.release(id, 0) },
			func(id string) { s.cancel(id, 0) },
			func(id string) { s.yield(id, s.writer("A"), 0) },
		} {
			patient, brief, w := s.id("A", protocol.Shared, 2*long), s.reader("B"), s.writer("C")
			s.gets(s.acquire(patient))
			s.gets(s.acquire(brief))
			s.waits(s.acquire(w), 0)
			behind := s.writer("C")
			s.waits(s.acquire(behind), 1)
			leave(patient)
			if m := inbox.receives(w, protocol.MessageEnds)[0]; m.Left <= 0 || m.Left > long {
				t.Errorf("told %v of a reader with %v", m.Left, long)
			}
			s.cancel(behind, 0)
			inbox.receives(w, protocol.MessageEnds) // again
			s.release(brief, 0)
			inbox.receives(w, protocol.MessageGranted)
			s.release(w, 0)
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
		c.Echo = "nonce"
		if a := s.must(s.do(c)); a.Echo != 1 {
			t.Errorf("%d received the echo: %+v", a.Echo, a)
		}
		if all := inbox.received(); len(all) != 1 || all[0].Kind != protocol.MessageEcho || all[0].Nonce != "nonce" {
			t.Errorf("received %+v", all)
		}
		other.receives(owner, protocol.MessageWanted)
		if a := s.acquire(id); a.Echo != protocol.NoEcho {
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
		inbox.receives("")
	})
}
