package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// One who only tries, beside a process that may keep its grant idle. See
// TestATryGetsAnIdleGrantOfAnotherProcess for both sides of it.

const (
	idlersID = "leased1:w:10000:ci:0000000000000000:BBBBBBBBBBBBBBBB:other"
	busysID  = "leased1:w:10000:c:0000000000000000:BBBBBBBBBBBBBBBB:other"
)

// refused is the answer that another has the lock, with so many queued behind it.
func (h *hand) refused(blocker string, queued int) protocol.Answer {
	a := h.queue()
	a.Outcome, a.Blocker, a.Place = protocol.Refused, blocker, queued
	return a
}

func TestATryWaitsShortlyForAnOwnerThatMayBeIdle(t *testing.T) {
	h := drive(t)
	c := h.enter(trying(writer()))
	if first := h.sends(protocol.Acquire); first.Wait {
		t.Error("it queues before it knows who has the lock")
	}
	h.answer(h.refused(idlersID, 0))
	h.out(c)
	cmd := h.sends(protocol.Acquire)
	if !cmd.Wait {
		t.Error("it does not queue, so the owner hears nothing")
	}
	h.answer(h.queue())
	h.pass(idleOwnersTime - 1)
	h.out(c)
	h.pass(1)
	h.turned(c, ErrLocked)
	h.cancels(cmd.ID)
}

func TestATryWaitsForWhatHasToTravelFromAnIdleOwner(t *testing.T) {
	for trip, want := range map[time.Duration]time.Duration{
		100 * time.Millisecond: idleOwnersTime + 400*time.Millisecond,
		time.Second:            idleOwnersTime + maxSilence,
	} {
		h := drive(t)
		h.trip = trip
		c := h.enter(trying(writer()))
		h.answer(h.refused(idlersID, 0))
		h.pass(trip)
		h.answer(h.queue())
		h.pass(want - trip - 1)
		h.out(c)
		h.pass(1)
		h.turned(c, ErrLocked)
	}
}

// The first answer may have had to wait for a connection.
func TestATryWaitsNoLongerThanTheDistanceTakesOnceItIsKnown(t *testing.T) {
	h := drive(t)
	h.trip = 200 * time.Millisecond
	c := h.enter(trying(writer()))
	h.answer(h.refused(idlersID, 0))
	h.trip = 10 * time.Millisecond
	h.answer(h.queue())
	h.pass(idleOwnersTime + 3*h.trip - 1)
	h.out(c)
	h.pass(1)
	h.turned(c, ErrLocked)
}

// The servers of a quorum may be split among several that tried at once.
func TestATryQueuesWhereNobodyOwnsAMajority(t *testing.T) {
	for _, split := range []bool{true, false} {
		h := drive(t)
		c := h.enter(trying(writer()))
		a := h.refused(busysID, 0)
		a.Split = split
		h.answer(a)
		if !split {
			h.turned(c, ErrLocked)
			continue
		}
		if cmd := h.sends(protocol.Acquire); !cmd.Wait {
			t.Error("it does not queue, so no ticket decides")
		}
		h.answer(h.queue())
		h.pass(idleOwnersTime - 1)
		h.out(c)
		h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		h.in(c)
	}
}

func TestATryEntersWhenAnIdleOwnerLetsGo(t *testing.T) {
	h := drive(t).keep()
	c := h.enter(trying(reader()))
	h.answer(h.refused(idlersID, 0))
	h.answer(h.queue())
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
	h.in(c)
	bound := h.enter(reader(func(o *Terms) { o.MaxHold = time.Minute }))
	h.in(bound)
	h.pass(time.Minute)
	h.lost(bound) // the other's patience was no maximum of its hold
}

// Readers that try share what is asked for the first of them, also where the answer takes a while.
func TestReadersThatTryWaitTogetherForAnIdleOwner(t *testing.T) {
	for _, granted := range []bool{true, false} {
		h := drive(t)
		a, b := h.enter(trying(reader())), h.enter(trying(reader()))
		h.answer(h.refused(idlersID, 0))
		h.pass(idleOwnersTime / 2)
		c := h.enter(trying(reader())) // while the request is under way
		h.answer(h.queue())
		d := h.enter(trying(reader())) // while it waits
		h.turned(h.enter(trying(writer())), ErrLocked)
		all := []*Caller{a, b, c, d}
		if granted {
			h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
			h.in(all...)
			continue
		}
		h.pass(idleOwnersTime/2 - 1)
		h.out(all...)
		h.pass(1) // together, though some came later
		for _, c := range all {
			h.turned(c, ErrLocked)
		}
	}
}

// A reader that waits anyway came in between.
func TestAReaderThatTriesDoesNotWaitBehindOneThatWaitsAnyway(t *testing.T) {
	h := drive(t)
	a := h.enter(trying(reader()))
	h.answer(h.refused(idlersID, 0))
	h.sends(protocol.Acquire)
	b := h.enter(reader())
	c := h.enter(trying(reader())) // shares the answer that is under way
	h.answer(h.queue())
	h.turned(c, ErrLocked)
	h.turned(h.enter(trying(reader())), ErrLocked)
	h.pass(idleOwnersTime)
	h.turned(a, ErrLocked)
	h.out(b)
}

// The process itself keeps the lock idle for writing, and gives that grant up for the first reader.
func TestReadersThatTryShareTheAnswerToAYield(t *testing.T) {
	h := drive(t)
	w := writer(func(o *Terms) { o.IdleHold = time.Minute })
	h.enter(w)
	h.answer(h.grant())
	h.in(w)
	h.leave(w)
	a := h.enter(trying(reader()))
	h.sends(protocol.Yield)
	b := h.enter(trying(reader()))
	h.turned(h.enter(trying(writer())), ErrLocked)
	h.answer(h.grant())
	h.in(a, b)
}

func TestATryIsTurnedAwayAtOnceByAnyOtherOwner(t *testing.T) {
	for name, c := range map[string]struct {
		blocker string
		queued  int
	}{
		"that is not idle":            {busysID, 0},
		"for whom others wait":        {idlersID, 1},
		"that is foreign":             {"foreign:ci:", 0},
		"that is of a later format":   {"leased2:w:10000:ci:0000000000000000:BBBBBBBBBBBBBBBB:other", 0},
		"that nobody can name":        {"", 0},
		"whose flags are not of ours": {"leased1:w:10000:cii:0000000000000000:BBBBBBBBBBBBBBBB:other", 0},
	} {
		t.Run(name, func(t *testing.T) {
			h := drive(t)
			x := h.enter(trying(writer()))
			h.answer(h.refused(c.blocker, c.queued))
			h.turned(x, ErrLocked)
			h.sendsNothing()
			h.cancels()
			h.state(none)
		})
	}
}

func TestATryThatWaitsForAnIdleOwnerIsTurnedAwayByTrouble(t *testing.T) {
	h := drive(t)
	c := h.enter(trying(writer()))
	h.answer(h.refused(idlersID, 0))
	h.reply(protocol.Answer{}, errSilence, time.Minute)
	h.turned(c, errSilence)
}

func TestAnAnswerThatTakesLongDoesNotKeepATry(t *testing.T) {
	h := drive(t)
	c := h.enter(trying(writer()))
	h.answer(h.refused(idlersID, 0))
	id := h.sends(protocol.Acquire).ID
	h.pass(idleOwnersTime)
	h.turned(c, ErrLocked)
	h.cancels()
	h.answer(h.queue())
	h.cancels(id)
}

// Others read the id to know whether the grant may be idle.
func TestAGrantIsKeptIdleOnlyIfItsIdSaysSo(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Minute }
	says := func(id string) bool {
		who, err := protocol.ParseID(id)
		if err != nil {
			t.Fatal(err)
		}
		return who.Idles
	}
	t.Run("of the caller it was asked for", func(t *testing.T) {
		for _, idles := range []bool{false, true} {
			a := writer()
			if idles {
				idle(a.Opts)
			}
			h := drive(t)
			h.enter(a)
			if id := h.sends(protocol.Acquire).ID; says(id) != idles {
				t.Errorf("idle hold %v: %s", a.Opts.IdleHold, id)
			}
			h.answer(h.grant())
			h.enter(writer(idle))
			b := h.l.waiting.first
			h.leave(a)
			h.leave(b)
			if !idles {
				h.sends(protocol.Release)
			} else {
				h.sendsNothing()
			}
		}
	})
	t.Run("of a yield", func(t *testing.T) {
		a, b := writer(), writer(idle)
		h := holding(t, a)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.enter(b)
		h.pass(20 * time.Millisecond)
		h.leave(a)
		if next := h.sends(protocol.Yield).Next; !says(next) {
			t.Error(next)
		}
	})
	t.Run("of a place", func(t *testing.T) {
		h := holding(t, reader())
		h.enter(writer(idle))
		if id := h.sends(protocol.Acquire).ID; !says(id) {
			t.Error(id)
		}
	})
	t.Run("of a downgrade", func(t *testing.T) {
		c := writer(idle)
		h := holding(t, c)
		h.downgrade(c)
		if next := h.sends(protocol.Downgrade).Next; !says(next) {
			t.Error(next)
		}
	})
}

func TestATryIsRefusedWhereItsYieldIsQueued(t *testing.T) {
	r := reader(func(o *Terms) { o.IdleHold = time.Minute })
	h := holding(t, r)
	h.leave(r)
	h.sendsNothing() // it idles
	w := h.enter(trying(writer()))
	id := h.sends(protocol.Yield).Next // another's writer queues at this time
	h.answer(h.queue())
	h.turned(w, ErrLocked)
	h.cancels(id)
}

func TestARefusedTryLeavesNoRequestInTheQueue(t *testing.T) {
	r := reader(func(o *Terms) { o.IdleHold = time.Minute })
	h := holding(t, r)
	h.leave(r)
	w := h.enter(trying(writer()))
	id := h.sends(protocol.Yield).Next
	h.answer(h.queue()) // the yield has put it into the queue
	for range 10 {
		if h.flight != nil {
			a := h.queue()
			a.Outcome = protocol.Refused
			h.answer(a)
		}
		h.pass(time.Second)
	}
	h.turned(w, ErrLocked)
	h.cancels(id)
}

const idleReadersID = "leased1:r:10000:ci:0000000000000000:BBBBBBBBBBBBBBBB:other"

// A process that keeps a reader's grant idle tries to get the lock for writing, while another process
// keeps one, too. The yield finds the other, as an acquire would.
func TestATryWaitsShortlyForAnOwnerThatMayBeIdleAfterAYieldToo(t *testing.T) {
	r := reader(func(o *Terms) { o.IdleHold = time.Minute })
	h := holding(t, r)
	h.leave(r)
	w := h.enter(trying(writer()))
	next := h.sends(protocol.Yield).Next
	a := h.queue()
	a.Blocker = idleReadersID // the yield has sent it wanted
	h.answer(a)
	h.out(w)
	h.pass(idleOwnersTime - 1)
	h.hears(protocol.MessageGranted, next, h.token())
	h.in(w)
}

// A caller that waits gives up while its acquire is under way, and leaves the request to a try.
func TestATryWaitsShortlyForAnOwnerThatMayBeIdleWhereItIsQueuedAlready(t *testing.T) {
	h := drive(t)
	c := h.enter(writer())
	id := h.sends(protocol.Acquire).ID
	h.abandon(c)
	w := h.enter(trying(writer()))
	a := h.queue()
	a.Blocker = idlersID
	h.answer(a)
	h.out(w)
	h.hears(protocol.MessageGranted, id, h.token())
	h.in(w)
}

// The servers of a quorum grant the successor by messages that overtake their answers to the yield; the
// message that announces the grant follows the answer.
func TestATryIsNotRefusedByAnAnswerThatNamesNobody(t *testing.T) {
	r := reader(func(o *Terms) { o.IdleHold = time.Minute })
	h := holding(t, r)
	h.leave(r)
	w := h.enter(trying(writer()))
	next := h.sends(protocol.Yield).Next
	h.answer(protocol.Answer{Outcome: protocol.Enqueued, Left: protocol.Ownerless})
	h.out(w)
	h.hears(protocol.MessageGranted, next, h.token())
	h.in(w)
}
