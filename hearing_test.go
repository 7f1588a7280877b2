package leased

import (
	"testing"
	"time"
)

// What the inbox makes of what it hears and does not hear, by hand.

// heardAt returns an inbox that was confirmed at t0, on a server that counts.
func heardAt(t0 time.Time) *hearing {
	h := &hearing{counts: true}
	h.enter(joined, t0)
	return h
}

func TestAnEchoThatNobodyReceivedHasTheInboxRebuiltWhicheverComesFirst(t *testing.T) {
	t0 := time.Now()
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	for what, deaf := range map[string]func(h *hearing, nonce string) bool{
		"the count alone": func(h *hearing, nonce string) bool { return h.published(nonce, 0, at(3*time.Second)) },
		"the echo, from a replica, before the count": func(h *hearing, nonce string) bool {
			h.message(nonce, at(3*time.Second))
			return h.published(nonce, 0, at(3*time.Second))
		},
		"the count before the echo": func(h *hearing, nonce string) bool {
			deaf := h.published(nonce, 0, at(3*time.Second))
			h.message(nonce, at(3*time.Second))
			return deaf
		},
	} {
		h := heardAt(t0)
		if !deaf(h, h.challenge(at(2*time.Second), echoWait)) {
			t.Errorf("%s: the inbox is believed", what)
		}
	}
}

func TestACountOfNobodyProvesNothing(t *testing.T) {
	t0 := time.Now()
	for what, h := range map[string]*hearing{
		"where the server does not count subscribers": {},
		"of an echo for an earlier subscription":      {counts: true},
	} {
		h.enter(joined, t0)
		nonce := h.challenge(t0.Add(2*time.Second), echoWait)
		h.message(nonce, t0.Add(2*time.Second))
		if h.counts {
			h.enter(joined, t0.Add(3*time.Second))
		}
		if h.published(nonce, 0, t0.Add(4*time.Second)) {
			t.Errorf("%s", what)
		}
	}
}

func TestAnEchoIsAwaitedForASecondAfterItWasPublished(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	nonce := h.challenge(t0.Add(2*time.Second), echoWait)
	if h.published(nonce, 1, t0.Add(2*time.Second)) || h.overdue(t0.Add(3*time.Second-1)) || !h.overdue(t0.Add(3*time.Second)) {
		t.Errorf("overdue at %v", h.due.Sub(t0))
	}
}

// A command that was to ask for it may never say what became of that.
func TestAnEchoWhoseCommandIsNeverAnsweredIsOverdueAllTheSame(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	h.challenge(t0.Add(2*time.Second), echoWait)
	if h.overdue(t0.Add(5*time.Second-1)) || !h.overdue(t0.Add(5*time.Second)) {
		t.Errorf("overdue at %v", h.due.Sub(t0))
	}
}

func TestErrorsOfOtherCommandsDoNotHideThatAnEchoIsMissing(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0.Add(2 * time.Second)
	h.published(h.challenge(now, echoWait), 1, now)
	for end := now.Add(echoWait); now.Before(end); now = now.Add(100 * time.Millisecond) {
		h.suspect()
		if nonce := h.challenge(now, echoWait); nonce != "" {
			t.Fatal("the echo that is awaited was forgotten")
		}
	}
	if !h.overdue(now) {
		t.Errorf("overdue at %v", h.due.Sub(t0))
	}
}

func TestTroubleHasTheInboxProveItselfAlthoughMessagesCome(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0.Add(100 * time.Millisecond)
	if h.challenge(now, echoWait) != "" {
		t.Error("an echo is demanded of an inbox that was just confirmed")
	}
	h.suspect()
	h.message("", now)
	nonce := h.challenge(now, ownerSilence)
	if nonce == "" {
		t.Fatal("no echo is demanded")
	}
	h.message(nonce, now)
	if h.challenge(now, echoWait) != "" {
		t.Error("it has proved itself, and has to again")
	}
}

// Messages come from a replica too.
func TestAnInboxThatHearsMessagesHasToProveItselfNowAndThen(t *testing.T) {
	t0 := time.Now()
	h := heardAt(t0)
	now := t0
	for now.Sub(t0) < ownerSilence {
		if h.challenge(now, echoWait) != "" {
			t.Fatalf("an echo is demanded after %v", now.Sub(t0))
		}
		now = now.Add(100 * time.Millisecond)
		h.message("", now)
	}
	if h.challenge(now, echoWait) == "" {
		t.Error("no echo is demanded")
	}
}

func TestThePauseBetweenSubscriptionsGrowsUntilOneHasLived(t *testing.T) {
	now := time.Now()
	h := heardAt(now)
	for _, want := range []int{20, 40, 80, 160, 320, 640, 1280, 2000, 2000} {
		now = now.Add(60 * time.Millisecond)
		if got := h.over(now); got != time.Duration(want)*time.Millisecond {
			t.Errorf("a pause of %v, want %d ms", got, want)
		}
		h.enter(joined, now)
	}
	if got := h.over(now.Add(steadyLife - 1)); got != longestRejoin {
		t.Errorf("%v after one that lived too short", got)
	}
	h.enter(joined, now)
	if got := h.over(now.Add(steadyLife)); got != firstRejoin {
		t.Errorf("%v after one that lived", got)
	}
	h.enter(forbidden, now)
	if got := h.over(now); got != deniedRejoin || h.state != forbidden {
		t.Errorf("%v after a refusal, state %v", got, h.state)
	}
}
