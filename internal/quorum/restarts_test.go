package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What a server proves that has restarted, or may have: that the lease was ours there until then, unless
// the lease had ended there before, the server had joined it later, or an eviction or an older answer
// explains what it says. In the comments, A holds the lease, and B is another client.

const longQuarantine = 10 * time.Second

var (
	notHere  = Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}
	enqueues = Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}}
	unheard  = Result{Renewed: protocol.Unanswered, Fail: silent}
)

// drain answers sends, and those that follow.
func (s *stand) drain(sends []*Send, res Result) {
	for len(sends) > 0 {
		sends = append(sends[1:], s.answer(sends[0], res)...)
	}
}

func (s *stand) wants(op *Op, done bool, what ...any) {
	s.t.Helper()
	if !op.Decided() {
		s.t.Errorf("%v: all have answered, and it is undecided: %v %v", what, op.outcomes, op.olds)
	} else if got := op.Err == nil && op.Answer.Outcome != protocol.NotOurs; got != done || op.Err != nil {
		s.t.Errorf("%v: %v %v, want proved %v: %v %v", what, op.Answer.Outcome, op.Err, done, op.outcomes, op.olds)
	}
}

// A could not reach server 0 for longer than the TTL, so its lease ended there, and B got it. Then A loses
// server 1 (an eviction that it hears of, or a deleted key): B owns 0 and 1, and leaves. Server 0 restarts;
// A reaches it again.
func TestARestartAfterALeaseHasEndedThereProvesNothing(t *testing.T) {
	for _, heard := range []bool{true, false} {
		for _, how := range []string{"renewal", "check, granted", "check, refused", "release asked", "release"} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			id1 := s.lock.reqs[s.id].parts[1].id
			for range 4 { // until 1.2 s
				s.now = s.now.Add(300 * time.Millisecond)
				s.renew()
				for i, send := range s.fx.Sends {
					s.answer(send, []Result{unheard, renewed, renewed}[i])
				}
			}
			if heard && s.evict(1, id1, 1) {
				continue // it is over
			}
			s.now = s.now.Add(50 * time.Millisecond)
			var asks []*Send
			over := false
			switch how {
			case "renewal":
				op := s.renew()
				for i, send := range s.fx.Sends {
					for _, again := range s.answer(send, []Result{notOurs, {Renewed: protocol.NotOurs, Answer: granted(9).Answer}, renewed}[i]) {
						s.answer(again, []Result{young(protocol.Granted, 7, longQuarantine), granted(9)}[i])
					}
				}
				over = op.Renewed == protocol.NotOurs
			case "check, granted", "check, refused":
				op, sends := s.check()
				o := map[string]protocol.Outcome{"check, granted": protocol.Granted, "check, refused": protocol.Refused}[how]
				s.answer(sends[0], young(o, 7, longQuarantine))
				s.answer(sends[1], granted(9))
				s.answer(sends[2], keptWith(1))
				over = !op.Answer.Kept
			case "release asked":
				s.renew()
				asks = s.answer(s.fx.Sends[0], notOurs)
			}
			if over {
				continue
			}
			op := s.release()
			sends := s.fx.Sends
			for _, ask := range asks {
				sends = append(sends, s.answer(ask, young(protocol.Granted, 7, longQuarantine))...)
			}
			for _, send := range sends {
				switch {
				case send.Kind == Cancel:
					s.answer(send, Result{Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
				case send.Server == 0 && how == "release":
					s.answer(send, young(protocol.NotOurs, 0, longQuarantine))
				case send.Server == 1 && how[0] == 'r' && how != "renewal":
					s.answer(send, notHere)
				default:
					s.answer(send, done)
				}
			}
			s.wants(op, false, "heard", heard, how)
		}
	}
}

// Heard alone: server 0 has not confirmed the lease for longer than the TTL, and server 1 evicts it.
func TestAServerThatHasNotConfirmedALeaseForATTLDoesNotOutlastAnEviction(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	id1 := s.lock.reqs[s.id].parts[1].id
	for range 4 {
		s.now = s.now.Add(300 * time.Millisecond)
		s.renew()
		for i, send := range s.fx.Sends {
			s.answer(send, []Result{unheard, renewed, renewed}[i])
		}
	}
	if !s.evict(1, id1, 1) {
		t.Error("at most one of three has kept the lease, and it goes on")
	}
}

// A is evicted on 0 and 1, B owns both and leaves, and server 0 loses its data. A hears of both evictions;
// that of server 0 comes after a command has found the lease gone there.
func TestAnEvictionIsHeardAfterACommandHasFoundTheLeaseGone(t *testing.T) {
	for _, how := range []string{"while asked", "after asked", "after refused", "after a late answer"} {
		for token := range uint64(2) {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			id0, id1 := s.lock.reqs[s.id].parts[0].id, s.lock.reqs[s.id].parts[1].id
			s.tick()
			over := false
			switch how {
			case "while asked", "after asked":
				s.renew()
				sends := s.fx.Sends
				asks := s.answer(sends[0], notOurs)
				if how == "while asked" {
					over = s.evict(0, id0, token)
				}
				s.answer(asks[0], young(protocol.Granted, 7, longQuarantine))
				s.answer(sends[1], renewed)
				s.answer(sends[2], renewed)
				if how == "after asked" {
					over = s.evict(0, id0, token)
				}
			case "after refused": // by an acquire that may not queue
				s.fx = Effects{}
				s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
				sends := s.fx.Sends
				s.answer(sends[0], young(protocol.Refused, 7, longQuarantine))
				s.answer(sends[1], keptWith(1))
				s.answer(sends[2], keptWith(1))
				over = s.evict(0, id0, token)
			case "after a late answer": // here the second eviction is found by the release
				s.renew()
				sends := s.fx.Sends
				s.answer(sends[1], renewed)
				s.answer(sends[2], renewed)
				s.answer(sends[0], notOurs)
				over = s.evict(0, id0, token)
			}
			if over {
				t.Errorf("%s: two of three have kept it, and it is over", how)
			}
			if how != "after a late answer" && s.evict(1, id1, 1) {
				continue
			}
			op := s.release()
			for _, send := range s.fx.Sends {
				switch {
				case send.Server == 2:
					s.answer(send, done)
				case send.Server == 1:
					s.answer(send, notHere)
				case send.Cmd.ID == id0:
					s.answer(send, young(protocol.NotOurs, 0, longQuarantine))
				default:
					s.answer(send, Result{Answer: done.Answer, Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
				}
			}
			s.wants(op, false, how, token)
		}
	}
}

// A server joins the lease only after another one has lost it (B owned both), and then restarts.
func TestAServerThatJoinedALeaseProvesNothingByARestart(t *testing.T) {
	for _, asked := range []bool{false, true} {
		s := newStand(t, 3, time.Second)
		s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], granted(1))
		s.answer(sends[1], granted(1))
		s.tick() // the key is deleted on server 0; B owns 0 and 2, and leaves
		s.answer(sends[2], granted(9))
		s.tick()
		var asks []*Send
		if asked {
			s.renew()
			asks = s.answer(s.fx.Sends[2], notOurs)
		}
		op := s.release()
		for _, send := range s.fx.Sends {
			s.answer(send, []Result{notHere, done, young(protocol.NotOurs, 0, longQuarantine)}[send.Server])
		}
		if asked {
			s.answer(asks[0], young(protocol.Granted, 11, longQuarantine))
		}
		s.wants(op, false, "asked", asked)
	}
}

// A check's answer, kept and 1 ms before the end of the quarantine, arrives after a renewal has found the
// lease lost: in between A was evicted on 0 and 1, and B owned both.
func TestAnAnswerFromBeforeALossTellsOfNoRestart(t *testing.T) {
	for _, yields := range []bool{false, true} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		_, sends := s.check()
		old := sends[0]
		s.answer(sends[1], keptWith(1))
		s.answer(sends[2], keptWith(1))
		kept := keptWith(1)
		kept.Young = time.Millisecond
		s.now = s.now.Add(100 * time.Millisecond)
		r := s.renew()
		sends = s.fx.Sends
		s.answer(sends[0], notOurs)
		if !yields {
			for _, again := range s.answer(sends[1], notOurs) {
				s.answer(again, granted(9))
			}
			s.answer(sends[2], renewed)
			s.answer(old, kept)
			if !r.Decided() || r.Renewed != protocol.NotOurs {
				t.Errorf("renewed: %v %v", r.Decided(), r.Renewed)
			}
			continue
		}
		op, sends := s.leave(protocol.Yield)
		for _, send := range sends {
			if send.Server == 1 {
				s.drain(s.answer(send, notHere), enqueues)
			} else {
				s.answer(send, wasOurs[protocol.Yield])
			}
		}
		s.drain(s.answer(old, kept), enqueues)
		s.wants(op, false, "yield")
	}
}

// All servers have restarted, and B owned them all.
func TestServersThatAllRestartedProveNothingAlthoughTheLeaseStoodThere(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield, protocol.None} {
		s := newStand(t, 3, time.Second) // A waits on 0 and 1 in their quarantine, and then 2 restarts
		s.own(true, true, true)
		for server := range 2 {
			s.tick()
			s.renew()
			for _, send := range s.fx.Sends {
				switch {
				case send.Kind == Do:
					s.answer(send, young(protocol.Enqueued, 5, longQuarantine))
				case send.Server == server:
					s.drain(s.answer(send, notOurs), young(protocol.Enqueued, 5, longQuarantine))
				default:
					s.answer(send, renewed)
				}
			}
		}
		s.tick()
		if verb == protocol.None {
			s.fx = Effects{}
			op := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			s.drain(s.fx.Sends, Result{Young: longQuarantine})
			if !op.Decided() || op.Canceled.Owned {
				t.Errorf("cancel: %v %+v", op.Decided(), op.Canceled)
			}
			continue
		}
		op, sends := s.leave(verb)
		for len(sends) > 0 {
			res := young(protocol.NotOurs, 0, longQuarantine)
			if sends[0].Cmd.Verb == protocol.Acquire {
				res = young(protocol.Enqueued, 5, longQuarantine)
			}
			sends = append(sends[1:], s.answer(sends[0], res)...)
		}
		s.wants(op, false, verb, "queued there")
	}
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
		s := newStand(t, 3, time.Second) // B's releases let A in while A's renewal asks
		s.own(true, true, true)
		s.tick()
		s.renew()
		var asks, sends []*Send
		for _, send := range s.fx.Sends {
			asks = append(asks, s.answer(send, notOurs)...)
		}
		for _, ask := range asks {
			s.receive(ask.Server, ask.Cmd.ID, 9)
		}
		op, rest := s.leave(verb)
		for _, ask := range asks {
			sends = append(sends, s.answer(ask, young(protocol.Enqueued, 8, longQuarantine))...)
		}
		s.drain(append(sends, rest...), Result{Answer: wasOurs[verb].Answer, Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
		s.wants(op, false, verb, "granted by messages")
	}
}

// A server that passes a lease on to the next request of its process, but answers when the others have
// decided, did not let anybody in between. So it proves the next lease as they do.
func TestAServerThatAnswersAYieldLastWasNotGained(t *testing.T) {
	for _, gone := range []bool{false, true} { // whether another owner had taken the old lease from it
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.tick()
		op, sends := s.leave(protocol.Yield)
		for _, send := range sends[:2] {
			s.answer(send, granted(7))
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Fatalf("decided %v, %v %v", op.Decided(), op.Answer.Outcome, op.Err)
		}
		s.tick()
		late := granted(7)
		late.Answer.Gone = gone
		s.answer(sends[2], late)
		s.id = s.next()
		op = s.release()
		for _, send := range s.fx.Sends {
			s.answer(send, []Result{notHere, done, done}[send.Server])
		}
		s.wants(op, !gone, "the old lease was gone", gone)
	}
}

// A second renewal's answer says of a server that is being given back what the first one's has said.
func TestASecondRenewalTakesNothingFromARelease(t *testing.T) {
	for _, late := range []bool{true, false} { // true: the first renewal is decided, so the release asks the server
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.renew()
		first := s.fx.Sends
		if late {
			s.answer(first[1], renewed)
			s.answer(first[2], renewed)
		}
		s.tick()
		s.renew()
		second := s.fx.Sends
		asks := s.answer(first[0], notOurs)
		op := s.release()
		sends := s.fx.Sends
		s.answer(second[0], notOurs)
		for _, send := range sends {
			s.answer(send, []Result{young(protocol.NotOurs, 0, longQuarantine), done, notHere}[send.Server])
		}
		for _, ask := range asks {
			s.drain(s.answer(ask, young(protocol.Granted, 7, longQuarantine)), Result{Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
		}
		s.wants(op, true, "late", late)
	}
}

// A release has too few answers, so a cancel follows. A renewal that was under way is decided in between.
func TestARenewalThatMeetsAReleaseInDoubtLeavesItToTheCancel(t *testing.T) {
	for _, meets := range []bool{false, true} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, false)
		var renewal []*Send
		if meets {
			s.renew()
			renewal = s.fx.Sends
		}
		op := s.release()
		for _, send := range s.fx.Sends {
			s.answer(send, []Result{quiet, done, {}}[send.Server]) // server 0's connection breaks
		}
		for _, send := range renewal { // server 1 says what the release has done
			s.drain(s.answer(send, []Result{unheard, notOurs, enqueues}[send.Server]), Result{})
		}
		if !op.Decided() || op.Err == nil {
			t.Fatalf("released: %v %v", op.Decided(), op.Answer.Outcome)
		}
		s.fx = Effects{}
		c := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
		for _, send := range s.fx.Sends {
			s.answer(send, Result{Canceled: protocol.Canceled{Owned: send.Server == 0}})
		}
		if !c.Decided() || !c.Canceled.Owned {
			t.Errorf("meets a renewal %v: decided %v, %+v", meets, c.Decided(), c.Canceled)
		}
	}
}

// The answer that a release waits for comes after its patience.
func TestACancelDecidesAReleaseThatWaitedTooLongForAnAcquire(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, false)
	s.renew()
	sends := s.fx.Sends
	asks := s.answer(sends[0], notOurs)
	s.answer(sends[1], renewed)
	s.answer(sends[2], enqueues)
	op := s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, []Result{{}, done, {}}[send.Server])
	}
	s.expire(op)
	if op.Err == nil {
		t.Fatalf("decided %v without a cancel", op.Answer.Outcome)
	}
	s.fx = Effects{}
	c := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	s.drain(append(s.fx.Sends, s.answer(asks[0], young(protocol.Granted, 7, longQuarantine))...), Result{Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
	if !c.Decided() || !c.Canceled.Owned {
		t.Errorf("cancel: %v %+v", c.Decided(), c.Canceled)
	}
}

// What asks a server is a check that was sent before a renewal found the lease lost there, carried out
// after the restart.
func TestAReleaseWaitsForACheckThatWasSentBeforeTheLoss(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		_, sends := s.check()
		old := sends[0]
		s.answer(sends[1], keptWith(1))
		s.answer(sends[2], keptWith(1))
		s.tick()
		s.renew()
		s.answer(s.fx.Sends[0], notOurs)
		op, sends := s.leave(verb)
		for _, send := range sends {
			s.drain(s.answer(send, []Result{{}, wasOurs[verb], notHere}[send.Server]), enqueues)
		}
		s.drain(s.answer(old, young(protocol.Granted, 7, longQuarantine)), Result{Answer: enqueues.Answer, Young: longQuarantine, Canceled: protocol.Canceled{Owned: true}})
		s.wants(op, true, verb)
	}
}

// Renewals of a request that is over.
func TestARenewalOfARequestThatIsOverIsDecided(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, false)
	r := s.renew()
	renewal := s.fx.Sends
	s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, done)
	}
	s.answer(renewal[0], notOurs)
	s.answer(renewal[1], notOurs)
	s.drain(s.answer(renewal[2], enqueues), Result{})
	if !r.Decided() {
		t.Errorf("after a release: all have answered, and it is undecided: %v", r.outcomes)
	}

	s = newStand(t, 3, time.Second)
	s.own(true, true, false)
	r = s.renew()
	renewal = s.fx.Sends
	s.answer(renewal[0], renewed)
	s.answer(renewal[1], unheard)
	s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, done)
	}
	s.drain(s.answer(renewal[2], enqueues), Result{})
	if !r.Decided() {
		t.Errorf("the last server answers after a release, and it is undecided: %v", r.outcomes)
	}
}

// A server that granted the lease anew, perhaps after B, has restarted since, and B owns there in its
// quarantine.
func TestAServerThatGrantedAnewAndRestartedDoesNotStand(t *testing.T) {
	for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		for _, answer := range []Result{granted(7), young(protocol.Enqueued, 8, longQuarantine)} {
			s.tick()
			op := s.renew()
			sends := s.fx.Sends
			s.answer(s.answer(sends[0], notOurs)[0], answer)
			s.answer(sends[1], renewed)
			s.answer(sends[2], unheard)
			if !op.Decided() || op.Renewed == protocol.NotOurs {
				t.Fatalf("renewed: decided %v, %v", op.Decided(), op.Renewed)
			}
		}
		op, sends := s.leave(verb)
		for _, send := range sends {
			s.drain(s.answer(send, []Result{enqueues, wasOurs[verb], notHere}[send.Server]), enqueues)
		}
		s.wants(op, false, verb)
	}
}

// By the client's clock, a quarantine lasts for as long as it can last by the server's, whose rate may
// differ by 1 %.
func TestAServersGrantCountsOnceItsQuarantineIsOverByTheSlowestClock(t *testing.T) {
	s := newStand(t, 3, 20*time.Second)
	op := s.acquire()
	for i, send := range s.fx.Sends {
		s.answer(send, []Result{young(protocol.Granted, 1, longQuarantine), granted(1), enqueues}[i])
	}
	r := s.lock.reqs[s.id]
	for after, counts := range map[time.Duration]bool{0: false, longQuarantine + longQuarantine/200: false, longQuarantine + longQuarantine/99: true} {
		if got := s.lock.majority(r, op.at, s.now.Add(after)); got != counts {
			t.Errorf("after %v: a majority %v", after, got)
		}
	}
}
