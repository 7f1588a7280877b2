package leased

import "time"

// grant is how this process stands with Redis about one lock:
//
//	none ──► asking ──► queued ──► held ──► lettingGo ──► none
//	            └─────────────────►┘            └──► queued, held (yield)
//
// A held grant is believed until the end of its trust window: from before the
// sending of the command that proved ownership, for its TTL less a margin of
// 1 % + 2 ms (Gray and Cheriton, "Leases", 1989).
type grant struct {
	state    grantState
	inFlight verb // the one command that awaits its answer
	req      request
	opts     *lockOptions // of the caller it was asked for
	ask      *inquiry     // while asking or queued
	hand     *handOver    // letting go by yield; held: a downgrade, or a place reserved

	// held:
	via      via
	proved   time.Time // sending of the last command that proved ownership
	since    time.Time // it has been in use without a break
	renewAt  time.Time
	touchAt  time.Time
	late     time.Time // until then an acquire of it that had no answer may still arrive
	doubt    time.Time // one that was under way while held had no answer, and may arrive until then
	idleTill time.Time
	wanted   bool   // somebody is queued behind the grant
	early    bool   // it came before messages were heard, so that may have been missed
	fresh    bool   // it came in this very step
	idle     bool   // nobody is inside, and it was not let go
	served   int    // leases it has given since it came or was idle
	token    uint64 // as Redis gave it
	readers  uint64 // of the leases of a shared grant
	clock    uint64 // what the server's clock showed, µs, at clockAt or before
	clockAt  time.Time
	gained   time.Duration // by the wall clock on the monotonic one since proved, when that was last looked at
}

// inquiry is what a grant needs until it is held.
type inquiry struct {
	known bool      // Redis may have heard of the request
	probe bool      // it must not queue, see lock.ask
	late  time.Time // until then a command without answer may still arrive

	// A message "granted" is trusted from basis, the sending of the first
	// acquire or of the last one answered "queued", never from its arrival; and
	// believed only if its token is above floor, the lock's last one in that
	// answer: else it tells of an earlier grant of the same id.
	basis   time.Time
	floor   uint64
	checkAt time.Time     // when to ask again
	told    uint64        // up to where readers were told that this waits, 0 if all were
	poll    time.Duration // pause between checks where nobody will tell us
	endsAt  time.Time     // when the owner ends by itself, as a message said; zero if none did
}

// handOver is a yield or a downgrade under way: one request ends and another
// comes in its place. For a writer behind readers of its own process it begins
// before the yield, with a place in the queue (reserve.go).
type handOver struct {
	next request
	opts *lockOptions
	ask  inquiry         // about next
	done []chan struct{} // of a downgrade
}

// inherit returns the grant that the hand-over asks for.
func (h *handOver) inherit(inFlight verb) grant {
	h.ask.known = true
	return grant{state: asking, inFlight: inFlight, req: h.next, opts: h.opts, ask: &h.ask}
}

// lostGrant is a grant that could not be proved in time. It is cancelled when
// nobody works under it any more.
type lostGrant struct {
	req  request
	next *lostGrant
}

type grantState uint8

const (
	none grantState = iota
	asking
	queued
	held
	lettingGo
)

// via says how a caller came to its lease.
type via uint8

const (
	viaFree   via = iota // the lock was free
	viaLocal             // from a caller of the same process, or beside one
	viaIdle              // the process had kept it
	viaDirect            // a message: the releasing script made us owner
	viaCheck             // a re-check found the lock ours or free
	vias
)

func (v via) String() string {
	return [...]string{"free", "local", "idle", "direct", "re-check"}[v]
}

const (
	firstPoll   = 50 * time.Millisecond
	longestPoll = 3 * time.Second
	// A crash does not start a herd: who waits further behind looks later.
	afterExpiry = time.Millisecond
	perPlace    = 5 * time.Millisecond
	// How long who would wait in Redis waits for the inbox first, once in a client's life.
	longestDeaf = 2 * time.Second
	// How long one who only tries waits for an owner that may be idle.
	idleOwnersTime = 50 * time.Millisecond
	// A token further than this ahead of the server's clock means that the
	// clock went back; nobody waits for it to catch up.
	longestAhead = time.Millisecond
)

// rateSlack: the server's clock and ours run at rates that differ by one part in
// so many at most. Good clocks differ by one in 20,000.
const rateSlack = 100

// margin is taken off a TTL for clocks that run at different rates and for
// what happens between Redis' reading of its clock and ours.
func margin(ttl time.Duration) time.Duration { return ttl/rateSlack + 2*time.Millisecond }

// window is for how long a proof of ownership is believed.
func (g *grant) window() time.Duration { return g.req.ttl - margin(g.req.ttl) }

// over reports whether what was proved at from is not to be believed any more.
func (g *grant) over(from, now time.Time) bool {
	return now.Sub(from)+max(0, gain(from, now)) >= g.window()
}

// gain is by how much the wall clock moved further than the monotonic one did.
// That one stands still while a machine sleeps, but the lease's TTL runs on; the
// other can be set back. So what has passed is the longer of the two.
func gain(from, now time.Time) time.Duration {
	return now.Round(0).Sub(from.Round(0)) - now.Sub(from)
}

// trust returns the end of the trust window, as far as the wall clock had gained on
// the monotonic one when that was last looked at: after each event, see settle.
func (g *grant) trust() time.Time { return g.proved.Add(g.window() - g.gained) }

// watch looks whether the machine has slept, or its clock was set.
func (g *grant) watch(now time.Time) {
	if g.state == held {
		g.gained = max(0, gain(g.proved, now))
	}
}

// ends returns when Redis ends the grant by itself, zero if that is not known.
func (g *grant) ends() time.Time {
	if g.proved.IsZero() {
		return time.Time{}
	}
	return g.proved.Add(g.req.ttl)
}

// trusted is asked before every admission, local ones included.
func (g *grant) trusted(now time.Time) bool { return !g.over(g.proved, now) && !g.drifted(now) }

// drifted reports that wall and monotonic time moved apart since ownership was
// proved: the machine slept, and the monotonic clock with it, or its clock was
// set. Only another proof tells.
func (g *grant) drifted(now time.Time) bool {
	return gain(g.proved, now).Abs() > margin(g.req.ttl)
}

// tenureOver reports that others are to have the lock although callers of this
// process wait. A shared grant that is wanted admits those who were waiting when
// it came, and nobody after them. An exclusive one goes round at a slow pace
// even if nobody was heard to want it: the message can have been lost.
func (l *lock) tenureOver(now time.Time) bool {
	g := &l.grant
	since := now.Sub(g.since)
	slow := since >= max(longestTenure, g.opts.tenure)
	switch {
	case g.served == 0 || g.idle:
		return false
	case g.req.mode == shared:
		return !g.fresh && (g.wanted || slow && !l.env.pushed())
	}
	return slow || g.wanted && (g.served >= g.opts.handoffs || since >= g.opts.tenure)
}

// touch returns how long the lock's last token should live on, 0 if it is not
// yet time to say so.
func (g *grant) touch(now time.Time) time.Duration {
	if now.Before(g.touchAt) {
		return 0
	}
	life := tokenLife(g.req.ttl)
	g.touchAt = now.Add(life / 4)
	return life
}

// serverClock estimates the server's clock in µs, never ahead of it: the reply was
// read after the server read its clock, and ours may be the faster one.
func (g *grant) serverClock(now time.Time) uint64 {
	since := max(0, now.Sub(g.clockAt))
	return g.clock + uint64((since - since/rateSlack).Microseconds())
}

// rebase takes in what the server's clock showed in answer to a command that was
// sent at sent. By now it shows that and as much more as may have passed since
// sent. An estimate between the two is better than the answer, for it is not late.
// One outside was wrong: the clocks differ by more than was thought, or one was set.
func (g *grant) rebase(clock uint64, sent, now time.Time) {
	since := max(0, now.Sub(sent))
	most := clock + uint64((since + since/rateSlack).Microseconds())
	if estimate := g.serverClock(now); estimate < clock || estimate > most {
		g.clock, g.clockAt = clock, now
	}
}

// nextToken is a hybrid logical clock (Kulkarni et al., 2014) on the server's
// time: it goes on growing when the lock's key expired, was flushed or went back
// in a failover. All leases of a shared grant have its one token. It also
// returns how far the token is ahead of the clock, for the caller to wait.
func (l *lock) nextToken(now time.Time) (token uint64, ahead time.Duration) {
	g := &l.grant
	if g.req.mode == shared {
		return g.readers, 0
	}
	token = g.token
	clock := g.serverClock(now)
	if l.last >= g.token { // it was given out
		token = clock
	}
	token = max(token, l.last+1)
	l.last = token
	if token > clock {
		if d := time.Duration(token-clock) * time.Microsecond; d <= longestAhead {
			ahead = d + d/(rateSlack-1) + 1 // as long as the estimate takes to get there
		}
	}
	return token, ahead
}

// onGrid moves a renewal to the instant before it that the renewals of all
// locks with the same TTL share.
func (l *lock) onGrid(t time.Time) time.Time {
	grid := l.grant.req.ttl / 30
	if grid <= 0 {
		return t
	}
	return t.Add(-(t.Sub(l.env.start()) % grid))
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
