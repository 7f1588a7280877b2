package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
)

// What a server said counts only as long as it can be true: not once the server has stopped answering, and
// not once the machine has slept longer than the lease lasts.

// behindOther is the answer that another client's writer, which has left to live, is ahead.
func behindOther(left time.Duration, told uint64) Result {
	other := protocol.NewRequest("BBBBBBBBBBBBBBBB:test", protocol.Exclusive, 10*time.Second, false, protocol.Unproved, protocol.Origin{}).ID
	return Result{Answer: protocol.Answer{Outcome: protocol.Enqueued, Token: 5, Clock: 10, Left: left, Blocker: other, Told: told}}
}

func TestHowLongToWaitDoesNotDependOnWhatASilentServerSaidBefore(t *testing.T) {
	for name, silence := range map[string]func(s *stand, away map[int]bool) Result{
		"away":         func(_ *stand, away map[int]bool) Result { away[2] = true; return Result{} },
		"no answer":    func(*stand, map[int]bool) Result { return Result{Fail: silent} },
		"not finished": func(*stand, map[int]bool) Result { return Result{} },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, 3, 10*time.Second)
			away := map[int]bool{}
			s.lock.cfg.Away = func(i int) bool { return away[i] }
			s.acquire()
			for _, send := range s.fx.Sends {
				s.answer(send, behindOther(9*time.Second, 1000))
			}
			said := silence(s, away)
			s.now = s.now.Add(9500 * time.Millisecond) // so the time that the third server gave is over
			op := s.acquire()
			for _, send := range s.fx.Sends {
				switch send.Server {
				case 0:
					s.answer(send, granted(7)) // the other does not reach this server anymore
				case 1:
					s.answer(send, behindOther(8*time.Second, 0))
				default:
					if said.Fail != nil {
						s.answer(send, said)
					}
				}
			}
			s.expire(op)
			if a := op.Answer; !op.Decided() || op.Err != nil || a.Outcome != protocol.Enqueued || a.Left != 8*time.Second || a.Told != 0 {
				t.Errorf("answered %+v, %v", a, op.Err)
			}
		})
	}
}

func TestTheOwnersTTLRunsWhileTheAnswersAreOnTheirWay(t *testing.T) {
	s := newStand(t, 3, 10*time.Second)
	op := s.acquire()
	for _, send := range s.fx.Sends {
		s.now = s.now.Add(100 * time.Millisecond)
		s.answer(send, behindOther(8*time.Second, 0))
	}
	if a := op.Answer; !op.Decided() || op.Err != nil || a.Left != 8*time.Second { // from when they were asked
		t.Errorf("answered %+v, %v", a, op.Err)
	}
}

func TestAYieldSaysWhichReadersWereNotNotified(t *testing.T) {
	s := newStand(t, 3, 10*time.Second)
	s.own(true, true, true)
	op, sends := s.leave(protocol.Yield)
	for _, send := range sends {
		s.answer(send, behindOther(8*time.Second, 1000))
	}
	if !op.Decided() || op.Answer.Outcome != protocol.Enqueued || op.Answer.Told != 1000 {
		t.Errorf("answered %+v, %v", op.Answer, op.Err)
	}
}

// The lease ended while the machine slept, and two servers have restarted without their data since.
func TestARestartAfterTheLeaseHasEndedInASleepProvesNothing(t *testing.T) {
	gone := Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}
	youngGone := young(protocol.NotOurs, 0, time.Minute)
	for name, passes := range map[string]func(now time.Time, d time.Duration) time.Time{
		"awake":  time.Time.Add,
		"asleep": func(now time.Time, d time.Duration) time.Time { return clocktest.Asleep(t, now, d) },
	} {
		for _, within := range []bool{true, false} {
			s := newStand(t, 3, 10*time.Second)
			s.own(true, true, true)
			want := protocol.Done
			if s.now = passes(s.now, 5*time.Second); !within {
				s.now = passes(s.now, 10*time.Second)
				want = protocol.NotOurs
			}
			op := s.release()
			for i, send := range s.fx.Sends {
				if i == 2 {
					s.answer(send, gone)
				} else {
					s.answer(send, youngGone)
				}
			}
			if !op.Decided() || op.Answer.Outcome != want {
				t.Errorf("%s, within the lease %v: decided %v, %+v, %v", name, within, op.Decided(), op.Answer, op.Err)
			}
		}
	}
}

// A server lost its data while we had the lease, and its quarantine has ended while the machine slept.
func TestAQuarantineEndsWhileTheMachineSleeps(t *testing.T) {
	p := part{history: history{quarantineEnd: time.Now().Add(time.Minute)}}
	for _, c := range []struct {
		name string
		now  time.Time
		in   bool
	}{
		{"at once", time.Now(), true},
		{"a minute later", time.Now().Add(time.Minute + time.Second), false},
		{"after a sleep", clocktest.Asleep(t, time.Now(), time.Minute+time.Second), false},
		{"after a minute in which the clock was set back", clocktest.Asleep(t, time.Now().Add(time.Minute+time.Second), -time.Hour), false},
	} {
		if p.inQuarantine(c.now) != c.in || p.quarantineOver(c.now) == c.in || p.stands(c.now) != c.in {
			t.Errorf("%s: in quarantine %v, over %v, stands %v", c.name, p.inQuarantine(c.now), p.quarantineOver(c.now), p.stands(c.now))
		}
	}
	if none := new(part); none.inQuarantine(time.Now()) || none.quarantineOver(time.Now()) {
		t.Error("a server that has not restarted is in quarantine, or was")
	}
}
