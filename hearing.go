package leased

import (
	"strconv"
	"time"
)

const (
	echoWait     = time.Second      // without an echo for that long, the subscription is rebuilt
	ownerSilence = 20 * time.Second // an owner demands an echo after that long

	firstRejoin   = 20 * time.Millisecond
	longestRejoin = 2 * time.Second
	deniedRejoin  = 30 * time.Second
	steadyLife    = 5 * time.Second // a subscription that lived so long was sound
)

// hearing decides whether the inbox can be believed to hear, and what to do where
// it cannot. It has no goroutine, no clock and no Redis: notify.go tells it what
// happened, under inbox.mu, and does what it says.
//
// A connection whose peer vanished looks alive for very long, so the inbox has to
// prove its life: a command has the server publish an echo, and where none comes
// the subscription is made anew. On a server that counts receivers, a count of 0
// says the same at once, and it does so even if the echo arrives: then the
// subscription is on another server, a replica of the one that published. That
// happens after a planned failover behind a fixed name: commands follow the name,
// and a subscription stays where it was.
type hearing struct {
	counts bool // PUBLISH counts every subscriber of the server it is sent to
	state  inboxState

	since     time.Time // of state
	heard     time.Time // the last message
	echoed    time.Time // the last proof: an echo, or the confirmation
	suspected bool      // something failed since: the next chance is taken for a proof

	sent  int
	nonce string    // of the echo awaited, "" if none is
	came  string    // of the last echo that came; its count may still be on its way
	due   time.Time // when the awaited echo is overdue

	pause time.Duration // before the next subscription
}

type inboxState uint8

const (
	joining inboxState = iota
	joined
	forbidden // Redis does not let us subscribe: waiting means polling
)

// enter: the subscription was confirmed, or refused, or it is over.
func (h *hearing) enter(s inboxState, now time.Time) {
	h.state, h.since = s, now
	h.heard, h.echoed, h.suspected = now, now, false
	h.nonce, h.came, h.due = "", "", time.Time{}
}

// over: the subscription ended, or could not be made. It returns how long to
// leave the server alone: each subscription of a client has all its locks look
// again, so the pause grows until one has lived for a while.
func (h *hearing) over(now time.Time) (pause time.Duration) {
	if h.state == joined && now.Sub(h.since) >= steadyLife {
		h.pause = 0
	}
	h.pause = min(max(2*h.pause, firstRejoin), longestRejoin)
	pause = h.pause
	if h.state == forbidden {
		return deniedRejoin
	}
	h.enter(joining, now)
	return pause
}

// challenge returns the nonce of an echo that a command should ask for, or "" if
// there is no need: a message came just now, or an echo is awaited already. It is
// overdue when the command has had all its time.
func (h *hearing) challenge(now time.Time, silence time.Duration) string {
	calm := !h.suspected && now.Sub(h.heard) < silence && now.Sub(h.echoed) < ownerSilence
	if h.state != joined || h.nonce != "" || calm {
		return ""
	}
	h.sent++
	h.nonce, h.due = strconv.Itoa(h.sent), now.Add(commandTimeout+echoWait)
	return h.nonce
}

// published: the server has published that echo to so many receivers; less than 0
// if it did not, or nobody knows. It reports whether the subscription is to be
// rebuilt.
func (h *hearing) published(nonce string, receivers int, now time.Time) (deaf bool) {
	awaited := nonce == h.nonce
	switch {
	case !awaited && nonce != h.came: // of an earlier subscription
	case receivers == 0 && h.counts:
		return true
	case awaited && receivers < 0:
		h.nonce, h.due = "", time.Time{}
	case awaited:
		h.due = earlier(h.due, now.Add(echoWait))
	}
	return false
}

// message: one arrived. nonce is that of an echo, else "".
func (h *hearing) message(nonce string, now time.Time) {
	h.heard = now
	if nonce != "" && nonce == h.nonce {
		h.nonce, h.came, h.due = "", nonce, time.Time{}
		h.echoed, h.suspected = now, false
	}
}

// overdue reports whether an echo was awaited for long enough.
func (h *hearing) overdue(now time.Time) bool { return h.nonce != "" && !now.Before(h.due) }

// suspect: a command failed, so the subscription may have broken too, or the
// server changed its part. An echo that is awaited already stays awaited, and no
// longer than before: else errors could hide for ever that none comes.
func (h *hearing) suspect() { h.suspected = true }
