package simulation

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

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// world is the exact simulation: the pure state machines of some clients for one name, the
// real scripts on one embedded server, and between them a network that can do everything that
// networks do. It has one goroutine and one seed, so a failing seed replays exactly.
type world struct {
	t      testing.TB
	mini   *miniredis.Miniredis
	server *simServer
	rdb    *redis.Client
	srv    *redisserver.Server
	keys   protocol.Keys
	modes  bool           // there are readers, too
	slow   bool           // the scripts run in miniredis itself
	counts map[string]int // how often each event has happened so far, in all schedules

	schedule
}

// schedule is what belongs to one schedule. It is made anew for each, so that a seed replays the same
// whichever came before.
type schedule struct {
	rng         *rand.Rand
	apart       *rand.Rand // a separate source, so that drawing from it changes nothing in worlds that do not draw
	seed        int64
	now         time.Time
	offset      time.Duration // of the server's clock from the world's, by jumps
	rate        int64         // ppm by which the server's clock is fast
	commands    commander
	deny        bool // PUBLISH is refused
	denyAsk     bool // PUBSUB is refused
	has         map[trouble]bool
	lazy        map[packetKind]int // by kind of packet, the percentage of deliveries that are put off
	clients     []*simClient
	wire        []*packet
	log         []logLine
	calm        bool
	failure     string
	refusing    bool   // commands get no further than the connection, or are refused by the server
	foreign     string // value of the foreign owner that is inside, "" if there is none
	foreignTill time.Time
	excused     map[string]time.Time // requests whose grants an accident took, and when
	given       map[string]bool      // requests that a script was to end
	copied      map[string]bool      // requests of which a late copy of an acquire arrived
	lowered     map[string]bool      // requests of which a downgrade was carried out, and those that replaced them
	writerOf    map[string]string    // by the request that replaced it in a downgrade, the writer's
	jumpedBack  bool
	unclean     bool     // a grant may have ended without a release while it was in use
	forgot      bool     // the server forgot tokens
	owners      []string // as last seen on the server
	topWriter   uint64   // the greatest token of a writer
	top         uint64   // the greatest token of anybody
	seq         int
	menu        [6]int
	downgraded  map[*lockstate.Caller]bool   // the callers that asked for a downgrade
	intruded    map[*lockstate.Caller]string // who else owned the lock while a caller was inside
	struck      map[string]bool              // requests whose excuse has ended
	saved       []savedKey                   // an older state of the server
	checkUps    []*checkUp                   // checks that have not returned
	luck        *rand.Rand                   // decides who checks, and nothing else
	cron        *rand.Rand                   // chooses minimum holds, and nothing else
	many        *rand.Rand                   // chooses crowds, and nothing else
	copying     *rand.Rand                   // decides what a replica has, and nothing else
	ends        *rand.Rand                   // decides who closes or gives back, and nothing else
	wider       *rand.Rand                   // decides how far clocks run apart and which keys are deleted, and nothing else
	promises    map[*lockstate.Caller]promise
	cooled      map[string]bool      // requests that were given back with a cool-down
	heard       map[string]time.Time // by request, when the last renewal that extended it was sent, by its client's clock
	taken       map[string]bool      // requests that stopped owning the lock other than through their own commands
	unqueued    map[string]bool      // requests that waited when somebody deleted the queue
	high        time.Time            // the latest time that the server's clock had shown before a jump back, at highAt
	highAt      time.Time            // in the world's time
	accidentAt  time.Time            // when the last accident happened, in the world's time
	lastEntry   time.Time            // when somebody last got the lock, including foreign clients
	longest     time.Duration        // the longest TTL so far
	outage      time.Time            // commands fail until then
	outageErr   error
}

// simClient is one process.
type simClient struct {
	w         *world
	name      string
	id        string
	lock      lockstate.Lock
	forgotten bool // the lock is new: the client's table has none
	dead      bool
	closed    bool
	paused    bool
	joins     bool          // its inbox has not been confirmed yet
	asleep    bool          // paused, and its monotonic clock stands still
	slept     time.Duration // by how much its monotonic clock is behind
	woke      time.Time     // when it last began to run or to sleep, in the world's time
	rate      int64         // ppm by which its clock is fast
	asked     time.Time     // when it last sent a command about its grant, in the world's time
	inbox     simInbox
	hearing   lockstate.InboxHealth
	rejoinAt  time.Time // when it subscribes again
	wanted    string    // the request that others were last said to be queued behind; empty once an acquire sent since has an answer
	wantedAt  time.Time // by its own clock
	byToken   bool      // the cancel being handled did not find its id as the owner
	cancel    lockstate.CancelSchedule
	pauses    time.Duration // last pause after an error
	probeAt   time.Time     // when it next checks whether an outage is over
	refused   bool          // its last error was one that only an operator can fix, so it does not check
	ttls      []time.Duration
	tries     int // one call in this many is a try
	idles     int
	calls     []*lockstate.Caller // waiting or inside
	left      []departure
	returning []*lockstate.Caller // readers who were admitted and give back, but not yet; see giveBackLate
	order     map[*lockstate.Caller]int
	lastIn    int
}

// departure is an Unlock that has not returned yet.
type departure struct {
	caller *lockstate.Caller
	ids    []string // the ids that its grant may have had in Redis
	asked  bool     // Redis was asked
	unused bool     // the caller gave the lock back at once
	sound  bool     // the lease had not ended at the Unlock
}

type simInbox uint8

const (
	inboxUp simInbox = iota
	inboxDown
	inboxHalfOpen  // counted, never delivered
	inboxElsewhere // delivered, but not counted: subscribed to a replica
)

// packetKind is a kind of packet, by its name in the log.
type packetKind string

const (
	requestPacket  packetKind = "request"
	replyPacket    packetKind = "reply"
	renewPacket    packetKind = "renew"
	renewedPacket  packetKind = "renewed"
	cancelPacket   packetKind = "cancel"
	canceledPacket packetKind = "canceled"
	messagePacket  packetKind = "message"
)

// packet is something on its way.
type packet struct {
	kind   packetKind
	c      *simClient
	cmd    protocol.Command
	a      protocol.Answer
	err    error
	r      protocol.Renewal
	g      *lockstate.Cancellation
	cool   time.Duration // of the cancel
	ended  protocol.Canceled
	m      protocol.Message
	orphan bool // the sender has given it up: its answer goes nowhere
	sent   time.Time
}

func (c *simClient) NewRequest(m protocol.Mode, ttl time.Duration, idles bool, from protocol.Origin) protocol.Request {
	flag := "u"
	if c.inbox != inboxDown {
		flag = "c"
		if c.w.has[uncounting] {
			flag = "p"
		}
	}
	if idles {
		flag += "i"
	}
	req, err := protocol.RequestOf(fmt.Sprintf("leased1:%c:%d:%s:%s:%s", m, ttl.Milliseconds(), flag, randomText(c.w.rng), c.id))
	if err != nil {
		panic(err)
	}
	return req
}

func (c *simClient) Client() string     { return c.id }
func (c *simClient) Jitter() float64    { return c.w.rng.Float64() }
func (c *simClient) HoldsMany() bool    { return false }
func (c *simClient) HasInbox() bool     { return !c.w.deny }
func (c *simClient) Subscribed() bool   { return c.inbox != inboxDown }
func (c *simClient) InboxPending() bool { return c.joins }
func (c *simClient) Start() time.Time   { return simTime(0, 0) }

func (c *simClient) RoundTrip() time.Duration { return 0 }

func newWorld(t testing.TB, modes bool, change ...func(*world)) *world {
	redistest.Needs64Bits(t)
	w := &world{t: t, modes: modes, schedule: schedule{now: simEpoch}, mini: miniredis.NewMiniRedis(), slow: *simSlow, counts: map[string]int{}}
	for _, f := range change {
		f(w)
	}
	w.mini.ClockTTL(true)
	w.mini.SetTime(simEpoch)
	conn, err := w.mini.Dial() // this creates its server
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	w.mini.Server().SetPreHook(w.publish)
	w.server = newSimServer(w.mini)
	w.rdb = redis.NewClient(redistest.MiniOptions(w.mini))
	w.server.slow = w.slow
	w.rdb.AddHook(w.server)
	w.srv = redisserver.New(w.rdb, "")
	w.srv.Rdb = w.rdb // the server is a hook of this client; a clone would not have it
	w.keys, _ = protocol.NewKeys("", "x")
	return w
}

// inMiniredis makes the scripts run in miniredis itself, over connections.
func inMiniredis(w *world) { w.slow = true }

// begin makes the clients of one more schedule on the same server.
func (w *world) begin(seed int64) {
	w.schedule = schedule{
		seed:       seed,
		rng:        rand.New(rand.NewPCG(uint64(seed), 0)),
		now:        simEpoch,
		log:        w.log[:0],
		lazy:       map[packetKind]int{},
		excused:    map[string]time.Time{},
		given:      map[string]bool{},
		copied:     map[string]bool{},
		lowered:    map[string]bool{},
		writerOf:   map[string]string{},
		downgraded: map[*lockstate.Caller]bool{},
		intruded:   map[*lockstate.Caller]string{},
		struck:     map[string]bool{},
		promises:   map[*lockstate.Caller]promise{},
		cooled:     map[string]bool{},
		heard:      map[string]time.Time{},
		taken:      map[string]bool{},
		unqueued:   map[string]bool{},
		longest:    2 * time.Second,
	}
	w.deny, w.denyAsk = w.rng.IntN(20) == 0, w.rng.IntN(20) == 0
	// Each world has its own mix of troubles (swarm testing): if all troubles were rare in all
	// worlds, they would never be seen together.
	for _, kind := range []packetKind{requestPacket, replyPacket, renewPacket, renewedPacket, cancelPacket, canceledPacket, messagePacket} {
		w.lazy[kind] = []int{0, 0, 0, 60, 90}[w.rng.IntN(5)]
	}
	for i := range w.menu { // how likely the acts of each kind are
		w.menu[i] = []int{1, 1, 1, 4, 0}[w.rng.IntN(5)]
	}
	w.chooseTroubles()
	if w.has[uncounting] && w.apart.IntN(2) == 0 { // confirmations are delayed for most of a provisional grant, or longer
		w.lazy[renewPacket], w.lazy[renewedPacket] = 97, 60
	}
	if w.has[rates] {
		w.rate = w.ppm()
	}
	w.mini.FlushAll()
	w.server.forgetScripts() // or the schedule would depend on those before it
	w.mini.SetTime(w.serverNow())
	processes := 2 + w.rng.IntN(2)
	if w.has[crowds] {
		processes = 4 + w.many.IntN(2)
	}
	for i := range processes {
		c := &simClient{w: w, name: string(rune('A' + i)), order: map[*lockstate.Caller]int{}, woke: w.now, asked: w.now}
		c.id = strings.Repeat(c.name, 16) + ":sim"
		c.lock.Wake(new(lockstate.Resting), c)
		c.hearing = lockstate.InboxHealth{Counts: !w.has[uncounting]}
		if w.rng.IntN(2) == 0 {
			c.joins, c.inbox = true, inboxDown
		} else {
			c.hearing.Enter(lockstate.Joined, c.now())
		}
		c.ttls, c.tries, c.idles = []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}, 8, 4
		if w.has[unlike] {
			c.ttls = [][]time.Duration{{100 * time.Millisecond}, {300 * time.Millisecond, time.Second}, {5 * time.Second}, {2 * time.Second, 10 * time.Second}}[w.rng.IntN(4)]
			c.tries, c.idles = []int{1, 4, 100}[w.rng.IntN(3)], []int{1, 2, 100}[w.rng.IntN(3)]
		}
		if w.has[uncounting] {
			c.ttls = [][]time.Duration{{3 * time.Second}, {5 * time.Second, 10 * time.Second}, {300 * time.Millisecond, 5 * time.Second}}[w.apart.IntN(3)]
		}
		if w.has[crowds] {
			c.ttls = [][]time.Duration{{10 * time.Second}, {10 * time.Second, 30 * time.Second}, {time.Minute}}[w.many.IntN(3)]
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

// ppm draws the rate of a clock. Two of them differ by less than a hundredth, which is what the contract
// supposes.
func (w *world) ppm() int64 {
	most := int64(1000)
	if w.has[farApart] {
		most = farApartRate
	}
	return int64(w.rng.IntN(3)-1) * most
}

func (w *world) close() {
	w.rdb.Close()
	w.server.close()
	w.mini.Close()
}

// logLine is a line of the log. It is formatted only if somebody reads it.
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

// publish replaces the server's own PUBLISH and PUBSUB NUMSUB: it counts receivers according
// to the state of the inboxes, and puts the messages on the wire.
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
	m, ok := protocol.ParseMessage(args[1])
	if !ok {
		w.fail("malformed message %q", args[1])
	}
	c := w.inboxOf(args[0])
	if c == nil {
		p.WriteInt(0)
		return true
	}
	if !c.dead && (c.inbox == inboxUp || c.inbox == inboxElsewhere) {
		w.put(&packet{kind: messagePacket, c: c, m: m})
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
		if channel == protocol.InboxChannel("", c.id) {
			return c
		}
	}
	return nil
}

// counted reports whether the server counts the client's subscription.
func (c *simClient) counted() bool {
	return !c.dead && (c.inbox == inboxUp || c.inbox == inboxHalfOpen)
}

// skipped reports whether the server can know that nobody listens for id.
func (w *world) skipped(id string) bool {
	proof := strings.Contains(id, ":c:") || strings.Contains(id, ":ci:")
	c := w.clientOf(id)
	return proof && (c == nil || !c.counted()) && !w.deny && !w.denyAsk
}

// put puts a packet on the wire.
func (w *world) put(p *packet) {
	p.sent = w.now
	w.wire = append(w.wire, p)
}

// step passes an event to a client's lock and performs the effects.
func (c *simClient) step(what string, event func(now time.Time, fx *lockstate.Effects)) {
	var fx lockstate.Effects
	w := c.w
	before := c.status()
	c.forgotten = false
	w.counts[before.String()+" × "+what]++
	event(c.now(), &fx)
	w.losses(c, before, &fx)
	w.released(c)
	if g := c.status(); w.has[heeds] && g.State == lockstate.Held && g.Req.ID == c.wanted && !g.Wanted {
		w.fail("%s was told that others wait for what it owns, and does not know it", c.name)
	}
	c.perform(&fx)
	if w.has[anew] && c.lock.Idle() {
		// This is how the client forgets a lock that nobody uses.
		w.counts["a lock made anew"]++
		c.lock, c.forgotten, c.pauses = lockstate.Lock{}, true, 0
		c.lock.Wake(new(lockstate.Resting), c)
	}
}

func (c *simClient) status() *lockstate.Status {
	v := c.lock.Status()
	return &v
}

func (c *simClient) anyoneWaits() bool {
	outside, _ := c.lock.Counts()
	return outside > 0
}

func (c *simClient) perform(fx *lockstate.Effects) {
	w := c.w
	var back []*lockstate.Caller
	for x := range fx.Woken.All {
		if !x.Entered {
			w.counts["turned away"]++
			w.logf("%s turned away: %v", c.name, x.Outcome())
			continue
		}
		w.counts["entered, "+x.Via.String()]++
		w.logf("%s in: token %d, %v, %s, trust %v", c.name, x.Token, x.Mode, x.Via, c.status().Trust.Sub(c.Start()))
		if x.ClockLead() > 0 {
			w.advance(x.ClockLead() + x.ClockLead()/50)
		}
		w.admitted(c, x)
		back = c.mayGiveBack(x, back)
	}
	for _, l := range fx.Ended {
		w.count("a lease is lost")
		w.logf("%s lost token %d: %s", c.name, l.Caller.Token, l.Why)
	}
	for _, done := range fx.Done {
		close(done)
	}
	for i := range fx.Cancels {
		g := fx.Cancels[i]
		c.haunt(&g)
	}
	if fx.Send.Verb != protocol.None {
		c.asked = w.now
		cmd := fx.Send
		if cmd.Recheck {
			cmd.Echo = c.hearing.StartProbe(c.now(), lockstate.EchoWait)
		}
		if cmd.Cooldown > 0 {
			c.cancel.Released(cmd.ID, c.now().Add(cmd.Cooldown), c.now())
		}
		w.logf("%s sends %s", c.name, told(cmd))
		w.put(&packet{kind: requestPacket, c: c, cmd: cmd})
	}
	if fx.Check != nil {
		w.logf("%s asks about %s", c.name, short(fx.Check.Req.ID))
		c.asked = w.now
		w.put(&packet{kind: renewPacket, c: c, r: *fx.Check})
	}
	if fx.Renew {
		if c.status().State != lockstate.Held {
			w.fail("%s renews what it does not hold", c.name)
		}
		c.asked = w.now
		req := c.status().Req
		w.logf("%s renews %s", c.name, short(req.ID))
		w.put(&packet{kind: renewPacket, c: c, r: protocol.Renewal{Req: req, At: c.now(), Touch: fx.Touch}})
	}
	c.giveBack(back)
}

// haunt has a request canceled.
func (c *simClient) haunt(g *lockstate.Cancellation) {
	c.w.logf("%s cancels %s", c.name, short(g.ID))
	c.cancel.Add(g, c.now())
	c.cancelDue()
}

// cancelDue sends the cancels that are due.
func (c *simClient) cancelDue() {
	for batch := c.cancel.Take(c.now()); len(batch) > 0; batch = c.cancel.Take(c.now()) {
		for _, g := range batch {
			c.w.put(&packet{kind: cancelPacket, c: c, g: g, cool: g.Cooldown(c.now())})
		}
	}
}

// told formats a command for the log.
type told protocol.Command

func (cmd told) String() string {
	verbs := map[protocol.Verb]string{protocol.Acquire: "acquire", protocol.Yield: "yield", protocol.Release: "release", protocol.Downgrade: "downgrade"}
	s := verbs[cmd.Verb] + " " + short(cmd.ID).String()
	if cmd.Next != "" {
		s += " to " + short(cmd.Next).String()
	}
	return s
}

// short formats an id so that people can tell it apart: its client and four random letters.
type short string

func (id short) String() string {
	f := strings.Split(string(id), ":")
	if len(f) < 6 {
		return string(id)
	}
	return f[5][:1] + "." + f[4][:4] + f[1]
}

// advance moves time forward by d, ringing each client's alarms when they are due.
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

// due returns when the client's next alarm rings, in the world's time.
func (c *simClient) due() (time.Time, bool) {
	due := c.lock.Due().Time(c.Start())
	for _, t := range []time.Time{c.cancel.Next(), c.hearing.Due, c.rejoinAt, c.probeAt} {
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
	early := c.w.apart.IntN(4) == 0 // the alarm of a lock may be earlier than what the lock asks for
	if due := c.lock.Due().Time(c.Start()); early || !due.IsZero() && !due.After(now) {
		c.step("tick", c.lock.Tick)
	}
	c.cancelDue()
	c.listen(now)
	c.probe(now)
}

// execute makes the server run what a packet asks for, and returns the answer.
func (w *world) execute(p *packet) *packet {
	w.advance(5 * time.Microsecond)
	before := w.look()
	ctx := context.Background()
	var reply *packet
	var err error
	switch p.kind {
	case requestPacket:
		cmd := p.cmd
		var a protocol.Answer
		w.given[cmd.ID] = w.given[cmd.ID] || cmd.Verb != protocol.Acquire
		a, err = w.commands.Do(ctx, &w.keys, &cmd)
		w.logf("server: %s of %s -> %s, %v", told(cmd), p.c.name, answerText(a), err)
		reply = &packet{kind: replyPacket, c: p.c, cmd: cmd, a: a, err: err}
		if cmd.Verb == protocol.Downgrade && a.Outcome == protocol.Granted {
			w.lowered[cmd.ID], w.lowered[cmd.Next], w.writerOf[cmd.Next] = true, true, cmd.ID
		}
	case renewPacket:
		batch := []protocol.Renewal{p.r}
		batch[0].Keys = &w.keys
		w.commands.Renew(ctx, batch)
		if err = batch[0].Err; err == nil {
			err = w.commands.Touch(ctx, batch)
		}
		w.logf("server: renew %s -> %d, %v", short(p.r.Req.ID), batch[0].Outcome, err)
		reply = &packet{kind: renewedPacket, c: p.c, r: batch[0]}
	case cancelPacket:
		w.given[p.g.ID] = true
		r := w.commands.Cancel(ctx, []protocol.CancelRequest{{Keys: &w.keys, ID: p.g.ID, Last: p.g.Last, Link: p.g.Link, Cooldown: p.cool}})[0]
		if r.Fail != nil {
			err = r.Fail.Err
		}
		// A message for a lost lease's id can arrive when the client has forgotten the lock, and the
		// last token with it: this is the hole described in design.md §3, Token.
		w.unclean = w.unclean || r.Owned && p.g.Last == 0
		w.logf("server: cancel %s -> owned %v, token %d, %v", short(p.g.ID), r.Owned, r.Token, err)
		reply = &packet{kind: canceledPacket, c: p.c, g: p.g, ended: r, err: err}
	}
	reply.sent = p.sent
	after := w.look()
	if err != nil && !w.refusing && !before.odd && !unconfirmed(err) {
		w.fail("%s: %v", p.kind, err)
	}
	w.dispossess(before, after, p)
	w.changed(before, after)
	w.compare(before, after, p)
	w.doubted(p, reply.a)
	if err == nil && !w.refusing {
		w.served(before, after, p, reply.a)
	}
	return reply
}

func answerText(a protocol.Answer) string {
	if a.Brief {
		return outcomeText(a.Outcome) + ", briefly"
	}
	return fmt.Sprintf("%s token %d place %d left %v", outcomeText(a.Outcome), a.Token, a.Place, a.Left)
}

// arrive gives a client what was sent to it.
func (w *world) arrive(p *packet) {
	c := p.c
	if c.dead {
		return
	}
	switch p.kind {
	case replyPacket:
		if p.orphan {
			return
		}
		w.logf("%s hears the answer to %s (%v)", c.name, told(p.cmd), p.err)
		w.learned(p.cmd.ID, p.a.Outcome, p)
		c.challenged(&p.cmd, p.a, p.err)
		var pause time.Duration
		name := verbName(p.cmd.Verb)
		if p.cmd.Question {
			name = "question"
		}
		what := fmt.Sprintf("%s %s", name, outcomeText(p.a.Outcome))
		if p.a.Brief {
			what += " briefly"
		}
		if p.err != nil {
			pause = c.pause()
			c.troubled(p.err)
			what = name + " failed: " + failureName(p.err)
		} else {
			c.pauses, c.probeAt, c.refused = 0, time.Time{}, false
		}
		if p.err == nil && p.cmd.Verb == protocol.Acquire && p.cmd.ID == c.wanted && !p.cmd.At.Before(c.wantedAt) {
			c.wanted = ""
		}
		before := c.status()
		c.step(what, func(now time.Time, fx *lockstate.Effects) {
			c.lock.Answered(&p.cmd, p.a, redisserver.Classify(p.err), pause, now, fx)
		})
		if after := c.status(); p.a.Brief && after.Req.ID == before.Req.ID && (after.Token != before.Token || after.Proved.After(p.cmd.At) && after.Proved.After(before.Proved)) {
			w.fail("%s takes more from a brief answer than that it has waited", c.name)
		}
	case renewedPacket:
		r := p.r
		w.learned(r.Req.ID, r.Outcome, p)
		w.extended(c, &r)
		if r.Err != nil {
			c.suspect(r.Err)
		}
		c.prove()
		what := "renewal " + outcomeText(r.Outcome)
		if r.Outcome == protocol.Granted {
			what = "renewed"
		}
		c.step(what, func(now time.Time, fx *lockstate.Effects) { c.lock.Renewed(&r, now, fx) })
	case canceledPacket:
		if s := c.cancel.Answered(p.g, p.ended, c.now()); len(s.Callers) > 0 {
			c.byToken = !p.ended.Owned
			c.step("canceled", func(now time.Time, fx *lockstate.Effects) { c.lock.Canceled(&s, now, fx) })
			c.byToken = false
		}
		c.cancelDue()
	case messagePacket:
		if c.inbox != inboxUp && c.inbox != inboxElsewhere {
			return
		}
		m := p.m
		w.logf("%s gets %s %s token %d", c.name, m.Kind, short(m.ID), m.Token)
		c.hearing.Message(m.Nonce, c.now())
		if m.Kind == protocol.MessageEcho {
			return
		}
		if c.forgotten { // the client uses no lock of that name
			w.counts["a message for no lock"]++
			if m.Kind == protocol.MessageGranted || m.Kind == protocol.MessageWanted {
				c.haunt(&lockstate.Cancellation{ID: m.ID})
			}
			return
		}
		g := c.status()
		if m.Kind == protocol.MessageWanted && !(g.Reserving && m.ID == g.Req.ID) { // else the cancel of its own writer's place will tell
			c.wanted, c.wantedAt = m.ID, c.now()
		}
		late := m.Kind == protocol.MessageWanted && m.ID == g.Req.ID && g.State == lockstate.Asking && g.InFlight == protocol.None
		c.step(string(m.Kind), func(now time.Time, fx *lockstate.Effects) { c.lock.Receive(&m, now, fx) })
		if g = c.status(); late && w.has[heeds] && g.State == lockstate.Asking && g.InFlight == protocol.None && c.anyoneWaits() && c.lock.Due().Time(c.Start()).Sub(c.now()) > 100*time.Millisecond {
			w.fail("%s is wanted, and will not ask about its grant for %v", c.name, c.lock.Due().Time(c.Start()).Sub(c.now()))
		}
	}
}

// pause returns for how long the client leaves Redis alone after an error.
func (c *simClient) pause() time.Duration {
	if !c.w.has[backOff] {
		return 20 * time.Millisecond
	}
	c.pauses = min(max(50*time.Millisecond, 2*c.pauses), simLongestPause)
	return c.pauses/2 + time.Duration(c.w.rng.Int64N(int64(c.pauses)))
}

// simLongestPause is the longest pause of the client's back-off, simProbeEvery the time between its probes.
const (
	simLongestPause = 30 * time.Second // as in the client, once a policy has given up
	simProbeEvery   = 2 * time.Second  // as in outage.go
)

func verbName(v protocol.Verb) string {
	return [...]string{"nothing", "acquire", "yield", "release", "downgrade"}[v]
}

func outcomeText(o protocol.Outcome) string {
	return [...]string{"unanswered", "granted", "queued", "refused", "not ours", "done"}[o]
}

// failureName says how a failure is classified.
func failureName(err error) string {
	return [...]string{"no answer", "never sent", "refused", "an operator's", "another type", "closed"}[redisserver.Classify(err).Kind]
}
