package redisserver

import (
	"context"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// These tests are about the cool-down: a writer that gives the lock back has the lock kept from
// everybody for a while.

const cool = 20 * time.Second

// cooling fails the test unless the lock is in the cool-down that id asked for when it gave the
// lock back, with about left remaining.
func (s *scene) cooling(id string, left time.Duration) {
	s.t.Helper()
	st := s.look()
	who, ok := protocol.ParseCooldown(st.value)
	want, err := protocol.ParseID(id)
	if err != nil || !ok || who != want {
		s.t.Fatalf("the key holds %q after %q", st.value, id)
	}
	if got := time.Duration(st.ends[0]-st.clock) * time.Millisecond; got > left || got < left-patient {
		s.t.Fatalf("it cools down for %v, want %v", got, left)
	}
}

// patient is how much time may pass between two steps of a test.
const patient = 15 * time.Second

// giveBacks returns the ways in which a writer can give the lock back with a cool-down.
func (s *scene) giveBacks() map[string]func(id string, cool time.Duration) {
	give := func(c protocol.Command) { s.must(s.do(c)) }
	return map[string]func(string, time.Duration){
		"release": func(id string, cool time.Duration) {
			give(protocol.Command{Verb: protocol.Release, ID: id, Cooldown: cool})
		},
		"release in doubt": func(id string, cool time.Duration) {
			give(protocol.Command{Verb: protocol.Release, ID: id, Cooldown: cool, Proof: 1})
		},
		"yield": func(id string, cool time.Duration) {
			give(protocol.Command{Verb: protocol.Yield, ID: id, Next: s.writer("C"), Cooldown: cool})
		},
		"cancel": func(id string, cool time.Duration) {
			if err := s.tryCancel(id, 0, cool); err != nil {
				s.t.Fatal(err)
			}
		},
	}
}

func TestAWriterCanHaveTheLockKeptWhenItGivesItBack(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		b := s.listen("B")
		for what, giveBack := range s.giveBacks() {
			for _, waiter := range []func(string) string{s.writer, s.reader} {
				s.clear()
				owner, next := s.writer("A"), waiter("B")
				token := s.gets(s.acquire(owner))
				s.waits(s.acquire(next), 0)
				giveBack(owner, cool)
				s.cooling(owner, cool)
				all := b.received()
				if len(all) != 1 || all[0].Kind != protocol.MessageEnds || all[0].ID != next || all[0].Left > cool || all[0].Left < cool-patient {
					t.Errorf("%s: the head of the queue was told %+v", what, all)
				}
				again := s.waits(s.acquire(next), 0)
				if again.NoNotify || again.Left <= 0 || again.Left > cool || again.Blocker != s.look().value {
					t.Errorf("%s: answered %+v", what, again)
				}
				if got := s.try(s.writer("D")); got.Outcome != protocol.Refused {
					t.Errorf("%s: a try is answered %+v", what, got)
				}
				if taken := s.raw("SET", s.keys.Lock, "foreign", "NX", "PX", 1000); taken != nil {
					t.Errorf("%s: a foreign client took it", what)
				}
				if r := s.answerOf(owner, 0); r.Owned || r.Token != token {
					t.Errorf("%s: the cancel that proves the release is answered %+v, want token %d", what, r, token)
				}
				s.cooling(owner, cool)
				b.received()   // the cancel has notified the head again
				s.renew(owner) // late copies
				s.release(owner, 0)
				s.cooling(owner, cool)
				s.raw("PEXPIRE", s.keys.Lock, 1)
				for s.raw("EXISTS", s.keys.Lock) != int64(0) {
					time.Sleep(time.Millisecond) // between two polls
				}
				if s.gets(s.acquire(next)) <= token {
					t.Errorf("%s: the next token is not above %d", what, token)
				}
			}
		}
	})
}

func TestACooldownIsKeptWithItsTokenForAsLongAsItLasts(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner := s.writer("A")
		token := s.gets(s.acquire(owner))
		s.must(s.do(protocol.Command{Verb: protocol.Release, ID: owner, Last: token + 7, Cooldown: 24 * time.Hour}))
		s.cooling(owner, 24*time.Hour)
		if st := s.look(); st.token() != token+7 || st.ends[4] < st.ends[0] {
			t.Errorf("token %d, forgotten %d ms before the end", st.token(), st.ends[0]-st.ends[4])
		}
	})
}

func TestAReaderGivesTheLockBackAtOnce(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		for what, giveBack := range s.giveBacks() {
			if what == "yield" {
				continue // it enqueues another writer, which the release of next would grant
			}
			owner, next := s.reader("A"), s.writer("B")
			s.gets(s.acquire(owner))
			s.waits(s.acquire(next), 0)
			giveBack(owner, cool)
			s.owned(next)
			s.release(next, 0)
		}
	})
}

func TestACooldownIsClampedWhenTheClockWentBackAndEndedByAnEviction(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.listen("B")
		owner, next := s.writer("A"), s.writer("B")
		s.gets(s.acquire(owner))
		s.must(s.do(protocol.Command{Verb: protocol.Release, ID: owner, Cooldown: cool}))
		s.raw("PEXPIRE", s.keys.Lock, 3_600_000)
		s.waits(s.acquire(next), 0)
		s.cooling(owner, cool)
		if evicted := s.evict(); len(evicted) != 1 {
			t.Errorf("evicted %q", evicted)
		}
		s.owned(next)
	})
}

// A fraction of a millisecond is rounded up.
func TestACooldownDoesNotEndEarly(t *testing.T) {
	args := withCooldown(3*time.Millisecond+time.Nanosecond, "x")
	if len(args) != 2 || args[1] != "4" {
		t.Errorf("%v", args)
	}
}

// A full server carries out a cool-down, because the first write is a PEXPIRE.
func TestAFullServerAdmitsACooldown(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		ctx := context.Background()
		for what, giveBack := range s.giveBacks() {
			s.clear()
			owner := s.writer("A")
			s.gets(s.acquire(owner))
			if err := s.rdb.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
				t.Fatal(err)
			}
			giveBack(owner, cool)
			if err := s.rdb.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
				t.Fatal(what, err)
			}
			s.cooling(owner, cool)
		}
	})
}

// Those behind the head may not know that it has died, or dies before the end.
func TestTheEndOfACoolDownIsAnnouncedToTheFirstTen(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("B")
		for what, giveBack := range s.giveBacks() {
			owner := s.writer("A")
			s.gets(s.acquire(owner))
			var ids []string
			for i := range 12 {
				ids = append(ids, s.writer("B"))
				s.waits(s.acquire(ids[i]), i)
			}
			giveBack(owner, cool)
			all := inbox.received()
			if len(all) != 10 {
				t.Fatalf("%s: %d messages: %+v", what, len(all), all)
			}
			for i, m := range all {
				late := time.Duration(i) * 5 * time.Millisecond
				if m.Kind != protocol.MessageEnds || m.ID != ids[i] || m.Left != all[0].Left+late || m.Left <= late || m.Left > cool+late {
					t.Errorf("%s: the waiter at place %d was sent %+v", what, i, m)
				}
			}
			s.cancel(owner, 0) // which finds nothing
			if again := inbox.received(); len(again) != 1 || again[0].Kind != protocol.MessageEnds || again[0].ID != ids[0] {
				t.Errorf("%s: a cancel that finds nothing sends %+v", what, again)
			}
			s.cancel(ids[3], 0) // who gives up makes room for another
			if all = inbox.received(); len(all) != 10 || all[9].ID != ids[10] {
				t.Errorf("%s: after one gave up, these are sent: %+v", what, all)
			}
			s.clear()
		}
	})
}
