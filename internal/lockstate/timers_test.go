package lockstate

import (
	"math"
	"math/rand"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Ends that come with time: maximum and idle holds, collected leases.

func TestAMaximumHoldEndsTheLeaseAndRenewalOnceNoOtherLeaseIsWithinItsOwn(t *testing.T) {
	bound := func(d time.Duration) func(*Terms) { return func(o *Terms) { o.MaxHold = d } }
	short, long, free := reader(bound(time.Minute)), reader(bound(2*time.Minute)), reader()
	h := drive(t).keep()
	h.enter(short, long)
	h.answer(h.grant())
	h.enter(free)
	h.in(short, long, free)

	h.pass(time.Minute - 1)
	h.lost()
	h.pass(1)
	h.lost(short)
	h.pass(time.Minute - 1)
	h.lost(short)
	h.pass(1)
	h.lost(short, long)
	h.pass(time.Hour)
	h.lost(short, long) // the third has no maximum
	n := len(h.renewals)
	h.leave(free)
	h.settled(free, nil)
	h.pass(handTTL)
	if len(h.renewals) != n {
		t.Error("renewed for leases that are over")
	}
	h.leave(short)
	h.leave(long)
	h.settled(long, ErrLeaseLost)
	h.lost(short, long)
}

func TestTheNextLeaseIsRenewedAfterAMaximumHold(t *testing.T) {
	a, b := writer(func(o *Terms) { o.MaxHold = time.Minute }), writer()
	h := holding(t, a).keep()
	h.enter(b)
	h.pass(time.Minute + time.Second)
	h.lost(a)
	h.leave(a)
	h.sends(protocol.Yield) // the tenure was long
	h.answer(h.grant())
	h.in(b)
	n := len(h.renewals)
	h.pass(time.Hour)
	h.lost(a)
	if len(h.renewals) == n {
		t.Error("the next lease is not renewed")
	}
}

func TestACollectedLeaseIsNotRenewedAndEndsWithItsWindow(t *testing.T) {
	c := writer()
	h := holding(t, c).keep()
	h.pass(time.Hour)
	h.lost()
	if !h.l.Collected(c) {
		t.Error("the lease was not taken for abandoned")
	}
	if h.l.Collected(c) {
		t.Error("abandoned twice")
	}
	n := len(h.renewals)
	h.pass(handTTL)
	if len(h.renewals) != n {
		t.Error("an abandoned lease is renewed")
	}
	h.lost(c)
	if c.Why != collected {
		t.Errorf("lost because %v", c.Why)
	}
}

// As long as another lease of the grant is renewed, only Redis can end it.
func TestACollectedLeaseBesideOneThatIsRenewedIsLostWithIt(t *testing.T) {
	a, b := reader(), reader()
	h := holding(t, a)
	h.enter(b)
	h.in(b)
	h.l.Collected(a)
	h.pass(handWindow)
	h.lost(a, b)
	if a.Why != NotConfirmed || b.Why != NotConfirmed {
		t.Errorf("lost because %v, and because %v", a.Why, b.Why)
	}
}

func TestALeaseThatASleepEndsSaysSo(t *testing.T) {
	for want, pass := range map[Reason]func(h *hand){
		Slept:        func(h *hand) { h.slept(handTTL); h.ring() },
		NotConfirmed: func(h *hand) { h.slept(handMargin + time.Millisecond); h.pass(handTTL) }, // renewals failed, too
	} {
		a := writer()
		h := driveFrom(t, time.Now())
		h.enter(a)
		h.answer(h.grant())
		pass(h)
		h.lost(a)
		if a.Why != want {
			t.Errorf("lost because %v; want %v", a.Why, want)
		}
	}
}

// Where the clocks have moved apart, as after a machine's sleep, nobody knows whether the grant
// still stands.
func TestAGrantThatNobodyVouchesForDoesNotIdle(t *testing.T) {
	a := writer(func(o *Terms) { o.IdleHold = time.Minute })
	h := driveFrom(t, time.Now())
	h.enter(a)
	h.answer(h.grant())
	h.now = clocktest.Asleep(h.t, h.now, handMargin+time.Millisecond)
	h.leave(a)
	h.sends(protocol.Release)
}

func TestAnIdleGrantIsKeptForItsTimeAndGivenUpAtTheFirstWish(t *testing.T) {
	idle := func(o *Terms) { o.IdleHold = time.Minute }
	t.Run("its time", func(t *testing.T) {
		a, b := writer(idle), writer(idle)
		h := holding(t, a).keep()
		h.leave(a)
		h.settled(a, nil)
		h.pass(time.Minute - 1)
		h.sendsNothing()
		h.enter(b)
		h.in(b)
		if b.Via != ViaIdle {
			t.Errorf("came %v", b.Via)
		}
		h.leave(b)
		h.pass(time.Minute - 1)
		h.sendsNothing()
		h.pass(1)
		h.sends(protocol.Release)
	})
	t.Run("a wish", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.leave(a)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.sends(protocol.Release)
	})
	t.Run("a wish before", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
		h.leave(a)
		h.sends(protocol.Release)
	})
	t.Run("a wish of which no message came", func(t *testing.T) {
		for _, waits := range []bool{false, true} {
			a := writer(idle)
			h := holding(t, a)
			h.polling = true
			h.leave(a)
			h.pass(handTTL / 3)
			h.sendsNothing()
			h.renewedAndAsked(waits)
			if waits {
				h.sends(protocol.Release)
			} else {
				h.sendsNothing()
			}
		}
	})
	t.Run("a wish of which no message came, while it is locked again and again", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.polling = true
		h.leave(a)
		for range handTTL / time.Second {
			h.pass(time.Second)
			b := writer(idle)
			h.enter(b)
			h.in(b)
			if len(h.renewals) > 0 {
				h.renewedAndAsked(true)
				h.leave(b)
				h.sends(protocol.Release)
				return
			}
			h.leave(b)
		}
		t.Error("it is not renewed")
	})
	t.Run("a caller while it is asked whether others wait", func(t *testing.T) {
		for _, wanted := range []bool{false, true} {
			a, b := writer(idle), writer(idle)
			h := holding(t, a)
			h.polling = true
			h.leave(a)
			h.pass(handTTL / 3)
			h.renewed(h.renewals[0], protocol.Granted)
			h.sends(protocol.Acquire)
			if wanted { // then its tenure is over
				h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
				h.enter(b)
				h.out(b)
				continue
			}
			h.enter(b)
			h.in(b)
			if b.Via != ViaIdle {
				t.Errorf("came %v", b.Via)
			}
		}
	})
	t.Run("messages come", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.leave(a)
		h.pass(handTTL / 3)
		h.renewed(h.renewals[0], protocol.Granted)
		h.sendsNothing()
	})
	t.Run("no renewal confirmed", func(t *testing.T) {
		a := writer(idle)
		h := holding(t, a)
		h.leave(a)
		h.pass(handWindow - 1)
		h.sendsNothing()
		h.pass(1)
		h.sends(protocol.Release)
		h.lost()
	})
	t.Run("another mode", func(t *testing.T) {
		a, b := writer(idle), reader()
		h := holding(t, a)
		h.leave(a)
		h.enter(b)
		h.out(b)
		h.sends(protocol.Yield)
		h.answer(h.grant())
		h.in(b)
	})
}

// Nothing renews it, so it ends with its trust window, once.
func TestACollectedLeaseIsNotEndedForItsMaximumHold(t *testing.T) {
	bound := func(o *Terms) { o.MaxHold = time.Second }
	a, b := reader(bound), reader(func(o *Terms) { o.MaxHold = 2 * time.Second })
	h := holding(t, a)
	h.enter(b)
	h.in(b)
	h.l.Collected(a)
	h.pass(time.Second)
	h.lost()
	h.pass(time.Second)
	h.lost(b)
	h.pass(handWindow)
	h.lost(b, a)
}

// Whoever came last, and whichever ends first.
func TestEachMaximumHoldEndsItsOwnLease(t *testing.T) {
	bound := func(d time.Duration) func(*Terms) { return func(o *Terms) { o.MaxHold = d } }
	for _, order := range [][]time.Duration{{1, 2, 3}, {3, 2, 1}, {2, 3, 1}, {3, 1, 2}, {1, 3, 2}} {
		h := drive(t).keep()
		byEnd := make([]*Caller, 4)
		for i, m := range order {
			c := reader(bound(m * time.Minute))
			h.enter(c)
			if i == 0 {
				h.answer(h.grant())
			}
			h.in(c)
			byEnd[m] = c
		}
		for m := 1; m <= 3; m++ {
			h.pass(time.Minute - 1)
			h.lost(byEnd[1:m]...)
			h.pass(1)
			h.lost(byEnd[1 : m+1]...)
		}
	}
}

func TestAMaximumHoldGoesOnWhenAnotherReaderLeaves(t *testing.T) {
	brief := func(o *Terms) { o.MaxHold = time.Second }
	a, b := reader(brief), reader(brief)
	h := drive(t)
	h.enter(a, b)
	h.answer(h.grant())
	h.in(a, b)
	h.leave(a)
	h.pass(time.Second)
	h.lost(b)
}

func TestAnUnlockAfterTheMaximumHoldSaysSo(t *testing.T) {
	c := writer(func(o *Terms) { o.MaxHold, o.IdleHold = time.Second, time.Minute })
	h := holding(t, c).keep()
	h.pass(time.Second)
	h.lost(c)
	if h.leaveKept(c) {
		t.Fatal("left by the short cut")
	}
	h.leave(c)
	h.settled(c, ErrLeaseLost)
}

// A tenure begins when an idle grant is used again, whatever was given out before.
func TestAnIdleGrantThatIsUsedAgainGivesOutAllLeasesOfATenure(t *testing.T) {
	own := func(o *Terms) { o.IdleHold, o.Handoffs, o.Tenure = time.Minute, 3, time.Hour }
	h := holding(t, writer(own)).keep()
	c := h.l.inside.first
	for range 5 { // nobody wants it so far
		next := writer(own)
		h.enter(next)
		h.leave(c)
		h.in(next)
		c = next
	}
	h.leave(c)
	h.pass(time.Second)
	cs := []*Caller{writer(own), writer(own), writer(own), writer(own)}
	h.enter(cs...)
	h.in(cs[0])
	h.hears(protocol.MessageWanted, h.l.grant.req.ID, 0)
	for i := range 2 {
		h.leave(cs[i])
		h.in(cs[i+1])
	}
	h.leave(cs[2])
	h.out(cs[3])
	h.sends(protocol.Yield)
}

func TestALeaseThatIsOverIsNotTrustedForTheFuture(t *testing.T) {
	for how, end := range map[string]func(h *hand, c *Caller){
		"unlocked": func(h *hand, c *Caller) { h.leave(c) },
		"revoked":  func(h *hand, _ *Caller) { h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.l.grant.token) },
		"not ours": func(h *hand, _ *Caller) {
			h.renewed(protocol.Renewal{Req: h.l.grant.req, At: h.now}, protocol.NotOurs)
		},
		"maximum hold": func(h *hand, _ *Caller) { h.pass(time.Second) },
	} {
		t.Run(how, func(t *testing.T) {
			c := writer(func(o *Terms) { o.MaxHold = time.Second })
			h := holding(t, c)
			h.pass(time.Millisecond)
			end(h, c)
			if until := h.l.TrustedUntil(c, h.now); until.After(h.now) {
				t.Errorf("trusted for %v more", until.Sub(h.now))
			}
		})
	}
}

func TestAReCheckWhereNobodyWillTellComesLaterEachTime(t *testing.T) {
	h := drive(t)
	h.polling = true
	h.enter(writer())
	for _, want := range []time.Duration{firstPoll, 2 * firstPoll, 4 * firstPoll, 8 * firstPoll} {
		h.sends(protocol.Acquire)
		h.answer(h.queue())
		if got := h.due().Sub(h.now); got != want {
			t.Fatalf("looks again after %v, want %v", got, want)
		}
		h.pass(want)
	}
}

// Those who come next look often, and so does everybody whom no message tells.
func TestAWaiterFarBehindLooksMoreSeldom(t *testing.T) {
	for what, c := range map[string]struct {
		ttl     time.Duration
		place   int
		proof   protocol.Proof
		polling bool
		want    time.Duration
	}{
		"the head":                         {ttl: time.Minute, want: 3 * time.Second},
		"the hundredth":                    {ttl: time.Minute, place: 100, want: 5500 * time.Millisecond},
		"the six hundredth":                {ttl: time.Minute, place: 600, want: 18 * time.Second},
		"the last of ten thousand":         {ttl: time.Minute, place: 9999, want: 20 * time.Second},
		"of a number that is none":         {ttl: time.Minute, place: math.MaxInt, want: 20 * time.Second},
		"with all but ten seconds of it":   {ttl: 25 * time.Second, place: 9999, want: 15 * time.Second},
		"with half of its TTL":             {ttl: 16 * time.Second, place: 9999, want: 8 * time.Second},
		"of a short TTL, the head":         {ttl: 3 * time.Second, want: time.Second},
		"of a short TTL":                   {ttl: 3 * time.Second, place: 9999, want: 1500 * time.Millisecond},
		"whose grant would be provisional": {ttl: time.Minute, place: 9999, proof: protocol.Provisionally, want: 3 * time.Second},
		"whom no message reaches":          {ttl: time.Minute, place: 9999, polling: true, want: 3 * time.Second},
	} {
		h := drive(t)
		h.polling = c.polling
		if c.proof != 0 {
			h.proof = c.proof
		}
		h.enter(writer(func(o *Terms) { o.TTL = c.ttl }))
		a := h.queue()
		a.Place, a.Left = c.place, protocol.Endless
		h.answer(a)
		for n := 0; c.polling && n < 10; n++ { // it slows down
			h.pass(h.due().Sub(h.now))
			h.answer(a)
		}
		if got := h.due().Sub(h.now); !paced(got, c.want, c.place) {
			t.Errorf("%s looks after %v, want %v", what, got, c.want)
		}
	}
}

// paced reports whether a pause of one with so many ahead is as long as wanted: at most a little
// shorter, so that others look then too.
func paced(got, want time.Duration, place int) bool {
	if place < farBehind {
		return got == want
	}
	return got <= want && got > want-lookInterval
}

// A look costs the server least right after another one.
func TestWaitersFarBehindLookTogether(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	for range 100 {
		h := drive(t)
		h.luck = rng.Float64()
		h.enter(writer(func(o *Terms) { o.TTL = time.Minute }))
		a := h.queue()
		a.Place, a.Left, a.Clock = 100+rng.Intn(1000), protocol.Endless, uint64(1+rng.Int63n(1e16))
		h.answer(a)
		looks := time.Duration(a.Clock%1e6)*time.Microsecond + h.due().Sub(h.now)
		if looks%lookInterval != 0 {
			t.Errorf("number %d, at %d, looks after %v, which is %v off", a.Place, a.Clock, h.due().Sub(h.now), looks%lookInterval)
		}
	}
}

// A pause that is short stays what it is: made shorter, it could have one look again at once.
func TestWaitersFarBehindThatLookOftenDoNotLookTogether(t *testing.T) {
	for clock := uint64(1); clock < 100_000; clock += 1000 {
		if got := together(99*time.Millisecond, clock); got != 99*time.Millisecond {
			t.Errorf("at %d µs, a pause of 99 ms is %v", clock, got)
		}
		if got := together(149*time.Millisecond, clock); got < 99*time.Millisecond || got > 149*time.Millisecond {
			t.Errorf("at %d µs, a pause of 149 ms is %v", clock, got)
		}
	}
}

// Where all look by the second, chance must not have one look twice as often; but where all have
// looked at once, as after a subscription or when many processes begin, it sets them apart.
func TestWaitersFarBehindLookAtTheirPaceUnlessAllDidAtOnce(t *testing.T) {
	const longest, earliest = 20 * time.Second, 2 * time.Second
	h := drive(t)
	h.luck = 1
	look := func(what string, want time.Duration) {
		t.Helper()
		a := h.queue()
		a.Place, a.Left = 9999, protocol.Endless
		h.answer(a)
		if got := h.due().Sub(h.now); !paced(got, want, a.Place) {
			t.Errorf("%s, it looks after %v, want %v", what, got, want)
		}
	}
	h.enter(writer(func(o *Terms) { o.TTL = time.Minute }))
	look("who begins to wait", earliest)
	h.pass(earliest)
	look("after the first look", longest-time.Second)
	h.step(h.l.Subscribed)
	look("after a subscription", earliest)
	h.pass(earliest)
	h.step(h.l.Subscribed) // the answer in flight may be older, and the next one counts
	h.answer(h.queue())
	look("after a subscription while it looked", earliest)
	h.pass(earliest)
	look("and from then on", longest-time.Second)
}

// Its message comes just before it would have looked, when a third of the window is left.
func TestAGrantByMessageAfterTheLongestPauseIsBelieved(t *testing.T) {
	h := drive(t)
	w := writer(func(o *Terms) { o.TTL = 30 * time.Second })
	h.enter(w)
	a := h.queue()
	a.Place, a.Left = 9999, 30*time.Second
	h.answer(a)
	h.pass(20*time.Second - lookInterval)
	h.sendsNothing()
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, a.Token+1)
	h.in(w)
	h.trust(30*time.Second - 302*time.Millisecond)
	if len(h.renewals) != 0 {
		t.Fatal("it was renewed before")
	}
	h.pass(0)
	if len(h.renewals) != 1 || h.renewals[0].Spare != 0 {
		t.Errorf("it is to be renewed at once, not %+v", h.renewals)
	}
}

func TestARequestWithoutAnswerIsAskedAboutAfterThePauseOnly(t *testing.T) {
	h := drive(t)
	h.enter(writer())
	h.sends(protocol.Acquire)
	h.reply(protocol.Answer{}, errSilence, time.Second)
	h.pass(time.Second - time.Millisecond)
	h.sendsNothing()
	h.pass(time.Millisecond)
	h.sends(protocol.Acquire)
}

// A client that takes very many locks within a second does not renew them within a second. None is
// renewed later than it would be alone.
func TestALeaseAmongManyIsRenewedEarlyTheFirstTime(t *testing.T) {
	for many, first := range map[bool]time.Duration{false: handTTL / 3, true: 7 * handTTL / 30} {
		h := driveFrom(t, time.Now())
		h.many, h.luck = many, .4
		h.enter(writer())
		h.answer(h.grant())
		for i, at := range []time.Duration{first, first + handTTL/3, first + 2*handTTL/3} {
			h.pass(h.began.Add(at - handTTL/grids).Sub(h.now))
			if n := len(h.renewals); n != i {
				t.Fatalf("many %v: %d renewals before %v", many, n, at)
			}
			h.pass(handTTL / grids)
			if n := len(h.renewals); n != i+1 {
				t.Fatalf("many %v: %d renewals after %v", many, n, at)
			}
			h.renewed(h.renewals[i], protocol.Granted)
		}
	}
}

// The renewals of many locks that are due together are spread, which must not cost one its window.
func TestARenewalMayWaitUnlessItIsUrgent(t *testing.T) {
	last := func(h *hand) protocol.Renewal {
		t.Helper()
		if len(h.renewals) == 0 {
			t.Fatal("nothing was renewed")
		}
		return h.renewals[len(h.renewals)-1]
	}
	h := holding(t, writer())
	h.pass(handTTL / 3)
	if r := last(h); r.Spare != handTTL/30 {
		t.Errorf("a regular one may wait for %v", r.Spare)
	}
	for h.now.Sub(h.began) < handTTL-handTTL/10 {
		h.renewed(last(h), protocol.Unanswered)
		h.pass(handTTL / 10)
		if r := last(h); r.At.Sub(h.began) > handTTL/2 && r.Spare != 0 {
			t.Errorf("one after %v may wait for %v", r.At.Sub(h.began), r.Spare)
		}
	}

	h = driveFrom(t, time.Now())
	h.enter(writer())
	h.answer(h.grant())
	h.now = clocktest.Asleep(t, h.now, handMargin+time.Millisecond)
	h.step(h.l.Tick)
	if r := last(h); r.Spare != 0 {
		t.Errorf("one after a sleep may wait for %v", r.Spare)
	}

	h, _ = granted(t, writer(func(o *Terms) { o.TTL = 3 * time.Second }))
	h.pass(0)
	if r := last(h); r.Spare != 0 {
		t.Errorf("a provisional one may wait for %v", r.Spare)
	}
}

// math.MaxInt64 is how some say that there is no bound. Counted from when the caller entered it is
// later than the last instant there is.
func TestAMaximumHoldThatEndsAfterTheLastInstantEndsNoLease(t *testing.T) {
	for _, most := range []time.Duration{math.MaxInt64, math.MaxInt64 - time.Minute} {
		c := writer(func(o *Terms) { o.MaxHold = most })
		h := drive(t).keep()
		h.pass(time.Hour)
		h.enter(c)
		h.answer(h.grant())
		h.in(c)
		h.pass(time.Hour)
		h.leave(c)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.settled(c, nil)
		h.lost()
	}
}
