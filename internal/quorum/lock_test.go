package quorum

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// stand is a lock whose test plays the servers: it gives each answer by hand.
type stand struct {
	t    *testing.T
	lock *Lock
	id   string // the request's id
	ttl  time.Duration
	now  time.Time
	fx   Effects // effects of the last event
}

func newStand(t *testing.T, n int, ttl time.Duration) *stand {
	t.Helper()
	const client = "AAAAAAAAAAAAAAAA:test"
	newID := func(ttl time.Duration) string {
		return protocol.NewRequest(client, protocol.Exclusive, ttl, false, protocol.Unproved, protocol.Origin{}).ID
	}
	cfg := &Config{N: n,
		NewID:  func(like protocol.Identity) string { return newID(like.TTL) },
		Proof:  func(int) protocol.Proof { return protocol.Unproved },
		Ticket: func() uint64 { return 1 },
		Away:   func(int) bool { return false },

		RoundTrip: func(int) time.Duration { return 0 },
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

// downgrade turns the request into a reader's. A test may call it again to repeat the downgrade.
func (s *stand) downgrade() (*Op, []*Send) {
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Downgrade, ID: s.id, Next: s.lower(), At: s.now}, s.now, &s.fx)
	return op, s.fx.Sends
}

// lower returns the id of the reader's request after a downgrade.
func (s *stand) lower() string { return "leased1:r" + s.id[len("leased1:w"):] }

// next returns the id of a request that follows the first one.
func (s *stand) next() string {
	const before = "leased1:w:1000:u:"
	return before + "BBBBBBBBBBBBBBBB" + s.id[len(before)+16:]
}

func (s *stand) release() *Op {
	s.fx = Effects{}
	return s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
}

// leave gives the lease back, by a release or by a yield to the next request.
func (s *stand) leave(verb protocol.Verb) (*Op, []*Send) {
	c := protocol.Command{Verb: verb, ID: s.id, At: s.now}
	if verb == protocol.Yield {
		c.Next = s.next()
	}
	s.fx = Effects{}
	return s.lock.Do(&c, s.now, &s.fx), s.fx.Sends
}

// wasOurs is the answer of a server where the lease was ours until it was given back.
var wasOurs = map[protocol.Verb]Result{
	protocol.Release: done,
	protocol.Yield:   {Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}},
}

// expire has op decided without the answers that are still missing.
func (s *stand) expire(op *Op) {
	s.fx = Effects{}
	s.lock.Expire(op, s.now, &s.fx)
}

func (s *stand) renew() *Op {
	s.fx = Effects{}
	return s.lock.Renew(&protocol.Renewal{Req: protocol.Request{ID: s.id, TTL: s.ttl}, At: s.now}, s.now, &s.fx)
}

// answer gives a send its answer and returns what the lock sends in response.
func (s *stand) answer(send *Send, res Result) []*Send {
	s.fx = Effects{}
	s.lock.Answered(send, res, s.now, &s.fx)
	return s.fx.Sends
}

// own has the request granted by the servers whose flag is true, each with token 1. The others are silent.
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

// young is the answer of a server that has lost its data and stays in quarantine for left.
func young(o protocol.Outcome, token uint64, left time.Duration) Result {
	return Result{Answer: protocol.Answer{Outcome: o, Token: token, Clock: token}, Young: left}
}

var (
	renewed = Result{Renewed: protocol.Granted, Clock: 1}
	notOurs = Result{Renewed: protocol.NotOurs}
)

// A server does less work for a request that it cannot know yet than for one that may already be queued
// there.
func TestOnlyTheFirstAcquireOfAServersIDSaysThatItIsNew(t *testing.T) {
	s := newStand(t, 3, time.Second)
	isNew := func(what string, sends []*Send, want ...bool) {
		t.Helper()
		if len(sends) != len(want) {
			t.Fatalf("%s: %d commands, want %d", what, len(sends), len(want))
		}
		for i, send := range sends {
			if send.Cmd.Verb != protocol.Acquire || send.Cmd.First != want[i] {
				t.Errorf("%s: server %d is sent %+v", what, send.Server, send.Cmd)
			}
		}
	}
	s.acquire()
	sends := s.fx.Sends
	isNew("at first", sends, true, true, true)
	s.answer(sends[0], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	s.answer(sends[1], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	s.answer(sends[2], Result{Fail: silent})
	s.acquire()
	isNew("once more", s.fx.Sends, false, false, false)
	for _, send := range s.fx.Sends {
		s.answer(send, granted(1))
	}
	s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
	}
	s.acquire() // under new ids on the servers
	isNew("after its end", s.fx.Sends, true, true, true)
}

// Some servers lost their data and granted the lock to another client. A grant by servers in quarantine
// counts for nobody, so the owner keeps its lease as long as the quarantine lasts.
func TestAnOwnerWaitsOnServersInQuarantineWithoutLosingItsLease(t *testing.T) {
	for _, within := range []bool{true, false} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		restarted := func(o protocol.Outcome, token uint64, left time.Duration) *Op {
			op := s.renew()
			sends := s.fx.Sends
			for i, send := range sends {
				if send.Kind != Renew { // the owner is queued on this server, which is asked again
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
			left, want = 0, protocol.NotOurs // another client may have owned the lock with those three servers
		}
		if op = restarted(protocol.Granted, 6, left); !op.Decided() || op.Renewed != want {
			t.Errorf("within the quarantine %v: decided %v, %v", within, op.Decided(), op.Renewed)
		}
	}
}

// A quarantine that ends while the owner waits for the server's answer no longer protects the owner.
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
	s.expire(op)
	if op.Renewed != protocol.NotOurs {
		t.Errorf("renewed: %v", op.Renewed)
	}
}

// The same, but a message says that the servers granted the lock to the owner again.
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
			s.lock.Receive(i, &protocol.Message{Kind: protocol.MessageGranted, ID: id, Token: 6, Clock: 6}, s.now, &s.fx)
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

// A server that answered NotOurs counts against the owner even if it does not answer the acquire that
// follows: together with the two servers that never granted the lock, it may have let another client own
// it.
func TestAServerThatLostAGrantDoesNotCountAsSilent(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.own(true, true, true, false, false)
	op := s.renew()
	for _, send := range s.fx.Sends {
		switch {
		case send.Server == 0:
			s.answer(send, renewed)
		case send.Server == 1:
			s.answer(send, notOurs) // the acquire that follows gets no answer
		case send.Server > 2:
			s.answer(send, granted(7))
		}
	}
	s.expire(op)
	if op.Renewed != protocol.NotOurs {
		t.Errorf("renewed: %v", op.Renewed)
	}
}

// If the servers' clocks differ by more than a fraction of the TTL, nobody is admitted until a majority has
// stored the token.
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

// enqueue has the request queued on all servers except server 0, which grants it, and server 1, which is
// silent. It returns the request's id on server 1.
func (s *stand) enqueue() string {
	s.t.Helper()
	op := s.acquire()
	sends := s.fx.Sends
	s.answer(sends[0], granted(1))
	s.answer(sends[1], Result{Fail: silent})
	for _, send := range sends[2:] {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		s.t.Fatalf("it does not wait: %+v %v", op.Answer, op.Err)
	}
	return sends[1].Cmd.ID
}

func (s *stand) receive(server int, id string, token uint64) (kinds protocol.MessageKind) {
	s.fx = Effects{}
	s.lock.Receive(server, &protocol.Message{Kind: protocol.MessageGranted, ID: id, Token: token, Clock: token}, s.now, &s.fx)
	for _, m := range s.fx.Messages {
		kinds += m.Kind
	}
	return kinds
}

// A message does not say whether its server is in quarantine. If the server's last answer is missing, it
// may have restarted before it queued the request, so it is asked before the message counts.
func TestAMessageCountsOnlyIfTheServersAnswersAreKnown(t *testing.T) {
	for _, restarted := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		id := s.enqueue()
		if told := s.receive(1, id, 6); told != protocol.MessageWanted {
			t.Fatalf("told %q", told)
		}
		op := s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 1, Clock: 1, Kept: true}})
		s.answer(sends[2], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}})
		res := Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 6, Clock: 6, Kept: true}}
		if restarted {
			res.Young = 10 * time.Second
		}
		s.answer(sends[1], res)
		if got := op.Answer.Outcome == protocol.Granted; !op.Decided() || got == restarted {
			t.Errorf("restarted %v: decided %v, %+v", restarted, op.Decided(), op.Answer)
		}
	}
}

// Servers that are away or refuse leave proofs behind that are too old to count, and asking makes them no
// younger. So the state machine is told to ask once for each grant, and not for each answer.
func TestOldProofsAreAReasonToAskOnce(t *testing.T) {
	queued := Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}
	for _, why := range []*protocol.Failure{silent, {Err: errors.New("READONLY"), Kind: protocol.RefusedNow}} {
		s := newStand(t, 5, time.Minute)
		s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], granted(1))
		s.answer(sends[1], granted(1))
		for _, send := range sends[2:] {
			s.answer(send, queued)
		}
		for round := range 2 {
			s.tick()
			s.acquire()
			asked := s.fx.Sends
			s.answer(asked[0], keptWith(1))
			for _, send := range asked[1:] {
				if send.Server < 2+round {
					s.answer(send, Result{Fail: why})
				} else {
					s.answer(send, queued)
				}
				if len(s.fx.Messages) > 0 {
					t.Fatalf("%v, round %d: after an answer the state machine is told %+v", why.Err, round, s.fx.Messages)
				}
			}
			if told := s.receive(2+round, sends[2+round].Cmd.ID, 6); told != protocol.MessageWanted {
				t.Fatalf("%v, round %d: after a message the state machine is told %q, want wanted", why.Err, round, told)
			}
		}
	}
}

// A message that overtakes the answer to the command that queued the request does not count until that
// answer has arrived.
func TestAMessageThatOvertakesItsAnswerWaitsForIt(t *testing.T) {
	for _, restarted := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		op := s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], granted(1))
		if told := s.receive(1, sends[1].Cmd.ID, 6); told != "" || op.Decided() {
			t.Fatalf("told %q, decided %v", told, op.Decided())
		}
		res := Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 5, Clock: 5}}
		if restarted {
			res.Young = 10 * time.Second
		}
		s.answer(sends[1], res)
		s.answer(sends[2], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}})
		if got := op.Answer.Outcome == protocol.Granted; !op.Decided() || got == restarted {
			t.Errorf("restarted %v: decided %v, %+v", restarted, op.Decided(), op.Answer)
		}
	}
}

// The grant of a silent server counts for the owner only until it expires. After that, the server may have
// granted the lock to another client.
func TestASilentServerCountsForATTLOnly(t *testing.T) {
	for _, renewals := range []int{1, 4} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, false, false)
		round := func(first Result) *Op {
			s.now = s.now.Add(300 * time.Millisecond)
			op := s.renew()
			for _, send := range s.fx.Sends {
				switch {
				case send.Server == 0:
					for _, ask := range s.answer(send, first) {
						s.answer(ask, granted(8))
					}
				case send.Server > 2 && send.Kind == Renew:
					s.answer(send, renewed)
				case send.Server > 2:
					s.answer(send, granted(7))
				}
			}
			s.expire(op)
			return op
		}
		for range renewals {
			if op := round(renewed); op.Renewed != protocol.Granted {
				t.Fatalf("renewed: %v %v", op.Renewed, op.Err)
			}
		}
		want := protocol.Granted
		if renewals > 3 { // another client may have owned servers 0 to 2
			want = protocol.NotOurs
		}
		if op := round(notOurs); op.Renewed != want {
			t.Errorf("after %d renewals: %v", renewals, op.Renewed)
		}
	}
}

// Servers that lost their data, and a silent one, cost the owner nothing: servers without data grant a lock
// only if all servers have lost theirs. If all have, the lease is over.
func TestOnlyIfAllServersRestartedOthersCanHaveOwnedIt(t *testing.T) {
	for _, all := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		op := s.renew()
		sends := s.fx.Sends
		for _, send := range sends {
			if send.Server < 2 || all {
				s.answer(s.answer(send, notOurs)[0], young(protocol.Granted, 7, 10*time.Second))
			}
		}
		s.fx = Effects{}
		if !op.Decided() {
			s.lock.Expire(op, s.now, &s.fx)
		}
		want := protocol.Granted
		if all {
			want = protocol.NotOurs
		}
		if op.Renewed != want {
			t.Errorf("all %v: renewed %v, %v", all, op.Renewed, op.Err)
		}
	}
	s := newStand(t, 5, time.Second) // every server that granted restarts, but not every server
	s.own(true, true, true, false, false)
	op := s.renew()
	for _, send := range s.fx.Sends {
		if send.Server < 3 {
			s.answer(s.answer(send, notOurs)[0], young(protocol.Granted, 7, 10*time.Second))
		}
	}
	s.expire(op)
	if op.Renewed != protocol.Granted {
		t.Errorf("renewed %v, %v", op.Renewed, op.Err)
	}
}

// displacedOn has servers 0 and 1 of three restart and grant the lock to another client. They stay in
// quarantine for left. It returns the ids under which the owner is queued on them.
func displacedOn(t *testing.T, left time.Duration) (s *stand, ids []string) {
	t.Helper()
	s = newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.renew()
	sends := s.fx.Sends
	for _, send := range sends[:2] {
		ask := s.answer(send, notOurs)[0]
		ids = append(ids, ask.Cmd.ID)
		s.answer(ask, young(protocol.Enqueued, 5, left))
	}
	s.answer(sends[2], renewed)
	return s, ids
}

// A server in quarantine goes on protecting the owner while its answer to an earlier acquire is missing.
func TestAServerInQuarantineProtectsTheOwnerWhileItIsSlow(t *testing.T) {
	s, _ := displacedOn(t, 10*time.Second)
	for i := range 3 {
		s.now = s.now.Add(100 * time.Millisecond)
		op := s.renew()
		for _, send := range s.fx.Sends {
			if send.Kind == Renew {
				s.answer(send, renewed)
			}
		}
		s.fx = Effects{}
		if !op.Decided() {
			s.lock.Expire(op, s.now, &s.fx)
		}
		if op.Renewed != protocol.Unanswered {
			t.Fatalf("renewal %d: %v", i, op.Renewed)
		}
	}
}

// After its quarantine, a server admitted its old owner again, but may have admitted others before. It
// proves nothing for that owner: not in a renewal that began earlier, in a release or in a cancel.
func TestAServerThatLetOthersInDoesNotSpeakForTheOldOwner(t *testing.T) {
	admit := func(s *stand, ids []string) {
		for i, id := range ids {
			s.receive(i, id, 6)
		}
	}
	t.Run("a renewal", func(t *testing.T) {
		s, ids := displacedOn(t, 100*time.Millisecond)
		s.now = s.now.Add(80 * time.Millisecond)
		op := s.renew()
		sends := s.fx.Sends
		s.now = s.now.Add(50 * time.Millisecond)
		admit(s, ids)
		for _, send := range sends {
			if send.Kind == Renew {
				s.answer(send, renewed)
			} else {
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 6, Clock: 6, Kept: true}})
			}
		}
		if op.Renewed != protocol.NotOurs {
			t.Errorf("renewed: %v", op.Renewed)
		}
	})
	for _, late := range []bool{true, false} {
		left := 100 * time.Millisecond
		if !late {
			left = time.Hour
		}
		t.Run("a release", func(t *testing.T) {
			s, ids := displacedOn(t, left)
			s.now = s.now.Add(200 * time.Millisecond)
			admit(s, ids)
			op := s.release()
			for _, send := range s.fx.Sends {
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
			}
			if ours := op.Answer.Outcome == protocol.Done; !op.Decided() || ours == late {
				t.Errorf("late %v: decided %v, %v", late, op.Decided(), op.Answer.Outcome)
			}
		})
		t.Run("a cancel", func(t *testing.T) {
			s, ids := displacedOn(t, left)
			s.now = s.now.Add(200 * time.Millisecond)
			admit(s, ids)
			s.fx = Effects{}
			op := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			for _, send := range s.fx.Sends {
				s.answer(send, Result{Canceled: protocol.Canceled{Owned: true}})
			}
			if !op.Decided() || op.Canceled.Owned == late {
				t.Errorf("late %v: decided %v, %+v", late, op.Decided(), op.Canceled)
			}
		})
	}
}

// If a renewal finds the lease lost while an acquire checks it, no request is left behind on a server,
// although the state machine cancels only what an acquire may have given it.
func TestALeaseThatIsLostDuringACheckLeavesNothing(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(100 * time.Millisecond)
	check := s.acquire()
	asks := s.fx.Sends
	op := s.renew()
	for _, send := range s.fx.Sends {
		s.answer(send, notOurs)
	}
	s.expire(op)
	if op.Renewed != protocol.NotOurs {
		t.Fatalf("renewed: %v", op.Renewed)
	}
	s.fx = Effects{}
	s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for left := append(asks, s.fx.Sends...); len(left) > 0; left = left[1:] {
		unsent := &protocol.Failure{Err: errAway, Kind: protocol.NeverSent}
		left = append(left, s.answer(left[0], Result{Fail: unsent, Canceled: protocol.Canceled{Fail: unsent}})...)
		if !check.Decided() {
			s.expire(check)
			left = append(left, s.fx.Sends...)
		}
	}
	if !s.lock.Idle() {
		t.Errorf("it keeps %s", s.lock)
	}
}

// A downgrade without answer may have been carried out. If a server says that the reader owned there when
// it was canceled, that may be by a late copy, after another owner.
func TestTheCancelOfAReaderProvesNothingWhereNobodySaidThatItOwned(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	again := s.acquire() // it may place the writer anew, after another owner
	late := s.fx.Sends
	s.expire(again)
	op, sends := s.downgrade()
	if len(sends) > 0 {
		t.Fatalf("%d commands pass others", len(sends))
	}
	s.drain(late, quiet) // and then the downgrades
	s.expire(op)
	s.fx = Effects{}
	s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	s.drain(s.fx.Sends, Result{Canceled: protocol.Canceled{Token: 9}})
	s.fx = Effects{}
	cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.lower()}, s.now, &s.fx)
	s.drain(s.fx.Sends, Result{Canceled: protocol.Canceled{Owned: true, Token: 9}})
	if !cancel.Decided() || cancel.Canceled.Owned || cancel.Canceled.Fail != nil {
		t.Errorf("canceled: %+v, decided %v", cancel.Canceled, cancel.Decided())
	}
}

// Locking goes on while a server is slow, and the commands of the leases that come and go meanwhile do not
// pile up in that server's queue.
func TestNothingPilesUpBeforeASlowServer(t *testing.T) {
	for _, granting := range []bool{true, false} { // false: two servers are slow, so nothing is granted
		s := newStand(t, 3, time.Second)
		var slow []*Send
		sorted := func(sends []*Send) (fast []*Send) {
			for _, send := range sends {
				if send.Server == 2 || send.Server == 1 && !granting {
					slow = append(slow, send)
				} else {
					fast = append(fast, send)
				}
			}
			return fast
		}
		for i := range 100 {
			s.now = s.now.Add(10 * time.Millisecond)
			s.id = s.id[:len("leased1:w:1000:u:")] + fmt.Sprintf("%016d", i) + s.id[len("leased1:w:1000:u:")+16:]
			op := s.acquire()
			for _, send := range sorted(s.fx.Sends) {
				sorted(s.answer(send, granted(uint64(2*i+1))))
			}
			s.fx = Effects{}
			if !op.Decided() {
				s.lock.Expire(op, s.now, &s.fx)
			}
			for _, send := range sorted(s.fx.Sends) {
				s.answer(send, Result{})
			}
			if op.Err == nil {
				s.release()
				for _, send := range sorted(s.fx.Sends) {
					s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
				}
			}
			if n := len(s.lock.lanes[2].queue); n > 3 {
				t.Fatalf("granting %v: %d commands wait after %d leases", granting, n, i+1)
			}
		}
		for n := 0; len(slow) > 0; n++ {
			if n > 10 {
				t.Fatalf("granting %v: so many were left", granting)
			}
			send := slow[0]
			slow = slow[1:]
			res := granted(1)
			if send.Kind == Cancel {
				res = Result{}
			}
			slow = append(slow, s.answer(send, res)...)
		}
		if !s.lock.Idle() {
			t.Errorf("granting %v: it keeps %s", granting, s.lock)
		}
	}
}

// The state machine is not told of answers to a downgrade that come after it was decided without them. It
// would not know the new request and would cancel it, while the lease goes on under the old request. It
// repeats the downgrade instead.
func TestAnAnswerToADowngradeThatComesLateIsNoGrant(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	op, sends := s.downgrade()
	s.expire(op)
	if op.Err == nil {
		t.Fatalf("decided without answers: %+v", op.Answer)
	}
	for _, send := range sends {
		s.answer(send, granted(7))
		if len(s.fx.Messages) > 0 {
			t.Fatalf("told %+v", s.fx.Messages[0])
		}
	}
	op, sends = s.downgrade()
	for _, send := range sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 7, Clock: 7, Kept: true}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Granted {
		t.Errorf("the second downgrade: decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
}

// queuedTwice returns a request that waits on three servers, of which one is in quarantine for half a
// second, and is asked for again. The commands have no answer yet.
func queuedTwice(t *testing.T, pass time.Duration, tell func(s *stand)) (*stand, *Op, []*Send) {
	t.Helper()
	s := newStand(t, 3, time.Second)
	first := s.acquire()
	for i, send := range s.fx.Sends {
		if i == 1 {
			s.answer(send, young(protocol.Enqueued, 1, 500*time.Millisecond))
		} else {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}})
		}
	}
	if !first.Decided() || first.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("%+v %v", first.Answer, first.Err)
	}
	tell(s)
	s.now = s.now.Add(pass)
	again := s.acquire()
	return s, again, s.fx.Sends
}

// tellGranted has messages say that the servers with these numbers have granted the request.
func (s *stand) tellGranted(token uint64, servers ...int) {
	for _, i := range servers {
		s.lock.Receive(i, &protocol.Message{Kind: protocol.MessageGranted, ID: s.lock.reqs[s.id].parts[i].id, Token: token, Clock: token}, s.now, &s.fx)
	}
}

// Two servers granted the request while one of them was in quarantine. Both grants ended before the
// quarantine did.
func TestGrantsThatEndedBeforeAQuarantineAreNoMajorityAfterIt(t *testing.T) {
	s, op, sends := queuedTwice(t, 2*time.Second, func(s *stand) { s.tellGranted(5, 1, 2) })
	s.answer(sends[0], Result{Fail: silent})
	if len(s.fx.Messages) > 0 {
		t.Fatalf("told %+v", s.fx.Messages[0])
	}
	s.answer(sends[1], granted(7))
	s.answer(sends[2], granted(8))
	if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Kept || op.Answer.Token != 8 {
		t.Errorf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
}

// One server's grant completes a majority with that of another one, of which a message said before that it
// granted. That one has lost its grant, and another owner may have come, before the acquire arrives there.
func TestAGrantThatIsMadeAnewAfterItWasAnnouncedIsANewOne(t *testing.T) {
	s, op, sends := queuedTwice(t, 600*time.Millisecond, func(s *stand) { s.tellGranted(5, 0) })
	s.answer(sends[2], granted(7))
	if len(s.fx.Messages) != 1 || s.fx.Messages[0].Token != 7 {
		t.Fatalf("told %+v", s.fx.Messages)
	}
	s.answer(sends[0], granted(8))
	if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Kept || op.Answer.Token != 8 {
		t.Errorf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
}

// Of three servers one is away. All was ours until the Unlock, whichever of the others have carried the
// downgrade out, and whoever has said so.
func TestAnUnlockAfterADowngradeWithoutAnswerIsNoLoss(t *testing.T) {
	const answers, isLost, isNot = 0, 1, 2 // the downgrade was answered, was carried out without an answer, was not carried out
	for first := range 3 {
		for second := range 3 {
			for evicted := range 2 {
				what := fmt.Sprint(first, second, " evicted ", evicted)
				fate := []int{first, second}
				s := newStand(t, 3, time.Second)
				s.acquire()
				asked := s.fx.Sends
				for i, server := range []int{2, 0, 1} { // the last answer comes when the lease is held already
					s.now = s.now.Add(time.Duration(i) * time.Millisecond)
					s.answer(asked[server], granted(1))
				}
				s.lock.cfg.Away = func(i int) bool { return i == 2 }
				op, sends := s.downgrade()
				for i, send := range sends {
					if fate[i] == answers {
						s.answer(send, granted(2))
					} else {
						s.answer(send, Result{Fail: silent})
					}
				}
				if first == answers && second == answers {
					continue // done
				}
				if !op.Decided() || op.Err == nil {
					t.Fatalf("%s: decided %v, %+v %v", what, op.Decided(), op.Answer, op.Err)
				}
				cancels := func(id string, carriedOut bool) *Op {
					s.fx = Effects{}
					op := s.lock.CancelRequest(&protocol.CancelRequest{ID: id}, s.now, &s.fx)
					for _, send := range s.fx.Sends {
						owned := (fate[send.Server] != isNot) == carriedOut && !(evicted == 1 && send.Server == 0)
						s.answer(send, Result{Canceled: protocol.Canceled{Owned: owned, Token: 9}})
					}
					return op
				}
				old := cancels(s.id, false)
				if !old.Decided() || evicted == 0 && old.Err != nil {
					t.Errorf("%s: the old request: decided %v, %v", what, old.Decided(), old.Err)
				}
				proved := old.Canceled.Proved
				next := cancels(s.lower(), true)
				if !next.Decided() || evicted == 0 && next.Err != nil {
					t.Errorf("%s: the new request: decided %v, %v", what, next.Decided(), next.Err)
				}
				if proved = proved || next.Canceled.Proved; proved != (evicted == 0) {
					t.Errorf("%s: proved %v", what, proved)
				}
			}
		}
	}
}

// Those that wait behind a writer are behind the reader that it becomes, too.
func TestADowngradeKeepsThePlaceOfItsWriter(t *testing.T) {
	s := newStand(t, 3, time.Second)
	ticket := uint64(0)
	s.lock.cfg.Ticket = func() uint64 { ticket++; return ticket }
	s.own(true, true, false)
	s.lock.cfg.Ticket() // of another request
	_, sends := s.downgrade()
	for _, send := range sends {
		if send.Kind == Do {
			s.answer(send, granted(2))
		} else {
			s.answer(send, Result{})
		}
	}
	s.fx = Effects{}
	s.lock.Renew(&protocol.Renewal{Req: protocol.Request{ID: s.lower(), TTL: s.ttl}, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		if send.Server == 2 && send.Cmd.Ticket != 1 {
			t.Errorf("the reader asks with ticket %d", send.Cmd.Ticket)
		}
	}
	if len(s.fx.Sends) != 3 {
		t.Errorf("%d servers are asked", len(s.fx.Sends))
	}
}

// Once a downgrade is done, its new request is one like any other.
func TestAReaderThatLostItsLeaseAfterADowngradeHearsOfTheNextGrant(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, sends := s.downgrade()
	for _, send := range sends {
		s.answer(send, granted(2))
	}
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.lower(), TTL: s.ttl, Wait: true, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 3, Clock: 3}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	s.fx = Effects{}
	for _, i := range []int{0, 1} {
		s.lock.Receive(i, &protocol.Message{Kind: protocol.MessageGranted, ID: s.lock.reqs[s.lower()].parts[i].id, Token: 4, Clock: 4}, s.now, &s.fx)
	}
	if len(s.fx.Messages) != 1 || s.fx.Messages[0].Kind != protocol.MessageGranted {
		t.Errorf("told %+v", s.fx.Messages)
	}
}

// A server that was away during the downgrade, and is back at the Unlock, counts as well.
func TestAnUnlockAfterADowngradeCountsWhereItWasNeverSent(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.own(true, true, true, true, true)
	s.lock.cfg.Away = func(i int) bool { return i >= 2 }
	_, sends := s.downgrade()
	for _, send := range sends {
		s.answer(send, granted(2))
	}
	s.lock.cfg.Away = func(i int) bool { return i >= 3 }
	cancels := func(id string, owned func(server int) bool) *Op {
		return s.cancels(id, func(i int) Result { return Result{Canceled: protocol.Canceled{Owned: owned(i), Token: 9}} })
	}
	old := cancels(s.id, func(i int) bool { return i == 2 })
	next := cancels(s.lower(), func(i int) bool { return i < 2 })
	if !old.Decided() || old.Err != nil || !next.Decided() || !next.Canceled.Proved {
		t.Errorf("the old request: %v, %v; the new: %v, %v, proved %v", old.Decided(), old.Err, next.Decided(), next.Err, next.Canceled.Proved)
	}
}

// One of two servers that granted the lease is away during the downgrade, and when the cancels are first
// tried.
func TestAnUnlockAfterADowngradeOfABareMajorityWaitsForItsServers(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.lock.cfg.Away = func(i int) bool { return i == 2 }
	s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, granted(1))
	}
	s.lock.cfg.Away = func(i int) bool { return i == 1 }
	_, sends := s.downgrade()
	s.answer(sends[0], granted(2))
	cancels := func(id string, owned func(server int) bool) *Op {
		return s.cancels(id, func(i int) Result { return Result{Canceled: protocol.Canceled{Owned: owned(i), Token: 9}} })
	}
	onSecond, onFirst := func(i int) bool { return i == 1 }, func(i int) bool { return i == 0 }
	if op := cancels(s.id, onSecond); !op.Decided() || op.Err == nil {
		t.Fatalf("while it is away: %+v", op.Canceled)
	}
	s.lock.cfg.Away = func(int) bool { return false }
	if op := cancels(s.id, onSecond); !op.Decided() || op.Err != nil {
		t.Fatalf("when it is back: decided %v, %v", op.Decided(), op.Err)
	}
	if op := cancels(s.lower(), onFirst); !op.Decided() || !op.Canceled.Proved {
		t.Errorf("the new request: decided %v, %+v %v", op.Decided(), op.Canceled, op.Err)
	}
}

// The cancel of the old request has succeeded, and one server has yet to answer it.
func TestTheCancelOfADowngradesRequestWaitsForThatOfItsWriter(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.lock.cfg.Away = func(i int) bool { return i == 2 }
	_, sends := s.downgrade()
	s.answer(sends[0], granted(2))
	s.answer(sends[1], Result{Fail: silent})
	s.lock.cfg.Away = func(int) bool { return false }
	cancel := func(id string) (*Op, []*Send) {
		s.fx = Effects{}
		return s.lock.CancelRequest(&protocol.CancelRequest{ID: id}, s.now, &s.fx), s.fx.Sends
	}
	said := func(owned bool) Result { return Result{Canceled: protocol.Canceled{Owned: owned, Token: 9}} }
	old, olds := cancel(s.id)
	for _, send := range olds {
		if send.Server == 1 {
			s.answer(send, said(false)) // carried out
		}
	}
	if !old.Decided() || old.Err != nil {
		t.Fatalf("the old request: decided %v, %v", old.Decided(), old.Err)
	}
	next, sends := cancel(s.lower())
	for _, send := range sends {
		s.answer(send, said(send.Server == 0)) // an operator has evicted the other one
	}
	if !next.Decided() || next.Err == nil {
		t.Fatalf("the new request: decided %v, %+v", next.Decided(), next.Canceled)
	}
	for _, send := range olds {
		if send.Server == 2 {
			s.answer(send, said(true))
		}
	}
	if next, _ = cancel(s.lower()); !next.Decided() || !next.Canceled.Proved {
		t.Errorf("once all have answered: decided %v, %+v %v", next.Decided(), next.Canceled, next.Err)
	}
}

// cancels cancels a request, whose servers say whether it owned.
func (s *stand) cancels(id string, said func(server int) Result) *Op {
	s.fx = Effects{}
	op := s.lock.CancelRequest(&protocol.CancelRequest{ID: id}, s.now, &s.fx)
	for len(s.fx.Sends) > 0 {
		sends := s.fx.Sends
		s.fx = Effects{}
		for _, send := range sends {
			s.lock.Answered(send, said(send.Server), s.now, &s.fx)
		}
	}
	return op
}

// The cancel of the old request has succeeded, and had no answer from one server, which is well again.
func TestTheCancelOfADowngradesRequestAsksAgainForItsWriter(t *testing.T) {
	owned, not := Result{Canceled: protocol.Canceled{Owned: true, Token: 9}}, Result{Canceled: protocol.Canceled{Token: 9}}
	lost := Result{Canceled: protocol.Canceled{Fail: silent}, Fail: silent}
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.lock.cfg.Away = func(i int) bool { return i == 2 }
	_, sends := s.downgrade()
	s.answer(sends[0], granted(2))
	s.answer(sends[1], Result{Fail: silent})
	if op := s.cancels(s.id, func(int) Result { return not }); !op.Decided() || op.Err != nil { // carried out on both
		t.Fatalf("the old request: decided %v, %v", op.Decided(), op.Err)
	}
	if op := s.cancels(s.lower(), func(i int) Result { return []Result{owned, lost, lost}[i] }); !op.Decided() {
		s.expire(op)
	}
	s.lock.cfg.Away = func(int) bool { return false }
	said := func(i int) Result { return []Result{not, not, owned}[i] }
	s.cancels(s.lower(), said)
	if op := s.cancels(s.lower(), said); !op.Decided() || !op.Canceled.Proved {
		t.Errorf("decided %v, %+v %v", op.Decided(), op.Canceled, op.Err)
	}
}

// A server that has answered the downgrade with "not ours" may not be taken for one that has carried it
// out.
func TestAServerThatRefusedADowngradeHasPassedNothingOn(t *testing.T) {
	owned, not := Result{Canceled: protocol.Canceled{Owned: true, Token: 9}}, Result{Canceled: protocol.Canceled{Token: 9}}
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.lock.cfg.Away = func(i int) bool { return i == 2 }
	_, sends := s.downgrade()
	s.answer(sends[0], granted(2))
	s.answer(sends[1], Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}})
	said := func(i int) Result { return []Result{not, not, owned}[i] }
	if op := s.cancels(s.id, said); !op.Decided() || op.Err == nil {
		t.Fatalf("without the third server: decided %v, %+v", op.Decided(), op.Canceled)
	}
	s.lock.cfg.Away = func(int) bool { return false }
	if op := s.cancels(s.id, said); !op.Decided() || op.Err != nil {
		t.Fatalf("with it: decided %v, %v", op.Decided(), op.Err)
	}
	if op := s.cancels(s.lower(), func(i int) Result { return []Result{owned, not, not}[i] }); !op.Decided() || !op.Canceled.Proved {
		t.Errorf("the new request: decided %v, %+v %v", op.Decided(), op.Canceled, op.Err)
	}
}

// A server that lost its data meanwhile, and is in quarantine, counts for both requests.
func TestAnUnlockAfterADowngradeCountsAServerThatLostItsData(t *testing.T) {
	owned, not := Result{Canceled: protocol.Canceled{Owned: true, Token: 9}}, Result{Canceled: protocol.Canceled{Token: 9}}
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.lock.cfg.Away = func(i int) bool { return i > 0 }
	_, sends := s.downgrade()
	s.answer(sends[0], granted(2))
	s.lock.cfg.Away = func(i int) bool { return i == 1 }
	said := func(i int) Result { return []Result{not, not, {Young: time.Minute}}[i] }
	if op := s.cancels(s.id, said); !op.Decided() || op.Err != nil {
		t.Fatalf("the old request: decided %v, %v", op.Decided(), op.Err)
	}
	if op := s.cancels(s.lower(), func(i int) Result { return []Result{owned, not, not}[i] }); !op.Decided() || !op.Canceled.Proved {
		t.Errorf("the new request: decided %v, %+v %v", op.Decided(), op.Canceled, op.Err)
	}
}

// A part that was never owned is canceled by the second try of a downgrade, too.
func TestADowngradeThatIsRepeatedLeavesNoOneInAQueue(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.acquire()
	sends := s.fx.Sends
	s.answer(sends[0], granted(1))
	s.answer(sends[2], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	s.answer(sends[1], granted(1))
	_, sends = s.downgrade()
	s.answer(sends[0], granted(2))
	for _, send := range sends[1:] {
		s.answer(send, Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}})
	}
	_, sends = s.downgrade()
	for _, send := range sends {
		if send.Server == 2 && send.Kind != Cancel {
			t.Errorf("the server where it waits is sent %+v", send.Cmd)
		}
	}
}

// While a first try may still be carried out, a second one knows nothing of the lease.
func TestADowngradeThatIsRepeatedWhileTheFirstIsUnderWayLosesNothing(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	first, sends := s.downgrade()
	s.expire(first)
	second, more := s.downgrade()
	if !second.Decided() || second.Err == nil || len(more) > 0 {
		t.Fatalf("before any answer: decided %v, %+v %v, %d more commands", second.Decided(), second.Answer, second.Err, len(more))
	}
	for _, send := range sends {
		s.answer(send, granted(7))
	}
	third, sends := s.downgrade()
	for _, send := range sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 7, Clock: 7, Kept: true}})
	}
	if !third.Decided() || third.Answer.Outcome != protocol.Granted {
		t.Errorf("after the answers: decided %v, %+v %v", third.Decided(), third.Answer, third.Err)
	}
}

// A late answer to a renewal that was decided without it causes no acquire. The next renewal finds the
// restart and asks the servers.
func TestARestartThatALateAnswerShowsKeepsTheLease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	first := s.renew()
	late := s.fx.Sends
	s.expire(first)
	s.now = s.now.Add(100 * time.Millisecond)
	op := s.renew()
	sends := s.fx.Sends
	for _, send := range late[:2] {
		if asks := s.answer(send, notOurs); len(asks) > 0 {
			t.Fatalf("asked %d", len(asks))
		}
	}
	s.answer(sends[2], renewed)
	for _, send := range sends[:2] {
		s.answer(s.answer(send, notOurs)[0], young(protocol.Granted, 7, 10*time.Second))
	}
	if !op.Decided() || op.Renewed != protocol.Granted {
		t.Errorf("decided %v, %v", op.Decided(), op.Renewed)
	}
}

// The same late answers, and an Unlock or a hand-off before the next renewal: the release or yield asks
// those servers, too.
func TestARestartThatALateAnswerShowsIsProvedByTheRelease(t *testing.T) {
	for what, restarted := range map[string]bool{"lost their data": true, "gave it to another": false} {
		for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			first := s.renew()
			late := s.fx.Sends
			s.expire(first)
			s.now = s.now.Add(100 * time.Millisecond)
			for _, send := range late[:2] {
				s.answer(send, notOurs)
			}
			op, sends := s.leave(verb)
			if len(sends) != 3 {
				t.Fatalf("%v, %s: %d servers are told", verb, what, len(sends))
			}
			for len(sends) > 0 { // after a yield, also the acquires of the next request
				send, res := sends[0], Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}
				switch {
				case send.Cmd.Verb == protocol.Acquire:
					res.Answer.Outcome = protocol.Enqueued
				case send.Server == 2:
					res = wasOurs[verb]
				case restarted:
					res.Young = time.Hour
				}
				sends = append(sends[1:], s.answer(send, res)...)
			}
			if !op.Decided() || (op.Answer.Outcome == wasOurs[verb].Answer.Outcome) != restarted {
				t.Errorf("%v, %s: decided %v, %+v", verb, what, op.Decided(), op.Answer)
			}
		}
	}
}

// An Unlock or a hand-off while it is still being asked why a renewal found the lease lost on a server: the
// answer to that acquire says whether the server has only lost its data, so nothing is decided before.
func TestAServerThatIsBeingAskedWhyItLostALeaseProvesWhatItAnswers(t *testing.T) {
	const quarantine = 10 * time.Second
	enqueued := protocol.Answer{Outcome: protocol.Enqueued, Token: 7, Clock: 7}
	for what, c := range map[string]struct {
		asked Result
		yes   bool
	}{
		"it has restarted, and grants it again": {young(protocol.Granted, 7, quarantine), true},
		"it has restarted, and others own it":   {young(protocol.Enqueued, 7, quarantine), true},
		"it granted it to others meanwhile":     {granted(7), false},
		"others own it":                         {Result{Answer: enqueued}, false},
	} {
		for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, false)
			s.renew()
			sends := s.fx.Sends
			ask := s.answer(sends[0], notOurs)
			s.answer(sends[1], renewed)
			s.answer(sends[2], Result{Answer: enqueued})
			op, sends := s.leave(verb)
			for _, send := range sends {
				if send.Cmd.Verb == verb {
					s.answer(send, wasOurs[verb])
				}
			}
			if op.Decided() {
				t.Fatalf("%v, %s: decided before the server has answered: %v %v", verb, what, op.Answer.Outcome, op.Err)
			}
			sends = s.answer(ask[0], c.asked)
			if len(sends) == 0 || sends[0].Kind != Cancel {
				t.Errorf("%v, %s: what the server granted is not given back", verb, what)
			}
			for len(sends) > 0 { // the cancel, and the acquires of the next request
				res := Result{Answer: enqueued, Young: c.asked.Young, Canceled: protocol.Canceled{Owned: true}}
				sends = append(sends[1:], s.answer(sends[0], res)...)
			}
			if verb == protocol.Yield && !op.Decided() {
				s.expire(op)
			}
			if op.Err != nil || !op.Decided() || (op.Answer.Outcome != protocol.NotOurs) != c.yes {
				t.Errorf("%v, %s: decided %v, %v %v", verb, what, op.Decided(), op.Answer.Outcome, op.Err)
			}
		}
	}
}

// The same where the acquire still waits behind another command for that server.
func TestAReleaseWaitsForAnAcquireThatHasNotBeenSent(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, false)
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.next(), TTL: s.ttl, Wait: true, At: s.now}, s.now, &s.fx)
	others := s.fx.Sends
	for _, send := range others[1:] {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	}
	s.renew()
	if sends := s.answer(s.fx.Sends[0], notOurs); len(sends) > 0 {
		t.Fatalf("sent %d", len(sends))
	}
	op, sends := s.leave(protocol.Release)
	for _, send := range sends {
		s.answer(send, done)
	}
	sends = s.answer(others[0], Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}, Young: time.Hour})
	if len(sends) != 1 || sends[0].Cmd.Verb != protocol.Acquire || op.Decided() {
		t.Fatalf("sent %d, decided %v", len(sends), op.Decided())
	}
	s.answer(sends[0], young(protocol.Granted, 7, time.Hour))
	if !op.Decided() || op.Answer.Outcome != protocol.Done {
		t.Errorf("decided %v, %v %v", op.Decided(), op.Answer.Outcome, op.Err)
	}
}

// A server that does not answer the acquire that a release waits for is one that has not answered the
// release.
func TestAReleaseCountsServersThatDoNotAnswerTheAcquireItWaitsFor(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.renew()
	ask := s.answer(s.fx.Sends[0], notOurs)[0]
	op, sends := s.leave(protocol.Release)
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	s.answer(ask, silence)
	for _, send := range sends {
		if send.Server == 1 {
			s.answer(send, done)
		} else {
			s.answer(send, silence)
		}
	}
	const want = "1 of 3 servers answered, but 2 are needed; servers 1 and 3: no answer in time"
	if !op.Decided() || op.Err == nil || op.Err.Error() != want {
		t.Errorf("decided %v: %v", op.Decided(), op.Err)
	}
}

// Where all servers have restarted, an Unlock that meets them while they are asked proves nothing.
func TestServersThatAllRestartedProveNothingWhileTheyAreAsked(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.renew()
	var asks []*Send
	for _, send := range s.fx.Sends {
		asks = append(asks, s.answer(send, notOurs)...)
	}
	op := s.release()
	for _, ask := range asks {
		s.answer(ask, young(protocol.Granted, 7, 10*time.Second))
	}
	if !op.Decided() || op.Answer.Outcome != protocol.NotOurs {
		t.Errorf("decided %v, %v %v", op.Decided(), op.Answer.Outcome, op.Err)
	}
}

// The cancel that follows a release in doubt counts what such an acquire said as the release would have,
// and goes to a server again where the release's own cancel had no answer.
func TestACancelCountsServersThatWereAskedWhyTheyLostALease(t *testing.T) {
	const quarantine = 10 * time.Second
	for _, all := range []bool{false, true} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		s.renew()
		var asks []*Send
		for _, send := range s.fx.Sends {
			if send.Server < 2 {
				asks = append(asks, s.answer(send, notOurs)...)
			} else {
				s.answer(send, renewed)
			}
		}
		op := s.release()
		sends := s.fx.Sends
		for _, ask := range asks {
			sends = append(sends, s.answer(ask, young(protocol.Granted, 7, quarantine))...)
		}
		for _, send := range sends {
			if send.Server == 1 {
				s.answer(send, Result{Young: quarantine, Canceled: protocol.Canceled{Owned: true}})
			} else {
				s.answer(send, Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}})
			}
		}
		if !op.Decided() || op.Err == nil {
			t.Fatalf("the release is decided %v, %v", op.Decided(), op.Answer.Outcome)
		}
		s.fx = Effects{}
		cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
		var told []int
		for _, send := range s.fx.Sends {
			told = append(told, send.Server)
			switch {
			case send.Server == 0:
				s.answer(send, Result{Young: quarantine, Canceled: protocol.Canceled{Owned: true}})
			case all:
				s.answer(send, Result{Young: quarantine})
			default:
				s.answer(send, Result{Canceled: protocol.Canceled{Owned: send.Server == 2, Token: 2}})
			}
		}
		if !slices.Equal(told, []int{0, 2, 3, 4}) {
			t.Errorf("the servers %v are told again", told)
		}
		if !cancel.Decided() || cancel.Canceled.Owned == all {
			t.Errorf("all of them restarted %v: decided %v, %+v", all, cancel.Decided(), cancel.Canceled)
		}
	}
}

// A server that granted a lease anew, perhaps after another owner, proves nothing by losing its data then,
// whether it says so to the release or to the acquire that a renewal caused.
func TestAServerThatGrantedAnewProvesNothingByARestart(t *testing.T) {
	const quarantine = 10 * time.Second
	for _, asked := range []bool{false, true} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		op := s.renew()
		sends := s.fx.Sends
		s.answer(s.answer(sends[0], notOurs)[0], granted(7))
		s.answer(sends[1], renewed)
		s.answer(sends[2], Result{Fail: silent})
		if !op.Decided() || op.Renewed != protocol.Granted {
			t.Fatalf("renewed: decided %v, %v", op.Decided(), op.Renewed)
		}
		s.now = s.now.Add(100 * time.Millisecond)
		var ask []*Send
		if asked {
			s.renew()
			sends = s.fx.Sends
			ask = s.answer(sends[0], notOurs)
			s.answer(sends[1], renewed)
			s.answer(sends[2], Result{Fail: silent})
		}
		op = s.release()
		sends = s.fx.Sends
		if asked {
			s.answer(ask[0], young(protocol.Granted, 9, quarantine))
		}
		for _, send := range sends {
			switch {
			case send.Server == 0 && send.Kind == Do:
				s.answer(send, young(protocol.NotOurs, 0, quarantine))
			case send.Server == 1:
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
			case send.Server == 2:
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}})
			}
		}
		if !op.Decided() || op.Answer.Outcome != protocol.NotOurs {
			t.Errorf("asked %v: decided %v, %v %v", asked, op.Decided(), op.Answer.Outcome, op.Err)
		}
	}
}

// A downgrade whose token is not stored by a majority in time is neither refused nor given back, because it
// is all that is left of the lease. It is repeated.
func TestADowngradeWhoseTokenIsNotKeptYetIsRepeated(t *testing.T) {
	for _, thirdAway := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, false)
		s.lock.cfg.Away = func(i int) bool { return thirdAway && i == 2 }
		op, sends := s.downgrade()
		var adopts []*Send
		for i, token := range []uint64{9_000_000, 1_000_000} {
			adopts = append(adopts, s.answer(sends[i], granted(token))...)
		}
		if len(adopts) != 1 || adopts[0].Kind != Adopt {
			t.Fatalf("sent %+v", adopts)
		}
		if !thirdAway {
			s.answer(sends[2], Result{})
		}
		s.expire(op)
		if op.Err == nil || len(s.fx.Sends) > 0 || len(s.fx.Strays) > 0 {
			t.Fatalf("decided %v, %v, sent %v, strays %v", op.Answer.Outcome, op.Err, s.fx.Sends, s.fx.Strays)
		}
		s.answer(adopts[0], Result{Answer: protocol.Answer{Outcome: protocol.Done}})
		op, sends = s.downgrade()
		for _, send := range sends {
			if send.Kind == Do && send.Cmd.Verb == protocol.Acquire {
				s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 9_000_000, Clock: 1_000_000, Kept: true}})
			}
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Token != 9_000_000 {
			t.Errorf("repeated: decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
		}
	}
}

// While a downgrade lacks the answers of a majority, a renewal finds that neither the old nor the new
// request owns a majority. The lease goes on all the same, so nothing is given back. If nobody repeats the
// downgrade, both requests are forgotten.
func TestARenewalDuringADowngradeGivesNothingBack(t *testing.T) {
	for _, repeats := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		op, sends := s.downgrade()
		s.answer(sends[0], granted(7))
		for _, send := range sends[1:] {
			s.answer(send, Result{Fail: silent})
		}
		if !op.Decided() || op.Err == nil {
			t.Fatalf("decided %v: %+v", op.Decided(), op.Answer)
		}
		renewal := s.renew()
		if !renewal.Decided() {
			s.lock.Expire(renewal, s.now, &s.fx)
		}
		for _, send := range s.fx.Sends {
			if send.Kind == Cancel {
				t.Errorf("%s is canceled", send.Cancel.ID)
			}
		}
		if len(s.fx.Strays) > 0 {
			t.Errorf("left: %+v", s.fx.Strays)
		}
		if !repeats {
			s.now = s.now.Add(2 * time.Minute)
			s.fx = Effects{}
			s.lock.Tick(s.now, &s.fx)
			for len(s.fx.Sends) > 0 {
				s.answer(s.fx.Sends[0], Result{})
			}
			if !s.lock.Idle() {
				t.Errorf("it keeps %s", s.lock)
			}
			continue
		}
		op, sends = s.downgrade()
		for _, send := range sends {
			s.answer(send, granted(8))
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Errorf("repeated: decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
		}
		s.now = s.now.Add(2 * time.Minute)
		s.lock.Tick(s.now, &s.fx)
		if _, known := s.lock.reqs[s.lower()]; !known {
			t.Errorf("it is forgotten")
		}
	}
}

// Two renewals are under way, as when the first one waits for a slow server, and both find that servers
// have restarted. Each restarted server is asked once, and its answer serves both renewals.
func TestTwoRenewalsThatFindARestartKeepTheLease(t *testing.T) {
	for _, before := range []bool{true, false} { // the second renewal begins before the first finds the restart
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		var ops []*Op
		begin := func() (sends []*Send) {
			s.now = s.now.Add(100 * time.Millisecond)
			ops = append(ops, s.renew())
			return s.fx.Sends
		}
		first := begin()
		var second, asks []*Send
		if before {
			second = begin()
		}
		for _, send := range first[:2] {
			asks = append(asks, s.answer(send, notOurs)...)
		}
		if !before {
			second = begin()
		}
		for _, send := range second {
			if send.Server == 2 {
				s.answer(send, renewed)
			} else {
				asks = append(asks, s.answer(send, notOurs)...)
			}
		}
		for _, ask := range asks {
			s.answer(ask, young(protocol.Granted, 7, 10*time.Second))
		}
		for i, op := range ops {
			if s.fx = (Effects{}); !op.Decided() {
				s.lock.Expire(op, s.now, &s.fx)
			}
			if op.Renewed == protocol.NotOurs {
				t.Errorf("before %v: renewal %d found it lost", before, i+1)
			}
		}
		if len(asks) != 2 {
			t.Errorf("before %v: asked %d times", before, len(asks))
		}
	}
}

// A message that a server sent before it learned of a request's end is no reason to cancel the request
// there. A later message is a reason, and so is one from a server that an acquire may still reach: the
// request may own the lock there.
func TestAMessageThatCrossesWithAReleaseIsIgnored(t *testing.T) {
	strays := func(silence bool, after time.Duration) int {
		s := newStand(t, 3, time.Second)
		s.own(true, true, !silence)
		s.release()
		sends := s.fx.Sends
		for _, send := range sends {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
		}
		s.now = s.now.Add(after)
		s.fx = Effects{}
		for _, send := range sends {
			for _, kind := range []protocol.MessageKind{protocol.MessageWanted, protocol.MessageGranted, protocol.MessageEnds} {
				s.lock.Receive(send.Server, &protocol.Message{Kind: kind, ID: send.Cmd.ID, Token: 2}, s.now, &s.fx)
			}
		}
		return len(s.fx.Strays)
	}
	if n := strays(false, crossing/2); n != 0 {
		t.Errorf("%d strays of messages that crossed", n)
	}
	if n := strays(false, crossing); n != 6 {
		t.Errorf("%d strays of messages that came later", n)
	}
	if n := strays(true, crossing/2); n != 2 {
		t.Errorf("%d strays where an acquire may still arrive", n)
	}
}

// A release whose answers come after its decision still proves that the lock was ours, although the cancel
// that follows finds that others have owned the lock since.
func TestAReleaseThatIsAnsweredLateProvesThatTheLockWasOurs(t *testing.T) {
	for _, done := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		op := s.release()
		releases := s.fx.Sends
		s.fx = Effects{}
		if s.lock.Expire(op, s.now, &s.fx); !op.Decided() || op.Err == nil {
			t.Fatalf("decided %v: %v", op.Decided(), op.Err)
		}
		op = s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
		for _, send := range releases {
			answer := Result{Fail: silent}
			if done {
				answer = Result{Answer: protocol.Answer{Outcome: protocol.Done}}
			}
			for _, cancel := range s.answer(send, answer) {
				s.answer(cancel, Result{Canceled: protocol.Canceled{Token: 99}})
			}
		}
		if !op.Decided() || op.Canceled.Owned != done {
			t.Errorf("released %v: decided %v, said that it was ours: %v", done, op.Decided(), op.Canceled.Owned)
		}
	}
}

// A majority has granted the request, and the other servers refused it because the last owner's release was
// still on its way to them. They are asked again, and queue the request until that release arrives.
func TestServersThatRefusedAreAskedAgainWhenAMajorityHasGranted(t *testing.T) {
	refused := Result{Answer: protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: 1, Blocker: "another"}}
	for _, late := range []bool{false, true} { // true: the refusals come after the decision
		s := newStand(t, 5, time.Second)
		s.fx = Effects{}
		op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
		sends := s.fx.Sends
		var asks []*Send
		answers := []Result{refused, refused, granted(1), granted(1), granted(1)}
		for i := range sends {
			if late {
				i = len(sends) - 1 - i
			}
			asks = append(asks, s.answer(sends[i], answers[i])...)
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Fatalf("late %v: decided %v, %+v %v", late, op.Decided(), op.Answer, op.Err)
		}
		if len(asks) != 2 {
			t.Fatalf("late %v: asked %d times", late, len(asks))
		}
		for _, ask := range asks {
			if ask.Server > 1 || ask.Kind != Do || ask.Cmd.Verb != protocol.Acquire || !ask.Cmd.Wait || ask.Cmd.ID == sends[ask.Server].Cmd.ID {
				t.Errorf("late %v: sent %+v", late, ask)
			}
			// The server queues the request, then grants it.
			if more := s.answer(ask, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}); len(more) != 0 {
				t.Errorf("late %v: asked again", late)
			}
			s.receive(ask.Server, ask.Cmd.ID, 2)
		}
		if n := s.lock.behind(s.id, s.now); n != 5 {
			t.Errorf("late %v: %d servers stand behind it", late, n)
		}
		// Now two of the servers that granted first may fail.
		op = s.release()
		for _, send := range s.fx.Sends {
			res := Result{Answer: protocol.Answer{Outcome: protocol.Done}}
			if send.Server > 2 {
				res = Result{Fail: silent}
			}
			s.answer(send, res)
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Done {
			t.Errorf("late %v: released: decided %v, %+v %v", late, op.Decided(), op.Answer, op.Err)
		}
	}
}

// Servers that refused are not asked again for a request that is over or that no majority granted.
func TestServersThatRefusedAreNotAskedAgainForNothing(t *testing.T) {
	refused := Result{Answer: protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: 1, Blocker: "another"}}
	s := newStand(t, 3, time.Second)
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	sends := s.fx.Sends
	for i, res := range []Result{granted(1), refused, refused} {
		for _, send := range s.answer(sends[i], res) {
			if send.Kind != Cancel {
				t.Errorf("sent %+v", send)
			}
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Refused {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	s = newStand(t, 3, time.Second)
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	sends = s.fx.Sends
	s.answer(sends[0], granted(1))
	s.answer(sends[1], granted(1))
	s.release()
	for _, send := range s.answer(sends[2], refused) {
		if send.Kind == Do && send.Cmd.Verb == protocol.Acquire {
			t.Error("asked for what is being released")
		}
	}
}

// A server that has lost its data does not know that the lock was ours. The lock was ours until the
// restart, and grants to others since then count for nobody, unless all servers have lost their data.
func TestServersThatRestartedProveAnUnlock(t *testing.T) {
	forgotten := Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}, Young: 10 * time.Second}
	done := Result{Answer: protocol.Answer{Outcome: protocol.Done}}
	lost := Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}
	type answers []Result
	for name, c := range map[string]struct {
		of    answers
		after time.Duration // since the grant
		want  protocol.Outcome
	}{
		"two of three have restarted":           {answers{done, forgotten, forgotten}, 0, protocol.Done},
		"one has, of a bare majority":           {answers{forgotten, done, {Fail: silent}}, 0, protocol.Done},
		"two have, and one does not answer":     {answers{forgotten, forgotten, {Fail: silent}}, 0, protocol.Done},
		"all have":                              {answers{forgotten, forgotten, forgotten}, 0, protocol.NotOurs},
		"two have lost it otherwise":            {answers{done, lost, lost}, 0, protocol.NotOurs},
		"one has, and one has lost it":          {answers{lost, forgotten, {Fail: silent}}, 0, protocol.Unanswered},
		"what they granted may have ended then": {answers{done, forgotten, forgotten}, time.Second, protocol.NotOurs},
	} {
		for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			s.now = s.now.Add(c.after)
			op := s.release()
			sends := s.fx.Sends
			for _, i := range order {
				s.answer(sends[i], c.of[i])
			}
			if !op.Decided() || op.Answer.Outcome != c.want {
				t.Errorf("%s, in order %v: decided %v, %v %v, want %v", name, order, op.Decided(), op.Answer.Outcome, op.Err, c.want)
			}
		}
	}
}

// A cancel follows a release that got no answer. It proves the release if the server says that the lock was
// ours until now, or still has our token as its last one, since then nobody has owned the lock there after
// us. Servers that have restarted without their data prove it as they prove a release.
func TestWhatACancelFindsProvesTheReleaseBeforeIt(t *testing.T) {
	owned := Result{Canceled: protocol.Canceled{Owned: true}}
	forgotten := Result{Young: 10 * time.Second}
	token := func(n uint64) Result { return Result{Canceled: protocol.Canceled{Token: n}} }
	for name, c := range map[string]struct {
		of   [3]Result
		want bool
	}{
		"two of three have restarted":  {[3]Result{forgotten, forgotten, owned}, true},
		"all have":                     {[3]Result{forgotten, forgotten, forgotten}, false},
		"the last token is ours":       {[3]Result{token(1), token(1), token(1)}, true},
		"the last token is another's":  {[3]Result{token(2), token(2), token(2)}, false},
		"there is nothing of the lock": {[3]Result{token(0), token(0), token(0)}, false},
	} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.release()
		for _, send := range s.fx.Sends {
			s.answer(send, Result{Fail: silent})
		}
		s.fx = Effects{}
		op := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
		for _, send := range s.fx.Sends {
			s.answer(send, c.of[send.Server])
		}
		if !op.Decided() || op.Canceled.Owned != c.want {
			t.Errorf("%s: decided %v, %+v", name, op.Decided(), op.Canceled)
		}
	}
}

// The message of the grant overtook an acquire, which got no answer, so a server may have granted the lease
// anew after another owner. The release reports whether that can have happened: for a server whose answer
// is missing, the lock's last token decides.
func TestAReleaseProvesThatNobodyElseHadALeaseInDoubt(t *testing.T) {
	kept := Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 1, Clock: 1, Kept: true}}
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	still := Result{Canceled: protocol.Canceled{Owned: true, Token: 1}}
	another := Result{Canceled: protocol.Canceled{Owned: true, Token: 9}}
	untold := Result{Canceled: protocol.Canceled{Owned: true}}
	released := Result{Canceled: protocol.Canceled{Token: 1}}
	done := Result{Answer: protocol.Answer{Outcome: protocol.Done}}
	for name, c := range map[string]struct {
		asked, ended [3]Result
		proved       bool
	}{
		"the tokens are still the last":        {[3]Result{silence, silence, silence}, [3]Result{still, still, still}, true},
		"an earlier try has released it":       {[3]Result{silence, silence, silence}, [3]Result{still, released, silence}, true},
		"another had it on one":                {[3]Result{silence, silence, silence}, [3]Result{another, still, still}, true},
		"another had it on most":               {[3]Result{silence, silence, silence}, [3]Result{another, another, still}, false},
		"another had it on one, one is silent": {[3]Result{silence, silence, silence}, [3]Result{another, still, silence}, false},
		"the tokens are not known":             {[3]Result{silence, silence, silence}, [3]Result{untold, untold, untold}, false},
		"all answered too late":                {[3]Result{kept, kept, kept}, [3]Result{done, done, silence}, true},
		"one had answered":                     {[3]Result{kept, silence, silence}, [3]Result{done, still, silence}, true},
		"one had granted it anew":              {[3]Result{granted(5), silence, silence}, [3]Result{done, still, another}, false},
		"one had granted it anew, two keep it": {[3]Result{granted(5), silence, silence}, [3]Result{done, still, still}, true},
	} {
		for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			s.now = s.now.Add(time.Millisecond)
			s.fx = Effects{}
			asks := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
			sends := s.fx.Sends
			if c.asked[2] == kept {
				s.expire(asks)
			}
			for i, send := range sends {
				s.answer(send, c.asked[i])
			}
			if !asks.Decided() || asks.Err == nil {
				t.Fatalf("%s: the acquire had an answer: %+v", name, asks.Answer)
			}
			s.fx = Effects{}
			op := s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
			sends = s.fx.Sends
			for _, i := range order {
				s.answer(sends[i], c.ended[i])
			}
			if !op.Decided() || op.Answer.Outcome != protocol.Done || op.Answer.Proved != c.proved {
				t.Errorf("%s, in order %v: decided %v, %+v %v", name, order, op.Decided(), op.Answer, op.Err)
			}
		}
	}
}

// A lease that is not in doubt is ended by a release, which costs the servers less than a cancel.
func TestALeaseThatIsNotInDoubtIsReleased(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, false)
	s.release()
	for _, send := range s.fx.Sends[:2] {
		if send.Kind != Do || send.Cmd.Verb != protocol.Release {
			t.Errorf("sent %+v", send)
		}
	}
}

// Where several clients ask for a free lock at once, each may be refused because of the others. A try
// learns of it, as it does where a server that did not answer may be the owner's.
func TestATryLearnsWhereServersAreSplit(t *testing.T) {
	const (
		one     = "leased1:w:10000:c:0000000000000000:BBBBBBBBBBBBBBBB:one"
		other   = "leased1:w:10000:c:0000000000000000:CCCCCCCCCCCCCCCC:other"
		reader  = "leased1:r:10000:c:0000000000000000:BBBBBBBBBBBBBBBB:one"
		foreign = "foreign"
	)
	for _, tt := range []struct {
		blockers []string // by server; "" grants
		split    bool
	}{
		{[]string{"", "", one, one, other}, true},
		{[]string{"", one, one, other, other}, true},
		{[]string{"", "", one, one, one}, false},
		{[]string{"", "", reader, reader, other}, false},
		{[]string{"", "", one, foreign, other}, false},
		{[]string{"", "", one, one, "away"}, true},
	} {
		s := newStand(t, 5, time.Second)
		op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
		sends := s.fx.Sends
		for i, blocker := range tt.blockers {
			res := Result{Answer: protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: 1, Blocker: blocker}}
			switch blocker {
			case "":
				res = granted(1)
			case "away":
				res = Result{Fail: silent}
			}
			s.answer(sends[i], res)
		}
		if a := op.Answer; !op.Decided() || a.Outcome != protocol.Refused || a.Split != tt.split {
			t.Errorf("%v: decided %v, %+v, %v, want split %v", tt.blockers, op.Decided(), a, op.Err, tt.split)
		}
	}
}

// A server that is about to answer that a partial grant was given back does answer, so a re-check that
// meets it waits. If it counted the server as silent, it would say that too few servers answer.
func TestAReCheckWaitsForGrantsThatAreBeingGivenBack(t *testing.T) {
	queued := Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}
	s := newStand(t, 5, time.Minute)
	s.acquire()
	asked := s.fx.Sends
	wanted := granted(1)
	wanted.Answer.More = true
	for _, send := range asked {
		if send.Server < 2 {
			s.answer(send, wanted)
		} else {
			s.answer(send, queued)
		}
	}
	giveBack := func() []*Send {
		s.now = s.now.Add(minKeep)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		return s.fx.Sends
	}
	yields := giveBack()
	s.fx = Effects{}
	s.lock.Receive(2, &protocol.Message{Kind: protocol.MessageGranted, ID: asked[2].Cmd.ID, Token: 6, Clock: 6, More: true}, s.now, &s.fx)
	if yields = append(yields, giveBack()...); len(yields) != 3 {
		t.Fatalf("%d grants are given back, want 3", len(yields))
	}
	op := s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, queued)
	}
	if op.Decided() {
		t.Fatalf("decided while three of five servers are about to answer: %v %v", op.Answer.Outcome, op.Err)
	}
	for _, yield := range yields {
		for _, send := range s.answer(yield, queued) {
			s.answer(send, queued)
		}
	}
	if !op.Decided() || op.Err != nil || op.Answer.Outcome != protocol.Enqueued {
		t.Errorf("decided %v, %v %v", op.Decided(), op.Answer.Outcome, op.Err)
	}
}

// Servers that have restarted prove a yield as they prove a release, also
// where the next request waits already when the yield arrives.
func TestServersThatRestartedProveAYield(t *testing.T) {
	waits := protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}
	gone := waits
	gone.Gone = true
	for i := range 4 {
		all, forgotten := i%2 == 1, protocol.Answer{Outcome: protocol.NotOurs}
		if i > 1 {
			forgotten = gone
		}
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		next := s.next()
		s.fx = Effects{}
		op := s.lock.Do(&protocol.Command{Verb: protocol.Yield, ID: s.id, Next: next, At: s.now}, s.now, &s.fx)
		sends := s.fx.Sends
		for len(sends) > 0 {
			send := sends[0]
			res := Result{Answer: waits}
			if send.Cmd.Verb == protocol.Yield && (send.Server < 2 || all) {
				res = Result{Answer: forgotten, Young: 10 * time.Second}
			}
			sends = append(sends[1:], s.answer(send, res)...)
		}
		if ours := op.Answer.Outcome == protocol.Enqueued; !op.Decided() || ours == all {
			t.Errorf("all %v, %v: a yield: decided %v, %v %v", all, forgotten.Outcome, op.Decided(), op.Answer.Outcome, op.Err)
		}
	}
}

// While servers still hold an earlier request of the same client, the next request is reported as blocked
// by the lock's owner, not by that earlier request.
func TestARequestIsNotSaidToWaitForAnEarlierOneOfItsClient(t *testing.T) {
	s := newStand(t, 5, time.Second)
	const client = "BBBBBBBBBBBBBBBB:owner"
	owner := protocol.NewRequest(client, protocol.Exclusive, time.Second, false, protocol.Unproved, protocol.Origin{}).ID
	earlier := s.lock.cfg.NewID(protocol.Identity{TTL: time.Second})
	for _, blockers := range [][]string{{earlier, earlier, owner}, {owner, earlier, earlier}, {earlier, owner, owner}} {
		op := s.acquire()
		for i, send := range s.fx.Sends[:3] {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1, Blocker: blockers[i], Left: time.Second}})
		}
		if !op.Decided() || op.Answer.Blocker != owner {
			t.Errorf("blocked by %q: said %q", blockers, op.Answer.Blocker)
		}
		s = newStand(t, 5, time.Second)
	}
}

// A connection that this side closed, as when the Redis client is closed, says nothing about its server.
func TestAServerIsNotAwayBecauseItsConnectionWasClosedHere(t *testing.T) {
	for _, c := range []struct {
		err  error
		away bool
	}{
		{&net.OpError{Op: "read", Err: net.ErrClosed}, false},
		{context.DeadlineExceeded, true},
		{&net.OpError{Op: "dial", Err: net.ErrClosed}, true},
	} {
		owner := &Server{base: t.Context(), start: func(func()) bool { return true }}
		m := &member{quorum: owner}
		m.sending()
		m.heardOf(redisserver.Classify(c.err), time.Now())
		if m.isAway() != c.away {
			t.Errorf("%v: away %v", c.err, m.isAway())
		}
	}
}

// If a connection breaks, or the pool has none to give, the server is checked at once and gets commands
// meanwhile. It is away only if it does not answer the check.
func TestAServerIsNotAwayBecauseOneOfItsConnectionsBroke(t *testing.T) {
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe,
		&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
		&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)},
		&net.OpError{Op: "read", Err: os.NewSyscallError("wsarecv", syscall.Errno(10054))},  // Windows: reset
		&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10053))}, // and aborted
		redis.ErrPoolTimeout, redis.ErrPoolExhausted} {
		var started []func()
		nobody := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
		defer func() { _ = nobody.Close() }()
		m := &member{quorum: &Server{base: t.Context(), start: func(f func()) bool { started = append(started, f); return true }},
			srv: redisserver.NewMember(nobody, "", time.Minute)}
		fails := func(goroutines int) {
			t.Helper()
			m.sending()
			m.heardOf(redisserver.Classify(err), time.Now())
			if m.isAway() || len(started) != goroutines {
				t.Errorf("%v: away %v, and %d goroutines to ask it", err, m.isAway(), len(started))
			}
		}
		fails(1)
		fails(1) // the check of the first failure is still under way
		m.checking = false
		fails(1) // the server has just answered the check
		m.checked = m.checked.Add(-time.Minute)
		fails(2)
		started[1]()
		if !m.isAway() || m.checking || len(started) != 3 {
			t.Errorf("%v, and no answer: away %v, checking %v, %d goroutines", err, m.isAway(), m.checking, len(started))
		}
	}
}

// A command can hang on a connection that a NAT has dropped, while the server answers on all others.
func TestAServerThatHasAnsweredSinceIsNotAwayBecauseOneCommandHung(t *testing.T) {
	for _, since := range []bool{false, true} {
		checks := 0
		m := &member{quorum: &Server{base: t.Context(), start: func(func()) bool { checks++; return true }}}
		sent := time.Now()
		m.sending()
		if since {
			m.sending()
			time.Sleep(time.Millisecond) // of real time, which has to pass between the two
			m.heardOf(nil, sent)
		}
		m.heardOf(redisserver.Classify(redisserver.ErrLateAnswer), sent)
		if m.isAway() == since {
			t.Errorf("answered since %v: away %v, checked %d times", since, m.isAway(), checks)
		}
	}
}

// An acquire whose connection broke is sent again by the server's client. The first copy may still arrive.
func TestAnAcquireThatWasRepeatedMayArriveLate(t *testing.T) {
	for _, repeated := range []bool{false, true} {
		s := newStand(t, 3, time.Minute)
		op := s.acquire()
		for _, send := range s.fx.Sends {
			res := granted(1)
			res.Repeated = repeated && send.Server == 0
			s.answer(send, res)
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Fatalf("not granted: %v", op.Err)
		}
		op = s.release()
		late := 0
		for _, send := range s.fx.Sends {
			s.answer(send, done)
			for _, stray := range s.fx.Strays {
				if stray.Server == 0 && stray.Late {
					late++
				}
			}
		}
		if !op.Decided() || op.Err != nil || late > 0 != repeated {
			t.Errorf("repeated %v: %d late copies are canceled; %v", repeated, late, op.Err)
		}
	}
}

// outOfConnections is a hook that stands in for a pool whose MaxActiveConns are in use for n commands.
type outOfConnections struct{ n int }

func (*outOfConnections) DialHook(next redis.DialHook) redis.DialHook { return next }
func (*outOfConnections) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return n
}

func (o *outOfConnections) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		if o.n--; o.n >= 0 {
			cmd.SetErr(redis.ErrPoolExhausted)
			return redis.ErrPoolExhausted
		}
		return nil
	}
}

func TestAServerIsNotAwayBecauseAllActiveConnectionsAreInUse(t *testing.T) {
	for n, away := range map[int]bool{10: false, 1000: true} {
		synctest.Test(t, func(t *testing.T) {
			rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, ContextTimeoutEnabled: true})
			defer func() { _ = rdb.Close() }()
			rdb.AddHook(&outOfConnections{n})
			m := &member{quorum: &Server{base: t.Context(), start: func(func()) bool { return true }}, srv: redisserver.NewMember(rdb, "", time.Minute)}
			m.check(false)
			if m.isAway() != away {
				t.Errorf("in use for %d commands: away %v", n, m.isAway())
			}
		})
	}
}

// What an operator reads about a server that is away is its last trouble, and not one before its last
// answer.
func TestATroubleIsOverWithTheNextAnswer(t *testing.T) {
	m := &member{quorum: &Server{base: t.Context(), start: func(func()) bool { return true }}}
	m.sending()
	m.heardOf(&protocol.Failure{Err: io.EOF, Kind: protocol.NoAnswer}, time.Now())
	if m.whyAway() != io.EOF {
		t.Errorf("after a broken connection: %v", m.whyAway())
	}
	m.sending()
	m.heardOf(nil, time.Now())
	if m.whyAway() != errAway {
		t.Errorf("after an answer: %v", m.whyAway())
	}
}

// A connection broke just after check. Later the server is silent, which is another matter.
func TestAServerThatIsSilentIsNotAwayForAnEarlierTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &member{quorum: &Server{base: t.Context(), start: func(func()) bool { return true }}, checked: time.Now()}
		m.sending()
		m.heardOf(&protocol.Failure{Err: io.EOF, Kind: protocol.NoAnswer}, time.Now())
		time.Sleep(time.Minute)
		m.sending()
		time.Sleep(maxPatience + 1)
		if !m.isAway() || m.whyAway() != errAway {
			t.Errorf("away %v, because of %v", m.isAway(), m.whyAway())
		}
	})
}

// panicking is a user's hook that panics on every command.
type panicking struct{}

func (panicking) DialHook(next redis.DialHook) redis.DialHook { return next }
func (panicking) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic("the user's") }
}
func (panicking) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { panic("the user's") }
}

// Nobody waits for a command that panicked, and it says nothing about its server. A cancel is tried again.
func TestACommandOfAQuorumThatPanicsIsOver(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	rdb.AddHook(panicking{})
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	m := &member{quorum: &Server{base: t.Context(), start: func(func()) bool { return true }}, srv: redisserver.NewMember(rdb, "", time.Minute)}
	id := newStand(t, 3, time.Second).id
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if recover() == nil {
				t.Errorf("%s: no panic", what)
			}
			if m.out != 0 || m.isAway() || m.sweeping {
				t.Errorf("%s: %d commands are out, away %v, sweeping %v", what, m.out, m.isAway(), m.sweeping)
			}
		}()
		f()
	}
	panics("acquire", func() {
		m.do(t.Context(), &Send{Kind: Do, Keys: &k, Cmd: protocol.Command{Verb: protocol.Acquire, ID: id, TTL: time.Second}})
	})
	panics("renewals", func() {
		renewal := protocol.Renewal{Keys: &k, Req: protocol.Request{ID: id, TTL: time.Second}}
		m.renew([]*Send{{Kind: Renew, Keys: &k, Renew: renewal, op: &Op{}}, {Kind: Renew, Keys: &k, Renew: renewal, op: &Op{}}})
	})
	panics("sweep", func() {
		m.strays.Add(&lockstate.Cancellation{Owner: &k, ID: id}, time.Now())
		m.sweeping = true
		m.sweepDue()
	})
	if m.timer == nil || m.strays.Next().IsZero() {
		t.Error("the cancel is not tried again")
	}
	m.halt()
}

// Like a release, a yield proves nothing on servers that may have admitted others.
func TestAYieldOnAServerThatLetOthersInProvesNothing(t *testing.T) {
	s, ids := displacedOn(t, 100*time.Millisecond)
	s.now = s.now.Add(200 * time.Millisecond)
	for i, id := range ids {
		s.receive(i, id, 6)
	}
	next := s.next()
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Yield, ID: s.id, Next: next, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 6, Clock: 6}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.NotOurs {
		t.Errorf("decided %v, %v", op.Decided(), op.Answer.Outcome)
	}
}

// A server that lost the grant, and has not answered the acquire that followed, does not count as silent
// once it is away.
func TestAServerThatLostAGrantDoesNotCountAsAway(t *testing.T) {
	s := newStand(t, 5, time.Second)
	away := false
	s.lock.cfg.Away = func(i int) bool { return i == 0 && away }
	s.own(true, true, true, true, true)
	op := s.renew()
	for _, send := range s.fx.Sends {
		if send.Server == 0 {
			s.answer(send, notOurs) // the acquire that follows has no answer yet
		} else {
			s.answer(send, renewed)
		}
	}
	if !op.Decided() || op.Renewed != protocol.Granted {
		t.Fatalf("decided %v, %v", op.Decided(), op.Renewed)
	}
	away = true
	s.now = s.now.Add(100 * time.Millisecond)
	op = s.renew()
	for _, send := range s.fx.Sends {
		if send.Server > 2 {
			s.answer(send, renewed)
			continue
		}
		for _, ask := range s.answer(send, notOurs) {
			s.answer(ask, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 7, Clock: 7}})
		}
	}
	if !op.Decided() || op.Renewed != protocol.NotOurs {
		t.Errorf("three of five have lost it: decided %v, %v", op.Decided(), op.Renewed)
	}
}

// The answers to a renewal count for nothing once a renewal that was sent later has proved ownership.
func TestARenewalThatWasOvertakenFindsNothingLost(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(100 * time.Millisecond)
	s.renew()
	late := s.fx.Sends
	s.now = s.now.Add(100 * time.Millisecond)
	op := s.renew()
	for _, send := range s.fx.Sends {
		s.answer(send, renewed)
	}
	if op.Renewed != protocol.Granted {
		t.Fatalf("renewed: %v", op.Renewed)
	}
	for _, send := range late {
		if asks := s.answer(send, notOurs); len(asks) > 0 {
			t.Errorf("server %d is asked again", send.Server)
		}
	}
	if n := s.lock.behind(s.id, s.now); n != 3 {
		t.Errorf("%d servers stand behind it", n)
	}
}

// A request that cannot get a majority must not keep out those that can.
func TestWhatIsGrantedWithoutAMajorityIsGivenBack(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	back := 0
	for _, send := range s.fx.Sends {
		res := Result{Fail: silent}
		if send.Server == 0 {
			res = granted(1)
		}
		for _, more := range s.answer(send, res) {
			if more.Kind == Cancel && more.Server == 0 {
				back++
			}
		}
	}
	if !op.Decided() || !errors.Is(op.Err, ErrNoQuorum) || back != 1 {
		t.Errorf("decided %v, %+v %v, and given back %d times", op.Decided(), op.Answer, op.Err, back)
	}
}

// If all servers are in quarantine, the set is new. It grants a request only if all of them do.
func TestServersThatAreAllNewGrantTogether(t *testing.T) {
	for _, all := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		op := s.acquire()
		for i, send := range s.fx.Sends {
			if i < 2 || all {
				s.answer(send, young(protocol.Granted, 1, 10*time.Second))
			} else {
				s.answer(send, Result{Fail: silent})
			}
		}
		if got := op.Answer.Outcome == protocol.Granted; !op.Decided() || got != all {
			t.Errorf("all %v: decided %v, %+v %v", all, op.Decided(), op.Answer, op.Err)
		}
	}
}

// A message about a grant from before the request was queued belongs to an earlier grant.
func TestAMessageWithAnOldTokenGrantsNothing(t *testing.T) {
	for what, last := range map[string]uint64{"the last token": 5, "a time, for the last token is forgotten": 0} {
		s := newStand(t, 3, time.Second)
		op := s.acquire()
		sends := s.fx.Sends
		s.answer(sends[0], granted(5))
		for _, send := range sends[1:] {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: last, Clock: 6}})
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
			t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
		}
		if told := s.receive(1, sends[1].Cmd.ID, 5); told != "" {
			t.Errorf("%s: an old token: told %q", what, told)
		}
		if told := s.receive(1, sends[1].Cmd.ID, 6); told != protocol.MessageGranted {
			t.Errorf("%s: a new one: told %q", what, told)
		}
	}
}

// An eviction ends the lease once it has no majority left. The eviction of an earlier grant ends nothing.
func TestAnEvictionCountsServerByServer(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	for _, send := range sends {
		s.answer(send, granted(5))
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Granted {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	revoked := func(server int, token uint64) int {
		s.fx = Effects{}
		s.lock.Receive(server, &protocol.Message{Kind: protocol.MessageRevoked, ID: sends[server].Cmd.ID, Token: token}, s.now, &s.fx)
		return len(s.fx.Messages)
	}
	for i := range sends {
		if n := revoked(i, 4); n > 0 {
			t.Errorf("of an earlier grant on server %d: %d messages", i, n)
		}
	}
	if n := revoked(0, 5); n > 0 || s.lock.behind(s.id, s.now) != 2 {
		t.Errorf("on one server: %d messages, %d servers behind it", n, s.lock.behind(s.id, s.now))
	}
	if n := revoked(1, 5); n != 1 {
		t.Errorf("on a majority: %d messages", n)
	}
}

// evict has a server say that it evicted the request, with token as the lock's last token there. It reports
// whether that ended the lease.
func (s *stand) evict(server int, id string, token uint64) bool {
	s.fx = Effects{}
	s.lock.Receive(server, &protocol.Message{Kind: protocol.MessageRevoked, ID: id, Token: token}, s.now, &s.fx)
	return len(s.fx.Messages) > 0
}

// revoked reports whether the last event ended the lease.
func (s *stand) revoked() bool {
	return slices.ContainsFunc(s.fx.Messages, func(m protocol.Message) bool { return m.Kind == protocol.MessageRevoked })
}

// check sends an acquire for a lease that is held, as if the message of the grant had overtaken it.
func (s *stand) check() (*Op, []*Send) {
	s.now = s.now.Add(100 * time.Millisecond)
	return s.do(protocol.Command{Wait: true})
}

// do sends an acquire of the request, which waits or is a question as c says.
func (s *stand) do(c protocol.Command) (*Op, []*Send) {
	c.Verb, c.ID, c.TTL, c.At = protocol.Acquire, s.id, s.ttl, s.now
	s.fx = Effects{}
	return s.lock.Do(&c, s.now, &s.fx), s.fx.Sends
}

func keptWith(token uint64) Result {
	res := granted(token)
	res.Answer.Kept = true
	return res
}

// An operator evicts the owner while a check is under way, so servers grant the lease anew. That does not
// undo the eviction: others may have owned the lock in between.
func TestAnEvictionIsNotUndoneByAnAcquireThatItMeets(t *testing.T) {
	for _, confirmed := range []bool{false, true} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		op, sends := s.check()
		id := sends[0].Cmd.ID
		if s.evict(0, id, 1) {
			t.Error("one server ends the lease")
		}
		s.answer(sends[0], granted(9))
		for _, send := range sends[1:] {
			s.answer(send, keptWith(1))
		}
		if !op.Decided() || !op.Answer.Kept {
			t.Errorf("four servers kept it: decided %v, %+v", op.Decided(), op.Answer)
		}
		if confirmed { // by all servers, which settles what happened on the first one
			s.now = s.now.Add(100 * time.Millisecond)
			again := s.renew()
			for _, send := range s.fx.Sends {
				s.answer(send, renewed)
			}
			if again.Renewed != protocol.Granted {
				t.Fatal("not renewed")
			}
		}
		if s.evict(1, id, 1) {
			t.Errorf("confirmed %v: three servers have kept it, and it is over", confirmed)
		}
		if over := s.evict(2, id, 1); over == confirmed {
			t.Errorf("confirmed %v: over %v", confirmed, over)
		}
	}
}

// The answer that grants the lease anew arrives before the message of the eviction.
func TestAnEvictionEndsALeaseThatServersHaveGrantedAnew(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.own(true, true, true, true, true)
	_, sends := s.check()
	id := sends[0].Cmd.ID
	s.answer(sends[0], granted(9))
	if s.evict(0, id, 1) || s.evict(1, id, 1) {
		t.Error("three servers have kept it, and it is over")
	}
	if !s.evict(2, id, 1) {
		t.Error("two of five have kept it, and it is not over")
	}

	s = newStand(t, 3, time.Second)
	s.own(true, true, true)
	_, sends = s.check()
	s.answer(sends[1], keptWith(1))
	s.answer(sends[2], keptWith(1))
	op := s.renew()
	renewals := s.fx.Sends
	renewals = append(renewals, s.answer(sends[0], granted(9))...)
	for _, send := range renewals {
		if send.Server != 2 {
			s.answer(send, renewed)
		}
	}
	if op.Renewed != protocol.Granted {
		t.Fatalf("renewed: %v", op.Renewed)
	}
	if s.evict(0, sends[0].Cmd.ID, 1) {
		t.Error("two of three have kept it, and it is over")
	}
	for _, send := range renewals {
		if send.Server == 2 {
			s.answer(send, notOurs)
		}
	}
	if !s.revoked() {
		t.Error("one of three has kept it, and it is not over")
	}
}

// Three of five servers evict the owner during a check. Two of the messages arrive, and the third is lost.
func TestACheckDoesNotProveALeaseThatWasEvictedMeanwhile(t *testing.T) {
	for _, early := range []bool{false, true} { // true: the messages come before their servers' answers
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		op, sends := s.check()
		for _, send := range sends[:2] {
			if early {
				s.evict(send.Server, send.Cmd.ID, 1)
				s.answer(send, granted(9))
			} else {
				s.answer(send, keptWith(1))
				s.evict(send.Server, send.Cmd.ID, 1)
			}
		}
		s.answer(sends[2], granted(9))
		s.answer(sends[3], keptWith(1))
		s.answer(sends[4], keptWith(1))
		if !op.Decided() || op.Answer.Kept {
			t.Errorf("early %v: two of five kept it: decided %v, %+v", early, op.Decided(), op.Answer)
		}
	}
}

// The answers that show the eviction come after a majority has confirmed the lease.
func TestALateAnswerEndsALeaseThatWasEvictedMeanwhile(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		op, sends := s.check()
		for _, send := range sends[2:] {
			s.answer(send, keptWith(1))
		}
		if !op.Decided() || !op.Answer.Kept {
			t.Fatalf("three servers kept it: decided %v, %+v", op.Decided(), op.Answer)
		}
		for _, send := range sends[2:4] {
			if evicted && s.evict(send.Server, send.Cmd.ID, 1) {
				t.Fatal("two of five end the lease")
			}
		}
		if s.answer(sends[0], granted(9)); s.revoked() != evicted {
			t.Errorf("evicted %v, and granted anew: over %v", evicted, s.revoked())
		}

		s = newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.now = s.now.Add(100 * time.Millisecond)
		renewal := s.renew()
		sends = s.fx.Sends
		for _, send := range sends[:2] {
			s.answer(send, renewed)
		}
		if renewal.Renewed != protocol.Granted {
			t.Fatal("not renewed by two of three")
		}
		if evicted && s.evict(0, sends[0].Cmd.ID, 1) {
			t.Fatal("one of three ends the lease")
		}
		if s.answer(sends[2], notOurs); s.revoked() != evicted {
			t.Errorf("evicted %v, and not renewed: over %v", evicted, s.revoked())
		}
	}
}

// The message of an eviction may arrive before the answer that reports the grant.
func TestAGrantWhoseEvictionIsAlreadyKnownIsNone(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	for _, send := range sends[:2] {
		s.evict(send.Server, send.Cmd.ID, 5)
		s.answer(send, granted(5))
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Errorf("evicted on two of three: decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	again := s.acquire()
	for _, send := range s.fx.Sends {
		if send.Cmd.ID == sends[0].Cmd.ID {
			t.Errorf("server %d is asked under an id that it has evicted", send.Server)
		}
		s.answer(send, granted(6))
	}
	if !again.Decided() || again.Answer.Outcome != protocol.Granted {
		t.Errorf("asked again: decided %v, %+v %v", again.Decided(), again.Answer, again.Err)
	}

	s = newStand(t, 3, time.Second)
	s.own(true, true, true)
	lowered, moves := s.downgrade()
	for _, send := range moves {
		if send.Server < 2 {
			s.evict(send.Server, send.Cmd.Next, 5)
		}
		s.answer(send, granted(5))
	}
	if n := s.lock.behind(s.lower(), s.now); n > 1 {
		t.Errorf("%d servers stand behind a downgraded lease that two of three evicted: %+v", n, lowered.Answer)
	}
}

// A part that is being given back is not owned, but not because of an eviction.
func TestAnEvictionOnAMinorityDoesNotEndALeaseThatIsGivenBack(t *testing.T) {
	begin := func(n int) (s *stand, renewals []*Send) {
		s = newStand(t, n, time.Second)
		s.own(slices.Repeat([]bool{true}, n)...)
		s.tick()
		s.renew()
		renewals = s.fx.Sends
		if s.evict(0, renewals[0].Cmd.ID, 1) {
			t.Fatal("one server ends the lease")
		}
		s.tick()
		return s, renewals
	}

	s, renewals := begin(3)
	s.downgrade()
	if s.answer(renewals[1], renewed); s.revoked() {
		t.Error("two of three are asked to downgrade it, and it is over")
	}

	s, renewals = begin(5)
	op := s.release()
	for _, send := range s.fx.Sends {
		s.answer(send, quiet)
	}
	if !op.Decided() || op.Err == nil {
		t.Fatalf("nobody answered the release: decided %v, %+v", op.Decided(), op.Answer)
	}
	if s.answer(renewals[1], renewed); s.revoked() {
		t.Error("four of five are asked to release it, and it is over")
	}
	s.fx = Effects{}
	op = s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Canceled: protocol.Canceled{Owned: true, Token: 1}})
	}
	if !op.Decided() || !op.Canceled.Owned {
		t.Errorf("four of five had it until it was canceled: decided %v, %+v", op.Decided(), op.Canceled)
	}
}

// What a server that no longer has the lease says next is whether it has only lost its data.
func TestAnEvictionOnAMinorityDoesNotEndALeaseBesideRestarts(t *testing.T) {
	for _, restarts := range []bool{true, false} {
		s := newStand(t, 5, time.Second)
		s.own(true, true, true, true, true)
		s.evict(0, s.lock.reqs[s.id].parts[0].id, 1)
		s.tick()
		op := s.renew()
		sends := s.fx.Sends
		for _, send := range sends[3:] {
			s.answer(send, renewed)
		}
		s.answer(sends[0], behind)
		var asks []*Send
		for _, send := range sends[1:3] {
			if asks = append(asks, s.answer(send, notOurs)...); s.revoked() {
				t.Error("it is over before its servers are asked")
			}
		}
		over := false
		for _, ask := range asks {
			if restarts {
				s.answer(ask, young(protocol.Granted, 9, time.Hour))
			} else {
				s.answer(ask, granted(9))
			}
			over = over || s.revoked()
		}
		if restarts && (over || op.Renewed != protocol.Granted) || !restarts && !over && op.Renewed != protocol.NotOurs {
			t.Errorf("restarts %v: over %v, renewed %v", restarts, over, op.Renewed)
		}
	}
}

// The slowest answer to a renewal comes after the next one has been decided. What a majority said then
// stays known.
func TestALateAnswerToARenewalTakesNothingBack(t *testing.T) {
	s := newStand(t, 5, time.Second)
	s.acquire()
	acquires := s.fx.Sends
	for _, send := range acquires[:4] {
		s.answer(send, granted(1))
	}
	s.tick()
	s.renew()
	renewals := s.fx.Sends
	for _, send := range renewals[:3] {
		s.answer(send, renewed)
	}
	s.tick()
	s.answer(acquires[4], granted(2))
	s.tick()
	op := s.renew()
	for _, send := range s.fx.Sends {
		s.answer(send, renewed)
	}
	if op.Renewed != protocol.Granted {
		t.Fatal("not renewed")
	}
	s.answer(renewals[3], renewed)
	for i := range 2 {
		if s.evict(i, s.lock.reqs[s.id].parts[i].id, 1) {
			t.Errorf("%d of five have kept it, and it is over", 4-i)
		}
	}
}

// A check does not report the lease as kept if so many servers granted it anew that no majority kept it,
// since others may have owned the lock in between. One such server does not matter.
func TestACheckThatIsGrantedAnewSaysSo(t *testing.T) {
	for _, lost := range []int{1, 2} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.now = s.now.Add(100 * time.Millisecond)
		s.fx = Effects{}
		op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Wait: true, At: s.now}, s.now, &s.fx)
		for i, send := range s.fx.Sends {
			res := granted(1)
			if res.Answer.Kept = i >= lost; i < lost {
				res = granted(9)
			}
			s.answer(send, res)
		}
		want := protocol.Granted
		if lost > 1 { // the request is queued again
			want = protocol.Enqueued
		}
		if !op.Decided() || op.Answer.Outcome != want || op.Answer.Kept != (lost < 2) {
			t.Errorf("%d lost it: decided %v, %+v %v", lost, op.Decided(), op.Answer, op.Err)
		}
	}
}

var enqueued = Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}

func (s *stand) rejoined(server int) []*Send {
	s.fx = Effects{}
	s.lock.Rejoined(server, s.now, &s.fx)
	return s.fx.Sends
}

// While a server's inbox was not subscribed, only messages of that server can have been missed, so only
// that server is asked.
func TestAServerWhoseInboxIsConfirmedAgainIsAskedAlone(t *testing.T) {
	s := newStand(t, 5, time.Second)
	op := s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, enqueued)
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	s.now = s.now.Add(100 * time.Millisecond)
	for i := range 3 { // each has granted the request meanwhile, and its message was missed
		asks := s.rejoined(i)
		if len(asks) != 1 || asks[0].Server != i || asks[0].Cmd.Verb != protocol.Acquire || !asks[0].Cmd.Wait {
			t.Fatalf("sent %+v", asks)
		}
		if more := s.answer(asks[0], granted(2)); len(more) != 0 {
			t.Errorf("sent %+v", more[0])
		}
		if told := len(s.fx.Messages) == 1 && s.fx.Messages[0].Kind == protocol.MessageGranted && s.fx.Messages[0].ID == s.id; told != (i == 2) {
			t.Errorf("after %d grants: %+v", i+1, s.fx.Messages)
		}
	}
	if asks := s.rejoined(3); len(asks) != 0 {
		t.Errorf("asked for what is held: %+v", asks[0])
	}
}

// An answer that was on its way when the inbox was confirmed may be older than a message that was missed.
func TestAnAnswerFromBeforeAnInboxWasConfirmedIsAskedForAgain(t *testing.T) {
	s := newStand(t, 5, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	for range 2 { // confirming the inbox twice makes no difference
		if asks := s.rejoined(4); len(asks) != 0 {
			t.Fatalf("sent %+v", asks[0])
		}
	}
	for _, send := range sends[:4] {
		s.answer(send, enqueued)
	}
	if !op.Decided() {
		t.Fatal("not decided")
	}
	asks := s.answer(sends[4], enqueued)
	if len(asks) != 1 || asks[0].Server != 4 || asks[0].Cmd.Verb != protocol.Acquire {
		t.Fatalf("sent %+v", asks)
	}
	if more := s.answer(asks[0], enqueued); len(more) != 0 {
		t.Errorf("asked forever: %+v", more[0])
	}
}

// The state machine's next command asks all servers. One of them is already being asked because its inbox
// was confirmed. It gets the command after that answer, and must not count as silent until then.
func TestACommandWaitsForAServerThatIsAskedBecauseOfItsInbox(t *testing.T) {
	for _, ends := range []bool{false, true} { // true: the request is canceled meanwhile
		s := newStand(t, 5, time.Second)
		s.acquire()
		for i, send := range s.fx.Sends {
			if i < 3 {
				s.answer(send, enqueued)
			} else {
				s.answer(send, Result{Fail: silent})
			}
		}
		looks := s.rejoined(2)
		s.now = s.now.Add(time.Millisecond)
		op := s.acquire()
		for _, send := range s.fx.Sends {
			if send.Server == 2 {
				t.Error("asked twice at once")
			} else if send.Server < 2 {
				s.answer(send, granted(2))
			} else {
				s.answer(send, Result{Fail: silent})
			}
		}
		if op.Decided() {
			t.Fatalf("decided without the third server: %v", op.Err)
		}
		if ends {
			s.fx = Effects{}
			s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			for _, send := range s.answer(looks[0], enqueued) {
				if send.Kind == Do {
					t.Errorf("asked for what is canceled: %+v", send)
				}
			}
			if open(op.outcomes) != 0 {
				t.Error("the command waits for a server that is not asked")
			}
			continue
		}
		asks := s.answer(looks[0], enqueued)
		if len(asks) != 1 || asks[0].Cmd.At.Before(op.at) {
			t.Fatalf("sent %+v", asks)
		}
		s.answer(asks[0], granted(2))
		if !op.Decided() || op.Answer.Outcome != protocol.Granted {
			t.Errorf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
		}
	}
}

// A confirmed inbox does not queue a request that does not wait or that is being canceled.
func TestAnInboxThatIsConfirmedQueuesNobodyWhoDoesNotWait(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	sends := s.fx.Sends
	s.rejoined(0)
	if more := s.answer(sends[0], granted(1)); len(more) != 0 {
		t.Errorf("of a try: sent %+v", more[0])
	}
	s = newStand(t, 3, time.Second)
	s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, enqueued)
	}
	s.fx = Effects{}
	s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends { // no server answers the cancel
		s.answer(send, Result{Canceled: protocol.Canceled{Fail: silent}})
	}
	for i := range 3 {
		if asks := s.rejoined(i); len(asks) != 0 {
			t.Errorf("of a cancel without answer: sent %+v", asks[0])
		}
	}
}

// The state machine learns which lease made way even if the last message that a majority needed does not
// complete the grant, because the token has to be written back first.
func TestAGrantThatIsWrittenBackTellsWhoseLeaseItFollows(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	for _, send := range sends {
		s.answer(send, enqueued)
	}
	if !op.Decided() {
		t.Fatal("not decided")
	}
	var adopts []*Send
	for i, token := range []uint64{9_000_000, 1_000_000} {
		s.fx = Effects{}
		m := protocol.Message{Kind: protocol.MessageGranted, ID: sends[i].Cmd.ID, Token: token, Clock: token, Link: &protocol.Span{Flags: 1}}
		s.lock.Receive(i, &m, s.now, &s.fx)
		adopts = append(adopts, s.fx.Sends...)
	}
	if len(adopts) != 1 || len(s.fx.Messages) != 0 {
		t.Fatalf("sent %+v, told %+v", adopts, s.fx.Messages)
	}
	s.answer(adopts[0], Result{Answer: protocol.Answer{Outcome: protocol.Done}})
	if len(s.fx.Messages) != 1 || s.fx.Messages[0].Kind != protocol.MessageGranted || s.fx.Messages[0].Link == nil {
		t.Errorf("told %+v", s.fx.Messages)
	}
}

// doubted returns a stand whose lease is in doubt: an acquire that the grant's message overtook got no
// answer.
func doubted(t *testing.T) *stand {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(time.Millisecond)
	s.fx = Effects{}
	asks := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}})
	}
	if asks.Err == nil {
		t.Fatal("it was answered")
	}
	return s
}

// A cancel that proves that nobody else owned the lock reports the proof.
func TestACancelAfterAReleaseInDoubtSaysWhatItProves(t *testing.T) {
	s := doubted(t)
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}})
	}
	s.fx = Effects{}
	cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Canceled: protocol.Canceled{Owned: true, Token: 1}})
	}
	if !cancel.Decided() || !cancel.Canceled.Proved {
		t.Errorf("canceled: %+v", cancel.Canceled)
	}
}

// Two of three servers had another owner since. The release learns that from one of them. That the lease
// owned the lock there again must not count as a proof in the cancel that follows.
func TestACancelAfterAReleaseInDoubtProvesNothingWhereOthersOwned(t *testing.T) {
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	another := Result{Canceled: protocol.Canceled{Owned: true, Token: 9}}
	for _, late := range []bool{false, true} {
		s := doubted(t)
		release := s.release()
		sends := s.fx.Sends
		s.answer(sends[0], another)
		if late {
			s.lock.Expire(release, s.now, &s.fx)
		} else {
			s.answer(sends[1], silence)
			s.answer(sends[2], silence)
		}
		s.fx = Effects{}
		cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
		more := s.fx.Sends
		if late {
			more = append(more, s.answer(sends[1], another)...)
		}
		for _, send := range more {
			if late {
				s.answer(send, Result{Canceled: protocol.Canceled{Token: 9}})
			} else {
				s.answer(send, another)
			}
		}
		if cancel.Decided() && cancel.Canceled.Owned {
			t.Errorf("late %v: proved, though others had owned two of three servers", late)
		}
	}
}

// A server says that it lost the lease, does not answer the acquire that follows, and later grants the
// lease anew.
func TestAServerThatLostALeaseAndWasSilentThenProvesNothing(t *testing.T) {
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	s := doubted(t)
	s.renew()
	sends := s.fx.Sends
	for _, ask := range s.answer(sends[0], notOurs) {
		s.answer(ask, silence)
	}
	s.answer(sends[1], silence)
	s.answer(sends[2], silence)
	s.now = s.now.Add(time.Millisecond)
	s.renew()
	for _, send := range s.fx.Sends {
		if send.Server == 0 {
			s.answer(send, granted(9))
		} else {
			s.answer(send, silence)
		}
	}
	release := s.release()
	for _, send := range s.fx.Sends {
		if send.Server == 1 {
			s.answer(send, silence)
		} else {
			s.answer(send, Result{Canceled: protocol.Canceled{Owned: true, Token: map[int]uint64{0: 9, 2: 1}[send.Server]}})
		}
	}
	if release.Answer.Proved {
		t.Error("proved with a server that had lost it")
	}
}

// One server lost the lease and grants it anew, another is silent, and the third renews it. The lease goes
// on, since the silent server may have kept it. But nothing proves that it did.
func TestARenewalThatASilentServerCarriesProvesNothing(t *testing.T) {
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	s := doubted(t)
	renewal := s.renew()
	sends := s.fx.Sends
	asks := s.answer(sends[0], notOurs)
	s.answer(sends[1], silence)
	s.answer(sends[2], renewed)
	for _, ask := range asks {
		s.answer(ask, granted(9))
	}
	if !renewal.Decided() || renewal.Renewed != protocol.Granted {
		t.Fatalf("not renewed: %+v", renewal)
	}
	release := s.release()
	for _, send := range s.fx.Sends {
		switch {
		case send.Server == 1:
			s.answer(send, silence)
		case send.Kind == Cancel:
			s.answer(send, Result{Canceled: protocol.Canceled{Owned: true, Token: 1}})
		default:
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
		}
	}
	if !release.Decided() {
		t.Fatal("the release is not decided")
	}
	if release.Answer.Proved {
		t.Error("proved with a server that had lost it")
	}
}

// A majority of the servers has lost the grant. One of them grants the lease anew, and others would follow,
// but that must not make it a lease again: no release could tell that others owned the lock in between.
func TestAnOwnerThatAsksAndIsRefusedHasLostItsLease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(time.Millisecond)
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
	for i, send := range s.fx.Sends {
		if i == 0 {
			s.answer(send, granted(9))
		} else {
			s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Refused, Token: 8}})
		}
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued || op.Answer.Token < 1 {
		t.Errorf("answered %+v, which does not end the grant with token 1", op.Answer)
	}
}

// Two of three servers lost the lease at different times and granted it anew, and the third is silent. The
// lease may go on, but no answer of those two proves that nobody else has owned the lock.
func TestServersThatGrantedALeaseAnewDoNotProveIt(t *testing.T) {
	silence := Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}}
	kept := Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 9, Clock: 9, Kept: true}}
	anew := func(t *testing.T) *stand {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		for _, lost := range []int{0, 1} {
			s.now = s.now.Add(time.Millisecond)
			s.renew()
			for i, send := range s.fx.Sends {
				switch {
				case i == lost:
					for _, ask := range s.answer(send, notOurs) {
						s.answer(ask, granted(9))
					}
				case i < lost:
					s.answer(send, renewed)
				default:
					s.answer(send, silence)
				}
			}
		}
		s.now = s.now.Add(time.Millisecond)
		return s
	}
	for name, say := range map[string]func(s *stand){
		"at once": func(*stand) {},
		"after a renewal": func(s *stand) {
			op := s.renew()
			sends := s.fx.Sends
			s.answer(sends[0], renewed)
			s.answer(sends[1], renewed)
			s.answer(sends[2], silence)
			if !op.Decided() || op.Renewed != protocol.Granted {
				s.t.Fatalf("not renewed: %+v", op)
			}
		},
		"after an acquire": func(s *stand) {
			s.fx = Effects{}
			op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, At: s.now}, s.now, &s.fx)
			sends := s.fx.Sends
			s.answer(sends[0], kept)
			s.answer(sends[1], kept)
			s.answer(sends[2], silence)
			if !op.Decided() || op.Answer.Outcome != protocol.Granted || !op.Answer.Kept {
				s.t.Fatalf("not kept: %+v", op)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := anew(t)
			say(s)
			s.fx = Effects{}
			release := s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
			for i, send := range s.fx.Sends {
				if i == 2 {
					s.answer(send, silence)
				} else {
					s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Done}})
				}
			}
			if !release.Decided() || release.Err == nil && release.Answer.Outcome == protocol.Done {
				t.Errorf("released: %+v", release.Answer)
			}
		})
		t.Run(name+", by a cancel", func(t *testing.T) {
			s := anew(t)
			say(s)
			s.fx = Effects{}
			s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
			for _, send := range s.fx.Sends {
				s.answer(send, silence)
			}
			s.fx = Effects{}
			cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			for i, send := range s.fx.Sends {
				if i == 2 {
					s.answer(send, silence)
				} else {
					s.answer(send, Result{Canceled: protocol.Canceled{Owned: true, Token: 9}})
				}
			}
			if cancel.Canceled.Owned {
				t.Error("a cancel proves it")
			}
		})
	}
}

// On a new set of servers, a request that all servers have granted by message asks again if a proof is
// older than its last asking, because one server was still busy with the asking before.
func TestOnANewSetOldProofsOfAMessageAreAReasonToAskAgain(t *testing.T) {
	for _, left := range []time.Duration{time.Second, 0} {
		s := newStand(t, 3, time.Second)
		enq := young(protocol.Enqueued, 1, left)
		s.acquire()
		for _, send := range s.fx.Sends {
			s.answer(send, enq)
		}
		s.now = s.now.Add(10 * time.Millisecond)
		op := s.acquire()
		second := s.fx.Sends
		s.answer(second[0], enq)
		s.answer(second[1], enq)
		if !op.Decided() {
			t.Fatal("two of three decide")
		}
		s.now = s.now.Add(10 * time.Millisecond)
		op = s.acquire() // while server 2 is still asked
		for _, send := range s.fx.Sends {
			s.answer(send, enq)
		}
		if !op.Decided() {
			t.Fatal("not decided")
		}
		s.answer(second[2], enq)
		told := ""
		for _, i := range []int{2, 0, 1} {
			r := s.lock.reqs[s.id]
			s.fx = Effects{}
			s.lock.Receive(i, &protocol.Message{Kind: protocol.MessageGranted, ID: r.parts[i].id, Token: 9, Clock: 9}, s.now, &s.fx)
			for _, m := range s.fx.Messages {
				told += string(m.Kind) + " "
			}
		}
		if !strings.HasPrefix(told, "wanted ") { // outside a quarantine, the grant follows
			t.Errorf("with %v of quarantine left, the state machine is told %q", left, told)
		}
	}
}

// A server's message completes a majority with what others had granted or queued before a re-check, whose
// answers follow. The message says how old that is, because those answers can come to the state machine
// first.
func TestAMessageOfAGrantSaysHowOldItIs(t *testing.T) {
	s := newStand(t, 3, time.Minute)
	op := s.acquire()
	first := s.now
	sends := s.fx.Sends
	ids := []string{sends[0].Cmd.ID, sends[1].Cmd.ID}
	s.answer(sends[0], granted(1))
	for _, send := range sends[1:] {
		s.answer(send, enqueues)
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("it does not wait: %+v %v", op.Answer, op.Err)
	}
	s.now = s.now.Add(time.Second)
	s.acquire()
	s.answer(s.fx.Sends[1], enqueues)
	s.fx = Effects{}
	s.lock.Receive(1, &protocol.Message{Kind: protocol.MessageGranted, ID: ids[1], Token: 6, Clock: 6}, s.now, &s.fx)
	if len(s.fx.Messages) != 1 || !s.fx.Messages[0].Proved.Equal(first) {
		t.Errorf("messages %+v, want one from %v", s.fx.Messages, first)
	}
}
