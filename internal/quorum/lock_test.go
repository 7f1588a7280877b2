package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// stand is a lock whose servers' answers a test gives by hand.
type stand struct {
	t    *testing.T
	lock *Lock
	id   string // of the request
	ttl  time.Duration
	now  time.Time
	fx   Effects // of the last event
}

func newStand(t *testing.T, n int, ttl time.Duration) *stand {
	t.Helper()
	const client = "AAAAAAAAAAAAAAAA:test"
	newID := func(ttl time.Duration) string {
		return protocol.NewRequest(client, protocol.Exclusive, ttl, false, protocol.Unproved, protocol.Origin{}).ID
	}
	cfg := &Config{N: n, Need: Majority(n),
		NewID:  func(like protocol.Identity) string { return newID(like.TTL) },
		Proof:  func(int) protocol.Proof { return protocol.Unproved },
		Ticket: func() uint64 { return 1 },
		Away:   func(int) bool { return false },
	}
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	return &stand{t: t, lock: NewLock(cfg, &k), id: newID(ttl), ttl: ttl, now: time.Now()}
}

func (s *stand) acquire() *Op {
	s.fx = Effects{}
	return s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Wait: true, At: s.now}, s.now, &s.fx)
}

func (s *stand) renew() *Op {
	s.fx = Effects{}
	return s.lock.Renew(&protocol.Renewal{Req: protocol.Request{ID: s.id, TTL: s.ttl}, At: s.now}, s.now, &s.fx)
}

// answer gives the answer to a send and returns what is sent because of it.
func (s *stand) answer(send *Send, res Result) []*Send {
	s.fx = Effects{}
	s.lock.Answered(send, res, s.now, &s.fx)
	return s.fx.Sends
}

// own has the servers grant the request, each with the token 1.
func (s *stand) own(servers ...bool) {
	s.t.Helper()
	op := s.acquire()
	for i, send := range s.fx.Sends {
		if servers[i] {
			s.answer(send, granted(1))
		} else {
			s.answer(send, Result{Fail: silent})
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Granted {
		s.t.Fatalf("not granted: %+v %v", op.Answer, op.Err)
	}
}

var silent = &protocol.Failure{Err: errAway, Kind: protocol.NoAnswer}

func granted(token uint64) Result {
	return Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: token}}
}

// young is the answer of a server that has lost its data, and is in quarantine for so long.
func young(o protocol.Outcome, token uint64, left time.Duration) Result {
	return Result{Answer: protocol.Answer{Outcome: o, Token: token, Clock: token}, Young: left}
}

var (
	renewed = Result{Renewed: protocol.Granted, Clock: 1}
	notOurs = Result{Renewed: protocol.NotOurs}
)

// Servers that lost their data, and let somebody else in whom nobody else counts, cost the
// owner nothing as long as they are in quarantine.
func TestAnOwnerWaitsOnServersInQuarantineWithoutLosingItsLease(t *testing.T) {
	for _, within := range []bool{true, false} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		restarted := func(o protocol.Outcome, token uint64, left time.Duration) *Op {
			op := s.renew()
			sends := s.fx.Sends
			for i, send := range sends {
				if send.Kind != Renew { // a server that it waits on is asked again
					s.answer(send, young(o, token, left))
				} else if i >= 3 {
					s.answer(send, renewed)
				} else if asks := s.answer(send, notOurs); len(asks) == 1 {
					s.answer(asks[0], young(o, token, left))
				}
			}
			return op
		}
		op := restarted(protocol.Enqueued, 5, 10*time.Second)
		if !op.Decided() || op.Renewed != protocol.Unanswered {
			t.Fatalf("decided %v: %v", op.Decided(), op.Renewed)
		}
		s.now = s.now.Add(5 * time.Second)
		if op = restarted(protocol.Enqueued, 5, 5*time.Second); op.Renewed != protocol.Unanswered {
			t.Fatalf("the second time: %v", op.Renewed)
		}
		want := protocol.Granted
		s.now = s.now.Add(time.Second)
		left := 4 * time.Second
		if !within {
			s.now = s.now.Add(time.Minute)
			left, want = 0, protocol.NotOurs // others may have owned it with those three
		}
		if op = restarted(protocol.Granted, 6, left); !op.Decided() || op.Renewed != want {
			t.Errorf("within the quarantine %v: decided %v, %v", within, op.Decided(), op.Renewed)
		}
	}
}

// Nor does a quarantine that ends while the owner waits for the server's answer protect it.
func TestAQuarantineThatEndsDuringARenewalProtectsNobody(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.renew()
	sends := s.fx.Sends
	for _, send := range sends[:2] {
		s.answer(s.answer(send, notOurs)[0], young(protocol.Enqueued, 5, 100*time.Millisecond))
	}
	s.answer(sends[2], renewed)
	s.now = s.now.Add(80 * time.Millisecond)
	op := s.renew()
	for _, send := range s.fx.Sends {
		if send.Kind == Renew {
			s.answer(send, renewed)
		}
	}
	s.now = s.now.Add(50 * time.Millisecond)
	s.fx = Effects{}
	s.lock.Expire(op, s.now, &s.fx)
	if op.Renewed != protocol.NotOurs {
		t.Errorf("renewed: %v", op.Renewed)
	}
}

// The same, where a message says that the server let us in.
func TestAServerThatAdmitsItsOldOwnerAfterItsQuarantineDoesNotSpeakForItsLease(t *testing.T) {
	for _, within := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.renew()
		sends := s.fx.Sends
		var ids []string
		for _, send := range sends[:2] {
			ask := s.answer(send, notOurs)[0]
			ids = append(ids, ask.Cmd.ID)
			s.answer(ask, young(protocol.Enqueued, 5, 10*time.Second))
		}
		s.answer(sends[2], renewed)
		if s.now = s.now.Add(5 * time.Second); !within {
			s.now = s.now.Add(10 * time.Second)
		}
		for i, id := range ids {
			s.fx = Effects{}
			s.lock.Receive(i, &protocol.Message{Kind: "granted", ID: id, Token: 6, Clock: 6}, s.now, &s.fx)
		}
		op := s.renew()
		for _, send := range s.fx.Sends {
			s.answer(send, renewed)
		}
		want := protocol.Granted
		if !within {
			want = protocol.NotOurs
		}
		if !op.Decided() || op.Renewed != want {
			t.Errorf("within the quarantine %v: decided %v, %v", within, op.Decided(), op.Renewed)
		}
	}
}

// A server that said that it is not ours speaks against us although it does not answer what it
// is asked then: with that one and the two that were not ours, another may have owned the lock.
func TestAServerThatLostAGrantDoesNotCountAsSilent(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.own(true, true, true, false, false)
	op := s.renew()
	for _, send := range s.fx.Sends {
		switch {
		case send.Server == 0:
			s.answer(send, renewed)
		case send.Server == 1:
			s.answer(send, notOurs) // and what follows has no answer
		case send.Server > 2:
			s.answer(send, granted(7))
		}
	}
	s.fx = Effects{}
	s.lock.Expire(op, s.now, &s.fx)
	if op.Renewed != protocol.NotOurs {
		t.Errorf("renewed: %v", op.Renewed)
	}
}

// Where the servers' clocks differ by more than a fraction of the TTL, nobody is admitted
// before a majority keeps the token.
func TestATokenFarAheadIsWrittenBackFirst(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	var adopts []*Send
	for i, token := range []uint64{9_000_000, 1_000_000} {
		adopts = append(adopts, s.answer(sends[i], granted(token))...)
	}
	if op.Decided() || len(adopts) != 1 || adopts[0].Kind != Adopt || adopts[0].Server != 1 || adopts[0].Token != 9_000_000 {
		t.Fatalf("decided %v, sent %+v", op.Decided(), adopts)
	}
	s.answer(adopts[0], Result{Answer: protocol.Answer{Outcome: protocol.Done}})
	if !op.Decided() || op.Answer.Token != 9_000_000 || op.Answer.Clock != 1_000_000 {
		t.Errorf("decided %v: %+v", op.Decided(), op.Answer)
	}
}
