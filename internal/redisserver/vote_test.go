package redisserver

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// calls checks how many calls a script makes.
func (s *scene) calls(what string, atMost int64, run func()) {
	s.t.Helper()
	before, err := redistest.Calls(s.t.Context(), s.rdb)
	if err != nil {
		s.t.Fatal(err)
	}
	run()
	after, err := redistest.Calls(s.t.Context(), s.rdb)
	if err != nil {
		s.t.Fatal(err)
	}
	sent := after.Sub(before)
	if n := sent.Total() - sent["evalsha"]; sent["evalsha"] != 1 || n > atMost {
		s.t.Errorf("%s: %d calls, want %d: %v", what, n, atMost, sent)
	}
}

func TestWhatALeaseAsksOfItsServer(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		first := func(id string) protocol.Answer {
			c := s.acquireOf(id)
			c.First = true
			return s.must(s.do(c))
		}
		s.listen("A")
		s.listen("B")
		var all []string
		for range 5 {
			all = append(all, counted(s.writer("A")), counted(s.writer("B")))
		}
		for _, id := range all[:2] { // the server learns the scripts
			s.gets(first(id))
			s.waits(first(s.writer("B")), 0)
			s.release(id, 0)
			s.clear()
		}
		s.calls("takes a free lock of a new name", 4, func() { s.gets(first(all[2])) })
		s.calls("gives back", 3, func() { s.release(all[2], 0) })
		s.calls("takes a free lock", 5, func() { s.gets(first(all[3])) })
		s.calls("is the first to queue", 9, func() { s.waits(first(all[4]), 0) })
		s.calls("joins the queue", 11, func() { s.waits(first(all[5]), 1) })
		s.calls("hands over", 10, func() { s.release(all[3], 0) })
		s.clear()
	})
}

// On a quorum each command runs on every server, so the calls within the scripts are most of a lease's
// cost. Each lease of a contended lock takes the calls of "joins the queue" and "hands over", and each
// lease of a free lock those of "takes a free lock" and "gives back".
func TestWhatALeaseOfAQuorumAsksOfEachServer(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.rdb, "", time.Minute)
		s.raw("SET", s.srv.mark, "1")
		s.listen("A")
		s.listen("B")
		calls := s.calls
		ticket := uint64(1_000)
		ask := func(id string) protocol.Answer {
			c := s.acquireOf(id)
			ticket += 100
			c.Ticket, c.First = ticket, true
			return s.must(s.do(c))
		}
		var all []string
		for range 5 {
			all = append(all, counted(s.writer("A")), counted(s.writer("B")))
		}
		for _, id := range all[:2] { // the server learns the scripts
			s.gets(ask(id))
			s.release(id, 0)
			s.cancel(id, 0)
		}
		calls("takes a free lock", 5, func() { s.gets(ask(all[2])) })
		calls("gives back", 3, func() { s.release(all[2], 0) })
		s.raw("DEL", s.keys.Meta())
		calls("takes a free lock of a new name", 5, func() { s.gets(ask(all[2])) })
		s.release(all[2], 0)
		token := s.gets(ask(all[3]))
		calls("gives back, with another server's token", 5, func() { s.release(all[3], token+1) })
		// The lease's token is that of the first servers to answer; the others draw a greater one.
		token = s.gets(ask(all[8]))
		calls("gives back, with an earlier token of another server", 3, func() { s.release(all[8], token-1) })
		token = s.gets(ask(all[9]))
		calls("is canceled as the owner, with an earlier token", 3, func() { s.cancel(all[9], token-1) })
		if last := s.look().token(); last != token {
			t.Errorf("the last token is %d, it was %d", last, token)
		}
		s.gets(ask(all[4]))
		s.waits(ask(all[5]), 0)
		s.waits(ask(all[6]), 1)
		calls("joins the queue", 11, func() { s.waits(ask(all[7]), 2) })
		calls("hands over", 10, func() { s.release(all[4], 0) })
		last := s.look().token() + 1
		calls("hands over, with another server's token", 10, func() { s.release(all[5], last) })
		s.clear()
		s.raw("DEL", s.srv.mark)
	})
}

// An owner's TTL may end while others wait: the lock has no owner then, and is not free.
func TestAVoteDoesNotPassThoseThatWait(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.srv.Rdb, "", time.Minute)
		s.raw("SET", s.srv.mark, "1")
		s.listen("A")
		s.listen("B")
		ticket := uint64(1_000)
		ask := func(id string) protocol.Answer {
			c := s.acquireOf(id)
			ticket += 100
			c.Ticket, c.First = ticket, true
			return s.must(s.do(c))
		}
		waiter := s.writer("B")
		s.gets(ask(s.writer("A")))
		s.waits(ask(waiter), 0)
		s.raw("DEL", s.keys.Lock)
		s.waits(ask(s.writer("A")), 0)
		s.owned(waiter)
		s.raw("DEL", s.srv.mark)
	})
}

// A server does a bounded part of the work at a time. A cancel that is sent as a single command is
// repeated until all is done, like one in a pipeline.
func TestACancelOnAQuorumsServerLetsAllReadersIn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.srv.Rdb, "", time.Minute)
		s.listen("B")
		owner := s.acquireOf(s.writer("A"))
		owner.Ticket = 1
		s.gets(s.must(s.do(owner)))
		var readers []string
		for i := range uint64(250) {
			c := s.acquireOf(s.reader("B"))
			c.Ticket = 10 + 10*i
			s.must(s.do(c))
			readers = append(readers, c.ID)
		}
		if r := s.answerOf(owner.ID, 0); !r.Owned {
			t.Errorf("the owner's cancel: %+v", r)
		}
		s.owned(readers...)
		s.raw("DEL", s.srv.mark)
	})
}

// Where an acquire had no answer, what a cancel says about its owner is to prove that nobody else
// has owned since: the lock's last token as it was before the next one got the lock, also where the
// owner's is another server's.
func TestACancelThatIsToProveSomethingTellsTheLastToken(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.srv.Rdb, "", time.Minute)
		for i, ahead := range []uint64{0, 1_000_000} {
			owner, next := s.acquireOf(s.writer("A")), s.acquireOf(s.writer("B"))
			owner.Ticket, next.Ticket = 1, 10
			want, last := s.gets(s.must(s.do(owner))), uint64(0)
			s.must(s.do(next))
			if ahead > 0 {
				want += ahead
				last = want
			}
			r := s.srv.Cancel(t.Context(), []protocol.CancelRequest{{ID: owner.ID, Keys: &s.keys, Last: last, Prove: true}})[0]
			if r.Fail != nil || !r.Owned || r.Token != want {
				t.Errorf("%d: %+v, the token was %d", i, r, want)
			}
			s.owned(next.ID)
			s.cancel(next.ID, 0)
		}
		s.raw("DEL", s.srv.mark)
	})
}

// A vote finds a key of another type before it writes anything, though its shortcut reads
// several keys by a command that takes such a key for a missing one.
func TestAKeyOfAnotherTypeStopsAVote(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.rdb, strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", "")), time.Minute)
		all := s.keys.All()
		for _, key := range []any{all[0], all[1], all[2], all[4], s.srv.mark} {
			for _, owned := range []bool{false, true} {
				s.clear()
				s.raw("DEL", s.srv.mark)
				s.raw("SET", s.srv.mark, "1")
				if owned {
					s.gets(s.acquire(s.writer("A")))
				}
				s.raw("DEL", key)
				s.raw("HSET", key, "a", "b")
				s.raw("PEXPIRE", key, 60_000)
				before := s.photo()
				for _, first := range []bool{true, false} {
					cmd := s.acquireOf(s.writer("B"))
					cmd.First = first
					_, err := s.do(cmd)
					if after := s.photo(); !wrongType(err) || after != before {
						t.Errorf("%v, owned %v, first %v: %v, after it had made of\n%s\nthis\n%s", key, owned, first, err, before, after)
					}
				}
				if v, err := s.rdb.HGet(t.Context(), key.(string), "a").Result(); v != "b" {
					t.Errorf("%v, owned %v: it changed the key of another type: %v", key, owned, err)
				}
				s.raw("DEL", key)
			}
		}
		s.clear()
		s.raw("DEL", s.srv.mark)
	})
}

// From the second vote on the server leaves its mark out, because the client says that it knows
// it; and a client that believes in another one learns of it.
func TestAClientLearnsTheMarkOfAServer(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = NewMember(s.srv.Rdb, strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", "")), time.Minute)
		marks := []string{"1000000000000001", "1000000000000002"}
		for _, mark := range marks {
			s.raw("SET", s.srv.mark, mark)
			for range 2 {
				id := s.writer("A")
				if a := s.must(s.do(s.newcomer(id))); s.gets(a) == 0 || a.Mark != 0 {
					t.Errorf("%+v", a)
				}
				s.release(id, 0)
			}
			if known := s.srv.settled.Load(); known == nil || *known != any(mark) {
				t.Errorf("the client knows %v, want %s", known, mark)
			}
		}
		fresh := strconv.FormatInt(s.now()*1000-1_000_000, 10)
		s.raw("SET", s.srv.mark, fresh)
		if a := s.must(s.do(s.newcomer(s.writer("A")))); strconv.FormatUint(a.Mark, 10) != fresh {
			t.Errorf("%+v, want the mark %s", a, fresh)
		}
		var ahead any = "9000000000000000" // since the clock was set back
		s.raw("SET", s.srv.mark, ahead)
		s.srv.settled.Store(&ahead)
		s.clear()
		if a := s.must(s.do(s.newcomer(s.writer("A")))); a.Mark == 0 || s.raw("GET", s.srv.mark) == ahead {
			t.Errorf("%+v, want a new mark", a)
		}
		s.raw("DEL", s.srv.mark)
		s.clear()
	})
}

// A vote leaves its mark out only where that is older than the quarantine, however long that is.
func TestAVoteTellsTheMarkForAsLongAsTheQuarantine(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		prefix := strings.TrimSuffix(s.srv.Inboxes, protocol.InboxChannel("", ""))
		for _, quarantine := range []time.Duration{time.Minute, 2 * time.Hour} {
			s.srv = NewMember(s.rdb, prefix, quarantine)
			for _, age := range []time.Duration{0, 50 * time.Second, 100 * time.Minute, 3 * time.Hour} {
				mark := uint64((time.Duration(s.now())*time.Millisecond - age).Microseconds())
				s.raw("SET", s.srv.mark, strconv.FormatUint(mark, 10))
				id := s.writer("A")
				a := s.must(s.do(s.newcomer(id)))
				s.gets(a)
				if a.Mark != mark && (age < quarantine || a.Mark != 0) {
					t.Errorf("a mark of %v ago, quarantine %v: the answer says %d, want %d", age, quarantine, a.Mark, mark)
				}
				if a.Mark != 0 && age > quarantine {
					t.Errorf("a mark of %v ago, quarantine %v: the answer has it still", age, quarantine)
				}
				s.release(id, 0)
			}
		}
		s.raw("DEL", s.srv.mark)
	})
}

// The scripts count in milliseconds, and the client in nanoseconds: it would take a mark that was left
// out within the last part of the quarantine for one that is older.
func TestAVoteTellsTheMarkUntilTheQuarantineIsOverToTheMicrosecond(t *testing.T) {
	m := redistest.MiniTCP(t)
	s := newScene(t, clientOf(t, m.Addr()), "", "x")
	now := time.UnixMilli(1_700_000_000_000)
	for _, quarantine := range []time.Duration{time.Minute, time.Minute + time.Microsecond, time.Minute + 999*time.Microsecond} {
		now = now.Add(time.Hour) // past the last token, or the long way is taken, which always tells the mark
		m.SetTime(now)
		s.srv = NewMember(s.rdb, "", quarantine)
		mark := uint64(now.Add(-quarantine).UnixMicro())
		s.raw("SET", s.srv.mark, strconv.FormatUint(mark, 10))
		id := s.writer("A")
		a := s.must(s.do(s.newcomer(id)))
		s.gets(a)
		if a.Mark != mark {
			t.Errorf("at the end of a quarantine of %v the answer says %d, want %d", quarantine, a.Mark, mark)
		}
		s.release(id, 0)
	}
}
