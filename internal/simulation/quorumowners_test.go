package simulation

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
)

// These checks look at who owned the lock according to the servers, not according to the clients, and at
// what an Unlock may say about it. An Unlock that asked the servers returns nil only if nobody else has
// owned the lock from the grant of its lease until Unlock was called and the first server was told that the lease
// is given back.
// To own the lock is to own it on a majority of the servers at one instant, and to be told so, then or
// later. Readers may own it beside readers, and beside a writer that asked to become a reader.
//
// There is an exception (docs/redlock.md): a lease that may have ended on servers without a word to its
// owner, by an eviction of which the owner did not hear, or because clocks were set or clients stood still.
// Most of these cases are proved, too, and -quorum.strict looks for those that are not. Even then some
// servers cannot know: a server that has joined the lease since, has lost its data since, or has carried
// out a downgrade that had no answer.

// qOwners is what is known about the ownership of the lock in a schedule.
type qOwners struct {
	seq     int               // the number of events so far; all times below are such numbers
	request map[string]string // by the id that a server knows, the id that the client's state machine knows
	took    []map[string]int  // by server, when an id became the owner there
	now     [][]string        // by server, the owners when last observed
	events  []*qMajority
	told    map[string]int // by request, when its state machine stopped holding the lock under it; 0 if it still does
	emptied []int          // by server, when it last lost its data
	evicted []int          // when leases may have ended on servers without a word to their owners
	leases  map[*lockstate.Caller]*qLease
	// gaveUpAt is when a request was last given back, to be made again.
	gaveUpAt map[string]int
	gaveUps  map[string]int // how often a request was given back before its client was ever told of a grant
	made     map[string]int // by the id that a server knows, how often its request had been given back when it was sent
	left     []*qLease      // unlocked, but not settled
	proven   []*qLease      // leases whose Unlock has returned nil
}

// qMajority is an instant at which a request owned a majority of the servers.
type qMajority struct {
	c       *qClient
	request string
	mode    protocol.Mode
	seq     int
	took    []int // by server, since when the request owned it; 0 if it did not
}

// qLease is the lease of a caller.
type qLease struct {
	c        *qClient
	x        *lockstate.Caller
	requests []string
	first    int // when the first server granted the request
	began    int // when the lease began: also then, unless it was handed on by another caller of its client
	told     int // when its client was told
	called   int // when Unlock was called
	lowered  int // when a downgrade was asked for
	settled  int
	asked    bool  // the servers were asked when the caller left
	gave     []int // by server, when a release, yield or cancel of it was carried out there after Unlock was called
	early    bool  // a server was told before that, once a downgrade was asked for, which gives back what it takes for lost
}

func newQOwners(n int) *qOwners {
	o := &qOwners{request: map[string]string{}, took: make([]map[string]int, n), now: make([][]string, n), emptied: make([]int, n),
		told: map[string]int{}, leases: map[*lockstate.Caller]*qLease{}, gaveUpAt: map[string]int{},
		gaveUps: map[string]int{}, made: map[string]int{}}
	for i := range o.took {
		o.took[i] = map[string]int{}
	}
	return o
}

// owners returns the ids that own the lock on the server.
func (s *qServer) owners() []string {
	value, _ := s.sim.do("GET", s.w.keys.Lock).(string)
	if value == protocol.MarkerValue {
		all, _ := s.sim.do("ZRANGEBYSCORE", s.w.keys.Readers(), "("+strconv.FormatInt(s.clock().UnixMilli(), 10), "+inf").([]any)
		var ids []string
		for _, id := range all {
			ids = append(ids, id.(string))
		}
		return ids
	}
	if _, cools := protocol.ParseCooldown(value); cools || !strings.HasPrefix(value, protocol.FormatTag) {
		return nil
	}
	return []string{value}
}

// clock returns the time on the server's clock.
func (s *qServer) clock() time.Time {
	return simEpoch.Add(faster(s.w.now.Sub(simEpoch), s.rate)).Add(s.offset)
}

// votes reports whether the server's vote counts, that is, it is not in quarantine.
func (s *qServer) votes() bool {
	text, _ := s.sim.do("GET", markKey).(string)
	mark, _ := strconv.ParseInt(text, 10, 64)
	return mark != 0 && s.clock().UnixMicro()-mark >= s.w.quarantine.Microseconds()
}

// carries notes which request a command is about, before the server carries it out.
func (o *qOwners) carries(p *qPacket) {
	o.seq++
	id, next := p.send.Requests()
	switch p.send.Kind {
	case quorum.Do:
		o.sees(p.send.Cmd.ID, id, p.gaveUps[0])
		if p.send.Cmd.Next != "" {
			o.sees(p.send.Cmd.Next, next, p.gaveUps[1])
		}
		if v := p.send.Cmd.Verb; v == protocol.Release || v == protocol.Yield {
			o.givesBack(p.server, p.send.Cmd.ID)
		}
	case quorum.Cancel:
		o.request[p.send.Cancel.ID] = id
		o.givesBack(p.server, p.send.Cancel.ID)
	}
}

// sees notes for which request an id stands, and how often that had been given back when the id was sent.
func (o *qOwners) sees(id, request string, gaveUps int) {
	o.request[id] = request
	if _, known := o.made[id]; !known {
		o.made[id] = gaveUps
	}
}

// givesBack notes that a server ends a request.
func (o *qOwners) givesBack(server int, id string) {
	for _, l := range slices.Concat(o.left, o.proven) {
		if l.gave[server] == 0 && slices.Contains(l.requests, o.request[id]) {
			l.gave[server] = o.seq
		}
	}
	for _, l := range o.leases {
		if l.called == 0 && l.lowered != 0 && slices.Contains(l.requests, o.request[id]) {
			l.early = true
		}
	}
}

// observe notes who owns the lock after something happened on a server.
func (w *qWorld) observe(s *qServer) {
	o := w.owners
	o.seq++
	for _, u := range w.checks {
		if !u.judged {
			u.look(s)
		}
	}
	var taken []string
	ids := s.owners()
	for _, id := range ids {
		if !slices.Contains(o.now[s.i], id) {
			o.took[s.i][id] = o.seq
			taken = append(taken, id)
		}
	}
	o.now[s.i] = ids
	if len(taken) == 0 {
		return
	}
	for _, other := range w.servers { // leases may have expired there
		if other != s {
			still := other.owners()
			o.now[other.i] = slices.DeleteFunc(o.now[other.i], func(id string) bool { return !slices.Contains(still, id) })
		}
	}
	for _, id := range taken {
		if r := o.request[id]; r != "" {
			w.count(r)
		}
	}
}

// count notes whether a request owns a majority now.
func (w *qWorld) count(request string) {
	o := w.owners
	m := &qMajority{request: request, seq: o.seq, took: make([]int, len(w.servers))}
	n, young := 0, 0
	for i, ids := range o.now {
		for _, id := range ids { // a reader's request can own under more than one id
			if at := o.took[i][id]; o.request[id] == request && o.made[id] == o.gaveUps[request] && (m.took[i] == 0 || at < m.took[i]) {
				m.took[i] = at
			}
		}
		switch {
		case m.took[i] == 0:
		case w.servers[i].votes():
			n++
		default:
			young++
		}
	}
	switch {
	case n >= quorum.Majority(len(w.servers)):
		for i, s := range w.servers {
			if m.took[i] != 0 && !s.votes() {
				m.took[i] = 0
			}
		}
	case young < len(w.servers): // if all are in quarantine, the whole set of servers is new
		return
	}
	who, _ := protocol.ParseID(request)
	m.mode = who.Mode
	for _, c := range w.clients {
		if strings.HasSuffix(request, ":"+c.id) {
			m.c = c
		}
	}
	o.events = append(o.events, m)
	w.judge(m)
}

// told notes what a state machine holds after an event, and which callers have settled.
func (w *qWorld) told(c *qClient) {
	o := w.owners
	o.seq++
	held := c.lock.Request().ID
	if !c.lock.Holds(held) {
		held = ""
	}
	if c.holds != "" && c.holds != held {
		o.told[c.holds] = o.seq
	}
	if held != "" && c.holds != held {
		o.told[held], c.since[held] = 0, w.now
		for i, s := range w.servers {
			still := s.owners()
			o.now[i] = slices.DeleteFunc(o.now[i], func(id string) bool { return !slices.Contains(still, id) })
		}
		w.count(held) // a quarantine may have ended
		for _, m := range o.events {
			if m.request == held {
				w.judge(m)
			}
		}
	}
	c.holds = held
	still := o.left[:0]
	for _, l := range o.left {
		if !l.x.Settled {
			still = append(still, l)
			continue
		}
		if l.x.Outcome() != nil || !l.asked || slices.Contains(l.requests, held) {
			continue // in the last case the next caller of the client goes on with the lock
		}
		w.counts["proved"]++
		l.settled = o.seq
		o.proven = append(o.proven, l)
		for _, m := range o.events {
			w.judge(m)
		}
	}
	o.left = still
}

// gaveUp notes that a request was given back because no majority is known to have granted it. The
// request may be made again.
func (o *qOwners) gaveUp(request string) {
	until, told := o.told[request]
	o.gaveUpAt[request] = o.seq
	if !told {
		o.gaveUps[request]++
	}
	o.events = slices.DeleteFunc(o.events, func(m *qMajority) bool {
		return m.request == request && (!told || until != 0 && m.seq > until)
	})
}

// dies notes that a client no longer holds anything.
func (o *qOwners) dies(c *qClient) {
	if c.holds != "" {
		o.seq++
		o.told[c.holds], c.holds = o.seq, ""
	}
}

// leases notes the lease of a caller that enters.
func (w *qWorld) leases(c *qClient, x *lockstate.Caller) {
	o := w.owners
	o.seq++
	l := &qLease{c: c, x: x, requests: []string{c.lock.Request().ID}, began: o.seq, told: o.seq, gave: make([]int, len(w.servers))}
	l.first = o.firstGrant(l.requests[0])
	if x.Via != lockstate.ViaLocal && x.Via != lockstate.ViaIdle {
		for _, m := range o.events {
			if m.request == l.requests[0] {
				since := slices.DeleteFunc(slices.Sorted(slices.Values(m.took)), func(at int) bool { return at == 0 })
				l.began = since[quorum.Majority(len(w.servers))-1]
			}
		}
	}
	o.leases[x] = l
}

// lowers notes that a downgrade is asked for.
func (o *qOwners) lowers(x *lockstate.Caller) {
	if l := o.leases[x]; l.lowered == 0 {
		l.lowered = o.seq
	}
}

// unlocks notes that a caller leaves.
func (o *qOwners) unlocks(x *lockstate.Caller) {
	l := o.leases[x]
	v := l.c.lock.Status()
	l.requests = append(l.requests, v.Req.ID)
	if v.Downgrading {
		l.requests = append(l.requests, v.Next)
	}
	l.called = o.seq
	o.left = append(o.left, l)
}

// judge fails if an Unlock has returned nil although m happened during its lease.
func (w *qWorld) judge(m *qMajority) {
	o := w.owners
	if until, told := o.told[m.request]; !told || until != 0 && m.seq > until {
		return // the owner's client was not told
	}
	for _, l := range o.proven {
		if m.c == l.c || m.seq <= l.began || m.seq > l.over() {
			continue
		}
		if m.mode == protocol.Shared && (l.x.Mode == protocol.Shared && l.lowered == 0 || l.lowered != 0 && m.seq > l.lowered) {
			continue
		}
		evicted := slices.ContainsFunc(o.evicted, func(at int) bool { return at > l.first && at < l.settled }) // perhaps of an earlier lease of the same grant
		if evicted && (!*quorumStrict || l.lowered != 0) {
			continue
		}
		n := 0
		for i, at := range m.took {
			late := evicted && o.regained(i, l, at)
			if at > l.told && !late && !(l.gave[i] != 0 && l.gave[i] < at) && o.emptied[i] < m.seq {
				n++
			}
		}
		if n >= quorum.Majority(len(w.servers)) {
			w.fail("Unlock of %s, token %d, says nil, but %s has owned in between, under %s (%d to %d: at %d from %v, given back %v)", l.c.name, l.x.Token, m.c.name, short(m.request), l.began, l.settled, m.seq, m.took, l.gave)
		}
	}
}

// over returns when the first server was told that the lease is given back. If that was before Unlock was
// called, or if the lease was left to the next caller of its client, it was over when Unlock was called.
func (l *qLease) over() int {
	if l.early {
		return l.called
	}
	first := 0
	for _, at := range l.gave {
		if at != 0 && at <= l.settled && (first == 0 || at < first) {
			first = at
		}
	}
	if first == 0 {
		return l.called
	}
	return first
}

// firstGrant returns when a server first granted the request.
func (o *qOwners) firstGrant(request string) int {
	first := o.seq
	for _, took := range o.took {
		for id, at := range took {
			if o.request[id] == request && at > o.gaveUpAt[request] {
				first = min(first, at)
			}
		}
	}
	return first
}

// evicts notes that leases may have ended on servers without a word to their owners.
func (o *qOwners) evicts() {
	o.seq++
	o.evicted = append(o.evicted, o.seq)
}

// regained reports whether the lease became an owner on the server again after that time.
func (o *qOwners) regained(server int, l *qLease, after int) bool {
	for id, at := range o.took[server] {
		if at > after && slices.Contains(l.requests, o.request[id]) {
			return true
		}
	}
	return false
}
