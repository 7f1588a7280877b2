package lockstate

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Release and yield: what their answers, or none, lead to.

// yielding returns a lock that gave the lock away with a caller waiting.
func yielding(t testing.TB) (h *hand, a, b *Caller, cmd protocol.Command) {
	t.Helper()
	a, b = writer(), writer()
	h = holding(t, a)
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(b)
	h.pass(20 * time.Millisecond) // over the tenure
	h.leave(a)
	cmd = h.sends(protocol.Yield)
	if cmd.Next == cmd.ID || cmd.Next == "" {
		t.Fatalf("waits under %q after %q", cmd.Next, cmd.ID)
	}
	if a.Settled {
		t.Fatal("settled although the lock is not given back")
	}
	return h, a, b, cmd
}

func TestAMessageMayOvertakeTheAnswerToAYield(t *testing.T) {
	h, a, b, cmd := yielding(t)
	sent := h.now
	h.pass(time.Second)
	h.hears(protocol.MessageGranted, cmd.Next, h.token())
	h.in(b)
	h.trust(sent.Sub(noon) + handWindow)
	h.answer(h.queue())
	h.in(b)
	h.settled(a, nil)
	h.cancels()
	h.leave(b)
	if again := h.sends(protocol.Release); again.ID != cmd.Next {
		t.Errorf("releases %s, not %s", again.ID, cmd.Next)
	}
}

func TestAMessageThatOvertookTheAnswerToAYieldTooLateIsNotBelieved(t *testing.T) {
	h, _, b, cmd := yielding(t)
	h.pass(handWindow)
	h.hears(protocol.MessageGranted, cmd.Next, h.token())
	h.out(b)
	h.answer(h.queue())
	h.out(b)
	h.cancels()
	if again := h.sends(protocol.Acquire); again.ID != cmd.Next { // no other message will come
		t.Errorf("asks as %s, not as %s", again.ID, cmd.Next)
	}
}

func TestAYieldWithoutAnswerHasTheOldCanceledAndTheNewAskedFor(t *testing.T) {
	h, a, b, cmd := yielding(t)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.out(b)
	h.cancels(cmd.ID)
	if until := h.unwanted[0].until; until.Sub(h.now) != handTTL {
		t.Errorf("canceled for %v, late copies may arrive for %v", until.Sub(h.now), handTTL)
	}
	if len(h.unwanted[0].Callers) != 1 || h.unwanted[0].Callers[0] != a || a.Settled {
		t.Error("the cancel will not tell who left")
	}
	h.sendsNothing()
	h.pass(time.Second)
	if again := h.sends(protocol.Acquire); again.ID != cmd.Next {
		t.Errorf("asks as %s, not as %s", again.ID, cmd.Next)
	}
	h.answer(h.grant())
	h.in(b)
}

func TestAYieldOfALostGrantTellsTheLossAndAsksAnew(t *testing.T) {
	h, a, b, cmd := yielding(t)
	h.answer(protocol.Answer{Outcome: protocol.NotOurs})
	h.settled(a, ErrLeaseLost)
	h.lost(a)
	h.cancels(cmd.ID)
	if again := h.sends(protocol.Acquire); again.ID == cmd.ID || again.ID == cmd.Next {
		t.Errorf("asks under a used id, %s", again.ID)
	}
	h.answer(h.grant())
	h.in(b)
}

// A copy of it was carried out before.
func TestAYieldThatRanTwiceIsNoLoss(t *testing.T) {
	h, a, b, _ := yielding(t)
	twice := h.grant()
	twice.Gone = true
	h.answer(twice)
	h.settled(a, nil)
	h.lost()
	h.in(b)
}

func TestTheAnswerToAYieldSaysThatOthersWaitAlsoAfterTheMessage(t *testing.T) {
	h, _, b, cmd := yielding(t)
	h.hears(protocol.MessageGranted, cmd.Next, h.token())
	h.in(b)
	said := h.kept(h.top)
	said.More = true
	h.answer(said)
	h.leave(b)
	if !h.sends(protocol.Release).Heard {
		t.Error("who waits is not known of")
	}
}

func TestAMessageAboutAnotherIDDuringAYieldIsNotAboutTheNext(t *testing.T) {
	for _, kind := range []protocol.MessageKind{protocol.MessageGranted, protocol.MessageRevoked} {
		h, _, b, _ := yielding(t)
		other := h.NewRequest(protocol.Exclusive, handTTL, false, protocol.Origin{}).ID
		h.hears(kind, other, h.token())
		h.out(b)
		if kind == protocol.MessageGranted {
			h.cancels(other)
			if last := h.unwanted[0].Last; last != h.top {
				t.Errorf("the cancel tells of token %d, the last was %d", last, h.top)
			}
		} else {
			h.cancels()
		}
		h.answer(h.grant())
		h.in(b)
	}
}

func TestAReleaseWithoutAnswerIsFollowedByCancelWithTheLastToken(t *testing.T) {
	a, b := writer(), writer()
	h := holding(t, a)
	id := h.l.grant.req.ID
	h.enter(b)
	h.leave(a)
	h.in(b) // a token of its own
	h.leave(b)
	cmd := h.sends(protocol.Release)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.cancels(id)
	if got := h.unwanted[0].Last; got != b.Token || cmd.Last != b.Token {
		t.Errorf("release tells of token %d, cancel of %d, the last was %d", cmd.Last, got, b.Token)
	}
	if got := h.unwanted[0].proof; got != b.Token {
		t.Errorf("proved by token %d, the last was %d", got, b.Token)
	}
	if giveUp := h.unwanted[0].giveUp; giveUp.Sub(h.now) != handTTL { // then it has expired, and who unlocks need not wait
		t.Errorf("given up after %v", giveUp.Sub(h.now))
	}
	if until := h.unwanted[0].until; until.Sub(h.now) != handTTL {
		t.Errorf("canceled for %v, late copies may arrive for %v", until.Sub(h.now), handTTL)
	}
	h.settled(a, nil)
	if b.Settled {
		t.Error("settled before anybody knows")
	}
	h.state(none)
	if !h.l.Idle() {
		t.Error("the lock is kept for what is to be canceled")
	}
}

// doubtful returns a lock whose caller is inside by a message that overtook a re-check, which had no answer: if
// that arrives after the grant was lost, another may have owned before the lock was granted anew, under the
// same id.
func doubtful(t *testing.T, c *Caller) (h *hand, id string) {
	t.Helper()
	h, id = overtaken(t, c)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	return h, id
}

// So a release that finds the id owning proves nothing. It tells which token has to be the lock's last, and its
// answer whether that was. The lock is not yielded, because the answer to that does not tell. If the release
// proves nothing, the cancel that follows decides.
func TestAReleaseProvesNothingWhereTheGrantMayHaveBeenGivenAnew(t *testing.T) {
	for _, waits := range []bool{false, true} {
		for what, proved := range map[string]bool{"its token is still the last": true, "another had it": false} {
			t.Run(fmt.Sprintf("a caller waits %v, %s", waits, what), func(t *testing.T) {
				c := writer(func(o *Terms) { o.Handoffs = 1 })
				h, id := doubtful(t, c)
				if waits {
					h.enter(writer())
					h.hears(protocol.MessageWanted, id, 0)
				}
				h.leave(c)
				if cmd := h.sends(protocol.Release); cmd.Proof != c.Token {
					t.Errorf("%d is to be the last token, not %d", cmd.Proof, c.Token)
				}
				h.answer(protocol.Answer{Outcome: protocol.Done})
				if c.Settled {
					t.Fatalf("its Unlock returned %v before there was a proof", c.Outcome())
				}
				h.cancels(id, id) // the first because the acquire may still arrive
				last := h.unwanted[1]
				if len(last.Callers) != 1 || last.Callers[0] != c || last.proof != c.Token {
					t.Fatalf("the cancel that is to prove it: %+v", last)
				}
				h.step(func(now time.Time, fx *Effects) {
					h.l.Canceled(&Settlement{Callers: last.Callers, proved: proved}, now, fx)
				})
				if waits {
					if again := h.sends(protocol.Acquire); again.ID == id {
						t.Error("asks under the id that was given back")
					}
				}
				if proved {
					h.settled(c, nil)
					return
				}
				h.lost(c)
				if !errors.Is(c.Outcome(), ErrLeaseLost) {
					t.Errorf("its Unlock returned %v", c.Outcome())
				}
			})
		}
	}
	t.Run("but for who entered when no acquire could arrive anymore", func(t *testing.T) {
		c, next := writer(func(o *Terms) { o.Tenure = time.Hour }), writer()
		h, _ := doubtful(t, c)
		h.keep().enter(next)
		h.pass(handTTL)
		h.leave(c)
		h.settled(c, nil) // Redis was not asked
		h.in(next)
		h.leave(next)
		if cmd := h.sends(protocol.Release); cmd.Proof != 0 {
			t.Errorf("asks for the proof of a grant that is not in doubt: %d", cmd.Proof)
		}
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.settled(next, nil)
	})
	t.Run("by the last token that was given out", func(t *testing.T) {
		c, next := writer(func(o *Terms) { o.Tenure = time.Hour }), writer()
		h, _ := doubtful(t, c)
		h.enter(next)
		h.leave(c)
		h.in(next) // with a token of its own
		h.leave(next)
		if cmd := h.sends(protocol.Release); cmd.Proof != next.Token || cmd.Last != next.Token || next.Token <= c.Token {
			t.Errorf("%d is to be the last token, and %d was drawn, after %d", cmd.Proof, cmd.Last, c.Token)
		}
	})
}

// A writer that waits behind readers whose grant is in doubt keeps its place in the queue. The place may be
// served before the answer to the release, so it is asked about at once.
func TestAPlaceIsKeptWhenTheReadersBeforeItAreInDoubt(t *testing.T) {
	wait := func(t *testing.T) (h *hand, r, w *Caller, id, place string) {
		r, w = reader(), writer()
		h, id = doubtful(t, r)
		h.enter(w)
		place = h.sends(protocol.Acquire).ID
		h.answer(h.queue())
		h.leave(r)
		if cmd := h.sends(protocol.Release); cmd.ID != id || cmd.Proof != r.Token {
			t.Errorf("releases %s by the proof %d, not %s by %d", cmd.ID, cmd.Proof, id, r.Token)
		}
		return h, r, w, id, place
	}
	proved := protocol.Answer{Outcome: protocol.Done, Proved: true}
	for name, answer := range map[string]protocol.Answer{"proved": proved, "unproved": {Outcome: protocol.Done}, "lost": {Outcome: protocol.NotOurs}} {
		for _, told := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, by message %v", name, told), func(t *testing.T) {
				h, r, w, id, place := wait(t)
				if told {
					h.hears(protocol.MessageGranted, place, h.token())
					h.out(w) // until the readers' grant is over
				}
				h.answer(answer)
				switch name {
				case "proved":
					h.settled(r, nil)
					h.cancels(id)
				case "unproved":
					h.cancels(id, id)
				case "lost":
					h.settled(r, ErrLeaseLost)
					h.lost(r)
					h.cancels(id)
				}
				if cmd := h.sends(protocol.Acquire); cmd.ID != place || cmd.First {
					t.Errorf("asks about %s, not about its place %s", cmd.ID, place)
				}
				h.answer(h.grant())
				h.in(w)
			})
		}
	}
	t.Run("no answer", func(t *testing.T) {
		h, _, w, id, place := wait(t)
		h.reply(protocol.Answer{}, errSilence, time.Second)
		h.out(w)
		h.cancels(id)
		h.sendsNothing()
		h.pass(time.Second)
		if cmd := h.sends(protocol.Acquire); cmd.ID != place {
			t.Errorf("asks about %s, not about its place %s", cmd.ID, place)
		}
	})
}

// Nor does a cancel that finds the id owning, after a release without answer: only the lock's last token
// does, or a quorum that has looked at it.
func TestACancelProvesNothingByOwnershipWhereTheGrantMayHaveBeenGivenAnew(t *testing.T) {
	for doubted, proofs := range map[bool]map[protocol.Canceled]bool{
		false: {{Owned: true, Token: 1}: true},
		true:  {{Owned: true, Token: 1}: false, {Owned: true, Proved: true}: true, {Owned: true}: false},
	} {
		for answer, proved := range proofs {
			c := writer()
			var h *hand
			if doubted {
				h, _ = doubtful(t, c)
			} else {
				h = holding(t, c)
			}
			h.leave(c)
			h.sends(protocol.Release)
			h.reply(protocol.Answer{}, errSilence, time.Second)
			g := h.unwanted[len(h.unwanted)-1]
			var s CancelSchedule
			s.Add(&g, h.now)
			s.Take(h.now)
			if got := s.Answered(&g, answer, h.now).proved; got != proved || len(g.Callers) != 0 {
				t.Errorf("doubted %v, %+v: proved %v", doubted, answer, got)
			}
		}
	}
}

func TestAReleaseThatSaysSoProvesAGrantThatMayHaveBeenGivenAnew(t *testing.T) {
	c := writer()
	h, id := doubtful(t, c)
	h.leave(c)
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done, Proved: true})
	h.settled(c, nil)
	h.cancels(id) // because the acquire may still arrive
}

func TestAReleaseOfALostGrantTellsTheLoss(t *testing.T) {
	c := writer()
	h := holding(t, c)
	id := h.l.grant.req.ID
	h.leave(c)
	h.answer(protocol.Answer{Outcome: protocol.NotOurs})
	h.settled(c, ErrLeaseLost)
	h.lost(c)
	h.cancels(id) // it may be back in the queue
}

// It left while another command was under way, so the release was still to come.
func TestALossBeforeTheReleaseWasSentIsToldToWhoLeft(t *testing.T) {
	t.Run("evicted", func(t *testing.T) {
		h := drive(t)
		c := h.enter(writer())
		id := h.sends(protocol.Acquire).ID
		h.hears(protocol.MessageGranted, id, h.token())
		h.leave(c)
		h.hears(protocol.MessageRevoked, id, h.top)
		h.settled(c, ErrLeaseLost)
		h.lost(c)
	})
	t.Run("not ours at the downgrade", func(t *testing.T) {
		c := writer()
		h := holding(t, c)
		h.downgrade(c)
		h.leave(c)
		h.answer(protocol.Answer{Outcome: protocol.NotOurs})
		h.settled(c, ErrLeaseLost)
		h.lost(c)
	})
}

func TestALossWhileARecheckIsUnderWayCancelsWhatItBrings(t *testing.T) {
	for name, a := range map[string]func(h *hand) protocol.Answer{"queued": (*hand).queue, "granted": (*hand).grant} {
		t.Run(name, func(t *testing.T) {
			x, y := writer(), writer()
			h, id := overtaken(t, x)
			h.enter(y)
			h.hears(protocol.MessageRevoked, id, h.top)
			h.lost(x)
			h.leave(x)
			h.out(y) // one command at a time
			h.answer(a(h))
			h.cancels(id)
			if again := h.sends(protocol.Acquire); again.ID == id {
				t.Error("asks under the id that was lost")
			}
			h.answer(h.grant())
			h.in(y)
		})
	}
}

// An Unlock that has stopped waiting has said that there was no answer. What an answer says then is told of
// as any loss is; that there is none is no news.
func TestALossThatIsFoundAfterItsUnlockHasReturnedIsTold(t *testing.T) {
	for what, s := range map[string]*Settlement{
		"proved":   {proved: true},
		"unproved": {},
		"given up": {Fail: &protocol.Failure{Err: errSilence, Kind: protocol.NoAnswer}},
		"closed":   {Fail: &protocol.Failure{Err: protocol.ErrClosed, Kind: protocol.ClientClosed}},
	} {
		c := writer()
		h := holding(t, c)
		h.leave(c)
		h.sends(protocol.Release)
		h.reply(protocol.Answer{}, errSilence, time.Second)
		if !c.LeaveUnsettled() {
			t.Fatal("settled before there is an answer")
		}
		s.Callers = h.unwanted[len(h.unwanted)-1].Callers
		h.step(func(now time.Time, fx *Effects) { h.l.Canceled(s, now, fx) })
		if what == "unproved" {
			h.lost(c)
		} else {
			h.lost()
		}
	}
}

// Whether the lock was lost before is known, or it is not.
func TestAnUnlockSaysWhatIsKnownOfALeaseWhoseReleaseHadNoAnswer(t *testing.T) {
	noAnswer := &protocol.Failure{Err: errSilence, Kind: protocol.NoAnswer}
	noClient := &protocol.Failure{Err: protocol.ErrClosed, Kind: protocol.ClientClosed}
	for what, want := range map[string]struct {
		outcome   Settlement
		lost      bool
		says, not []error
	}{
		"proved":                    {Settlement{proved: true}, false, nil, nil},
		"unproved":                  {Settlement{}, false, []error{ErrLeaseLost}, []error{ErrNotReleased}},
		"given up":                  {Settlement{Fail: noAnswer}, false, []error{ErrLeaseLost, errSilence}, []error{ErrNotReleased}},
		"closed":                    {Settlement{Fail: noClient}, false, []error{ErrNotReleased, protocol.ErrClosed}, []error{ErrLeaseLost}},
		"lost before":               {Settlement{}, true, []error{ErrLeaseLost}, []error{ErrNotReleased}},
		"lost before, and given up": {Settlement{Fail: noAnswer}, true, []error{ErrLeaseLost, ErrNotReleased, errSilence}, nil},
		"lost before, and closed":   {Settlement{Fail: noClient}, true, []error{ErrLeaseLost, ErrNotReleased, protocol.ErrClosed}, nil},
	} {
		c := writer()
		h := holding(t, c)
		id := h.l.grant.req.ID
		h.leave(c)
		h.sends(protocol.Release)
		if want.lost {
			h.hears(protocol.MessageGranted, id, h.top+1) // by a late acquire: another was inside before
		}
		h.reply(protocol.Answer{}, errSilence, time.Second)
		s := want.outcome
		s.Callers = h.unwanted[0].Callers
		h.step(func(now time.Time, fx *Effects) { h.l.Canceled(&s, now, fx) })
		err := c.Outcome()
		if !c.Settled || (err == nil) != (want.says == nil) {
			t.Errorf("%s: settled %v, %v", what, c.Settled, err)
		}
		for _, e := range want.says {
			if !errors.Is(err, e) {
				t.Errorf("%s: %v, which is not %v", what, err, e)
			}
		}
		for _, e := range want.not {
			if errors.Is(err, e) {
				t.Errorf("%s: %v, which is %v", what, err, e)
			}
		}
	}
}

// The server writes first to who is notified of the release, but only if it is told that somebody is.
func TestAReleaseSaysWhetherAnotherProcessWaits(t *testing.T) {
	for _, wanted := range []bool{false, true} {
		a := writer()
		h := holding(t, a)
		if wanted {
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		}
		h.leave(a)
		if cmd := h.sends(protocol.Release); cmd.Heard != wanted {
			t.Errorf("wanted %v: it says %v", wanted, cmd.Heard)
		}
	}
}

// Its context has ended as the grant came, and LockContext has said so.
func TestALeaseThatNobodyHadIsNotReportedLost(t *testing.T) {
	for name, ends := range map[string]func(h *hand){
		"its release finds another owner": func(h *hand) { h.answer(protocol.Answer{Outcome: protocol.NotOurs}) },
		"its release cannot be proved": func(h *hand) {
			h.reply(protocol.Answer{}, errSilence, time.Second)
			s := Settlement{Callers: h.unwanted[0].Callers}
			h.step(func(now time.Time, fx *Effects) { h.l.Canceled(&s, now, fx) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := writer()
			h := holding(t, c).keep()
			h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(c, now, fx) })
			h.sends(protocol.Release)
			ends(h)
			h.lost()
		})
	}
}

// Two readers were admitted at once. One unlocks, which ends the other's hold, as that came first; and the
// call of that other one has not returned yet when its context ends.
func TestAReaderThatGivesUpLeavesEvenIfAnotherOnesUnlockHasEndedItsHold(t *testing.T) {
	for name, lease := range map[string]bool{"RLock": false, "RLockContext": true} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			x, y := reader(), reader()
			x.Leased, y.Leased = lease, lease
			h.enter(x)
			h.enter(y)
			h.answer(h.grant())
			h.in(x, y)
			h.leave(h.l.PickHolder(protocol.Shared))
			if x.Phase != Left || y.Phase != Inside {
				t.Fatalf("the first is in phase %d, the second in phase %d", x.Phase, y.Phase)
			}
			h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(x, now, fx) })
			h.sends(protocol.Release)
			h.answer(protocol.Answer{Outcome: protocol.Done})
			if !h.l.Idle() {
				t.Error("somebody is still inside")
			}
		})
	}
}

// Of a writer there is only one, and who is inside later has nothing to do with it.
func TestAWriterThatGivesUpAfterItsHoldHasEndedEndsNoOther(t *testing.T) {
	h := drive(t)
	x, z := writer(), writer(minHold)
	h.enter(x)
	h.answer(h.grant())
	h.in(x)
	h.leave(h.l.PickHolder(protocol.Exclusive))
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.enter(z)
	h.answer(h.grant())
	h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(x, now, fx) })
	if _, within := h.l.Counts(); z.Phase != Inside || within != 1 {
		t.Errorf("the next writer is in phase %d, with %d inside", z.Phase, within)
	}
	h.leave(z)
	if cmd := h.sends(protocol.Release); cmd.Cooldown != handMinHold {
		t.Errorf("the next writer's minimum hold goes on for %v", cmd.Cooldown)
	}
}

// besideALease returns a lock with two readers inside, of which x has a Lease.
func besideALease(t *testing.T) (h *hand, x, y *Caller) {
	t.Helper()
	h, x, y = drive(t), reader(), reader()
	x.Leased = true
	h.enter(x, y)
	h.answer(h.grant())
	h.in(x, y)
	return h, x, y
}

// Beside a Lease, any other reader's hold is as good as that of the one that leaves, but not for a Lease.
func TestAReaderThatGivesUpEndsItsOwnHold(t *testing.T) {
	h, x, y := besideALease(t)
	h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(x, now, fx) })
	if x.Phase != Left || y.Phase != Inside {
		t.Errorf("it is in phase %d, and the other in phase %d", x.Phase, y.Phase)
	}
}

func TestAnUnlockThatNamesNoLeaseEndsNone(t *testing.T) {
	h, _, y := besideALease(t)
	if c := h.l.PickHolder(protocol.Shared); c != y {
		t.Error("it ends the hold of the one with a Lease")
	}
}

// An idle grant that is given back has no caller, and whoever closes the client wants to know all the same.
func TestTheCancelOfAReleaseWithoutAnswerSaysSoAlsoIfNoCallerWaits(t *testing.T) {
	for _, idles := range []bool{true, false} {
		c := writer(func(o *Terms) {
			if idles {
				o.IdleHold = time.Minute
			}
		})
		h := holding(t, c)
		h.leave(c)
		if idles {
			h.close()
		}
		h.sends(protocol.Release)
		h.reply(protocol.Answer{}, errSilence, 0)
		if g := h.unwanted[0]; !g.Release || (len(g.Callers) == 0) != idles {
			t.Fatalf("idle %v: %+v", idles, g)
		}
		var s CancelSchedule
		s.Add(&h.unwanted[0], h.now)
		g := s.Take(h.now)[0]
		if told := s.Answered(g, protocol.Canceled{Fail: failureOf(errSilence)}, h.now); told.Release {
			t.Error("confirmed without an answer")
		}
		h.pass(time.Second)
		g = s.Take(h.now)[0]
		if told := s.Answered(g, protocol.Canceled{}, h.now); !told.Release {
			t.Error("not confirmed by the answer")
		}
	}
	h := drive(t)
	w := h.enter(writer())
	h.answer(h.queue())
	h.abandon(w)
	if h.unwanted[0].Release {
		t.Error("a request that waited counts as a release")
	}
}

// Nothing is heard from Redis for a second, and then a try would wait for two more.
func TestATryDoesNotWaitForASecondAnswer(t *testing.T) {
	for _, late := range []time.Duration{0, 1} {
		a := writer()
		h := holding(t, a)
		h.leave(a)
		h.sends(protocol.Release)
		b := h.enter(trying(writer()))
		h.pass(maxSilence - late)
		h.reply(protocol.Answer{}, errSilence, 0)
		if late == 0 {
			h.turned(b, errSilence)
		} else {
			h.out(b)
			h.sends(protocol.Acquire)
		}
	}
}

func TestTheTimeByWhichALeaseEndsIsNotTooEarly(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	h.answer(h.queue())
	asked := h.now
	h.pass(2 * time.Second)
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token()) // so the TTL runs from now on
	h.in(c)
	if ends := h.l.EndsBy(c, h.now); ends.Before(h.now.Add(handTTL)) {
		t.Errorf("it ends %v after the last question", ends.Sub(asked))
	}
	h.pass(handTTL / 2) // a renewal is under way
	if ends := h.l.EndsBy(c, h.now); ends.Before(h.now.Add(handTTL)) {
		t.Errorf("it ends %v from now", ends.Sub(h.now))
	}
	b := writer(minHold)
	h = holding(t, b)
	if ends := h.l.EndsBy(b, h.now); !ends.Equal(h.now.Add(handMinHold + handTTL)) {
		t.Errorf("with a minimum hold, it ends %v from now", ends.Sub(h.now))
	}
	if ends := h.l.EndsBy(writer(), h.now); !ends.IsZero() {
		t.Errorf("of a caller that is not inside, it ends at %v", ends)
	}
}
