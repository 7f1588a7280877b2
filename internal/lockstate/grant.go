package lockstate

// What the process has in Redis: the request and the grant, their states, how long a grant is
// trusted, the tokens that it gives out, and its tenure.

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// grant is what this process has in Redis for one lock:
//
//	none ──► asking ──► queued ──► held ──► releasing ──► none
//	            └─────────────────►┘  │         └──► asking, queued, held (yield, or a reserved place)
//	                                  └──► asking (idle, and not believed anymore), none (lost)
//
// A request that is refused or given up goes from asking or queued to none.
//
// A held grant is believed until the end of its trust window, which starts before the command
// that proved ownership is sent and lasts for the TTL less a margin of 1 % + 2 ms (Gray and
// Cheriton, "Leases", 1989).
type grant struct {
	ticket            // the request that was granted, or is asked for
	next   *successor // the request that replaces it, nil if there is none
	state  grantState

	wanted bool // requested, held: another process waits for the lock

	// queued, held: a reading of the server's clock, µs, taken at clockAt or before
	clock   uint64
	clockAt Instant

	// held:
	via      Via
	askDue   bool    // a question is due: a message may have been missed, or left open whether the grant was made anew
	fresh    bool    // it came in this very step
	idle     bool    // after the last step, no caller was inside, and no command in flight but a question while nobody waits
	served   int32   // leases given since it came or was last idle
	since    Instant // when its present period of use began
	askedAt  Instant // when Redis last said to an owner's question that others wait; zero if it did not
	renewAt  Instant
	touchAt  Instant // when the lock's last token needs a new TTL; a renewal gives it, so this is on their grid
	idleTill Instant

	// minHoldUntil is the end of the minimum hold of the caller inside, or of the last caller
	// that was inside; 0 if that has none. No caller enters before then, so the grant is given
	// back when that caller leaves, and Redis keeps the lock from everybody until then.
	minHoldUntil Instant

	readers uint64        // token of the leases of a shared grant
	gained  time.Duration // how far the wall clock has outrun the monotonic one since proved, see watch

	// notified is when a message gave us the grant for protocol.ProvisionalTTL. It is zero if
	// no message did, or if a renewal or an acquire has been answered since, which gave the
	// grant its full TTL.
	notified Instant
}

// ticket is one request for the lock, and what is known about it in Redis.
type ticket struct {
	req  protocol.Request
	opts *Terms // of the caller that the request was made for

	// proved is when the last command that proved ownership was sent. Until the request is
	// granted, it is the time from which a message "granted" is trusted: when the first
	// acquire was sent, or the last one that was answered "queued", in full or briefly, but
	// never when the message arrived.
	proved time.Time

	// token is the grant's token, as Redis gave it. Until the request is granted, it is the
	// floor of the last full answer "queued", see protocol.Answer.Floor. A message is believed
	// only if its token is greater; otherwise it is about an earlier grant of the same id.
	token uint64

	sent        bool    // Redis may have seen the request
	mayNotQueue bool    // the request was made before the inbox was confirmed, so it may only take a free lock; see makeRequest
	lateUntil   Instant // until then, an unanswered acquire of the request may still arrive
	doubtUntil  Instant // the same for an acquire that was sent while the grant was held

	schedule // of a grant that is held, only recheckAt is valid
}

// schedule says when a ticket that is not granted yet is asked about again.
type schedule struct {
	recheckAt  Instant       // when to ask again; of a held grant, whether others wait, see Lock.asksForReaders
	endsAt     Instant       // when the owner's lease ends, according to a message; zero if none came
	told       uint64        // readers whose leases end by this time have been sent *wanted* for it; 0 if all have
	poll       time.Duration // pause between re-checks where no notification comes
	pollsSince Instant       // when an answer first said that it has to poll; 0 if messages come
	place      int           // how many requests were ahead when it was last asked about in full
	fullAt     Instant       // the next full re-check comes before then; those before it may be brief
	lease      uint64        // when its waiting lease ends, in ms of the server's clock, unless it was granted since
	// hastened says that the ticket is asked about before its pause is over, like all others
	// that share its inbox.
	hastened bool
}

// recheckInFull schedules the next re-check for at, and makes it a full one.
func (s *schedule) recheckInFull(at Instant) { s.recheckAt, s.fullAt = at, 0 }

// successor is the request that replaces a grant's own.
type successor struct {
	ticket
	role   role
	wanted bool            // byYield, byDowngrade: a message said that others wait behind it, and the answer may be older
	done   []chan struct{} // byDowngrade: to be closed when the downgrade is settled
}

// role says how a successor replaces its predecessor.
type role uint8

const (
	noNext      role = iota
	byYield          // the grant is being released; Redis queues the successor
	byDowngrade      // a writer's grant becomes a reader's
	byPlace          // the successor has a place in the queue behind our own readers, or asks for one
)

// role returns the role of the grant's successor.
func (g *grant) role() role {
	if g.next == nil {
		return noNext
	}
	return g.next.role
}

// requested reports whether the grant is asked for, or is about to be, but not given yet.
func (g *grant) requested() bool { return g.state == Asking || g.state == queued }

// pending is the one command of a lock that awaits its answer.
type pending struct {
	verb     protocol.Verb // None if there is none
	question bool          // the owner asks whether others wait
	stale    bool          // its answer may predate a message that came, or may have been missed, since it was sent

	// revoked is the greatest token of a message, since the command was sent, that the request's grant
	// was taken away; 0 if none came. An answer that grants this token or a smaller one is not believed.
	revoked uint64
}

// lostGrant is a grant that could not be proved in time, or that Redis gave to another request of the
// process. It is canceled once no caller works under it anymore.
type lostGrant struct {
	req  protocol.Request
	keep time.Time // the end of its minimum hold
	next *lostGrant
}

// grantState says what the process knows about its request, and what may be in flight. Only
// the become functions write it.
type grantState uint8

const (
	// none: there is no request, and Redis knows of none that has not been canceled or
	// released. Nothing is in flight, except for a command about a grant that was lost.
	none grantState = iota

	// Asking: the ticket is asked for with an acquire, which is in flight or will be sent at
	// recheckAt. Whether Redis may have seen it is in sent. A held grant that cannot be believed
	// anymore and has no caller inside is in this state too: it is asked about under its own
	// id before the next caller enters.
	Asking

	// queued: Redis answered that the request waits in the queue. It becomes held by a message
	// "granted" or by the acquire of a re-check.
	queued

	// Held: Redis gave us the lock, and callers enter while the grant is trusted. Members are
	// the callers inside. Without any, the grant idles until idleTill. It may have a successor,
	// by a downgrade or by a place behind our own readers. The downgrade, or the acquire for
	// that place, is then in flight or will be sent at the successor's recheckAt.
	Held

	// Releasing: a release or a yield is in flight, and no caller is inside under the grant.
	// The callers in leaving wait for the answer. The successor, if any, is that of the yield.
	Releasing
)

// becomeAsking makes t the request to be asked for next, by an acquire.
func (l *Lock) becomeAsking(t ticket) { l.grant = grant{state: Asking, ticket: t} }

// becomeNext puts the successor in the grant's place. Redis was told of the successor.
func (l *Lock) becomeNext() {
	t, wanted := l.grant.next.ticket, l.grant.next.wanted
	t.sent = true
	l.becomeAsking(t)
	l.grant.wanted = wanted
}

// idlesAfter returns until when the grant is kept for callers to come if c, which leaves now, is the last
// one; 0 if it is given back at once.
func (g *grant) idlesAfter(c *Caller, now Instant) Instant {
	if g.opts.IdleHold == 0 || c.Opts.IdleHold == 0 { // the grant's id says whether it may idle
		return 0
	}
	return now.add(c.Opts.IdleHold)
}

// becomeQueued notes the answer that the request waits. Its command was sent at sentAt.
func (l *Lock) becomeQueued(a protocol.Answer, sentAt time.Time) {
	g := &l.grant
	g.state, g.proved, g.token = queued, sentAt, a.Floor()
}

// becomeHeld notes that answer grants the lock to the ticket. The command that proves it was sent at
// sentAt.
func (l *Lock) becomeHeld(answer protocol.Answer, sentAt time.Time, how Via, now time.Time) {
	g := &l.grant
	g.askDue = l.env.InboxPending() || g.mayNotQueue // a message "wanted" may have been missed
	g.mayNotQueue, l.refusedOnce = false, false
	if g.place > 0 {
		l.blocker = "" // others were between that owner and this grant
	}
	g.state, g.fresh, l.lackedReplicas = Held, true, false
	g.schedule = schedule{}
	at := l.instant(now)
	g.via, g.since, g.served = how, at, 0
	g.token, g.clock, g.clockAt = answer.Token, answer.Clock, at
	if answer.Kept {
		// Others may have had the lock since that token was given, because Redis can have
		// gone back to a state in which we owned it. So the token counts as given out.
		l.last = max(l.last, answer.Token)
	}
	if g.req.Mode == protocol.Shared {
		if answer.Kept {
			l.last = max(l.last, answer.Clock-1)
		}
		l.last = max(answer.Token, l.last+1)
		g.readers = l.last
	}
	g.prove(sentAt)
	if how == ViaDirect && g.req.Provisional {
		g.notified = at
	}
	l.prevHoldSpan = answer.Link
	g.touchAt = g.onGrid(at.add(protocol.TokenLife(g.req.TTL) / 4))
}

// becomeReleasing starts a release or a yield of a grant that has no members anymore.
func (l *Lock) becomeReleasing(verb protocol.Verb) {
	l.grant.state, l.pending = Releasing, pending{verb: verb}
	l.blocker = "" // who blocked this grant does not matter to those who wait for the next
}

// becomeNone ends the request. What Redis may still know of it was released, or its cancel is
// among the effects.
func (l *Lock) becomeNone() { l.grant = grant{} }

// Via says how a caller came to its lease.
type Via uint8

const (
	viaFree    Via = iota // the lock was free
	ViaLocal              // handed over by a caller of the same process, or shared with one
	ViaIdle               // the process had kept the lock
	ViaDirect             // by message: the releasing script made us owner
	viaRecheck            // a re-check found the lock ours or free
	Vias                  // number of values
)

func (v Via) String() string {
	return [...]string{"free", "local", "idle", "direct", "recheck"}[v]
}

const (
	// confirmTime is how much of a provisional grant must be left for a caller to enter: the
	// time for a renewal's answer. An unanswered renewal is sent again after the same time.
	confirmTime = protocol.ProvisionalTTL / 4
	// maxInboxWait is how long callers wait in the process for the inbox to be confirmed
	// before they queue. That happens once in a client's life.
	maxInboxWait = 2 * time.Second
	// idleOwnersTime is how long a Try caller waits for an owner that may be idle, beside what has to travel.
	idleOwnersTime = 50 * time.Millisecond
	// maxSilence is how long Redis may leave a command without an answer before Try callers that came
	// meanwhile give up.
	maxSilence = time.Second
	// maxAhead: a token further ahead of the server's clock than this means that the
	// clock was set back, and callers do not wait for the clock to catch up.
	maxAhead = time.Millisecond
)

// maxTenure is the tenure of an exclusive grant that is not known to be wanted.
const maxTenure = time.Second

// rateSlack bounds how much the rates of the server's clock and ours differ: by one part in
// rateSlack. Good clocks differ by one part in 20,000.
const rateSlack = 100

// margin is subtracted from a TTL. It allows for clocks that run at different rates, and for
// what happens between the server's reading of its clock and our reading of ours.
func margin(ttl time.Duration) time.Duration { return ttl/rateSlack + 2*time.Millisecond }

// window returns for how long a proof of ownership for ttl is believed.
func window(ttl time.Duration) time.Duration { return ttl - margin(ttl) }

// tooOld reports whether a proof of ownership for ttl can no longer be believed. Its command was sent at
// sentAt.
func tooOld(ttl time.Duration, sentAt, now time.Time) bool { return between(sentAt, now).tooLong(ttl) }

// late reports whether a message that t was granted comes too late for a caller to enter before
// Redis has been asked. A provisional grant must last until its renewal can be answered.
func (t *ticket) late(now time.Time) bool {
	if t.req.Provisional {
		return tooOld(protocol.ProvisionalTTL, t.proved, now.Add(confirmTime))
	}
	return tooOld(t.req.TTL, t.proved, now)
}

// provedAt notes how old a message about t is: it proves what was so at that time, if that is not zero. An
// answer that is newer may have overtaken it.
func (t *ticket) provedAt(at time.Time) {
	if !at.IsZero() && at.Before(t.proved) {
		t.proved = at
	}
}

// cooldown returns for how long from now Redis must keep a lock that is given back, so that it
// is kept until keep. It uses the monotonic clock, because setting the wall clock must not
// shorten a cool-down.
func cooldown(keep, now time.Time) time.Duration {
	if keep.IsZero() {
		return 0
	}
	return max(0, keep.Sub(now))
}

// ttl returns for how long Redis keeps the grant after its last proof.
func (g *grant) ttl() time.Duration {
	if g.notified != 0 {
		return protocol.ProvisionalTTL
	}
	return g.req.TTL
}

// over reports whether the last proof of ownership is too old to be believed.
func (g *grant) over(now time.Time) bool { return tooOld(g.ttl(), g.proved, now) }

// prove records a proof of ownership for the full TTL. Its command was sent at sentAt.
func (g *grant) prove(sentAt time.Time) {
	g.proved, g.notified = sentAt, 0
}

// Gain returns how much further the wall clock moved than the monotonic clock. The monotonic
// clock stands still while a machine sleeps, but the lease's TTL does not; the wall clock can
// be set back. So the longer of the two times is taken as the time that has passed.
func Gain(from, now time.Time) time.Duration { return between(from, now).gain }

// interval is the time between two readings of the clocks.
type interval struct {
	passed time.Duration // by the monotonic clock
	gain   time.Duration // how much more passed by the wall clock
}

func between(from, now time.Time) interval {
	passed := now.Sub(from)
	return interval{passed, time.Duration(now.UnixNano()-from.UnixNano()) - passed}
}

// Elapsed returns the time from one instant to another, by the monotonic clock or by the wall clock,
// whichever says more.
func Elapsed(from, now time.Time) time.Duration { return between(from, now).elapsed() }

func (i interval) elapsed() time.Duration { return i.passed + max(0, i.gain) }

// tooLong reports whether a proof of ownership for ttl is no longer believed after i.
func (i interval) tooLong(ttl time.Duration) bool { return i.elapsed() >= window(ttl) }

// drifted reports whether the clocks moved apart during i by more than a TTL's margin.
func (i interval) drifted(ttl time.Duration) bool { return i.gain.Abs() > margin(ttl) }

// trust returns the end of the trust window. It goes by what the wall clock had gained on the
// monotonic clock at the end of the last event.
func (g *grant) trust() time.Time { return g.proved.Add(window(g.ttl()) - g.gained) }

// trustEnds returns trust as an Instant.
func (l *Lock) trustEnds() Instant {
	g := &l.grant
	return l.instant(g.proved).add(window(g.ttl()) - g.gained)
}

// watch notes whether the machine has slept or its wall clock was set.
func (g *grant) watch(now time.Time) {
	if g.state == Held {
		g.gained = max(0, Gain(g.proved, now))
	}
}

// proof is the last proof of ownership in the form that trusts needs.
type proof struct {
	from           time.Time
	ttl            time.Duration
	at             Instant // on the monotonic clock
	wall           int64   // on the wall clock, ns
	window, margin time.Duration
}

// trusts reports whether the grant may be believed: it is neither over nor drifted. This is tested
// before every admission, including hand-offs inside the process, so what follows from the proof
// alone is computed once. at is now as an Instant.
func (l *Lock) trusts(at Instant, now time.Time) bool {
	p, from, ttl := &l.proof, l.grant.proved, l.grant.ttl()
	if p.from != from || p.ttl != ttl {
		*p = proof{from, ttl, l.instant(from), from.UnixNano(), window(ttl), margin(ttl)}
	}
	passed := at.sub(p.at)
	gain := time.Duration(now.UnixNano()-p.wall) - passed
	return passed+max(0, gain) < p.window && gain.Abs() <= p.margin
}

// drifted reports whether the wall clock and the monotonic clock have moved apart since
// ownership was proved: the machine slept, or its wall clock was set. Only another proof can
// tell which.
func (g *grant) drifted(now time.Time) bool {
	return between(g.proved, now).drifted(g.ttl())
}

// tenureOver reports whether other processes are to be served next, although callers of this
// process wait. A shared grant that is wanted admits the callers that waited when it came, and
// none after them until Redis says that nobody waits anymore. An exclusive grant is yielded once
// in a while even if it is not known to be wanted, because the message that says so can be lost.
func (l *Lock) tenureOver(now Instant) bool {
	g := &l.grant
	since := now.sub(g.since)
	slow := since >= max(maxTenure, g.opts.Tenure)
	switch {
	case g.served > 0 && g.req.Mode == protocol.Exclusive && l.aheadOfServers(now):
		return true
	case g.served == 0 || g.idle:
		return false
	case g.req.Mode == protocol.Shared:
		return !g.fresh && (g.wanted || slow && !l.env.HasInbox() && now >= g.recheckAt)
	}
	return slow || g.wanted && (int(g.served) >= g.opts.Handoffs || since >= g.opts.Tenure)
}

// aheadOfServers reports whether the grant's next token would be so far ahead of the server's
// clock that the server would not give a greater one if the lease ended there without a release.
// That is so if the clock was set back, or if on a quorum another server's clock is fast. Each
// lease then needs a token from Redis.
func (l *Lock) aheadOfServers(now Instant) bool {
	g := &l.grant
	near := uint64((g.req.TTL/(2*rateSlack) + maxAhead).Microseconds())
	return l.last >= g.token && l.last >= g.serverClock(now)+near
}

// touch returns for how long the lock's last token is to be kept, the zero value if that was said recently.
// How far the server's clock is behind the token, because it was set back, is for the answer to the renewal to
// say: the clock may have been set since it was last read.
func (g *grant) touch(last uint64, now Instant) protocol.Touch {
	if now < g.touchAt {
		return protocol.Touch{}
	}
	life := protocol.TokenLife(g.req.TTL)
	g.touchAt = g.onGrid(now.add(life / 4))
	return protocol.Touch{Life: life, Token: max(last, g.token)}
}

// serverClock estimates the server's clock in µs. The estimate is never ahead of the clock,
// because the reply arrived after the server had read it. Our clock may be the faster one, so not
// all of the time that has passed since is counted.
func (g *grant) serverClock(now Instant) uint64 {
	since := max(0, now.sub(g.clockAt))
	return g.clock + uint64((since - since/rateSlack).Microseconds())
}

// rebase takes the server's clock from the answer to a command, which was sent at sentAt. By now the
// server's clock shows at least that, and at most as much more as has passed since the command was sent.
// An estimate within that range is better than the answer, because the answer was delayed. An estimate
// outside it was wrong: the clocks differ by more than assumed, or one was set.
func (g *grant) rebase(clock uint64, sentAt, now Instant) {
	since := max(0, now.sub(sentAt))
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
// (Kulkarni et al., 2014) based on the server's time: they keep growing when the lock's key has
// expired, was flushed or went back in a failover. All leases of a shared grant have the same
// token. ahead is how far the token is ahead of the server's clock; the caller must wait that
// long.
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
		if d := time.Duration(token-clock) * time.Microsecond; d <= maxAhead {
			ahead = d + d/(rateSlack-1) + 1 // the time until the estimate reaches the token
		}
	}
	return token, ahead
}

// grids is the number of instants within a TTL at which renewals are due.
const grids = 30

// grid returns the time between two such instants.
func (g *grant) grid() time.Duration { return g.req.TTL / grids }

// onGrid moves a renewal at t back to the grid of instants that all locks with the same TTL share.
func (g *grant) onGrid(t Instant) Instant {
	grid := g.grid()
	if grid <= 0 {
		return t
	}
	return t.add(-(t.sub(start) % grid))
}

// earlierOf returns the earlier of two instants.
func earlierOf(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
