package simulation

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
)

// The simulation of a quorum: the state machines of some clients, internal/quorum's
// decisions, and the real scripts on several embedded servers, each with its clock. Between
// them a network that loses, delays and repeats, and that lets some clients reach some
// servers only; servers that restart without their data, and clocks that are set.

var quorumSeeds = flag.Int("quorum.seeds", 24, "schedules of TestQuorumSimulation on three servers, and a fifth of that on five")
var quorumFirst = flag.Int64("quorum.first", 1, "first seed of TestQuorumSimulation")
var quorumTrace = flag.Bool("quorum.trace", false, "print each schedule")

type qServer struct {
	w      *qWorld
	i      int
	mini   *miniredis.Miniredis
	sim    *simServer
	rdb    *redis.Client
	srv    *redisserver.Server
	offset time.Duration
}

type qPacket struct {
	kind   string // request, reply, message
	c      *qClient
	server int
	send   *quorum.Send
	res    quorum.Result
	m      protocol.Message
	copied bool
	sent   time.Time
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
	lock   lockstate.Lock
	q      *quorum.Lock
	cancel lockstate.CancelSchedule
	calls  []*lockstate.Caller
	reach  []bool
	dead   bool
}

type qWorld struct {
	t       testing.TB
	rng     *rand.Rand
	now     time.Time
	servers []*qServer
	clients []*qClient
	wire    []*qPacket
	ops     []*qOp
	keys    protocol.Keys
	log     []string
	failure string
	top     uint64
	readers uint64 // greatest token of a reader
	calm    bool
	lowered map[*lockstate.Caller]bool // who asked for a downgrade
	restart time.Time                  // when a server last lost its data
	counts  map[string]int
	lazy    int
}

const qQuarantine = 3 * time.Second

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
		s.srv = redisserver.NewMember(s.rdb, "")
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

func (w *qWorld) logf(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%8v  ", w.now.Sub(simEpoch))+fmt.Sprintf(format, args...))
}

func (w *qWorld) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.failure)
	}
}

func (w *qWorld) setTime() {
	for _, s := range w.servers {
		s.mini.SetTime(w.now.Add(s.offset))
	}
}

func (w *qWorld) begin(seed int64) {
	w.rng = rand.New(rand.NewPCG(uint64(seed), 7))
	w.now = simEpoch
	w.wire, w.ops, w.log, w.failure, w.top, w.readers, w.calm = nil, nil, nil, "", 0, 0, false
	w.restart, w.lowered = time.Time{}, map[*lockstate.Caller]bool{}
	w.lazy = []int{0, 30, 70, 95}[w.rng.IntN(4)]
	skew := []time.Duration{0, 0, time.Millisecond, 300 * time.Millisecond, 3 * time.Second}[w.rng.IntN(5)]
	for _, s := range w.servers {
		s.offset = time.Duration(w.rng.Float64() * float64(skew))
		s.mini.FlushAll()
	}
	w.setTime()
	for _, s := range w.servers {
		_ = s.mini.Set("leased:quorum:mark", "1")
	}
	w.clients = nil
	for i := range 2 + w.rng.IntN(3) {
		c := &qClient{w: w, name: string(rune('A' + i)), reach: make([]bool, len(w.servers))}
		c.id = strings.Repeat(c.name, 16) + ":sim"
		for i := range c.reach {
			c.reach[i] = true
		}
		c.lock.Init(c)
		cfg := &quorum.Config{N: len(w.servers), Need: quorum.Majority(len(w.servers)),
			NewID:  func(like protocol.Identity) string { return c.newID(like.Mode, like.TTL, like.Idles) },
			Proof:  func(int) protocol.Proof { return protocol.Counted },
			Ticket: func() uint64 { return uint64(w.now.UnixMicro() + w.rng.Int64N(2000)) },
			Away:   func(i int) bool { return !c.reach[i] && w.rng.IntN(2) == 0 },
		}
		c.q = quorum.NewLock(cfg, &w.keys)
		w.clients = append(w.clients, c)
	}
}

func (c *qClient) newID(m protocol.Mode, ttl time.Duration, idles bool) string {
	flag := "c"
	if idles {
		flag += "i"
	}
	return fmt.Sprintf("leased1:%c:%d:%s:%s:%s", m, ttl.Milliseconds(), flag, randomText(c.w.rng), c.id)
}

func (c *qClient) NewRequest(m protocol.Mode, ttl time.Duration, idles bool, _ protocol.Origin) protocol.Request {
	req, err := protocol.RequestOf(c.newID(m, ttl, idles))
	if err != nil {
		panic(err)
	}
	return req
}
func (c *qClient) Jitter() float64    { return c.w.rng.Float64() }
func (c *qClient) HasInbox() bool     { return true }
func (c *qClient) InboxPending() bool { return false }
func (c *qClient) Start() time.Time   { return simEpoch }

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
	w.put(&qPacket{kind: "message", c: c, server: s.i, m: m})
	p.WriteInt(1)
	return true
}

func (w *qWorld) put(p *qPacket) {
	p.sent = w.now
	w.wire = append(w.wire, p)
}

// step gives a client's state machine an event.
func (c *qClient) step(event func(now time.Time, fx *lockstate.Effects)) {
	var fx lockstate.Effects
	event(c.w.now, &fx)
	c.perform(&fx)
}

func (c *qClient) perform(fx *lockstate.Effects) {
	w := c.w
	for x := fx.Woken; x != nil; x = x.Then {
		if x.Entered {
			w.counts["entered, "+x.Via.String()]++
			w.admitted(c, x)
		}
	}
	for _, l := range fx.Ended {
		w.counts["lost"]++
		w.logf("%s lost token %d: %v", c.name, l.Caller.Token, l.Why)
	}
	for _, done := range fx.Done {
		close(done)
	}
	for i := range fx.Cancels {
		g := fx.Cancels[i]
		w.logf("%s cancels %s", c.name, short(g.ID))
		c.cancel.Add(&g, w.now)
	}
	if fx.Check != nil {
		c.renew(fx.Check)
	}
	if fx.Renew {
		c.renew(&protocol.Renewal{Req: c.lock.Request(), At: w.now})
	}
	if fx.Send.Verb != protocol.None {
		cmd := fx.Send
		w.logf("%s does %v", c.name, told(cmd))
		c.qstep(func(q *quorum.Lock, now time.Time, qfx *quorum.Effects) {
			op := &qOp{c: c, cmd: &cmd, expire: now.Add(50 * time.Millisecond)}
			op.op = q.Do(&cmd, now, qfx)
			op.op.Tag = op
			w.ops = append(w.ops, op)
		})
	}
	c.flush()
}

func (c *qClient) renew(r *protocol.Renewal) {
	w := c.w
	copied := *r
	c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) {
		op := &qOp{c: c, r: &copied, expire: now.Add(50 * time.Millisecond)}
		op.op = q.Renew(&copied, now, fx)
		op.op.Tag = op
		w.ops = append(w.ops, op)
	})
}

func (c *qClient) flush() {
	w := c.w
	for batch := c.cancel.Take(w.now); len(batch) > 0; batch = c.cancel.Take(w.now) {
		for _, g := range batch {
			c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) {
				op := &qOp{c: c, g: g, expire: now.Add(50 * time.Millisecond)}
				op.op = q.CancelRequest(&protocol.CancelRequest{Keys: &w.keys, ID: g.ID, Last: g.Last}, now, fx)
				op.op.Tag = op
				w.ops = append(w.ops, op)
			})
		}
	}
}

// qstep gives a client's quorum an event.
func (c *qClient) qstep(event func(q *quorum.Lock, now time.Time, fx *quorum.Effects)) {
	var fx quorum.Effects
	w := c.w
	event(c.q, w.now, &fx)
	for _, send := range fx.Sends {
		w.put(&qPacket{kind: "request", c: c, server: send.Server, send: send})
	}
	for _, stray := range fx.Strays {
		if w.rng.IntN(3) > 0 && c.reach[stray.Server] {
			w.servers[stray.Server].srv.Cancel(context.Background(), []protocol.CancelRequest{{Keys: &w.keys, ID: stray.ID, Last: stray.Last}})
		}
	}
	for i := range fx.Messages {
		m := fx.Messages[i]
		w.logf("%s is told %s of %s, token %d", c.name, m.Kind, short(m.ID), m.Token)
		c.step(func(now time.Time, lfx *lockstate.Effects) { c.lock.Receive(&m, now, lfx) })
	}
	for _, op := range fx.Done {
		if o, ok := op.Tag.(*qOp); ok {
			o.done()
		} else {
			w.t.Helper()
			defer func() { op.Tag.(*qOp).done() }() // decided at once: its tag comes after this
		}
	}
}

func (o *qOp) done() {
	c := o.c
	w := c.w
	for i, other := range w.ops {
		if other == o {
			w.ops = append(w.ops[:i], w.ops[i+1:]...)
			break
		}
	}
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
		c.step(func(now time.Time, fx *lockstate.Effects) {
			c.lock.Answered(o.cmd, o.op.Answer, fail, 300*time.Millisecond, now, fx)
		})
	case o.r != nil:
		o.r.Outcome, o.r.Clock, o.r.Err = o.op.Renewed, o.op.Clock, o.op.Err
		w.logf("%s renewed: %d %v", c.name, o.r.Outcome, o.r.Err)
		w.counts[fmt.Sprint("renewal ", o.r.Outcome)]++
		c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Renewed(o.r, now, fx) })
	default:
		if s := c.cancel.Answered(o.g, o.op.Cancelled, w.now); len(s.Callers) > 0 {
			c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Cancelled(&s, now, fx) })
		}
	}
}

// admitted checks a caller that enters against all that believe to be inside.
func (w *qWorld) admitted(c *qClient, x *lockstate.Caller) {
	w.logf("%s enters with token %d, %v", c.name, x.Token, x.Via)
	for _, other := range w.clients {
		if other.dead {
			continue
		}
		for _, y := range other.calls {
			if y == x || y.Phase != lockstate.Inside || other == c && (x.Mode == protocol.Shared || y.Ended == lockstate.ByLoss) {
				continue
			}
			if x.Mode == protocol.Shared && (y.Mode == protocol.Shared || w.lowered[y]) {
				continue // a downgrade may have been done whose answer is under way
			}
			if y.Ended == lockstate.NotYet && w.now.Before(other.lock.TrustedUntil(y, w.now)) {
				w.fail("%s enters beside %s, which has token %d", c.name, other.name, y.Token)
			}
		}
	}
	if x.Mode == protocol.Exclusive {
		if x.Token <= w.top || x.Token <= w.readers {
			w.fail("%s has token %d after %d, and a reader's %d", c.name, x.Token, w.top, w.readers)
		}
		w.top = max(w.top, x.Token)
	} else {
		if x.Token <= w.top {
			w.fail("reader %s has token %d after the writer's %d", c.name, x.Token, w.top)
		}
		w.readers = max(w.readers, x.Token)
	}
}

// deliver carries a packet out.
func (w *qWorld) deliver(p *qPacket) {
	s := w.servers[p.server]
	switch p.kind {
	case "request":
		if !p.c.reach[p.server] {
			if !p.copied {
				w.answer(p, quorum.Result{Fail: noAnswer, Cancelled: protocol.Cancelled{Fail: noAnswer}})
			}
			return
		}
		res := s.execute(p.send)
		w.logf("  server %d: %s %s: %d, token %d, young %v, renewed %d", p.server+1, p.c.name, sentTo(p.send), res.Answer.Outcome, res.Answer.Token, res.Young, res.Renewed)
		if p.copied {
			return
		}
		if w.rng.IntN(100) < 2 && !w.calm { // a late copy
			c := *p
			c.copied = true
			w.put(&c)
		}
		w.put(&qPacket{kind: "reply", c: p.c, server: p.server, send: p.send, res: res})
	case "reply":
		res := p.res
		if !p.c.reach[p.server] || !w.calm && w.rng.IntN(100) < 3 {
			res = quorum.Result{Fail: noAnswer, Cancelled: protocol.Cancelled{Fail: noAnswer}}
		}
		w.answer(p, res)
	case "message":
		if p.c.reach[p.server] && (w.calm || w.rng.IntN(100) >= 3) && !p.c.dead {
			p.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Receive(p.server, &p.m, now, fx) })
		}
	}
}

var noAnswer = &protocol.Failure{Err: context.DeadlineExceeded, Kind: protocol.NoAnswer}

func (w *qWorld) answer(p *qPacket, res quorum.Result) {
	if !p.c.dead {
		p.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Answered(p.send, res, now, fx) })
	}
}

// sentTo is a command for a server in a log.
func sentTo(s *quorum.Send) string {
	switch s.Kind {
	case quorum.Cancel:
		return "cancel " + short(s.Cancel.ID).String()
	case quorum.Renew:
		return "renew " + short(s.Renew.Req.ID).String()
	case quorum.Adopt:
		return "adopt " + short(s.ID).String()
	}
	return told(s.Cmd).String()
}

func (s *qServer) execute(send *quorum.Send) (res quorum.Result) {
	ctx := context.Background()
	var err error
	switch send.Kind {
	case quorum.Do:
		cmd := send.Cmd
		res.Answer, err = s.srv.Do(ctx, send.Keys, &cmd)
		res.Fail = redisserver.Classify(err)
		if a := &res.Answer; a.Mark != 0 && a.Clock != 0 {
			age := time.Duration(int64(a.Clock)-int64(a.Mark)) * time.Microsecond
			res.Young = max(0, min(qQuarantine, qQuarantine-age))
		}
	case quorum.Adopt:
		s.w.counts["token written back"]++
		res.Answer, err = s.srv.Adopt(ctx, send.Keys, send.ID, send.Token)
		res.Fail = redisserver.Classify(err)
	case quorum.Cancel:
		res.Cancelled = s.srv.Cancel(ctx, []protocol.CancelRequest{send.Cancel})[0]
		res.Fail = res.Cancelled.Fail
	case quorum.Renew:
		batch := []protocol.Renewal{send.Renew}
		s.srv.Renew(ctx, batch)
		res = quorum.Result{Renewed: batch[0].Outcome, Clock: batch[0].Clock, Fail: redisserver.Classify(batch[0].Err)}
	}
	if res.Fail != nil {
		s.w.fail("server %d: %v", s.i+1, res.Fail.Err)
	}
	return res
}

// advance moves time to the next alarm, by d at most.
func (w *qWorld) advance(d time.Duration) {
	end := w.now.Add(d)
	for range 3000 {
		next := end
		consider := func(t time.Time) {
			if !t.IsZero() && t.Before(next) {
				next = t
			}
		}
		for _, c := range w.clients {
			if !c.dead {
				consider(c.lock.Due().Time(c.Start()))
				consider(c.q.Due())
				consider(c.cancel.Next())
			}
		}
		for _, o := range w.ops {
			consider(o.expire)
		}
		if next.After(w.now) {
			w.now = next
			w.setTime()
		}
		rang := false
		for _, c := range w.clients {
			if c.dead {
				continue
			}
			if due := c.lock.Due().Time(c.Start()); !due.IsZero() && !due.After(w.now) {
				rang = true
				c.step(c.lock.Tick)
			}
			if due := c.q.Due(); !due.IsZero() && !due.After(w.now) {
				rang = true
				w.counts["looked at partial grants"]++
				c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Tick(now, fx) })
			}
			if due := c.cancel.Next(); !due.IsZero() && !due.After(w.now) {
				rang = true
				c.flush()
			}
		}
		for _, o := range append([]*qOp(nil), w.ops...) {
			if !o.expire.After(w.now) && !o.op.Decided() && !o.c.dead {
				rang = true
				o.c.qstep(func(q *quorum.Lock, now time.Time, fx *quorum.Effects) { q.Expire(o.op, now, fx) })
				if !o.op.Decided() {
					w.fail("an op is not decided when its patience is over")
				}
			}
		}
		if w.calm && len(w.wire) > 0 {
			return
		}
		if !rang && !w.now.Before(end) {
			return
		}
	}
	w.fail("alarms do not come to rest")
}

func (c *qClient) enter(mode protocol.Mode, try bool) *lockstate.Caller {
	ttl := []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}[c.w.rng.IntN(3)]
	x := &lockstate.Caller{Mode: mode, Try: try, Opts: &lockstate.Terms{TTL: ttl, Handoffs: 3, Tenure: 10 * time.Millisecond}}
	if c.w.rng.IntN(5) == 0 {
		x.Opts.IdleHold = 100 * time.Millisecond
	}
	c.calls = append(c.calls, x)
	c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Enter(x, now, fx) })
	return x
}

// act does something at random.
func (w *qWorld) act(readers bool) {
	c := w.clients[w.rng.IntN(len(w.clients))]
	if c.dead {
		return
	}
	switch w.rng.IntN(14) {
	case 0, 1, 2, 3:
		if n := w.inside(c, lockstate.Waiting); n < 2 {
			mode := protocol.Exclusive
			if readers && w.rng.IntN(2) == 0 {
				mode = protocol.Shared
			}
			c.enter(mode, w.rng.IntN(6) == 0)
		}
	case 4, 5, 6, 7:
		for _, x := range c.calls {
			if x.Phase == lockstate.Inside {
				w.logf("%s unlocks token %d", c.name, x.Token)
				c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Leave(x, now, fx) })
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
		i := w.rng.IntN(len(w.servers))
		c.reach[i] = !c.reach[i]
		w.logf("%s reaches server %d: %v", c.name, i+1, c.reach[i])
	case 10:
		for i := range c.reach {
			c.reach[i] = true
		}
		c.step(c.lock.Subscribed)
	case 11:
		// Empty restarts further apart than the quarantine, or of a minority.
		if w.rng.IntN(4) == 0 && (w.restart.IsZero() || w.now.Sub(w.restart) > qQuarantine+2*time.Second) {
			w.restart = w.now
			for _, i := range w.rng.Perm(len(w.servers))[:1+w.rng.IntN(len(w.servers)-1)] {
				w.servers[i].mini.FlushAll()
				w.counts["restart"]++
				w.logf("server %d restarts empty", i+1)
			}
		}
	case 12:
		s := w.servers[w.rng.IntN(len(w.servers))]
		if w.rng.IntN(4) == 0 { // ahead: leases end early there, as on one server; only a little
			s.offset += time.Duration(w.rng.IntN(2)) * time.Millisecond
			w.setTime()
		}
	case 13:
		if readers {
			for _, x := range c.calls {
				if x.Phase == lockstate.Inside && x.Mode == protocol.Exclusive {
					w.lowered[x] = true
					done := make(chan struct{})
					c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Downgrade(x, done, now, fx) })
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

// some delivers something under way.
func (w *qWorld) some() {
	if len(w.wire) == 0 {
		return
	}
	i := w.rng.IntN(len(w.wire))
	if w.rng.IntN(100) >= w.lazy {
		i = 0
	}
	p := w.wire[i]
	w.wire = append(w.wire[:i:i], w.wire[i+1:]...)
	w.deliver(p)
}

func (w *qWorld) run(seed int64, readers bool) {
	w.begin(seed)
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
		if w.failure != "" {
			return
		}
	}
	w.settle()
}

// settle lets everything come to rest: then each client gets the lock.
func (w *qWorld) settle() {
	w.calm = true
	w.logf("calm")
	rest := func(d time.Duration) {
		for end := w.now.Add(d); w.now.Before(end) && w.failure == ""; {
			for len(w.wire) > 0 && w.failure == "" {
				p := w.wire[0]
				w.wire = w.wire[1:]
				w.deliver(p)
			}
			w.advance(min(50*time.Millisecond, end.Sub(w.now)))
		}
	}
	for _, c := range w.clients {
		for i := range c.reach {
			c.reach[i] = true
		}
		c.step(c.lock.Subscribed)
	}
	for range 30 {
		for _, c := range w.clients {
			for _, x := range c.calls {
				if x.Phase == lockstate.Inside {
					c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Leave(x, now, fx) })
				}
			}
		}
		rest(500 * time.Millisecond)
		if w.failure != "" {
			return
		}
	}
	for _, c := range w.clients {
		if n := w.inside(c, lockstate.Waiting); n > 0 {
			w.fail("%s still waits", c.name)
			return
		}
		x := c.enter(protocol.Exclusive, false)
		for range 100 {
			rest(100 * time.Millisecond)
			if x.Phase != lockstate.Waiting || w.failure != "" {
				break
			}
		}
		if w.failure != "" {
			return
		}
		if x.Phase != lockstate.Inside {
			w.fail("%s does not get a free lock", c.name)
			return
		}
		c.step(func(now time.Time, fx *lockstate.Effects) { c.lock.Leave(x, now, fx) })
		rest(time.Second)
		if x.Err != nil && w.failure == "" {
			w.fail("%s unlocks in calm: %v", c.name, x.Err)
		}
	}
	for range 70 {
		w.advance(time.Second)
	}
	rest(time.Second)
	for _, c := range w.clients {
		if !c.q.Idle() && w.failure == "" {
			w.fail("%s keeps requests: %s", c.name, c.q)
		}
	}
}

func TestQuorumSimulation(t *testing.T) {
	redistest.Needs64Bits(t)
	for _, n := range []int{3, 5} {
		for _, readers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d servers, readers %v", n, readers), func(t *testing.T) {
				w := newQWorld(t, n)
				defer w.close()
				for i := range *quorumSeeds * 3 / (n * (n - 2)) {
					seed := *quorumFirst + int64(i)
					w.run(seed, readers)
					if *quorumTrace {
						t.Log("\n" + strings.Join(w.log, "\n"))
					}
					if w.failure != "" {
						tail := w.log[max(0, len(w.log)-120):]
						t.Fatalf("seed %d: %s\n%s", seed, w.failure, strings.Join(tail, "\n"))
					}
				}
				t.Logf("%v", w.counts)
			})
		}
	}
}
