package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Tenure: how long a process keeps a lock that others want.

func TestLocalHandoffsAreBoundedByCountWhileAnotherWaits(t *testing.T) {
	two := func(o *Terms) { o.Handoffs = 2 }
	for _, wanted := range []bool{true, false} {
		a, b, c := writer(two), writer(two), writer(two)
		h := holding(t, a)
		h.enter(b, c)
		if wanted {
			h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		}
		h.leave(a)
		h.in(b)
		h.leave(b)
		if !wanted {
			h.in(c)
			h.sendsNothing()
			continue
		}
		h.out(c)
		h.sends(protocol.Yield)
		h.answer(h.grant()) // nobody wanted it anymore: a new tenure
		h.in(c)
		if h.l.grant.served != 1 || h.l.grant.wanted {
			t.Errorf("a new tenure starts with %+v", h.l.grant)
		}
	}
}

func TestLocalHandoffsAreBoundedByTimeWhileAnotherWaits(t *testing.T) {
	for d, over := range map[time.Duration]bool{10*time.Millisecond - 1: false, 10 * time.Millisecond: true} {
		a, b := writer(), writer()
		h := drive(t)
		h.enter(a)
		g := h.grant()
		g.More = true // the answer says that others wait
		h.answer(g)
		h.enter(b)
		h.pass(d)
		h.leave(a)
		if over {
			h.out(b)
			h.sends(protocol.Yield)
		} else {
			h.in(b)
		}
	}
}

// Wanted can be lost.
func TestALongTenureYieldsAtASlowPaceThoughNobodyWasHeardToWantIt(t *testing.T) {
	for d, over := range map[time.Duration]bool{time.Second - 1: false, time.Second: true} {
		a, b := writer(), writer()
		h := holding(t, a)
		h.enter(b)
		h.pass(d)
		h.leave(a)
		if over {
			h.out(b)
			h.sends(protocol.Yield)
			h.answer(h.grant())
		}
		h.in(b)
	}
}

func TestReuseOfAnIdleGrantBeginsATenure(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Minute }
	a, b, c := writer(idle), writer(idle), writer(idle)
	h := holding(t, a).keep()
	h.leave(a)
	h.pass(30 * time.Second)
	h.enter(b, c)
	h.in(b)
	h.leave(b)
	h.in(c)
	h.sendsNothing()
}

func TestAConfirmedGrantIsWantedOnlyIfTheAnswerSaysSo(t *testing.T) {
	for _, more := range []bool{false, true} {
		a, b := writer(), writer()
		h := holding(t, a)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.enter(b)
		h.now = h.now.Add(handWindow)
		h.leave(a)
		g := h.grant()
		g.More = more
		h.answer(g)
		h.in(b)
		if h.l.grant.wanted != more {
			t.Errorf("others wait: %v, the grant is taken for wanted: %v", more, h.l.grant.wanted)
		}
	}
}

func TestAWantedSharedGrantAdmitsThoseWhoWaitedWhenItCameAndNobodyNew(t *testing.T) {
	r := []*Caller{reader(), reader(), reader(), reader()}
	h := drive(t)
	h.enter(r[0], r[1], r[2])
	g := h.grant()
	g.More = true
	h.answer(g)
	h.in(r[0], r[1], r[2])
	h.enter(r[3])
	h.out(r[3])
	h.leave(r[0])
	h.leave(r[1])
	h.out(r[3])
	h.sendsNothing()
	h.leave(r[2])
	h.sends(protocol.Yield)
	h.answer(h.grant())
	h.in(r[3])
	if r[0].Token != r[2].Token || r[3].Token <= r[0].Token {
		t.Errorf("tokens %d, %d, then %d", r[0].Token, r[2].Token, r[3].Token)
	}
}

func TestASharedGrantThatNobodyWantsAdmitsReadersAtOnce(t *testing.T) {
	a, b, c := reader(), reader(), reader()
	h := holding(t, a)
	h.enter(b)
	h.in(b)
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.enter(c)
	h.out(c)
	h.abandon(c)
	h.leave(a)
	h.leave(b)
	h.sends(protocol.Release)
}

func TestReadersBehindAWaitingWriterWaitToo(t *testing.T) {
	r1, w, r2 := reader(), writer(), reader()
	h := holding(t, r1)
	h.enter(w, r2)
	h.out(w, r2)
	h.sends(protocol.Acquire) // a place for w
	h.answer(h.queue())
	h.leave(r1)
	h.sends(protocol.Yield)
	h.answer(h.grant())
	h.in(w)
	h.out(r2)
}

// Nobody who only tries waits for those inside to leave.
func TestOneWhoOnlyTriesIsTurnedAwayWhereAWantedSharedGrantAdmitsNobodyNew(t *testing.T) {
	h := holding(t, reader())
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	h.turned(h.enter(trying(reader())), ErrLocked)
}

func TestAGrantThatIdledLongHasItsWholeTenureBeforeIt(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Hour }
	a, b, c := writer(idle), writer(idle), writer(idle)
	h := holding(t, a).keep()
	h.leave(a)
	h.pass(2 * maxTenure)
	h.enter(b)
	h.in(b)
	h.enter(c)
	h.leave(b)
	h.in(c)
	h.sendsNothing()
}
