package simulation

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/redistest"
)

// This file has what goes wrong on a quorum besides its network, and what must hold all the same.

type qTrouble int

const (
	qPartitions qTrouble = iota // clients that reach some servers only
	qRestarts                   // servers that lose their data
	qBounces                    // servers that restart without losing data, but lose what is under way
	qJumps                      // clocks of a minority that are set
	qRates                      // clocks that run at different rates
	qPauses                     // clients that stand still
	qDeaths                     // clients that die
	qSlow                       // servers that are slow
	qEvictions                  // ForceUnlock
	qForeign                    // others that write or delete keys, on a minority
	qMinHolds                   // minimum holds
	qChecks                     // renewals that callers ask for
	qLetters                    // inboxes that become unconfirmed and are confirmed again
	qLong                       // TTLs so long that what is left behind shows
	qTroubles
)

var qPercent = [qTroubles]int{70, 60, 20, 25, 40, 30, 30, 30, 20, 20, 30, 30, 30, 15}

func (w *qWorld) chooseTroubles() {
	for i := range w.has {
		w.has[i] = w.rng.IntN(100) < qPercent[i]
	}
	w.quarantine, w.ttls = 3*time.Second, []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}
	if w.has[qLong] {
		w.quarantine, w.ttls = 40*time.Second, []time.Duration{30 * time.Second}
	}
}

// ppm draws by how much a clock is fast.
func (w *qWorld) ppm() int64 {
	if !w.has[qRates] {
		return 0
	}
	return w.rng.Int64N(6001) - 3000
}

// strike makes some kind of trouble happen.
func (w *qWorld) strike(c *qClient) {
	s := w.servers[w.rng.IntN(len(w.servers))]
	trouble := qTrouble(w.rng.IntN(int(qTroubles)))
	if !w.has[trouble] {
		return
	}
	w.counts[qNames[trouble]]++
	switch trouble {
	case qRestarts:
		// Restarts are further apart than the quarantine and a lease. At least one server keeps its data.
		if w.restart.IsZero() || w.now.Sub(w.restart) > w.quarantine+2*time.Second+w.ttls[len(w.ttls)-1] {
			w.restart = w.now
			for _, i := range w.rng.Perm(len(w.servers))[:1+w.rng.IntN(len(w.servers)-1)] {
				w.servers[i].mini.FlushAll()
				w.servers[i].restarted = w.now
				w.restarts++
				w.logf("server %d restarts empty", i+1)
				w.observe(w.servers[i])
				w.owners.emptied[i] = w.owners.seq
			}
		}
	case qBounces:
		w.logf("server %d restarts", s.i+1)
		for _, p := range slices.Clone(w.wire) {
			if p.server != s.i || p.kind == "stray" {
				continue
			}
			if p.kind == "request" && w.rng.IntN(2) == 0 { // it is executed, but nobody hears of it
				w.silent(p)
				continue
			}
			w.wire = slices.DeleteFunc(w.wire, func(q *qPacket) bool { return q == p })
			if p.kind != "message" {
				w.silent(p)
			}
		}
		for _, c := range w.clients {
			c.hurt[s.i] = w.now
			if !c.dead && c.wakeAt.IsZero() {
				c.rejoins(s.i)
			}
		}
	case qJumps:
		if !w.fault(s) {
			return
		}
		w.owners.evicts() // leases end early there
		by := time.Duration(w.rng.Int64N(int64(2500 * time.Millisecond)))
		if w.rng.IntN(2) == 0 {
			by = -by
			w.loose = true // as documented
		}
		s.offset += by
		s.setTime()
		w.logf("the clock of server %d is set by %v", s.i+1, by)
	case qPauses:
		c.wakeAt = w.now.Add(time.Duration(w.rng.Int64N(int64(3 * time.Second))))
		w.logf("%s stands still until %v", c.name, c.wakeAt.Sub(simEpoch))
	case qDeaths:
		alive := 0
		for _, c := range w.clients {
			if !c.dead {
				alive++
			}
		}
		if alive > 1 && w.rng.IntN(2) == 0 {
			c.dead = true
			w.owners.dies(c)
			w.ops = slices.DeleteFunc(w.ops, func(o *qOp) bool { return o.c == c })
			w.logf("%s dies", c.name)
		}
	case qSlow:
		s.slowTill = w.now.Add(time.Duration(w.rng.Int64N(int64(3 * time.Second))))
		w.logf("server %d is slow until %v", s.i+1, s.slowTill.Sub(simEpoch))
	case qEvictions:
		w.evict()
	case qForeign:
		if !w.fault(s) {
			return
		}
		switch w.rng.IntN(3) {
		case 0:
			s.sim.do("DEL", w.keys.Lock)
		case 1:
			s.sim.do("SET", w.keys.Lock, "foreign", "PX", "300")
		case 2:
			s.sim.do("DEL", w.keys.Lock, w.keys.Queue(), w.keys.Readers(), w.keys.Waiters())
		}
		w.logf("others write to server %d", s.i+1)
		w.observe(s)
	case qChecks:
		c.checks()
	case qLetters:
		if c.proofs[s.i] = protocol.Counted + protocol.Unproved - c.proofs[s.i]; c.proofs[s.i] == protocol.Counted {
			c.rejoins(s.i)
		}
	}
}

// checks makes one of the client's callers that are inside ask whether its lease is still held.
func (c *qClient) checks() {
	for _, x := range c.calls {
		if x.Phase == lockstate.Inside {
			done := make(chan struct{})
			c.w.checks = append(c.w.checks, done)
			c.w.logf("%s checks", c.name)
			c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Check(&lockstate.Check{}, x, done, now, fx) })
			break
		}
	}
}

// doubtPercent is the percentage of schedules that make leases doubtful: commands about a held lock get no
// answer, others get the lock without a word to its owner, and releases are not answered either. In the other
// schedules these events are rare, and hardly ever come together. In these schedules, some of the acts are
// such events.
const doubtPercent = 25

func (w *qWorld) doubt(c *qClient) {
	switch w.luck.IntN(7) {
	case 0: // the client asks about a held lock once more
		if c.joins {
			c.subscribed()
		} else if w.luck.IntN(2) == 0 {
			c.joins = true
		}
	case 1, 2, 3: // what is under way for the client gets no answer, or arrives late
		w.counts["silence"]++
		w.logf("nobody answers %s", c.name)
		for _, p := range slices.Clone(w.wire) {
			if p.c != c || p.kind != "request" && p.kind != "reply" || w.luck.IntN(4) == 0 {
				continue
			}
			if p.kind == "reply" || w.luck.IntN(2) == 0 {
				w.wire = slices.DeleteFunc(w.wire, func(q *qPacket) bool { return q == p })
			}
			w.silent(p)
		}
	case 4:
		if w.luck.IntN(2) == 0 { // an eviction crosses with commands about the lease
			w.counts["eviction while asked"]++
			for _, c := range w.clients {
				if !c.dead && c.wakeAt.IsZero() {
					c.subscribed()
					c.checks()
				}
			}
			w.evict()
			break
		}
		// Nobody hears of the eviction.
		w.counts["unheard eviction"]++
		w.evict()
		w.wire = slices.DeleteFunc(w.wire, func(p *qPacket) bool { return p.kind == "message" && p.m.Kind == "revoked" })
	case 5:
		if w.inside(c, lockstate.Waiting) == 0 {
			c.enter(protocol.Exclusive, false)
		}
	case 6:
		for _, x := range c.calls {
			if x.Phase == lockstate.Inside {
				c.leave(x)
				break
			}
		}
	}
}

// subscribed confirms the client's inboxes if they have not been confirmed yet.
func (c *qClient) subscribed() {
	if c.joins {
		c.joins = false
		c.step(c.lock.Subscribed)
	}
}

var qNames = [qTroubles]string{"partition", "restart", "bounce", "jump", "rate", "pause", "death", "slow", "eviction", "foreign", "min hold", "check", "letter", "long"}

// fault reports whether s may fail in a way that takes a vote from leases, and if so, notes the fault.
// Within the time of a lease and a quarantine, at most a minority of the servers may fail so. A client
// without a majority among the others is excused: it may lose its lease, and another client may enter.
func (w *qWorld) fault(s *qServer) bool {
	recent := map[int]bool{s.i: true}
	for _, other := range w.servers {
		if !other.faultAt.IsZero() && w.now.Sub(other.faultAt) < w.quarantine+w.ttls[len(w.ttls)-1] {
			recent[other.i] = true
		}
	}
	if need := quorum.Majority(len(w.servers)); len(recent) > len(w.servers)-need {
		return false
	}
	s.faultAt = w.now
	for _, c := range w.clients {
		n := 0
		for _, other := range w.servers {
			if !recent[other.i] && other.keeps(c) {
				n++
			}
		}
		if n < quorum.Majority(len(w.servers)) {
			w.logf("%s is excused", c.name)
			w.owners.evicts()
			c.excuse = w.now
		}
		if w.now.After(c.hurt[s.i]) {
			c.hurt[s.i] = w.now
		}
	}
	return true
}

// keeps reports whether the client owns the lock on the server for at least as long as the client
// believes.
func (s *qServer) keeps(c *qClient) bool {
	w := s.w
	need := w.ttls[len(w.ttls)-1] // for a grant of which the client does not know yet
	for _, x := range c.calls {
		if x.Phase == lockstate.Inside {
			need = c.lock.TrustedUntil(x, c.local()).Sub(c.local())
		}
	}
	owner, _ := s.sim.do("GET", w.keys.Lock).(string)
	if left, _ := s.sim.do("PTTL", w.keys.Lock).(int); time.Duration(left)*time.Millisecond < need {
		return false
	}
	if owner != protocol.MarkerValue {
		return strings.HasSuffix(owner, ":"+c.id)
	}
	ids, _ := s.sim.do("ZRANGE", w.keys.Readers(), "0", "-1").([]any)
	for _, id := range ids {
		if id, _ := id.(string); strings.HasSuffix(id, ":"+c.id) {
			return true
		}
	}
	return false
}

// evict is a ForceUnlock by an operator that reaches at least a majority.
func (w *qWorld) evict() {
	need := quorum.Majority(len(w.servers))
	some := w.rng.Perm(len(w.servers))[:need+w.rng.IntN(len(w.servers)-need+1)]
	w.logf("an operator evicts on %v", some)
	w.owners.evicts()
	for _, c := range w.clients {
		c.excuse = w.now
		w.evictions = append(w.evictions, w.evictionOf(c, some))
	}
	least := uint64(0)
	for _, i := range some {
		sn, err := w.servers[i].srv.Inspect(context.Background(), &w.keys)
		if err != nil {
			w.fail("inspect: %v", err)
		}
		least = max(least, quorum.Greatest(&sn))
	}
	for _, i := range some {
		if _, err := w.servers[i].srv.EvictOwner(context.Background(), &w.keys, least, ""); err != nil {
			w.fail("evict: %v", err)
		}
		w.observe(w.servers[i])
	}
}

// qEviction is what a client that holds the lock has heard about a ForceUnlock.
type qEviction struct {
	c       *qClient
	request string
	since   time.Time
	servers []int // servers that evict it, without those it has already heard from
	heard   int
}

// evictionOf returns what an eviction on some servers will do to a client.
func (w *qWorld) evictionOf(c *qClient, some []int) *qEviction {
	v := c.lock.Status()
	e := &qEviction{c: c, request: c.holds, since: v.Since}
	for _, i := range some {
		ids := slices.DeleteFunc(w.servers[i].owners(), func(id string) bool { return w.owners.request[id] != e.request })
		if len(ids) == 1 { // of several, the client has given up all but one, and need not hear of that one
			e.servers = append(e.servers, i)
		}
	}
	return e
}

// hears notes that a client has heard of an eviction.
func (w *qWorld) hears(p *qPacket) {
	for _, e := range w.evictions {
		if e.c == p.c && w.owners.request[p.m.ID] == e.request && e.forget(p.server) {
			e.heard++
		}
	}
}

// finds notes that a renewal was the first to say that a server no longer has a lease. The client then asks
// that server whether it has lost its data, and waits for the answer, whatever it hears in the meantime.
func (w *qWorld) finds(p *qPacket) {
	if p.send.Kind != quorum.Renew || p.res.Renewed != protocol.NotOurs {
		return
	}
	for _, e := range w.evictions {
		if id, _ := p.send.Requests(); e.c == p.c && id == e.request {
			e.forget(p.server)
		}
	}
}

func (e *qEviction) forget(server int) bool {
	i := slices.Index(e.servers, server)
	if i >= 0 {
		e.servers = slices.Delete(e.servers, i, i+1)
	}
	return i >= 0
}

// obeys fails if a client holds the lock although it has heard that it was evicted on so many servers that
// the others are no majority. A downgrade continues with what is left of the lease.
func (w *qWorld) obeys(c *qClient) {
	v := c.lock.Status()
	w.evictions = slices.DeleteFunc(w.evictions, func(e *qEviction) bool {
		return e.c == c && (c.holds == "" || c.holds != e.request || !v.Since.Equal(e.since) || v.Downgrading)
	})
	for _, e := range w.evictions {
		if e.c == c && len(w.servers)-e.heard < quorum.Majority(len(w.servers)) {
			w.fail("%s has heard of its eviction on %d servers, and holds the lock under %s", c.name, e.heard, short(e.request))
		}
	}
}

// judgeLoss fails if a lease was ended although, as far as its owner can know, no other client
// can have owned the lock.
//
// If nothing went wrong between a client and the servers since its request was made, and no
// server lost its data, its lease cannot be lost. If servers did lose their data, they still do
// not say that others have owned the lock, as long as the client hears all their answers,
// because nobody counts their grants before the quarantine is over. (They may deny the client
// a majority until its TTL ends.)
func (w *qWorld) judgeLoss(c *qClient, l lockstate.Loss) {
	id := w.under[l.Caller]
	made, known := c.made[id]
	over := !c.local().Before(c.lock.TrustedUntil(l.Caller, c.local())) // the lease was not confirmed in time
	if !known || c.excused(id) || l.Why == lockstate.Evicted {
		return
	}
	clean, restarts, deaf := true, false, false
	for _, s := range w.servers {
		if !s.faultAt.Before(made) {
			return // the fault took a vote
		}
		clean = clean && c.hurt[s.i].Before(made)
		if !s.restarted.Before(made) {
			restarts = true
			deaf = deaf || !c.hurt[s.i].Before(s.restarted)
		}
	}
	switch {
	case clean && !restarts:
		w.fail("%s lost token %d for nothing: %v", c.name, l.Caller.Token, l.Why)
	case strings.HasPrefix(l.Why.String(), "Redis says that it is not ours") && !deaf && !over:
		w.fail("%s lost token %d to servers in quarantine: %v", c.name, l.Caller.Token, l.Why)
	}
}

// qPromise is a minimum hold whose lock was given back early. Nobody may enter before it is over,
// unless a majority of the servers could not be told of it before the lease ended there.
type qPromise struct {
	c         *qClient
	x         *lockstate.Caller
	id        string
	at, until time.Time
}

func (w *qWorld) keepPromises(c *qClient, x *lockstate.Caller) {
	for _, p := range w.promises {
		slack := p.x.Opts.MinHold/50 + 2*time.Millisecond // clocks run at different rates
		silent := 0
		for _, at := range p.c.hurt {
			if !at.Before(p.at) {
				silent++
			}
		}
		if len(w.servers)-silent < quorum.Majority(len(w.servers)) {
			continue
		}
		if p.x.Settled && p.x.Ended != lockstate.ByLoss && p.x.Outcome() == nil && !p.c.dead && p.c.excuse.IsZero() && w.now.Before(p.until.Add(-slack)) {
			w.fail("%s enters at %v, and %s was to keep others out until %v", c.name, w.now.Sub(simEpoch), p.c.name, p.until.Sub(simEpoch))
		}
	}
}

// nothingOwned fails if a server still has an owner, or an entry in the queue, although everybody
// has left and no client died: only after a crash may the TTL be needed.
func (w *qWorld) nothingOwned() {
	for _, c := range w.clients {
		if c.dead {
			return
		}
	}
	for _, s := range w.servers {
		for _, key := range []string{w.keys.Lock, w.keys.Queue(), w.keys.Readers()} {
			if s.sim.do("EXISTS", key) == 1 {
				w.fail("server %d keeps %s: %v %v", s.i+1, key, s.sim.do("GET", w.keys.Lock), s.sim.do("ZRANGE", w.keys.Queue(), "0", "-1"))
			}
		}
	}
}

// idle reports whether no client has anything left to do.
func (w *qWorld) idle() bool {
	for _, c := range w.clients {
		if c.dead {
			continue
		}
		if !c.q.Idle() || len(c.cancel.Pending) > 0 {
			return false
		}
		for i := range c.strays {
			if len(c.strays[i].Pending) > 0 {
				return false
			}
		}
	}
	return len(w.ops) == 0
}

// nothingLeft fails if anything is left in the clients or, after the last TTL, in Redis.
func (w *qWorld) nothingLeft() {
	for _, c := range w.clients {
		if c.dead {
			continue
		}
		if !c.q.Idle() {
			w.fail("%s keeps requests: %s", c.name, c.q)
		}
		for i := range c.strays {
			if n := len(c.strays[i].Pending); n > 0 {
				w.fail("%s keeps %d strays of server %d", c.name, n, i+1)
			}
		}
	}
	for _, done := range w.checks {
		select {
		case <-done:
		default:
			if !slices.ContainsFunc(w.clients, func(c *qClient) bool { return c.dead }) {
				w.fail("a check was never answered")
			}
		}
	}
	if w.failure != "" {
		return
	}
	w.now = w.now.Add(3*w.ttls[len(w.ttls)-1] + 10*time.Second)
	w.setTime()
	for _, s := range w.servers {
		for _, key := range s.mini.Keys() {
			if key != w.keys.Meta() && key != "leased:quorum:mark" {
				w.fail("server %d keeps %s", s.i+1, key)
			}
		}
	}
}

// A server whose clock is fast issues tokens far ahead of the other servers' clocks. If the owner,
// which has handed its lock on inside its process, then dies, and only the other servers are left,
// these must not issue the same tokens again.
func TestTokensGrowOnAQuorumWithAFastClockWhenTheOwnerDies(t *testing.T) {
	redistest.Needs64Bits(t)
	w := newQWorld(t, 3)
	defer w.close()
	w.begin(1)
	w.trace, w.lazy, w.quarantine, w.ttls = true, 0, time.Second, []time.Duration{time.Second}
	w.has = [qTroubles]bool{}
	w.calm = true // nothing is lost
	for i, s := range w.servers {
		s.offset, s.rate = 0, 0
		if i == 0 {
			s.offset = 5 * time.Second
		}
	}
	w.setTime()
	deliver := func() {
		for len(w.wire) > 0 {
			p := w.wire[0]
			w.wire = w.wire[1:]
			w.deliver(p)
		}
	}
	a, b := w.clients[0], w.clients[1]
	a.rate, b.rate = 0, 0
	a.reach[2], b.reach[0] = false, false
	for range 4 {
		a.enter(protocol.Exclusive, false)
	}
	deliver()
	for range 3 {
		for _, x := range a.calls {
			if x.Phase == lockstate.Inside {
				a.leave(x)
				break
			}
		}
		deliver()
		for end := w.now.Add(100 * time.Millisecond); w.now.Before(end); deliver() {
			w.advance(10 * time.Millisecond)
		}
	}
	if n := len(w.entered); n < 4 {
		t.Fatalf("%d callers have entered", n)
	}
	a.dead = true
	b.enter(protocol.Exclusive, false)
	for end := w.now.Add(5 * time.Second); w.now.Before(end); deliver() {
		w.advance(10 * time.Millisecond)
	}
	if w.inside(b, lockstate.Inside) != 1 {
		w.fail("B does not enter")
	}
	if w.failure != "" {
		t.Errorf("%s\n%s", w.failure, strings.Join(w.log, "\n"))
	}
}
