package lockstate

// Re-checks: when a request that waits is asked about again, and how much is asked.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	firstPoll = 50 * time.Millisecond
	// MaxPoll is the longest pause between two re-checks by the head of the queue, or by a
	// waiter that polls.
	MaxPoll = 3 * time.Second
	// maxFarPoll is the longest pause of all. The pause grows by PausePerPlace for each place.
	maxFarPoll    = 20 * time.Second
	PausePerPlace = 25 * time.Millisecond
	// lookInterval is the interval at which waiters far behind re-check: all that are due, at once.
	lookInterval = 50 * time.Millisecond
	// askInTime is how much of a waiting lease is left after the longest pause, to ask once
	// more; it is half of the lease if that is less.
	askInTime = 10 * time.Second
	// maxBrief is the longest time between two full re-checks of a waiter that is not the head, if
	// those between them are brief. If it has become the head since, it has to notice when the lock
	// loses its owner without a message.
	maxBrief = 15 * time.Second
	// slowAnswer is by which part of a TTL an answer may be late if brief re-checks are to follow: the
	// waiting lease that they ask for begins when they are sent, by a clock that lags by that much.
	slowAnswer = 8
	// AfterExpiry is how long after the owner's expiry the head of the queue re-checks. Each
	// waiter behind it re-checks perPlace later, so that a crash does not start a herd.
	AfterExpiry = time.Millisecond
	perPlace    = 5 * time.Millisecond
	// deadAfter is how long a waiter polls before it gives up a request that looks dead. A subscription
	// that broke in an outage is made again sooner, and the request keeps its place.
	deadAfter = 2 * time.Second
	// headPoll is the longest pause between two re-checks by the head of the queue if its
	// grant will be provisional. It leaves most of ProvisionalTTL when the message comes, and
	// if the message is lost, a re-check still finds the grant.
	headPoll = time.Second
)

// enqueued handles the answer "queued" to a command, which was sent at sentAt.
func (l *Lock) enqueued(a protocol.Answer, sentAt, now time.Time) {
	g := &l.grant
	if head := l.waiting.first; head != nil && head.Events != nil && g.state != queued {
		head.Events.add(Event{At: now, What: EventQueuedInRedis, Place: a.Place, Text: a.Blocker})
	}
	hastened := g.hastened || g.state != queued
	l.becomeQueued(a, sentAt)
	polls := a.Echo == protocol.EchoDenied || !l.env.HasInbox()
	pause := l.pauseAfter(a, polls, hastened)
	switch {
	case !polls:
		g.pollsSince = 0
	case g.pollsSince == 0:
		g.pollsSince = l.instant(now)
	}
	l.blocker = a.Blocker
	g.clock, g.clockAt = a.Clock, l.instant(now)
	g.lease = a.Clock/1000 + uint64(g.req.TTL.Milliseconds())
	g.fullAt = l.briefUntil(a, polls, sentAt, now)
	if l.pending.stale || a.Unfinished || a.Told > 0 {
		pause, g.fullAt = 0, 0
	}
	// By now the distance is known better: at first, a connection may have had to be made.
	for c := l.waiting.first; c != nil && c.awaitsIdleOwner(); c = c.next {
		c.until = min(c.until, l.instant(now.Add(idleOwnersTime+3*l.env.RoundTrip())))
	}
	g.told, g.place, g.hastened = a.Told, a.Place, l.pending.stale
	g.recheckAt = l.instant(now).add(pause)
	if a.Left >= 0 {
		g.recheckAt = min(g.recheckAt, l.afterExpiry(a, sentAt))
	}
	if g.endsAt > l.instant(sentAt) { // the answer may be older than the message, and than the end
		g.recheckAt, g.fullAt = min(g.recheckAt, g.endsAt), min(g.fullAt, g.endsAt)
	}
}

// pauseAfter returns when to ask again after the answer a. polls says that no messages come, and hastened
// that others were asked about at the same time.
func (l *Lock) pauseAfter(a protocol.Answer, polls, hastened bool) time.Duration {
	g := &l.grant
	pause := g.regularPause()
	if g.req.Provisional && a.Place == 0 {
		pause = min(pause, headPoll)
	}
	if polls || a.NoNotify && a.Place == 0 { // the head's release notifies those behind it
		if a.Blocker != l.blocker {
			g.poll = 0 // owners that take turns may do so again soon
		}
		pause = min(pause, max(firstPoll, 2*g.poll))
		g.poll = pause
	} else {
		g.poll = 0
	}
	early, chance := pause/3, l.env.Jitter()
	if !polls && !g.req.Provisional { // otherwise, if the one ahead is dead, only a re-check finds out
		near := pause
		pause = farther(pause, a.Place, g.req.TTL)
		if hastened { // others may have been hastened too, and are to re-check at different times again
			early += pause - near
		}
	}
	pause -= time.Duration(float64(early) * chance)
	if a.Place >= farBehind && !polls {
		pause = together(pause, a.Clock)
	}
	return pause
}

// briefUntil returns until when re-checks after the answer a may be brief; 0 if none may. The command that
// was answered was sent at sentAt.
func (l *Lock) briefUntil(a protocol.Answer, polls bool, sentAt, now time.Time) Instant {
	g := &l.grant
	quick := now.Sub(sentAt) <= g.req.TTL/slowAnswer
	if a.Place > 0 && a.Place < farBehind && a.Left >= 0 && !polls && !a.NoNotify && quick && g.behindWriter(a.Blocker) {
		return min(l.afterExpiry(a, sentAt), l.instant(now).add(min(g.req.TTL/2, maxBrief)))
	}
	return 0
}

// afterExpiry returns when the request asks again because the lease of the owner that the answer a names is
// over, unless it was renewed. It is over that long after the server was asked, which was not before sentAt; if
// the answer was late, it may be over already.
func (l *Lock) afterExpiry(a protocol.Answer, sentAt time.Time) Instant {
	return l.instant(sentAt).add(a.Left + AfterExpiry + time.Duration(a.Place)*perPlace)
}

// stillWaits handles the answer to a brief re-check, which says that the request has waited ever since its
// last answer. So a message is trusted from when the re-check was sent, but whatever else was known of
// the wait stays, including the token that a message must exceed.
func (l *Lock) stillWaits(c *protocol.Command, a protocol.Answer, now time.Time) {
	g := &l.grant
	g.proved, g.lease = c.At, c.Until
	if l.pending.stale || a.Echo == protocol.EchoDenied || !l.env.HasInbox() {
		g.fullAt = 0
	}
	g.hastened = l.pending.stale
	early := float64(g.regularPause()/3) * l.env.Jitter()
	pause := farther(g.regularPause(), g.place, g.req.TTL) - time.Duration(early)
	g.recheckAt = min(l.instant(now).add(pause), g.fullAt)
}

// regularPause is the longest pause between two re-checks, if nobody is ahead and messages arrive.
func (t *ticket) regularPause() time.Duration { return min(t.req.TTL/3, MaxPoll) }

// behindWriter reports whether g is for a writer that waits for the writer owner, on a server that
// counts subscribers. Then it makes no difference whether somebody ahead of it has died: the release
// passes over the dead, or announces the end of a cool-down to others, too.
func (g *grant) behindWriter(owner string) bool {
	who, err := protocol.ParseID(owner)
	own, _ := protocol.ParseID(g.req.ID) // if it is not counted, those ahead of it may be provisional
	return err == nil && who.Mode == protocol.Exclusive && own.Mode == protocol.Exclusive && own.Proof == protocol.Counted
}

// farther returns the pause of a waiter with place requests ahead of it. It is longer than pause,
// that of the head, because all waiters together would keep a server busy. The waiting lease
// outlasts it, and so does the trust window of a grant whose message comes at its end.
func farther(pause time.Duration, place int, ttl time.Duration) time.Duration {
	return min(pause+time.Duration(min(place, 1e6))*PausePerPlace, max(ttl/2, ttl-askInTime), maxFarPoll)
}

// together shortens the pause of a waiter that is far behind so that it ends at an instant that
// others share. The instants are on the server's clock, which showed clock when the pause began.
// Each re-check that comes alone wakes up the server, so those that come together cost it much
// less. A pause hardly longer than the time between these instants stays as it is.
func together(pause time.Duration, clock uint64) time.Duration {
	const grid = lookInterval
	began := time.Duration(clock%uint64(grid.Microseconds())) * time.Microsecond
	if shorter := pause - (began+pause)%grid; shorter >= 2*grid {
		return shorter
	}
	return pause
}

// briefly returns the time for Command.Until if the next acquire is a re-check that may be brief,
// else 0.
func (l *Lock) briefly(now time.Time) uint64 {
	g, at := &l.grant, l.instant(now)
	longest := farther(g.regularPause(), g.place, g.req.TTL)
	if g.state != queued || at.add(longest) >= g.fullAt || g.drifted(now) {
		return 0 // or the re-check after this one would be too late for a full one
	}
	return g.serverClock(at)/1000 + uint64(g.req.TTL.Milliseconds())
}
