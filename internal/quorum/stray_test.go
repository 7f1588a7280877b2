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
