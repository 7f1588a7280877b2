package lockstate

// What the process has with Redis: the request and the grant, their states, for how long a
// grant is trusted, the tokens that it gives, and its tenure.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// grant is what this process has with Redis about one lock:
//
//	none ──► asking ──► queued ──► held ──► releasing ──► none
//	            └─────────────────►┘            └──► asking, queued, held (yield)
//
// A held grant is believed until the end of its trust window: from before the sending of the
// command that proved ownership, for its TTL less a margin of 1 % + 2 ms (Gray and Cheriton,
// "Leases", 1989).
type grant struct {
	ticket            // what it was asked for with
	next   *successor // what takes the ticket's place, nil if nothing does
	state  grantState

	// held:
	via      Via
	wanted   bool    // another process waits for the lock
	early    bool    // it came before the inbox was confirmed, so "wanted" may have been missed
	fresh    bool    // it came in this very step
	idle     bool    // no caller was inside after the last step, and no command in flight
	served   int32   // leases it has given since it came or was last idle
	since    Instant // it has been in use without a break
	renewAt  Instant
	touchAt  Instant // when the lock's last token is given a new TTL, on the grid of renewals, which does it
	idleTill Instant

	// minHoldUntil is the end of the minimum hold of the caller inside, or of the one that
	// was last inside; 0 if it has none. No caller enters before, so the grant is given
	// back when that caller leaves, and Redis keeps the lock from everybody until then.
	minHoldUntil Instant

	readers uint64 // token of the leases of a shared grant
	clock   uint64 // what the server's clock showed, µs, at clockAt or before
	clockAt Instant
	gained  time.Duration // by the wall clock on the monotonic one since proved, see watch

	// notified is when a message gave us the grant for protocol.ProvisionalTTL; zero if none
	// did, or a renewal or an acquire has been answered since, which gave it its full TTL.
	notified Instant
}

// ticket is one request for the lock, and what is known of it in Redis.
type ticket struct {
	req  protocol.Request
	opts *Terms // of the caller it was made for

	// proved is the sending of the last command that proved ownership. Until the
	// request is granted it is what a message "granted" is trusted from: the sending of
	// the first acquire, or of the last one answered "queued", never the arrival of the
	// message.
	proved time.Time

	// token is the grant's, as Redis gave it. Until the request is granted it is the
	// lock's last token in the answer "queued": a message is believed only if its token
	// is greater, else it is about an earlier grant of the same id.
	token uint64

	sent       bool    // Redis may have seen it
	probe      bool    // it must not queue, see Lock.ask
	lateUntil  Instant // until then an acquire of it that had no answer may still arrive
	doubtUntil Instant // likewise, one that was sent while the grant was held

	wait // until it is granted
}

// wait is what is known of a ticket that is not granted yet.
type wait struct {
	checkAt Instant       // when to ask again
	endsAt  Instant       // when the owner's lease ends, as a message said; zero if none did
	told    uint64        // up to which end of a lease readers were sent wanted for it, 0 if all were
	poll    time.Duration // pause between checks where no notification comes
	place   int           // how many were ahead when it was asked about last
	// hastened: it is asked about before its pause is over, as are all others that share its inbox
	// or its server.
	hastened bool
}

// successor is the request that takes the place of a grant's own.
type successor struct {
	ticket
	role role
	done []chan struct{} // byDowngrade: closed when that is settled
}

// role says how a successor takes its predecessor's place.
type role uint8

const (
	noNext      role = iota
	byYield          // the grant is being released; Redis queues the successor
	byDowngrade      // a writer's grant becomes a reader's
	byPlace          // it has a place in the queue behind our own readers, or asks for one
)

// role returns that of the grant's successor.
func (g *grant) role() role {
	if g.next == nil {
		return noNext
	}
	return g.next.role
}

// requested reports that the grant was asked for, or is about to be, and not given yet.
func (g *grant) requested() bool { return g.state == Asking || g.state == queued }

// pending is the one command of a lock that awaits its answer.
type pending struct {
	verb  protocol.Verb // None if there is none
	stale bool          // a message came, or may have been missed, since it was sent: its answer may be older
}

// lostGrant is a grant that could not be proved in time. It is cancelled when no caller works
// under it any more.
type lostGrant struct {
	req  protocol.Request
	keep time.Time // the end of its minimum hold
	next *lostGrant
}

// grantState says what the process knows of its request, and what may be in flight. It is
// written by the become functions only.
type grantState uint8

const (
	// none: there is no request, and Redis knows of none that has not been cancelled or
	// released. Nothing is in flight, but for a command about a grant that was lost.
	none grantState = iota

	// Asking: the ticket is asked for with acquire, which is in flight or is sent at
	// checkAt. Whether Redis has seen it is what sent says. Also a held grant that cannot
	// be believed any more and has no caller inside: it is asked about under its own id
	// before the next caller enters.
	Asking

	// queued: Redis answered that the request waits in the queue. A message "granted", or
	// the acquire of a re-check, makes it held.
	queued

	// Held: Redis gave us the lock, and callers enter while the grant is trusted. Members
	// are those inside; without any, the grant idles until idleTill. It may have a
	// successor: by downgrade, or by a place behind our own readers; then the acquire or
	// the downgrade is in flight, or is sent at the successor's checkAt.
	Held

	// Releasing: a release or a yield is in flight, and no caller is inside under the grant.
	// Callers in leaving wait for its answer. The successor is that of the yield.
	Releasing
)

// becomeAsking: t is asked for next, by acquire.
func (l *Lock) becomeAsking(t ticket) { l.grant = grant{state: Asking, ticket: t} }

// becomeNext: the successor takes the grant's place. Redis was told of it.
func (l *Lock) becomeNext() {
	t := l.grant.next.ticket
	t.sent = true
	l.becomeAsking(t)
}

// becomeQueued: an answer to what was sent at from said that the request waits.
func (l *Lock) becomeQueued(a protocol.Answer, from time.Time) {
	g := &l.grant
	g.state, g.proved, g.token = queued, from, a.Token
}

// becomeHeld: a gave the lock to the ticket that is asked for, as is proved from from on.
func (l *Lock) becomeHeld(a protocol.Answer, from time.Time, how Via, now time.Time) {
	g := &l.grant
	g.early = l.env.InboxPending() || g.probe
	g.state, g.fresh = Held, true
	g.wait = wait{}
	at := l.instant(now)
	g.via, g.since, g.served = how, at, 0
	g.token, g.clock, g.clockAt = a.Token, a.Clock, at
	if a.Kept {
		// Others may have had the lock since that token was given: Redis can have gone
		// back to a state in which we owned. So it counts as given out.
		l.last = max(l.last, a.Token)
	}
	if g.req.Mode == protocol.Shared {
		if a.Kept {
			l.last = max(l.last, a.Clock-1)
		}
		l.last = max(a.Token, l.last+1)
		g.readers = l.last
	}
	g.prove(from)
	if how == ViaDirect && g.req.Provisional {
		g.notified = at
	}
	g.idleTill = 0
	l.prevHoldSpan = a.Link
	g.touchAt = g.onGrid(at.add(protocol.TokenLife(g.req.TTL) / 4))
}

// becomeReleasing: the grant has no members any more, and a release or yield is sent.
func (l *Lock) becomeReleasing(verb protocol.Verb) {
	l.grant.state, l.pending = Releasing, pending{verb: verb}
	l.blocker = "" // who blocked this grant is of no use to those who wait for the next
}

// becomeNone: the request is over. What Redis may still know of it was released, or its
// cancel is among the effects.
func (l *Lock) becomeNone() { l.grant = grant{} }

// Via says how a caller came to its lease.
type Via uint8

const (
	viaFree   Via = iota // the lock was free
	ViaLocal             // from a caller of the same process, or beside one
	ViaIdle              // the process had kept it
	ViaDirect            // a message: the releasing script made us owner
	viaCheck             // a re-check found the lock ours or free
	Vias                 // how many there are
)

func (v Via) String() string {
	return [...]string{"free", "local", "idle", "direct", "recheck"}[v]
}

const (
	firstPoll = 50 * time.Millisecond
	// LongestPoll is the longest pause between two re-checks of the head of the queue, and of
	// a waiter that polls.
	LongestPoll = 3 * time.Second
	// FarthestPoll is the longest pause of all: it grows by PausePerPlace for each place ahead.
	FarthestPoll  = 20 * time.Second
	PausePerPlace = 25 * time.Millisecond
	// LooksEvery is how often waiters that are far behind look, all that are due together.
	LooksEvery = 50 * time.Millisecond
	// askInTime is what is left of a waiting lease after the longest pause, to ask once more, or
	// half of the lease if that is less.
	askInTime = 10 * time.Second
	// AfterExpiry is how long after the owner's expiry the head of the queue checks. Each
	// waiter behind it checks perPlace later, so that a crash does not start a herd.
	AfterExpiry = time.Millisecond
	perPlace    = 5 * time.Millisecond
	// headPoll is the longest pause between two re-checks of the head of the queue if its
	// grant will be provisional. Then most of that is left when the message comes, and if
	// the message is lost a re-check still finds the grant.
	headPoll = time.Second
	// confirmTime is how much of a provisional grant must be left for a caller to enter:
	// the time for a renewal's answer. A renewal without one is sent again after as long.
	confirmTime = protocol.ProvisionalTTL / 4
	// longestInboxWait is for how long callers wait in the process for the inbox to be
	// confirmed before they queue, once in a client's life.
	longestInboxWait = 2 * time.Second
	// idleOwnersTime is for how long a caller that only tries waits for an owner that may
	// be idle.
	idleOwnersTime = 50 * time.Millisecond
	// longestAhead: a token further ahead of the server's clock than this means that the
	// clock went back. Callers do not wait for it to catch up then.
	longestAhead = time.Millisecond
)

// longestTenure is the tenure of an exclusive grant that is not known to be wanted.
const longestTenure = time.Second

// rateSlack bounds how much the rates of the server's clock and ours differ: by one part in
// so many. Good clocks differ by one in 20,000.
const rateSlack = 100

// margin is taken off a TTL for clocks that run at different rates, and for what happens
// between the server's reading of its clock and our reading of ours.
func margin(ttl time.Duration) time.Duration { return ttl/rateSlack + 2*time.Millisecond }

// window is for how long a proof of ownership for ttl is believed.
func window(ttl time.Duration) time.Duration { return ttl - margin(ttl) }

// tooOld reports whether a proof of ownership for ttl that was sent at from cannot be believed
// any more.
func tooOld(ttl time.Duration, from, now time.Time) bool { return between(from, now).tooLong(ttl) }

// late reports whether a message that t was granted comes too late for a caller to enter
// before Redis was asked. What is left of a provisional grant has to last until its renewal is
// answered.
func (t *ticket) late(now time.Time) bool {
	if t.req.Provisional {
		return tooOld(protocol.ProvisionalTTL, t.proved, now.Add(confirmTime))
	}
	return tooOld(t.req.TTL, t.proved, now)
}

// cooldown returns for how long, from now on, a lock that is given back is kept until keep. It
// is measured by the monotonic clock: one that is set must not shorten it.
func cooldown(keep, now time.Time) time.Duration {
	if keep.IsZero() {
		return 0
	}
	return max(0, keep.Sub(now))
}

// ttl is for how long Redis keeps the grant from its last proof on.
func (g *grant) ttl() time.Duration {
	if g.notified != 0 {
		return protocol.ProvisionalTTL
	}
	return g.req.TTL
}

// over reports whether the last proof of ownership is too old to be believed.
func (g *grant) over(now time.Time) bool { return tooOld(g.ttl(), g.proved, now) }

// prove takes a proof of ownership for the full TTL that was sent at from.
func (g *grant) prove(from time.Time) {
	g.proved, g.notified = from, 0
}

// Gain returns by how much the wall clock moved further than the monotonic one did. The
// monotonic clock stands still while a machine sleeps, but the lease's TTL does not; the wall
// clock can be set back. So the longer of the two is taken for what has passed.
func Gain(from, now time.Time) time.Duration { return between(from, now).gain }

// interval is the time between two readings of the clocks.
type interval struct {
	passed time.Duration // by the monotonic clock
	gain   time.Duration // of the wall clock on that
}

func between(from, now time.Time) interval {
	passed := now.Sub(from)
	return interval{passed, time.Duration(now.UnixNano()-from.UnixNano()) - passed}
}

// tooLong reports whether a proof of ownership for ttl is not believed any more after i.
func (i interval) tooLong(ttl time.Duration) bool { return i.passed+max(0, i.gain) >= window(ttl) }

// drifted reports whether the clocks have moved apart in i by more than a TTL's margin.
func (i interval) drifted(ttl time.Duration) bool { return i.gain.Abs() > margin(ttl) }

// trust returns the end of the trust window, given what the wall clock had gained on the
// monotonic one after the last event.
func (g *grant) trust() time.Time { return g.proved.Add(window(g.ttl()) - g.gained) }

// trustEnds is trust as an instant.
func (l *Lock) trustEnds() Instant {
	g := &l.grant
	return l.instant(g.proved).add(window(g.ttl()) - g.gained)
}

// watch notes whether the machine has slept, or its clock was set.
func (g *grant) watch(now time.Time) {
	if g.state == Held {
		g.gained = max(0, Gain(g.proved, now))
	}
}

// ends returns when the grant expires in Redis, zero if that is not known.
func (g *grant) ends() time.Time {
	if g.state != Held && g.state != Releasing {
		return time.Time{}
	}
	return g.proved.Add(g.req.TTL)
}

// trusted reports whether the grant may be believed. It is tested before every admission,
// those inside the process included.
func (g *grant) trusted(now time.Time) bool {
	since, ttl := between(g.proved, now), g.ttl() // once: over and drifted would each read it
	return !since.tooLong(ttl) && !since.drifted(ttl)
}

// proof is the last proof of ownership, in the form in which trusts needs it.
type proof struct {
	from           time.Time
	ttl            time.Duration
	at             Instant // on the monotonic clock
	wall           int64   // on the wall clock, ns
	window, margin time.Duration
}

// trusts is trusted at now, which is at, for those who ask over and over about the same proof.
func (l *Lock) trusts(at Instant, now time.Time) bool {
	p, from, ttl := &l.proof, l.grant.proved, l.grant.ttl()
	if p.from != from || p.ttl != ttl {
		*p = proof{from, ttl, l.instant(from), from.UnixNano(), window(ttl), margin(ttl)}
	}
	passed := at.sub(p.at)
	gain := time.Duration(now.UnixNano()-p.wall) - passed
	return passed+max(0, gain) < p.window && gain.Abs() <= p.margin
}

// drifted reports that wall and monotonic time have moved apart since ownership was proved:
// the machine slept, or its wall clock was set. Only another proof tells which.
func (g *grant) drifted(now time.Time) bool {
	return between(g.proved, now).drifted(g.ttl())
}

// tenureOver reports that other processes are served next, although callers of this process
// wait. A shared grant that is wanted admits the callers that waited when it came, and none
// after them. An exclusive one is yielded once in a while even if it is not known to be
// wanted, for that message can be lost.
func (l *Lock) tenureOver(now Instant) bool {
	g := &l.grant
	since := now.sub(g.since)
	slow := since >= max(longestTenure, g.opts.Tenure)
	switch {
	case g.served > 0 && g.req.Mode == protocol.Exclusive && l.aheadOfServers(now):
		return true
	case g.served == 0 || g.idle:
		return false
	case g.req.Mode == protocol.Shared:
		return !g.fresh && (g.wanted || slow && !l.env.HasInbox())
	}
	return slow || g.wanted && (int(g.served) >= g.opts.Handoffs || since >= g.opts.Tenure)
}

// aheadOfServers reports that the next token of the grant would be so far ahead of the server's
// clock that the server does not give a greater one when the lease ends there without a release:
// the clock was set back, or, on a quorum, another server's is fast. Each lease then needs a token
// that Redis has given.
func (l *Lock) aheadOfServers(now Instant) bool {
	g := &l.grant
	near := uint64((g.req.TTL/(2*rateSlack) + longestAhead).Microseconds())
	return l.last >= g.token && l.last >= g.serverClock(now)+near
}

// touch returns the TTL that the lock's last token needs now, 0 if it has been given one
// recently. A token that is ahead of the server's clock, which was set back, must outlive the
// time until the clock has reached it.
func (g *grant) touch(last uint64, now Instant) time.Duration {
	if now < g.touchAt {
		return 0
	}
	life := protocol.TokenLife(g.req.TTL)
	g.touchAt = g.onGrid(now.add(life / 4))
	if last, clock := max(last, g.token), g.serverClock(now); last > clock {
		life += time.Duration(min(last-clock, maxAhead)) * time.Microsecond
	}
	return life
}

// maxAhead bounds by how much longer than usual a token is kept, in µs: about 30 years, as in
// the scripts.
const maxAhead = 1e15

// serverClock estimates the server's clock in µs. The estimate is never ahead of it: the reply
// arrived after the server had read its clock, and ours may be the faster one.
func (g *grant) serverClock(now Instant) uint64 {
	since := max(0, now.sub(g.clockAt))
	return g.clock + uint64((since - since/rateSlack).Microseconds())
}

// rebase takes what the server's clock showed in answer to a command that was sent at sent. By
// now it shows at least that, and at most as much more as has passed since sent. An estimate
// in between is better than the answer, for the answer was delayed. An estimate outside was
// wrong: the clocks differ by more than assumed, or one was set.
func (g *grant) rebase(clock uint64, sent, now Instant) {
	since := max(0, now.sub(sent))
	most := clock + uint64((since + since/rateSlack).Microseconds())
	if estimate := g.serverClock(now); estimate < clock || estimate > most {
		g.clock, g.clockAt = clock, now
	}
}

// drawn returns the last token given to a caller under the grant, 0 if that is the grant's own.
func (l *Lock) drawn() uint64 {
	if l.last > l.grant.token {
		return l.last
	}
	return 0
}

// nextToken returns the token of a caller that enters. Tokens are a hybrid logical clock
// (Kulkarni et al., 2014) on the server's time: they keep growing when the lock's key has
// expired, was flushed or went back in a failover. All leases of a shared grant have the same
// token. ahead is how far the token is ahead of the server's clock, for the caller to wait.
func (l *Lock) nextToken(now time.Time) (token uint64, ahead time.Duration) {
	g := &l.grant
	if g.req.Mode == protocol.Shared {
		return g.readers, 0
	}
	token = g.token
	clock := g.serverClock(l.instant(now))
	if l.last >= g.token { // it was given out
		token = clock
	}
	token = max(token, l.last+1)
	l.last = token
	if token > clock {
		if d := time.Duration(token-clock) * time.Microsecond; d <= longestAhead {
			ahead = d + d/(rateSlack-1) + 1 // as long as the estimate takes to reach it
		}
	}
	return token, ahead
}

// grids is how many instants a TTL has at which renewals are due.
const grids = 30

// grid is the time between two of them.
func (g *grant) grid() time.Duration { return g.req.TTL / grids }

// onGrid moves a renewal to the last instant before it that all locks with the same TTL share.
func (g *grant) onGrid(t Instant) Instant {
	grid := g.grid()
	if grid <= 0 {
		return t
	}
	return t.add(-(t.sub(start) % grid))
}

// Earlier returns the earlier of two instants.
func Earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
