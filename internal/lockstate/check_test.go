package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// check has c ask whether the lock is still ours.
func (h *hand) check(c *Caller) *Check {
	h.t.Helper()
	k := &Check{}
	h.step(func(now time.Time, fx *Effects) { h.l.Check(k, c, make(chan struct{}), now, fx) })
	return k
}

// asked fails unless that many renewals were sent so far, and returns the last.
func (h *hand) asked(n int) protocol.Renewal {
	h.t.Helper()
	if len(h.renewals) != n {
		h.t.Fatalf("%d renewals were sent, want %d", len(h.renewals), n)
	}
	return h.renewals[n-1]
}

func (h *hand) unanswered(ks ...*Check) {
	h.t.Helper()
	for i, k := range ks {
		if closed(k.done) {
			h.t.Fatalf("check %d is answered: %+v", i, k)
		}
	}
}

// answeredWith fails unless the checks have that answer.
func (h *hand) answeredWith(over bool, err error, ks ...*Check) {
	h.t.Helper()
	for i, k := range ks {
		if !closed(k.done) || k.Over != over || k.Err != err {
			h.t.Fatalf("check %d: answered %v, over %v, %v", i, closed(k.done), k.Over, k.Err)
		}
	}
}

func TestACheckAsksAtOnceAndTrustsFromItsSending(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(time.Second)
	k := h.check(c)
	r := h.asked(1)
	h.unanswered(k)
	h.pass(time.Second)
	h.renewed(r, protocol.Granted)
	h.answeredWith(false, nil, k)
	h.trust(time.Second + handWindow)
	h.asked(1)
}

func TestACheckThatFindsTheLockLostEndsTheGrantForAll(t *testing.T) {
	a, b, next := reader(), reader(), writer()
	h := holding(t, a)
	h.enter(b)
	h.pass(time.Second)
	k := h.check(a)
	h.renewed(h.asked(1), protocol.NotOurs)
	h.answeredWith(true, nil, k)
	h.lost(a, b)
	h.enter(next)
	h.leave(a)
	h.leave(b)
	h.sends(protocol.Acquire) // nobody is handed the dead grant
	h.out(next)
}

func TestChecksShareARenewalThatWasSentAfterThem(t *testing.T) {
	a, b := reader(), reader()
	h := holding(t, a)
	h.enter(b)
	early := h.check(a)
	first := h.asked(1)
	h.pass(time.Millisecond)
	late, later := h.check(b), h.check(a)
	h.asked(1)
	h.renewed(first, protocol.Granted)
	h.answeredWith(false, nil, early)
	h.unanswered(late, later)
	h.renewed(h.asked(2), protocol.Granted)
	h.answeredWith(false, nil, late, later)
}

func TestARenewalThatWasSentBeforeACheckDoesNotAnswerIt(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(handTTL / 3)
	before := h.asked(1)
	h.pass(time.Millisecond)
	k := h.check(c)
	own := h.asked(2)
	h.renewed(before, protocol.Granted)
	h.unanswered(k)
	h.renewed(before, protocol.Unanswered)
	h.unanswered(k)
	h.renewed(own, protocol.Granted)
	h.answeredWith(false, nil, k)
}

func TestACheckWithoutAnswerSaysSoAndTheLeaseGoesOn(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(time.Second)
	k := h.check(c)
	h.renewed(h.asked(1), protocol.Unanswered)
	h.answeredWith(false, errSilence, k)
	h.lost()
	h.trust(handWindow)
	k = h.check(c)
	h.renewed(h.asked(2), protocol.Granted) // the failure is not under way forever
	h.answeredWith(false, nil, k)
}

func TestACheckOfALeaseThatEndsIsAnswered(t *testing.T) {
	for what, end := range map[string]func(h *hand, c *Caller){
		"unlocked":     func(h *hand, c *Caller) { h.leave(c) },
		"revoked":      func(h *hand, c *Caller) { h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top) },
		"not in time":  func(h *hand, _ *Caller) { h.pass(handTTL) },
		"maximum hold": func(h *hand, _ *Caller) { h.pass(5 * time.Second) },
	} {
		t.Run(what, func(t *testing.T) {
			c := writer(func(o *Terms) {
				if what == "maximum hold" {
					o.MaxHold = 5 * time.Second
				}
			})
			h := holding(t, c)
			k := h.check(c)
			h.unanswered(k)
			end(h, c)
			h.answeredWith(true, nil, k)
			h.answeredWith(true, nil, h.check(c)) // at once
			if h.l.checking != nil {
				t.Error("still asks")
			}
		})
	}
}

// The grant gets another id meanwhile; the renewal of the old one proves nothing.
func TestACheckDuringADowngradeIsAnsweredUnderTheNewID(t *testing.T) {
	for what, trouble := range map[string]error{"answered": nil, "silence first": errSilence} {
		t.Run(what, func(t *testing.T) {
			c := writer()
			h := holding(t, c)
			before := h.check(c)
			old := h.asked(1)
			h.pass(time.Millisecond)
			h.downgrade(c)
			h.pass(time.Millisecond)
			during := h.check(c)
			h.renewed(old, protocol.NotOurs)
			h.asked(1)
			if trouble != nil {
				h.reply(protocol.Answer{}, trouble, time.Second)
				h.answeredWith(false, trouble, before)
				h.unanswered(during)
				h.pass(time.Second)
			}
			h.answer(h.grant())
			if trouble == nil {
				h.answeredWith(false, nil, before) // the downgrade proves it
				h.unanswered(during)
				h.renewed(h.asked(2), protocol.Granted)
			}
			h.answeredWith(false, nil, during)
			h.lost()
		})
	}
}

// Where the grant is gone when the acquire arrives, it makes it anew, and a renewal that comes after it
// finds the lock ours. Only the answer to the acquire says that it was not.
func TestACheckWaitsForAnAcquireThatWasOvertaken(t *testing.T) {
	c := writer()
	h, _ := overtaken(t, c)
	h.pass(time.Millisecond)
	k := h.check(c)
	h.unanswered(k)
	if len(h.renewals) != 0 {
		t.Fatalf("%d renewals for the check", len(h.renewals))
	}
	h.pass(handTTL / 2) // a regular one
	h.renewed(h.renewals[0], protocol.Granted)
	h.unanswered(k)
	h.answer(h.kept(c.Token))
	h.answeredWith(false, nil, k) // by the renewal
}

func TestACheckDoesNotWaitForAQuestion(t *testing.T) {
	h, in, _ := keepingOut(t)
	h.asksAsReaders()
	h.onRenew, h.renewals = nil, nil
	k := h.check(in)
	h.pass(time.Millisecond)
	h.renewed(h.asked(1), protocol.Granted)
	h.answeredWith(false, nil, k)
}

// A regular renewal also has the lock's last token kept, and a check's does not.
func TestChecksPutOffNoRenewal(t *testing.T) {
	c := writer()
	h := holding(t, c).keep()
	const checks = 18
	for range checks {
		h.pass(handTTL / 6)
		h.check(c)
		h.renewed(h.renewals[len(h.renewals)-1], protocol.Granted)
	}
	if regular, want := len(h.renewals)-checks, checks/2-1; regular < want {
		t.Errorf("%d renewals in %v, want %d", regular, checks*handTTL/6, want)
	}
}
