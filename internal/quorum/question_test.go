package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// An owner's question: does the lease still stand, and do others wait? It goes to the servers that are
// known to have granted the lease, and gives it nothing there.

// ask sends an owner's question.
func (s *stand) ask() (*Op, []*Send) {
	s.tick()
	return s.do(protocol.Command{Question: true})
}

func moreWait(token uint64) Result {
	res := keptWith(token)
	res.Answer.More = true
	return res
}

func TestAnOwnerIsToldWhetherOthersWaitNow(t *testing.T) {
	s := newStand(t, 3, time.Second)
	acquire := s.acquire()
	for _, send := range s.fx.Sends {
		res := granted(1)
		res.Answer.More = true
		s.answer(send, res)
	}
	if !acquire.Answer.More {
		t.Fatalf("granted with %+v", acquire.Answer)
	}
	for _, more := range []bool{true, false, true} {
		op, sends := s.ask()
		for _, send := range sends {
			if !send.Cmd.Question {
				t.Errorf("sent %+v", send.Cmd)
			}
			if more && send.Server == 1 {
				s.answer(send, moreWait(1))
			} else {
				s.answer(send, keptWith(1))
			}
		}
		if !op.Decided() || !op.Answer.Kept || op.Answer.More != more {
			t.Errorf("decided %v, %+v", op.Decided(), op.Answer)
		}
	}
}

// What a server said before it was away does not count.
func TestAServerThatDoesNotAnswerDoesNotSayThatOthersWait(t *testing.T) {
	s := newStand(t, 3, time.Second)
	acquire := s.acquire()
	for i, send := range s.fx.Sends {
		res := granted(1)
		res.Answer.More = i == 0
		s.answer(send, res)
	}
	if !acquire.Answer.More {
		t.Fatalf("granted with %+v", acquire.Answer)
	}
	op, sends := s.ask()
	s.answer(sends[1], keptWith(1))
	s.answer(sends[2], keptWith(1))
	if !op.Decided() || op.Answer.More {
		t.Errorf("decided %v, %+v", op.Decided(), op.Answer)
	}
}

// A writer gives up on one server after the other. Only then does the owner have reason to ask.
func TestAnOwnerHearsThatNobodyWaitsOnceNoServerSaysOtherwise(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	says := func(server int, kind protocol.MessageKind) (passed bool) {
		s.fx = Effects{}
		s.lock.Receive(server, &protocol.Message{Kind: kind, ID: s.lock.reqs[s.id].parts[server].id, Key: "x"}, s.now, &s.fx)
		return len(s.fx.Messages) == 1 && s.fx.Messages[0].Kind == kind && s.fx.Messages[0].ID == s.id
	}
	for range 2 {
		for i := range 3 {
			if !says(i, protocol.MessageWanted) {
				t.Errorf("server %d is not heard", i)
			}
		}
		for i := range 3 {
			if passed := says(i, protocol.MessageUnwanted); passed != (i == 2) {
				t.Errorf("after %d of 3 servers it is passed on: %v", i+1, passed)
			}
		}
	}
	says(0, protocol.MessageWanted)
	says(2, protocol.MessageWanted)
	s.lock.cfg.Away = func(i int) bool { return i == 2 }
	if !says(0, protocol.MessageUnwanted) {
		t.Error("a server that is away is waited for")
	}
}

// A question that had no answer cannot have made the lease anew, so a release needs no further proof.
func TestAQuestionWithoutAnswerLeavesNoDoubt(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		op, sends := s.ask()
		for _, send := range sends {
			s.answer(send, Result{Fail: silent})
		}
		if !op.Decided() || op.Err == nil {
			t.Fatalf("decided %v, %+v", op.Decided(), op.Answer)
		}
		end, sends := s.leave(verb)
		for _, send := range sends {
			if send.Kind == Cancel {
				t.Errorf("cancels on server %d", send.Server)
			}
			s.answer(send, wasOurs[verb])
		}
		if want := wasOurs[verb].Answer.Outcome; !end.Decided() || end.Answer.Outcome != want {
			t.Errorf("decided %v, %+v", end.Decided(), end.Answer)
		}
	}

	// Nor does a cancel, if the release has no answer either.
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, sends := s.ask()
	for _, send := range sends {
		s.answer(send, Result{Fail: silent})
	}
	s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Fail: silent})
	}
	s.fx = Effects{}
	cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Canceled: protocol.Canceled{Owned: true}})
	}
	if !cancel.Decided() || !cancel.Canceled.Owned {
		t.Errorf("decided %v, %+v", cancel.Decided(), cancel.Canceled)
	}
}

// The server may have lost its data, or another client may have owned there: only an acquire tells.
func TestAQuestionThatFindsALeaseGoneIsFollowedByAnAcquire(t *testing.T) {
	for name, c := range map[string]struct {
		again Result
		stays bool
	}{
		"the server lost its data": {young(protocol.Granted, 9, longQuarantine), true},
		"it was granted anew":      {granted(9), false},
		"another owns":             {Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 9}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			op, sends := s.ask()
			for _, i := range []int{0, 1} {
				more := s.answer(sends[i], young(protocol.NotOurs, 0, longQuarantine))
				if len(more) != 1 || more[0].Cmd.Verb != protocol.Acquire || more[0].Cmd.Question || !more[0].Cmd.Wait {
					t.Fatalf("server %d is sent %+v", i, more)
				}
				s.answer(more[0], c.again)
			}
			s.answer(sends[2], keptWith(1))
			switch {
			case !op.Decided():
				t.Error("not decided")
			case c.stays && (op.Err != nil || op.Answer.Outcome != protocol.Granted || !op.Answer.Kept):
				t.Errorf("it still stands: %+v", op.Answer)
			case !c.stays && (op.Answer.Outcome != protocol.Enqueued || op.Answer.Token < 1):
				t.Errorf("it is lost: %+v %v", op.Answer, op.Err)
			}
		})
	}
}

// Two servers have restarted without their data, and the question before had no answer.
func TestAFailedQuestionDoesNotHideThatServersHaveRestarted(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.ask()
	s.tick()
	r := s.renew()
	renewals := s.fx.Sends
	for i := range 2 {
		s.answer(renewals[i], notOurs)
		more := s.answer(asks[i], Result{Fail: silent})
		if len(more) != 1 || more[0].Cmd.Verb != protocol.Acquire || more[0].Cmd.Question {
			t.Fatalf("server %d is sent %+v", i, more)
		}
		s.answer(more[0], young(protocol.Granted, 9, longQuarantine))
	}
	s.answer(renewals[2], renewed)
	if !r.Decided() || r.Renewed != protocol.Granted {
		t.Errorf("renewed: %v %v", r.Decided(), r.Renewed)
	}
}

// The answers come by different connections. One that the lease is kept may be older than a renewal's that
// it is gone, and one that it is gone may be older than a renewal's that it is kept.
func TestARenewalAndAQuestionCross(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	op, sends := s.ask()
	s.answer(sends[1], keptWith(1))
	s.answer(sends[2], keptWith(1))
	if !op.Decided() || !op.Answer.Kept {
		t.Fatalf("decided %v, %+v", op.Decided(), op.Answer)
	}
	s.tick()
	r := s.renew()
	renewals := s.fx.Sends
	if more := s.answer(renewals[0], notOurs); len(more) != 0 {
		t.Errorf("sent %+v before the question is answered", more)
	}
	s.answer(renewals[1], renewed)
	more := s.answer(sends[0], keptWith(1))
	if len(more) != 1 || more[0].Cmd.Verb != protocol.Acquire || more[0].Cmd.Question {
		t.Fatalf("sent %+v", more)
	}
	s.answer(more[0], granted(9))
	s.answer(renewals[2], renewed)
	if !r.Decided() || r.Renewed != protocol.Granted {
		t.Errorf("renewed: %v %v", r.Decided(), r.Renewed)
	}
	if s.lock.reqs[s.id].parts[0].breaks != 1 {
		t.Error("it is not noted that others may have owned on one server")
	}

	s = newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, sends = s.ask()
	s.answer(sends[1], keptWith(1))
	s.answer(sends[2], keptWith(1))
	s.tick()
	s.renew()
	for _, send := range s.fx.Sends {
		s.answer(send, renewed)
	}
	if more := s.answer(sends[0], Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}); len(more) != 0 {
		t.Errorf("sent %+v", more)
	}
	if p := s.lock.reqs[s.id].parts[0]; p.state != owned || p.lost {
		t.Errorf("the part is %v, lost %v", p.state, p.lost)
	}
}

// Its server has lost its data, which only the answer to the question says.
func TestALeaseIsReleasedAfterARenewalAndAQuestionFoundItGone(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		_, asks := s.ask()
		s.answer(asks[1], keptWith(1))
		s.answer(asks[2], keptWith(1))
		s.tick()
		s.renew()
		s.answer(s.fx.Sends[0], notOurs)
		op, sends := s.leave(verb)
		for _, send := range sends {
			if send.Server == 1 {
				s.drain(s.answer(send, wasOurs[verb]), enqueued)
			} else {
				s.drain(s.answer(send, Result{Fail: silent}), enqueued)
			}
		}
		s.drain(s.answer(asks[0], young(protocol.NotOurs, 0, longQuarantine)), enqueued)
		if want := wasOurs[verb].Answer.Outcome; !op.Decided() || op.Answer.Outcome != want {
			t.Errorf("verb %v: decided %v, %+v %v", verb, op.Decided(), op.Answer, op.Err)
		}
	}
}

// A release waits behind the question in the server's lane.
func TestALeaseIsReleasedWhileAQuestionIsUnderWay(t *testing.T) {
	for name, late := range map[string]Result{
		"kept":      keptWith(1),
		"gone":      {Answer: protocol.Answer{Outcome: protocol.NotOurs}},
		"no answer": {Fail: silent},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			_, asks := s.ask()
			s.answer(asks[1], keptWith(1))
			s.answer(asks[2], keptWith(1))
			op, sends := s.leave(protocol.Release)
			for _, send := range sends {
				s.answer(send, done)
			}
			for _, send := range s.answer(asks[0], late) {
				if send.Kind == Do && send.Cmd.Verb == protocol.Acquire {
					t.Errorf("server %d is asked for the lock", send.Server)
				}
				s.answer(send, done)
			}
			if !op.Decided() || op.Answer.Outcome != protocol.Done {
				t.Errorf("decided %v, %+v", op.Decided(), op.Answer)
			}
			if !s.lock.Idle() {
				t.Errorf("left: %v", s.lock)
			}
		})
	}
}
