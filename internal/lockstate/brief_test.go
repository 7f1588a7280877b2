package lockstate

import (
	"math/rand"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	briefTTL    = time.Minute
	thirdsPause = MaxPoll + 2*PausePerPlace // between two re-checks of the waiter at place 2
	otherWriter = "leased1:w:60000:c:BBBBBBBBBBBBBBBB:CCCCCCCCCCCCCCCC:other"
	otherReader = "leased1:r:60000:c:BBBBBBBBBBBBBBBB:CCCCCCCCCCCCCCCC:other"
)

// stillWaits is the answer to a brief re-check.
var stillWaits = protocol.Answer{Outcome: protocol.Enqueued, Brief: true, Echo: protocol.NoEcho}

// third is the answer that the request waits behind another writer, whose lease has begun, and two
// requests.
func (h *hand) third() protocol.Answer {
	a := h.queue()
	a.Place, a.Left, a.Blocker = 2, briefTTL, otherWriter
	return a
}

// waitsThird returns a lock whose caller waits in the third place.
func waitsThird(t testing.TB) (*hand, *Caller) {
	t.Helper()
	h := driveFrom(t, time.Now())
	c := h.enter(writer(func(o *Terms) { o.TTL = briefTTL }))
	h.answer(h.third())
	return h, c
}

// looks has the time pass until the next re-check, and reports whether it is brief.
func (h *hand) looks() bool {
	h.t.Helper()
	if h.flight == nil {
		h.pass(h.due().Sub(h.now))
	}
	return h.sends(protocol.Acquire).Until != 0
}

func TestTheReChecksOfAWaiterBehindTheHeadAreBriefExceptForOneInFifteenSeconds(t *testing.T) {
	h, _ := waitsThird(t)
	lease := uint64(h.now.Add(briefTTL).UnixMilli())
	for n := 1; n < 20; n++ {
		before := h.now
		brief := h.looks()
		if pause := h.now.Sub(before); pause != thirdsPause {
			t.Errorf("re-check %d comes after %v, want %v", n, pause, thirdsPause)
		}
		if want := n%4 != 0; brief != want {
			t.Errorf("re-check %d is brief: %v", n, brief)
		}
		if !brief {
			h.answer(h.third())
			lease = uint64(h.now.Add(briefTTL).UnixMilli())
			continue
		}
		want := uint64(h.now.Add(briefTTL).UnixMilli())
		until := h.flight.Until
		if until > want || until < want-uint64(maxBrief.Milliseconds())/rateSlack-1 {
			t.Errorf("re-check %d: the waiting lease is to end at %d, want %d", n, until, want)
		}
		if h.flight.Waits != lease {
			t.Errorf("re-check %d: the waiting lease is said to end at %d so far, want %d", n, h.flight.Waits, lease)
		}
		lease = until
		h.answer(stillWaits)
	}
}

func TestWhoseReChecksAreNeverBrief(t *testing.T) {
	change := func(f func(a *protocol.Answer)) func(*hand, *Caller, *protocol.Answer) {
		return func(_ *hand, _ *Caller, a *protocol.Answer) { f(a) }
	}
	for who, set := range map[string]func(h *hand, c *Caller, a *protocol.Answer){
		"the head":                          change(func(a *protocol.Answer) { a.Place = 0 }),
		"one far behind":                    change(func(a *protocol.Answer) { a.Place = farBehind }),
		"one behind readers":                change(func(a *protocol.Answer) { a.Blocker = otherReader }),
		"one behind a cool-down":            change(func(a *protocol.Answer) { a.Blocker = "leased1:cooldown:" + otherWriter }),
		"one behind another program":        change(func(a *protocol.Answer) { a.Blocker = "another" }),
		"one behind a later version":        change(func(a *protocol.Answer) { a.NoNotify = true }),
		"one behind an endless owner":       change(func(a *protocol.Answer) { a.Left = protocol.Endless }),
		"one behind no owner":               change(func(a *protocol.Answer) { a.Left = protocol.Ownerless }),
		"one whom the owner would have met": change(func(a *protocol.Answer) { a.Left = 2*thirdsPause - 20*time.Millisecond }),
		"one whose messages are denied":     change(func(a *protocol.Answer) { a.Echo = protocol.EchoDenied }),
		"one whom no message reaches":       func(h *hand, _ *Caller, _ *protocol.Answer) { h.polling = true },
		"a reader":                          func(_ *hand, c *Caller, _ *protocol.Answer) { c.Mode = protocol.Shared },
		"one whose grant is provisional":    func(h *hand, _ *Caller, _ *protocol.Answer) { h.proof = protocol.Provisionally },
		"one that cannot be told from dead": func(h *hand, _ *Caller, _ *protocol.Answer) { h.proof = protocol.Unproved },
	} {
		h := drive(t)
		c := writer(func(o *Terms) { o.TTL = briefTTL })
		a := h.third()
		set(h, c, &a)
		h.enter(c)
		for n := range 20 {
			if h.looks() {
				t.Errorf("%s: re-check %d is brief", who, n)
			}
			h.answer(a)
		}
	}
}

// Who has a short TTL wants a lock back soon whose owner has died, so it learns soon who the owner is. And
// only a full re-check makes the keys of the queue last longer, which last for two TTLs at least.
func TestAFullReCheckComesWithinHalfATTL(t *testing.T) {
	for ttl, every := range map[time.Duration]int{300 * time.Millisecond: 1, 9 * time.Second: 1, 13 * time.Second: 2, 16 * time.Second: 2, 20 * time.Second: 3} {
		h := drive(t)
		h.enter(writer(func(o *Terms) { o.TTL = ttl }))
		h.answer(h.third())
		last := h.now
		for n := 1; n < 20; n++ {
			brief := h.looks()
			if want := n%every != 0; brief != want {
				t.Errorf("TTL %v: re-check %d is brief: %v", ttl, n, brief)
			}
			if pause := h.now.Sub(last); every > 1 && pause > ttl/2 {
				t.Errorf("TTL %v: a full re-check comes after %v", ttl, pause)
			}
			if brief {
				h.answer(stillWaits)
				continue
			}
			h.answer(h.third())
			last = h.now
		}
	}
}

// Chance can make the first re-check so early that another one comes before a full one is due.
func TestBelowWhichTTLNoReCheckIsBrief(t *testing.T) {
	for ttl, want := range map[time.Duration]bool{10 * time.Second: false, 10200 * time.Millisecond: true} {
		h := drive(t)
		h.luck = 1
		h.enter(writer(func(o *Terms) { o.TTL = ttl }))
		a := h.third()
		a.Place = 1
		h.answer(a)
		if brief := h.looks(); brief != want {
			t.Errorf("TTL %v: the re-check is brief: %v", ttl, brief)
		}
	}
}

// However long the answers take, the full re-check comes in time.
func TestAFullReCheckIsNotPutOffByLateAnswers(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	h, _ := waitsThird(t)
	last := h.now
	for range 1000 {
		if !h.looks() {
			if pause := h.now.Sub(last); pause > maxBrief {
				t.Errorf("a full one comes after %v", pause)
			}
			h.answer(h.third())
			last = h.now
			continue
		}
		h.pass(time.Duration(rng.Int63n(int64(protocol.CommandTimeout))))
		h.answer(stillWaits)
	}
}

// Chance shortens the pauses after brief re-checks as those after others, so that waiters that began
// together do not go on together.
func TestBriefReChecksOfManyComeApart(t *testing.T) {
	h, _ := waitsThird(t)
	if !h.looks() {
		t.Fatal("it is not brief")
	}
	h.luck = .75
	h.answer(stillWaits)
	if got, want := h.due().Sub(h.now), thirdsPause-MaxPoll/4; got != want {
		t.Errorf("the next comes after %v, want %v", got, want)
	}
}

// A waiting lease that is asked for by a brief re-check counts from the sending.
func TestNoReCheckIsBriefAfterASlowAnswer(t *testing.T) {
	for way, want := range map[time.Duration]bool{briefTTL / 8: true, briefTTL/8 + time.Millisecond: false} {
		h := drive(t)
		h.enter(writer(func(o *Terms) { o.TTL = briefTTL }))
		h.pass(way)
		h.answer(h.third())
		if got := h.looks(); got != want {
			t.Errorf("after an answer that took %v, the re-check is brief: %v", way, got)
		}
	}
}

// A waiter asks in full as soon as there may be more to learn than whether it still waits.
func TestAfterWhatAReCheckIsNotBrief(t *testing.T) {
	for what, happens := range map[string]func(h *hand){
		"the server as a whole refused one": func(h *hand) {
			h.looks()
			h.reply(protocol.Answer{}, refusal("LOADING"), time.Second)
		},
		"one had no answer": func(h *hand) {
			h.looks()
			h.reply(protocol.Answer{}, errSilence, time.Second)
		},
		"one found more to be done": func(h *hand) {
			h.pass(maxBrief)
			for h.looks() {
				h.answer(stillWaits)
			}
			a := h.third()
			a.Unfinished = true
			h.answer(a)
		},
		"one has readers to tell": func(h *hand) {
			for h.looks() {
				h.answer(stillWaits)
			}
			a := h.third()
			a.Told = 7
			h.answer(a)
		},
		"the messages are denied by now": func(h *hand) {
			h.looks()
			a := stillWaits
			a.Echo = protocol.EchoDenied
			h.answer(a)
		},
		"no message arrives by now": func(h *hand) {
			h.looks()
			h.polling = true
			h.answer(stillWaits)
		},
		"the inbox was subscribed to": func(h *hand) { h.step(h.l.Subscribed) },
		"the inbox was subscribed to while one was under way": func(h *hand) {
			h.looks()
			h.step(h.l.Subscribed)
			h.answer(stillWaits)
		},
		"the owner's lease is about to end": func(h *hand) {
			h.step(func(now time.Time, fx *Effects) { h.l.Ends(h.l.grant.req.ID, 2*time.Second, now, fx) })
		},
		"the owner's lease is about to end, which one overtakes": func(h *hand) {
			for h.looks() {
				h.answer(stillWaits)
			}
			h.step(func(now time.Time, fx *Effects) { h.l.Ends(h.l.grant.req.ID, 2*time.Second, now, fx) })
			h.answer(h.third())
		},
		"a message that it was granted is not enough": func(h *hand) {
			h.l.grant.opts.Confirm = true
			h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
		},
		"the clocks have moved apart": func(h *hand) { h.slept(time.Second) },
	} {
		h, _ := waitsThird(t)
		happens(h)
		if h.looks() {
			t.Errorf("%s, and the next re-check is brief", what)
		}
	}
}

// A brief answer says that the request has waited since the one before. So what a message says happened
// later, if its token is above the lock's last token by then.
func TestAGrantByMessageIsBelievedFromTheLastReCheckOn(t *testing.T) {
	h, c := waitsThird(t)
	var asked time.Time
	floor := h.l.grant.token
	for range 3 {
		if !h.looks() {
			t.Fatal("it is not brief")
		}
		asked = h.now
		h.pass(time.Second)
		h.answer(stillWaits)
	}
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, floor) // an old message
	h.out(c)
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
	h.in(c)
	if got, want := h.l.grant.trust(), asked.Add(window(briefTTL)); !got.Equal(want) {
		t.Errorf("it is trusted for %v from the re-check on, want %v", got.Sub(asked), want.Sub(asked))
	}
}

// What the message is about happened after what the answer is about.
func TestABriefAnswerThatAMessageOvertookIsNoLoss(t *testing.T) {
	h, c := waitsThird(t)
	if !h.looks() {
		t.Fatal("it is not brief")
	}
	h.hears(protocol.MessageGranted, h.l.grant.req.ID, h.token())
	h.answer(stillWaits)
	h.in(c)
	h.state(Held)
	h.sendsNothing()
	if c.Ended != NotYet {
		t.Errorf("its lease ended: %v", c.Ended)
	}
}

func TestABriefAnswerChangesOnlyTheNextReCheckAndWhatIsTrusted(t *testing.T) {
	h, _ := waitsThird(t)
	before, blocker := h.l.grant, h.l.Blocker()
	if !h.looks() {
		t.Fatal("it is not brief")
	}
	asked, until := h.now, h.flight.Until
	h.pass(20 * time.Millisecond)
	h.answer(stillWaits)
	after := h.l.grant
	if after.recheckAt <= before.recheckAt {
		t.Error("there is no further re-check")
	}
	before.recheckAt, before.proved, before.lease = after.recheckAt, asked, until
	if after != before || h.l.Blocker() != blocker {
		t.Errorf("%+v became %+v, behind %s", before, after, h.l.Blocker())
	}
}

func TestABriefReCheckMayAlsoEndTheWait(t *testing.T) {
	h, c := waitsThird(t)
	if !h.looks() {
		t.Fatal("it is not brief")
	}
	h.answer(h.grant())
	h.in(c)
	if c.Via != viaRecheck {
		t.Errorf("it entered via %v", c.Via)
	}
}

// The clocks moved apart only for the re-checks before the next proof.
func TestAReCheckIsBriefAgainAfterAFullOne(t *testing.T) {
	h, _ := waitsThird(t)
	h.slept(time.Second)
	if h.looks() {
		t.Error("it is brief, though the clocks moved apart")
	}
	h.answer(h.third())
	if !h.looks() {
		t.Error("it is not brief after a full one")
	}
}
