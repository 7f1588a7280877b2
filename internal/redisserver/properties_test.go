package redisserver

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redistest"
)

// scatterings is the number of random states on which each property is checked.
func scatterings() int64 {
	if race.Enabled {
		return 10
	}
	if testing.Short() {
		return 50
	}
	return 300
}

// All scripts can run twice, except evict, whose second run evicts the next owner. Entries that a
// grant to a writer leaves behind are cleaned up by the next call, so the comparison ignores them.
func TestEachScriptRunTwiceHasTheEffectOfOnce(t *testing.T) {
	t.Parallel()
	onScripts(t, func(t *testing.T, s *scene) {
		for seed := range scatterings() {
			began := time.Now()
			x := scatter(seed, s.now())
			st := x.step(rand.New(rand.NewSource(seed)))
			s.put(x)
			before := s.look()
			if before.value == "" && len(before.readers) > 0 {
				// The marker was deleted. The first run may restore it, and only then can
				// the second run see readers whose leases have to be cut.
				continue
			}
			one := s.take(st)
			mid := s.look().settled()
			two := s.take(step{what: st.what, id: st.id, next: st.next, used: min(st.used, 1), cool: st.cool})
			after := s.look().settled()
			if provisionalEnds(began) {
				continue
			}
			if mid.shape(&ranks{}) != after.shape(&ranks{}) || mid.token() != after.token() {
				t.Fatalf("seed %d: %+v\nstate\n%s\nonce (%+v)\n%s\ntwice (%+v)\n%s", seed, st, before.shape(&ranks{}), one, mid.shape(&ranks{}), two, after.shape(&ranks{}))
			}
			if d := mid.drift(after, after.clock-before.clock+stalled); d != "" {
				t.Fatalf("seed %d: %+v: %s\nstate\n%s\nonce (%+v)\n%s", seed, st, d, before.shape(&ranks{}), one, mid.shape(&ranks{}))
			}
			// A reader that asks again may get a later reader's token.
			asked := st.id
			if st.what == "yield" || st.what == "downgrade" {
				asked = st.next
			}
			token := one.Token == two.Token || strings.HasPrefix(asked, "leased1:r") && one.Token < two.Token
			token = token || protocol.NewerFormat(before.meta) // a later format wrote the token, and the answer's token is the time
			same := one.Outcome == two.Outcome && token && one.Blocker == two.Blocker && one.Place >= two.Place
			if gone := st.what == "release" && one.Outcome == protocol.Done && two.Outcome == protocol.NotOurs; !same && !gone {
				t.Fatalf("seed %d: %+v\nstate\n%s\nanswers %+v, then %+v", seed, st, before.shape(&ranks{}), one, two)
			}
		}
	})
}

// stalled is by how many ms more than the clock shows two expiries may differ when what two runs leave is
// compared: the embedded server records a wrong expiry if the machine stalls in the middle of a script.
// A rule that a script leaves out makes a difference of a second or more.
const stalled = 500

// recheck_fast.lua, acquire_fast.lua and release_fast.lua do the same as the scripts that follow them, in
// fewer calls: the answers, messages and keys are equal.
func TestTheShortcutsDoWhatTheLongWayDoes(t *testing.T) {
	t.Parallel()
	onScripts(t, func(t *testing.T, s *scene) {
		rounds := 3*scatterings() + 500
		if race.Enabled {
			rounds = 3 * scatterings()
		}
		s.compareShortcuts(rounds)
	})
}

// The same if the server's clock has fewer digits, or needs leading zeros in its microseconds. A shortcut
// that misreads such a time leaves the work to the long way, so it would hardly be used.
func TestTheShortcutsDoWhatTheLongWayDoesByAnyClock(t *testing.T) {
	t.Parallel()
	rounds := int64(500)
	if race.Enabled {
		rounds = scatterings()
	}
	for _, us := range []int64{900_000_000_000_042, 1_700_000_000_000_000, 1_700_000_000_099_999, 8_999_999_999_000_007} {
		m := redistest.MiniTCP(t)
		m.SetTime(time.UnixMicro(us))
		newScene(t, clientOf(t, m.Addr()), "", "x").compareShortcuts(rounds)
	}
}

// compareShortcuts takes steps in random states, with and without the shortcuts.
func (s *scene) compareShortcuts(rounds int64) {
	t := s.t
	t.Helper()
	quick := map[string]Script{"acquire": AcquireScript, "release": ReleaseScript}
	alone := loadScript("recheck_fast", "acquire_fast")
	slow := map[string]Script{"acquire": loadScript("acquire_arguments", "common", "acquire"), "release": loadScript("release_arguments", "common", "release")}
	inboxes := []*listener{s.listen("A"), s.listen("B")} // C has none
	shortcuts := map[string]int{}
	for seed := range rounds {
		began, started := s.now(), time.Now()
		x := scatter(seed, began)
		rng := rand.New(rand.NewSource(seed))
		what := []string{"acquire", "release"}[rng.Intn(2)]
		id := x.ids[rng.Intn(len(x.ids))]
		switch rng.Intn(9) { // the common cases are too rare in random states
		case 8:
			x.contested(rng, began)
			x.only(0, 4)          // nobody waits
			if rng.Intn(4) == 0 { // the clock was set back
				x.commands = append(x.commands, []any{"PEXPIRE", 0, 7_200_000})
			} else if rng.Intn(4) == 0 { // somebody has removed the expiry
				x.commands = append(x.commands, []any{"PERSIST", 0})
			}
			if rng.Intn(4) == 0 {
				x.commands = append(x.commands, []any{"ZADD", 3, began - 60_000, "dead"}, []any{"PEXPIRE", 3, 900_000})
			}
			id = x.ids[0]
			if what == "acquire" {
				for maker := (scene{made: 900_000}); id == x.ids[0] || !first(id); {
					id = maker.writer("A")
				}
			}
		case 0:
			x.only(map[string]int{"acquire": 4, "release": 0}[what], 4)
			id = x.ids[0]
		case 1:
			x.contested(rng, began)
			id = x.ids[0]
		case 2, 3:
			x.joined(rng, began)
			id = x.ids[map[string]int{"acquire": 1, "release": 0}[what]]
		case 4, 5, 6:
			x.joined(rng, began)
			if ends := []int64{-60_000, 0, 0, 0, 7_200_000}[rng.Intn(5)]; ends != 0 && len(x.ids) > 3 { // the head's lease
				x.commands = append(x.commands, []any{"ZADD", 3, began + ends, x.ids[2]})
			}
			id = x.ids[2]
			for _, waiter := range x.ids[3:] {
				if !first(waiter) && (first(id) || rng.Intn(2) == 0) {
					id = waiter
				}
			}
		}
		used := []uint64{0, 0, 1, 7_200_000_000}[rng.Intn(4)]
		var cool time.Duration // other than 0, it takes the long way
		if rng.Intn(4) == 0 {
			cool = someCooldown(rng)
		}
		if what == "acquire" { // its answer does not show whether it took the shortcut
			s.put(x)
			r, short := s.runScript(what, &alone, id, 0, 0)
			if short || r.err == nil {
				kind := ""
				switch {
				case r.Outcome != protocol.Enqueued:
				case !first(id) && r.Place == 0:
					kind = " again, at the head"
				case !first(id):
					kind = " again"
				case r.Place == 0:
					kind = " first"
				}
				shortcuts[fmt.Sprint("acquire ", r.Outcome, kind)]++
			}
			for _, l := range inboxes {
				l.received()
			}
		}
		var got [2]string
		var errs [2]error
		var after [2]*state
		for i, sc := range []Script{quick[what], slow[what]} {
			s.put(x)
			var names ranks
			last := s.look().token()
			names.name(last)
			names.name(last + used) // later tokens must be above it
			given := uint64(0)
			if used > 0 {
				given = last + used
			}
			r, short := s.runScript(what, &sc, id, given, cool)
			if short && what == "release" {
				shortcuts[fmt.Sprint(what, " handed ", r.Handed)]++
			}
			after[i] = s.look()
			got[i] = r.meaning(&names)
			for _, l := range inboxes {
				for _, m := range l.received() {
					if m.Kind == protocol.MessageEcho && r.Outcome == protocol.Granted {
						continue // it proves no more than the answer does
					}
					got[i] += fmt.Sprint("\ntold ", m.Kind, " ", m.ID, " ", names.name(m.Token), " ", m.Token >= m.Clock, " ", m.More, " ", m.Link)
				}
			}
			got[i] += "\n" + after[i].shape(&names)
			errs[i] = r.err
		}
		if provisionalEnds(started) {
			continue
		}
		if got[0] != got[1] {
			t.Fatalf("seed %d: %s %s\nquick %s\nslow  %s\nerrors %v and %v", seed, what, id, got[0], got[1], errs[0], errs[1])
		}
		if d := after[0].drift(after[1], after[1].clock-began+stalled); d != "" {
			t.Fatalf("seed %d: %s %s: %s", seed, what, id, d)
		}
	}
	for _, usual := range []string{"acquire 1", "acquire 2", "acquire 2 first", "acquire 2 again", "acquire 2 again, at the head", "release handed 0", "release handed 1"} {
		if shortcuts[usual] < 3 && !race.Enabled {
			t.Errorf("the shortcuts were hardly used: %v", shortcuts)
		}
	}
}

// A brief re-check of a request that still waits, by the waiting lease that its client knows, extends that
// lease and does nothing else. Any other is answered like a full one, and has the same effect: so it
// never shortens a lease, nor is a request that was queued anew taken for one that has waited.
func TestABriefReCheckIsAFullOneOfARequestThatWaitsNoMore(t *testing.T) {
	t.Parallel()
	onScripts(t, func(t *testing.T, s *scene) {
		inboxes := []*listener{s.listen("A"), s.listen("B")} // C has none
		told := func(names *ranks) (all string) {
			for _, l := range inboxes {
				for _, m := range l.received() {
					all += fmt.Sprint("\ntold ", m.Kind, " ", m.ID, " ", m.Nonce, " ", names.name(m.Token), " ", m.More)
				}
			}
			return all
		}
		answers := map[string]int{}
		for seed := range 2 * scatterings() {
			began, started := s.now(), time.Now()
			x := scatter(seed, began)
			rng := rand.New(rand.NewSource(seed))
			if rng.Intn(2) == 0 {
				x.joined(rng, began)
			}
			c := s.acquireOf(x.ids[rng.Intn(len(x.ids))])
			c.Echo = []string{"", "7"}[rng.Intn(2)]
			s.put(x)
			before := s.look()
			ends, waits := before.waiters[c.ID]
			known := ends
			switch {
			case !waits:
				known = began
			case rng.Intn(2) == 0:
				known += []int64{-1, 1, -50_000, 50_000}[rng.Intn(4)]
			}
			until := known + []int64{1, 50_000, 7_200_000}[rng.Intn(3)]
			c.Waits, c.Until = uint64(known), uint64(until)
			got, err := s.do(c)
			var names ranks
			names.name(before.token())
			said, after := told(&names), s.look()
			if got.Brief {
				answers["brief"]++
				if !waits || ends != known || after.waiters[c.ID] != until {
					t.Fatalf("seed %d: a waiting lease until %d was taken for one until %d, and extended to %d, want %d", seed, ends, known, after.waiters[c.ID], until)
				}
				after.waiters[c.ID] = before.waiters[c.ID]
				want, wantSaid := protocol.Answer{Outcome: protocol.Enqueued, Brief: true}, ""
				switch listens := strings.HasSuffix(c.ID, "A") || strings.HasSuffix(c.ID, "B"); {
				case c.Echo == "":
					want.Echo = protocol.NoEcho
				case listens:
					want.Echo, wantSaid = 1, "\ntold echo  7 none false"
				}
				if got != want || err != nil || said != wantSaid {
					t.Fatalf("seed %d: %+v, %v; told %q", seed, got, err, said)
				}
				after.clock = before.clock // by which leases are called dead
				if was, is := before.shape(&ranks{}), after.shape(&ranks{}); was != is {
					t.Fatalf("seed %d: made of\n%s\nthis\n%s", seed, was, is)
				}
				if d := before.drift(after, fuzz+stalled); d != "" {
					t.Fatalf("seed %d: %s", seed, d)
				}
				continue
			}
			if waits && ends == known && err == nil {
				t.Fatalf("seed %d: %s waits, and the answer is %+v", seed, c.ID, got)
			}
			answers["full"]++
			brief := result{Answer: got, failed: err != nil}
			quick := brief.meaning(&names) + said + after.shape(&names)
			s.put(x)
			c.Waits, c.Until = 0, 0
			got, err = s.do(c)
			full := result{Answer: got, failed: err != nil}
			names = ranks{}
			names.name(before.token())
			said, after = told(&names), s.look()
			if slow := full.meaning(&names) + said + after.shape(&names); quick != slow && !provisionalEnds(started) {
				t.Fatalf("seed %d: brief\n%s\nfull\n%s", seed, quick, slow)
			}
		}
		for _, kind := range []string{"brief", "full"} {
			if answers[kind] < 10 && !race.Enabled {
				t.Errorf("answers: %v", answers)
			}
		}
		s.clear()
	})
}

// vote_fast.lua, and release_fast.lua before a cancel, do the same as the scripts that follow
// them, with two exceptions: vote_fast.lua notifies the owner only of a request that is first in
// the queue, and lets the queue's keys live for at least two TTLs instead of three.
func TestTheShortcutsOfAVoteDoWhatTheLongWayDoes(t *testing.T) {
	t.Parallel()
	quick := map[string]Script{"acquire": VoteAcquireScript, "release": ReleaseScript, "cancel": VoteCancelScript}
	voting := loadScript("vote_before", "acquire_arguments", "common", "acquire", "vote_after")
	voting.Text = ticketLast + voting.Text.(string)
	voting.Sha = hash([]byte(voting.Text.(string)))
	slow := map[string]Script{"acquire": voting,
		"release": loadScript("release_arguments", "common", "release"), "cancel": loadScript("release_arguments", "common", "cancel")}
	onScripts(t, func(t *testing.T, s *scene) {
		inboxes := []*listener{s.listen("A"), s.listen("B")} // C has none
		mark := s.keys.Lock + ":mark"
		shortcuts := map[string]int{}
		for seed := range 3 * scatterings() {
			began, started := s.now(), time.Now()
			x := scatter(seed, began)
			rng := rand.New(rand.NewSource(seed))
			what := []string{"acquire", "release", "cancel"}[rng.Intn(3)]
			id := x.ids[rng.Intn(len(x.ids))]
			ticket := []uint64{uint64(began * 1000), uint64(rng.Intn(6))}[rng.Intn(2)]
			used := []uint64{0, 1, ^uint64(4), 1_000_000, 7_200_000_000}[rng.Intn(5)] // one makes a token below the last

			switch rng.Intn(4) { // the common cases are too rare in random states
			case 0:
				x.only(map[string]int{"acquire": 4}[what], 4)
				id = x.ids[0]
			case 3:
				x.joined(rng, began)
				id = x.ids[2+rng.Intn(len(x.ids)-2)]
			case 1, 2:
				x.contested(rng, began)
				id = x.ids[0]
				if rng.Intn(2) == 0 {
					x.only(0, 4) // nobody waits
				}
				if rng.Intn(3) == 0 { // the clock was set back
					x.commands = append(x.commands, []any{"PEXPIRE", 0, 7_200_000})
				}
				if what == "acquire" {
					id = (&scene{made: 900_000}).writer("A")
				}
			}
			marked := []string{"1", settled, settled, "", "9007199254740000", "nonsense"}[rng.Intn(6)]
			known := []string{unknownMark, settled, marked, marked}[rng.Intn(4)] // by the client
			var got [2]string
			var errs [2]error
			var after [2]*state
			for i, sc := range []Script{quick[what], slow[what]} {
				s.put(x)
				s.raw("DEL", mark)
				if marked != "" {
					s.raw("SET", mark, marked)
				}
				var names ranks
				last := max(s.look().token(), 10)
				names.name(last)
				names.name(last + used) // later tokens must be above it
				var r result
				if what == "acquire" {
					r = s.runVote(&sc, id, mark, known, ticket, func(text string) { got[i] += text }, func() { shortcuts[fmt.Sprint("acquire ", owned(s))]++ })
				} else {
					given := uint64(0)
					if used > 0 {
						given = last + used
					}
					r = s.runEnd(what, &sc, id, given, func() { shortcuts[what]++ })
				}
				after[i] = s.look()
				expired := 0
				for waiter, ends := range after[i].settled().waiters {
					if ends <= after[i].clock {
						delete(after[i].waiters, waiter)
						expired++
					}
				}
				if expired > 0 && len(after[i].waiters) == 0 {
					after[i].ends[3] = 0
				}
				got[i] += r.meaning(&names)
				for _, l := range inboxes {
					for _, m := range l.received() {
						if what == "acquire" && m.Kind == protocol.MessageWanted && r.Place > 0 {
							continue
						}
						got[i] += fmt.Sprint("\ntold ", m.Kind, " ", m.ID, " ", names.name(m.Token), " ", m.Token >= m.Clock, " ", m.More, " ", m.Link)
					}
				}
				got[i] += "\n" + after[i].shape(&names)
				errs[i] = r.err
			}
			if provisionalEnds(started) {
				continue
			}
			if got[0] != got[1] {
				t.Fatalf("seed %d: %s %s\nquick %s\nslow  %s\nerrors %v and %v", seed, what, id, got[0], got[1], errs[0], errs[1])
			}
			for _, key := range []int{1, 3} {
				if least := 2*ttlOf(t, id).Milliseconds() - fuzz; what == "acquire" && after[0].left(after[0].ends[key]) >= least {
					after[0].ends[key] = after[1].ends[key]
				}
			}
			if d := after[0].drift(after[1], after[1].clock-began+stalled); d != "" {
				t.Fatalf("seed %d: %s %s: %s", seed, what, id, d)
			}
		}
		s.raw("DEL", mark)
		for _, usual := range []string{"acquire free", "acquire taken", "release", "cancel"} {
			if shortcuts[usual] < 3 && !race.Enabled {
				t.Errorf("the shortcuts were hardly used: %v", shortcuts)
			}
		}
	})
}

// settled is a mark that was set long ago.
const settled = "1000000000000001"

// ticketLast does what vote_fast.lua does for the script behind it.
const ticketLast = "ARGV[#ARGV] = string.match(ARGV[3], '%d+', 2)\n"

// owned says, after an acquire, whether it found the lock free.
func owned(s *scene) string {
	if s.look().queue == nil || len(s.look().queue) == 0 {
		return "free"
	}
	return "taken"
}

// runVote runs a script with the arguments of acquire on a quorum's server. It passes what the script
// says about the mark to say, and calls shortcut if the script took its shortcut, whose reply is not
// nested.
func (s *scene) runVote(sc *Script, id, mark, known string, ticket uint64, say func(string), shortcut func()) (r result) {
	s.t.Helper()
	all, ttl := s.keys.All(), ttlOf(s.t, id)
	val, err := s.srv.run(context.Background(), sc, append(all[:], mark), id, Milliseconds(ttl), fmt.Sprint(2, ticket, " ", s.srv.Inboxes), known)
	if err != nil {
		return result{failed: true, err: err}
	}
	if text, ok := val.(string); ok {
		if s.raw("GET", mark) != any(known) {
			s.t.Errorf("the mark %v was left out, the client knows %v", s.raw("GET", mark), known)
		}
		say("mark set anew false ")
		shortcut()
		r.Answer, err = granted(text)
		if err != nil {
			s.t.Fatal(err)
		}
		return r
	}
	reply := val.([]any)
	said := "no mark "
	if _, err := strconv.ParseUint(reply[0].(string), 10, 53); err == nil {
		said = fmt.Sprint("mark set anew ", reply[0].(string) > settled, " ")
	}
	say(said)
	if nested, ok := reply[1].([]any); ok {
		reply = nested
	} else {
		shortcut()
		reply = reply[1:]
		if len(reply) == 1 {
			if r.Answer, err = granted(reply[0].(string)); err != nil {
				s.t.Fatal(err)
			}
			return r
		}
	}
	if r.Answer, err = parseAnswer(reply); err != nil {
		s.t.Fatal(err)
	}
	return r
}

// runEnd runs a script with the arguments of release or cancel, and calls shortcut if the script took
// its shortcut, whose reply is a number.
func (s *scene) runEnd(what string, sc *Script, id string, last uint64, shortcut func()) (r result) {
	s.t.Helper()
	all := s.keys.All()
	val, err := s.srv.run(context.Background(), sc, all[:], id, "span "+s.srv.Inboxes, strconv.FormatUint(last, 10))
	if err != nil {
		return result{failed: true, err: err}
	}
	if n, ok := val.(int64); ok {
		shortcut()
		r.Answer = protocol.Answer{Outcome: protocol.Done, Handed: int(n)}
		return r
	}
	reply := val.([]any)
	if r.Answer, err = parseAnswer(reply); err != nil {
		s.t.Fatal(err)
	}
	if what == "cancel" && reply[2] == int64(0) { // the request did not own the lock
		r.Outcome, r.Token = protocol.NotOurs, uint64(reply[3].(int64))
	}
	return r
}

// granted parses the reply of a shortcut that grants the lock: only the token.
func granted(text string) (protocol.Answer, error) {
	token, err := parseToken(text)
	return protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: token, Echo: protocol.NoEcho}, err
}

// runScript runs a script with the arguments of acquire or release, and reports whether its
// reply is a single value, which only the shortcuts return.
func (s *scene) runScript(what string, sc *Script, id string, last uint64, cool time.Duration) (r result, short bool) {
	s.t.Helper()
	all := s.keys.All()
	args := withCooldown(cool, id, "span "+s.srv.Inboxes, strconv.FormatUint(last, 10))
	if what == "acquire" {
		args = []any{id, Milliseconds(ttlOf(s.t, id)), "2 " + s.srv.Inboxes}
		if !first(id) {
			args[2] = "1 " + s.srv.Inboxes
			if id[len(id)-1]%2 == 1 {
				args = append(args, "7")
			}
		}
	}
	val, err := s.srv.run(context.Background(), sc, all[:], args...)
	if err != nil {
		return result{failed: true, err: err}, false
	}
	switch reply := val.(type) {
	case int64:
		r.Answer = protocol.Answer{Outcome: protocol.Done, Handed: int(reply)}
		return r, true
	case string:
		if r.Answer, err = granted(reply); err != nil {
			s.t.Fatal(err)
		}
		return r, true
	case []any:
		r.Answer, err = parseAnswer(reply)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return r, false
}

// A script that uses a key of another type fails before it writes anything. A script that does not use
// that key may do all of its work, and leaves the key alone.
func TestAKeyOfAnotherTypeStopsAScriptBeforeItsFirstWrite(t *testing.T) {
	t.Parallel()
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
			broken := s.keys.All()[rng.Intn(5)]
			s.raw("DEL", broken)
			s.raw("HSET", broken, "a", "b")
			s.raw("PEXPIRE", broken, 60_000)
			before := s.photo()
			if r := s.take(st); r.failed || st.what == "renew" && r.Outcome == protocol.NotOurs && broken == s.keys.Lock {
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

func TestInspectWritesNothing(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for seed := range scatterings() / 4 {
			s.put(scatter(seed, s.now()))
			before := s.photo()
			if _, err := s.srv.Inspect(context.Background(), &s.keys); err != nil && !errors.Is(err, redis.Nil) {
				t.Fatal(err)
			}
			if after := s.photo(); after != before {
				t.Fatalf("seed %d: made of\n%s\nthis\n%s", seed, before, after)
			}
		}
	})
}

func TestInspectShowsWhoWaitsAndIsAlive(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		s.acquire(s.writer("A"))
		ids := s.crowd(1100, s.now()+30_000)
		look := func(want []string, length int) {
			t.Helper()
			sn, err := s.srv.Inspect(context.Background(), &s.keys)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(sn.Queue, want) || sn.Length != length {
				t.Errorf("%d of %d wait; want %d of %d", len(sn.Queue), sn.Length, len(want), length)
			}
		}
		look(ids[:1000], 1100)
		for _, i := range []int{0, 7, 999, 1000, 1099} { // of the head, of those that are shown, and of the rest
			s.dies(ids[i])
		}
		look(slices.Concat(ids[1:7], ids[8:999]), 1095)
		s.clear()
	})
}

// photo returns the content of every key of the lock, of whatever type, and whether it has an
// expiry.
func (s *scene) photo() string {
	s.t.Helper()
	var b strings.Builder
	ctx := context.Background()
	for _, k := range s.keys.All() {
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
