package lockstate

import (
	"strconv"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	// EchoWait is how long an echo may take before the subscription is rebuilt.
	EchoWait = time.Second
	// OwnerSilence is how long a client that owns a lock goes without an echo before it
	// asks for one.
	OwnerSilence = 20 * time.Second

	// farBehind is the place from which a waiter's inbox may be silent for farSilence, and for
	// up to as long again, depending on its place: many may have joined at the same time.
	farBehind  = 100
	farSilence = 40 * time.Second

	firstRejoin = 20 * time.Millisecond
	maxRejoin   = 2 * time.Second
	// After a refusal, which an operator has to end. It may have been a slip that lasts for seconds.
	firstDenied = time.Second
	maxDenied   = 30 * time.Second
	// absentAfter is how long attempts to subscribe fail before waiters poll. It is longer than a
	// subscription that broke takes to be made again.
	absentAfter = 2 * maxRejoin
	steadyLife  = 5 * time.Second // a subscription that lasted this long was sound
)

// InboxHealth decides whether the inbox can be relied on to receive messages, and what to do
// if not. It has no goroutine and no clock, and sends nothing: notify.go reports events to it
// under inbox.mu, and does what it returns.
//
// A connection whose peer has vanished looks alive for a very long time. So the inbox is
// probed: a command makes the server publish an echo, and if no echo arrives, the subscription
// is rebuilt. On a server that counts receivers, a count of 0 shows at once that it is broken,
// even if the echo does arrive: then the subscription is on another server, a replica of the one
// that published. That happens after a planned failover behind a fixed name, because commands
// follow the name while a subscription stays where it was.
type InboxHealth struct {
	Counts bool // whether PUBLISH counts every subscriber of the server that it is sent to
	State  InboxState

	since         time.Time // when State was entered
	heard         time.Time // when the last message arrived
	echoed        time.Time // when the inbox was last proved, by an echo or by its confirmation
	ProbeRequired bool      // a command failed since then, so the next command probes

	sent  int
	nonce string    // of the awaited echo, "" if none is awaited
	came  string    // of the last echo that arrived; its count of receivers may still be on its way
	Due   time.Time // when the awaited echo is overdue

	pause    time.Duration // before the next subscription
	denied   time.Duration // before the next one after a refusal
	unsteady time.Time     // when the first subscription was made since the last one that lasted; zero if the last one did
	failing  time.Time     // since when no attempt to subscribe has succeeded, or none has lasted; zero if the last one did
}

// InboxState is the state of the inbox's subscription.
type InboxState uint8

const (
	joining   InboxState = iota
	Joined               // confirmed
	Absent               // attempts have failed for absentAfter: waiters poll until one succeeds
	Forbidden            // refused: waiters have to poll
)

// Silence returns how long the inbox of a waiter with place requests ahead of it goes without an
// echo before it asks for one. The next in line must receive the message that it was granted. For
// a waiter far behind, an echo would cost the server about as much as the re-check itself. If it
// comes to the front meanwhile and the message is lost, its next re-check finds the grant.
func Silence(place int) time.Duration {
	if place >= farBehind {
		return farSilence + time.Duration(place)*time.Second%farSilence
	}
	return EchoWait
}

// Enter is the event that the subscription was confirmed or refused, or that it ended.
func (h *InboxHealth) Enter(s InboxState, now time.Time) {
	switch {
	case s == Joined:
		h.failing = time.Time{}
	case s == Forbidden && h.failing.IsZero():
		h.failing = now
	}
	h.State, h.since = s, now
	h.heard, h.echoed, h.ProbeRequired = now, now, false
	h.nonce, h.came, h.Due = "", "", time.Time{}
}

// Over is the event that the subscription ended or could not be made. It returns the pause
// before the next one. All locks of a client re-check after each subscription, so the pause
// grows until a subscription has lasted for a while. For the same reason, those that break soon count
// as attempts that failed: their locks ask Redis often, and still miss messages.
func (h *InboxHealth) Over(now time.Time) (pause time.Duration) {
	if h.State == Joined {
		if now.Sub(h.since) >= steadyLife {
			h.pause, h.denied, h.unsteady = 0, 0, time.Time{}
		} else if h.unsteady.IsZero() {
			h.unsteady = h.since
		}
		h.failing = h.unsteady
	}
	h.pause = min(max(2*h.pause, firstRejoin), maxRejoin)
	pause = h.pause
	switch {
	case h.State == Forbidden:
		h.denied = min(max(2*h.denied, firstDenied), maxDenied)
		return h.denied
	case h.State != Joined && h.failing.IsZero():
		h.failing = now
	}
	if h.Failing(now) >= absentAfter {
		h.Enter(Absent, now)
	} else {
		h.Enter(joining, now)
	}
	return pause
}

// Late is the event that an attempt to subscribe takes long. It counts as one that has failed, unless it
// succeeds after all.
func (h *InboxHealth) Late(now time.Time) {
	if h.failing.IsZero() {
		h.failing = now
	}
	if h.State == joining && h.Failing(now) >= absentAfter {
		h.Enter(Absent, now)
	}
}

// Failing returns for how long attempts to subscribe have failed or been refused. It is 0 while a
// subscription is confirmed, and for an inbox that has just broken.
func (h *InboxHealth) Failing(now time.Time) time.Duration {
	if h.failing.IsZero() {
		return 0
	}
	return now.Sub(h.failing)
}

// Polls reports whether no message comes, so that waiters have to poll.
func (h *InboxHealth) Polls() bool { return h.State == Forbidden || h.State == Absent }

// StartProbe returns the nonce of an echo that a command should ask for. It returns "" if that is
// not needed, because a message has just come, or if an echo is already awaited. The echo is
// overdue EchoWait after the command's own timeout.
func (h *InboxHealth) StartProbe(now time.Time, silence time.Duration) string {
	calm := !h.ProbeRequired && now.Sub(h.heard) < silence && now.Sub(h.echoed) < max(silence, OwnerSilence)
	if h.State != Joined || h.nonce != "" || calm {
		return ""
	}
	h.sent++
	h.nonce, h.Due = strconv.Itoa(h.sent), now.Add(protocol.CommandTimeout+EchoWait)
	return h.nonce
}

// ProbeCounted is the event that the server published an echo to this many receivers; the number
// is negative if it did not, or if the number is unknown. It reports whether the subscription
// must be rebuilt.
func (h *InboxHealth) ProbeCounted(nonce string, receivers int, now time.Time) (rebuild bool) {
	awaited := nonce == h.nonce
	switch {
	case !awaited && nonce != h.came: // from an earlier subscription
	case receivers == 0 && h.Counts:
		return true
	case awaited && receivers < 0:
		h.nonce, h.Due = "", time.Time{}
	case receivers < 0 && h.Counts:
		h.ProbeRequired = true // the echo came, perhaps from a replica: only the count tells
	case awaited:
		h.Due = earlierOf(h.Due, now.Add(EchoWait))
	}
	return false
}

// Message is the event that a message arrived. nonce is the nonce of an echo, "" for any other
// message.
func (h *InboxHealth) Message(nonce string, now time.Time) {
	h.heard = now
	if nonce != "" && nonce == h.nonce {
		h.nonce, h.came, h.Due = "", nonce, time.Time{}
		h.echoed, h.ProbeRequired = now, false
	}
}

// Overdue reports whether the awaited echo has not arrived in time.
func (h *InboxHealth) Overdue(now time.Time) bool { return h.nonce != "" && !now.Before(h.Due) }

// RequireProbe is the event that a command failed, so the subscription may be broken too, or
// the server may have changed roles. It does not give an echo that is already awaited more time:
// otherwise a series of errors could hide forever that no echo arrives.
func (h *InboxHealth) RequireProbe() { h.ProbeRequired = true }
