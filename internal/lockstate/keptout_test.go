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
	h.hears("wanted", h.l.grant.req.ID, 0)
	out = h.enter(reader())
	h.out(out)
	h.sendsNothing()
	return h, in, out
}

// asksAsReaders lets the time pass until the readers ask, and checks the question.
func (h *hand) asksAsReaders() {
	h.t.Helper()
	pause := handTTL / 3
	if pause > LongestPoll {
		pause = LongestPoll
	}
	h.pass(pause - 1)
	h.sendsNothing()
	h.pass(1)
	if q := h.sends(protocol.Acquire); q.ID != h.l.grant.req.ID || !q.Held || q.Wait {
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
	if h.sendsNothing(); h.l.grant.wanted {
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
		h.pass(LongestPoll - 1)
		h.hears("wanted", h.l.grant.req.ID, 0)
	}
	h.sendsNothing()
	h.out(out)
	h.asksAsReaders()
}

func TestTheQuestionOfReadersComesALittleLaterThanTheWaiterRepeatsItself(t *testing.T) {
	in := reader()
	h := holding(t, in)
	h.luck = 1
	h.hears("wanted", h.l.grant.req.ID, 0)
	h.enter(reader())
	h.pass(LongestPoll*4/3 - 1)
	h.sendsNothing()
	h.pass(1)
	h.sends(protocol.Acquire)
}

// The answer can be older than the message, which came by another connection.
func TestAMessageThatOthersWaitCountsMoreThanAnAnswerUnderWay(t *testing.T) {
	h, _, out := keepingOut(t)
	h.asksAsReaders()
	h.hears("wanted", h.l.grant.req.ID, 0)
	h.answer(h.kept(h.top))
	if h.out(out); !h.l.grant.wanted {
		t.Error("the grant is not taken for wanted")
	}
	h.sends(protocol.Acquire) // again
	h.answer(h.yes())
	h.out(out)
	h.sendsNothing()
	h.asksAsReaders()
}

func TestReadersAskAtOnceWhenTheyHearThatNobodyWaits(t *testing.T) {
	h, _, out := keepingOut(t)
	h.hears("unwanted", "leased1:r:10000:c:0000000000000099:AAAAAAAAAAAAAAAA:hand", 0) // an earlier grant
	h.sendsNothing()
	h.hears("unwanted", h.l.grant.req.ID, 0)
	h.sends(protocol.Acquire)
	h.hears("unwanted", h.l.grant.req.ID, 0) // of another one, which gave up after the question
	h.answer(h.yes())
	h.out(out)
	h.sends(protocol.Acquire)
	h.answer(h.kept(h.top))
	h.in(out)
	h.hears("unwanted", h.l.grant.req.ID, 0)
	h.sendsNothing()
}

// It costs nothing until somebody comes.
func TestAReaderThatComesAfterNobodyWaitsAsksFirst(t *testing.T) {
	h := holding(t, reader())
	h.hears("wanted", h.l.grant.req.ID, 0)
	h.hears("unwanted", h.l.grant.req.ID, 0)
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
			h.leave(in)
			h.sends(protocol.Yield)
			h.answer(h.queue())
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, in, out := keepingOut(t)
			leave(h, in, out)
			for range 10 {
				h.pass(LongestPoll / 4)
				if h.flight != nil && h.flight.Held {
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
	h.hears("wanted", h.l.grant.req.ID, 0)
	h.enter(reader())
	h.pass(time.Minute)
	h.sendsNothing()
}

// A grant that idles is given back when it is wanted, and one that is not believed is asked about under its id.
func TestNobodyAsksForAReaderThatFindsNoneInside(t *testing.T) {
	c := reader(func(o *Terms) { o.IdleHold = time.Hour })
	h := driveFrom(t, time.Now())
	h.enter(c)
	h.answer(h.grant())
	h.leave(c)
	h.slept(time.Second) // the clocks moved apart
	h.enter(reader())
	if cmd := h.sends(protocol.Acquire); cmd.Held {
		t.Errorf("asks with %+v", cmd)
	}
}

func TestAReaderThatComesLaterAsksAtOnce(t *testing.T) {
	in := reader()
	h := holding(t, in).keep()
	h.hears("wanted", h.l.grant.req.ID, 0)
	h.pass(time.Minute)
	h.sendsNothing()
	out := h.enter(reader())
	if q := h.sends(protocol.Acquire); !q.Held {
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
			h.hears("wanted", h.l.grant.req.ID, 0)
			h.turned(h.enter(trying(reader())), ErrLocked) // others have just said so
			h.sendsNothing()
			h.pass(LongestPoll)
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
	if h.cancels(); !in.Settled || in.Outcome() != nil {
		t.Errorf("Unlock returned %v, %v", in.Settled, in.Outcome())
	}
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
	h, _, _ := keepingOut(t)
	h.renewals = nil
	for range 8 {
		h.asksAsReaders()
		h.answer(h.yes())
	}
	if n := len(h.renewals); n < 6 {
		t.Errorf("%d renewals in %v", n, 8*LongestPoll)
	}
}

// Where no message comes, readers that take turns would keep a writer out, so from a second on each newcomer
// asks, and others as well if it is told that nobody waits.
func TestReadersWithoutMessagesAskWhetherOthersWait(t *testing.T) {
	in := reader()
	h := drive(t).keep()
	h.polling = true
	h.enter(in)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.pass(longestTenure - 1)
	h.in(h.enter(reader()))
	h.pass(1)
	out := h.enter(reader())
	if q := h.sends(protocol.Acquire); !q.Held {
		t.Errorf("asks with %+v", q)
	}
	h.out(out)
	h.answer(h.kept(h.top))
	h.in(out)
	h.pass(longestTenure - 1)
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
	h := drive(t).keep()
	h.polling = true
	h.enter(reader())
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.pass(longestTenure)
	out := h.enter(reader())
	h.sends(protocol.Acquire)
	h.reply(protocol.Answer{}, errSilence, 0)
	h.asksAsReaders()
	h.answer(h.kept(h.top))
	h.in(out)
}
