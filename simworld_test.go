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
	t        testing.TB
	rng      *rand.Rand
	seed     int64
	now      time.Time
	offset   time.Duration // of the server's clock from the world's, by jumps
	rate     int64         // ppm by which the server's clock is fast
	mini     *miniredis.Miniredis
	server   *simServer
	rdb      *redis.Client
	srv      *redisServer
	keys     keys
	modes    bool // readers too
	slow     bool // scripts run in miniredis itself
	deny     bool // PUBLISH is refused
	denyAsk  bool // PUBSUB is refused
	has      map[trouble]bool
	lazy     map[string]int // percent of deliveries of a kind that wait
	clients  []*simClient
	wire     []*packet
	log      []logLine
	calm     bool
	failure  string
	refusing bool // commands get no further than the connection, or the server's door

	foreign     string // value of the foreign owner that is inside, "" if none
	foreignTill time.Time
	excused     map[string]time.Time // requests whose grants an accident took, and when it did
	copied      map[string]bool      // requests that a late copy of an acquire was about
	jumpedBack  bool
	unclean     bool     // a grant ended without release while it may have been in use
	owners      []string // as the server had them last
	topWriter   uint64   // greatest token used by a writer
	top         uint64   // by anybody
	seq         int
	menu        [6]int
	lowered     map[*caller]bool   // who asked for a downgrade
	intruded    map[*caller]string // who else owned while one was inside
	struck      map[string]bool    // requests whose excuse has ended
	saved       []savedKey         // an older state of the server
	longest     time.Duration      // the longest TTL so far
	outage      time.Time          // commands fail until then
	outageErr   error
	counts      map[string]int // what happened so far, in all schedules
}

// simClient is one process.
type simClient struct {
	w         *world
	name      string
	id        string
	lock      lock
	forgotten bool // the lock is new: there is none in the client's table
	dead      bool
	paused    bool
	joins     bool          // its inbox was not confirmed yet
	asleep    bool          // paused, and its monotonic clock stands still
	slept     time.Duration // by which its monotonic clock is behind
	woke      time.Time     // when it ran again, the world's time
	rate      int64         // ppm by which its clock is fast
	asked     time.Time     // when it last sent a command about its grant, the world's time
	inbox     simInbox
	hearing   hearing
	rejoinAt  time.Time // it subscribes anew then
	byToken   bool      // the cancel being heard did not find its id as owner
	cancel    cancelSchedule
	pauses    time.Duration // last pause after an error
	probeAt   time.Time     // when it looks whether an outage is over
	refused   bool          // its last error was one that only an operator mends: no such look
	ttls      []time.Duration
	tries     int // one call in so many
	idles     int
	calls     []*caller // waiting or inside
	left      []departure
	order     map[*caller]int
	lastIn    int
}

// departure is an Unlock that has not returned yet.
type departure struct {
	caller *caller
	ids    []string // that its grant may have had in Redis
	asked  bool     // Redis was asked
}

type simInbox uint8

const (
	inboxUp simInbox = iota
	inboxDown
	inboxHalfOpen  // counted, never delivered
	inboxElsewhere // delivered, not counted: it is subscribed to a replica
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
	ended  cancelled
	m      message
	orphan bool // the sender has given up on it: its answer goes nowhere
	sent   time.Time
}

func (c *simClient) newRequest(m mode, ttl time.Duration, idles bool) request {
	flag := "u"
	if c.inbox != inboxDown {
		flag = "c"
	}
	if idles {
		flag += "i"
	}
	return request{fmt.Sprintf("leased1:%c:%d:%s:%s:%s", m, ttl.Milliseconds(), flag, randomText(c.w.rng), c.id), m, ttl}
}

func (c *simClient) jitter() float64  { return c.w.rng.Float64() }
func (c *simClient) pushed() bool     { return !c.w.deny }
func (c *simClient) joining() bool    { return c.joins }
func (c *simClient) start() time.Time { return simTime(0, 0) }

func newWorld(t testing.TB, modes bool, change ...func(*world)) *world {
	w := &world{t: t, modes: modes, now: simEpoch, mini: miniredis.NewMiniRedis(), slow: *simSlow, counts: map[string]int{}}
	for _, f := range change {
		f(w)
	}
	w.mini.ClockTTL(true)
	w.mini.SetTime(simEpoch)
	conn, err := w.mini.Dial() // which makes its server
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	w.mini.Server().SetPreHook(w.publish)
	w.server = newSimServer(w.mini)
	w.rdb = redis.NewClient(redistest.MiniOptions(w.mini))
	w.server.slow = w.slow
	w.rdb.AddHook(w.server)
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
	w.clients, w.wire, w.log, w.calm, w.failure = nil, nil, w.log[:0], false, ""
	w.foreign, w.excused, w.jumpedBack, w.unclean = "", map[string]time.Time{}, false, false
	w.owners, w.lowered, w.copied, w.intruded = nil, map[*caller]bool{}, map[string]bool{}, map[*caller]string{}
	w.struck = map[string]bool{}
	w.topWriter, w.top, w.seq, w.saved, w.outage = 0, 0, 0, nil, time.Time{}
	w.longest = 2 * time.Second
	w.deny, w.denyAsk = w.rng.IntN(20) == 0, w.rng.IntN(20) == 0
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
	w.chooseTroubles()
	w.rate = 0
	if w.has[rates] {
		w.rate = w.ppm()
	}
	w.mini.FlushAll()
	w.mini.SetTime(w.serverNow())
	for i := range 2 + w.rng.IntN(2) {
		c := &simClient{w: w, name: string(rune('A' + i)), order: map[*caller]int{}, woke: w.now, asked: w.now}
		c.id = strings.Repeat(c.name, 16) + ":sim"
		c.lock.env = c
		c.hearing = hearing{counts: true}
		if w.rng.IntN(2) == 0 {
			c.joins, c.inbox = true, inboxDown
		} else {
			c.hearing.enter(joined, c.now())
		}
		c.ttls, c.tries, c.idles = []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}, 8, 4
		if w.has[unlike] {
			c.ttls = [][]time.Duration{{100 * time.Millisecond}, {300 * time.Millisecond, time.Second}, {5 * time.Second}, {2 * time.Second, 10 * time.Second}}[w.rng.IntN(4)]
			c.tries, c.idles = []int{1, 4, 100}[w.rng.IntN(3)], []int{1, 2, 100}[w.rng.IntN(3)]
		}
		if w.has[rates] {
			c.rate = w.ppm()
		}
		w.clients = append(w.clients, c)
	}
	if w.has[deadQueue] {
		w.seedDead(150 + w.rng.IntN(451))
	}
}

func (w *world) ppm() int64 { return int64(w.rng.IntN(3)-1) * 1000 }

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

// publish stands in for the server's own PUBLISH and PUBSUB NUMSUB: it counts
// receivers as the inboxes are, and puts messages on the wire.
func (w *world) publish(p *mini.Peer, cmd string, args ...string) bool {
	const denied = "NOPERM this user has no permissions to access one of the channels used as arguments"
	switch {
	case cmd == "PUBSUB" && strings.EqualFold(args[0], "NUMSUB"):
		if w.deny || w.denyAsk {
			p.WriteError(denied)
			return true
		}
		p.WriteLen(2 * len(args[1:]))
		for _, channel := range args[1:] {
			p.WriteBulk(channel)
			n := 0
			if c := w.inboxOf(channel); c != nil && c.counted() {
				n = 1
			}
			p.WriteInt(n)
		}
		return true
	case cmd != "PUBLISH":
		return false
	case w.deny:
		p.WriteError(denied)
		return true
	}
	m, ok := parseMessage(args[1])
	if !ok {
		w.fail("malformed message %q", args[1])
	}
	c := w.inboxOf(args[0])
	if c == nil {
		p.WriteInt(0)
		return true
	}
	if !c.dead && (c.inbox == inboxUp || c.inbox == inboxElsewhere) {
		w.put(&packet{kind: "message", c: c, m: m})
	}
	if c.counted() {
		p.WriteInt(1)
	} else {
		p.WriteInt(0)
	}
	return true
}

func (w *world) inboxOf(channel string) *simClient {
	for _, c := range w.clients {
		if channel == inboxChannel("", c.id) {
			return c
		}
	}
	return nil
}

// counted reports whether the server counts its subscription.
func (c *simClient) counted() bool {
	return !c.dead && (c.inbox == inboxUp || c.inbox == inboxHalfOpen)
}

// skipped reports whether the server can know that nobody listens for id.
func (w *world) skipped(id string) bool {
	proof := strings.Contains(id, ":c:") || strings.Contains(id, ":ci:")
	c := w.clientOf(id)
	return proof && (c == nil || !c.counted()) && !w.deny && !w.denyAsk
}

// put sends a packet.
func (w *world) put(p *packet) {
	p.sent = w.now
	w.wire = append(w.wire, p)
}

// step gives a client's lock an event and performs the effects.
func (c *simClient) step(what string, event func(now time.Time, fx *effects)) {
	var fx effects
	w := c.w
	before := c.lock.grant
	c.forgotten = false
	w.counts[before.name()+" × "+what]++
	event(c.now(), &fx)
	w.losses(c, before, &fx)
	w.released(c)
	c.perform(&fx)
	if w.has[anew] && c.lock.idle() {
		// As the client forgets a lock that nobody uses.
		w.counts["a lock made anew"]++
		c.lock, c.forgotten, c.pauses = lock{env: c}, true, 0
	}
}

// name is the row of the table in design.md §5.
func (g *grant) name() string {
	switch {
	case g.lowering():
		return "lowering"
	case g.reserving():
		return "reserving"
	}
	return [...]string{"none", "asking", "queued", "held", "letting go"}[g.state]
}

func (c *simClient) perform(fx *effects) {
	w := c.w
	for x := fx.woken; x != nil; x = x.then {
		if !x.entered {
			w.counts["turned away"]++
			w.logf("%s turned away: %v", c.name, x.err)
			continue
		}
		w.counts["entered, "+x.via.String()]++
		w.logf("%s in: token %d, %v, %s, trust %v", c.name, x.token, x.mode, x.via, c.lock.grant.trust().Sub(c.start()))
		if x.ahead > 0 {
			w.advance(x.ahead + x.ahead/500)
		}
		w.admitted(c, x)
	}
	for _, l := range fx.ended {
		w.count("a lease is lost")
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
		c.asked = w.now
		cmd := fx.send
		if cmd.check {
			cmd.echo = c.hearing.challenge(c.now(), echoWait)
		}
		w.logf("%s sends %s", c.name, told(cmd))
		w.put(&packet{kind: "request", c: c, cmd: cmd})
	}
	if fx.renew {
		if c.lock.grant.state != held {
			w.fail("%s renews what it does not hold", c.name)
		}
		c.asked = w.now
		req := c.lock.grant.req
		w.logf("%s renews %s", c.name, short(req.id))
		w.put(&packet{kind: "renew", c: c, r: renewal{req: req, at: c.now()}})
	}
}

// haunt has a request cancelled.
func (c *simClient) haunt(g *ghost) {
	c.w.logf("%s cancels %s", c.name, short(g.id))
	c.cancel.add(g, c.now())
	c.cancelDue()
}

// cancelDue sends the cancels that are due.
func (c *simClient) cancelDue() {
	for batch := c.cancel.take(c.now()); len(batch) > 0; batch = c.cancel.take(c.now()) {
		for _, g := range batch {
			c.w.put(&packet{kind: "cancel", c: c, g: g})
		}
	}
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
	for range 5000 {
		next := end
		for _, c := range w.clients {
			if c.dead || c.paused {
				continue
			}
			if due, ok := c.due(); ok && due.Before(next) {
				next = due
			}
		}
		if next.After(w.now) {
			w.now = next
			w.mini.SetTime(w.serverNow())
		}
		rang := false
		for _, c := range w.clients {
			if due, ok := c.due(); ok && !c.dead && !c.paused && !due.After(w.now) {
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

// due returns when the client's next alarm rings, by the world's time.
func (c *simClient) due() (time.Time, bool) {
	due := c.lock.due()
	for _, t := range []time.Time{c.cancel.next(), c.hearing.due, c.rejoinAt, c.probeAt} {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	if due.IsZero() {
		return due, false
	}
	return c.world(due), true
}

func (c *simClient) ring() {
	now := c.now()
	if due := c.lock.due(); !due.IsZero() && !due.After(now) {
		c.step("tick", c.lock.tick)
	}
	c.cancelDue()
	c.listen(now)
	c.probe(now)
}

// execute has the server run what a packet asks for and returns the answer.
func (w *world) execute(p *packet) *packet {
	w.advance(5 * time.Microsecond)
	before := w.look()
	ctx := context.Background()
	var reply *packet
	var err error
	switch p.kind {
	case "request":
		cmd := p.cmd
		var a answer
		a, err = w.srv.do(ctx, &w.keys, &cmd)
		w.logf("server: %s of %s -> %s, %v", told(cmd), p.c.name, a, err)
		reply = &packet{kind: "reply", c: p.c, cmd: cmd, a: a, err: err}
	case "renew":
		batch := []renewal{p.r}
		batch[0].entry = &entry{keys: w.keys}
		w.srv.renew(ctx, batch)
		err = batch[0].err
		w.logf("server: renew %s -> %d, %v", short(p.r.req.id), batch[0].outcome, err)
		reply = &packet{kind: "renewed", c: p.c, r: batch[0]}
	case "cancel":
		p.g.keys = &w.keys
		r := w.srv.cancel(ctx, []*ghost{p.g})[0]
		if r.fail != nil {
			err = r.fail.err
		}
		// A message for a lost lease's id can come when the client has forgotten the lock,
		// and with it the last token: the hole of design.md §3, Token.
		w.unclean = w.unclean || r.owned && p.g.last == 0
		w.logf("server: cancel %s -> owned %v, token %d, %v", short(p.g.id), r.owned, r.token, err)
		reply = &packet{kind: "cancelled", c: p.c, g: p.g, ended: r, err: err}
	}
	reply.sent = p.sent
	after := w.look()
	if err != nil && !w.refusing && !before.odd {
		w.fail("%s: %v", p.kind, err)
	}
	w.changed(before, after)
	w.compare(before, after, p)
	if err == nil && !w.refusing {
		w.served(before, after, p, reply.a.unfinished)
	}
	return reply
}

func (a answer) String() string {
	return fmt.Sprintf("%s token %d place %d left %v", a.outcome.name(), a.token, a.place, a.left)
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
		w.learned(p.cmd.id, p.a.outcome, p)
		c.challenged(&p.cmd, p.a, p.err)
		var pause time.Duration
		what := fmt.Sprintf("%s %s", verbName(p.cmd.verb), p.a.outcome.name())
		if p.err != nil {
			pause = c.pause()
			c.troubled(p.err)
			what = verbName(p.cmd.verb) + " failed: " + failureName(p.err)
		} else {
			c.pauses, c.probeAt, c.refused = 0, time.Time{}, false
		}
		c.step(what, func(now time.Time, fx *effects) { c.lock.answered(&p.cmd, p.a, classify(p.err), pause, now, fx) })
	case "renewed":
		r := p.r
		w.learned(r.req.id, r.outcome, p)
		if r.err != nil {
			c.suspect(r.err)
		}
		c.prove()
		what := "renewal " + r.outcome.name()
		if r.outcome == granted {
			what = "renewed"
		}
		c.step(what, func(now time.Time, fx *effects) { c.lock.renewed(&r, now, fx) })
	case "cancelled":
		if s := c.cancel.answered(p.g, p.ended, c.now()); len(s.callers) > 0 {
			c.byToken = !p.ended.owned
			c.step("cancelled", func(now time.Time, fx *effects) { c.lock.cancelled(&s, now, fx) })
			c.byToken = false
		}
		c.cancelDue()
	case "message":
		if c.inbox != inboxUp && c.inbox != inboxElsewhere {
			return
		}
		m := p.m
		w.logf("%s gets %s %s token %d", c.name, m.kind, short(m.id), m.token)
		c.hearing.message(m.nonce, c.now())
		if m.kind == "echo" {
			return
		}
		if c.forgotten { // no lock of that name is in use
			w.counts["a message for no lock"]++
			if m.kind == "granted" || m.kind == "wanted" {
				c.haunt(&ghost{id: m.id})
			}
			return
		}
		g := &c.lock.grant
		late := m.kind == "wanted" && m.id == g.req.id && g.state == asking && g.inFlight == nothing
		c.step(m.kind, func(now time.Time, fx *effects) { c.lock.receive(&m, now, fx) })
		if late && w.has[heeds] && g.state == asking && g.inFlight == nothing && c.lock.waiting.first != nil && c.lock.due().Sub(c.now()) > 100*time.Millisecond {
			w.fail("%s is wanted, and will not ask about its grant for %v", c.name, c.lock.due().Sub(c.now()))
		}
	}
}

// pause is how long the client leaves Redis alone after an error.
func (c *simClient) pause() time.Duration {
	if !c.w.has[backOff] {
		return 20 * time.Millisecond
	}
	c.pauses = min(max(50*time.Millisecond, 2*c.pauses), simLongestPause)
	return c.pauses/2 + time.Duration(c.w.rng.Int64N(int64(c.pauses)))
}

// simLongestPause is the longest pause of the client's back-off.
const simLongestPause = maxRetryDelay

func verbName(v verb) string {
	return [...]string{"nothing", "acquire", "yield", "release", "downgrade"}[v]
}

func (o outcome) name() string {
	return [...]string{"unanswered", "granted", "queued", "refused", "not ours", "done"}[o]
}

// failureName says how a failure is classified.
func failureName(err error) string {
	return [...]string{"no answer", "never sent", "refused", "an operator's", "another type", "closed"}[classify(err).kind]
}
