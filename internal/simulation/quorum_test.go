package simulation

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
)

// This is the simulation of a quorum: the state machines of some clients, the decisions of
// internal/quorum, and the real scripts on several embedded servers with a clock each. Between
// them is a network that loses, delays and repeats packets, and that lets some clients reach
// only some of the servers. quorumtrouble_test.go draws for each seed which other troubles
// there are.

var quorumSeeds = flag.Int("quorum.seeds", 0, "schedules of TestQuorumSimulation on three servers, fewer on five and seven (0: a short run)")
var quorumFirst = flag.Int64("quorum.first", 1, "first seed of TestQuorumSimulation")
var quorumStrict = flag.Bool("quorum.strict", false, "check what Unlock proves also where docs/redlock.md makes an exception: after evictions and jumps of clocks")
var quorumFor = flag.Duration("quorum.for", 0, "instead of a number of schedules: for how long to go on, on each number of servers, with readers and without")
var quorumTrace = flag.Bool("quorum.trace", false, "print each schedule")

type qServer struct {
	w           *qWorld
	i           int
	mini        *miniredis.Miniredis
	sim         *simServer
	rdb         *redis.Client
	srv         *redisserver.Server
	offset      time.Duration // of its clock from the world's, by skew and jumps
	rate        int64         // ppm by which its clock is fast
	restarted   time.Time     // when it last lost its data
	faultAt     time.Time     // when its clock was last set, or its keys were written by others
	slowTill    time.Time
	markAt      time.Time // when its mark was last deleted
	refusal     simAnswer // with which it answers until refusesTill
	refusesTill time.Time
}

// The kinds of packets that only a quorum has, beside requests, replies and messages.
const (
	strayPacket packetKind = "stray" // the cancel of a stray
	forcePacket packetKind = "force" // a ForceUnlock's command
	toldPacket  packetKind = "told"  // what the quorum tells its client's state machine, out of order
)

type qPacket struct {
	kind   packetKind
	c      *qClient // nil of a ForceUnlock
	server int
	send   *quorum.Send
	res    quorum.Result
	m      protocol.Message
	g      *lockstate.Cancellation
	force  *qForced
	copied bool      // nobody waits for its answer
	twin   bool      // a copy of a command whose answer may have arrived
	sent   time.Time // when the command was sent
	ready  time.Time // it does not arrive before this
	// gaveUps is how often the requests that the command is about had been given back when it was sent.
	gaveUps [2]int
}

type qOp struct {
	op     *quorum.Op
	c      *qClient
	cmd    *protocol.Command
	r      *protocol.Renewal
	g      *lockstate.Cancellation
	expire time.Time
}

type qClient struct {
	w      *qWorld
	name   string
	id     string
	rate   int64 // ppm by which its clock is fast
	lock   lockstate.Lock
	q      *quorum.Lock
	cancel lockstate.CancelSchedule
	strays []lockstate.CancelSchedule // cancels of strays, by server
	calls  []*lockstate.Caller
	reach  []bool
	proofs []protocol.Proof
	away   []time.Time     // by server, until when the client assumes that it does not answer
	trips  []time.Duration // by server, how long the client takes a round trip to last
	hurt   []time.Time     // by server, when something last went wrong between it and the client
	made   map[string]time.Time
	heard  []map[string]time.Time // by server, when the client first heard that it is the owner there under an id
	since  map[string]time.Time   // by request, since when the client's state machine has held it
	dead   bool
	closed bool
	wakeAt time.Time // the client is paused until then; zero if it is not paused
	excuse time.Time // requests made until then may be lost, or exclude nobody
	holds  string    // the request under which it holds the lock
	joins  bool      // its inboxes have not been confirmed yet
}

type qWorld struct {
	t          testing.TB
	rng        *rand.Rand
	luck       *rand.Rand // a separate source, so that drawing from it changes nothing in worlds without doubts and idle locks
	doubts     bool
	idles      bool
	ends       *rand.Rand // likewise, for worlds whose clients are closed, or whose callers give back
	closes     bool
	givesBack  bool
	order      *rand.Rand // nil if what the quorum tells the state machine comes in order
	atOnce     bool       // the tickets of requests that are made at once are nearly equal
	now        time.Time
	servers    []*qServer
	clients    []*qClient
	wire       []*qPacket
	ops        []*qOp
	keys       protocol.Keys
	trace      bool
	log        []string
	failure    string
	has        [qTroubles]bool
	quarantine time.Duration
	patience   time.Duration // the longest that a decision waits: some servers are far away
	ttls       []time.Duration
	top        uint64
	readers    uint64 // the greatest token of a reader
	loose      bool   // tokens need not increase anymore
	calm       bool
	lowered    map[*lockstate.Caller]uint64    // of each caller that asked for a downgrade its token before that, 0 once it is done
	under      map[*lockstate.Caller]string    // the request under which a caller entered
	entered    map[*lockstate.Caller]time.Time // when the caller entered
	promises   []qPromise
	evictions  []*qEviction
	owners     *qOwners
	checks     []*qCheck
	downgrades []chan struct{}
	restart    time.Time // when a server last lost its data or its mark
	restarts   int       // how often servers have lost their data in this schedule
	counts     map[string]int
	pardoned   map[string]bool // requests that owned on a server when owners were evicted there
	twins      map[string]bool // requests of which a copy arrived whose answer may have arrived before
	voided     bool            // owners were evicted, so minimum holds may have ended
	lazy       int
	ran        int // the number of schedules so far
}

func newQWorld(t testing.TB, n int) *qWorld {
	w := &qWorld{t: t, counts: map[string]int{}}
	w.keys, _ = protocol.NewKeys("", "x")
	for i := range n {
		s := &qServer{w: w, i: i, mini: miniredis.NewMiniRedis()}
		s.mini.ClockTTL(true)
		s.mini.SetTime(simEpoch)
		conn, err := s.mini.Dial()
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		s.mini.Server().SetPreHook(s.publish)
		s.sim = newSimServer(s.mini)
		s.rdb = redis.NewClient(redistest.MiniOptions(s.mini))
		s.rdb.AddHook(s.sim)
		s.srv = redisserver.NewMember(s.rdb, "", time.Minute)
		s.srv.Rdb = s.rdb
		w.servers = append(w.servers, s)
	}
	return w
}

func (w *qWorld) close() {
	for _, s := range w.servers {
		s.rdb.Close()
		s.sim.close()
		s.mini.Close()
	}
}

// logf adds a line to the log of the schedule. A schedule that fails is run again with a log.
func (w *qWorld) logf(format string, args ...any) {
	if w.trace {
		w.log = append(w.log, fmt.Sprintf("%8v  ", w.now.Sub(simEpoch))+fmt.Sprintf(format, args...))
	}
}

func (w *qWorld) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.failure)
	}
}

func (s *qServer) setTime() {
	s.mini.SetTime(simEpoch.Add(faster(s.w.now.Sub(simEpoch), s.rate)).Add(s.offset))
}

func (w *qWorld) setTime() {
	for _, s := range w.servers {
		s.setTime()
	}
}

func (w *qWorld) begin(seed int64) {
	w.rng = rand.New(rand.NewPCG(uint64(seed), 7))
	w.now = simEpoch
	w.wire, w.ops, w.log, w.failure, w.top, w.readers, w.loose, w.calm = nil, nil, nil, "", 0, 0, false, false
	w.restart, w.restarts, w.lowered, w.under, w.entered = time.Time{}, 0, map[*lockstate.Caller]uint64{}, map[*lockstate.Caller]string{}, map[*lockstate.Caller]time.Time{}
	w.promises, w.evictions, w.checks, w.downgrades, w.owners = nil, nil, nil, nil, newQOwners(len(w.servers))
	w.pardoned, w.voided, w.twins = map[string]bool{}, false, map[string]bool{}
	w.lazy = []int{0, 30, 70, 95}[w.rng.IntN(4)]
	w.chooseTroubles()
	w.luck = rand.New(rand.NewPCG(uint64(seed), 8))
	w.doubts = w.luck.IntN(100) < doubtPercent
	w.idles = w.luck.IntN(100) < idlePercent
	w.ends = rand.New(rand.NewPCG(uint64(seed), 20))
	w.closes, w.givesBack = w.ends.IntN(100) < closesPercent, w.ends.IntN(100) < givesBackPercent
	if w.order = rand.New(rand.NewPCG(uint64(seed), 10)); w.order.IntN(100) >= disorderPercent {
		w.order = nil
	}
	w.atOnce = rand.New(rand.NewPCG(uint64(seed), 9)).IntN(4) == 0
	w.patience = minPatience
	if far := rand.New(rand.NewPCG(uint64(seed), 21)); far.IntN(2) == 0 {
		w.patience += time.Duration(far.Int64N(int64(maxPatience - minPatience)))
	}
	skew := []time.Duration{0, 0, time.Millisecond, 300 * time.Millisecond, 3 * time.Second}[w.rng.IntN(5)]
	skew = min(skew, w.quarantine)
	for _, s := range w.servers {
		s.offset = time.Duration(w.rng.Float64() * float64(skew))
		s.rate, s.restarted, s.faultAt, s.slowTill = w.ppm(), time.Time{}, time.Time{}, time.Time{}
		s.markAt, s.refusesTill = time.Time{}, time.Time{}
		s.mini.FlushAll()
	}
	w.setTime()
	for _, s := range w.servers {
		_ = s.mini.Set("leased:quorum:mark", "1")
	}
	w.clients = nil
	n := len(w.servers)
	for i := range 2 + w.rng.IntN(3) {
		c := &qClient{w: w, name: string(rune('A' + i)), rate: w.ppm(), reach: make([]bool, n), proofs: make([]protocol.Proof, n), away: make([]time.Time, n),
			hurt: make([]time.Time, n), strays: make([]lockstate.CancelSchedule, n), made: map[string]time.Time{}, since: map[string]time.Time{}, heard: make([]map[string]time.Time, n)}
		c.id = strings.Repeat(c.name, 16) + ":sim"
		for i := range c.reach {
			c.reach[i], c.proofs[i], c.heard[i] = true, protocol.Counted, map[string]time.Time{}
		}
		c.joins = w.doubts && w.luck.IntN(2) == 0
		c.trips = make([]time.Duration, n)
		if distance := rand.New(rand.NewPCG(uint64(seed), 10+uint64(i))); distance.IntN(2) == 0 { // it takes some servers to be far away
			for i := range c.trips {
				c.trips[i] = time.Duration(distance.IntN(100)) * time.Millisecond
			}
		}
		c.lock.Wake(new(lockstate.Resting), c)
		cfg := &quorum.Config{N: n,
			NewID:  c.newID,
			Proof:  func(i int) protocol.Proof { return c.proofs[i] },
			Ticket: w.ticket,
			Away:   c.isAway,

			RoundTrip: func(i int) time.Duration { return c.trips[i] },
		}
		c.q = quorum.NewLock(cfg, &w.keys)
		w.clients = append(w.clients, c)
	}
}

// ticket returns a request's ticket. The clients' estimates of the first server's clock differ, but for
// some requests by less than the servers tell tickets apart.
func (w *qWorld) ticket() uint64 {
	ahead := w.rng.Int64N(2000)
	if w.atOnce {
		ahead %= 3
	}
	return uint64(w.now.UnixMicro() + ahead)
}

// local returns the time on the client's clock.
func (c *qClient) local() time.Time { return simEpoch.Add(faster(c.w.now.Sub(simEpoch), c.rate)) }

// world returns the world's time at which the client's clock shows t; zero if t is zero.
func (c *qClient) world(t time.Time) time.Time {
	if t.IsZero() || c.rate == 0 {
		return t
	}
	d := t.Sub(simEpoch)
	at := simEpoch.Add(faster(d, -c.rate))
	for wall := faster(at.Sub(simEpoch), c.rate); wall < d; wall = faster(at.Sub(simEpoch), c.rate) {
		at = at.Add(d - wall)
	}
	return at
}

// isAway reports whether the client assumes that a server does not answer.
func (c *qClient) isAway(i int) bool {
	w := c.w
	away := !c.reach[i] && w.rng.IntN(2) == 0 || w.now.Before(c.away[i]) && !w.calm
	if away {
		c.hurt[i] = w.now
	}
	return away
}

func (c *qClient) newID(like protocol.Identity) string {
	flag := string(like.Proof)
	if like.Idles {
		flag += "i"
	}
	id := fmt.Sprintf("leased1:%c:%d:%s:%s:%s", like.Mode, like.TTL.Milliseconds(), flag, randomText(c.w.rng), c.id)
	c.made[id] = c.w.now
	return id
}

func (c *qClient) NewRequest(m protocol.Mode, ttl time.Duration, idles bool, _ protocol.Origin) protocol.Request {
	req, err := protocol.RequestOf(c.newID(protocol.Identity{Mode: m, TTL: ttl, Idles: idles, Proof: protocol.Counted}))
	if err != nil {
		panic(err)
	}
	return req
}
func (c *qClient) Client() string     { return c.id }
func (c *qClient) Jitter() float64    { return c.w.rng.Float64() }
func (c *qClient) HoldsMany() bool    { return false }
func (c *qClient) HasInbox() bool     { return true }
func (c *qClient) Subscribed() bool   { return true }
func (c *qClient) InboxPending() bool { return c.joins }
func (c *qClient) Start() time.Time   { return simEpoch }

func (c *qClient) RoundTrip() time.Duration { return c.trips[0] }

// publish stands in for the server's PUBLISH and PUBSUB NUMSUB.
func (s *qServer) publish(p *mini.Peer, cmd string, args ...string) bool {
	w := s.w
	find := func(channel string) *qClient {
		for _, c := range w.clients {
			if channel == protocol.InboxChannel("", c.id) && !c.dead && c.reach[s.i] {
				return c
			}
		}
		return nil
	}
	switch {
	case cmd == "PUBSUB" && strings.EqualFold(args[0], "NUMSUB"):
		p.WriteLen(2 * len(args[1:]))
		for _, channel := range args[1:] {
			p.WriteBulk(channel)
			n := 0
			if find(channel) != nil {
				n = 1
			}
			p.WriteInt(n)
		}
		return true
	case cmd != "PUBLISH":
		return false
	}
	c := find(args[0])
	if c == nil {
		p.WriteInt(0)
		return true
	}
	m, ok := protocol.ParseMessage(args[1])
	if !ok {
		w.fail("malformed message %q", args[1])
	}
	w.put(&qPacket{kind: messagePacket, c: c, server: s.i, m: m})
	p.WriteInt(1)
	return true
}

func (w *qWorld) put(p *qPacket) {
	if p.sent.IsZero() {
		p.sent = w.now
	}
	if s := w.servers[p.server]; w.now.Before(s.slowTill) && !w.calm {
		p.ready = w.now.Add(time.Duration(w.rng.Int64N(int64(commandTimeout))))
	}
	w.wire = append(w.wire, p)
}

// step passes an event to the client's state machine and performs the effects.
func (c *qClient) step(event func(now time.Time, fx *lockstate.Effects)) {
	var fx lockstate.Effects
	event(c.local(), &fx)
	c.w.told(c)
	c.w.obeys(c)
	c.w.lowers(c)
	c.perform(&fx)
}

// isLowered reports whether a caller has asked for a downgrade.
func (w *qWorld) isLowered(x *lockstate.Caller) bool {
	_, asked := w.lowered[x]
	return asked
}

// lowers checks the tokens of leases that a step has downgraded.
func (w *qWorld) lowers(c *qClient) {
	for _, x := range c.calls {
		before, asked := w.lowered[x]
		if !asked || before == 0 || x.Mode != protocol.Shared {
			continue
		}
		w.lowered[x] = 0
		w.counts["downgraded"]++
		if c.excused(w.under[x]) {
			continue
		}
		if (x.Token <= before || x.Token <= w.top) && !w.loose {
			w.fail("%s has token %d after the downgrade of %d, and after %d", c.name, x.Token, before, w.top)
		}
		w.readers = max(w.readers, x.Token)
	}
}

func (c *qClient) perform(fx *lockstate.Effects) {
	w := c.w
	var back []*lockstate.Caller
	for x := range fx.Woken.All {
		if x.Entered {
			w.counts["entered, "+x.Via.String()]++
			w.admitted(c, x)
			if w.givesBack && !w.calm && w.ends.IntN(4) == 0 {
				back = append(back, x)
			}
		}
	}
	for _, l := range fx.Ended {
		if l.Caller.Ended != lockstate.ByLoss {
			continue // its client was closed, and it keeps its lease
		}
		w.counts["lost"]++
		w.logf("%s lost token %d: %v", c.name, l.Caller.Token, l.Why)
		w.judgeLoss(c, l)
	}
	for _, done := range fx.Done {
		close(done)
	}
	for i := range fx.Cancels {
		g := fx.Cancels[i]
		w.logf("%s cancels %s", c.name, short(g.ID))
		c.cancel.Add(&g, c.local())
	}
	if fx.Check != nil {
		c.renew(fx.Check)
	}
	if fx.Renew {
		c.renew(&protocol.Renewal{Req: c.lock.Request(), At: c.local(), Touch: fx.Touch})
	}
	if fx.Send.Verb != protocol.None {
		cmd := fx.Send
		w.logf("%s does %v", c.name, told(cmd))
		c.qstep(func(q *quorum.Lock, now time.Time, qfx *quorum.Effects) {
			op := &qOp{c: c, cmd: &cmd, expire: w.now.Add(w.patienceFor(cmd.ID))}
			op.op = q.Do(&cmd, now, qfx)
			op.op.Tag = op
			w.ops = append(w.ops, op)
		})
	}
	c.flush()
	for _, x := range back {
		c.giveBack(x)
	}
}

// giveBack has a caller give the lock back, as the client does for one whose context has ended.
func (c *qClient) giveBack(x *lockstate.Caller) {
	w := c.w
	w.counts["given back at once"]++
	w.logf("%s gives back token %d", c.name, x.Token)
	w.owners.unlocks(x)
	c.step(func(now time.Time, fx *lockstate.Effects) {
		c.lock.GiveBack(x, now, fx)
		w.owners.leases[x].asked = !x.Settled
	})
}

// close closes the client, whose callers inside keep their leases until they unlock.
func (c *qClient) close() {
	if c.closed {
		return
	}
	c.w.counts["closed"]++
	c.w.logf("%s is closed", c.name)
	c.closed = true
	c.step(c.lock.Close)
}

func (c *qClient) renew(r *protocol.Renewal) {
	w := c.w
	copied := *r
	c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) {
		op := &qOp{c: c, r: &copied, expire: w.now.Add(w.patienceFor(copied.Req.ID))}
		op.op = q.Renew(&copied, now, fx)
		op.op.Tag = op
		w.ops = append(w.ops, op)
	})
}

func (c *qClient) flush() {
	w := c.w
	now := c.local()
	for i := range c.strays {
		if s := &c.strays[i]; !s.Next().After(now) && !s.Next().IsZero() && !c.isAway(i) {
			for _, g := range s.Take(now) {
				w.put(&qPacket{kind: strayPacket, c: c, server: i, g: g})
			}
		}
	}
	for batch := c.cancel.Take(now); len(batch) > 0; batch = c.cancel.Take(now) {
		for _, g := range batch {
			cool := time.Duration(0)
			if !g.Keep.IsZero() {
				cool = max(0, g.Keep.Sub(now))
			}
			c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) {
				op := &qOp{c: c, g: g, expire: w.now.Add(w.patience)}
				op.op = q.CancelRequest(&protocol.CancelRequest{Keys: &w.keys, ID: g.ID, Last: g.Last, Cooldown: cool}, now, fx)
				op.op.Tag = op
				w.ops = append(w.ops, op)
			})
		}
	}
}

// rejoins confirms the client's inboxes on the given servers. If none are given, it confirms them
// on all servers, again or, as for a new client, by one event for all.
func (c *qClient) rejoins(servers ...int) {
	if len(servers) == 0 {
		servers = c.w.rng.Perm(len(c.w.servers))
		if c.w.rng.IntN(4) == 0 {
			c.step(c.lock.Subscribed)
			return
		}
	}
	for _, i := range servers {
		c.w.counts["rejoined"]++
		c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Rejoined(i, now, fx) })
		c.flush()
	}
}

// qstep passes an event to the client's quorum and performs the effects.
func (c *qClient) qstep(event func(q *quorum.Lock, now time.Time, fx *quorum.Effects)) {
	var fx quorum.Effects
	w := c.w
	w.now = w.now.Add(time.Nanosecond) // no two events of a client come at one instant
	event(c.q, c.local(), &fx)
	for _, send := range fx.Sends {
		id, next := send.Requests()
		if id == next { // a partial grant is given back
			delete(c.heard[send.Server], send.Cmd.ID)
		}
		w.put(&qPacket{kind: requestPacket, c: c, server: send.Server, send: send, gaveUps: [2]int{w.owners.gaveUps[id], w.owners.gaveUps[next]}})
	}
	for _, stray := range fx.Strays {
		w.counts["stray"]++
		stray.ScheduleIn(&c.strays[stray.Server], nil, c.local())
	}
	for i := range fx.Messages {
		m := fx.Messages[i]
		if w.order != nil && !w.calm && w.order.IntN(2) == 0 { // another goroutine is faster
			w.counts["told late"]++
			w.wire = append(w.wire, &qPacket{kind: toldPacket, c: c, server: -1, m: m})
			continue
		}
		c.hears(&m)
	}
	for _, op := range fx.Done {
		if o, ok := op.Tag.(*qOp); ok {
			o.done()
		} else {
			defer func() { op.Tag.(*qOp).done() }() // decided at once, before its tag was set
		}
	}
}

// tellAll has the state machines learn of what other goroutines have overtaken.
func (w *qWorld) tellAll() {
	for _, p := range slices.Clone(w.wire) {
		if p.kind == toldPacket && p.c.wakeAt.IsZero() {
			w.wire = slices.DeleteFunc(w.wire, func(q *qPacket) bool { return q == p })
			w.deliver(p)
		}
	}
}

// hears passes a message of the quorum to the state machine.
func (c *qClient) hears(m *protocol.Message) {
	c.w.logf("%s is told %s of %s, token %d", c.name, m.Kind, short(m.ID), m.Token)
	c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Receive(m, now, fx) })
}

func (o *qOp) done() {
	c := o.c
	w := c.w
	w.ops = slices.DeleteFunc(w.ops, func(other *qOp) bool { return other == o })
	var fail *protocol.Failure
	if o.op.Err != nil {
		fail = redisserver.Classify(o.op.Err)
	}
	switch {
	case o.cmd != nil:
		w.logf("%s is answered %d (token %d, kept %v, gone %v) to %v: %v", c.name, o.op.Answer.Outcome, o.op.Answer.Token, o.op.Answer.Kept, o.op.Answer.Gone, told(*o.cmd), o.op.Err)
		if o.op.Err != nil {
			w.counts["no quorum"]++
		}
		if o.op.Answer.Proved {
			w.counts["proved in doubt"]++
		}
		if o.cmd.Question {
			w.counts[fmt.Sprintf("question %s, more wait %v", outcomeText(o.op.Answer.Outcome), o.op.Answer.More)]++
		}
		c.step(func(now time.Time, fx *lockstate.Effects) {
			pause := time.Duration(20+w.luck.IntN(300)) * time.Millisecond // so that even a short TTL has second tries
			if w.calm {
				pause = 2 * time.Second
			}
			c.lock.Answered(o.cmd, o.op.Answer, fail, pause, now, fx)
			if fail != nil || o.op.Answer.Outcome == protocol.Refused {
				w.owners.gaveUp(o.cmd.ID)
				if o.cmd.Verb != protocol.Yield { // whose answers may come later and grant it
					w.owners.gaveUp(o.cmd.Next)
				}
			}
		})
	case o.r != nil:
		o.r.Outcome, o.r.Clock, o.r.Err = o.op.Renewed, o.op.Clock, o.op.Err
		w.logf("%s renewed: %d %v", c.name, o.r.Outcome, o.r.Err)
		w.counts[fmt.Sprint("renewal ", o.r.Outcome)]++
		c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Renewed(o.r, now, fx) })
	default:
		if s := c.cancel.Answered(o.g, o.op.Canceled, c.local()); len(s.Callers) > 0 {
			c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Canceled(&s, now, fx) })
		}
	}
}

// excused reports whether an eviction or an accident may have taken the lock from the request.
func (c *qClient) excused(id string) bool {
	return c.w.pardoned[id] || !c.made[id].After(c.excuse) && !c.excuse.IsZero()
}

// admitted checks a caller that enters against all callers that believe they are inside.
func (w *qWorld) admitted(c *qClient, x *lockstate.Caller) {
	w.logf("%s enters with token %d, %v", c.name, x.Token, x.Via)
	w.under[x], w.entered[x] = c.lock.Request().ID, w.now
	w.leases(c, x)
	if c.excused(w.under[x]) {
		return
	}
	for _, other := range w.clients {
		if other.dead {
			continue
		}
		for _, y := range other.calls {
			if y == x || y.Phase != lockstate.Inside || other == c && (x.Mode == protocol.Shared || y.Ended == lockstate.ByLoss) {
				continue
			}
			if x.Mode == protocol.Shared && (y.Mode == protocol.Shared || w.isLowered(y)) {
				continue // the downgrade may have been carried out, with its answer under way
			}
			if y.Ended != lockstate.ByLoss && !other.excused(w.under[y]) && other.local().Before(other.lock.TrustedUntil(y, other.local())) {
				w.fail("%s enters beside %s, which has token %d", c.name, other.name, y.Token)
			}
		}
	}
	w.keepPromises(c, x)
	if x.Mode == protocol.Exclusive {
		if (x.Token <= w.top || x.Token <= w.readers) && !w.loose {
			w.fail("%s has token %d after %d, and a reader's %d", c.name, x.Token, w.top, w.readers)
		}
	} else if x.Token <= w.top && !w.loose {
		w.fail("reader %s has token %d after the writer's %d", c.name, x.Token, w.top)
	}
	if x.Mode == protocol.Exclusive {
		w.top = max(w.top, x.Token)
	} else {
		w.readers = max(w.readers, x.Token)
	}
}

// believers checks that no two clients believe that they are inside: a belief can grow long after the other
// has entered, for example by a late answer to a renewal.
func (w *qWorld) believers() {
	believes := func(c *qClient, x *lockstate.Caller) bool {
		return !c.dead && x.Phase == lockstate.Inside && x.Ended != lockstate.ByLoss && !c.excused(w.under[x]) &&
			c.local().Before(c.lock.TrustedUntil(x, c.local()))
	}
	for i, c := range w.clients {
		for _, x := range c.calls {
			if !believes(c, x) {
				continue
			}
			for _, other := range w.clients[:i] {
				for _, y := range other.calls {
					shared := (x.Mode == protocol.Shared || w.isLowered(x)) && (y.Mode == protocol.Shared || w.isLowered(y))
					if !shared && believes(other, y) {
						w.fail("%s and %s believe that they are inside, with tokens %d and %d", c.name, other.name, x.Token, y.Token)
					}
				}
			}
		}
	}
}

// deliver lets a packet arrive.
func (w *qWorld) deliver(p *qPacket) {
	if p.kind == toldPacket {
		if !p.c.dead {
			p.c.hears(&p.m)
		}
		return
	}
	s := w.servers[p.server]
	if p.kind == forcePacket {
		w.forced(p)
		return
	}
	lost := func(percent int) bool { return !p.c.reach[p.server] || !w.calm && w.rng.IntN(100) < percent }
	switch p.kind {
	case requestPacket:
		if !p.c.reach[p.server] {
			w.silent(p)
			return
		}
		w.owners.carries(p)
		res := s.execute(p.send)
		w.observe(s)
		if w.trace {
			w.logf("  server %d: %s %s: %d, token %d, young %v, renewed %d", p.server+1, p.c.name, sentTo(p.send), res.Answer.Outcome, res.Answer.Token, res.Young, res.Renewed)
		}
		if p.twin && p.send.Kind == quorum.Do && p.send.Cmd.Verb == protocol.Acquire {
			w.twins[p.send.Cmd.ID] = true
		}
		if p.copied {
			return
		}
		if w.rng.IntN(100) < 2 && !w.calm { // a late copy
			c := *p
			c.copied, c.twin = true, true
			w.put(&c)
		}
		w.put(&qPacket{kind: replyPacket, c: p.c, server: p.server, send: p.send, res: res, sent: p.sent})
	case replyPacket:
		if lost(3) {
			w.silent(p)
			return
		}
		w.answer(p, p.res)
	case messagePacket:
		if !lost(3) && !p.c.dead {
			if p.m.Kind == protocol.MessageGranted {
				p.c.owns(p.server, p.m.ID)
			}
			p.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Receive(p.server, &p.m, now, fx) })
			if p.m.Kind == protocol.MessageRevoked {
				w.hears(p)
			}
		}
	case strayPacket:
		if p.c.dead {
			return
		}
		res := protocol.Canceled{Fail: noAnswer}
		if !lost(3) {
			w.owners.seq++
			w.owners.givesBack(p.server, p.g.ID)
			if err := s.refuses(false); err != nil {
				p.c.strays[p.server].Answered(p.g, protocol.Canceled{Fail: redisserver.Classify(err)}, p.c.local())
				return
			}
			res = s.srv.Cancel(context.Background(), []protocol.CancelRequest{{Keys: &w.keys, ID: p.g.ID, Last: p.g.Last}})[0]
			w.observe(s)
			w.logf("  server %d: %s stray %v: %v", p.server+1, p.c.name, short(p.g.ID), res.Owned)
			if lost(3) {
				res = protocol.Canceled{Fail: noAnswer}
			}
		}
		p.c.strays[p.server].Answered(p.g, res, p.c.local())
	}
}

// silent ends a command that gets no answer.
func (w *qWorld) silent(p *qPacket) {
	if p.copied {
		return
	}
	p.copied = true
	p.c.hurt[p.server] = w.now
	if w.rng.IntN(2) == 0 {
		p.c.away[p.server] = w.now.Add(time.Duration(w.rng.Int64N(int64(time.Second))))
	}
	w.answer(p, quorum.Result{Fail: noAnswer, Canceled: protocol.Canceled{Fail: noAnswer}})
}

// owns notes when the client first heard that it is the owner on a server under an id. It does not count
// what it hears after it has given the id back there, as when it takes another place in the queue.
func (c *qClient) owns(server int, id string) {
	if _, ok := c.heard[server][id]; !ok && c.q.Has(id, server) {
		c.heard[server][id] = c.w.now
	}
}

var noAnswer = &protocol.Failure{Err: context.DeadlineExceeded, Kind: protocol.NoAnswer}

func (w *qWorld) answer(p *qPacket, res quorum.Result) {
	if !p.c.dead {
		if p.send.Kind == quorum.Do && res.Answer.Outcome == protocol.Granted {
			id := p.send.Cmd.ID
			if p.send.Cmd.Next != "" {
				id = p.send.Cmd.Next
			}
			p.c.owns(p.server, id)
		}
		p.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Answered(p.send, res, now, fx) })
	}
}

// sentTo formats a command for the log.
func sentTo(s *quorum.Send) string {
	switch s.Kind {
	case quorum.Cancel:
		return "cancel " + short(s.Cancel.ID).String()
	case quorum.Renew:
		return "renew " + short(s.Renew.Req.ID).String()
	case quorum.Adopt:
		return "adopt " + short(s.Cmd.ID).String()
	}
	return told(s.Cmd).String()
}

func (s *qServer) execute(send *quorum.Send) (res quorum.Result) {
	ctx := context.Background()
	needsMemory := send.Kind == quorum.Adopt || send.Kind == quorum.Do && send.Cmd.Verb == protocol.Acquire && send.Cmd.First
	if err := s.refuses(needsMemory); err != nil {
		s.w.counts["refused"]++
		s.hurtsAll()
		fail := redisserver.Classify(err)
		return quorum.Result{Fail: fail, Canceled: protocol.Canceled{Fail: fail}, Renewed: protocol.Unanswered}
	}
	var err error
	switch send.Kind {
	case quorum.Do:
		cmd := send.Cmd
		res.Answer, err = s.srv.Do(ctx, send.Keys, &cmd)
		res.Fail = redisserver.Classify(err)
		res.Young = s.young(res.Answer.Clock, res.Answer.Mark)
		if res.Answer.Mark != 0 {
			res.VoteClock = res.Answer.Mark + uint64(s.w.quarantine.Microseconds())
		}
	case quorum.Adopt:
		s.w.counts["token written back"]++
		res.Answer, err = s.srv.Adopt(ctx, send.Keys, send.Cmd.ID, send.Token)
		res.Fail = redisserver.Classify(err)
	case quorum.Cancel:
		res.Canceled = s.srv.Cancel(ctx, []protocol.CancelRequest{send.Cancel})[0]
		res.Fail = res.Canceled.Fail
		res.Young = s.young(res.Canceled.Clock, res.Canceled.Mark)
	case quorum.Renew:
		batch := []protocol.Renewal{send.Renew}
		s.srv.Renew(ctx, batch)
		res = quorum.Result{Renewed: batch[0].Outcome, Clock: batch[0].Clock, Fail: redisserver.Classify(batch[0].Err)}
		if err := s.srv.Touch(ctx, batch); err != nil {
			s.w.fail("server %d: %v", s.i+1, err)
		}
	}
	if res.Fail != nil {
		s.w.fail("server %d: %v", s.i+1, res.Fail.Err)
	}
	return res
}

// young returns for how much longer the server is in quarantine.
func (s *qServer) young(clock, mark uint64) time.Duration {
	if mark == 0 || clock == 0 {
		return 0
	}
	age := time.Duration(int64(clock)-int64(mark)) * time.Microsecond
	return max(0, min(s.w.quarantine, s.w.quarantine-age))
}

// advance moves time forward by d, ringing all alarms on the way. In calm, it returns early if
// there is something on the wire.
func (w *qWorld) advance(d time.Duration) {
	if d > time.Millisecond { // no goroutine waits for the processor that long
		w.tellAll()
	}
	end := w.now.Add(d)
	for range 3000 {
		next := end
		consider := func(t time.Time) {
			if !t.IsZero() && t.Before(next) {
				next = t
			}
		}
		for _, c := range w.clients {
			switch {
			case c.dead:
			case !c.wakeAt.IsZero():
				consider(c.wakeAt)
			default:
				consider(c.due())
			}
		}
		for _, o := range w.ops {
			if o.c.wakeAt.IsZero() {
				consider(o.expire)
			}
		}
		for _, p := range w.wire {
			if p.times() {
				consider(p.sent.Add(commandTimeout))
			}
		}
		if next.After(w.now) {
			w.now = next
			w.setTime()
		}
		rang := w.ring()
		if w.calm && len(w.wire) > 0 {
			return
		}
		if !rang && !w.now.Before(end) || w.failure != "" {
			return
		}
	}
	w.fail("alarms do not come to rest")
}

// times reports whether the packet belongs to a command that can still time out.
func (p *qPacket) times() bool {
	return !p.copied && (p.kind == requestPacket || p.kind == replyPacket) && p.c.wakeAt.IsZero()
}

// due returns when the client next has something to do, in the world's time.
func (c *qClient) due() (due time.Time) {
	consider := func(t time.Time) {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	consider(c.lock.Due().Time(c.Start()))
	consider(c.q.Due())
	consider(c.cancel.Next())
	for i := range c.strays {
		if c.reach[i] && !c.w.now.Before(c.away[i]) {
			consider(c.strays[i].Next())
		}
	}
	return c.world(due)
}

// ring does everything that is due. It reports whether there was anything.
func (w *qWorld) ring() bool {
	rang := false
	for _, c := range w.clients {
		if c.dead {
			continue
		}
		if !c.wakeAt.IsZero() {
			if w.now.Before(c.wakeAt) {
				continue
			}
			w.logf("%s goes on", c.name)
			c.wakeAt, rang = time.Time{}, true
			for i := range c.hurt {
				c.hurt[i] = w.now
			}
			if w.idles && w.inside(c, lockstate.Waiting) == 0 && w.luck.IntN(2) == 0 { // who comes before any timer has rung
				w.counts["caller after a pause"]++
				c.enter(protocol.Exclusive, false)
			}
		}
		now := c.local()
		is := func(due time.Time) bool { return !due.IsZero() && !due.After(now) }
		if is(c.lock.Due().Time(c.Start())) {
			rang = true
			c.step(c.lock.Tick)
			if w.idles && !w.calm && c.renewsIdle() && w.luck.IntN(4) == 0 { // the answer finds another lease, or none
				ttl := w.ttls[len(w.ttls)-1]
				w.standStill(c, ttl/2+time.Duration(w.luck.Int64N(int64(ttl))))
				continue
			}
		}
		if is(c.q.Due()) {
			rang = true
			w.counts["looked at partial grants"]++
			c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Tick(now, fx) })
		}
		swept := false
		for i := range c.strays {
			swept = swept || c.reach[i] && is(c.strays[i].Next())
		}
		if is(c.cancel.Next()) || swept {
			rang = rang || is(c.cancel.Next())
			c.flush()
		}
	}
	for _, o := range slices.Clone(w.ops) {
		if o.expire.After(w.now) || o.op.Decided() || o.c.dead || !o.c.wakeAt.IsZero() {
			continue
		}
		rang = true
		for _, p := range w.wire {
			if p.c == o.c && (p.kind == requestPacket || p.kind == replyPacket) {
				p.c.hurt[p.server] = w.now
			}
		}
		o.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Expire(o.op, now, fx) })
		if !o.op.Decided() {
			w.fail("an op is not decided when its patience is over")
		}
	}
	for _, p := range slices.Clone(w.wire) {
		if p.times() && w.now.Sub(p.sent) >= commandTimeout {
			rang = true
			if p.kind == replyPacket {
				w.wire = slices.DeleteFunc(w.wire, func(q *qPacket) bool { return q == p })
			}
			w.silent(p)
		}
	}
	return rang
}

const (
	commandTimeout = 2 * time.Second // protocol.CommandTimeout
	minPatience    = 500 * time.Millisecond
	maxPatience    = 2 * (commandTimeout - 200*time.Millisecond)
)

// patienceFor returns for how long a decision about the request waits for answers.
func (w *qWorld) patienceFor(id string) time.Duration {
	who, _ := protocol.ParseID(id)
	return max(20*time.Millisecond, min(who.TTL/10, w.patience))
}

// renewsIdle reports whether the client has sent a renewal of a lock that it keeps idle.
func (c *qClient) renewsIdle() bool {
	return c.w.inside(c, lockstate.Inside)+c.w.inside(c, lockstate.Waiting) == 0 &&
		slices.ContainsFunc(c.w.ops, func(o *qOp) bool { return o.c == c && o.r != nil && !o.op.Decided() })
}

func (c *qClient) enter(mode protocol.Mode, try bool) *lockstate.Caller {
	w := c.w
	ttl := w.ttls[w.rng.IntN(len(w.ttls))]
	x := &lockstate.Caller{Mode: mode, Try: try, Opts: &lockstate.Terms{TTL: ttl, Handoffs: 3, Tenure: 10 * time.Millisecond}}
	if w.rng.IntN(5) == 0 {
		x.Opts.IdleHold = 100 * time.Millisecond
	}
	if w.idles && !w.calm && w.luck.IntN(3) > 0 {
		x.Opts.IdleHold = 3 * ttl // it is renewed while it is idle
	}
	if w.has[qMinHolds] && !w.calm && w.rng.IntN(3) == 0 {
		x.Opts.MinHold = time.Duration(1+w.rng.IntN(800)) * time.Millisecond
	}
	c.calls = slices.DeleteFunc(c.calls, func(x *lockstate.Caller) bool { return x.Phase != lockstate.Waiting && x.Phase != lockstate.Inside })
	c.calls = append(c.calls, x)
	c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Enter(x, now, fx) })
	return x
}

// leave unlocks x's lease.
func (c *qClient) leave(x *lockstate.Caller) {
	w := c.w
	w.logf("%s unlocks token %d", c.name, x.Token)
	if x.Opts.MinHold > 0 && x.Mode == protocol.Exclusive && x.Ended == lockstate.NotYet && !w.isLowered(x) {
		w.promises = append(w.promises, qPromise{c: c, x: x, at: w.now, until: w.entered[x].Add(x.Opts.MinHold), id: w.under[x]})
	}
	w.owners.unlocks(x)
	c.step(func(now time.Time, fx *lockstate.Effects) {
		c.lock.Leave(x, now, fx)
		w.owners.leases[x].asked = !x.Settled
	})
}

// act does one thing at random.
func (w *qWorld) act(readers bool) {
	c := w.clients[w.rng.IntN(len(w.clients))]
	if c.dead || !c.wakeAt.IsZero() {
		return
	}
	if w.doubts && w.luck.IntN(100) < 40 {
		w.doubt(c)
		return
	}
	if w.closes && w.ends.IntN(30) == 0 {
		c.close()
		return
	}
	switch w.rng.IntN(14) {
	case 0, 1, 2, 3:
		if n := w.inside(c, lockstate.Waiting); n < 2 && !c.closed {
			mode := protocol.Exclusive
			if readers && w.rng.IntN(2) == 0 {
				mode = protocol.Shared
			}
			c.enter(mode, w.rng.IntN(6) == 0)
		}
	case 4, 5, 6, 7:
		for _, x := range c.calls {
			if x.Phase == lockstate.Inside {
				c.leave(x)
				break
			}
		}
	case 8:
		for _, x := range c.calls {
			if x.Phase == lockstate.Waiting {
				c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Abandon(x, now, fx) })
				break
			}
		}
	case 9:
		if w.has[qPartitions] {
			i := w.rng.IntN(len(w.servers))
			c.reach[i] = !c.reach[i]
			c.hurt[i] = w.now
			w.logf("%s reaches server %d: %v", c.name, i+1, c.reach[i])
		}
	case 10:
		for i := range c.reach {
			c.reach[i] = true
		}
		c.rejoins()
	case 11, 12:
		w.strike(c)
	case 13:
		if readers {
			for _, x := range c.calls {
				if x.Phase == lockstate.Inside && x.Mode == protocol.Exclusive {
					w.lowered[x] = x.Token
					w.owners.lowers(x)
					done := make(chan struct{})
					w.downgrades = append(w.downgrades, done)
					c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Downgrade(x, done, now, fx) })
					if w.luck.IntN(4) == 0 { // it unlocks before a second try, or after one
						w.luckless(c, x)
					}
					break
				}
			}
		}
	}
}

func (w *qWorld) inside(c *qClient, phase lockstate.Phase) (n int) {
	for _, x := range c.calls {
		if x.Phase == phase {
			n++
		}
	}
	return n
}

// some delivers one of the packets under way that can arrive now.
func (w *qWorld) some() {
	at, n := -1, 0
	any := w.rng.IntN(100) < w.lazy
	for i, p := range w.wire {
		if p.ready.After(w.now) || p.kind != requestPacket && p.kind != forcePacket && !p.c.wakeAt.IsZero() {
			continue
		}
		if n++; n == 1 || any && w.rng.IntN(n) == 0 {
			at = i
		}
		if !any {
			break
		}
	}
	if at < 0 {
		return
	}
	p := w.wire[at]
	w.wire = slices.Delete(w.wire, at, at+1)
	w.deliver(p)
}

func (w *qWorld) run(seed int64, readers bool) {
	w.begin(seed)
	w.ran++
	for range 150 + w.rng.IntN(150) {
		switch w.rng.IntN(10) {
		case 0, 1:
			w.act(readers)
		case 2:
			d := []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, 600 * time.Millisecond}[w.rng.IntN(4)]
			w.advance(d)
		default:
			w.some()
		}
		w.judgeChecks()
		if w.believers(); w.failure != "" {
			return
		}
	}
	w.settle()
}

// until lets things happen in calm until done returns true, or longest has passed. Whoever is
// inside unlocks. It reports false if it ran out of time.
func (w *qWorld) until(longest time.Duration, done func() bool) bool {
	for end := w.now.Add(longest); w.failure == ""; {
		for n := 0; len(w.wire) > 0 && w.failure == ""; n++ {
			if n == 5000 { // a lock asks without a pause
				w.fail("packets do not come to rest")
				break
			}
			p := w.wire[0]
			w.wire = w.wire[1:]
			w.deliver(p)
		}
		w.judgeChecks()
		if w.believers(); done() {
			return true
		}
		if !w.now.Before(end) {
			return false
		}
		for _, c := range w.clients {
			for _, x := range c.calls {
				if x.Phase == lockstate.Inside && !c.dead {
					c.leave(x)
				}
			}
		}
		if len(w.wire) == 0 {
			w.advance(50 * time.Millisecond)
		}
	}
	return true
}

// settle lets everything come to rest. Then each client must get the lock, and nothing may be left.
func (w *qWorld) settle() {
	w.calm = true
	w.logf("calm")
	for _, s := range w.servers {
		s.refusesTill = time.Time{}
	}
	for _, c := range w.clients {
		if c.dead {
			continue
		}
		for i := range c.hurt {
			if !c.wakeAt.IsZero() {
				c.hurt[i] = w.now
			}
		}
		c.wakeAt = time.Time{}
		for i := range c.reach {
			c.reach[i], c.proofs[i] = true, protocol.Counted
		}
	}
	for _, c := range w.clients {
		if !c.dead {
			c.subscribed()
			c.rejoins()
		}
	}
	long := 3*(w.quarantine+w.ttls[len(w.ttls)-1]) + 10*time.Second
	if w.luck.IntN(2) == 0 {
		w.limps(long)
	}
	if !w.until(long, func() bool {
		for _, c := range w.clients {
			if !c.dead && w.inside(c, lockstate.Waiting)+w.inside(c, lockstate.Inside) > 0 {
				return false
			}
		}
		return len(w.ops) == 0
	}) {
		w.fail("somebody still waits")
	}
	w.each(long)
	w.until(3*time.Second, func() bool { return false })
	w.each(long) // the clients find what a late copy has left behind a foreign owner
	w.until(time.Second, func() bool { return false })
	if w.twinsOwn() {
		w.until(2*w.ttls[len(w.ttls)-1], func() bool { return false })
	}
	w.nothingOwned()
	w.enterAtOnce()
	if !w.until(10*time.Minute, func() bool { return w.idle() }) {
		w.fail("somebody still has something to do")
	}
	w.nothingLeft()
}

// each makes each client get the lock in calm.
func (w *qWorld) each(long time.Duration) {
	for _, c := range w.clients {
		if w.failure != "" || c.dead || c.closed {
			continue
		}
		x := c.enter(w.anyMode(), false)
		if !w.until(long, func() bool { return x.Phase != lockstate.Waiting && x.Phase != lockstate.Inside }) {
			w.fail("%s does not get a free lock", c.name)
		}
		if w.entered[x].IsZero() {
			w.fail("%s does not enter: %v", c.name, x.Outcome())
		}
		if !w.until(10*time.Second, func() bool { return x.Settled }) {
			w.fail("the Unlock of %s has no end", c.name)
		}
		w.until(time.Second, func() bool { return len(w.ops) == 0 })
		// The lease may be that of an idle grant, whose eviction was not heard of, or which has lost a vote:
		// then judgeLoss decides.
		id := w.under[x]
		made, known := c.made[id]
		judged := known && x.Ended == lockstate.ByLoss && w.faultSince(made)
		if x.Outcome() != nil && !c.excused(id) && !judged {
			w.fail("%s unlocks in calm: %v", c.name, x.Outcome())
		}
	}
}

// quorumEvents are the events that so many schedules must reach, each at least once. In practice, each is
// reached some twenty times in that many. Fewer schedules need not reach any.
var quorumEvents = map[int][]string{
	30: {
		"entered, direct", "entered, free", "entered, local", "entered at once in calm", "looked at partial grants", "lost", "no quorum",
		"proved", "proved in doubt", "refused", "rejoined", "renewal 0", "silence", "stray", "token written back",
		"without a minority, entered within 100 ms",
	},
	1000: {
		"bounce", "check", "closed", "death", "entered, idle", "entered, recheck", "error", "eviction", "eviction while asked", "force", "forced",
		"foreign", "given back at once", "jump", "letter", "long", "mark", "min hold", "partition", "pause", "rate", "renewal 1", "renewal 4", "restart",
		"rolling", "slow", "told late", "unheard eviction", "without a minority, all entered within 1 s",
	},
	10000: {"a check says that it is ours"},
}

func TestQuorumSimulation(t *testing.T) {
	redistest.Needs64Bits(t)
	seeds := *quorumSeeds
	if seeds == 0 {
		seeds = 32
		if race.Enabled {
			seeds = 6
		}
	}
	for _, n := range []int{3, 5, 7} {
		for _, readers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d servers, readers %v", n, readers), func(t *testing.T) {
				w := newQWorld(t, n)
				defer w.close()
				last, end := *quorumFirst+int64(max(1, seeds*3/(n*(n-2)))), time.Now().Add(*quorumFor)
				for seed := *quorumFirst; *quorumFor == 0 && seed < last || time.Now().Before(end); seed++ {
					w.trace = *quorumTrace
					w.run(seed, readers)
					if w.trace {
						t.Log("\n" + strings.Join(w.log, "\n"))
					}
					if failure := w.failure; failure != "" {
						w.trace = true
						w.run(seed, readers)
						tail := w.log[max(0, len(w.log)-120):]
						t.Fatalf("seed %d (-quorum.first=%d -quorum.seeds=1): %s\n%s", seed, seed, failure, strings.Join(tail, "\n"))
					}
				}
				t.Logf("%d schedules: %v", w.ran, w.counts)
				for least, events := range quorumEvents {
					for _, event := range events {
						if w.ran >= least && w.counts[event] == 0 {
							t.Errorf("%d schedules never reached: %s", w.ran, event)
						}
					}
				}
			})
		}
	}
}
