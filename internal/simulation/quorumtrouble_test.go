package simulation

import (
	"context"
	"fmt"
	"slices"
	"strconv"
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
	qErrors                     // servers that refuse all commands, or those that need memory
	qRolling                    // restarts without data that follow each other within one quarantine
	qMarks                      // marks that are deleted while the locks are kept
	qForce                      // ForceUnlock in the steps of Server.Evict, between which other things happen
	qTroubles
)

var qPercent = [qTroubles]int{70, 60, 20, 25, 40, 30, 30, 30, 20, 20, 30, 30, 30, 15, 30, 30, 15, 25}

func (w *qWorld) chooseTroubles() {
	for i := range w.has {
		w.has[i] = w.rng.IntN(100) < qPercent[i]
	}
	w.quarantine, w.ttls = 3*time.Second, []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}
	switch {
	case w.has[qLong]:
		w.quarantine, w.ttls = 40*time.Second, []time.Duration{30 * time.Second}
	case w.rng.IntN(4) == 0: // the shortest that is allowed
		w.quarantine = w.ttls[len(w.ttls)-1]
	}
}

// ppm draws by how much a clock is fast.
func (w *qWorld) ppm() int64 {
	if !w.has[qRates] {
		return 0
	}
	return w.rng.Int64N(2*farApartRate+1) - farApartRate
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
	case qErrors:
		s.refusesTill = w.now.Add(time.Duration(w.rng.Int64N(int64(4 * time.Second))))
		s.refusal = qRefusals[w.rng.IntN(len(qRefusals))]
		w.logf("server %d refuses until %v: %s", s.i+1, s.refusesTill.Sub(simEpoch), s.refusal)
	case qRolling:
		w.roll(s)
	case qMarks:
		// The server may not vote for a quarantine, as after a restart, but has its locks.
		if w.mayRoll(s) {
			s.markAt, w.restart = w.now, w.now
			s.sim.do("DEL", markKey)
			w.logf("the mark of server %d is deleted", s.i+1)
			s.hurtsAll()
		}
	case qForce:
		w.force()
	case qRestarts:
		if w.has[qRolling] {
			w.roll(s)
			return
		}
		// Restarts are further apart than the quarantine and a lease, also from the loss of a mark. At
		// least one server keeps its data.
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
			if p.server != s.i || p.kind == strayPacket {
				continue
			}
			if p.kind == requestPacket && w.rng.IntN(2) == 0 { // it is executed, but nobody hears of it
				w.silent(p)
				continue
			}
			w.wire = slices.DeleteFunc(w.wire, func(q *qPacket) bool { return q == p })
			if p.kind != messagePacket {
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
		}
		s.offset += by
		s.setTime()
		if uint64(s.clock().UnixMicro()) <= max(w.top, w.readers) { // set back by more than the time that has passed, as documented
			w.loose = true
		}
		w.logf("the clock of server %d is set by %v", s.i+1, by)
	case qPauses:
		w.standStill(c, time.Duration(w.rng.Int64N(int64(3*time.Second))))
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

// mayRoll reports whether s may lose its data or its mark now: at least one other server must have kept
// both.
func (w *qWorld) mayRoll(s *qServer) bool {
	return slices.ContainsFunc(w.servers, func(other *qServer) bool { return other != s && other.hasKept() })
}

// hasKept reports whether the server has kept its data and its mark for a quarantine and a lease.
func (s *qServer) hasKept() bool {
	w, lost := s.w, s.restarted
	if s.markAt.After(lost) {
		lost = s.markAt
	}
	return lost.IsZero() || w.now.Sub(lost) > w.quarantine+2*time.Second+w.ttls[len(w.ttls)-1]
}

// roll restarts s without its data, if it may. Another lock's command follows at once, which sets the mark:
// a server that nobody asks after its restart is an exception that docs/redlock.md makes.
func (w *qWorld) roll(s *qServer) {
	if !w.mayRoll(s) {
		return
	}
	w.restart = w.now
	s.mini.FlushAll()
	s.restarted = w.now
	w.restarts++
	w.logf("server %d restarts empty", s.i+1)
	w.observe(s)
	w.owners.emptied[s.i] = w.owners.seq
	s.marks()
}

// marks sets the server's mark if it has none, as a command about another lock would.
func (s *qServer) marks() {
	s.sim.do("SET", markKey, strconv.FormatInt(s.clock().UnixMicro(), 10), "NX")
}

// checks makes one of the client's callers that are inside ask whether its lease is still held.
func (c *qClient) checks() {
	for _, x := range c.calls {
		if x.Phase == lockstate.Inside {
			u := &qCheck{c: c, k: &lockstate.Check{}, done: make(chan struct{}), owned: make([]bool, len(c.w.servers))}
			c.w.checks = append(c.w.checks, u)
			c.w.logf("%s checks", c.name)
			for _, s := range c.w.servers {
				u.look(s)
			}
			c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Check(u.k, x, u.done, now, fx) })
			break
		}
	}
}

// qCheck is a call of Lease.Check.
type qCheck struct {
	c        *qClient
	k        *lockstate.Check
	done     chan struct{}
	requests []string // of the client's grant since the call
	owned    []bool   // by server, whether one of them owned the lock there at some time since the call
	judged   bool
}

// look notes whether the client's grant owns the lock on the server.
func (u *qCheck) look(s *qServer) {
	now := u.c.lock.Status()
	for _, id := range []string{now.Req.ID, now.Next} { // a downgrade gives it another one
		if id != "" && !slices.Contains(u.requests, id) {
			u.requests = append(u.requests, id)
		}
	}
	if u.owned[s.i] {
		return
	}
	for _, id := range s.owners() {
		u.owned[s.i] = u.owned[s.i] || slices.Contains(u.requests, u.c.w.owners.request[id])
	}
}

// judgeChecks fails if a check says that the lock is ours although that was not so, at any time since the
// call, on a majority of the servers.
func (w *qWorld) judgeChecks() {
	for _, u := range w.checks {
		if u.judged {
			continue
		}
		select {
		case <-u.done:
		default:
			continue
		}
		u.judged = true
		if u.k.Over || u.k.Err != nil {
			continue
		}
		n := 0
		for i, s := range w.servers {
			u.look(s)
			if u.owned[i] {
				n++
			}
		}
		w.counts["a check says that it is ours"]++
		if n < quorum.Majority(len(w.servers)) {
			w.fail("a check of %s says that the lock is its own, which it was on %d servers", u.c.name, n)
		}
	}
}

func (w *qWorld) standStill(c *qClient, d time.Duration) {
	c.wakeAt = w.now.Add(d)
	w.logf("%s stands still until %v", c.name, c.wakeAt.Sub(simEpoch))
}

// idlePercent is the percentage of schedules in which clients keep the lock idle for longer than its TTL,
// and stand still meanwhile, so that a caller comes when the TTL is over.
const idlePercent = 15

// disorderPercent is the percentage of schedules in which a client's state machine learns of grants and
// evictions by goroutines that later ones can overtake.
const disorderPercent = 20

// doubtPercent is the percentage of schedules that make leases doubtful: commands about a held lock get no
// answer, others get the lock without a word to its owner, and releases are not answered either. In the
// other schedules these events are rare, and hardly ever come together. In these schedules, some of the
// acts are such events.
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
			if p.c != c || p.kind != requestPacket && p.kind != replyPacket || w.luck.IntN(4) == 0 {
				continue
			}
			if p.kind == replyPacket || w.luck.IntN(2) == 0 {
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
		w.wire = slices.DeleteFunc(w.wire, func(p *qPacket) bool { return p.kind == messagePacket && p.m.Kind == protocol.MessageRevoked })
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

// markKey is the key of a server's mark without a key prefix.
const markKey = "leased:quorum:mark"

var qRefusals = [...]simAnswer{
	"READONLY You can't write against a read only replica.",
	"LOADING Redis is loading the dataset in memory",
	outOfMemory,
	"NOPERM this user has no permissions",
	"WRONGTYPE Operation against a key holding the wrong kind of value",
}

const outOfMemory simAnswer = "OOM command not allowed when used memory > 'maxmemory'."

var qNames = [qTroubles]string{"partition", "restart", "bounce", "jump", "rate", "pause", "death", "slow", "eviction", "foreign", "min hold", "check", "letter", "long", "error", "rolling", "mark", "force"}

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
// believes, and knows of it: what the client takes for a place in a queue it may give up.
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
	present := c.lock.Status() // what an earlier request has left there is no vote for the present one
	ours := func(id string) bool {
		request := w.owners.request[id]
		return strings.HasSuffix(id, ":"+c.id) && c.q.Owns(id, s.i) && (request == present.Req.ID || present.Downgrading && request == present.Next)
	}
	if owner != protocol.MarkerValue {
		return ours(owner)
	}
	ids, _ := s.sim.do("ZRANGE", w.keys.Readers(), "0", "-1").([]any)
	return slices.ContainsFunc(ids, func(id any) bool {
		text, _ := id.(string)
		return ours(text)
	})
}

// evict is a ForceUnlock by an operator that reaches at least a majority.
func (w *qWorld) evict() {
	need := quorum.Majority(len(w.servers))
	some := w.rng.Perm(len(w.servers))[:need+w.rng.IntN(len(w.servers)-need+1)]
	w.logf("an operator evicts on %v", some)
	some = slices.DeleteFunc(some, func(i int) bool { return w.servers[i].refuses(false) != nil })
	w.owners.evicts()
	for _, i := range some {
		w.pardon(w.servers[i])
	}
	for _, c := range w.clients {
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

// pardon excuses the requests that own the lock on a server from which its owners are about to be evicted,
// and the leases that go on under them.
func (w *qWorld) pardon(s *qServer) {
	w.voided = true
	for _, id := range s.owners() {
		r := w.owners.request[id]
		if r == "" {
			continue
		}
		w.pardoned[r] = true
		for x, lease := range w.owners.leases {
			if slices.Contains(lease.requests, r) {
				w.pardoned[w.under[x]] = true
			}
		}
		for _, c := range w.clients {
			for _, x := range c.calls { // a downgrade goes on under another request
				if strings.HasSuffix(r, ":"+c.id) && x.Phase == lockstate.Inside {
					w.pardoned[w.under[x]] = true
				}
			}
		}
	}
}

// refuses returns the error with which the server refuses a command, or nil if it does not. Without memory
// to spare, it refuses only commands that need some.
func (s *qServer) refuses(needsMemory bool) error {
	if s.w.now.Before(s.refusesTill) && (needsMemory || s.refusal != outOfMemory) {
		return s.refusal
	}
	return nil
}

// hurtsAll notes that the server fails all clients now.
func (s *qServer) hurtsAll() {
	for _, c := range s.w.clients {
		c.hurt[s.i] = s.w.now
	}
}

// qForced is a ForceUnlock under way. As Server.Evict does, it first asks the servers who owns the lock,
// and evicts once a majority has answered. Between any two of its commands anything may happen.
type qForced struct {
	servers  []int
	seen     map[int]protocol.Snapshot // by server
	asked    int                       // how many servers have been asked
	evicting bool
	least    uint64
	owner    string
	ownsMost bool
}

// force begins a ForceUnlock that reaches at least a majority.
func (w *qWorld) force() {
	need := quorum.Majority(len(w.servers))
	f := &qForced{servers: w.rng.Perm(len(w.servers))[:need+w.rng.IntN(len(w.servers)-need+1)], seen: map[int]protocol.Snapshot{}}
	w.logf("an operator forces on %v", f.servers)
	w.sendForced(f)
}

func (w *qWorld) sendForced(f *qForced) {
	for _, i := range f.servers {
		w.put(&qPacket{kind: forcePacket, server: i, force: f, copied: true})
	}
}

// forced delivers a command of a ForceUnlock.
func (w *qWorld) forced(p *qPacket) {
	f, s := p.force, w.servers[p.server]
	lost := w.rng.IntN(100) < 5 || s.refuses(false) != nil
	switch {
	case f.evicting:
		if !lost {
			w.evictForced(f, s)
		}
		return
	case !lost:
		sn, err := s.srv.Inspect(context.Background(), &w.keys)
		if err != nil {
			w.fail("inspect: %v", err)
		}
		f.seen[s.i] = sn
	}
	f.asked++
	if need := quorum.Majority(len(w.servers)); len(f.seen) < need || f.asked < len(f.servers) && w.rng.IntN(2) == 0 {
		return
	}
	owned := false
	var seen []protocol.Snapshot
	for _, i := range f.servers {
		if sn, ok := f.seen[i]; ok {
			seen = append(seen, sn)
			f.least = max(f.least, quorum.Greatest(&sn))
			owned = owned || sn.Value != ""
		}
	}
	if !owned {
		f.least = 0
	}
	most := quorum.Merged(seen, len(w.servers))
	f.evicting, f.owner, f.ownsMost = true, quorum.OwnerOf(&most), most.Behind >= quorum.Majority(len(w.servers))
	w.sendForced(f)
}

// evictForced evicts the owner from s, unless another one was seen there.
func (w *qWorld) evictForced(f *qForced, s *qServer) {
	value := ""
	if sn, ok := f.seen[s.i]; ok && f.ownsMost {
		if quorum.OwnerOf(&sn) != f.owner {
			return
		}
		value = sn.Value
	}
	w.owners.evicts()
	w.pardon(s)
	ids, err := s.srv.EvictOwner(context.Background(), &w.keys, f.least, value)
	if err == nil && len(ids) == 0 && value != "" {
		if now, _ := s.srv.Inspect(context.Background(), &w.keys); quorum.GoesOn(&now, f.owner) {
			_, err = s.srv.EvictOwner(context.Background(), &w.keys, f.least, now.Value)
		}
	}
	if err != nil {
		w.fail("evict: %v", err)
	}
	w.logf("  server %d: forced, of %q: %v", s.i+1, f.owner, ids)
	w.counts["forced"]++
	w.observe(s)
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
	if slices.ContainsFunc(w.wire, func(p *qPacket) bool { return p.kind == toldPacket && p.c == c && p.m.Kind == protocol.MessageRevoked }) {
		return // its state machine is about to hear of it
	}
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
// If nothing went wrong between a client and the servers since its request was made, and no server lost its
// data, its lease cannot be lost. The same holds if a majority of the servers granted it with which nothing
// went wrong. If servers did lose their data, they still do not say that others have owned the lock, as
// long as the client hears all their answers, because nobody counts their grants before the quarantine is
// over. (They may deny the client a majority until its TTL ends.)
func (w *qWorld) judgeLoss(c *qClient, l lockstate.Loss) {
	id := w.under[l.Caller]
	made, known := c.made[id]
	over := !c.local().Before(c.lock.TrustedUntil(l.Caller, c.local())) // the lease was not confirmed in time
	if !known || c.excused(id) || l.Why == lockstate.Evicted {
		return
	}
	clean, restarts, deaf, faulty := true, false, false, w.faultSince(made)
	for _, s := range w.servers {
		clean = clean && c.hurt[s.i].Before(made)
		if !s.restarted.Before(made) {
			restarts = true
			deaf = deaf || !c.hurt[s.i].Before(s.restarted)
		}
	}
	if faulty && w.order != nil {
		return // what its state machine was told late had not been heard late
	}
	if sound := w.untroubled(c, l, made); sound >= quorum.Majority(len(w.servers)) {
		w.fail("%s lost token %d although %d servers that granted it were never in trouble: %v", c.name, l.Caller.Token, sound, l.Why)
	}
	switch {
	case faulty:
	case clean && !restarts:
		w.fail("%s lost token %d for nothing: %v", c.name, l.Caller.Token, l.Why)
	case l.Why == lockstate.NotOurs && !deaf && !over:
		w.fail("%s lost token %d to servers in quarantine: %v", c.name, l.Caller.Token, l.Why)
	}
}

// faultSince reports whether a server may have taken its vote from a lease whose request was made at that time.
func (w *qWorld) faultSince(made time.Time) bool {
	return slices.ContainsFunc(w.servers, func(s *qServer) bool { return !s.faultAt.Before(made) })
}

// untroubled returns how many servers prove a lease to its client: those that granted it and have had no
// trouble since its request was made, nor a quarantine. Of a server whose grant the client heard of only
// when it held the lease already, it cannot know whether others owned there before. So such servers count
// only if they are no majority together with those that prove nothing. A server that has restarted since
// proves nothing against the lease, if the client hears it.
func (w *qWorld) untroubled(c *qClient, l lockstate.Loss, made time.Time) int {
	lease := w.owners.leases[l.Caller]
	if lease != nil && lease.lowered != 0 {
		return 0 // a downgrade proves nothing on servers that have lost their data, or whose answer was not waited for
	}
	began, joined, restarted := 0, 0, 0
	for _, s := range w.servers {
		heard, since := w.grantOn(c, l, s)
		first := !heard.IsZero() && heard.Before(since) // what is heard at that very time comes after it, see qstep
		switch {
		case first && heard.Before(s.restarted) && c.hurt[s.i].Before(s.restarted):
			restarted++
		case heard.IsZero() || !c.hurt[s.i].Before(made) || !s.hasKept():
		case first:
			began++
		default:
			joined++
		}
	}
	if n := len(w.servers); n-began-restarted < quorum.Majority(n) {
		return began + joined
	}
	return began
}

// grantOn returns when the client heard that a server had granted a lease, zero if it did not, and since
// when it has held the lease.
func (w *qWorld) grantOn(c *qClient, l lockstate.Loss, s *qServer) (heard, since time.Time) {
	lease := w.owners.leases[l.Caller]
	for owner, at := range w.owners.took[s.i] {
		r := w.owners.request[owner]
		if lease != nil && lease.called != 0 && at >= lease.called { // granted when it was already being given back
			continue
		}
		if w.owners.made[owner] != w.owners.gaveUps[r] { // granted to an earlier try of the request
			continue
		}
		if r != w.under[l.Caller] && (lease == nil || !slices.Contains(lease.requests, r)) {
			continue
		}
		if h, ok := c.heard[s.i][owner]; ok && (heard.IsZero() || h.Before(heard)) {
			heard, since = h, c.since[r]
		}
	}
	return heard, since
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
		if p.x.Settled && p.x.Ended != lockstate.ByLoss && p.x.Outcome() == nil && !p.c.dead && p.c.excuse.IsZero() && !w.voided && w.now.Before(p.until.Add(-slack)) {
			w.fail("%s enters at %v, and %s was to keep others out until %v", c.name, w.now.Sub(simEpoch), p.c.name, p.until.Sub(simEpoch))
		}
	}
}

// twinsOwn reports whether a server has an owner, or an entry in the queue, of which a copy arrived
// although its answer had. Of that nobody can know, so only its TTL ends it, unless a message makes it
// known.
func (w *qWorld) twinsOwn() bool {
	for _, s := range w.servers {
		ids := []any{s.sim.do("GET", w.keys.Lock)}
		for _, key := range []string{w.keys.Readers(), w.keys.Queue()} {
			more, _ := s.sim.do("ZRANGE", key, "0", "-1").([]any)
			ids = append(ids, more...)
		}
		for _, id := range ids {
			if id, is := id.(string); is && w.twins[id] {
				return true
			}
		}
	}
	return false
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
				w.fail("server %d keeps %s: %v %v; readers %v", s.i+1, key, s.sim.do("GET", w.keys.Lock), s.sim.do("ZRANGE", w.keys.Queue(), "0", "-1"), s.sim.do("ZRANGE", w.keys.Readers(), "0", "-1", "WITHSCORES"))
			}
		}
	}
}

// limps leaves a minority of the servers broken in calm. Whoever waits must be served nevertheless, as must
// each client by itself, and all of them when they come at once.
func (w *qWorld) limps(long time.Duration) {
	for _, s := range w.servers {
		s.marks() // the quarantine of a server that nobody asks does not begin
	}
	gone := func(x *lockstate.Caller) bool { return x.Phase != lockstate.Waiting && x.Phase != lockstate.Inside }
	mend := w.cripple()
	if !w.until(long, func() bool {
		for _, c := range w.clients {
			if !c.dead && w.inside(c, lockstate.Waiting)+w.inside(c, lockstate.Inside) > 0 {
				return false
			}
		}
		return len(w.ops) == 0
	}) {
		w.fail("somebody still waits without a minority")
	}
	// What is left on servers that cannot be told ends with its TTL.
	w.until(3*w.ttls[len(w.ttls)-1]+w.quarantine+5*time.Second, func() bool { return false })
	for _, c := range w.clients {
		if w.failure != "" || c.dead || c.closed {
			continue
		}
		x, from := c.enter(protocol.Exclusive, false), w.now
		if !w.until(10*time.Second, func() bool { return gone(x) }) {
			w.fail("%s does not get a free lock without a minority", c.name)
		}
		if w.entered[x].IsZero() {
			w.fail("%s does not enter without a minority: %v", c.name, x.Outcome())
		}
		w.counts[fmt.Sprintf("without a minority, entered within %d00 ms", min(20, 1+w.entered[x].Sub(from)/(100*time.Millisecond)))]++
		if !w.until(10*time.Second, func() bool { return x.Settled }) {
			w.fail("the Unlock of %s has no end without a minority", c.name)
		}
		w.until(2*time.Second, func() bool { return len(w.ops) == 0 })
		if x.Outcome() != nil {
			w.fail("%s unlocks without a minority: %v", c.name, x.Outcome())
		}
	}
	var all []*lockstate.Caller
	from := w.now
	for _, c := range w.clients {
		if !c.dead && !c.closed && w.failure == "" {
			all = append(all, c.enter(protocol.Exclusive, false))
		}
	}
	if !w.until(30*time.Second, func() bool { return !slices.ContainsFunc(all, func(x *lockstate.Caller) bool { return !gone(x) }) }) {
		w.fail("without a minority, not all enter that came at once")
	}
	w.counts[fmt.Sprintf("without a minority, all entered within %d s", 1+w.now.Sub(from)/time.Second)]++
	if !w.until(10*time.Second, func() bool { return !slices.ContainsFunc(all, func(x *lockstate.Caller) bool { return !x.Settled }) }) {
		w.fail("without a minority, an Unlock has no end")
	}
	for _, x := range all {
		if x.Outcome() != nil {
			w.fail("without a minority, an Unlock says: %v", x.Outcome())
		}
	}
	mend()
}

// anyMode returns the mode of a caller in calm.
func (w *qWorld) anyMode() protocol.Mode {
	if w.luck.IntN(3) == 0 {
		return protocol.Shared
	}
	return protocol.Exclusive
}

// enterAtOnce has each client lock in calm, when nobody has the lock and all servers vote: it enters at
// once, and its Unlock has an end at once.
func (w *qWorld) enterAtOnce() {
	if w.failure != "" || slices.ContainsFunc(w.servers, func(s *qServer) bool { return !s.votes() }) ||
		slices.ContainsFunc(w.clients, func(c *qClient) bool { return c.dead || c.closed }) {
		return
	}
	for _, c := range w.clients {
		x := c.enter(w.anyMode(), false)
		x.Opts.IdleHold = 0
		if !w.until(0, func() bool { return !w.entered[x].IsZero() }) && w.failure == "" {
			w.fail("%s does not enter a free lock at once: %v, %s", c.name, x.Phase, c.q)
		}
		if x.Phase == lockstate.Inside {
			c.leave(x)
		}
		if !w.until(0, func() bool { return x.Settled }) && w.failure == "" {
			w.fail("the Unlock of %s has no end at once", c.name)
		}
	}
	w.counts["entered at once in calm"]++
}

// luckless has the servers that a downgrade needs answer one by one, or not, and its lease unlocked then.
func (w *qWorld) luckless(c *qClient, x *lockstate.Caller) {
	w.counts["unlocked soon after a downgrade"]++
	for range w.luck.IntN(20) {
		w.some()
	}
	if w.luck.IntN(2) == 0 {
		w.advance(time.Duration(w.luck.IntN(400)) * time.Millisecond)
	}
	for range w.luck.IntN(20) {
		w.some()
	}
	if !c.dead && c.wakeAt.IsZero() && x.Phase == lockstate.Inside && w.failure == "" {
		c.leave(x)
	}
}

// cripple breaks a minority of the servers: no client reaches them, or each client does not reach a
// minority of its own, or they refuse everything. It returns the end of that.
func (w *qWorld) cripple() (mend func()) {
	minority := func() []int {
		most := len(w.servers) - quorum.Majority(len(w.servers))
		return w.rng.Perm(len(w.servers))[:1+w.rng.IntN(most)]
	}
	broken, kind := minority(), w.rng.IntN(3)
	w.logf("a minority is broken: %v, kind %d", broken, kind)
	w.counts[fmt.Sprintf("without a minority, kind %d", kind)]++
	if kind == 2 {
		for _, i := range broken {
			w.servers[i].refusal, w.servers[i].refusesTill = qRefusals[0], w.now.Add(24*time.Hour)
		}
	}
	for _, c := range w.clients {
		if kind == 1 {
			broken = minority()
			w.logf("%s does not reach %v", c.name, broken)
		}
		for _, i := range broken {
			c.reach[i], c.hurt[i] = kind == 2, w.now
		}
	}
	return func() {
		for _, s := range w.servers {
			s.refusesTill = time.Time{}
		}
		for _, c := range w.clients {
			for i := range c.reach {
				if !c.reach[i] {
					c.reach[i], c.hurt[i] = true, w.now
				}
			}
			if !c.dead {
				c.rejoins()
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
	for _, done := range w.downgrades {
		select {
		case <-done:
		default:
			if !slices.ContainsFunc(w.clients, func(c *qClient) bool { return c.dead }) {
				w.fail("a downgrade has no end")
			}
		}
	}
	for _, u := range w.checks {
		select {
		case <-u.done:
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
