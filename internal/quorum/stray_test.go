package quorum

import (
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// cancelsOf plays a server that answers each cancel of a stray, and returns when they come.
func cancelsOf(stray Stray, now time.Time) (at []time.Duration) {
	var all lockstate.CancelSchedule
	stray.ScheduleIn(&all, nil, now)
	for next := all.Next(); !next.IsZero(); next = all.Next() {
		for _, cancel := range all.Take(next) {
			at = append(at, next.Sub(now))
			all.Answered(cancel, protocol.Canceled{}, next)
		}
	}
	return at
}

// An acquire that has had no answer can arrive after the cancel that the server has answered, and would
// leave a request there that nobody needs, or an owner.
func TestACancelIsRepeatedOnAServerThatAnAcquireMayStillReach(t *testing.T) {
	const ttl = 10 * time.Second
	for name, ends := range map[string]func(s *stand, unanswered *Send) []Stray{
		"it gives up": func(s *stand, _ *Send) []Stray {
			s.fx = Effects{}
			s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			var strays []Stray
			for _, send := range s.fx.Sends {
				s.answer(send, Result{})
				strays = append(strays, s.fx.Strays...)
			}
			return strays
		},
		"it asks there under a new id": func(s *stand, _ *Send) []Stray {
			p := &s.lock.reqs[s.id].parts[2]
			p.ended = true // as after a refusal
			s.acquire()
			return s.fx.Strays
		},
		"its failure is known only when it asks there under a new id": func(s *stand, unanswered *Send) []Stray {
			p := &s.lock.reqs[s.id].parts[2]
			p.ended, p.asking = true, false
			s.acquire()
			s.answer(unanswered, Result{Fail: silent})
			return s.fx.Strays
		},
		"its failure is known only afterwards": func(s *stand, unanswered *Send) []Stray {
			s.fx = Effects{}
			s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			for _, send := range s.fx.Sends {
				s.answer(send, Result{})
			}
			s.answer(unanswered, Result{Fail: silent})
			return s.fx.Strays
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, 3, ttl)
			op := s.acquire()
			sends := s.fx.Sends
			s.answer(sends[0], behindOther(9*time.Second, 0))
			s.answer(sends[1], behindOther(9*time.Second, 0))
			if strings.HasPrefix(name, "its failure is known only") {
				s.expire(op)
			} else {
				s.answer(sends[2], Result{Fail: silent})
			}
			strays := ends(s, sends[2])
			var at []time.Duration
			for _, stray := range strays {
				if stray.Server == 2 && stray.ID == sends[2].Cmd.ID {
					at = append(at, cancelsOf(stray, s.now)...)
				}
			}
			if n := len(at); n < 2 || at[n-1] < ttl {
				t.Errorf("strays %+v: the server is sent cancels after %v", strays, at)
			}
		})
	}
}

func TestAStrayThatNoCommandCanMakeAgainIsCanceledOnce(t *testing.T) {
	if at := cancelsOf(Stray{ID: "x", TTL: time.Minute}, time.Now()); len(at) != 1 || at[0] != 0 {
		t.Errorf("canceled after %v", at)
	}
}

// The command that ends the request may carry a cool-down, which a cancel of the stray does not have.
func TestTheCancelOfAStrayComesAfterTheCommandThatEndsIt(t *testing.T) {
	if at := cancelsOf(Stray{ID: "x", TTL: time.Minute, Late: true, Ends: true}, time.Now()); len(at) < 2 || at[0] < time.Second {
		t.Errorf("canceled after %v", at)
	}
}

// Server 0 granted by a message what it had been asked for before. The first copy of that acquire may still
// arrive after the grant was given back, and nobody knows its id by then.
func TestALateAcquireOfWhatWasGivenBackIsCanceled(t *testing.T) {
	s := newStand(t, 3, time.Minute)
	s.acquire()
	sends := s.fx.Sends
	id := sends[0].Cmd.ID
	s.answer(sends[0], Result{Fail: silent})
	for _, send := range sends[1:] {
		s.answer(send, enqueues)
	}
	s.fx = Effects{}
	s.lock.Receive(0, &protocol.Message{Kind: protocol.MessageGranted, ID: id, Token: 6, Clock: 6, More: true}, s.now, &s.fx)
	s.now = s.now.Add(minKeep)
	s.fx = Effects{}
	s.lock.Tick(s.now, &s.fx)
	if len(s.fx.Sends) != 1 || s.fx.Sends[0].Cmd.Verb != protocol.Yield || s.fx.Sends[0].Cmd.ID != id {
		t.Fatalf("gives back %+v", s.fx.Sends)
	}
	if len(s.fx.Strays) != 1 || s.fx.Strays[0].ID != id || !s.fx.Strays[0].Late || !s.fx.Strays[0].Ends {
		t.Errorf("strays %+v, want %s, which may arrive late", s.fx.Strays, id)
	}
}

// A majority has decided, and the request is forgotten, before it is known that a server may not have heard.
func TestWhatAServerMayNotHaveHeardIsCanceledAlsoAfterTheRequestIsForgotten(t *testing.T) {
	for how, ends := range map[string]func(s *stand) []*Send{
		"release":   func(s *stand) []*Send { _, sends := s.leave(protocol.Release); return sends },
		"yield":     func(s *stand) []*Send { _, sends := s.leave(protocol.Yield); return sends },
		"downgrade": func(s *stand) []*Send { _, sends := s.downgrade(); return sends },
		"cancel": func(s *stand) []*Send {
			s.fx = Effects{}
			s.lock.CancelRequest(&protocol.CancelRequest{ID: s.id}, s.now, &s.fx)
			return s.fx.Sends
		},
	} {
		t.Run(how, func(t *testing.T) {
			s := newStand(t, 3, time.Second)
			s.own(true, true, true)
			sends := ends(s)
			for _, send := range sends[:2] {
				answer := Result{Canceled: protocol.Canceled{Owned: true, Token: 1}}
				switch send.Cmd.Verb {
				case protocol.Release, protocol.Yield:
					answer = wasOurs[send.Cmd.Verb]
				case protocol.Downgrade:
					answer = granted(2)
				}
				s.answer(send, answer)
			}
			s.now = s.now.Add(2 * time.Minute)
			s.fx = Effects{}
			s.lock.Tick(s.now, &s.fx)
			s.answer(sends[2], Result{Fail: silent, Canceled: protocol.Canceled{Fail: silent}})
			for _, stray := range s.fx.Strays {
				if stray.Server == 2 && stray.ID == sends[2].Cmd.ID {
					return
				}
			}
			t.Errorf("strays %+v, not %s", s.fx.Strays, sends[2].Cmd.ID)
		})
	}
}

// It has a later place by then, and the cancel of the old one has no answer.
func TestAPlaceThatWasLeftForALaterOneIsCanceledUntilItIsGone(t *testing.T) {
	s := newStand(t, 3, time.Minute)
	sends, wanted := s.aMinorityGrants()
	old := sends[2].Cmd.ID
	for range patientGiveBacks {
		s.now = s.now.Add(maxKeep)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		for sends = s.fx.Sends; len(sends) > 0; sends = sends[1:] {
			switch send := sends[0]; {
			case send.Kind == Cancel && send.Server == 2:
				s.answer(send, Result{Canceled: protocol.Canceled{Fail: silent}})
				if len(s.fx.Strays) != 1 || s.fx.Strays[0].Server != 2 || s.fx.Strays[0].ID != old || s.fx.Strays[0].Keys == nil || s.fx.Strays[0].TTL != time.Minute {
					t.Errorf("strays %+v, want %s", s.fx.Strays, old)
				}
				return
			case send.Cmd.Verb == protocol.Yield:
				wanted.Answer.Token++
				s.answer(send, wanted)
			case send.Kind == Do:
				sends = append(sends, s.answer(send, enqueues)...)
			}
		}
	}
	t.Fatal("it never left its place")
}

// Where a server lets in only some of those who may enter, a cancel of any id has it let in more. Whoever waits
// there asks again instead.
func TestAServerThatCouldNotLetInAllGoesOn(t *testing.T) {
	var unfinished Result
	for how, ends := range map[string]func(s *stand) []*Send{
		"acquire": func(s *stand) []*Send { s.acquire(); unfinished = granted(1); return s.fx.Sends },
		"release": func(s *stand) []*Send {
			s.own(true, true, true)
			_, sends := s.leave(protocol.Release)
			unfinished = done
			return sends
		},
	} {
		s := newStand(t, 3, time.Minute)
		send := ends(s)[1]
		unfinished.Answer.Unfinished = true
		s.answer(send, unfinished)
		if len(s.fx.Strays) != 1 {
			t.Fatalf("%s: strays %+v", how, s.fx.Strays)
		}
		stray := s.fx.Strays[0]
		if _, err := protocol.ParseID(stray.ID); err != nil || stray.Server != 1 || stray.Keys == nil || stray.ID == send.Cmd.ID || stray.Late {
			t.Errorf("%s: cancels %+v, after %s", how, stray, send.Cmd.ID)
		}
	}
	for _, verb := range []protocol.Verb{protocol.Acquire, protocol.Yield} {
		s := newStand(t, 3, time.Minute)
		var op *Op
		if verb == protocol.Acquire {
			op = s.acquire()
		} else {
			s.own(true, true, true)
			op, _ = s.leave(verb)
		}
		for i, send := range s.fx.Sends {
			waits := wasOurs[protocol.Yield]
			waits.Answer.Unfinished, waits.Answer.Handed = i == 1, []int{1, 3, 2}[i]
			s.answer(send, waits)
			if len(s.fx.Strays) > 0 {
				t.Errorf("cancels %+v", s.fx.Strays)
			}
		}
		if !op.Decided() || !op.Answer.Unfinished || op.Answer.Handed != 3 {
			t.Errorf("verb %v: decided %v, %+v", verb, op.Decided(), op.Answer)
		}
	}
}
