package lockstate

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
)

// calendar drives a schedule of cancels in time that it sets itself.
type calendar struct {
	t     *testing.T
	s     CancelSchedule
	now   time.Time
	sent  map[*Cancellation][]time.Duration // since noon
	trips []time.Duration
	told  map[*Cancellation][]Settlement
	reply func(*Cancellation) protocol.Canceled
}

func newCalendar(t *testing.T) *calendar {
	return &calendar{t: t, now: noon, sent: map[*Cancellation][]time.Duration{}, told: map[*Cancellation][]Settlement{},
		reply: func(*Cancellation) protocol.Canceled { return protocol.Canceled{} }}
}

// pass lets time go by; each round trip takes a millisecond.
func (c *calendar) pass(d time.Duration) {
	c.t.Helper()
	end := c.now.Add(d)
	for {
		batch := c.s.Take(c.now)
		if len(batch) == 0 {
			next := c.s.Next()
			if next.IsZero() || next.After(end) {
				c.now = end
				return
			}
			if !next.After(c.now) {
				c.t.Fatalf("due %v ago, but nothing was taken", c.now.Sub(next))
			}
			c.now = next
			continue
		}
		if len(batch) > CancelsAtOnce {
			c.t.Fatalf("%d at once", len(batch))
		}
		at := c.now.Sub(noon)
		c.trips = append(c.trips, at)
		c.now = c.now.Add(time.Millisecond)
		for _, g := range batch {
			c.sent[g] = append(c.sent[g], at)
			if told := c.s.Answered(g, c.reply(g), c.now); len(told.Callers) > 0 {
				c.told[g] = append(c.told[g], told)
			}
		}
	}
}

func (c *calendar) total() (n int) {
	for _, times := range c.sent {
		n += len(times)
	}
	return n
}

func wait24h(n int) []*Cancellation {
	var all []*Cancellation
	for i := range n {
		all = append(all, &Cancellation{ID: fmt.Sprintf("leased1:w:86400000:c:%016d:AAAAAAAAAAAAAAAA:cal", i)})
	}
	return all
}

func silentCancel(*Cancellation) protocol.Canceled {
	return protocol.Canceled{Fail: failureOf(errSilence)}
}

func TestAnAnsweredCancelIsRepeatedWhileAnEarlierCommandMayArriveAndNotLonger(t *testing.T) {
	c := newCalendar(t)
	g := wait24h(1)[0]
	g.until = arrives(noon, 24*time.Hour)
	c.s.Add(g, noon)
	once := wait24h(1)[0]
	c.s.Add(once, noon)
	c.pass(24 * time.Hour)
	ms := time.Millisecond
	if got, want := fmt.Sprint(c.sent[g]), fmt.Sprint([]time.Duration{0, 1100 * ms, 31200 * ms, time.Minute}); got != want {
		t.Errorf("sent at %s, want %s", got, want)
	}
	if got := c.sent[once]; len(got) != 1 {
		t.Errorf("what no command can follow was canceled at %v", got)
	}
}

func TestAfterItsTTLNoCommandOfAnIDIsWaitedFor(t *testing.T) {
	if got := arrives(noon, time.Second).Sub(noon); got != time.Second {
		t.Error(got)
	}
	if got := arrives(noon, 24*time.Hour).Sub(noon); got != time.Minute {
		t.Error(got)
	}
}

func TestTwoThousandLocksOfADaysTTLCostAFewCancelsEach(t *testing.T) {
	c := newCalendar(t)
	for _, g := range wait24h(2000) {
		g.until = arrives(noon, 24*time.Hour)
		c.s.Add(g, noon)
	}
	c.pass(24 * time.Hour)
	if n := c.total(); n < 2*2000 || n > 4*2000 {
		t.Errorf("%d cancels", n)
	}
	if n := len(c.trips); n > 5*2000/CancelsAtOnce {
		t.Errorf("%d round trips", n)
	}
}

// Acquires without answer during a stall of 3 s, each abandoned within it.
func TestFiveHundredWaitsAbandonedInAStallCostThreeCancelsEach(t *testing.T) {
	c := newCalendar(t)
	const ttl = 30 * time.Second
	c.reply = func(g *Cancellation) protocol.Canceled {
		if c.now.Sub(noon) < 3*time.Second {
			return silentCancel(g)
		}
		return protocol.Canceled{}
	}
	for i := range 500 {
		g := &Cancellation{ID: fmt.Sprintf("leased1:w:30000:c:%016d:AAAAAAAAAAAAAAAA:cal", i)}
		g.until = arrives(noon.Add(2*time.Second), ttl)
		c.s.Add(g, noon.Add(2*time.Second))
	}
	c.pass(10 * time.Minute)
	if n := c.total(); n > 500*4 || n < 500*2 {
		t.Errorf("%d cancels, of which one each had no answer", n)
	}
	if len(c.s.Pending) != 0 {
		t.Errorf("%d are still to be canceled", len(c.s.Pending))
	}
}

func TestACancelThatSomebodyWaitsForIsTriedAgainSoon(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	leisurely, awaited := wait24h(2)[0], wait24h(2)[1]
	awaited.Callers = []*Caller{writer()}
	c.s.Add(leisurely, noon)
	c.s.Add(awaited, noon)
	c.pass(900 * time.Millisecond)
	if n := len(c.sent[awaited]); n != 5 { // after 0, 50, 150, 350, 750 ms
		t.Errorf("what an Unlock waits for was tried %d times in 0.9 s: %v", n, c.sent[awaited])
	}
	if n := len(c.sent[leisurely]); n != 1 {
		t.Errorf("what nobody waits for was tried %d times in 0.9 s", n)
	}
	c.reply = func(*Cancellation) protocol.Canceled { return protocol.Canceled{Owned: true} }
	c.pass(time.Second)
	if told := c.told[awaited]; len(told) != 1 || !told[0].proved || told[0].Fail != nil {
		t.Errorf("told %+v", told)
	}
}

// It is the first of a chain that is tried, and the last that has callers.
func TestTheFirstOfTwoCancelsIsTriedAgainSoonForTheSakeOfTheSecond(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	both := wait24h(2)
	both[1].Callers = []*Caller{writer()}
	both[0].Then = both[1]
	c.s.Add(both[0], noon)
	c.pass(400 * time.Millisecond)
	if n := len(c.sent[both[0]]); n != 4 || len(c.sent[both[1]]) != 0 {
		t.Errorf("tried %d and %d times", n, len(c.sent[both[1]]))
	}
	c.reply = func(g *Cancellation) protocol.Canceled { return protocol.Canceled{Owned: g == both[0]} }
	c.pass(time.Second)
	if told := c.told[both[1]]; len(told) != 1 || !told[0].proved {
		t.Errorf("told %+v: one proof is enough", told)
	}
}

func TestDuringAnOutageCancelsCostOneRoundTripEachTwoSecondsAndAllAreTriedWhenItEnds(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	all := wait24h(2000)
	for _, g := range all {
		c.s.Add(g, noon)
	}
	c.pass(5*time.Minute + 5*time.Second) // not when they would be tried anyway
	if n := len(c.trips); n > 8*4+150+10 {
		t.Errorf("%d round trips in five minutes", n)
	}
	c.reply = func(*Cancellation) protocol.Canceled { return protocol.Canceled{} }
	c.s.Add(wait24h(2001)[2000], c.now) // the first that is answered
	c.pass(4 * time.Second)
	if len(c.s.Pending) != 0 {
		t.Errorf("%d were not tried within 4 s after the end of the outage", len(c.s.Pending))
	}
}

func TestManyCancelsDoNotCostMoreRoundTripsInALongOutageThanFew(t *testing.T) {
	for _, n := range []int{200, 20_000} {
		c := newCalendar(t)
		c.reply = silentCancel
		for _, g := range wait24h(n) {
			c.s.Add(g, noon)
		}
		c.pass(10 * time.Minute) // the pauses have grown
		before := len(c.trips)
		c.pass(10 * time.Minute)
		if trips := len(c.trips) - before; trips < 200 || trips > 310 {
			t.Errorf("%d cancels cost %d round trips in ten minutes, want at most one every 2 s", n, trips)
		}
	}
}

// Its next try among so many would come two minutes later.
func TestACancelAmongManyIsGivenUpAfterItsTTLToo(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	for _, g := range wait24h(20_000) {
		c.s.Add(g, noon)
	}
	g := &Cancellation{ID: "leased1:w:300000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:cal", Callers: []*Caller{writer()}}
	c.s.Add(g, noon)
	c.pass(5*time.Minute - time.Second)
	if len(c.told) != 0 {
		t.Error("given up before its TTL ended")
	}
	c.pass(2 * time.Second)
	if told := c.told[g]; len(told) != 1 || told[0].Fail == nil {
		t.Errorf("told %+v", told)
	}
}

// The alarm is set for what next says.
func TestTheNextCancelIsTheEarliest(t *testing.T) {
	c := newCalendar(t)
	for _, after := range []time.Duration{3 * time.Second, time.Second, 2 * time.Second} {
		c.s.Add(wait24h(1)[0], noon.Add(after))
	}
	if got := c.s.Next().Sub(noon); got != time.Second {
		t.Errorf("next after %v", got)
	}
	if got := c.s.Take(noon.Add(500 * time.Millisecond)); got != nil {
		t.Errorf("took %d too early", len(got))
	}
	c.s = CancelSchedule{}
	if !c.s.Next().IsZero() {
		t.Error("nothing is due, some time")
	}
}

func TestACancelWithoutAnswerIsGivenUpAfterItsTTL(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	g := &Cancellation{ID: "leased1:w:300000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:cal", Callers: []*Caller{writer()}}
	c.s.Add(g, noon)
	c.pass(5*time.Minute - time.Second)
	if len(c.told) != 0 || len(c.s.Pending) != 1 {
		t.Fatal("given up before its TTL ended")
	}
	c.pass(time.Minute)
	if told := c.told[g]; len(told) != 1 || told[0].proved || told[0].Fail == nil || len(c.s.Pending) != 0 {
		t.Errorf("told %+v", told)
	}
}

func TestThatTheLastTokenIsStillOursProvesThatNobodyWasLetIn(t *testing.T) {
	for what, c := range map[string]struct {
		proof  uint64
		r      protocol.Canceled
		proved bool
	}{
		"it owned":                {7, protocol.Canceled{Owned: true, Token: 7}, true},
		"it owned after a flush":  {7, protocol.Canceled{Owned: true}, true},
		"our token is the last":   {7, protocol.Canceled{Token: 7}, true},
		"another had a later one": {7, protocol.Canceled{Token: 8}, false},
		"nobody remembers":        {7, protocol.Canceled{}, false},
		"we gave none out":        {0, protocol.Canceled{}, false},
		"the lock went back":      {7, protocol.Canceled{Token: 6}, false},
	} {
		t.Run(what, func(t *testing.T) {
			cal := newCalendar(t)
			cal.reply = func(*Cancellation) protocol.Canceled { return c.r }
			g := wait24h(1)[0]
			g.proof, g.Callers = c.proof, []*Caller{writer()}
			cal.s.Add(g, noon)
			cal.pass(time.Second)
			if told := cal.told[g]; len(told) != 1 || told[0].proved != c.proved {
				t.Errorf("told %+v", told)
			}
		})
	}
}

func TestNothingIsCanceledThroughAClosedRedisClient(t *testing.T) {
	c := newCalendar(t)
	closed := fmt.Errorf("%w: %w", protocol.ErrClosed, io.ErrClosedPipe)
	c.reply = func(*Cancellation) protocol.Canceled {
		return protocol.Canceled{Fail: &protocol.Failure{Err: closed, Kind: protocol.ClientClosed}}
	}
	g := wait24h(1)[0]
	g.Callers = []*Caller{writer()}
	c.s.Add(g, noon)
	c.pass(time.Hour)
	if told := c.told[g]; len(c.sent[g]) != 1 || len(told) != 1 || !errors.Is(told[0].Fail.Err, io.ErrClosedPipe) {
		t.Errorf("sent %v, told %+v", c.sent[g], told)
	}
}

func TestAFloodOfFalseMessagesDoesNotFillTheMemory(t *testing.T) {
	var s CancelSchedule
	for _, g := range wait24h(MaxCancels) {
		if !s.Add(g, noon) {
			t.Fatal("refused")
		}
	}
	if s.Add(&Cancellation{}, noon) {
		t.Error("no bound")
	}
	if !s.Add(&Cancellation{Release: true}, noon) || !s.Add(&Cancellation{Then: &Cancellation{Release: true}}, noon) {
		t.Error("a release is not confirmed")
	}
}

func TestAWallClockThatIsSetBackDelaysNoCancel(t *testing.T) {
	now := time.Now()
	var s CancelSchedule
	g := &Cancellation{ID: "x", until: now.Add(time.Minute)}
	s.Add(g, now)
	s.Take(now)
	s.Answered(g, protocol.Canceled{}, now)
	now = clocktest.Asleep(t, now.Add(cancelAgain+cancelGrid), -time.Hour).Add(time.Hour)
	now = clocktest.Asleep(t, now, -time.Hour)
	if due := s.Take(now); len(due) != 1 {
		t.Errorf("nothing is due; the next is in %v", s.Next().Sub(now))
	}
}

// An acquire without answer may arrive after its request was granted by the next one,
// and let go: it would own the lock, or wait, for nobody.

func TestALateAcquireOfAGrantThatWasLetGoIsCanceled(t *testing.T) {
	again := func(t *testing.T, c *Caller) (*hand, string) {
		h := driveFrom(t, time.Now()) // which has both clocks
		h.enter(c)
		id := h.sends(protocol.Acquire).ID
		h.reply(protocol.Answer{}, errors.New("no answer"), time.Millisecond)
		h.pass(time.Millisecond)
		h.sends(protocol.Acquire)
		h.answer(h.grant())
		h.in(c)
		return h, id
	}
	late := func(t *testing.T, h *hand, id string) {
		t.Helper()
		for _, g := range h.unwanted {
			if g.ID == id && g.until.After(h.now.Add(handTTL/2)) {
				return
			}
		}
		t.Errorf("it is not canceled for as long as the acquire may arrive, but %+v", h.unwanted)
	}
	t.Run("by a release", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.leave(c)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.settled(c, nil)
		late(t, h, id)
	})
	t.Run("by a yield", func(t *testing.T) {
		c, next := writer(), writer(func(o *Terms) { o.TTL = 2 * handTTL })
		h, id := again(t, c)
		h.enter(next)
		h.hears(protocol.MessageWanted, id, 0)
		h.pass(time.Second)
		h.leave(c)
		h.sends(protocol.Yield)
		h.answer(h.queue())
		late(t, h, id)
	})
	t.Run("by a downgrade", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.downgrade(c)
		h.sends(protocol.Downgrade)
		h.answer(h.grant())
		late(t, h, id)
	})
	t.Run("as it was lost", func(t *testing.T) {
		c := writer()
		h, id := again(t, c)
		h.hears(protocol.MessageRevoked, id, 0)
		late(t, h, id)
	})
	t.Run("as nobody waits anymore for an idle one that was asked about", func(t *testing.T) {
		c := writer(func(o *Terms) { o.IdleHold = time.Hour })
		h, id := again(t, c)
		h.leave(c)
		h.sendsNothing()
		h.slept(handMargin + 1) // so that it cannot be entered on without asking
		next := h.enter(writer())
		h.sends(protocol.Acquire)
		h.abandon(next)
		h.answer(h.queue())
		h.state(none)
		late(t, h, id)
	})
	t.Run("but not where every acquire was answered", func(t *testing.T) {
		c := writer()
		h := holding(t, c)
		h.leave(c)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.cancels()
	})
}

// What a failover brings back is given up for the rest of its minimum hold only, as long as it can come back.
func TestACancelKeepsTheMinimumHoldOfARequestThatWasReleased(t *testing.T) {
	var s CancelSchedule
	hold, id := noon.Add(time.Hour), func(ttl time.Duration) string {
		return protocol.NewRequest(protocol.NewClientID("o"), protocol.Exclusive, ttl, false, protocol.Unproved, protocol.Origin{}).ID
	}
	canceled := func(id string, now time.Time) time.Time {
		g := &Cancellation{ID: id}
		s.Add(g, now)
		return g.Keep
	}
	short, long, failed := id(time.Minute), id(2*time.Hour), id(2*time.Hour)
	s.Released(short, hold, noon)
	s.Released(long, hold, noon)
	s.Add(&Cancellation{ID: failed, Keep: hold}, noon) // a release that had no answer
	for id, want := range map[string]time.Time{short: hold, long: hold, failed: hold, id(time.Hour): {}} {
		if got := canceled(id, noon.Add(time.Minute-1)); !got.Equal(want) {
			t.Errorf("the cancel of %s keeps the lock until %v, want %v", id, got, want)
		}
	}
	s.Released(id(time.Hour), hold.Add(time.Hour), noon.Add(time.Minute)) // forgets what is over
	for id, want := range map[string]time.Time{short: {}, long: hold, failed: hold} {
		if got := canceled(id, hold.Add(-1)); !got.Equal(want) {
			t.Errorf("later, the cancel of %s keeps the lock until %v, want %v", id, got, want)
		}
	}
	s.Released(id(time.Hour), hold.Add(time.Hour), hold)
	if len(s.minHolds) != 2 || len(s.released) != 2 {
		t.Errorf("%d and %d are remembered of two that go on", len(s.minHolds), len(s.released))
	}
	for range 2 * minHoldsRemembered {
		s.Released(id(time.Hour), hold.Add(time.Hour), hold)
	}
	last := id(time.Hour)
	s.Released(last, hold.Add(time.Hour), hold)
	s.Released(last, hold.Add(2*time.Hour), hold) // by another try
	if a, b := len(s.minHolds), len(s.released); a != minHoldsRemembered-1 && a != minHoldsRemembered || a != b {
		t.Errorf("%d and %d are remembered", a, b)
	}
	if got := canceled(last, hold); !got.Equal(hold.Add(2 * time.Hour)) {
		t.Errorf("until %v", got)
	}
}
