package quorum

import (
	"maps"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// All five servers answer a re-check with the grant, as at the end of a cool-down, but some ms apart, and
// the first grants are given back meanwhile because others wait behind them. The request still waits.
func TestARequestKeepsItsPlaceWhenItsGrantsAreGivenBackBeforeTheLastServerAnswers(t *testing.T) {
	s := newStand(t, 5, time.Second)
	first := s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	}
	if !first.Decided() || first.Err != nil {
		t.Fatalf("%+v %v", first.Answer, first.Err)
	}
	s.now = s.now.Add(200 * time.Millisecond)
	op := s.acquire()
	sends := s.fx.Sends
	yes := granted(7)
	yes.Answer.More = true // others wait behind it
	tick := func() {
		s.now = s.now.Add(3 * time.Millisecond)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
	}
	cancels := 0
	take := func(i int) {
		for _, more := range s.answer(sends[i], yes) {
			if more.Kind == Cancel {
				cancels++
			}
		}
	}
	take(0)
	take(1)
	tick()
	take(2)
	tick()
	take(3)
	take(4)
	if !op.Decided() || op.Err != nil || cancels > 0 {
		t.Errorf("all servers have answered: decided %v, %v, and %d cancels", op.Decided(), op.Err, cancels)
	}
}

// Requests of one instant may be in different orders on the servers, and then each gets back at once what
// it gives back. So after a few times it gets a later ticket, and is placed by it on the other servers,
// too.
func TestAGrantThatKeepsComingBackIsPlacedLater(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.lock.cfg.Ticket = func() uint64 { return 1000 }
	s.acquire()
	sends := s.fx.Sends
	behind := granted(7)
	behind.Answer.More = true
	enqueued := Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}}
	s.answer(sends[0], behind)
	for _, send := range sends[1:] {
		s.answer(send, enqueued)
	}
	last := uint64(1000)
	ids := map[int]string{1: sends[1].Cmd.ID, 2: sends[2].Cmd.ID}
	for n := 1; n <= 30; n++ {
		s.now = s.now.Add(maxKeep)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		var ticket uint64
		placed, left := map[int]uint64{}, map[int]bool{}
		before := maps.Clone(ids)
		for sends = s.fx.Sends; len(sends) > 0; sends = sends[1:] {
			send, res := sends[0], enqueued
			switch {
			case send.Kind == Cancel: // after the request has its new place, or others could enter in between
				if _, again := placed[send.Server]; !again || send.Cancel.ID != before[send.Server] {
					t.Fatalf("server %d: %s canceled, placed anew before: %v", send.Server, send.Cancel.ID, again)
				}
				left[send.Server], res = true, Result{}
			case send.Cmd.Verb == protocol.Yield:
				ticket = send.Cmd.Ticket
				behind.Answer.Token++
				res = behind
			default:
				placed[send.Server], ids[send.Server] = send.Cmd.Ticket, send.Cmd.ID
			}
			sends = append(sends, s.answer(send, res)...)
		}
		least := uint64(setBack) << min(max(0, n-patientGiveBacks), maxDoublings)
		later := ticket >= last+least && ticket < last+2*least
		if n < patientGiveBacks {
			later = ticket == 1000
		}
		if !later {
			t.Fatalf("given back %d times: ticket %d after %d", n, ticket, last)
		}
		if again := n >= patientGiveBacks; again != (len(placed) == 2) || again && (placed[1] != ticket || placed[2] != ticket || len(left) != 2) {
			t.Fatalf("given back %d times, with ticket %d: placed anew %v", n, ticket, placed)
		}
		last = ticket
	}
}

// aMinorityGrants has a request granted by the first server, where others wait, and queued on the rest.
func (s *stand) aMinorityGrants() (sends []*Send, grant Result) {
	s.acquire()
	sends, grant = s.fx.Sends, granted(7)
	grant.Answer.More = true
	s.answer(sends[0], grant)
	for _, send := range sends[1:] {
		s.answer(send, enqueues)
	}
	return sends, grant
}

// All servers are asked again under other ids at the time of a re-check. The answers to both count.
func TestAReCheckWaitsForARequestThatIsBeingPlacedAnew(t *testing.T) {
	s := newStand(t, 3, time.Second)
	_, wanted := s.aMinorityGrants()
	var under []*Send
	for range patientGiveBacks {
		for _, send := range under {
			wanted.Answer.Token++
			s.answer(send, wanted)
		}
		s.now = s.now.Add(maxKeep)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		under = s.fx.Sends
	}
	if len(under) != 3 {
		t.Fatalf("%d commands, want one to each server", len(under))
	}
	op := s.acquire()
	for under = append(under, s.fx.Sends...); len(under) > 0; under = under[1:] {
		res := enqueues
		if under[0].Kind == Cancel {
			res = Result{}
		}
		under = append(under, s.answer(under[0], res)...)
	}
	if !op.Decided() || op.Err != nil || op.Answer.Outcome != protocol.Enqueued {
		t.Errorf("decided %v, %v %v", op.Decided(), op.Answer.Outcome, op.Err)
	}
}

// storing returns a request that two of three servers have granted, with others behind it, and the command
// by which the second is to store the token of the first.
func storing(t *testing.T) (*stand, *Send) {
	t.Helper()
	s := newStand(t, 3, time.Second)
	s.acquire()
	sends := s.fx.Sends
	for _, send := range sends {
		s.answer(send, enqueues)
	}
	s.now = s.now.Add(time.Millisecond)
	s.fx = Effects{}
	for i, token := range []uint64{9_000_000, 1_000_000} {
		s.lock.Receive(i, &protocol.Message{Kind: protocol.MessageGranted, ID: sends[i].Cmd.ID, Token: token, Clock: token, More: true}, s.now, &s.fx)
	}
	if len(s.fx.Sends) != 1 || s.fx.Sends[0].Kind != Adopt {
		t.Fatalf("sends %+v, want an adopt", s.fx.Sends)
	}
	return s, s.fx.Sends[0]
}

// keeps lets as much time pass as partial grants are kept at first, and more.
func (s *stand) keeps() {
	s.now = s.now.Add(10 * minKeep)
	s.fx = Effects{}
	s.lock.Tick(s.now, &s.fx)
}

// A request whose token is being stored on another server has a majority.
func TestAGrantIsNotGivenBackWhileTheTokenIsBeingStored(t *testing.T) {
	s, adopt := storing(t)
	s.keeps()
	if len(s.fx.Sends) != 0 {
		t.Errorf("gives back %+v", s.fx.Sends[0].Cmd)
	}
	s.answer(adopt, done)
	if len(s.fx.Messages) != 1 || s.fx.Messages[0].Kind != protocol.MessageGranted {
		t.Errorf("then it says %+v", s.fx.Messages)
	}
}

func TestGrantsAreGivenBackIfTheTokenCouldNotBeStored(t *testing.T) {
	s, adopt := storing(t)
	s.keeps()
	s.answer(adopt, Result{Fail: silent})
	s.keeps()
	if len(s.fx.Sends) != 2 || s.fx.Sends[0].Cmd.Verb != protocol.Yield {
		t.Errorf("sends %+v, want both grants given back", s.fx.Sends)
	}
}

// The answer to the command that made a part may come when the part is about to end.
func TestAnAnswerDoesNotBringBackWhatIsBeingCanceled(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Yield, protocol.Downgrade} {
		for what, res := range map[string]Result{"granted": granted(9), "queued": wasOurs[protocol.Yield]} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			next := s.next()
			if verb == protocol.Downgrade {
				next = s.lower()
			}
			s.fx = Effects{}
			op := s.lock.Do(&protocol.Command{Verb: verb, ID: s.id, Next: next, At: s.now}, s.now, &s.fx)
			moves := s.fx.Sends
			for _, send := range moves[:2] {
				s.answer(send, granted(9))
			}
			if !op.Decided() || op.Err != nil {
				t.Fatalf("%v: not decided, or %v", verb, op.Err)
			}
			s.id = next
			if op = s.release(); len(s.fx.Sends) != 2 {
				t.Fatalf("%v: %d releases", verb, len(s.fx.Sends))
			}
			for _, send := range s.fx.Sends {
				s.answer(send, done)
			}
			if !op.Decided() || op.Err != nil {
				t.Fatalf("%v: the release is not decided, or %v", verb, op.Err)
			}
			then := s.answer(moves[2], res)
			if len(s.fx.Strays) != 0 || len(then) != 1 || then[0].Kind != Cancel || then[0].Cancel.ID != moves[2].Cmd.Next {
				t.Errorf("%v, %s: sends %+v, strays %+v", verb, what, then, s.fx.Strays)
			}
			if s.lock.Owns(moves[2].Cmd.Next, 2) {
				t.Errorf("%v, %s: it came back", verb, what)
			}
		}
	}
}

// Else two requests that each have what the other needs would exchange it forever. Nobody gives back what
// a near server granted before a far one can have granted it, too, a quarter of its round trip late.
func TestRequestsGiveTheirGrantsBackAtDifferentTimes(t *testing.T) {
	trips := []time.Duration{time.Millisecond, 41 * time.Millisecond, 5 * time.Second, 3 * time.Millisecond, 2 * time.Millisecond}
	const away = 4
	cfg := &Config{N: len(trips), RoundTrip: func(i int) time.Duration { return trips[i] }, Away: func(i int) bool { return i == away }}
	for _, c := range []struct {
		has, also int // servers that granted
		waits     []int
		lag       time.Duration
	}{
		{0, 0, []int{2, 1, 3}, 50250 * time.Microsecond}, // two more are needed
		{0, 3, []int{2, 1}, 50250 * time.Microsecond},
		{3, 0, []int{2, 1}, 48250 * time.Microsecond},
		{0, 1, []int{2, 3}, 2750 * time.Microsecond},
		{1, 0, []int{2, 3}, 0}, // it is the farther one
		{0, 1, []int{2}, maxKeep},
		{0, 0, []int{1, away}, 0}, // these are no majority
	} {
		for _, giveBacks := range []int{0, 2, 30} {
			longest := min(minKeep<<min(giveBacks, 20), maxKeep)
			seen := map[time.Duration]bool{}
			for _, id := range []string{"one", "two", "three", "four"} {
				r := &request{parts: make([]part, len(trips))}
				r.parts[c.also].state = owned
				r.parts[c.has] = part{history: history{giveBacks: giveBacks}, id: id, state: owned}
				for _, i := range c.waits {
					r.parts[i].state = queued
				}
				d := (&Lock{cfg: cfg}).keepFor(r, c.has) - c.lag
				if d <= longest/2 || d > longest || seen[d] {
					t.Errorf("%q keeps a grant of server %d for %v after %d times, of at most %v", id, c.has, d, giveBacks, longest)
				}
				seen[d] = true
			}
		}
	}
}

// Of several grants, all are given back with the same ticket.
func TestGrantsThatKeepComingBackArePlacedAlike(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.acquire()
	sends := s.fx.Sends
	behind := granted(7)
	behind.Answer.More = true
	for i, send := range sends {
		if i < 2 {
			s.answer(send, behind)
		} else {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
		}
	}
	for n := 1; n <= patientGiveBacks; n++ {
		s.now = s.now.Add(maxKeep)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		tickets := map[uint64]int{}
		for _, send := range s.fx.Sends {
			if send.Cmd.Verb == protocol.Yield {
				tickets[send.Cmd.Ticket]++
				behind.Answer.Token++
				s.answer(send, behind)
			}
		}
		if len(tickets) != 1 || tickets[s.lock.reqs[s.id].ticket] != 2 {
			t.Fatalf("given back %d times: %v", n, tickets)
		}
	}
}

// A check of a held lease by nobody who waits leaves the request in the queues of servers with another
// owner, where it can still be granted, as each renewal does.
func TestACheckLeavesALeaseInTheQueues(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	s.answer(sends[0], granted(1))
	s.answer(sends[2], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	s.answer(sends[1], granted(1))
	if !op.Decided() || op.Answer.Outcome != protocol.Granted {
		t.Fatalf("decided %v, %+v", op.Decided(), op.Answer)
	}
	s.tick()
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Question: true, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		if send.Server == 2 && (!send.Cmd.Wait || send.Cmd.Question) {
			t.Error("the server is told not to queue what waits there")
		}
	}
}
