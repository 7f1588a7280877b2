package quorum

// When the grants of single servers make a request the owner of the lock, and with which token.

import (
	"slices"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// counts reports whether a part counts toward a majority: it is owned, and its server is known not
// to be in quarantine, or the request has owned the lock without a break since before the server
// restarted, so that nobody else can have owned it.
func (r *request) counts(p *part, now time.Time) bool {
	return p.state == owned && (r.unbroken || !now.Before(p.countsFrom) && !p.quarantineUnknown)
}

// majority reports whether the parts whose proof of ownership is not older than oldest, and that cannot have
// ended since, are a majority. The end of a quarantine makes parts count that may have ended long before. If
// all servers are young, and all have granted, the set of servers is new, and they count.
func (l *Lock) majority(r *request, oldest, now time.Time) bool {
	n, young := 0, 0
	for i := range r.parts {
		p := &r.parts[i]
		if p.state != owned || p.proved.Before(oldest) || !p.lasts(r, now) {
			continue
		}
		if r.counts(p, now) {
			n++
		}
		if now.Before(p.countsFrom) {
			young++
		}
	}
	return n >= l.cfg.need() || young == l.cfg.N
}

// announced reports whether, by messages and answers together, the request may own a majority, as in
// majority, so that it is worth asking.
func (l *Lock) announced(r *request, now time.Time) bool {
	n, young := 0, 0
	for i := range r.parts {
		p := &r.parts[i]
		switch {
		case p.state != owned || p.asking || lockstate.Elapsed(p.proved, now) > r.who.TTL:
		case now.Before(p.countsFrom):
			young++
		default:
			n++
		}
	}
	return n >= l.cfg.need() || young == l.cfg.N
}

// slack returns by how many µs a token may be ahead of the servers' clocks without being written
// back; see tokenOf.
func slack(ttl time.Duration) uint64 {
	return uint64((ttl/200 + time.Millisecond).Microseconds())
}

// tokenOf returns the token of a grant, the servers' clock, and whether each server of a majority
// has stored the token or is certain to give the next owner a greater one.
//
// The token is the greatest that the servers gave. The next owner's majority has a server in
// common with ours. If that server receives our release, it receives our token with it. If not,
// it gives the lock to others only after our lease has ended there, and the token that it gives
// then is at least its own clock. So a token needs no second round trip if it is ahead of the clocks of
// a majority by much less than the TTL; one that is further ahead is written back first.
//
// If the server in common has lost its data meanwhile, it may have given its grant at once, which counts
// from the end of its quarantine on. So the token is then at least what the server's clock shows at that
// end, when our lease is over. fresh says that the grant is not one that r had all the time.
func (l *Lock) tokenOf(r *request, fresh bool, now time.Time) (token, clock uint64, kept bool) {
	clocks := make([]uint64, 0, l.cfg.N)
	for i := range r.parts {
		if p := &r.parts[i]; p.state == owned {
			token = max(token, p.token)
			if fresh && !now.Before(p.countsFrom) {
				token = max(token, p.voteClock)
			}
			clocks = append(clocks, p.clock)
		}
	}
	if len(clocks) < l.cfg.need() {
		return token, 0, false
	}
	near := slack(r.who.TTL)
	n := 0
	for i := range r.parts {
		if p := &r.parts[i]; p.state == owned && (p.known >= token || p.clock+near >= token) {
			n++
		}
	}
	slices.Sort(clocks)
	clock = clocks[len(clocks)-l.cfg.need()]
	if clock+near >= token {
		clock = max(clock, token)
	}
	return token, clock, n >= l.cfg.need()
}

// Greatest returns the greatest token that one server knows of, or that it can have given by now. The
// owners' token can be ahead of it by as much as is not written back; where they are evicted, evict.lua
// adds that.
func Greatest(sn *protocol.Snapshot) uint64 {
	return max(protocol.LastToken(sn.Meta), sn.Clock)
}

// writeBack has the servers on which we are the owner, and that do not know the token, store it.
func (l *Lock) writeBack(r *request, token uint64, fx *Effects) {
	for i := range r.parts {
		if p := &r.parts[i]; p.state == owned && p.known < token && !p.adopting && !p.adoptFailed {
			p.adopting = true
			l.send(&Send{Server: i, Kind: Adopt, Cmd: protocol.Command{ID: p.id}, Token: token, req: r}, fx)
		}
	}
}

// review announces a grant to the state machine if messages or late answers have made the request
// own a majority. If they have not, it plans when to give back its partial grants.
func (l *Lock) review(r *request, now time.Time, fx *Effects) {
	if r.dropped {
		return
	}
	if r.op != nil {
		l.evaluate(r.op, now, fx)
	}
	if r.token != 0 {
		l.askRefusing(r, now, fx)
		return
	}
	if r.basis.IsZero() || r.downgradeOf != nil {
		return
	}
	if l.majority(r, r.basis, now) && (r.op == nil || r.op.verb == protocol.Acquire) {
		token, clock, kept := l.tokenOf(r, true, now)
		if !kept {
			if l.writeBack(r, token, fx); !r.writing() { // it has failed; asking leads to another try
				l.askOnce(r, fx)
				l.plan(r, now)
			}
			return
		}
		r.token = token
		r.noteMajority()
		r.noteKept(nil, now)
		fx.Messages = append(fx.Messages, protocol.Message{Kind: protocol.MessageGranted, ID: r.id, Key: l.keys.Lock, Token: token, Clock: clock, More: r.anyMore(), Link: r.link, Proved: r.basis})
		return
	}
	// Some proofs may be older than the state machine accepts for a message, or from servers that may be in
	// quarantine.
	if !l.announced(r, now) || !l.askOnce(r, fx) {
		l.plan(r, now)
	}
}

// askOnce has the state machine ask, and reports whether it does. It does so once for each grant: while
// servers are away or refuse, their old proofs stay, and the answer to asking would be a reason to ask
// again.
func (l *Lock) askOnce(r *request, fx *Effects) bool {
	if r.op != nil || r.toldToAsk {
		return false
	}
	r.toldToAsk = true
	fx.Messages = append(fx.Messages, protocol.Message{Kind: protocol.MessageWanted, ID: r.id, Key: l.keys.Lock})
	return true
}

// askRefusing asks the servers that refused a request again once a majority has granted it. They
// will grant it soon: whoever owned there has no majority, and usually its release is still under
// way. Until they do, each further server that fails may leave the lease without a majority.
func (l *Lock) askRefusing(r *request, now time.Time, fx *Effects) {
	for i := range r.parts {
		if !r.parts[i].refused || l.cfg.Away(i) {
			continue
		}
		r.parts[i].refused = false
		l.ask(l.look(r, now), r, i, fx)
	}
}

func (r *request) anyMore() bool {
	return slices.ContainsFunc(r.parts, func(p part) bool { return p.state == owned && p.more })
}
