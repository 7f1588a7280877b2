package leased

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// world is the exact simulation: some clients' pure locks of one name, the real
// scripts on one embedded server, and a network between them that can do all
// that networks do. One goroutine, one seed: a failing seed replays to the letter.
type world struct {
	t       testing.TB
	rng     *rand.Rand
	seed    int64
	now     time.Time
	offset  time.Duration // of the server's clock from ours
	mini    *miniredis.Miniredis
	server  *simServer
	rdb     *redis.Client
	srv     *redisServer
	keys    keys
	modes   bool            // readers too
	slow    bool            // scripts run in miniredis itself
	deny    bool            // PUBLISH is refused
	lazy    map[string]int  // percent of deliveries of a kind that wait
	unheard map[string]bool // told that they were granted, but nobody listens
	clients []*simClient
	wire    []*packet
	log     []logLine
	calm    bool
	failure string

	foreign     string // value of the foreign owner that is inside, "" if none
	foreignTill time.Time
	excused     map[string]bool // requests whose grants an accident took
	copied      map[string]bool // requests that a late copy of an acquire was about
	jumpedBack  bool
	unclean     bool     // a grant ended without release while it may have been in use
	owners      []string // as the server had them last
	topWriter   uint64   // greatest token used by a writer
	top         uint64   // by anybody
	seq         int
	menu        [6]int
	lowered     map[*caller]bool // who asked for a downgrade
}

// simClient is one process.
type simClient struct {
	w      *world
	name   string
	id     string
	lock   lock
	dead   bool
	paused bool
	inbox  simInbox
	ghosts []*ghost
	calls  []*caller // waiting or inside
	left   []departure
	order  map[*caller]int
	lastIn int
}

// departure is an Unlock that has not returned yet.
type departure struct {
	caller *caller
	ids    []string // that its grant may have had in Redis
}

type simInbox uint8

const (
	inboxUp simInbox = iota
	inboxDown
	inboxHalfOpen // counted, never delivered
)

// packet is something under way.
type packet struct {
	kind   string // request, reply, renew, renewed, cancel, cancelled, message
	c      *simClient
	cmd    command
	a      answer
	err    error
	r      renewal
	g      *ghost
	m      message
	orphan bool // the sender has given up on it: its answer goes nowhere
}

func (c *simClient) newRequest(m mode, ttl time.Duration) request {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	var b [16]byte
	for i := range b {
		b[i] = digits[c.w.rng.IntN(len(digits))]
	}
	flag := "u"
	if c.inbox != inboxDown {
		flag = "c"
	}
	return request{fmt.Sprintf("leased1:%c:%d:%s:%s:%s", m, ttl.Milliseconds(), flag, b, c.id), m, ttl}
}

func (c *simClient) jitter() float64  { return c.w.rng.Float64() }
func (c *simClient) pushed() bool     { return !c.w.deny }
func (c *simClient) start() time.Time { return simEpoch }

var simEpoch = time.UnixMilli(1_700_000_000_000)

func newWorld(t testing.TB, modes bool, change ...func(*world)) *world {
	w := &world{t: t, modes: modes, now: simEpoch, mini: miniredis.NewMiniRedis(), slow: *simSlow}
	for _, f := range change {
		f(w)
	}
	w.mini.ClockTTL(true)
	w.mini.SetTime(w.now)
	conn, err := w.mini.Dial() // which makes its server
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	w.mini.Server().SetPreHook(w.publish)
	w.server = newSimServer(w.mini)
	w.rdb = redis.NewClient(redistest.MiniOptions(w.mini))
	if !w.slow {
		w.rdb.AddHook(w.server)
	}
	w.srv = &redisServer{rdb: w.rdb, inboxes: inboxChannel("", "")}
	w.keys, _ = newKeys("", "x")
	return w
}

// inMiniredis has the scripts run there, over connections.
func inMiniredis(w *world) { w.slow = true }

// begin makes clients for one more run on the same server.
func (w *world) begin(seed int64) {
	w.seed, w.rng = seed, rand.New(rand.NewPCG(uint64(seed), 0))
	w.now, w.offset = simEpoch, 0
	w.mini.FlushAll()
	w.mini.SetTime(w.now)
	w.clients, w.wire, w.log, w.calm, w.failure = nil, nil, nil, false, ""
	w.foreign, w.excused, w.jumpedBack, w.unclean = "", map[string]bool{}, false, false
	w.owners, w.lowered, w.copied = nil, map[*caller]bool{}, map[string]bool{}
	w.topWriter, w.top, w.seq = 0, 0, 0
	w.deny = w.rng.IntN(20) == 0
	// Each world has its own temper (swarm testing): what is rare in all is
	// never seen together.
	w.lazy = map[string]int{}
	for _, kind := range []string{"request", "reply", "renew", "renewed", "cancel", "cancelled", "message"} {
		w.lazy[kind] = []int{0, 0, 0, 60, 90}[w.rng.IntN(5)]
	}
	w.menu = [6]int{} // acts of each kind
	for i := range w.menu {
		w.menu[i] = []int{1, 1, 1, 4, 0}[w.rng.IntN(5)]
	}
	for i := range 2 + w.rng.IntN(2) {
		c := &simClient{w: w, name: string(rune('A' + i)), order: map[*caller]int{}}
		c.id = strings.Repeat(c.name, 16) + ":sim"
		c.lock.env = c
		w.clients = append(w.clients, c)
	}
}

func (w *world) close() {
	w.rdb.Close()
	w.server.close()
	w.mini.Close()
}

// logLine is a line of the log. It is not formatted unless somebody reads it.
type logLine struct {
	at     time.Time
	format string
	args   []any
}

func (w *world) logf(format string, args ...any) {
	w.log = append(w.log, logLine{w.now, format, args})
}

func (w *world) story() string {
	var b strings.Builder
	for _, l := range w.log {
		fmt.Fprintf(&b, "%8v  %s\n", l.at.Sub(simEpoch), fmt.Sprintf(l.format, l.args...))
	}
	return b.String()
}

func (w *world) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.failure)
	}
}

// publish stands in for the server's own PUBLISH: it counts receivers as the
// inboxes are, and puts messages on the wire.
func (w *world) publish(p *mini.Peer, cmd string, args ...string) bool {
	if cmd != "PUBLISH" {
		return false
	}
	if w.deny {
		p.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
		return true
	}
	for _, c := range w.clients {
		if args[0] != inboxChannel("", c.id) {
			continue
		}
		m, ok := parseMessage(args[1])
		if !ok {
			w.fail("malformed message %q", args[1])
		}
		if c.dead || c.inbox == inboxDown {
			if m.kind == "granted" && strings.Contains(m.id, ":c:") {
				w.unheard[m.id] = true
			}
			break
		}
		if c.inbox == inboxUp && m.kind != "echo" {
			w.wire = append(w.wire, &packet{kind: "message", c: c, m: m})
		}
		p.WriteInt(1)
		return true
	}
	p.WriteInt(0)
	return true
}

// step gives a client's lock an event and performs the effects.
func (c *simClient) step(event func(now time.Time, fx *effects)) {
	var fx effects
	before := c.lock.grant
	event(c.w.now, &fx)
	c.w.losses(c, before, &fx)
	c.w.released(c)
	c.perform(&fx)
}

func (c *simClient) perform(fx *effects) {
	w := c.w
	for x := fx.woken; x != nil; x = x.then {
		if !x.entered {
			w.logf("%s turned away: %v", c.name, x.err)
			continue
		}
		w.logf("%s in: token %d, %v, %s, trust %v", c.name, x.token, x.mode, x.via, c.lock.grant.trust().Sub(simEpoch))
		if x.ahead > 0 {
			w.advance(x.ahead)
		}
		w.admitted(c, x)
	}
	for _, l := range fx.ended {
		w.logf("%s lost token %d: %s", c.name, l.caller.token, l.why)
	}
	for _, done := range fx.done {
		close(done)
	}
	for i := range fx.ghosts {
		g := fx.ghosts[i]
		c.haunt(&g)
	}
	if fx.send.verb != nothing {
		w.logf("%s sends %s", c.name, told(fx.send))
		w.wire = append(w.wire, &packet{kind: "request", c: c, cmd: fx.send})
	}
	if fx.renew {
		if c.lock.grant.state != held {
			w.fail("%s renews what it does not hold", c.name)
		}
		req := c.lock.grant.req
		w.logf("%s renews %s", c.name, short(req.id))
		w.wire = append(w.wire, &packet{kind: "renew", c: c, r: renewal{req: req, at: w.now}})
	}
}

// haunt is the reaper.
func (c *simClient) haunt(g *ghost) {
	c.w.logf("%s cancels %s", c.name, short(g.id))
	g.giveUp = c.w.now.Add(10 * time.Second)
	if g.until.After(g.giveUp) {
		g.giveUp = g.until
	}
	g.nextAt = c.w.now.Add(time.Second)
	c.ghosts = append(c.ghosts, g)
	c.w.wire = append(c.w.wire, &packet{kind: "cancel", c: c, g: g})
}

// told is a command in a log.
type told command

func (cmd told) String() string {
	verbs := map[verb]string{acquire: "acquire", yield: "yield", release: "release", downgrade: "downgrade"}
	s := verbs[cmd.verb] + " " + short(cmd.id).String()
	if cmd.next != "" {
		s += " to " + short(cmd.next).String()
	}
	return s
}

// short tells ids apart for people: client and four random letters.
type short string

func (id short) String() string {
	f := strings.Split(string(id), ":")
	if len(f) < 6 {
		return string(id)
	}
	return f[5][:1] + "." + f[4][:4] + f[1]
}

// advance moves time, ringing each client's alarm when it is due.
func (w *world) advance(d time.Duration) {
	end := w.now.Add(d)
	for range 1000 {
		next := end
		for _, c := range w.clients {
			if c.dead || c.paused {
				continue
			}
			if due := c.due(); !due.IsZero() && due.Before(next) {
				next = due
			}
		}
		if next.After(w.now) {
			w.now = next
			w.mini.SetTime(w.now.Add(w.offset))
		}
		rang := false
		for _, c := range w.clients {
			if due := c.due(); !c.dead && !c.paused && !due.IsZero() && !due.After(w.now) {
				rang = true
				c.ring()
			}
		}
		if !rang && !w.now.Before(end) {
			return
		}
	}
	w.fail("alarms do not come to rest")
}

func (c *simClient) due() time.Time {
	due := c.lock.due()
	for _, g := range c.ghosts {
		if due.IsZero() || g.nextAt.Before(due) {
			due = g.nextAt
		}
	}
	return due
}

func (c *simClient) ring() {
	c.step(c.lock.tick)
	keep := c.ghosts[:0]
	for _, g := range c.ghosts {
		if !g.nextAt.After(c.w.now) {
			if !c.w.now.Before(g.giveUp) {
				continue
			}
			g.nextAt = c.w.now.Add(time.Second)
			c.w.wire = append(c.w.wire, &packet{kind: "cancel", c: c, g: g})
		}
		keep = append(keep, g)
	}
	c.ghosts = keep
}

// execute has the server run what a packet asks for and returns the answer.
func (w *world) execute(p *packet) *packet {
	w.advance(5 * time.Microsecond)
	before := w.look()
	w.unheard = map[string]bool{}
	ctx := context.Background()
	var reply *packet
	switch p.kind {
	case "request":
		cmd := p.cmd
		a, err := w.srv.do(ctx, &w.keys, &cmd)
		if err != nil {
			w.fail("%s: %v", told(cmd), err)
		}
		w.logf("server: %s of %s -> %s", told(cmd), p.c.name, a)
		reply = &packet{kind: "reply", c: p.c, cmd: cmd, a: a}
	case "renew":
		batch := []renewal{p.r}
		batch[0].entry = &entry{keys: w.keys}
		w.srv.renew(ctx, batch)
		if batch[0].err != nil {
			w.fail("renew: %v", batch[0].err)
		}
		w.logf("server: renew %s -> %d", short(p.r.req.id), batch[0].outcome)
		reply = &packet{kind: "renewed", c: p.c, r: batch[0]}
	case "cancel":
		p.g.keys = &w.keys
		if errs := w.srv.cancel(ctx, []*ghost{p.g}); errs[0] != nil {
			w.fail("cancel: %v", errs[0])
		}
		w.logf("server: cancel %s", short(p.g.id))
		reply = &packet{kind: "cancelled", c: p.c, g: p.g}
	}
	after := w.look()
	w.changed(before, after)
	w.compare(before, after, p)
	w.served(before, after, p)
	return reply
}

func (a answer) String() string {
	names := [...]string{"?", "granted", "queued", "refused", "not ours", "done"}
	return fmt.Sprintf("%s token %d place %d left %v", names[a.outcome], a.token, a.place, a.left)
}

// arrive gives a client what was sent to it.
func (w *world) arrive(p *packet) {
	c := p.c
	if c.dead {
		return
	}
	switch p.kind {
	case "reply":
		if p.orphan {
			return
		}
		w.logf("%s hears the answer to %s (%v)", c.name, told(p.cmd), p.err)
		c.step(func(now time.Time, fx *effects) { c.lock.answered(&p.cmd, p.a, p.err, 20*time.Millisecond, now, fx) })
	case "renewed":
		r := p.r
		c.step(func(now time.Time, fx *effects) { c.lock.renewed(&r, now, fx) })
	case "cancelled":
		if gone := p.g.gone; p.err == nil && gone != nil {
			p.g.gone = nil
			c.step(func(_ time.Time, fx *effects) {
				for _, x := range gone {
					x.settle(nil, fx)
				}
			})
		}
		if next := p.g.then; p.err == nil && next != nil {
			p.g.then = nil
			c.haunt(next)
		}
		if p.err == nil && (p.g.until.IsZero() || !w.now.Before(p.g.until)) {
			for i, g := range c.ghosts {
				if g == p.g {
					c.ghosts = append(c.ghosts[:i], c.ghosts[i+1:]...)
					break
				}
			}
		}
	case "message":
		if c.inbox != inboxUp {
			return
		}
		m := p.m
		w.logf("%s gets %s %s token %d", c.name, m.kind, short(m.id), m.token)
		c.step(func(now time.Time, fx *effects) { c.lock.receive(&m, now, fx) })
	}
}
