package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// In each of these, another client may have owned servers 0 and 2 at one time since the lease was granted:
// it was evicted there, and does not know. Then server 0 is ours again, and server 2 is silent.

var (
	quiet  = Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	done   = Result{Answer: protocol.Answer{Outcome: protocol.Done}}
	behind = Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 8}}
	keeps  = Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 1, Clock: 9, Kept: true}}
)

func (s *stand) tick() { s.now = s.now.Add(time.Millisecond) }

// answerButTwo has servers 0 and 1 answer, and server 2 be silent.
func (s *stand) answerButTwo(sends []*Send, res Result) {
	for _, send := range sends {
		if send.Server == 2 {
			s.answer(send, quiet)
		} else {
			s.answer(send, res)
		}
	}
}

// proves releases the request: two servers say that they owned it, and the third is silent. It reports
// whether that proves the lease, or a cancel that follows does.
func (s *stand) proves() bool {
	s.tick()
	op := s.release()
	s.answerButTwo(s.fx.Sends, Result{Answer: done.Answer, Canceled: protocol.Canceled{Owned: true, Token: 9}})
	if !op.Decided() {
		s.expire(op)
	}
	if op.Err == nil {
		return op.Answer.Outcome == protocol.Done
	}
	s.fx = Effects{}
	op = s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	s.answerButTwo(s.fx.Sends, Result{Canceled: protocol.Canceled{Owned: true, Token: 9}})
	return op.Canceled.Owned
}

func (s *stand) granting(server int, token uint64) {
	s.t.Helper()
	for _, r := range s.lock.reqs {
		s.fx = Effects{}
		s.lock.Receive(server, &protocol.Message{Kind: protocol.MessageGranted, ID: r.parts[server].id, Token: token, Clock: token}, s.now, &s.fx)
		if r.parts[server].state != owned {
			s.t.Fatal("the message is not believed")
		}
	}
}

// renewing renews; what server 0 is asked for is returned.
func (s *stand) renewing(zero, one, two Result) (*Op, []*Send) {
	s.tick()
	op := s.renew()
	var asks []*Send
	for i, send := range s.fx.Sends {
		asks = append(asks, s.answer(send, []Result{zero, one, two}[i])...)
	}
	return op, asks
}

func TestAServerThatOthersCountedProvesNothingAfterARenewalBySilentOnes(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.renewing(notOurs, renewed, renewed)
	s.answer(asks[0], young(protocol.Enqueued, 8, 20*time.Millisecond)) // it has lost its data
	s.now = s.now.Add(50 * time.Millisecond)                            // and counts for its owner, who ends
	s.granting(0, 9)
	if op, _ := s.renewing(renewed, renewed, quiet); op.Renewed != protocol.Granted {
		t.Fatalf("not renewed: %+v", op)
	}
	if s.proves() {
		t.Error("released")
	}
}

func TestAMessageDoesNotHideThatItsServerHadLostTheLease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.renewing(notOurs, renewed, quiet)
	s.granting(0, 9)
	s.answer(asks[0], behind)
	if s.proves() {
		t.Error("released")
	}
}

func TestACancelDoesNotProveWhatALostServerGrantsAnewBeforeIt(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.renewing(notOurs, renewed, quiet)
	s.tick()
	release := s.release()
	sends := s.fx.Sends
	cancels := s.answer(asks[0], granted(9))
	s.answerButTwo(append(sends, cancels...), Result{Answer: done.Answer, Canceled: protocol.Canceled{Owned: true, Token: 9}})
	if !release.Decided() || release.Err == nil {
		t.Fatalf("released: %+v", release.Answer)
	}
	s.fx = Effects{}
	cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, quiet)
	}
	if !cancel.Decided() {
		s.expire(cancel)
	}
	if cancel.Canceled.Owned {
		t.Error("a cancel proves it")
	}
}

// heldAsk sends an acquire for a held lease, which two servers decide, and returns what the third has yet
// to answer.
func heldAsk(s *stand) *Send {
	s.tick()
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	sends := s.fx.Sends
	s.answer(sends[1], keeps)
	s.answer(sends[2], keeps)
	if !op.Decided() || op.Answer.Outcome != protocol.Granted || !op.Answer.Kept {
		s.t.Fatalf("%+v", op)
	}
	return sends[0]
}

// The release of a server waits for the acquire before it, which is granted anew, or has no answer.
func TestAReleaseDoesNotProveWhatIsGrantedAnewBeforeIt(t *testing.T) {
	for name, answer := range map[string]Result{"granted anew": granted(9), "no answer": quiet} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		ask := heldAsk(s)
		s.tick()
		release := s.release()
		sends := s.fx.Sends
		s.answerButTwo(append(sends, s.answer(ask, answer)...), done)
		if !release.Decided() || release.Err == nil && release.Answer.Outcome == protocol.Done {
			t.Errorf("%s: released: %+v", name, release.Answer)
		}
	}
}

func TestALateCopyOfAnAcquireThatOthersDecidedProvesNothing(t *testing.T) {
	for last, proved := range map[uint64]bool{1: true, 9: false} { // 9: the late copy was granted anew
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.answer(heldAsk(s), quiet)
		s.tick()
		release := s.release()
		for _, send := range s.fx.Sends {
			switch send.Server {
			case 0:
				s.answer(send, Result{Answer: done.Answer, Canceled: protocol.Canceled{Owned: true, Token: last}})
			case 1:
				s.answer(send, done)
			case 2:
				s.answer(send, quiet)
			}
		}
		if got := release.Decided() && release.Err == nil && release.Answer.Outcome == protocol.Done; got != proved {
			t.Errorf("the last token is %d: released %v", last, got)
		}
	}
}

// Server 2 says yes, and is another's then, as server 0 was; server 0 gives us the lock anew; server 1 says
// yes only then.
func TestARenewalDoesNotProveWhatIsGrantedAnewMeanwhile(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.tick()
	s.renew()
	sends := s.fx.Sends
	s.answer(sends[2], renewed)
	s.answer(s.answer(sends[0], notOurs)[0], granted(9))
	s.answer(sends[1], renewed)
	if s.proves() {
		t.Error("released")
	}
}

// Likewise if server 0 was known to be another's when the renewal began.
func TestARenewalDoesNotProveWhatWasAnothersWhenItBegan(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.fx = Effects{}
	for _, r := range s.lock.reqs {
		s.lock.Receive(0, &protocol.Message{Kind: protocol.MessageRevoked, ID: r.parts[0].id}, s.now, &s.fx)
	}
	s.tick()
	s.renew()
	sends := s.fx.Sends
	s.answer(sends[2], renewed)
	s.answer(sends[0], granted(9))
	s.answer(sends[1], renewed)
	if s.proves() {
		t.Error("released")
	}
}

// A renewal finds that server 0 is another's, and asks it. A check meets that question, and the answer
// comes before the check's other answers: server 1 has been another's, too.
func TestACheckDoesNotCountAServerThatIsFoundToBeAnothersMeanwhile(t *testing.T) {
	for name, answer := range map[string]Result{"it waits there": behind, "granted anew": granted(9), "no answer": quiet} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		_, asks := s.renewing(notOurs, renewed, renewed)
		op, sends := s.check()
		s.answer(asks[0], answer)
		s.answer(sends[0], granted(9))
		s.answer(sends[1], keptWith(1))
		if !op.Decided() || op.Err == nil && op.Answer.Kept {
			t.Errorf("%s: decided %v, %+v", name, op.Decided(), op.Answer)
		}
	}
}

// lowered unlocks the reader that the request was downgraded to, and reports whether that proves its lease.
func (s *stand) lowered() bool {
	s.tick()
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.lower(), At: s.now}, s.now, &s.fx)
	s.answerButTwo(s.fx.Sends, done)
	return op.Decided() && op.Err == nil && op.Answer.Outcome == protocol.Done
}

// The first try of a downgrade finds that server 0 granted anew, and has no answer of the others.
func TestTheSecondTryOfADowngradeRemembersWhatWasGrantedAnew(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.renewing(notOurs, renewed, quiet)
	s.answer(asks[0], granted(9))
	for try := range 2 {
		s.tick()
		op, sends := s.downgrade()
		for _, send := range sends {
			if send.Server == 0 || send.Server == 1 && try == 1 {
				s.answer(send, granted(20))
			} else {
				s.answer(send, quiet)
			}
		}
		if try == 1 && op.Err == nil && op.Answer.Outcome == protocol.Granted && s.lowered() {
			t.Error("released")
		}
	}
}

// Between two tries of a downgrade, server 0 is another's. Then its word alone proves nothing, whether the others
// let the downgrade succeed or not.
func TestWhatWasGrantedAnewBetweenTriesOfADowngradeProvesNothing(t *testing.T) {
	for _, answering := range []int{2, 3} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		for try := range 2 {
			s.tick()
			op, sends := s.downgrade()
			for _, send := range sends {
				switch {
				case send.Server == 0 && try == 0:
					s.answer(send, granted(20))
				case send.Server < answering && try == 1:
					s.answer(send, granted(30))
				default:
					s.answer(send, quiet)
				}
			}
			succeeded := op.Err == nil && op.Answer.Outcome == protocol.Granted
			if try == 1 && succeeded != (answering == 3) {
				t.Errorf("%d servers answered: granted %v", answering, succeeded)
			}
			if try == 1 && succeeded && s.lowered() {
				t.Error("released")
			}
		}
	}
}

// A downgrade was done by all, who do not keep its token: they have another owner by then. Unlock has both
// requests canceled, the old one first, and it is the second that proves the lease.
func TestTheCancelOfWhatWasDowngradedDoesNotProveThatItsReaderOwned(t *testing.T) {
	for _, evicted := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.tick()
		op, sends := s.downgrade()
		for i, send := range sends {
			for _, adopt := range s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: uint64(1e7 * (i + 1)), Clock: 1e7}}) {
				s.answer(adopt, quiet)
			}
		}
		if !op.Decided() {
			s.expire(op)
		}
		if op.Err == nil {
			t.Fatalf("the downgrade is answered: %+v", op.Answer)
		}
		cancel := func(id string, res Result) protocol.Canceled {
			s.fx = Effects{}
			op := s.lock.CancelRequest(&protocol.CancelRequest{ID: id}, s.now, &s.fx)
			for _, send := range s.fx.Sends {
				s.answer(send, res)
			}
			if !op.Decided() {
				t.Fatal("a cancel is not decided")
			}
			return op.Canceled
		}
		if cancel(s.id, quiet).Owned {
			t.Error("proved by the cancel of the writer")
		}
		if cancel(s.lower(), Result{Canceled: protocol.Canceled{Owned: !evicted}}).Owned == evicted {
			t.Errorf("evicted %v: proved %v by the cancel of the reader", evicted, evicted)
		}
	}
}

// The slowest server confirms each renewal, but too late for its decision.
func TestTheSlowestServersWordsCountForARenewalToo(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, asks := s.renewing(notOurs, renewed, renewed)
	s.answer(asks[0], granted(9))
	for range 3 {
		if op, _ := s.renewing(renewed, renewed, renewed); op.Renewed != protocol.Granted {
			t.Fatalf("not renewed: %+v", op)
		}
	}
	if !s.proves() {
		t.Error("not proved, although all servers confirmed it three times")
	}
}

// A server that granted the lease only after it had begun says nothing about the time before. If
// another server turns out to have lost it, others may have owned both.
func TestAServerThatWasGainedDoesNotProveWhatWasBefore(t *testing.T) {
	gained := func() *stand {
		s := newStand(t, 3, time.Second)
		op := s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], granted(1))
		s.answer(sends[1], granted(1))
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Fatalf("not granted: %+v", op.Answer)
		}
		s.tick()
		s.answer(sends[2], granted(2))
		s.tick()
		return s
	}
	renew := func(s *stand, zero Result) *Op {
		op := s.renew()
		for _, send := range s.fx.Sends {
			if send.Server > 0 {
				s.answer(send, renewed)
			} else {
				for _, again := range s.answer(send, zero) {
					s.answer(again, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1}})
				}
			}
		}
		if op.Renewed != protocol.Granted {
			t.Fatalf("renewed by two of three: %v", op.Renewed)
		}
		s.tick()
		return op
	}
	for _, c := range []struct {
		name             string
		confirmed, loses bool
		first            Result // of a renewal, before that
	}{
		{name: "all kept it"},
		{name: "one lost it", loses: true},
		{name: "one lost it after all had kept it", loses: true, confirmed: true, first: renewed},
		{name: "one lost it after the others had kept it", loses: true, confirmed: true, first: Result{Fail: silent}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := gained()
			if c.confirmed {
				renew(s, c.first)
			}
			if c.loses {
				renew(s, notOurs)
			}
			op := s.release()
			for _, send := range s.fx.Sends {
				switch {
				case send.Kind == Cancel:
					s.answer(send, Result{Canceled: protocol.Canceled{Token: 1}})
				case send.Server == 0:
					s.answer(send, Result{Fail: silent})
				default:
					s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
				}
			}
			want := protocol.Done
			if c.loses && !c.confirmed {
				want = protocol.NotOurs
			}
			if !op.Decided() || op.Answer.Outcome != want {
				t.Errorf("decided %v, %v, want %v: %v", op.Decided(), op.Answer.Outcome, want, op.Err)
			}
		})
		t.Run(c.name+", evicted", func(t *testing.T) {
			s := gained()
			if c.confirmed {
				renew(s, c.first)
			}
			if over := s.evict(0, s.lock.reqs[s.id].parts[0].id, 1); over == c.confirmed {
				t.Errorf("over %v", over)
			}
		})
	}
}

// A server that lost its data and let the owner in again, in quarantine, was not gained.
func TestAServerThatLostItsDataWasNotGained(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.tick()
	s.renew()
	sends := s.fx.Sends
	s.tick()
	s.answer(sends[1], renewed)
	for _, again := range s.answer(sends[2], notOurs) {
		s.answer(again, young(protocol.Granted, 2, time.Hour))
	}
	for _, again := range s.answer(sends[0], notOurs) {
		s.answer(again, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1}})
	}
	s.tick()
	op := s.release()
	for _, send := range s.fx.Sends {
		if send.Kind == Cancel {
			s.answer(send, Result{Canceled: protocol.Canceled{Token: 1}})
		} else {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Done {
		t.Errorf("decided %v, %v: %v", op.Decided(), op.Answer.Outcome, op.Err)
	}
}

// A downgrade is decided before the slowest server has answered, which has had the lease all the time.
func TestAServerThatDowngradesALeaseLastWasNotGained(t *testing.T) {
	for _, evicted := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.tick()
		op, sends := s.downgrade()
		s.answer(sends[0], granted(20))
		s.answer(sends[1], granted(20))
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Fatalf("%+v", op)
		}
		s.tick()
		s.answer(sends[2], granted(20))
		s.tick()
		if evicted {
			if s.evict(0, sends[0].Cmd.Next, 20) {
				t.Error("two of three have kept it, and it is over")
			}
			continue
		}
		s.fx = Effects{}
		op = s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.lower(), At: s.now}, s.now, &s.fx)
		for _, send := range s.fx.Sends {
			if send.Server == 0 {
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}})
			} else {
				s.answer(send, done)
			}
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Done {
			t.Errorf("decided %v, %v: %v", op.Decided(), op.Answer.Outcome, op.Err)
		}
	}
}

// Server 0 has granted a request, evicted it unheard, had another owner together with server 2, and granted
// the request again, whose answer was lost. Its clock and that of server 2 are ahead of server 1's.
func TestTokensGrowWhereAServerGrantedAnewWithoutAWord(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.enqueue() // server 0 grants it
	s.tick()
	op := s.acquire()
	for _, send := range s.fx.Sends {
		if send.Server == 0 {
			s.answer(send, quiet)
		} else {
			s.answer(send, behind)
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("decided %v, %+v", op.Decided(), op.Answer)
	}
	s.tick()
	op = s.acquire()
	for _, send := range s.fx.Sends {
		switch send.Server {
		case 0:
			s.answer(send, keptWith(60e6))
		case 1:
			for _, adopt := range s.answer(send, granted(30e6)) {
				s.answer(adopt, done)
			}
		default:
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 55e6, Clock: 60e6}})
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Token < 60e6 {
		t.Errorf("decided %v, %+v: another owner had token 55000000", op.Decided(), op.Answer)
	}
}
