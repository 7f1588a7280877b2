package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Server 0 has lost its data, and with it the token of a lease that it shares with server 1, whose clock is
// ahead. It grants the lock to us at once, but that counts only after its quarantine. That lease has ended
// by then, but whoever had it may still use its token.
func TestWhatAServerGrantedInItsQuarantineCountsWithATokenOfAfterIt(t *testing.T) {
	const others, before = 5_000_000, 2_000_000
	const votes = before + uint64(longQuarantine/time.Microsecond)
	answer := func(o protocol.Outcome, token, clock uint64, left time.Duration) Result {
		res := Result{Answer: protocol.Answer{Outcome: o, Kept: o == protocol.Granted, Token: token, Clock: clock}, Young: left}
		if clock != others {
			res.VoteClock = votes
		}
		return res
	}
	silence := Result{Fail: silent}
	const after = votes + 1_000_000
	first := map[string]Result{ // of server 0
		"an answer":                 young(protocol.Granted, before, longQuarantine),
		"a message":                 young(protocol.Enqueued, before-1, longQuarantine),
		"an answer that was lost":   silence,
		"its time, in an acquire":   young(protocol.Granted, before, longQuarantine),
		"its time, and what others": young(protocol.Granted, before, longQuarantine),
	}
	for how, res := range first {
		t.Run(how, func(t *testing.T) {
			s := newStand(t, 3, time.Minute)
			told := func() (token uint64) {
				for _, m := range s.fx.Messages {
					if m.Kind == protocol.MessageGranted {
						token = m.Token
					}
				}
				return token
			}
			op := s.acquire()
			sends := s.fx.Sends
			if res.Fail == nil {
				res.VoteClock = votes
			}
			s.answer(sends[1], answer(protocol.Enqueued, others, others, 0))
			s.answer(sends[2], granted(before))
			s.answer(sends[0], res)
			if !op.Decided() || op.Answer.Outcome == protocol.Granted {
				t.Fatalf("decided %v, %+v, %v", op.Decided(), op.Answer, op.Err)
			}
			if how == "a message" {
				s.receive(0, sends[0].Cmd.ID, before)
			}
			var token uint64
			switch how {
			case "its time, in an acquire": // server 0 answers just before its quarantine ends, and server 1 after that
				s.now = s.now.Add(longQuarantine)
				op = s.acquire()
				sends = s.fx.Sends
				s.answer(sends[0], answer(protocol.Granted, before, votes-100_000, 100*time.Millisecond))
				s.answer(sends[2], answer(protocol.Granted, before, votes-100_000, 0))
				s.now = s.now.Add(200 * time.Millisecond)
				for _, adopt := range s.answer(sends[1], answer(protocol.Enqueued, others, others, 0)) {
					s.answer(adopt, done)
				}
				token = op.Answer.Token
			case "its time, and what others": // server 1's answer to something else has the request looked at
				s.now = s.now.Add(longQuarantine + time.Second)
				for _, send := range s.rejoined(1) {
					for _, adopt := range s.answer(send, answer(protocol.Enqueued, others, others, 0)) {
						s.answer(adopt, done)
					}
				}
				if token = told(); token == 0 { // then it has to be asked
					token = votes
				}
			default:
				s.now = s.now.Add(longQuarantine + time.Second)
				op = s.acquire()
				for _, send := range s.fx.Sends {
					kept := answer(protocol.Granted, before, after, 0)
					if send.Server == 1 {
						kept = answer(protocol.Enqueued, others, others, 0)
					}
					for _, adopt := range s.answer(send, kept) {
						s.answer(adopt, done)
					}
				}
				token = op.Answer.Token
			}
			if token < votes {
				t.Errorf("it counts with token %d, want one from %d on: %+v, %v", token, votes, op.Answer, op.Err)
			}
		})
	}
}

// Two servers make us the owner, and one of them has to store the other's token first, which fails. It may
// be that only a connection was broken.
func TestATokenThatCouldNotBeStoredIsTriedOnceMore(t *testing.T) {
	s, adopt := storing(t)
	wanted := func() (n int) {
		for _, m := range s.fx.Messages {
			if m.Kind == protocol.MessageWanted {
				n++
			}
		}
		return n
	}
	if s.answer(adopt, Result{Fail: silent}); wanted() != 1 {
		t.Fatalf("says %+v, want the state machine to ask", s.fx.Messages)
	}
	s.acquire()
	var adopts []*Send
	for _, send := range s.fx.Sends {
		for _, again := range s.answer(send, map[int]Result{0: keptWith(9_000_000), 1: keptWith(1_000_000), 2: {Fail: silent}}[send.Server]) {
			if again.Kind == Adopt {
				adopts = append(adopts, again)
			}
		}
	}
	if len(adopts) != 1 {
		t.Errorf("stores it %d times more, want once", len(adopts))
	}
}

// The first try of a downgrade is answered too late. Then an operator evicts the reader on all servers, of
// which no message arrives. The next try may have no answer in time, too. Whether the servers still have the
// reader is asked by a question, which grants it nothing.
func TestADowngradeThatLostItsReaderBetweenTwoTriesFails(t *testing.T) {
	for _, second := range []string{"in time", "late", "never"} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.tick()
		op, sends := s.downgrade()
		s.expire(op)
		for _, send := range sends {
			s.answer(send, granted(20))
		}
		s.tick()
		op, sends = s.downgrade()
		// evicted gives an answer to all questions, and to the acquires that follow that answer.
		evicted := func() {
			for _, send := range sends {
				if send.Cmd.Verb != protocol.Acquire || !send.Cmd.Question {
					t.Fatalf("sends %+v, want questions of the reader", send.Cmd)
				}
				then := s.answer(send, notHere)
				if !op.Decided() && len(then) != 1 {
					t.Fatalf("a question answered in vain is followed by %+v, want an acquire", then)
				}
				for _, acquire := range then {
					s.answer(acquire, granted(30))
				}
			}
		}
		switch second {
		case "late":
			s.expire(op)
			evicted()
			s.tick()
			op, sends = s.downgrade()
			for _, send := range sends {
				s.answer(send, keptWith(30))
			}
		case "never":
			for _, send := range sends {
				s.answer(send, quiet)
			}
			s.tick()
			op, sends = s.downgrade()
			evicted()
		default:
			evicted()
		}
		if op.Decided() && op.Err == nil && op.Answer.Outcome == protocol.Granted {
			t.Errorf("second try answered %s: the downgrade succeeded, although others may have had the lock", second)
		}
	}
}

// The third server is down. One that had carried the downgrade out loses its data, and grants the reader anew.
func TestADowngradeGoesOnThoughAServerLosesItsDataBetweenTwoTries(t *testing.T) {
	s := newStand(t, 3, time.Minute)
	s.own(true, true, true)
	for _, answers := range [][]Result{{granted(20), quiet, quiet}, {notHere, keptWith(20), quiet}, {keptWith(30), keptWith(20), quiet}} {
		s.tick()
		op, sends := s.downgrade()
		for _, send := range sends {
			for _, acquire := range s.answer(send, answers[send.Server]) {
				s.answer(acquire, young(protocol.Granted, 30, 30*time.Second))
			}
		}
		if op.Decided() && op.Err == nil && op.Answer.Outcome == protocol.Granted {
			return
		}
	}
	t.Error("the downgrade did not succeed")
}

// One server carried the downgrade out, another one's answer was lost, and the third is down. In the next try
// the first one's answer is lost, too. Both have had the reader all the time.
func TestALostAnswerBetweenTwoTriesOfADowngradeCostsNoLease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	for _, answers := range [][]Result{{granted(20), quiet, quiet}, {quiet, keptWith(20), quiet}, {keptWith(20), keptWith(20), quiet}} {
		s.tick()
		op, sends := s.downgrade()
		for _, send := range sends {
			s.answer(send, answers[send.Server])
		}
		if op.Decided() && op.Err == nil && op.Answer.Outcome == protocol.Granted {
			return
		}
	}
	t.Error("the downgrade did not succeed")
}
