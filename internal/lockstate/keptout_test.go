package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Readers of a process stay out while another process is to be served before them. That process
// may have given up, or died, and nothing says so: so they ask.

// keepingOut returns a lock that a reader has and another process wants, and a further reader, which waits.
func keepingOut(t *testing.T) (h *hand, in, out *Caller) {
	t.Helper()
	in = reader()
	h = holding(t, in).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	out = h.enter(reader())
	h.out(out)
	h.sendsNothing()
	return h, in, out
}

// askingWithoutMessages returns a lock that a reader has, in a process without messages, and a further
// reader that has the question asked.
func askingWithoutMessages(t *testing.T) (h *hand, out *Caller) {
	t.Helper()
	h = drive(t).keep()
	h.polling = true
	h.enter(reader())
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.pass(maxTenure)
	out = h.enter(reader())
	h.sends(protocol.Acquire)
	return h, out
}

// asksAsReaders lets the time pass until the readers ask, and checks the question.
func (h *hand) asksAsReaders() {
	h.t.Helper()
	h.pass(askAfter - 1)
	h.sendsNothing()
	h.pass(1)
	if q := h.sends(protocol.Acquire); q.ID != h.l.grant.req.ID || !q.Question || q.Wait {
		h.t.Fatalf("asks with %+v", q)
	}
}

// yes is the answer that the readers own the lock, and others wait.
func (h *hand) yes() protocol.Answer {
	a := h.kept(h.top)
	a.More = true
	return a
}

func TestReadersThatAreKeptOutAskWhetherOthersStillWait(t *testing.T) {
	h, in, out := keepingOut(t)
	h.asksAsReaders()
	h.answer(h.kept(h.top))
	h.in(out)
	h.sendsNothing()
	if h.l.grant.wanted {
		t.Error("the grant is still taken for wanted")
	}
	h.in(h.enter(reader()))
	h.leave(in)
}

func TestReadersStayOutAsLongAsOthersWait(t *testing.T) {
	h, _, out := keepingOut(t)
	for range 3 {
		h.asksAsReaders()
		h.answer(h.yes())
		h.out(out)
		h.sendsNothing()
	}
	h.asksAsReaders()
	h.answer(h.kept(h.top))
	h.in(out)
}

// A waiter that is alive repeats that it waits.
func TestNobodyAsksWhileOthersSayThatTheyWait(t *testing.T) {
	h, _, out := keepingOut(t)
	for range 5 {
		h.pass(askAfter - 1)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	}
	h.sendsNothing()
	h.out(out)
	h.asksAsReaders()
}

func TestTheQuestionOfReadersComesALittleLaterThanTheWaiterRepeatsItself(t *testing.T) {
	in := reader()
	h := holding(t, in)
	h.luck = 1
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(reader())
	h.pass(askAfter + askSpread - 1)
	h.sendsNothing()
	h.pass(1)
	h.sends(protocol.Acquire)
}

// The answer can be older than the message, which came by another connection.
func TestAMessageThatOthersWaitCountsMoreThanAnAnswerUnderWay(t *testing.T) {
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.answer(h.kept(h.top))
	h.out(out)
	if !h.l.grant.wanted {
		t.Error("the grant is not taken for wanted")
	}
	h.pass(firstPoll - 1)
	h.sendsNothing()
	h.pass(1)
	h.sends(protocol.Acquire) // again
	h.answer(h.yes())
	h.out(out)
	h.sendsNothing()
	h.asksAsReaders()
}

func TestReadersAskAtOnceWhenTheyHearThatNobodyWaits(t *testing.T) {
	h, _, out := keepingOut(t)
	h.hears(protocol.MessageUnwanted, "leased1:r:10000:c:0000000000000099:AAAAAAAAAAAAAAAA:hand", 0) // an earlier grant
	h.sendsNothing()
	h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0)
	h.sends(protocol.Acquire)
	h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0) // of another one, which gave up after the question
	h.answer(h.yes())
	h.out(out)
	h.pass(firstPoll)
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top))
	h.in(out)
	h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0)
	h.sendsNothing()
}

// It costs nothing until somebody comes.
func TestAReaderThatComesAfterNobodyWaitsAsksFirst(t *testing.T) {
	h := holding(t, reader())
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0)
	h.sendsNothing()
	c := h.enter(trying(reader()))
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top))
	h.in(c)
}

func TestNobodyAsksForReadersThatDoNotWait(t *testing.T) {
	for name, leave := range map[string]func(h *hand, in, out *Caller){
		"no reader waits": func(h *hand, _, out *Caller) { h.abandon(out) },
		"a writer of the process waits": func(h *hand, _, out *Caller) {
			h.abandon(out)
			h.enter(writer())
			h.sends(protocol.Acquire)
			h.answer(h.queue())
		},
		"none is inside": func(h *hand, in, out *Caller) {
			h.now = h.now.Add(askAfter) // the time to ask has come, too
			h.leave(in)
			h.sends(protocol.Yield)
			h.answer(h.queue())
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, in, out := keepingOut(t)
			leave(h, in, out)
			for range 10 {
				h.pass(MaxPoll / 4)
				if h.flight != nil && h.flight.Question {
					t.Fatalf("asks with %+v", *h.flight)
				}
				if h.flight != nil {
					h.answer(h.queue())
				}
			}
		})
	}
}

func TestNobodyAsksForAReaderBehindAWriterOfItsProcess(t *testing.T) {
	h := holding(t, writer()).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(reader())
	h.pass(time.Minute)
	h.sendsNothing()
}

// A grant that idles is given back when it is wanted, and one that is not believed is asked about under its
// id.
func TestNobodyAsksForAReaderThatFindsNoneInside(t *testing.T) {
	c := reader(func(o *Terms) { o.IdleHold = time.Hour })
	h := driveFrom(t, time.Now())
	h.enter(c)
	h.answer(h.grant())
	h.leave(c)
	h.slept(time.Second) // the clocks moved apart
	h.enter(reader())
	if cmd := h.sends(protocol.Acquire); cmd.Question {
		t.Errorf("asks with %+v", cmd)
	}
}

func TestAReaderThatComesLaterAsksAtOnce(t *testing.T) {
	in := reader()
	h := holding(t, in).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.pass(time.Minute)
	h.sendsNothing()
	out := h.enter(reader())
	if q := h.sends(protocol.Acquire); !q.Question {
		t.Errorf("asks with %+v", q)
	}
	h.answer(h.kept(h.top))
	h.in(out)
}

// A try waits for one answer, as it does for a free lock.
func TestATryToReadAsksWhetherOthersStillWait(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(h *hand) protocol.Answer
		enters bool
	}{
		"nobody does": {func(h *hand) protocol.Answer { return h.kept(h.top) }, true},
		"they do":     {(*hand).yes, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := holding(t, reader()).keep()
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
			h.turned(h.enter(trying(reader())), ErrLocked) // others have just said so
			h.sendsNothing()
			h.pass(askAfter)
			first := h.enter(trying(reader()))
			h.sends(protocol.Acquire)
			second := h.enter(trying(reader()))
			h.out(first)
			h.out(second)
			h.answer(c.answer(h))
			if c.enters {
				h.in(first)
				h.in(second)
			} else {
				h.turned(first, ErrLocked)
				h.turned(second, ErrLocked)
				h.turned(h.enter(trying(reader())), ErrLocked)
			}
			h.sendsNothing()
		})
	}
}

// The reader that had the question asked may be gone when another tries.
func TestATryToReadSharesAQuestionUnderWay(t *testing.T) {
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	h.abandon(out)
	c := h.enter(trying(reader()))
	h.out(c)
	h.answer(h.kept(h.top))
	h.in(c)
}

func TestAQuestionWithoutAnswerIsRepeated(t *testing.T) {
	h, in, out := keepingOut(t)
	h.asksAsReaders()
	try := h.enter(trying(reader()))
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.turned(try, errSilence)
	h.out(out)
	h.asksAsReaders()
	h.reply(protocol.Answer{}, errSilence, 7*time.Second)
	h.pass(7*time.Second - 1)
	h.sendsNothing()
	h.pass(1)
	h.answer(h.kept(h.top))
	h.in(out)
	// It gives its id nothing, so it leaves no doubt whose the lock was.
	h.leave(in)
	h.leave(out)
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	h.cancels()
	if !in.Settled || in.Outcome() != nil {
		t.Errorf("Unlock returned %v, %v", in.Settled, in.Outcome())
	}
}

// As for a request: whoever does not wait for an operator is told.
func TestAQuestionThatAnOperatorHasToAllowIsAnError(t *testing.T) {
	h, in, out := keepingOut(t)
	patient := reader()
	patient.RetryFatal = true
	h.enter(patient)
	h.asksAsReaders()
	no := refusal("NOPERM no")
	h.reply(protocol.Answer{}, no, time.Second)
	h.turned(out, no)
	h.out(patient)
	h.leave(in)
}

// One call drops so many dead requests and no more.
func TestAQuestionThatWasNotFinishedIsAskedAgainSoon(t *testing.T) {
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	try := h.enter(trying(reader()))
	a := h.yes()
	a.Unfinished = true
	h.answer(a)
	h.out(try)
	h.pass(firstPoll)
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top))
	h.in(out)
	h.in(try)
}

// Such a failure says nothing about the server.
func TestAQuestionThatMetAClosedConnectionIsRepeatedAtOnce(t *testing.T) {
	closed := &protocol.Failure{Err: errSilence, Again: true}
	fails := func(h *hand) {
		cmd := *h.flight
		h.flight = nil
		h.step(func(now time.Time, fx *Effects) { h.l.Answered(&cmd, protocol.Answer{}, closed, 0, now, fx) })
	}
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	try := h.enter(trying(reader()))
	fails(h)
	h.sends(protocol.Acquire)
	h.out(try)
	h.answer(h.kept(h.top))
	h.in(out)
	h.in(try)

	h = connecting(t)
	h.enter(writer())
	h.answer(h.grant())
	h.connects = false
	h.step(h.l.Subscribed)
	fails(h)
	h.sends(protocol.Acquire)
}

// Where no message comes, nothing else keeps newcomers out until the renewal has its answer.
func TestAQuestionThatFindsNoOwnerWhereNoMessageComesLetsNobodyIn(t *testing.T) {
	h, out := askingWithoutMessages(t)
	h.onRenew = nil
	h.answer(protocol.Answer{Outcome: protocol.NotOurs})
	h.out(out)
}

func TestAQuestionIsAskedWhenRedisAnswersAgain(t *testing.T) {
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	h.reply(protocol.Answer{}, errSilence, 30*time.Second)
	h.pass(time.Second)
	h.sendsNothing()
	asked := false
	h.step(func(now time.Time, fx *Effects) { asked = h.l.Reachable(now, fx) })
	if !asked {
		t.Fatal("nothing waits for Redis")
	}
	h.answer(h.kept(h.top))
	h.in(out)
}

// Then a renewal finds out what became of it, and not each question anew.
func TestAQuestionThatFindsNoOwnerHasTheGrantRenewed(t *testing.T) {
	h, in, out := keepingOut(t)
	h.asksAsReaders()
	h.onRenew, h.renewals = nil, nil
	h.answer(protocol.Answer{Outcome: protocol.NotOurs})
	h.sendsNothing()
	h.lost()
	h.ring()
	if len(h.renewals) != 1 {
		t.Fatalf("%d renewals", len(h.renewals))
	}
	h.renewed(h.renewals[0], protocol.NotOurs)
	h.lost(in)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(out)
}

// Renewals also have the lock's last token kept.
func TestQuestionsPutOffNoRenewal(t *testing.T) {
	long := func(o *Terms) { o.TTL = time.Minute }
	h := holding(t, reader(long)).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(reader(long))
	for range 18 {
		h.asksAsReaders()
		h.answer(h.yes())
	}
	if n := len(h.renewals); n != 3 {
		t.Errorf("%d renewals in %v", n, 18*askAfter)
	}
}

// Where no message comes, readers that take turns would keep a writer out, so from a second on each
// newcomer asks, and others as well if it is told that nobody waits.
func TestReadersWithoutMessagesAskWhetherOthersWait(t *testing.T) {
	in := reader()
	h := drive(t).keep()
	h.polling = true
	h.enter(in)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.pass(maxTenure - 1)
	h.in(h.enter(reader()))
	h.pass(1)
	out := h.enter(reader())
	if q := h.sends(protocol.Acquire); !q.Question {
		t.Errorf("asks with %+v", q)
	}
	h.out(out)
	h.answer(h.kept(h.top))
	h.in(out)
	h.pass(maxTenure - 1)
	h.in(h.enter(reader()))
	h.pass(1)
	out = h.enter(reader())
	h.answer(h.yes())
	h.out(out)
	h.asksAsReaders()
	h.reply(protocol.Answer{}, errSilence, 0)
	h.asksAsReaders()
	h.answer(h.kept(h.top))
	h.in(out)
}

func TestAQuestionWithoutAnswerIsRepeatedWhereNoMessageComes(t *testing.T) {
	h, out := askingWithoutMessages(t)
	h.reply(protocol.Answer{}, errSilence, 0)
	h.asksAsReaders()
	h.answer(h.kept(h.top))
	h.in(out)
}

// A question extends the grant, and such a grant is to end.
func TestNobodyAsksAboutAGrantThatNobodyRenews(t *testing.T) {
	for name, c := range map[string]struct {
		in  *Caller
		end func(h *hand, in *Caller)
	}{
		"its maximum hold is over":   {reader(func(o *Terms) { o.MaxHold = time.Minute }), func(h *hand, _ *Caller) { h.pass(time.Minute) }},
		"its lease was not unlocked": {reader(), func(h *hand, in *Caller) { h.l.Collected(in) }},
	} {
		t.Run(name, func(t *testing.T) {
			h := holding(t, c.in).keep()
			c.end(h, c.in)
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
			out := h.enter(reader())
			h.pass(handTTL - 1)
			if h.flight == nil || h.flight.Question {
				t.Fatalf("asks with %+v", h.flight)
			}
			h.answer(h.queue())
			h.out(out)
		})
	}
}

// Writers that come and give up all the time send messages that cross with each question.
func TestMessagesThatCrossWithQuestionsKeepNoTryAndSetThePace(t *testing.T) {
	h, in, out := keepingOut(t)
	in.Events = &EventLog{}
	h.asksAsReaders()
	questions := 0
	for range 1000 {
		try := h.enter(trying(reader()))
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.pass(5 * time.Millisecond)
		h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0)
		if h.flight != nil {
			questions++
			h.answer(h.yes())
		}
		h.turned(try, ErrLocked)
		h.out(out)
		h.pass(5 * time.Millisecond)
	}
	if most := int(10 * time.Second / firstPoll); questions > most {
		t.Errorf("%d questions in 10 s, at most %d are right", questions, most)
	}
	if n := len(in.Events.List); n > maxEvents {
		t.Errorf("%d events", n)
	}
}

func TestAReaderThatIsWantedAgainAndAgainHasFewEvents(t *testing.T) {
	in := reader()
	in.Events = &EventLog{}
	h := holding(t, in).keep()
	for range 2 * maxEvents {
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.hears(protocol.MessageUnwanted, h.l.grant.req.ID, 0)
		c := h.enter(trying(reader()))
		h.sends(protocol.Acquire)
		h.answer(h.kept(h.top))
		h.in(c)
		h.leave(c)
	}
	if n := len(in.Events.List); n > maxEvents {
		t.Errorf("%d events", n)
	}
}

// The writer comes while a try has the question asked.
func TestAWriterBehindATryToReadTakesItsPlace(t *testing.T) {
	h := holding(t, reader()).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.pass(askAfter)
	try := h.enter(trying(reader()))
	h.sends(protocol.Acquire)
	h.enter(writer())
	h.answer(h.yes())
	h.turned(try, ErrLocked)
	if place := h.sends(protocol.Acquire); place.Own != h.l.grant.req.ID {
		t.Errorf("asks with %+v", place)
	}
}

// A waiter repeats itself at a pace that depends on its own TTL, not on the readers'.
func TestReadersWithAShortTTLAskNoMoreOftenThanOthers(t *testing.T) {
	short := func(o *Terms) { o.TTL = 100 * time.Millisecond }
	h := holding(t, reader(short)).keep()
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(reader(short))
	h.asksAsReaders()
}

// Then the renewal that follows lets the reader in.
func TestNobodyAsksForAReaderThatTheClocksKeepOut(t *testing.T) {
	h := driveFrom(t, time.Now())
	h.enter(reader())
	h.answer(h.grant())
	h.slept(time.Second)
	out := h.enter(reader())
	h.sendsNothing()
	h.pass(time.Millisecond)
	h.ring() // the watchdog compares the clocks
	h.renewed(h.renewals[0], protocol.Granted)
	h.in(out)
}

// What others say counts, and not that our own writer waits, which gives up.
func TestAnEarlyOwnersAnswerDoesNotForgetOthersBehindItsOwnWriter(t *testing.T) {
	h := connecting(t)
	h.enter(reader())
	a := h.grant()
	a.More = true
	h.answer(a)
	w := h.enter(writer())
	r := h.enter(reader())
	h.connects = false
	h.step(h.l.Subscribed)
	h.sends(protocol.Acquire) // a place for the writer
	h.answer(h.queue())
	h.sends(protocol.Acquire) // whether the lock is wanted
	h.answer(h.yes())
	h.abandon(w)
	h.out(r)
}

func TestAQuestionWithoutAnswerKeepsNoWritersLockAwake(t *testing.T) {
	for name, c := range map[string]struct {
		denied bool
		err    error
	}{"subscribing is denied": {denied: true}, "there is no answer": {err: errSilence}} {
		t.Run(name, func(t *testing.T) {
			h := connecting(t)
			h.enter(writer())
			h.answer(h.grant())
			h.connects, h.polling = false, c.denied
			h.step(h.l.Subscribed)
			h.sends(protocol.Acquire)
			if c.err != nil {
				h.reply(protocol.Answer{}, c.err, 0)
			} else {
				h.answer(h.kept(h.top))
			}
			if h.l.grant.recheckAt != 0 {
				t.Errorf("something is due at %v", h.l.grant.recheckAt)
			}
		})
	}
}

// The grant is given back in neither case before there is an answer.
func TestAnUnlockThatKeepsTheLockDoesNotWaitForTheAnswerToAQuestion(t *testing.T) {
	asked := func(t *testing.T, opts ...func(*Terms)) (*hand, *Caller) {
		h, c := drive(t), writer(append(opts, func(o *Terms) { o.IdleHold = 10 * time.Minute })...)
		h.connects = true
		h.enter(c)
		h.answer(h.grant())
		h.connects = false
		h.step(h.l.Subscribed)
		if cmd := h.sends(protocol.Acquire); !cmd.Question {
			t.Fatalf("sent %+v", cmd)
		}
		return h, c
	}
	t.Run("it keeps the lock", func(t *testing.T) {
		h, c := asked(t)
		h.leave(c)
		if !c.Settled || c.Outcome() != nil {
			t.Errorf("Unlock returned %v, %v", c.Settled, c.Outcome())
		}
		h.reply(protocol.Answer{}, errSilence, time.Second)
		h.sendsNothing()
		next := writer()
		h.enter(next)
		h.in(next)
	})
	t.Run("another process wants it", func(t *testing.T) {
		h, c := asked(t)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.leave(c)
		if c.Settled {
			t.Error("Unlock has returned")
		}
		h.answer(h.kept(c.Token))
		h.sends(protocol.Release)
	})
	t.Run("a minimum hold is not over", func(t *testing.T) {
		h, c := asked(t, func(o *Terms) { o.MinHold = time.Minute })
		h.leave(c)
		if c.Settled {
			t.Error("Unlock has returned")
		}
		h.answer(h.kept(c.Token))
		h.sends(protocol.Release)
	})
}

func TestAReleaseWaitsForTheAnswerToAQuestion(t *testing.T) {
	h, in, out := keepingOut(t)
	h.asksAsReaders()
	h.abandon(out)
	h.leave(in)
	if in.Settled {
		t.Error("Unlock has returned")
	}
	h.answer(h.yes())
	h.sends(protocol.Release)
	h.answer(protocol.Answer{Outcome: protocol.Done})
	if !in.Settled || in.Outcome() != nil {
		t.Errorf("Unlock returned %v, %v", in.Settled, in.Outcome())
	}
}
