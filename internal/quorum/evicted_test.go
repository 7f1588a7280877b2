package quorum

// What is left of a part that was evicted while the servers were asked about it.

import (
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// askedAgain returns a request that server 0 has granted, and the sends of an acquire that asks all servers
// again.
func askedAgain(t *testing.T) (s *stand, op *Op, sends []*Send) {
	t.Helper()
	s = newStand(t, 3, time.Second)
	s.enqueue() // server 0 grants it
	s.tick()
	op = s.acquire()
	return s, op, s.fx.Sends
}

// A partial grant is evicted while the request asks once more, which its server queues. When the request is
// given up, it must not stay in that queue.
func TestARequestThatIsQueuedAfterItsEvictionIsCanceled(t *testing.T) {
	s, _, sends := askedAgain(t)
	s.evict(0, sends[0].Cmd.ID, 1)
	for _, send := range sends {
		s.answer(send, behind)
	}
	s.fx = Effects{}
	s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	found := map[int]bool{}
	for _, send := range s.fx.Sends {
		found[send.Server] = send.Kind == Cancel
	}
	for _, stray := range s.fx.Strays {
		found[stray.Server] = true
	}
	if !found[0] || !found[1] || !found[2] {
		t.Errorf("it is canceled on %v", found)
	}
}

// The same, and the message of a grant that follows arrives.
func TestAMessageGrantsARequestThatWasQueuedAfterItsEviction(t *testing.T) {
	for _, early := range []bool{false, true} {
		s, _, sends := askedAgain(t)
		s.evict(0, sends[0].Cmd.ID, 1)
		for _, send := range sends[1:] {
			s.answer(send, behind)
		}
		if early {
			s.receive(0, sends[0].Cmd.ID, 9)
			s.answer(sends[0], behind)
		} else {
			s.answer(sends[0], behind)
			s.receive(0, sends[0].Cmd.ID, 9)
		}
		if p := &s.lock.reqs[s.id].parts[0]; p.state != owned || p.ended {
			t.Errorf("early %v: the message is not believed: %+v", early, p)
		}
	}
}

// Two operators evict it, and the second one meets what the server granted again in between.
func TestASecondEvictionIsHeardBeforeTheAnswerToAnAcquire(t *testing.T) {
	s, op, sends := askedAgain(t)
	s.evict(0, sends[0].Cmd.ID, 1)
	s.evict(0, sends[0].Cmd.ID, 5)
	s.answer(sends[0], granted(5)) // evicted by the second
	s.answer(sends[1], granted(2))
	s.answer(sends[2], behind)
	if op.Answer.Outcome == protocol.Granted {
		t.Error("granted by one of three")
	}
}

// The message of the evicted grant was slower than that of its eviction.
func TestAMessageOfAnEvictedGrantIsNotBelievedWhileTheServersAreAsked(t *testing.T) {
	s, _, sends := askedAgain(t)
	s.evict(0, sends[0].Cmd.ID, 5)
	s.receive(0, sends[0].Cmd.ID, 5)
	if p := &s.lock.reqs[s.id].parts[0]; p.state == owned {
		t.Errorf("it is believed: %+v", p)
	}
}

// The server that a renewal finds without the lease may have lost its data, and then grants it again. But
// a message that this grant was evicted, too, leaves nothing to wait for.
func TestAnEvictionOfWhatALostServerGrantsAnewCounts(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.tick()
	s.renew()
	sends := s.fx.Sends
	asks := s.answer(sends[0], notOurs)
	if len(asks) != 1 {
		t.Fatalf("asked %d times", len(asks))
	}
	s.answer(sends[1], renewed)
	if s.evict(0, asks[0].Cmd.ID, 9) {
		t.Error("two of three have kept it, and it is over")
	}
	if !s.evict(1, sends[1].Cmd.ID, 9) && !s.revoked() {
		t.Error("one of three is left, and it goes on")
	}
}

// A server in quarantine that grants a lease again, or lets others in, seems to have lost its data. A
// message that it evicted the grant says otherwise, so the server does not count, although the message is
// about an earlier grant than the server's last one.
func TestAnEvictionByAServerInQuarantineIsNotTakenForARestart(t *testing.T) {
	for _, o := range []protocol.Outcome{protocol.Granted, protocol.Enqueued} {
		for token := range uint64(2) { // 0: the server did not say which
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			op, sends := s.check()
			s.answer(sends[0], young(o, 9, 10*time.Second))
			s.answer(sends[1], keptWith(1))
			s.answer(sends[2], keptWith(1))
			if !op.Decided() || op.Answer.Outcome != protocol.Granted || !op.Answer.Kept {
				t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
			}
			if s.evict(0, sends[0].Cmd.ID, token) {
				t.Errorf("%v, token %d: two of three have kept it, and it is over", o, token)
			}
			if !s.evict(1, sends[1].Cmd.ID, 1) {
				t.Errorf("%v, token %d: one of three has kept it, and it goes on", o, token)
			}
		}
	}
}

// Nor does such a server prove that the lease was ours until it was given back.
func TestAnEvictionByAServerInQuarantineProvesNoRelease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, sends := s.check()
	s.answer(sends[0], young(protocol.Enqueued, 9, 10*time.Second))
	s.answer(sends[1], keptWith(1))
	s.answer(sends[2], keptWith(1))
	s.evict(0, sends[0].Cmd.ID, 1)
	op := s.release()
	for _, send := range s.fx.Sends {
		switch send.Server {
		case 1:
			s.answer(send, done)
		case 2:
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}})
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.NotOurs {
		t.Errorf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
}

// Nor does such a message count for a lease that began after the eviction.
func TestAnEvictionFromBeforeALeaseDoesNotCount(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	op, sends := s.check()
	s.answer(sends[0], young(protocol.Enqueued, 4, 100*time.Millisecond))
	for _, send := range sends[1:] {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 5}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	s.now = s.now.Add(200 * time.Millisecond)
	s.receive(0, sends[0].Cmd.ID, 10)
	if kinds := s.receive(1, sends[1].Cmd.ID, 10); kinds != protocol.MessageGranted {
		t.Fatalf("a new lease: %q", kinds)
	}
	if s.evict(0, sends[0].Cmd.ID, 5) {
		t.Error("a server evicted what it had granted before, and the lease is over")
	}
}

// The lease is evicted while it is asked for again. If the servers grant it anew, the state machine uses
// that grant or cancels it. If they do not answer, nothing is left.
func TestALeaseThatIsGrantedAgainAfterItsEvictionStays(t *testing.T) {
	for _, again := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		r := s.lock.reqs[s.id]
		op, sends := s.check()
		s.evict(0, r.parts[0].id, 1)
		if !s.evict(1, r.parts[1].id, 1) {
			t.Fatal("the lease goes on without a majority")
		}
		if s.evict(2, r.parts[2].id, 1) {
			t.Error("it is told twice")
		}
		unsent := &protocol.Failure{Err: errAway, Kind: protocol.NeverSent}
		var canceled []*Send
		for ; len(sends) > 0; sends = sends[1:] {
			res := Result{Fail: unsent, Canceled: protocol.Canceled{Fail: unsent}}
			if again {
				res = granted(9)
			}
			after := s.answer(sends[0], res)
			sends = append(sends, after...)
			canceled = append(canceled, slices.DeleteFunc(after, func(send *Send) bool { return send.Kind != Cancel })...)
		}
		s.expire(op)
		canceled = append(canceled, slices.DeleteFunc(s.fx.Sends, func(send *Send) bool { return send.Kind != Cancel })...)
		switch {
		case again && (op.Err != nil || op.Answer.Outcome != protocol.Granted || op.Answer.Kept || len(canceled) > 0 || s.lock.reqs[s.id] == nil):
			t.Errorf("granted again: %+v %v, canceled %d, %s", op.Answer, op.Err, len(canceled), s.lock)
		case !again && s.lock.reqs[s.id] != nil:
			t.Errorf("nobody answers, and it keeps %s", s.lock)
		}
	}
}

// The lease was not proved on server 1 for longer than a TTL. When its eviction on server 0 is heard of, it
// has no majority. Then server 1 says that it still has it; but the state machine has given the lease up,
// and has nothing to cancel, because the question was sent to a minority.
func TestARequestIsForgottenWhoseEvictionWasToldOfDuringAQuestion(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	r := s.lock.reqs[s.id]
	for range 3 {
		s.now = s.now.Add(s.ttl / 2)
		op := s.renew()
		for i, send := range s.fx.Sends {
			s.answer(send, []Result{renewed, unheard, renewed}[i])
		}
		s.expire(op)
	}
	s.lock.cfg.Away = func(i int) bool { return i != 1 }
	op, sends := s.ask()
	if !s.evict(0, r.parts[0].id, 1) {
		t.Fatal("the lease goes on without a majority")
	}
	s.drain(sends, keeps)
	s.expire(op)
	if !op.Decided() || op.Err == nil {
		t.Fatalf("asked: %+v", op.Answer)
	}
	if s.lock.reqs[s.id] != nil {
		t.Errorf("it keeps %s", s.lock)
	}
}
