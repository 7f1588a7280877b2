package redisserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// These tests need a memory limit, which only a real server has.

// fill makes the server refuse everything that needs memory.
func (s *scene) fill() { s.raw("CONFIG", "SET", "maxmemory", "1") }

// room undoes fill.
func (s *scene) room() { s.raw("CONFIG", "SET", "maxmemory", "0") }

// Rule 12: giving something back, or keeping what a client has, needs no memory.
func TestAFullServerCarriesOutWhatGivesBackOrKeeps(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		// Each case runs once for each mode of the owner. It begins with an owner and a waiter,
		// and acts once the server is full.
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			cases := map[string]func(owner, waiter, fresh string){
				"release": func(owner, waiter, _ string) {
					s.is(s.release(owner, 0), protocol.Done)
					s.owned(waiter)
				},
				"release in doubt": func(owner, waiter, _ string) {
					a := s.must(s.do(protocol.Command{Verb: protocol.Release, ID: owner, Proof: s.look().token()}))
					if s.is(a, protocol.Done); !a.Proved {
						t.Errorf("not proved: %+v", a)
					}
					s.owned(waiter)
				},
				"release with a token": func(owner, waiter, _ string) {
					used := s.look().token() + 3_600_000_000
					s.is(s.release(owner, used), protocol.Done)
					s.owned(waiter)
					if token := s.look().token(); token != used+1 {
						t.Errorf("token %d after %d", token, used)
					}
				},
				"yield": func(owner, waiter, fresh string) {
					s.is(s.yield(owner, fresh, 0), protocol.Enqueued)
					s.owned(waiter)
					s.queued(fresh)
				},
				"cancel of the owner": func(owner, waiter, _ string) {
					s.cancel(owner, 0)
					s.owned(waiter)
				},
				"cancel of the waiter": func(owner, waiter, _ string) {
					s.cancel(waiter, 0)
					s.owned(owner)
					s.queued()
				},
				"adopt": func(owner, _, _ string) {
					used := s.look().token() + 3_600_000_000
					s.is(s.must(s.srv.Adopt(t.Context(), &s.keys, owner, used)), protocol.Done)
					if token := s.look().token(); token != used {
						t.Errorf("token %d instead of %d", token, used)
					}
				},
				"evict": func(_, waiter, _ string) {
					s.evict()
					s.owned(waiter)
				},
				"renew": func(owner, _, _ string) {
					if !s.renew(owner) {
						t.Error("not renewed")
					}
				},
				"acquire by the owner": func(owner, _, _ string) { s.gets(s.acquire(owner)) },
				"acquire by the waiter": func(_, waiter, _ string) {
					s.room()
					s.raw("ZADD", s.keys.Waiters(), "XX", s.now()+5000, waiter)
					s.fill()
					s.waits(s.acquire(waiter), 0)
					if st := s.look(); st.left(st.waiters[waiter]) < 20_000 {
						t.Errorf("the lease was not refreshed: %d ms", st.left(st.waiters[waiter]))
					}
				},
				"brief acquire by the waiter": func(_, waiter, _ string) {
					s.waits(s.must(s.do(s.briefly(waiter, 10_000))), 0) // answered in full
					if st := s.look(); st.left(st.waiters[waiter]) > 30_000 {
						t.Errorf("the lease lasts for %d ms", st.left(st.waiters[waiter]))
					}
				},
				"acquire by one behind the waiter": func(_, _, fresh string) {
					s.room()
					s.waits(s.acquire(fresh), 1)
					s.raw("ZADD", s.keys.Waiters(), "XX", s.now()+5000, fresh)
					s.fill()
					s.waits(s.acquire(fresh), 1)
					if st := s.look(); st.left(st.waiters[fresh]) < 20_000 {
						t.Errorf("the lease was not refreshed: %d ms", st.left(st.waiters[fresh]))
					}
				},
				"acquire by the waiter whose turn it is": func(_, waiter, _ string) {
					s.raw("DEL", s.keys.Lock, s.keys.Readers())
					s.gets(s.acquire(waiter))
					s.owned(waiter)
				},
				"late copy of yield": func(owner, waiter, fresh string) {
					s.room()
					s.yield(owner, fresh, 0)
					s.fill()
					s.is(s.yield(owner, fresh, 0), protocol.Enqueued)
					s.owned(waiter)
				},
			}
			for what, act := range cases {
				t.Run(fmt.Sprintf("%v/%s", m, what), func(t *testing.T) {
					s.t = t
					s.room()
					s.clear()
					owner, waiter, fresh := s.id("A", m, long), s.writer("B"), s.id("A", m, long)
					s.gets(s.acquire(owner))
					s.waits(s.acquire(waiter), 0)
					s.fill()
					act(owner, waiter, fresh)
				})
			}
		}
		s.t = t
		s.room()
	})
}

// Rule 12, beside a reader with a longer TTL: there, no key's expiry has to be extended before the
// script writes the reader's score.
func TestAFullServerExtendsAShortReaderBesideALongOne(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		patient, brief := s.id("A", protocol.Shared, 2*long), s.id("B", protocol.Shared, long)
		s.gets(s.acquire(patient))
		s.gets(s.acquire(brief))
		s.fill()
		defer s.room()
		if !s.renew(brief) {
			t.Error("not renewed")
		}
		if a, err := s.do(s.acquireOf(brief)); err != nil || a.Outcome != protocol.Granted {
			t.Errorf("asked again: %+v, %v", a, err)
		}
		s.owned(patient, brief)
	})
}

// A script that needs memory fails before it has changed anything, even if it takes its shortcut.
func TestAFullServerRefusesANewOwnerAndANewWaiterAndKeepsNothingOfThem(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		for i := range 24 {
			m := []protocol.Mode{protocol.Exclusive, protocol.Shared}[i%2]
			taken, newcomer, quorum := i/2%3, i/6%2 == 1, i/12 == 1 // taken: how many requests own or wait
			s.srv = New(s.srv.Rdb, "")
			if quorum {
				s.srv = NewMember(s.srv.Rdb, "", time.Minute)
			}
			s.room()
			s.clear()
			s.raw("SET", protocol.MarkKey(""), settled)
			for range taken {
				s.acquire(s.writer("A"))
			}
			before := s.look()
			s.fill()
			c := s.acquireOf(s.id("B", m, long))
			c.First, c.Ticket = newcomer, 10
			what := fmt.Sprintf("%v, %d before it, newcomer %v, quorum %v", m, taken, newcomer, quorum)
			if a, err := s.do(c); err == nil || !strings.Contains(err.Error(), "OOM") {
				t.Errorf("%s: %+v, %v", what, a, err)
			}
			if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) {
				t.Errorf("%s: left\n%s", what, after.shape(&ranks{}))
			}
		}
		s.room()
		s.raw("DEL", protocol.MarkKey(""))
	})
}
