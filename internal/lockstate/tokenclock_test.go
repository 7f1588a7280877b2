package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// Tokens stay below the server's clock however fast ours runs: else the next
// owner's first token, which is that clock, could be below the last of this one.

// ticking makes the server's clock run at rate times ours from now on.
func (h *hand) ticking(rate float64) {
	began := h.now
	h.server = func() uint64 {
		return uint64(began.UnixMicro()) + uint64(float64(h.now.Sub(began).Nanoseconds())*rate/1000)
	}
}

// renewing has every renewal answered after half of the way there and half back.
func (h *hand) renewing(way time.Duration) {
	h.onRenew = func(r protocol.Renewal) {
		h.onRenew = nil
		h.now = h.now.Add(way / 2)
		r.Clock = h.clock()
		h.now = h.now.Add(way / 2)
		r.Outcome = protocol.Granted
		h.step(func(now time.Time, fx *Effects) { h.l.Renewed(&r, now, fx) })
		h.renewing(way)
	}
}

func TestTheLastTokenOfAnOwnerThatIsCutOffIsBelowTheServersClock(t *testing.T) {
	long := time.Hour
	if race.Enabled {
		long = 2 * time.Minute
	}
	for name, rate := range map[string]float64{
		"our clock is 50 ppm fast": 1 / (1 + 50e-6), "our clock is 50 ppm slow": 1 / (1 - 50e-6),
		"our clock is 1/1000 fast": 1 - 1e-3, "our clock is 1/1000 slow": 1 + 1e-3, "the clocks agree": 1,
	} {
		for _, ttl := range []time.Duration{time.Second, 30 * time.Second} {
			for _, way := range []time.Duration{0, 200 * time.Microsecond, 150 * time.Millisecond} {
				h := drive(t)
				h.ticking(rate)
				h.renewing(way)
				own := func(o *Terms) { o.TTL, o.Handoffs, o.Tenure = ttl, 1<<30, 24*time.Hour }
				c := writer(own)
				h.enter(c)
				h.answer(h.grant())
				h.pass(long)
				h.onRenew = nil // cut off
				end := h.l.grant.trust().Add(-time.Millisecond)
				for tick := time.Duration(0); h.now.Before(end); tick++ {
					next := writer(own)
					h.enter(next)
					h.pass(min(ttl/50, end.Sub(h.now)))
					h.leave(c)
					h.in(next)
					c = next
				}
				h.now = h.now.Add(c.ClockLead())
				if c.Token > h.clock() {
					t.Errorf("%s, TTL %v, %v to the server and back: the last token is %d µs ahead of the server's clock",
						name, ttl, way, c.Token-h.clock())
				}
			}
		}
	}
}

// A token may be one more than the last where the clock has not moved on: then its
// owner waits until the server's clock has reached it, and hardly longer.
func TestWhoWaitsForTheServersClockWaitsAsLongAsThatTakesAndHardlyLonger(t *testing.T) {
	const handoffs = 10_000
	own := func(o *Terms) { o.TTL, o.Handoffs, o.Tenure = time.Minute, 1<<30, 24*time.Hour }
	for _, rate := range []float64{1, 1 - 0.99/rateSlack} {
		h := drive(t)
		h.ticking(rate)
		c := writer(own)
		h.enter(c)
		h.answer(h.grant())
		began := h.now
		for range handoffs {
			next := writer(own)
			h.enter(next)
			h.leave(c)
			h.in(next)
			h.now = h.now.Add(next.ClockLead())
			if next.Token > h.clock() {
				t.Fatalf("rate %v: token %d when the server's clock shows %d", rate, next.Token, h.clock())
			}
			c = next
		}
		if took := h.now.Sub(began); took > handoffs*1020*time.Nanosecond {
			t.Errorf("rate %v: %d hand-offs waited %v for the clock", rate, handoffs, took)
		}
	}
}

// However little ahead it is: the clock was set back.
func TestAnEstimateOfTheClockThatAnAnswerRefutesIsReplaced(t *testing.T) {
	for _, back := range []time.Duration{20 * time.Millisecond, 500 * time.Millisecond, time.Minute} {
		h := holding(t, writer())
		h.renewing(time.Millisecond)
		h.server = func() uint64 { return uint64(h.now.Add(-back).UnixMicro()) }
		h.pass(handTTL / 3)
		if est := h.l.grant.serverClock(h.l.instant(h.now)); len(h.renewals) != 1 || est > h.clock() {
			t.Errorf("set back by %v: the estimate is %d µs ahead after %d renewals", back, est-h.clock(), len(h.renewals))
		}
	}
}

// What a late answer says of the clock was true before.
func TestAnEstimateOfTheClockIsKeptIfTheAnswerCannotRefuteIt(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.pass(handTTL / 3)
	before := h.l.grant.serverClock(h.l.instant(h.now))
	r := h.renewals[0]
	r.Clock, r.Outcome = h.clock(), protocol.Granted
	h.now = h.now.Add(time.Second) // its way back
	if est := h.l.grant.serverClock(h.l.instant(h.now)); est <= r.Clock {
		t.Fatalf("the estimate %d is no better than the answer %d", est, r.Clock)
	}
	h.step(func(now time.Time, fx *Effects) { h.l.Renewed(&r, now, fx) })
	if est := h.l.grant.serverClock(h.l.instant(h.now)); est < before+990_000 {
		t.Errorf("the estimate went back to %d", est)
	}
}
