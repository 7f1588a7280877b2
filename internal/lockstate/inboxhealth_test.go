package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What the inbox makes of what it hears and does not hear, by hand.

// heardAt returns an inbox that was confirmed at t0, on a server that counts.
func heardAt(t0 time.Time) *InboxHealth {
	h := &InboxHealth{Counts: true}
	h.Enter(Joined, t0)
	return h
}

func TestAnEchoThatNobodyReceivedHasTheInboxRebuiltWhicheverComesFirst(t *testing.T) {
	t0 := time.Now()
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	for what, deaf := range map[string]func(h *InboxHealth, nonce string) bool{
		"the count alone": func(h *InboxHealth, nonce string) bool { return h.ProbeCounted(nonce, 0, at(3*time.Second)) },
		"the echo, from a replica, before the count": func(h *InboxHealth, nonce string) bool {
			h.Message(nonce, at(3*time.Second))
			return h.ProbeCounted(nonce, 0, at(3*time.Second))
		},
		"the count before the echo": func(h *InboxHealth, nonce string) bool {
			deaf := h.ProbeCounted(nonce, 0, at(3*time.Second))
			h.Message(nonce, at(3*time.Second))
			return deaf
		},
	} {
		h := heardAt(t0)
		if !deaf(h, h.StartProbe(at(2*time.Second), EchoWait)) {
			t.Errorf("%s: the inbox is believed", what)
		}
	}
}

func TestACountOfNobodyProvesNothing(t *testing.T) {
	t0 := time.Now()
	for what, h := range map[string]*InboxHealth{
		"where the server does not count subscribers": {},
		"of an echo for an earlier subscription":      {Counts: true},
	} {
		h.Enter(Joined, t0)
		nonce := h.StartProbe(t0.Add(2*time.Second), EchoWait)
		h.Message(nonce, t0.Add(2*time.Second))
		if h.Counts {
			h.Enter(Joined, t0.Add(3*time.Second))
		}
		if h.ProbeCounted(nonce, 0, t0.Add(4*time.Second)) {
			t.Errorf("%s", what)
		}
	}
}

func TestAnEchoIsAwaitedForASecondAfterItWasPublished(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	nonce := h.StartProbe(t0.Add(2*time.Second), EchoWait)
	if h.ProbeCounted(nonce, 1, t0.Add(2*time.Second)) || h.Overdue(t0.Add(3*time.Second-1)) || !h.Overdue(t0.Add(3*time.Second)) {
		t.Errorf("overdue at %v", h.Due.Sub(t0))
	}
}

// A command that was to ask for it may never say what became of that.
func TestAnEchoWhoseCommandIsNeverAnsweredIsOverdueAllTheSame(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	h.StartProbe(t0.Add(2*time.Second), EchoWait)
	if h.Overdue(t0.Add(5*time.Second-1)) || !h.Overdue(t0.Add(5*time.Second)) {
		t.Errorf("overdue at %v", h.Due.Sub(t0))
	}
}

func TestErrorsOfOtherCommandsDoNotHideThatAnEchoIsMissing(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0.Add(2 * time.Second)
	h.ProbeCounted(h.StartProbe(now, EchoWait), 1, now)
	for end := now.Add(EchoWait); now.Before(end); now = now.Add(100 * time.Millisecond) {
		h.RequireProbe()
		if nonce := h.StartProbe(now, EchoWait); nonce != "" {
			t.Fatal("the echo that is awaited was forgotten")
		}
	}
	if !h.Overdue(now) {
		t.Errorf("overdue at %v", h.Due.Sub(t0))
	}
}

func TestTroubleHasTheInboxProveItselfAlthoughMessagesCome(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0.Add(100 * time.Millisecond)
	if h.StartProbe(now, EchoWait) != "" {
		t.Error("an echo is demanded of an inbox that was just confirmed")
	}
	h.RequireProbe()
	h.Message("", now)
	nonce := h.StartProbe(now, OwnerSilence)
	if nonce == "" {
		t.Fatal("no echo is demanded")
	}
	h.Message(nonce, now)
	if h.StartProbe(now, EchoWait) != "" {
		t.Error("it has proved itself, and has to again")
	}
}

// Messages come from a replica too.
func TestAnInboxThatHearsMessagesHasToProveItselfNowAndThen(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0
	for now.Sub(t0) < OwnerSilence {
		if h.StartProbe(now, EchoWait) != "" {
			t.Fatalf("an echo is demanded after %v", now.Sub(t0))
		}
		now = now.Add(100 * time.Millisecond)
		h.Message("", now)
	}
	if h.StartProbe(now, EchoWait) == "" {
		t.Error("no echo is demanded")
	}
}

func TestThePauseBetweenSubscriptionsGrowsUntilOneHasLived(t *testing.T) {
	now := time.Now()
	h := heardAt(now)
	for _, want := range []int{20, 40, 80, 160, 320, 640, 1280, 2000, 2000} {
		now = now.Add(60 * time.Millisecond)
		if got := h.Over(now); got != time.Duration(want)*time.Millisecond {
			t.Errorf("a pause of %v, want %d ms", got, want)
		}
		h.Enter(Joined, now)
	}
	if got := h.Over(now.Add(steadyLife - 1)); got != maxRejoin {
		t.Errorf("%v after one that lived too short", got)
	}
	h.Enter(Joined, now)
	if got := h.Over(now.Add(steadyLife)); got != firstRejoin {
		t.Errorf("%v after one that lived", got)
	}
}

// Who may not subscribe is not asked forever, and asks soon after a slip.
func TestThePauseAfterARefusalGrowsUntilASubscriptionHasLived(t *testing.T) {
	now := time.Now()
	h := heardAt(now)
	for range 2 {
		h.Enter(Forbidden, now)
		for _, want := range []int{1, 2, 4, 8, 16, 30, 30} {
			if got := h.Over(now); got != time.Duration(want)*time.Second || h.State != Forbidden {
				t.Errorf("%v after a refusal, want %d s; state %v", got, want, h.State)
			}
		}
		h.Enter(Joined, now)
		now = now.Add(steadyLife)
		h.Over(now)
	}
	h.Enter(Forbidden, now)
	h.Over(now)
	h.Enter(Joined, now)
	h.Over(now.Add(steadyLife - 1))
	h.Enter(Forbidden, now)
	if got := h.Over(now); got != 2*firstDenied {
		t.Errorf("%v after a refusal soon after another one", got)
	}
}

// Whoever is next is not to wait for a message that does not come. Those far behind get none.
func TestAWaiterFarBehindAsksForAnEchoOnceAMinuteOnAverage(t *testing.T) {
	t0 := time.Now()
	for place, silence := range map[int]time.Duration{0: EchoWait, 99: EchoWait, 100: time.Minute, 120: 40 * time.Second, 9999: 79 * time.Second} {
		h := heardAt(t0)
		if h.StartProbe(t0.Add(silence-1), Silence(place)) != "" || h.StartProbe(t0.Add(silence), Silence(place)) == "" {
			t.Errorf("number %d is not content for %v", place, silence)
		}
		h = heardAt(t0)
		h.RequireProbe()
		if h.StartProbe(t0, Silence(place)) == "" {
			t.Errorf("number %d is content after an error", place)
		}
	}
}

// After a planned failover the inbox is at the old primary, which passes on the echo as a replica. The
// re-check that asked for it is granted, and such an answer has no count of receivers.
func TestAnEchoWhoseReceiversAreUnknownIsNoProofOfTheInbox(t *testing.T) {
	now := noon
	h := InboxHealth{Counts: true}
	h.Enter(Joined, now)
	h.RequireProbe() // a command was answered READONLY
	now = now.Add(100 * time.Millisecond)
	nonce := h.StartProbe(now, EchoWait)
	if nonce == "" {
		t.Fatal("no probe")
	}
	h.Message(nonce, now.Add(time.Millisecond))
	h.ProbeCounted(nonce, protocol.NoEcho, now.Add(2*time.Millisecond))
	for range 150 { // 15 s of re-checks; other messages come through the replica, too
		now = now.Add(100 * time.Millisecond)
		h.Message("", now)
		if h.StartProbe(now, EchoWait) != "" {
			return
		}
	}
	t.Error("the inbox is taken for proved, and does not ask again for 15 s")
}

// A refusal does not end the time for which there has been no subscription, and may begin it.
func TestSubscriptionsFailUntilOneIsConfirmed(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0.Add(-steadyLife))
	for _, then := range []struct {
		at      time.Duration
		event   func(time.Time)
		failing time.Duration
	}{
		{time.Second, func(now time.Time) { h.Over(now) }, 0}, // it broke
		{2 * time.Second, func(now time.Time) { h.Over(now) }, 0},
		{5 * time.Second, func(now time.Time) { h.Enter(Forbidden, now) }, 3 * time.Second},
		{7 * time.Second, func(now time.Time) { h.Over(now) }, 5 * time.Second},
		{8 * time.Second, func(now time.Time) { h.Enter(Joined, now) }, 0},
		{9 * time.Second, func(now time.Time) { h.Enter(Forbidden, now) }, 0},
		{10 * time.Second, func(now time.Time) { h.Over(now) }, time.Second},
	} {
		now := t0.Add(then.at)
		if then.event(now); h.Failing(now) != then.failing {
			t.Errorf("at %v: failing for %v, want %v", then.at, h.Failing(now), then.failing)
		}
	}
}

func TestSubscriptionsThatBreakSoonCountAsFailing(t *testing.T) {
	t0 := time.Now()
	now, h := t0.Add(time.Hour), heardAt(t0)
	began := now
	h.Over(now) // of one that had lasted
	for h.Failing(now) < absentAfter {
		if h.Polls() {
			t.Fatalf("polls after %v", now.Sub(began))
		}
		now = now.Add(10 * time.Millisecond) // a pause
		if h.Enter(Joined, now); h.Failing(now) != 0 || h.Polls() {
			t.Fatal("a subscription that is confirmed counts as failing")
		}
		now = now.Add(10 * time.Millisecond)
		h.Over(now)
		if now.Sub(began) > 2*absentAfter {
			t.Fatal("they never count")
		}
	}
	if !h.Polls() || now.Sub(began) < absentAfter {
		t.Errorf("polls %v after %v", h.Polls(), now.Sub(began))
	}
	h.Enter(Joined, now)
	now = now.Add(steadyLife)
	if h.Over(now); h.Polls() || h.Failing(now) != 0 {
		t.Error("one that lasted counts as failing")
	}
}

func TestWaitersPollOnlyOnceAttemptsToSubscribeHaveFailedForLong(t *testing.T) {
	t0 := time.Now()
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	h := heardAt(t0.Add(-steadyLife))
	for _, then := range []struct {
		at    time.Duration
		event func(time.Time)
		polls bool
	}{
		{time.Second, func(now time.Time) { h.Over(now) }, false}, // it broke
		{2 * time.Second, func(now time.Time) { h.Over(now) }, false},
		{2*time.Second + absentAfter - 1, func(now time.Time) { h.Over(now) }, false},
		{2*time.Second + absentAfter, func(now time.Time) { h.Over(now) }, true},
		{time.Minute, func(now time.Time) { h.Over(now) }, true},
		{2 * time.Minute, func(now time.Time) { h.Enter(Joined, now) }, false},
		{2*time.Minute + steadyLife, func(now time.Time) { h.Over(now) }, false}, // it broke anew
		{3 * time.Minute, func(now time.Time) { h.Over(now) }, false},
		{3*time.Minute + absentAfter, func(now time.Time) { h.Over(now) }, true},
		{4 * time.Minute, func(now time.Time) { h.Enter(Forbidden, now) }, true},
		{5 * time.Minute, func(now time.Time) { h.Over(now) }, true},
		{6 * time.Minute, func(now time.Time) { h.Enter(Joined, now) }, false},
	} {
		then.event(at(then.at))
		if h.Polls() != then.polls {
			t.Errorf("at %v: polls %v", then.at, h.Polls())
		}
		if failing := h.Failing(at(then.at)); h.State == Joined && failing != 0 {
			t.Errorf("at %v: subscribed, and failing for %v", then.at, failing)
		}
	}
}
