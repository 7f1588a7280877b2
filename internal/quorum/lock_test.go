package quorum

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
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

// downgrade lets the request be a reader's; it may be repeated.
func (s *stand) downgrade() (*Op, []*Send) {
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Downgrade, ID: s.id, Next: s.lower(), At: s.now}, s.now, &s.fx)
	return op, s.fx.Sends
}

// lower is the id of the reader's request.
func (s *stand) lower() string { return "leased1:r" + s.id[len("leased1:w"):] }

// next is the id of a request that follows the first one.
func (s *stand) next() string {
	const before = "leased1:w:1000:u:"
	return before + "BBBBBBBBBBBBBBBB" + s.id[len(before)+16:]
}

func (s *stand) release() *Op {
	s.fx = Effects{}
	return s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
}

// expire has a command be decided without the answers that are missing.
func (s *stand) expire(op *Op) {
	s.fx = Effects{}
	s.lock.Expire(op, s.now, &s.fx)
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

// A server does less for a request that it cannot know yet than for one that may wait there.
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
	s.acquire() // the servers are told of other ids
	isNew("after its end", s.fx.Sends, true, true, true)
}

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
	s.expire(op)
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
	s.expire(op)
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

// enqueue gives the answers by which the request waits, but for server 0, which granted, and
// server 1, which was silent. It returns the id for server 1.
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

func (s *stand) receive(server int, id string, token uint64) string {
	s.fx = Effects{}
	s.lock.Receive(server, &protocol.Message{Kind: "granted", ID: id, Token: token, Clock: token}, s.now, &s.fx)
	kinds := ""
	for _, m := range s.fx.Messages {
		kinds += m.Kind
	}
	return kinds
}

// A message does not say whether its server is in quarantine. Where an answer is missing, the
// server may have restarted before it placed the request: it is asked first.
func TestAMessageCountsOnlyIfTheServersAnswersAreKnown(t *testing.T) {
	for _, restarted := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		id := s.enqueue()
		if told := s.receive(1, id, 6); told != "wanted" {
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

// Nor does a message that overtakes the answer to the command that placed the request.
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

// What a silent server granted does not speak for the owner for longer than it lasts: then it
// may have granted the lock to somebody else.
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
		if renewals > 3 { // another may have owned the servers 0 to 2
			want = protocol.NotOurs
		}
		if op := round(notOurs); op.Renewed != want {
			t.Errorf("after %d renewals: %v", renewals, op.Renewed)
		}
	}
}

// Servers that lost their data, and a silent one, cost the owner nothing: others would have
// needed all servers without data. If all have lost it, the lease is over.
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
	s := newStand(t, 5, time.Second) // all that granted, and not all
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

// displacedOn has the servers 0 and 1 of three restart and let somebody else in; they are in
// quarantine for left. It returns the ids under which the owner waits there.
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

// Where an earlier question has no answer yet, a server in quarantine goes on protecting the
// owner.
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

// A server that let its old owner in again after its quarantine, when others may have been in,
// speaks for nothing: not in a renewal that began before, in a release or in a cancel.
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
				s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true}})
			}
			if !op.Decided() || op.Cancelled.Owned == late {
				t.Errorf("late %v: decided %v, %+v", late, op.Decided(), op.Cancelled)
			}
		})
	}
}

// A lease that a renewal finds lost while an acquire is asked about it leaves nothing, although
// the state machine cancels only what an acquire may have given it.
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
	for left := asks; len(left) > 0; left = left[1:] {
		unsent := &protocol.Failure{Err: errAway, Kind: protocol.NeverSent}
		left = append(left, s.answer(left[0], Result{Fail: unsent, Cancelled: protocol.Cancelled{Fail: unsent}})...)
		if !check.Decided() {
			s.expire(check)
			left = append(left, s.fx.Sends...)
		}
	}
	if !s.lock.Idle() {
		t.Errorf("it keeps %s", s.lock)
	}
}

// Locking goes on while a server is slow, and what is made and ended meanwhile does not pile up
// before it.
func TestNothingPilesUpBeforeASlowServer(t *testing.T) {
	for _, granting := range []bool{true, false} { // or without a majority
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

// Answers to a downgrade that come when it was decided without them say nothing to the state
// machine, which would take the new request for one that it does not know and cancel it, while
// its lease goes on under the old one: it sends the downgrade again.
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

// A renewal that was decided without a server's answer asks nothing when it comes. The next one
// does.
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

// A downgrade whose token a majority does not keep in time is neither refused nor given back: it
// is what is left of the lease. It is repeated.
func TestADowngradeWhoseTokenIsNotKeptYetIsRepeated(t *testing.T) {
	for _, silentThird := range []bool{true, false} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, false)
		op, sends := s.downgrade()
		var adopts []*Send
		for i, token := range []uint64{9_000_000, 1_000_000} {
			adopts = append(adopts, s.answer(sends[i], granted(token))...)
		}
		if len(adopts) != 1 || adopts[0].Kind != Adopt {
			t.Fatalf("sent %+v", adopts)
		}
		if !silentThird && len(sends) > 2 {
			s.answer(sends[2], Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}})
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

// While a downgrade has no answer from a majority, a renewal finds neither request owning one. The
// lease goes on all the same, so nothing is given back. If nobody repeats the downgrade, both
// requests are forgotten.
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
				t.Errorf("%s is cancelled", send.Cancel.ID)
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

// Two renewals under way, as when the first one waits for a slow server, find the same: that
// servers have restarted. The answer to what the first one asks then is the second one's, too.
func TestTwoRenewalsThatFindARestartKeepTheLease(t *testing.T) {
	for _, before := range []bool{true, false} { // the second one begins before the first finds it
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

// What a server said about a request before it heard of its end is no reason to cancel it
// there. If an acquire of it may still arrive, or later, it is: the request may own.
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
			for _, kind := range []string{"wanted", "granted", "ends"} {
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

// A release whose answers come after its decision was ours all the same, although the cancel
// that follows finds that others have had the lock since.
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
				s.answer(cancel, Result{Cancelled: protocol.Cancelled{Token: 99}})
			}
		}
		if !op.Decided() || op.Cancelled.Owned != done {
			t.Errorf("released %v: decided %v, said that it was ours: %v", done, op.Decided(), op.Cancelled.Owned)
		}
	}
}

// A majority has granted it, and the others refused because the last owner's release was still on
// its way to them: they are asked again, and wait for that.
func TestServersThatRefusedAreAskedAgainWhenAMajorityHasGranted(t *testing.T) {
	refused := Result{Answer: protocol.Answer{Outcome: protocol.Refused, Token: 1, Clock: 1, Blocker: "another"}}
	for _, late := range []bool{false, true} { // the refusals come after the decision
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
			// It waits there, and is let in.
			if more := s.answer(ask, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}); len(more) != 0 {
				t.Errorf("late %v: asked again", late)
			}
			s.receive(ask.Server, ask.Cmd.ID, 2)
		}
		if n := s.lock.behind(s.id, s.now); n != 5 {
			t.Errorf("late %v: %d servers stand behind it", late, n)
		}
		// So two of those that granted first may die.
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

// Nobody asks for a request again that is over, or that a majority did not grant.
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

// A server that has lost its data does not know that the lock was ours. It was until then, and
// others that it has let in since count for nobody, unless all servers have lost theirs.
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

// A cancel follows a release without answer. It proves the release where the server says that it
// was ours until then, or keeps the token that it gave us as its last one: nobody has had the lock
// there since. Servers that have restarted without their data prove it as they do a release.
func TestWhatACancelFindsProvesTheReleaseBeforeIt(t *testing.T) {
	owned := Result{Cancelled: protocol.Cancelled{Owned: true}}
	forgotten := Result{Young: 10 * time.Second}
	token := func(n uint64) Result { return Result{Cancelled: protocol.Cancelled{Token: n}} }
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
		if !op.Decided() || op.Cancelled.Owned != c.want {
			t.Errorf("%s: decided %v, %+v", name, op.Decided(), op.Cancelled)
		}
	}
}

// An acquire of the lease had no answer, so it may have made us owner anew, after another one. A
// release says whether it can have been so: where the answer is missing, the lock's last token tells.
func TestAReleaseProvesThatNobodyElseHadALeaseInDoubt(t *testing.T) {
	kept := Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: 1, Clock: 1, Kept: true}}
	silence := Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}}
	still := Result{Cancelled: protocol.Cancelled{Owned: true, Token: 1}}
	another := Result{Cancelled: protocol.Cancelled{Owned: true, Token: 9}}
	untold := Result{Cancelled: protocol.Cancelled{Owned: true}}
	released := Result{Cancelled: protocol.Cancelled{Token: 1}}
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
			for _, verb := range []protocol.Verb{protocol.Release, protocol.Yield} {
				s := newStand(t, 3, time.Second)
				s.own(true, true, true)
				s.now = s.now.Add(time.Millisecond)
				s.fx = Effects{}
				asks := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Held: true, At: s.now}, s.now, &s.fx)
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
				next := s.next()
				s.fx = Effects{}
				op := s.lock.Do(&protocol.Command{Verb: verb, ID: s.id, Next: next, At: s.now}, s.now, &s.fx)
				sends = s.fx.Sends
				for _, i := range order {
					res := c.ended[i]
					if verb == protocol.Yield && res == done {
						res = Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}
					}
					for _, send := range s.answer(sends[i], res) { // of a yield: the next request
						s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}})
					}
				}
				want := protocol.Done
				if verb == protocol.Yield {
					want = protocol.Enqueued
				}
				if !op.Decided() || op.Answer.Outcome != want || op.Answer.Proved != c.proved {
					t.Errorf("%s, in order %v, verb %v: decided %v, %+v %v", name, order, verb, op.Decided(), op.Answer, op.Err)
				}
			}
		}
	}
}

// A lease about which there is no doubt is released, which costs its servers less than a cancel.
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

// Servers that have restarted prove a yield as they do a release.
func TestServersThatRestartedProveAYield(t *testing.T) {
	for _, all := range []bool{false, true} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		next := s.next()
		s.fx = Effects{}
		op := s.lock.Do(&protocol.Command{Verb: protocol.Yield, ID: s.id, Next: next, At: s.now}, s.now, &s.fx)
		sends := s.fx.Sends
		for len(sends) > 0 {
			send := sends[0]
			res := Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 1, Clock: 1}}
			if send.Cmd.Verb == protocol.Yield && (send.Server < 2 || all) {
				res = Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}, Young: 10 * time.Second}
			}
			sends = append(sends[1:], s.answer(send, res)...)
		}
		if ours := op.Answer.Outcome == protocol.Enqueued; !op.Decided() || ours == all {
			t.Errorf("all %v: a yield: decided %v, %v %v", all, op.Decided(), op.Answer.Outcome, op.Err)
		}
	}
}

// While an earlier request of the same client leaves the servers, who blocks the next one is the
// lock's owner, and not that.
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

// A connection that was closed here, as by closing the Redis client, says nothing about its server.
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
		m := &member{owner: owner}
		m.sending()
		m.heardOf(redisserver.Classify(c.err))
		if m.isAway() != c.away {
			t.Errorf("%v: away %v", c.err, m.isAway())
		}
	}
}

// The server of a connection that broke, or for which the pool had none, is asked at once, and gets
// commands meanwhile. It is away if it does not answer.
func TestAServerIsNotAwayBecauseOneOfItsConnectionsBroke(t *testing.T) {
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe,
		&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
		&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)},
		&net.OpError{Op: "read", Err: os.NewSyscallError("wsarecv", syscall.Errno(10054))},  // Windows: reset
		&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10053))}, // and aborted
		redis.ErrPoolTimeout} {
		var started []func()
		nobody := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
		defer func() { _ = nobody.Close() }()
		m := &member{owner: &Server{base: t.Context(), start: func(f func()) bool { started = append(started, f); return true }},
			srv: redisserver.NewMember(nobody, "", time.Minute)}
		fails := func(goroutines int) {
			t.Helper()
			m.sending()
			m.heardOf(redisserver.Classify(err))
			if m.isAway() || len(started) != goroutines {
				t.Errorf("%v: away %v, and %d goroutines to ask it", err, m.isAway(), len(started))
			}
		}
		fails(1)
		fails(1) // the first one asks
		m.checking = false
		fails(1) // it has just answered
		m.checked = m.checked.Add(-time.Minute)
		fails(2)
		started[1]()
		if !m.isAway() || m.checking || len(started) != 3 {
			t.Errorf("%v, and no answer: away %v, checking %v, %d goroutines", err, m.isAway(), m.checking, len(started))
		}
	}
}

// panicking is a hook whose user made a mistake.
type panicking struct{}

func (panicking) DialHook(next redis.DialHook) redis.DialHook { return next }
func (panicking) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic("the user's") }
}
func (panicking) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { panic("the user's") }
}

// A command that panics is not waited for, says nothing about its server, and a cancel is tried again.
func TestACommandOfAQuorumThatPanicsIsOver(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	rdb.AddHook(panicking{})
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	m := &member{owner: &Server{base: t.Context(), start: func(func()) bool { return true }}, srv: redisserver.NewMember(rdb, "", time.Minute)}
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

// A yield is no proof where others may have been in, as a release is none.
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

// A server that lost the grant, and has not answered what it was asked then, does not count as
// silent when it goes away.
func TestAServerThatLostAGrantDoesNotCountAsAway(t *testing.T) {
	s := newStand(t, 5, time.Second)
	away := false
	s.lock.cfg.Away = func(i int) bool { return i == 0 && away }
	s.own(true, true, true, true, true)
	op := s.renew()
	for _, send := range s.fx.Sends {
		if send.Server == 0 {
			s.answer(send, notOurs) // what follows has no answer yet
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

// What a renewal finds that arrived before a later one proved ownership says nothing.
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

// Who cannot own must not keep out those that can.
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

// A set of servers of which all are in quarantine is new, and grants if all do.
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

// A message about a grant before the request was placed is of an earlier one.
func TestAMessageWithAnOldTokenGrantsNothing(t *testing.T) {
	s := newStand(t, 3, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	s.answer(sends[0], granted(5))
	for _, send := range sends[1:] {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 5, Clock: 5}})
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued {
		t.Fatalf("decided %v, %+v %v", op.Decided(), op.Answer, op.Err)
	}
	if told := s.receive(1, sends[1].Cmd.ID, 5); told != "" {
		t.Errorf("an old token: told %q", told)
	}
	if told := s.receive(1, sends[1].Cmd.ID, 6); told != "granted" {
		t.Errorf("a new one: told %q", told)
	}
}

// An eviction ends the lease when no majority is left, and one of an earlier grant ends nothing.
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
		s.lock.Receive(server, &protocol.Message{Kind: "revoked", ID: sends[server].Cmd.ID, Token: token}, s.now, &s.fx)
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

// evict has a server say that it evicted the request, with the lock's last token there. It reports
// whether that ended the lease.
func (s *stand) evict(server int, id string, token uint64) bool {
	s.fx = Effects{}
	s.lock.Receive(server, &protocol.Message{Kind: "revoked", ID: id, Token: token}, s.now, &s.fx)
	return len(s.fx.Messages) > 0
}

// revoked reports whether the last event ended the lease.
func (s *stand) revoked() bool {
	return slices.ContainsFunc(s.fx.Messages, func(m protocol.Message) bool { return m.Kind == "revoked" })
}

// check asks the servers about a lease that is held.
func (s *stand) check() (*Op, []*Send) {
	s.now = s.now.Add(100 * time.Millisecond)
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Wait: true, Held: true, At: s.now}, s.now, &s.fx)
	return op, s.fx.Sends
}

func keptWith(token uint64) Result {
	res := granted(token)
	res.Answer.Kept = true
	return res
}

// A check that is under way when an operator evicts the owner has the servers grant the lease again:
// others may have owned it in between.
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
		if confirmed { // by all, so that what happened to the first does not matter any more
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

// The answer that grants anew is faster than the message of the eviction.
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

// Two messages of an eviction have arrived, and the third is lost.
func TestACheckDoesNotProveALeaseThatWasEvictedMeanwhile(t *testing.T) {
	for _, early := range []bool{false, true} { // the messages, before their servers' answers
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

// The answers that say so come after a majority has said that it kept the lease.
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

// The message of an eviction may be faster than the answer that tells of the grant.
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
		s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true, Token: 1}})
	}
	if !op.Decided() || !op.Cancelled.Owned {
		t.Errorf("four of five had it until it was cancelled: decided %v, %+v", op.Decided(), op.Cancelled)
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

// The slowest answer to a renewal comes after the next one has been decided. What a majority said then stays known.
func TestALateAnswerToARenewalTakesNothingBack(t *testing.T) {
	s := newStand(t, 5, time.Second)
	op := s.acquire()
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
	op = s.renew()
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

// A check that finds servers to have granted it anew says that others may have been inside.
func TestACheckThatIsGrantedAnewSaysSo(t *testing.T) {
	for _, lost := range []int{1, 2} {
		s := newStand(t, 3, time.Second)
		s.own(true, true, true)
		s.now = s.now.Add(100 * time.Millisecond)
		s.fx = Effects{}
		op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Wait: true, Held: true, At: s.now}, s.now, &s.fx)
		for i, send := range s.fx.Sends {
			res := granted(1)
			if res.Answer.Kept = i >= lost; i < lost {
				res = granted(9)
			}
			s.answer(send, res)
		}
		want := protocol.Granted
		if lost > 1 { // it waits again
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

// What may have been missed while a server's inbox was not heard are messages of that server: it
// is asked, and it alone.
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
	for i := range 3 { // all have granted it meanwhile, and were not heard
		asks := s.rejoined(i)
		if len(asks) != 1 || asks[0].Server != i || asks[0].Cmd.Verb != protocol.Acquire || !asks[0].Cmd.Wait {
			t.Fatalf("sent %+v", asks)
		}
		if more := s.answer(asks[0], granted(2)); len(more) != 0 {
			t.Errorf("sent %+v", more[0])
		}
		if told := len(s.fx.Messages) == 1 && s.fx.Messages[0].Kind == "granted" && s.fx.Messages[0].ID == s.id; told != (i == 2) {
			t.Errorf("after %d grants: %+v", i+1, s.fx.Messages)
		}
	}
	if asks := s.rejoined(3); len(asks) != 0 {
		t.Errorf("asked for what is held: %+v", asks[0])
	}
}

// An answer that was on its way when the inbox was confirmed may be older than a message that was
// missed.
func TestAnAnswerFromBeforeAnInboxWasConfirmedIsAskedForAgain(t *testing.T) {
	s := newStand(t, 5, time.Second)
	op := s.acquire()
	sends := s.fx.Sends
	for range 2 { // also if it is confirmed twice meanwhile
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
		t.Errorf("asked for ever: %+v", more[0])
	}
}

// The state machine's next command asks all servers. One that is being asked because its inbox was
// confirmed is asked for the command then: it must not look as if it did not answer.
func TestACommandWaitsForAServerThatIsAskedBecauseOfItsInbox(t *testing.T) {
	for _, ends := range []bool{false, true} { // the request is cancelled meanwhile
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
					t.Errorf("asked for what is cancelled: %+v", send)
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

// Who does not wait, or is about to leave, is not queued because an inbox is confirmed.
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
	for _, send := range s.fx.Sends { // nobody hears of it
		s.answer(send, Result{Cancelled: protocol.Cancelled{Fail: silent}})
	}
	for i := range 3 {
		if asks := s.rejoined(i); len(asks) != 0 {
			t.Errorf("of a cancel without answer: sent %+v", asks[0])
		}
	}
}

// The lease that made way is told to the state machine also if the message of the last server that
// was needed is not enough, because the token has to be written back first.
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
		m := protocol.Message{Kind: "granted", ID: sends[i].Cmd.ID, Token: token, Clock: token, Link: &protocol.Span{Flags: 1}}
		s.lock.Receive(i, &m, s.now, &s.fx)
		adopts = append(adopts, s.fx.Sends...)
	}
	if len(adopts) != 1 || len(s.fx.Messages) != 0 {
		t.Fatalf("sent %+v, told %+v", adopts, s.fx.Messages)
	}
	s.answer(adopts[0], Result{Answer: protocol.Answer{Outcome: protocol.Done}})
	if len(s.fx.Messages) != 1 || s.fx.Messages[0].Kind != "granted" || s.fx.Messages[0].Link == nil {
		t.Errorf("told %+v", s.fx.Messages)
	}
}

// doubted is a stand whose lease was asked for once more, without an answer.
func doubted(t *testing.T) *stand {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(time.Millisecond)
	s.fx = Effects{}
	asks := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Held: true, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}})
	}
	if asks.Err == nil {
		t.Fatal("it was answered")
	}
	return s
}

// Where the cancel has proved it, it says so.
func TestACancelAfterAReleaseInDoubtSaysWhatItProves(t *testing.T) {
	s := doubted(t)
	s.fx = Effects{}
	s.lock.Do(&protocol.Command{Verb: protocol.Release, ID: s.id, At: s.now}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}})
	}
	s.fx = Effects{}
	cancel := s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true, Token: 1}})
	}
	if !cancel.Decided() || !cancel.Cancelled.Proved {
		t.Errorf("cancelled: %+v", cancel.Cancelled)
	}
}

// Two of three servers had another owner since. The release hears it of one, and the cancel that follows
// must not take for a proof that the lease owned there again.
func TestACancelAfterAReleaseInDoubtProvesNothingWhereOthersOwned(t *testing.T) {
	silence := Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}}
	another := Result{Cancelled: protocol.Cancelled{Owned: true, Token: 9}}
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
				s.answer(send, Result{Cancelled: protocol.Cancelled{Token: 9}})
			} else {
				s.answer(send, another)
			}
		}
		if cancel.Decided() && cancel.Cancelled.Owned {
			t.Errorf("late %v: proved, though others had owned two of three servers", late)
		}
	}
}

// A server did not own the lease, was asked for it without an answer, and grants it later.
func TestAServerThatLostALeaseAndWasSilentThenProvesNothing(t *testing.T) {
	silence := Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}}
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
			s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true, Token: map[int]uint64{0: 9, 2: 1}[send.Server]}})
		}
	}
	if release.Answer.Proved {
		t.Error("proved with a server that had lost it")
	}
}

// A server did not own the lease and grants it anew, another is silent, the third renews it. That is
// enough for the lease to go on, as the silent one may have kept it. It is no proof that it has.
func TestARenewalThatASilentServerCarriesProvesNothing(t *testing.T) {
	silence := Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}}
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
			s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true, Token: 1}})
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

// A majority of servers does not have what it had granted. That one of them grants it anew, and others are
// to follow, must not make it a lease again: no release could tell that others had it in between.
func TestAnOwnerThatAsksAndIsRefusedHasLostItsLease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	s.now = s.now.Add(time.Millisecond)
	s.fx = Effects{}
	op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Held: true, At: s.now}, s.now, &s.fx)
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

// Two of three servers did not own the lease and granted it anew, at different times, and the third is
// silent. The lease may go on, but nothing that these two say proves that no other has had it.
func TestServersThatGrantedALeaseAnewDoNotProveIt(t *testing.T) {
	silence := Result{Fail: silent, Cancelled: protocol.Cancelled{Fail: silent}}
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
			op := s.lock.Do(&protocol.Command{Verb: protocol.Acquire, ID: s.id, TTL: s.ttl, Held: true, At: s.now}, s.now, &s.fx)
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
					s.answer(send, Result{Cancelled: protocol.Cancelled{Owned: true, Token: 9}})
				}
			}
			if cancel.Cancelled.Owned {
				t.Error("a cancel proves it")
			}
		})
	}
}
