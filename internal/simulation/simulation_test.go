package simulation

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redisserver"
)

var (
	simSeeds = flag.Int("simulate.seeds", 0, "how many schedules to simulate for each kind (0: a short run)")
	simFirst = flag.Int64("simulate.first", 1, "the first seed")
	simTrace = flag.Bool("simulate.trace", false, "print the schedule of the first seed")
	simJobs  = flag.Int("simulate.jobs", runtime.GOMAXPROCS(0), "how many schedules to simulate at once")
	simAll   = flag.Bool("simulate.all", false, "do not stop at a failure, and list all seeds that fail")
	simSlow  = flag.Bool("simulate.slow", false, "run the scripts in miniredis itself, over connections")
)

// TestSimulation runs schedules of a whole world; see world. A failing schedule is
// printed step by step, and can be replayed with
//
//	go test -run TestSimulation/writers -simulate.first=SEED -simulate.seeds=1 .
func TestSimulation(t *testing.T) {
	n := *simSeeds
	if n == 0 {
		n = 600
		if testing.Short() {
			n = 80
		}
		if race.Enabled {
			n = 16
		}
	}
	for _, modes := range []bool{false, true} {
		name := map[bool]string{false: "writers", true: "readers and writers"}[modes]
		t.Run(name, func(t *testing.T) { simulate(t, name, modes, n) })
	}
}

// simulate runs n schedules, several worlds at once, and reports the first seed that fails.
// A seed does the same in every world.
func simulate(t *testing.T, name string, modes bool, n int) {
	began := time.Now()
	var mu sync.Mutex
	next, ran, bad := 0, 0, n // index of the next seed; number of schedules done; the first that failed
	var failure, story string
	counts := map[string]int{}
	var wg sync.WaitGroup
	for range min(n, max(1, *simJobs)) {
		w := newWorld(t, modes)
		wg.Go(func() { // waited for below; ends with the last seed
			defer w.close()
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				for what, n := range w.counts {
					counts[what] += n
				}
			}()
			for {
				mu.Lock()
				i, last := next, bad
				next++
				mu.Unlock()
				if i >= n || i > last {
					return
				}
				w.run(*simFirst + int64(i))
				mu.Lock()
				if ran++; n >= 5000 && ran%5000 == 0 {
					fmt.Printf("%s: %d schedules, %v\n", name, ran, time.Since(began).Round(time.Second))
				}
				if w.failure != "" && *simAll {
					t.Errorf("seed %d: %s", *simFirst+int64(i), w.failure)
				} else if w.failure != "" && i < bad {
					bad, failure, story = i, w.failure, w.story()
				} else if *simTrace && i == 0 {
					story = w.story()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if bad < n {
		t.Fatalf("seed %d:\n%s\nseed %d: %s", *simFirst+int64(bad), story, *simFirst+int64(bad), failure)
	} else if *simTrace {
		t.Logf("seed %d:\n%s", *simFirst, story)
	}
	if n >= 100 {
		reached(t, name, counts, n)
	}
}

// TestTheSimulatedServerAnswersLikeTheEmbeddedOne replays schedules with the scripts
// run by miniredis itself: the logs must be equal to the letter.
func TestTheSimulatedServerAnswersLikeTheEmbeddedOne(t *testing.T) {
	fast, slow := newWorld(t, true), newWorld(t, true, inMiniredis)
	defer fast.close()
	defer slow.close()
	seeds := 20
	if race.Enabled {
		seeds = 4
	}
	for seed := range int64(seeds) {
		fast.run(seed)
		slow.run(seed)
		if fast.story() != slow.story() {
			t.Fatalf("seed %d:\n%s\nand in miniredis:\n%s", seed, fast.story(), slow.story())
		}
	}
}

var errLost = errors.New("simulated: connection lost")

// run simulates one schedule: trouble first, then calm, in which everybody must be served
// and nothing may be left behind.
func (w *world) run(seed int64) {
	w.begin(seed)
	for range 30 + w.rng.IntN(120) {
		w.act()
		w.check()
		if w.failure != "" {
			return
		}
	}
	w.recover()
}

func (w *world) client() *simClient {
	c := w.clients[w.rng.IntN(len(w.clients))]
	if c.dead || c.paused {
		return nil
	}
	return c
}

// act does one of the things that can happen.
func (w *world) act() {
	w.halt()
	c := w.client()
	if w.has[busy] && c != nil && w.rng.IntN(100) < 30 {
		c.each(lockstate.Inside, c.leave)
		return
	}
	if w.has[checks] && c != nil && w.luck.IntN(100) < 10 {
		c.each(lockstate.Inside, c.checkUp)
		return
	}
	if w.has[replicas] && w.copying.IntN(25) == 0 {
		w.advance(5 * time.Microsecond)
		w.failOver()
		return
	}
	if w.has[closes] && c != nil && w.ends.IntN(60) == 0 {
		c.close()
		return
	}
	if c != nil && len(c.returning) > 0 && w.ends.IntN(25) == 0 {
		c.giveBackLate()
		return
	}
	n := w.rng.IntN(100)
	if n >= 72 { // as much trouble and time as this world likes
		kind := []int{0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4}[(n-72)/2]
		if kind > 0 && w.rng.IntN(4) >= w.menu[kind] {
			return
		}
	}
	switch {
	case n < 16:
		if c != nil && !c.closed && len(c.calls) < 4 {
			c.enter()
		}
	case n < 20:
		if c != nil {
			c.each(lockstate.Waiting, func(x *lockstate.Caller) {
				w.logf("%s gives up", c.name)
				c.step("abandon", func(now time.Time, fx *lockstate.Effects) { c.lock.Abandon(x, now, fx) })
			})
		}
	case n < 30:
		if c != nil {
			c.each(lockstate.Inside, func(x *lockstate.Caller) {
				if w.modes && x.Mode == protocol.Exclusive && w.rng.IntN(3) == 0 && x.Token != 0 { // only a lease can be downgraded
					w.logf("%s downgrades", c.name)
					w.downgraded[x] = true // from here on it does not write
					c.step("downgrade", func(now time.Time, fx *lockstate.Effects) { c.lock.Downgrade(x, make(chan struct{}), now, fx) })
					return
				}
				c.leave(x)
			})
		}
	case n < 72:
		w.deliver(w.rng.IntN(100))
	case n < 84 && w.has[uncounting] && w.apart.IntN(4) == 0: // a few of these are longer than a provisional grant
		w.advance(time.Duration(w.apart.IntN(1500)) * time.Millisecond)
	case n < 84:
		w.advance(time.Duration(w.rng.IntN(400)) * w.pace())
	case n < 86:
		w.advance(time.Duration(w.rng.IntN(3000)) * w.pace())
	case n < 92:
		w.foreigner()
	case n < 96:
		w.mischief(c)
	default:
		w.disaster()
	}
}

// pace is by what the time between two acts is counted. Who has a longer TTL holds the lock for longer.
func (w *world) pace() time.Duration {
	if w.has[crowds] {
		return 10 * time.Millisecond
	}
	return time.Millisecond
}

func (c *simClient) enter() {
	w := c.w
	o := &lockstate.Terms{TTL: c.ttls[w.rng.IntN(len(c.ttls))], Handoffs: 2, Tenure: 50 * time.Millisecond, Confirm: w.has[replicas]}
	w.longest = max(w.longest, o.TTL)
	if w.rng.IntN(c.idles) == 0 {
		o.IdleHold = 300 * time.Millisecond
		if w.has[longHolds] && !w.deny {
			o.IdleHold = 20 * time.Second
		}
	}
	x := &lockstate.Caller{Mode: protocol.Exclusive, Opts: o, Try: w.rng.IntN(c.tries) == 0, RetryFatal: w.rng.IntN(4) > 0}
	if w.modes && w.rng.IntN(2) == 0 {
		x.Mode = protocol.Shared
	}
	if w.rng.IntN(10) == 0 {
		o.MaxHold = 500 * time.Millisecond
	}
	if w.has[minHolds] && w.cron.IntN(3) == 0 {
		o.MinHold = time.Duration(1+w.cron.IntN(30)) * maxMinHold / 30
	}
	w.seq++
	c.order[x] = w.seq
	c.calls = append(c.calls, x)
	w.logf("%s wants it, %v, TTL %v, try %v", c.name, x.Mode, o.TTL, x.Try)
	c.step("enter", func(now time.Time, fx *lockstate.Effects) {
		if w.shortCuts() && !x.Try && c.lock.Reenter(x, now) {
			w.counts["reentered"]++
			w.logf("%s in again: %v, %s", c.name, x.Mode, x.Via)
			w.admitted(c, x)
			return
		}
		c.lock.Enter(x, now, fx)
	})
}

// shortCuts reports whether the next caller tries the shortcuts of Lock and Unlock. Every other
// caller does.
func (w *world) shortCuts() bool { return w.seq%2 == 0 }

func (c *simClient) leave(x *lockstate.Caller) {
	w := c.w
	if x.Mode == protocol.Shared && len(c.returning) > 0 {
		if x = c.unlocks(); x == nil {
			return
		}
	}
	w.logf("%s unlocks", c.name)
	if p, ok := w.promises[x]; ok && (x.Orphaned || x.Ended == lockstate.ByLoss || w.downgraded[x]) {
		delete(w.promises, x) // others may have had the lock, or may have it now
	} else if ok {
		p.left = w.now
		w.promises[x] = p
	}
	ids := c.owned(x)
	if p, ok := w.promises[x]; ok {
		p.client, p.ids = c, ids
		w.promises[x] = p
	}
	d := departure{caller: x, ids: ids, sound: x.Ended == lockstate.NotYet && c.now().Before(c.status().Trust)}
	draws := x.Token == 0 && c.believes(x) && !w.excuse(c.status().Req.ID)
	c.step("leave", func(now time.Time, fx *lockstate.Effects) {
		if w.shortCuts() && len(c.returning) == 0 && c.lock.LeaveKept(x, now) {
			w.counts["the grant is kept"]++
			return
		}
		c.lock.Leave(x, now, fx)
		if draws {
			w.drew(c, x)
		}
		d.asked = !x.Settled
		c.left = append(c.left, d)
	})
}

// owned returns the ids that x's grant may have in Redis, if it is not gone.
func (c *simClient) owned(x *lockstate.Caller) (ids []string) {
	if g := c.status(); !x.Orphaned {
		ids = append(ids, g.Req.ID)
		if g.Downgrading {
			ids = append(ids, g.Next)
		}
	}
	return ids
}

// each calls f for one random call in that phase. It forgets calls that are over.
func (c *simClient) each(ph lockstate.Phase, f func(*lockstate.Caller)) {
	var some []*lockstate.Caller
	keep := c.calls[:0]
	for _, x := range c.calls {
		if x.Phase == lockstate.Left || x.Phase == lockstate.Rejected {
			delete(c.order, x)
			continue
		}
		keep = append(keep, x)
		if x.Phase == ph {
			some = append(some, x)
		}
	}
	c.calls = keep
	if len(some) > 0 {
		f(some[c.w.rng.IntN(len(some))])
	}
}

// deliver moves one packet, chosen at random. A low luck loses or duplicates it.
func (w *world) deliver(luck int) bool {
	if len(w.wire) == 0 {
		return false
	}
	i := w.rng.IntN(len(w.wire))
	p := w.wire[i]
	if !w.calm && w.rng.IntN(100) < w.lazy[p.kind] {
		return false
	}
	if p.c.paused && (p.kind == replyPacket || p.kind == renewedPacket || p.kind == canceledPacket || p.kind == messagePacket) {
		return false
	}
	if p.orphan && w.now.Before(w.outage) {
		return false // it is still somewhere on the way
	}
	w.wire = append(w.wire[:i], w.wire[i+1:]...)
	if w.calm {
		luck = 99
	}
	switch p.kind {
	case requestPacket, renewPacket, cancelPacket:
		w.carry(p, luck)
	case messagePacket:
		if luck < 8 {
			w.count("a message is lost")
			w.logf("lost: %s to %s", p.m.Kind, p.c.name)
			return true
		}
		if luck < 14 {
			w.count("a message is doubled")
			again := *p
			w.wire = append(w.wire, &again)
		}
		w.arrive(p)
	default:
		w.arrive(p)
	}
	return true
}

// carry takes a command to the server, or halfway, or twice.
func (w *world) carry(p *packet, luck int) {
	failed := &packet{kind: map[packetKind]packetKind{requestPacket: replyPacket, renewPacket: renewedPacket, cancelPacket: canceledPacket}[p.kind],
		c: p.c, cmd: p.cmd, r: p.r, g: p.g, ended: protocol.Canceled{Fail: redisserver.Classify(errLost)}, err: errLost, sent: p.sent}
	failed.r.Outcome, failed.r.Err = protocol.Unanswered, errLost
	piped := p.kind != requestPacket
	out := w.now.Before(w.outage)
	switch {
	case p.orphan:
		w.count("a late copy arrives")
		w.logf("a late copy arrives")
		w.copied[p.cmd.ID] = w.copied[p.cmd.ID] || p.cmd.Verb == protocol.Acquire
		w.execute(p)
		if w.copied[p.cmd.ID] { // if it owned again, the next request does now, or waits, though it may have been released
			switch v := w.look(); p.cmd.Verb {
			case protocol.Downgrade:
				w.copied[p.cmd.Next] = v.owns(p.cmd.Next)
			case protocol.Yield:
				w.copied[p.cmd.Next] = w.copied[p.cmd.Next] || v.owns(p.cmd.Next) || slices.Contains(v.queue, p.cmd.Next)
			}
		}
	case out && w.outageErr != nil:
		w.refused(p, w.outageErr, false)
	case out:
		w.count("an outage loses a command")
		w.wire = append(w.wire, failed)
	case luck < 5: // it never arrives
		w.count("a command is lost")
		w.logf("lost: %s of %s", p.kind, p.c.name)
		w.wire = append(w.wire, failed)
	case luck < 10: // it runs, but nobody hears the answer
		w.count("an answer is lost")
		w.execute(p)
		w.wire = append(w.wire, failed)
	case luck < 15: // it is given up and arrives later
		w.count("a command is late")
		late := *p
		late.orphan = true
		w.wire = append(w.wire, failed, &late)
	case luck < 20: // it runs, and a copy arrives later
		w.count("a command is doubled")
		late := *p
		late.orphan = true
		w.wire = append(w.wire, w.execute(p), &late)
	case luck < 32 && w.has[refusals]:
		w.refused(p, simRefusals[w.rng.IntN(len(simRefusals))], false)
	case luck < 40 && piped && w.has[silently]:
		w.refused(p, errWrongPassword, true)
	default:
		w.wire = append(w.wire, w.execute(p))
	}
}

// foreigner is a foreign client, which uses SET NX PX and compare-and-delete.
func (w *world) foreigner() {
	if w.foreign != "" {
		if w.server.do("GET", w.keys.Lock) == any(w.foreign) {
			w.server.do("DEL", w.keys.Lock)
		}
		w.logf("the foreigner lets go")
		w.foreign = ""
		return
	}
	w.seq++
	value := fmt.Sprintf("foreign-%d", w.seq)
	ttl := time.Duration(100+w.rng.IntN(1500)) * time.Millisecond
	if w.server.do("SET", w.keys.Lock, value, "NX", "PX", redisserver.Milliseconds(ttl)) != nil {
		w.count("a foreigner takes it")
		w.entered(nil)
		w.foreign, w.foreignTill = value, w.now.Add(ttl-ttl/50)
		w.intrude(w.look())
		w.logf("the foreigner takes it for %v", ttl)
	}
}

// mischief does something to one client.
func (w *world) mischief(c *simClient) {
	if w.rng.IntN(3) == 0 {
		for _, p := range w.clients {
			if p.paused {
				w.logf("%s goes on", p.name)
				p.wake() // other events may reach it before its watchdog runs
				return
			}
		}
	}
	if c == nil {
		return
	}
	if w.has[uncounting] && w.apart.IntN(5) == 0 && w.server.do("TYPE", w.keys.Lock) != any(simStatus("hash")) {
		w.advance(5 * time.Microsecond)
		w.killed(1 + w.apart.IntN(3))
		return
	}
	switch w.rng.IntN(11) {
	case 0:
		w.count("a process is killed")
		w.logf("%s is killed", c.name)
		c.dead = true
	case 1, 2:
		w.count("a process stops")
		w.logf("%s stops", c.name)
		c.paused = true
	case 3:
		w.count("an inbox is lost")
		w.logf("%s loses its inbox", c.name)
		c.inbox = inboxDown
		c.hearing.Over(c.now())
		if c.joins { // its first subscription fails
			c.joins = false
			c.step("messageless", c.lock.SubscribeFailed)
		}
	case 4:
		w.count("an inbox is half open")
		w.logf("the inbox of %s is half open", c.name)
		c.inbox = inboxHalfOpen
	case 5:
		if w.has[uncounted] {
			w.count("an inbox is elsewhere")
			w.logf("the inbox of %s is at a replica", c.name)
			c.join()
			c.inbox = inboxElsewhere
		}
	case 6:
		if w.has[suspensions] {
			w.count("a machine sleeps")
			w.logf("the machine of %s sleeps", c.name)
			c.sleep()
		}
	case 7:
		if w.has[longHolds] {
			w.quiet(w.longest * time.Duration(3+w.rng.IntN(12)))
		}
	default:
		c.join()
	}
}

func (c *simClient) join() {
	if c.inbox == inboxUp {
		return
	}
	c.w.count("an inbox comes back")
	c.w.logf("%s has an inbox again", c.name)
	c.inbox, c.joins, c.rejoinAt = inboxUp, false, time.Time{}
	c.hearing.Enter(lockstate.Joined, c.now())
	c.step("subscribed", c.lock.Subscribed)
}

// disaster does something to the server.
func (w *world) disaster() {
	ctx := context.Background()
	w.advance(5 * time.Microsecond)
	switch w.rng.IntN(14) {
	case 0:
		w.accident("the server is flushed")
		w.mini.FlushAll()
	case 1:
		key := w.keys.Lock
		if w.has[helperKeys] {
			key = w.fiveKeys()[w.wider.IntN(5)]
		}
		w.accident("somebody deletes the key")
		w.logf("it was %s", key)
		for _, id := range w.queued() {
			if key == w.keys.Queue() {
				w.unqueued[id] = true
			}
		}
		w.forgot = w.forgot || key == w.keys.Meta()
		w.server.do("DEL", key)
	case 2:
		w.accident("the server's clock jumps ahead")
		w.offset += time.Duration(w.rng.IntN(2000)) * time.Millisecond
		w.mini.SetTime(w.serverNow())
	case 3:
		w.count("the server's clock jumps back")
		w.logf("the server's clock jumps back")
		w.jumpedBack = true
		high := w.highest()
		if now := w.serverNow(); now.After(high) {
			high = now
		}
		w.high, w.highAt = high, w.now
		w.offset -= time.Duration(w.rng.IntN(2000)) * time.Millisecond
		w.mini.SetTime(w.serverNow())
	case 4, 10:
		w.accident("an operator evicts the owner")
		if _, err := w.srv.Evict(ctx, &w.keys); err != nil && !w.look().odd {
			w.fail("evict: %v", err)
		}
	case 5:
		w.count("the scripts are flushed")
		w.logf("the scripts are flushed")
		w.server.do("SCRIPT", "FLUSH")
		clear(w.server.known)
	case 6, 11, 12:
		if w.has[olderState] && len(w.saved) > 0 {
			w.restore()
		} else if w.has[olderState] {
			w.save()
		}
	case 7:
		if w.has[olderState] || w.has[replicas] {
			w.save()
		}
	case 8, 13:
		if w.has[outages] {
			w.fall()
		}
	case 9:
		if w.has[hashes] {
			w.accident("somebody puts a hash in its place")
			w.server.do("DEL", w.keys.Lock)
			w.server.do("HSET", w.keys.Lock, "field", "value")
			w.server.do("PEXPIRE", w.keys.Lock, strconv.Itoa(100+w.rng.IntN(1500)))
		}
	}
	w.intrude(w.lookAgain())
}

// recover ends all trouble. Everybody alive must be served within the longest TTL and one
// re-check, and then nothing may be left.
func (w *world) recover() {
	w.logf("--- calm")
	w.calm, w.outage = true, time.Time{}
	for _, c := range w.clients {
		if c.paused {
			c.wake()
			c.ring()
		}
		for !c.dead && len(c.returning) > 0 {
			c.giveBackLate()
		}
		if c.inbox == inboxDown || w.has[longHolds] { // a client that idles for long need not find out soon
			c.join() // the inbox must find out by itself what else is wrong with it
		}
	}
	began := w.now
	// Each late copy of an acquire can make a request the owner that nobody knows anymore. If no
	// message tells of it, its turn ends with its TTL. And a process that was killed can be the owner,
	// and can also have a waiter that nothing proves dead.
	turns := 1
	atServer := w.look()
	for _, id := range append(sortedKeys(atServer.readers), append(atServer.queue, atServer.value)...) {
		if w.copied[id] {
			turns++
		}
	}
	for _, p := range w.wire {
		if p.orphan && p.kind == requestPacket {
			turns++
		}
	}
	if atServer.odd { // a cancel finds nothing while another program's key hides the request
		turns++
	}
	for _, c := range w.clients {
		if c.dead {
			turns++
		}
	}
	bound := time.Duration(turns)*w.longest + lockstate.MaxPoll + 2*time.Second
	for _, c := range w.clients {
		for _, x := range c.calls {
			if x.Opts.MinHold > 0 {
				bound += x.Opts.MinHold + 100*time.Millisecond
			}
		}
	}
	if len(w.unqueued) > 0 {
		bound += 15 * time.Second // what each that waited has to find out at its next full re-check
	}
	if w.has[minHolds] {
		bound += 2 * maxMinHold // of a caller that has left, and of a late copy of its release
	}
	if v := w.look(); w.has[uncounting] {
		for _, id := range v.queue {
			if c := w.clientOf(id); !v.dead[id] && (c == nil || c.dead) {
				bound += protocol.ProvisionalTTL + time.Second // each may be followed by a live waiter that needs a regular re-check
			}
		}
	}
	if w.rng.IntN(2) == 0 {
		w.readersStay(bound + 2*lockstate.MaxPoll)
		bound += w.now.Sub(began)
	}
	for range 5000 {
		w.deliverAll()
		anybody := false
		for _, c := range w.clients {
			if c.dead {
				continue
			}
			if c.refused && c.pauses > 0 { // the longest pause may begin at this moment
				bound = max(bound, w.now.Sub(began)+simLongestPause+simLongestPause/2+w.longest+lockstate.MaxPoll)
			}
			c.each(lockstate.Inside, c.leave)
			c.each(lockstate.Waiting, func(*lockstate.Caller) {})
			anybody = anybody || len(c.calls) > 0
		}
		w.check()
		if w.failure != "" {
			return
		}
		if !anybody && len(w.wire) == 0 {
			break
		}
		if len(w.wire) == 0 {
			w.advance(10 * w.pace())
		}
		if w.now.Sub(began) > bound {
			w.fail("somebody still waits after %v of calm", w.now.Sub(began))
			return
		}
	}
	w.checksReturned()
	w.nothingLeft()
}

// deliverAll moves all packets, and checks the world after each, until one fails.
func (w *world) deliverAll() {
	for len(w.wire) > 0 && w.failure == "" {
		w.deliver(99)
		w.check()
	}
}

// readersStay has all writers leave or give up, but no reader. Then no reader must be kept out for longer
// than bound: a process whose readers have the lock finds out that nobody else waits for it.
func (w *world) readersStay(bound time.Duration) {
	began := w.now
	for range 5000 {
		w.deliverAll()
		anybody := false
		for _, c := range w.clients {
			if c.dead {
				continue
			}
			for _, x := range slices.Clone(c.calls) {
				switch {
				case x.Mode == protocol.Exclusive && x.Phase == lockstate.Inside:
					c.leave(x)
				case x.Mode == protocol.Exclusive && x.Phase == lockstate.Waiting:
					c.step("abandon", func(now time.Time, fx *lockstate.Effects) { c.lock.Abandon(x, now, fx) })
				case x.Phase == lockstate.Waiting:
					anybody = true
				}
			}
		}
		w.check()
		if w.failure != "" || !anybody && len(w.wire) == 0 {
			return
		}
		if len(w.wire) == 0 {
			w.advance(10 * w.pace())
		}
		if anybody && w.now.Sub(began) > bound {
			w.fail("a reader still waits after %v in which only readers had the lock", w.now.Sub(began))
			return
		}
	}
}

func (w *world) nothingLeft() {
	for range 100 + 2*int(w.longest.Seconds()) { // for cancels that continue, idle grants and leases of the dead
		w.advance(time.Second)
		for len(w.wire) > 0 {
			w.deliver(99)
		}
		if w.left() == "" {
			return
		}
	}
	w.fail("%s", w.left())
}

// left says what the schedule has left behind, or "" if nothing.
func (w *world) left() string {
	for _, c := range w.clients {
		if !c.dead && (!c.lock.Idle() || len(c.cancel.Pending) > 0 || len(c.left) > 0) {
			return fmt.Sprintf("%s is not idle: %s, %d in Unlock, cancels of %v", c.name, c.status(), len(c.left), c.cancels())
		}
	}
	for _, k := range w.mini.Keys() {
		switch left, _ := w.server.do("PTTL", k).(int); {
		case left == -1:
			return fmt.Sprintf("%s lives forever", k)
		case left >= 0 && k != w.keys.Meta():
			return fmt.Sprintf("key %s is left", k)
		}
	}
	return ""
}
