package quorum

// What is left of a part that was evicted while the servers were asked about it.

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// askedAgain returns a request that server 0 has granted, and the sends of an acquire that asks all servers again.
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
func TestARequestThatIsQueuedAfterItsEvictionIsCancelled(t *testing.T) {
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
		t.Errorf("it is cancelled on %v", found)
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
