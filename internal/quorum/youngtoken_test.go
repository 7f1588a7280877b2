package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// sees is an answer of a server whose clock has gone on since it gave the token.
func sees(o protocol.Outcome, token, clock uint64, left time.Duration) Result {
	return Result{Answer: protocol.Answer{Outcome: o, Kept: o == protocol.Granted, Token: token, Clock: clock}, Young: left}
}

// Server 0 has lost its data, and with it the token of a lease that it shares with server 1, whose clock is
// ahead. It grants the lock to us at once, but that counts only after its quarantine. That lease has ended
// by then, but whoever had it may still use its token.
func TestWhatAServerGrantedInItsQuarantineCountsWithATokenOfAfterIt(t *testing.T) {
	const others, before, after = 5_000_000, 2_000_000, 14_000_000
	for _, how := range []string{"answer", "message"} {
		t.Run(how, func(t *testing.T) {
			s := newStand(t, 3, time.Minute)
			op := s.acquire()
			sends := s.fx.Sends
			if how == "answer" {
				s.answer(sends[0], young(protocol.Granted, before, longQuarantine))
			} else {
				s.answer(sends[0], young(protocol.Enqueued, before-1, longQuarantine))
			}
			s.answer(sends[1], sees(protocol.Enqueued, others, others, 0))
			s.answer(sends[2], granted(before))
			if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
				t.Fatalf("decided %v, %+v, %v", op.Decided(), op.Answer, op.Err)
			}
			if how == "message" {
				s.receive(0, sends[0].Cmd.ID, before)
			}
			s.now = s.now.Add(longQuarantine + time.Second)
			s.fx = Effects{}
			s.lock.Tick(s.now, &s.fx)
			s.lock.Receive(2, &protocol.Message{Kind: protocol.MessageWanted, ID: sends[2].Cmd.ID}, s.now, &s.fx) // has it look
			for _, m := range s.fx.Messages {
				if m.Kind == protocol.MessageGranted && m.Token < after {
					t.Errorf("without asking, it counts with token %d", m.Token)
				}
			}
			op = s.acquire()
			for _, send := range s.fx.Sends {
				switch send.Server {
				case 1:
					s.answer(send, sees(protocol.Enqueued, others, after, 0))
				default:
					s.answer(send, sees(protocol.Granted, before, after, 0))
				}
			}
			if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Token < after {
				t.Errorf("decided %v, %+v, %v; want a token from %d on", op.Decided(), op.Answer, op.Err, after)
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
// which no message arrives, and the second try is granted anew.
func TestADowngradeThatLostItsReaderBetweenTwoTriesFails(t *testing.T) {
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
	for _, send := range sends {
		if send.Cmd.Verb != protocol.Acquire {
			t.Fatalf("sends %+v, want acquires of the reader", send.Cmd)
		}
		s.answer(send, granted(30))
	}
	if op.Decided() && op.Err == nil && op.Answer.Outcome == protocol.Granted {
		t.Error("the downgrade succeeded, although others may have had the lock")
	}
}
