package quorum

import (
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A process stands still while it keeps the lock idle. When it continues, the TTL is over, and a caller
// comes: the state machine asks for the lock again, under the id that it had. What is still said of the old
// grant says nothing of the new one.

// overdue returns a stand whose lease is over on servers 0 and 1, which had granted it; server 2 was
// silent. A renewal was sent before that and has no answer yet.
func overdue(t *testing.T) (s *stand, renewal *Op, renewals []*Send) {
	s = newStand(t, 3, time.Second)
	s.own(true, true, false)
	renewal = s.renew()
	renewals = s.fx.Sends
	s.now = s.now.Add(2 * s.ttl)
	return s, renewal, renewals
}

// grantsBy answers sends, and those that follow: servers 0 and 1 grant what is asked for, as zero and one,
// and carry out cancels; server 2 is silent. It returns the ids that were canceled.
func (s *stand) grantsBy(sends []*Send, zero, one Result) (canceled []string) {
	for len(sends) > 0 {
		send, res := sends[0], quiet
		if send.Server < 2 {
			res = []Result{zero, one}[send.Server]
		}
		if send.Kind == Cancel {
			canceled = append(canceled, send.Cmd.ID)
		}
		sends = append(sends[1:], s.answer(send, res)...)
	}
	return canceled
}

func TestALateRenewalDoesNotEndTheGrantThatFollowsItsOwn(t *testing.T) {
	for _, when := range []string{"before the answers", "between them", "after them"} {
		s, renewal, _ := overdue(t)
		old := s.lock.reqs[s.id].parts[0].id
		op := s.acquire()
		sends := s.fx.Sends
		late := func() {
			s.expire(renewal)
			if renewal.Renewed == protocol.Granted {
				t.Errorf("%s: renewed after the TTL", when)
			}
			sends = append(sends, s.fx.Sends...)
		}
		if when == "before the answers" {
			late()
		}
		if when == "between them" {
			sends = append(sends[1:], s.answer(sends[0], granted(99))...)
			late()
		}
		canceled := s.grantsBy(sends, granted(99), granted(99))
		if when == "after them" {
			sends = nil
			late()
			canceled = append(canceled, s.grantsBy(sends, granted(99), granted(99))...)
		}
		if !op.Decided() || op.Answer.Outcome != protocol.Granted || op.Answer.Kept {
			t.Fatalf("%s: %+v %v", when, op.Answer, op.Err)
		}
		if s.lock.reqs[s.id] == nil {
			t.Errorf("%s: the request that was granted is forgotten, and %v were canceled", when, canceled)
			continue
		}
		p := &s.lock.reqs[s.id].parts[0]
		if p.state != owned || p.id == old || slices.Contains(canceled, p.id) {
			t.Errorf("%s: granted as %s (the old one was %s), canceled were %v", when, p.id, old, canceled)
		}
		s.renew()
		if !slices.ContainsFunc(s.fx.Sends, func(send *Send) bool { return send.Kind == Renew }) {
			t.Errorf("%s: the lease is not renewed", when)
		}
	}
}

// The renewal was carried out before its process stood still, and only its answers are late. Server 0 has
// restarted since, so others may count on it.
func TestALateRenewalDoesNotHaveAYoungServersGrantCount(t *testing.T) {
	s, renewal, renewals := overdue(t)
	op := s.acquire()
	sends := s.fx.Sends
	for _, send := range renewals[:2] {
		sends = append(sends, s.answer(send, renewed)...)
	}
	if !renewal.Decided() {
		s.expire(renewal)
	}
	s.grantsBy(sends, young(protocol.Granted, 99, time.Second), granted(99))
	if !op.Decided() {
		s.expire(op)
	}
	if op.Err == nil && op.Answer.Outcome == protocol.Granted {
		t.Errorf("granted by one server that counts: %+v", op.Answer)
	}
}

// An acquire without a majority may have been carried out everywhere, and others may have owned before it.
// So the next one asks under other ids: to be still the owner would say nothing.
func TestAfterAFailedAcquireOfAnOverdueLeaseTheNextHasOtherIDs(t *testing.T) {
	s, renewal, _ := overdue(t)
	s.expire(renewal)
	var last []string
	for range 2 {
		op := s.acquire()
		var ids []string
		for sends := s.fx.Sends; len(sends) > 0; {
			send := sends[0]
			if send.Kind == Do {
				ids = append(ids, send.Cmd.ID)
			}
			sends = append(sends[1:], s.answer(send, quiet)...)
		}
		s.expire(op)
		if op.Err == nil {
			t.Fatalf("decided without an answer: %+v", op.Answer)
		}
		if len(ids) == 0 || slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(last, id) }) {
			t.Errorf("asks as %v, after %v", ids, last)
		}
		last = ids
		s.now = s.now.Add(s.ttl / 10)
	}
}

// The state machine cancels a lease that a renewal has found lost, but has too much to cancel to do so at
// once.
func TestALeaseThatARenewalFoundLostIsForgotten(t *testing.T) {
	s := newStand(t, 3, 10*time.Minute)
	s.own(true, true, true)
	s.now = s.now.Add(time.Second)
	op := s.renew()
	for i, send := range s.fx.Sends {
		for _, ask := range s.answer(send, []Result{notOurs, notOurs, renewed}[i]) {
			s.answer(ask, enqueues)
		}
	}
	if !op.Decided() || op.Renewed != protocol.NotOurs {
		t.Fatalf("renewed: %v", op.Renewed)
	}
	if s.lock.Due().IsZero() {
		t.Fatal("it is never forgotten")
	}
	s.now = s.now.Add(s.ttl)
	s.fx = Effects{}
	s.lock.Tick(s.now, &s.fx)
	if s.lock.reqs[s.id] != nil {
		t.Error("it is not forgotten")
	}
}

// It did not believe a renewal.
func TestALeaseThatGoesOnIsNotForgotten(t *testing.T) {
	for how, goOn := range map[string]func(s *stand) (*Op, []*Send){
		"renewed":   func(s *stand) (*Op, []*Send) { return s.renew(), s.fx.Sends },
		"asked for": func(s *stand) (*Op, []*Send) { return s.acquire(), s.fx.Sends },
	} {
		s := newStand(t, 3, 10*time.Minute)
		s.own(true, true, true)
		s.lock.forgetLater(s.lock.reqs[s.id], s.now)
		s.now = s.now.Add(time.Second)
		op, sends := goOn(s)
		s.drain(sends, Result{Renewed: protocol.Granted, Answer: keeps.Answer})
		s.now = s.now.Add(s.ttl)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
		if op.Err != nil || s.lock.reqs[s.id] == nil {
			t.Errorf("%s: %v, and forgotten", how, op.Err)
		}
	}
}

// The state machine still doubts what it asks for again: an acquire of it had no answer. The servers have
// no doubt about the new grant, whose ids they were asked for once.
func TestALeaseThatFollowsADoubtedOneIsProvedByItsRelease(t *testing.T) {
	s := newStand(t, 3, time.Second)
	s.own(true, true, true)
	op, sends := s.check()
	s.drain(sends, quiet)
	s.expire(op)
	if !s.lock.reqs[s.id].doubted {
		t.Fatal("there is no doubt")
	}
	s.now = s.now.Add(2 * s.ttl)
	s.acquire()
	s.grantsBy(s.fx.Sends, granted(99), granted(99))
	s.tick()
	release := s.release()
	s.answerButTwo(s.fx.Sends, done)
	if !release.Decided() || release.Answer.Outcome != protocol.Done || !release.Answer.Proved {
		t.Errorf("released: %+v %v", release.Answer, release.Err)
	}
}

// Where the wall clock was set ahead, no time has passed for the servers, and the next owner there must get
// a greater token than any that was drawn in this process.
func TestAnOverdueLeaseIsGivenBackWithTheLastTokenThatWasDrawnUnderIt(t *testing.T) {
	s, _, _ := overdue(t)
	_, sends := s.do(protocol.Command{Wait: true, Last: 77})
	told := 0
	for _, send := range sends {
		if send.Kind == Cancel {
			told++
			if send.Cancel.Last != 77 {
				t.Errorf("server %d is told of token %d", send.Server, send.Cancel.Last)
			}
		}
	}
	if told != 2 {
		t.Errorf("%d servers are told", told)
	}
}
