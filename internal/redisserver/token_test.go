package redisserver

import (
	"strconv"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A token is max(previous + 1, the server's TIME in µs); see docs/design.md, section 3.

func TestATokenIsTheServersTime(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var top uint64
		for range 3 {
			id := s.writer("A")
			a := s.acquire(id)
			if token := s.gets(a); token != a.Clock || token <= top {
				t.Errorf("token %d at %d, after %d", token, a.Clock, top)
			}
			top = a.Token
			s.release(id, 0)
		}
	})
}

// Tokens follow the clock, so losing all keys does not make them go back.
func TestTokensGrowThoughEverythingIsForgotten(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var top uint64
		for range 5 {
			id := s.writer("A")
			if token := s.gets(s.acquire(id)); token <= top {
				t.Errorf("token %d after %d", token, top)
			} else {
				top = token
			}
			s.clear()
		}
	})
}

func TestATokenOutlivesTheLock(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, ttl := range []time.Duration{time.Second, time.Hour} {
			s.clear()
			id := s.id("A", protocol.Exclusive, ttl)
			s.gets(s.acquire(id))
			s.release(id, 0)
			keep := max(10*time.Minute, 4*ttl).Milliseconds()
			if st := s.look(); st.left(st.ends[4]) > keep || st.left(st.ends[4]) < keep-5000 {
				t.Errorf("TTL %v: the last token is kept for %d ms", ttl, st.left(st.ends[4]))
			}
		}
	})
}

// Local hand-offs assign tokens that Redis does not know until the release.
func TestReleaseAndYieldAndCancelCarryTheLastTokenUsed(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			for _, verb := range []string{"release", "yield", "cancel"} {
				s.clear()
				id, next := s.id("A", m, long), s.writer("A")
				used := s.gets(s.acquire(id)) + 3_600_000_000 // an hour ahead of the clock
				switch verb {
				case "release":
					s.release(id, used)
				case "yield":
					if token := s.gets(s.yield(id, next, used)); token != used+1 {
						t.Errorf("%v: yield grants %d after %d", m, token, used)
					}
					s.release(next, 0)
					used++
				case "cancel":
					s.cancel(id, used)
				}
				if token := s.look().token(); token != used {
					t.Errorf("%v %s: the server has %d, want %d", m, verb, token, used)
				}
				if token := s.gets(s.acquire(next)); token != used+1 {
					t.Errorf("%v %s: %d after %d", m, verb, token, used)
				}
			}
		}
	})
}

// A lower token may come from a late command.
func TestALowerTokenNeverLowersTheServers(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, back := range []string{"release", "yield", "cancel"} {
			id, next := s.writer("A"), s.writer("B")
			token := s.gets(s.acquire(id))
			s.acquire(next)
			switch back {
			case "release":
				s.release(id, token-1000)
			case "yield":
				s.yield(id, s.writer("A"), token-1000)
			case "cancel":
				s.cancel(id, token-1000)
			}
			if now := s.look().token(); now <= token {
				t.Errorf("%s: token %d after %d", back, now, token)
			}
			s.clear()
		}
	})
}

// Nobody waits, so no newer token hides it. Readers' releases take no shortcut.
func TestALowerTokenNeverLowersWhatTheServerRemembers(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.reader("A")
		token := s.gets(s.acquire(id))
		s.release(id, token-1000)
		if now := s.look().token(); now != token {
			t.Errorf("token %d after %d", now, token)
		}
	})
}

// Rule 10: a value that cannot be a token is ignored.
func TestAnAbsurdTokenIsIgnored(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		id := s.writer("A")
		token := s.gets(s.acquire(id))
		s.release(id, 1<<53)
		if now := s.look().token(); now != token {
			t.Errorf("the server took %d for a token", now)
		}
		for _, meta := range []string{"leased1:99999999999999999999:1", "leased1:-5:1", "leased1:x", "garbage", "leased1:9007199254740993:1"} {
			s.raw("SET", s.keys.Meta(), meta, "PX", 60_000)
			id := s.writer("A")
			if a := s.acquire(id); s.gets(a) != a.Clock {
				t.Errorf("%q: token %d at %d", meta, a.Token, a.Clock)
			}
			s.release(id, 0)
		}
	})
}

// Rule 4: the last token is the floor by which a client ignores messages about earlier grants.
func TestQueuedAndRefusedCarryTheLastToken(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		owner, waiter := s.writer("A"), s.writer("B")
		token := s.gets(s.acquire(owner))
		if a := s.acquire(waiter); a.Token != token {
			t.Errorf("queued at floor %d, want %d", a.Token, token)
		}
		if a := s.try(s.writer("C")); a.Token != token {
			t.Errorf("refused at floor %d, want %d", a.Token, token)
		}
		next := s.writer("A")
		inbox := s.listen("B")
		a := s.waits(s.yield(owner, next, 0), 0)
		m := inbox.receives(waiter, protocol.MessageGranted)[0]
		if m.Token <= token || a.Token != m.Token {
			t.Errorf("floor %d, granted %d, before %d", a.Token, m.Token, token)
		}
	})
}

// A shared grant's token is above every earlier writer's and below every later one's.
func TestReadersTokensStandBetweenWriters(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		var top uint64
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared, protocol.Shared, protocol.Exclusive, protocol.Shared, protocol.Exclusive} {
			id := s.id("A", m, long)
			token := s.gets(s.acquire(id))
			if token <= top {
				t.Errorf("%v: token %d after %d", m, token, top)
			}
			top = token
			s.release(id, 0)
		}
	})
}

// The re-check of an owner must not answer token 0 after the last token was lost.
func TestAnOwnerWhoseTokenWasForgottenGetsOneByTheClock(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
			id := s.id("A", m, long)
			token := s.gets(s.acquire(id))
			s.raw("DEL", s.keys.Meta())
			if again := s.gets(s.acquire(id)); again <= token {
				t.Errorf("%v: %d after %d", m, again, token)
			}
			s.release(id, 0)
		}
	})
}

func TestTokensGoOnByOneWhileTheClockIsBack(t *testing.T) {
	m := redistest.MiniTCP(t)
	s := newScene(t, clientOf(t, m.Addr()), "", "x")
	begin := time.UnixMilli(1_700_000_000_000)
	m.SetTime(begin)
	first := s.writer("A")
	top := s.gets(s.acquire(first))
	if top != uint64(begin.UnixMicro()) {
		t.Fatalf("token %d at %d", top, begin.UnixMicro())
	}
	s.release(first, 0)
	m.SetTime(begin.Add(-time.Hour))
	waiter, inbox := s.writer("B"), s.listen("B")
	for i := range 3 {
		id := s.writer("A")
		if token := s.gets(s.acquire(id)); token != top+1 {
			t.Errorf("acquire %d: token %d after %d", i, token, top)
		}
		s.acquire(waiter)
		inbox.received()
		s.release(id, 0)
		if got := inbox.receives(waiter, protocol.MessageGranted)[0]; got.Token != top+2 {
			t.Errorf("hand-off %d: token %d after %d", i, got.Token, top+1)
		}
		s.release(waiter, 0)
		top += 2
	}
	// The token is kept until the clock has reached it, however long nobody locks.
	m.SetTime(begin.Add(-time.Minute))
	last := s.writer("A")
	if token := s.gets(s.acquire(last)); token != top+1 {
		t.Errorf("after the lock was idle for most of an hour: token %d after %d", token, top)
	}
	s.release(last, 0)
	m.SetTime(begin.Add(time.Hour))
	if token := s.gets(s.acquire(s.writer("A"))); token != uint64(begin.Add(time.Hour).UnixMicro()) {
		t.Errorf("token %d when the clock is right again", token)
	}
}

// acquire_fast.lua compares tokens as text.
func TestATokenAheadOfTheClockByOneMicrosecondIsNotRepeated(t *testing.T) {
	for _, ahead := range []int64{-1, 0, 1} {
		m := redistest.MiniTCP(t)
		s := newScene(t, clientOf(t, m.Addr()), "", "x")
		now := time.UnixMilli(1_700_000_000_000)
		m.SetTime(now)
		last := now.UnixMicro() + ahead
		s.raw("SET", s.keys.Meta(), protocol.FormatTag+strconv.FormatInt(last, 10)+":"+strconv.FormatInt(last, 10), "PX", 60_000)
		if got, want := s.gets(s.acquire(s.writer("A"))), uint64(max(last+1, now.UnixMicro())); got != want {
			t.Errorf("%+d µs: token %d, want %d", ahead, got, want)
		}
	}
}

// The clock of a device without a battery may start in a year whose times in µs have fewer digits.
// Besides, early in a second, the microseconds have fewer than six.
func TestTokensGoOnWhereTheClockIsBackByADigit(t *testing.T) {
	for _, member := range []bool{false, true} {
		m := redistest.MiniTCP(t)
		s := newScene(t, clientOf(t, m.Addr()), "", "x")
		if member {
			s.srv = NewMember(s.srv.Rdb, "", time.Minute)
			s.raw("SET", s.srv.mark, "1")
		}
		now := time.UnixMicro(900_000_000_000_042)
		m.SetTime(now)
		id := s.writer("A")
		if token := s.gets(s.acquire(id)); token != uint64(now.UnixMicro()) {
			t.Errorf("token %d, want %d", token, now.UnixMicro())
		}
		const ahead = 1_700_000_000_000_000
		s.release(id, ahead)
		if left := s.raw("PTTL", s.keys.Meta()).(int64); left < 500_000_000_000 {
			t.Errorf("the token is kept for %d ms", left)
		}
		id = s.writer("A")
		if token := s.gets(s.acquire(id)); token != ahead+1 {
			t.Errorf("token %d, want %d", token, int64(ahead+1))
		}
		s.release(id, ahead+2)
		if left := s.raw("PTTL", s.keys.Meta()).(int64); left < 500_000_000_000 {
			t.Errorf("a later token is kept for %d ms", left)
		}
	}
}

// A later format may look like this one, with numbers in the same places.
func TestWhatALaterFormatRemembersIsNotOverwrittenWhereTheLockIsFree(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, format := range []string{"leased2:", "leased11:"} {
			later := format + "1000000000000000:1000000000000000"[len(format)-8:]
			s.raw("SET", s.keys.Meta(), later, "PX", 60_000)
			s.is(s.try(s.writer("A")), protocol.Refused)
			if got := s.raw("GET", s.keys.Meta()); got != later {
				t.Errorf("%v became %v", later, got)
			}
		}
		s.clear()
	})
}
