package quorum

import (
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// What is claimed of a part, by its fields and by methods, some of them of its request:
//
//	owned   its server granted it, is not known to have lost it, and was not told to end it
//	lasts   if owned, less than a TTL has passed since the last proof
//	stands  owned, or it was when its server lost its data, and the server is still in quarantine: since
//	        the first grant, nobody else can have counted that server, unless the part was grantedLate
//	counts  owned, and its server's grants count by now, or the request has owned the lock without a break
//	gained  granted only since a majority was last known to have kept the lease (request.keptAt)
//	broken  others may have owned there since then

// part is a request on one server.
type part struct {
	history

	id    string // "" until there is an id for this server
	state partState
	// proved is when the last command that proved ownership was sent. Before a grant it is when
	// the first acquire was sent, or the last one that was answered with "queued".
	proved time.Time
	floor  uint64 // queued: the lock's last token there
	token  uint64 // owned: the grant's token
	known  uint64 // owned: the greatest token of the lock that the server is known to have stored
	clock  uint64 // the server's clock in µs when it last said that we own the lock
	told   uint64 // time up to which readers were notified
	more   bool   // owned: others wait on this server

	asking  bool  // an acquire is under way or waits in the lane
	waiting []*Op // renewals, releases, yields and downgrades that wait for the answer to another op's acquire
	// unprompted: what is under way is an acquire of Rejoined, or a yield that gives a partial grant back,
	// so a command of the state machine is put off until its answer.
	unprompted  bool
	askNext     *Op  // asks the server once the acquire under way is answered; nil for none
	adopting    bool // an adopt is under way
	adoptFailed bool // an adopt failed; there is no other until the next acquire

	// mayArrive: a command without an answer may still arrive, or may have been executed after a
	// restart of the server that we have not learned of.
	mayArrive bool
	// quarantineUnknown: a message said that we own the lock, and the server has not said since whether
	// it is in quarantine.
	quarantineUnknown bool
	refused           bool // its server had another owner, and the request did not wait
	grantedLate       bool // the server granted the part again only after quarantineEnd
	// evicted is the greatest token of the lock that a message about the part's eviction had: what the
	// server granted with it, or with an earlier one, is gone.
	evicted uint64
	// doubted: an acquire of a part that its server had granted had no answer. So the server may have
	// granted it anew under the same id, after another owner, and only the lock's last token shows that.
	doubted bool

	blocker  string
	left     time.Time // when the owner's lease ends there; zero if unknown
	endless  bool
	place    int
	noNotify bool

	sent        bool // a command with the part's id has left the lane
	ended       bool // the server no longer has the part: it was released, canceled, refused or never sent
	confirmed   bool // the part was ours until it ended
	downgraded  bool // the part was ours until a downgrade passed it to the next request
	byDowngrade bool // a downgrade passed to this part what was ours until then
	passes      bool // a downgrade was sent that passes to this part only what has been ours until then
	restarted   bool // the server had lost its data when the part ended, and its grants did not count meanwhile
}

// history is what is known of a request on one server whatever id it has there: see identify.
type history struct {
	since      time.Time // when the part became owned; if its server lost its data, before that
	countsFrom time.Time // until then a grant of the server does not count for a majority
	voteClock  uint64    // the server's clock in µs at the end of its quarantine, as far as it is known; see tokenOf
	giveBacks  int       // how often the part's grant was given back
	lost       bool      // a renewal found the part lost, and the acquire that follows has no answer yet
	broken     bool      // others may have owned there since a majority was last known to have kept the lease; see brokeOff
	breaks     int       // how often that was found
	// quarantineEnd is set for a part that was owned when its server lost its data: the end of the server's
	// quarantine, before which no other client can count the server's vote.
	quarantineEnd time.Time
	// lostToken is the token of the grant that the server seems to have lost with its data, while the lease
	// was held; else 0. A message that the grant was evicted says otherwise. lostID is the id that the part
	// had then, if it has another one now.
	lostToken uint64
	lostID    string
}

type partState uint8

const (
	absent partState = iota // the server does not have the part, or nothing is known
	asked                   // sent, no answer yet
	queued
	owned
	ending // a release, yield, downgrade or cancel was sent; once it was answered, ended is set as well
)

// goesOn reports whether the part has not ended, and nothing under way ends it.
func (p *part) goesOn() bool { return !p.ended && p.state != ending }

// lastFor returns the last token that a release has to tell the server, 0 if the server knows it.
func (p *part) lastFor(r *request) uint64 {
	last := max(r.last, r.token)
	if last > p.known {
		return last
	}
	return 0
}

// lasts reports whether what the server granted cannot have ended there yet.
func (p *part) lasts(r *request, now time.Time) bool {
	return p.state != owned || lockstate.Elapsed(p.proved, now) < r.who.TTL
}

// inQuarantine reports whether the part was owned when its server lost its data, and the server is still in
// quarantine. quarantineOver reports whether that quarantine has ended since.
func (p *part) inQuarantine(now time.Time) bool {
	return !p.quarantineEnd.IsZero() && lockstate.Elapsed(p.quarantineEnd, now) < 0
}

func (p *part) quarantineOver(now time.Time) bool {
	return !p.quarantineEnd.IsZero() && !p.inQuarantine(now)
}

// stands reports whether no other client can have counted the server's vote since the part was
// first granted there, provided that it was not grantedLate.
func (p *part) stands(now time.Time) bool { return p.state == owned || p.inQuarantine(now) }

// brokeOff notes that others may have owned the lock on the part's server since a majority was last
// known to have kept the lease.
func (p *part) brokeOff() {
	p.broken, p.lostToken = true, 0
	p.breaks++
}

// missed reports whether the answer to an acquire of a part that is being given back says that the part
// was no longer owned. An answer that it was queued may be older than the message that granted it.
func (p *part) missed(a *protocol.Answer, fail *protocol.Failure) bool {
	switch {
	case fail != nil || p.known == 0:
		return false
	case a.Outcome == protocol.Granted:
		return !a.Kept
	}
	return a.Token >= p.known
}

// lostUnless is the outcome for a server that no longer has what it granted us. A young server lost
// its data, and whoever it has granted the lock to since cannot count that grant.
func lostUnless(young bool) outcome {
	if young {
		return outcomeRestarted
	}
	return outcomeLost
}

// inDoubt reports whether an acquire of an owned part has no answer. Then the part may have been
// granted anew after another owner, so an answer that we own it does not prove that we always did.
func (p *part) inDoubt() bool { return p.asking || p.mayArrive }

// unasked reports whether a late answer to a renewal has found the part lost, and nobody has asked why
// since. The answer to a release or yield says whether its server has only lost its data.
func (p *part) unasked() bool { return p.lost && p.ended && !p.asking }

// lostAndAsked reports whether a renewal has found the part lost, and the answer to the acquire that
// followed will say whether its server has only lost its data.
func (p *part) lostAndAsked() bool { return p.lost && p.asking && p.state != ending }
