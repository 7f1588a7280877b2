package leased

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// calendar drives a schedule of cancels in time that it sets itself.
type calendar struct {
	t     *testing.T
	s     cancelSchedule
	now   time.Time
	sent  map[*ghost][]time.Duration // since noon
	trips []time.Duration
	told  map[*ghost][]settlement
	reply func(*ghost) cancelled
}

func newCalendar(t *testing.T) *calendar {
	return &calendar{t: t, now: noon, sent: map[*ghost][]time.Duration{}, told: map[*ghost][]settlement{},
		reply: func(*ghost) cancelled { return cancelled{} }}
}

// pass lets time go by; each round trip takes a millisecond.
func (c *calendar) pass(d time.Duration) {
	c.t.Helper()
	end := c.now.Add(d)
	for {
		batch := c.s.take(c.now)
		if len(batch) == 0 {
			next := c.s.next()
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
		if len(batch) > cancelsAtOnce {
			c.t.Fatalf("%d at once", len(batch))
		}
		at := c.now.Sub(noon)
		c.trips = append(c.trips, at)
		c.now = c.now.Add(time.Millisecond)
		for _, g := range batch {
			c.sent[g] = append(c.sent[g], at)
			if told := c.s.answered(g, c.reply(g), c.now); len(told.callers) > 0 {
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

func wait24h(n int) []*ghost {
	var all []*ghost
	for i := range n {
		all = append(all, &ghost{id: fmt.Sprintf("leased1:w:86400000:c:%016d:AAAAAAAAAAAAAAAA:cal", i)})
	}
	return all
}

func silentCancel(*ghost) cancelled { return cancelled{fail: classify(errSilence)} }

func TestAnAnsweredCancelIsRepeatedWhileAnEarlierCommandMayArriveAndNotLonger(t *testing.T) {
	c := newCalendar(t)
	g := wait24h(1)[0]
	g.until = arrives(noon, 24*time.Hour)
	c.s.add(g, noon)
	once := wait24h(1)[0]
	c.s.add(once, noon)
	c.pass(24 * time.Hour)
	ms := time.Millisecond
	if got, want := fmt.Sprint(c.sent[g]), fmt.Sprint([]time.Duration{0, 1100 * ms, 31200 * ms, time.Minute}); got != want {
		t.Errorf("sent at %s, want %s", got, want)
	}
	if got := c.sent[once]; len(got) != 1 {
		t.Errorf("what no command can follow was cancelled at %v", got)
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
		c.s.add(g, noon)
	}
	c.pass(24 * time.Hour)
	if n := c.total(); n < 2*2000 || n > 4*2000 {
		t.Errorf("%d cancels", n)
	}
	if n := len(c.trips); n > 5*2000/cancelsAtOnce {
		t.Errorf("%d round trips", n)
	}
}

// Acquires without answer during a stall of 3 s, each abandoned within it.
func TestFiveHundredWaitsAbandonedInAStallCostThreeCancelsEach(t *testing.T) {
	c := newCalendar(t)
	const ttl = 30 * time.Second
	c.reply = func(g *ghost) cancelled {
		if c.now.Sub(noon) < 3*time.Second {
			return silentCancel(g)
		}
		return cancelled{}
	}
	for i := range 500 {
		g := &ghost{id: fmt.Sprintf("leased1:w:30000:c:%016d:AAAAAAAAAAAAAAAA:cal", i)}
		g.until = arrives(noon.Add(2*time.Second), ttl)
		c.s.add(g, noon.Add(2*time.Second))
	}
	c.pass(10 * time.Minute)
	if n := c.total(); n > 500*4 || n < 500*2 {
		t.Errorf("%d cancels, of which one each had no answer", n)
	}
	if len(c.s.pending) != 0 {
		t.Errorf("%d are still to be cancelled", len(c.s.pending))
	}
}

func TestACancelThatSomebodyWaitsForIsTriedAgainSoon(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	leisurely, awaited := wait24h(2)[0], wait24h(2)[1]
	awaited.gone = []*caller{writer()}
	c.s.add(leisurely, noon)
	c.s.add(awaited, noon)
	c.pass(900 * time.Millisecond)
	if n := len(c.sent[awaited]); n != 5 { // after 0, 50, 150, 350, 750 ms
		t.Errorf("what an Unlock waits for was tried %d times in 0.9 s: %v", n, c.sent[awaited])
	}
	if n := len(c.sent[leisurely]); n != 1 {
		t.Errorf("what nobody waits for was tried %d times in 0.9 s", n)
	}
	c.reply = func(*ghost) cancelled { return cancelled{owned: true} }
	c.pass(time.Second)
	if told := c.told[awaited]; len(told) != 1 || !told[0].proved || told[0].fail != nil {
		t.Errorf("told %+v", told)
	}
}

// It is the first of a chain that is tried, and the last that has callers.
func TestTheFirstOfTwoCancelsIsTriedAgainSoonForTheSakeOfTheSecond(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	both := wait24h(2)
	both[1].gone = []*caller{writer()}
	both[0].then = both[1]
	c.s.add(both[0], noon)
	c.pass(400 * time.Millisecond)
	if n := len(c.sent[both[0]]); n != 4 || len(c.sent[both[1]]) != 0 {
		t.Errorf("tried %d and %d times", n, len(c.sent[both[1]]))
	}
	c.reply = func(g *ghost) cancelled { return cancelled{owned: g == both[0]} }
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
		c.s.add(g, noon)
	}
	c.pass(5 * time.Minute)
	if n := len(c.trips); n > 8*4+150+10 {
		t.Errorf("%d round trips in five minutes", n)
	}
	c.reply = func(*ghost) cancelled { return cancelled{} }
	c.pass(4 * time.Second)
	if len(c.s.pending) != 0 {
		t.Errorf("%d were not tried within 4 s after the end of the outage", len(c.s.pending))
	}
}

// The alarm is set for what next says.
func TestTheNextCancelIsTheEarliest(t *testing.T) {
	c := newCalendar(t)
	for _, after := range []time.Duration{3 * time.Second, time.Second, 2 * time.Second} {
		c.s.add(wait24h(1)[0], noon.Add(after))
	}
	if got := c.s.next().Sub(noon); got != time.Second {
		t.Errorf("next after %v", got)
	}
	if got := c.s.take(noon.Add(500 * time.Millisecond)); got != nil {
		t.Errorf("took %d too early", len(got))
	}
	c.s = cancelSchedule{}
	if !c.s.next().IsZero() {
		t.Error("nothing is due, some time")
	}
}

func TestACancelWithoutAnswerIsGivenUpAfterItsTTL(t *testing.T) {
	c := newCalendar(t)
	c.reply = silentCancel
	g := &ghost{id: "leased1:w:300000:c:AAAAAAAAAAAAAAAA:AAAAAAAAAAAAAAAA:cal", gone: []*caller{writer()}}
	c.s.add(g, noon)
	c.pass(5*time.Minute - time.Second)
	if len(c.told) != 0 || len(c.s.pending) != 1 {
		t.Fatal("given up before its TTL ended")
	}
	c.pass(time.Minute)
	if told := c.told[g]; len(told) != 1 || told[0].proved || told[0].fail == nil || len(c.s.pending) != 0 {
		t.Errorf("told %+v", told)
	}
}

func TestThatTheLastTokenIsStillOursProvesThatNobodyWasLetIn(t *testing.T) {
	for what, c := range map[string]struct {
		proof  uint64
		r      cancelled
		proved bool
	}{
		"it owned":                {7, cancelled{owned: true, token: 7}, true},
		"it owned after a flush":  {7, cancelled{owned: true}, true},
		"our token is the last":   {7, cancelled{token: 7}, true},
		"another had a later one": {7, cancelled{token: 8}, false},
		"nobody remembers":        {7, cancelled{}, false},
		"we gave none out":        {0, cancelled{}, false},
		"the lock went back":      {7, cancelled{token: 6}, false},
	} {
		t.Run(what, func(t *testing.T) {
			cal := newCalendar(t)
			cal.reply = func(*ghost) cancelled { return c.r }
			g := wait24h(1)[0]
			g.proof, g.gone = c.proof, []*caller{writer()}
			cal.s.add(g, noon)
			cal.pass(time.Second)
			if told := cal.told[g]; len(told) != 1 || told[0].proved != c.proved {
				t.Errorf("told %+v", told)
			}
		})
	}
}

func TestNothingIsCancelledThroughAClosedRedisClient(t *testing.T) {
	c := newCalendar(t)
	closed := fmt.Errorf("%w: %w", ErrClosed, redis.ErrClosed)
	c.reply = func(*ghost) cancelled { return cancelled{fail: &failure{closed, clientClosed}} }
	g := wait24h(1)[0]
	g.gone = []*caller{writer()}
	c.s.add(g, noon)
	c.pass(time.Hour)
	if told := c.told[g]; len(c.sent[g]) != 1 || len(told) != 1 || !errors.Is(told[0].fail.err, redis.ErrClosed) {
		t.Errorf("sent %v, told %+v", c.sent[g], told)
	}
}

func TestAFloodOfFalseMessagesDoesNotFillTheMemory(t *testing.T) {
	var s cancelSchedule
	for _, g := range wait24h(mostCancels) {
		if !s.add(g, noon) {
			t.Fatal("refused")
		}
	}
	if s.add(&ghost{}, noon) {
		t.Error("no bound")
	}
	if !s.add(&ghost{gone: []*caller{writer()}}, noon) {
		t.Error("one that is awaited is not cancelled")
	}
}
